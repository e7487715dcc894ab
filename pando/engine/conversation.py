"""Conversations as the offline interface takes them: rendered by a chat template, and calls found in the answers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import InvalidPrompt
from ..model.tokenizer import Tokenizer
from .given import Given, Truncating, how
from .request import RequestOutput, SamplingParams
from .tools import form_of, functions, takes_tools
from .truncation import of_conversation, wanted_room

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]  # as OpenAI's API has them


def conversations(messages: Messages | Sequence[Messages]) -> Sequence[Messages]:
    is_one = not isinstance(messages, Sequence) or not messages or isinstance(messages[0], Mapping)
    return [messages] if is_one else messages  # type: ignore[list-item, return-value]


class Rendering:
    """What the conversations of one call have in common. `template`: in place of the model's own. `options`: what it asks for by name."""

    def __init__(self, tokenizer: Tokenizer, tools: Tools | None, template: str | None, options: Mapping[str, Any] | None) -> None:
        if template is not None and not isinstance(template, str):
            raise InvalidPrompt(f"chat_template is a {type(template).__name__}; it must be the text of a Jinja template")
        if template and "{" not in template:  # every conversation would be the same text
            raise InvalidPrompt(f"chat_template is {template[:80]!r}; it must be the text of a Jinja template, and not the name of a file")
        if options is not None and not isinstance(options, Mapping):
            raise InvalidPrompt(f"chat_template_kwargs is a {type(options).__name__}; it must map names to values")
        if tools is not None and (isinstance(tools, str | bytes) or not isinstance(tools, Sequence)):
            raise InvalidPrompt(f"tools is a {type(tools).__name__}; it must be a list of functions, as OpenAI's API has them")
        self._tokenizer, self._tools, self._template, self._options = tokenizer, tools or None, template, options
        self._form, self._marked = None, False
        if tools:
            functions(tools)  # what is none is refused
            chosen = template or tokenizer.template(tools=True) or ""
            if not takes_tools(chosen):
                raise InvalidPrompt("the chat template of this model takes no tools; leave them out, or give a chat_template that does")
            self._form = form_of(chosen)
            self._marked = self._form is not None and bool(self._form.special_words(tokenizer))

    def text(self, messages: Messages) -> str:
        return self._tokenizer.chat(messages, template=self._template, tools=self._tools, options=self._options)

    def given(self, messages: Messages, text: str, max_tokens: int | None, truncation: Truncating, window: int) -> Given:
        """`window`: tokens beyond which a conversation that may be cut is."""
        tokens, cut = self._tokenizer.encode(text), how(truncation)
        if truncation == "auto" and len(tokens) + wanted_room(max_tokens, window) > window:
            cut = of_conversation(lambda others: self._tokenizer.encode(self.text(others)), messages, tokens)
        return Given(tokens, truncation=cut)

    def params(self, params: SamplingParams) -> SamplingParams:
        """Where what marks a call is a special token, the text must have it."""
        return replace(params, skip_special_tokens=False) if self._marked else params

    def find_calls(self, outputs: Sequence[RequestOutput]) -> None:
        if self._form is not None:
            for answer in [answer for output in outputs for answer in output.outputs]:
                is_cut = answer.finish_reason == "length" or isinstance(answer.stop_reason, str)
                answer.tool_calls = self._form.parse(answer.text, cut=is_cut)[1]
