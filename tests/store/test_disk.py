import errno
import hashlib
import os
import shutil
import sqlite3
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from pando.store import folder
from pando.store.disk import SPARE, DiskTier
from pando.store.fileformat import PROBE, read_header, tag
from pando.store.tier import Lost
from pando.store.touches import every

from .pages import ROOT, SHAPE, TENANT, Clock, card, chain, data, keys, layers, pin, purge, read

OTHER = hashlib.sha256(b"another tenant").digest()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tmp_path, clock):
    """Tiers on one directory, each as another process would have it."""
    made: list[DiskTier] = []

    def one(directory=tmp_path / "kv", shape=SHAPE, **options) -> DiskTier:
        made.append(DiskTier(directory, shape, clock, **options))
        return made[-1]

    yield one
    for tier in made:
        tier.close()


def path_of(directory: Path, key: bytes, shape=SHAPE) -> Path:
    return directory / "v1" / tag(shape) / key.hex()[:2] / key.hex()


def save(tier: DiskTier, *cards) -> None:
    for one in cards:
        tier.save(one, layers(one))


# --- keeping -----------------------------------------------------------------------------------------------------------------------


def test_what_was_saved_is_read(make):
    disk, cards = make(), chain(5)
    save(disk, *cards)
    assert disk.look(keys(cards)) == 5
    assert [read(disk.open(one.key)) for one in cards] == [data(one) for one in cards]
    assert disk.open(cards[2].key).card == cards[2]


def test_what_was_saved_outlives_the_process(make):
    cards, end = chain(3), card(50, 3)
    before = make()
    save(before, *cards, end)
    before.close()
    disk = make()
    assert disk.look(keys(cards)) == 3
    assert disk.ends(ROOT) == [end]
    assert read(disk.open(end.key)) == data(end)


def test_files_and_folders_are_the_owners_alone(make, tmp_path):
    old = os.umask(0)
    try:
        save(make(), card())
    finally:
        os.umask(old)
    found = [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]
    assert len(found) > 5
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_page_is_written_once(make, tmp_path):
    disk, one = make(), card()
    save(disk, one)
    file = path_of(tmp_path / "kv", one.key)
    before = file.stat().st_ino
    save(disk, one)
    assert file.stat().st_ino == before
    assert len(disk.entries()) == 1


def test_a_dropped_page_is_gone_and_can_still_be_read_by_who_has_it_open(make, tmp_path):
    disk, (one, other) = make(), chain(2)
    save(disk, one, other)
    reader = disk.open(one.key)
    disk.drop([one.key, one.key, card(99).key])
    assert disk.look([one.key]) == 0 and not path_of(tmp_path / "kv", one.key).exists()
    assert read(reader) == data(one)
    with pytest.raises(Lost, match="absent"):
        disk.open(one.key)
    assert read(disk.open(other.key)) == data(other)


def test_sizes_and_ages_are_told(make, clock, tmp_path):
    disk, cards = make(), chain(3)
    for one in cards:
        save(disk, one)
        clock.now += 10
    disk.touch([cards[0].key])
    pin(disk, [cards[1].key])
    entries = disk.entries()
    assert [entry.key for entry in entries] == keys([cards[1], cards[2], cards[0]])  # least recently used first
    assert [(entry.born, entry.used, entry.pinned) for entry in entries] == [(1010, 1010, 1), (1020, 1020, 0), (1000, 1030, 0)]
    assert [entry.size for entry in entries] == [path_of(tmp_path / "kv", entry.key).stat().st_size for entry in entries]
    assert disk.size == sum(entry.size for entry in entries) and len(entries) == 3
    assert entries[0].parent == cards[0].key and entries[0].tokens == SHAPE.page_size
    pin(disk, [cards[1].key], False)
    assert not any(entry.pinned for entry in disk.entries())


def test_a_tenant_is_purged_and_the_others_stay(make, tmp_path):
    mine, theirs = chain(3), chain(2, tenant=OTHER)
    disk, compressed = make(), make(shape=replace(SHAPE, codec="int8"))
    save(disk, *mine, *theirs)
    save(compressed, theirs[0])
    assert purge(disk, OTHER) == 3
    assert make().look(keys(mine)) == 3 and make().look(keys(theirs)) == 0
    files = {path.name for path in (tmp_path / "kv").rglob("*") if len(path.name) == 64}
    assert files == {one.key.hex() for one in mine}


