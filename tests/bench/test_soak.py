"""`pando bench soak`: that it finds what is wrong, on a real server around the tiny model in which something is made wrong."""

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from pando.bench import host, soak
from pando.bench.crowd import TENANTS, Crowd, Heard
from pando.bench.host import Gone, Site, Vitals, vitals
from pando.bench.ledger import HOPELESS, Observed, Sample, Sent, Tally, counts, judge
from pando.bench.mixture import Sizes, bad
from pando.bench.soak import ALONE, Soak, report
from pando.engine.request import Tenant
from pando.errors import InvalidOption
from pando.server import answers
from pando.server.service import Service
from pando.server.tenants import Tenants

from ..server.live import Live, live
from ..tiny import write_checkpoint

KEYS = {"one": "key-one", "two": "key-two", ALONE: "key-alone"}
SMALL = Sizes(each=1, groups=1, long=(100, 140), prefix=48, growing=64, words=4, turns=2, answer=(4, 12))
CHANCE = {"rows preempted", "prompts evicted before", "prompts with a hit", "prompts only another tenant had"}
POOL = {"page_size": 16, "kv_cache_tokens": 384, "max_num_seqs": 8, "max_num_batched_tokens": 128}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "server.log"
    file.touch()
    return file


@contextlib.contextmanager
def small_server() -> Iterator[Live]:
    with live(engine=POOL, api_key=tuple(KEYS.values()), max_body_mib=1, disable_log_requests=True) as server:
        yield server


def observe(server: Live, log: Path, begin: Callable[[], None] = lambda: None, rounds: int = 1) -> Observed:
    """Every habit of both tenants, all at once: no chance, no clock. `begin` is called when the answers of an idle server are known."""

    class Once(Soak):
        async def _load(self, crowd: Crowd) -> None:
            begin()
            for turn in range(rounds):
                every = product(crowd.habits, TENANTS)
                await asyncio.gather(*(habit(tenant, Random(f"{turn} {i}")) for i, (habit, tenant) in enumerate(every)))
                self._samples.append(Sample(0.0, vitals(self._site.pid)))
            if not server.running.server.should_exit:
                await asyncio.to_thread(server.settle)  # what stays from now on stays for ever

    run = Once(Site(server.url, os.getpid(), log), KEYS, seconds=1.0, clients=1, timeout=30.0, seed=3, margin=64, sizes=SMALL)
    return asyncio.run(run.run())


def failed(seen: Observed) -> set[str]:
    """The checks that fail, but for those of what happens by chance in so few requests."""
    return {result.case for result in judge(seen) if result.met is False} - CHANCE


def test_a_sound_server_passes_and_has_been_asked_everything(log):
    with small_server() as server:
        seen = observe(server, log, rounds=3)
    assert not seen.tally.violations, seen.tally.examples
    assert not failed(seen)
    assert {"turn", "sampled", "invalid", "secret", "left in a stream", "hung up", "pin", "unpin", "warm", "tokenize", "look"} <= set(
        seen.tally.sent
    )
    assert seen.tally.hits and seen.tally.tempted and seen.tally.compared
    assert seen.tally.sent.total() == seen.tally.came.total()
    assert "pando_steps_total" in report(seen, judge(seen))


def test_every_kind_of_invalid_request_is_refused_as_it_should_be(log):
    with small_server() as server:
        names = {"own": "key-one", "none": "", "wrong": "nonsense"}
        for wrong in bad(context=512, max_body=1 << 20):
            key = names[wrong.credential]
            headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
            reply = httpx.post(server.url + wrong.path, content=wrong.content, headers=headers)
            assert (wrong.name, reply.status_code) == (wrong.name, wrong.status), reply.text
            assert reply.json()["error"]["message"], wrong.name


def test_an_answer_that_differs_from_the_one_given_alone_is_found(log, monkeypatch):
    true, altered = answers.text_choice, []

    def choice(index: int, text: str, *rest: Any) -> Any:
        return true(index, text + "!" * bool(altered), *rest)

    monkeypatch.setattr(answers, "text_choice", choice)
    with small_server() as server:
        seen = observe(server, log, lambda: altered.append(True))
    assert seen.tally.violations["wrong answer"]
    assert "wrong answer" in failed(seen)
    assert "instead of" in report(seen, judge(seen))


