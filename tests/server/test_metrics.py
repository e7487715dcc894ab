"""What /metrics says, read back with Prometheus' own parser."""

import re
import time
from dataclasses import dataclass, replace

import httpx
import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from pando.server.metrics import Metrics
from pando.store.facts import Room, StoreFacts

from ..tiny import tiny_engine
from .live import live

KEPT = StoreFacts(
    room={"host": Room(5, 10), "disk": Room(7, 20)}, loaded={"disk": 384}, saved={"host": 3}, lost={"corrupt": 1}, unsaved={"room": 2},
    unanswered={"late": 4},
    recomputed=64, prefetched=9,
)  # fmt: skip


@dataclass(frozen=True)
class Stats:
    steps: int = 7
    plans: int = 3
    preemptions: int = 1
    pages: int = 100
    pages_in_use: int = 60
    pages_cached: int = 50
    pages_evictable: int = 40
    pages_pinned: int = 5
    running: int = 2
    waiting: int = 4
    shared_reads: int = 11
    shared_rows: int = 33
    read_bytes: int = 5_000
    flat_bytes: int = 2**40
    store: StoreFacts | None = KEPT
    attention: str | None = "shared"


def made(compat="none", stats=None):
    return Metrics("tiny", stats or Stats, compat)


def read(metrics):
    """{(name, label values): value} of every sample."""
    body, _ = metrics.render()
    families = text_string_to_metric_families(body.decode())
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_a_request_is_counted_from_its_prompt_to_its_end():
    metrics = made()
    metrics.queued(0.01)
    metrics.prompt({"computed": 10, "device": 64, "host": 32}, "diverged")
    metrics.first_token(0.2)
    metrics.generated(5)
    metrics.answer(5, 0.4)
    metrics.ended("tool_calls", 0.6)
    samples = read(metrics)
    assert samples["pando_prompt_tokens_total", "computed"] == 10
    assert samples["pando_prompt_tokens_total", "device"] == 64
    assert samples["pando_prompt_tokens_total", "host"] == 32
    assert samples["pando_prompt_tokens_total", "disk"] == 0
    assert samples["pando_cache_hits_total",] == 1
    assert samples["pando_cache_misses_total", "diverged"] == 1
    assert samples["pando_cache_misses_total", "cold"] == 0
    assert samples["pando_generated_tokens_total",] == 5
    assert samples["pando_requests_total", "tool_calls"] == 1
    assert samples["pando_queue_seconds_sum",] == pytest.approx(0.01)
    assert samples["pando_time_to_first_token_seconds_sum",] == pytest.approx(0.2)
    assert samples["pando_time_per_output_token_seconds_sum",] == pytest.approx(0.1)
    assert samples["pando_request_seconds_sum",] == pytest.approx(0.6)


def test_an_answer_of_one_token_has_no_time_between_tokens():
    metrics = made()
    metrics.generated(1)
    metrics.answer(1, 0.0)
    metrics.answer(0, 0.0)
    samples = read(metrics)
    assert samples["pando_time_per_output_token_seconds_count",] == 0
    assert samples["pando_generated_tokens_total",] == 1


def test_a_cold_prompt_is_a_miss_and_no_hit():
    metrics = made()
    metrics.prompt({"computed": 10}, "cold")
    samples = read(metrics)
    assert samples["pando_cache_hits_total",] == 0
    assert samples["pando_cache_misses_total", "cold"] == 1


def test_a_refusal_is_told_by_its_status_and_has_no_duration():
    metrics = made()
    metrics.refused(429)
    metrics.refused(429)
    metrics.refused(401)
    samples = read(metrics)
    assert samples["pando_requests_refused_total", "429"] == 2
    assert samples["pando_requests_refused_total", "401"] == 1
    assert samples["pando_requests_total", "refused"] == 3
    assert samples["pando_request_seconds_count",] == 0


def test_every_outcome_is_there_before_it_happens():
    samples = read(made())
    for outcome in ("stop", "length", "tool_calls", "cancelled", "timeout", "refused", "failed"):
        assert samples["pando_requests_total", outcome] == 0


def test_steps_are_seen_with_their_size():
    metrics = made()
    metrics.observe_step(0.02, rows=32, tokens=300, shared_reads=3)
    metrics.observe_step(0.04, rows=16, tokens=16, shared_reads=0)
    samples = read(metrics)
    assert samples["pando_step_seconds_sum",] == pytest.approx(0.06)
    assert samples["pando_step_rows_sum",] == 48
    assert samples["pando_step_tokens_sum",] == 316
    assert samples["pando_step_shared_reads_bucket", "0.0"] == 1
    assert samples["pando_step_shared_reads_count",] == 2


def test_the_engine_is_asked_at_each_scrape():
    answers = [Stats(), replace(Stats(), running=9, steps=8)]
    metrics = made(stats=lambda: answers.pop(0))
    first, second = read(metrics), read(metrics)
    assert (first["pando_requests_running",], second["pando_requests_running",]) == (2, 9)
    assert (first["pando_steps_total",], second["pando_steps_total",]) == (7, 8)
    pages = {name: first[f"pando_pages{name}",] for name in ("", "_in_use", "_cached", "_evictable", "_pinned")}
    assert pages == {"": 100, "_in_use": 60, "_cached": 50, "_evictable": 40, "_pinned": 5}
    assert (first["pando_plans_total",], first["pando_preemptions_total",], first["pando_requests_waiting",]) == (3, 1, 4)