def test_what_is_noted_is_found_by_others_and_later_and_expires(make, clock):
    one, other = make(), make()
    places = keys(chain(1200))
    one.note(places[3], TENANT, b"first", 0.0)
    one.note(places[3], TENANT, b"second", 0.0)
    clock.now += 10
    one.note(places[1100], TENANT, b"third", 0.0)
    assert other.notes(places, 0.0) == make().notes(places, 0.0) == {places[3]: b"second", places[1100]: b"third"}
    assert make(shape=replace(SHAPE, codec="int8")).notes(places, 0.0) == {}, "it is of another shape"
    assert other.notes(places, clock.now - 5) == {places[1100]: b"third"}
    other.note(places[4], TENANT, b"fourth", clock.now - 5)
    assert set(one.notes(places, 0.0)) == {places[1100], places[4]}, "what expired is removed when something is noted"


def test_only_the_latest_notes_stay(make, monkeypatch):
    monkeypatch.setattr("pando.store.index.NOTED", 3)
    disk, places = make(), keys(chain(5))
    for key in places:
        disk.note(key, TENANT, key, 0.0)
    assert set(disk.notes(places, 0.0)) == set(places[2:])


def test_a_tenants_notes_are_purged_and_the_others_stay(make):
    disk, (mine, theirs) = make(), keys(chain(2))
    disk.note(mine, TENANT, b"mine", 0.0)
    disk.note(theirs, OTHER, b"theirs", 0.0)
    purge(disk, OTHER)
    assert disk.notes([mine, theirs], 0.0) == {mine: b"mine"}


def test_an_index_without_notes_gets_them_and_what_cannot_be_noted_is_not_found(make, tmp_path, caplog):
    first, (key,) = make(), keys(chain(1))
    save(first, *chain(1))
    with sqlite3.connect(tmp_path / "kv/v1/index.sqlite") as index:
        index.execute("DROP TABLE notes")
    index.close()
    first.note(key, TENANT, b"lost", 0.0)
    assert first.notes([key], 0.0) == {} and "out of use" in caplog.text
    second = make()
    second.note(key, TENANT, b"kept", 0.0)
    assert second.notes([key], 0.0) == {key: b"kept"} and second.look([key]) == 1


def test_a_purge_finds_what_the_index_has_not(make, tmp_path):
    disk, (one, other) = make(), chain(2)
    save(disk, one, other)
    disk._folder.index.remove([(tag(SHAPE), one.key)])
    assert purge(disk, TENANT) == 2
    assert not path_of(tmp_path / "kv", one.key).exists()


def test_what_is_there_and_unknown_is_entered_in_the_index(make):
    disk, one = make(), card()
    save(make(), one)
    disk._folder.index.remove([(tag(SHAPE), one.key)])
    assert disk.look([one.key]) == 0
    save(disk, one)
    assert disk.look([one.key]) == 1 and [entry.key for entry in disk.entries()] == [one.key]


def test_room_is_made_of_what_nobody_keeps(make, clock):
    old, disk, cards = make(shape=replace(SHAPE, model=bytes(32))), make(), chain(4)
    save(old, *chain(2))
    clock.now += 1
    save(disk, *cards)
    page = disk.entries()[0].size
    pin(old, [chain(2)[0].key])
    assert disk.make_room(6 * page, keep=set(keys(cards))) == 0
    assert disk.make_room(3 * page, keep={cards[3].key}) == 3  # the other model's, which is older, and two more; not the pinned one
    assert disk.size == 3 * page
    assert disk.look(keys(cards)) == 1 and disk.look([cards[3].key]) == 1  # of one chain its end goes first, unless it is to stay
    old.open(chain(2)[0].key).close()


def test_shapes_do_not_meet(make):
    exact, compressed, one = make(), make(shape=replace(SHAPE, codec="int8")), card()
    save(exact, one)
    assert compressed.look([one.key]) == 0
    with pytest.raises(Lost, match="absent"):
        compressed.open(one.key)


