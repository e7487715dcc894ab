"""Truncation on the states themselves: a conversation past the window goes on without its oldest part, and nothing of the rest is computed
again.

What is left of a prompt is a list of runs like any other: its first tokens where they were, then what was encoded behind the dropped part,
moved up to them, then what is new. The next turn brings the whole history again. So it is remembered how a history was cut, by the key of
the last page that matters, and a longer one that begins like it is cut alike. When that no longer fits, what was computed behind the runs
is a run itself, and is cut in its turn. Remembered are numbers alone: the tokens come with the history. Where there is a disk, what is
remembered outlives the process. What was made of the latest of them is kept beside the numbers, since it takes a while: every cut is made
again, and every token of it named.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from ..errors import InvalidPrompt, PromptTooLong
from ..kv.latest import Latest
from ..kv.run import Origin, Run
from ..kv.segment import Key, Lineage, extend_keys, page_key, shared_length
from ..kv.stem import Stem
from ..kv.tree import PrefixTree
from .below import WORTH_KEEPING, Below, Passage
from .imports import find, wants
from .layout import Layout, Move
from .request import Miss, RecomputeReason, Request, Span, Truncated, Truncation

if TYPE_CHECKING:
    from ..store.notes import Notes

FIRST = 4  # tokens that always stay: attention rests on them, whatever they are
ANSWER = 4  # an answer may count on the tokens that it asks for, but on no more than one in so many of the window
REMEMBERED = 2**15  # histories
READY = 2**20  # tokens of layouts that need not be made again
FORM = b"cut 1"  # of what is remembered
SEAL, SIZE = 32, 4  # bytes
SCORED = "the logprobs of a prompt are those of all its tokens, so nothing of it can be dropped; shorten it yourself"
SYSTEM = ("system", "developer")  # whose messages are no turns

Message = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Cut:
    """A request's prompt, cut, and what to say about it."""

    layout: Layout
    reason: RecomputeReason | None = None  # why nothing of it is moved
    diverges: bool = False  # what is held goes on differently behind the runs

    def request(self, asked: Request) -> Request:
        layout, public = self.layout, asked.public
        if layout.dropped and not layout.runs:
            public = min(public, layout.dropped[0][0])
        own = layout.left(asked.prompt, start=layout.placed)
        return replace(asked, prompt=own, runs=layout.runs, public=public, repair=0.0, truncation=None, drop=())

    def computed(self, reason: RecomputeReason) -> "Cut":
        """The same tokens, and none of their states."""
        return Cut(self.layout.computed(), reason)

    def told(self, moved: int) -> Truncated:
        return Truncated(self.layout.dropped, moved, self.reason)

    @property
    def miss(self) -> Miss | None:
        return Miss("diverged", self.layout.placed) if self.diverges else None


class Unanswered(Exception):
    """How a prompt is cut depends on what a remote has, and it did not say so yet."""


