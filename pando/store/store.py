"""The tiers below the pool as one cache: what they have of a prompt, what is brought up, what is kept.

Everything here is called in the engine's thread. Nothing waits but `settle`, `forget_pool` and `close`; `look`, for a remote of which the
`scout` did not ask before; and `go`, for a moment. Bytes move in threads of their own (`transfer`), which tier keeps what is decided by the
`ledger`, and what was finished since then `pump` takes in, once a step.

Saving never slows an answer. A page that is to be saved is offered, leaves the pool for host memory, and is written to each tier below. It
stays in the pool until it has left, unless a row needs the room before that has begun: then it is let go unsaved, and counted.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue

from ..kv.segment import Key
from ..kv.stem import Stem
from .catalogue import Catalogue
from .departures import Departure, Departures
from .disk import DiskTier
from .facts import Counts, Room, StoreFacts
from .ledger import Gone, Ledger, Page
from .notes import Notes
from .scout import Scout
from .sharing import Sharing
from .sought import Found, Offer, Sought
from .speeds import Moved, Speeds
from .tier import Card, Lost, Tags, Tier
from .touches import Touches
from .transfer import Load, Transfer
from .untaken import Untaken
from .worker import Worker, start, tried

log = logging.getLogger(__name__)

AHEAD = 4  # jobs that are looked at for prefetching, at most, in one step
HEAD_START = 0.001  # seconds for which a device's first copies are waited for: Python that ran meanwhile would hold them up, and has time
FULL_START = 0.005  # the same, where nothing can be computed before they have come


class Store:
    def __init__(
        self,
        transfer: Transfer,
        ledger: Ledger,
        below: Sequence[Tier],
        *,
        buffer: int,
        disk: DiskTier | None = None,
        bound: int = 0,
        touches: Sequence[Callable[[Sequence[Key]], None]] = (),
        scout: Scout | None = None,
        clock: Callable[[], float] = time.time,
        worker: Callable[[str], Worker] = Worker,
    ) -> None:
        """`buffer`: so many pages may be on their way out of the pool at the same time. `disk`: the one among the tiers that remembers what
        was used, and whose bound in bytes counts for everyone who writes there. `touches` are told of pages that are used."""
        self.transfer, self.ledger, self.host, self.below = transfer, ledger, transfer.host, tuple(below)
        self.counts, self.speeds, self.tags, self.rounds = Counts(), Speeds(), Tags(), transfer.shape.codec != "none"
        self._catalogue = Catalogue(ledger, self.counts, transfer.shape.page_size)
        self.tag, self.buffer, self._disk, self._clock, self._now, self.scout = self.tags.of, buffer, disk, clock, time.monotonic, scout
        self._page_bytes = transfer.shape.layers * transfer.codec.layer_bytes(transfer.shape, transfer.shape.page_size)
        self._offers: deque[Offer] = deque()
        self._loads: list[tuple[Load, Sequence[Key]]] = []  # not begun yet, each with the keys of its context
        self._leaving = self._writing = 0  # pages; those that are written are counted once for each tier
        self._unwritten, self._untaken = Counter[Key](), Untaken()  # the same, by page; and those that were not taken
        self._free: list[Stem] = []  # stems that need not stay any longer
        self._queued, self._raising = set[Key](), set[Key]()  # pages that were offered and are not kept yet; and those that come up
        self._done: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._end, (self._loader, self._saver, self._writer) = start(self, worker, "pando-load", "pando-save", "pando-write")
        self._touches = Touches(touches, self._writer, ledger.ttl)
        self._departures = Departures(self.host, transfer.mover, self._saver, transfer.shape.layers)
        self.notes = None if disk is None else Notes(disk, self._writer, self.tags, ledger.ttl, clock)
        self._sharing = None if disk is None else Sharing(disk, bound, self._page_bytes, ledger, self._writer, self._done)

    def facts(self) -> StoreFacts:
        room = {tier: Room(self.ledger.used[tier], size) for tier, size in self.ledger.capacities.items()}
        return self.counts.facts(room if self._sharing is None else {**room, "disk": self._sharing.room})

    # ---- looking

    def look(self, sought: Sought, *, counts: bool = True) -> Found:
        """What is kept of it, from the first token on, if loading is worth its time. What is not loaded `counts`, unless rows ask again."""
        self._expire()
        found = whole = self._catalogue.find(sought, self.host, self.below)
        while found.parts and not self.speeds.pays(found.sizes(self._page_bytes), found.tokens):
            found = found.nearer()
        self.counts.recomputed += counts * (whole.tokens - found.tokens)
        self.counts.lost["expired"] += counts and whole.ended == "expired"
        return found

    def needs(self, keys: Sequence[Key], tokens: Sequence[int], before: Key, owners: Sequence[Key]) -> list[Key]:
        """What a row will need: its pages, and behind those that are kept the short end that it goes on from. Nobody else is asked."""
        self._expire()
        size, held = self.transfer.shape.page_size, len(self.ledger.find(keys))
        ours = [tier for tier in (self.host, *self.below) if tier.name in self.ledger.capacities]
        end, _ = self._catalogue.end(ours, keys[held - 1] if held else before, owners, tokens[held * size : (held + 1) * size], set())
        return [*keys[:held], *([] if end is None else [end.card.key]), *keys[held:]]

    # ---- loading

    def load(self, found: Found, chain: Sequence[Key], pages: Sequence[int]) -> Load:
        """Begins to bring pages up, to these pages of the pool. `chain`: the keys of the whole context, so that it counts as used."""
        load = Load(found.parts, pages, self.speeds.patience(found.tokens), self._given_up, self._now)
        self.ledger.use(chain, self._clock())
        self._loads.append((load, tuple(chain)))
        self._touches.use(chain, [part.card.key for part in found.parts])
        return load

    def go(self, *, needed: bool = False) -> None:
        """The loads of one step begin together, after its copies: rows that run together need the first layer of all of them first, and a
        page that is loaded to may be one that was just copied from. `needed`: by the step itself."""
        loads, self._loads, computed = self._loads, [], self.transfer.mover.mark() if self._loads else None

        def work() -> None:
            self.transfer.load([load for load, _ in loads], computed, lambda moved: self._done.put(partial(self._loaded, loads, moved)))

        if loads:
            self._loader.post(work, urgent=True)
        if computed is not None:
            loads[0][0].begins_within(FULL_START if needed else HEAD_START)

    def left(self, load: Load) -> float:
        return load.left(self.transfer.shape.layers)

    def _loaded(self, loads: Sequence[tuple[Load, Sequence[Key]]], moved: Mapping[str, Moved]) -> None:
        for tier, how in moved.items():
            self.speeds.moved(tier, how)
        for load, chain in loads:
            for part in load.good:
                self.counts.loaded[part.tier] += len(part.card.tokens)
            if load.lost is not None and not load.unwanted and not load.late:
                self._lost(load.parts[len(load.good)].card.key, load.lost)
            self._note_host([part.card.key for part in load.parts if not self.ledger.has(part.card.key, "host")], chain)

    def _given_up(self, load: Load) -> None:
        """What it waits for is taken to be the lowest of its tiers. One that was not begun waits for another load."""
        self.counts.lost["late"] += 1
        names, seconds = [part.tier for part in load.parts], load.seconds(self.transfer.shape.layers)
        if seconds is not None:
            lowest = max(names, key=list(self.transfer.tiers).index)
            self.speeds.gave_up(lowest, Moved(names.count(lowest) * self._page_bytes, seconds))

    def _lost(self, key: Key, lost: Lost) -> None:
        """Whoever needs it computes it, and then it is kept anew. What only did not come in time may be there the next time."""
        self.counts.lost[lost.reason] += 1
        if lost.reason != "late":
            self.ledger.drop([key])
            self.host.drop([key])

    def _note_host(self, keys: Sequence[Key], chain: Sequence[Key]) -> None:
        """What was read from below is in host memory now, if there was room."""
        there = [key for key in keys if self.host.look([key])]
        self._keep("host", list(dict.fromkeys((*chain, *there))), self._catalogue.shown(there))  # ends are not in the chain
        self._passed(there)

    # ---- the queue

    def join(self, place: int, keys: Sequence[Key]) -> None:
        """A row waits that will need these pages."""
        if place not in self.ledger.queue:
            self.ledger.join(place, keys)

    def leave(self, place: int) -> None:
        if place in self.ledger.queue:
            self.ledger.leave(place)

    # ---- saving

    def wanted(self, key: Key) -> bool:
        """Is it neither kept nor about to be?"""
        return key not in self._queued and not self.ledger.has(key)

    @property
    def spare(self) -> int:
        """So many pages may depart: none while others wait."""
        return 0 if self._offers else max(0, min(self.buffer - self._on_the_way, self.host.free))

    def depart(self, pages: Iterable[tuple[Card, int]]) -> Departure:
        """Pages that a step is about to fill leave the pool while it computes. When it is over, the tree's are offered as ever, and the
        others dismissed."""
        return self._departures.begin([each for each in pages if each[0].key not in self._departures])

    def dismiss(self, departure: Departure) -> None:
        """What was not offered of it is not kept."""
        self._departures.drop(departure.pages.keys() - self._queued)

    def offer(self, offer: Offer) -> None:
        self._offers.append(offer)
        self._queued.update(card.key for card in offer.cards)

    def pump(self) -> list[Stem]:
        """Takes in what was finished, begins what may begin; answers the stems that need not stay in the pool for it any longer."""
        while not self._done.empty():
            self._done.get()()
        while self._offers and self._has_room(self._offers[0]):
            self._begin(self._offers.popleft())
        self._raise_ahead()
        free, self._free = self._free, []
        return free

    def settle(self) -> list[Stem]:
        """As `pump`, when everything that is on its way out has been copied: a matter of milliseconds."""
        self._saver.settle()
        return self.pump()

    def relent(self, reason: str = "room") -> list[Stem]:
        """A row needs the room: what is not on its way yet is not saved."""
        offers, self._offers = self._offers, deque()
        self._not_saved([card for offer in offers for card in offer.cards], reason)
        return [offer.stem for offer in offers]

    @property
    def _on_the_way(self) -> int:
        """Pages between the pool and the lowest tier: what is in host memory only until it is written counts as well."""
        return max(self._leaving + len(self._departures), self._writing)

    def _has_room(self, offer: Offer) -> bool:
        """Also for too much, where nothing else will end: what departs is offered behind it."""
        new = sum(card.key not in self._departures for card in offer.cards)
        return not (self._leaving or self._writing) or self._on_the_way + new <= self.buffer

    @property
    def busy(self) -> bool:
        """Is anything on its way that `pump` will have to take in?"""
        return bool(self._offers or self._leaving or self._writing or self._raising or not self._done.empty())

    def forget_pool(self) -> None:
        """The pool's pages are not to be trusted any more: nothing is copied from them when this returns. What was begun is sound: only a
        step that settled offers anything. Loads go on until they are done, since a tier may hang."""
        self.relent("failed")
        self._departures.drop([*self._departures])  # their step did not settle
        self._saver.settle()
        self.pump()
        self._free = []

    def close(self) -> list[Stem]:
        """Saves what is on its way, and lets go of the tiers, as long as they take anything; answers as `pump`. Nothing may be asked of it
        afterwards."""
        free, before = list[Stem](), None
        while (left := (len(self._offers), self._leaving, self._writing)) not in ((0, 0, 0), before):
            before = None if self._saver.settles() and self._writer.settles() else left
            free += self.pump()
        if unsaved := self._queued | self._unwritten.keys():
            size, tokens = len(unsaved) * self._page_bytes, self.transfer.shape.page_size
            log.warning("nothing is taken below host memory: %d pages of %d tokens, %d bytes, are not saved", len(unsaved), tokens, size)
        for tier in self.below:
            self._writer.post(tier.close)
        if not unsaved:
            self._writer.settles()
        self._end()
        return free + self.relent("late")

    def _begin(self, offer: Offer) -> None:
        kept = self._keep("host", offer.chain, {card.key for card in offer.cards})
        going = [each for each in offer.pages if self.below or each[0].key in kept]  # without a lasting place it passes through
        self._not_saved([] if self.below else [card for card in offer.cards if card.key not in kept], "full")
        if not going:
            self._free.append(offer.stem)
            return
        self._leaving += len(going)
        departures = self._departures.end(going)

        def work() -> None:
            failed = [card for card, _ in going if tried(partial(departures[card.key].keep, card.key)) is not None]
            self._done.put(lambda: self._taken(offer, [card for card, _ in going], failed))

        self._saver.post(work)

    def _keep(self, tier: str, chain: Sequence[Key], only: Collection[Key] | None = None) -> Collection[Key]:
        """Makes room for a chain in a tier; answers which pages of it enter. The ledger would not say of what goes that it has expired."""
        kept = self.ledger.keep(tier, [(key, self._page_bytes) for key in chain], self._expire(), only)
        self._let_go(kept.gone)
        self._catalogue.keep(kept.entered)
        return set(kept.entered)

    def _taken(self, offer: Offer, cards: Sequence[Card], failed: Sequence[Card]) -> None:
        self._leaving -= len(cards)
        self._free.append(offer.stem)
        self.ledger.drop([card.key for card in failed], "host")
        self._not_saved(failed, "full")
        self._queued -= {card.key for card in cards}
        good = [card for card in cards if card not in failed]
        self.counts.saved["host"] += len(good)
        for tier in self.below:
            self._write(tier, offer.chain, good)
        self._touches.follow(offer.chain, {card.key for card in good})
        self._passed([card.key for card in good])

    def _passed(self, keys: Sequence[Key]) -> None:
        """What has no lasting place in host memory leaves it, unless it is on its way down, and still to be written."""
        self.host.drop([key for key in keys if not (key in self._unwritten or key in self._queued or self.ledger.has(key, "host"))])

    def _write(self, tier: Tier, chain: Sequence[Key], cards: Sequence[Card], again: bool = False) -> None:
        """Behind everything else, down to a tier. Where the ledger has none of its name, it looks after itself."""
        if self._sharing is not None:
            self._sharing.lift()
        if tier.name in self.ledger.capacities:
            kept = self._keep(tier.name, chain, {card.key for card in cards})
            self.counts.unsaved["full"] += sum(not self.ledger.has(card.key, tier.name) for card in cards)
            cards = [card for card in cards if card.key in kept]

        def work() -> None:
            for card in cards:
                lost = tried(partial(self.transfer.write, card, tier.name))
                self._done.put(partial(self._written, tier, chain, card, lost, again))

        if cards:
            self._writing += len(cards)
            self._unwritten.update(card.key for card in cards)
            self.ledger.pin([card.key for card in cards])  # in host memory, until it is written
            if self._sharing is not None and again:
                self._sharing.make_way()
            self._writer.post(work)

    def _written(self, tier: Tier, chain: Sequence[Key], card: Card, lost: Lost | None, again: bool) -> None:
        self._writing -= 1
        if left := self._unwritten.pop(card.key) - 1:
            self._unwritten[card.key] = left
        self.ledger.unpin([card.key])
        self.counts.saved[tier.name] += lost is None
        self.ledger.drop([card.key] if lost is not None else [], tier.name)
        if self._sharing is not None and tier.name == "disk" and self._sharing.written(lost, again, self._unwritten):
            self._write(tier, chain, [card], again=True)
        elif lost is not None:
            self.counts.unsaved[lost.reason] += 1
            self._untaken.note(tier.name, card, lost)
        elif missing := self._untaken.again(tier.name, chain, card.key, lambda key: self.ledger.has(key, "host")):
            self._write(tier, chain, missing)
        self._passed([card.key])

    def _not_saved(self, cards: Sequence[Card], reason: str) -> None:
        self.counts.unsaved[reason] += len(cards)
        self._queued -= (keys := {card.key for card in cards})
        self._departures.drop(keys)
        self._passed([*keys])  # it may be there from an earlier offer, which was written while this one waited

    # ---- what leaves a tier, and what comes up

    def _let_go(self, gone: Sequence[Gone], ttl: float | None = None) -> None:
        """`ttl`: unless others used it, which the ledger cannot know."""
        self._passed([key for key, tier in gone if tier == "host"])
        for key, tier in gone:
            if tier != "host":
                self._remove([key], tier, ttl)

    def _remove(self, keys: Sequence[Key], tier: str, ttl: float | None = None) -> None:
        def work() -> None:
            self.transfer.tiers[tier].drop(keys if ttl is None or self._disk is None else self._disk.unused(keys, ttl, self._clock()))
            self._done.put(partial(self._catalogue.forget, keys))

        self._catalogue.hide(keys)
        self._writer.post(work)

    def _expire(self) -> float:
        """What nobody used for too long is not found by who looks for it now. Answers the time."""
        if gone := self.ledger.expire(now := self._clock()):
            self._let_go(gone, self.ledger.ttl)
            self._catalogue.expire(key for key, _ in gone)
        return now

    def discard(self, keys: Sequence[Key]) -> None:
        """They are not what they should be, and leave every tier."""
        self.ledger.drop(keys)
        self.host.drop(keys)
        for tier in self.below:
            self._remove(list(keys), tier.name)

    def _raise_ahead(self) -> None:
        """Brings up what the next rows in the queue need, one job at a time."""
        for _, chain in zip(range(AHEAD), self.ledger.prefetch(), strict=False) if not self._raising else ():
            keys = [page.key for page in chain]
            lacking = {key: tier for key, tier in zip(keys, self.ledger.find(keys), strict=False) if tier != "host"}
            if lacking:
                self._raise(lacking, chain)
                return

    def _raise(self, tiers: Mapping[Key, str], chain: Sequence[Page]) -> None:
        kept = self._keep("host", [page.key for page in chain])
        self._raising = set(coming := [key for key in tiers if key in kept])
        self.ledger.pin(coming)
        for key in coming:  # one by one: what is urgent goes between

            def work(key: Key = key) -> None:
                lost = tried(partial(self.transfer.raise_to_host, key, tiers[key]))
                self._done.put(partial(self._raised, key, lost))

            self._loader.post(work)

    def _raised(self, key: Key, lost: Lost | None) -> None:
        self._raising.discard(key)
        self.ledger.unpin([key])
        self.counts.prefetched += lost is None
        if lost is not None:
            self.ledger.drop([key], "host")
            if lost.reason != "full":
                self._lost(key, lost)
        self._passed([key])