# --- two processes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_what_another_process_adds_is_found(make, shared):
    mine, other = make(shared=shared), make(shared=shared)
    cards, end = chain(3), card(50, 3)
    assert mine.look(keys(cards)) == 0 and mine.ends(ROOT) == []
    save(other, *cards, end)
    assert mine.look(keys(cards)) == 3 and mine.ends(ROOT) == [end]
    assert [read(mine.open(one.key)) for one in cards] == [data(one) for one in cards]


def test_who_saves_what_is_there_uses_it(make, clock):
    disk, other, one = make(), make(), card()
    save(other, one)
    clock.now += 50
    assert disk.look([one.key]) == 1
    save(disk, one)
    assert [entry.used for entry in disk.entries()] == [clock.now]


def test_what_another_process_drops_is_absent_and_can_be_saved_again(make):
    mine, other, one = make(), make(), card()
    save(mine, one)
    assert other.look([one.key]) == 1
    other.drop([one.key])
    with pytest.raises(Lost, match="absent"):
        mine.open(one.key)
    assert mine.look([one.key]) == 0
    save(mine, one)
    assert read(other.open(one.key)) == data(one)


def test_what_others_left_and_nobody_used_goes_when_the_bound_is_looked_at(make, clock, tmp_path):
    disk, other, cards = make(), make(), chain(5)
    save(other, *cards)
    pin(other, [cards[3].key])
    other.close()
    clock.now += 50
    disk.touch([cards[1].key])
    clock.now += 20
    assert disk.look(keys(cards)) == 5
    assert disk.share(2**20, [cards[0].key], [cards[2].key], ttl=60) == []
    assert [disk.look([one.key]) for one in cards] == [1, 1, 1, 1, 0]
    assert not path_of(tmp_path / "kv", cards[4].key).exists()


def test_what_is_told_late_of_ones_own_use_is_not_taken_for_the_use_of_another(make, clock):
    disk, cards, ttl = make(), chain(4), 1600.0
    mine, late, others, future = keys(cards)
    save(disk, *cards)
    used = clock.now
    clock.now = used + every(ttl) - 1
    disk.touch([late])
    clock.now = used + ttl
    disk.touch([others])
    clock.now = used + 10 * ttl  # and then it is set back
    disk.touch([future])
    assert disk.unused(keys(cards), ttl, used + ttl) == [mine, late, future]


def test_an_index_that_somebody_removed_is_made_anew_for_all(tmp_path, make):
    mine, cards = make(), chain(6)
    save(mine, *cards[:3])
    for file in (tmp_path / "kv/v1").glob("index.sqlite*"):
        file.unlink()
    other = make()
    assert other.look(keys(cards)) == 3, "it is made from the files"
    save(mine, cards[3])
    assert mine.share(2**40, (), keys(cards[:4])) == []
    save(mine, *cards[4:])
    assert other.look(keys(cards)) == 6 and mine.size == other.size
    page = other.size // 6
    assert len(mine.share(2 * page, (), keys(cards))) == 4 and other.size == 2 * page


def test_who_shares_a_directory_with_nobody_does_not_read_all_of_the_index_to_learn_what_others_removed(make, monkeypatch):
    mine, cards, read = make(), chain(4), []
    save(mine, *cards)
    assert mine.share(2**40, (), keys(cards)) == []
    plain = mine._folder.index.keys
    monkeypatch.setattr(mine._folder.index, "keys", lambda shape: read.append(shape) or plain(shape))
    assert mine.share(2**40, (), keys(cards)) == [] and not read
    make().drop([cards[3].key])
    assert mine.share(2**40, (), keys(cards)) == [cards[3].key] and read
    assert mine.look([cards[3].key]) == 0 and mine.used == mine.size


def test_a_page_whose_row_is_missing_is_not_taken_for_removed(make):
    mine, cards = make(), chain(3)
    save(mine, *cards)
    make()._folder.index.remove([(tag(SHAPE), cards[1].key)])
    assert mine.share(2**40, (), keys(cards)) == []


