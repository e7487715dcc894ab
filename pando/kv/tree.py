"""The prefix tree: what has been computed, found again by its tokens.

A stem is a segment's place in the tree. Stems are whole pages long, so a request shares them without copying; only what is left of a
sequence at its end, less than a page, hangs there as a last short stem, whose slots a later request copies. Rows pin the deepest stem on
their path. Eviction takes leaves only, so what leads to a pinned stem is safe without a count of its own.

A chain may begin at any key. A page's key names all of its past, so who reads it without that past, as a conversation does that has dropped
its oldest part, needs the key in front of it and not the pages: it begins at a root of that name. Where the page of that name is here too,
what continues it hangs below the page or below the root, never both: whoever comes along the pages takes it there, and whoever begins at
the root takes it back, unless someone reads it along the pages.

Whole pages are found by their keys, which name the tenant. What is found by comparing tokens, a part of a page, is looked for only in stems
of the same owner, or of the root's, which is everyone's.
"""

import heapq
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import NamedTuple

from .latest import Latest
from .segment import Key, Lineage, Segment, Tokens, page_key, shared_length
from .stem import Stem

Said = tuple[tuple[int, ...], ...]  # tokens, page by page
REMEMBERED = 2**16  # keys of pages that were evicted: to tell a loss from something new


class Match(NamedTuple):
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


