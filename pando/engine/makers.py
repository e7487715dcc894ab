"""Rows that answer nothing: they make runs that others wait for, or bring them up from below the pool, and leave them to the tree.

What is brought up can be read on its way: it is lent, and each layer of it is waited for. What a step computes to its end can be read in
that step: in each layer, keys and values are written before anyone reads them. The row that makes or brings it has the pages until the tree
does. Then those who borrowed it find it there, or begin again.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ..kv.run import Run
from ..kv.segment import Key, Segment, page_key
from ..kv.tree import PrefixTree
from .below import Below, Passage
from .imports import Import, Want, find, wants
from .request import Miss, SamplingParams
from .row import Row
from .turns import Turn

ANSWERS_NOTHING = SamplingParams()
MOST_READ = 1024  # runs, by those who borrow some in one step: each takes a tenth of a millisecond, and long steps hold up others


class Makers:
    def __init__(self, tree: PrefixTree, waiting: deque[Row], running: list[Row], loading: list[Row], arrivals: Iterator[int]) -> None:
        """The scheduler's rows, as it has them at any time, and the numbers of those that come."""
        self._arrivals = arrivals
        self._tree, self._waiting, self._running, self._loading, self._page_size = tree, waiting, running, loading, tree.page_size
        self._making: dict[tuple[Key, bytes], Row] = {}  # by the name of what they make
        self.finishing: set[Row] = set()  # of those, whose run the step that is being made computes to its end,
        self._read = 0  # and how many runs are read by those who borrow them
        self._undecided: dict[tuple[Key, bytes], tuple[Key, Want]] = {}  # runs of tenants, to be made, or brought up if a remote has them
        self._lacking: dict[tuple[Key, bytes], dict[Row, None]] = {}  # rows to be told of what comes, by its name: of thousands, a few

    def __len__(self) -> int:
        return len(self._making) + len(self._undecided)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._making.values())

    @property
    def asks(self) -> bool:
        """Is there something of which it is not decided yet how it is made?"""
        return bool(self._undecided)

    def stop(self) -> list[Row]:
        """Nothing more is begun; answers all that were."""
        self._undecided.clear()
        return list(self._making.values())

    def is_lacked(self, want: Want) -> bool:
        """Is there a row that needs it, and was not placed yet?"""
        return want.name in self._lacking

    def forget(self, row: Row) -> None:
        """A row that is gone: what it made, and what it waited for."""
        if row.makes is not None:
            self._making.pop(row.makes.name, None)
        self._tell_no_more(row)

    def gather(self, row: Row, below: Below | None, now: float, *, alone: bool) -> list[Row] | None:
        """Finds what stands before a row's tokens. Where something is missing, answers the rows that will make it, but for those that are
        at it. `alone`: nobody runs who need not wait for anything."""
        if len(row.imports) == len(row.wants):
            return None
        if alone and row.awaits is not None and self.are_coming(row):
            return []  # there is nothing more to be found
        maker = self._making.get(row.awaits) if row.awaits is not None else None
        if maker is not None and (maker not in self.finishing or self._is_much(row)) and not (alone and maker.brings):
            return self._forward(maker) if alone else []  # of a thousand that wait for one another, only one needs to look
        lent = {maker.makes.name for maker in self.finishing if maker.makes is not None}  # and not in the tree yet
        found = [None if want.name in lent else find(self._tree, want, now) for want in row.wants]
        for old in row.imports:
            self._tree.unpin(old.pinned)
        row.imports = tuple(each for each in found if each is not None)  # kept while the others are made
        missing = [want for want, each in zip(row.wants, found, strict=True) if each is None]
        if row.found is None:
            first = {want.name: want for want in reversed(missing)}  # one that stands there twice is made once, and then found
            again = {want: len(want) for want in missing if first[want.name] is not want}
            row.found = {each.want: len(each.want) for each in row.imports} | again
            self._tell(row, missing)
            row.miss = self._missed(row, missing) or row.miss
        row.awaits = None
        return self._for_row(row, missing, below, now) if missing else None

    def _missed(self, row: Row, missing: Sequence[Want]) -> Miss | None:
        """Of what is missing the first that could have been there: text that is new in a prompt is no miss."""
        first = next((want for want in missing if not want.is_new or self._was_evicted(want)), None)
        return None if first is None else self.miss(row, first)

    def _for_row(self, row: Row, missing: Sequence[Want], below: Below | None, now: float) -> list[Row]:
        """Those that wait already, behind others, come forward: what stands between could be waiting for the room that this row holds.
        Where a tier did not bring a run, nobody waits for it to bring what the run was made behind. Of a thousand texts, each behind all
        before it, few are begun at a time: each has a list of what stands before it."""
        found, read = list[Row](), 0
        for want in missing:
            maker = self._making.get(want.name)
            if maker is None and read >= MOST_READ:
                continue
            row.awaits = want.name
            if maker is None:
                maker = self.begin(row.tenant, want, row.arrival, None if row.is_shunned else below, now)
                maker.is_shunned = row.is_shunned
                read += len(maker.wants)
                found.append(maker)
                if maker.ended is not None and row.miss in (None, cold := self.miss(row, want)):
                    row.miss = Miss(maker.ended, cold.token)
            else:
                found += self._forward(maker)
        return found

    def _forward(self, maker: Row) -> list[Row]:
        if maker not in self._waiting:
            return []
        self._waiting.remove(maker)
        return [maker]

    def are_coming(self, row: Row) -> bool:
        """Is all that a row lacks on its way into the pool?"""
        makers = (self._making.get(want.name) for want in _lacking(row))
        return not row.repair and all(
            maker is not None and maker.brings and maker.load is not None and not maker.behind for maker in makers
        )

    def are_made(self, row: Row) -> bool:
        """Is all that a row lacks computed by the step that is being made, and can it be lent?"""
        is_lent = not row.repair and not self._is_much(row)
        return is_lent and all(self._making.get(want.name) in self.finishing for want in _lacking(row))

    def _is_much(self, row: Row) -> bool:
        return self._read + len(row.wants) > MOST_READ

    def may_lend(self, row: Row, makers: Sequence[Row], below: Below | None, budget: int) -> bool:
        """Could a row be placed in the same step, behind those that make or bring what it lacks?"""
        rounds = below is not None and below.rounded.rounds  # who reads what was rounded is told so when that is there
        in_one = not (rounds or row.repair) and sum(len(maker.tokens) for maker in makers) < budget
        return in_one or all(maker.brings for maker in makers)

    def look_ahead(self, turns: dict[Row, Turn]) -> None:
        """Whose runs a step computes to their end; who borrows one that it does not has to wait for another step."""
        self.finishing.clear()
        self._read = 0
        for row in self._running if self._making else ():
            if row in turns and any(each.load is None and self._making.get(each.want.name) not in self.finishing for each in row.borrowed):
                del turns[row]
            elif row in turns:
                self._read += len(row.wants) if row.borrowed else 0
                self.finish(turns[row])

    def finish(self, turn: Turn) -> None:
        """What it computes may be lent, if that is the rest of a run."""
        row, start, count, length = turn
        if row.makes is not None and start + count == length and not row.loads and not row.makes.origin.before:
            self.finishing.add(row)

    def lend(self, row: Row) -> None:
        """A row that is placed reads what it lacks on its way. What is brought up counts as found."""
        self._tell_no_more(row)
        lacking = list(_lacking(row))
        self._read += len(row.wants) if lacking else 0
        for want in lacking:
            maker = self._making[want.name]
            assert maker.stem is not None
            self._tree.pin(maker.stem)
            maker.comes = maker.comes or tuple(coming(maker, len(maker.tokens), self._page_size))
            *whole, last = maker.comes
            if not maker.brings and row.cached is None:
                self._pass_on(row, want, maker)
            counts = maker.brings and row.cached is None and self._count(row, want, len(want))
            row.imports += (Import(want, maker.stem, None, 0, (*whole, last.head(len(last) - want.is_end)), maker.load, counts),)

    def borrowers(self, maker: Row) -> list[Row]:
        return [row for row in (*self._running, *self._loading) if row.imports and row.borrows(maker)] if maker.comes else []

    def take_back(self, maker: Row, borrowers: Iterable[Row], now: float) -> list[Row]:
        """A row that made or brought something is gone: the tree has that now, and whoever borrowed it finds it there. Answers those who
        do not: they begin again."""
        failed = list[Row]()
        for row in borrowers:
            borrowed = row.borrows(maker)
            found = [find(self._tree, each.want, now) for each in borrowed]
            for each in borrowed:
                self._tree.unpin(each.pinned)
            row.imports = (*(each for each in row.imports if each not in borrowed), *(each for each in found if each is not None))
            if None in found:
                self._uncount(row, [each.want for each in borrowed], is_lost=maker.miss is not None)
                failed.append(row)
        return failed

    def _uncount(self, row: Row, failed: Sequence[Want], *, is_lost: bool) -> None:
        """A row waits again for what did not come, and for what it borrows beside it: as if it had not counted on that."""
        if row.is_new and row.found is not None:
            beside = [each.want for each in row.imports if each.load is not None]
            row.cached, row.tiers, row.raised = None, {}, 0
            for want in (*failed, *beside):
                row.found.pop(want, None)
            self._tell(row, [want for want in row.wants if want not in row.found])
            cold = self._missed(row, failed) or self.miss(row, failed[0])
            row.miss = Miss("lost", cold.token) if is_lost else row.miss or cold

    def pass_on(self, maker: Row) -> None:
        """What a maker did not compute of its run, because the tree or a tier below it had that, those who wait for it did not, either."""
        assert maker.makes is not None
        name = maker.makes.name
        for row in self._lacking.get(name, ()):
            for want in [want for want in row.wants if want.name == name]:
                self._pass_on(row, want, maker)
        for row in self.borrowers(maker):
            for each in [each for each in row.borrows(maker) if each.counts]:
                _count_tiers(row, each.want, _found(maker), maker.tiers)

    def _pass_on(self, row: Row, want: Want, maker: Row) -> None:
        found = _found(maker)
        if found > 0 and self._count(row, want, min(found, len(want))):
            _count_tiers(row, want, found, maker.tiers)

    def _tell(self, row: Row, wants: Sequence[Want]) -> None:
        """A row that was not placed yet is told of each of these when it is made or brought up, whoever asked for it."""
        for want in wants:
            self._lacking.setdefault(want.name, {})[row] = None

    def _tell_no_more(self, row: Row) -> None:
        for name in {want.name for want in row.wants} & self._lacking.keys() if self._lacking else ():
            self._lacking[name].pop(row, None)
            if not self._lacking[name]:
                del self._lacking[name]

    def tell_only(self, asked: Collection[Row]) -> None:
        """Of rows that are neither asked for nor make anything, nobody knows where they are."""
        known = {*asked, *self}
        left = {name: dict.fromkeys(row for row in rows if row in known) for name, rows in self._lacking.items()}
        self._lacking = {name: rows for name, rows in left.items() if rows}

    def _count(self, row: Row, want: Want, came: int) -> bool:
        """Says whether it was not counted before: what a row has found may go and come while it waits."""
        if row.found is None or want in row.found:
            return False
        row.found[want] = came
        if row.miss is not None and came >= len(want) - 1 and row.miss == self.miss(row, want):
            row.miss = None
        return True

    def miss(self, row: Row, lost: Want) -> Miss:
        before = sum(len(want.run) for want in row.wants[: list(row.wants).index(lost)])
        return Miss("evicted" if self._was_evicted(lost) else "cold", before)

    def _was_evicted(self, want: Want) -> bool:
        return any(map(self._tree.was_evicted, want.keys))

    def begin_missing(self, tenant: Key, asked: Sequence[Want], below: Below | None, now: float) -> list[Row]:
        """Rows for runs that are neither in the tree nor being made, one behind the other. Of some it is asked first what a remote has."""
        missing = list[Row]()
        for want in asked:
            found = find(self._tree, want, now)
            if found is not None:
                self._tree.unpin(found.pinned)
            elif want.name not in self._making:
                if below is not None and below.asks(Passage.of(want, tenant), now):
                    self._undecided[want.name] = tenant, want
                else:
                    missing.append(self.begin(tenant, want, next(self._arrivals), below, now))
        return missing

    def decided(self, below: Below | None, now: float) -> Iterator[Row]:
        """The same for those that were asked about, one by one: if one fails, none that was begun is lost."""
        for name, (tenant, want) in list(self._undecided.items()):
            del self._undecided[name]  # it comes again where there is still no answer
            yield from self.begin_missing(tenant, [want], below, now)

    def unmade(self, tenant: Key, runs: Sequence[Run]) -> int:
        """How many of these runs are among them."""
        names = self._making.keys() | self._undecided.keys()
        return sum(want.name in names for run in runs for want in wants(tenant, [run], self._page_size))

    def begin(self, tenant: Key, want: Want, arrival: int, below: Below | None, now: float) -> Row:
        """What is kept below comes up as it is: nothing that it was made behind is needed for that."""
        brings, ended = below.keeps(want, tenant, now) if below is not None else (False, None)
        lineage, tokens = (want.lineage, want.run.tokens) if brings else (want.context, want.path)
        maker = Row("", -1, tokens, ANSWERS_NOTHING, 0, lineage, len(tokens), tenant, makes=want, arrival=arrival)
        maker.found, maker.brings, maker.ended = {}, brings, None if brings else ended
        if brings:
            maker.at, maker.keys = want.origin.first, list(want.keys)
        else:
            maker.at, maker.wants = want.origin.start, wants(tenant, want.origin.context, self._page_size, makes=True)
            maker.awaits = maker.wants[-1].name if maker.wants else None
        self._making[want.name] = maker
        self._tell(maker, maker.wants)
        return maker


