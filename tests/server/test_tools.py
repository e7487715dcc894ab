"""Tool calls are told apart from text in every form that is known, however the answer is cut; forced calls follow their schemas."""

import json
import re
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pando.engine.grammar import MAX_SCHEMA_DEPTH, Grammars
from pando.engine.request import SamplingParams, TokenEvent
from pando.engine.tools import HERMES, LLAMA, MAX_FORCED_CALLS, MISTRAL, Call, Form, Function, Stream, form_of, functions
from pando.errors import InvalidPrompt, InvalidSampling
from pando.server.answers import _Answer
from pando.server.prompts import Asked
from tests.engine.test_grammar import MARK, follow, marked_tokenizer, tokens_of, wander
from tests.tiny import END, VOCAB, tiny_tokenizer

FORMS = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}

HERMES_TEMPLATE = r"""{%- if tools %}Call with <tool_call>
{{ "{\"name\": <name>, \"arguments\": <object>}" }}
</tool_call>{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"""
LLAMA_TEMPLATE = """{% if tools is not none %}{{ 'Reply with {"name": the name, "parameters": the arguments}.' }}{% endif %}"""
MISTRAL_TEMPLATE = """{%- if tools is defined %}[AVAILABLE_TOOLS]{% endif %}{{ "[TOOL_CALLS] [" }}"""


def shown(calls: list[Call]) -> list[tuple[int, str, str]]:
    return [(call.index, call.name, call.arguments) for call in calls]


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


# Which form a template teaches


def test_the_form_is_read_from_the_template() -> None:
    assert form_of(HERMES_TEMPLATE) == HERMES
    assert form_of(LLAMA_TEMPLATE) == LLAMA
    assert form_of(MISTRAL_TEMPLATE) == MISTRAL


@pytest.mark.parametrize(
    "template",
    [
        "",
        "{{ messages }}",
        'You have tools. <tool_call>{"name": x, "arguments": y}',  # says so, but is given none
        "{% if tools %}<tool_call><function=f><parameter=p>{% endif %}",
        "{% if tools %}[TOOL_CALLS]name[ARGS]{% endif %}",
        "{% if tools %}[name(argument=value)]{% endif %}",
        '{% if mytools %}<tool_call>"arguments"{% endif %}',
    ],
)
def test_a_template_without_tools_or_with_calls_of_another_form_has_none(template: str) -> None:
    assert form_of(template) is None


def test_the_blank_before_a_list_is_as_the_template_has_it() -> None:
    form = form_of(MISTRAL_TEMPLATE.replace("] [", "]["))
    assert form is not None and '"[" call' in form.grammar(functions([tool("f")]))
    assert '" [" call' in MISTRAL.grammar(functions([tool("f")]))


# What is a call, and what is text

A = '{"name": "a", "arguments": {"x": 1}}'
B = '{"name": "b-2", "arguments": {}}'
P = '{"name": "a", "parameters": {"x": 1}}'
ONE = [(0, "a", '{"x": 1}')]
TWO = [*ONE, (1, "b-2", "{}")]

