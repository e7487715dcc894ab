"""`pando cache`, on a directory as servers leave it."""

import errno
import hashlib
import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from pando import cli
from pando.cache_cli import age_of, seconds, size_of
from pando.errors import InvalidOption
from pando.server.tenants import Tenants
from pando.store.disk import DiskTier
from pando.store.remote import remote_tier
from pando.store.sought import end_card, end_parent
from pando.store.tier import tenant_tag

from .store.pages import SHAPE, Clock, card, chain, data, keys, layers, pin, read
from .store.test_remote import server  # noqa: F401  # a fixture

DAY = 86400.0


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch, tmp_path):
    for variable in [name for name in os.environ if name.startswith("PANDO_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PANDO_HOME", str(tmp_path / "home"))


@pytest.fixture
def clock(monkeypatch):
    made = Clock(100 * DAY)
    monkeypatch.setattr("pando.cache_cli.time", type("time", (), {"time": staticmethod(made)}))
    return made


@pytest.fixture
def disk(tmp_path, clock):
    tier = DiskTier(tmp_path / "home/store", SHAPE, clock)
    yield tier
    tier.close()


@pytest.fixture
def pando(capsys):
    def run(*words: object) -> tuple[int, str, str]:
        code = cli.main(["cache", *map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def told(pando):
    def run(*words: object) -> dict:
        code, out, err = pando(*words, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return run


def save(disk: DiskTier, *cards) -> None:
    for one in cards:
        disk.save(one, layers(one))


def salted(salt: bytes, pages: int = 2) -> list:
    return chain(pages, tenant=tenant_tag(salt))


# --- ls and stat -------------------------------------------------------------------------------------------------------------------


def test_conversations_are_listed_last_used_first(disk, clock, pando):
    long, short = chain(5), chain(2, 100)
    save(disk, *long)
    clock.now += 2 * DAY
    save(disk, *short)
    clock.now += 90
    code, out, _ = pando("ls")
    head, first, second, summary = out.splitlines()
    size = sum(entry.size for entry in disk.entries())
    assert code == 0
    assert head.split() == ["key", "tenant", "pages", "tokens", "size", "age", "unused"]
    assert first.split()[:4] == [short[-1].key.hex()[:12], short[-1].tenant.hex()[:12], "2", "16"]
    assert second.split()[2:4] == ["5", "40"]
    assert first.split()[-4:] == ["2", "m", "2", "m"] and second.split()[-4:] == ["2", "d", "2", "d"]
    assert summary == f"7 pages, {size_of(size)}"


def test_conversations_that_begin_alike_are_two_with_shared_pages(disk, told):
    shared = chain(3)
    fork = card(77, parent=shared[1].key)
    save(disk, *shared, fork)
    listed = told("ls")["conversations"]
    assert {one["key"]: (one["pages"], one["tokens"]) for one in listed} == {
        shared[-1].key.hex(): (3, 24),
        fork.key.hex(): (3, 24),
    }


def test_every_page_can_be_listed(disk, told):
    save(disk, *chain(4))
    assert {one["key"] for one in told("ls", "--pages")["pages"]} == {key.hex() for key in keys(chain(4))}


def test_numbers_are_told_of_models_and_tenants(disk, clock, tmp_path, told, pando):
    other = DiskTier(tmp_path / "home/store", replace(SHAPE, codec="int8", model=bytes(32)), clock)
    save(disk, *chain(3))
    save(other, *salted(b"b"))
    other.close()
    clock.now += DAY
    stat = told("stat")
    page = disk.entries()[0].size
    assert (stat["pages"], stat["bytes"], stat["oldest"]) == (5, 5 * page, DAY)
    assert [(shape["model"], shape["codec"], shape["bytes"]) for shape in stat["shapes"]] == [
        (SHAPE.model.hex(), "none", 3 * page),
        (bytes(32).hex(), "int8", 2 * page),
    ]
    assert stat["tenants"] == {chain(1)[0].tenant.hex(): 3 * page, tenant_tag(b"b").hex(): 2 * page}
    out = pando("stat")[1]
    assert "5 pages" in out and "int8" in out and tenant_tag(b"b").hex()[:12] in out


@pytest.mark.parametrize("damage", ["DELETE FROM shapes", "UPDATE shapes SET model = 'text'", "UPDATE pages SET shape = x'00'"])
def test_numbers_are_told_although_the_index_has_lost_what_a_shape_is(disk, tmp_path, told, damage):
    save(disk, *chain(3))
    before = told("stat")
    with closing(sqlite3.connect(tmp_path / "home/store/v1/index.sqlite")) as other, other:
        other.execute(damage)
    after = told("stat")
    assert (after["pages"], after["shapes"], after["tenants"]) == (3, before["shapes"], before["tenants"])


def test_an_empty_directory_has_nothing_to_tell(disk, pando, told):
    assert pando("ls")[1].splitlines()[-1] == "0 pages, 0 B"
    assert pando("stat")[1].endswith("store: 0 pages, 0 B\n")
    assert told("verify")["bad"] == []


# --- verify ------------------------------------------------------------------------------------------------------------------------


def path_of(disk: DiskTier, key: bytes) -> Path:
    return disk._folder.path((disk._tag, key))


def test_sound_pages_are_said_to_be_sound(disk, pando):
    save(disk, *chain(3))
    code, out, _ = pando("verify")
    assert code == 0 and out.startswith("3 pages, ") and out.endswith("all of them are sound\n")


def test_bad_pages_are_named_and_removed_when_asked(disk, pando):
    first, second, third = chain(3)
    save(disk, first, second, third)
    file = path_of(disk, second.key)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    path_of(disk, third.key).write_bytes(b"")
    code, out, _ = pando("verify")
    assert code == 1
    assert f"{second.key.hex()[:12]}  corrupt" in out and f"{third.key.hex()[:12]}  short" in out and "2 bad" in out
    assert json.loads(pando("verify", "--json")[1])["bad"] == [
        {"key": one.key.hex(), "reason": reason} for one, reason in sorted([(second, "corrupt"), (third, "short")], key=lambda x: x[0].key)
    ]
    assert pando("verify", "--remove")[0] == 1
    assert not file.exists() and pando("verify")[0] == 0
    assert read(disk.open(first.key)) == data(first)


# --- purge -------------------------------------------------------------------------------------------------------------------------


def left(disk: DiskTier) -> set[bytes]:
    return {entry.key for entry in disk.entries()}


def test_a_tenant_of_the_library_is_purged_by_its_salt(disk, told):
    mine, theirs, nobodys = salted(b"mine"), salted(b"theirs"), salted(b"")
    save(disk, *mine, *theirs, *nobodys)
    page = disk.entries()[0].size
    assert told("purge", "--tenant", "mine")["bytes"] == 2 * page
    assert left(disk) == set(keys([*theirs, *nobodys]))
    assert told("purge", "--tenant", "")["pages"] == 2
    assert left(disk) == set(keys(theirs))


def test_a_tenant_of_a_server_is_purged_by_its_key(disk, told, monkeypatch):
    monkeypatch.setenv("PANDO_CACHE_SALT", "our server")
    tenants = Tenants(["sk-1", "sk-2"], "our server")
    kept = {
        (key, salt): salted(tenants.tenant(owner, salt).salt)
        for key, owner in zip(("sk-1", "sk-2"), tenants.owners, strict=True)
        for salt in ("", "blue")
    }
    anonymous = salted(Tenants([], "our server").tenant(b"", "blue").salt)
    save(disk, *(one for cards in kept.values() for one in cards), *anonymous)
    assert told("purge", "--api-key", "sk-1")["pages"] == 2
    assert not left(disk) & set(keys(kept["sk-1", ""]))
    assert told("purge", "--api-key", "sk-2", "--tenant", "blue")["pages"] == 2
    assert told("purge", "--tenant", "blue")["pages"] == 2  # of those who have no key
    assert left(disk) == set(keys([*kept["sk-1", "blue"], *kept["sk-2", ""]]))
    tag = kept["sk-2", ""][0].tenant.hex()[:12]
    assert told("purge", "--tag", tag)["pages"] == 2
    assert left(disk) == set(keys(kept["sk-1", "blue"]))


def test_what_was_not_used_for_long_is_purged_unless_it_is_pinned(disk, clock, told):
    old, pinned, fresh = chain(2), chain(2, 50), chain(2, 100)
    save(disk, *old, *pinned)
    pin(disk, keys(pinned))
    clock.now += 8 * DAY
    save(disk, *fresh)
    assert told("purge", "--older-than", "7d")["pages"] == 2
    assert left(disk) == set(keys([*pinned, *fresh]))
    assert told("purge", "--older-than", "9d")["pages"] == 0


def test_everything_is_purged_even_what_no_index_has(disk, told, tmp_path):
    save(disk, *chain(3))
    path_of(disk, chain(1)[0].key).write_bytes(b"damaged")
    assert told("purge", "--all")["pages"] == 3
    assert [path for path in (tmp_path / "home/store").rglob("*") if len(path.name) == 64] == []


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--tenant", "mine"], "yours"),
        (["--tag", tenant_tag(b"mine").hex()[:12]], "yours"),
        (["--older-than", "5d"], "yours"),
        (["--all"], ""),
    ],
)
def test_what_was_noted_goes_with_the_pages_and_does_not_count_as_any(disk, clock, told, pando, words, left):
    names = dict(zip(("mine", "yours"), keys(chain(2)), strict=True))
    for name, key in names.items():
        disk.note(key, tenant_tag(name.encode()), name.encode(), 0.0)
        clock.now += 6 * DAY
    clock.now -= 3 * DAY
    assert told("ls")["conversations"] == [] and told("verify")["pages"] == told("stat")["pages"] == 0
    assert told("purge", *words)["pages"] == 0
    assert disk.notes([*names.values()], 0.0) == ({names[left]: left.encode()} if left else {})


def test_nothing_of_a_purged_tenant_stays_in_the_index(disk, told, tmp_path):
    words = tuple(range(7_000_001, 7_000_009))
    secret = card()._replace(tokens=words, tenant=tenant_tag(b"mine"), key=hashlib.sha256(b"secret").digest())
    save(disk, secret, *chain(2))
    needle = words[0].to_bytes(4, "little") + words[1].to_bytes(4, "little")

    def found() -> bool:
        return any(needle in path.read_bytes() for path in (tmp_path / "home/store").rglob("*") if path.is_file())

    assert found()
    assert told("purge", "--tenant", "mine")["pages"] == 1
    assert not found()


def test_a_purge_that_could_not_be_finished_says_so(disk, pando, tmp_path, monkeypatch):
    monkeypatch.setattr("pando.store.folder.PATIENCE", 0.05)
    monkeypatch.setattr("pando.store.index.WAIT_S", 0.05)
    words = tuple(range(7_000_001, 7_000_009))
    save(disk, card()._replace(tokens=words, tenant=tenant_tag(b"mine"), key=hashlib.sha256(b"secret").digest()), *chain(2))
    path = tmp_path / "home/store/v1/index.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT COUNT(*) FROM pages").fetchone() == (3,)
        code, out, _ = pando("purge", "--tenant", "mine")
        assert code == 1 and out.startswith("removed 1 page, ") and "run it again: the index of" in out and "other processes read it" in out
        reader.execute("COMMIT")
    assert pando("purge", "--tenant", "mine")[:2] == (0, "removed 0 pages, 0 B\n")
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        code, out, _ = pando("purge", "--all", "--json")
        told = json.loads(out)
        assert (code, told["pages"]) == (1, 2) and told["bytes"] > 0 and "locked" in told["failures"][0]
    assert pando("purge", "--all")[0] == 0 and pando("ls")[1].endswith("0 pages, 0 B\n")


def test_a_directory_in_which_nothing_is_kept_stays_as_it_is(pando, tmp_path):
    code, _, err = pando("ls", "--disk-dir", tmp_path)
    assert code == 2 and "nothing is kept in" in err and not list(tmp_path.glob("v*"))


def test_a_directory_that_may_not_be_looked_into_is_not_said_to_be_empty(disk, pando, monkeypatch):
    save(disk, *chain(2))

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("pando.cache_cli.os.scandir", refuse)
        code, out, err = pando("ls")
    assert (code, out) == (2, "") and "cannot be read (Permission denied)" in err and len(err.splitlines()) == 1


# --- pin ---------------------------------------------------------------------------------------------------------------------------


def test_a_conversation_is_pinned_to_its_beginning(disk, pando, told):
    cards, other = chain(4), chain(2, 100)
    save(disk, *cards, *other)
    code, out, _ = pando("pin", cards[2].key.hex()[:12])
    assert code == 0 and out.startswith("pinned 3 pages, ")
    assert {entry.key for entry in disk.entries() if entry.pinned} == set(keys(cards[:3]))
    assert told("unpin", cards[1].key.hex())["pages"] == 2
    assert {entry.key for entry in disk.entries() if entry.pinned} == {cards[2].key}
    assert "pinned" in pando("ls", "--pages")[1]


def test_what_was_not_pinned_is_not_said_to_be_unpinned(disk, pando, told):
    cards = chain(3)
    save(disk, *cards)
    assert pando("unpin", cards[0].key.hex())[:2] == (0, "none of these pages was pinned\n")
    pando("pin", cards[1].key.hex())
    assert told("unpin", cards[2].key.hex())["pages"] == 2, "the third was not"
    assert told("unpin", cards[2].key.hex())["pages"] == 0


@pytest.mark.parametrize("given", ["the end", "the page before it"])
def test_a_conversation_is_pinned_with_its_unfilled_end_whichever_of_them_is_given(disk, pando, told, given):
    cards, other = chain(3), chain(2, 100)
    root = cards[0].parent
    end = end_card(end_parent(cards[-1].key, root), cards[0].tenant, [7, 8, 9])
    save(disk, *cards, end, *other)
    assert {one["key"]: (one["pages"], one["tokens"]) for one in told("ls")["conversations"]} == {
        end.key.hex(): (4, 27),
        other[-1].key.hex(): (2, 16),
    }
    code, out, _ = pando("pin", (end if given == "the end" else cards[-1]).key.hex()[:12])
    assert code == 0 and out.startswith("pinned 4 pages, ")
    assert {entry.key for entry in disk.entries() if entry.pinned} == {*keys(cards), end.key}


def test_an_index_that_goes_in_a_circle_is_no_endless_list(disk, pando):
    one = card()
    save(disk, one._replace(parent=one.key))
    assert pando("ls", "--pages")[0] == 0
    assert pando("pin", one.key.hex())[1].startswith("pinned 1 page, ")


# --- what cannot be --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["purge"], "say what to remove"),
        (["purge", "--all", "--older-than", "1d"], "say what to remove"),
        (["purge", "--older-than", "soon"], "such as 7d"),
        (["purge", "--tag", "xyz"], "not the beginning of a key"),
        (["pin", "00"], "8 characters or more"),
        (["pin", "0123456789"], "no page has a key"),
        (["pin"], "required: KEY"),
        (["ls", "extra"], "unknown argument"),
        (["dance"], "invalid choice"),
        (["ls", "--disk-dir", "/" + 300 * "x"], "cannot be read (File name too long)"),
        (["ls", "--disk-dir", "/nowhere/at/all"], "nothing is kept in /nowhere/at/all"),
        (["ls", "--disk-dir", "~nobody-at-all/store"], "~nobody-at-all/store begins with a home folder that there is not"),
        (["ls", "--remote", "~nobody-at-all/store"], "~nobody-at-all/store begins with a home folder that there is not"),
    ],
)
def test_a_command_that_cannot_be_is_explained(disk, pando, words, complaint):
    code, out, err = pando(*words)
    assert (code, out) == (2, "") and complaint in err and len(err.splitlines()) == 1


