"""What a prompt is made of: runs of tokens, each at its place.

Some runs bring an origin: they were, or will be, encoded elsewhere, behind a context of their own, and their states are reused wherever
they stand. The others are new and are computed where they stand, behind everything that stands before them. So a prefix hit, a module, an
argument and the words of a user are all runs, and a context is a list of them, too.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .segment import Key


@dataclass(frozen=True, eq=False)
class Origin:
    """How the states of a run are made: behind which runs, and at which position."""

    context: tuple["Run", ...]
    first: int


@dataclass(frozen=True, eq=False)
class Run:
    tokens: tuple[int, ...]
    position: int  # of its first token, in the prompt or context that it stands in
    origin: Origin | None = None  # None: it is computed where it stands

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        return self.position + len(self.tokens)

    @property
    def shift(self) -> int:
        """How far it stands behind where it was encoded."""
        return 0 if self.origin is None else self.position - self.origin.first

    @property
    def is_plain(self) -> bool:
        """The beginning of a prompt, as any other."""
        return self.position == 0 and (self.origin is None or not (self.origin.context or self.origin.first))

    def moved(self, position: int) -> "Run":
        return Run(self.tokens, position, self.origin)

    @cached_property
    def digest(self) -> bytes:
        """Names the tokens, where they stand, and where they come from."""
        made = b"" if self.origin is None else context_digest(self.origin.context) + self.origin.first.to_bytes(8, "little")
        facts = (made, array("i", self.tokens).tobytes(), self.position.to_bytes(8, "little"))
        return hashlib.sha256(b"".join(len(fact).to_bytes(8, "little") + fact for fact in facts)).digest()


def context_digest(runs: Sequence[Run]) -> bytes:
    return hashlib.sha256(b"".join(run.digest for run in runs)).digest()


def context_key(root: Key, runs: Sequence[Run], first: int) -> Key:
    """The root of whatever is computed behind these runs from a position on. Behind nothing, from the start, it is the tenant's own."""
    if not runs and not first:
        return root
    return hashlib.sha256(b"context" + root + context_digest(runs) + first.to_bytes(8, "little")).digest()