def test_room_is_made_for_a_page_and_what_it_takes_beside_its_file_and_nobody_is_told_of_another_codecs_page(make, clock, monkeypatch):
    mine, other, cards = make(), make(shape=replace(SHAPE, codec="int8")), chain(2)
    save(other, cards[0])  # under the same key
    clock.now += 1
    save(mine, *cards)
    monkeypatch.setattr(folder.Folder, "free", 10**6)
    assert mine.make_way(10**6 - SPARE, ()) == []
    assert mine.make_way(10**6 - SPARE + 1, ()) == [] and other.look([cards[0].key]) == 1 and mine.look(keys(cards)) == 2
    assert make(shape=replace(SHAPE, codec="int8")).look([cards[0].key]) == 0
    assert mine.make_way(10**6 - SPARE + 1, ()) == [cards[1].key]


def test_what_pages_take_is_counted_once_each(make):
    mine, cards = make(), chain(3)
    save(mine, *cards)
    page = mine.used // 3
    mine.drop(keys(cards[2:]))
    assert mine.used == 2 * page
    path = mine._folder.path((tag(SHAPE), cards[0].key))
    path.unlink()  # and it is written again, before anybody has missed it
    save(mine, cards[0])
    assert mine.used == mine.size == 2 * page


def test_a_short_end_is_found_by_who_wrote_it_as_long_as_it_is_there(make):
    mine, first = make(), card()
    save(mine, first, end := card(100, 5, first.key))
    assert mine.ends(first.key) == [end]
    mine.drop([end.key])
    assert mine.ends(first.key) == []


def test_a_short_end_that_another_process_wrote_behind_a_known_page_is_found(make):
    mine, other, first = make(), make(), card()
    save(mine, first)
    save(other, end := card(100, 5, first.key))
    assert mine.look([first.key]) == 1 and mine.ends(first.key) == [end]


def test_what_others_add_to_an_index_that_was_made_anew_is_found(tmp_path, make):
    mine, other, cards = make(), make(), chain(10)
    save(other, *cards[:8])
    assert mine.look(keys(cards)) == 8
    mine.drop(keys(cards[2:8]))
    for file in (tmp_path / "kv/v1").glob("index.sqlite*"):
        file.unlink()
    another = make()
    mine.share(2**40, (), keys(cards[:2]))
    save(another, *cards[2:5])
    assert mine.look(keys(cards)) == 5


