"""What is asked, what is answered, and how a token is chosen: values only."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from ..errors import InvalidOption, InvalidSampling, known_only, nearest
from ..kv.run import Run

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Span = tuple[int, int]  # first and end
FinishReason = Literal["stop", "length", "error"]  # error: no number that a token could be chosen by, or a fault

MAX_N = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256  # an answer is compared with all of them at each token
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MIN_REPETITION_PENALTY = 0.01  # logits are divided by it, and must stay finite
RENAMED = {  # as other engines call them
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens", "n_predict"), "max_tokens"),
    **{"min_new_tokens": "min_tokens", "repeat_penalty": "repetition_penalty", "do_sample": "temperature"},
}
ELSEWHERE = {  # params of other engines, and what to do here
    "guided_decoding": "give StructuredOutputsParams to generate, chat or the stream, beside these",
    "prompt_logprobs": "llm.score(prompt) gives the logprobs of a prompt",
    "best_of": "ask for several answers with n, and choose among them",
    **dict.fromkeys(("bad_words", "allowed_token_ids", "logits_processors"), "bias single tokens with logit_bias"),
}


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What an answer must follow: one of these. Names follow vLLM's offline API."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # as Lark writes it
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise InvalidSampling(f"structured outputs are one of json, regex, choice, grammar and json_object; found {found}")
        if self.json is not None and not isinstance(self.json, str | Mapping):
            raise InvalidSampling(f"json is a {type(self.json).__name__}; it must be a JSON schema, as a mapping or as text")
        for name, text in (("regex", self.regex), ("grammar", self.grammar)):
            if text is not None and not isinstance(text, str):
                raise InvalidSampling(f"{name} is a {type(text).__name__}; it must be text")
        is_list = isinstance(self.choice, Sequence) and not isinstance(self.choice, str)
        if self.choice is not None and not (is_list and self.choice and all(isinstance(one, str) for one in self.choice)):
            raise InvalidSampling(f"choice is {repr(self.choice)[:80]}; it must be a list of one or more texts")


def _check_names(given: Iterable[str]) -> None:
    """Refuses what there is not, as Python code gives it."""
    known = SamplingParams.__dataclass_fields__
    for name in given:
        if name == "structured_outputs":  # where vLLM has it
            raise InvalidSampling("structured_outputs are no sampling params; give them to generate, chat or the stream, beside these")
        if name not in known:
            meant = RENAMED.get(name) or nearest(name, known)
            told = ELSEWHERE.get(name) or (f"did you mean {meant}?" if meant else f"known are {', '.join(known)}")
            raise InvalidSampling(f"unknown sampling param {name!r}; {told}")


@known_only(_check_names)
@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Names and defaults follow vLLM's offline API."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: as many as the context holds
    min_tokens: int = 0
    logprobs: int | None = None  # that many alternatives beside the chosen token
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _whole("n", self.n, 1, MAX_N)
        _real("temperature", self.temperature, 0, 100)
        if not 0 < _real("top_p", self.top_p, 0, 1):
            raise InvalidSampling("top_p is 0, which leaves no token; use a value in (0, 1], or temperature=0 for the likeliest token")
        _whole("top_k", self.top_k, -1, 2**31 - 1)
        _real("min_p", self.min_p, 0, 1)
        _real("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100)
        _real("presence_penalty", self.presence_penalty, -2, 2)
        _real("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidSampling(f"min_tokens is {self.min_tokens}, above max_tokens; lower it to at most {self.max_tokens}")
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidSampling(f"{name} is {getattr(self, name)!r}; it must be True or False")
        self._check_lists()

    def _check_lists(self) -> None:
        if self.stop is None and self.stop_token_ids is None and self.logit_bias == {}:
            return
        for name, value in (("stop", self.stop), ("stop_token_ids", self.stop_token_ids)):
            if value is not None and not isinstance(value, Sequence):
                raise InvalidSampling(f"{name} is {value!r}; it must be {'text, or ' * (name == 'stop')}a list")
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidSampling(f"logit_bias is {self.logit_bias!r}; it must map tokens to numbers")
        if len(self.stops) > MAX_STOPS:
            raise InvalidSampling(f"{len(self.stops)} stop strings; at most {MAX_STOPS} are allowed")
        for stop in self.stops:
            if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARS:
                raise InvalidSampling(f"a stop must be a string of 1 to {MAX_STOP_CHARS} characters; found {str(stop)[:40]!r}")
        for token in self.stop_token_ids or ():
            _whole("stop_token_ids", token, 0, 2**31 - 1)
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidSampling(f"{len(self.logit_bias)} entries in logit_bias; at most {MAX_BIASES} are allowed")
        for token, bias in self.logit_bias.items():
            _whole("logit_bias token", token, 0, 2**31 - 1)
            _real(f"logit_bias of token {token}", bias, -100, 100)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


def _real(name: str, value: float, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidSampling(f"{name} is {value!r}; it must be a number from {low} to {high}")
    return value


def _whole(name: str, value: int, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidSampling(f"{name} is {value!r}; it must be a whole number from {low} to {high}")
    return value


class Constraint(Protocol):
    """What one answer may become, followed token by token."""

    def allowed(self) -> "NDArray[np.int32]":
        """A bit for each token of the vocabulary, 32 to a number, lowest first: may it come next? At least one may."""
        ...

    def accept(self, token: int) -> bool:
        """Takes in the token that was chosen; says whether the answer is complete, so that nothing may follow."""
        ...

    @property
    def is_broken(self) -> bool:
        """It could not be followed any further: the answer ends, and is not complete."""
        ...


@dataclass(frozen=True)
class Tenant:
    """Who may reuse what. Requests with equal salts share cached context; what an owner has under another salt is told, not shared."""

    salt: bytes = b""
    owner: bytes = b""


@dataclass(frozen=True)
class Truncation:
    """What may be dropped of a prompt that does not fit: the oldest part behind its first tokens, and enough for the next turns to fit."""

    keep: int = 0  # so many of the first tokens stay, and a few in any case
    recent: int = 0  # so many of the last ones stay as long as that leaves room for an answer
    share: float = 0.5  # of the window that is full afterwards

    def __post_init__(self) -> None:
        for name, value in (("keep", self.keep), ("recent", self.recent)):
            if type(value) is not int or value < 0:
                raise InvalidOption(f"{name} of a truncation is {value!r}; it is a number of tokens, from 0 on")
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise InvalidOption(f"share of a truncation is {self.share!r}; it is a part of the window, above 0 and at most 1")


@dataclass(frozen=True)
class Request:
    request_id: str
    prompt: Sequence[int]  # tokens
    params: SamplingParams
    tenant: Tenant = Tenant()
    public: int = 0  # the first so many tokens of the prompt are no secret: every tenant shares them
    score: bool = False  # wanted: the logprob of each prompt token after the first, which rules out reuse
    constraint: Callable[[], Constraint] | None = None  # makes one for each answer
    runs: Sequence[Run] = ()  # what stands before the prompt's tokens, in order
    position: int | None = None  # of the prompt's first token; behind the last run, if nothing is said
    repair: float = 0.0  # the share of tokens encoded elsewhere that are computed again, behind what stands before them here
    truncation: Truncation | None = None  # None: a prompt that does not fit is refused
    drop: Sequence[Span] = ()  # parts of the prompt to leave out: first token and end, ascending


MissReason = Literal["cold", "diverged", "evicted", "expired", "slow", "lost", "other_tenant", "too_short", "off"]


@dataclass(frozen=True)
class Miss:
    """Why reuse ended where it did.

    cold: nothing of this was seen before. diverged: what is known goes on differently from this token on, or soon. evicted: it was known,
    and its pages were needed. expired: nobody used it for longer than the tiers below the pool keep it. slow: it is kept there, and was
    sooner computed than loaded. lost: it was kept there and could not be read back, or a tier did not say what it has. other_tenant: the
    same owner has it under another salt. too_short: a prompt of one token, which is always computed. off: reuse was ruled out, by the
    configuration or because every prompt token's logprob was wanted.
    """

    reason: MissReason
    token: int  # the first that had to be computed


RecomputeReason = Literal["cold", "evicted", "positions", "off", "pool"]


@dataclass(frozen=True)
class Truncated:
    """What was dropped of a prompt, and what became of the rest.

    Where its states are reused at other positions the answer is an approximation: they know what was dropped. Where they are computed
    anew it is exact for what is left. Why they are: cold: they are not cached. evicted: they were. positions: those of this model are
    learned, and cannot move. off: prefix caching is off. pool: there is not room for them beside what was dropped.
    """

    ranges: tuple[Span, ...] = ()  # of the whole prompt
    moved: int = 0  # tokens whose states are reused at other positions
    recomputed: RecomputeReason | None = None  # None: they were reused, or it was an earlier turn that computed them

    @property
    def dropped(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def whole(self, token: int) -> int:
        """Where a token of what is left stands in the whole prompt."""
        for start, stop in self.ranges:
            token += stop - start if token >= start else 0
        return token


How = Literal["exact", "rounded", "modular", "truncated"]  # what an answer is; all but the first are approximations, the last the coarsest
Source = Literal["computed", "device", "host", "disk", "remote", "module"]  # where a prompt's tokens came from
TIERS: tuple[Source, ...] = ("host", "disk", "remote")


@dataclass(frozen=True)
class Reuse:
    """Prompt tokens that were not computed. Without a miss, all that is known of the prompt was reused, and the rest of it is new."""

    device: int = 0  # all that were read from the pool, and so also those that a tier below brought there
    miss: Miss | None = None
    modules: int = 0  # of the prompt's tokens, so many had been encoded in another context: the answer is an approximation
    held: int = 0  # so many of these were in the pool
    repaired: int = 0  # so many more had been, and were computed again
    tiers: Mapping[str, int] = field(default_factory=dict)  # of the tokens, so many came from each tier below the device
    truncated: Truncated | None = None
    rounded: bool = False  # some of it was kept with a codec that rounds, or computed behind such: the answer is an approximation

    @property
    def how(self) -> How:
        """What makes the answer an approximation, if anything does: of several, what matters most."""
        if self.truncated is not None and self.truncated.moved:
            return "truncated"
        return "modular" if self.modules else "rounded" if self.rounded else "exact"

    def sources(self, total: int) -> dict[Source, int]:
        """Where a prompt's `total` tokens came from, each of them once: from a tier below the device, or from the device, as any prefix or
        as a module that had been encoded behind something else. Of what came up and was computed again, by a repair, nobody knows which it
        was."""
        left, came = self.device, dict[Source, int]()
        found: tuple[tuple[Source, int], ...] = (*((tier, self.tiers.get(tier, 0)) for tier in TIERS), ("module", self.held))
        for source, count in found:
            came[source] = min(count, left)
            left -= came[source]
        return {"computed": total - self.device, "device": left, **came}


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int  # 1 is the likeliest
    decoded_token: str = ""


class TokenEvent(NamedTuple):
    """One token of one answer. `text` is what became readable with it: never half a character, never part of a stop string."""

    request_id: str
    index: int  # type: ignore[assignment]  # of the answer: nobody looks for places in an event
    token: int
    text: str
    logprobs: Mapping[int, Logprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    reuse: Reuse = Reuse()
    waited: float = 0.0  # seconds until its first step
    prompt_logprobs: Sequence[float] | None = None  # of the tokens after the first, where the request asked for them
    prompt_top: Sequence[Sequence[tuple[int, float, int]]] = ()  # of each, it and the likeliest, with logprob and rank, where asked for


@dataclass(frozen=True)
class Call:
    """Of a function, by the model."""

    index: int  # among the calls of one answer
    id: str
    name: str
    arguments: str  # JSON, exactly as the model wrote it


@dataclass
class CompletionOutput:
    """One answer to a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Mapping[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    tool_calls: list[Call] | None = None  # None: there were no tools, or their template has calls in a form that is not known


@dataclass
class RequestOutput:
    """A request with all of its answers; the shape of vLLM's class of that name."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    finished: bool = False
    reuse: Reuse = Reuse()
