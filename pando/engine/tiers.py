"""The store of an engine: which tiers there are, how large, and what is in them at the start."""

import gc
import hashlib
import logging
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from ..config import EngineConfig
from ..errors import InvalidOption
from ..kv.pool import PagePool
from ..kv.segment import Key
from ..model.load import Model
from ..model.memory import free_memory
from ..model.shelf import Shelf
from ..store.codec import codec
from ..store.disk import DiskTier
from ..store.fileformat import file_size
from ..store.folder import directory_at, try_directory
from ..store.host import HostTier
from ..store.index import Entry
from ..store.ledger import Ledger, Page
from ..store.movers import mover_of
from ..store.policy import POLICIES
from ..store.remote import remote_tier
from ..store.scout import Scout
from ..store.store import Store
from ..store.tier import Shape, Tier
from ..store.transfer import Transfer
from ..store.worker import tried

log = logging.getLogger(__name__)
_CPU = torch.device("cpu")

BUFFER = 16  # pages that may be on their way out of the pool
HOST_SHARE, HOST_MOST = 0.25, 16 * 2**30  # of the free memory, beside a GPU: pinning that much takes some seconds
DISK_SHARE, DISK_MOST = 0.1, 32 * 2**30  # of what is free, or the directory's own
SWITCH = 0.0002  # seconds that one thread may keep Python from the others: the one that asks for copies must not wait for a plan
YOUNG = 10_000  # objects that are made before Python looks through them for garbage: prompts are among them, with all their tokens
GIB = 2**30


def open_store(model: Model, config: EngineConfig, pool: PagePool) -> Store | None:
    """None where nothing below the pool is wanted, or nothing is reused at all."""
    if not config.prefix_caching:
        return None
    shape, packed = shape_of(model, config), codec(config.store_codec)
    layer_bytes = packed.layer_bytes(shape, shape.page_size)
    page_bytes = shape.layers * layer_bytes
    file_bytes = file_size(shape.page_size, shape, layer_bytes)
    disk, disk_bytes = _disk(config, shape, file_bytes)
    host_pages = _host_bytes(model, config) // page_bytes
    if not host_pages and disk is None and config.remote is None:
        return None
    below, capacities = list[Tier](), {"host": max(host_pages, 2 * BUFFER) * page_bytes}
    passing = 2 * BUFFER  # pages beside these: of what host memory does not keep, or of which it is not known yet
    if disk is not None:
        below.append(disk)
    if disk is not None and not disk.is_full:
        disk.make_room(disk_bytes, ())
        capacities["disk"] = disk_bytes // file_bytes * page_bytes  # so many whole files
    remote = remote_tier(config.remote, shape, config.ttl or None) if config.remote is not None else None
    host = HostTier(shape, max(host_pages, 2 * BUFFER) + passing, layer_bytes, pinned=model.device.type == "cuda")
    ledger = Ledger(capacities, POLICIES[config.policy], float(config.ttl) if config.ttl else None)
    scout = Scout(remote, ledger, shape.page_size) if remote is not None else None
    below += [scout] if scout is not None else []
    if disk is not None and not disk.is_full:
        _enter(ledger, disk, page_bytes, time.time())
    sizes = ", ".join(f"{name} {size / GIB:.{1 if size >= GIB else 3}f} GiB" for name, size in capacities.items())
    where = f" in {_directory(config)}" if disk is not None else ""
    log.info("cached context outlives the pool: %s%s%s", sizes, where, f", and what {remote.place} holds" if remote is not None else "")
    if remote is not None and (lost := tried(remote.reach)) is not None:
        log.warning("the remote cannot be reached now, and is asked again when something is looked for: %s", lost)
    if model.device.type == "cuda":
        sys.setswitchinterval(min(SWITCH, sys.getswitchinterval()))
        gc.set_threshold(max(YOUNG, gc.get_threshold()[0]), *gc.get_threshold()[1:])
    transfer = Transfer(shape, packed, mover_of(pool, shape, packed), host, below, reserve=passing)
    touches = [tier.touch for tier in (disk, remote) if tier is not None]
    return Store(transfer, ledger, below, buffer=BUFFER, disk=disk, bound=disk_bytes, touches=touches, scout=scout)


