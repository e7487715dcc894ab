"""What a remote has of a prompt, asked in a thread of its own while the row that needs it waits: other rows go on meanwhile."""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from ..kv.latest import Latest
from ..kv.segment import Key
from .ledger import Ledger
from .sought import Sought, end_parent
from .tier import Card, Lost, Reader, Tier
from .worker import Worker

log = logging.getLogger(__name__)

FRESH = 2.0  # seconds for which an answer counts
AWAITED = 1.0  # seconds in which some answer comes; else nobody waits for any
LATEST = 30.0  # seconds for which an answer waits for whoever asked: a step may take longer than it would count
REMEMBERED = 2**14  # pages and short ends of which something was heard

T = TypeVar("T")
Heard = Latest[Key, tuple[float, T | Lost]]
Question = tuple[Key, ...]


class Scout:
    """A tier that answers from what was asked before, for a moment. Who looks for something else waits for the tier itself."""

    def __init__(self, inner: Tier, ledger: Ledger, page_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`ledger`: of what is nearer, and need not be asked for."""
        self.name = inner.name
        self._inner, self._ledger, self._page_size, self._clock = inner, ledger, page_size, clock
        self._worker = Worker("pando-look")
        weakref.finalize(self, self._worker.stop)  # of one that nobody closes, too
        self._changed = threading.Condition()
        self._asked: dict[Question, float] = {}  # questions without an answer, and when they were asked
        self._answered = -AWAITED  # when the last answer came
        self.answers = 0  # that have come until now
        # Answers: when, and of which pages and short ends.
        self._unread = Latest[Question, tuple[float, Sequence[Key], Sequence[Key]]](REMEMBERED)
        self._pages: Heard[bool] = Latest(REMEMBERED)
        self._ends: Heard[Sequence[Card]] = Latest(REMEMBERED)

    # ---- asking ahead, in the engine's thread

    def awaits(self, sought: Sought) -> bool:
        """Asks what there is, unless that is known; says whether there is no answer yet."""
        held = len(self._ledger.find(sought.keys))
        if held * self._page_size >= sought.limit:
            return False
        keys, before = sought.keys[held : -(-sought.limit // self._page_size)], sought.keys[held - 1] if held else sought.before
        question = before, *keys[-1:], *sought.owners
        now = self._clock()
        with self._changed:
            oldest = next(iter(self._asked.values()), now)
            if now > max(oldest, self._answered) + AWAITED:  # whatever was asked since waits behind that
                self._hear(keys[:1], before, sought.owners, Lost("late", "it did not say in time what it has"))
                return False
            if question in self._asked:
                return True
            self._read(question, now)
            if self._is_known(keys, before, sought.owners):
                return False
            self._asked[question] = now
        self._worker.post(partial(self._ask, question, tuple(keys), before, sought.owners))
        return True

    def _read(self, question: Question, now: float) -> None:
        """What was answered since whoever asks now has asked before counts from now on."""
        when, pages, ends = self._unread.pop(question, (-LATEST, (), ()))
        if now < when + LATEST:
            self._pages.update({key: (now, self._pages[key][1]) for key in pages if key in self._pages})
            self._ends.update({parent: (now, self._ends[parent][1]) for parent in ends if parent in self._ends})

    def _is_known(self, keys: Sequence[Key], before: Key, owners: Sequence[Key]) -> bool:
        now = self._clock()
        for key in keys:
            there = _known(self._pages, key, now)
            if there is None or isinstance(there, Lost):
                return there is not None
            if not there:
                break
            before = key
        return all(_known(self._ends, end_parent(before, owner), now) is not None for owner in owners)

    def listen(self, seconds: float) -> None:
        """Until an answer comes, if one is awaited, and for so long at most."""
        with self._changed:
            if self._asked:
                self._changed.wait(seconds)

    def _ask(self, question: Question, keys: Sequence[Key], before: Key, owners: Sequence[Key]) -> None:
        count, lost, ends = 0, list[Lost](), dict[Key, Sequence[Card]]()
        try:
            count = self._inner.look(keys) if keys else 0
            before = keys[count - 1] if count else before
            ends = {parent: self._inner.ends(parent) for parent in {end_parent(before, owner) for owner in owners}}
        except Lost as error:
            lost.append(error)
        except Exception as error:  # an error of ours: nobody waits for another answer
            log.exception("a remote could not be asked")
            lost.append(Lost("unreadable", type(error).__name__))
        finally:
            with self._changed:
                now = self._clock()
                self._pages.update(dict.fromkeys(keys[:count], (now, True)))
                self._ends.update({parent: (now, cards) for parent, cards in ends.items()})
                if lost:
                    self._hear(keys[count : count + 1], before, owners, lost[0])
                elif count < len(keys):
                    self._pages[keys[count]] = now, False
                self._answered, self.answers = now, self.answers + 1
                self._unread[question] = now, keys[: count + 1], [end_parent(before, owner) for owner in owners]
                self._asked.pop(question, None)
                self._changed.notify_all()

    def _hear(self, keys: Sequence[Key], before: Key, owners: Sequence[Key], lost: Lost) -> None:
        now = self._clock()
        self._pages.update(dict.fromkeys(keys, (now, lost)))
        self._ends.update({end_parent(before, owner): (now, lost) for owner in owners})

    # ---- the tier

    def look(self, keys: Sequence[Key]) -> int:
        for place, key in enumerate(keys):
            there = _known(self._pages, key, self._clock())
            if there is None:
                return place + self._inner.look(keys[place:])
            if isinstance(there, Lost) and not place:
                raise there
            if isinstance(there, Lost) or not there:
                return place
        return len(keys)

    def ends(self, parent: Key) -> Sequence[Card]:
        cards = _known(self._ends, parent, self._clock())
        if isinstance(cards, Lost):
            raise cards
        return self._inner.ends(parent) if cards is None else cards

    def open(self, key: Key) -> Reader:
        return self._inner.open(key)

    def save(self, card: Card, layers: Sequence[memoryview]) -> None:
        self._inner.save(card, layers)
        with self._changed:
            self._pages.pop(card.key, None)
            self._ends.pop(card.parent, None)

    def drop(self, keys: Sequence[Key]) -> None:
        self._inner.drop(keys)
        with self._changed:
            for key in keys:
                self._pages.pop(key, None)
            self._ends.clear()

    def close(self) -> None:
        self._worker.stop()
        self._inner.close()


def _known(heard: "Heard[T]", key: Key, now: float) -> T | Lost | None:
    """None: nobody asked, or too long ago."""
    when, what = heard.get(key, (-FRESH, None))
    return what if now < when + FRESH else None
