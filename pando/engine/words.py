"""A model's tokenizer, as the language wants it."""

from collections.abc import Mapping, Sequence
from functools import cached_property

from ..model.tokenizer import Tokenizer


class Words:
    """`chat_template`: instead of the model's own."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None = None) -> None:
        self._tokenizer, self._chat_template = tokenizer, chat_template

    @property
    def bos(self) -> int | None:
        return self._tokenizer.bos

    @cached_property
    def begin(self) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(""))

    @cached_property
    def unknown(self) -> int:
        return self._tokenizer.unknown

    def text(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, special=False)

    def template(self, text: str) -> list[int]:
        return self._tokenizer.encode_template(text)

    def chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        return self._tokenizer.chat(messages, add_generation_prompt=add_generation_prompt, template=self._chat_template)
