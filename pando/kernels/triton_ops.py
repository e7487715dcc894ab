"""The GPU kernels of what surrounds attention in a layer: norms, gates, linear maps of few rows, the write of new keys and values.

OVERLAPS: a launch may begin while the one before it still runs. Until it has waited it reads weights only, which nobody changes. Every
program waits before it reads or writes anything else: so whoever waits for this launch has waited for all before it. A launch lets the next
one begin when that cannot slow it down: at once if it streams weights itself, or if attention follows, which waits as well, or is launched
so that it cannot begin early; but not before it has its input if it only waits for memory and those behind it fetch at once.
"""

import triton
import triton.language as tl


@triton.jit
def add_norm(x, more, weight, out, eps, C: tl.constexpr, WIDE: tl.constexpr, ADDS: tl.constexpr, OVERLAPS: tl.constexpr):
    """One token of the stream: what is added is rounded before it is normed. WIDE is C, made a power of two."""
    dims = tl.arange(0, WIDE)
    whole = dims < C
    here = tl.program_id(0).to(tl.int64) * C + dims
    scale = tl.load(weight + dims, mask=whole, other=0.0).to(tl.float32)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    y = tl.load(x + here, mask=whole, other=0.0)
    if ADDS:
        y = (y.to(tl.float32) + tl.load(more + here, mask=whole, other=0.0).to(tl.float32)).to(y.dtype)
        tl.store(x + here, y, mask=whole)
    y = y.to(tl.float32)
    scale *= tl.rsqrt(tl.sum(y * y, 0) / C + eps)
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + here, (y * scale).to(out.dtype.element_ty), mask=whole)


@triton.jit
def _gated(gate, other):
    """Rounded where torch rounds: after the activation, and after the product."""
    x = gate.to(tl.float32)
    active = (x / (1.0 + tl.exp(-x))).to(gate.dtype)
    return (active.to(tl.float32) * other.to(tl.float32)).to(gate.dtype)


