"""From bodies to prompts: tokens, constraints, and what is known of the conversation. It is slow, and runs beside the event loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from ..engine import tools
from ..engine.grammar import Grammars
from ..engine.request import Constraint, SamplingParams, Tenant, Truncation
from ..engine.truncation import Message, of_conversation, wanted_room
from ..errors import InvalidPrompt, PromptTooLong, counted, one_of_several
from ..markup.binding import Bound
from ..model.tokenizer import Tokenizer
from .history import Drift, History, message_at, message_starts
from .limits import MAX_PROMPT_TOKENS, Plain
from .messages import conversation, definitions
from .overflow import Overflow
from .schemas import Holdings, is_element
from .tenants import Public
from .wire import ChatBody, ChosenTool, CompletionBody, Generation, TokenizeBody, WarmBody

Rendering = Callable[..., str]  # of messages, by the chat template


@dataclass(frozen=True)
class Prompt:
    tokens: tuple[int, ...]  # a list would be looked through for garbage
    text: str | None  # None where tokens were given, or PML
    public: int = 0  # first tokens that every tenant shares
    starts: Sequence[int] = ()  # the first token of each message
    drift: Drift | None = None  # from the conversation's last turn
    bound: Bound | None = None  # of a prompt in PML
    repair: float = 0.0  # the share of its module tokens that are computed again
    truncation: Truncation | None = None  # None: it is refused if it does not fit

    def message_of(self, token: int) -> int | None:
        return message_at(self.starts, token) if self.starts else None

    def module_of(self, token: int) -> str | None:
        """The part of a schema that the states of a token come from."""
        if self.bound is None:
            return None
        ends = accumulate(len(run) for run in self.bound.runs)
        found = zip(ends, self.bound.names, self.bound.runs, strict=True)
        return next((name if run.origin is not None else None for end, name, run in found if token < end), None)


@dataclass(frozen=True)
class Asked:
    """A request, ready for the engine."""

    prompts: list[Prompt]
    params: SamplingParams
    constraint: Callable[[], Constraint] | None = None
    form: tools.Form | None = None  # how calls are found in the answer
    one_call: bool = False  # and no more of them are wanted
    score: bool = False
    silent: bool = False  # nothing is told of the answer, only of the prompt
    messages: Sequence[Plain] = ()


class Prompts:
    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None,
        grammars: Grammars,
        history: History,
        public: Public,
        schemas: Holdings,
        overflow: Overflow,
        max_len: int,
        window: int,
    ) -> None:
        """`window`: tokens beyond which a conversation that may be cut is."""
        self._tokenizer, self._template, self._schemas, self._max_len, self._window = tokenizer, template, schemas, max_len, window
        self._overflow = overflow
        self._grammars, self._history, self._public = grammars, history, public

    def chat(self, body: ChatBody, tenant: Tenant, session: str | None) -> Asked:
        params, messages = body.sampling(), body.conversation()
        if (pml := self._pml(body, messages, tenant.owner)) is not None:
            return self._modular(body, pml, tenant, params)
        wanted = body.definitions() if body.tool_choice != "none" else None
        form, constraint = None, self._format(body, tenant)
        if wanted:
            form = self._form()
            functions, special = tools.functions(wanted), form.special_words(self._tokenizer)
            if body.tool_choice == "required" or isinstance(body.tool_choice, ChosenTool):
                only = body.tool_choice.function.name if isinstance(body.tool_choice, ChosenTool) else None
                grammar = form.grammar(functions, only, parallel=body.parallel_tool_calls, special=special)
                constraint = self._grammars.lark(grammar, tenant.salt)
                params = replace(params, stop=None)  # there is no text that it could end
            if special:
                params = replace(params, skip_special_tokens=False)
        truncates = self._overflow.allows(body.truncation, tenant.salt, session)
        rendering = self._rendering(wanted, body.chat_template_kwargs)
        prompt = self._conversation(messages, rendering, answered=True, truncates=truncates)
        if truncates:
            prompt = replace(prompt, truncation=self._truncation(prompt.tokens, messages, rendering, params.max_tokens))
        drift = self._history.explain(tenant.salt, messages, prompt.tokens, session) if prompt.starts else None
        if drift is not None and drift.message is None:
            drift = replace(drift, message=prompt.message_of(drift.token))
        return Asked([replace(prompt, drift=drift)], params, constraint, form, not body.parallel_tool_calls, messages=messages)

    def _pml(self, body: ChatBody | TokenizeBody | WarmBody, messages: Sequence[Plain], owner: bytes) -> str | None:
        """The one message of a conversation, if it is a prompt in PML."""
        if body.prompt_format == "text":
            return None
        asked: dict[int, str] = {place: message["content"] for place, message in enumerate(messages) if message["role"] == "user"}
        if len(messages) == len(asked) == 1 and self._schemas.is_prompt(owner, asked[0]):
            return asked[0]
        if (place := next((place for place, text in asked.items() if is_element(text)), None)) is not None:
            raise InvalidPrompt(
                f"a prompt in PML must be the only message, and messages[{place}] of {len(messages)} is one; write the other messages "
                'into it, as <system>, <user> and <assistant>, or set prompt_format to "text" if it is meant as text'
            )
        return None

    def _modular(self, body: ChatBody, pml: str, tenant: Tenant, params: SamplingParams) -> Asked:
        """A prompt in PML as the one message."""
        _check_no_template(body.tools if body.tool_choice != "none" else None, body.chat_template_kwargs)
        return Asked([self._bound(body, pml, tenant)], params, self._format(body, tenant))

    def completion(self, body: CompletionBody, tenant: Tenant, session: str | None) -> Asked:
        if body.prompt_format == "pml":
            given = [prompt for prompt in body.prompts() if isinstance(prompt, str)]
            named = [f"prompt[{place}]" if len(given) > 1 else "prompt" for place in range(len(given))]
            prompts = [self._bound(body, prompt, tenant, name) for prompt, name in zip(given, named, strict=True)]
        else:
            truncates = self._overflow.allows(body.truncation, tenant.salt, session)
            prompts = []
            for place, prompt in enumerate(plain := body.prompts()):
                with one_of_several("prompt", place, len(plain)):
                    prompts.append(self._plain(prompt, truncates=truncates))
        score, silent = body.echo and body.logprobs is not None, body.max_tokens == 0
        return Asked(prompts, body.sampling(), self._structure(body, tenant), score=score, silent=silent)

    def _bound(self, body: Generation, pml: str, tenant: Tenant, name: str = "prompt") -> Prompt:
        if body.ttl is not None:
            raise InvalidPrompt("prompt_cache_options pins the beginning of a plain prompt, and this one is made of modules; leave it out")
        if body.truncation == "auto":
            raise InvalidPrompt(
                "truncation drops the oldest part of a plain prompt, and this one is made of modules; leave out modules instead"
            )
        bound, repair = self._schemas.bind(tenant.owner, pml, name)
        tokens = tuple(token for run in bound.runs for token in run.tokens)
        return Prompt(tokens, None, bound=bound, repair=repair if body.repair is None else body.repair)

    def warm(self, body: WarmBody, owner: bytes) -> Prompt:
        if body.messages is not None:
            messages = conversation(body.messages)
            if self._pml(body, messages, owner) is not None:
                raise InvalidPrompt(
                    "a prompt in PML cannot be warmed or pinned; register its schema with ?eager=true to compute its modules in advance"
                )
            return self._whole(
                self._conversation(messages, self._rendering(definitions(body.tools), body.chat_template_kwargs), answered=False)
            )
        assert body.prompt is not None
        return self._whole(self._plain(body.prompt))

    def _whole(self, prompt: Prompt) -> Prompt:
        if len(prompt.tokens) >= self._max_len:
            raise PromptTooLong(
                f"the prompt has {len(prompt.tokens)} tokens and the context holds {self._max_len}, one of them for an answer; "
                f"what is warmed or pinned is never truncated: shorten it by {counted(len(prompt.tokens) - self._max_len + 1, 'token')}"
            )
        return prompt

    def tokenize(self, body: TokenizeBody, owner: bytes) -> list[int]:
        if body.prompt is not None:
            return self._tokenizer.encode(body.prompt) if body.add_special_tokens else self._tokenizer.encode_template(body.prompt)
        messages = conversation(body.messages or ())
        if (pml := self._pml(body, messages, owner)) is not None:
            _check_no_template(body.tools, body.chat_template_kwargs)
            return self._schemas.tokens(owner, pml)
        rendering = self._rendering(definitions(body.tools), body.chat_template_kwargs)
        return list(self._conversation(messages, rendering, answered=body.add_generation_prompt).tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special=False)

    def texts(self, prompts: Sequence[Prompt]) -> list[str]:
        """As they were written, or as their tokens are spelt, which takes a while for long ones."""
        return [self.decode(prompt.tokens) if prompt.text is None else prompt.text for prompt in prompts]

    def _rendering(self, definitions: Sequence[Plain] | None, options: Plain | None) -> Rendering:
        return partial(self._tokenizer.chat, template=self._template, tools=definitions, options=options)

    def _conversation(self, messages: Sequence[Plain], rendering: Rendering, *, answered: bool, truncates: bool | None = None) -> Prompt:
        text = rendering(messages, add_generation_prompt=answered)
        self._check_length(text, truncates)
        tokens, offsets = self._tokenizer.encode_with_offsets(text, MAX_PROMPT_TOKENS if truncates else self._max_len)
        starts = message_starts(text, [message["content"] for message in messages], offsets) if offsets else ()
        return Prompt(tuple(tokens), text, self._public.length(tokens), starts)

    def _truncation(self, tokens: Sequence[int], messages: Sequence[Plain], rendering: Rendering, max_tokens: int | None) -> Truncation:
        """What of a conversation stays. One that fits is not rendered again to know."""
        if len(tokens) + wanted_room(max_tokens, self._window) <= self._window:
            return Truncation()

        def render(others: Sequence[Message]) -> list[int]:
            return self._tokenizer.encode(rendering(others))

        return of_conversation(render, messages, tokens)

    def _check_length(self, text: str, truncates: bool | None) -> None:
        """What cannot fit whatever its tokens are is not tokenised: that takes seconds for megabytes. None: it is never cut."""
        least = len(text) // self._tokenizer.longest
        if least > (MAX_PROMPT_TOKENS if truncates else self._max_len):
            way = ', or ask for truncation="auto", which drops its oldest part' if truncates is False else ""
            raise PromptTooLong(
                f"the prompt has {len(text)} characters, at least {least} tokens, and the context holds {self._max_len}; "
                f"shorten the prompt{way}"
            )

    def _plain(self, prompt: str | list[int], *, truncates: bool | None = None) -> Prompt:
        if isinstance(prompt, str):
            self._check_length(prompt, truncates)
        tokens = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        how = Truncation() if truncates else None
        return Prompt(tuple(tokens), prompt if isinstance(prompt, str) else None, self._public.length(tokens), truncation=how)

    def _structure(self, body: Generation, tenant: Tenant) -> Callable[[], Constraint] | None:
        return self._grammars.of(body.structured_outputs.params(), tenant.salt) if body.structured_outputs is not None else None

    def _format(self, body: ChatBody, tenant: Tenant) -> Callable[[], Constraint] | None:
        wanted = body.response_format
        if wanted is None or wanted.type == "text":
            return self._structure(body, tenant)
        if wanted.type == "json_schema" and wanted.json_schema is not None and wanted.json_schema.schema_ is not None:
            return self._grammars.json_schema(wanted.json_schema.schema_, tenant.salt)
        return self._grammars.json_object(tenant.salt)

    def _form(self) -> tools.Form:
        form = tools.form_of(self._template or self._tokenizer.template(tools=True) or "")
        if form is None:
            raise InvalidPrompt(
                "the chat template of this model takes no tools, or teaches a form of calls that is not known here; "
                'leave tools out, send tool_choice "none", or start the server with another --chat-template'
            )
        return form


def _check_no_template(tools: Sequence[object] | None, options: Plain | None) -> None:
    """What the chat template would write is the schema's to write, where a prompt is in PML."""
    if tools:
        raise InvalidPrompt("tools go through the chat template, and a prompt in PML does not use it; write them into the schema")
    if options:
        raise InvalidPrompt("chat_template_kwargs are for the chat template, and a prompt in PML does not use it; leave them out")
