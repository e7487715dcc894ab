"""The routes."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

from anyio import CapacityLimiter
from fastapi import FastAPI, Header
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .. import __version__
from ..engine.engine import Engine
from ..engine.request import Tenant
from ..errors import InputError, MarkupError, PandoError, PromptTooLong, QuotaExceeded, SchemaExists
from .account import Account
from .answers import ChatAnswers, TextAnswers
from .bodies import Ignored, PatientRoute
from .exchange import Exchange, gone, unless_gone
from .failures import FailureBody, Stopped, failure, from_validation, in_markup
from .gate import Gate
from .journal import Journal
from .limits import MAX_NAME_CHARS
from .prompts import Asked, Prompt, Prompts
from .replies import ChatCompletion, Envelope, PinReply, TextCompletion, chat_id, json_response, text_id
from .responses import ResponseAnswers, ResponseReply, response_id
from .responses_wire import ResponsesBody
from .schema_routes import SchemaRoutes
from .schemas import NotYours, TooManySchemas, UnknownSchema
from .service import Busy, NotReady, Service, UnknownModel
from .tenants import Tenants
from .ticket import Lost, TimedOut
from .tracing import Operation, Tracing
from .views import (
    CacheView,
    DetokenizeReply,
    Health,
    ModelCard,
    ModelList,
    Ready,
    SegmentView,
    TokenizeReply,
    UnpinReply,
    Version,
    WarmReply,
    model_card,
)
from .wire import ChatBody, CompletionBody, DetokenizeBody, PinBody, TokenizeBody, UnpinBody, WarmBody

AnyBody = ChatBody | CompletionBody | ResponsesBody  # that is answered

MAX_SEGMENTS = 1000  # that one view of the cache lists
REASONS = {
    400: "The request cannot be answered as it is.",
    401: "No valid API key.",
    403: "Only the operator may do that.",
    404: "No such model, schema or route.",
    408: "The body did not arrive in time.",
    409: "The name is in use by a schema with different content.",
    413: "The body is too large.",
    422: "A field has a wrong type or value.",
    429: "The queue is full; Retry-After says when to try again.",
    503: "The model is not loaded yet, the server is shutting down, or the request took too long.",
}
# A model is made anew for each route and status that names it, which took longer than all else at a start: one does, others refer to it.
_BODY = {"application/json": {"schema": {"$ref": f"#/components/schemas/{FailureBody.__name__}"}}}
FAILURES: dict[int | str, dict[str, Any]] = {code: {"description": reason, "content": _BODY} for code, reason in REASONS.items()}
REFUSALS: tuple[tuple[type[PandoError], int, str | None], ...] = (  # the first that fits
    (Busy, 429, None),
    (NotReady, 503, "not_ready"),
    (TimedOut, 503, "timeout"),
    (Lost, 503, "failed"),
    (Stopped, 503, "stopped"),
    (UnknownModel, 404, "model_not_found"),
    (UnknownSchema, 404, "schema_not_found"),
    (NotYours, 403, "schema_of_operator"),
    (SchemaExists, 409, "schema_exists"),
    (TooManySchemas, 400, "schema_quota_exceeded"),
    (MarkupError, 400, "invalid_pml"),
    (PromptTooLong, 400, "context_length_exceeded"),
    (QuotaExceeded, 400, "pin_quota_exceeded"),
    (InputError, 400, None),
    (PandoError, 500, None),
)
STREAMED: dict[int | str, dict[str, Any]] = {  # whether a stream is a text or its events are objects, tools do not agree
    200: {"content": {"text/event-stream": {"schema": {}}}, "description": "With stream: server-sent events."}
}


def make_app(service: Service, tenants: Tenants, journal: Journal, tracing: Tracing) -> FastAPI:
    config = service.config
    gate = Middleware(Gate, tenants=tenants, journal=journal, max_body=config.max_body_mib << 20, refused=service.metrics.refused)
    every = ["*"]  # of the headers that pages may read, x-request-id and retry-after are most wanted
    cors = [Middleware(CORSMiddleware, allow_origins=config.cors_origins, allow_methods=every, allow_headers=every, expose_headers=every)]
    app = FastAPI(
        title="Pando",
        version=__version__,
        description="OpenAI's API; and every answer says where its prompt's tokens came from, and why the rest was computed.",
        middleware=[*(cors if config.cors_origins else []), gate],
        strict_content_type=False,
        responses={code: FAILURES[code] for code in (401, 404, 413, 422, 503)},
    )
    app.state.parsing, app.state.ignored = CapacityLimiter(1), Ignored()
    app.router.route_class = PatientRoute
    _Routes(service, tenants, journal, tracing).add_to(app)
    SchemaRoutes(service, tenants).add_to(app, FAILURES)
    _add_failures(app, service)
    return app


class _Routes:
    def __init__(self, service: Service, tenants: Tenants, journal: Journal, tracing: Tracing) -> None:
        self.service, self.tenants, self.journal, self.tracing = service, tenants, journal, tracing

    def add_to(self, app: FastAPI) -> None:
        asking: dict[int | str, dict[str, Any]] = {code: FAILURES[code] for code in (400, 429)}
        modelled = {**asking, **STREAMED, 400: {"description": REASONS[400], "model": FailureBody}}
        app.post("/v1/chat/completions", response_model=ChatCompletion, responses=modelled, tags=["answers"])(self.chat)
        app.post("/v1/completions", response_model=TextCompletion, responses={**asking, **STREAMED}, tags=["answers"])(self.complete)
        app.post("/v1/responses", response_model=ResponseReply, responses={**asking, **STREAMED}, tags=["answers"])(self.respond)
        app.get("/v1/models", response_model=ModelList, tags=["models"])(self.models)
        app.get("/v1/models/{model:path}", response_model=ModelCard, tags=["models"])(self.model)
        app.post("/tokenize", response_model=TokenizeReply, responses=asking, tags=["tokens"])(self.tokenize)
        app.post("/detokenize", response_model=DetokenizeReply, responses=asking, tags=["tokens"])(self.detokenize)
        app.get("/v1/cache", response_model=CacheView, tags=["cache"])(self.cache)
        app.post("/v1/cache/warm", response_model=WarmReply, responses=asking, tags=["cache"])(self.warm)
        app.post("/v1/cache/pin", response_model=PinReply, responses=asking, tags=["cache"])(self.pin)
        app.post("/v1/cache/unpin", response_model=UnpinReply, responses=asking, tags=["cache"])(self.unpin)
        app.get("/health", response_model=Health, tags=["state"])(self.health)
        app.get("/ready", response_model=Ready, tags=["state"])(self.ready)
        app.get("/version", response_model=Version, tags=["state"])(self.version)
        app.get("/metrics", response_class=Response, tags=["state"])(self.metrics)

    # ---- answers

    async def chat(self, request: Request, body: ChatBody, x_session_id: Annotated[str | None, Header()] = None) -> Response:
        """Answers a conversation."""
        return await self._answer(request, body, x_session_id)

    async def complete(self, request: Request, body: CompletionBody, x_session_id: Annotated[str | None, Header()] = None) -> Response:
        """Goes on after a prompt, or after each of several."""
        return await self._answer(request, body, x_session_id)

    async def respond(self, request: Request, body: ResponsesBody, x_session_id: Annotated[str | None, Header()] = None) -> Response:
        """Answers a conversation, in the form of OpenAI's Responses API. Nothing of it is stored."""
        return await self._answer(request, body, x_session_id)

    async def _answer(self, request: Request, body: AnyBody, in_header: str | None) -> Response:
        service, name = self.service, request.state.request_id
        tenant, session = self._who(request, body.cache_salt), body.session or _printable(in_header)
        self._check(body.model)
        asked = await service.prepare(lambda prompts: _asked(prompts, body, tenant, session))
        echoed = asked.prompts if isinstance(body, CompletionBody) and body.echo else []
        echoes = await service.beside(lambda: service.prompts.texts(echoed)) if echoed else []
        ticket = await service.open(name, asked, tenant)
        ticket.arrived = request.state.arrived  # before it was parsed and tokenised
        operation: Operation = "text_completion" if isinstance(body, CompletionBody) else "chat"
        exchange = Exchange(
            service,
            ticket,
            self._answers(body, asked, Account(ticket, session, service.metrics), echoes),
            tenant=tenant,
            session=session,
            ttl=body.ttl,
            span=self.tracing.request(operation, service.name, name, request.headers),
            journal=self.journal,
            about={"request_id": name, "path": request.scope["path"], "stream": body.stream, "n": asked.params.n, "user": body.user},
        )
        return exchange.stream() if body.stream else await exchange.whole(request)

    def _answers(self, body: AnyBody, asked: Asked, account: Account, echoes: Sequence[str]) -> ChatAnswers | TextAnswers | ResponseAnswers:
        name, spell, ends, now = self.service.name, self.service.spell, self.service.eos, int(time.time())
        if isinstance(body, ResponsesBody):
            return ResponseAnswers(asked, body, Envelope(response_id(), now, name), account, spell, ends)
        tells = body.return_token_ids
        if isinstance(body, ChatBody):
            envelope = Envelope(chat_id(), now, name, body.include_usage)
            return ChatAnswers(asked, envelope, account, spell, ends, top=body.top_logprobs or 0, tells_tokens=tells)
        envelope, special = Envelope(text_id(), now, name, body.include_usage), self.service.special
        return TextAnswers(asked, envelope, account, spell, ends, special=special, echoes=echoes, tells_tokens=tells)

    # ---- models and tokens

    async def models(self) -> Response:
        """The one model that is served."""
        self.service.check_ready()
        return json_response(ModelList(object="list", data=[self._card()]))

    async def model(self, model: str) -> Response:
        """One model."""
        self._check(model)
        return json_response(self._card())

    def _card(self) -> ModelCard:
        return model_card(self.service.name, self.service.created, self.service.facts["max_model_len"])

    async def tokenize(self, request: Request, body: TokenizeBody) -> Response:
        """The tokens of a text, or of a conversation as the chat template writes it."""
        owner = request.state.owner
        self._check(body.model)
        tokens = await self.service.prepare(lambda prompts: prompts.tokenize(body, owner))
        return json_response(TokenizeReply(tokens=tokens, count=len(tokens), max_model_len=self.service.facts["max_model_len"]))

    async def detokenize(self, body: DetokenizeBody) -> Response:
        """The text of tokens, special ones included."""
        self._check(body.model)
        if wrong := next((token for token in body.tokens if token >= self.service.vocab_size), None):
            raise HTTPException(
                400, f"{wrong} is not a token of this model; tokens are whole numbers from 0 to {self.service.vocab_size - 1}"
            )
        return json_response(DetokenizeReply(prompt=await self.service.prepare(lambda prompts: prompts.decode(body.tokens))))

    # ---- the cache

    async def cache(self, request: Request) -> Response:
        """What is cached for this client: its own segments and the public ones."""
        owner, service = request.state.owner, self.service
        (segments, truncated), stats = await service.ask_engine(lambda engine: (_segments(engine, owner), engine.stats()))
        pages = {"size": service.page_size, "total": stats.pages, "in_use": stats.pages_in_use, "cached": stats.pages_cached}
        return json_response({"pages": {**pages, "pinned": stats.pages_pinned}, "segments": segments, "truncated": truncated})

    async def warm(self, request: Request, body: WarmBody) -> Response:
        """Computes a prompt now, so that requests that begin with it need not; with a ttl it is pinned for that long."""
        tenant = self._who(request, body.cache_salt)
        self._check(body.model)
        prompt = await self.service.prepare(lambda prompts: prompts.warm(body, tenant.owner))
        cached = await unless_gone(request, self.service.compute(request.state.request_id, prompt, tenant))
        if cached is None:
            return gone()
        pin = await self._pin(prompt, tenant, body.ttl) if body.ttl is not None else None
        return json_response(WarmReply(tokens=len(prompt.tokens), cached_tokens=cached, pin=pin))

    async def pin(self, request: Request, body: PinBody) -> Response:
        """Computes a prompt if it is not cached, and keeps it until it is unpinned or its ttl is over."""
        tenant = self._who(request, body.cache_salt)
        self._check(body.model)
        prompt = await self.service.prepare(lambda prompts: prompts.warm(body, tenant.owner))
        if await unless_gone(request, self.service.compute(request.state.request_id, prompt, tenant)) is None:
            return gone()
        return json_response(await self._pin(prompt, tenant, body.ttl))

    async def _pin(self, prompt: Prompt, tenant: Tenant, ttl: int | None) -> PinReply:
        pin = await self.service.pin(prompt.tokens, tenant, prompt.public, ttl)
        return PinReply(id=pin.pin_id, tokens=pin.tokens, expires_at=None if ttl is None else int(time.time()) + ttl)

    async def unpin(self, request: Request, body: UnpinBody) -> Response:
        """Lets go of what was pinned; it stays cached until its pages are needed."""
        owner = request.state.owner

        def unpin(engine: Engine) -> bool:
            pin = engine.pins.get(body.id, owner)
            if pin is not None:
                engine.pins.drop(pin)
            return pin is not None

        return json_response(UnpinReply(id=body.id, unpinned=await self.service.ask_engine(unpin)))

    # ---- state

    async def health(self) -> Response:
        """Whether the process lives, and its engine with it."""
        if self.service.state == "ready" and not self.service.loop.alive:
            raise HTTPException(503, "the engine has stopped; restart the server")
        return json_response(Health(status="ok"))

    async def ready(self) -> Response:
        """Whether it answers: the model is loaded and the pool is warm."""
        state = self.service.state if self.service.state != "ready" or self.service.loop.alive else "failed"
        return json_response(Ready(status=state), 200 if state == "ready" else 503)

    async def version(self) -> Response:
        """Pando's version."""
        return json_response(Version(version=__version__))

    async def metrics(self) -> Response:
        """For Prometheus."""
        body, kind = await run_in_threadpool(self.service.metrics.render)
        return Response(body, media_type=kind)

    # ---- checks

    def _who(self, request: Request, cache_salt: str | None) -> Tenant:
        return self.tenants.tenant(request.state.owner, cache_salt)

    def _check(self, model: str | None) -> None:
        self.service.check_ready()
        if model is not None and model != self.service.name:
            raise UnknownModel(f"the model {model[:80]!r} is not served here; {self.service.name!r} is")


