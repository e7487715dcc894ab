"""Answers of the offline interface follow what was asked for, whatever the model would rather say."""

import json
import re
from typing import Any

import pytest

from pando import SamplingParams, StructuredOutputsParams
from pando.engine.conversation import Rendering
from pando.engine.tools import HERMES, functions
from pando.errors import InvalidPrompt, InvalidSampling

from ..tiny import tiny_llm
from .test_grammar import marked_tokenizer

pytestmark = pytest.mark.usefixtures("overlap")

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


HELLO = [{"role": "user", "content": "Hello"}]
LONG = SamplingParams(max_tokens=200, seed=0)


@pytest.mark.parametrize("schema", [CITY, json.dumps(CITY)], ids=["mapping", "text"])
def test_every_answer_follows_a_json_schema_however_it_is_asked_for(schema: Any) -> None:
    llm, wanted = tiny_llm(), StructuredOutputsParams(json=schema)
    outputs = llm.generate(["one", "two"], SamplingParams(n=3, max_tokens=200), structured_outputs=wanted)
    outputs += llm.chat(HELLO, LONG, structured_outputs=wanted)
    texts = [answer.text for output in outputs for answer in output.outputs]
    texts.append("".join(event.text for event in llm.stream("four", LONG, structured_outputs=wanted)))
    texts.append("".join(event.text for event in llm.stream_chat(HELLO, LONG, structured_outputs=wanted)))
    assert len(texts) == 9
    for found in map(json.loads, texts):
        assert found.keys() == {"city", "days"} and found["city"] in ("Paris", "Rome") and 1 <= found["days"] <= 14
    assert {answer.finish_reason for output in outputs for answer in output.outputs} == {"stop"}


def test_each_prompt_of_a_batch_follows_its_own() -> None:
    words = ['"yes"\n', "näh 😀"]
    free = SamplingParams(max_tokens=3, temperature=0)
    wanted = [{"regex": r"\d{3}-\d{4}"}, {"choice": words}, {"grammar": 'start: "a" /b+/ "c"'}]
    structures = [*(StructuredOutputsParams(**one) for one in wanted), None]
    outputs = tiny_llm().generate(["same"] * 4, [LONG, LONG, LONG, free], structured_outputs=structures)
    number, word, letters, plain = [output.outputs[0].text for output in outputs]
    assert re.fullmatch(r"\d{3}-\d{4}", number) and word in words and re.match("ab+", letters)
    assert plain == tiny_llm().generate("same", free)[0].outputs[0].text


def test_any_json_object_is_one() -> None:
    [output] = tiny_llm().generate("x", SamplingParams(max_tokens=8), structured_outputs=StructuredOutputsParams(json_object=True))
    assert output.outputs[0].text.startswith("{")


def test_every_choice_can_be_chosen() -> None:
    [output] = tiny_llm().generate("x", SamplingParams(n=30, seed=0), structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    assert {answer.text for answer in output.outputs} == {"a", "b"}


def test_one_of_thousands_may_be_chosen() -> None:
    words = [f"choice {place}" for place in range(4000)]
    [output] = tiny_llm().generate("x", LONG, structured_outputs=StructuredOutputsParams(choice=words))
    assert output.outputs[0].text in words


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({}, "found none of them"),
        ({"json_object": False}, "found none of them"),
        ({"json": CITY, "regex": "a"}, "found json and regex"),
        ({"json": [1]}, "json is a list"),
        ({"regex": 5}, "regex is a int; it must be text"),
        ({"grammar": b"x"}, "grammar is a bytes"),
        ({"choice": "yes"}, "choice is 'yes'; it must be a list"),
        ({"choice": []}, "one or more texts"),
        ({"choice": []}, "choice is []; it must be a list"),
        ({"choice": ["a", 1]}, "one or more texts"),
    ],
)
def test_what_cannot_be_meant_is_refused_when_it_is_written_down(wanted: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSampling, match=re.escape(says)):
        StructuredOutputsParams(**wanted)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"json": CITY}, "must be StructuredOutputsParams, or a list of them; found dict"),
        (["a", "b"], "found list"),
        ([None], "1 structured outputs for 2 prompts"),
    ],
)
def test_what_are_no_structured_outputs_is_refused_in_words(wanted: Any, says: str) -> None:
    with pytest.raises(InvalidSampling, match=says):
        tiny_llm().generate(["a", "b"], structured_outputs=wanted)


