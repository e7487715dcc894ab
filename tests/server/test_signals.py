"""`pando serve` as a process: what it prints, what signals do to it, and how it ends."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from pando.cli import main

from .clients import Brake, wait_for
from .live import live
from .spare import Fork

CONTEXT = 8192
WAIT = 60.0  # seconds; only a failing test waits so long


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def model(tiny_gguf: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("model") / "it's tiny.gguf", {"llama.context_length": CONTEXT})


def _anew(words: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    command, root = [sys.executable, "-m", "pando", *words], Path(__file__).parents[2]
    return subprocess.Popen(command, env=env, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class Process:
    """A server of its own, in a process of its own."""

    def __init__(self, home: Path, *arguments: object, anew: bool = False, **environment: str) -> None:
        """`anew`: as a user starts it, and not a fork of what has imported everything."""
        words = ["serve", *map(str, arguments), "--dtype", "float32", "--device", "cpu"]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PANDO_")}
        # without a compiler torch's own kernels are used: nothing has to be compiled first
        env = {**kept, "PANDO_HOME": str(home), "CC": "false", **environment}
        self.process = _anew(words, env) if anew else Fork(words, env)
        self.printed = ""
        self.errors: list[str] = []
        self._changed = threading.Condition()
        self._reading = [threading.Thread(target=self._read_output), threading.Thread(target=self._read_errors)]
        for thread in self._reading:
            thread.start()

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.printed += line
                self._changed.notify_all()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.errors.append(line)
                self._changed.notify_all()

    def until(self, happened: Callable[[], bool]) -> None:
        with self._changed:
            seen = self._changed.wait_for(lambda: happened() or self.process.poll() is not None, WAIT)
            assert seen and happened(), f"exit code {self.process.poll()}: {self.printed}{''.join(self.errors)}"

    def ready(self) -> str:
        """Waits for the server's own announcement, and takes the address from it."""
        self.until(lambda: any('"ready"' in line for line in self.errors) and self.printed.endswith("\n\n"))
        [address] = re.findall(r"listening on (http://127\.0\.0\.1:[0-9]+)", self.printed)
        return str(address)

    def end(self) -> int:
        code = self.process.wait(WAIT)
        for thread in self._reading:
            thread.join(WAIT)
        return code

    def close(self) -> None:
        self.process.kill()
        self.end()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def start(home: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(*arguments: object, anew: bool = False, **environment: str) -> Process:
        started.append(Process(home, *arguments, anew=anew, **environment))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def stream(address: str, count: int, key: str | None = None) -> Iterator[str]:
    """The lines of a stream that takes a while."""
    body = {"prompt": "Once", "max_tokens": count, "ignore_eos": True, "stream": True, "temperature": 0}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, headers=headers, timeout=WAIT) as response:
        assert response.status_code == 200, response.read()
        yield from (line for line in response.iter_lines() if line)


def lets_nobody_in(address: str) -> bool:
    try:
        httpx.get(f"{address}/health")
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # it came when the door was being closed
        return False
    return False


def test_a_server_prints_a_curl_line_that_works_and_drains_on_a_signal(start: Callable[..., Process], model: Path):
    server = start(model, "--port", 0, "--disable-log-requests", "--drain-timeout", 600, anew=True, PANDO_API_KEY="open-sesame")
    address = server.ready()
    second = start(model, "--port", address.rsplit(":")[-1])
    assert "KV cache" in server.printed and f"context {CONTEXT} tokens" in server.printed

    [command] = re.findall(r"curl .*\\\n.*", server.printed)
    limited = command.replace("KEY", "open-sesame").replace('"messages"', '"max_tokens": 3, "messages"')
    curl = subprocess.run(["bash", "-c", limited + " -sS"], capture_output=True, text=True, timeout=WAIT)
    assert json.loads(curl.stdout)["usage"]["completion_tokens"] <= 3, curl

    assert second.end() == 2
    assert second.errors == [f"pando: error: cannot listen on {address[7:]}: Address already in use; choose another --host or --port\n"]

    lines = stream(address, 1000, "open-sesame")
    begun = [next(lines) for _ in range(5)]
    server.process.send_signal(signal.SIGTERM)
    server.until(lambda: any("Shutting down" in line for line in server.errors))
    wait_for(lambda: lets_nobody_in(address))  # it says so just before
    rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    texts = [json.loads(line.removeprefix("data: "))["choices"] for line in [*begun, *rest[:-1]]]
    assert texts[-1][0]["finish_reason"] == "length"
    assert server.end() == 0
    assert not any("Traceback" in line or '"level": "error"' in line for line in server.errors), server.errors


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_second_signal_stops_at_once(start: Callable[..., Process], model: Path, sign: signal.Signals, code: int):
    server = start(model, "--port", 0)
    lines = stream(server.ready(), CONTEXT - 100)
    next(lines)
    server.process.send_signal(sign)
    server.until(lambda: any("Shutting down" in line for line in server.errors))
    next(lines)  # the first one lets it go on
    assert server.process.poll() is None
    server.process.send_signal(sign)
    with pytest.raises(httpx.RemoteProtocolError):
        assert "data: [DONE]" not in list(lines)
    assert server.end() == code
    assert not any("Traceback" in line for line in server.errors), server.errors