@triton.jit
def silu_gate(x, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Some of one token's [2 * SIZE] numbers: the first half, activated, times the second."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    whole = dims < SIZE
    here = x + token * 2 * SIZE + dims
    gate = tl.load(here, mask=whole, other=0.0)
    other = tl.load(here + SIZE, mask=whole, other=0.0)
    tl.store(out + token * SIZE + dims, _gated(gate, other), mask=whole)


@triton.jit
def few_rows(
    x, weight, scales, bias, out, count, outputs, inputs,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, ONCE: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some of the outputs of a linear map, for all tokens, which are at most TOKENS.

    All weights pass through once, and nothing is as slow as that: a block of them is fetched while the one before it is multiplied, the
    first before this launch has any input. ONCE: it is the only one. A thread adds up the GROUP products of what it fetches in one go; all
    others are added at the end. SCALED: weights have 8 bits, and each row has a scale. GATED: weights of gates come before those of what
    they let through; the rows of a pair are neighbours here.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    rows, dims, tokens = tl.arange(0, ROWS), tl.arange(0, BLOCK), tl.arange(0, TOKENS)
    if GATED:
        output = tl.program_id(0) * (ROWS // 2) + rows // 2
        rows = output + rows % 2 * outputs
    else:
        output = tl.program_id(0) * ROWS + rows
        rows = output
    real, here = (output < outputs)[None, :, None], weight + rows.to(tl.int64)[None, :, None] * inputs + dims[None, None, :]
    ahead = tl.load(here, mask=real & (dims < inputs)[None, None, :], other=0.0)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    mine, given = (tokens < count)[:, None, None], x + tokens[:, None, None] * inputs + dims[None, None, :]
    acc = tl.zeros([TOKENS, ROWS, BLOCK // GROUP], tl.float32)
    for k in range(0, BLOCK if ONCE else inputs, BLOCK):
        now = ahead.to(tl.float32)
        if not ONCE:
            ahead = tl.load(here + k + BLOCK, mask=real & (k + BLOCK + dims < inputs)[None, None, :], other=0.0)
        y = tl.load(given + k, mask=mine & (k + dims < inputs)[None, None, :], other=0.0).to(tl.float32)
        acc += tl.sum(tl.reshape(now * y, [TOKENS, ROWS, BLOCK // GROUP, GROUP]), 3)
    answer = tl.sum(acc, 2)
    if SCALED:
        answer *= tl.load(scales + rows, mask=output < outputs, other=0.0)[None, :]
    if BIASED:
        answer += tl.load(bias + rows, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    answer = answer.to(out.dtype.element_ty)
    if GATED:
        gate, other = tl.split(tl.reshape(answer, [TOKENS, ROWS // 2, 2]))
        answer = _gated(gate, other)
        output = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    tl.store(out + tokens[:, None] * outputs + output[None, :], answer, mask=(tokens < count)[:, None] & (output < outputs)[None, :])


@triton.jit(do_not_specialize=["count"])  # it is launched again for others: made for a multiple of 16, it would write beyond their end
def some_rows(
    x, weight, bias, out, count, outputs, inputs,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    BIASED: tl.constexpr, GATED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """As `few_rows`, for more tokens than can be multiplied one by one: ROWS of the outputs are the rows of a product. `weight` is a
    descriptor, beyond whose end there are zeros."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS
    output, dims, tokens = row + tl.arange(0, ROWS), tl.arange(0, BLOCK), tl.arange(0, TOKENS)
    given, mine = x + tokens[None, :] * inputs + dims[:, None], (tokens < count)[None, :]
    gate, other = tl.zeros([ROWS, TOKENS], tl.float32), tl.zeros([ROWS, TOKENS], tl.float32)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    for k in tl.range(0, inputs, BLOCK, num_stages=STAGES):
        y = tl.load(given + k, mask=mine & (k + dims < inputs)[:, None], other=0.0)
        gate = tl.dot(weight.load([row, k]), y, gate)
        if GATED:
            other = tl.dot(weight.load([outputs + row, k]), y, other)
    if BIASED:
        gate += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
        if GATED:
            other += tl.load(bias + outputs + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    answer = gate.to(out.dtype.element_ty)
    if GATED:
        answer = _gated(answer, other.to(out.dtype.element_ty))
    tl.store(out + tokens[None, :] * outputs + output[:, None], answer, mask=mine & (output < outputs)[:, None])


@triton.jit
def round_rows(x, codes, scales, C: tl.constexpr, WIDE: tl.constexpr, OVERLAPS: tl.constexpr):
    """One token's numbers in 8 bits, and their scale. WIDE is C, made a power of two."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    token, dims = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    y = tl.load(x + token * C + dims, mask=dims < C, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(y), 0) / 448.0, 1.1754943508222875e-38)
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(codes + token * C + dims, _in_8_bits(y / scale), mask=dims < C)
    tl.store(scales + token, scale)


@triton.jit
def _in_8_bits(x):
    return tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def rotate_and_store(
    qkv, turn, slots, turned, k, v,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: queries and keys are rotated by pairs, of which the first PAIRS turn; keys and values go to their slot."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    heads, dims = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, 2 * HALF)
    real = (heads < H + 2 * K)[:, None] & (dims < D)[None, :]
    x = tl.load(qkv + (token * (H + 2 * K) + heads)[:, None] * D + dims[None, :], mask=real, other=0.0)
    angle = tl.load(turn + token * (2 * PAIRS) + dims, mask=dims < 2 * PAIRS, other=0.0)
    y = _turned(x, angle, (heads < H + K)[:, None], PAIRS, HALF, HEADS)
    is_query, is_value = (heads < H)[:, None], (heads >= H + K)[:, None]
    tl.store(turned + (token * H + heads)[:, None] * D + dims[None, :], y, mask=real & is_query)
    if k.dtype.element_ty == tl.float8e4nv:
        y = _in_8_bits(y.to(tl.float32))
    tl.store(k + (slot * K + heads - H)[:, None] * D + dims[None, :], y, mask=real & ~is_query & ~is_value)
    tl.store(v + (slot * K + heads - H - K)[:, None] * D + dims[None, :], y, mask=real & is_value)


@triton.jit
def _turned(x, angle, moves, PAIRS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr):
    """Heads [HEADS, 2 HALF] by pairs of neighbours, of which the first PAIRS turn by as many angles (cosine, sine) where it `moves`. Taken
    apart only here: what is fetched and stored as pairs goes four bytes at a time."""
    a, b = tl.split(tl.reshape(x.to(tl.float32), (HEADS, HALF, 2)))
    cosine, sine = tl.split(tl.reshape(angle, (HALF, 2)))
    turns = moves & (tl.arange(0, HALF) < PAIRS)[None, :]
    y = tl.join(tl.where(turns, a * cosine[None] - b * sine[None], a), tl.where(turns, a * sine[None] + b * cosine[None], b))
    return tl.reshape(y, (HEADS, 2 * HALF)).to(x.dtype)


@triton.jit
def likeliest(logits, tokens, told, V, BLOCK: tl.constexpr, NOTHING: tl.constexpr):
    """The largest of one row's numbers, of equals the first. NOTHING is told of it where that is no finite number, or one is NaN."""
    here, mine = tl.arange(0, BLOCK), logits + tl.program_id(0).to(tl.int64) * V
    best, at, odd = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    ahead = tl.load(mine + here, mask=here < V, other=float("-inf"))
    for start in range(0, V, BLOCK):
        x, place = ahead.to(tl.float32), start + here
        ahead = tl.load(mine + place + BLOCK, mask=place + BLOCK < V, other=float("-inf"))
        odd = tl.where(x == x, odd, 1)
        at = tl.where(x > best, place, at)
        best = tl.where(x > best, x, best)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, at, V), 0)
    finite = (tl.max(odd, 0) == 0) & (tl.abs(top) < float("inf"))
    tl.store(tokens + tl.program_id(0), token)
    tl.store(told + tl.program_id(0), tl.where(finite, token, NOTHING))


@triton.jit(do_not_specialize=["count"])
def turn_again(
    q, turned, moved, turn, out, count, apart,
    H: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some heads of one query: as it is turned for most of what it reads; or, behind all of these, for a placement that is shifted."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    item = tl.program_id(0)
    heads, dims = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, 2 * HALF)
    here, real = heads[:, None] * D + dims[None, :], (heads < H)[:, None] & (dims < D)[None, :]
    is_moved = item >= count
    place = tl.where(is_moved, item - count, 0)
    token = tl.load(moved + place).to(tl.int64)
    x = tl.load(tl.where(is_moved, q + token * apart, turned + item.to(tl.int64) * (H * D)) + here, mask=real, other=0.0)
    angle = tl.load(turn + place * (2 * PAIRS) + dims, mask=is_moved & (dims < 2 * PAIRS), other=0.0)
    y = _turned(x, angle, is_moved, PAIRS, HALF, HEADS)
    tl.store(out + item.to(tl.int64) * (H * D) + here, y, mask=real)