def test_structured_outputs_among_sampling_params_are_refused_with_where_they_go() -> None:
    with pytest.raises(InvalidSampling, match="give them to generate, chat or the stream, beside these"):
        SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(choice=["red"]))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"json": "{"}, "JSON schema cannot be followed"),
        ({"json": "[]"}, "JSON schema is a list; it must be an object"),
        ({"json": {"type": "strange"}}, "JSON schema cannot be followed"),
        ({"regex": "("}, "regex cannot be followed"),
        ({"regex": "\ud800"}, "regex cannot be followed"),
        ({"grammar": "start"}, "grammar cannot be followed"),
    ],
)
def test_what_cannot_be_followed_is_refused_before_any_prompt_is_begun(wanted: dict[str, Any], says: str) -> None:
    llm = tiny_llm()
    with pytest.raises(InvalidSampling, match=says):
        llm.generate(["fine", "not"], structured_outputs=[None, StructuredOutputsParams(**wanted)])
    assert not llm.engine.has_work


# ---- conversations

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}, {"type": "function", "function": {"name": "now"}}]
HERMES_TEMPLATE = """{% if tools %}<tool_call>{"name": n, "arguments": a}</tool_call>{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}
{% endfor %}assistant: """


CALL = '{"name": "now", "arguments": {}}'
CALLING = StructuredOutputsParams(grammar=HERMES.grammar(functions(TOOLS)))


def test_tools_are_shown_to_the_model_and_its_calls_are_found() -> None:
    [output] = tiny_llm().chat(HELLO, LONG, structured_outputs=CALLING, tools=TOOLS, chat_template=HERMES_TEMPLATE)
    assert output.prompt is not None and '"name": "weather"' in output.prompt
    [answer] = output.outputs
    assert answer.tool_calls and answer.text.startswith("<tool_call>")
    for place, call in enumerate(answer.tool_calls):
        assert call.index == place and call.name in ("weather", "now") and isinstance(json.loads(call.arguments), dict) and call.id


def test_a_conversation_goes_on_behind_its_calls_as_the_model_wrote_them() -> None:
    """Clients have arguments as JSON text, and templates write what they are given as JSON again."""
    called = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'}}
    told = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [called]}, {"role": "tool", "tool_call_id": "1", "content": "Sun"}]
    [output] = tiny_llm().chat(told, SamplingParams(max_tokens=1), tools=TOOLS, chat_template=HERMES_TEMPLATE)
    assert output.prompt is not None and '{"name": "weather", "arguments": {"city": "Rome", "days": 2}}' in output.prompt


def test_the_text_parts_of_a_message_are_joined() -> None:
    llm, parts = tiny_llm(), [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert llm.chat([{"role": "user", "content": parts}])[0].prompt == llm.chat(HELLO)[0].prompt
    for wrong in ([*parts, {"type": "image_url"}], [{"type": "text", "text": 5}], [parts], {"type": "text", "text": "x"}):
        with pytest.raises(InvalidPrompt, match=r"message 0 \(user\) has content of type (list|dict); it must be a string, or text parts"):
            llm.chat([{"role": "user", "content": wrong}])


def test_a_part_that_is_no_text_is_named() -> None:
    picture = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}]
    with pytest.raises(InvalidPrompt, match=r"it must be a string, or text parts: part 1 is \{'type': 'image_url'"):
        tiny_llm().chat([{"role": "user", "content": picture}])


@pytest.mark.parametrize("empty", [{"content": None}, {}])
def test_a_message_that_only_calls_tools_has_no_words_for_the_template(empty: dict[str, Any]) -> None:
    """As clients of OpenAI's API have them. Many templates add the content to other text, or would write None."""
    called = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    told = [*HELLO, {"role": "assistant", "tool_calls": [called]} | empty, {"role": "tool", "tool_call_id": "1", "content": "Noon"}]
    template = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
    [output] = tiny_llm().chat(told, SamplingParams(max_tokens=1), chat_template=template)
    assert output.prompt == "<user>Hello<assistant><tool>Noon"


def test_without_tools_nothing_is_taken_for_a_call() -> None:
    [output] = tiny_llm().chat(HELLO, LONG, structured_outputs=CALLING, chat_template=HERMES_TEMPLATE)
    assert output.outputs[0].tool_calls is None and "weather" not in (output.prompt or "")


def test_calls_in_a_form_that_is_not_known_stay_text() -> None:
    [output] = tiny_llm().chat(HELLO, SamplingParams(max_tokens=3), tools=TOOLS, chat_template="{% if tools %}[f(x=1)]{% endif %}")
    assert output.outputs[0].tool_calls is None and output.prompt == "[f(x=1)]"


