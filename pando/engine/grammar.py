"""Answers that follow a grammar: any JSON object, a JSON schema, or a Lark text, followed token by token with llguidance."""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidSampling, PandoError, UnsupportedModel
from ..kv.latest import Latest
from ..model.tokenizer import Tokenizer
from .closing import plain
from .patterns import check_patterns, check_regex
from .request import Constraint, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_GRAMMAR_BYTES = 1024 * 1024  # a grammar may hold the schemas of many functions
MAX_COMPILED = 64

# Small models like to write blanks without end, so there is none but, at most, one after a comma or a colon: what most JSON looks like.
COMPACT: Mapping[str, str | bool] = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}

_IN_GRAMMAR = "failed to compile JSON schema: "  # how llguidance begins what is wrong with a schema within a grammar
_LISTING = re.compile(r"\n +\d+ \| ")  # and how it goes on with the lines of that grammar

_log = logging.getLogger(__name__)


class Grammars:
    """Compiles grammars for one model, each once for each tenant, whose salt is given: were one found that another has compiled, the time
    that it did not take would tell who asked for what. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size  # of the model's output, which may be wider than the tokenizer
        self._eos = tuple(dict.fromkeys(token for token in eos if 0 <= token < vocab_size))
        self._ends = _bits(self._eos, vocab_size)
        self._lock = Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled = Latest[tuple[bytes, str], "LLMatcher"](MAX_COMPILED)

    def json_object(self, salt: bytes = b"") -> Callable[[], Constraint]:
        return self.json_schema({"type": "object"}, salt)

    def json_schema(self, schema: Mapping[str, Any], salt: bytes = b"") -> Callable[[], Constraint]:
        text = schema_text(schema)
        try:
            grammar = _library().grammar_from_json_schema(text)
        except ValueError as error:
            raise _refusal("JSON schema", str(error)) from error
        return self._maker("JSON schema", grammar, salt)

    def lark(self, text: str, salt: bytes = b"") -> Callable[[], Constraint]:
        _check_text("Lark grammar", text)
        return self._maker("Lark grammar", _library().grammar_from_lark(text), salt)

    def regex(self, text: str, salt: bytes = b"") -> Callable[[], Constraint]:
        _check_text("regex", text)
        check_regex(text)
        return self._maker("regex", _library().grammar_from_regex(text), salt)

    def of(self, wanted: StructuredOutputsParams, salt: bytes = b"") -> Callable[[], Constraint]:
        if wanted.json is not None:
            return self.json_schema(_schema(wanted.json), salt)
        if wanted.regex is not None:
            return self.regex(wanted.regex, salt)
        if wanted.choice is not None:
            return self.lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, wanted.choice)), salt)  # rules may not be so many
        return self.json_object(salt) if wanted.grammar is None else self.lark(wanted.grammar, salt)

    def _maker(self, kind: str, grammar: str, salt: bytes) -> Callable[[], Constraint]:
        compiled = self._find(kind, grammar, salt)
        return lambda: _Followed(compiled.deep_copy(), self._ends)

    def _find(self, kind: str, grammar: str, salt: bytes) -> "LLMatcher":
        name = salt, grammar
        with self._lock:
            if name in self._compiled:
                self._compiled.move_to_end(name)
                return self._compiled[name]
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer, self._vocab_size, self._eos)
        compiled = _library()(self._vocabulary, grammar, log_level=0, limits=_limits())
        if fault := compiled.get_error() or _early_fault(compiled.deep_copy()):
            raise _refusal(kind, fault)
        with self._lock:
            self._compiled[name] = compiled
        return compiled


class _Followed:
    """A Constraint: one answer, on its way through a compiled grammar."""

    def __init__(self, matcher: "LLMatcher", ends: NDArray[np.int32]) -> None:
        self._matcher = matcher
        self._ends = ends
        self._warned = False

    def allowed(self) -> NDArray[np.int32]:
        if not self._matcher.is_stopped():
            found = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)[: len(self._ends)]  # it may be a number longer
            if not self._matcher.is_error() and found.any():
                return found.copy()  # what was found cannot be written to, and torch wants what can
        self._warn()
        return self._ends.copy()

    def accept(self, token: int) -> bool:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
        self._warn()
        return self._matcher.is_stopped()

    @property
    def is_broken(self) -> bool:
        return bool(self._matcher.is_error())

    def _warn(self) -> None:
        if self._matcher.is_error() and not self._warned:
            self._warned = True
            _log.warning("an answer left its grammar and ends here: %s", _short(self._matcher.get_error()))


class _Vocabulary:
    """The tokenizer as llguidance wants it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos[0]
        self.bos_token_id = tokenizer.bos
        self.tokens = [tokenizer.token_bytes(token, skip_special=False) for token in range(vocab_size)]
        hidden = [token for token, spelt in enumerate(self.tokens) if spelt and not tokenizer.token_bytes(token, skip_special=True)]
        self.special_token_ids = sorted({*eos, *hidden})

    def __call__(self, text: str) -> list[int]:
        """The tokens a text in the middle of an answer would be; llguidance writes what a grammar forces with these."""
        if not isinstance(text, str):
            raise TypeError("text, not bytes")  # llguidance asks with bytes first, and takes the hint
        if not self._tokenizer.strips_first_space:
            return self._tokenizer.encode(text, special=False)
        tokens = self._tokenizer.encode(_BEFORE + text, special=False)
        begun = b""
        for place, token in enumerate(tokens):
            if begun.endswith(_BEFORE.encode()):
                return tokens[place:]
            begun += self.tokens[token]
        return []