EXAMPLES = [
    ("hermes", f"<tool_call>\n{A}\n</tool_call>", "", ONE),
    ("hermes", f"<tool_call>\n{A}\n</tool_call>\n<tool_call>\n{B}\n</tool_call>\n", "", TWO),
    ("hermes", f"I will look.\n\n<tool_call>{A}</tool_call>", "I will look.", ONE),
    ("hermes", f"<tool_call>{A}</tool_call>\n So.\n", "So.\n", ONE),
    ("hermes", f"<tool_call>{A}", "", ONE),  # it stopped before the closer
    ("hermes", f"<tool_call>{A}</tool", "", ONE),
    ("hermes", f"<tool_call>{A}\n<tool_call>{B}", "", TWO),
    ("hermes", f"<tool_call>[{A}, {B}]</tool_call>", "", TWO),
    ("hermes", f"<tool_call>{A[:-1]}</tool_call>\n<tool_call>{A}</tool_call>", f"<tool_call>{A[:-1]}</tool_call>", ONE),
    ("hermes", f"<tool_call><tool_call>{A}</tool_call>", "<tool_call>", ONE),
    ("hermes", f"a < b <tool {A}", f"a < b <tool {A}", []),
    ("hermes", A, A, []),
    ("llama", P, "", ONE),
    ("llama", f"\n\n<|python_tag|>{P}", "", ONE),
    ("llama", f"Look: <|python_tag|>{P}", "Look:", ONE),
    ("llama", f"{P}; {B}", "", TWO),
    ("llama", f"{P}\n{B}", "", TWO),
    ("llama", f"So: {P}", f"So: {P}", []),
    ("llama", '{"name": "Ann", "age": 7}', '{"name": "Ann", "age": 7}', []),
    ("llama", "{x} is a set", "{x} is a set", []),
    ("llama", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("mistral", f"[TOOL_CALLS] [{A}]", "", ONE),
    ("mistral", f"[TOOL_CALLS][{A}, {B}]", "", TWO),
    ("mistral", f"[TOOL_CALLS] {A}", "", ONE),
    ("mistral", f"[TOOL_CALLS] [{A}, {{}}]", f"[TOOL_CALLS] [{A}, {{}}]", []),
    ("mistral", f"[TOOL_CALLS] [{A} {B}]", f"[TOOL_CALLS] [{A} {B}]", []),
    ("mistral", "[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
    ("mistral", f"[{A}]", f"[{A}]", []),
    *((name, text, text, []) for name in FORMS for text in ("", "Hello", "  Hello \n", "\n", "é😀", "{", "{}", '{"a": [', "[", '"')),
]


@pytest.mark.parametrize(("name", "text", "plain", "calls"), EXAMPLES)
def test_an_answer_is_taken_apart_into_text_and_calls(name: str, text: str, plain: str, calls: list[tuple[int, str, str]]) -> None:
    found_plain, found_calls = FORMS[name].parse(text)
    assert (found_plain, shown(found_calls)) == (plain, calls)


@pytest.mark.parametrize(
    "value",
    [
        '{"name": "a", "arguments": {"x": NaN}}',
        '{"name": "a", "arguments": {"x": 1,}}',
        '{"name": "a", "arguments": {"x": "line\nbreak"}}',
        '{"name": "a", "arguments": "x"}',
        '{"name": "a", "arguments": [1]}',
        '{"name": "a"}',
        '{"arguments": {}}',
        '{"name": 1, "arguments": {}}',
        '{"name": null, "arguments": {}}',
        '{"name": "a b", "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "a" "arguments": {}}',
        "{'name': 'a', 'arguments': {}}",
        '{"name": "a", "arguments": {"x": ' + "[" * 50_000 + "]" * 50_000 + "}}",
        '{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}",
    ],
)
def test_what_looks_like_a_call_but_is_none_stays_text(value: str) -> None:
    text = f"<tool_call>\n{value}\n</tool_call>"
    assert HERMES.parse(text) == (text, [])


@pytest.mark.parametrize("arguments", ['{"s": "</tool_call> } \\" { é \\ud83d"}', '{"n": 1.50, "m": 1E400}', '{ "a":1,\n"a":2 }'])
def test_arguments_are_passed_on_exactly_as_they_were_written(arguments: str) -> None:
    text = f'<tool_call>{{"id": 3, "arguments": {arguments} , "name": "f"}}</tool_call>'
    assert shown(HERMES.parse(text)[1]) == [(0, "f", arguments)]


def test_every_call_has_an_id_of_its_own_that_its_template_takes_back() -> None:
    ids = [call.id for _ in range(50) for call in HERMES.parse(f"<tool_call>[{A}, {B}]")[1]]
    assert len(set(ids)) == 100 and all(re.fullmatch("call_[0-9a-f]{24}", one) for one in ids)
    assert re.fullmatch("[0-9a-f]{9}", MISTRAL.parse(f"[TOOL_CALLS] [{A}]")[1][0].id)


# The same, as it arrives


def streamed(form: Form, parts: list[str]) -> tuple[str, list[tuple[int, str, str]]]:
    stream = Stream(form)
    pieces = [*(stream.feed(part) for part in parts), stream.finish()]
    return "".join(piece.text for piece in pieces), shown([call for piece in pieces for call in piece.calls])


@pytest.mark.parametrize(("name", "text", "plain", "calls"), EXAMPLES)
def test_an_answer_that_arrives_letter_by_letter_is_taken_apart_alike(
    name: str, text: str, plain: str, calls: list[tuple[int, str, str]]
) -> None:
    assert streamed(FORMS[name], list(text)) == (plain, calls)


WORDS = st.sampled_from(
    [A, B, P, "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", ";", "\n", " ", "{", "}", "[", "]", ",", '"', "\\", ":", "é"]
)
ANSWERS = st.lists(WORDS | st.text(max_size=5), max_size=12).map("".join)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(FORMS)), ANSWERS, st.lists(st.integers(0, 200), max_size=20))
def test_no_text_is_too_strange_and_no_cut_makes_a_difference(name: str, text: str, places: list[int]) -> None:
    cuts = sorted({0, len(text), *(place for place in places if place < len(text))})
    parts = [text[begin:end] for begin, end in pairwise(cuts)]
    plain, calls = FORMS[name].parse(text)
    assert streamed(FORMS[name], parts) == (plain, shown(calls))
    assert calls or plain == text  # without a call, nothing is lost
    for call in calls:
        assert isinstance(json.loads(call.arguments), dict)


