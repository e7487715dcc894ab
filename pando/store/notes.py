"""What is remembered beside the pages on disk: small records that outlive the process, and expire as pages do. A hint, like the index."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ..kv.segment import Key
from .disk import DiskTier
from .tier import Tags
from .worker import Worker


class Notes:
    def __init__(self, disk: DiskTier, writer: Worker, tags: Tags, ttl: float | None, clock: Callable[[], float]) -> None:
        self._disk, self._writer, self._tags, self._ttl, self._clock = disk, writer, tags, ttl, clock

    def find(self, keys: Sequence[Key]) -> Mapping[Key, bytes]:
        """What there is under some of these keys. It may be anything: whoever wrote it can tell."""
        return self._disk.notes(keys, self._oldest)

    def keep(self, key: Key, tenant: Key, note: bytes) -> None:
        """`tenant`: the root of what it has, or its tag."""
        self._writer.post(partial(self._disk.note, key, self._tags.of(tenant), note, self._oldest))

    @property
    def _oldest(self) -> float:
        return -math.inf if self._ttl is None else self._clock() - self._ttl
