"""`pando cache`: what is kept on disk or on a remote, looked at, checked and removed. Servers may use it meanwhile. No model is loaded."""

import argparse
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

from .config import UNITS, EngineConfig
from .errors import InvalidOption, counted
from .kv.segment import Key
from .model.shelf import Shelf
from .server.tenants import Tenants
from .store.fileformat import VERSION, Header
from .store.folder import Folder, directory_at
from .store.index import Entry, Kind
from .store.redis_server import RedisServer
from .store.remote import directory_of
from .store.sought import end_parent
from .store.tier import Lost, Shape, tenant_tag

SHOWN = 12  # characters of a key; a command takes as few as LEAST
LEAST = 8
BAD = 1  # the exit code of `verify`, and of what could not be done

Out = Callable[[str], None]


@dataclass(frozen=True)
class Chain:
    """A conversation, from its beginning to one end. Chains that begin alike share pages."""

    last: Entry
    pages: int
    tokens: int
    size: int


def cache(arguments: argparse.Namespace, config: EngineConfig, out: Out = print, now: float | None = None) -> int:
    """Carries out one command; its exit code."""
    directory = directory_at(config.disk_dir) if config.disk_dir is not None else Shelf.of_user().store
    if arguments.remote is not None:
        if arguments.disk_dir is not None:
            raise InvalidOption("--disk-dir and --remote are different places; give only one of them")
        shared = directory_of(arguments.remote)
        if shared is None:
            return _on_server(arguments, config, out)
        directory = shared
    _check_readable(directory)
    with closing(Folder(directory, shared=arguments.remote is not None)) as folder:
        commands = {"ls": _ls, "stat": _stat, "verify": _verify, "purge": _purge, "pin": _pin, "unpin": _pin}
        code, told, lines = commands[arguments.action](folder, arguments, config, time.time() if now is None else now)
    for line in [json.dumps({"directory": str(directory), **told})] if arguments.json else lines:
        out(line)
    return code


def _check_readable(directory: Path) -> None:
    """What may not be looked into is not empty."""
    try:
        os.scandir(directory / f"v{VERSION}").close()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InvalidOption(
            f"nothing is kept in {directory}; name a server's directory with --disk-dir, or a shared one with --remote"
        ) from error
    except OSError as error:
        raise InvalidOption(
            f"{directory} cannot be read ({error.strerror or error}); run the command as whoever runs the server, or name another directory"
        ) from error


Told = tuple[int, dict[str, object], Sequence[str]]  # the exit code, the facts, and how they are shown


def _ls(folder: Folder, arguments: argparse.Namespace, config: EngineConfig, now: float) -> Told:
    entries = _joined(folder.entries())
    chains = _chains(entries) if not arguments.pages else [Chain(entry, 1, entry.tokens, entry.size) for entry in entries]
    chains.sort(key=lambda chain: -chain.last.used)
    facts = [
        {
            **{"key": chain.last.key.hex(), "tenant": chain.last.tenant.hex(), "pages": chain.pages, "tokens": chain.tokens},
            **{"bytes": chain.size, "age": now - chain.last.born, "unused": now - chain.last.used, "pinned": bool(chain.last.pinned)},
        }
        for chain in chains
    ]
    rows = [
        [
            *(chain.last.key.hex()[:SHOWN], chain.last.tenant.hex()[:SHOWN], str(chain.pages), str(chain.tokens), size_of(chain.size)),
            *(age_of(now - chain.last.born), age_of(now - chain.last.used), "pinned" if chain.last.pinned else ""),
        ]
        for chain in chains
    ]
    lines = [*_table(["key", "tenant", "pages", "tokens", "size", "age", "unused", ""], rows), _summary(entries)]
    return 0, {"pages" if arguments.pages else "conversations": facts}, lines


