"""The prefix tree: what has been computed, found again by its tokens.

A stem is a segment's place in the tree. Stems are whole pages long, so a request shares them without copying; only what is left of a
sequence at its end, less than a page, hangs there as a last short stem, whose slots a later request copies. Rows pin the deepest stem on
their path. Eviction takes leaves only, so what leads to a pinned stem is safe without a count of its own.

Whole pages are found by their keys, which name the tenant. What is found by comparing tokens, a part of a page, is looked for only in stems
of the same owner, or of the root's, which is everyone's.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from .segment import Key, Lineage, Segment, page_key, shared_length

REMEMBERED = 2**16  # keys of pages that were evicted: to tell a loss from something new


class Stem:
    __slots__ = ("_alike", "_path", "born", "children", "held", "owner", "parent", "pins", "segment", "used")

    def __init__(self, segment: Segment, parent: "Stem | None", owner: Key, now: float) -> None:
        self.segment = segment
        self.parent = parent
        self.owner = owner
        self.children: dict[Key, Stem] = {}  # by the key of their first page
        self._alike: dict[int, dict[Key, Stem]] = {}  # the same, by their first token: there may be thousands behind a system prompt
        self.pins = 0
        self.held = 0  # why it must stay: it is pinned, and each child that must stay counts as well
        self.born = self.used = now
        self._path: tuple[Segment, ...] | None = None

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.segment.first + len(self.segment)

    def adopt(self, child: "Stem") -> None:
        key = child.segment.keys[0]
        self.children[key] = self._alike.setdefault(child.segment.tokens[0], {})[key] = child

    def disown(self, child: "Stem") -> None:
        key, first = child.segment.keys[0], child.segment.tokens[0]
        del self.children[key], self._alike[first][key]
        if not self._alike[first]:
            del self._alike[first]

    def beginning(self, token: int) -> list["Stem"]:
        """The children that begin with a token."""
        return list(self._alike.get(token, {}).values())

    def path(self) -> tuple[Segment, ...]:
        """From the first segment below the root to this one: the same tuple until one of them is another."""
        if self._path is None:
            found: list[Segment] = []
            stem = self
            while stem.parent is not None:
                found.append(stem.segment)
                stem = stem.parent
            self._path = tuple(found[::-1])
        return self._path

    def change(self, segment: Segment) -> None:
        """Takes another segment in its place. Whoever reads this stem, or one below it, reads other segments from now on."""
        self.segment = segment
        stack = [self]
        while stack:
            stem = stack.pop()
            stem._path = None
            stack.extend(stem.children.values())


@dataclass(frozen=True)
class Match:
    stem: Stem  # whole pages up to its end are shared
    end: Stem | None = None  # and the first page of this one holds `tokens` more, to be copied
    tokens: int = 0
    diverges: bool = False  # what is known goes on from here, but differently

    @property
    def page(self) -> int | None:
        return None if self.end is None else self.end.segment.pages[0]

    @property
    def length(self) -> int:
        return self.stem.end + self.tokens


@dataclass(frozen=True)
class Inserted:
    stem: Stem
    pages: list[int]  # where the run lies now: the tree's own pages where it had them already
    spare: list[int]  # the caller's pages that this made superfluous


class PrefixTree:
    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.reset()

    def reset(self) -> None:
        """Nothing is known, and nothing is freed: the pages go another way."""
        self._roots: dict[Key, Stem] = {}
        self._evicted: dict[Key, None] = {}  # in the order of their going
        self.pages = 0  # held by the tree
        self._held = 0  # those of them on the way to a pinned stem
        self._leaves: list[tuple[float, int, Stem]] = []  # a heap: every loose leaf, by a time of use that is not later than its last
        self._noted = count()

    def root(self, key: Key, first: int = 0) -> Stem:
        """Where a context ends: what continues it begins at position `first`, which is always the same for the same key."""
        if key not in self._roots:
            self._roots[key] = Stem(Segment((key,), (), (), first), None, key, 0)
        return self._roots[key]

    def stems(self) -> Iterator[Stem]:
        """Every stem but the roots, parents first."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            stem = stack.pop()
            yield stem
            stack.extend(stem.children.values())

    def was_evicted(self, key: Key) -> bool:
        return key in self._evicted

    def match(self, lineage: Lineage, keys: Sequence[Key], tokens: Sequence[int], limit: int, now: float, *, first: int = 0) -> Match:
        """The longest known prefix of at most `limit` tokens. A stem that the match ends inside of is cut in two."""
        stem, page = self.root(lineage.root, first), 0
        whole = min(len(keys), limit // self.page_size)
        while page < whole and (child := stem.children.get(keys[page])) is not None:
            equal = shared_length(child.segment.keys, keys[page:whole])
            stem = child if equal == len(child.segment.keys) else self._cut(child, equal)
            stem.used = now
            page += equal
        rest = tokens[page * self.page_size : min(limit, (page + 1) * self.page_size)]
        best, source, owners = 0, None, self._owners(stem, lineage.owner)
        for child in stem.beginning(rest[0]) if rest else ():
            if child.owner in owners and (shared := shared_length(child.segment.tokens, rest)) > best:
                best, source = shared, child
        if source is None:
            return Match(stem, diverges=any(child.owner in owners for child in stem.children.values()))
        source.used = now
        return Match(stem, source, best, diverges=len(source.segment) > best or bool(source.children))

    def _owners(self, stem: Stem, owner: Key) -> tuple[Key, Key]:
        """Whose children an owner may compare tokens with: its own, and everyone's."""
        while stem.parent is not None:
            stem = stem.parent
        return owner, stem.owner

    def insert(self, at: Stem, keys: Sequence[Key], tokens: Sequence[int], pages: Sequence[int], owner: Key, now: float) -> Inserted:
        """Hands over whole pages that continue a stem pinned by the caller. A run that is known already keeps its old pages."""
        own, spare, place, start = list(pages), [], 0, at
        while place < len(keys) and (child := at.children.get(keys[place])) is not None:
            equal = shared_length(child.segment.keys, keys[place:])
            at = child if equal == len(child.segment.keys) else self._cut(child, equal)
            at.used = now
            spare += own[place : place + equal]
            own[place : place + equal] = at.segment.pages
            place += equal
        if place < len(keys):
            fresh = Segment(tuple(keys[place:]), tuple(tokens[place * self.page_size :]), tuple(own[place:]), at.end)
            spare += self._drop_covered(at, fresh.tokens, owner)
            grows = at is start and at.owner == owner and _is_loose_leaf(at, 1)
            at = self._lengthen(at, fresh, now) if grows else self._sprout(at, fresh, owner, now)
            self.pages += len(fresh.pages)
        return Inserted(at, own, spare)

    def insert_end(self, at: Stem, tokens: Sequence[int], page: int, owner: Key, now: float) -> list[int]:
        """Hands over the last, unfilled page of a sequence; answers the pages that nobody needs now (this one, if it is known)."""
        end = tuple(tokens)
        owners = self._owners(at, owner)
        if any(child.owner in owners and child.segment.tokens[: len(end)] == end for child in at.beginning(end[0])):
            return [page]
        spare = self._drop_covered(at, end, owner)
        key = page_key(at.segment.key + owner, end)
        self.pages += 1
        self._sprout(at, Segment((key,), end, (page,), at.end), owner, now)
        return spare

    def pin(self, stem: Stem) -> None:
        stem.pins += 1
        above: Stem | None = stem if stem.pins == 1 else None
        while above is not None:
            above.held += 1
            self._held += len(above.segment.pages) if above.held == 1 else 0
            above = above.parent if above.held == 1 else None

    def unpin(self, stem: Stem) -> None:
        assert stem.pins > 0
        stem.pins -= 1
        above: Stem | None = stem if not stem.pins else None
        while above is not None:
            above.held -= 1
            self._held -= len(above.segment.pages) if not above.held else 0
            above = above.parent if not above.held else None
        self.forget_bare(stem)
        self._note_leaf(stem)

    def drop(self, stem: Stem) -> list[int]:
        """Forgets a stem that nobody reads and nothing continues, and what leads to it alone; answers the pages."""
        freed: list[int] = []
        while _is_loose_leaf(stem):
            assert stem.parent is not None
            freed += stem.segment.pages
            stem.parent.disown(stem)
            self.forget_bare(stem.parent)
            stem = stem.parent
        self.pages -= len(freed)
        return freed

    def forget_bare(self, root: Stem) -> None:
        """There may be any number of tenants and contexts: one that nothing is known of needs no root. Any other stem stays."""
        if root.parent is None and not root.children and not root.pins and self._roots.get(root.segment.key) is root:
            del self._roots[root.segment.key]

    def first_page(self, stem: Stem) -> Stem:
        """A stem of one page that begins as this one does; the rest of it hangs below."""
        return stem if len(stem.segment.pages) == 1 else self._cut(stem, 1)

    def evictable(self) -> int:
        """How many pages `evict` could free: those not on the way to a pinned stem."""
        return self.pages - self._held

    def evict(self, count: int) -> list[int]:
        """Frees up to `count` pages, from the ends of the leaves that were used longest ago."""
        freed: list[int] = []
        while len(freed) < count and (leaf := self._oldest()) is not None:
            freed += self._trim(leaf, count - len(freed))
            self._note_leaf(leaf if self._is_here(leaf) else leaf.parent)
        self.pages -= len(freed)
        return freed

    def _oldest(self) -> Stem | None:
        while self._leaves:
            used, _, stem = heapq.heappop(self._leaves)
            if _is_loose_leaf(stem) and self._is_here(stem):
                if used == stem.used:
                    return stem
                self._note_leaf(stem)
        return None

    def _note_leaf(self, stem: Stem | None) -> None:
        """To be said of a stem that may have become a loose leaf. One that is used again moves when its turn comes."""
        if stem is None or not _is_loose_leaf(stem):
            return
        heapq.heappush(self._leaves, (stem.used, next(self._noted), stem))
        if len(self._leaves) > 2 * self.pages + 64:  # most of it is out of date
            self._leaves = [(leaf.used, next(self._noted), leaf) for leaf in self.stems() if _is_loose_leaf(leaf)]
            heapq.heapify(self._leaves)

    def _is_here(self, stem: Stem) -> bool:
        return stem.parent is not None and stem.parent.children.get(stem.segment.keys[0]) is stem

    def clear(self) -> list[int]:
        """Frees whatever is not pinned."""
        return self.evict(self.pages)

    def _drop_covered(self, at: Stem, tokens: tuple[int, ...], owner: Key) -> list[int]:
        """Removes an owner's short ends that the given continuation contains; answers their pages."""
        loose = [
            child for child in at.beginning(tokens[0]) if child.owner == owner and not child.pins and len(child.segment) < self.page_size
        ]
        covered = [child for child in loose if tokens[: len(child.segment)] == child.segment.tokens]
        for child in covered:
            at.disown(child)
        self.pages -= len(covered)
        return [child.segment.pages[0] for child in covered]

    def _lengthen(self, stem: Stem, fresh: Segment, now: float) -> Stem:
        """Nobody but the caller stands on this leaf: one longer stem instead of a chain of short ones."""
        old = stem.segment
        self._held += len(fresh.pages)
        stem.change(Segment(old.keys + fresh.keys, old.tokens + fresh.tokens, old.pages + fresh.pages, old.first))
        stem.used = now
        return stem

    def _sprout(self, at: Stem, fresh: Segment, owner: Key, now: float) -> Stem:
        child = Stem(fresh, at, owner, now)
        at.adopt(child)
        self._note_leaf(child)
        return child

    def _cut(self, stem: Stem, pages: int) -> Stem:
        """Cuts a stem after so many pages; the upper part is new, the lower keeps its identity, its pins and its children."""
        assert stem.parent is not None
        old, tokens = stem.segment, pages * self.page_size
        upper = Stem(Segment(old.keys[:pages], old.tokens[:tokens], old.pages[:pages], old.first), stem.parent, stem.owner, stem.used)
        upper.born, upper.held = stem.born, int(stem.held > 0)
        stem.parent.adopt(upper)
        stem.change(Segment(old.keys[pages:], old.tokens[tokens:], old.pages[pages:], old.first + tokens))
        stem.parent = upper
        upper.adopt(stem)
        return upper

    def _trim(self, leaf: Stem, count: int) -> list[int]:
        old = leaf.segment
        keep = max(0, len(old.pages) - count)
        self._evicted.update(dict.fromkeys(old.keys[keep:]))
        while len(self._evicted) > REMEMBERED:
            del self._evicted[next(iter(self._evicted))]
        if keep:
            leaf.change(Segment(old.keys[:keep], old.tokens[: keep * self.page_size], old.pages[:keep], old.first))
        else:
            assert leaf.parent is not None
            leaf.parent.disown(leaf)
            self.forget_bare(leaf.parent)
        return list(old.pages[keep:])


def _is_loose_leaf(stem: Stem, pins: int = 0) -> bool:
    return stem.parent is not None and not stem.children and stem.pins == pins
