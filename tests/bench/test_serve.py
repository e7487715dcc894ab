"""`pando bench serve` against a server that does what the test says, over real sockets."""

import asyncio
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pando.bench import arguments, probe
from pando.bench.client import Failed, Reading
from pando.bench.load import NOT_SENT
from pando.bench.report import UNFINISHED
from pando.bench.serve import main
from pando.errors import InvalidOption

from .fake_server import Behaviour, FakeServer, shared

ROOT = Path(__file__).parent.parent.parent
FIELDS = ("choices", "delta", "content", "text", "usage", "error", "finish_reason", "prompt_tokens_details", "completion_tokens")
PROBES = 2  # requests that come before everything else


@pytest.fixture(scope="module")
def running() -> Iterator[FakeServer]:
    server = FakeServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def server(running: FakeServer, monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    for name in ("PANDO_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    running.behaviour = Behaviour()
    return running


SMALL = "--rate inf --requests 8 --prefix-tokens 30 --prompt-tokens 10 --output-tokens 4"


class Bench:
    """Runs the command in small, and gives what it has written as JSON."""

    def __init__(self, server: FakeServer, folder: Path) -> None:
        self.server, self.file = server, folder / "out.json"

    def __call__(self, options: str = SMALL, code: int = 0) -> Any:
        assert main(["--url", self.server.url, "--json", str(self.file), *options.split()]) == code
        return json.loads(self.file.read_text())


@pytest.fixture
def bench(server: FakeServer, tmp_path: Path) -> Bench:
    return Bench(server, tmp_path)


def failing(*actions: str) -> Any:
    """The first requests after the probes fare so, and the others well."""
    return lambda number, body: dict(enumerate(actions, PROBES)).get(number, "answer")


def test_every_request_is_answered_and_told(server: FakeServer, bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    [run] = bench()["runs"]
    summary = run["summary"]
    assert (summary["planned"], summary["answered"], summary["failures"]) == (8, 8, {})
    assert (summary["prompt_tokens"], summary["output_tokens"]) == (8 * 40, 8 * 4)
    assert len(run["requests"]) == 8 and len(server.behaviour.bodies) == 8 + PROBES
    assert all(0 < request["first"] <= request["total"] and len(request["gaps"]) == 3 for request in run["requests"])
    out = capsys.readouterr().out
    assert "8 planned, 8 answered, 0 not" in out
    assert f"{server.url}, version 7.7" in out and "parrot" in out
    assert re.search(r"^time to first token +ms +\S+ +\S+ +\S+ +\S+", out, re.MULTILINE)


def test_the_cached_share_is_what_the_server_said(server: FakeServer, bench: Bench) -> None:
    [run] = bench(SMALL + " --concurrency 1")["runs"]
    told = [request["cached_tokens"] for request in run["requests"]]
    assert told[0] < 30 and all(cached >= 30 for cached in told[1:])
    assert run["summary"]["cached_share"] == sum(told) / (8 * 40)


def test_groups_have_prefixes_of_their_own(server: FakeServer, bench: Bench) -> None:
    bench(SMALL.replace("--requests 8", "--requests 40") + " --groups 3")
    systems = Counter(body["messages"][0]["content"] for body in server.behaviour.bodies[PROBES:])
    assert len(systems) == 3 and systems.total() == 40


def test_rates_of_a_sweep_share_no_text(server: FakeServer, bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench("--rates 400,inf --requests 5 --prefix-tokens 30 --prompt-tokens 10 --output-tokens 2")
    assert [run["rate"] for run in found["runs"]] == [400, "inf"]
    one, other = (
        [body["messages"][0]["content"].split() for body in server.behaviour.bodies[start : start + 5]] for start in (PROBES, PROBES + 5)
    )
    assert shared(one[0], other[0]) < 3
    table = capsys.readouterr().out.split("\n\n")[-1].splitlines()
    assert [line.split()[:3] for line in table[2:]] == [["400", "5", "0"], ["inf", "5", "0"]]


def test_warmup_is_not_counted_and_warms_no_prefix(server: FakeServer, bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    server.behaviour.act = failing("500")
    [run] = bench(SMALL + " --warmup 3 --concurrency 1")["runs"]
    assert len(server.behaviour.bodies) == PROBES + 3 + 8
    assert run["summary"]["planned"] == 8 and run["requests"][0]["cached_tokens"] < 30
    assert "2 of 3 answered, not counted below; 1 x HTTP 500" in capsys.readouterr().out


def test_the_same_seed_asks_the_same_and_another_something_else(server: FakeServer, bench: Bench) -> None:
    texts = []
    for seed in (1, 1, 2):
        server.behaviour.bodies.clear()
        bench(f"{SMALL} --concurrency 1 --seed {seed}")
        texts.append([body["messages"] for body in server.behaviour.bodies])
    assert texts[0] == texts[1] != texts[2]


def test_requests_leave_though_none_has_been_answered(server: FakeServer, bench: Bench) -> None:
    server.behaviour.together = 8
    [run] = bench(SMALL.replace("inf", "100") + " --timeout 30")["runs"]
    assert run["summary"]["answered"] == 8
    requests = sorted(run["requests"], key=lambda request: request["conversation"])
    arrivals = [request["arrival"] for request in requests]
    assert arrivals == sorted(arrivals) and len(set(arrivals)) == 8
    assert all(request["lag"] >= 0 for request in requests)
    # The first waited for the last to come, and its latency counts from its own arrival.
    assert requests[0]["first"] >= arrivals[-1] - arrivals[0]


def test_a_cap_delays_requests_and_says_so(server: FakeServer, bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    server.behaviour.delay = 0.05
    [run] = bench(SMALL + " --concurrency 2")["runs"]
    assert server.behaviour.most_in_flight == 2
    assert run["summary"]["capped"] == 6
    # Four rounds one after the other: the wait is part of the latency, which counts from the arrival.
    assert max(request["first"] for request in run["requests"]) >= 4 * 0.05
    assert "held back    6 by --concurrency" in capsys.readouterr().out


def test_failures_are_counted_by_kind_and_kept_out_of_latencies(
    server: FakeServer, bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    server.behaviour.act = failing("429", "429", "500", "break", "nonsense", "complain", "end early", "whole", "hang")
    options = SMALL.replace("--requests 8", "--requests 12") + " --timeout 5"  # seconds, for the one that hangs
    [run] = bench(options)["runs"]
    summary = run["summary"]
    assert summary["failures"] == {
        "HTTP 429": 2,
        "HTTP 500": 1,
        "connection broke": 1,
        "invalid JSON in the stream": 1,
        "error in the stream": 1,
        "stream ended early": 1,
        "not a stream": 1,
        "timeout": 1,
    }
    assert (summary["planned"], summary["answered"], summary["output_tokens"]) == (12, 3, 12)
    assert summary["examples"]["error in the stream"] == "out of breath"
    assert {request["failure"]["retry_after"] for request in run["requests"] if request["failure"]} == {None, "3"}
    assert len(server.behaviour.bodies) == 12 + PROBES  # nothing is asked twice
    assert "2 x HTTP 429: no 429" in capsys.readouterr().out


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    )
)
def test_whatever_a_stream_says_is_a_failure_at_worst(body: object) -> None:
    reading = Reading()
    with suppress(Failed):
        reading.take(json.dumps(body), 1.0)
    reply = reading.reply(0.0, 2.0, None)
    assert reply.failure is not None or reply.pieces or reply.output_tokens


def test_a_time_in_which_nothing_arrives_is_refused(bench: Bench) -> None:
    with pytest.raises(InvalidOption, match=r"nothing arrives in 0\.001 s"):
        bench("--rate 1 --duration 0.001")


def test_a_file_that_cannot_be_written_is_named_after_the_table(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder").mkdir()
    bench.file = tmp_path / "folder" / "out.json"

    def act(number: int, body: Any) -> str:
        with suppress(FileNotFoundError):
            bench.file.parent.rmdir()
        return "answer"

    bench.server.behaviour.act = act
    with pytest.raises(InvalidOption, match=r"out\.json: cannot be written"):
        bench()
    assert "8 answered" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_where_there_is_no_space_the_table_is_all_there_is(bench: Bench) -> None:
    bench.file = Path("/dev/full")
    with pytest.raises(InvalidOption, match=r"^a file: cannot be written \(No space left on device\)"):
        bench()


def test_a_run_that_nobody_answered_is_no_success(server: FakeServer, bench: Bench) -> None:
    server.behaviour.act = lambda number, body: "503" if number >= PROBES else "answer"
    [run] = bench(code=1)["runs"]
    assert run["summary"]["failures"] == {"HTTP 503": 8}


def test_every_turn_sends_the_history_with_the_servers_own_answers(server: FakeServer, bench: Bench) -> None:
    [run] = bench(f"{SMALL} --workload multi-turn --turns 4 --think 0 --concurrency 1")["runs"]
    first, *_, last = sorted((body["messages"] for body in server.behaviour.bodies[PROBES:]), key=len)
    assert [message["role"] for message in last] == ["system", *["user", "assistant"] * 3, "user"]
    assert last[2]["content"] == "".join(f"t40.{i} " for i in range(4))
    assert len(first) == 2 and run["summary"]["answered"] == 8
    later = [request for request in run["requests"] if request["turn"]]
    assert len(later) == 6 and all(request["cached_tokens"] >= request["prompt_tokens"] - 10 - 4 for request in later)


def test_a_turn_comes_after_the_answer_before_it(server: FakeServer, bench: Bench) -> None:
    server.behaviour.delay = 0.05
    [run] = bench("--workload multi-turn --turns 3 --think 0.05 --rate inf --requests 6 --output-tokens 2")["runs"]
    for conversation in (0, 1):
        turns = sorted((r for r in run["requests"] if r["conversation"] == conversation), key=lambda request: request["turn"])
        assert [request["turn"] for request in turns] == [0, 1, 2]
        for before, after in pairwise(turns):
            assert after["arrival"] >= before["arrival"] + before["total"]


def test_turns_after_a_failed_one_are_not_sent_and_not_forgotten(server: FakeServer, bench: Bench) -> None:
    server.behaviour.act = failing("answer", "500")
    [run] = bench("--workload multi-turn --turns 4 --think 0 --rate inf --requests 4 --output-tokens 2")["runs"]
    assert run["summary"]["failures"] == {"HTTP 500": 1, NOT_SENT: 2}
    assert len(server.behaviour.bodies) == PROBES + 2


def test_lengths_of_a_file_are_asked_for(server: FakeServer, bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("11,2\n17,3\n")
    [run] = bench(f"--workload lengths --lengths {file} --rate inf --requests 20")["runs"]
    assert {(request["prompt_tokens"], request["output_tokens"]) for request in run["requests"]} == {(11, 2), (17, 3)}


def test_completions_send_the_history_as_one_text(server: FakeServer, bench: Bench) -> None:
    [run] = bench(f"{SMALL} --endpoint completions --workload multi-turn --turns 2 --think 0 --concurrency 1")["runs"]
    short, *_, long = sorted((body["prompt"] for body in server.behaviour.bodies[PROBES:]), key=len)
    assert any(long.startswith(body["prompt"]) and body["prompt"] != long for body in server.behaviour.bodies[PROBES:])
    assert len(short.split()) == 40 and run["summary"]["answered"] == 8


def test_words_are_weighed_by_what_the_server_counts(server: FakeServer, bench: Bench, tmp_path: Path) -> None:
    assert bench()["facts"]["tokens per word"] == "1, measured by two requests"
    server.behaviour.tells_usage = False
    found = bench()
    assert found["facts"]["tokens per word"].startswith("1, assumed")
    assert found["runs"][0]["summary"]["tokens_were_counted"] is True
    server.behaviour.bodies.clear()
    bench(SMALL + " --tokens-per-word 2")
    assert {len(body["messages"][1]["content"].split()) for body in server.behaviour.bodies[PROBES:]} == {5}


def test_a_field_that_the_server_refuses_is_left_out(server: FakeServer, bench: Bench) -> None:
    server.behaviour.act = lambda number, body: "422" if "ignore_eos" in body else "answer"
    found = bench()
    assert found["facts"]["end of answers"] == "the model's own"
    assert found["runs"][0]["summary"]["answered"] == 8
    assert all("stream_options" in body for body in server.behaviour.bodies)
    server.behaviour = Behaviour(act=lambda number, body: "400" if "stream_options" in body else "answer")
    assert bench()["runs"][0]["summary"]["prompt_tokens"] is None
    assert all(body["ignore_eos"] for body in server.behaviour.bodies if "stream_options" not in body)


def test_ignore_eos_can_be_left_out(server: FakeServer, bench: Bench) -> None:
    bench(SMALL + " --no-ignore-eos")
    assert not any("ignore_eos" in body for body in server.behaviour.bodies)


def test_the_key_reaches_the_server_and_nothing_else(
    server: FakeServer, bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench(SMALL + " --api-key verysecret")
    bench(SMALL + " --api-key=verysecret")
    assert {headers["authorization"] for headers in server.behaviour.headers} == {"Bearer verysecret"}
    assert "verysecret" not in capsys.readouterr().out + bench.file.read_text()
    server.behaviour.headers.clear()
    monkeypatch.setenv("PANDO_API_KEY", "one,two")
    bench()
    assert {headers["authorization"] for headers in server.behaviour.headers} == {"Bearer one"}


@pytest.mark.parametrize(("key", "told"), [("", "answers 401: it wants a key; "), ("old", "answers 401: it wants another key; ")])
def test_a_server_that_wants_a_key_says_whether_it_got_one(key: str, told: str) -> None:
    async def ask() -> str:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(headers=headers, transport=httpx.MockTransport(lambda _: httpx.Response(401))) as http:
            return await probe.first_model(http, "http://server")

    with pytest.raises(InvalidOption, match=told + "give one with --api-key"):
        asyncio.run(ask())


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        for options in ([], ["--model", "parrot"]):
            with pytest.raises(InvalidOption, match=f"no server answers at {url} .*--url"):
                main(["--url", url, *options])


def test_a_server_that_refuses_the_first_request_is_not_measured(server: FakeServer, bench: Bench) -> None:
    server.behaviour.act = lambda number, body: "404"
    with pytest.raises(InvalidOption, match=r"HTTP 404: no 404.*nothing was measured"):
        bench()
    server.behaviour.models = {"data": []}
    with pytest.raises(InvalidOption, match="names no model; name one with --model"):
        bench()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--rate 0", "no number above 0"),
        ("--rate nan", "no number above 0"),
        ("--rates 1,,2", "no number above 0"),
        ("--rate 1 --rates 2", "not allowed with"),
        ("--requests 0", "whole number from 1"),
        ("--think -1", "no number from 0"),
        ("--rate inf --duration 5", "give --requests"),
        ("--workload lengths", "belong together"),
        ("--lengths x.csv", "belong together"),
        ("--turns 3", "multi-turn"),
        ("--url localhost:8000", "not the address of a server"),
        ("--url http://localhost:99999", "not the address of a server"),
        ("--url http://[::1", "not the address of a server"),
        ("--url http://me:secret@localhost", "--api-key"),
        ("--api-key ключ", "no HTTP header"),
        ("--text nowhere.txt", "nowhere.txt: cannot be read"),
        ("--workload lengths --lengths nowhere.csv", "nowhere.csv: cannot be read"),
        ("--json nowhere/out.json", "no folder"),
        ("--json .", "is a folder"),
        ("--plot out.bmp", "must end in .svg"),
        ("--rat 3", "unrecognized"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_sent(options: str, complaint: str) -> None:
    with pytest.raises(InvalidOption, match=complaint):
        arguments.check(arguments.parser().parse_args(options.split()), {})


@pytest.mark.parametrize("rates", ["--rate inf", "--rates 300,inf"])
def test_a_picture_is_drawn_of_one_rate_and_of_several(rates: str, bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.svg"
    bench(f"{rates} --requests 4 --output-tokens 3 --plot {picture}")
    assert picture.read_text().lstrip().startswith("<?xml") and "</svg>" in picture.read_text()


def test_a_picture_without_matplotlib_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidOption, match=r"pip install 'pando-llm\[bench\]'"):
        arguments.parser().parse_args(["--plot", "out.svg"])


def test_an_interrupted_run_tells_what_it_has(server: FakeServer, tmp_path: Path) -> None:
    server.behaviour.act = lambda number, body: "answer" if number < PROBES + 3 else "hang"
    file = tmp_path / "out.json"
    code = "import sys; from pando.bench.serve import main; sys.exit(main(sys.argv[1:]))"
    options = f"--url {server.url} --json {file} --rate inf --requests 5 --concurrency 1".split()
    process = subprocess.Popen([sys.executable, "-c", code, *options], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ)
    deadline = time.monotonic() + 60
    while len(server.behaviour.bodies) < PROBES + 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"2 x {UNFINISHED}" in out and "5 planned, 3 answered, 2 not" in out
    assert json.loads(file.read_text())["runs"][0]["summary"]["answered"] == 3


def test_the_document_lists_every_option_with_its_default_and_no_other() -> None:
    text = (ROOT / "docs" / "bench-serve.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(--[a-z-]+)[^|]*` \| ([^|]+) \|", text, re.MULTILINE))
    actions = [action for action in arguments.parser()._actions if action.dest != "help"]
    assert set(rows) == {action.option_strings[0] for action in actions}
    for action in actions:
        if isinstance(action.default, int | float | str) and not isinstance(action.default, bool):
            shown = rows[action.option_strings[0]].strip("`")
            assert shown == (f"{action.default:g}" if isinstance(action.default, float) else str(action.default)), action.dest


def test_an_endless_rate_is_written_as_a_word() -> None:
    assert arguments.parser().parse_args(["--rates", "1,inf"]).rates == [1.0, math.inf]
