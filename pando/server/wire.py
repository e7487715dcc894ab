"""What clients send: every body of a request, and what the engine is asked for in its stead.

Null means the same as leaving a field out. A field that is not listed here is ignored, as servers of this protocol do, so that clients may
send what only other servers know; the log says so. The few that would change an answer, and that Pando cannot obey, are refused by name.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, Tag, model_validator

from ..config import TruncationChoice
from ..engine.request import MAX_LOGPROBS, MAX_N, MIN_REPETITION_PENALTY, SamplingParams
from .formats import CONSTRAINTS, ResponseFormat, StructuredOutputs
from .limits import (
    MAX_ANSWERS,
    MAX_INT32,
    MAX_NAME_CHARS,
    MAX_PROMPT_TOKENS,
    MAX_STOP_TOKENS,
    Biases,
    Body,
    Count,
    ModelName,
    Name,
    Notes,
    Penalty,
    Plain,
    Prompts,
    Real,
    Seconds,
    Stops,
    TemplateOptions,
    Text,
    TextOrTokens,
    Token,
    one_of,
    printable,
)
from .messages import Messages, Tools, conversation, definitions

Served = Annotated[ModelName | None, Field(description="A name from /v1/models; by default the one that is served.")]
TemplateChoices = Annotated[
    TemplateOptions | None,
    Field(description="Variables of the chat template, such as enable_thinking.", examples=[{"enable_thinking": False}]),
]
MessageFormat = Annotated[Literal["auto", "text"], Field(description="text: no message is a prompt in PML, whatever it looks like.")]

User = Annotated[str, Field(max_length=MAX_NAME_CHARS), AfterValidator(printable)]

_SCORES = "send the prompt to /v1/completions with echo, logprobs and max_tokens 0"
_BIAS = "bias single tokens with logit_bias"

# what other servers do with a prompt or an answer, and Pando does not
OTHERS = {
    "prompt_logprobs": _SCORES,
    "bad_words": _BIAS,
    "allowed_token_ids": _BIAS,
    "logits_processors": _BIAS,
    "use_beam_search": "answers are sampled; ask for several with n",
    "truncate_prompt_tokens": 'use truncation "auto"',
}

ANEW = "an answer is always a new message; render the prompt yourself, and send it to /v1/completions"

# what would change the text of messages
TEMPLATES = {
    "chat_template": "the operator chooses it; render the prompt yourself, and send it to /v1/completions",
    "continue_final_message": ANEW,
    "documents": "write them into a message",
}


class CacheOptions(Body):
    ttl: Seconds | None = Field(None, description="How long the prompt stays cached after its last use.", examples=["30m"])


class StreamOptions(Body):
    include_usage: bool = Field(False, description="Send the usage in one more event before the end.")


class Steering(Body):
    model: Served = None
    prompt_cache_key: Name | None = Field(None, description="Names the conversation, where no session_id does.")
    session_id: Name | None = Field(None, description="Names the conversation; the header x-session-id does the same.")
    cache_salt: Name | None = Field(None, description="Requests under different salts never share cached context.")

    @property
    def session(self) -> str | None:
        return self.session_id if self.session_id is not None else self.prompt_cache_key


class Amount(Steering):
    """How much is answered. Of several errors these are told before those of `Sampling`."""

    max_tokens: Count | None = Field(None, description="Tokens of an answer, at most; by default as many as the context holds.")
    n: int = Field(1, ge=1, le=MAX_N, description="Answers to each prompt.")


class Sampling(Steering):
    """What all answers have in common."""

    ignored: ClassVar[frozenset[str]] = frozenset({"store", "service_tier", "safety_identifier"})

    temperature: Real = Field(1.0, ge=0, le=100, description="0 takes the likeliest token; higher is more varied.")
    top_p: Real = Field(1.0, gt=0, le=1, description="Choose among the likeliest tokens that together have this probability.")
    top_k: int = Field(0, ge=-1, le=MAX_INT32, description="Choose among so many of the likeliest tokens; 0 or -1: among all.")
    min_p: Real = Field(0.0, ge=0, le=1, description="Leave out tokens less likely than this share of the likeliest.")
    repetition_penalty: Real = Field(
        1.0, ge=MIN_REPETITION_PENALTY, le=100, description="Above 1: tokens seen in prompt or answer become less likely."
    )
    presence_penalty: Penalty = Field(0.0, description="Subtracted from the logit of each token that the answer has.")
    frequency_penalty: Penalty = Field(0.0, description="Subtracted for each time that the answer has the token.")
    logit_bias: Biases = Field({}, description="Added to the logits, by token id.", examples=[{"50256": -100}])
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1, description="The same seed and request give the same answer.")
    stop: Stops | None = Field(None, description="The answer ends before any of these.", examples=[["\n\n"]])
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] = Field(
        [], description="The answer ends at any of these tokens."
    )
    ignore_eos: bool = Field(False, description="Go on after the model's own end, for measurements.")
    min_tokens: int = Field(0, ge=0, le=MAX_INT32, description="The answer does not end by itself before so many tokens.")
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of the text.")
    include_stop_str_in_output: bool = Field(False, description="Keep the stop string at the end of the text.")
    stream: bool = Field(False, description="Send tokens as they come, as server-sent events.")
    repair: Annotated[Real, Field(ge=0, le=1)] | None = Field(
        None, description="The share of module tokens that are computed again, where a prompt is in PML; by default as its schema says."
    )
    truncation: TruncationChoice | None = Field(
        None, description="auto drops the oldest part of a prompt that does not fit; by default as the session's last request that said it."
    )
    user: User | None = Field(None, description="The client's own user; noted in the log.")
    prompt_cache_options: CacheOptions | None = Field(None, description="How long the prompt is kept.")

    @property
    def ttl(self) -> int | None:
        return self.prompt_cache_options.ttl if self.prompt_cache_options else None


class Generation(Sampling, Amount):
    """What chat and plain completions have in common."""

    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="Constrains the answer to one of these.", examples=[{"choice": ["yes", "no"]}]
    )
    return_token_ids: bool = Field(False, description="Give the token ids of prompt and answers, too.")

    @model_validator(mode="after")
    def _streams(self) -> "Generation":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed when stream is true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def _sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids or None,
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            logprobs=logprobs,
            skip_special_tokens=self.skip_special_tokens,
        )


class ChosenFunction(Body):
    name: Name = Field(description="One of the tools' names.")


class ChosenTool(Body):
    type: Literal["function"] = Field(description="Only functions are known.")
    function: ChosenFunction = Field(description="The function that must be called.")


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")] | Annotated[ChosenTool, Tag("<object>")],
    one_of('"none", "auto", "required", or {"type": "function", "function": {"name": ...}}'),
]


class ChatBody(Generation):
    """The next message of a conversation."""

    refused: ClassVar[Mapping[str, str]] = {
        "functions": "describe them in tools",
        "function_call": "use tool_choice",
        "audio": "answers are text only; leave it out",
        "web_search_options": "this server does not search; leave it out",
        **CONSTRAINTS,
        **TEMPLATES,
        **OTHERS,
    }

    messages: Messages = Field(description="The conversation so far.", examples=[[{"role": "user", "content": "Hello"}]])
    max_completion_tokens: Count | None = Field(None, description="The newer name of max_tokens; wins over it.")
    logprobs: bool = Field(False, description="Give the logprob of each token of the answer.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="How many of the likeliest tokens to give beside it; needs logprobs."
    )
    response_format: ResponseFormat | None = Field(None, description="Constrains the answer to JSON, or to a JSON schema.")
    tools: Tools | None = Field(None, description="Functions that the model may call.")
    tool_choice: ToolChoice | None = Field(None, description="Whether it may, must, or must not; by default it may.", examples=["auto"])
    parallel_tool_calls: bool = Field(True, description="Whether one answer may have several calls.")
    add_generation_prompt: bool = Field(True, description="Must be true: an answer is always a new message.")
    chat_template_kwargs: TemplateChoices = None
    prompt_format: MessageFormat = "auto"
    metadata: Notes | None = Field(None, description="The client's own notes; accepted without effect.")

    @model_validator(mode="after")
    def _agrees(self) -> "ChatBody":
        if not self.add_generation_prompt:
            raise ValueError(f"add_generation_prompt: {ANEW}")
        if self.top_logprobs and not self.logprobs:  # 0 asks for nothing
            raise ValueError("top_logprobs: only allowed when logprobs is true")
        known = [tool.function.name for tool in self.tools or ()]
        if self.tool_choice == "required" and not known:
            raise ValueError('tool_choice: "required" needs tools to choose from')
        if isinstance(self.tool_choice, ChosenTool) and self.tool_choice.function.name not in known:
            raise ValueError("tool_choice: names a function that is not among the tools")
        if self.structured_outputs is not None and self.response_format is not None and self.response_format.type != "text":
            raise ValueError("structured_outputs: cannot be combined with response_format; leave one of them out")
        if self.structured_outputs is not None and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("structured_outputs: cannot be combined with a tool_choice that forces a call; leave one of them out")
        return self

    def sampling(self) -> SamplingParams:
        return self._sampling(self.max_completion_tokens or self.max_tokens, (self.top_logprobs or 0) if self.logprobs else None)

    def conversation(self) -> list[Plain]:
        return conversation(self.messages)

    def definitions(self) -> list[Plain] | None:
        return definitions(self.tools)


class CompletionBody(Generation):
    """What follows a prompt, as it stands: no chat template is used."""

    refused: ClassVar[Mapping[str, str]] = {
        "suffix": "only text after the prompt can be generated; leave it out",
        "response_format": 'only /v1/chat/completions has it; use structured_outputs, as {"json": ...}',
        **CONSTRAINTS,
        **OTHERS,
    }

    prompt: Prompts = Field(description="One prompt or several, each as text or as token ids.", examples=["Once upon a time"])
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = Field(
        16, description="The most tokens an answer may have; 0: only the echo."
    )
    echo: bool = Field(False, description="Give the prompt before the answer.")
    prompt_format: Literal["text", "pml"] = Field("text", description="pml: each prompt is a PML prompt, made from a registered schema.")
    best_of: int | None = Field(None, ge=1, le=MAX_N, description="Must be the same as n.")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Give the logprob of each token, and of this many of the likeliest."
    )

    @model_validator(mode="after")
    def _agrees(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 leaves no room for an answer; ask for at least 1, or for echo")
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError(f"best_of: must be the same as n, which is {self.n}; every answer is returned")
        if self.prompt_format == "pml" and not all(isinstance(prompt, str) for prompt in self.prompts()):
            raise ValueError("prompt: with prompt_format pml it must be text, not token ids")
        if (asked := self.n * len(self.prompts())) > MAX_ANSWERS:
            raise ValueError(f"n: times the number of prompts makes {asked} answers; at most {MAX_ANSWERS} are allowed")
        return self

    def prompts(self) -> list[str | list[int]]:
        """Each on its own."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]

    def sampling(self) -> SamplingParams:
        return self._sampling(1 if self.max_tokens == 0 else self.max_tokens, self.logprobs)  # a prompt is scored with what follows it


