"""Rows that answer nothing: they make runs that others wait for, or bring them up from below the pool, and leave them to the tree."""

from collections import deque
from collections.abc import Sequence

from ..kv.run import Run
from ..kv.segment import Key
from ..kv.tree import PrefixTree
from .below import Below
from .imports import Want, find, wants
from .request import Miss, SamplingParams
from .row import Row


class Makers:
    def __init__(self, tree: PrefixTree, waiting: deque[Row], page_size: int) -> None:
        self._tree, self._waiting, self._page_size = tree, waiting, page_size
        self._making: dict[tuple[Key, bytes], Row] = {}  # by the name of what they make

    def __len__(self) -> int:
        return len(self._making)

    def all(self) -> list[Row]:
        return list(self._making.values())

    def of(self, name: tuple[Key, bytes]) -> Row | None:
        return self._making.get(name)

    def forget(self, row: Row) -> None:
        """A row that is gone, if it made something."""
        if row.makes is not None:
            self._making.pop(row.makes.name, None)

    def gather(self, row: Row, below: Below | None, now: float, *, alone: bool) -> list[Row] | None:
        """Finds what stands before a row's tokens. Where something is missing, answers the rows that will make it, but for those that are
        at it. `alone`: nobody runs."""
        if len(row.imports) == len(row.wants):
            return None
        if row.awaits is not None and (maker := self.of(row.awaits)) is not None:
            return self._forward(maker) if alone else []  # of a thousand that wait for one another, only one needs to look
        found = [find(self._tree, want, now) for want in row.wants]
        for old in row.imports:
            self._tree.unpin(old.pinned)
        row.imports = tuple(each for each in found if each is not None)  # kept while the others are made
        missing = [want for want, each in zip(row.wants, found, strict=True) if each is None]
        if row.found is None:
            row.found = sum(len(each.want) for each in row.imports)
            row.miss = self.miss(row, missing[0]) if missing else row.miss
        row.awaits = missing[-1].name if missing else None
        return self._for_row(row, missing, below, now) if missing else None

    def _for_row(self, row: Row, missing: Sequence[Want], below: Below | None, now: float) -> list[Row]:
        """Those that wait already, behind others, come forward: what stands between could be waiting for the room that this row holds.
        Where a tier did not bring a run, nobody waits for it to bring what the run was made behind."""
        found = []
        for want in missing:
            maker = self._making.get(want.name)
            if maker is None:
                maker = self.begin(row.tenant, want, row.arrival, None if row.is_shunned else below, now)
                maker.is_shunned = row.is_shunned
                found.append(maker)
            else:
                found += self._forward(maker)
        return found

    def _forward(self, maker: Row) -> list[Row]:
        if maker not in self._waiting:
            return []
        self._waiting.remove(maker)
        return [maker]

    def pass_on(self, maker: Row) -> None:
        """What a maker did not compute of its run, because the tree or a tier below it had that, those who wait for it did not, either."""
        assert maker.makes is not None
        found = (maker.cached or 0) - (maker.found or 0) - (len(maker.tokens) - len(maker.makes.run))
        for row in self._waiting if found > 0 else ():
            mine = [want for want in row.wants if want.name == maker.makes.name] if row.found is not None and row.cached is None else []
            for want in mine:
                came = left = min(found, len(want))
                row.found = (row.found or 0) + came
                for tier, count in maker.tiers.items():
                    row.tiers[tier] = row.tiers.get(tier, 0) + min(left, count)
                    left -= min(left, count)
                if row.miss == self.miss(row, want) and came >= len(want) - 1:
                    row.miss = None

    def miss(self, row: Row, lost: Want) -> Miss:
        before = sum(len(want.run) for want in row.wants[: list(row.wants).index(lost)])
        return Miss("evicted" if any(map(self._tree.was_evicted, lost.keys)) else "cold", before)

    def unmade(self, tenant: Key, runs: Sequence[Run]) -> int:
        """How many of these runs are among them."""
        return sum(want.name in self._making for run in runs for want in wants(tenant, [run], self._page_size))

    def begin(self, tenant: Key, want: Want, arrival: int, below: Below | None, now: float) -> Row:
        """What is kept below comes up as it is: nothing that it was made behind is needed for that."""
        brings = below is not None and below.keeps(want, tenant, now)
        lineage, tokens = (want.lineage, want.run.tokens) if brings else (want.context, want.path)
        maker = Row("", -1, tokens, SamplingParams(), 0, lineage, len(tokens), tenant, makes=want, arrival=arrival)
        maker.found, maker.brings = 0, brings
        if brings:
            maker.at, maker.keys = want.origin.first, list(want.keys)
        else:
            maker.at, maker.wants = want.origin.start, wants(tenant, want.origin.context, self._page_size, makes=True)
            maker.awaits = maker.wants[-1].name if maker.wants else None
        self._making[want.name] = maker
        return maker