@pytest.mark.parametrize("gone", ["", "v1", "v1/making"])
def test_a_directory_that_somebody_removed_is_made_again(tmp_path, make, gone):
    mine, cards = make(), chain(6)
    save(mine, *cards[:3])
    shutil.rmtree(tmp_path / "kv" / gone)
    save(mine, *cards[3:])
    assert [read(mine.open(one.key)) for one in cards[3:]] == [data(one) for one in cards[3:]]
    lost = mine.share(2**40, (), keys(cards))
    assert lost == (keys(cards[:3]) if gone != "v1/making" else [])
    other = make()
    assert [other.look([one.key]) for one in cards] == [one.key not in lost for one in cards]
    assert mine.size == other.size == (6 - len(lost)) * (other.used // (6 - len(lost)))


def test_a_shared_directory_that_is_gone_is_not_made_again_in_its_place(tmp_path, make):
    mine, cards = make(shared=True), chain(2)
    save(mine, cards[0])
    shutil.move(tmp_path / "kv", tmp_path / "elsewhere")
    with pytest.raises(Lost, match="takes no pages"):
        save(mine, cards[1])
    assert not (tmp_path / "kv").exists()
    shutil.move(tmp_path / "elsewhere", tmp_path / "kv")
    save(mine, cards[1])
    assert [read(mine.open(one.key)) for one in cards] == [data(one) for one in cards]


def test_an_index_that_cannot_be_opened_anew_is_tried_again(tmp_path, make, monkeypatch):
    mine, cards = make(), chain(3)
    save(mine, *cards)
    (tmp_path / "kv/v1/index.sqlite").unlink()
    with monkeypatch.context() as broken:
        broken.setattr("pando.store.folder.Folder._reconcile", lambda *_: (_ for _ in ()).throw(sqlite3.OperationalError("busy")))
        assert mine.share(2**40, (), keys(cards)) == []
    assert mine.share(2**40, (), keys(cards)) == [] and make().look(keys(cards)) == 3 and mine.size > 0


def test_processes_and_threads_write_at_once(tmp_path, make):
    work = f"""
import threading
from pathlib import Path
from pando.store import index
from pando.store.disk import SPARE, DiskTier
from tests.store.pages import *
index.WAIT_S = 60  # seconds: whoever writes may be held up for longer than a server would wait
disk = DiskTier(Path({str(tmp_path / "kv")!r}), SHAPE)
def run(turn):
    for step in range(40):
        one = chain(6)[(step * turn) % 6]
        disk.save(one, layers(one))
        disk.look(keys(chain(6)))
        try:
            assert read(disk.open(one.key)) == data(one)
        except Lost as lost:
            assert lost.reason == "absent", lost
        if step % 5 == 0:
            disk.drop([one.key])
threads = [threading.Thread(target=run, args=(turn,)) for turn in (1, 5)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
""".replace("import *", "import *\nfrom pando.store.tier import Lost")
    started = [
        subprocess.Popen([sys.executable, "-c", work], stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) for _ in "ab"
    ]
    said = [process.communicate()[1] for process in started]
    assert said == ["", ""]
    assert all(finding.lost is None for finding in make().verify())


def test_an_index_that_machines_share_stays_one_whoever_opens_it(make, tmp_path):
    save(make(shared=True), card())
    save(make(), card(9))
    assert not list((tmp_path / "kv/v1").glob("index.sqlite-*"))  # no journal in memory that only one machine has


def test_closing_twice_closes_nothing_else(make):
    disk, (one, other) = make(), chain(2)
    save(disk, one, other)
    first = disk.open(one.key)
    first.close()
    second = disk.open(other.key)  # has the same number now
    first.close()
    assert read(second) == data(other)


# --- starting again ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["missing", "noise", "empty", "version", "columns", "cut", "rows", "page"])
def test_the_index_is_made_again_from_the_files(make, tmp_path, damage):
    cards, end = chain(5), card(50, 3)
    before = make()
    save(before, *cards, end)
    before.close()
    index = tmp_path / "kv/v1/index.sqlite"
    if damage == "missing":
        index.unlink()
    elif damage == "noise":
        index.write_bytes(os.urandom(9000))
    elif damage == "empty":
        index.write_bytes(b"")
    elif damage == "page":
        connection = sqlite3.connect(index)
        [(root, size)] = connection.execute("SELECT rootpage, page_size FROM sqlite_master, pragma_page_size WHERE name = 'pages'")
        connection.close()
        content = bytearray(index.read_bytes())
        content[(root - 1) * size : root * size] = os.urandom(size)
        index.write_bytes(content)
    elif damage == "cut":
        index.write_bytes(index.read_bytes()[:-5000])
    else:
        said = {"version": "PRAGMA user_version = 9", "columns": "ALTER TABLE pages RENAME COLUMN key TO k", "rows": "DELETE FROM pages"}
        with sqlite3.connect(index) as connection:
            connection.execute(said[damage])
        connection.close()
    disk = make()
    assert disk.look(keys(cards)) == 5 and disk.ends(ROOT) == [end]
    assert sorted(entry.key for entry in disk.entries()) == sorted(keys([*cards, end]))
    assert index.exists()


def test_starting_reads_no_payload(make, tmp_path, monkeypatch):
    save(make(), *chain(4))
    (tmp_path / "kv/v1/index.sqlite").unlink()
    read_bytes: list[int] = []
    plain = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: read_bytes.append(len(got := plain(*args))) or got)
    monkeypatch.setattr(os, "preadv", lambda *args: pytest.fail("a payload was read"))
    assert len(make().entries()) == 4
    assert len(read_bytes) == 4  # a header each, when there was no index
    read_bytes.clear()
    assert len(make().entries()) == 4
    assert read_bytes == []  # and nothing with one


