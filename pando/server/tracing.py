"""A span for each request, where OpenTelemetry is installed and somebody listens; nothing at all otherwise.

Somebody listens when the process that embeds the server has set a tracer provider, or the environment names an OTLP endpoint.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from .. import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider as OwnProvider
    from opentelemetry.trace import Span, TracerProvider

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
HEADERS = ("traceparent", "tracestate")
INSTALL = "pip install 'pando-llm[otel]'"

Operation = Literal["chat", "text_completion"]  # the names that the conventions have for them


class RequestSpan:
    """What is told of one request. Without a listener each of these does nothing."""

    __slots__ = ("_span",)

    def __init__(self, span: "Span | None" = None) -> None:
        self._span = span

    def first_token(self) -> None:
        if self._span is not None:
            self._span.add_event("first_token")

    def end(
        self,
        *,
        input_tokens: int = 0,
        output_tokens: int = 0,
        cached_tokens: int = 0,
        miss: str | None = None,
        finish_reasons: Sequence[str] = (),
        error: str | None = None,
    ) -> None:
        """Ends the span. `error` names what went wrong in a word, such as an HTTP status or a type; a client that left is none."""
        if self._span is None:
            return
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("gen_ai.usage.input_tokens", input_tokens)
        self._span.set_attribute("gen_ai.usage.output_tokens", output_tokens)
        self._span.set_attribute("pando.cached_tokens", cached_tokens)
        if miss is not None:
            self._span.set_attribute("pando.miss", miss)
        if finish_reasons:
            self._span.set_attribute("gen_ai.response.finish_reasons", list(finish_reasons))
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class Tracing:
    def __init__(self, provider: "TracerProvider | None" = None, *, own: "OwnProvider | None" = None, note: str = "") -> None:
        self.note = note  # what the journal should say of it at the start
        self._tracer = provider.get_tracer("pando", __version__) if provider is not None else None
        self._own = own

    @property
    def on(self) -> bool:
        return self._tracer is not None

    def request(self, operation: Operation, model: str, request_id: str, headers: Mapping[str, str]) -> RequestSpan:
        """Begins the span of a request, below the client's own where its headers name one."""
        if self._tracer is None:
            return RequestSpan()
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {name: headers[name] for name in HEADERS if name in headers}
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "pando",
            "gen_ai.request.model": model,
            "gen_ai.response.id": request_id,
        }
        above = TraceContextTextMapPropagator().extract(carrier)
        return RequestSpan(self._tracer.start_span(f"{operation} {model}", context=above, kind=SpanKind.SERVER, attributes=attributes))

    def close(self) -> None:
        """Sends what is still to be sent."""
        if self._own is not None:
            self._own.shutdown()


def tracing(environ: Mapping[str, str]) -> Tracing:
    """Tracing as this process is set up."""
    wanted = next((name for name in ENDPOINTS if environ.get(name)), None)  # by its name alone: the address may hold a password
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return Tracing()
    try:
        from opentelemetry.trace import NoOpTracerProvider, ProxyTracerProvider, get_tracer_provider

        provider = get_tracer_provider()
        if not isinstance(provider, NoOpTracerProvider | ProxyTracerProvider):
            return Tracing(provider, note="traces go to the tracer provider of this process")
        if wanted is None:
            return Tracing()
        own = _exporting(environ)
    except ModuleNotFoundError as error:
        missing = f"{wanted} is set, but traces need the package {error.name}, which is missing here; install it with `{INSTALL}`"
        return Tracing(note=missing if wanted else "")
    return Tracing(own, own=own, note=f"traces go where {wanted} says")


def _exporting(environ: Mapping[str, str]) -> "OwnProvider":
    """A provider of our own, which nobody else in the process sees. Where it sends, the exporter reads from OTEL_EXPORTER_OTLP_*."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = "OTEL_SERVICE_NAME" in environ or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    provider = TracerProvider(resource=Resource.create({} if named else {"service.name": "pando"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
