"""What clients send is understood or refused in words, whatever it is."""

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pando.engine.request import MAX_BIASES, MAX_LOGPROBS, MAX_N, MAX_STOP_CHARS, MAX_STOPS, SamplingParams
from pando.errors import InvalidSampling
from pando.server import limits, wire
from pando.server.failures import failure, from_validation
from pando.server.replies import encode

USER = {"role": "user", "content": "Hello"}
CHAT = {"messages": [USER]}
TEXT = {"prompt": "Hello"}
BODIES = {
    wire.ChatBody: CHAT,
    wire.CompletionBody: TEXT,
    wire.TokenizeBody: TEXT,
    wire.DetokenizeBody: {"tokens": [1]},
    wire.WarmBody: TEXT,
    wire.PinBody: CHAT,
    wire.UnpinBody: {"id": "pin-1"},
}


def chat(**fields: Any) -> wire.ChatBody:
    return wire.ChatBody.model_validate(CHAT | fields)


def text(**fields: Any) -> wire.CompletionBody:
    return wire.CompletionBody.model_validate(TEXT | fields)


def refusal(body: type[limits.Body], fields: Mapping[str, Any]) -> str:
    """The message that a client would get, which names the field that the error is about."""
    with pytest.raises(ValidationError) as caught:
        body.model_validate(dict(BODIES[body]) | fields)
    message, param = from_validation(caught.value.errors())
    assert param is None or message.startswith(param + ": ")
    assert len(message) < 1000
    return message


def tool(name: str = "look", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | function}


# ---- what is understood


def test_left_out_fields_have_the_defaults_of_openai() -> None:
    assert chat().sampling() == SamplingParams(max_tokens=None)
    assert text().sampling() == SamplingParams(max_tokens=16)


@pytest.mark.parametrize("body", [wire.ChatBody, wire.CompletionBody, wire.TokenizeBody, wire.WarmBody])
def test_null_is_the_same_as_leaving_a_field_out(body: type[limits.Body]) -> None:
    nulls = dict.fromkeys(body.model_fields) | dict.fromkeys(body.refused)
    assert body.model_validate(nulls | BODIES[body]) == body.model_validate(BODIES[body])


def test_every_sampling_field_reaches_the_engine() -> None:
    fields = {
        "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": -0.2, "seed": 7, "stop": ["a", "b"], "stop_token_ids": [3], "ignore_eos": True, "min_tokens": 2,
        "max_tokens": 9, "skip_special_tokens": False, "include_stop_str_in_output": True,
    }  # fmt: skip
    wanted = SamplingParams(**fields, logit_bias={50: -100.0}, logprobs=3)
    assert chat(**fields, logit_bias={"50": -100}, logprobs=True, top_logprobs=3).sampling() == wanted
    assert text(**fields, logit_bias={"50": -100}, logprobs=3).sampling() == wanted
    assert set(fields) | {"logit_bias", "logprobs"} == set(SamplingParams.__dataclass_fields__)


def test_max_completion_tokens_is_stronger_than_max_tokens() -> None:
    assert chat(max_tokens=5).sampling().max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=7).sampling().max_tokens == 7


def test_logprobs_of_a_chat_come_alone_or_with_the_likeliest_tokens() -> None:
    assert chat().sampling().logprobs is None
    assert chat(logprobs=True).sampling().logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).sampling().logprobs == 5
    assert "top_logprobs: only allowed when logprobs is true" in refusal(wire.ChatBody, {"top_logprobs": 5})


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), ("", [""]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_a_prompt_may_be_text_or_tokens_one_or_several(prompt: object, prompts: object) -> None:
    assert text(prompt=prompt).prompts() == prompts


def test_a_template_gets_strings_and_no_developer() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}], "name": "ann"},
        {"role": "assistant", "content": None, "refusal": None, "audio": None},
    ]
    with pytest.raises(ValidationError, match="assistant needs content"):
        chat(messages=messages)
    assert chat(messages=messages[:2]).conversation() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello", "name": "ann"},
    ]


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"city": "Paris", "days": [1, null]}', {"city": "Paris", "days": [1, None]}),
        ('{"city": "Par', '{"city": "Par'),
        ("[1]", "[1]"),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ("[" * 100_000, "[" * 100_000),
        ("1" * 5000, "1" * 5000),
        ("{}", {}),
        ("", {}),  # what some clients write where there are none
        (" \n", {}),
    ],
)
def test_a_template_gets_the_arguments_of_a_call_as_an_object_where_they_are_one(arguments: str, seen: object) -> None:
    called = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    asked, answered = chat(
        messages=[{"role": "assistant", "tool_calls": [called]}, {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}]
    ).conversation()
    assert asked == {"role": "assistant", "content": "", "tool_calls": [called | {"function": {"name": "look", "arguments": seen}}]}
    assert answered == {"role": "tool", "content": "sunny", "tool_call_id": "call_1"}