def quiet_port() -> int:
    """A free one, below those that the system gives to whoever connects: it stays free until it is used."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(first // 2, first), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def test_a_server_that_still_loads_says_so_and_ends_when_it_is_told(start: Callable[..., Process], model: Path, tmp_path: Path):
    never = tmp_path / "never"
    os.mkfifo(never)  # reading it waits for a writer, who does not come
    port = quiet_port()
    server = start(model, "--port", port, "--share-prefix", never, "--log-level", "debug")  # otherwise it says nothing yet
    server.until(lambda: any("startup complete" in line for line in server.errors))
    address = f"http://127.0.0.1:{port}"
    assert httpx.get(f"{address}/health").status_code == 200
    loading = httpx.get(f"{address}/ready")
    assert (loading.status_code, loading.json()) == (503, {"status": "loading"})
    refused = httpx.post(f"{address}/v1/completions", json={"prompt": "Once"})
    assert refused.status_code == 503 and "still being loaded" in refused.json()["error"]["message"]
    assert httpx.get(f"{address}/metrics").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    assert server.printed == ""


def test_what_cannot_work_ends_with_one_line_and_exit_code_2(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, home: Path
):
    broken, schema = tmp_path / "broken.jinja", tmp_path / "broken.pml"
    broken.write_text("Hello\n{% for message in messages %}{{ message.content }}")
    schema.write_text('<schema name="x">')
    monkeypatch.setenv("PANDO_HOME", str(home))
    missing = tmp_path / "missing.txt"  # a model, a schema or a text; a schema is looked at first
    options: dict[str, list[object]] = {
        "no model": [tmp_path / "nothing"],
        "broken.jinja, line 2, is not a valid Jinja template": [model, "--chat-template", broken],
        "missing.txt cannot be read": [model, "--share-prefix", missing],
        "API key": [model, "--api-key", "two words"],
        "cannot listen on 192.0.2.1": [model, "--host", "192.0.2.1"],
        "cannot listen on a..b:0: that cannot be the name of a host": [model, "--host", "a..b"],
        "use at most": [model, "--threads", 1000],
        "made for": [model, "--max-model-len", CONTEXT + 1],
        "schema: .*missing.txt cannot be read": [missing, "--schema", missing],
        "schema dir: .*missing.txt is not a directory": [missing, "--schema-dir", missing],
        "broken.pml:1:18: malformed XML": [missing, "--schema-dir", tmp_path],
    }
    for text, given in options.items():
        assert main(["serve", "--port", "0", "--dtype", "float32", "--no-native", *map(str, given)]) == 2
        printed, errors = capsys.readouterr()
        [told, *caret] = errors.splitlines()
        assert printed == "" and len(caret) == (2 if "pml" in text else 0), errors
        assert re.match(f"pando: error: .*{text}", told.replace("_", " "), re.IGNORECASE), told


def test_what_is_said_while_loading_is_said_late_but_said(start: Callable[..., Process], model: Path):
    server = start(model, "--port", 0, "--no-native")
    server.ready()
    said = [json.loads(line).get("message", "") for line in server.errors]
    assert said[0].startswith("Started server process") and any(line.startswith("loading ") for line in said)


def test_whoever_outlasts_the_drain_is_told_and_nothing_looks_like_a_fault():
    with live(drain_timeout=2) as server, ThreadPoolExecutor(2) as beside:
        brake = Brake(server.service.loop._engine)
        try:
            body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True}
            streamed = beside.submit(lambda: list(stream(server.url, 400)))
            asked = beside.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=WAIT)
            wait_for(lambda: len(server.service._tickets) == 2)
            wait_for(lambda: brake.let(1) or all(ticket.first for ticket in list(server.service._tickets.values())))
            server.running.server.should_exit = True
            wait_for(lambda: "Shutting down" in server.log.getvalue())
            assert not streamed.done() and not asked.done() and server.service.state == "ready", "it still drains"
            lines, whole = streamed.result(WAIT), asked.result(WAIT)
        finally:
            brake.let(1000)
        assert len(lines) > 1 and whole.status_code == 503
        for error in (json.loads(lines[-1].removeprefix("data: ")), whole.json()):
            assert "being stopped" in error["error"]["message"] and error["error"]["code"] == "stopped"
    logged = [json.loads(line) for line in server.log.getvalue().splitlines()]
    assert [line["outcome"] for line in logged if line["event"] == "request"] == ["stopped"] * 2
    assert {line["level"] for line in logged} == {"info"}, logged


def test_a_request_that_outlasts_the_drain_is_told_that_the_server_has_stopped():
    with live(drain_timeout=0) as server, ThreadPoolExecutor(1) as beside:
        body = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "n": 16, "logprobs": 20}
        brake = Brake(server.service.loop._engine)
        try:
            brake.let(3)
            asked = beside.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=WAIT)
            while not server.service.loop._engine.has_work:
                assert not asked.done()
            server.running.server.should_exit = True
            response = asked.result(WAIT)
        finally:
            brake.let(10_000)
        assert response.status_code == 503 and "stopped" in response.json()["error"]["message"]
        assert "Traceback" not in server.log.getvalue()