def test_what_reading_once_saves_is_counted():
    samples = read(made())
    assert (samples["pando_shared_reads_total",], samples["pando_shared_read_rows_total",]) == (11, 33)
    assert (samples["pando_kv_read_bytes_total",], samples["pando_kv_flat_bytes_total",]) == (5_000, 2**40)
    assert samples["pando_attention_info", "shared"] == 1


def test_no_mode_of_attention_is_told_before_there_is_an_engine():
    samples = read(made(stats=lambda: Stats(attention=None)))
    assert not [name for name, *_ in samples if name == "pando_attention_info"]


def test_a_running_server_shows_what_was_read_once():
    with live(engine={"attention": "shared"}) as server:
        before = server.metric("pando_kv_flat_bytes_total")  # of the start, in which a row runs alone
        assert server.metric("pando_kv_read_bytes_total") == before
        body = {"prompt": "a beginning that three answers share", "max_tokens": 8, "n": 3, "temperature": 0}
        httpx.post(server.url + "/v1/completions", json=body).raise_for_status()
        server.settle()
        engine, end = server.service.loop._engine.totals, time.monotonic() + 10
        while server.metric("pando_kv_flat_bytes_total") < engine.flat_bytes and time.monotonic() < end:
            time.sleep(0.01)  # the numbers of a busy engine may be a moment old
        assert server.metric('pando_attention_info{mode="shared"}') == 1
        assert server.metric("pando_shared_reads_total") == engine.shared_reads > 0
        assert 2 <= server.metric("pando_shared_read_rows_total") / server.metric("pando_shared_reads_total") <= 3
        read_bytes, flat_bytes = server.metric("pando_kv_read_bytes_total"), server.metric("pando_kv_flat_bytes_total")
        assert (read_bytes, flat_bytes) == (engine.read_bytes, engine.flat_bytes)
        assert before < read_bytes < flat_bytes


def test_what_nobody_was_told_is_no_token_of_an_answer():
    with live() as server:
        for path, body in (
            ("/v1/completions", {"prompt": "Hello", "echo": True, "max_tokens": 0}),
            ("/v1/cache/warm", {"prompt": "Warm this"}),
            ("/v1/completions", {"prompt": "Hello", "max_tokens": 3, "ignore_eos": True}),
        ):
            httpx.post(server.url + path, json=body, timeout=60).raise_for_status()
        assert server.metric("pando_generated_tokens_total") == 3


def test_routers_find_the_names_of_vllm_when_asked_for():
    metrics = made("vllm")
    metrics.prompt({"computed": 10, "device": 30})
    samples = read(metrics)
    assert samples["vllm:num_requests_running", "tiny"] == 2
    assert samples["vllm:num_requests_waiting", "tiny"] == 4
    assert samples["vllm:kv_cache_usage_perc", "tiny"] == pytest.approx(0.2), "what is only cached counts as free"
    assert samples["vllm:gpu_cache_usage_perc", "tiny"] == samples["vllm:kv_cache_usage_perc", "tiny"]
    assert samples["vllm:prefix_cache_queries_total", "tiny"] == 40
    assert samples["vllm:prefix_cache_hits_total", "tiny"] == 30
    assert not [name for name, *_ in read(made()) if name.startswith("vllm")]


def test_a_model_with_odd_characters_in_its_name_is_still_one_label():
    metrics = Metrics('a "b"\\c\nd', Stats, "vllm")
    assert read(metrics)["vllm:num_requests_running", 'a "b"\\c\nd'] == 2


def test_every_name_is_listed_with_a_sentence_and_follows_the_conventions():
    metrics = made("vllm")
    metrics.refused(400)
    names = metrics.names()
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name, *_ in read(metrics)}
    assert shown == set(names)
    for name, text in names.items():
        assert name.startswith(("pando_", "vllm:", "process_")), name
        assert len(text) > 15, name
        assert not name.endswith("_created"), name
    assert {"pando_requests_total", "pando_time_to_first_token_seconds", "pando_pages", "process_resident_memory_bytes"} <= set(names)


def test_two_servers_in_one_process_count_apart():
    one, other = made(), made()
    one.ended("stop", 1.0)
    assert read(other)["pando_requests_total", "stop"] == 0
    assert not [metric.name for metric in REGISTRY.collect() if metric.name.startswith("pando")]


def test_the_content_type_is_the_one_that_every_prometheus_reads():
    assert made().render()[1] == "text/plain; version=0.0.4; charset=utf-8"


def test_a_real_engine_can_be_asked():
    engine = tiny_engine(page_size=4, kv_cache_tokens=64)
    samples = read(Metrics("tiny", engine.stats, "vllm"))
    assert samples["pando_pages",] == 16
    assert samples["vllm:kv_cache_usage_perc", "tiny"] == 0


def test_the_tiers_below_the_device_tell_what_they_hold_and_what_was_lost() -> None:
    text = Metrics("m", Stats).render()[0].decode()
    for line in (
        'pando_tier_bytes{tier="disk"} 7.0',
        'pando_tier_bytes_limit{tier="host"} 10.0',
        'pando_store_loaded_tokens_total{tier="disk"} 384.0',
        'pando_store_saved_pages_total{tier="host"} 3.0',
        'pando_store_lost_pages_total{reason="corrupt"} 1.0',
        'pando_store_unsaved_pages_total{reason="room"} 2.0',
        'pando_store_unanswered_looks_total{reason="late"} 4.0',
        "pando_store_recomputed_tokens_total 64.0",
        "pando_store_prefetched_pages_total 9.0",
    ):
        assert line in text.splitlines()