def _asked(prompts: Prompts, body: AnyBody, tenant: Tenant, session: str | None) -> Asked:
    if isinstance(body, CompletionBody):
        return prompts.completion(body, tenant, session)
    return prompts.chat(body.chat if isinstance(body, ResponsesBody) else body, tenant, session)


def _segments(engine: Engine, owner: bytes) -> tuple[list[SegmentView], bool]:
    now, stems, pins = engine.scheduler.clock(), engine.segments(owner), engine.pins.ends()
    views: list[SegmentView] = []
    for stem, readers in stems[:MAX_SEGMENTS]:
        above = stem.parent if stem.parent is not None and stem.parent.parent is not None else None
        views.append(
            {
                "key": stem.segment.key.hex()[:16],
                "parent": above.segment.key.hex()[:16] if above is not None else None,
                "tokens": len(stem.segment),
                "first": stem.segment.first,
                "readers": readers,
                "tier": "device",
                "age_seconds": round(now - stem.born, 3),
                "idle_seconds": round(now - stem.used, 3),
                "pins": pins[stem],
            }
        )
    return views, len(stems) > MAX_SEGMENTS


def _printable(session: str | None) -> str | None:
    """A header may hold anything; what could not stand in a body is not taken from there either."""
    if session is None or not session:
        return None
    with suppress(UnicodeError):  # clients write UTF-8; as the protocol has it, it was read as Latin-1
        session = session.encode("latin-1").decode()
    if len(session) > MAX_NAME_CHARS or not session.isprintable():
        raise HTTPException(400, f"the header x-session-id must have at most {MAX_NAME_CHARS} characters, all of them printable")
    return session