def test_a_row_without_a_file_is_a_miss(make, tmp_path):
    disk, (one, other) = make(), chain(2)
    save(disk, one, other)
    path_of(tmp_path / "kv", one.key).unlink()
    with pytest.raises(Lost, match="absent"):
        disk.open(one.key)
    assert [entry.key for entry in disk.entries()] == [other.key]
    path_of(tmp_path / "kv", other.key).unlink()
    assert len(make().entries()) == 0


def test_pins_outlive_the_index(make, tmp_path):
    before, cards = make(), chain(4)
    save(before, *cards)
    pin(before, keys(cards[:3]))
    pin(before, keys(cards[2:3]), False)
    before.close()
    (tmp_path / "kv/v1/index.sqlite").unlink()
    disk = make()
    assert {entry.key for entry in disk.entries() if entry.pinned} == set(keys(cards[:2]))
    assert [read(disk.open(one.key)) for one in cards] == [data(one) for one in cards]
    disk.drop(keys(cards[:1]))
    assert disk.look(keys(cards)) == 0


def test_a_pinned_page_that_was_damaged_is_pinned_when_it_is_saved_again(make, tmp_path):
    disk, (one, other) = make(), chain(2)
    save(disk, one, other)
    pin(disk, [one.key])
    for each in (one, other):
        file = path_of(tmp_path / "kv", each.key)
        mode, start = stat.S_IMODE(file.stat().st_mode), file.read_bytes()[:300]
        file.unlink()
        file.write_bytes(start)
        file.chmod(mode)
        with pytest.raises(Lost, match="short"):
            disk.open(each.key)
    save(disk, one, other)
    assert {entry.key: entry.pinned for entry in disk.entries()} == {one.key: 1, other.key: 0}
    assert stat.S_IMODE(path_of(tmp_path / "kv", one.key).stat().st_mode) == 0o400


def test_an_index_that_lies_about_a_short_end_costs_the_page_and_no_more(make, tmp_path):
    disk, end = make(), card(50, 3)
    save(disk, end)
    disk.close()
    with sqlite3.connect(tmp_path / "kv/v1/index.sqlite") as connection:
        connection.execute("UPDATE pages SET tokens = x'010000000200000003000000'")
    connection.close()
    disk = make()
    assert [told.tokens for told in disk.ends(ROOT)] == [(1, 2, 3)]
    with pytest.raises(Lost, match="corrupt"):
        disk.open(end.key)
    assert disk.ends(ROOT) == []


def test_what_a_dead_process_was_writing_is_swept_away_and_what_a_living_one_writes_is_not(make, tmp_path, monkeypatch):
    one = card()
    writing, go_on = threading.Event(), threading.Event()
    plain = os.fdatasync

    def wait(descriptor: int) -> None:
        writing.set()
        go_on.wait()
        plain(descriptor)

    monkeypatch.setattr(os, "fdatasync", wait)
    disk = make()
    (tmp_path / "kv/v1/making/left").write_bytes(b"half a page")
    thread = threading.Thread(target=save, args=(disk, one))
    thread.start()
    try:
        assert writing.wait(10)
        assert len(list((tmp_path / "kv/v1/making").iterdir())) == 2
        other = make()
        assert len(list((tmp_path / "kv/v1/making").iterdir())) == 1
    finally:
        go_on.set()
        thread.join()
    assert other.look([one.key]) == 1 and read(other.open(one.key)) == data(one)


def test_a_file_that_is_swept_away_before_it_is_locked_is_begun_again(make, monkeypatch):
    disk, one, plain, swept = make(), card(), tempfile.mkstemp, []

    def swept_at_once(dir: Path) -> tuple[int, str]:
        descriptor, path = plain(dir=dir)
        if len(swept) < 2:
            os.unlink(path)
            swept.append(path)
        return descriptor, path

    monkeypatch.setattr(tempfile, "mkstemp", swept_at_once)
    save(disk, one)
    assert len(swept) == 2 and read(disk.open(one.key)) == data(one)