def test_text_is_passed_on_at_once_unless_it_may_begin_a_call() -> None:
    stream = Stream(HERMES)
    assert stream.feed("It is").text == "It is"
    assert stream.feed(" 5 <").text == " 5"
    assert stream.feed("tool").text == ""
    assert stream.feed("s").text == " <tools"
    assert stream.feed(". Now <tool_call>").text == ". Now"
    assert stream.feed("{or").text == " <tool_call>{or"
    assert stream.finish().text == ""


def test_a_call_is_passed_on_as_soon_as_it_is_whole() -> None:
    stream = Stream(HERMES)
    stream.feed(f"<tool_call>\n{A[:-1]}")
    assert shown(list(stream.feed("}").calls)) == ONE
    assert stream.feed("\n</tool_call>") == stream.finish()


@pytest.mark.parametrize("piece", ["<tool_call>", '<tool_call>{"', '<tool_call>{"\\"', "<tool_call>[", " ", "\n<", '<tool_call>{"a":{'])
def test_a_long_answer_of_half_calls_takes_no_longer_than_its_length_explains(piece: str) -> None:
    start = time.thread_time()
    text = piece * 20_000
    assert HERMES.parse(text) == (text, [])
    assert time.thread_time() - start < 20  # were it quadratic, minutes


@pytest.mark.parametrize("piece", ["[", "{", " ", "\n "])
@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL])
def test_what_begins_a_call_and_goes_on_without_one_costs_a_stream_no_more_with_each_token(form: Form, piece: str) -> None:
    start, stream = time.thread_time(), Stream(form)
    texts = [stream.feed(text).text for text in [form.marker, *[piece * 4] * 40_000]]
    assert "".join(texts) == "" and stream.finish().text == form.marker + piece * 160_000
    assert time.thread_time() - start < 5  # were it quadratic, a minute


# Cut off


