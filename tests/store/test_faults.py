"""Whatever happens to a kept page: it is read as it was saved, or it is lost, with the reason. Never wrong bytes, never another error."""

import errno
import itertools
import os
import random
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pando.store.disk import DiskTier
from pando.store.fileformat import MAGIC, header_for, pack, tag
from pando.store.host import HostTier
from pando.store.tier import Lost, NoRoom

from .faults import CALLS, KINDS, FaultyTier, went_wrong
from .pages import LAYER, SHAPE, card, chain, data, keys, layers, read

ONE = chain(2)[1]
START = header_for(ONE, SHAPE, layers(ONE)).start
SIZE = START + SHAPE.layers * LAYER


@pytest.fixture
def disk(tmp_path):
    tier = DiskTier(tmp_path / "kv", SHAPE)
    tier.save(ONE, layers(ONE))
    yield tier
    tier.close()


@pytest.fixture
def file(tmp_path, disk) -> Path:
    key = ONE.key.hex()
    return tmp_path / "kv/v1" / tag(SHAPE) / key[:2] / key


def lost_by_reading(tier) -> Lost:
    with pytest.raises(Lost) as lost:
        read(tier.open(ONE.key))
    return lost.value


# --- one file ----------------------------------------------------------------------------------------------------------------------


def test_every_flipped_bit_is_found(disk, file):
    """Of all bytes of the header, and of some of every layer."""
    sound = file.read_bytes()
    assert len(sound) == SIZE
    draw = random.Random(0)
    places = [*range(START), *(START + layer * LAYER + at for layer in range(SHAPE.layers) for at in (0, LAYER // 2, LAYER - 1))]
    for place in places:
        damaged = bytearray(sound)
        damaged[place] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        assert lost_by_reading(disk).reason in ("corrupt", "version", "short"), place
        assert not file.exists()  # so that it can be saved again
        file.write_bytes(sound)
    assert read(disk.open(ONE.key)) == data(ONE)


def test_a_file_cut_anywhere_is_short(disk, file):
    sound = file.read_bytes()
    boundaries = [0, 1, 8, 11, 12, 100, START - 64, START - 1, START, *(START + layer * LAYER for layer in range(SHAPE.layers)), SIZE - 1]
    for length in boundaries:
        file.write_bytes(sound[:length])
        assert lost_by_reading(disk).reason == "short", length


def test_a_file_that_is_cut_while_it_is_read_is_short(disk, file):
    reader = disk.open(ONE.key)
    buffer = memoryview(bytearray(LAYER))
    reader.layer(0, buffer)
    os.truncate(file, START + LAYER + 10)
    with pytest.raises(Lost, match="short"):
        reader.layer(1, buffer)
    reader.close()


def test_a_file_that_was_lengthened_is_corrupt(disk, file):
    file.write_bytes(file.read_bytes() + b"more")
    assert lost_by_reading(disk).reason == "corrupt"


def test_a_file_of_another_version_is_told_apart(disk, file):
    sound = file.read_bytes()
    file.write_bytes(MAGIC + struct.pack("<I", 2) + sound[12:])
    assert lost_by_reading(disk).reason == "version"


@pytest.mark.parametrize(
    "other",
    [
        *(replace(SHAPE, model=bytes(32)), replace(SHAPE, dtype="float16"), replace(SHAPE, codec="fp8")),
        *(replace(SHAPE, kv_heads=1), replace(SHAPE, head_dim=8), replace(SHAPE, page_size=16)),
    ],
    ids=lambda shape: tag(shape)[:4],
)
def test_another_models_page_under_this_ones_name_is_foreign(disk, file, other):
    header = header_for(ONE, other, layers(ONE))
    file.write_bytes(pack(header) + b"".join(layers(ONE)))
    assert lost_by_reading(disk).reason == "foreign"


def test_another_page_under_this_ones_name_is_foreign(disk, file):
    other = card(77)
    file.write_bytes(pack(header_for(other, SHAPE, layers(other))) + b"".join(layers(other)))
    assert lost_by_reading(disk).reason == "foreign"


def test_layers_that_changed_places_are_corrupt(disk, file):
    sound = file.read_bytes()
    first, second, rest = sound[START : START + LAYER], sound[START + LAYER : START + 2 * LAYER], sound[START + 2 * LAYER :]
    file.write_bytes(sound[:START] + second + first + rest)
    assert lost_by_reading(disk).reason == "corrupt"


def test_a_header_that_promises_too_much_takes_no_memory(disk, file):
    sound = file.read_bytes()
    file.write_bytes(sound[:12] + struct.pack("<II", 2**31, 2**31) + sound[20:])
    assert lost_by_reading(disk).reason == "short"


def test_a_folder_in_place_of_a_file_is_unreadable_and_not_fatal(disk, file):
    file.unlink()
    file.mkdir()
    assert lost_by_reading(disk).reason == "unreadable"
    with pytest.raises(Lost):
        disk.save(ONE, layers(ONE))
    disk.drop([ONE.key])


def test_a_layer_of_another_size_is_never_given(disk):
    reader = disk.open(ONE.key)
    for size in (0, LAYER - 1, LAYER + 1):
        with pytest.raises(Lost, match="foreign"):
            reader.layer(0, memoryview(bytearray(size)))
    reader.close()


def test_a_lost_page_is_saved_again(disk, file):
    file.write_bytes(b"")
    lost_by_reading(disk)
    disk.save(ONE, layers(ONE))
    assert disk.look([ONE.key]) == 1 and read(disk.open(ONE.key)) == data(ONE)


# --- the system says no ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason"), [(errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EIO, "unreadable"), (errno.EROFS, "unreadable")]
)
@pytest.mark.parametrize("call", ["write", "fdatasync", "rename"])
def test_a_write_that_fails_leaves_nothing_behind(disk, tmp_path, monkeypatch, caplog, code, reason, call):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    for other in chain(4)[2:]:
        with pytest.raises(Lost) as lost:
            disk.save(other, layers(other))
        assert lost.value.reason == reason
        assert disk.look([other.key]) == 0
    assert len(caplog.records) == 1  # the first of its kind
    assert f"a page could not be kept: {tmp_path}/kv/v1 takes no pages ({os.strerror(code)})" in caplog.text
    assert isinstance(lost.value, NoRoom) == (reason == "full")
    assert list((tmp_path / "kv/v1/making").iterdir()) == []
    assert read(disk.open(ONE.key)) == data(ONE)


def test_the_disk_is_full_after_some_bytes(disk, tmp_path, monkeypatch):
    plain, left = os.write, [START + LAYER + 100]

    def fill(descriptor, buffer):
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        wrote = plain(descriptor, bytes(buffer[: left[0]]))
        left[0] -= wrote
        return wrote

    monkeypatch.setattr(os, "write", fill)
    with pytest.raises(Lost, match="full"):
        disk.save(card(5), layers(card(5)))
    assert list((tmp_path / "kv/v1/making").iterdir()) == []


def test_short_writes_and_short_reads_are_continued(disk, monkeypatch):
    write, preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda descriptor, buffer: write(descriptor, bytes(buffer[:37])))
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset: preadv(descriptor, [buffers[0][:41]], offset))
    other = card(5)
    disk.save(other, layers(other))
    assert read(disk.open(other.key)) == data(other)


