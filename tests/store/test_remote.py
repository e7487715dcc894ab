import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pando.errors import InvalidOption
from pando.store import redis_server, remote
from pando.store.disk import DiskTier
from pando.store.fileformat import tag
from pando.store.remote import RedisTier, SharedTier, remote_tier
from pando.store.tier import Lost

from .faults import KINDS, FaultyTier, went_wrong
from .pages import LAYER, ROOT, SHAPE, TENANT, Clock, card, chain, data, keys, layers, pin, read
from .test_faults import START, play


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A server that has to share its machine may take longer; tests of that say how long."""
    monkeypatch.setattr(redis_server, "LOOK_S", 20.0)
    monkeypatch.setattr(redis_server, "MOVE_S", 20.0)


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
        client.connect(str(path))
        return True
    return False


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A real one, on a socket of its own; its address."""
    beside = Path(sys.executable).parent  # where pip puts it; a virtual environment need not be on the PATH
    program = shutil.which("redis-server", path=os.pathsep.join([str(beside), os.environ.get("PATH", os.defpath)]))
    if program is None:
        pytest.skip("REDIS-SERVER IS NOT INSTALLED: the remote tier is not tested against a real server; apt-get install redis-server")
    pytest.importorskip("redis", reason="THE PACKAGE redis IS NOT INSTALLED: the remote tier is not tested; pip install redis")
    folder = tmp_path_factory.mktemp("redis")
    options = ["--port", "0", "--unixsocket", "s", "--save", "", "--maxmemory", "64mb", "--dir", str(folder)]
    process = subprocess.Popen([program, *options], cwd=folder, stdout=subprocess.DEVNULL)
    while not answers(folder / "s"):
        assert process.poll() is None
        time.sleep(0.01)
    yield f"unix://{folder}/s"
    process.terminate()
    process.wait()


@pytest.fixture
def make(server):
    made: list[RedisTier] = []

    def one(shape=SHAPE, ttl=None, url=server) -> RedisTier:
        tier = remote_tier(url, shape, ttl)
        assert isinstance(tier, RedisTier)
        made.append(tier)
        return tier

    one()._patient.flushall()
    yield one
    for tier in made:
        tier.close()


def value(key: bytes) -> str:
    return f"pando:1:{tag(SHAPE)}:{key.hex()}"


def save(tier, *cards) -> None:
    for one in cards:
        tier.save(one, layers(one))


# --- keeping -----------------------------------------------------------------------------------------------------------------------


def test_what_one_machine_saves_another_reads(make):
    here, there, cards = make(), make(), chain(3)
    save(here, *cards)
    assert there.look(keys(cards)) == 3
    assert there.look([*keys(cards[:2]), card(99).key, cards[2].key]) == 2
    assert [read(there.open(one.key)) for one in cards] == [data(one) for one in cards]
    assert there.open(cards[1].key).card == cards[1]


def test_short_ends_are_found_by_the_page_before_them(make):
    tier, page = make(), card()
    end, other = card(50, 3, page.key), card(60, 5, page.key)
    save(tier, page, end, other)
    assert {one.key for one in tier.ends(page.key)} == {end.key, other.key}
    assert tier.ends(ROOT) == []
    tier.drop([end.key])
    assert tier.ends(page.key) == [other]
    assert tier._patient.zcard(tier._behind(page.key)) == 1  # what is gone is taken out


def test_a_short_end_whose_set_went_before_it_is_found_when_it_is_saved_again(make):
    tier, page = make(ttl=60), card()
    end = card(50, 3, page.key)
    save(tier, page, end)
    tier._patient.delete(tier._behind(page.key))  # it expired, or the server needed the room
    assert tier.ends(page.key) == []
    save(make(ttl=60), end)
    assert tier.ends(page.key) == [end] and 0 < tier._patient.ttl(tier._behind(page.key)) <= 60


