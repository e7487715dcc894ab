"""From tokens to bodies: the answers of one request, whole or piece by piece."""

import codecs
from collections.abc import Container, Sequence
from functools import cached_property, partial
from typing import Any, Literal

from ..engine.request import Logprob, TokenEvent
from ..engine.tools import Piece, Stream
from .account import Account
from .failures import FailureBody
from .logprobs import Scored, Spell, chat_logprobs, text_logprobs
from .prompts import Asked
from .replies import (
    DONE,
    Around,
    Call,
    ChatChunk,
    ChatCompletion,
    ChatFinish,
    Delta,
    Envelope,
    PandoReport,
    TextCompletion,
    TextFinish,
    Usage,
    call,
    chat_choice,
    chat_delta,
    text_choice,
)
from .ticket import Arrival


class _Answer:
    """One answer so far."""

    def __init__(self, asked: Asked, ends: Container[int], hidden: Container[int] = ()) -> None:
        """`ends`: the tokens by which the model itself ends an answer; `hidden`: those that the text leaves out."""
        self._ends, self._hidden, self._one_call = ends, hidden, asked.one_call
        self.stream = Stream(asked.form) if asked.form is not None else None
        self._texts: list[str] = []
        self.tokens: list[int] = []
        self.scored: list[Scored] = []
        self.calls: list[Call] = []
        self.begun = False
        self.lead = 0  # characters before the text that its first tokens spell all the same, below 0
        self._placed, self._read = 0, codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def text(self) -> str:
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    def say(self, text: str) -> None:
        self._texts.append(text)

    def take(self, event: TokenEvent) -> tuple[Piece, list[Scored]]:
        """What became clear with a token, and its logprob where that was asked for."""
        self.tokens.append(event.token)
        piece = Piece(event.text) if self.stream is None else self._parsed(self.stream, event)
        self.say(piece.text)
        if event.logprobs is None:
            return piece, []
        is_end = event.finish_reason == "stop" and event.stop_reason is None and event.token in self._ends
        new = [Scored.chosen(event.token, event.logprobs, is_shown=event.token not in self._hidden)] if not is_end else []
        self.scored += new
        return piece, new

    def _parsed(self, stream: Stream, event: TokenEvent) -> Piece:
        piece = stream.feed(event.text)
        is_cut = event.finish_reason == "length" or isinstance(event.stop_reason, str)
        rest = stream.finish(cut=is_cut) if event.finish_reason is not None else Piece()
        calls = piece.calls + rest.calls
        if self._one_call:
            calls = calls[: 1 - len(self.calls)]
        self.calls += [call(each.id, each.name, each.arguments) for each in calls]
        return Piece(piece.text + rest.text, calls)

    def place(self, scored: Sequence[Scored], spell: Spell) -> int:
        """How many characters stand before the next of these tokens: not those passed on so far, of which some may be held back."""
        start = self.lead + self._placed
        self._placed += sum(len(self._read.decode(one.text(spell))) for one in scored)
        return start

    def finish(self, reason: str) -> ChatFinish:
        if reason == "length" and not (self._one_call and self.calls):  # what was cut off may have been one more call
            return "length"
        return "tool_calls" if self.calls else "stop"


class TurnAnswers:
    """The answers to a conversation."""

    def __init__(self, asked: Asked, envelope: Envelope, account: Account, spell: Spell, ends: Container[int], *, top: int) -> None:
        """`top`: likeliest tokens that are told beside each, where logprobs are."""
        self.account = account
        self._asked, self._envelope, self._spell, self._top = asked, envelope, spell, top
        self.answers = [_Answer(asked, ends) for _ in range(asked.params.n)]
        self._reasons: list[ChatFinish] = ["stop"] * asked.params.n

    def _take(self, place: int, event: TokenEvent, now: float) -> tuple[Piece, list[Scored]]:
        self.account.take(place, event, now)
        answer = self.answers[event.index]
        found = answer.take(event)
        if event.finish_reason is not None:
            self._reasons[event.index] = answer.finish(event.finish_reason)
        return found

    @property
    def outcome(self) -> Literal["stop", "length", "tool_calls"]:
        return self._reasons[0]

    def message(self) -> dict[str, object]:
        """The first answer, as a client sends it back."""
        answer = self.answers[0]
        content: dict[str, object] = {"role": "assistant", "content": answer.text}
        return {**content, "tool_calls": answer.calls} if answer.calls else content


class Chunks:
    """How the streams of chats and of completions end."""

    account: Account
    _envelope: Envelope

    def _last(self, usage: Usage, pando: PandoReport) -> object:
        """One more event, where usage is told."""
        raise NotImplementedError

    def opening(self) -> bytes:
        """What is sent before any token."""
        return b""

    def conclude(self, sent: list[Any]) -> None:
        """Adds to the events of the last tokens what was reused."""
        if self._envelope.tells_usage:
            sent.append(self._last(self.account.usage(), self.account.report()))
        elif sent:
            assert not isinstance(sent[-1], bytes)  # it says how the answer ended
            sent[-1]["pando"] = self.account.report()

    def end(self) -> bytes:
        return DONE

    def failed(self, failure: FailureBody) -> FailureBody:
        """In place of the end."""
        return failure


