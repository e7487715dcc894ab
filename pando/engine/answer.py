"""One answer as it is written: from tokens to readable text, and when to stop."""

from collections.abc import Mapping, Sequence

from ..model.tokenizer import Detokenizer, Tokenizer
from .request import FinishReason, Logprob, Reuse, TokenEvent
from .row import Row
from .sampler import NO_TOKEN, Chosen

PROMPT_TAIL = 8  # tokens of the prompt that decide how the first word of the answer is spelt


class Answer:
    """Follows one row. Text that may turn out to begin a stop string is held back until it is clear that it does not."""

    def __init__(self, row: Row, tokenizer: Tokenizer, eos: Sequence[int]) -> None:
        self.row = row
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special=row.params.skip_special_tokens, prompt_tail=row.prompt[-PROMPT_TAIL:])
        self._eos = () if row.params.ignore_eos else tuple(eos)
        self._stop_ids = tuple(row.params.stop_token_ids or ())
        self._stops = row.params.stops
        self._held = ""
        self._modules = 0 if row.truncated is not None else row.foreign - row.repaired

    def take(self, chosen: Chosen) -> TokenEvent:
        """Appends a token to the row; the event says what became readable and whether the answer ends here."""
        row = self.row
        if chosen.token == NO_TOKEN:
            return self._event(chosen, self._held, "error", None)
        row.output.append(chosen.token)
        row.tokens.append(chosen.token)
        complete = row.constraint is not None and row.constraint.accept(chosen.token)
        early = len(row.output) < row.params.min_tokens
        if not early and (chosen.token in self._eos or chosen.token in self._stop_ids):
            keep = row.params.include_stop_str_in_output and chosen.token not in self._eos
            text = self._held + (self._detokenizer.add(chosen.token) if keep else "") + self._detokenizer.finish()
            return self._event(chosen, text, "stop", None if chosen.token in self._eos else chosen.token)
        text = self._held + self._detokenizer.add(chosen.token)
        if not early and (found := _first(text, self._stops)) is not None:
            place, stop = found
            end = place + len(stop) if row.params.include_stop_str_in_output else place
            return self._event(chosen, text[:end], "stop", stop)
        if complete or len(row.tokens) >= row.last:
            return self._event(chosen, text + self._detokenizer.finish(), "stop" if complete else "length", None)
        safe = len(text) - _open_stop(text, self._stops)
        self._held = text[safe:]
        return self._event(chosen, text[:safe], None, None)

    def _event(self, chosen: Chosen, text: str, finish: FinishReason | None, stop: str | int | None) -> TokenEvent:
        row = self.row
        logprobs: Mapping[int, Logprob] | None = None
        if chosen.top is not None:
            logprobs = {token: Logprob(value, rank, self._tokenizer.token_text(token)) for token, value, rank in chosen.top}
        return TokenEvent(
            request_id=row.request_id,
            index=row.index,
            token=chosen.token,
            text=text,
            logprobs=logprobs,
            finish_reason=finish,
            stop_reason=stop,
            num_cached_tokens=row.cached or 0,
            num_prompt_tokens=len(row.prompt),
            reuse=Reuse(row.cached or 0, row.miss, self._modules, row.repaired, row.tiers, row.truncated),
            waited=row.waited,
            prompt_logprobs=row.scored,
        )


def _first(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The stop string that begins earliest, and where."""
    found = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    return min(found, default=None)


def _open_stop(text: str, stops: Sequence[str]) -> int:
    """The length of the longest end of the text that a stop string begins with."""
    return max((n for stop in stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])), default=0)