def test_another_directory_may_be_named(tmp_path, clock, told, monkeypatch):
    tier = DiskTier(tmp_path / "elsewhere", SHAPE, clock)
    save(tier, card())
    tier.close()
    assert told("stat", "--disk-dir", tmp_path / "elsewhere")["pages"] == 1
    monkeypatch.setenv("PANDO_DISK_DIR", str(tmp_path / "elsewhere"))
    assert told("stat")["pages"] == 1


def test_the_command_loads_no_torch(disk):
    save(disk, card())
    program = "import sys; from pando import cli; code = cli.main(['cache', 'ls']); sys.exit(code or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("age", "said"), [(0, "0 s"), (59.4, "59 s"), (60, "1 m"), (7200, "2 h"), (3 * DAY, "3 d"), (-5, "0 s")])
def test_ages_are_short(age, said):
    assert age_of(age) == said


@pytest.mark.parametrize(("size", "said"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**20, "1.0 MiB"), (5 * 2**30, "5.0 GiB")])
def test_sizes_are_short(size, said):
    assert size_of(size) == said


@pytest.mark.parametrize(("text", "count"), [("30s", 30), ("5m", 300), ("1.5h", 5400), ("7d", 7 * DAY), ("2w", 14 * DAY)])
def test_ages_are_read(text, count):
    assert seconds(text) == count


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "7 d", "7y"])
def test_what_is_no_age_is_refused(text):
    with pytest.raises(InvalidOption, match="7d"):
        seconds(text)