def test_pages_with_long_headers_are_read(make):
    shape = replace(SHAPE, page_size=4096)
    tier, one = make(shape), card(0, 4096)
    given = [memoryview(bytes([layer]) * 640) for layer in range(3)]
    tier.save(one, given)
    reader = make(shape).open(one.key)
    assert reader.card == one and read(reader, 640, shape) == [bytes(layer) for layer in given]


def test_a_page_is_sent_once(make, monkeypatch):
    tier, one = make(), card()
    save(tier, one)
    monkeypatch.setattr(remote, "pack", lambda header: pytest.fail("it was sent again"))
    save(tier, one)


def test_pages_expire_after_the_time_they_are_given(make):
    tier, end = make(ttl=7), card(50, 3)
    save(tier, end)
    names = tier._patient.keys("pando:*")
    assert len(names) == 2 and all(0 < tier._patient.ttl(name) <= 7 for name in names)
    forever = make()
    save(forever, card())
    assert forever._patient.ttl(value(card().key)) == -1


def test_pages_that_are_used_expire_later(make):
    tier, page = make(ttl=7), card()
    end = card(50, 3, page.key)
    save(tier, page, end)
    sets = tier._patient.keys("pando:*:ends:*")

    def left(*names) -> bool:
        """Have they all of their time again?"""
        is_whole = all(tier._patient.ttl(name) > 5 for name in names)
        for name in tier._patient.keys("pando:*"):
            tier._patient.expire(name, 3)
        return is_whole

    left()
    assert not left(value(page.key))
    tier.touch([page.key, end.key])
    assert left(value(page.key), value(end.key)) and tier.ends(page.key) == [end] and left(*sets)
    save(tier, page)
    assert left(value(page.key)), "someone else keeps it, too"


@pytest.mark.parametrize("ttl", [None, 60])
def test_a_server_that_lets_go_of_what_was_used_longest_ago_hears_of_uses(make, ttl):
    tier, (one, other) = make(ttl=ttl), chain(2)
    save(tier, one, other)

    def idle(of) -> int:
        return tier._patient.object("idletime", value(of.key))

    while not (idle(one) and idle(other)):  # seconds, by the server's own clock
        time.sleep(0.05)
    tier.touch([one.key])
    assert idle(one) < idle(other)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_in_a_shared_directory_goes_what_nobody_used_for_too_long(tmp_path, codec, monkeypatch):
    monkeypatch.setattr(remote, "TIDIED", 8)
    clock, (old, used, kept) = Clock(0.0), chain(3)
    tier = SharedTier(tmp_path, SHAPE, 60, clock)
    save(tier, old, used, kept)
    pin(tier, [kept.key])
    clock.now = 50
    tier.touch([used.key])
    clock.now = 70
    other = SharedTier(tmp_path, replace(SHAPE, codec=codec), 60, clock)
    other.close()
    assert {entry.key for entry in tier.entries()} == {used.key, kept.key}
    clock.now = 120
    save(tier, *chain(remote.TIDIED - 3, 9000))
    assert used.key not in {entry.key for entry in tier.entries()} and tier.look([kept.key]) == 1 and tier.look([used.key]) == 0
    tier.close()
    forever = SharedTier(tmp_path, SHAPE, None, Clock(0.0))
    assert forever.look([kept.key]) == 1
    forever.close()


def test_a_tenant_is_purged_and_the_others_stay(make):
    tier, mine, theirs = make(), chain(3), chain(2, tenant=bytes(32))
    save(tier, *mine, *theirs)
    save(make(replace(SHAPE, codec="int8")), theirs[0])
    assert tier.remove(lambda header: header is not None and header.card.tenant == bytes(32))[0] == 3
    assert tier.look(keys(mine)) == 3 and tier.look(keys(theirs)) == 0
    assert tier.remove(lambda header: header is not None and header.card.tenant == TENANT)[0] == 3
    assert tier._patient.dbsize() == 0


