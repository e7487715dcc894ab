"""Text to tokens and back, and conversations to text.

Decoding works on bytes: every token stands for some bytes, and an answer is those bytes read as UTF-8. The stream and the whole text then
agree by construction, each token costs the same, and what is held back is at most the first bytes of one character.
"""

import codecs
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tokenizers import Encoding as _Encoding
from tokenizers import Tokenizer as _Library

from ..errors import BadModelFile, InvalidPrompt, ModelNotFound, UnsupportedModel
from .chat import OURS, render

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"  # SentencePiece writes spaces so


class Tokenizer:
    """Made by `from_directory`. Shared by all requests: nothing in it changes but what it has spelt before."""

    def __init__(self, text: str, settings: Mapping[str, Any], ends: Sequence[int], chat_template: str | Mapping[str, str] | None) -> None:
        try:
            self._library = _read(text)
        except Exception as error:  # the library raises nothing more precise
            raise BadModelFile(f"tokenizer.json cannot be read: {error}; fetch the model again") from error
        self._text = text
        added: dict[int, Any] = self._library.get_added_tokens_decoder()
        self.specials = frozenset(token for token, entry in added.items() if entry.special)
        self._spelling, self.strips_first_space = _spelling(json.loads(text).get("decoder"))
        space = _SPACE if self._spelling == "spaces" else " "
        self._added: dict[int, bytes] = {token: entry.content.replace(space, " ").encode() for token, entry in added.items()}
        self.whole_texts = {skip_special: _WholeTexts(self, skip_special) for skip_special in (False, True)}
        self._names = {name: found for name in _TOKEN_NAMES if (found := _content(settings.get(name))) is not None}
        self._template = chat_template
        self.vocab_size: int = self._library.get_vocab_size(with_added_tokens=True)
        self.bos: int | None = self._id(self._names.get("bos_token"))
        named_end = self._id(self._names.get("eos_token"))
        self.eos: tuple[int, ...] = tuple(dict.fromkeys([*([] if named_end is None else [named_end]), *ends]))

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelNotFound(f"{directory} has no tokenizer.json; save the model's fast tokenizer there")
        settings = {**_json(directory / "special_tokens_map.json"), **_json(directory / "tokenizer_config.json")}
        others = [_json(directory / name) for name in ("generation_config.json", "config.json")]
        ends = [token for config in others for token in _ids(config.get("eos_token_id"))]
        return cls(_text(path), settings, ends, _chat_template(directory, settings))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """`special`: the names of special tokens mean those tokens, and what the model expects around a text is added, but never twice.
        Otherwise the text is only text, whatever it spells."""
        return list(self._encoding(text, special).ids)

    def encode_template(self, text: str) -> list[int]:
        """A piece of what a chat template writes: the names of special tokens mean those tokens, and nothing is added around it."""
        [encoding] = self._library.encode_batch([text], add_special_tokens=False)
        return list(encoding.ids)

    @cached_property
    def unknown(self) -> int:
        """A token that stands for nothing in particular: a space. What files call unknown may be the token that ends a document, and a
        model hardly looks back beyond that."""
        space = self.encode(" ", special=False)
        named = (self._id(self._names.get(name)) for name in ("unk_token", "pad_token", "eos_token"))
        return space[0] if len(space) == 1 else next((token for token in named if token is not None), 0)

    def encode_with_offsets(self, text: str, most: int = 2**31) -> tuple[list[int], list[tuple[int, int]]]:
        """As `encode`, and which characters each token stands for, first and end; (0, 0) where it was added around the text. Of more than
        `most` tokens nobody wants to know."""
        encoding = self._encoding(text, special=True)
        return list(encoding.ids), list(encoding.offsets) if len(encoding) <= most else []

    @cached_property
    def longest(self) -> int:
        """The most bytes that one token stands for."""
        return max(len(self.token_bytes(token, skip_special=False)) for token in range(self.vocab_size))

    def _encoding(self, text: str, special: bool) -> _Encoding:
        if not isinstance(text, str):
            raise InvalidPrompt(f"a prompt must be a string, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidPrompt(
                f"character {error.start} of the prompt is half of a surrogate pair (U+{ord(text[error.start]):04X}); "
                "remove it, or decode the text properly"
            ) from error
        begin = self._names.get("bos_token")
        begun = begin is not None and text.startswith(begin)
        library = self._library if special else self._literal
        [encoding] = library.encode_batch([text], add_special_tokens=special and not begun)  # `encode` would hold up all other threads
        return encoding

    @cached_property
    def _literal(self) -> _Library:
        library = _read(self._text)
        library.encode_special_tokens = True
        return library

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        text = b"".join(self.token_bytes(token, skip_special=skip_special) for token in tokens).decode(errors="replace")
        return text.removeprefix(" ") if self.strips_first_space else text

    def token_text(self, token: int) -> str:
        """A token by itself, special ones included; part of a character shows as U+FFFD."""
        return self.token_bytes(token, skip_special=False).decode(errors="replace")

    def token_bytes(self, token: int, *, skip_special: bool) -> bytes:
        """The bytes a token stands for. A token beyond the vocabulary, which a padded output layer can name, stands for none."""
        if token in self.specials and skip_special:
            return b""
        if token in self._added:
            return self._added[token]
        if not 0 <= token < 2**32:
            raise InvalidPrompt(f"{token} is not a token; this model has 0 to {self.vocab_size - 1}")
        spelt = self._library.id_to_token(token)
        if spelt is None:
            return b""
        if self._spelling == "bytes":
            return bytes(_BYTE_OF[char] for char in spelt) if all(char in _BYTE_OF for char in spelt) else spelt.encode()
        byte = _BYTE_TOKEN.fullmatch(spelt)
        return bytes([int(byte[1], 16)]) if byte else spelt.replace(_SPACE, " ").encode()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation as the text this model was trained on. Encode it with special tokens. `options`: what the template asks for by
        name, beside what every template does."""
        if ours := sorted(OURS & set(options or ())):
            raise InvalidPrompt(f"chat_template_kwargs has {', '.join(ours)}, which is said otherwise; leave it out")
        names = {**(options or {}), **self._names}
        return render(template or self.template(tools=bool(tools)), messages, tools, add_generation_prompt, names)

    def template(self, *, tools: bool = False) -> str | None:
        """The model's own chat template; it may have another one for conversations with tools."""
        return _choose(self._template, "tool_use" if tools else "default")

    def special(self, name: str) -> int | None:
        """The special token of this name, if there is one."""
        token = self._id(name)
        return token if token in self.specials else None

    def _id(self, text: str | None) -> int | None:
        return None if text is None else self._library.token_to_id(text)


