"""The tiers below the pool, for rows: what is kept of their context is brought up, and what they computed is kept."""

from collections.abc import Sequence

from ..kv.segment import Key, Lineage, extend_keys, page_key
from ..kv.stem import Stem
from ..kv.tree import PrefixTree
from ..store.keeper import Found, Keeper, Loading, Offer, end_card, end_parent
from ..store.tier import Card
from .imports import Want, wants
from .request import Miss
from .row import Row

WORTH_KEEPING = 16  # tokens of a short end: fewer are sooner computed than looked for


class Below:
    def __init__(self, store: Keeper, tree: PrefixTree) -> None:
        self.store = store
        self.tree = tree
        self.limbo: list[tuple[Loading, list[int]]] = []  # pages that are filled for nobody

    def join(self, row: Row) -> None:
        """A row waits, and will need its pages."""
        needs, chains = list[Key](), [(want.lineage, want.keys, want.run.tokens) for want in row.wants]
        for lineage, keys, tokens in (*chains, (row.lineage, row.keys, row.tokens)):
            needs += self._needs(lineage, keys, tokens)
        self.store.join(row.arrival, needs)

    def _needs(self, lineage: Lineage, keys: Sequence[Key], tokens: Sequence[int]) -> list[Key]:
        return self.store.needs(keys, tokens, lineage.root, sorted({lineage.owner, lineage.root}))

    # ---- bringing up

    def load(self, row: Row, limit: int, *, more_than: int) -> int:
        """Begins to bring up what is kept of a row behind what the tree has, if it is more than that; answers how many tokens. The row has
        its pages already."""
        found = self.look(row.lineage, row.tenant, row.keys, row.tokens, row.settled, limit)
        if found is None or found.tokens <= more_than:
            return 0
        start = row.settled // self.tree.page_size
        row.load = self.store.load(found, row.keys, row.pages[start : start + len(found.parts)])
        row.loaded = found.tokens
        return found.tokens

    def look(self, lineage: Lineage, tenant: Key, keys: Sequence[Key], tokens: Sequence[int], settled: int, limit: int) -> Found | None:
        """What is kept of tokens behind those that the tree has, which are `settled`; of at most `limit`, if loading is worth its time."""
        start, root = settled // self.tree.page_size, lineage.root
        before = keys[start - 1] if start else root
        owners = sorted({lineage.owner, root})
        return self.store.look(keys[start:], tokens[settled:], before, owners, self.store.tag(tenant), limit - settled)

    def keeps(self, want: Want, tenant: Key, now: float) -> bool:
        """Is all of a run kept that the tree does not have, and worth loading?"""
        tokens, first = want.run.tokens, want.origin.first
        match = self.tree.match(want.lineage, want.keys, tokens, len(tokens), now, first=first)
        self.tree.forget_bare(match.stem)
        settled = match.stem.end - first
        found = self.look(want.lineage, tenant, want.keys, tokens, settled, len(tokens))
        return found is not None and settled + found.tokens == len(tokens)

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
            row.cached = None if row.cached is None else row.cached - (row.loaded - came)
            row.computed = row.settled + came
            row.loaded = came
            row.miss = Miss("lost", row.imported + row.computed)
        left = row.loaded
        for part in parts:
            row.tiers[part.tier] = row.tiers.get(part.tier, 0) + min(left, len(part.card.tokens))
            left -= min(left, len(part.card.tokens))
        return True

    def stop(self, row: Row) -> list[int]:
        """A row that does not need its context any more, or not now; answers the pages that are still being filled."""
        load, start = row.load, row.settled // self.tree.page_size
        assert load is not None
        load.abandon()
        count = -(-row.loaded // self.tree.page_size)
        row.load, row.computed, row.loaded = None, row.settled, 0
        if load.done:
            return []
        filled = row.pages[start : start + count]
        self.limbo.append((load, filled))
        return filled

    def returned(self) -> list[int]:
        """Pages that nobody fills any more."""
        done = [pages for load, pages in self.limbo if load.done]
        self.limbo = [(load, pages) for load, pages in self.limbo if not load.done]
        return [page for pages in done for page in pages]

    # ---- keeping

    def keep(self, row: Row, start: int, stop: int) -> None:
        """Pages that the tree has taken from a row outlive the pool from now on."""
        assert row.stem is not None
        if not _is_kept(row):
            return
        size, root, cards, pages = self.tree.page_size, row.lineage.root, list[Card](), list[int]()
        for place in range(start, stop):
            if self.store.wanted(row.keys[place]):
                before = row.keys[place - 1] if place else root
                whose = self.store.tag(root if place < row.lineage.public else row.tenant)
                cards.append(Card(row.keys[place], before, whose, tuple(row.tokens[place * size : (place + 1) * size])))
                pages.append(row.pages[place])
        for first in range(0, len(cards), self.store.buffer):
            some = slice(first, first + self.store.buffer)
            self._offer(row.stem, cards[some], pages[some], row.keys[:stop])

    def keep_end(self, row: Row, tokens: Sequence[int], page: int) -> None:
        """The unfilled page at the end of a sequence that was just handed to the tree, if the tree took it."""
        assert row.stem is not None
        before, owner = row.stem.segment.key, row.lineage.owner
        stem = row.stem.children.get(page_key(before + owner, tokens))
        if not _is_kept(row) or len(tokens) < WORTH_KEEPING or stem is None or stem.segment.pages != (page,):
            return
        card = end_card(end_parent(before, owner), self.store.tag(row.tenant), tokens)
        if self.store.wanted(card.key):
            self._offer(stem, [card], [page], [*row.keys[: row.settled // self.tree.page_size], card.key])

    def _offer(self, stem: Stem, cards: Sequence[Card], pages: Sequence[int], chain: Sequence[Key]) -> None:
        self.tree.pin(stem)
        self.store.offer(Offer(stem, tuple(chain), tuple(cards), tuple(pages)))

    def pump(self) -> bool:
        """Says whether there is more room in the pool for it."""
        free = self.store.pump()
        self._unpin(free)
        return bool(free)

    def make_room(self) -> None:
        """Someone needs the pages that wait to be saved."""
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


def _is_kept(row: Row) -> bool:
    """A repaired prompt is found in the tree alone; what only leads to a module is not kept at all."""
    return not row.repair and not row.is_suspect and not (row.makes is not None and row.makes.passing)