# --- faults ------------------------------------------------------------------------------------------------------------------------


def test_a_purge_leaves_no_sets_of_ends_that_are_gone(make):
    tier, page, other = make(), card(), hashlib.sha256(b"other").digest()
    save(tier, page, card(50, 3, page.key), card(60, 5, page.key), card(70, 3, page.key, other))
    assert tier.remove(lambda header: header is not None and header.card.tenant == TENANT)[0] == 3
    assert tier._patient.zcard(tier._behind(page.key)) == 1 and len(tier.ends(page.key)) == 1, "another tenant's stays"
    assert tier.remove(lambda _: True)[0] == 1
    assert not tier._patient.keys("*")


def test_damage_is_found_and_makes_room_for_a_better_copy(make):
    tier, one = make(), card()
    save(tier, one)
    sound = tier._patient.get(value(one.key))
    wrong = {
        "corrupt": [sound[:START] + b"\0" + sound[START + 1 :], b"x" * len(sound), sound[:40] + b"\xff" + sound[41:], sound + b"more"],
        "short": [sound[:4], sound[:100], sound[:-1]],
        "version": [sound[:8] + b"\2" + sound[9:]],
    }
    for reason, values in wrong.items():
        for damaged in values:
            tier._patient.set(value(one.key), damaged)
            with pytest.raises(Lost) as lost:
                read(tier.open(one.key))
            assert lost.value.reason == reason
            assert tier.look([one.key]) == 0
    save(tier, one)
    assert read(tier.open(one.key)) == data(one)


def test_another_models_data_is_foreign(make):
    tier, one = make(), card()
    other = make(replace(SHAPE, model=bytes(32)))
    save(other, one)
    assert tier.look([one.key]) == 0
    tier._patient.rename(other._value(one.key), value(one.key))
    with pytest.raises(Lost, match="foreign"):
        tier.open(one.key)


def test_what_goes_away_while_it_is_read_is_absent(make):
    tier, one = make(), card()
    save(tier, one)
    reader, buffer = tier.open(one.key), memoryview(bytearray(LAYER))
    reader.layer(0, buffer)
    tier.drop([one.key])
    with pytest.raises(Lost, match="absent"):
        reader.layer(1, buffer)


def test_a_full_server_is_full_and_still_answers(make, caplog):
    tier, one = make(), card()
    save(tier, one)
    tier._patient.config_set("maxmemory", "1kb")  # less than an empty one takes
    try:
        for other in chain(redis_server.FAILURES + 3)[1:]:
            with pytest.raises(Lost, match="full"):
                save(tier, other)
        assert read(tier.open(one.key)) == data(one)
    finally:
        tier._patient.config_set("maxmemory", "64mb")
    assert len(caplog.records) == 1


def test_a_value_of_another_kind_is_lost_and_the_others_are_not(make):
    tier, (one, other) = make(), chain(2)
    save(tier, other)
    tier._patient.lpush(value(one.key), "a list")
    for _ in range(redis_server.FAILURES + 1):
        with pytest.raises(Lost, match="unreadable"):
            tier.open(one.key)
    assert read(tier.open(other.key)) == data(other)


def test_random_schedules_on_a_faulty_remote_are_never_wrong(make):
    tier = make()
    tiers = [FaultyTier(tier, seed, rate=0.1) for seed in range(40)]
    assert sum(play(each, seed, 20) for seed, each in enumerate(tiers)) > 40
    assert {kind for _, kind in went_wrong(tiers)} == {*KINDS}


def is_silent(tier) -> bool:
    try:
        tier.look([card().key])
    except Lost:
        return True
    return False


