"""Errors are written as OpenAI writes them, in sentences, and never repeat what was sent."""

import json
from pathlib import Path

import httpx
import openai
import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from pando.server.app import REFUSALS
from pando.server.failures import CODES, failure, from_validation
from pando.server.replies import encode
from pando.server.wire import ChatBody


@pytest.mark.parametrize(
    ("status", "kind", "code", "raised"),
    [
        (400, "invalid_request_error", None, openai.BadRequestError),
        (401, "authentication_error", "invalid_api_key", openai.AuthenticationError),
        (403, "permission_error", None, openai.PermissionDeniedError),
        (404, "not_found_error", None, openai.NotFoundError),
        (413, "invalid_request_error", "request_too_large", openai.APIStatusError),
        (422, "invalid_request_error", None, openai.UnprocessableEntityError),
        (429, "rate_limit_error", "rate_limit_exceeded", openai.RateLimitError),
        (500, "server_error", None, openai.InternalServerError),
        (503, "service_unavailable_error", "overloaded", openai.InternalServerError),
        (418, "invalid_request_error", None, openai.APIStatusError),
        (507, "server_error", None, openai.InternalServerError),
    ],
)
def test_the_client_raises_the_error_of_each_status(status: int, kind: str, code: str | None, raised: type[openai.APIStatusError]) -> None:
    body = encode(failure(status, "that went wrong", "temperature"))
    answer = httpx.MockTransport(lambda request: httpx.Response(status, content=body, headers={"content-type": "application/json"}))
    with httpx.Client(transport=answer) as http:
        client = openai.OpenAI(api_key="k", base_url="http://pando.test/v1", http_client=http, max_retries=0)
        with pytest.raises(raised) as caught:
            client.models.list()
    error = caught.value
    assert (error.status_code, error.type, error.param, error.code) == (status, kind, "temperature", code)
    assert "that went wrong" in error.message


def test_an_error_may_have_a_code_of_its_own() -> None:
    assert failure(404, "no such model", "model", "model_not_found")["error"]["code"] == "model_not_found"
    assert failure(400, "no")["error"] == {"message": "no", "type": "invalid_request_error", "param": None, "code": None}


def test_a_message_can_be_sent_whatever_is_in_it() -> None:
    body = json.loads(encode(failure(400, "half a pair: \ud800 " + "x" * 10_000)))
    assert body["error"]["message"].startswith("half a pair: ? xxx") and len(body["error"]["message"]) == 1000


def errors_of(**fields: object) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}]} | fields)
    return caught.value


def test_a_validation_error_is_one_sentence_with_the_field_it_is_about() -> None:
    assert from_validation(errors_of(temperature="0.5").errors()) == ("temperature: Input should be a valid number", "temperature")


def test_no_more_than_three_errors_are_told_and_the_rest_counted() -> None:
    wrong = dict.fromkeys(("temperature", "top_p", "min_p", "n", "seed"), "no")
    message, param = from_validation(errors_of(**wrong).errors())
    assert message.count("Input should be") == 3 and message.endswith("; and 2 more") and param == "n"


def test_what_the_client_sent_is_not_repeated_at_length() -> None:
    secret = "secret" * 10_000
    for wrong in (
        {"temperature": secret},
        {"tool_choice": secret},
        {"messages": [{"role": secret, "content": "a"}]},
        {"stop": {secret: 1}},
    ):
        assert "secret" not in from_validation(errors_of(**wrong).errors())[0]
    message, param = from_validation(errors_of(logit_bias={secret: 1}).errors())
    assert len(message) < 300 and param is not None and len(param) < 100


def test_the_place_of_an_error_is_the_clients_own_and_not_the_frames() -> None:
    inner = errors_of(stop=["a", 5]).errors()
    framed = RequestValidationError([error | {"loc": ("body", *error["loc"])} for error in inner])
    assert from_validation(framed.errors()) == from_validation(inner) == ("stop.1: Input should be a valid string", "stop.1")


def test_a_body_that_is_not_json_is_said_to_be_none() -> None:
    broken = [{"type": "json_invalid", "loc": ("body", 17), "msg": "JSON decode error", "ctx": {"error": "Expecting value"}}]
    assert from_validation(broken) == ("the body is not valid JSON: Expecting value", None)


def test_a_missing_body_is_told_from_a_missing_field() -> None:
    assert from_validation([{"type": "missing", "loc": ("body",), "msg": "Field required"}])[0].startswith("the request has no body")
    assert from_validation([{"type": "missing", "loc": ("body", "a"), "msg": "Field required"}]) == ("a: This field is required", "a")


def test_no_errors_at_all_still_make_a_message() -> None:
    assert from_validation([]) == ("the request is not valid", None)


def test_the_document_lists_every_code() -> None:
    told = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8").partition("\n## Errors\n")[2].partition("\n## ")[0]
    for code in {*CODES.values(), *(code for _, _, code in REFUSALS if code)}:
        assert f"`{code}`" in told, code
