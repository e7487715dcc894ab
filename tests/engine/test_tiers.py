"""What an engine finds below the pool when it starts."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pando.engine import tiers
from pando.engine.request import Request
from pando.errors import InvalidOption
from pando.kv.segment import Key
from pando.store.disk import DiskTier
from pando.store.facts import StoreFacts
from pando.store.index import Entry
from pando.store.ledger import Ledger, Page
from pando.store.policy import LRU
from tests.store.pages import SHAPE, card, chain, keys, layers
from tests.tiny import greedy, run, tiny_engine, tiny_model

PAGE = 10  # bytes


class Told:
    """A disk of which only the index is known, and what was dropped from it."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.told = sorted(entries, key=lambda entry: entry.used)
        self.dropped: list[Key] = []

    def entries(self) -> list[Entry]:
        return self.told

    def drop(self, keys: Sequence[Key]) -> None:
        self.dropped += keys


def entry(key: str, parent: str, used: float, pinned: int = 0) -> Entry:
    return Entry("shape", key.encode(), parent.encode(), b"tenant", 4, PAGE, used, used, pinned)


def enter(entries: Sequence[Entry], pages: int = 100, ttl: float | None = None, now: float = 100) -> tuple[Ledger, list[Key]]:
    ledger, disk = Ledger({"host": PAGE, "disk": pages * PAGE}, LRU(), ttl), Told(entries)
    tiers._enter(ledger, disk, PAGE, now)  # type: ignore[arg-type]
    return ledger, disk.dropped


def leaves_first(ledger: Ledger) -> list[str]:
    """The pages in the order in which the ledger lets them go for new ones."""
    gone = []
    while (held := list(ledger.held("disk"))) and any(page.used < 1000 for page in held):
        gone += [key.decode() for key, _ in ledger.keep("disk", [Page(f"new {len(gone)}".encode(), PAGE)], 1000).gone]
    return gone


def test_a_chain_leaves_from_its_end_although_its_beginning_was_written_first() -> None:
    ledger, dropped = enter([entry("a", "root", 1), entry("b", "a", 5), entry("c", "b", 9), entry("x", "root", 7)], pages=4)
    assert not dropped
    assert leaves_first(ledger) == ["x", "c", "b", "a"], "whoever wrote c used a, later than anyone used x"


def test_what_two_conversations_share_is_as_young_as_the_younger() -> None:
    told = [entry("s", "root", 1), entry("a", "s", 2), entry("b", "s", 9), entry("x", "root", 5)]
    assert leaves_first(enter(told, pages=4)[0]) == ["a", "x", "b", "s"]


def test_what_was_used_too_long_ago_goes_from_disk_when_the_engine_starts() -> None:
    told = [entry("a", "root", 1), entry("b", "a", 60), entry("c", "b", 2), entry("x", "root", 3), entry("p", "root", 4, pinned=1)]
    ledger, dropped = enter(told, ttl=50, now=100)
    assert sorted(dropped) == [b"c", b"x"], "b was used lately, so a was; p is pinned"
    assert ledger.find([b"a", b"b"]) == ["disk", "disk"] and ledger.find([b"p"]) == ["disk"]
    assert ledger.used["disk"] == 3 * PAGE


def test_a_pinned_page_is_pinned_once_however_many_continue_it() -> None:
    ledger, _ = enter([entry("p", "root", 1, pinned=1), entry("a", "p", 2), entry("b", "p", 3)], pages=3)
    assert leaves_first_but_pinned(ledger) == [b"a", b"b"]
    ledger.unpin([b"p"])
    assert ledger.keep("disk", [Page(b"last", PAGE)], 2000).gone[0].key == b"p"


def leaves_first_but_pinned(ledger: Ledger) -> list[Key]:
    return [key for name in (b"m", b"n") for key, _ in ledger.keep("disk", [Page(name, PAGE)], 1000).gone]


def test_more_than_fits_is_dropped_from_disk_but_for_what_is_pinned() -> None:
    told = [entry("p", "root", 1, pinned=1), entry("q", "p", 2, pinned=1), entry("a", "root", 3), entry("b", "root", 4)]
    assert enter(told, pages=3)[1] == [b"a"]
    assert sorted(enter(told, pages=1)[1]) == [b"a", b"b"]