class Truncations:
    """How histories were cut, and how the next one is."""

    def __init__(
        self,
        tree: PrefixTree,
        below: Below | None,
        window: int,
        clock: Callable[[], float],
        never: RecomputeReason | None,
        ready: int = READY,
    ) -> None:
        """`never`: why no states of this model are ever moved. `ready`: tokens of layouts that are kept as they are."""
        self._tree, self.below, self.window, self._clock, self._never = tree, below, window, clock, never
        self._notes = Latest[Key, bytes](REMEMBERED)  # by the last whole page
        self._made: OrderedDict[bytes, Layout] = OrderedDict()  # by what is noted of them, which names all of their tokens
        self._room = ready  # tokens

    # ---- deciding

    def alone(self) -> "Truncations":
        """The same, for whom only what the pool has counts."""
        made = copy(self)
        made.below = None
        return made

    @property
    def answers(self) -> int:
        """That have come from a remote until now."""
        scout = self.below.store.scout if self.below is not None else None
        return scout.answers if scout is not None else 0

    def cut(self, asked: Request, home: Lineage, keys: list[Key]) -> Cut | None:
        """How a prompt is cut; None where it stays whole. `home` is whose its beginning is, `keys` are those of its full pages, as far as
        they are known: where it is cut, the others are added. Raises Unanswered where that depends on what a remote has, which is asked
        then."""
        _check(asked)
        if asked.drop:
            page = self._tree.page_size
            inner = [(-(-start // page) * page, stop // page * page) for start, stop in asked.drop]
            return self._without(Layout(), list(asked.prompt), [span for span in inner if span[0] < span[1]], home)
        room = 1 if asked.score else wanted_room(asked.params.max_tokens, self.window)
        if asked.truncation is None or len(asked.prompt) + room <= self.window:
            return None
        if asked.score:
            raise InvalidPrompt(SCORED)
        known = self._recall(asked.prompt, home, keys)
        lost = known is not None and not self._holds(known.runs, home)
        layout = known.computed() if known is not None and lost else known or Layout()
        if layout.length(len(asked.prompt)) + room <= self.window:
            return Cut(layout, "evicted" if lost else None)
        how = replace(asked.truncation, keep=max(asked.truncation.keep, asked.public))
        return self._again(layout, layout.left(asked.prompt), room, how, home)

    def _again(self, layout: Layout, left: list[int], room: int, how: Truncation, home: Lineage) -> Cut:
        page = self._tree.page_size
        keep = -(-max(how.keep, FIRST) // page) * page
        count = dropped(len(left), keep, room, how, self.window, page)
        if len(left) - count >= self.window:
            first, others = min(keep, len(left)), max(0, len(left) - keep)
            what = f"what may be dropped of the other {others} does not make" if others else "there are no others that could make"
            raise PromptTooLong(
                f"the first {first} tokens stay, and {what} room in a context of {self.window}; "
                "shorten the system prompt or the last message"
            )
        keep = min(keep, len(left) // page * page)
        return self._without(layout, left, [(keep, keep + count)], home)

    def _without(self, layout: Layout, left: list[int], ranges: Sequence[Span], home: Lineage) -> Cut:
        if not ranges:
            return Cut(layout)
        if self._never is not None:
            return Cut(layout.without(ranges, ()), self._never)
        held, diverges, lost = self._held_behind(layout, left, home)
        pieces = layout.pieces(left, held)
        ranges = tuple((start, _begin(pieces, stop, self._tree.page_size)) for start, stop in ranges)
        moved = layout.moved(left, Move(ranges, held))
        if all(run.is_plain for run in moved.runs):  # nothing of what was encoded behind the dropped part
            return Cut(layout.without(ranges, ()), "evicted" if lost else "cold")
        return Cut(moved, diverges=diverges)

    def _held_behind(self, layout: Layout, left: list[int], home: Lineage) -> tuple[int, bool, bool]:
        """How many tokens behind the runs there are states of; whether what is held goes on differently from there; and whether there were
        more of them."""
        at, page, keys = layout.placed, self._tree.page_size, list[Key]()
        lineage = _behind(layout, home)
        extend_keys(keys, lineage, left[at:], page)
        passage = Passage(lineage, home.owner, keys, left[at:], len(left) - at - 1, at)
        self._ask([passage])
        held, diverges = self._held(passage)
        lost = any(map(self._tree.was_evicted, keys[held // page :]))
        return held - (held % page if held % page < WORTH_KEEPING else 0), diverges, lost  # a shorter end is lost with the pool

    def _holds(self, runs: Sequence[Run], home: Lineage) -> bool:
        """Are all of them in the tree, or in a tier below it that is worth the loading?"""
        passages = [Passage.of(want, home.owner) for want in wants(home.owner, runs, self._tree.page_size, plain=home)]
        self._ask(passages)
        return all(self._held(passage)[0] == passage.limit for passage in passages)

    def _ask(self, passages: Sequence[Passage]) -> None:
        """What a remote has of all of these, at the same time."""
        below = self.below
        if below is not None and [passage for passage in passages if below.asks(passage, self._clock())]:
            raise Unanswered

    def _held(self, passage: Passage) -> tuple[int, bool]:
        """How many of its tokens there are states of; and whether what is known goes on differently from there."""
        lineage, _, keys, tokens, limit, first = passage
        match = self._tree.match(lineage, keys, tokens, limit, self._clock(), first=first)
        self._tree.forget_bare(match.stem)
        held, settled = match.length - first, match.stem.end - first
        below = self.below if held < limit else None
        found = below.look(passage, settled, counts=False) if below is not None else None  # rows look again
        kept = settled + found.tokens if found is not None and found.parts else 0
        return max(held, kept), match.diverges and kept <= held < limit

    # ---- remembering

    def remember(self, history: Sequence[int], layout: Layout, home: Lineage, keys: Sequence[Key]) -> None:
        """`keys`: of the history's full pages, as `cut` left them."""
        whole = layout.end // self._tree.page_size
        if not whole:
            return
        key, rest = keys[whole - 1], history[whole * self._tree.page_size : layout.end]
        note = self._notes[key] = _noted(key, rest, layout.packed())
        self._notes.move_to_end(key)
        self._keep_made(note, layout)
        if self._kept is not None:
            self._kept.keep(key, home.owner, note)

    def _keep_made(self, note: bytes, layout: Layout) -> None:
        if note not in self._made:
            self._made[note] = layout
            self._room -= layout.end
        self._made.move_to_end(note)
        while self._room < 0:
            self._room += self._made.popitem(last=False)[1].end

    def _recall(self, history: Sequence[int], home: Lineage, keys: list[Key]) -> Layout | None:
        """Of the histories that this one continues, how the longest was cut."""
        page = self._tree.page_size
        extend_keys(keys, home, history, page)
        known = next((place for place in range(len(keys), 0, -1) if keys[place - 1] in self._notes), 0)
        kept = self._kept.find(keys[known:]) if self._kept is not None else {}
        for place in range(len(keys), 0, -1):
            key = keys[place - 1]
            note = self._notes.get(key) or kept.get(key)
            if note is not None and (packed := _read(note, key, history, place * page)) is not None:
                layout = self._made.get(note)
                return Layout.recalled(packed, history) if layout is None else layout
        return None

    def cached(self, history: Sequence[int], home: Lineage, keys: list[Key], *, is_cut: bool) -> tuple[list[Stem], int]:
        """The stems of what the tree has of a history, or of what was left of it; and how many of its first tokens that are."""
        layout = (self._recall(history, home, keys) if is_cut else None) or Layout()
        lineage, at, left = _behind(layout, home), layout.placed, layout.left(history)
        page, now, own = self._tree.page_size, self._clock(), list[Key]() if layout.end else keys  # uncut, they are the same
        found = [find(self._tree, want, now) for want in wants(home.owner, layout.runs, page, plain=home)]
        extend_keys(own, lineage, left[at:], page)
        match = self._tree.match(lineage, own, left[at:], len(left) - at, now, first=at)
        ends = [] if match.end is None else [self._tree.first_page(match.end)]  # what goes on from there is not asked for
        there = [each.pinned for each in found if each is not None]
        for stem in there:
            self._tree.unpin(stem)
        length = next((run.position for run, each in zip(layout.runs, found, strict=True) if each is None), match.length)
        return [match.stem, *ends, *there], length

    @property
    def _kept(self) -> "Notes | None":
        """What outlives the process."""
        return self.below.store.notes if self.below is not None else None


def _behind(layout: Layout, home: Lineage) -> Lineage:
    """Where what follows its runs is found."""
    return Lineage.of(Origin(layout.runs, layout.placed).key(home.owner)) if layout.runs else home


def _noted(key: Key, rest: Sequence[int], packed: bytes) -> bytes:
    """What is remembered of a history, by its last whole page and the tokens behind that."""
    told = len(rest).to_bytes(SIZE, "little") + packed
    return _seal(key, rest, told) + told


def _read(note: bytes, key: Key, history: Sequence[int], start: int) -> bytes | None:
    """None where it is not whole, or not of a history that goes on like this one from there: it may come from a disk, where nobody looked
    after it."""
    seal, told = note[:SEAL], note[SEAL:]
    rest = history[start : start + int.from_bytes(told[:SIZE], "little")]
    return told[SIZE:] if seal == _seal(key, rest, told) else None


def _seal(key: Key, rest: Sequence[int], told: bytes) -> bytes:
    return sha256(FORM + page_key(key, rest) + told).digest()


def wanted_room(max_tokens: int | None, window: int) -> int:
    """What an answer may count on."""
    most = max(1, window // ANSWER)
    return most if max_tokens is None else min(max_tokens, most)


def dropped(length: int, keep: int, room: int, how: Truncation, window: int, page: int) -> int:
    """How many tokens go: enough for the answer, and for the next turns, but for these nothing of what was said last."""
    enough = -(-(length + room - window) // page) * page
    wanted = -(-(length - int(how.share * window)) // page) * page
    older = (length - how.recent - keep) // page * page
    most = (length - 1 - keep) // page * page
    return max(0, min(most, max(enough, min(wanted, older))))


def of_conversation(render: Callable[[Sequence[Message]], list[int]], messages: Sequence[Message], tokens: Sequence[int]) -> Truncation:
    """What stays of a conversation: what its template writes before the first message that is not the system's, and the last message."""
    first = next((place for place, message in enumerate(messages) if message.get("role") not in SYSTEM), len(messages) - 1)
    keep = _before(render, messages[: first + 1], tokens)
    return Truncation(keep, len(tokens) - (_before(render, messages, tokens) or keep))


def _before(render: Callable[[Sequence[Message]], list[int]], messages: Sequence[Message], tokens: Sequence[int]) -> int:
    """How many tokens stand before the content of the last message: as many as it has in common with a conversation that ends otherwise."""
    *others, last = messages
    other = {**last, "content": "1" if str(last.get("content")).startswith("0") else "0"}
    try:
        return shared_length(render([*others, other]), tokens)
    except InvalidPrompt:  # there are templates that want to know more than they are told here
        return 0


def _begin(pieces: Sequence[Run], place: int, page: int) -> int:
    """The next place from which on what is left can be read: it begins with a page, or with what is not held."""
    for run in pieces:
        if run.origin is not None and run.position < place < run.end:
            start = run.position - len(run.origin.before)
            return min(run.end, start + -(-(place - start) // page) * page)
    return place


def _check(asked: Request) -> None:
    if asked.drop and asked.truncation is not None:
        raise InvalidPrompt("drop says what goes, and truncation chooses it; give one of the two")
    if not isinstance(asked.drop, Sequence):
        raise InvalidPrompt(f"drop is {asked.drop!r}; it is a list of pairs of whole numbers, each the first token of a part and its end")
    if asked.runs:
        raise InvalidPrompt("a prompt made of modules cannot be cut; leave modules out of it instead")
    if asked.score and asked.drop:
        raise InvalidPrompt(SCORED)
    length, before = len(asked.prompt), 0
    for span in asked.drop:
        if not isinstance(span, Sequence) or len(span) != 2 or any(type(place) is not int for place in span):
            raise InvalidPrompt(f"drop has {span!r}; each part is a pair of whole numbers, its first token and its end")
        start, stop = span
        if not 0 <= start < stop:
            raise InvalidPrompt(f"drop has {start} to {stop}, which is no part of a prompt; the first is at least 0 and below the end")
        if stop >= length:
            raise InvalidPrompt(f"drop has {start} to {stop}, and the prompt has {length} tokens, the last of which is needed")
        if start < before:
            raise InvalidPrompt(f"drop has {start} to {stop} behind a part that ends at {before}; give them in order, without overlaps")
        before = stop