@pytest.mark.parametrize("split", [lambda text: [text], list], ids=["whole", "letter by letter"])
@pytest.mark.parametrize(
    ("name", "text", "plain", "calls"),
    [
        *(("hermes", f"<tool_call>\n{A}\n</tool_call>\n<tool_call>\n{B}"[:length], "", ONE) for length in range(48, 106)),
        *(("hermes", f"<tool_call>\n{A}"[:length], "", []) for length in range(48)),
        ("hermes", f"I will look.\n\n<tool_call>{A[:-1]}", "I will look.", []),
        ("hermes", "I will look.\n<tool", "I will look.", []),
        ("hermes", "It is 5 <", "It is 5 <", []),
        ("hermes", f"<tool_call>{A}</tool_call>So it is", "So it is", ONE),
        ("hermes", f"<tool_call>[{A}, {B[:-3]}", "", ONE),
        ("hermes", "<tool_call>{or", "<tool_call>{or", []),
        ("hermes", A[:-1], A[:-1], []),
        *(("llama", P[:length], "", []) for length in range(1, len(P))),
        *(("llama", f"{P}; {P}"[:length], "", ONE) for length in range(len(P), 2 * len(P) + 2)),
        ("llama", f"<|python_tag|>{P[:-1]}", "", []),
        ("llama", '{"name": "Ann", "age": 7, "bo', '{"name": "Ann", "age": 7, "bo', []),
        ("llama", '{"town": "Oslo", "na', '{"town": "Oslo", "na', []),
        ("llama", '{"name": "two words", "par', '{"name": "two words", "par', []),
        ("mistral", f"[TOOL_CALLS] [{A}, {B[:-3]}", "", ONE),
        ("mistral", f"[TOOL_CALLS] [{A}, ", "", ONE),
        ("mistral", f"See.[TOOL_CALLS] [{A[:-3]}", "See.", []),
    ],
)
def test_of_an_answer_that_is_cut_off_no_piece_of_a_call_is_passed_on(
    name: str, text: str, plain: str, calls: list[tuple[int, str, str]], split: Callable[[str], list[str]]
) -> None:
    stream = Stream(FORMS[name])
    pieces = [*(stream.feed(part) for part in split(text)), stream.finish(cut=True)]
    assert "".join(piece.text for piece in pieces) == plain
    assert shown([call for piece in pieces for call in piece.calls]) == calls


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(FORMS)), ANSWERS)
def test_what_is_cut_off_loses_nothing_but_its_end(name: str, text: str) -> None:
    stream, whole = Stream(FORMS[name]), FORMS[name].parse(text)[0]
    pieces = [stream.feed(text), stream.finish(cut=True)]
    assert whole.startswith("".join(piece.text for piece in pieces).rstrip())


# Tools as clients define them


def test_functions_are_read_and_those_without_parameters_take_none() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    first, second, third = functions([tool("a", schema), tool("b_B-2"), tool("c", {"properties": {}})])
    assert first == Function("a", schema)
    assert second.parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    assert third.parameters["type"] == "object"


@pytest.mark.parametrize(
    ("tools", "complaint"),
    [
        ([tool("a"), {"type": "retrieval"}], r"tools\[1\]"),
        (["a"], r"tools\[0\]"),
        ([{"type": "function", "function": "a"}], r"tools\[0\]"),
        ([tool("")], "named ''"),
        ([tool("a b")], "'a b'"),
        ([tool("a\n")], "named"),
        ([tool("x" * 65)], "1 to 64"),
        ([tool(None)], "named"),  # type: ignore[arg-type]
        ([tool("a"), tool("b"), tool("a")], "two functions named 'a'"),
        ([tool("a", {"type": "string"})], "no object"),
        ([tool("a", ["x"])], "no object"),
    ],
)
def test_a_tool_that_is_none_is_refused_with_its_place_or_name(tools: list[Any], complaint: str) -> None:
    with pytest.raises(InvalidPrompt, match=complaint):
        functions(tools)


# Calls that are forced

