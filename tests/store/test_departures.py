"""Pages that leave the pool while they are computed."""

import threading
from collections.abc import Iterator, Sequence

import pytest

from pando.store.departures import Departures
from pando.store.host import HostTier
from pando.store.movers import Take
from pando.store.tier import Card, Lost
from pando.store.worker import Worker

from .pages import LAYER, SHAPE, card, chain, read


class Pool:
    """Pages of a pool whose bytes say which page and which layer they are of."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []
        self.calls = 0
        self.broken = False

    def mark(self) -> None: ...

    def take(self, takes: Sequence[Take], computed: None) -> None:
        self.calls += 1
        if self.broken:
            raise MemoryError
        for page, tokens, layers, into in takes:
            for layer in layers:
                self.taken.append((page, layer))
                into[layer, : LAYER * tokens // SHAPE.page_size] = 16 * page + layer


@pytest.fixture
def host() -> HostTier:
    return HostTier(SHAPE, 4, LAYER, pinned=False)


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def saver() -> Iterator[Worker]:
    worker = Worker("test")
    yield worker
    worker.stop()


@pytest.fixture
def departures(host: HostTier, pool: Pool, saver: Worker) -> Departures:
    return Departures(host, pool, saver, SHAPE.layers)  # type: ignore[arg-type]


def keep(departures: Departures, saver: Worker, pages: Sequence[tuple[Card, int]]) -> None:
    leaving = departures.end(pages)
    saver.settle()
    for key, departure in leaving.items():
        departure.keep(key)


def of_page(page: int, tokens: int = SHAPE.page_size) -> list[bytes]:
    return [bytes([16 * page + layer]) * (LAYER * tokens // SHAPE.page_size) for layer in range(SHAPE.layers)]


def test_layers_are_copied_as_they_are_computed_and_found_when_the_page_is_kept(
    departures: Departures, host: HostTier, pool: Pool, saver: Worker
) -> None:
    a, b = chain(2)
    departure = departures.begin([(a, 5), (b, 6)])
    seen = []
    for layers in range(SHAPE.layers + 1):
        departure.computed(layers)
        saver.settle()
        seen.append(len(pool.taken))
    assert seen == [0, 2, 4, 6] and not host.look([a.key]) and a.key in departures
    keep(departures, saver, [(a, 5), (b, 6)])
    assert [read(host.open(one.key)) for one in (a, b)] == [of_page(5), of_page(6)]
    assert len(pool.taken) == 6 and not len(departures)


def test_layers_that_are_computed_while_others_are_copied_are_copied_together(departures: Departures, pool: Pool, saver: Worker) -> None:
    """Whoever copies takes Python from the thread that computes, once for each call."""
    departure, busy = departures.begin([(chain(1)[0], 5)]), threading.Event()
    saver.post(busy.wait)
    for layers in range(SHAPE.layers):
        departure.computed(layers)
    busy.set()
    saver.settle()
    assert pool.calls == 1 and pool.taken == [(5, layer) for layer in range(SHAPE.layers - 1)]
    departure.computed(SHAPE.layers)
    saver.settle()
    assert pool.calls == 2 and pool.taken[-1] == (5, SHAPE.layers - 1)


def test_a_page_that_is_not_under_way_leaves_whole(departures: Departures, host: HostTier, pool: Pool, saver: Worker) -> None:
    short = card(3, tokens=5)
    keep(departures, saver, [(short, 2)])
    assert read(host.open(short.key)) == of_page(2, tokens=5)
    assert pool.taken == [(2, layer) for layer in range(SHAPE.layers)]


def test_what_is_dropped_was_never_there_and_its_slot_is_free(departures: Departures, host: HostTier, saver: Worker) -> None:
    a, b = chain(2)
    departures.begin([(a, 5), (b, 6)]).computed(2)
    departures.drop([a.key, b"unknown"])
    saver.settle()
    assert host.free == 3 and a.key not in departures
    keep(departures, saver, [(b, 6)])
    assert not host.look([a.key]) and read(host.open(b.key)) == of_page(6)


def test_what_was_dropped_may_depart_again_at_once(departures: Departures, host: HostTier, saver: Worker) -> None:
    one = card()
    departures.begin([(one, 5)]).computed(2)
    departures.drop([one.key])
    departures.begin([(one, 7)]).computed(1)
    keep(departures, saver, [(one, 7)])
    assert read(host.open(one.key)) == of_page(7) and host.free == 3


def test_only_the_page_that_departed_is_met(departures: Departures, host: HostTier, saver: Worker) -> None:
    one = card()
    departures.begin([(one, 5)]).computed(SHAPE.layers)
    keep(departures, saver, [(one, 6)])
    assert read(host.open(one.key)) == of_page(6) and host.free == 3 and not len(departures)


def test_of_two_pages_with_one_key_the_first_departs(departures: Departures, host: HostTier, pool: Pool, saver: Worker) -> None:
    one = card()
    departure = departures.begin([(one, 5), (one, 6)])
    departure.computed(SHAPE.layers)
    keep(departures, saver, [(one, 5)])
    assert dict(departure.pages) == {one.key: 5} and read(host.open(one.key)) == of_page(5)
    assert {page for page, _ in pool.taken} == {5}


def test_where_there_was_no_room_a_page_is_copied_when_it_is_kept(departures: Departures, host: HostTier, saver: Worker) -> None:
    cards = chain(5)
    for one in cards[:4]:
        host.begin(one)
    departures.begin([(cards[4], 5)]).computed(2)
    saver.settle()
    host.abort(cards[0])
    keep(departures, saver, [(cards[4], 5)])
    assert read(host.open(cards[4].key)) == of_page(5)


def test_where_there_is_no_room_in_the_end_the_page_is_lost(departures: Departures, host: HostTier, saver: Worker) -> None:
    cards = chain(5)
    for one in cards[:4]:
        host.begin(one)
    with pytest.raises(Lost, match="full"):
        keep(departures, saver, [(cards[4], 5)])


def test_copying_that_fails_is_tried_once_more_and_leaves_nothing(
    departures: Departures, host: HostTier, pool: Pool, saver: Worker
) -> None:
    one = card()
    departure, pool.broken = departures.begin([(one, 5)]), True
    departure.computed(1)
    saver.settle()
    pool.broken = False
    keep(departures, saver, [(one, 5)])
    assert read(host.open(one.key)) == of_page(5)
    host.drop([one.key])
    pool.broken = True
    with pytest.raises(MemoryError):
        keep(departures, saver, [(one, 5)])
    assert host.free == 4 and not host.look([one.key])