class ChatAnswers(TurnAnswers, Chunks):
    def __init__(
        self, asked: Asked, envelope: Envelope, account: Account, spell: Spell, ends: Container[int], *, top: int, tells_tokens: bool
    ) -> None:
        super().__init__(asked, envelope, account, spell, ends, top=top)
        self._tells_tokens = tells_tokens

    @cached_property
    def _around(self) -> list[Around]:
        return [Around(partial(self._plain, index)) for index in range(len(self.answers))]

    def _last(self, usage: Usage, pando: PandoReport) -> ChatChunk:
        return self._envelope.chat_chunk([], usage, pando)

    def _plain(self, index: int, text: str) -> ChatChunk:
        return self._envelope.chat_chunk([chat_delta(index, {"content": text})])

    def take(self, arrived: Sequence[Arrival]) -> None:
        for place, event, now in arrived:
            self._take(place, event, now)

    def events(self, arrived: Sequence[Arrival]) -> list[ChatChunk | bytes]:
        """The same, and the events that a stream sends of it: one for each token that brings something. What has text and nothing else is
        written already."""
        sent: list[ChatChunk | bytes] = []
        for place, event, now in arrived:
            prompt = self._asked.prompts[0].tokens if self._tells_tokens and not self.account.tokens else None
            piece, scored = self._take(place, event, now)
            answer = self.answers[event.index]
            if answer.begun and event.finish_reason is None and not (scored or piece.calls or self._tells_tokens):
                if piece.text:
                    sent.append(self._around[event.index].event(piece.text))
                continue
            delta: Delta = {} if answer.begun else {"role": "assistant", "content": ""}
            answer.begun = True
            if piece.text:
                delta["content"] = piece.text
            if piece.calls:
                delta["tool_calls"] = [{"index": each.index, **call(each.id, each.name, each.arguments)} for each in piece.calls]
            finish = self._reasons[event.index] if event.finish_reason is not None else None
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


class TextAnswers(Chunks):
    def __init__(
        self,
        asked: Asked,
        envelope: Envelope,
        account: Account,
        spell: Spell,
        ends: Container[int],
        *,
        special: Container[int],
        echoes: Sequence[str],
        tells_tokens: bool,
    ) -> None:
        """`special`: tokens that a text has only if that is asked for; `echoes`: a prompt's text for each, or none."""
        self.account = account
        self._asked, self._envelope, self._spell, self._echoes, self._tells_tokens = asked, envelope, spell, echoes, tells_tokens
        hidden = special if asked.params.skip_special_tokens else ()
        self.answers = [_Answer(asked, ends, hidden) for _ in range(asked.params.n * len(asked.prompts))]
        self._reasons: list[TextFinish] = ["stop"] * len(self.answers)

    @cached_property
    def _around(self) -> list[Around]:
        return [Around(partial(self._plain, index)) for index in range(len(self.answers))]

    def _last(self, usage: Usage, pando: PandoReport) -> TextCompletion:
        return self._envelope.text([], usage, pando)

    def _plain(self, index: int, text: str) -> TextCompletion:
        return self._envelope.text([text_choice(index, text)])

    def take(self, arrived: Sequence[Arrival]) -> None:
        for place, event, now in arrived:
            self._take(place, event, now)

    def events(self, arrived: Sequence[Arrival]) -> list[TextCompletion | bytes]:
        """As in a chat."""
        sent: list[TextCompletion | bytes] = []
        for place, event, now in arrived:
            index = place * self._asked.params.n + event.index
            answer = self.answers[index]
            first = not answer.begun
            piece, scored = self._take(place, event, now)
            if not (first or event.finish_reason is not None or scored or self._tells_tokens):
                if piece.text:
                    sent.append(self._around[index].event(piece.text))
                continue
            said = answer.text if first else piece.text
            scored = answer.scored if first else scored
            finish = self._reasons[index] if event.finish_reason is not None else None
            if said or scored or finish or self._tells_tokens:
                logprobs = text_logprobs(scored, self._spell, answer.place(scored, self._spell)) if scored else None
                prompt = self._asked.prompts[place].tokens if first and self._tells_tokens else None
                tokens = ([] if self._asked.silent else [event.token]) if self._tells_tokens else None
                sent.append(self._envelope.text([text_choice(index, said, finish, logprobs, tokens, prompt)]))
        return sent

    def _take(self, place: int, event: TokenEvent, now: float) -> tuple[Piece, list[Scored]]:
        self.account.take(place, event, now)
        index = place * self._asked.params.n + event.index
        answer = self.answers[index]
        if not answer.begun:
            self._begin(answer, place, event)
        if event.finish_reason is not None:
            self._reasons[index] = "length" if event.finish_reason == "length" or self._asked.silent else "stop"
        return (Piece(), []) if self._asked.silent else answer.take(event)

    def _begin(self, answer: _Answer, place: int, event: TokenEvent) -> None:
        """An echoed prompt stands before the answer, and its logprobs before the answer's."""
        answer.begun = True
        if not self._echoes:
            return
        answer.say(self._echoes[place])
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
