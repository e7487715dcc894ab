"""What outlives a server: killed at any moment, restarted, beside another on the same directory, on a disk that fails."""

import errno
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pando.engine.llm import LLM
from pando.engine.request import SamplingParams
from pando.model.load import Model
from pando.store import folder as folders
from pando.store.index import Index

from ..tiny import tiny_llm, tiny_model
from .clients import WAIT, ask, client_of, counters, said, wait_for
from .live import Live, live
from .spare import STICKS, STUCK
from .test_signals import Process

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("PANDO_KILLS", "25"))
SERVER_KILLS = int(os.environ.get("PANDO_SERVER_KILLS", "2"))
STORE = {"disk_gib": 0.01, "page_size": 16}
LONG = "It was a long story, told slowly, and it went on for a while before anything happened at all. " * 2


# ---- killed


def test_engines_that_are_killed_at_any_moment_never_leave_a_wrong_answer_behind(tmp_path: Path) -> None:
    """PANDO_KILLS=100 for as many; some of them two at a time, on one directory."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.server.mortal", str(tmp_path), str(KILLS), "seed"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["wrong"] == [] and seen["kills"] == KILLS
    assert seen["torn"] > 0, "no kill met a file that was being written"
    assert seen["answers"] > KILLS and seen["last"] > 0, seen


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def gguf(tiny_gguf: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", {"llama.context_length": 2048})


@pytest.fixture
def start(home: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(*arguments: object, **environment: str) -> Process:
        options = ("--port", 0, "--disk-gib", 0.05, "--page-size", 16, "--kv-cache-tokens", 2048, "--disable-log-requests")
        started.append(Process(home, *arguments, *options, **environment))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def turns_of(address: str, model: str, contents: list[str]) -> Any:
    body = {"model": model, "messages": said(*contents), "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    response = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def chatter(address: str, seed: int) -> None:
    """Conversations without an end; the server is killed meanwhile."""
    dice = random.Random(seed)
    try:
        while True:
            text = "".join(dice.choices("abcdefgh ", k=300))
            httpx.post(f"{address}/v1/completions", json={"prompt": text, "max_tokens": 20, "ignore_eos": True}, timeout=60)
    except httpx.HTTPError:
        pass


def test_a_server_that_was_killed_answers_as_a_cold_one_and_a_restarted_one_from_disk(
    start: Callable[..., Process], gguf: Path, tmp_path: Path
) -> None:
    """PANDO_SERVER_KILLS=100 for as many; each server answers from what those before it left. Every second one is killed in the middle of a
    file, the others at any moment."""
    store, dice = tmp_path / "store", random.Random(0)
    making = store / "v1" / "making"
    talk = [f"Tell me a story. {LONG}", "Once.", "And then?"]
    cold = LLM(str(gguf), dtype="float32", device="cpu", native=False, prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [cold.chat(said(*talk[:count]), params)[0].outputs[0].text for count in (1, 3)]

    def told(address: str) -> list[Any]:
        replies = [turns_of(address, str(gguf), talk[:count]) for count in (1, 3)]
        assert [reply["choices"][0]["message"]["content"] for reply in replies] == expected
        return replies

    for number in range(SERVER_KILLS):
        sticks = not number % 2
        server = start(gguf, "--disk-dir", store, **({STICKS: str(dice.randrange(60))} if sticks else {}))
        address = server.ready()
        noise = threading.Thread(target=chatter, args=(address, number))
        noise.start()
        told(address)
        if sticks:
            server.until(lambda errors=server.errors: STUCK + "\n" in errors)
        else:
            time.sleep(number % 5 * 0.05)  # some of what was said last is being written
        server.process.send_signal(signal.SIGKILL)
        assert server.end() == -signal.SIGKILL
        noise.join()
        assert not sticks or len([*making.iterdir()]) == 1, "the kill met no file that was being written"
    server = start(gguf, "--disk-dir", store)
    told(server.ready())
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    assert [*making.iterdir()] == []
    server = start(gguf, "--disk-dir", store)
    address = server.ready()
    first, _ = told(address)
    assert first["pando"]["tokens"]["disk"] >= 150 and first["pando"]["reuse"] == "exact"
    assert first["pando"]["tokens"]["computed"] < 30
    metrics = httpx.get(f"{address}/metrics").text
    for name in ('pando_store_loaded_tokens_total{tier="disk"}', 'pando_tier_bytes{tier="disk"}', 'pando_tier_bytes_limit{tier="disk"}'):
        assert name in metrics
    assert not any("Traceback" in line for line in server.errors), server.errors


# ---- beside each other, and on a disk that fails


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(max_positions=2048)


@pytest.fixture(scope="module")
def cold(model: Model) -> Callable[..., str]:
    llm = tiny_llm(model, prefix_caching=False)

    def answer(*contents: str) -> str:
        return llm.chat(said(*contents), SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text

    return answer


def kept(server: Live) -> None:
    """Waits until every page is on disk, or was given up."""
    server.settle()
    wait_for(lambda: server.service.loop.call(lambda engine: engine.tend() is None).result(WAIT))
    server.settle()  # what is told is so
    found = counters(server)
    taken, written = (found.get(f'pando_store_saved_pages_total{{tier="{tier}"}}', 0) for tier in ("host", "disk"))
    given_up = sum(count for name, count in found.items() if name.startswith("pando_store_unsaved_pages_total"))
    assert taken > 0 and written + given_up >= taken


def text(reply: Any) -> str:
    return str(reply.choices[0].message.content)


def forget(server: Live) -> None:
    """The pool is empty; what is kept below stays."""
    server.settle()
    server.service.loop.call(lambda engine: engine.clear_cache()).result(10)


def test_two_servers_on_one_directory_share_what_they_keep(model: Model, cold: Callable[..., str], tmp_path: Path) -> None:
    options = {**STORE, "disk_dir": str(tmp_path)}
    with live(model, options) as one, live(model, options) as two, client_of(one) as asks_one, client_of(two) as asks_two:
        assert text(ask(asks_one, LONG)) == cold(LONG)
        kept(one)
        reply = ask(asks_two, LONG)
        assert text(reply) == cold(LONG) and reply.pando["tokens"]["disk"] >= len(LONG) - 16
        for number in range(4):
            talk = f"{number}: {LONG}"
            assert text(ask(asks_one, talk)) == text(ask(asks_two, talk)) == cold(talk)


def test_a_conversation_longer_than_host_memory_comes_back_whole_after_a_restart(
    model: Model, cold: Callable[..., str], tmp_path: Path
) -> None:
    options, story = {**STORE, "disk_dir": str(tmp_path)}, LONG * 4  # host memory holds 32 pages of 16 tokens where it is a buffer alone
    with live(model, options) as server, client_of(server) as client:
        assert text(ask(client, story)) == cold(story)
    with live(model, options) as server, client_of(server) as client:
        reply = ask(client, story)
        assert text(reply) == cold(story) and reply.pando["tokens"]["disk"] >= len(story) > 32 * 16


@pytest.mark.parametrize(("number", "reason"), [(errno.ENOSPC, "full"), (errno.EROFS, "unreadable"), (errno.EIO, "unreadable")])
def test_a_disk_that_takes_no_more_costs_no_answer_and_is_told(
    model: Model, cold: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with live(model, {**STORE, "disk_dir": str(tmp_path)}) as server, client_of(server) as client:
        ask(client, LONG)
        kept(server)
        with monkeypatch.context() as patch:
            patch.setattr(folders, "write_page", refuse)
            assert text(ask(client, f"Now: {LONG}")) == cold(f"Now: {LONG}")
            kept(server)
        assert counters(server)[f'pando_store_unsaved_pages_total{{reason="{reason}"}}'] >= 10
        forget(server)
        assert text(again := ask(client, LONG)) == cold(LONG)
        assert again.pando["tokens"]["disk"] + again.pando["tokens"]["host"] >= len(LONG) - 16  # what was kept before is still there
        before = counters(server)['pando_store_saved_pages_total{tier="disk"}']
        ask(client, f"Later: {LONG}")
        wait_for(lambda: counters(server)['pando_store_saved_pages_total{tier="disk"}'] >= before + 10)  # there is room again


def test_an_index_that_cannot_be_written_costs_nothing(
    model: Model, cold: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise sqlite3.OperationalError("attempt to write a readonly database")

    options = {**STORE, "disk_dir": str(tmp_path)}
    with live(model, options) as server, client_of(server) as client, monkeypatch.context() as patch:
        patch.setattr(Index, "add", refuse)
        assert text(ask(client, LONG)) == cold(LONG)
        kept(server)
    with live(model, options) as server, client_of(server) as client:
        reply = ask(client, LONG)
        assert text(reply) == cold(LONG) and reply.pando["tokens"]["disk"] >= len(LONG) - 16


def test_a_directory_that_is_removed_under_a_server_costs_no_answer(model: Model, cold: Callable[..., str], tmp_path: Path) -> None:
    with live(model, {**STORE, "disk_dir": str(tmp_path / "store")}) as server, client_of(server) as client:
        talks = [f"{number}: {LONG * 2}" for number in range(3)]  # more than host memory has as a buffer
        for talk in talks:
            ask(client, talk)
        kept(server)
        shutil.rmtree(tmp_path / "store")
        forget(server)
        for talk in (*talks, f"More: {LONG}"):
            assert text(ask(client, talk)) == cold(talk)
        server.settle()  # what is told of the engine is so
        lost = {name: count for name, count in counters(server).items() if name.startswith("pando_store_lost_pages_total")}
        assert sum(lost.values()) > 0, lost