# --- where nothing can be written --------------------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_made_is_an_empty_tier(make, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    disk, one = make(tmp_path / "file"), card()
    assert disk.look([one.key]) == 0 and disk.ends(ROOT) == [] and disk.entries() == [] and disk.size == 0
    for _ in range(3):
        with pytest.raises(Lost, match="unreadable"):
            save(disk, one)
    disk.drop([one.key])
    disk.touch([one.key])
    assert disk._folder.purge([], "tenant = ?", [TENANT]) == 0
    assert len(caplog.records) == 3  # no index, no page, nothing to remove: each once
    assert "choose another directory" in caplog.text


def test_what_is_no_page_is_left_alone_wherever_it_lies(make, tmp_path):
    disk, cards = make(), chain(2)
    save(disk, *cards)
    path = path_of(tmp_path / "kv", cards[0].key)
    strays = [folder / ".DS_Store" for folder in (path.parent, path.parent.parent, path.parents[2], disk._folder._making.parent)]
    for stray in strays:
        stray.write_bytes(b"no page")
    other = make()
    assert other.look(keys(cards)) == 2 and len(list(other.verify())) == 2 and all(stray.exists() for stray in strays)


def test_an_index_that_is_made_again_knows_how_old_pages_are(make, tmp_path):
    disk, cards = make(), chain(2)
    save(disk, *cards)
    os.utime(path_of(tmp_path / "kv", cards[0].key), (500, 500))
    for file in (tmp_path / "kv/v1").glob("index.sqlite*"):
        file.unlink()
    assert [(entry.born, entry.used) for entry in make().entries() if entry.key == cards[0].key] == [(500, 500)]


def test_an_index_of_another_version_is_made_again(make, tmp_path, caplog):
    save(disk := make(), *(cards := chain(2)))
    disk.close()
    with closing(sqlite3.connect(tmp_path / "kv/v1/index.sqlite")) as index:
        index.execute("PRAGMA user_version = 9")
    assert make().look(keys(cards)) == 2 and "is made again from the files (the index has version 9" in caplog.text


def test_an_index_that_others_hold_is_not_taken_for_damaged(make, tmp_path, monkeypatch, caplog):
    save(disk := make(), *(cards := chain(2)))
    disk.close()
    path = tmp_path / "kv/v1/index.sqlite"
    inode = path.stat().st_ino
    monkeypatch.setattr("pando.store.index.WAIT_S", 0.01)
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("PRAGMA locking_mode = EXCLUSIVE")
        holder.execute("BEGIN EXCLUSIVE")
        holder.execute("UPDATE pages SET used = used")
        assert make().look(keys(cards)) == 2
    assert path.stat().st_ino == inode and "is made again" not in caplog.text


