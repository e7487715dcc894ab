"""What the tiers below the pool keep, and how they are asked.

They keep pages: the K and V of whole pages, and of the short end of a sequence, each under the key that the tree has for it. Keys are
chained, so a page has the same key in every conversation that contains it, and is kept once. A payload is layer-major, so that layer 0 can
be used while layer 1 is on its way.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from ..kv.latest import Latest
from ..kv.segment import Key

Reason = Literal["absent", "expired", "short", "corrupt", "foreign", "version", "unreadable", "late", "full"]


ENDS = 32  # short ends that are looked at behind one page
NAMED = 2**16  # tenants, the latest: clients choose salts, and may choose many


class Lost(Exception):
    """What was looked for cannot be had, and why: the caller computes it. Never the fault of a request."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason: Reason = reason


class NoRoom(Lost):
    """The place itself is full, whatever its bound: the page could be kept if others went."""

    def __init__(self, detail: str) -> None:
        super().__init__("full", detail)
        self.there = 0  # bytes of pages


@dataclass(frozen=True)
class Shape:
    """What a kept page must have in common with the pool that takes it."""

    model: bytes  # its digest, 32 bytes
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str  # of the pool, as torch names it: float32, bfloat16, float16, float8_e4m3fn
    page_size: int
    codec: str = "none"


class Card(NamedTuple):
    """What is known of a kept page besides its bytes."""

    key: Key
    parent: Key  # the key of the page before it, or of the root: short ends are found by it
    tenant: bytes  # 32 bytes: whose it is, so that it can be purged
    tokens: tuple[int, ...]  # a full page of them, or less at the end of a sequence


def tenant_tag(salt: bytes) -> bytes:
    """What a tenant is called in the tiers, whatever the model."""
    return hashlib.sha256(b"tenant" + salt).digest()


class Tags:
    """What tenants are called, by the roots of what they have: pages are kept under these names, by which they can be purged."""

    def __init__(self) -> None:
        self._tags = Latest[Key, bytes](NAMED)

    def name(self, tenant: Key, salt: bytes) -> None:
        self._tags[tenant] = tenant_tag(salt)
        self._tags.move_to_end(tenant)

    def of(self, tenant: Key) -> bytes:
        return self._tags.get(tenant, tenant)


class Ends:
    """Short ends by the page that they continue, the latest: whatever begins with one system prompt has one behind it, and each is compared
    with a prompt."""

    def __init__(self) -> None:
        self._behind: dict[Key, dict[Key, Card]] = {}

    def add(self, card: Card) -> None:
        mine = self._behind.setdefault(card.parent, {})
        mine[card.key] = card
        if len(mine) > ENDS:
            del mine[next(iter(mine))]

    def drop(self, parent: Key, key: Key) -> None:
        """If it is one of them."""
        mine = self._behind.get(parent, {})
        if mine.pop(key, None) and not mine:
            del self._behind[parent]

    def get(self, parent: Key, key: Key) -> Card | None:
        return self._behind.get(parent, {}).get(key)

    def behind(self, parent: Key) -> Sequence[Card]:
        return list(self._behind.get(parent, {}).values())


class Reader(Protocol):
    """One kept page, open for reading."""

    card: Card

    def layer(self, index: int, into: memoryview) -> None:
        """Fills the buffer with one layer's bytes, which agree with their checksum; raises Lost."""
        ...

    def close(self) -> None: ...


class Tier(Protocol):
    """Every method may be called from any thread. None of them raises anything but Lost."""

    name: str

    def look(self, keys: Sequence[Key]) -> int:
        """How many of these, from the first on, it has."""
        ...

    def ends(self, parent: Key) -> Sequence[Card]:
        """The short ends that continue a page."""
        ...

    def open(self, key: Key) -> Reader:
        """Raises Lost."""
        ...

    def save(self, card: Card, layers: Sequence[memoryview]) -> None:
        """Keeps a page, unless it is there already; raises Lost where that cannot be. The buffers are the caller's again afterwards."""
        ...

    def drop(self, keys: Sequence[Key]) -> None: ...

    def close(self) -> None: ...