def test_a_page_that_is_never_given_back_is_found(log, monkeypatch):
    monkeypatch.setattr(soak, "REST", 1.0)
    with small_server() as server:
        pages = server.service.loop._engine.pages
        pages.take(1, None, 0)
        seen = observe(server, log)
    assert failed(seen) == {"pages lost at rest"}


def test_a_pin_that_stays_is_found(log, monkeypatch):
    monkeypatch.setattr(soak, "REST", 1.0)
    with small_server() as server:
        engine = server.service.loop._engine
        monkeypatch.setattr(engine.pins, "drop", lambda pin: None)

        def begin() -> None:
            """One pin that surely finds room: the crowd's may all be refused."""
            headers = {"authorization": f"Bearer {KEYS[ALONE]}"}
            pinned = httpx.post(server.url + "/v1/cache/pin", json={"prompt": [1] * 40, "ttl": "10m"}, headers=headers).raise_for_status()
            httpx.post(server.url + "/v1/cache/unpin", json={"id": pinned.json()["id"]}, headers=headers).raise_for_status()

        seen = observe(server, log, begin)
    assert "pages pinned at rest" in failed(seen)


def test_tenants_that_share_a_cache_are_found(log, monkeypatch):
    monkeypatch.setattr(soak, "REST", 1.0)
    monkeypatch.setattr(Tenants, "tenant", lambda self, owner, salt: Tenant(b"all", b"all"))
    with small_server() as server:
        seen = observe(server, log, rounds=4)  # in one of them, the small pool still has what one said when the other asks
    assert "foreign tokens" in failed(seen)


def test_an_error_of_the_server_is_found(log, monkeypatch):
    async def compute(*_: Any) -> int:
        raise RuntimeError("planted")

    monkeypatch.setattr(Service, "compute", compute)
    with small_server() as server:
        seen = observe(server, log)
    assert failed(seen) == {"server error"}, seen.tally.examples


def test_a_request_that_does_not_end_is_stuck_and_a_hopeless_run_ends_early(log):
    with small_server() as server:
        site = Site(server.url, os.getpid(), log)
        seen = asyncio.run(Soak(site, KEYS, seconds=600.0, clients=6, timeout=1e-4, seed=3, margin=64, sizes=SMALL).run())
    assert seen.tally.violations["stuck"] >= HOPELESS
    assert "stuck" in failed(seen)


def test_a_server_that_ends_under_load_is_told(log):
    log.write_text("out of luck", encoding="utf-8")
    with small_server() as server, pytest.raises(Gone, match="out of luck"):
        observe(server, log, lambda: setattr(server.running.server, "should_exit", True))


def test_a_process_that_is_gone_has_no_vitals():
    with pytest.raises(Gone, match="has ended"):
        vitals(2**22 + 1)


def test_a_tenant_may_reuse_what_it_has_sent_and_no_more():
    sent = Sent()
    sent.note("one", (1, 2, 3, 4))
    sent.note("one", (1, 2, 9))
    assert [sent.reach("one", tokens) for tokens in ((1, 2, 3, 5), (1, 2, 3, 4, 5), (1, 7), (2, 2))] == [3, 4, 1, 0]
    assert sent.reach("two", (1, 2, 3, 4)) == 0


def test_a_prompt_is_no_reason_for_its_own_tokens_to_be_cached_unless_it_was_sent_twice():
    sent = Sent()
    sent.note("one", (1, 2, 3, 4))
    assert sent.reach("one", (1, 2, 3), apart_from=(1, 2, 3, 4)) == 0
    sent.note("one", (1, 2, 3, 4))
    assert sent.reach("one", (1, 2, 3), apart_from=(1, 2, 3, 4)) == 3


REST = {f"pando_{name}": 0.0 for name in ("requests_running", "requests_waiting", "pages_pinned")} | {
    "pando_pages_in_use": 7.0,
    "pando_pages_cached": 7.0,
    "pando_preemptions_total": 3.0,
    'pando_cache_misses_total{reason="evicted"}': 4.0,
}
QUIET = Vitals(rss=500, threads=12, files=20)
SOUND = Observed(Tally(compared=9, hits=3, tempted=2), {}, REST, QUIET, [Sample(10.0, QUIET)], QUIET, 0, 60.0, 64)