def test_where_no_index_can_be_written_pages_are_listed_in_memory(make, tmp_path, monkeypatch, caplog):
    cards = chain(3)
    save(make(), *cards)

    def refuse(self, path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr("pando.store.folder.Folder._open_index", refuse)
    disk = make()
    assert disk.look(keys(cards)) == 3
    assert [read(disk.open(one.key)) for one in cards] == [data(one) for one in cards]
    assert len(caplog.records) == 1


def test_a_busy_index_is_written_later(make, tmp_path, monkeypatch):
    disk, (one, other) = make(), chain(2)
    plain = disk._folder.index.add

    def busy(rows):
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(disk._folder.index, "add", busy)
    save(disk, one)
    assert disk.look([one.key]) == 1 and read(disk.open(one.key)) == data(one)
    monkeypatch.setattr(disk._folder.index, "add", plain)
    save(disk, other)
    assert {entry.key for entry in disk.entries()} == set(keys([one, other]))
    assert disk._folder._unindexed == []


# ---- an index that is not as it should be, or not to be had


@pytest.mark.parametrize(
    ("column", "value"),
    [("tokens", b"123"), ("tokens", None), ("size", None), ("size", "x"), ("key", "text"), ("parent", 7), ("used", None), ("count", b"")],
)
def test_a_row_that_is_not_as_it_should_be_is_passed_over(make, tmp_path, column: str, value: object) -> None:
    one, sound, damaged = make(), card(1), card(2)
    beside = make()
    save(one, sound)
    assert beside.look([sound.key]) == 1
    save(one, damaged)
    with sqlite3.connect(tmp_path / "kv" / "v1" / "index.sqlite") as other:
        other.execute(f"UPDATE pages SET {column} = ? WHERE key = ?", (value, damaged.key))
    other.close()
    assert beside.look([damaged.key]) == 0 and list(beside.ends(ROOT)) == []
    assert [entry.key for entry in beside.entries()] == [sound.key]
    assert make().look(keys([sound, damaged])) == 2, "the next start knows it by its file"
    assert one.make_room(10, ()) == 2


@pytest.mark.parametrize("shape", ["{}", "../../{}", "../{}"], ids=["from the root", "from the pages", "from the index"])
def test_a_row_is_no_way_out_of_the_directory(make, tmp_path, shape: str) -> None:
    one, kept = make(), card(1)
    save(one, kept)
    place = tmp_path / ("other" if shape.startswith("../../") or shape == "{}" else "kv/other")
    outside = place / kept.key.hex()[:2] / kept.key.hex()
    outside.parent.mkdir(parents=True)
    outside.write_bytes(b"somebody else's")
    row = shape.format(place if shape == "{}" else "other")
    with sqlite3.connect(tmp_path / "kv" / "v1" / "index.sqlite") as other:
        other.execute("INSERT INTO shapes SELECT ?, model, dtype, codec, page_size FROM shapes", (row,))
        columns = "key, parent, tenant, tokens, count, size, born, used"
        other.execute(f"INSERT INTO pages (shape, {columns}) SELECT ?, {columns} FROM pages", (row,))
    other.close()
    one.make_room(0, ())
    assert outside.read_bytes() == b"somebody else's"


def test_a_pipe_in_place_of_a_page_is_not_waited_for(make, tmp_path) -> None:
    one, kept = make(), card(1)
    save(one, kept)
    path_of(tmp_path / "kv", kept.key).unlink()
    os.mkfifo(path_of(tmp_path / "kv", kept.key))
    with pytest.raises(Lost, match="no plain file"):
        one.open(kept.key)


def test_a_header_that_claims_too_much_is_not_read_to_its_end() -> None:
    asked: list[int] = []
    claims = b"PANDOKV\0" + struct.pack("<III", 1, 2**27, 2**27)  # version, tokens, layers

    def give(offset: int, length: int) -> bytes:
        asked.append(length)
        return claims.ljust(length, b"\0") if length <= PROBE else b""

    with pytest.raises(Lost, match="tokens"):
        read_header(give, 2**31)
    assert asked == [PROBE]


def test_who_looks_for_a_page_does_not_wait_for_who_writes(make) -> None:
    one = make()
    with one._folder.index._lock:  # as a writer has it, who waits for another process
        assert one.look(keys([card(1)])) == 0 and list(one.ends(ROOT)) == []


def test_pages_without_a_row_are_remembered_while_they_are_there(make, monkeypatch) -> None:
    def locked(*_: object) -> None:
        raise sqlite3.OperationalError("database is locked")

    one = make()
    index = one._folder.index
    monkeypatch.setattr(folder, "UNINDEXED", 5)
    with monkeypatch.context() as patch:
        patch.setattr(index, "add", locked)
        for place in range(20):
            one.save(card(place), layers(card(place)))
        assert len(one._folder._unindexed) == 6
        one.drop([card(18).key])
    one.save(card(30), layers(card(30)))
    names = {name for _, name in index.names()}
    assert names == set(keys([card(place) for place in (15, 16, 17, 19, 30)]))
    assert make().look(keys([card(3)])) == 1, "the next start finds all files"


def test_a_page_that_was_absent_is_not_removed_when_it_comes(make, monkeypatch) -> None:
    one, late = make(), card(1)
    tell = one._folder.tell

    def meanwhile(lost: Lost) -> None:
        tell(lost)
        one.save(late, layers(late))

    with monkeypatch.context() as patch:
        patch.setattr(one._folder, "tell", meanwhile)
        with pytest.raises(Lost, match="absent"):
            one.open(late.key)
    assert make().look([late.key]) == 1 and read(one.open(late.key)) == data(late)
