"""The engine as the event loop sees it: requests go in, tokens come out, and nothing here waits for a step."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

from anyio import CapacityLimiter, to_thread

from ..config import EngineConfig, ServerConfig
from ..engine.admission import PUBLIC
from ..engine.engine import Engine
from ..engine.facts import Stats, StepFacts
from ..engine.grammar import Grammars
from ..engine.llm import LLM
from ..engine.loop import EngineLoop
from ..engine.pace import measure
from ..engine.pins import Pin
from ..engine.request import Request, SamplingParams, Tenant, TokenEvent
from ..engine.schemas import Schemas
from ..errors import InvalidOption, InvalidPrompt, PandoError, QuotaExceeded, counted, one_of_several
from ..kv.run import Run
from ..markup.schema import Schema
from ..model.load import Model
from ..model.tokenizer import Tokenizer
from .failures import Stopped
from .history import History
from .metrics import Metrics
from .overflow import Overflow
from .prompts import Asked, Prompt, Prompts
from .schemas import Holdings
from .tenants import Public
from .ticket import Lost, Ticket

log = logging.getLogger(__name__)
State = Literal["loading", "ready", "draining", "failed"]
T = TypeVar("T")

WORKERS = 4  # threads that tokenise, render and compile grammars
MAX_RETRY_AFTER = 60
TOLD_EVERY = 5.0  # seconds, of what takes long at the start


class Busy(PandoError):
    """The queue is full."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(
            f"{counted(waiting, 'request')} {'is' if waiting == 1 else 'are'} waiting, as many as may; try again in about {retry_after} s"
        )
        self.retry_after = retry_after


class NotReady(PandoError):
    """There is no engine: not yet, or no longer."""


class UnknownModel(PandoError):
    """A request names another model than the one that is served."""


