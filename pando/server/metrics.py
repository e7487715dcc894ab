"""What the server counts and times, for Prometheus.

The server tells of each request as it goes; of the engine, steps are observed one by one, and the rest is asked for when somebody scrapes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric

from ..config import MetricsCompat
from ..engine.request import MissReason, Source
from ..store.facts import StoreFacts

if TYPE_CHECKING:
    from ..engine.facts import Stats

Outcome = Literal["stop", "length", "tool_calls", "cancelled", "timeout", "failed", "stopped"]

# From a GPU that answers in milliseconds to two slow cores that take minutes.
FIRST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
TOKEN = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
WHOLE = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
STEP = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
ROWS = tuple(2**i for i in range(11))
TOKENS = tuple(2**i for i in range(15))
READS = (0, *(2**i for i in range(9)))

GAUGES: dict[str, tuple[str, Callable[["Stats"], float]]] = {
    "pando_requests_running": ("Rows that are being computed; a request with n answers has n.", lambda s: s.running),
    "pando_requests_waiting": ("Rows that wait for a place in the batch or for pages.", lambda s: s.waiting),
    "pando_pages": ("Pages in the pool.", lambda s: s.pages),
    "pando_pages_in_use": ("Pages held by rows or by the prefix tree.", lambda s: s.pages_in_use),
    "pando_pages_cached": ("Pages in the prefix tree, whether or not a row reads them now.", lambda s: s.pages_cached),
    "pando_pages_evictable": ("Pages in the prefix tree that would make room for others.", lambda s: s.pages_evictable),
    "pando_pages_pinned": ("Pages that a client has pinned.", lambda s: s.pages_pinned),
}
COUNTERS: dict[str, tuple[str, Callable[["Stats"], float]]] = {
    "pando_steps": ("Steps of the engine.", lambda s: s.steps),
    "pando_plans": ("Plans made: the steps between two plans share one.", lambda s: s.plans),
    "pando_preemptions": ("Rows that gave up their pages for others, and were computed again.", lambda s: s.preemptions),
    "pando_shared_reads": ("Reads that served several rows at once.", lambda s: s.shared_reads),
    "pando_shared_read_rows": ("Rows of each of those reads, added up.", lambda s: s.shared_rows),
    "pando_kv_read_bytes": ("Bytes of K and V in the reads of all steps and layers.", lambda s: s.read_bytes),
    "pando_kv_flat_bytes": ("The same bytes, had every row read by itself whatever it sees.", lambda s: s.flat_bytes),
}


def _busy(stats: "Stats") -> float:
    """The share of the pool that no new request can have; what is only cached is as good as free."""
    return (stats.pages_in_use - stats.pages_evictable) / max(1, stats.pages)  # no pages: nothing is loaded yet


VLLM_GAUGES: dict[str, tuple[str, Callable[["Stats"], float]]] = {
    "vllm:num_requests_running": ("As pando_requests_running.", lambda s: s.running),
    "vllm:num_requests_waiting": ("As pando_requests_waiting.", lambda s: s.waiting),
    "vllm:kv_cache_usage_perc": ("The share of pages that running rows and pins hold; 1 is all.", _busy),
    "vllm:gpu_cache_usage_perc": ("As vllm:kv_cache_usage_perc, under its former name.", _busy),
}


def _of_store(facts: StoreFacts) -> Iterator[Metric]:
    used = GaugeMetricFamily("pando_tier_bytes", "Bytes that a tier below the device holds.", labels=["tier"])
    limit = GaugeMetricFamily("pando_tier_bytes_limit", "Bytes that it may hold.", labels=["tier"])
    for tier, room in facts.room.items():
        used.add_metric([tier], room.used)
        limit.add_metric([tier], room.size)
    yield from (used, limit)
    for name, text, label, counts in (
        ("pando_store_loaded_tokens", "Tokens whose states came from a tier below the device.", "tier", facts.loaded),
        ("pando_store_saved_pages", "Pages that a tier below the device took.", "tier", facts.saved),
        ("pando_store_lost_pages", "Pages that should have been there and were computed instead, by why.", "reason", facts.lost),
        ("pando_store_unsaved_pages", "Pages that were not kept, by why.", "reason", facts.unsaved),
        ("pando_store_unanswered_looks", "Times that a tier did not say what it has, by why.", "reason", facts.unanswered),
    ):
        counter = CounterMetricFamily(name, text, labels=[label])
        for value, count in counts.items():
            counter.add_metric([value], count)
        yield counter
    yield CounterMetricFamily("pando_store_recomputed_tokens", "Tokens that were sooner computed than loaded.", value=facts.recomputed)
    yield CounterMetricFamily("pando_store_prefetched_pages", "Pages brought up before they were asked for.", value=facts.prefetched)


class Metrics:
    def __init__(self, model: str, stats: Callable[[], "Stats"], compat: MetricsCompat = "none") -> None:
        self.model = model
        self.compat = compat
        self._stats = stats
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        outcomes = (*get_args(Outcome), "refused")
        self._requests = self._counter("pando_requests", "Requests that ended, by how.", "outcome", outcomes)
        self._refused = self._counter("pando_requests_refused", "Requests that were refused, by HTTP status.", "status")
        self._prompt = self._counter("pando_prompt_tokens", "Tokens of prompts, by where they came from.", "source", get_args(Source))
        self._generated = Counter("pando_generated_tokens", "Tokens of answers.", registry=self._registry)
        self._hits = Counter("pando_cache_hits", "Prompts of which some tokens were reused.", registry=self._registry)
        self._misses = self._counter("pando_cache_misses", "Prompts whose reuse ended early, by why.", "reason", get_args(MissReason))
        self._queue = self._histogram("pando_queue_seconds", "From a request's arrival to its first step.", FIRST)
        self._first = self._histogram("pando_time_to_first_token_seconds", "From a request's arrival to its first token.", FIRST)
        self._token = self._histogram("pando_time_per_output_token_seconds", "Mean time between the tokens of an answer.", TOKEN)
        self._whole = self._histogram("pando_request_seconds", "From a request's arrival to its end.", WHOLE)
        self._step = self._histogram("pando_step_seconds", "One step of the engine.", STEP)
        self._rows = self._histogram("pando_step_rows", "Rows in a step: the batch size.", ROWS)
        self._tokens = self._histogram("pando_step_tokens", "Tokens computed in a step.", TOKENS)
        self._reads = self._histogram("pando_step_shared_reads", "Reads of a step that serve several rows at once.", READS)

    def _counter(self, name: str, text: str, label: str, values: Sequence[str] = ()) -> Counter:
        counter = Counter(name, text, [label], registry=self._registry)
        for value in values:
            counter.labels(value)  # so that it is there, at 0, before it first happens
        return counter

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, registry=self._registry, buckets=buckets)

    # ---- a request

    def refused(self, status: int, *, begun: bool = False) -> None:
        """`begun`: how it ended is counted already."""
        if not begun:
            self._requests.labels("refused").inc()
        self._refused.labels(str(status)).inc()

    def queued(self, seconds: float) -> None:
        self._queue.observe(seconds)

    def prompt(self, tokens: Mapping[Source, int], miss: MissReason | None = None) -> None:
        """Where the tokens of one prompt came from, and why no more of them were reused."""
        for source, count in tokens.items():
            if count:
                self._prompt.labels(source).inc(count)
        if any(count for source, count in tokens.items() if source != "computed"):
            self._hits.inc()
        if miss is not None:
            self._misses.labels(miss).inc()

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def generated(self, tokens: int) -> None:
        """Of all answers, as they come: a long one is seen while it is written."""
        self._generated.inc(tokens)

    def answer(self, tokens: int, seconds: float) -> None:
        """One answer, ended or cut short; `seconds` passed from its first token to its last."""
        if tokens > 1:
            self._token.observe(seconds / (tokens - 1))

    def ended(self, outcome: Outcome, seconds: float) -> None:
        self._requests.labels(outcome).inc()
        self._whole.observe(seconds)

    # ---- the engine

    def observe_step(self, seconds: float, rows: int, tokens: int, shared_reads: int) -> None:
        self._step.observe(seconds)
        self._rows.observe(rows)
        self._tokens.observe(tokens)
        self._reads.observe(shared_reads)

    # ---- a scrape

    def render(self) -> tuple[bytes, str]:
        """The body of /metrics and its content type."""
        return generate_latest(self), CONTENT_TYPE_PLAIN_0_0_4

    def names(self) -> dict[str, str]:
        """Every metric and what it says."""
        return {f"{m.name}_total" if m.type == "counter" else m.name: m.documentation for m in self.collect()}

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]  # twice the lines, and unread
            yield metric
        for name, (text, value) in GAUGES.items():
            yield GaugeMetricFamily(name, text, value=value(stats))
        for name, (text, value) in COUNTERS.items():
            yield CounterMetricFamily(name, text, value=value(stats))
        attention = GaugeMetricFamily("pando_attention_info", "How reads are shared, by mode; always 1.", labels=["mode"])
        if stats.attention is not None:
            attention.add_metric([stats.attention], 1)
        yield attention
        yield from _of_store(stats.store or StoreFacts())
        if self.compat == "vllm":
            yield from self._as_vllm(stats)

    def _as_vllm(self, stats: "Stats") -> Iterator[Metric]:
        for name, (text, value) in VLLM_GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self.model], value(stats))
            yield gauge
        tokens = {
            sample.labels["source"]: sample.value for m in self._prompt.collect() for sample in m.samples if sample.name.endswith("_total")
        }
        asked = sum(tokens.values())
        for name, text, count in (
            ("vllm:prefix_cache_queries", "Tokens of prompts, each of which might have been cached.", asked),
            ("vllm:prefix_cache_hits", "Those of them that were.", asked - tokens["computed"]),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self.model], count)
            yield counter
