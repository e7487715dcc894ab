"""The tiers below the pool, for rows: what is kept of their context is brought up, and what they computed is kept."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ..kv.segment import Key, Lineage, extend_keys, page_key
from ..kv.stem import Stem
from ..kv.tree import PrefixTree
from ..store.sought import Ended, Found, Offer, Sought, end_card, end_parent
from ..store.tier import Card
from .imports import Want, wants
from .rounded import Rounded
from .row import Row, Schedule
from .turns import Turn

if TYPE_CHECKING:
    from ..store.departures import Departure
    from ..store.store import Store
    from ..store.transfer import Load

PAUSE = 0.02  # seconds for which nothing is asked of an engine that has nothing to do but to wait
WORTH_KEEPING = 16  # tokens of a short end: fewer are sooner computed than looked for, and than brought up


class Passage(NamedTuple):
    """A tenant's tokens at a place, which are looked for: in the tree, and below it behind what the tree has."""

    lineage: Lineage
    tenant: Key
    keys: Sequence[Key]  # of its full pages
    tokens: Sequence[int]
    limit: int  # so many of them are wanted at most
    first: int  # the position of the first

    @classmethod
    def of(cls, want: Want, tenant: Key) -> "Passage":
        """All of a run."""
        return cls(want.lineage, tenant, want.keys, want.run.tokens, len(want.run), want.origin.first)


