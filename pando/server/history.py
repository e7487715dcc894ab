"""Why a conversation's next turn could not reuse what its last one left.

The engine reuses tokens; a client sends messages. Between two turns the tokens of the same messages can change without anybody noticing:
the chat template renders earlier turns differently, or an answer's text becomes other tokens than the ones that were generated. History
remembers what was answered, in tokens and under digests of the messages, and names such a drift.
"""

import hashlib
import json
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from threading import Lock
from typing import Any, Literal

from ..kv.latest import Latest
from ..kv.segment import shared_length

DriftKind = Literal["template_rewrote_history", "answer_retokenised", "history_changed"]
Message = Mapping[str, Any]

DIGEST_BYTES = 32
STRIDE = 1024  # tokens compared at once


@dataclass(frozen=True)
class Drift:
    """The first token, and where it is known the message, from which on a turn no longer continues the one before."""

    kind: DriftKind
    token: int
    message: int | None = None

    @property
    def detail(self) -> str:
        place = f"from token {self.token}" + ("" if self.message is None else f" (message {self.message})") + " on"
        if self.kind == "template_rewrote_history":
            return (
                f"the chat template renders the same earlier messages differently than in the last turn, {place}; keep the tools and "
                "anything the template inserts (a date, an option) the same, or use a template that leaves earlier turns as they were"
            )
        if self.kind == "answer_retokenised":
            return (
                f"the answer's text, tokenised again, gives other tokens than those generated, {place}; nothing is wrong with the request: "
                "those tokens are computed once more, and the turns after this one reuse them"
            )
        return (
            f"the messages are not those of this session's last turn, {place}; send earlier messages and answers back unchanged, "
            "spaces and line ends included, and add new ones at the end"
        )


@dataclass(frozen=True)
class Turn:
    """What one answer left behind."""

    chain: bytes  # a digest for each message, the answer last; each one also stands for the messages before it
    tokens: "array[int]"  # the prompt and what was generated
    prompt_tokens: int

    @property
    def weight(self) -> int:
        """Memory, in tokens."""
        return len(self.tokens) + len(self.chain) // self.tokens.itemsize


