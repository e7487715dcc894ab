"""Drawing from distributions, many rows at once: which tokens are kept, and which of them a uniform number points at.

The uniform behind a draw depends on the row's seed and position alone, and no sum here runs across rows, so a seeded answer is the same in
every batch. Nothing is sorted that need not be: a row without top_k and top_p is summed in blocks, one with them looks at a short list.
"""

import numpy as np
import torch
from torch import Tensor

Score = tuple[float, list[tuple[int, float, int]]]

BLOCK = 256  # a draw finds its block of the vocabulary first, then its token
SHORTLIST = 512  # likeliest tokens looked at before a whole row is sorted; real text seldom needs more


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each seed and position: two rounds of the splitmix64 finaliser over the pair."""
    gamma = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seeds + gamma) + (positions.astype(np.uint64) + np.uint64(1)) * gamma)
    return np.asarray((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


def draw_whole(x: Tensor, floor: Tensor | None, chance: Tensor) -> Tensor:
    """The token at `chance` of each row's distribution, in order of id. x [n, V] has its largest at 0; below `floor` nothing is kept."""
    count, vocab = x.shape
    weights = torch.zeros(count, -(-vocab // BLOCK) * BLOCK, device=x.device)
    torch.exp(x, out=weights[:, :vocab])
    if floor is not None:
        weights[:, :vocab].masked_fill_(x < floor[:, None], 0)
    blocks = weights.view(count, -1, BLOCK)
    sums = blocks.sum(-1).double().cumsum(-1)  # [n, blocks]
    target = chance[:, None] * sums[:, -1:]
    block = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)  # [n, 1]
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_(min=0)), 0)
    inside = blocks[torch.arange(count, device=x.device), block[:, 0]].double().cumsum(-1)  # [n, BLOCK]
    # The block's sum was rounded differently, so the rest may lie past its end; what is chosen must still have weight.
    rest = torch.minimum(target - before, torch.nextafter(inside[:, -1:], torch.zeros_like(target)))
    token = block * BLOCK + torch.searchsorted(inside, rest, right=True)
    return token[:, 0].clamp_(max=vocab - 1)  # only a row of NaN needs it


def shortlist(x: Tensor, floor: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What min_p, top_k and top_p keep of each row: all three keep the first so many of the tokens in falling order, a tie to the lower id.

    Looks at the `width` likeliest only. Gives their ids [n, width], running sums of weight [n, width], how many are kept [n], and whether
    that is settled [n]: a row whose limit lies beyond, or on a tie with what lies beyond, must be asked again with the whole vocabulary.
    """
    vocab = x.shape[1]
    values, ids = _largest(x, width)
    sums = values.double().exp().cumsum(-1)
    allowed = (values >= floor[:, None]) & (torch.arange(width, device=x.device) < top_k[:, None])
    limit = allowed.sum(-1, keepdim=True).clamp_(min=1)
    total = sums.gather(1, limit - 1)
    beyond = limit[:, 0] == width
    open_ended = beyond & (top_k == vocab)
    if _may_be_any(open_ended):
        weights = x.exp().masked_fill_(x < floor[:, None], 0)
        total = torch.where(open_ended[:, None], weights.sum(-1, keepdim=True).double(), total)
    reached = 1 + (sums[:, :-1] < top_p[:, None] * total).sum(-1, keepdim=True)
    kept = torch.minimum(limit, reached)
    if width == vocab:
        return ids, sums, kept[:, 0], torch.ones_like(beyond)
    settled = (open_ended | ~beyond) & (values.gather(1, kept - 1) > values[:, -1:])[:, 0]
    return ids, sums, kept[:, 0], settled


def _largest(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest of each row, falling, equal values by rising id; which of several equals are taken last is open."""
    if width == x.shape[1]:
        values, ids = x.sort(dim=-1, descending=True, stable=True)
        return values, ids
    values, ids = x.topk(width)
    if _may_be_any(values[:, 1:] == values[:, :-1]):
        ids, order = ids.sort(dim=-1)
        values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(1, order)
    return values, ids


def _may_be_any(flags: Tensor) -> bool:
    """On a CPU what nobody needs is not done; asking a GPU would take longer than doing it."""
    return flags.is_cuda or bool(flags.any())


def draw_listed(ids: Tensor, sums: Tensor, kept: Tensor, chance: Tensor) -> Tensor:
    last = kept[:, None] - 1
    place = torch.searchsorted(sums, chance[:, None] * sums.gather(1, last), right=True)
    return ids.gather(1, torch.minimum(place, last))[:, 0]


def scores(raw: Tensor, tokens: Tensor, wanted: list[int]) -> list[Score]:
    """Of each row's token, and of so many of the likeliest in its place."""
    found = scored(raw, tokens, min(max(wanted), raw.shape[1]))
    return list(map(listed, found.tolist(), tokens.tolist(), wanted))


def scored(raw: Tensor, tokens: Tensor, width: int) -> Tensor:
    """What `listed` makes a score of, without waiting for it: [n, 2 + 2 width], fp64."""
    bits = (raw + 0.0).view(torch.int32)  # never -0
    order = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long() << 32  # whole numbers in the order of the logprobs;
    order += 0xFFFFFFFF - torch.arange(raw.shape[1], device=raw.device)  # of a tie, the lower id is the larger one
    at = tokens.clamp(min=0)[:, None]
    ids = 0xFFFFFFFF - (order.topk(width).values & 0xFFFFFFFF)
    rank = (order >= order.gather(1, at)).sum(-1, keepdim=True)
    return torch.cat([numbers.double() for numbers in (raw.gather(1, at), rank, raw.gather(1, ids), ids)], dim=1)


def listed(numbers: list[float], token: int, count: int) -> Score:
    """The logprob of a token; then it and the `count` likeliest with their logprobs and ranks, where a tie ranks the lower id first."""
    logprob, rank, *others = numbers
    values, ids = others[: len(others) // 2], map(int, others[len(others) // 2 :])
    likeliest = list(zip(ids, values, range(1, count + 1), strict=False))
    return logprob, [(token, logprob, int(rank)), *(other for other in likeliest if other[0] != token)]