@pytest.mark.parametrize(
    ("seen", "case"),
    [
        (replace(SOUND, after=REST | {"pando_requests_running": 1.0}), "rows running at rest"),
        (replace(SOUND, after=REST | {"pando_requests_waiting": 1.0}), "rows waiting at rest"),
        (replace(SOUND, after=REST | {"pando_pages_in_use": 8.0}), "pages lost at rest"),
        (replace(SOUND, after=REST | {"pando_pages_pinned": 1.0}), "pages pinned at rest"),
        (replace(SOUND, after=REST | {'pando_requests_total{outcome="failed"}': 1.0}), "requests failed inside"),
        (replace(SOUND, after=REST | {'pando_requests_total{outcome="timeout"}': 1.0}), "requests timed out"),
        (replace(SOUND, before=REST), "rows preempted"),
        (replace(SOUND, before=REST), "prompts evicted before"),
        (replace(SOUND, end=replace(QUIET, rss=565)), "memory at rest"),
        (replace(SOUND, end=replace(QUIET, threads=17)), "threads at rest"),
        (replace(SOUND, end=replace(QUIET, files=25)), "open files at rest"),
        (replace(SOUND, complaints=1), "errors in the log"),
        (replace(SOUND, tally=Tally(hits=3, tempted=2)), "answers compared"),
        (replace(SOUND, tally=Tally(compared=9, tempted=2)), "prompts with a hit"),
        (replace(SOUND, tally=Tally(compared=9, hits=3)), "prompts only another tenant had"),
    ],
)
def test_each_thing_that_is_not_as_it_should_be_fails_its_check(seen, case):
    assert case in {result.case for result in judge(seen) if not result.met}


def test_what_is_as_it_should_be_passes_every_check():
    assert all(result.met for result in judge(SOUND))


def test_memory_is_compared_with_the_warm_up_and_not_with_what_came_later():
    later = Sample(120.0, replace(QUIET, rss=5000))
    grown = replace(SOUND, samples=[*SOUND.samples, later], end=replace(QUIET, rss=1000))
    assert "memory at rest" in failed(grown)


def test_metrics_are_read_with_their_labels():
    assert counts('# HELP a b\na 1.0\nb{c="d e"} 2.5\n') == {"a": 1.0, 'b{c="d e"}': 2.5}


def test_a_stream_and_a_whole_answer_are_read_alike():
    pieces = [{"choices": [{"index": 1, "delta": {"content": c}, "finish_reason": "stop" if c == "b" else None}]} for c in "ab"]
    whole = {"choices": [{"index": 1, "message": {"content": "ab"}, "finish_reason": "stop"}]}
    for bodies in (tuple(pieces), (whole,)):
        assert (Heard(200, bodies).texts(2), Heard(200, bodies).finished) == (("", "ab"), 1)


def test_the_command_starts_a_server_of_its_own_judges_it_and_stops_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(host, "write_random_model", partial(write_checkpoint, positions=512, layers=2))
    monkeypatch.setattr(soak, "Sizes", lambda: SMALL)
    file, sites = tmp_path / "soak.json", []
    true = soak.Soak
    monkeypatch.setattr(soak, "Soak", lambda site, *rest, **more: sites.append(site) or true(site, *rest, **more))
    code = soak.main(["--random-weights", "--minutes", "0.15", "--seed", "1", "--json", str(file)])
    found = json.loads(file.read_text(encoding="utf-8"))
    wrong = {check["case"] for check in found["checks"] if not check["met"]}
    assert wrong <= CHANCE, capsys.readouterr().out  # chance, in nine seconds
    assert code == bool(wrong)
    assert found["sent"]["json"] and found["samples"][0]["vitals"]["rss"]
    with pytest.raises(ProcessLookupError):
        os.kill(sites[0].pid, 0)


def test_a_server_that_does_not_start_is_told_with_its_reason():
    told = r"ended with status 2 before it was ready: pando: error: .*max_num_seqs"
    with pytest.raises(InvalidOption, match=told), host.hosted("model", ["--max-num-seqs", "0"], {}):
        pass


@pytest.mark.parametrize("words", [["--minutes", "0"], ["--minutes", "nan"], ["--timeout", "nan"], ["--clients", "0"], ["--nonsense"]])
def test_nonsense_is_refused_before_anything_is_started(words):
    with pytest.raises(InvalidOption):
        soak.main(words)
