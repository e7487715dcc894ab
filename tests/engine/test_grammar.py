"""Answers that must follow a grammar do, whatever the model would rather say; a grammar that cannot be followed is refused at once."""

import json
import logging
import random
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Tokenizer as Vocabulary
from tokenizers import decoders, models, pre_tokenizers

from pando.engine.grammar import MAX_COMPILED, MAX_GRAMMAR_BYTES, MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH, Grammars
from pando.engine.request import Constraint, StructuredOutputsParams
from pando.errors import InvalidSampling, PandoError, UnsupportedModel
from pando.model.tokenizer import Tokenizer
from tests.tiny import END, VOCAB, tiny_tokenizer

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(tiny_tokenizer(), VOCAB, [END])


MARK = END + 1


def marked_tokenizer() -> Tokenizer:
    """Bytes, and two special tokens: the end, and one that marks tool calls."""
    library = Vocabulary(models.BPE({char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<end>", "[TOOL_CALLS]"])
    return Tokenizer(library.to_str(), {"eos_token": "<end>"}, [], None)


def tokens_of(bits: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


def follow(constraint: Constraint, text: str) -> bool:
    """Writes a text that the constraint must allow; says whether it is then complete."""
    complete = False
    for token in tiny_tokenizer().encode(text, special=False):
        assert token in tokens_of(constraint.allowed()), f"{text!r} is not allowed"
        complete = constraint.accept(token)
    return complete


def allows(make: Callable[[], Constraint], text: str) -> bool:
    constraint = make()
    for token in tiny_tokenizer().encode(text, special=False):
        if token not in tokens_of(constraint.allowed()):
            return False
        constraint.accept(token)
    return END in tokens_of(constraint.allowed())


def wander(make: Callable[[], Constraint], seed: int) -> str:
    """An answer of allowed tokens, each chosen by chance."""
    constraint, chance, answer = make(), random.Random(seed), []
    for _ in range(4000):
        token = chance.choice(tokens_of(constraint.allowed()))
        complete = constraint.accept(token)
        if token != END:
            answer.append(token)
        if complete:
            return tiny_tokenizer().decode(answer)
    raise AssertionError("the answer did not end")


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_chosen_the_answer_follows_the_schema(grammars: Grammars, seed: int) -> None:
    found = json.loads(wander(grammars.json_schema(WEATHER), seed))
    assert found.keys() == {"city", "days"} and found["city"] in ("Paris", "Rome") and 1 <= found["days"] <= 14


def test_a_format_that_json_schema_does_not_know_asks_for_nothing(grammars: Grammars) -> None:
    """Pydantic writes some for paths and passwords, and descriptions of web services have their own."""
    secret, day = {"type": "string", "format": "password", "maxLength": 3}, {"type": "string", "format": "date"}
    inner = {"type": "object", "properties": {"format": secret, "day": day}, "required": ["format", "day"], "additionalProperties": False}
    members = [{"$ref": "#/$defs/inner"}, {"const": {"format": "own"}}]
    make = grammars.json_schema({"type": "array", "prefixItems": members, "minItems": 2, "items": False, "$defs": {"inner": inner}})
    assert allows(make, '[{"format": "a!", "day": "2024-02-29"}, {"format": "own"}]')
    assert not allows(make, '[{"format": "a!", "day": "today"}, {"format": "own"}]'), "one that it does know is followed"
    assert not allows(make, '[{"format": "a!", "day": "2024-02-29"}, {}]'), "what only looks like a format stays"
    with pytest.raises(InvalidSampling, match="iri"):
        grammars.json_schema({"type": "string", "format": "iri"})


def test_any_object_may_be_written_but_no_other_value(grammars: Grammars) -> None:
    make = grammars.json_object()
    for text in ("{}", '{"a":1}', '{"a": [true, null, {"b": "é\\n"}], "c": -1.5e3}'):
        assert allows(make, text)
    for text in ("[]", "1", '"a"', "null", "{a:1}", "Sure! {}", '{"a":1'):
        assert not allows(make, text)


def test_blanks_are_bounded_unless_the_schema_says_otherwise(grammars: Grammars) -> None:
    for text in ("{ }", '{"a":  1}', '{"a":\n1}', '{"a":1}\n'):
        assert not allows(grammars.json_object(), text)
    loose = grammars.json_schema({"type": "object", "x-guidance": {"whitespace_flexible": True}})
    assert allows(loose, '{\n  "a":   1\n}')


def test_a_complete_answer_may_only_end(grammars: Grammars) -> None:
    constraint = grammars.json_schema(WEATHER)()
    assert not follow(constraint, '{"city": "Rome", "days": 3')
    assert follow(constraint, "}")
    assert tokens_of(constraint.allowed()) == [END]
    assert constraint.accept(END)
    assert tokens_of(constraint.allowed()) == [END]


def test_an_answer_that_could_go_on_may_end_too(grammars: Grammars) -> None:
    constraint = grammars.json_schema({"type": "integer", "minimum": 0, "maximum": 99})()
    assert not follow(constraint, "4")
    assert sorted(tiny_tokenizer().token_text(token) for token in tokens_of(constraint.allowed())) == [*"0123456789", "<end>"]
    assert constraint.accept(END)


def test_a_token_that_is_not_allowed_ends_the_answer_with_a_warning(grammars: Grammars, caplog: pytest.LogCaptureFixture) -> None:
    constraint = grammars.json_object()()
    with caplog.at_level(logging.WARNING):
        assert constraint.accept(tiny_tokenizer().encode("x", special=False)[0])
    assert len(caplog.records) == 1 and "left its grammar" in caplog.text
    assert tokens_of(constraint.allowed()) == [END]


def test_answers_to_one_grammar_do_not_meet(grammars: Grammars) -> None:
    make = grammars.json_schema(WEATHER)
    first, second = make(), make()
    follow(first, '{"city": "Pa')
    follow(second, '{"city": "Ro')
    assert follow(first, 'ris", "days": 1}') is True
    assert follow(second, 'me", "days": 2}') is True


@pytest.mark.parametrize("vocab_size", [256, VOCAB, 288, 289, 320])
def test_the_mask_is_as_wide_as_the_model_and_padding_is_never_allowed(vocab_size: int) -> None:
    end = vocab_size - 1 if vocab_size <= 256 else END
    constraint = Grammars(tiny_tokenizer(), vocab_size, [end]).lark(r"start: /(.|\n)*/")()
    bits = constraint.allowed()
    assert bits.dtype == np.int32 and bits.shape == ((vocab_size + 31) // 32,) and bits.flags.writeable
    assert max(tokens_of(bits)) == end and len(tokens_of(bits)) > 100


def test_every_end_token_of_the_model_may_end_an_answer() -> None:
    constraint = Grammars(tiny_tokenizer(), VOCAB + 3, [END, VOCAB + 1, 10**6]).json_object()()
    follow(constraint, "{}")
    assert tokens_of(constraint.allowed()) == [END, VOCAB + 1]


def test_a_special_token_is_no_way_to_write_its_name() -> None:
    constraint = Grammars(marked_tokenizer(), MARK + 1, [END]).lark(r"start: /[A-Z_\[\]]*/")()
    written = {marked_tokenizer().token_text(token) for token in tokens_of(constraint.allowed())}
    assert {"[", "T", "]", "<end>"} <= written and "[TOOL_CALLS]" not in written


def test_a_tokenizer_that_adds_a_space_before_words_writes_what_is_forced() -> None:
    words = {token: i for i, token in enumerate(["<end>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"])}
    library = Vocabulary(models.BPE(words, [("▁", "a"), ("a", "b"), ("▁a", "b")], byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    library.add_special_tokens(["<end>"])
    tokenizer = Tokenizer(library.to_str(), {"eos_token": "<end>"}, [], None)
    assert tokenizer.strips_first_space

    constraint = Grammars(tokenizer, tokenizer.vocab_size, [0]).lark('start: "ab ab"')()
    for token in (words["ab"], words["▁ab"]):  # and not "▁ab" twice, nor letter by letter
        assert tokens_of(constraint.allowed()) == [token]
        complete = constraint.accept(token)
    assert complete


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ({"type": "nonsense"}, "nonsense"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"enum": []}, "Unsatisfiable"),
        ({"$ref": "#/$defs/absent"}, "absent"),
        ({"$ref": "https://example.com/schema"}, "example.com"),
        ({"$ref": "#"}, "nothing can satisfy it"),
        ({"not": {"type": "string"}}, "not"),
        ({"minimum": float("nan")}, "float"),
        ({"const": {1, 2}}, "set"),
        ({"const": "\ud800"}, "escape"),
        ({"description": "x" * MAX_SCHEMA_BYTES}, str(MAX_SCHEMA_BYTES)),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_at_once_with_the_reason(grammars: Grammars, schema: dict, complaint: str) -> None:
    with pytest.raises(InvalidSampling, match="JSON schema") as caught:
        grammars.json_schema(schema)
    assert complaint in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("lark", ["", "start: absent", "start: start", "start: (", 'start: "\ud800"', "x" * (MAX_GRAMMAR_BYTES + 1)])
def test_a_grammar_that_cannot_be_followed_is_refused_at_once(grammars: Grammars, lark: str) -> None:
    with pytest.raises(InvalidSampling, match="grammar"):
        grammars.lark(lark)


@pytest.mark.parametrize("depth", [MAX_SCHEMA_DEPTH // 2, MAX_SCHEMA_DEPTH + 1, 100_000])
def test_a_schema_may_be_deep_but_not_too_deep(grammars: Grammars, depth: int) -> None:
    schema: dict = {"type": "null"}
    for _ in range(depth - 1):
        schema = {"items": schema}
    if depth <= MAX_SCHEMA_DEPTH:
        assert grammars.json_schema(schema)
        return
    with pytest.raises(InvalidSampling, match="deeper"):
        grammars.json_schema(schema)
    while schema := schema.get("items", {}):  # taken apart slowly, since freeing it at once would be as deep
        pass


HOSTILE = {
    "choices multiplied": {"allOf": [{"anyOf": [{"required": [f"p{i}_{j}"]} for j in range(8)]} for i in range(12)]},
    "references doubled": {
        "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {"type": "null"}},
        "$ref": "#/$defs/d0",
    },
    "repeats nested": {"type": "string", "pattern": "((((x{0,99}){0,99}){0,99}){0,99}){0,99}"},
    "states without number": {"type": "string", "pattern": "^(.*a.{400}|.*b.{500})$"},
    "a long list": {"type": "array", "items": {"type": "null"}, "minItems": 10**9},
    "a far multiple": {"type": "integer", "multipleOf": 987654321, "minimum": 1, "maximum": 10**18},
    "many properties": {"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(1500)}},
    "patterns together": {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(40)]},
    "patterns of a property": {
        "allOf": [{"type": "object", "properties": {"a": {"type": "string", "pattern": f".*{i}.*"}}} for i in range(40)]
    },
    "patterns referred to": {
        "$defs": {f"d{i}": {"type": "string", "pattern": f".*{i}.*", "$ref": f"#/%24defs/d{i + 1}"} for i in range(40)} | {"d40": {}},
        "$ref": "#/$defs/d0",
    },
    "long patterns together": {
        "allOf": [{"type": "string", "pattern": "|".join(f"[^{chr(97 + j)}{i}]{j}" for j in range(26))} for i in range(9)]
    },
    "patterns of an item": {
        "items": [{"allOf": [{"type": "string", "pattern": "|".join(f"[^{chr(97 + j)}{i}]{j}" for j in range(26))} for i in range(9)]}]
    },
    "a chain of references": {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1500)}, "$ref": "#/$defs/d0"},
    "mutual references": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
}


def test_some_patterns_may_hold_together_and_any_number_apart(grammars: Grammars) -> None:
    ends = {"allOf": [{"type": "string", "pattern": "^[a-z]{2,40}$"}, {"type": "string", "pattern": "ing$"}, {"maxLength": 9}]}
    apart = {"anyOf": [{"type": "string", "pattern": f"^{i}[a-z]{{2,40}}$"} for i in range(20)]}
    many = {f"p{i}": {"type": "string", "pattern": f"^{i}[a-z]+$"} for i in range(20)}
    grammars.json_schema({"type": "object", "properties": {"a": ends, "b": apart, **many}, "required": ["a"]})


def comes_to_an_end(compiled: Callable[[], Callable[[], Constraint]]) -> bool:
    """Is it refused, or followed for a while, in little time?"""
    done = threading.Event()

    def use() -> None:
        try:
            constraint = compiled()()
            for _ in range(50):
                constraint.accept(tokens_of(constraint.allowed())[0])
        except InvalidSampling:
            pass
        done.set()

    threading.Thread(target=use, daemon=True).start()
    return done.wait(20)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_refused_or_followed_in_little_time(grammars: Grammars, name: str) -> None:
    """Either way it must not hang: each of these has few bytes, and some stand for more states than there are atoms."""
    assert comes_to_an_end(lambda: grammars.json_schema(HOSTILE[name]))


def test_a_grammar_is_compiled_once_and_the_least_used_is_forgotten(grammars: Grammars) -> None:
    for i in range(MAX_COMPILED):
        grammars.json_schema({"const": i})
    grammars.json_schema({"const": 0})
    grammars.json_schema({"const": "new"})
    kept = [json.loads(text)["grammars"][0]["json_schema"]["const"] for _, text in grammars._compiled]
    assert len(kept) == MAX_COMPILED and 0 in kept and "new" in kept and 1 not in kept


def test_what_one_tenant_had_compiled_saves_no_other_the_time() -> None:
    grammars, asked = Grammars(tiny_tokenizer(), VOCAB, [END]), StructuredOutputsParams(choice=["a secret", "another"])
    for salt in (b"one", b"two", b"one", b"two", b""):
        assert wander(grammars.of(asked, salt), 0) in ("a secret", "another")
    assert [salt for salt, _ in grammars._compiled] == [b"one", b"two", b""]


def test_several_threads_may_ask_at_once(grammars: Grammars) -> None:
    answers: list[str] = []

    def ask(seed: int) -> None:
        answers.append(wander(grammars.json_schema(WEATHER), seed))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([json.loads(answer) for answer in answers]) == 8


def test_a_model_without_an_end_token_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedModel, match="ends an answer"):
        Grammars(tiny_tokenizer(), VOCAB, []).json_object()


def test_without_the_library_the_error_says_how_to_install_it(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(PandoError, match="pip install llguidance"):
        grammars.json_object()


def test_a_grammar_that_becomes_too_large_within_an_answer_is_broken_there(grammars: Grammars) -> None:
    """Its error shows only when tokens are followed: a schema that seems harmless has too many cases."""
    number = {"type": "integer", "multipleOf": 7919, "minimum": 1, "maximum": 10**9}
    constraint = grammars.json_schema({"type": "object", "properties": {"x": number}, "required": ["x"]})()
    assert not follow(constraint, '{"x": ') and not constraint.is_broken
    complete = False
    for token in tiny_tokenizer().encode("123456789", special=False):
        complete = complete or constraint.accept(token if token in tokens_of(constraint.allowed()) else END)
    assert complete and constraint.is_broken
    assert tokens_of(constraint.allowed()) == [END]


def test_a_complete_answer_is_not_broken(grammars: Grammars) -> None:
    constraint = grammars.json_schema(WEATHER)()
    assert follow(constraint, '{"city": "Rome", "days": 3}') and not constraint.is_broken
