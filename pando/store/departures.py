"""Pages on their way out of the pool. Each layer is copied into host memory when it is computed, while those behind it are."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from ..kv.segment import Key
from .host import HostTier
from .movers import Mover, Take
from .tier import Card
from .worker import Worker

if TYPE_CHECKING:
    import torch


@dataclass
class _Going:
    card: Card
    page: int
    slot: Tensor | None = None  # [L, layer_bytes], in host memory
    layers: int = 0  # that were copied to it, or are being


class Departure:
    """Pages that leave together. Nobody finds one before it is kept, and what is dropped was never there."""

    def __init__(self, host: HostTier, mover: Mover, saver: Worker, pages: Sequence[tuple[Card, int]]) -> None:
        """`pages`: where they are in the pool. Of two with the same key the first counts."""
        self.pages = {card.key: page for card, page in reversed(pages)}
        self._host, self._mover, self._saver = host, mover, saver
        self._ready: tuple[int, torch.cuda.Event | None] = 0, None
        self._going = {card.key: _Going(card, page) for card, page in reversed(pages)}
        self._there: torch.cuda.Event | None = None
        self._is_followed = False  # will what is ready be copied, without being asked for again?

    def computed(self, layers: int) -> None:
        """So many layers of all pages are computed, or asked of the device. For the thread that computes: it waits for nothing."""
        if layers > self._ready[0]:
            self._ready = layers, self._mover.mark()
            if not self._is_followed:  # else that one, which has not begun, takes these layers, too
                self._is_followed = True
                self._saver.post(self._follow)

    # ---- for the thread that saves

    def keep(self, key: Key) -> None:
        """It is found in host memory from now on; raises Lost where that has no room."""
        going = self._going.pop(key)
        try:
            self._begin(going)
            self._copy([going])
            self._wait()
        except BaseException:
            self._abort(going)
            raise
        if going.slot is not None:
            self._host.commit(going.card)

    def drop(self, key: Key) -> None:
        self._abort(self._going.pop(key))

    def _follow(self) -> None:
        """All that was announced in the meantime."""
        self._is_followed = False
        with suppress(Exception):  # whoever keeps them tries again, and hears why it cannot be
            for going in self._going.values():
                self._begin(going)
            self._copy(self._going.values())

    def _begin(self, going: _Going) -> None:
        if going.slot is None:
            going.slot = self._host.begin(going.card)

    def _copy(self, some: Collection[_Going]) -> None:
        layers, computed = self._ready
        takes = list[Take]()
        for going in some:
            if going.slot is not None and going.layers < layers:
                takes.append(Take(going.page, len(going.card.tokens), range(going.layers, layers), going.slot))
        if takes:
            self._there = self._mover.take(takes, computed)
        for going in some:
            going.layers = layers if going.slot is not None else 0

    def _wait(self) -> None:
        """Until what was copied is there."""
        if self._there is not None:
            self._there.synchronize()

    def _abort(self, going: _Going) -> None:
        if going.slot is not None:
            self._wait()  # or it would be written to when it is another's
            self._host.abort(going.card)


class Departures:
    """Those under way, by their pages. In the thread that computes."""

    def __init__(self, host: HostTier, mover: Mover, saver: Worker, layers: int) -> None:
        self._host, self._mover, self._saver, self._layers = host, mover, saver, layers
        self._under_way: dict[Key, Departure] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def __contains__(self, key: Key) -> bool:
        return key in self._under_way

    def __iter__(self) -> Iterator[Key]:
        return iter(self._under_way)

    def begin(self, pages: Sequence[tuple[Card, int]]) -> Departure:
        departure = Departure(self._host, self._mover, self._saver, pages)
        self._under_way.update(dict.fromkeys(departure.pages, departure))
        return departure

    def end(self, pages: Sequence[tuple[Card, int]]) -> dict[Key, Departure]:
        """All of them are computed: each with what it leaves by. Those that are not under way leave together."""
        under_way = self._under_way
        self.drop([card.key for card, page in pages if card.key in under_way and under_way[card.key].pages[card.key] != page])
        self.begin([(card, page) for card, page in pages if card.key not in under_way])
        leaving = {card.key: under_way.pop(card.key) for card, _ in pages}
        for departure in {*leaving.values()}:
            departure.computed(self._layers)
        return leaving

    def drop(self, keys: Iterable[Key]) -> None:
        """They are not kept, if they are under way."""
        for key in [key for key in keys if key in self]:
            self._saver.post(partial(self._under_way.pop(key).drop, key))
