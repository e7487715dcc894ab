"""The engine: requests in, tokens out, one step at a time."""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat

import torch
from torch import Tensor

from ..config import EngineConfig
from ..errors import InvalidOption, QuotaExceeded
from ..kv.pages import Pages
from ..kv.run import Run
from ..kv.segment import Key, extend_keys
from ..kv.stem import Stem
from ..kv.tree import PrefixTree
from ..model.load import Model
from ..model.shelf import Shelf
from ..store.tier import Lost
from .admission import PUBLIC, Admission
from .answer import Answer
from .batch import Batcher, Unread, lowering_of, warm_up
from .costs import chosen_cost
from .cutting import Cutting
from .facts import Counting, Stats, StepFacts
from .flight import Flight
from .graphs import on_cuda
from .imports import find, wants
from .pins import Pin, Pins, Turn
from .repair import Repairer
from .request import Request, Tenant, TokenEvent
from .row import Row, Schedule
from .sampler import NO_TOKEN, NOBODY, Choices, Sampler
from .scheduler import Scheduler
from .scores import take_scores
from .sizing import context_of, page_count, pool_of, rows_of
from .tiers import open_store
from .truncation import Truncations
from .whole import Whole

log = logging.getLogger(__name__)

TENDED = 0.02  # seconds until what is being saved is looked after again
PIN_SHARE = 0.25  # of the pool that pins may hold