def _stat(folder: Folder, arguments: argparse.Namespace, config: EngineConfig, now: float) -> Told:
    entries, kinds = folder.entries(), folder.index.kinds()
    by_kind, by_tenant = Counter[str](), Counter[bytes]()
    for entry in entries:
        by_kind[entry.shape] += entry.size
        by_tenant[entry.tenant] += entry.size
    shares, shown = _shares([(kinds[name], size) for name, size in by_kind.most_common()], by_tenant)
    told: dict[str, object] = {
        "pages": len(entries),
        "bytes": sum(by_kind.values()),
        "pinned_bytes": sum(entry.size for entry in entries if entry.pinned),
        "oldest": max((now - entry.born for entry in entries), default=0.0),
        "unused": max((now - entry.used for entry in entries), default=0.0),
        **shares,
    }
    return 0, told, [f"{folder.root.parent}: {_summary(entries)}", *(shown if entries else ())]


def _shares(kinds: Sequence[tuple[Kind | Shape, int]], by_tenant: "Counter[bytes]") -> tuple[dict[str, object], list[str]]:
    """The bytes of each kind of page, and of each tenant: as facts, and as they are shown."""
    facts: dict[str, object] = {
        "shapes": [{**asdict(kind), "model": kind.model.hex(), "bytes": size} for kind, size in kinds],
        "tenants": {tenant.hex(): size for tenant, size in by_tenant.most_common()},
    }
    rows = [[kind.model.hex()[:SHOWN], kind.dtype, kind.codec, str(kind.page_size), size_of(size)] for kind, size in kinds]
    whose = [[tenant.hex()[:SHOWN], size_of(size)] for tenant, size in by_tenant.most_common()]
    return facts, ["", *_table(["model", "type", "codec", "tokens in a page", "size"], rows), "", *_table(["tenant", "size"], whose)]


def _verify(folder: Folder, arguments: argparse.Namespace, config: EngineConfig, now: float) -> Told:
    findings = list(folder.verify())
    bad = [finding for finding in findings if finding.lost is not None]
    if arguments.remove:
        folder.remove([finding.name for finding in bad])
    said = f"{counted(len(findings), 'page')}, {size_of(sum(finding.size for finding in findings))}: "
    fate = "removed" if arguments.remove else "computed again when it is needed; --remove removes it now"
    lines = [f"{finding.name[1].hex()[:SHOWN]}  {finding.lost}" for finding in bad]
    facts = [{"key": finding.name[1].hex(), "reason": finding.lost.reason} for finding in bad if finding.lost]
    told: dict[str, object] = {"pages": len(findings), "bytes": sum(finding.size for finding in findings), "bad": facts}
    return BAD if bad else 0, told, [*lines, said + (f"{len(bad)} bad; what is bad is {fate}" if bad else "all of them are sound")]


def _purge(folder: Folder, arguments: argparse.Namespace, config: EngineConfig, now: float) -> Told:
    _check_choice(arguments)
    where, values = ("1", []) if arguments.all else _condition(arguments, config, now)
    # of all, also those that no index can have
    names = list(folder.files()) if arguments.all else [(entry.shape, entry.key) for entry in folder.entries(where, values)]
    before = {name: folder.size(name) for name in names}
    removed = folder.purge(names, where, values)
    size = sum(before.values()) - sum(map(folder.size, names))
    return _done(folder, f"removed {counted(removed, 'page')}, {size_of(size)}", {"pages": removed, "bytes": size})


def _done(folder: Folder, said: str, facts: dict[str, object]) -> Told:
    """Whoever removes what must not stay has to know where it does."""
    lines = [f"not all could be done, run it again: {failure}" for failure in folder.failures]
    return BAD if lines else 0, {**facts, "failures": folder.failures}, [said, *lines]


def _check_choice(arguments: argparse.Namespace) -> None:
    chosen = [arguments.tenant, arguments.api_key, arguments.tag, arguments.older_than]
    if arguments.all == any(value is not None for value in chosen):
        raise InvalidOption("say what to remove: --tenant SALT, --api-key KEY, --tag TAG or --older-than AGE, or --all")


