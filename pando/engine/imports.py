"""What stands before a row's own tokens: runs whose states are in the tree, or are still to be made.

A run is found under the root of its context, whole, or not at all. One that is not there is made by a row of its own, which imports the
context, computes the run's tokens, and leaves them to the tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from ..kv.run import Origin, Run, context_digest, context_key
from ..kv.segment import Key, Lineage, Segment, extend_keys
from ..kv.tree import PrefixTree, Stem


@dataclass(frozen=True, eq=False)
class Want:
    """A run to import, and where in the tree its states are."""

    run: Run
    lineage: Lineage
    keys: tuple[Key, ...]  # of its full pages
    passing: bool = False  # needed to make another, and by nobody else: it is not kept
    exact: bool = True  # it was encoded behind what stands before it here

    @property
    def name(self) -> tuple[Key, bytes]:
        """Equal for equal states."""
        return self.lineage.root, self.run.digest


@dataclass(frozen=True, eq=False)
class Import:
    want: Want
    stem: Stem  # its whole pages
    end: Stem | None  # the page that holds the rest of it
    rest: int

    @property
    def pinned(self) -> Stem:
        """Whatever leads to it stays, too."""
        return self.end or self.stem

    def path(self) -> tuple[Segment, ...]:
        return (*self.stem.path(), self.end.segment.head(self.rest)) if self.end is not None else self.stem.path()


def in_place(runs: Sequence[Run]) -> list[Run]:
    """Runs, all of them with an origin: what is computed where it stands has everything before it for a context."""
    found: list[Run] = []
    for run in runs:
        origin = run.origin or Origin(tuple(found), run.position)
        found.append(run if run.origin is not None else Run(run.tokens, run.position, origin))
    return found


def wants(root: Key, runs: Sequence[Run], page_size: int, *, makes: bool = False) -> tuple[Want, ...]:
    """The runs of a tenant's prompt, or of a context that something is made behind: what is computed in place there is only passing."""
    found, ours, before = [], in_place(runs), sha256()
    exact = True
    for given, run in zip(runs, ours, strict=True):
        assert run.origin is not None
        lineage, keys = Lineage.of(context_key(root, run.origin.context, run.origin.first)), list[Key]()
        extend_keys(keys, lineage, run.tokens, page_size)
        same = run.shift == 0 and context_digest(in_place(run.origin.context)) == before.digest()
        exact = exact and same
        found.append(Want(run, lineage, tuple(keys), makes and given.origin is None, exact or given.origin is None))
        before.update(run.digest)
    return tuple(found)


def find(tree: PrefixTree, want: Want, now: float) -> Import | None:
    """The states of a run, pinned, if all of them are there."""
    run = want.run
    assert run.origin is not None
    match = tree.match(want.lineage, want.keys, run.tokens, len(run), now, first=run.origin.first)
    if match.length - run.origin.first < len(run):
        return None
    end = tree.first_page(match.end) if match.end is not None else None
    found = Import(want, match.stem, end, match.tokens)
    tree.pin(found.pinned)
    return found