def shape_of(model: Model, config: EngineConfig) -> Shape:
    facts, named = model.config, hashlib.sha256(model.digest).digest()
    kind = str(model.states).removeprefix("torch.")
    return Shape(named, facts.layers, facts.kv_heads, facts.head_dim, kind, config.page_size, config.store_codec)


def _host_bytes(model: Model, config: EngineConfig) -> int:
    """Beside a GPU, a part of the memory. On a CPU the pool is in host memory itself, and a second copy there would keep nothing longer."""
    if config.host_gib is not None:
        return int(config.host_gib * GIB)
    if model.device.type == "cpu":
        return 0
    return min(int(HOST_SHARE * free_memory(_CPU)), HOST_MOST)


def _disk(config: EngineConfig, shape: Shape, file_bytes: int) -> tuple[DiskTier | None, int]:
    """The tier, if there is one, and its bound in bytes."""
    if config.disk_gib is None:
        return _disk_as_it_fits(_directory(config), shape, file_bytes)
    size = int(config.disk_gib * GIB)
    if 0 < size < file_bytes:
        raise InvalidOption(
            f"disk_gib is {config.disk_gib:g} and one page of {config.page_size} tokens takes {file_bytes / GIB:.3f} GiB; "
            "raise it to hold at least some pages, or give 0 for no disk"
        )
    if not size:
        return None, 0
    directory = _directory(config)
    try:
        try_directory(directory)
    except OSError as error:
        raise InvalidOption(
            f"disk_dir is {directory}, and no file can be made there ({error.strerror or error}); "
            "give the right to write there, choose another, or give 0 as disk_gib for no disk"
        ) from error
    return DiskTier(directory, shape), size


def _disk_as_it_fits(directory: Path, shape: Shape, file_bytes: int) -> tuple[DiskTier | None, int]:
    """A part of what is free, or held already: so the bound does not shrink as the directory fills. Where that is less than a page, what is
    there is read all the same."""
    try:
        try_directory(directory)
        free = shutil.disk_usage(directory).free
    except OSError as error:
        log.warning("no context is kept on disk: %s cannot be used (%s); choose another --disk-dir", directory, error.strerror or error)
        return None, 0
    disk = DiskTier(directory, shape)
    size = min(int(DISK_SHARE * (free + disk.size)), DISK_MOST)
    disk.is_full = size < file_bytes
    if disk.is_full:
        log.warning(
            "no more context is kept on disk: %d bytes are free at %s, and a tenth of that is less than a page of %d; "
            "what is there is read. Make room, choose another --disk-dir, or say with --disk-gib how much it may take",
            *(free, directory, file_bytes),
        )
    return disk, size


def _directory(config: EngineConfig) -> Path:
    return directory_at(config.disk_dir) if config.disk_dir is not None else Shelf.of_user().store


def _enter(ledger: Ledger, disk: DiskTier, page_bytes: int, now: float) -> None:
    """What is on disk is known to the ledger from the start; what it has no room for, or nobody used for too long, goes. Payloads are not
    read."""
    entries = {entry.key: entry for entry in disk.entries()}
    ledger.pin(entry.key for entry in entries.values() if entry.pinned)
    places = _places(entries)
    for key in sorted(places, key=places.__getitem__):
        used, depth = places[key]
        ledger.restore("disk", Page(key, page_bytes), -depth, used)
    ledger.expire(now)
    disk.drop([key for key, entry in entries.items() if not entry.pinned and not ledger.find([key])])


def _places(entries: Mapping[Key, Entry]) -> dict[Key, tuple[float, int]]:
    """When each page was used, and its depth in its chain, negated: in this order ends go first. The index has when a page was written; who
    used it used those before it, too. Entries are given least recently used first."""
    places: dict[Key, tuple[float, int]] = {}
    for entry in reversed(list(entries.values())):
        path, key = list[Key](), entry.key
        while key in entries and key not in places:
            places[key] = entry.used, 0  # from now on it is known: a damaged index may lead in circles
            path.append(key)
            key = entries[key].parent
        depth = 1 - places[key][1] if key in places else 0
        for number, key in enumerate(reversed(path), depth):
            places[key] = entry.used, -number
    return places