def test_a_template_gets_tools_without_what_it_does_not_teach() -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "default": None}}}
    given_tools = [tool(description=None, parameters=parameters, strict=True), tool("other", description="Finds.")]
    assert chat(tools=given_tools).definitions() == [tool(parameters=parameters), tool("other", description="Finds.")]
    assert chat().definitions() is chat(tools=[]).definitions() is None


def test_a_chosen_tool_must_be_one_of_the_tools() -> None:
    def chosen(name: str) -> dict[str, Any]:
        return {"tool_choice": {"type": "function", "function": {"name": name}}, "tools": [tool("look")]}

    choice = chat(**chosen("look")).tool_choice
    assert isinstance(choice, wire.ChosenTool) and choice.function.name == "look"
    assert "tool_choice: names a function that is not among" in refusal(wire.ChatBody, chosen("listen"))
    assert 'tool_choice: "required" needs tools' in refusal(wire.ChatBody, {"tool_choice": "required"})
    assert chat(tool_choice="auto").tool_choice == "auto"
    assert "'none', 'auto' or 'required'" in refusal(wire.ChatBody, {"tool_choice": "maybe"})


def test_a_json_schema_is_kept_as_it_was_sent() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [None, 1]}}}
    found = chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}).response_format
    assert found is not None and found.json_schema is not None and found.json_schema.schema_ == schema
    assert "needs a json_schema" in refusal(wire.ChatBody, {"response_format": {"type": "json_schema"}})
    assert "'json_object'" in refusal(wire.ChatBody, {"response_format": {"type": "xml"}})


@pytest.mark.parametrize(("ttl", "seconds"), [("45s", 45), ("30m", 1800), ("12h", 43200), ("7d", 604800), (90, 90), (1, 1)])
def test_a_time_to_live_is_in_seconds_whatever_its_unit(ttl: object, seconds: int) -> None:
    assert chat(prompt_cache_options={"ttl": ttl}).ttl == seconds
    assert wire.PinBody.model_validate(TEXT | {"ttl": ttl}).ttl == seconds


@pytest.mark.parametrize(
    "ttl", ["30", "m", "", "1.5h", "-1s", "0s", "8d", "999999999d", "٣s", "30m\n", 0, -1, 604801, 1.5, True, 10**400, []]
)
def test_a_time_to_live_that_means_nothing_is_refused(ttl: object) -> None:
    assert "ttl" in refusal(wire.PinBody, {"ttl": ttl})


def test_a_conversation_is_named_by_its_session_or_else_by_its_cache_key() -> None:
    assert chat().session is None
    assert chat(prompt_cache_key="k").session == "k"
    assert chat(prompt_cache_key="k", session_id="s").session == "s"


def test_usage_in_a_stream_is_asked_for_within_a_stream() -> None:
    assert chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False}).include_usage
    assert not chat(stream=True).include_usage
    assert "stream_options: only allowed when stream is true" in refusal(wire.ChatBody, {"stream_options": {"include_usage": True}})


def test_fields_that_only_other_servers_know_are_ignored() -> None:
    others = {"service_tier": "auto", "store": True, "reasoning_effort": "low", "metadata": {"a": "b"}, "user": "ann", "made_up": [1]}
    assert chat(**others).sampling() == chat().sampling()


# ---- what is refused


@pytest.mark.parametrize(("body", "field"), [(body, field) for body in BODIES for field in body.refused])
def test_a_field_that_would_change_the_answer_and_is_not_obeyed_is_refused(body: type[limits.Body], field: str) -> None:
    assert refusal(body, {field: "x"}).startswith(f"{field}: not supported; ")


