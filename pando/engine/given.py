"""What the offline interface is given: prompts and params in every form they may have, and what the engine takes of them."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, NamedTuple, TypeVar

from ..errors import InvalidOption, InvalidPrompt, InvalidSampling, one_of_several
from ..kv.run import Run
from ..markup.program import Prompt as Written
from .request import Constraint, SamplingParams, Span, StructuredOutputsParams, Truncation
from .schemas import Prompt

# text; tokens; {"prompt": text} or {"prompt_token_ids": tokens}; PML; a call of a program
AnyPrompt = str | Sequence[int] | Mapping[str, Any] | Prompt | Written
Params = SamplingParams | Sequence[SamplingParams] | None
Structures = StructuredOutputsParams | Sequence[StructuredOutputsParams | None] | None
Truncating = Literal["auto", "disabled"] | Truncation  # auto: the oldest part of a prompt that does not fit is dropped

S = TypeVar("S")
T = TypeVar("T")


class Given(NamedTuple):
    """A prompt as an engine takes it."""

    tokens: Sequence[int]
    runs: Sequence[Run] = ()
    position: int | None = None
    repair: float = 0.0
    truncation: Truncation | None = None
    drop: Sequence[Span] = ()
    constraint: Callable[[], Constraint] | None = None


def several(prompts: AnyPrompt | Sequence[AnyPrompt]) -> Sequence[AnyPrompt]:
    """One prompt or many? A list of whole numbers is one prompt of tokens."""
    if (
        isinstance(prompts, str | bytes | Mapping | Prompt | Written)
        or not isinstance(prompts, Sequence)
        or (prompts and isinstance(prompts[0], Integral))
    ):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def each_prompt(prompts: Sequence[S], work: Callable[[S], T]) -> list[T]:
    done = []
    for place, prompt in enumerate(prompts):
        with one_of_several("prompts", place, len(prompts)):
            done.append(work(prompt))
    return done


def written(prompt: AnyPrompt) -> str | None:
    """The text of a prompt, where it has one."""
    if isinstance(prompt, Prompt | Written):
        return prompt.pml
    if isinstance(prompt, Mapping):
        return prompt.get("prompt")
    return prompt if isinstance(prompt, str) else None


def plain(prompt: str | Sequence[int] | Mapping[str, Any]) -> str | list[int]:
    """Text or tokens, out of a mapping, or of an array with one dimension."""
    given: Any = prompt
    if isinstance(prompt, Mapping):
        given = prompt.get("prompt_token_ids")
        if isinstance(given, str):
            raise InvalidPrompt("'prompt_token_ids' is text; give a list of tokens, or the text as 'prompt'")
        given = prompt.get("prompt") if given is None else given
        if given is None:
            raise InvalidPrompt(f"a prompt given as a mapping needs 'prompt' or 'prompt_token_ids'; found {sorted(map(str, prompt))}")
    if isinstance(given, str):
        return given
    found = given.tolist() if hasattr(given, "tolist") else given  # numpy's arrays and torch's tensors
    if isinstance(found, bytes) or not isinstance(found, Sequence):
        raise InvalidPrompt(f"a prompt is text, a list of tokens, or a mapping with one of them; found {type(given).__name__}")
    if found and isinstance(found[0], str):
        raise InvalidPrompt("a prompt is one text, or a list of tokens; found a list of texts: generate takes several prompts, others one")
    return [int(token) if isinstance(token, Integral) and not isinstance(token, bool) else token for token in found]


def how(truncation: Truncating) -> Truncation | None:
    if isinstance(truncation, Truncation):
        return truncation
    if truncation not in ("auto", "disabled"):
        raise InvalidOption(f"truncation is {truncation!r}; it must be auto, disabled, or a Truncation")
    return Truncation() if truncation == "auto" else None


def each(params: Params, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise InvalidSampling(f"sampling_params must be SamplingParams, or a list of them; found {type(params).__name__}")
    if len(params) != count:
        raise InvalidSampling(f"{len(params)} sampling params for {count} prompts; give one for all, or one for each")
    return params


def each_structure(wanted: Structures, count: int) -> Sequence[StructuredOutputsParams | None]:
    if wanted is None or isinstance(wanted, StructuredOutputsParams):
        return [wanted] * count
    if not isinstance(wanted, Sequence) or not all(one is None or isinstance(one, StructuredOutputsParams) for one in wanted):
        raise InvalidSampling(f"structured_outputs must be StructuredOutputsParams, or a list of them; found {type(wanted).__name__}")
    if len(wanted) != count:
        raise InvalidSampling(f"{len(wanted)} structured outputs for {count} prompts; give one for all, or one or None for each")
    return wanted