def _condition(arguments: argparse.Namespace, config: EngineConfig, now: float) -> tuple[str, list[object]]:
    """Of everything that was asked for, in SQL."""
    parts, values = list[str](), list[object]()
    if arguments.tenant is not None or arguments.api_key is not None:
        tags = _tags(arguments.tenant or "", arguments.api_key, config.cache_salt)
        parts.append(f"tenant IN ({', '.join('?' for _ in tags)})")
        values += tags
    if arguments.tag is not None:
        parts.append("hex(tenant) LIKE ?")
        values.append(_beginning(arguments.tag).upper() + "%")
    if arguments.older_than is not None:
        parts.append("used < ? AND NOT pinned")
        values.append(now - seconds(arguments.older_than))
    return " AND ".join(parts), values


def _tags(salt: str, api_key: str | None, server_salt: str) -> list[bytes]:
    """What a tenant is called: by a server, to whom the key and the salts matter, and without a key also by the library."""
    tenants = Tenants([] if api_key is None else [api_key], server_salt)
    served = tenant_tag(tenants.tenant(tenants.owners[0], salt).salt)
    return [served] if api_key is not None else [served, tenant_tag(salt.encode(errors="surrogatepass"))]


def _pin(folder: Folder, arguments: argparse.Namespace, config: EngineConfig, now: float) -> Told:
    by_name = {(entry.shape, entry.key): entry for entry in _joined(folder.entries())}
    chosen: dict[tuple[str, Key], Entry] = {}
    for word in arguments.keys:
        beginning = _beginning(word)
        found = [entry for entry in by_name.values() if entry.key.hex().startswith(beginning)]
        if not found:
            raise InvalidOption(f"no page has a key that begins with {word}; `pando cache ls` shows them")
        for entry in found:
            ends = [one for one in by_name.values() if (one.shape, one.parent) == (entry.shape, entry.key) and one.tokens < entry.tokens]
            chosen |= {(one.shape, one.key): one for one in (*_back(entry, by_name), *ends)}
    pinned = arguments.action == "pin"
    folder.pin(chosen, pinned)
    changed = [entry for entry in chosen.values() if pinned or entry.pinned]
    size = sum(entry.size for entry in changed)
    said = f"{arguments.action}ned {counted(len(changed), 'page')}, {size_of(size)}" if changed else "none of these pages was pinned"
    return _done(folder, said, {"pages": len(changed), "bytes": size})


# ---- a server that speaks Redis' protocol


def _on_server(arguments: argparse.Namespace, config: EngineConfig, out: Out) -> int:
    """It has no index: what is there is found by looking at everything, and when it was used nobody knows but the server."""
    if arguments.action not in ("stat", "purge"):
        raise InvalidOption(f"`pando cache {arguments.action}` works only on directories; on a server, use `stat` or `purge`")
    with closing(RedisServer(arguments.remote)) as server:
        try:
            told, lines = _stat_server(server) if arguments.action == "stat" else _purge_server(server, arguments, config)
        except Lost as lost:
            raise InvalidOption(f"the remote cannot be used ({lost}); check that it is running, and that the address is right") from lost
    for line in [json.dumps({"server": server.place, **told})] if arguments.json else lines:
        out(line)
    return 0


def _stat_server(server: RedisServer) -> tuple[dict[str, object], Sequence[str]]:
    by_kind, by_tenant, pages, bad = Counter[Shape](), Counter[bytes](), 0, 0
    for _, size, header in (each for some in server.pages() for each in some):
        pages, bad = pages + 1, bad + (header is None)
        if header is not None:
            by_kind[header.shape] += size
            by_tenant[header.card.tenant] += size
    total = sum(by_kind.values())
    shares, shown = _shares(by_kind.most_common(), by_tenant)
    said = f"{server.place}: {counted(pages, 'page')}, {size_of(total)}" + (f", {bad} of them damaged" if bad else "")
    return {"pages": pages, "bytes": total, "bad": bad, **shares}, [said, *(shown if pages > bad else ())]