_BEFORE = "\x02"  # takes the space that such a tokenizer puts before a text's first word; no word begins with it


def _check_text(kind: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise _refusal(kind, str(error)) from error
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidSampling(f"the {kind} has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")


def _schema(given: str | Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise _refusal("JSON schema", str(error)) from error
    if not isinstance(found, Mapping):
        raise InvalidSampling(f"the JSON schema is a {type(found).__name__}; it must be an object")
    return found


def is_deeper(value: Any, most: int) -> bool:
    """Are objects and lists nested in more than so many levels? One that holds itself is, too."""
    level = [value]
    for _ in range(most):
        level = [inner for one in level if isinstance(one, Mapping | list) for inner in (one.values() if isinstance(one, Mapping) else one)]
    return any(isinstance(one, Mapping | list) for one in level)


def schema_text(schema: Mapping[str, Any], layout: Mapping[str, str | bool] = COMPACT) -> str:
    """The schema as JSON, if it is neither too deep nor too long. Answers get this layout, unless its own "x-guidance" says otherwise."""
    if is_deeper(schema, MAX_SCHEMA_DEPTH):
        raise InvalidSampling(f"the JSON schema is nested deeper than {MAX_SCHEMA_DEPTH} levels; move parts of it to $defs")
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _refusal("JSON schema", str(error)) from error
    if len(text) > MAX_SCHEMA_BYTES:  # before what is added to it
        raise InvalidSampling(f"the JSON schema has {len(text)} bytes; at most {MAX_SCHEMA_BYTES} are allowed")
    schema = json.loads(text)  # Python has tuples, and keys that are no texts
    check_patterns(schema)
    own = schema.get("x-guidance")
    return json.dumps({**plain(schema), "x-guidance": {**layout, **(own if isinstance(own, Mapping) else {})}})


def _library() -> "type[LLMatcher]":
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise PandoError("answers that follow a grammar need the package llguidance; install it with: pip install llguidance") from error
    return LLMatcher


def _vocabulary(tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> "LLTokenizer":
    from llguidance import LLTokenizer, TokenizerWrapper

    if not eos:
        raise UnsupportedModel("this model names no token that ends an answer, so its answers cannot follow a grammar; set eos_token_id")
    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, eos)), n_vocab=vocab_size, eos_token=list(eos))


def _limits() -> "LLParserLimits":
    """Well below the library's own: those let a single hostile answer take hundreds of megabytes."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000, step_lexer_fuel=100_000, max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False
    )


def _early_fault(matcher: "LLMatcher") -> str:
    """Some faults show only when an answer begins: a reference to itself, or more choices at once than the limits allow."""
    for _ in range(4):
        first = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little").argmax()
        if matcher.is_stopped() or not matcher.consume_token(int(first)):
            break
    return matcher.get_error()


def _bits(tokens: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    bits = np.zeros((vocab_size + 31) // 32, dtype=np.uint32)
    for token in tokens:
        bits[token // 32] |= np.uint32(1 << token % 32)
    return bits.view(np.int32)


def _refusal(kind: str, reason: str) -> InvalidSampling:
    _, within, fault = _LISTING.split(reason)[0].partition(_IN_GRAMMAR)
    if within:  # of a function, say: its grammar is ours, and tells the client nothing
        kind, reason = "JSON schema", fault
    told = "nothing can satisfy it" if reason.startswith("NoExtension") else _short(reason)
    return InvalidSampling(f"the {kind} cannot be followed: {told}; change or remove that part of it")


def _short(message: str) -> str:
    words = " ".join(message.replace("<non-verbose/>", "").split())
    return words if len(words) <= 300 else words[:300] + "…"