def test_a_server_that_is_gone_is_asked_three_times_and_then_left_alone(tmp_path, caplog):
    pytest.importorskip("redis")
    clock = Clock(0.0)
    tier, one = RedisTier(f"unix://{tmp_path}/nobody", SHAPE, clock=clock), card()
    for ask in (lambda: tier.look([one.key]), lambda: tier.ends(ROOT), *5 * [lambda: tier.open(one.key)]):
        with pytest.raises(Lost, match="unreadable"):
            ask()
    with pytest.raises(Lost, match="left alone for a while"):
        save(tier, one)
    tier.drop([one.key])
    assert len(caplog.records) == 1
    clock.now += redis_server.PAUSE_S + 1
    with pytest.raises(Lost, match="does not answer"):
        tier.open(one.key)
    with pytest.raises(Lost, match="left alone for a while"):
        tier.open(one.key)
    assert len(caplog.records) == 1
    tier.close()


def test_a_server_that_comes_back_is_used_again(make, server, caplog):
    clock, one = Clock(0.0), card()
    save(make(), one)
    tier = RedisTier(server, SHAPE, clock=clock)
    for _ in range(redis_server.FAILURES):
        tier._breaker.failed()
    assert is_silent(tier)
    clock.now += redis_server.PAUSE_S + 1
    assert tier.look([one.key]) == 1 and read(tier.open(one.key)) == data(one)
    tier.close()


def test_a_server_that_never_answers_costs_its_timeout_and_no_more(monkeypatch):
    redis = pytest.importorskip("redis")
    monkeypatch.setattr(redis_server, "LOOK_S", 0.2)
    monkeypatch.setattr(redis_server, "MOVE_S", 2.0)
    waits, read = list[float](), redis.connection.Connection.read_response

    def counted(connection, *given, **more):
        waits.append(connection.socket_timeout)
        return read(connection, *given, **more)

    monkeypatch.setattr(redis.connection.Connection, "read_response", counted)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tier = RedisTier(f"redis://:secret@127.0.0.1:{silent.getsockname()[1]}", SHAPE)
        assert is_silent(tier)
        assert waits and sum(waits) < 5 * redis_server.LOOK_S
        waits.clear()
        for _ in range(20):
            assert is_silent(tier)
        assert waits and sum(waits) < 8 * redis_server.LOOK_S
        with pytest.raises(Lost) as lost:
            tier.open(card().key)
        assert "secret" not in str(lost.value)
        tier.close()


def test_a_server_that_closes_the_connection_is_unreadable():
    pytest.importorskip("redis")
    with socket.create_server(("127.0.0.1", 0)) as rude:

        def hang_up() -> None:
            for _ in range(redis_server.FAILURES):
                rude.accept()[0].close()

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        tier = RedisTier(f"redis://127.0.0.1:{rude.getsockname()[1]}", SHAPE)
        for _ in range(redis_server.FAILURES):
            with pytest.raises(Lost, match="unreadable"):
                tier.open(card().key)
        tier.close()


# --- addresses ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["file://{}", "{}"])
def test_a_directory_may_be_the_remote(tmp_path, form):
    place = tmp_path / "with space"
    url = form.format(str(place).replace(" ", "%20") if "file" in form else place)
    here, there, one = remote_tier(url, SHAPE), remote_tier(url, SHAPE), card()
    assert isinstance(here, DiskTier) and isinstance(there, DiskTier) and here.name == "remote"
    save(here, one)
    assert there.look([one.key]) == 1 and read(there.open(one.key)) == data(one)
    assert (place / "v1").is_dir()
    assert not list((place / "v1").glob("index.sqlite-*"))  # no journal in shared memory, which machines have not
    here.close()
    there.close()


@pytest.mark.parametrize("url", ["http://example.org", "", "redis://host:port", "file://host/path", "s3://bucket"])
def test_what_is_no_remote_is_refused(url):
    pytest.importorskip("redis")
    with pytest.raises(InvalidOption, match="redis://HOST:6379"):
        remote_tier(url, SHAPE)


def test_a_missing_package_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(InvalidOption, match=r"pip install 'pando-llm\[store\]'"):
        remote_tier("redis://localhost", SHAPE)