def _purge_server(server: RedisServer, arguments: argparse.Namespace, config: EngineConfig) -> tuple[dict[str, object], Sequence[str]]:
    if arguments.older_than is not None:
        raise InvalidOption("a server does not say when a page was used; give a --ttl when pages are saved, or purge by tenant")
    _check_choice(arguments)
    names = (
        _tags(arguments.tenant or "", arguments.api_key, config.cache_salt)
        if (arguments.tenant, arguments.api_key) != (None, None)
        else None
    )
    beginning = "" if arguments.tag is None else _beginning(arguments.tag)

    def chosen(header: Header | None) -> bool:
        """What is damaged is of no use to anybody, and nobody knows whose it is."""
        if header is None or arguments.all:
            return True
        return (names is None or header.card.tenant in names) and header.card.tenant.hex().startswith(beginning)

    pages, size = server.remove(chosen)
    return {"pages": pages, "bytes": size}, [f"removed {counted(pages, 'page')}, {size_of(size)}"]


# ---- chains


def _chains(entries: Sequence[Entry]) -> list[Chain]:
    """One for each page that no other follows."""
    by_name = {(entry.shape, entry.key): entry for entry in entries}
    followed = {(entry.shape, entry.parent) for entry in entries}
    chains = []
    for name, entry in by_name.items():
        if name not in followed:
            pages = list(_back(entry, by_name))
            chains.append(Chain(entry, len(pages), sum(page.tokens for page in pages), sum(page.size for page in pages)))
    return chains


def _joined(entries: Sequence[Entry]) -> list[Entry]:
    """The same, each unfilled page with the page before it as its parent: it is kept under that page and whose it is. Where that is not the
    beginning of its chain, since it begins with what all tenants share, it stays alone."""
    by_name = {(entry.shape, entry.key): entry for entry in entries}
    roots: dict[tuple[str, Key], Key] = {}  # where the chain of each page begins
    for entry in entries:
        path = list(takewhile(lambda one: (one.shape, one.key) not in roots, _back(entry, by_name)))
        if path:
            before = path[-1].shape, path[-1].parent
            roots.update(dict.fromkeys([(one.shape, one.key) for one in path], roots.get(before, before[1])))
    pages = {(shape, end_parent(key, root)): key for (shape, key), root in roots.items()}
    return [entry._replace(parent=pages.get((entry.shape, entry.parent), entry.parent)) for entry in entries]


def _back(entry: Entry, by_name: dict[tuple[str, Key], Entry]) -> Iterator[Entry]:
    """A page and those before it, as far as they are here. A damaged index may say that they go in a circle."""
    seen = set[Key]()
    found: Entry | None = entry
    while found is not None and found.key not in seen:
        yield found
        seen.add(found.key)
        found = by_name.get((found.shape, found.parent))


# ---- words and numbers


def _summary(entries: Sequence[Entry]) -> str:
    pinned = sum(entry.size for entry in entries if entry.pinned)
    return f"{counted(len(entries), 'page')}, {size_of(sum(entry.size for entry in entries))}" + (
        f", {size_of(pinned)} of it pinned" if pinned else ""
    )


def _beginning(word: str) -> str:
    if re.fullmatch(f"[0-9a-fA-F]{{{LEAST},64}}", word) is None:
        raise InvalidOption(f"{word!r} is not the beginning of a key; give {LEAST} characters or more of one that `pando cache ls` shows")
    return word.lower()


def seconds(age: str) -> float:
    if (found := re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", age)) is None:
        raise InvalidOption(f"--older-than is {age!r}; write a number and one of s, m, h, d, w, such as 7d")
    return float(found[1]) * UNITS[found[2]]


def size_of(count: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def age_of(age: float) -> str:
    for unit in ("d", "h", "m"):
        if age >= UNITS[unit]:
            return f"{age / UNITS[unit]:.0f} {unit}"
    return f"{max(age, 0):.0f} s"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
