"""One answer as it is written: from tokens to readable text, and when to stop."""

import logging
from collections.abc import Sequence
from functools import cached_property

from ..model.tokenizer import Detokenizer, Tokenizer
from .request import FinishReason, Logprob, Reuse, TokenEvent
from .row import Row
from .sampler import NO_TOKEN, Chosen

log = logging.getLogger(__name__)

PROMPT_TAIL = 8  # tokens of the prompt that decide how the first word of the answer is spelt


class Answer:
    """Follows one row. Text that may turn out to begin a stop string is held back until it is clear that it does not."""

    def __init__(self, row: Row, tokenizer: Tokenizer, eos: Sequence[int]) -> None:
        self.row = row
        self._tokenizer = tokenizer
        self._eos = frozenset(() if row.params.ignore_eos else eos)
        self._ends = self._eos.union(row.params.stop_token_ids or ())
        self._stops = row.params.stops
        self._hidden = self._stops_left_out()
        self._least = row.params.min_tokens
        self._held = ""
        self._reuse: Reuse | None = None

    def prepare(self) -> None:
        """What need not wait for the first token, nor it for that."""
        _ = self._detokenizer, self._modules

    def _stops_left_out(self) -> dict[int, str]:
        """Stops that are the names of special tokens: of those that are left out of the text, it does not tell that they came."""
        stops = self._stops if self.row.params.skip_special_tokens else ()
        found = {self._tokenizer.special(stop): stop for stop in stops}
        return {token: stop for token, stop in found.items() if token is not None}

    @cached_property
    def _detokenizer(self) -> Detokenizer:
        params, prompt = self.row.params, self.row.prompt
        return Detokenizer(self._tokenizer, skip_special=params.skip_special_tokens, prompt_tail=prompt[-PROMPT_TAIL:])

    @cached_property
    def _modules(self) -> tuple[int, int]:
        """Tokens encoded in another context, but for those that are repaired; and these."""
        row, repaired = self.row, self.row.repaired
        return row.foreign - repaired if row.truncated is None else 0, repaired

    def take(self, chosen: Chosen) -> TokenEvent:
        """Appends a token to the row; the event says what became readable and whether the answer ends here. What fails in it, such as a
        grammar, ends this answer and no other: those of the same step have their tokens, too."""
        try:
            return self._taken(chosen)
        except Exception:
            log.exception("answer %d of request %s cannot go on, and ends", self.row.index, self.row.request_id)
            return self._event(Chosen(chosen.token), "", "error", None)

    def _taken(self, chosen: Chosen) -> TokenEvent:
        row, token = self.row, chosen.token
        if token == NO_TOKEN:
            return self._event(chosen, self._held, "error", None)
        row.output.append(token)
        row.tokens.append(token)
        complete = row.constraint is not None and row.constraint.accept(token)
        finish: FinishReason = "length" if row.constraint is not None and row.constraint.is_broken else "stop"
        early = len(row.output) < self._least
        if token in self._ends and not early:
            keep = row.params.include_stop_str_in_output and token not in self._eos
            text = self._held + (self._detokenizer.add(token) if keep else "") + self._detokenizer.finish()
            return self._event(chosen, text, finish, None if token in self._eos else token)
        if token in self._hidden and not early:
            stop = self._hidden[token]
            shown = stop if row.params.include_stop_str_in_output else ""
            return self._event(chosen, self._held + self._detokenizer.finish() + shown, finish, stop)
        text = self._held + self._detokenizer.add(token)
        if self._stops and not early and (found := _first(text, self._stops)) is not None:
            place, stop = found
            end = place + len(stop) if row.params.include_stop_str_in_output else place
            return self._event(chosen, text[:end], "stop", stop)
        if complete or len(row.tokens) >= row.last:
            return self._event(chosen, text + self._detokenizer.finish(), finish if complete else "length", None)
        if self._stops:
            safe = len(text) - _open_stop(text, self._stops)
            text, self._held = text[:safe], text[safe:]
        return self._event(chosen, text, None, None)

    def _event(self, chosen: Chosen, text: str, finish: FinishReason | None, stop: str | int | None) -> TokenEvent:
        row = self.row
        cached, logprobs = row.cached or 0, None
        if chosen.top is not None:
            logprobs = {token: Logprob(value, rank, self._tokenizer.token_text(token)) for token, value, rank in chosen.top}
        told = self._reuse
        if told is None or (told.device, told.rounded) != (cached, row.rounded) or told.miss is not row.miss or told.tiers is not row.tiers:
            modules, repaired = self._modules
            held = min(modules, row.held)
            told = self._reuse = Reuse(cached, row.miss, modules, held, repaired, row.tiers, row.truncated, row.rounded)
        return TokenEvent(
            row.request_id,
            row.index,
            chosen.token,
            text,
            logprobs,
            finish,
            stop,
            cached,
            len(row.prompt),
            told,
            row.waited,
            row.scored,
            row.others,
        )


def _first(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The stop string that begins earliest, and where."""
    found = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    return min(found, default=None)


def _open_stop(text: str, stops: Sequence[str]) -> int:
    """The length of the longest end of the text that a stop string begins with."""
    return max((n for stop in stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])), default=0)
