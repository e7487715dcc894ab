"""From tokens to bodies: the answers of one request, whole or piece by piece, and the account of what was reused for them."""

import codecs
import time
from collections.abc import Container, Sequence
from typing import Literal, get_args

from ..engine import request
from ..engine.pins import Pin
from ..engine.request import Logprob, Reuse, TokenEvent, Truncated
from ..engine.tools import Piece, Stream
from .history import Drift
from .logprobs import Scored, Spell, chat_logprobs, text_logprobs
from .metrics import Metrics, Source
from .prompts import Asked, Prompt
from .replies import (
    Call,
    CallDelta,
    ChatChunk,
    ChatCompletion,
    ChatFinish,
    Delta,
    Envelope,
    How,
    MissReport,
    PandoReport,
    PinReply,
    TextCompletion,
    TextFinish,
    TruncatedReport,
    Usage,
    call,
    chat_choice,
    chat_delta,
    text_choice,
    usage,
)
from .service import Ticket

TIERS: tuple[Source, ...] = ("host", "disk", "remote")
ADVICE = {
    "cold": "nothing of this prompt was seen before",
    "diverged": "what is cached goes on differently from this token on; put what changes behind what does not",
    "lost": "it was kept below the device and could not be read back, or a tier did not answer; see pando_store_* and the log",
    "evicted": "it was cached, and its pages were needed; pin it, raise --kv-cache-tokens, or keep more below the device",
    "expired": "it was cached, and nobody used it for longer than --ttl",
    "slow": "it is kept below the device, from where loading takes longer than computing; see pando_store_recomputed_tokens_total",
    "other_tenant": "it was cached under another cache_salt; use the same one to share it",
    "too_short": "a prompt of one token is always computed",
    "off": "reuse was ruled out: prefix caching is off, or the prompt's logprobs were asked for",
}


class Account:
    """What one request cost and reused."""

    def __init__(self, ticket: Ticket, session: str | None, metrics: Metrics) -> None:
        self._ticket, self._session, self._metrics = ticket, session, metrics
        self.reuse: dict[int, Reuse] = {}  # by prompt
        self.tokens: dict[tuple[int, int], int] = {}  # generated, by prompt and answer
        self.pin: PinReply | None = None
        self._open: dict[tuple[int, int], tuple[float, float]] = {}  # when an answer that has not ended got its first token, and its last
        self._waited, self._rounded = 0.0, False

    def take(self, place: int, event: TokenEvent) -> None:
        answer = place, event.index
        now = time.perf_counter()
        if place not in self.reuse:
            self.reuse[place] = event.reuse
            self._waited = max(self._waited, event.waited)
            if not self.tokens:
                self._metrics.first_token((self._ticket.first or now) - self._ticket.arrived)
                self._metrics.queued(event.waited)
            miss = event.reuse.miss
            self._metrics.prompt(_sources(event.reuse, event.num_prompt_tokens), None if miss is None else miss.reason)
        self._rounded |= event.reuse.rounded  # also an answer that was interrupted, and went on from what was kept of it
        self.tokens[answer] = self.tokens.get(answer, 0) + 1
        self._open[answer] = self._open.get(answer, (now, now))[0], now
        if event.finish_reason is not None:
            self._end(answer)

    def close(self) -> None:
        """Counts what was answered before the client left or the request was given up."""
        for answer in list(self._open):
            self._end(answer)

    def _end(self, answer: tuple[int, int]) -> None:
        first, last = self._open.pop(answer)
        self._metrics.answer(self.tokens[answer], last - first)

    def hold(self, pin: Pin | None, ttl: float) -> None:
        if pin is not None:
            self.pin = {"id": pin.pin_id, "tokens": pin.tokens, "expires_at": int(time.time() + ttl)}

    def usage(self) -> Usage:
        prompts = self._ticket.asked.prompts
        modules = sum(prompt.bound.module_tokens for prompt in prompts if prompt.bound is not None)
        told = 0 if self._ticket.asked.silent else sum(self.tokens.values())
        return usage(self._asked(), told, self._cached(), modules, self._kind())

    def report(self) -> PandoReport:
        prompts, cached = self._ticket.asked.prompts, self._cached()
        missed = [(prompts[place], reuse) for place, reuse in sorted(self.reuse.items()) if reuse.miss is not None]
        first = self._ticket.first
        sources = [_sources(reuse, 0) for reuse in self.reuse.values()]
        came = {source: sum(each[source] for each in sources) for source in get_args(Source)}
        return {
            "reuse": self._kind() if cached or self._kind() != "exact" else "none",
            "tokens": {**came, "computed": self._asked() - cached},  # type: ignore[typeddict-item]  # every source has its key
            "repaired": sum(reuse.repaired for reuse in self.reuse.values()),
            "truncated": _truncated([reuse.truncated for reuse in self.reuse.values() if reuse.truncated is not None]),
            "miss": _miss(*missed[0]) if missed else None,
            "time_to_first_token_ms": None if first is None else round((first - self._ticket.arrived) * 1e3, 3),
            "queue_ms": round(self._waited * 1e3, 3),
            "session_id": self._session,
            "pin": self.pin,
        }

    def _cached(self) -> int:
        return sum(reuse.device for reuse in self.reuse.values())

    def _asked(self) -> int:
        """Tokens of the prompts, without those that were dropped."""
        whole = sum(len(prompt.tokens) for prompt in self._ticket.asked.prompts)
        return whole - sum(reuse.truncated.dropped for reuse in self.reuse.values() if reuse.truncated is not None)

    def _kind(self) -> How:
        """What makes it an approximation, if anything does: of several, what matters most."""
        if any(reuse.truncated is not None and reuse.truncated.moved for reuse in self.reuse.values()):
            return "truncated"
        if any(reuse.modules for reuse in self.reuse.values()):
            return "modular"
        return "rounded" if self._rounded else "exact"