def _lacking(row: Row) -> Iterable[Want]:
    """As it is asked for: often the first is enough."""
    if len(row.imports) == len(row.wants):
        return ()
    found = {each.want for each in row.imports}
    return (want for want in row.wants if want not in found)


def coming(row: Row, stop: int, page_size: int) -> Iterator[Segment]:
    """What a row has up to there that is not the tree's yet. The last page is a segment of its own, of which a reader may want less."""
    assert row.stem is not None
    first, last = row.settled // page_size, -(-stop // page_size) - 1
    if first < last:
        tokens = tuple(row.tokens[first * page_size : last * page_size])
        yield Segment(tuple(row.keys[first:last]), tokens, tuple(row.pages[first:last]), row.at + first * page_size)
    if first <= last:
        rest = tuple(row.tokens[last * page_size : stop])
        before = row.keys[last - 1] if last > first else row.stem.segment.key
        key = row.keys[last] if len(rest) == page_size else page_key(before + row.lineage.owner, rest)
        yield Segment((key,), rest, (row.pages[last],), row.at + last * page_size)


def _found(maker: Row) -> int:
    """What it did not compute of its run."""
    assert maker.makes is not None
    return (maker.cached or 0) - maker.had - (len(maker.tokens) - len(maker.makes.run))


def _count_tiers(row: Row, want: Want, found: int, tiers: Mapping[str, int]) -> None:
    left = min(found, len(want))
    for tier, count in tiers.items():
        came = min(left, count)
        row.tiers[tier] = row.tiers.get(tier, 0) + came
        row.raised += 0 if want.exact else came
        left -= came