def test_an_index_that_leads_in_circles_is_entered_all_the_same() -> None:
    ledger, dropped = enter([entry("a", "c", 1), entry("b", "a", 2), entry("c", "b", 3), entry("d", "d", 4)])
    assert not dropped and ledger.used["disk"] == 4 * PAGE


def test_thirty_thousand_pages_behind_one_system_prompt_enter_in_a_moment() -> None:
    """Three thousand conversations of nine pages that share a thousand: walking each from its first page on would take minutes."""
    told = [entry(f"s{i}", f"s{i - 1}", 0) for i in range(1000)]
    for talk in range(3000):
        told += [entry(f"{talk}.{i}", f"{talk}.{i - 1}" if i else "s999", 1 + talk) for i in range(9)]
    start = time.thread_time()
    ledger, dropped = enter(told, pages=40_000)
    assert time.thread_time() - start < 3
    assert not dropped and ledger.used["disk"] == len(told) * PAGE


def test_files_that_outlived_their_time_are_gone_after_a_restart(tmp_path: Path) -> None:
    times = iter([10.0, 20.0, 1000.0])
    disk = DiskTier(tmp_path, SHAPE, clock=lambda: next(times))
    [old, older], new = chain(2), card(500)
    for page in (old, older, new):
        disk.save(page, layers(page))
    ledger = Ledger({"disk": 10**9}, LRU(), ttl=100)
    tiers._enter(ledger, disk, PAGE, now=1050)
    disk.close()
    again = DiskTier(tmp_path, SHAPE)
    assert (again.look(keys([old])), again.look([new.key])) == (0, 1)
    again.close()


@pytest.mark.parametrize(("later", "found"), [(10, {"disk": 40}), (100, {})])
def test_an_engine_that_starts_again_finds_what_was_used_lately(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, later: float, found: dict[str, int]
) -> None:
    model, request = tiny_model(), Request("r", list(range(41)), greedy(1))
    first = tiny_engine(model, disk_gib=0.01, disk_dir=str(tmp_path), ttl=60)
    run(first, [request])
    first.close()
    now = time.time() + later
    monkeypatch.setattr(time, "time", lambda: now)
    second = tiny_engine(model, disk_gib=0.01, disk_dir=str(tmp_path), ttl=60)
    [event] = run(second, [request])["r", 0]
    second.close()
    assert event.reuse.tiers == found


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_an_engine_made_in_inference_mode_keeps_and_loads(codec: str) -> None:
    with torch.inference_mode():
        engine = tiny_engine(tiny_model(), kv_cache_tokens=160, page_size=4, host_gib=0.01, store_codec=codec)
        asked = Request("r", list(range(40)), greedy(3))
        first = run(engine, [asked])
        while engine.tend() is not None:
            time.sleep(0.002)
        engine.clear_cache()
        again = run(engine, [asked])
    facts = engine.stats().store
    assert facts is not None and facts.loaded["host"] > 30
    assert codec == "int8" or [event.token for event in again["r", 0]] == [event.token for event in first["r", 0]]


# ---- how much of a disk is taken where nobody says


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that the system says are free, to be changed."""
    told = [10**12]
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=told[0]))
    return told


def kept_in(folder: Path, request: Request | None = None) -> tuple[int, dict[str, int], StoreFacts]:
    """The bound of a server's directory that nothing was said of, and what is found in it."""
    engine = tiny_engine(tiny_model(), disk_gib=None, disk_dir=str(folder), page_size=4)
    events = run(engine, [request])["r", 0] if request is not None else []
    while engine.tend() is not None:
        time.sleep(0.002)
    told = engine.stats().store
    assert told is not None
    engine.close()
    return told.room["disk"].size, dict(events[0].reuse.tiers) if events else {}, told


def test_the_bound_does_not_shrink_as_the_directory_fills(tmp_path: Path, free: list[int]) -> None:
    free[0] = 10**6
    before, _, told = kept_in(tmp_path, Request("r", list(range(41)), greedy(1)))
    assert before == 10**5 and told.room["disk"].used > 10**4
    free[0] -= told.room["disk"].used
    assert kept_in(tmp_path)[0] == before
    free[0] = 10**12
    assert kept_in(tmp_path)[0] == 32 * 2**30