class Engine:
    def __init__(self, model: Model, config: EngineConfig) -> None:
        self.model = model = model.with_states(config.kv_dtype)
        self.max_len = context_of(model.config, config)
        self.pages = Pages(page_count(model, config, self.max_len), config.page_size)
        self.tree = PrefixTree(config.page_size)
        self.pool = pool_of(model, config, self.pages)
        rows = rows_of(model, config, self.pool)
        self.store = open_store(model, config, self.pool)
        self.scheduler = Scheduler(
            self.pages,
            self.tree,
            max_rows=rows,
            budget=config.max_num_batched_tokens,
            reuse=config.prefix_caching,
            store=self.store,
        )
        lower = lowering_of(model, config.page_size, use_reference=config.attention == "reference")
        self.batcher = Batcher(
            model.decoder.geometry,
            config.page_size,
            model.device,
            lower,
            cost=chosen_cost(model, config.attention, Shelf.of_user().home / "costs"),
        )
        seen, window = self.store.tags.name if self.store is not None else None, min(self.max_len, self.pages.count * config.page_size)
        self.admission = Admission(model, self.pages, self.max_len, config, self._alive, seen)
        self.truncations = Truncations(self.tree, self.scheduler.below, window, self.scheduler.clock, self.admission.cannot_move)
        self.cutting = Cutting(self.admission, self.truncations, self.scheduler.clock)
        captures = config.cuda_graphs and lower is not None and model.device.type == "cuda"
        self.graphs = on_cuda(model.decoder, self.pool, model.dtype) if captures else None
        self.repairer = Repairer(model.decoder, self.pool, lower)
        self.sampler = Sampler(model.config.vocab_size, model.device)
        self.pins = Pins(self.tree, int(PIN_SHARE * self.pages.count))
        self.answers: dict[Row, Answer] = {}
        self._begun: dict[Row, Answer] = {}  # that are not prepared yet
        self.steps = 0
        self.facts = self.totals = StepFacts()
        self._token_bytes, self._attention = self.pool.nbytes // self.pool.slots, config.attention
        self._counting = Counting(self.batcher, self._token_bytes)
        self._overlap = model.device.type == "cuda" if config.overlap is None else config.overlap
        self._flight: Flight | None = None
        self._amended = False  # a token of the last step was not what the next one was fed: it may be so again, and is looked at first
        self.whole, self._settled = Whole(self._begin_again, self._drop_cancelled), 0.0
        self._cancelled, self._events = list[str](), deque[TokenEvent]()  # requests; and what nobody has heard of yet

    def warm_up(self, *, capture: bool = True) -> None:
        """Hardly anything is compiled any more when requests come, nor captured."""
        if self.batcher.lower is not None:
            warm_up(self.model, self.pages.page_size)
            if self.graphs is not None:
                self.graphs.warm_up(self.scheduler.max_rows if capture else 0, self.scheduler.budget)

    def tend(self) -> float | None:
        """What there is to do although nobody asks for anything; answers in how many seconds there is more of it, if it is known."""
        with self.whole.undisturbed():
            self.expire_pins()
            self.scheduler.tend()
        return TENDED if self._is_moving else None

    @property
    def _is_moving(self) -> bool:
        """Is something on its way between the tiers?"""
        below = self.scheduler.below
        return self.store is not None and (self.store.busy or (below is not None and bool(below.limbo)))

    def close(self) -> None:
        """What is on its way to the tiers below the pool arrives there; afterwards there is nothing to do for this engine."""
        if self.store is not None:
            with self.whole.undisturbed(), self.whole.breakable():
                self.store.go()
                self.truncations.below = self.store = None
                self.scheduler.detach()

    # ---- requests

    def add(self, request: Request) -> None:
        """Queues a request, or raises what is wrong with it; nothing of a refused request is kept."""
        with self.whole.undisturbed():
            self._queue(self.cutting.rows(request))

    def _queue(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.answers[row] = self._begun[row] = Answer(row, self.model.tokenizer, self.admission.eos)
        self.scheduler.add(rows)

    def cancel(self, request_id: str) -> None:
        """Drops a request's rows; what they computed stays in the tree. In the middle of other work (a garbage collector may close a stream
        at any time) it waits for the end of that."""
        self._cancelled.append(request_id)
        with self.whole.undisturbed():
            pass

    def _drop_cancelled(self) -> None:
        while self._cancelled:
            request_id = self._cancelled[-1]
            self.cutting.cancel(request_id)
            for row in [row for row in self.answers if row.request_id == request_id]:
                self._end(row)
            self._cancelled.remove(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self.answers or len(self.cutting) or len(self.scheduler.makers) or self._events)

    # ---- a step

    def step(self) -> list[TokenEvent]:
        """Next, forward, sample, settle. Where steps overlap, it is the step before that is settled, while this one runs."""
        self.facts = StepFacts()
        with torch.inference_mode(), self._whole_or_not_at_all():
            self._step()
            self._drop_cancelled()
        return list(map(deque.popleft, repeat(self._events, len(self._events))))  # at once: who is interrupted hears of them the next time

    def _step(self) -> None:
        if len(self.cutting):
            self._queue(self.cutting.decided())
        before = self._flight
        if before is None:
            self._flight = self._launch(self.scheduler.next())
            if self._flight.schedule.plain and self._overlap and not self._amended:
                return
            before, self._flight = self._flight, None
        else:
            schedule = self.scheduler.ahead(before.schedule)
            self._flight = self._launch(schedule) if schedule is not None else None
            if schedule is None and self.store is not None:
                self.store.go()  # what was placed is on its way, though there is nothing to compute: not begun, it would never end
        self._settle(before)
        if self._flight is not None and (logits := self._flight.logits) is not None:
            self._flight = self._flight._replace(chosen=self._sample(self._flight.schedule, logits), logits=None)

    def _launch(self, schedule: Schedule) -> Flight:
        began, logits = time.perf_counter(), self._forward(schedule)
        chosen = None if self._unread is not None and self._unread.is_bound else self._sample(schedule, logits)
        return Flight(schedule, self._counting.step(schedule), began, logits if chosen is None else None, chosen)

    @contextmanager
    def _whole_or_not_at_all(self) -> Iterator[None]:
        """A step that is cut short (Ctrl-C, no memory) leaves states half written. Its rows go on from their tokens, without them, and
        where there was no memory, in smaller steps."""
        with self.whole.undisturbed():
            try:
                yield
            except Lost:
                self.whole.surely(self.scheduler.unload)
            except torch.OutOfMemoryError:
                self.whole.begin_again()
                if self.graphs is not None and self.graphs.let_go():
                    return
                if not self.scheduler.shrink():
                    raise
                sizes = self.scheduler.budget, self.scheduler.max_rows
                log.warning("a step did not fit into the memory; from now on it has at most %d tokens of %d rows", *sizes)
            except BaseException as error:
                self.whole.begin_again()
                if not self.batcher.falls_back(error):
                    raise
                self.graphs = None

    def _begin_again(self) -> None:
        self._flight = None
        self.scheduler.forget_states(self.answers)
        self.pins.reset()

    def _forward(self, schedule: Schedule) -> Tensor:
        self.pool.arrivals, self.pool.departure = (), None
        for copy in schedule.copies:
            self.pool.copy(copy.source, copy.target, copy.tokens)
        if self.store is not None:
            self.store.go(needed=bool(schedule.loads))
        for row in schedule.repairs:
            self.repairer.repair(row.tokens[: row.repaired_end], row.pages, row.imports, row.repaired)
        self.pool.arrivals = schedule.loads  # which rows that are repaired do not read
        if not schedule.rows:
            if self.scheduler.starved and not self._is_moving:  # else there may be more room soon
                self.pins.give_way()
            with self.whole.breakable():
                self.scheduler.wait()
            return torch.empty(0, self.model.config.vocab_size)
        batch = self.batcher.prepare(schedule, self._unread)
        with self.whole.breakable():
            logits = self.graphs.forward(batch, layered=bool(schedule.loads)) if self.graphs is not None else None
            if logits is None:
                self.pool.departure = schedule.departure  # what was captured has no moment between two layers
                logits = self.model.decoder.forward(self.batcher.step(batch), self.pool)
        if schedule.departure is not None:
            schedule.departure.computed(self.model.config.layers)
        return logits

    def _sample(self, schedule: Schedule, logits: Tensor) -> Choices:
        """The rows that have caught up get their next token; whatever it is, where they have ended meanwhile."""
        likeliest = self.graphs.likeliest if self.graphs is not None else None
        if schedule.scored:
            logits, likeliest = take_scores(schedule, logits), None
        rows = [row if row in self.answers else NOBODY for row in schedule.ready]
        return self.sampler.choose(logits, rows, self._unread, likeliest)

    @property
    def _unread(self) -> Unread | None:
        """What the step before chose, if nobody here knows it yet."""
        return self._flight.unread if self._flight is not None else None

    def _settle(self, flight: Flight) -> None:
        schedule, self.facts = flight.schedule, flight.facts
        self.scheduler.settle(schedule)  # while the device computes: whatever is asked of it now comes behind that
        while self._begun:
            self._begun.popitem()[1].prepare()
        with self.whole.breakable():
            chosen, are_fed = flight.read()
        self._amended = not are_fed
        if not are_fed and self._flight is not None:
            self._flight = None
            self.scheduler.retract()
        self.steps += 1
        self.totals = self.totals.plus(self.facts)
        now = time.perf_counter()
        if self.store is not None and self.facts.tokens and not schedule.loads:
            prompts = sum(count for count in schedule.counts if count > 1)
            self.store.speeds.stepped(self.facts.tokens, prompts, now - max(flight.began, self._settled))
        self._settled = now
        for row, token in zip(schedule.ready, chosen, strict=True):
            answer = self.answers.get(row)
            if answer is None:
                continue  # it ended while the step ran: this token is one too many
            self._events.append(event := answer.take(token))
            if event.finish_reason is not None:
                row.is_suspect = token.token == NO_TOKEN
                self._end(row)
                if row.is_suspect and not row.bends_logits:  # else it may be its own fault, and not that of the states
                    self._distrust(row)

    def _distrust(self, row: Row) -> None:
        """Its states are no numbers, and the good ones before them were computed beside them: nothing of them stays in any tier."""
        if self.scheduler.below is not None:
            self.scheduler.below.discard(row)
        self.clear_cache()

    def _end(self, row: Row) -> None:
        del self.answers[row]
        self._begun.pop(row, None)
        self.sampler.forget(row)
        self.scheduler.remove(row)
        if not (self.answers or len(self.scheduler.makers)) and self._flight is not None:
            self._flight = None  # nobody waits for it; read at the next request, it would seem to have taken until then
            self.scheduler.retract()

    # ---- facts

    @property
    def pages_in_use(self) -> int:
        return self.pages.count - self.pages.free

    def stats(self) -> Stats:
        scheduler = self.scheduler
        return Stats(
            steps=self.steps, plans=self.batcher.plans_made, preemptions=scheduler.preemptions,
            pages=self.pages.count, pages_in_use=self.pages_in_use, pages_cached=self.tree.pages, pages_evictable=self.tree.evictable(),
            pages_pinned=self.pins.pages, running=len(scheduler.running), waiting=len(scheduler.waiting) + len(self.cutting),
            attention=self._attention, shared_reads=self.totals.shared_reads, shared_rows=self.totals.shared_rows,
            read_bytes=self.totals.read_bytes, flat_bytes=self.totals.flat_bytes,
            store=self.store.facts() if self.store is not None else None,
        )  # fmt: skip

    def clear_cache(self) -> None:
        """Forgets whatever is neither pinned nor needed by a running request."""
        with self.whole.undisturbed():
            self.pages.give(self.tree.clear())

    # ---- keeping

    def pin(
        self, tokens: Sequence[int], tenant: Tenant, public: int, ttl: float | None, *, automatic: bool = False, is_cut: bool = False,
        session: str | None = None, asked: int = 0,
    ) -> Pin:  # fmt: skip
        """Keeps what is cached of a context, for `ttl` seconds or until it is unpinned. `is_cut`: of what is left of it. `session`: the
        conversation of which it is a turn, with so many tokens that were asked."""
        if not self.scheduler.reuse:
            raise InvalidOption("prefix_caching is off, so nothing is kept that could be pinned; turn it on")
        now, keys, home = self.scheduler.clock(), list[Key](), self.admission.lineage(tenant, public)
        extend_keys(keys, home, tokens, self.pages.page_size)
        with self.whole.undisturbed():
            self.expire_pins()
            self.scheduler.clear_away()
            turn = None if session is None or not (pages := asked // self.pages.page_size) else Turn(session, keys[pages - 1])
            self.pins.make_way(tenant, keys if automatic and is_cut else (), turn)
            stems, length = self.truncations.cached(tokens, home, keys, is_cut=is_cut)
            try:
                return self.pins.add(stems, length, keys, tenant, None if ttl is None else now + ttl, automatic=automatic, turn=turn)
            except QuotaExceeded:
                self.tree.forget_bare(stems[0])
                raise

    def expire_pins(self) -> None:
        self.pins.expire(self.scheduler.clock())

    def segments(self, owner: bytes) -> list[tuple[Stem, int]]:
        """The stems that an owner may see, its tenants' and everyone's, each with the number of rows that read it; parents first."""
        stems = list(self.tree.stems())
        readers: dict[Stem, int] = {}
        for row in self.scheduler.running:
            for stem in (row.stem, *(found.pinned for found in row.imports)):
                while stem is not None:
                    readers[stem] = readers.get(stem, 0) + 1
                    stem = stem.parent
        return [(stem, readers.get(stem, 0)) for stem in stems if self.admission.owners.get(stem.owner) in (owner, PUBLIC.owner)]

    def _alive(self) -> set[Key]:
        """Owners of whatever is cached, or being computed."""
        return {stem.owner for stem in self.tree.stems()} | {row.lineage.owner for row in self.answers}

    # ---- modules

    def encode(self, runs: Sequence[Run], tenant: Tenant) -> int:
        """Queues what is not cached of runs that will be asked for; answers how many there are to make. Steps make them."""
        if not self.scheduler.reuse:
            raise InvalidOption("prefix_caching is off, so the states of modules have no place; turn it on")
        for run in runs:
            self.admission.check_prompt(run.tokens, run.end if run.origin is None else run.origin.first + len(run))
        if self.admission.pages_of(runs) > self.pages.count:  # the later ones have the longer contexts
            for run in reversed(runs):
                self.admission.last([], 0, 0, self.admission.pages_of([run]))
        root = self.admission.tenant(tenant)
        asked = [want for run in runs for want in wants(root, [run], self.pages.page_size)]
        self.admission.owners.update((want.lineage.owner, tenant.owner) for want in asked)
        with self._whole_or_not_at_all():
            return self.scheduler.make(root, asked)
        return len(self.scheduler.makers)  # it was cut short, and all begin again

    def unmade(self, runs: Sequence[Run], tenant: Tenant) -> int:
        """How many of these runs are being made, or will be."""
        return self.scheduler.makers.unmade(self.admission.tenant(tenant), runs)

    def holds(self, run: Run, tenant: Tenant) -> bool:
        """Are the states of a run in the cache?"""
        [want] = wants(self.admission.tenant(tenant), [run], self.pages.page_size)
        with self.whole.undisturbed():
            self.scheduler.clear_away()
            found = find(self.tree, want, self.scheduler.clock())
            if found is not None:
                self.tree.unpin(found.pinned)
        return found is not None

    def bytes_of(self, runs: Sequence[Run]) -> int:
        """What the states of runs take, in whole pages."""
        return sum(self.pages.needed(len(run)) for run in runs) * self.pages.page_size * self._token_bytes
