"""What stands before a row's own tokens: runs whose states are in the tree, or are still to be made.

A run is found behind the key that it begins at, whole, or not at all: at the root of its context, or behind a part of a longer run that is
not wanted. One that is not there comes up from below the pool, as it is. If it is not kept there either, it is made by a row of its own,
which imports the context, computes the run's tokens, and leaves them to the tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING

from ..kv.pages import Pages
from ..kv.run import Origin, Run, in_place
from ..kv.segment import Key, Lineage, Segment
from ..kv.stem import Stem
from ..kv.tree import PrefixTree

if TYPE_CHECKING:
    from ..store.transfer import Load


@dataclass(frozen=True, eq=False)
class Want:
    """A run to import, and where in the tree its states are."""

    run: Run
    lineage: Lineage  # from where on it is found
    keys: tuple[Key, ...]  # of its full pages
    context: Lineage  # from where on it is made
    passing: bool  # needed to make another, and by nobody else: it is not kept
    exact: bool  # it was encoded behind what stands before it here
    is_new: bool  # text of the prompt: nobody could have expected it to be there
    is_end: bool = False  # nothing follows it: its last token is computed with the row, which must answer it, and not read

    def __len__(self) -> int:
        """The tokens that are read."""
        return len(self.run.tokens) - self.is_end

    @property
    def end(self) -> int:
        return self.run.end - self.is_end

    @property
    def origin(self) -> Origin:
        assert self.run.origin is not None
        return self.run.origin

    @property
    def path(self) -> tuple[int, ...]:
        """The tokens by which it is made: its own, behind those that are not wanted here."""
        return (*self.origin.before, *self.run.tokens)

    @cached_property
    def name(self) -> tuple[Key, bytes]:
        """Equal for equal states, wherever they are read. Rows that wait for one another ask for it again and again."""
        return self.lineage.root + self.lineage.owner, self.run.tokens_digest


@dataclass(frozen=True, eq=False)
class Import:
    want: Want
    stem: Stem  # its whole pages
    end: Stem | None  # the page that holds the rest of it
    rest: int
    coming: tuple[Segment, ...] = ()  # or its pages behind the stem: another row makes or brings them, and has them until the tree does
    load: "Load | None" = None  # by which they come, if they are not computed
    counts: bool = False  # as found by the row that reads them, which is not told yet from which tiers they come

    @property
    def pinned(self) -> Stem:
        """Whatever leads to it stays, too."""
        return self.end or self.stem

    def path(self) -> tuple[Segment, ...]:
        found = self.stem.path(self.want.origin.first)
        return (*found, self.end.segment.head(self.rest)) if self.end is not None else (*found, *self.coming) if self.coming else found


def wants(
    root: Key, runs: Sequence[Run], page_size: int, *, plain: Lineage | None = None, makes: bool = False, ends: bool = False
) -> tuple[Want, ...]:
    """The runs of a tenant's prompt, or of a context that something is made behind: what is computed in place there is only passing.
    `plain`: whose the beginning of the prompt is, if not the tenant's alone. `ends`: the prompt ends with the last of them."""
    found, ours, before = [], in_place(runs), sha256()
    exact = True
    for given, run in zip(runs, ours, strict=True):
        assert run.origin is not None
        behind = run.origin.key(root)
        context = plain if plain is not None and behind == root else Lineage.of(behind)
        keys = run.keys(context, page_size)
        skipped = len(run.origin.before) // page_size
        lineage = Lineage(keys[skipped - 1], context.owner) if skipped else context
        exact = exact and run.shift == 0 and not run.origin.before and run.origin.placed_digest == before.digest()
        if exact:
            before.update(run.digest)
        is_new = given.origin is None
        found.append(Want(run, lineage, keys[skipped:], context, makes and is_new, exact or is_new, is_new))
    return (*found[:-1], replace(found[-1], is_end=True)) if ends else tuple(found)


def pages_of(runs: Sequence[Run], pages: Pages) -> int:
    """What runs take, and the contexts that they are made behind: all of it may be needed at once."""
    found, stack, count = set[Run](), list(runs), 0
    while stack:
        run = stack.pop()
        if run not in found:
            found.add(run)
            origin = run.origin
            stack += () if origin is None else origin.context
            count += pages.needed(len(run.tokens) + 1 + (0 if origin is None else len(origin.before)))
    return count


def find(tree: PrefixTree, want: Want, now: float) -> Import | None:
    """The states of a run, pinned, if all of them are there."""
    tokens, first = want.run.tokens, want.origin.first
    if not want.is_end and len(want.keys) * tree.page_size == len(tokens):
        stem = tree.ending(want.lineage.root, want.keys[-1], now)
        if stem is not None:
            tree.pin(stem)
            return Import(want, stem, None, 0)
    if tokens and not tree.knows(want.lineage.root):
        return None
    match = tree.match(want.lineage, want.keys, tokens, len(tokens), now, first=first)
    if match.length - first < len(tokens):
        tree.forget_bare(match.stem)
        return None
    if want.is_end:
        match = tree.match(want.lineage, want.keys, tokens, len(tokens) - 1, now, first=first)
    end = tree.first_page(match.end) if match.end is not None else None
    found = Import(want, match.stem, end, match.tokens)
    tree.pin(found.pinned)
    return found