def _sources(reuse: Reuse, total: int) -> dict[Source, int]:
    """Where a prompt's tokens came from, each of them once: from a tier below the device, or from the device, as any prefix or as a module
    that had been encoded behind something else. Of what came up and was computed again, by a repair, nobody knows which it was."""
    left, came = reuse.device, dict[Source, int]()
    found: tuple[tuple[Source, int], ...] = (*((tier, reuse.tiers.get(tier, 0)) for tier in TIERS), ("module", reuse.held))
    for source, count in found:
        came[source] = min(count, left)
        left -= came[source]
    return {"computed": total - reuse.device, "device": left, **came}


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


class _Answer:
    """One answer so far."""

    def __init__(self, asked: Asked, ends: Container[int]) -> None:
        """`ends`: the tokens by which the model itself ends an answer."""
        self._ends, self._one_call = ends, asked.one_call
        self.stream = Stream(asked.form) if asked.form is not None else None
        self.text = ""
        self.tokens: list[int] = []
        self.scored: list[Scored] = []
        self.calls: list[Call] = []
        self.begun = False
        self.lead = 0  # characters before the text that its first tokens spell all the same, below 0
        self._placed, self._read = 0, codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, event: TokenEvent) -> tuple[Piece, list[Scored]]:
        """What became clear with a token, and its logprob where that was asked for."""
        self.tokens.append(event.token)
        text = event.text
        calls: tuple[request.Call, ...] = ()
        if self.stream is not None:
            piece = self.stream.feed(text)
            is_cut = event.finish_reason == "length" or isinstance(event.stop_reason, str)
            rest = self.stream.finish(cut=is_cut) if event.finish_reason is not None else Piece()
            text, calls = piece.text + rest.text, piece.calls + rest.calls
            if self._one_call:
                calls = calls[: 1 - len(self.calls)]
        self.text += text
        self.calls += [call(each.id, each.name, each.arguments) for each in calls]
        is_end = event.finish_reason == "stop" and event.stop_reason is None and event.token in self._ends
        new = [Scored.chosen(event.token, event.logprobs)] if event.logprobs is not None and not is_end else []
        self.scored += new
        return Piece(text, calls), new

    def place(self, scored: Sequence[Scored], spell: Spell) -> int:
        """How many characters stand before the next of these tokens: not those passed on so far, of which some may be held back."""
        start = self.lead + self._placed
        self._placed += sum(len(self._read.decode(spell(one.token))) for one in scored)
        return start

    def finish(self, reason: str) -> ChatFinish:
        if reason == "length" and not (self._one_call and self.calls):  # what was cut off may have been one more call
            return "length"
        return "tool_calls" if self.calls else "stop"


