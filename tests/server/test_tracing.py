"""Spans as an OpenTelemetry backend would see them."""

import sys
import types

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pando.server import tracing as module
from pando.server.tracing import Tracing, tracing

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://user:password@collector:4318"}
EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


@pytest.fixture
def listener():
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield Tracing(provider), exporter
    provider.shutdown()


def test_a_request_is_a_span_in_the_words_of_the_conventions(listener):
    tracing, exporter = listener
    span = tracing.request("chat", "tiny", "req-1", {})
    span.first_token()
    span.end(input_tokens=96, output_tokens=5, cached_tokens=64, miss="diverged", finish_reasons=["stop", "length"])
    [seen] = exporter.get_finished_spans()
    assert (seen.name, seen.kind) == ("chat tiny", trace.SpanKind.SERVER)
    assert dict(seen.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pando",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.id": "req-1",
        "gen_ai.usage.input_tokens": 96,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "pando.cached_tokens": 64,
        "pando.miss": "diverged",
    }
    assert [event.name for event in seen.events] == ["first_token"]
    assert seen.start_time <= seen.events[0].timestamp <= seen.end_time
    assert seen.status.status_code is trace.StatusCode.UNSET


def test_a_failure_is_marked(listener):
    tracing, exporter = listener
    tracing.request("text_completion", "tiny", "req-1", {}).end(error="503")
    [seen] = exporter.get_finished_spans()
    assert seen.attributes["error.type"] == "503"
    assert seen.status.status_code is trace.StatusCode.ERROR
    assert "pando.miss" not in seen.attributes


def test_the_trace_of_the_client_goes_on(listener):
    tracing, exporter = listener
    tracing.request("chat", "tiny", "r", {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=b"}).end()
    [seen] = exporter.get_finished_spans()
    assert f"{seen.context.trace_id:032x}" == TRACE
    assert f"{seen.parent.span_id:016x}" == SPAN
    assert seen.context.trace_state.get("a") == "b"


@pytest.mark.parametrize("parent", ["", "nonsense", f"00-{'0' * 32}-{SPAN}-01", f"ff-{TRACE}-{SPAN}-01", "\x00" * 55, "0" * 100_000])
def test_a_malformed_parent_begins_a_new_trace(listener, parent):
    tracing, exporter = listener
    tracing.request("chat", "tiny", "r", {"traceparent": parent}).end()
    [seen] = exporter.get_finished_spans()
    assert seen.parent is None


def test_a_client_that_does_not_sample_is_obeyed(listener):
    tracing, exporter = listener
    tracing.request("chat", "tiny", "r", {"traceparent": f"00-{TRACE}-{SPAN}-00"}).end()
    assert exporter.get_finished_spans() == ()


def test_without_a_listener_nothing_is_made(monkeypatch):
    off = tracing({})
    assert (off.on, off.note) == (False, "")
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)  # whoever imports it now fails
    span = off.request("chat", "tiny", "r", {"traceparent": f"00-{TRACE}-{SPAN}-01"})
    span.first_token()
    span.end(input_tokens=1, error="500")
    off.close()


def test_a_server_without_opentelemetry_starts_and_says_so_only_if_traces_were_wanted(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert (tracing({}).on, tracing({}).note) == (False, "")
    wanted = tracing(ENDPOINT)
    assert not wanted.on
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set, but traces need the package opentelemetry" in wanted.note
    assert "pip install 'pando-llm[otel]'" in wanted.note


def test_the_provider_of_an_embedding_process_is_used_and_left_open(monkeypatch):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    on = tracing({})
    assert on.on
    on.close()
    on.request("chat", "tiny", "r", {}).end()
    assert len(exporter.get_finished_spans()) == 1
    provider.shutdown()


def test_an_endpoint_in_the_environment_gets_what_is_left_at_the_end(monkeypatch):
    exporter = InMemorySpanExporter()
    fake = types.ModuleType(EXPORTER)
    fake.OTLPSpanExporter = lambda: exporter
    monkeypatch.setitem(sys.modules, EXPORTER, fake)
    on = tracing(ENDPOINT)
    assert (on.on, on.note) == (True, "traces go where OTEL_EXPORTER_OTLP_ENDPOINT says")
    on.request("chat", "tiny", "r", {}).end()
    on.close()
    [seen] = exporter.get_finished_spans()
    assert seen.resource.attributes["service.name"] == "pando"
    assert not isinstance(trace.get_tracer_provider(), TracerProvider), "nobody else's spans are taken"


def test_the_name_of_the_service_can_be_chosen(monkeypatch):
    fake = types.ModuleType(EXPORTER)
    fake.OTLPSpanExporter = InMemorySpanExporter
    monkeypatch.setitem(sys.modules, EXPORTER, fake)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    provider = module._exporting({"OTEL_SERVICE_NAME": "mine"})
    assert provider.resource.attributes["service.name"] == "mine"
    provider.shutdown()


def test_the_sdk_can_be_switched_off():
    assert not tracing({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}).on