def _methods(app: FastAPI, path: str) -> list[str]:
    """What this path may be asked with: a path may have several routes, of which the framework names one."""
    found = {method for route in app.routes if isinstance(route, Route) and route.path_regex.match(path) for method in route.methods or ()}
    return sorted(found - {"HEAD"})


def _add_failures(app: FastAPI, service: Service) -> None:
    def answer(
        status: int, message: str, param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Response:
        service.metrics.refused(status)
        return json_response(failure(status, message, param, code), status, headers)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        message, param = from_validation(error.errors())
        broken = any(found.get("type") == "json_invalid" for found in error.errors())
        return answer(400 if broken else 422, message, param)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text, headers, asked = str(error.detail), error.headers, f"{request.method} {request.url.path[:200]}"
        if error.status_code == 404 and text == "Not Found":
            text = f"there is no route {asked}; GET /openapi.json lists the routes"
        elif error.status_code == 405:
            known = _methods(app, request.url.path)
            text = f"there is no route {asked}, but this path takes {' and '.join(known)}; GET /openapi.json lists the routes"
            headers = {"allow": ", ".join([*known, "HEAD"] if "GET" in known else known)}
        return answer(error.status_code, text, headers=headers)

    async def own(request: Request, error: Exception) -> Response:
        status, code = next((status, code) for kind, status, code in REFUSALS if isinstance(error, kind))
        headers = {"retry-after": "5"} if isinstance(error, NotReady) else {}
        headers |= {"retry-after": str(error.retry_after)} if isinstance(error, Busy) else {}
        headers |= {"x-should-retry": "false"} if isinstance(error, TimedOut) else {}  # it would take as long again: clients ask thrice
        service.metrics.refused(status, begun=type(error) in (TimedOut, Lost, Stopped))
        message = str(error)
        if isinstance(error, PromptTooLong):
            # Clients know this error by words of other servers, and not by its code. They look for them in what Python prints of the body,
            # where an apostrophe would be escaped.
            most = service.facts["max_model_len"]
            message = f"the request exceeds the available context size, and the maximum context length is {most} tokens: {message}"
        body = in_markup(status, error, code) if isinstance(error, MarkupError) else failure(status, message, code=code)
        return json_response(body, status, headers)

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(PandoError, own)