class ChatAnswers:
    def __init__(
        self, asked: Asked, envelope: Envelope, account: Account, spell: Spell, ends: Container[int], *, top: int, tells_tokens: bool
    ) -> None:
        self.account = account
        self._asked, self._envelope, self._spell, self._top, self._tells_tokens = asked, envelope, spell, top, tells_tokens
        self.answers = [_Answer(asked, ends) for _ in range(asked.params.n)]
        self._reasons: list[ChatFinish] = ["stop"] * asked.params.n

    def take(self, events: Sequence[tuple[int, TokenEvent]]) -> list[ChatChunk]:
        """The events that a stream sends: one for each token that brings something."""
        sent = []
        for place, event in events:
            prompt = self._asked.prompts[0].tokens if self._tells_tokens and not self.account.tokens else None
            self.account.take(place, event)
            answer = self.answers[event.index]
            piece, scored = answer.take(event)
            if event.finish_reason is not None:
                self._reasons[event.index] = answer.finish(event.finish_reason)
            delta: Delta = {} if answer.begun else {"role": "assistant", "content": ""}
            answer.begun = True
            if piece.text:
                delta["content"] = piece.text
            if piece.calls:
                delta["tool_calls"] = [_call_delta(each.index, each.id, each.name, each.arguments) for each in piece.calls]
            finish = self._reasons[event.index] if event.finish_reason is not None else None
            if delta or scored or finish or self._tells_tokens:
                logprobs = chat_logprobs(scored, self._top, self._spell) if scored else None
                choice = chat_delta(event.index, delta, finish, logprobs, [event.token] if self._tells_tokens else None)
                sent.append(self._envelope.chat_chunk([choice], prompt_token_ids=prompt))
        return sent

    def whole(self) -> ChatCompletion:
        wanted = self._asked.params.logprobs is not None
        choices = [
            chat_choice(
                index,
                answer.text,
                self._reasons[index],
                answer.calls,
                chat_logprobs(answer.scored, self._top, self._spell) if wanted else None,
                answer.tokens if self._tells_tokens else None,
            )
            for index, answer in enumerate(self.answers)
        ]
        prompt = self._asked.prompts[0].tokens if self._tells_tokens else None
        return self._envelope.chat(choices, self.account.usage(), self.account.report(), prompt)

    @property
    def outcome(self) -> Literal["stop", "length", "tool_calls"]:
        return self._reasons[0]

    def message(self) -> dict[str, object]:
        """The first answer, as a client sends it back."""
        answer = self.answers[0]
        content: dict[str, object] = {"role": "assistant", "content": answer.text}
        return {**content, "tool_calls": answer.calls} if answer.calls else content


def _call_delta(index: int, call_id: str, name: str, arguments: str) -> CallDelta:
    return {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class TextAnswers:
    def __init__(
        self,
        asked: Asked,
        envelope: Envelope,
        account: Account,
        spell: Spell,
        ends: Container[int],
        *,
        echoes: Sequence[str],
        tells_tokens: bool,
    ) -> None:
        """`echoes`: a prompt's text for each, or none."""
        self.account = account
        self._asked, self._envelope, self._spell, self._echoes, self._tells_tokens = asked, envelope, spell, echoes, tells_tokens
        self.answers = [_Answer(asked, ends) for _ in range(asked.params.n * len(asked.prompts))]
        self._reasons: list[TextFinish] = ["stop"] * len(self.answers)

    def take(self, events: Sequence[tuple[int, TokenEvent]]) -> list[TextCompletion]:
        """The events that a stream sends: one for each token that brings something."""
        sent = []
        for place, event in events:
            self.account.take(place, event)
            index = place * self._asked.params.n + event.index
            answer = self.answers[index]
            first = not answer.tokens
            if first:
                self._begin(answer, place, event)
            piece, scored = (Piece(), []) if self._asked.silent else answer.take(event)
            said = answer.text if first else piece.text
            scored = answer.scored if first else scored
            if event.finish_reason is not None:
                self._reasons[index] = "length" if event.finish_reason == "length" or self._asked.silent else "stop"
            finish = self._reasons[index] if event.finish_reason is not None else None
            if said or scored or finish or self._tells_tokens:
                logprobs = text_logprobs(scored, self._spell, answer.place(scored, self._spell)) if scored else None
                prompt = self._asked.prompts[place].tokens if first and self._tells_tokens else None
                tokens = ([] if self._asked.silent else [event.token]) if self._tells_tokens else None
                sent.append(self._envelope.text([text_choice(index, said, finish, logprobs, tokens, prompt)]))
        return sent

    def _begin(self, answer: _Answer, place: int, event: TokenEvent) -> None:
        """An echoed prompt stands before the answer, and its logprobs before the answer's."""
        if not self._echoes:
            return
        answer.text = self._echoes[place]
        if event.prompt_logprobs is not None:
            answer.lead = min(0, len(answer.text) - _characters(self._asked.prompts[place].tokens, self._spell))
            first, *tokens = self._asked.prompts[place].tokens
            tops = [{token: Logprob(value, rank) for token, value, rank in top} for top in event.prompt_top]
            others = zip(tokens, event.prompt_logprobs, tops, strict=True)
            answer.scored = [Scored(first, None, {}), *(Scored(*other) for other in others)]

    def whole(self) -> TextCompletion:
        wanted = self._asked.params.logprobs is not None
        choices = []
        for index, answer in enumerate(self.answers):
            logprobs = text_logprobs(answer.scored, self._spell, answer.lead) if wanted else None
            tokens = answer.tokens if self._tells_tokens else None
            prompt = self._asked.prompts[index // self._asked.params.n].tokens if self._tells_tokens else None
            choices.append(text_choice(index, answer.text, self._reasons[index], logprobs, tokens, prompt))
        return self._envelope.text(choices, self.account.usage(), self.account.report())

    @property
    def outcome(self) -> Literal["stop", "length"]:
        return self._reasons[0]


def _characters(tokens: Sequence[int], spell: Spell) -> int:
    """That they spell: with the token that begins a sequence, and the first space, which are no part of the text that was sent."""
    return len(b"".join(map(spell, tokens)).decode(errors="replace"))
