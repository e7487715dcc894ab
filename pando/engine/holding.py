"""What rows hold of the pool: pages that they get, hand to the tree when they are full, and let go."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from ..kv.pages import Pages
from ..kv.segment import Key, extend_keys, shared_length, worth_having
from ..kv.tree import Match, PrefixTree
from .below import Below
from .imports import Want
from .makers import coming
from .row import Copy, Row
from .turns import Turns

WORTH_WAITING = 2  # tokens in common from which a row waits for another to compute them: everyone begins with the same one


def there(row: Row) -> int:
    """Tokens whose states others could read now."""
    return row.computed if row.load is None else row.settled


class Ahead:
    """Rows that compute or load more than their next token. Of a thousand that begin with one system prompt each is compared with the
    others, so they are found by what a row must have in common with one to wait for it: all but a few have nothing to do with each other.
    Nothing of them changes as long as it is used, but that rows are added."""

    def __init__(self, rows: Sequence[Sequence[Row]], copied: int) -> None:
        self._from, self._copied = rows, copied
        self._rows: list[Row] | None = None  # made when somebody asks
        self._found: dict[int, dict[tuple[bytes, bytes], list[Row]]] = {}  # by how many tokens that are, by the first and last few of them

    def like(self, row: Row) -> list[Row]:
        """Those that a row may have to wait for, and hardly any others."""
        if self._rows is None:
            self._rows = []
            for other in chain(*self._from):
                if other.load is not None or len(other.tokens) - other.computed > 1:
                    self.add(other)
        most = len(row.tokens) - 1
        if most < self._copied:
            return self._rows
        start, found = row.tokens[: self._copied].tobytes(), list[Row]()
        for least, some in self._found.items():
            if least <= most:
                found += some.get((start, row.tokens[least - self._copied : least].tobytes()), ())
        return found

    def add(self, row: Row) -> None:
        if self._rows is None or (row.behind <= 1 and row.load is None):
            return
        self._rows.append(row)
        if (least := max(there(row) + 1, self._copied)) <= len(row.tokens):
            name = row.tokens[: self._copied].tobytes(), row.tokens[least - self._copied : least].tobytes()
            self._found.setdefault(least, {}).setdefault(name, []).append(row)


class Holding:
    def __init__(
        self, pages: Pages, tree: PrefixTree, turns: Turns, below: Below | None, is_lacked: Callable[[Want], bool], *, reuse: bool
    ) -> None:
        """`turns` are told when what a row reads changes; `below` keeps what the tree is given, if there is anything below the pool;
        `is_lacked` says whether somebody still needs something."""
        self._is_lacked = is_lacked
        self.pages, self.tree, self.turns, self.below, self.reuse = pages, tree, turns, below, reuse
        self._copied = worth_having(pages.page_size)

    @property
    def to_be_had(self) -> int:
        """Pages that are free, or that the cache could give."""
        return self.pages.free + self.tree.evictable()

    def seat(self, row: Row, limit: int, now: float, *, spare: int) -> Match | None:
        """Finds what is known of a row's first tokens, and room for the others, if the cache has it with some pages to spare."""
        self.extend_keys(row)
        match = self.tree.match(row.lineage, row.keys, row.tokens, limit, now, first=row.at, least=self._copied)
        if match.length - row.at < row.repaired_end:  # who is repaired is known only of all together
            match = Match(self.tree.root(row.lineage.root))
        self.tree.pin(match.stem)
        shared = match.stem.end - row.at
        room = min(len(row.tokens) + 1, row.last)  # nothing follows a scored prompt that fills the context
        missing = self.pages.needed(room) - shared // self.pages.page_size
        if not self.free(missing, spare):
            self.tree.unpin(match.stem)
            return None
        row.stem = match.stem
        row.pages = [page for segment in match.stem.path(row.at) for page in segment.pages]
        row.settled = row.computed = shared
        if self.below is not None and match.tokens:
            self.below.rounded.look(row, match.page)  # before it may become one of the row's own
        self.grow(row, room)
        return match

    def fill(self, row: Row, match: Match, limit: int, running: Iterable[Row]) -> list[Copy]:
        """What is known of a row behind the pages that it shares: the tiers below bring it up, or it is copied, whichever is more."""
        tokens, source = max((match.tokens, match.page or 0), self._ahead(row, limit, running))
        below = self.below if limit and not row.repair and not row.is_shunned else None
        if below is not None and (kept := below.load(row, limit, more_than=tokens)):
            row.computed += kept
            return []
        if self.below is not None:
            self.below.rounded.look(row, source if tokens else None)
        row.computed += tokens
        return [Copy(source, row.pages[row.settled // self.pages.page_size], tokens)] if tokens else []

    def bring(self, row: Row, now: float, *, spare: int) -> bool:
        """Begins to bring up what a row shall leave to the tree; says whether there was room."""
        if self.seat(row, len(row.tokens), now, spare=spare) is None:
            return False
        if self.below is not None:
            row.computed += self.below.load(row, len(row.tokens), more_than=0)
        row.cached, row.comes = row.computed, tuple(coming(row, row.computed, self.pages.page_size))
        return True

    def seat_repaired(self, row: Row, now: float) -> None:
        """The same prompt, repaired before, is found whole; otherwise what is repaired is there when it runs."""
        known = row.computed >= row.repaired_end
        if row.cached is None:
            row.cached = row.computed if known else max(0, row.had - row.repaired)
            row.waited = now - row.arrived
        if known:
            self.let_go(row)
        else:
            row.computed = row.repaired_end

    def ahead(self, *rows: Sequence[Row]) -> Ahead:
        return Ahead(rows, self._copied)

    def is_held(self, row: Row, others: Ahead) -> bool:
        """Is another row computing or loading the beginning of this one? Then that is worth waiting for: the same states are not computed
        twice."""
        if not self.reuse or row.scored is not None:
            return False
        worth = max(WORTH_WAITING, min(self._copied, len(row.tokens) - 1))
        start = row.tokens[:worth]
        busy = [other for other in others.like(row) if other.tokens[:worth] == start]
        if not busy:
            return False
        self.extend_keys(row)
        alike = (other for other in busy if other.lineage == row.lineage and other.scored is None)
        return any(max(there(other) + 1, worth) <= self._had(row, other) for other in alike)

    def _had(self, row: Row, other: Row) -> int:
        """What they have in common, less what is not worth a copy."""
        common = self.common(row, other)
        rest = common % self.pages.page_size
        return common if rest >= self._copied or common in (len(row.tokens) - 1, len(other.tokens)) else common - rest

    def give_way(self, row: Row, others: Sequence[Row]) -> bool:
        """Where nothing runs and there is no room, only the first that waits keeps what it has found: the others begin again later. Says
        whether any had something."""
        asking = [other for other in (row, *others) if other.makes is None]
        first = min(asking, key=lambda other: other.arrival, default=row)
        holding = [other for other in others if other.imports and other is not first]
        for other in holding:
            self.let_go(other)
        return bool(holding)

    def give_room(self, row: Row, tokens: int) -> bool:
        """Gives a row pages for so many tokens; says whether there were free ones, or the cache could give them."""
        missing = self.pages.needed(tokens) - len(row.pages)
        if missing > 0 and not self.free(missing):
            return False
        self.grow(row, tokens)
        return True

    def free(self, count: int, spare: int = 0) -> bool:
        """Makes sure that so many pages are free, if the cache can give them and would still have some to spare."""
        short = count - self.pages.free
        if short + spare <= 0:
            return True
        if self.tree.evictable() < short + spare and self.below is not None:
            self.below.make_room()
        if self.tree.evictable() < short + spare:
            return False
        if short <= 0:
            return True
        self.pages.give(self.tree.evict(short))
        return True

    def grow(self, row: Row, tokens: int) -> None:
        missing = self.pages.needed(tokens) - len(row.pages)
        if missing > 0:
            after = row.pages[-1] if row.pages else None
            expect = self.pages.needed(row.last) - len(row.pages) - missing
            row.pages += (taken := self.pages.take(missing, after, max(0, expect)))
            if self.below is not None:
                self.below.rounded.begin(row, taken)
            self.turns.change()

    def keeps_own(self, row: Row) -> bool:
        """Nothing is reused where a prompt is scored: what the tree has of it already may have gone through a codec that rounds. And what
        others were lent stays where it is: the tree may have the same run in other pages."""
        return bool(row.comes) or (row.scored is not None and self.below is not None and self.below.rounded.rounds)

    def hand_over(self, row: Row, now: float) -> None:
        """Full pages become the tree's. Where it has the same run already, the row reads that one from now on."""
        start, stop = row.settled // self.pages.page_size, row.computed // self.pages.page_size
        if start == stop:
            return
        self.extend_keys(row)
        public = min(max(start, row.lineage.public), stop)
        for first, last, owner in ((start, public, row.lineage.root), (public, stop, row.lineage.owner)):
            if first < last:
                self._insert(row, first, last, owner, now)

    def _insert(self, row: Row, start: int, stop: int, owner: Key, now: float) -> None:
        assert row.stem is not None
        size = self.pages.page_size
        tokens = row.tokens[start * size : stop * size]
        done = self.tree.insert(row.stem, row.keys[start:stop], tokens, row.pages[start:stop], owner, now)
        if done.spare:
            self.pages.unclaim(row.pages[-1])
            self.pages.give(done.spare)
            self.turns.change()
        row.pages[start:stop] = done.pages
        row.settled = stop * size
        if done.stem is not row.stem:
            self.tree.pin(done.stem)
            self.tree.unpin(row.stem)
            row.stem = done.stem
        if self.below is not None:
            self.below.keep(row, start, stop)

    def release(self, row: Row, now: float) -> None:
        """The one place where a row lets go: full pages and the end go to the tree, the rest is free."""
        assert row.stem is not None
        filled = self.below.stop(row) if row.load is not None and self.below is not None else []
        if self.reuse:
            self.hand_over(row, now)
        size = self.pages.page_size
        keep, end = row.settled // size, row.computed - row.settled
        if row.pages:
            self.pages.unclaim(row.pages[-1])
        own = row.pages[keep + len(filled) :]
        if self.reuse and end:
            tail, page = row.tokens[row.settled : row.computed], own.pop(0)
            self.pages.give(self.tree.insert_end(row.stem, tail, page, row.lineage.owner, now))
            if self.below is not None:
                self.below.keep_end(row, tail, page)
        self.pages.give(own)
        self.tree.unpin(row.stem)
        self.let_go(row)
        row.stem, row.pages, row.settled, row.computed, row.comes = None, [], 0, 0, ()

    def let_go(self, row: Row) -> None:
        for found in row.imports:
            self.tree.unpin(found.pinned)
            if found.want.passing and not self._is_lacked(found.want):
                self.pages.give(self.tree.drop(found.pinned))
        row.imports = ()

    def extend_keys(self, row: Row) -> None:
        extend_keys(row.keys, row.lineage, row.tokens, self.pages.page_size)

    def common(self, row: Row, other: Row) -> int:
        """How many of a row's first tokens another has too, less the last, which must be computed to be answered."""
        self.extend_keys(other)
        low, high = 0, min(len(row.keys), len(other.keys))
        while low < high:  # keys are chained: one that is equal makes all before it equal
            middle = (low + high + 1) // 2
            low, high = (middle, high) if row.keys[middle - 1] == other.keys[middle - 1] else (low, middle - 1)
        start, stop = low * self.pages.page_size, (low + 1) * self.pages.page_size
        return min(start + shared_length(row.tokens[start:stop], other.tokens[start:stop]), len(row.tokens) - 1)

    def _ahead(self, row: Row, limit: int, running: Iterable[Row]) -> tuple[int, int]:
        """A running row at the same place may have computed more than the tree knows: how many tokens, and in which page."""
        own, best, size = row.tokens[row.settled : limit], (0, 0), self.pages.page_size
        for other in running if own else ():
            count = min(other.computed - other.settled, size)  # of its next page: one that keeps its own pages may have more
            if count > best[0] and other.stem is row.stem and other.load is None:
                more, first = max(best[0] + 1, min(self._copied, len(own), count)), other.settled
                if own[:more] == other.tokens[first : first + more] and other.lineage == row.lineage:  # hardly any has more than the best
                    best = shared_length(own, other.tokens[first : first + count]), other.pages[first // size]
        return best