class Below:
    def __init__(self, store: "Store", tree: PrefixTree) -> None:
        self.store = store
        self.tree = tree
        self.rounded = Rounded(tree.page_size, rounds=store.rounds)
        self.limbo: list[tuple[Load, list[int]]] = []  # pages that are filled for nobody
        self._departure: Departure | None = None  # of the last step that was made
        self._coming: dict[Row, None] = {}  # rows that wait, and whose pages the store has not been told of
        self._kept: dict[tuple[Want | None, int], Found] = {}  # of runs, behind so many tokens; until the store makes room for anything

    def join(self, row: Row) -> None:
        """A row waits, and will need its pages. Most rows run in the next step: the store is told of those that do not."""
        self._coming[row] = None

    def leave(self, row: Row) -> None:
        """It waits no longer."""
        if row in self._coming:
            del self._coming[row]
        else:
            self.store.leave(row.arrival)

    def _tell(self) -> None:
        """To be done before the store makes room for anything."""
        self._kept.clear()
        for row in self._coming:
            self._tell_of(row)
        self._coming.clear()

    def _tell_of(self, row: Row) -> None:
        extend_keys(row.keys, row.lineage, row.tokens, self.tree.page_size)
        needs, chains = list[Key](), [(want.lineage, want.keys, want.run.tokens) for want in row.wants]
        for lineage, keys, tokens in (*chains, (row.lineage, row.keys, row.tokens)):
            needs += self._needs(lineage, keys, tokens)
        self.store.join(row.arrival, needs)

    def _needs(self, lineage: Lineage, keys: Sequence[Key], tokens: Sequence[int]) -> list[Key]:
        return self.store.needs(keys, tokens, lineage.root, sorted({lineage.owner, lineage.root}))

    # ---- bringing up

    def load(self, row: Row, limit: int, *, more_than: int) -> int:
        """Begins to bring up what is kept of a row behind what the tree has, if it is enough more than that; answers how many tokens. The
        row has its pages already."""
        kept = self._kept.get((row.makes, row.settled)) if row.brings else None
        found = kept or self.look(_passage(row, limit), row.settled)
        row.ended = found.ended
        if found.tokens - more_than < max(1, min(WORTH_KEEPING, self.tree.page_size, limit - row.settled)):
            return 0
        start = row.settled // self.tree.page_size
        row.load = self.store.load(found, row.keys, row.pages[start : start + len(found.parts)])
        row.loaded = found.tokens
        return found.tokens

    def awaits(self, row: Row, now: float) -> bool:
        """Is it still being asked what a remote has of a row, and of what stands before its tokens?"""
        if self.store.scout is None or row.is_shunned or row.scored is not None:
            return False
        extend_keys(row.keys, row.lineage, row.tokens, self.tree.page_size)
        found = {each.want for each in row.imports}
        asked = [self.asks(Passage.of(want, row.tenant), now) for want in row.wants if want not in found]
        return any([*asked, self.asks(_passage(row, len(row.tokens) - 1), now)])

    def asks(self, passage: Passage, now: float) -> bool:
        """Is it still being asked what a remote has of a passage that the tree does not have?"""
        if self.store.scout is None:
            return False
        settled = self._settled(passage, now)
        return settled < passage.limit and self.store.scout.awaits(self._sought(passage, settled))

    def _settled(self, passage: Passage, now: float) -> int:
        """How many of its tokens the tree has."""
        lineage, _, keys, tokens, limit, first = passage
        if not self.tree.knows(lineage.root):
            return 0
        match = self.tree.match(lineage, keys, tokens, limit, now, first=first)
        self.tree.forget_bare(match.stem)
        return match.stem.end - first

    def look(self, passage: Passage, settled: int, *, counts: bool = True) -> Found:
        """What is kept of a passage behind the tokens that the tree has, which are `settled`, if loading is worth its time."""
        return self.store.look(self._sought(passage, settled), counts=counts)

    def _sought(self, passage: Passage, settled: int) -> Sought:
        lineage, tenant, keys, tokens, limit, _ = passage
        start, root = settled // self.tree.page_size, lineage.root
        before = keys[start - 1] if start else root
        owners = sorted({lineage.owner, root})
        return Sought(keys[start:], tokens[settled:], before, owners, self.store.tag(tenant), limit - settled)

    def keeps(self, want: Want, tenant: Key, now: float) -> tuple[bool, Ended | None]:
        """Is all of a run kept that the tree does not have, and worth loading? And why not, where that is known."""
        passage = Passage.of(want, tenant)
        settled = self._settled(passage, now)
        found = self._kept[want, settled] = self.look(passage, settled)
        return settled + found.tokens == passage.limit and bool(found.parts), found.ended

    def end(self, row: Row) -> bool:
        """What came is the row's; what did not is computed. Answers whether it is known what came: a load that does not end keeps its
        pages."""
        assert row.load is not None
        if not row.load.finish():
            return False
        parts, lost = row.load.good, row.load.lost
        row.load = None
        if lost is not None:
            came = min(row.loaded, sum(len(part.card.tokens) for part in parts))
            row.lose(row.loaded - came, row.settled + came)
            row.computed = row.settled + came
            row.loaded = came
        left = row.loaded
        for part in parts if row.is_new else ():
            row.tiers[part.tier] = row.tiers.get(part.tier, 0) + (came := min(left, len(part.card.tokens)))
            left -= came
        start = row.settled // self.tree.page_size
        self.rounded.come(row.pages[start : start + len(parts)])
        self.rounded.look(row)
        return True

    def stop(self, row: Row) -> list[int]:
        """A row that does not need its context any more, or not now; answers the pages that are still being filled."""
        load, start = row.load, row.settled // self.tree.page_size
        assert load is not None
        load.abandon()
        done, count = load.done, -(-row.loaded // self.tree.page_size)
        filled = [] if done else row.pages[start : start + count]
        if not done:
            self.limbo.append((load, filled))  # first: whoever is interrupted here must not give them away
        row.load, row.computed, row.loaded = None, row.settled, 0
        if row.is_new:
            row.cached = None  # it did not run with that, and is told how it is when it does
        return filled

    def in_time(self, rows: Sequence[Row], budget: int) -> list[Row]:
        """Of rows whose context is on its way those that should hold up nobody, if they run together: it is there, or comes while the step
        computes. The more there are, the longer a step takes, and the more comes in it."""
        coming = sorted(((self._left(row), place, row) for place, row in enumerate(rows)), key=lambda each: each[:2])
        tokens, count = 0, 0
        for number, (left, _, row) in enumerate(coming, 1):
            tokens = min(tokens + row.behind, budget)
            count = number if self.store.speeds.in_time(left, tokens) else count
        return [row for _, _, row in coming[:count]]

    def _left(self, row: Row) -> float:
        """Seconds until all that it reads is there."""
        return max((self.store.left(load) for load in row.loads if not load.done), default=0.0)

    def hold_up_nobody(self, turns: dict[Row, Turn], running: list[Row], loading: list[Row], budget: int) -> "list[Load]":
        """Rows whose context is on its way wait for it beside the step, if there are others in it, unless it should come in time; if that
        does not, it is given up. Answers what the step waits for."""
        early = {row: loads for row in turns if (row.load is not None or row.imports) and (loads := row.loads)}
        if not early:
            return []
        others = len(early) < len(turns)
        going = self.in_time(list(early), budget) if others else early
        for row in [row for row in early if row not in going]:
            del turns[row]
            running.remove(row)
            loading.append(row)
        found = list(dict.fromkeys(load for row, loads in early.items() if row in turns for load in loads))
        for load in [load for load in found if not load.done] if others else ():
            load.hurry(self.store.speeds.grace(self.store.left(load)))
        return found

    def wait(self, wanted: "Sequence[Load]") -> None:
        """Until the first of what is wanted has come up. If there is nothing: for pages that are filled for nobody, and not for long, since
        nobody knows how long that takes."""
        for load in wanted[:1]:
            load.finish()
        for load, _ in () if wanted else self.limbo[:1]:
            load.ends_within(PAUSE)
        if not wanted and self.store.scout is not None:
            self.store.scout.listen(PAUSE)

    def returned(self) -> list[int]:
        """Pages that nobody fills any more."""
        if not self.limbo:
            return []
        done = [pages for load, pages in self.limbo if load.done]
        self.limbo = [(load, pages) for load, pages in self.limbo if not load.done]
        return [page for pages in done for page in pages]

    def forget_pool(self) -> list[int]:
        """Nothing in the pool is to be trusted any more; answers the pages that are still being filled."""
        self._kept.clear()
        self.store.forget_pool()
        self.returned()
        return [page for _, pages in self.limbo for page in pages]

    # ---- keeping

    def keep(self, row: Row, start: int, stop: int) -> None:
        """Pages that the tree has taken from a row outlive the pool from now on; and, when they are the row's first, those that it found
        in the pool, if nobody keeps their beginning any more. Without later ones there was only no room for these."""
        assert row.stem is not None
        self.rounded.look(row)
        is_first = start * self.tree.page_size <= (row.cached or 0) - row.had
        wanted = list(self._wanted(row, 0 if is_first and self.store.wanted(row.keys[0]) else start, stop))
        for first in range(0, len(wanted), self.store.buffer):
            self._offer(row.stem, wanted[first : first + self.store.buffer], row.keys[:stop])

    def depart(self, schedule: Schedule) -> Schedule:
        """Pages that a step will fill are saved while it computes, if their tokens are known: the last one may be chosen by a step that
        still runs."""
        self._departure = None
        if spare := self.store.spare:
            pages = list(islice(self._filled(schedule), spare))
            self._departure = self.store.depart(pages) if pages else None
        return schedule if self._departure is None else schedule._replace(departure=self._departure)

    def _filled(self, schedule: Schedule) -> Iterator[tuple[Card, int]]:
        size, starts, counts = self.tree.page_size, schedule.starts, schedule.counts
        for place in (starts % size + counts >= size).nonzero()[0].tolist():
            row, start = schedule.rows[place], int(starts[place])
            extend_keys(row.keys, row.lineage, row.tokens, size)
            yield from self._wanted(row, start // size, min(start + counts[place], len(row.tokens)) // size)

    def retract(self) -> None:
        """Nothing of the last step that was made is kept."""
        if self._departure is not None:
            self.store.dismiss(self._departure)

    def _wanted(self, row: Row, start: int, stop: int) -> Iterator[tuple[Card, int]]:
        """Those of a row's pages that are to be kept, and are not."""
        size, root = self.tree.page_size, row.lineage.root
        for place in range(start, stop) if _is_kept(row) else ():
            if self.store.wanted(row.keys[place]):
                before = row.keys[place - 1] if place else root
                whose = self.store.tag(root if place < row.lineage.public else row.tenant)
                yield Card(row.keys[place], before, whose, tuple(row.tokens[place * size : (place + 1) * size])), row.pages[place]

    def keep_end(self, row: Row, tokens: Sequence[int], page: int) -> None:
        """The unfilled page at the end of a sequence that was just handed to the tree, if the tree took it."""
        assert row.stem is not None
        before, owner = row.stem.segment.key, row.lineage.owner
        stem = row.stem.children.get(page_key(before + owner, tokens))
        is_worth_it = len(tokens) >= WORTH_KEEPING or row.makes is not None  # without its end a run would not come up at all
        if not _is_kept(row) or not is_worth_it or stem is None or stem.segment.pages != (page,):
            return
        card = end_card(end_parent(before, owner), self.store.tag(row.tenant), tokens)
        if self.store.wanted(card.key):
            self._offer(stem, [(card, page)], [*row.keys[: row.settled // self.tree.page_size], card.key])

    def _offer(self, stem: Stem, some: Sequence[tuple[Card, int]], chain: Sequence[Key]) -> None:
        self.tree.pin(stem)
        self.store.offer(Offer(stem, tuple(chain), tuple(some)))

    def pump(self) -> bool:
        """Says whether there is more room in the pool for it."""
        self._tell()
        free = self.store.pump()
        self._unpin(free)
        return bool(free)

    def make_room(self) -> None:
        """Someone needs the pages that wait to be saved."""
        self._tell()
        self._unpin(self.store.relent())
        self._unpin(self.store.settle())

    def _unpin(self, stems: Sequence[Stem]) -> None:
        for stem in stems:
            self.tree.unpin(stem)

    def discard(self, row: Row) -> None:
        """What a row computed or read is not to be trusted, nor what that was made behind: it leaves every tier."""
        self.make_room()
        needs, stack, seen = self._needs(row.lineage, row.keys, row.tokens), list(row.wants), set[tuple[Key, bytes]]()
        while stack:
            want, keys = stack.pop(), list[Key]()
            if want.name not in seen:
                seen.add(want.name)
                extend_keys(keys, want.context, want.path, self.tree.page_size)
                needs += self._needs(want.context, keys, want.path)
                stack += wants(row.tenant, want.origin.context, self.tree.page_size)
        self.store.discard(needs)

    def close(self) -> None:
        self._unpin(self.store.close())


def _passage(row: Row, limit: int) -> Passage:
    return Passage(row.lineage, row.tenant, row.keys, row.tokens, limit, row.at)


def _is_kept(row: Row) -> bool:
    """A repaired prompt is found in the tree alone; what only leads to a module is not kept at all."""
    return not row.repair and not row.is_suspect and not (row.makes is not None and row.makes.passing)
