"""`pando cache`: what is kept on disk, looked at, checked and removed. Servers may use the directory meanwhile. No model is loaded."""

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from .config import EngineConfig
from .errors import InvalidOption
from .kv.segment import Key
from .model.shelf import Shelf
from .server.tenants import Tenants
from .store.folder import Folder
from .store.index import Entry
from .store.tier import tenant_tag

SHOWN = 12  # characters of a key; a command takes as few as LEAST
LEAST = 8
BAD = 1  # the exit code of `verify`
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

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
    directory = Path(config.disk_dir).expanduser() if config.disk_dir is not None else Shelf.of_user().store
    if not directory.is_dir():
        raise InvalidOption(f"nothing is kept in {directory}; name the directory of a server with --disk-dir")
    with closing(Folder(directory)) as folder:
        commands = {"ls": _ls, "stat": _stat, "verify": _verify, "purge": _purge, "pin": _pin, "unpin": _pin}
        code, told, lines = commands[arguments.action](folder, arguments, config, time.time() if now is None else now)
    for line in [json.dumps({"directory": str(directory), **told})] if arguments.json else lines:
        out(line)
    return code


Told = tuple[int, dict[str, object], Sequence[str]]  # the exit code, the facts, and how they are shown


def _ls(folder: Folder, arguments: argparse.Namespace, config: EngineConfig, now: float) -> Told:
    entries = folder.entries()
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
    told: dict[str, object] = {
        "pages": len(entries),
        "bytes": sum(by_kind.values()),
        "pinned_bytes": sum(entry.size for entry in entries if entry.pinned),
        "oldest": max((now - entry.born for entry in entries), default=0.0),
        "unused": max((now - entry.used for entry in entries), default=0.0),
        "shapes": [{**asdict(kinds[kind]), "model": kinds[kind].model.hex(), "bytes": size} for kind, size in by_kind.most_common()],
        "tenants": {tenant.hex(): size for tenant, size in by_tenant.most_common()},
    }
    rows = [
        [kinds[kind].model.hex()[:SHOWN], kinds[kind].dtype, kinds[kind].codec, str(kinds[kind].page_size), size_of(size)]
        for kind, size in by_kind.most_common()
    ]
    whose = [[tenant.hex()[:SHOWN], size_of(size)] for tenant, size in by_tenant.most_common()]
    lines = [
        *(f"{folder.root.parent}: {_summary(entries)}", ""),
        *(*_table(["model", "type", "codec", "tokens in a page", "size"], rows), "", *_table(["tenant", "size"], whose)),
    ]
    return 0, told, lines if entries else lines[:1]


def _verify(folder: Folder, arguments: argparse.Namespace, config: EngineConfig, now: float) -> Told:
    findings = list(folder.verify())
    bad = [finding for finding in findings if finding.lost is not None]
    if arguments.remove:
        folder.remove([finding.name for finding in bad])
    said = f"{len(findings)} pages, {size_of(sum(finding.size for finding in findings))}: "
    fate = "removed" if arguments.remove else "computed again when it is needed; --remove takes it away now"
    lines = [f"{finding.name[1].hex()[:SHOWN]}  {finding.lost}" for finding in bad]
    facts = [{"key": finding.name[1].hex(), "reason": finding.lost.reason} for finding in bad if finding.lost]
    told: dict[str, object] = {"pages": len(findings), "bytes": sum(finding.size for finding in findings), "bad": facts}
    return BAD if bad else 0, told, [*lines, said + (f"{len(bad)} bad; what is bad is {fate}" if bad else "all of them are sound")]


def _purge(folder: Folder, arguments: argparse.Namespace, config: EngineConfig, now: float) -> Told:
    chosen = [arguments.tenant, arguments.api_key, arguments.tag, arguments.older_than]
    if arguments.all == any(value is not None for value in chosen):
        raise InvalidOption("say what to remove: --tenant SALT, --api-key KEY, --tag TAG or --older-than AGE, or --all")
    before = folder.index.size()
    if arguments.all:
        names = list(folder.files())  # also those that no index can have
        folder.forget()
    else:
        where, values = _condition(arguments, config, now)
        names = [(entry.shape, entry.key) for entry in folder.entries(where, values)]
        folder.forget(where, values)
    removed = folder.purge(names)
    size = before - folder.index.size()
    return 0, {"pages": removed, "bytes": size}, [f"removed {removed} pages, {size_of(size)}"]


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
    by_name = {(entry.shape, entry.key): entry for entry in folder.entries()}
    chosen: dict[tuple[str, Key], Entry] = {}
    for word in arguments.keys:
        beginning = _beginning(word)
        found = [entry for entry in by_name.values() if entry.key.hex().startswith(beginning)]
        if not found:
            raise InvalidOption(f"no page has a key that begins with {word}; `pando cache ls` shows them")
        for entry in found:
            chosen |= {(one.shape, one.key): one for one in _back(entry, by_name)}
    folder.pin(chosen, arguments.action == "pin")
    size = sum(entry.size for entry in chosen.values())
    return 0, {"pages": len(chosen), "bytes": size}, [f"{arguments.action}ned {len(chosen)} pages, {size_of(size)}"]


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
    return f"{len(entries)} pages, {size_of(sum(entry.size for entry in entries))}" + (
        f", {size_of(pinned)} of it pinned" if pinned else ""
    )


def _beginning(word: str) -> str:
    if re.fullmatch(f"[0-9a-fA-F]{{{LEAST},64}}", word) is None:
        raise InvalidOption(f"{word!r} is no beginning of a key: give {LEAST} characters or more, as `pando cache ls` shows them")
    return word.lower()


def seconds(age: str) -> float:
    if (found := re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", age)) is None:
        raise InvalidOption(f"--older-than is {age!r}; write a number and one of s, m, h, d, w, such as 7d")
    return float(found[1]) * SECONDS[found[2]]


def size_of(count: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def age_of(age: float) -> str:
    for unit in ("d", "h", "m"):
        if age >= SECONDS[unit]:
            return f"{age / SECONDS[unit]:.0f} {unit}"
    return f"{max(age, 0):.0f} s"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
