"""The GPU kernels of attention: a plan's tiles, the merge of their parts, and pages that come from host memory.

A tile is a run of keys and the packed queries that look at it: pairs of a read and a query, each with the G heads of a key's group. Keys
come in whole blocks through a descriptor of the pool, so that nothing but their page is looked up; in short tiles, and where a block is
fetched ahead of the others, one by one, so that none comes that nobody sees. Weights are powers of 2 inside a kernel; a part leaves it as
(answer, lse), fp32, with the natural logarithm. What changes from step to step, how many keys each pair sees, `begin` computes on the
device, once for all layers.
"""

import triton
import triton.language as tl

# Of a tile: where its read's pages are listed, first key, end of the keys that all pairs see, end of those that any sees, pair, pairs,
# part, end of the run, page of the first key, and of the first that not all pairs see (they are listed, too; but who knows them has one
# thing less to wait for). Zeros are no tile.
FIELDS = 10
TILE = tl.constexpr(FIELDS)


@triton.jit
def begin(
    positions, tiles, counts, pages, reader, base, room, seen, ahead, PAGE: tl.constexpr, PAIRS: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """How many keys each pair of a tile sees, and how far ahead of its query the first one lies."""
    if tl.program_id(0) < tl.load(counts + 1):
        tile = tiles + tl.program_id(0) * TILE
        first, stop = tl.load(tile + 1), tl.load(tile + 7)
        mine = tl.arange(0, PAIRS)
        real = mine < tl.load(tile + 5)
        mine += tl.load(tile + 4)
        token = tl.load(reader + mine, mask=real, other=0)
        offset = tl.load(base + mine, mask=real, other=0) - tl.load(positions + token, mask=real, other=0).to(tl.int32)
        limit = tl.minimum(tl.maximum(1 - offset, 0), tl.load(room + mine, mask=real, other=0))
        tl.store(seen + mine, limit, mask=real)
        tl.store(ahead + mine, offset, mask=real)
        end = tl.maximum(first, tl.minimum(stop, tl.max(tl.where(real, limit, 0), 0)))
        least = tl.maximum(first, tl.minimum(end, tl.min(tl.where(real, limit, stop), 0)))
        full = first + (least - first) // KEYS * KEYS
        tl.store(tile + 2, full)
        tl.store(tile + 3, end)
        tl.store(tile + 9, tl.load(pages + tl.load(tile) + full // PAGE, mask=full < end, other=0))


@triton.jit
def _weigh(q, k, scale, slope, offset, limit, j, peak, total, ALIBI: tl.constexpr, PRECISION: tl.constexpr):
    """Keys of which some are not for all, or for nobody."""
    score = tl.dot(q, k.to(q.dtype).T, input_precision=PRECISION) * scale
    if ALIBI:
        score += slope[:, None] * (offset[:, None] + j[None, :]).to(tl.float32)
    score = tl.where(j[None, :] < limit[:, None], score, float("-inf"))
    top = tl.maximum(peak, tl.max(score, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen nothing yet
    weight = tl.exp2(score - safe[:, None])
    shrink = tl.exp2(peak - safe)
    return weight.to(q.dtype), shrink[:, None], top, total * shrink + tl.sum(weight, 1)


@triton.jit
def _look(
    q, k, v, blocks_k, blocks_v, slopes, pages, query, seen, ahead, places, parts, lses, out, scale, tile, head,
    H: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr, AHEAD: tl.constexpr, ALIBI: tl.constexpr, PRECISION: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """One tile for one kv head. WIDE is D, made a power of two: what a block holds beyond D meets zeros, or is not stored. AHEAD: the first
    block that not all pairs see, mostly the only one, is fetched before all others and looked at behind them: nobody waits for it."""
    first = tl.load(tile)
    start = tl.load(tile + 1)
    pair = tl.load(tile + 4)
    pairs = tl.load(tile + 5)
    part = tl.load(tile + 6)
    page = tl.load(tile + 8)
    rows, dims, keys = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, KEYS)
    real, whole = rows < pairs * G, dims < D
    mine, name = pair + rows // G, head * G + rows % G
    who = tl.load(query + mine, mask=real, other=0).to(tl.int64)
    place = tl.load(places + part + rows // G, mask=real, other=0)
    if WAITS:  # what it read until now is the plan, which stays
        tl.extra.cuda.gdc_wait()
    full = tl.load(tile + 2)
    end = tl.load(tile + 3)
    x = tl.load(q + (who * H + name)[:, None] * D + dims[None, :], mask=real[:, None] & whole[None, :], other=0.0)
    if ALIBI:
        slope = tl.load(slopes + name, mask=real, other=0.0) * 1.4426950408889634
        offset = tl.load(ahead + mine, mask=real, other=0)
    else:
        slope, offset = 0.0, 0
    if AHEAD:
        spot = (tl.load(tile + 9) * PAGE + full % PAGE + keys).to(tl.int64)[:, None] * (K * D) + head * D + dims[None, :]
        there = (full + keys < end)[:, None] & whole[None, :]
        key_ahead = tl.load(k + spot, mask=there, other=0.0)
        value_ahead = tl.load(v + spot, mask=there, other=0.0)
        limit = tl.load(seen + mine, mask=real, other=0)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    last = (tl.maximum(end, 1) - 1) // PAGE
    if EXACT:
        full = start
    else:
        for at in tl.range(start, full, KEYS, num_stages=STAGES):
            slot = page * PAGE + at % PAGE
            page = tl.load(pages + first + tl.minimum((at + KEYS) // PAGE, last))  # a block early: the descriptor need not wait for it
            score = tl.dot(x, blocks_k.load([slot, head * D]).to(x.dtype).T, input_precision=PRECISION)
            if ALIBI:
                score = score * scale + slope[:, None] * (offset[:, None] + (at + keys)[None, :]).to(tl.float32)
                top = tl.maximum(peak, tl.max(score, 1))
                weight = tl.exp2(score - top[:, None])
            else:
                top = tl.maximum(peak, tl.max(score, 1) * scale)
                weight = tl.exp2(score * scale - top[:, None])
            shrink = tl.exp2(peak - top)
            total = total * shrink + tl.sum(weight, 1)
            acc = acc * shrink[:, None]
            acc = tl.dot(weight.to(x.dtype), blocks_v.load([slot, head * D]).to(x.dtype), acc, input_precision=PRECISION)
            peak = top
    if full < end:
        if AHEAD:
            weight, shrink, peak, total = _weigh(x, key_ahead, scale, slope, offset, limit, full + keys, peak, total, ALIBI, PRECISION)
            acc = tl.dot(weight, value_ahead.to(x.dtype), acc * shrink, input_precision=PRECISION)
            full += KEYS
            page = tl.load(pages + first + tl.minimum(full // PAGE, last))
        else:
            limit = tl.load(seen + mine, mask=real, other=0)
        for at in tl.range(full, end, KEYS, num_stages=STAGES if EXACT else 1):
            slot = page * PAGE + at % PAGE
            page = tl.load(pages + first + tl.minimum((at + KEYS) // PAGE, last))
            j = at + keys
            if EXACT:
                spot = (slot + keys).to(tl.int64)[:, None] * (K * D) + head * D + dims[None, :]
                there = (j < end)[:, None] & whole[None, :]
                key = tl.load(k + spot, mask=there, other=0.0)
                value = tl.load(v + spot, mask=there, other=0.0)
            else:
                key = blocks_k.load([slot, head * D])
            weight, shrink, peak, total = _weigh(x, key, scale, slope, offset, limit, j, peak, total, ALIBI, PRECISION)
            if not EXACT:
                value = tl.where((j < end)[:, None], blocks_v.load([slot, head * D]), 0.0)  # what nobody sees may hold anything, even NaN
            acc = tl.dot(weight, value.to(x.dtype), acc * shrink, input_precision=PRECISION)
    if WAITS:
        tl.extra.cuda.gdc_launch_dependents()
    empty = total == 0.0
    answer = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, total)[:, None])
    lse = tl.where(empty, float("-inf"), (peak + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453)
    partial, only = real & (place >= 0), real & (place < 0)
    to = place.to(tl.int64) * H + name
    tl.store(lses + to, lse, mask=partial)
    tl.store(parts + to[:, None] * D + dims[None, :], answer, mask=partial[:, None] & whole[None, :])
    to = (-1 - place).to(tl.int64) * H + name  # a token's only part is its answer
    tl.store(out + to[:, None] * D + dims[None, :], answer.to(out.dtype.element_ty), mask=only[:, None] & whole[None, :])


@triton.jit
def look(
    q, k, v, blocks_k, blocks_v, slopes, tiles, counts, pages, query, seen, ahead, places, parts, lses, out, scale,
    H: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr, AHEAD: tl.constexpr, ALIBI: tl.constexpr, PRECISION: tl.constexpr,
    LARGE: tl.constexpr, ALL: tl.constexpr, MANY: tl.constexpr, WAITS: tl.constexpr, EARLY: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """The large tiles of a plan, or the small ones behind them. The pool's k and v come twice, as pointers and as descriptors; those that
    take keys one by one have no descriptors. ALL: there are only these, and nobody waits to be told how many, since those behind them are
    zeros. MANY: a program takes one tile after the other. WAITS: this launch may begin while the one before it runs, as those of
    `triton_ops`, and lets the next one begin when it has looked.

    EARLY: the launch that follows may begin while this one runs. It is the other kind of tile, which needs nothing of this one and finds
    the room that large tiles leave, so that one computes while the other fetches; or the merge, which waits. A merge waits for the launch
    before it only: AFTER, that launch ends no earlier than the one before.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    low = 0 if LARGE or ALL else tl.load(counts) * K
    if MANY:
        high = (tl.load(counts) if LARGE else tl.load(counts + 1)) * K
        for i in tl.range(low + tl.program_id(0), high, tl.num_programs(0)):
            _look(
                q, k, v, blocks_k, blocks_v, slopes, pages, query, seen, ahead, places, parts, lses, out, scale,
                tiles + i // K * TILE, i % K, H, K, G, D, WIDE, PAGE, ROWS, KEYS, STAGES, EXACT, AHEAD, ALIBI, PRECISION, WAITS,
            )  # fmt: skip
    else:
        i = low + tl.program_id(0)
        if ALL or i < (tl.load(counts) if LARGE else tl.load(counts + 1)) * K:
            _look(
                q, k, v, blocks_k, blocks_v, slopes, pages, query, seen, ahead, places, parts, lses, out, scale,
                tiles + i // K * TILE, i % K, H, K, G, D, WIDE, PAGE, ROWS, KEYS, STAGES, EXACT, AHEAD, ALIBI, PRECISION, WAITS,
            )  # fmt: skip
    if AFTER:  # noqa: SIM102
        if tl.program_id(0) == tl.num_programs(0) - 1:
            tl.extra.cuda.gdc_wait()


@triton.jit
def look_alone(
    q, k, v, tiles, counts, pages, query, places, parts, lses, out, scale,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    EARLY: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """Small tiles of one query each, in models whose heads all have keys of their own. A product would have one row: numbers are multiplied
    and added up as they come, for some heads at a time. EARLY and AFTER as in `look`."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    BLOCKS: tl.constexpr = H // HEADS
    i = tl.load(counts) + tl.program_id(0) // BLOCKS
    if i < tl.load(counts + 1):
        tile = tiles + i * TILE
        first = tl.load(tile)
        start = tl.load(tile + 1)
        end = tl.load(tile + 3)
        who = tl.load(query + tl.load(tile + 4)).to(tl.int64)
        place = tl.load(places + tl.load(tile + 6)).to(tl.int64)
        last = (tl.maximum(end, 1) - 1) // PAGE
        page = tl.load(tile + 8)
        heads = tl.program_id(0) % BLOCKS * HEADS + tl.arange(0, HEADS)
        dims, keys = tl.arange(0, WIDE), tl.arange(0, KEYS)
        mine, whole = heads[:, None] * D + dims[None, :], (dims < D)[None, :]
        x = tl.load(q + who * (H * D) + mine, mask=whole, other=0.0).to(tl.float32) * scale
        peak = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, WIDE], tl.float32)
        for at in tl.range(start, end, KEYS, num_stages=3):
            slot = page * PAGE + at % PAGE
            page = tl.load(pages + first + tl.minimum((at + KEYS) // PAGE, last))
            seen = at + keys < end
            spot = (slot + keys).to(tl.int64)[:, None, None] * (H * D) + mine[None, :, :]
            there = seen[:, None, None] & whole[None, :, :]
            key = tl.load(k + spot, mask=there, other=0.0).to(tl.float32)
            value = tl.load(v + spot, mask=there, other=0.0).to(tl.float32)
            score = tl.where(seen[:, None], tl.sum(key * x[None, :, :], 2), float("-inf"))
            top = tl.maximum(peak, tl.max(score, 0))
            weight = tl.exp2(score - top[None, :])
            shrink = tl.exp2(peak - top)
            total = total * shrink + tl.sum(weight, 0)
            acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * value, 0)
            peak = top
        empty = total == 0.0
        answer = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, total)[:, None])
        if place >= 0:
            lse = tl.where(empty, float("-inf"), (peak + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453)
            tl.store(lses + place * H + heads, lse)
            tl.store(parts + place * (H * D) + mine, answer, mask=whole)
        else:  # a token's only part is its answer
            tl.store(out + (-1 - place) * (H * D) + mine, answer.to(out.dtype.element_ty), mask=whole)
    if AFTER:  # noqa: SIM102
        if tl.program_id(0) == tl.num_programs(0) - 1:
            tl.extra.cuda.gdc_wait()


@triton.jit
def merge(
    parts, lses, starts, tokens, counts, out,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """The parts of one token, for some of its heads. A part that saw nothing weighs nothing; a token without any answers zero."""
    item = tl.program_id(0)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims, some = tl.arange(0, WIDE), tl.arange(0, PARTS)
    real, whole = heads < H, dims < D
    wanted = item < tl.load(counts + 2)
    token = tl.load(tokens + item, mask=wanted, other=0).to(tl.int64)
    start, stop = tl.load(starts + item, mask=wanted, other=0), tl.load(starts + item + 1, mask=wanted, other=0)
    if AFTER:  # even those without work wait: whoever waits for this launch has waited for the one before it
        tl.extra.cuda.gdc_wait()
    if wanted:
        peak = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, WIDE], tl.float32)
        for i in tl.range(start, stop, PARTS):
            there = real[:, None] & (i + some < stop)[None, :]
            place = (i + some).to(tl.int64)[None, :] * H + heads[:, None]
            lse = tl.load(lses + place, mask=there, other=float("-inf")) * 1.4426950408889634
            block = tl.load(parts + place[:, :, None] * D + dims[None, None, :], mask=there[:, :, None] & whole[None, None, :], other=0.0)
            top = tl.maximum(peak, tl.max(lse, 1))
            safe = tl.where(top == float("-inf"), 0.0, top)
            weight, shrink = tl.exp2(lse - safe[:, None]), tl.exp2(peak - safe)
            total = total * shrink + tl.sum(weight, 1)
            acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * block, 1)
            peak = top
        answer = tl.where((total == 0.0)[:, None], 0.0, acc / tl.where(total == 0.0, 1.0, total)[:, None])
        to = (token * H + heads)[:, None] * D + dims[None, :]
        tl.store(out + to, answer.to(out.dtype.element_ty), mask=real[:, None] & whole[None, :])


@triton.jit
def fetch(sources, pages, k, v, count, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Pages of a layer from pinned host memory, where keys come first, then values. All in numbers of 4 bytes. A program takes one part
    of a page after the other: few programs are enough to wait for the bus, and more would take the processors from those who compute."""
    PARTS: tl.constexpr = (HALF + BLOCK - 1) // BLOCK
    for i in tl.range(tl.program_id(0), count * PARTS, tl.num_programs(0)):
        source = tl.load(sources + i // PARTS).to(tl.pointer_type(tl.int32))
        page = tl.load(pages + i // PARTS)
        at = i % PARTS * BLOCK + tl.arange(0, BLOCK)
        real = at < HALF
        keys = tl.load(source + at, mask=real)
        values = tl.load(source + HALF + at, mask=real)
        tl.store(k + page * HALF + at, keys, mask=real)
        tl.store(v + page * HALF + at, values, mask=real)


@triton.jit(do_not_specialize=["count", "rest"])
def bring(source, target, count, other_source, other_target, rest, BLOCK: tl.constexpr):
    """Numbers from one place to another, of which one is pinned memory; and others, where there are any."""
    program, first = tl.program_id(0), tl.cdiv(count, BLOCK)
    if program < first:
        at = program * BLOCK + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < count, other=0), mask=at < count)
    else:
        at = (program - first) * BLOCK + tl.arange(0, BLOCK)
        tl.store(other_target + at, tl.load(other_source + at, mask=at < rest, other=0), mask=at < rest)