class Service:
    def __init__(
        self,
        engine: EngineConfig,
        server: ServerConfig,
        warn: Callable[[str], None] = lambda message: None,
        tenants: Sequence[Tenant] = (),
    ) -> None:
        """`tenants`: those that the operator's schemas are encoded for, if that is to be done at the start."""
        self.engine_config, self.config, self._tenants = engine, server, tenants
        self.state: State = "loading"
        self.name = server.served_model_name or engine.model
        self.created = int(time.time())
        self.workers = ThreadPoolExecutor(WORKERS, "pando-worker")
        self.metrics = Metrics(self.name, self._stats, server.metrics_compat)
        self.loop: EngineLoop
        self.prompts: Prompts
        self.history: History
        self.schemas: Holdings
        self.bytes_of: Callable[[Sequence[Run]], int]
        self.facts: dict[str, int] = {}
        self._warn = warn
        self._tickets: dict[str, Ticket] = {}
        self._open = 0  # rows
        self._preparing = 0  # requests
        self._registering = CapacityLimiter(1)
        self._numbers = itertools.count()
        self._seconds = 1.0  # that a request takes, lately

    # ---- life

    def _load(self, model: Model | None) -> Engine:
        """Loads the model and computes what is shared, in the engine's thread."""
        template = _read(self.config.chat_template, "chat_template") if self.config.chat_template else None
        texts = [_read(path, "share_prefix") for path in self.config.share_prefix]
        engine = LLM.from_config(self.engine_config, model).engine
        if template is not None:
            _check_template(engine.model.tokenizer, template, self.config.chat_template)
        engine.pins.quota = engine.pages.count * self.config.pin_quota // 100
        tokenizer = engine.model.tokenizer
        shared = _public(dict(zip(self.config.share_prefix, map(tokenizer.encode, texts), strict=True)), engine.pages.page_size)
        _prefill(engine, shared)
        self.facts = {
            "pool_tokens": engine.pages.count * engine.pages.page_size,
            "pool_bytes": engine.pool.nbytes,
            "max_model_len": engine.max_len,
        }
        self.page_size, self.max_rows = engine.pages.page_size, engine.scheduler.max_rows
        self.spell = lambda token: tokenizer.token_bytes(token, skip_special=False)
        self.vocab_size = engine.model.config.vocab_size
        self.eos, self.special = frozenset(tokenizer.eos), tokenizer.specials
        self.history = History(tokenizer.decode)
        grammars = Grammars(tokenizer, self.vocab_size, tokenizer.eos)
        self.workers.submit(grammars.json_object)  # its first use is slow
        self.schemas = self._holdings(engine, template)
        self.bytes_of = engine.bytes_of
        overflow = Overflow(self.config.truncation, engine.store.notes if engine.store is not None else None)
        sizes = engine.max_len, engine.truncations.window
        self.prompts = Prompts(tokenizer, template, grammars, self.history, Public(shared), self.schemas, overflow, *sizes)
        return engine

    def _holdings(self, engine: Engine, template: str | None) -> Holdings:
        held = Holdings(lambda: Schemas(engine, chat_template=template))
        for schema in held.load(self.config.schema, self.config.schema_dir):
            tenants, told = self._tenants if self.config.eager_schemas else (), time.monotonic()
            asked = sum(engine.encode(schema.stored, tenant) for tenant in tenants)
            while engine.has_work:
                engine.step()
                if time.monotonic() - told >= TOLD_EVERY:
                    made, told = asked - sum(engine.unmade(schema.stored, tenant) for tenant in tenants), time.monotonic()
                    log.info("schema %s: %d of %d texts are encoded", schema.name, made, asked)
            log.info("schema %s: %d tokens", schema.name, sum(part.tokens for part in schema.modules))
        return held

    async def start(self, model: Model | None = None) -> None:
        """Loads, and begins to answer."""
        events = asyncio.get_running_loop()

        def deliver(tokens: Sequence[TokenEvent]) -> None:
            events.call_soon_threadsafe(self._dispatch, tokens)

        def give_up(names: Sequence[str]) -> None:
            events.call_soon_threadsafe(self._give_up, names)

        self.loop = EngineLoop(lambda: self._load(model), deliver, give_up, self._observe)
        await asyncio.wrap_future(self.loop.start())
        self.state = "ready"

    def end_requests(self) -> None:
        """Their time to end by themselves is over: whoever waits is told so."""
        self.state = "draining" if self.state == "ready" else self.state
        for ticket in self._tickets.values():
            ticket.fail(
                Stopped("the server is being stopped, and cannot finish this answer; ask another server, or try again when it is back")
            )

    def stop(self) -> None:
        if self.state in ("ready", "draining"):
            self.loop.stop(timeout=self.config.drain_timeout)
        self.state = "failed"
        self.workers.shutdown(wait=False, cancel_futures=True)

    async def beside(self, work: Callable[[], T]) -> T:
        """Runs slow work in another thread."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, work)

    async def ask_engine(self, work: Callable[[Engine], T]) -> T:
        self.check_ready()
        return await self._answered(self.loop.call(work))

    async def _answered(self, posted: "Future[T]") -> T:
        try:
            return await asyncio.wrap_future(posted)
        except asyncio.CancelledError:
            if self.loop.alive:
                raise  # it is the client that has gone
            raise NotReady("the engine has stopped; restart the server") from None

    def check_ready(self) -> None:
        if self.state == "loading":
            raise NotReady("the model is still being loaded; GET /ready says when it is ready")
        if self.state != "ready":
            raise NotReady("the server is shutting down; ask another server, or try again later")
        if not self.loop.alive:
            raise NotReady("the engine has stopped; restart the server")

    # ---- requests

    async def prepare(self, work: Callable[[Prompts], T]) -> T:
        """Tokenises, renders, compiles: beside the event loop, and only for as many requests as may wait."""
        self.check_ready()
        self.check_room()
        self._preparing += 1
        try:
            return await self.beside(lambda: work(self.prompts))
        finally:
            self._preparing -= 1

    async def register(self, owner: bytes, pml: bytes, repair: float | None) -> Schema:
        """The same for a schema. A long one takes seconds: one at a time."""
        self.check_ready()
        self.check_room()
        self._preparing += 1
        try:
            return await to_thread.run_sync(self.schemas.add, owner, pml, repair, limiter=self._registering)
        finally:
            self._preparing -= 1

    async def open(self, request_id: str, asked: Asked, tenant: Tenant) -> Ticket:
        """Hands a request to the engine; raises what is wrong with it. Whoever opens a ticket closes it."""
        self.check_ready()
        self.check_room()
        # Two requests may well come with one id; the engine's must be its own, or one would get the other's tokens.
        ticket = Ticket(f"{next(self._numbers)}-{request_id}", asked, time.perf_counter() + self.config.request_timeout)
        self._open += ticket.open_answers
        self._tickets |= dict.fromkeys(ticket.names, ticket)
        try:
            each = zip(ticket.names, asked.prompts, strict=True)
            posted = [self.loop.add(_request(name, prompt, asked, tenant)) for name, prompt in each]
            for place, one in enumerate(posted):
                with one_of_several("prompt", place, len(posted)):
                    await self._answered(one)
        except asyncio.CancelledError:
            self.close(ticket)
            raise
        except BaseException:
            ticket.outcome = "failed"
            self.close(ticket, counted=False)
            raise
        return ticket

    def check_room(self) -> None:
        waiting = self._open + self._preparing - self.max_rows
        if waiting >= self.config.max_queue:
            seconds = int(self._seconds * (1 + waiting / self.max_rows)) + 1
            raise Busy(waiting, min(seconds, MAX_RETRY_AFTER))

    def close(self, ticket: Ticket, *, counted: bool = True) -> None:
        """The one place where a request ends, however it ended."""
        held = [self._tickets.pop(name, None) for name in ticket.names]
        if not any(held):
            return
        self._open -= ticket.asked.params.n * len(ticket.asked.prompts)
        if ticket.open_answers:
            for name in ticket.names:
                self.loop.cancel(name)
        elif ticket.outcome == "cancelled":
            ticket.outcome = "stop"
        seconds = time.perf_counter() - ticket.arrived
        self._seconds += 0.1 * (seconds - self._seconds)
        if counted:
            self.metrics.ended(ticket.outcome, seconds)

    async def compute(self, request_id: str, prompt: Prompt, tenant: Tenant) -> int:
        """Computes a prompt and answers nothing; says how many of its tokens were cached already."""
        ticket = await self.open(request_id, Asked([prompt], SamplingParams(temperature=0, max_tokens=1), silent=True), tenant)
        cached = 0
        try:
            async for batch in ticket.batches():
                cached = batch[0][1].num_cached_tokens
        finally:
            self.close(ticket)
        return cached

    async def pin(self, tokens: Sequence[int], tenant: Tenant, public: int, ttl: float | None) -> Pin:
        def pinned(engine: Engine) -> Pin:
            """Between two steps: one of them could take the pin away."""
            pin = engine.pin(tokens, tenant, public, ttl)
            if pin.tokens < len(tokens) - 1:  # the last token's states are not always there
                engine.pins.drop(pin)
                raise QuotaExceeded(
                    "the prompt was evicted before it could be pinned, because the cache is full; try again, or raise kv_cache_tokens"
                )
            return pin

        return await self.ask_engine(pinned)

    async def pin_if_room(self, pin: Callable[[Engine], Pin]) -> Pin | None:
        try:
            return await self.ask_engine(pin)
        except (QuotaExceeded, InvalidOption) as error:  # the answer is there: it is given all the same
            self._warn(str(error))
            return None

    # ---- from the engine

    def _stats(self) -> Stats:
        return self.loop.stats if self.state in ("ready", "draining") else Stats()

    def _dispatch(self, events: Sequence[TokenEvent]) -> None:
        now, told = time.perf_counter(), 0
        for event in events:
            if (ticket := self._tickets.get(event.request_id)) is not None:
                ticket.put(event, now)
                told += not ticket.asked.silent
        self.metrics.generated(told)

    def _give_up(self, names: Sequence[str]) -> None:
        for name in names:
            if (ticket := self._tickets.get(name)) is not None:
                ticket.fail(Lost("the engine failed several times on batches with this request; try again"))

    def _observe(self, seconds: float, facts: StepFacts) -> None:
        self.metrics.observe_step(seconds, facts.rows, facts.tokens, facts.shared_reads)


def _request(name: str, prompt: Prompt, asked: Asked, tenant: Tenant) -> Request:
    own, runs, position = (prompt.tokens, (), None) if prompt.bound is None else prompt.bound.parts
    return Request(
        name,
        own,
        asked.params,
        tenant,
        prompt.public,
        asked.score,
        asked.constraint,
        runs=runs,
        position=position,
        repair=prompt.repair,
        truncation=prompt.truncation,
    )


def _prefill(engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
    """Computes what all tenants share, and keeps it; and one token in any case, so that the first client does not wait for a cold start."""
    engine.warm_up()
    warm = [*prompts, engine.model.tokenizer.encode("Hello")]
    for place, tokens in enumerate(warm):
        engine.add(Request(f"start/{place}", tokens, SamplingParams(temperature=0, max_tokens=1), PUBLIC))
    while engine.has_work:
        engine.step()
    measure(engine)
    for tokens in prompts:
        engine.pin(tokens, PUBLIC, 0, None)


def _public(texts: Mapping[str, list[int]], page_size: int) -> list[list[int]]:
    """What all tenants share begins with whole pages: of a shorter text nobody would find anything."""
    for path, tokens in texts.items():
        if len(tokens) < page_size:
            wanted = "name a longer text, or lower page_size"
            log.warning(
                "share_prefix: %s has %d tokens, less than a page of %d, and is not shared; %s", path, len(tokens), page_size, wanted
            )
    return [tokens for tokens in texts.values() if len(tokens) >= page_size]


def _check_template(tokenizer: Tokenizer, template: str, path: str | None) -> None:
    """Whether it can be read as a template at all; which conversations it takes is between it and the clients."""
    from jinja2 import TemplateSyntaxError

    try:
        tokenizer.chat([{"role": "user", "content": "Hello"}], template=template)
    except InvalidPrompt as error:
        if isinstance(error.__cause__, TemplateSyntaxError):
            fault = error.__cause__
            raise InvalidOption(
                f"chat_template: {path}, line {fault.lineno}, is not a valid Jinja template: {fault.message}; correct it"
            ) from error


def _read(path: str, option: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # the mark that some editors begin a file with is no part of a prompt
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"{option}: {path} cannot be read ({error}); give a text file in UTF-8") from error
