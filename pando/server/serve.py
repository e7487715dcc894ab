"""`pando serve`: a socket, the routes, the engine, and what happens on signals."""

import asyncio
import gc
import json
import os
import shlex
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any, NoReturn

import uvicorn
from fastapi import FastAPI

from ..config import EngineConfig, ServerConfig
from ..engine.tiers import YOUNG
from ..errors import InvalidOption
from ..model.load import Model
from .app import make_app
from .connection import PATIENCE as KEEP_ALIVE
from .connection import Connection
from .journal import Journal, logging_config
from .schemas import read
from .service import Service
from .tenants import Tenants
from .tracing import tracing

BACKLOG = 2048
PATIENCE = 10  # seconds of loading after which nobody mistook an option, and whoever waits wants to see that it goes on
FAREWELL = 3  # seconds, after the drain, in which requests that are given up are told so
STALLED = 120_000  # milliseconds in which a client that is sent something takes none of it, and counts as gone
EXIT_SIGNAL = 128  # and the number of the signal: what a shell says of a process that a signal ended


class Server(uvicorn.Server):
    """The first signal drains: nothing new is let in, and what runs may end. The second one stops."""

    last_signal = 0

    def __init__(self, config: uvicorn.Config, drain: float, on_exit: Callable[[], None], give_up: Callable[[], None]) -> None:
        """`on_exit` is called when nothing is let in any more, `give_up` so many seconds later, if something still runs then."""
        super().__init__(config)
        self._drain, self._on_exit, self._give_up = drain, on_exit, give_up

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_exit()
        over = asyncio.get_running_loop().call_later(self._drain, self._give_up)
        await super().shutdown(sockets)
        over.cancel()

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.last_signal = sig
        self.force_exit = self.force_exit or self.should_exit
        self.should_exit = True


def serve(engine: EngineConfig, server: ServerConfig, model: Model | None = None) -> int:
    journal = Journal.from_config(server, sys.stderr)
    journal.hold()  # a start that fails says why, and nothing else
    tenants = Tenants(server.api_key, engine.cache_salt)
    list(read(server.schema, server.schema_dir))  # for what is wrong with them, before anything is waited for
    listener = _listen(server.host, server.port)
    running = Running(engine, server, tenants, journal, listener, model)
    running.on_ready = _keep_what_is_loaded
    try:
        with asyncio.Runner(loop_factory=running.server.config.get_loop_factory()) as runner:
            runner.run(running.run())
            if running.server.force_exit:
                _leave(EXIT_SIGNAL + running.server.last_signal)
    finally:
        listener.close()
    if running.failure is not None:
        raise running.failure
    if _threads_left():
        _leave(0)
    return 0


def _keep_what_is_loaded() -> None:
    """Looking through it for garbage, again and again, would hold up every thread."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(max(YOUNG, gc.get_threshold()[0]), *gc.get_threshold()[1:])  # nor at what a few requests have just made


def _leave(code: int) -> NoReturn:
    """At once: a thread in the middle of loading or computing cannot be interrupted, and Python would wait for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _threads_left() -> bool:
    """Whether threads of the engine still work. Those that are idle get a moment to end."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("pando-")]
    for thread in ours:
        thread.join(0.2)
    return any(thread.is_alive() for thread in ours)


class Running:
    def __init__(
        self,
        engine: EngineConfig,
        server: ServerConfig,
        tenants: Tenants,
        journal: Journal,
        listener: socket.socket,
        model: Model | None = None,
    ) -> None:
        owners = [tenants.tenant(owner, None) for owner in tenants.owners]
        self.service = Service(engine, server, lambda message: journal.warning("not pinned", reason=message), owners)
        self.failure: BaseException | None = None
        self.on_ready: Callable[[], None] = lambda: None
        self._journal, self._model, self._listener = journal, model, listener
        self._tracing = tracing(os.environ)
        self.app = make_app(self.service, tenants, journal, self._tracing)
        self.app.router.lifespan_context = self._lifespan
        settings = uvicorn.Config(
            self.app,
            http=Connection,
            log_config=logging_config(journal),
            access_log=False,
            server_header=False,
            ws="none",
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=server.drain_timeout + FAREWELL,
            backlog=BACKLOG,
        )
        self.server = Server(settings, server.drain_timeout, self._speak, self.service.end_requests)

    async def run(self) -> None:
        await self.server.serve(sockets=[self._listener])

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.ensure_future(self._load())
        try:
            yield
        finally:
            self.service.state = "draining" if self.service.state == "ready" else self.service.state
            loading.cancel()
            self.service.stop()
            self._tracing.close()

    async def _load(self) -> None:
        """Routes are there from the start, and say that the model is not."""
        asyncio.get_running_loop().call_later(PATIENCE, self._speak)
        try:
            await self.service.start(self._model)
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):
                self.failure, self.service.state = error, "failed"
                self.server.should_exit = True
            return
        self.on_ready()
        self._speak()
        self._announce()

    def _speak(self) -> None:
        """What was logged so far is wanted, unless the start failed."""
        if self.failure is None:
            self._journal.release()

    def _announce(self) -> None:
        service, config = self.service, self.service.config
        if self._tracing.note:
            self._journal.info(self._tracing.note)
        host, port = self._listener.getsockname()[:2]
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{port}"
        key = " -H 'Authorization: Bearer KEY'" if config.api_key else ""
        facts, engine = service.facts, service.engine_config
        rounded = "  weights in fp8" if engine.quantization == "fp8" else ""
        kept = " in fp8" if engine.kv_dtype == "fp8" else ""
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        body = json.dumps({"model": service.name, "messages": messages, "temperature": 0})
        if host not in ("127.0.0.1", "::1", "localhost") and not config.api_key:
            self._journal.warning("no --api-key: everyone who reaches this address may use it", host=host)
        print(
            f"{service.name}  context {facts['max_model_len']} tokens{rounded}\n"
            f"KV cache  {facts['pool_tokens']} tokens, {facts['pool_bytes'] / 2**30:.2f} GiB{kept}\n"
            f"listening on {address}  (docs: {address}/docs)\n\n"
            f"  curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n    -d {shlex.quote(body)}\n",
            flush=True,
        )
        self._journal.info("ready", model=service.name, address=address)


def _listen(host: str, port: int) -> socket.socket:
    """Takes the port before the model is loaded: that it is in use should not be found out minutes later."""
    with ExitStack() as undone:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            # asyncio sets TCP_NODELAY only where the protocol is named; without, the second packet of an answer waits 40 ms for an
            # acknowledgement of the first wherever a connection is used again
            listener = undone.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED)
            listener.bind(address)
            listener.listen(BACKLOG)
        except (OSError, UnicodeError) as error:
            why = error.strerror or error if isinstance(error, OSError) else "that cannot be the name of a host"
            raise InvalidOption(f"cannot listen on {host}:{port}: {why}; choose another --host or --port") from error
        undone.pop_all()
        return listener