def test_a_constraint_that_would_not_be_followed_is_refused_and_free_text_is_not_passed_off_for_it() -> None:
    others = {
        "guided_json": {},
        "guided_choice": ["a", "b"],
        "regex": "[ab]",
    }
    for body in (wire.ChatBody, wire.CompletionBody):
        said = refusal(body, {"grammar": "root ::= a"})
        assert said.startswith("grammar: not supported; ") and said.endswith(
            "use a JSON schema, a regex or a choice, or follow the grammar offline, with pando.LLM"
        )
    for field, value in others.items():
        way = field.removeprefix("guided_")
        for body in (wire.ChatBody, wire.CompletionBody):
            assert refusal(body, {field: value}).startswith(f'{field}: not supported; use structured_outputs, as {{"{way}": ...}}')
    said = refusal(wire.CompletionBody, {"response_format": {"type": "json_object"}})
    assert "only /v1/chat/completions has it; use structured_outputs" in said


@pytest.mark.parametrize("name", ["schema", "value"])
def test_a_schema_beside_json_object_is_refused_and_any_object_is_not_passed_off_for_it(name: str) -> None:
    """Other servers take a schema there, and clients that know them send it, as huggingface_hub does to any address."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    said = refusal(wire.ChatBody, {"response_format": {"type": "json_object", name: schema}})
    assert said.startswith(f"response_format: {name}: not supported; ") and '"type": "json_schema"' in said
    assert chat(response_format={"type": "json_object", name: None}) == chat(response_format={"type": "json_object"})


def test_a_message_to_be_continued_is_refused_and_one_that_is_not_is_fine() -> None:
    assert refusal(wire.ChatBody, {"continue_final_message": True}).startswith("continue_final_message: not supported; ")
    assert chat(continue_final_message=False) == chat()
    assert refusal(wire.ChatBody, {"add_generation_prompt": False}).startswith("add_generation_prompt: an answer is always a new message; ")
    assert chat(add_generation_prompt=True) == chat(add_generation_prompt=None) == chat()


@pytest.mark.parametrize("field", ["suffix", "bad_words", "prompt_logprobs", "use_beam_search", "response_format", "guided_choice"])
def test_what_asks_for_nothing_is_not_refused(field: str) -> None:
    for nothing in (None, False, "", []):
        assert text(**{field: nothing}) == text()
    assert text(response_format={"type": "text"}) == text()


@pytest.mark.parametrize("off", [{}, {"logprobs": False}, {"logprobs": None}])
def test_no_likeliest_tokens_beside_no_logprobs_are_not_refused(off: dict[str, Any]) -> None:
    assert chat(top_logprobs=0, **off).sampling().logprobs is None
    assert "only allowed when logprobs is true" in refusal(wire.ChatBody, {"messages": [USER], "top_logprobs": 1, **off})


def test_what_other_servers_do_with_a_prompt_or_an_answer_is_refused_with_what_to_do_instead() -> None:
    for body in (wire.ChatBody, wire.CompletionBody):
        assert "echo, logprobs and max_tokens 0" in refusal(body, {"prompt_logprobs": 0})
        assert "logit_bias" in refusal(body, {"bad_words": ["no"]})
        assert 'truncation "auto"' in refusal(body, {"truncate_prompt_tokens": 100})
    for body in (wire.ChatBody, wire.TokenizeBody, wire.WarmBody, wire.PinBody):
        assert "the operator chooses it" in refusal(body, {"chat_template": "{{ messages }}"})
        assert "into a message" in refusal(body, {"documents": [{"text": "a"}]})


REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
WHOLES = ("n", "top_k", "seed", "max_tokens", "min_tokens")
FLAGS = ("ignore_eos", "stream", "skip_special_tokens", "include_stop_str_in_output", "return_token_ids")
HUGE = pytest.param(10**400, id="huge")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -3, 101, HUGE, True, "0.5", [1], {}])
@pytest.mark.parametrize("field", REALS)
@pytest.mark.parametrize("body", [wire.ChatBody, wire.CompletionBody])
def test_a_number_out_of_its_range_or_no_number_is_refused_by_name(body: type[limits.Body], field: str, value: object) -> None:
    assert refusal(body, {field: value}).startswith(f"{field}: Input should be ")


@pytest.mark.parametrize("value", [1.5, 1.0, math.nan, math.inf, -(2**64), 2**70, HUGE, True, "1", [1]])
@pytest.mark.parametrize("field", WHOLES)
def test_a_count_that_is_not_whole_or_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    assert refusal(wire.ChatBody, {field: value}).startswith(f"{field}: Input should be ")


@pytest.mark.parametrize("value", [0, 1, "true", "yes", []])
@pytest.mark.parametrize("field", FLAGS)
def test_a_flag_is_true_or_false(field: str, value: object) -> None:
    assert refusal(wire.ChatBody, {field: value}) == f"{field}: Input should be a valid boolean"


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("hello", "messages.0: Input should be an object"),
        ({"role": "robot", "content": "a"}, "messages.0.role: Input should be 'developer'"),
        ({"content": "a"}, "messages.0.role: This field is required"),
        ({"role": "user"}, "messages.0: A message of role user needs content"),
        ({"role": "user", "content": 5}, "messages.0.content: Input should be a string or a list of text parts"),
        ({"role": "user", "content": "\ud800"}, "messages.0.content: Input should be a valid string"),
        ({"role": "user", "content": [{"text": "a"}]}, "messages.0.content.0.type: This field is required"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0.text: This field is required"),
        ({"role": "user", "content": ["a"]}, "messages.0.content.0: Input should be an object"),
        ({"role": "user", "content": "a", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}]}, "Only an assistant"),
        ({"role": "tool", "content": "a"}, "messages.0: A message of role tool needs the tool_call_id"),
        ({"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]}, "arguments: Input should be"),
    ],
)
def test_a_message_that_is_none_is_refused_with_its_place(message: object, complaint: str) -> None:
    assert complaint in refusal(wire.ChatBody, {"messages": [message]})


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_text", "text": "a"}, {"type": None}])
def test_a_part_that_is_no_text_gets_one_sentence_which_names_it(part: object) -> None:
    content = [{"type": "text", "text": "a"}, part]
    sentence = refusal(wire.ChatBody, {"messages": [{"role": "user", "content": content}]})
    assert sentence == (
        'messages.0.content.1: Input should be a text part, such as {"type": "text", "text": "Hello"}; this server reads text only'
    )


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ([], "at least 1 item"),
        ([[]], "at least 1 item"),
        ([1, "a"], "prompt.1: Input should be a valid integer"),
        (["a", 1], "prompt.1: Input should be a valid string"),
        ([True], "prompt.0: Input should be a valid integer"),
        ([-1], "prompt.0: Input should be greater than or equal to 0"),
        ([10**400], "prompt.0: Input should be less"),
        (5, "prompt: Input should be a string, a list of strings, a list of token ids, or a list of such lists"),
        ({"a": "b"}, "prompt: Input should be a string"),
    ],
)
def test_a_prompt_that_is_none_is_refused_with_its_place(prompt: object, complaint: str) -> None:
    assert complaint in refusal(wire.CompletionBody, {"prompt": prompt})


def too_long(limit: int) -> str:
    return "a" * (limit + 1)


NESTED: dict[str, Any] = {}
for _ in range(5000):
    NESTED = {"a": NESTED}


@pytest.mark.parametrize(
    ("body", "fields", "complaint"),
    [
        (wire.ChatBody, {"messages": [USER] * (limits.MAX_MESSAGES + 1)}, "messages: List should have at most 2048 items"),
        (wire.ChatBody, {"messages": []}, "messages: List should have at least 1 item"),
        (wire.ChatBody, {"messages": [USER | {"content": too_long(limits.MAX_CHARS)}]}, "at most 4194304 characters"),
        (wire.CompletionBody, {"prompt": too_long(limits.MAX_CHARS)}, "prompt: String should have at most 4194304 characters"),
        (wire.CompletionBody, {"prompt": ["a"] * (limits.MAX_PROMPTS + 1)}, "prompt: List should have at most 64 items"),
        (wire.CompletionBody, {"prompt": [[1]] * (limits.MAX_PROMPTS + 1)}, "prompt: List should have at most 64 items"),
        (wire.CompletionBody, {"prompt": [1] * (limits.MAX_PROMPT_TOKENS + 1)}, "prompt: List should have at most 262144 items"),
        (wire.CompletionBody, {"prompt": ["a"] * 3, "n": 86}, "n: times the number of prompts makes 258 answers; at most 256"),
        (wire.CompletionBody, {"n": MAX_N + 1}, "n: Input should be less than or equal to 128"),
        (wire.CompletionBody, {"n": 2, "best_of": 3}, "best_of: must be the same as n, which is 2"),
        (wire.CompletionBody, {"logprobs": MAX_LOGPROBS + 1}, "logprobs: Input should be less than or equal to 20"),
        (wire.ChatBody, {"logprobs": True, "top_logprobs": MAX_LOGPROBS + 1}, "top_logprobs: Input should be less than or equal to 20"),
        (wire.ChatBody, {"stop": ["a"] * 10_000}, f"stop: List should have at most {MAX_STOPS} items"),
        (wire.ChatBody, {"stop": too_long(MAX_STOP_CHARS)}, f"stop: String should have at most {MAX_STOP_CHARS} characters"),
        (wire.ChatBody, {"stop": [""]}, "stop.0: String should have at least 1 character"),
        (wire.ChatBody, {"stop_token_ids": [1] * 1025}, "stop_token_ids: List should have at most 1024 items"),
        (wire.ChatBody, {"logit_bias": {str(i): 1 for i in range(MAX_BIASES + 1)}}, "logit_bias: Input should have at most 1024 entries"),
        (wire.ChatBody, {"logit_bias": {"1": 101}}, "logit_bias.1: Input should be less than or equal to 100"),
        (wire.ChatBody, {"logit_bias": {"one": 1}}, "logit_bias.one: String should match pattern"),
        (wire.ChatBody, {"logit_bias": {"9" * 5000: 1}}, "logit_bias.999"),
        (wire.ChatBody, {"tools": [tool(f"f{i}") for i in range(129)]}, "tools: List should have at most 128 items"),
        (wire.ChatBody, {"tools": [tool(parameters={"a": too_long(limits.MAX_SCHEMA_BYTES)})]}, "at most 65536 bytes as JSON, not 65546"),
        (wire.ChatBody, {"tools": [tool(parameters=NESTED)]}, "tools.0.function.parameters: Input should be plain JSON"),
        (wire.ChatBody, {"tools": [tool(parameters={"a": math.nan})]}, "tools.0.function.parameters: Input should be plain JSON"),
        (wire.ChatBody, {"tools": [tool(parameters={"a": "\ud800"})]}, "tools.0.function.parameters: Input should be plain JSON"),
        (wire.ChatBody, {"user": too_long(256)}, "user: String should have at most 256 characters"),
        (wire.ChatBody, {"user": "ann\nbob"}, "user: Input should have printable characters only"),
        (wire.ChatBody, {"session_id": too_long(256)}, "session_id: String should have at most 256 characters"),
        (wire.ChatBody, {"session_id": "\x1b[2J"}, "session_id: Input should have printable characters only"),
        (wire.ChatBody, {"prompt_cache_key": ""}, "prompt_cache_key: String should have at least 1 character"),
        (wire.ChatBody, {"cache_salt": "\0"}, "cache_salt: Input should have printable characters only"),
        (wire.ChatBody, {"metadata": {str(i): "" for i in range(17)}}, "metadata: Input should have at most 16 entries, not 17"),
        (wire.ChatBody, {"metadata": {"a": 1}}, "metadata.a: Input should be a valid string"),
        (wire.TokenizeBody, CHAT, "give either a prompt or messages, not both"),
        (wire.WarmBody, {"prompt": None}, "give either a prompt or messages"),
        (wire.DetokenizeBody, {"tokens": [2**31]}, "tokens.0: Input should be less than or equal to 2147483647"),
        (wire.UnpinBody, {"id": None}, "id: This field is required"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else None,
)  # fmt: skip
def test_each_limit_is_told_when_it_is_passed(body: type[limits.Body], fields: Mapping[str, Any], complaint: str) -> None:
    assert complaint in refusal(body, fields)


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (wire.ChatBody, {"messages": [USER] * limits.MAX_MESSAGES}),
        (wire.CompletionBody, {"prompt": "a" * limits.MAX_CHARS}),
        (wire.CompletionBody, {"prompt": [1] * limits.MAX_PROMPT_TOKENS}),
        (wire.CompletionBody, {"prompt": ["a"] * limits.MAX_PROMPTS, "n": 4, "best_of": 4}),
        (wire.ChatBody, {"stop": ["a" * MAX_STOP_CHARS] * MAX_STOPS}),
        (wire.ChatBody, {"logit_bias": {str(i): -100 for i in range(MAX_BIASES)}}),
        (wire.ChatBody, {"seed": 2**64 - 1}),
        (wire.ChatBody, {"session_id": "é" * 256, "metadata": {str(i): "" for i in range(16)}}),
    ],
    ids=lambda value: "" if isinstance(value, dict) else None,
)
def test_what_just_keeps_a_limit_is_accepted(body: type[limits.Body], fields: Mapping[str, Any]) -> None:
    body.model_validate(dict(BODIES[body]) | fields)


def test_what_only_the_engine_can_judge_it_refuses_itself() -> None:
    with pytest.raises(InvalidSampling, match="min_tokens"):
        chat(min_tokens=5, max_tokens=4).sampling()


# ---- anything at all

NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, -(2**63), 2**64, True, False])
TEXTS = st.text(st.characters(), max_size=8) | st.sampled_from(["\ud800", "auto", "text", "function", "user", "tool", "30m"])
KEYS = TEXTS | st.sampled_from(["type", "role", "content", "function", "name", "ttl", "include_usage"])
ANYTHING = st.recursive(
    st.none() | NUMBERS | TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)


@pytest.mark.parametrize("body", BODIES)
@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_anything_else_is_refused_in_a_sentence_that_can_be_sent(body: type[limits.Body], data: st.DataObject) -> None:
    names = [*body.model_fields, *body.refused, "\ud800"]
    wrong = data.draw(ANYTHING | st.dictionaries(st.sampled_from(names), ANYTHING, max_size=4))
    sent = dict(BODIES[body]) | wrong if isinstance(wrong, dict) and data.draw(st.booleans()) else wrong
    try:
        found = body.model_validate(sent)
        if isinstance(found, wire.ChatBody):
            encode([found.conversation(), found.definitions()])
        if isinstance(found, wire.ChatBody | wire.CompletionBody):
            found.sampling()
    except ValidationError as error:
        message, param = from_validation(error.errors())
        assert message and len(message) < 1000
        encode(failure(400, message, param))
    except InvalidSampling:
        pass


@pytest.mark.parametrize("body", BODIES)
def test_json_text_is_read_like_values(body: type[limits.Body]) -> None:
    assert body.model_validate_json(json.dumps(BODIES[body])) == body.model_validate(BODIES[body])


@pytest.mark.parametrize(
    "sent", [b"", b"{", b"null", b"[]", b'"\xff"', b"[" * 100_000, b'{"messages":' + b"9" * 5000 + b"}", b'{"a": "\\ud800"}']
)
def test_bytes_that_are_no_body_are_refused_in_a_sentence_that_can_be_sent(sent: bytes) -> None:
    with pytest.raises(ValidationError) as caught:
        wire.ChatBody.model_validate_json(sent)
    message, param = from_validation(caught.value.errors())
    assert len(message) > 10
    encode(failure(400, message, param))


# ---- documentation


@pytest.mark.parametrize("body", BODIES)
def test_every_field_is_described_and_every_example_is_valid(body: type[limits.Body]) -> None:
    schema = body.model_json_schema()
    for part in [schema, *schema.get("$defs", {}).values()]:
        for name, field in part["properties"].items():
            assert field.get("description", "").endswith("."), f"{part['title']}.{name} is not described"
    for name, field in body.model_fields.items():
        for example in field.examples or ():
            alone = {"prompt": None} if name == "messages" else {"messages": None} if name == "prompt" else {}
            body.model_validate(dict(BODIES[body]) | alone | {name: example})


def test_the_schema_says_that_null_is_allowed_where_it_is() -> None:
    properties = wire.ChatBody.model_json_schema()["properties"]
    assert {"type": "null"} in properties["temperature"]["anyOf"]
    assert properties["temperature"]["default"] == 1
    assert "anyOf" not in properties["messages"]
