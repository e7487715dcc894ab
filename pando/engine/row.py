"""A row, and what is decided about rows for one step: values of the scheduler's, which alone changes them."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..kv.plan import Numbers, RowView
from ..kv.segment import Key, Lineage, Placement, Segment, compact
from ..kv.stem import Stem
from ..store.sought import Ended
from .imports import Import, Want
from .request import Constraint, Miss, SamplingParams, Truncated

if TYPE_CHECKING:
    from ..store.departures import Departure
    from ..store.transfer import Load

EARLY = 5  # a repair computes one in so many layers, the first ones, for every token


@dataclass(eq=False, slots=True)
class Row:
    """One answer being made: its tokens, and while it runs, its place in the tree and its pages."""

    request_id: str
    index: int
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    lineage: Lineage
    last: int  # the most tokens it may come to
    tenant: Key = b""  # the root of what its tenant has
    blocked: Sequence[int] = ()  # tokens it may not choose before min_tokens
    constraint: Constraint | None = None  # what it may become
    trace: Sequence[Key] = ()  # keys of the prompt's pages, and of what is left, as every tenant of its owner would have them
    arrival: int = 0  # its number in the order in which rows came
    arrived: float = 0.0  # when
    # ---- its tokens, and where their states are
    output: list[int] = field(default_factory=list)
    tokens: "array[int]" = field(init=False)  # prompt, but for what is imported, and output
    keys: list[Key] = field(default_factory=list)  # of its full pages, as far as they were needed
    at: int = 0  # the position of its first token
    stem: Stem | None = None  # the deepest on its path; pinned
    pages: list[int] = field(default_factory=list)  # all of them, the tree's first
    settled: int = 0  # tokens whose pages are the tree's
    computed: int = 0  # tokens whose K and V are in the pool
    is_suspect: bool = False  # what it computed is no number
    # ---- what stands before its tokens
    imported: int = 0  # so many tokens of the prompt
    wants: Sequence[Want] = ()  # where those are
    imports: tuple[Import, ...] = ()  # the same, found; pinned
    awaits: tuple[Key, bytes] | None = None  # the name of the last of it that was missing
    found: dict[Want, int] | None = None  # tokens of each that were there when it was first looked for
    repair: float = 0.0  # what is wanted is copied into its own pages, and this share of it repaired
    # ---- a row that answers nothing
    makes: Want | None = None  # it answers nothing: its tokens are that run's, which others wait for
    brings: bool = False  # and it computes nothing: all of that is kept below the pool, and comes up
    comes: tuple[Segment, ...] = ()  # its pages that do, or those that it computes in this step: others may read them meanwhile
    # ---- what comes from below the pool
    load: "Load | None" = None  # pages of it that are on their way into the pool
    loaded: int = 0  # tokens in them
    ended: Ended | None = None  # why the tiers below the pool had no more of it, where they know
    is_shunned: bool = False  # what should have come did not: it is computed
    rounded: bool = False  # some of what it reads went through a codec that rounds, or was computed behind such
    # ---- what is told of it
    is_new: bool = True  # it was not admitted before: `cached` counts on what is on its way
    cached: int | None = None  # prompt tokens that were there when it was first admitted
    miss: Miss | None = None  # and why they were no more
    why: Miss | None = None  # that, where the tree told it
    waited: float = 0.0  # seconds until it was first admitted
    tiers: dict[str, int] = field(default_factory=dict)  # tokens that came from each tier below the pool
    raised: int = 0  # of those, tokens that were encoded behind something else than what stands before them here
    truncated: Truncated | None = None  # what is left out of it
    scored: list[float] | None = None  # logprobs of the prompt, where they are wanted
    others: list[list[tuple[int, float, int]]] = field(default_factory=list)  # and of what could stand there: token, logprob, rank
    # ---- as the plan sees it
    _view: RowView | None = field(default=None, init=False, repr=False)
    _viewed: tuple[object, ...] = field(default=(), init=False, repr=False)  # what it shows

    def __post_init__(self) -> None:
        self.tokens = compact(self.prompt[self.imported :])

    @property
    def behind(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def loads(self) -> "list[Load]":
        """What it reads that is still on its way."""
        borrowed = [found.load for found in self.imports if found.load is not None]
        return borrowed if self.load is None else [self.load, *borrowed]

    @property
    def had(self) -> int:
        """Imported tokens that were there when they were first looked for."""
        return sum(self.found.values()) if self.found else 0

    @property
    def held(self) -> int:
        """Tokens encoded behind something else that were in the pool then."""
        return sum(count for want, count in (self.found or {}).items() if not want.exact) - self.raised

    def lose(self, count: int, place: int) -> None:
        """So many tokens do not come, and from this place on it computes. What is told of it is how it was when it was first admitted."""
        if self.is_new:
            self.cached = None if self.cached is None else self.cached - count
            self.miss = Miss("lost", self.imported + place)

    @property
    def borrowed(self) -> list[Import]:
        """What it reads while another row makes it, or brings it up."""
        return [found for found in self.imports if found.coming]

    def borrows(self, maker: "Row") -> list[Import]:
        return [found for found in self.borrowed if maker.makes is not None and found.want.name == maker.makes.name]

    def view(self, page_size: int) -> RowView:
        """As the plan sees it: the same object until what it reads is another."""
        path = self.stem.path() if self.stem else ()
        imports = () if self.repair else self.imports
        paths = [found.path() for found in imports]
        now = (path, self.pages, len(self.pages), self.settled, *paths)
        if self._view is None or self._viewed != now:
            moved = [Placement(segment, found.want.run.shift) for found, some in zip(imports, paths, strict=True) for segment in some]
            tail = tuple(self.pages[self.settled // page_size :])
            self._viewed = now
            self._view = RowView([*moved, *map(Placement, path)], tail, self.at + self.settled)
        return self._view

    @property
    def bends_logits(self) -> bool:
        """Are there other reasons than its states for what is likeliest?"""
        params = self.params
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        is_early = bool(self.blocked) and len(self.output) < params.min_tokens  # all that is likely may be blocked
        return self.constraint is not None or bool(params.logit_bias) or penalties != (1, 0, 0) or is_early

    def is_scored_from(self, start: int) -> bool:
        """Are there logprobs of the prompt to be had where its tokens are computed from here on?"""
        return self.scored is not None and start + 1 < len(self.prompt)

    @property
    def foreign(self) -> int:
        """Tokens that were encoded behind something else than what stands before them here."""
        return sum(len(want) for want in self.wants if not want.exact)

    @property
    def repaired(self) -> int:
        """So many of those are computed again."""
        foreign = self.foreign if self.repair else 0
        return min(foreign, math.ceil(self.repair * foreign - 1e-6))

    @property
    def repaired_end(self) -> int:
        """So many of its first tokens have their states from a repair: up to the end of the last module."""
        return self.wants[-1].end if self.repair else 0

    @property
    def repair_cost(self) -> int:
        """What its repair takes, in tokens that could be computed instead."""
        again = self.repaired + self.repaired_end - sum(map(len, self.wants)) if self.repair else 0
        return -(-(self.repaired_end + (EARLY - 1) * again) // EARLY)


@dataclass(frozen=True)
class Copy:
    """The first tokens of a page, into another."""

    source: int
    target: int
    tokens: int


class Schedule(NamedTuple):
    rows: list[Row]
    starts: Numbers  # how many of its tokens each has computed before
    counts: list[int]  # tokens each computes
    ready: list[Row]  # those that have caught up then, and get their next token
    copies: Sequence[Copy] = ()  # before anything is computed, in this order
    changed: bool = True  # rows or pages differ from the step before, or rows compute more than their next token
    loads: "Sequence[Load]" = ()  # what rows read that is still on its way
    repairs: Sequence[Row] = ()  # rows whose first tokens are repaired before the others are computed
    scored: bool = False  # does a row get logprobs of its prompt?
    plain: bool = False  # it has nothing of the last three, and nobody waits for what a row of it makes
    follows: bool = False  # the rows of the step before, and each computes its next token, as it did then

    departure: "Departure | None" = None  # pages that it fills, and that are saved while it computes

    def again(self, changed: bool) -> "Schedule":
        return self._replace(starts=self.starts + 1, copies=(), changed=changed, follows=True)