def test_of_an_answer_that_breaks_off_the_calls_that_are_whole_are_found() -> None:
    template = "{% if tools %}[TOOL_CALLS] [{% endif %}"
    two = r'\[TOOL_CALLS\] \[\{"name": "now", "arguments": \{\}\}, \{"name": "now", "arguments": \{\}\}\]'
    wanted = StructuredOutputsParams(regex=two)
    first, second = [
        tiny_llm()
        .chat(HELLO, SamplingParams(max_tokens=most), structured_outputs=wanted, tools=TOOLS, chat_template=template)[0]
        .outputs[0]
        for most in (200, 70)
    ]
    assert (first.finish_reason, len(first.tool_calls or ())) == ("stop", 2)
    assert (second.finish_reason, len(second.tool_calls or ())) == ("length", 1)


def test_of_an_answer_that_a_stop_breaks_off_the_calls_that_are_whole_are_found() -> None:
    template, wanted = "{% if tools %}[TOOL_CALLS] [{% endif %}", StructuredOutputsParams(choice=[f"[TOOL_CALLS] [{CALL}, {CALL}]"])
    params = SamplingParams(max_tokens=200, stop=', {"na')
    [output] = tiny_llm().chat(HELLO, params, structured_outputs=wanted, tools=TOOLS, chat_template=template)
    [answer] = output.outputs
    assert answer.text == f"[TOOL_CALLS] [{CALL}" and [call.name for call in answer.tool_calls or ()] == ["now"]


def test_calls_are_found_where_a_special_token_marks_them() -> None:
    """Special tokens are left out of texts, and with it the call would be lost."""
    tokenizer, template = marked_tokenizer(), "{% if tools %}[TOOL_CALLS] [{% endif %}{{ messages[0].content }}"
    assert Rendering(tokenizer, TOOLS, template, None).params(LONG).skip_special_tokens is False
    assert Rendering(tokenizer, None, template, None).params(LONG) == LONG


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_gets_what_it_asks_for_by_name(stream: bool) -> None:
    llm, template, options = tiny_llm(), "{{ 'thinking' if think else 'quick' }}", {"think": True}
    if stream:
        events = list(llm.stream_chat(HELLO, SamplingParams(max_tokens=1), chat_template=template, chat_template_kwargs=options))
        assert events[0].num_prompt_tokens == len("thinking")
    else:
        [output] = llm.chat(HELLO, SamplingParams(max_tokens=1), chat_template=template, chat_template_kwargs=options)
        [other] = llm.chat(HELLO, SamplingParams(max_tokens=1), chat_template=template)
        assert (output.prompt, other.prompt) == ("thinking", "quick")


def test_a_conversation_that_is_cut_is_rendered_with_its_tools_and_template() -> None:
    """What stays is found by rendering parts of it: without the tools these would be other tokens."""
    long = [{"role": "user" if place % 2 == 0 else "assistant", "content": "word " * 15} for place in range(11)]
    [output] = tiny_llm().chat(long, SamplingParams(max_tokens=8), tools=TOOLS, chat_template=HERMES_TEMPLATE, truncation="auto")
    assert output.reuse.truncated is not None
    [(start, _)] = output.reuse.truncated.ranges
    head = tiny_llm().tokenizer.chat(long[:1], tools=TOOLS, template=HERMES_TEMPLATE).split("user: ")[0]
    assert start >= len(head) - 4  # the tools stay, but for what is less than a page


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tools": TOOLS}, "the chat template of this model takes no tools; leave them out, or give a chat_template"),
        ({"tools": TOOLS[0]}, "tools is a dict; it must be a list"),
        ({"tools": [{"type": "search"}], "chat_template": HERMES_TEMPLATE}, "no other kind of tool is known"),
        ({"chat_template": 5}, "chat_template is a int"),
        ({"chat_template": "{% if %}"}, "the chat template refuses this conversation"),
        ({"chat_template": "{{ messages }}\n{{ foo("}, "line 2 is no Jinja (unexpected 'end of template'); correct the template"),
        (
            {"chat_template": "chatml.jinja"},
            "chat_template is 'chatml.jinja'; it must be the text of a Jinja template, and not the name of a file",
        ),
        ({"chat_template_kwargs": ["think"]}, "chat_template_kwargs is a list; it must map names"),
        ({"chat_template_kwargs": {"tools": [], "think": 1}}, "chat_template_kwargs has tools, which is said otherwise"),
    ],
)
def test_what_a_template_cannot_take_is_refused_in_words(options: dict[str, Any], says: str) -> None:
    llm = tiny_llm()
    for ask in (llm.chat, llm.stream_chat):
        with pytest.raises(InvalidPrompt, match=re.escape(says)):
            ask(HELLO, **options)
    assert not llm.engine.has_work