class Inserted(NamedTuple):
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
        self._whole: dict[Key, Stem] = {}  # where each whole page is
        self._evicted = Latest[Key, None](REMEMBERED)  # in the order of their going
        self.pages = 0  # held by the tree
        self._held = 0  # those of them on the way to a pinned stem
        self._leaves: list[tuple[float, int, Stem]] = []  # a heap: every loose leaf, by a time of use that is not later than its last
        self._noted = count()

    def root(self, key: Key, first: int = 0) -> Stem:
        """Where a chain begins: what continues it begins at position `first`, which is always the same for the same key. What hangs below
        the page of that name hangs here then, unless it is read along the page: then it is the stem that ends with the page."""
        page = self._ending_with(key)
        if page is not None and any(child.held for child in page.children.values()):
            return self._along(page)
        if key not in self._roots:
            self._roots[key] = Stem(Segment((key,), (), (), first), None, key, 0)
        root = self._roots[key]
        if page is not None:
            self._move_children(page, root)
            self._note_leaf(page)
        return root

    def _along(self, stem: Stem) -> Stem:
        """The page of a stem's name, if that is here, else the stem. What hung below the root of that name hangs below the page then."""
        root = self._roots.get(stem.segment.key)
        page = self._ending_with(stem.segment.key) if root is not None else None
        if root is None or page is None:
            return stem
        self._move_children(root, page)
        self.forget_bare(root)
        return page

    def _ending_with(self, key: Key) -> Stem | None:
        stem = self._whole.get(key)
        if stem is None or stem.segment.key == key:
            return stem
        return self._cut(stem, stem.segment.keys.index(key) + 1)

    def _move_children(self, source: Stem, target: Stem) -> None:
        for child in list(source.children.values()):
            child.move(target)
            if child.held:
                self._hold(target)
                self._loosen(source)

    def stems(self) -> Iterator[Stem]:
        """Every stem but the roots, parents first."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            stem = stack.pop()
            yield stem
            stack.extend(stem.children.values())

    def was_evicted(self, key: Key) -> bool:
        return key in self._evicted

    def knows(self, root: Key) -> bool:
        """Is there anything that a chain which begins at this key could go on with?"""
        return root in self._roots or root in self._whole

    def match(
        self, lineage: Lineage, keys: Sequence[Key], tokens: Sequence[int], limit: int, now: float, *, first: int = 0, least: int = 1
    ) -> Match:
        """The longest known prefix of at most `limit` tokens. A stem that the match ends inside of is cut in two. `least`: of a page that
        goes on differently, fewer tokens are not worth it."""
        stem, page = self.root(lineage.root, first), 0
        whole = min(len(keys), limit // self.page_size)
        while page < whole and (child := stem.children.get(keys[page])) is not None:
            equal = shared_length(child.segment.keys, keys[page:whole])
            stem = self._along(child if equal == len(child.segment.keys) else self._cut(child, equal))
            stem.used = now
            page += equal
        if not stem.children:
            return Match(stem)
        rest = tuple(tokens[page * self.page_size : min(limit, (page + 1) * self.page_size)])
        best, source, owners = 0, None, self._owners(stem, lineage.owner)
        for child in {child: None for owner in owners for child in (*stem.nearest(owner, rest), *islice(stem.within(owner, rest), 1))}:
            said = child.opening
            if (shared := shared_length(said, rest)) > best and shared >= min(least, len(said), len(rest)):
                best, source = shared, child
        if source is None:
            return Match(stem, diverges=any(map(stem.has_of, owners)))
        source.used = now
        return Match(stem, source, best, diverges=len(source.segment) > best or bool(source.children))

    def ending(self, root: Key, last: Key, now: float) -> Stem | None:
        """The stem that ends with a whole page, if the chain to it begins at this root: what `match` would find, sooner."""
        stem = found = self._whole.get(last)
        if stem is None or stem.segment.key != last:
            return None
        while stem.parent is not None:
            stem.used, stem = now, stem.parent
        return found if stem.segment.key == root else None

    def _owners(self, stem: Stem, owner: Key) -> tuple[Key, Key]:
        """Whose children an owner may compare tokens with: its own, and everyone's."""
        while stem.parent is not None:
            stem = stem.parent
        return owner, stem.owner

    def insert(self, at: Stem, keys: Sequence[Key], tokens: Sequence[int], pages: Sequence[int], owner: Key, now: float) -> Inserted:
        """Hands over whole pages that continue a stem pinned by the caller. A run that is known already keeps its old pages."""
        own, spare, place, start, size = list(pages), list[int](), 0, at, self.page_size
        at = self._along(at)
        while place < len(keys):
            child = at.children.get(keys[place])
            if child is not None:
                equal = shared_length(child.segment.keys, keys[place:])
                at = child if equal == len(child.segment.keys) else self._cut(child, equal)
                at.used = now
                spare += own[place : place + equal]
                own[place : place + equal] = at.segment.pages
            else:  # new, up to where it may go on with what began there before
                fresh = keys[place:]
                known = 0 if self._roots.keys().isdisjoint(fresh) else next(n for n, key in enumerate(fresh, 1) if key in self._roots)
                equal = known or len(fresh)
                end = place + equal
                said = Tokens.of(tokens[place * size : end * size], size)
                parts = tuple(fresh[:equal]), said.pages, tuple(own[place:end])
                if at.children:
                    spare += self._drop_covered(at, said.pages[0], owner)
                grows = at is start and at.owner == owner and _is_loose_leaf(at, 1)
                at = self._lengthen(at, parts, now) if grows else self._sprout(at, Segment(parts[0], said, parts[2], at.end), owner, now)
                self._whole.update(dict.fromkeys(parts[0], at))
                self.pages += equal
            at = self._along(at)
            place += equal
        return Inserted(at, own, spare)

    def insert_end(self, at: Stem, tokens: Sequence[int], page: int, owner: Key, now: float) -> list[int]:
        """Hands over the last, unfilled page of a sequence; answers the pages that nobody needs now (this one, if it is known)."""
        at, end = self._along(at), tuple(tokens)
        owners = self._owners(at, owner)
        if any(child.opening[: len(end)] == end for owner in owners for child in at.nearest(owner, end)):
            return [page]
        spare = self._drop_covered(at, end, owner)
        key = page_key(at.segment.key + owner, end)
        self.pages += 1
        self._sprout(at, Segment((key,), Tokens((end,)), (page,), at.end), owner, now)
        return spare

    def pin(self, stem: Stem) -> None:
        stem.pins += 1
        if stem.pins == 1:
            self._hold(stem)

    def unpin(self, stem: Stem) -> None:
        assert stem.pins > 0
        stem.pins -= 1
        if not stem.pins:
            self._loosen(stem)
        self.forget_bare(stem)
        self._note_leaf(stem)

    def _hold(self, stem: Stem | None) -> None:
        """There is one reason more why it must stay, and whatever leads to it."""
        while stem is not None:
            stem.held += 1
            self._held += len(stem.segment.pages) if stem.held == 1 else 0
            stem = stem.parent if stem.held == 1 else None

    def _loosen(self, stem: Stem | None) -> None:
        while stem is not None:
            stem.held -= 1
            self._held -= len(stem.segment.pages) if not stem.held else 0
            stem = stem.parent if not stem.held else None

    def drop(self, stem: Stem) -> list[int]:
        """Forgets a stem that nobody reads and nothing continues, and what leads to it alone; answers the pages."""
        freed: list[int] = []
        while _is_loose_leaf(stem):
            assert stem.parent is not None
            freed += stem.segment.pages
            self._forget_pages(stem.segment.keys)
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
        covered = [child for child in at.within(owner, tokens) if not child.pins and len(child.segment) < self.page_size]
        for child in covered:
            at.disown(child)
        self.pages -= len(covered)
        return [child.segment.pages[0] for child in covered]

    def _lengthen(self, stem: Stem, fresh: tuple[tuple[Key, ...], Said, tuple[int, ...]], now: float) -> Stem:
        """Nobody but the caller stands on this leaf: one longer stem instead of a chain of short ones. `fresh`: keys, tokens and pages."""
        old, (keys, said, pages) = stem.segment, fresh
        self._held += len(pages)
        stem.change(Segment(old.keys + keys, Tokens(_said(stem) + said), old.pages + pages, old.first))
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
        old, said, first = stem.segment, _said(stem), stem.segment.first + pages * self.page_size
        upper = Stem(Segment(old.keys[:pages], Tokens(said[:pages]), old.pages[:pages], old.first), stem.parent, stem.owner, stem.used)
        upper.born, upper.held = stem.born, int(stem.held > 0)
        stem.parent.adopt(upper)
        stem.change(Segment(old.keys[pages:], Tokens(said[pages:]), old.pages[pages:], first))
        stem.parent = upper
        upper.adopt(stem)
        self._whole.update(dict.fromkeys(upper.segment.keys, upper))
        return upper

    def _forget_pages(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._whole.pop(key, None)  # a short end is none of them

    def _trim(self, leaf: Stem, count: int) -> list[int]:
        old = leaf.segment
        keep = max(0, len(old.pages) - count)
        gone = old.keys[keep:]
        self._forget_pages(gone)
        self._evicted.update(dict.fromkeys(gone))
        if keep:
            leaf.change(Segment(old.keys[:keep], Tokens(_said(leaf)[:keep]), old.pages[:keep], old.first))
        else:
            assert leaf.parent is not None
            leaf.parent.disown(leaf)
            self.forget_bare(leaf.parent)
        return list(old.pages[keep:])


def _said(stem: Stem) -> Said:
    """Its tokens, page by page, as the tree made them."""
    assert isinstance(stem.segment.tokens, Tokens)
    return stem.segment.tokens.pages


def _is_loose_leaf(stem: Stem, pins: int = 0) -> bool:
    return stem.parent is not None and not stem.children and stem.pins == pins