class TokenizeBody(Body):
    """Give a prompt or messages, not both."""

    refused: ClassVar[Mapping[str, str]] = TEMPLATES

    model: Served = None
    prompt: Text | None = Field(None, description="Text.", examples=["Hello"])
    messages: Messages | None = Field(None, description="A conversation, rendered by the chat template.")
    tools: Tools | None = Field(None, description="Functions, for the chat template.")
    chat_template_kwargs: TemplateChoices = None
    prompt_format: MessageFormat = "auto"
    add_special_tokens: bool = Field(True, description="Begin a prompt as the model wants it; a chat template does so by itself.")
    add_generation_prompt: bool = Field(True, description="End messages where the assistant's answer begins.")

    @model_validator(mode="after")
    def _one(self) -> "TokenizeBody":
        _only_one(self.prompt, self.messages)
        return self


class DetokenizeBody(Body):
    model: Served = None
    tokens: Annotated[list[Token], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)] = Field(description="Token ids.", examples=[[1, 2]])


class WarmBody(Steering):
    """Give a prompt or messages, not both: what is computed now, so that later requests that begin so need not."""

    refused: ClassVar[Mapping[str, str]] = TEMPLATES

    prompt: TextOrTokens | None = Field(None, description="Text or token ids.", examples=["You are a helpful assistant."])
    messages: Messages | None = Field(None, description="A conversation, rendered by the chat template without a beginning answer.")
    tools: Tools | None = Field(None, description="Functions, for the chat template.")
    chat_template_kwargs: TemplateChoices = None
    prompt_format: MessageFormat = "auto"
    ttl: Seconds | None = Field(None, description="How long it is kept.", examples=["30m"])

    @model_validator(mode="after")
    def _one(self) -> "WarmBody":
        _only_one(self.prompt, self.messages)
        return self


class PinBody(WarmBody):
    """Give a prompt or messages, not both: what stays cached, whatever else needs its pages, until it is unpinned or its ttl is over."""


class UnpinBody(Body):
    id: Name = Field(description="The id that pinning gave.")


def _only_one(prompt: object, messages: object) -> None:
    if (prompt is None) == (messages is None):
        raise ValueError("give either a prompt or messages" + ("" if prompt is None else ", not both"))
