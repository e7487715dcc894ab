"""The tiers below the pool, for rows: what is kept of their context is brought up, and what they computed is kept."""

from collections.abc import Sequence

from ..kv.segment import Key, Lineage, page_key
from ..kv.tree import PrefixTree, Stem
from ..store.keeper import Found, Keeper, Offer, end_card, end_parent
from ..store.tier import Card
from .request import Miss
from .row import Row

WORTH_KEEPING = 16  # tokens of a short end: fewer are sooner computed than looked for


class Below:
    def __init__(self, store: Keeper, tree: PrefixTree) -> None:
        self.store = store
        self.tree = tree

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
        owners = {lineage.owner, root} if start >= lineage.public else {root}
        return self.store.look(keys[start:], tokens[settled:], before, sorted(owners), self.store.tag(tenant), limit - settled)

    def end(self, row: Row) -> None:
        """What came is the row's; what did not is computed."""
        assert row.load is not None
        row.load.finish()
        parts, lost = row.load.good, row.load.lost
        row.load = None
        if lost is not None:
            came = min(row.loaded, sum(len(part.card.tokens) for part in parts))
            row.cached = None if row.cached is None else row.cached - (row.loaded - came)
            row.computed = row.settled + came
            row.loaded = came
            row.miss = Miss("lost", row.computed)
        left = row.loaded
        for part in parts:
            row.tiers[part.tier] = row.tiers.get(part.tier, 0) + min(left, len(part.card.tokens))
            left -= min(left, len(part.card.tokens))

    def stop(self, row: Row) -> None:
        """A row that does not need its context any more, or not now."""
        assert row.load is not None
        row.load.abandon()
        row.load, row.computed, row.loaded = None, row.settled, 0

    # ---- keeping

    def keep(self, row: Row, start: int, stop: int) -> None:
        """Pages that the tree has taken from a row outlive the pool from now on."""
        assert row.stem is not None
        if row.makes is not None and row.makes.passing:
            return
        size, root, cards, pages = self.tree.page_size, row.lineage.root, list[Card](), list[int]()
        for place in range(start, stop):
            if self.store.wanted(row.keys[place]):
                before = row.keys[place - 1] if place else root
                whose = self.store.tag(root if place < row.lineage.public else row.tenant)
                cards.append(Card(row.keys[place], before, whose, tuple(row.tokens[place * size : (place + 1) * size])))
                pages.append(row.pages[place])
        if cards:
            self._offer(row.stem, cards, pages, row.keys[:stop])

    def keep_end(self, row: Row, tokens: Sequence[int], page: int) -> None:
        """The unfilled page at the end of a sequence that was just handed to the tree, if the tree took it."""
        assert row.stem is not None
        before, owner = row.stem.segment.key, row.lineage.owner
        stem = row.stem.children.get(page_key(before + owner, tokens))
        if len(tokens) < WORTH_KEEPING or stem is None or stem.segment.pages != (page,):
            return
        card = end_card(end_parent(before, owner), self.store.tag(row.tenant), tokens)
        if self.store.wanted(card.key):
            self._offer(stem, [card], [page], [*row.keys[: row.settled // self.tree.page_size], card.key])

    def _offer(self, stem: Stem, cards: Sequence[Card], pages: Sequence[int], chain: Sequence[Key]) -> None:
        self.tree.pin(stem)
        self.store.offer(Offer(stem, tuple(chain), tuple(cards), tuple(pages)))

    def pump(self) -> None:
        self._unpin(self.store.pump())

    def make_room(self) -> None:
        """Someone needs the pages that wait to be saved."""
        self._unpin(self.store.relent())
        self._unpin(self.store.settle())

    def _unpin(self, stems: Sequence[Stem]) -> None:
        for stem in stems:
            self.tree.unpin(stem)