class History:
    """The turns that were answered last. Every method may be called from any thread; none changes or keeps what it is given.

    `decode` turns tokens into text, without special tokens. The oldest turns are forgotten when there are more than `max_conversations`,
    or when together they hold more than `max_tokens`; a turn larger than that is never kept.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], max_conversations: int = 1024, max_tokens: int = 4_000_000) -> None:
        self._decode = decode
        self._max_conversations = max_conversations
        self._max_tokens = max_tokens
        self._turns: OrderedDict[bytes, Turn] = OrderedDict()  # by the last digest of its chain; oldest first
        self._sessions = Latest[tuple[bytes, str], bytes](max_conversations)  # each session's last turn, which may be forgotten
        self._weight = 0
        self._lock = Lock()

    @property
    def turns(self) -> int:
        """How many are kept."""
        return len(self._turns)

    @property
    def weight(self) -> int:
        """Memory held, in tokens."""
        return self._weight

    def remember(
        self, tenant: bytes, messages: Sequence[Message], answer: Message, tokens: Sequence[int], prompt_tokens: int, session: str | None
    ) -> None:
        """Keeps a turn: `tokens` are those of the prompt, `prompt_tokens` many, and those that were generated."""
        turn = Turn(_chain(tenant, [*messages, answer]), array("i", tokens), prompt_tokens)
        if turn.weight > self._max_tokens:
            return
        name = turn.chain[-DIGEST_BYTES:]
        with self._lock:
            if name in self._turns:
                self._drop(name)
            self._turns[name] = turn
            self._weight += turn.weight
            if session is not None:
                self._sessions.pop((tenant, session), None)
                self._sessions[tenant, session] = name
            while len(self._turns) > self._max_conversations or self._weight > self._max_tokens:
                self._drop(next(iter(self._turns)))

    def explain(self, tenant: bytes, messages: Sequence[Message], tokens: Sequence[int], session: str | None) -> Drift | None:
        """How this prompt drifted from what was remembered; None where it simply continues, or nothing is known of it.

        The message of a rewritten history is left open: `message_at` finds it.
        """
        chain = _chain(tenant, messages)
        with self._lock:
            known, turn = self._longest(chain)
            last = self._last(tenant, session)
        prompt = array("i", tokens)
        if turn is not None and (drift := self._compare(turn, messages[known - 1], known - 1, prompt)):
            return drift
        # What follows the known part is history only if an answer is in it; otherwise this is a new question, or a new conversation.
        if last is not None and any(message.get("role") == "assistant" for message in messages[known:]):
            return _changed(last, chain, known, prompt)
        return None

    def _longest(self, chain: bytes) -> tuple[int, Turn | None]:
        """The longest beginning of these messages that is a remembered conversation with its answer."""
        for end in range(len(chain), 0, -DIGEST_BYTES):
            if (turn := self._turns.get(chain[end - DIGEST_BYTES : end])) is not None:
                return end // DIGEST_BYTES, turn
        return 0, None

    def _last(self, tenant: bytes, session: str | None) -> Turn | None:
        name = None if session is None else self._sessions.get((tenant, session))
        return None if name is None else self._turns.get(name)

    def _compare(self, turn: Turn, answer: Message, place: int, prompt: "array[int]") -> Drift | None:
        token = _first_difference(turn.tokens, prompt)
        if token is None:
            return None
        if token < turn.prompt_tokens:
            return Drift("template_rewrote_history", token)
        generated = turn.tokens[turn.prompt_tokens :]
        text, said = self._text(generated), _plain(answer)
        if said is not None and text.startswith(said):
            agreed = self._text(generated[: token + 1 - turn.prompt_tokens])
            if not said.startswith(agreed.rstrip("\ufffd")):  # half a character decodes to that
                return None  # a stop string was generated and is no part of the answer; nothing of what was said is lost
            text = said
        # A token of text stands for a byte at least, so that many tokens hold the answer again; one more for a first space.
        again = self._text(prompt[turn.prompt_tokens : turn.prompt_tokens + len(text.encode()) + 1])
        return Drift("answer_retokenised" if again.startswith(text) else "template_rewrote_history", token, place)

    def _text(self, tokens: "array[int]") -> str:
        """Some tokenizers drop the first space when they decode, so an answer may be known with or without it."""
        return self._decode(tokens).removeprefix(" ")

    def _drop(self, name: bytes) -> None:
        self._weight -= self._turns.pop(name).weight


def message_starts(text: str, contents: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[int]:
    """The first token of each message in a rendered conversation; `offsets` says which characters each token stands for.

    A message whose content is not found, because it is empty or the template left it out, starts where the one before it does. One whose
    content is also a word of the template's own, such as a role, may be found there, a little before its place.
    """
    ends = list(accumulate((end for _, end in offsets), max))  # tokens added around the text say (0, 0), wherever they stand
    starts: list[int] = []
    searched = 0
    for content in contents:
        for wanted in filter(None, (content, content.strip())):  # templates trim
            if (place := text.find(wanted, searched)) >= 0:
                starts.append(bisect_right(ends, place))
                searched = place + len(wanted)
                break
        else:
            starts.append(starts[-1] if starts else 0)
    return starts


def message_at(starts: Sequence[int], token: int) -> int:
    """The message a token belongs to: what the template writes after a content counts with it. Before the first content, the first."""
    after = bisect_right(starts, token)
    return bisect_left(starts, starts[after - 1]) if after else 0  # of messages that start together, the first has the content


def _changed(last: Turn, chain: bytes, known: int, prompt: "array[int]") -> Drift | None:
    places = range(0, min(len(chain), len(last.chain)), DIGEST_BYTES)
    same = sum(chain[place : place + DIGEST_BYTES] == last.chain[place : place + DIGEST_BYTES] for place in places)  # chained: a prefix
    token = _first_difference(last.tokens, prompt)
    return None if token is None or same == len(places) or same < known else Drift("history_changed", token, same)


def _first_difference(remembered: "array[int]", prompt: "array[int]") -> int | None:
    """The last remembered token does not count: it ends the turn, in a way the template may write differently, and is one token."""
    shared = min(len(remembered) - 1, len(prompt))
    for start in range(0, shared, STRIDE):
        end = min(start + STRIDE, shared)
        if remembered[start:end] != prompt[start:end]:
            return start + shared_length(remembered[start:end], prompt[start:end])
    return None


def _chain(tenant: bytes, messages: Sequence[Message]) -> bytes:
    digest = hashlib.sha256(b"pando history" + tenant).digest()
    digests: list[bytes] = []
    for message in messages:
        digest = hashlib.sha256(digest + _canonical(message).encode()).digest()
        digests.append(digest)
    return b"".join(digests)


def _canonical(message: Message) -> str:
    """One text for every way of writing the same message: what is absent, null and empty are the same, as are text and a list of it."""
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    fields = (message.get("role"), _content(message), calls, message.get("tool_call_id"), message.get("name"))
    return json.dumps([field or None for field in fields], sort_keys=True)


def _content(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or "") for part in content)


def _call(call: Message) -> list[Any]:
    function = call.get("function") or {}
    return [call.get("id"), function.get("name"), _arguments(function.get("arguments"))]


def _arguments(given: Any) -> str:
    """The same for JSON text and for the value it spells."""
    try:
        return json.dumps(json.loads(given) if isinstance(given, str) else given, sort_keys=True)
    except (ValueError, RecursionError):
        return given if isinstance(given, str) else ""  # a value nested as deep as that is not told from another


def _plain(answer: Message) -> str | None:
    """The text of an answer that is text alone; None where tools are called, which the model writes in its own notation."""
    return None if answer.get("tool_calls") else _content(answer).removeprefix(" ")
