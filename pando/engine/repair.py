"""Repair: some of the tokens of a prompt's modules are computed again, behind everything that stands before them.

A module was encoded without its neighbours, and few of its tokens mind. The states of all modules are copied to where the prompt has them,
their keys turned to their new positions. The first layers, computed for every token, show whose keys and values in the next one differ most
from the copied ones: those are computed in all layers that follow, together with whatever is new between the modules, over the states of
the others. A row that was repaired so owns its pages, and goes on as the row of any plain prompt.
"""

import hashlib
import math
import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import InvalidOption, InvalidPrompt
from ..kernels import reference
from ..kernels.fp8 import store
from ..kernels.ops import Attend
from ..kernels.reads import joined
from ..kernels.rope import rotate, turns
from ..kv.pool import PagePool
from ..kv.run import Run, context_digest
from ..kv.segment import Key
from ..model.decoder import Decoder, Step
from .batch import Lower
from .imports import Import
from .row import EARLY

WINDOW = 128  # tokens


def check_share(share: float) -> float:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise InvalidOption(f"repair is {share!r}; it is the share of module tokens to compute again, a number from 0 to 1")
    return share


def check_gaps(runs: Sequence[Run], end: int) -> None:
    """What is repaired becomes the row of a plain prompt, and that has no holes."""
    before = 0
    for start, stop in (*((run.position, run.end) for run in runs), (end, end)):
        if start != before:
            raise InvalidPrompt(
                f"repair needs a prompt without holes, and the positions from {before} to {start - 1} are empty; "
                'use layout="compact", or repair=0'
            )
        before = stop


def key(root: Key, runs: Sequence[Run], end: int, share: float) -> Key:
    """The root of a prompt that is repaired up to a position: no other prompt finds what is approximate."""
    return hashlib.sha256(b"repair" + root + context_digest(runs) + struct.pack("<qd", end, share)).digest()