class _WholeTexts(dict[int, str | None]):
    """What tokens spell, looked up once each; None where that is not whole characters."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special

    def __missing__(self, token: int) -> str | None:
        try:
            text: str | None = self._tokenizer.token_bytes(token, skip_special=self._skip_special).decode()
        except UnicodeDecodeError:
            text = None
        self[token] = text
        return text


class Detokenizer:
    """The text of one answer, as its tokens arrive: never half a character.

    `prompt_tail` is the end of the prompt: with text before it, the answer's first word keeps its space, and a character that the prompt
    began is completed.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, prompt_tail: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.strips_first_space
        self._whole, self._midway = tokenizer.whole_texts[skip_special], False  # in a character
        self._is_prompts = False  # a character that is not whole, and of which the answer has no byte
        for token in prompt_tail:
            self.add(token)
        self._is_prompts = self._midway

    def add(self, token: int) -> str:
        """The text that became readable with this token."""
        text = None if self._midway else self._whole[token]
        if text is None:
            said = self._tokenizer.token_bytes(token, skip_special=self._skip_special)
            text, self._is_prompts = self._decoder.decode(said), self._is_prompts and not said
            self._midway = self._decoder.getstate()[0] != b""
        return self._first(text) if self._at_start else text

    def finish(self) -> str:
        """What was held back: a character of the answer that never became whole."""
        if self._is_prompts:
            return ""
        return self._first(self._decoder.decode(b"", final=True))

    def _first(self, text: str) -> str:
        if not text or not self._at_start:
            return text
        self._at_start = False
        return text.removeprefix(" ")


def _read(text: str) -> _Library:
    """Without the cutting and padding of texts that whoever trained the model may have left on in the file."""
    library = _Library.from_str(text)
    library.no_truncation()
    library.no_padding()
    return library


_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE spells a byte as the printable Latin-1 character of that number, and the others as characters from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _spelling(decoder: Any) -> tuple[Literal["bytes", "spaces"], bool]:
    """How tokens spell bytes, and whether decoding drops the space that encoding put before the first word."""
    steps = list(_steps(decoder))
    kinds = {step.get("type") for step in steps}
    if kinds == {"ByteLevel"}:
        return "bytes", False
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    replacements = [(step.get("pattern"), step.get("content")) for step in steps if step.get("type") == "Replace"]
    written_so = all(replacement == ({"String": _SPACE}, " ") for replacement in replacements)
    if kinds and kinds <= known and written_so:
        strips = any(step["type"] == "Strip" and step.get("start") for step in steps)
        joins = any(step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never" for step in steps)
        return "spaces", strips or joins
    found = ", ".join(sorted(map(str, kinds))) or "nothing"
    raise UnsupportedModel(f"tokenizer.json decodes with {found}; Pando reads byte-level BPE and SentencePiece BPE")


def _steps(decoder: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(decoder, Mapping) and decoder.get("type") == "Sequence":
        for step in decoder.get("decoders", ()):
            yield from _steps(step)
    elif isinstance(decoder, Mapping):
        yield decoder


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadModelFile(f"{path} cannot be read: {error}; fetch the model again") from error


def _json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise BadModelFile(f"{path} is not JSON ({error}); fetch the model again") from error
    return found if isinstance(found, dict) else {}


def _content(token: Any) -> str | None:
    """A token in tokenizer_config.json is its text, or a mapping that holds the text."""
    found = token.get("content") if isinstance(token, Mapping) else token
    return found if isinstance(found, str) else None


def _ids(value: Any) -> list[int]:
    return [token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int) and not isinstance(token, bool)]


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str | Mapping[str, str] | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return _text(file)
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = [entry for entry in found if isinstance(entry, Mapping) and {"name", "template"} <= entry.keys()]
        return {str(entry["name"]): str(entry["template"]) for entry in named}
    return found if isinstance(found, str) else None


def _choose(template: str | Mapping[str, str] | None, wanted: str) -> str | None:
    if not isinstance(template, Mapping):
        return template
    return template.get(wanted) or template.get("default")