# --- remotes -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_a_shared_directory_is_looked_at_and_purged_like_any_other(told, tmp_path, form):
    tier = remote_tier(form.format(tmp_path / "shared"), SHAPE)
    save(tier, *salted(b"mine", 2), *chain(3))
    url = form.format(tmp_path / "shared")
    assert told("stat", "--remote", url)["pages"] == 5 and len(told("ls", "--remote", url)["conversations"]) == 2
    assert told("purge", "--tenant", "mine", "--remote", url)["pages"] == 2
    tier.close()


def test_on_a_server_pages_are_counted_and_purged_by_tenant(told, pando, server):  # noqa: F811
    tier = remote_tier(server, SHAPE)
    tier._patient.flushall()
    save(tier, *salted(b"one", 2), *salted(b"two", 3), *chain(1))
    tier._patient.set(tier._value(bytes(32)), "no page")
    stat = told("stat", "--remote", server)
    assert (stat["pages"], stat["bad"], len(stat["tenants"]), len(stat["shapes"])) == (7, 1, 3, 1)
    assert stat["bytes"] == sum(stat["tenants"].values()) == stat["shapes"][0]["bytes"] > 0
    assert told("purge", "--tenant", "two", "--remote", server)["pages"] == 3 + 1, "and what is damaged"
    assert told("purge", "--tag", tenant_tag(b"one").hex()[:12], "--remote", server)["pages"] == 2
    assert told("stat", "--remote", server)["pages"] == 1
    code, out, _ = pando("stat", "--remote", server)
    assert code == 0 and ": 1 page, " in out and "tenant" in out
    assert told("purge", "--all", "--remote", server)["pages"] == 1
    tier.close()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["ls"], "on a server, use `stat` or `purge`"),
        (["verify"], "on a server, use `stat` or `purge`"),
        (["pin", "0123456789"], "on a server, use `stat` or `purge`"),
        (["purge", "--older-than", "7d"], "does not say when a page was used"),
        (["purge"], "say what to remove"),
        (["stat", "--disk-dir", "."], "give only one of them"),
        (["stat"], "the remote cannot be used"),
    ],
)
def test_what_cannot_be_done_on_a_server_is_refused_with_what_can(pando, tmp_path, words, why):
    pytest.importorskip("redis")
    code, out, err = pando(*words, "--remote", f"unix://{tmp_path}/nobody")
    assert (code, out) == (2, "") and why in err


def test_a_remote_of_another_kind_is_refused(pando):
    code, _, err = pando("stat", "--remote", "s3://bucket")
    assert code == 2 and "'s3'" in err and "redis://HOST:6379" in err
