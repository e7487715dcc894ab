"""The OpenAPI schema against the server: whatever it allows, and much that it does not, is answered as it says."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from .live import Live, live

EXAMPLES = 6  # of each route and mode; set it to hundreds to search
ROUTES = [
    "DELETE /v1/schemas/{name}",
    "GET /health",
    "GET /metrics",
    "GET /ready",
    "GET /v1/cache",
    "GET /v1/models",
    "GET /v1/models/{model}",
    "GET /v1/schemas",
    "GET /v1/schemas/{name}",
    "GET /version",
    "POST /detokenize",
    "POST /tokenize",
    "POST /v1/cache/pin",
    "POST /v1/cache/unpin",
    "POST /v1/cache/warm",
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /v1/schemas",
]
SETTINGS = settings(derandomize=True, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live() as server:
        yield server
        server.settle()
        engine = server.service.loop._engine
        assert engine.pages_in_use == engine.tree.pages
        assert '"level": "error"' not in server.log.getvalue()


@pytest.fixture(scope="module")
def described(server: Live) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("route", ROUTES)
def test_every_request_is_answered_as_the_schema_says(described: Any, route: str, mode: GenerationMode):
    method, path = route.split()
    operation = described[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(SETTINGS, max_examples=EXAMPLES if method == "POST" else 1)
    def answered(case: schemathesis.Case) -> None:
        # rules over several fields cannot be said in the schema, so what it allows may still be refused
        case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=30)

    try:
        answered()
    except Unsatisfiable:
        assert not operation.body and mode is GenerationMode.NEGATIVE  # a route that takes nothing cannot be asked wrongly


def test_the_schema_names_every_route_and_its_refusals(server: Live):
    described = httpx.get(f"{server.url}/openapi.json").json()
    routes = sorted(f"{method.upper()} {path}" for path, methods in described["paths"].items() for method in methods)
    assert routes == ROUTES
    answers = described["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {"200", "400", "401", "404", "413", "422", "429", "503"} <= set(answers)
    assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
    assert httpx.get(f"{server.url}/docs").status_code == 200
