"""A real server on a free port, in a thread, around the tiny model."""

import asyncio
import contextlib
import io
import threading
import time
from collections.abc import Iterator

import httpx

from pando.config import ServerConfig
from pando.model.load import Model
from pando.server.journal import Journal
from pando.server.serve import Running, _listen
from pando.server.service import Service
from pando.server.tenants import Tenants

from ..tiny import tiny_config, tiny_model

NAME = "tiny"


class Live:
    def __init__(self, running: Running, url: str, log: io.StringIO) -> None:
        self.running, self.url, self.log = running, url, log

    @property
    def service(self) -> Service:
        return self.running.service

    def metric(self, name: str, **headers: str) -> float:
        """The value of one sample, written as Prometheus has it, labels included."""
        text = httpx.get(self.url + "/metrics", headers=headers, verify=False).text  # to load certificates takes longer than an answer
        return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.rsplit(" ", 1)[0] == name)

    def settle(self, seconds: float = 30.0) -> None:
        """Waits until nothing runs any more, and what is told of the engine is so."""
        end = time.monotonic() + seconds
        while self.service._tickets or self.service._open or not self._rests(seconds):
            assert time.monotonic() < end, "requests are stuck"
            time.sleep(0.01)
        httpx.get(self.url + "/health", verify=False)  # what was to be logged of them is: the server does one thing after another

    def _rests(self, seconds: float) -> bool:
        """Asked in the engine's thread: it is not in the middle of anything then."""
        found = self.service.loop.call(lambda engine: None if engine.has_work else engine.stats()).result(seconds)
        return found is not None and found == self.service.loop.stats


@contextlib.contextmanager
def live(model: Model | None = None, engine: dict[str, object] | None = None, **options: object) -> Iterator[Live]:
    """`engine` are options of the engine, the others those of the server."""
    log = io.StringIO()
    server = ServerConfig(**{"port": 0, "served_model_name": NAME, **options})  # type: ignore[arg-type]
    listener = _listen(server.host, server.port)
    running = Running(
        tiny_config(**(engine or {})), server, Tenants(server.api_key), Journal.from_config(server, log), listener, model or tiny_model()
    )
    thread = threading.Thread(target=lambda: asyncio.run(running.run()))
    thread.start()
    try:
        end = time.monotonic() + 30
        while running.service.state == "loading" and time.monotonic() < end:
            time.sleep(0.005)
        assert running.service.state == "ready", running.failure
        yield Live(running, f"http://127.0.0.1:{listener.getsockname()[1]}", log)
    finally:
        running.server.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive(), "the server did not stop"