def test_a_nearly_full_disk_is_told_of_and_what_is_kept_there_is_read(
    tmp_path: Path, free: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    short = Request("r", list(range(9)), greedy(1))
    kept_in(tmp_path, short)
    files = pages_in(tmp_path)
    free[0] = 0
    _, found, told = kept_in(tmp_path, Request("r", list(range(61)), greedy(1)))
    assert found == {"disk": 8} and told.unsaved["full"] > 10
    assert pages_in(tmp_path) == files
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "0 bytes are free" in warning and "what is there is read" in warning and "--disk-gib" in warning


def test_a_directory_that_cannot_be_made_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a directory")
    engine = tiny_engine(tiny_model(), disk_gib=None, disk_dir=str(tmp_path / "file" / "store"))
    assert engine.store is None
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "cannot be used (Not a directory)" in warning and "--disk-dir" in warning


def test_a_directory_of_a_user_that_there_is_not_is_refused() -> None:
    with pytest.raises(InvalidOption, match="~nobody-at-all/store begins with a home folder that there is not"):
        tiny_engine(tiny_model(), disk_gib=None, disk_dir="~nobody-at-all/store")


def test_what_a_disk_holds_is_told_in_the_bytes_of_its_files(tmp_path: Path) -> None:
    _, _, told = kept_in(tmp_path, Request("r", list(range(38)), greedy(1)))
    assert told.room["disk"].used == sum(path.stat().st_size for path in pages_in(tmp_path))


# ---- a bound


def test_pages_that_there_is_no_room_for_on_disk_are_counted(tmp_path: Path) -> None:
    engine = tiny_engine(tiny_model(), disk_gib=3000 / 2**30, disk_dir=str(tmp_path), page_size=4)
    run(engine, [Request("r", list(range(41)), greedy(1))])
    while engine.tend() is not None:
        time.sleep(0.002)
    told = engine.stats().store
    engine.close()
    assert told is not None and len(pages_in(tmp_path)) == told.saved["disk"] > 0
    assert told.unsaved == {"full": told.saved["host"] - told.saved["disk"]}


def test_two_processes_on_one_directory_share_its_bound(tmp_path: Path) -> None:
    bound = 40_000
    one, other = [tiny_engine(tiny_model(), disk_gib=bound / 2**30, disk_dir=str(tmp_path), page_size=4) for _ in range(2)]
    sizes = []
    for place in range(16):
        for whose, engine in enumerate((one, other)):
            run(engine, [Request("r", [2 * place + whose, *range(100, 140)], greedy(1))])
            while engine.tend() is not None:
                time.sleep(0.002)
            assert engine.store is not None
            engine.store._writer.settle()
            engine.tend()
            sizes.append(sum(path.stat().st_size for path in pages_in(tmp_path)))
    assert max(sizes) < 1.2 * bound and min(sizes[4:]) > 0.5 * bound
    assert one.store is not None
    ledger = one.store.ledger
    assert ledger.used["disk"] < 0.8 * ledger.capacities["disk"], "it knows what the other one has removed"
    for engine in (one, other):
        engine.clear_cache()
        [event] = run(engine, [Request("r", [31, *range(100, 140)], greedy(1))])["r", 0]
        assert sum(event.reuse.tiers.values()) == 40, "what was kept last, by either"
        engine.close()


def pages_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if len(path.name) == 64)


def test_the_remote_is_named_at_the_start_and_whether_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    caplog.set_level("INFO")
    engine = tiny_engine(tiny_model(), remote="~/shared")
    assert (tmp_path / "shared" / "v1").is_dir() and f"{tmp_path}/shared" in caplog.text and "cannot be reached" not in caplog.text
    engine.close()
    for refuses in ("/dev/null/shared", "/" + 300 * "x"):
        caplog.clear()
        tiny_engine(tiny_model(), remote=refuses).close()
        assert "the remote cannot be reached now" in caplog.text and "Traceback" not in caplog.text
    pytest.importorskip("redis")
    engine = tiny_engine(tiny_model(), remote=f"unix://{tmp_path}/nobody")
    assert f"{tmp_path}/nobody" in caplog.text and "the remote cannot be reached now" in caplog.text
    engine.close()