class Repairer:
    def __init__(self, decoder: Decoder, pool: PagePool, lower: Lower | None) -> None:
        self._decoder, self._pool, self._lower = decoder, pool, lower
        self._device, self._dtype = pool.k.device, decoder.embed.dtype

    def repair(self, tokens: Sequence[int], pages: Sequence[int], parts: Sequence[Import], count: int) -> None:
        """Fills the first pages of a row: its tokens up to the end of its last module. `count`: so many of those that were encoded behind
        something else are computed again."""
        slots = self._slots(pages)[: len(tokens)]
        for part in parts:
            if len(part.want):  # a module of one token at the end is computed with the row
                self._copy(part, slots)
        self._compute(torch.tensor(tokens, device=self._device), pages, slots, parts, count)

    def _copy(self, part: Import, slots: Tensor) -> None:
        run, geometry = part.want.run, self._decoder.geometry
        target = slots[run.position : part.want.end]
        source = torch.cat([self._slots(segment.pages)[: len(segment)] for segment in part.path()])
        turn = None
        if geometry.freqs is not None and run.shift:
            turn = turns(torch.tensor([run.shift], device=self._device), geometry.freqs)  # their factor they have
        for index in range(len(self._decoder.layers)):
            k, v = self._pool.layer(index)
            keys = k.index_select(0, source)
            store(k, target, keys if turn is None else rotate(keys.to(self._dtype), turn))
            store(v, target, v.index_select(0, source))

    def _compute(self, tokens: Tensor, pages: Sequence[int], slots: Tensor, parts: Sequence[Import], count: int) -> None:
        decoder, last = self._decoder, len(self._decoder.layers) - 1
        every = torch.arange(len(tokens), device=self._device)
        step = Step(tokens, every, slots, every[:0], self._attend(pages, every))
        x, turn = decoder.embedded(tokens, every), decoder.turned(every)
        early = min(max(1, (last + 1) // EARLY), last)
        x = decoder.through(range(early), x, turn, step, self._pool)
        chosen = self._chosen(early, x, turn, slots, parts, count)
        x, turn, slots = x[chosen], None if turn is None else turn[chosen], slots[chosen]
        step = Step(tokens[chosen], chosen, slots, every[:0], self._attend(pages, chosen))
        x = decoder.through(range(early, last), x, turn, step, self._pool)
        decoder.store(last, x, turn, slots, *self._pool.layer(last))

    def _chosen(self, layer: int, x: Tensor, turn: Tensor | None, slots: Tensor, parts: Sequence[Import], count: int) -> Tensor:
        """The tokens that are computed in the layers from this one on, in order: all that are new, and those that deviate most."""
        k, v = self._pool.layer(layer)
        fresh = [pool.new_empty(len(x), *pool.shape[1:]) for pool in (k, v)]
        self._decoder.store(layer, x, turn, torch.arange(len(x), device=self._device), fresh[0], fresh[1])
        deviation = sum(_deviation(true, pool[slots]) for true, pool in zip(fresh, (k, v), strict=True))
        assert isinstance(deviation, Tensor)
        new, foreign = torch.ones_like(slots, dtype=torch.bool), torch.zeros_like(slots, dtype=torch.bool)
        for part in parts:
            new[part.want.run.position : part.want.end] = False
            foreign[part.want.run.position : part.want.end] = not part.want.exact
        deviation = deviation.masked_fill(~foreign, -math.inf)
        new[torch.sort(deviation, descending=True, stable=True).indices[:count]] = True
        return new.nonzero()[:, 0]

    def _attend(self, pages: Sequence[int], positions: Tensor) -> Attend:
        """Every token sees the row's own slots, up to its position."""
        at, geometry = positions.cpu(), self._decoder.geometry
        reads = joined(self._pool.page_size, _reads(at.tolist(), pages, self._pool.page_size))
        if self._lower is not None:
            return self._lower(reads, at, geometry).attend
        put = self._put
        found = [reference.Read(put(read.slots), read.first, put(read.queries), put(read.shifts)) for read in reads.each()]
        return lambda q, turned, k, v: reference.attend(q, k, v, found, positions, geometry)

    def _put(self, numbers: Tensor) -> Tensor:
        return numbers.to(self._device)

    def _slots(self, pages: Sequence[int]) -> Tensor:
        size = self._pool.page_size
        starts = torch.tensor(pages, dtype=torch.int64, device=self._device) * size
        return (starts[:, None] + torch.arange(size, device=self._device)).flatten()


Given = tuple[Sequence[int], int, int, Sequence[int], Sequence[int]]


def _reads(positions: Sequence[int], pages: Sequence[int], page_size: int) -> list[Given]:
    """What stands before a window is one read for all of its tokens; then neighbours together read the window, up to themselves."""
    found: list[Given] = []
    window = page_size * -(-WINDOW // page_size)
    for start in range(0, positions[-1] + 1 if positions else 0, window):
        mine = range(bisect_left(positions, start), bisect_left(positions, start + window))
        if start and mine:
            found.append((pages[: start // page_size], start, 0, mine, [0] * len(mine)))
        for first, last in _stretches(positions, mine):
            end = positions[last] + 1
            inside = pages[start // page_size : -(-end // page_size)]
            found.append((inside, end - start, start, range(first, last + 1), [0] * (last + 1 - first)))
    return found


def _stretches(positions: Sequence[int], places: range) -> Iterator[tuple[int, int]]:
    """The first and the last of each run of neighbours."""
    first = places.start
    for place in places:
        if place + 1 == places.stop or positions[place + 1] != positions[place] + 1:
            yield first, place
            first = place + 1


def _deviation(true: Tensor, copied: Tensor) -> Tensor:
    """Of each token, squared, and in terms of how large it is: so keys and values can be added."""
    true, copied = true.to(torch.float32).flatten(1), copied.to(torch.float32).flatten(1)
    return (true - copied).square().sum(1) / true.square().sum(1).clamp_min(torch.finfo(torch.float32).tiny)
