"""What one request cost and reused, and why not more."""

import time
from collections.abc import Sequence
from typing import get_args

from ..engine.pins import Pin
from ..engine.request import How, Reuse, Source, TokenEvent, Truncated
from .history import Drift
from .metrics import Metrics
from .prompts import Prompt
from .replies import MissReport, PandoReport, PinReply, TruncatedReport, Usage, usage
from .ticket import Ticket

ADVICE = {
    "cold": "nothing of this prompt was seen before",
    "diverged": "the cached tokens differ from this token on; put what changes after what does not",
    "lost": "it was kept below the device and could not be read back, or a tier did not answer; see pando_store_* and the log",
    "evicted": "it was cached, and its pages were needed; pin it, raise --kv-cache-tokens, or keep more below the device",
    "expired": "it was cached, and nobody used it for longer than --ttl",
    "slow": "it is kept below the device, but loading it takes longer than computing it; see pando_store_recomputed_tokens_total",
    "other_tenant": "it was cached under another cache_salt; use the same one to share it",
    "too_short": "a prompt of one token is always computed",
    "off": "reuse was ruled out: prefix caching is off, or the prompt's logprobs were requested",
}


class Account:
    """What one request cost and reused."""

    def __init__(self, ticket: Ticket, session: str | None, metrics: Metrics) -> None:
        self._ticket, self._session, self._metrics = ticket, session, metrics
        self.reuse: dict[int, Reuse] = {}  # by prompt
        self.tokens: dict[tuple[int, int], int] = {}  # generated, by prompt and answer
        self.pin: PinReply | None = None
        self._firsts: dict[tuple[int, int], float] = {}  # when an answer that has not ended got its first token
        self._lasts: dict[tuple[int, int], float] = {}  # and its last
        self._waited, self._rounded = 0.0, False

    def take(self, place: int, event: TokenEvent, now: float) -> None:
        """`now`: when it came."""
        answer = place, event.index
        if place not in self.reuse:
            self._begin(place, event, now)
        self._rounded |= event.reuse.rounded  # also an answer that was interrupted, and went on from what was kept of it
        if answer not in self.tokens:
            self.tokens[answer], self._firsts[answer] = 0, now
        self.tokens[answer] += 1
        self._lasts[answer] = now
        if event.finish_reason is not None:
            self._end(answer)

    def _begin(self, place: int, event: TokenEvent, now: float) -> None:
        self.reuse[place] = event.reuse
        self._waited = max(self._waited, event.waited)
        if not self.tokens:
            self._metrics.first_token((self._ticket.first or now) - self._ticket.arrived)
            self._metrics.queued(event.waited)
        miss = event.reuse.miss
        self._metrics.prompt(event.reuse.sources(event.num_prompt_tokens), None if miss is None else miss.reason)

    def close(self) -> None:
        """Counts what was answered before the client left or the request was given up."""
        for answer in list(self._firsts):
            self._end(answer)

    def _end(self, answer: tuple[int, int]) -> None:
        self._metrics.answer(self.tokens[answer], self._lasts.pop(answer) - self._firsts.pop(answer))

    def hold(self, pin: Pin | None, ttl: float) -> None:
        if pin is not None:
            self.pin = {"id": pin.pin_id, "tokens": pin.tokens, "expires_at": int(time.time() + ttl)}

    def usage(self) -> Usage:
        prompts = self._ticket.asked.prompts
        modules = sum(prompt.bound.module_tokens for prompt in prompts if prompt.bound is not None)
        told = 0 if self._ticket.asked.silent else sum(self.tokens.values())
        return usage(self._asked(), told, self._cached(), modules, self._kind())

    def report(self) -> PandoReport:
        cached = self._cached()
        sources = [reuse.sources(0) for reuse in self.reuse.values()]
        came = {source: sum(each[source] for each in sources) for source in get_args(Source)}
        return {
            "reuse": self._kind() if cached or self._kind() != "exact" else "none",
            "tokens": {**came, "computed": self._asked() - cached},  # type: ignore[typeddict-item]  # every source has its key
            "repaired": sum(reuse.repaired for reuse in self.reuse.values()),
            "truncated": _truncated([reuse.truncated for reuse in self.reuse.values() if reuse.truncated is not None]),
            "miss": self.miss(),
            "time_to_first_token_ms": self.first_token_ms(),
            "queue_ms": round(self._waited * 1e3, 3),
            "session_id": self._session,
            "pin": self.pin,
        }

    def miss(self) -> MissReport | None:
        missed = (place for place, reuse in sorted(self.reuse.items()) if reuse.miss is not None)
        place = next(missed, None)
        return None if place is None else _miss(self._ticket.asked.prompts[place], self.reuse[place])

    def first_token_ms(self) -> float | None:
        return None if self._ticket.first is None else round((self._ticket.first - self._ticket.arrived) * 1e3, 3)

    def _cached(self) -> int:
        return sum(reuse.device for reuse in self.reuse.values())

    def _asked(self) -> int:
        """Tokens of the prompts, without those that were dropped."""
        whole = sum(len(prompt.tokens) for prompt in self._ticket.asked.prompts)
        return whole - sum(reuse.truncated.dropped for reuse in self.reuse.values() if reuse.truncated is not None)

    def _kind(self) -> How:
        """Of several prompts, the coarsest."""
        found: list[How] = [reuse.how for reuse in self.reuse.values()]
        return max([*found, "rounded" if self._rounded else "exact"], key=get_args(How).index)


def _truncated(found: Sequence[Truncated]) -> TruncatedReport | None:
    if not found:
        return None
    reasons = [each.recomputed for each in found if each.recomputed is not None]
    return {
        "dropped_tokens": sum(each.dropped for each in found),
        "moved_tokens": sum(each.moved for each in found),
        "recomputed": reasons[0] if reasons else None,
    }


def _miss(prompt: Prompt, reuse: Reuse) -> MissReport:
    assert reuse.miss is not None
    reason, token = reuse.miss.reason, reuse.miss.token
    token = token if reuse.truncated is None else reuse.truncated.whole(token)
    drift: Drift | None = prompt.drift
    if drift is not None and token > drift.token:  # something else that is cached covers it
        drift = None
    advice, module = ADVICE[reason], prompt.module_of(token)
    if reason == "cold" and module is not None:
        advice = f"{module} had not been encoded yet; register its schema with eager=true to have that done before anyone asks"
    return {
        "reason": reason,
        "token": token,
        "message": prompt.message_of(token),
        "drift": drift.kind if drift else None,
        "detail": drift.detail if drift else advice,
    }
