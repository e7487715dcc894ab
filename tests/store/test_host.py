import threading

import pytest
import torch

from pando.store.host import HostTier
from pando.store.tier import Lost

from .pages import LAYER, ROOT, SHAPE, card, chain, data, keys, layers, read


@pytest.fixture
def host() -> HostTier:
    return HostTier(SHAPE, 4, LAYER, pinned=False)


def test_what_was_saved_is_read(host):
    cards = chain(3)
    for one in cards:
        host.save(one, layers(one))
    assert [read(host.open(one.key)) for one in cards] == [data(one) for one in cards]


def test_looking_counts_from_the_first_on(host):
    first, second, third = chain(3)
    for one in (first, third):
        host.save(one, layers(one))
    assert host.look(keys([first, second, third])) == 1
    assert host.look([second.key]) == 0
    assert host.look([]) == 0


def test_a_short_end_is_found_by_the_page_before_it(host):
    page = card()
    end, other = card(100, 3, page.key), card(200, 5, page.key)
    for one in (page, end, other):
        host.save(one, layers(one))
    assert set(host.ends(page.key)) == {end, other}
    assert host.ends(ROOT) == []  # a full page is no end
    assert read(host.open(end.key)) == data(end)
    host.drop([end.key])
    assert host.ends(page.key) == [other]


def test_what_is_not_there_is_absent(host):
    with pytest.raises(Lost) as lost:
        host.open(card().key)
    assert lost.value.reason == "absent"


def test_a_full_tier_says_so_and_keeps_what_it_has(host):
    cards = chain(5)
    for one in cards[:4]:
        host.save(one, layers(one))
    with pytest.raises(Lost) as lost:
        host.save(cards[4], layers(cards[4]))
    assert lost.value.reason == "full"
    assert [read(host.open(one.key)) for one in cards[:4]] == [data(one) for one in cards[:4]]
    host.drop([cards[0].key])
    host.save(cards[4], layers(cards[4]))
    assert host.look([cards[4].key]) == 1


def test_a_page_is_kept_once(host):
    one = card()
    for _ in range(9):
        host.save(one, layers(one))
    assert (len(host), host.free) == (1, 3)


def test_a_page_that_is_read_is_not_overwritten(host):
    cards = chain(8)
    for one in cards[:4]:
        host.save(one, layers(one))
    reader, again = host.open(cards[0].key), host.open(cards[0].key)
    host.drop([cards[0].key])
    assert host.look([cards[0].key]) == 0
    with pytest.raises(Lost):
        host.save(cards[4], layers(cards[4]))
    assert read(again) == data(cards[0])
    with pytest.raises(Lost):
        host.save(cards[4], layers(cards[4]))
    assert read(reader) == data(cards[0])
    host.save(cards[4], layers(cards[4]))
    assert read(host.open(cards[4].key)) == data(cards[4])


def test_pages_that_are_read_together_stay_until_all_of_them_are_read(host):
    cards = chain(6)
    for one in cards[:4]:
        host.save(one, layers(one))
    with host.reading(keys([cards[1], cards[4], cards[2]])) as (first, absent, second):
        assert absent is None
        host.drop(keys(cards))
        assert host.look([cards[1].key]) == 0 and host.free == 2
        for one in cards[4:]:
            host.save(one, layers(one))
        for slot, one in ((first, cards[1]), (second, cards[2])):
            assert [bytes(row.numpy()) for row in slot] == data(one)
    assert host.free == 2
    assert [read(host.open(one.key)) for one in cards[4:]] == [data(one) for one in cards[4:]]


def test_a_page_dropped_while_read_may_come_back_elsewhere(host):
    one = card()
    host.save(one, layers(one))
    reader = host.open(one.key)
    host.drop([one.key])
    host.save(one, layers(one))
    reader.close()
    reader.close()  # a second time changes nothing
    assert read(host.open(one.key)) == data(one)
    assert (len(host), host.free) == (1, 3)


def test_a_page_is_found_only_when_it_is_committed(host):
    one = card()
    slot = host.begin(one)
    assert slot is not None and slot.shape == (SHAPE.layers, LAYER)
    assert host.look([one.key]) == 0
    assert host.begin(one) is None  # somebody is at it
    for row, layer in zip(slot, layers(one), strict=True):
        row.copy_(torch.frombuffer(bytearray(layer), dtype=torch.uint8))
    host.commit(one)
    assert host.begin(one) is None
    reader = host.open(one.key)
    assert [bytes(row.numpy()) for row in reader.payload] == data(one)
    assert read(reader) == data(one)


def test_a_page_that_was_begun_and_given_up_leaves_its_slot(host):
    one = card()
    for _ in range(9):
        assert host.begin(one) is not None
        host.abort(one)
    assert (len(host), host.free) == (0, 4)


def test_threads_never_see_each_others_bytes():
    host, cards = HostTier(SHAPE, 3, LAYER, pinned=False), chain(6)
    wrong: list[object] = []

    def work(turn: int) -> None:
        for step in range(300):
            one = cards[(turn * 7 + step) % len(cards)]
            try:
                host.save(one, layers(one))
                if read(host.open(one.key)) != data(one):
                    wrong.append(one)
            except Lost:
                host.drop(keys(cards[step % len(cards) :]))
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    host.drop(keys(cards))
    assert host.free == 3