@pytest.mark.parametrize("call", ["open", "pread", "preadv", "fstat"])
def test_a_read_that_fails_is_unreadable_and_the_file_stays(disk, file, monkeypatch, call):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(Lost) as lost:
            read(disk.open(ONE.key))
    assert lost.value.reason == "unreadable"
    assert file.exists()
    assert disk.look([ONE.key]) == 0  # until it is saved again, or the process starts again
    disk.save(ONE, layers(ONE))
    assert read(disk.open(ONE.key)) == data(ONE)


# --- kill -9 -----------------------------------------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from pando.store.disk import DiskTier
from tests.store.pages import SHAPE, chain, layers
disk = DiskTier(Path(sys.argv[1]), SHAPE)
print("ready", flush=True)
for start in range(int(sys.argv[2]), 10**9, 4):
    cards = chain(4, start)
    for one in cards:
        disk.save(one, layers(one))
        print("kept", flush=True)
    disk.touch([one.key for one in cards])
    disk.drop([cards[3].key])
"""


def test_a_process_killed_at_any_moment_leaves_nothing_wrong(tmp_path):
    draw = random.Random(1)
    seen = 0
    for turn in range(20):
        command = [sys.executable, "-c", WRITER, str(tmp_path / "kv"), str(turn * 10**6)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
            assert not turn % 4 or writer.stdout.readline() == b"kept\n"  # however slow a disk is, some are killed behind a page
            time.sleep(draw.uniform(0, 0.03))
            writer.send_signal(signal.SIGKILL)
        disk = DiskTier(tmp_path / "kv", SHAPE)
        findings = list(disk.verify())
        assert all(finding.lost is None for finding in findings)
        assert {finding.name[1] for finding in findings} == {entry.key for entry in disk.entries()}
        assert list((tmp_path / "kv/v1/making").iterdir()) == []
        for one in chain(4, turn * 10**6)[:3]:
            if disk.look([one.key]):
                assert read(disk.open(one.key)) == data(one)
                seen += 1
        disk.close()
    assert seen > 0


# --- random schedules --------------------------------------------------------------------------------------------------------------


def play(tier, seed: int, steps: int, damage=lambda draw: None) -> int:
    """Random calls; how many pages were read. What is read is right, and nothing is raised but Lost."""
    draw, cards, reads = random.Random(seed), [*chain(4), card(50, 3), card(60, 7)], 0
    for _ in range(steps):
        one = draw.choice(cards)
        try:
            match draw.randrange(6):
                case 0 | 1:
                    tier.save(one, layers(one))
                case 2 | 3:
                    reader = tier.open(one.key)
                    assert reader.card == one
                    assert read(reader) == data(one)
                    reads += 1
                case 4:
                    assert 0 <= tier.look(keys(cards[:4])) <= 4
                    tier.ends(one.parent)
                case 5:
                    tier.drop([one.key])
        except Lost:
            pass  # as a tier may at any time
        damage(draw)
    return reads


def test_a_faulty_host_tier_is_never_wrong():
    tiers = [FaultyTier(HostTier(SHAPE, 3, LAYER, pinned=False), seed, rate=0.2) for seed in range(500)]
    assert sum(play(tier, seed, 20) for seed, tier in enumerate(tiers)) > 400
    assert went_wrong(tiers) == {*itertools.product(CALLS, KINDS)}, "whatever a call may meet"


def test_a_faulty_disk_tier_whose_files_are_damaged_all_the_time_is_never_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)
    root = tmp_path / "kv/v1" / tag(SHAPE)

    def damage(draw: random.Random) -> None:
        files = sorted(path for path in root.rglob("*") if path.is_file())
        if not files or draw.random() < 0.7:
            return
        file = draw.choice(files)
        content = bytearray(file.read_bytes())
        match draw.randrange(4):
            case 0:
                file.unlink()
            case 1:
                file.write_bytes(content[: draw.randrange(len(content) + 1)])
            case 2 if content:
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
                file.write_bytes(content)
            case 3:
                file.write_bytes(draw.choice(files).read_bytes())

    reads, disk, tiers = 0, DiskTier(tmp_path / "kv", SHAPE), list[FaultyTier]()
    for seed in range(150):
        if seed % 10 == 0:
            disk.close()
            disk = DiskTier(tmp_path / "kv", SHAPE)
        tiers.append(FaultyTier(disk, seed, rate=0.1))
        reads += play(tiers[-1], seed, 20, damage)
    disk.close()
    assert reads > 100
    assert {kind for _, kind in went_wrong(tiers)} == {*KINDS}