TOOLS = functions(
    [
        tool(
            "weather",
            {
                "$defs": {"day": {"enum": ["today", "tomorrow"]}},
                "properties": {"days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 3}, "hot": {"type": "boolean"}},
                "required": ["days", "hot"],
                "additionalProperties": False,
            },
        ),
        tool("weather_2", {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}),
        tool("now"),
    ]
)


def check(name: str, arguments: dict[str, Any]) -> None:
    if name == "weather":
        assert arguments.keys() == {"days", "hot"} and isinstance(arguments["hot"], bool)
        assert len(arguments["days"]) <= 3 and set(arguments["days"]) <= {"today", "tomorrow"}
    else:
        assert arguments in ([{"n": 1}, {"n": 2}] if name == "weather_2" else [{}])


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(tiny_tokenizer(), VOCAB, [END])


@pytest.mark.parametrize("name", FORMS)
def test_whatever_is_chosen_a_forced_answer_calls_as_the_schemas_say(grammars: Grammars, name: str) -> None:
    form, seen = FORMS[name], set()
    make = grammars.lark(form.grammar(TOOLS))
    for seed in range(12):
        plain, calls = form.parse(wander(make, seed))
        assert plain == "" and 1 <= len(calls) <= (MAX_FORCED_CALLS if form.several else 1)
        for call in calls:
            check(call.name, json.loads(call.arguments))
            assert json.dumps(json.loads(call.arguments)) == call.arguments  # as a template will write it into history
        seen |= {call.name for call in calls} | ({"several"} if len(calls) > 1 else set())
    assert seen == {"weather", "weather_2", "now"} | ({"several"} if form.several else set())


@pytest.mark.parametrize("name", FORMS)
def test_one_call_is_forced_where_several_are_not_wanted(grammars: Grammars, name: str) -> None:
    form = FORMS[name]
    make = grammars.lark(form.grammar(TOOLS, parallel=False))
    assert [len(form.parse(wander(make, seed))[1]) for seed in range(6)] == [1] * 6


@pytest.mark.parametrize("name", FORMS)
def test_a_named_function_is_called_once(grammars: Grammars, name: str) -> None:
    form = FORMS[name]
    make = grammars.lark(form.grammar(TOOLS, "weather_2"))
    for seed in range(4):
        (call,) = form.parse(wander(make, seed))[1]
        assert call.name == "weather_2"


def test_forced_calls_are_written_as_the_templates_write_them(grammars: Grammars) -> None:
    hermes = grammars.lark(HERMES.grammar(TOOLS))()
    call = '<tool_call>\n{"name": "weather", "arguments": {"days": ["today", "tomorrow"], "hot": true}}\n</tool_call>'
    follow(hermes, f'{call}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>')
    assert follow(grammars.lark(LLAMA.grammar(TOOLS))(), '{"name": "weather_2", "parameters": {"n": 2}}')
    assert follow(grammars.lark(MISTRAL.grammar(TOOLS))(), '[TOOL_CALLS] [{"name": "now", "arguments": {}}]')


def test_a_marker_that_is_a_special_token_is_written_as_that_token() -> None:
    tokenizer = marked_tokenizer()
    special = MISTRAL.special_words(tokenizer)
    assert special == {"[TOOL_CALLS]": MARK}
    assert MISTRAL.special_words(tiny_tokenizer()) == HERMES.special_words(tokenizer) == {}

    constraint = Grammars(tokenizer, tokenizer.vocab_size, [END]).lark(MISTRAL.grammar(TOOLS, special=special))()
    assert tokens_of(constraint.allowed()) == [MARK]
    answer = tokenizer.encode('[TOOL_CALLS] [{"name": "now", "arguments": {}}]')
    assert [constraint.accept(token) for token in answer] == [False] * (len(answer) - 1) + [True]
    assert len(MISTRAL.parse(tokenizer.decode(answer, skip_special=False))[1]) == 1


def test_a_function_that_cannot_be_forced_is_refused_with_the_reason(grammars: Grammars) -> None:
    with pytest.raises(InvalidPrompt, match="'absent'"):
        HERMES.grammar(TOOLS, "absent")
    with pytest.raises(InvalidPrompt, match="no tool"):
        HERMES.grammar(())
    with pytest.raises(InvalidSampling, match="nonsense"):
        grammars.lark(HERMES.grammar(functions([tool("a", {"properties": {"x": {"type": "nonsense"}}})])))
    several = {"type": "array", "uniqueItems": True}
    with pytest.raises(InvalidSampling) as refused:
        grammars.lark(HERMES.grammar(functions([tool("a"), tool("b", {"properties": {"x": several}})])))
    assert str(refused.value) == (
        'the JSON schema cannot be followed: Unimplemented keys: ["uniqueItems"]; change or remove that part of it'
    ), "without the grammar around it, which the client did not write"
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(MAX_SCHEMA_DEPTH):
        deep = {"items": deep}
    with pytest.raises(InvalidSampling, match="deeper"):
        HERMES.grammar(functions([tool("a", {"properties": {"x": deep}})]))


@pytest.mark.parametrize(("said", "left"), [("I look.\n<tool_call>", "I look."), ('<tool_call>\n{"name": "a", "argu', "")])
def test_of_a_call_that_a_stop_ends_nothing_is_passed_on(said: str, left: str) -> None:
    answer = _Answer(Asked([], SamplingParams(), form=HERMES), ())
    answer.take(TokenEvent("r", 0, 1, said))
    answer.take(TokenEvent("r", 0, 2, "", finish_reason="stop", stop_reason="\n"))
    assert answer.text == left and not answer.calls
