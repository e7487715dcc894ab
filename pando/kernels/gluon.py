"""The large tiles on a Hopper GPU, where warps may have parts of their own.

One warp fetches keys and values, as far ahead as there is room. Two groups of four warps look at them, half of the packed queries each.
A group has the scores of one block and the sum over the values of the block before computed at once, and while it weighs those scores the
other group's are computed. Tiles and results are those of `triton.look`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .triton import FIELDS

ROWS = gl.constexpr(64)  # packed queries of a group
KEYS = gl.constexpr(128)  # of a block
K_HERE, V_HERE, K_DONE, V_DONE = map(gl.constexpr, range(4))  # what each stage is waited for
TILE = gl.constexpr(FIELDS)
TOGETHER = gl.constexpr(8)  # tiles that neighbours take, one each, before any takes another head's
LOOKS, FETCHES = gl.constexpr(192), gl.constexpr(24)  # registers of a thread, by what it does
REGISTERS = 136  # of each thread of twelve warps, when a program begins: as many in all as their parts take then


@gluon.jit
def _tile(tiles, i, high, K: gl.constexpr):
    """Its fields, and its head; first key, end of those that all see, end of those looked at, which is one block at least, and of those
    that any sees. Programs that are neighbours take tiles that are: what they fetch is the same, and is fetched for both at once."""
    group = i // (TOGETHER * K)
    rest, some = i - group * (TOGETHER * K), gl.minimum(TOGETHER, high // K - group * TOGETHER)
    tile = tiles + (group * TOGETHER + rest % some) * TILE
    start, end = gl.load(tile + 1), gl.load(tile + 3)
    return tile, rest // some, start, start + (gl.load(tile + 2) - start) // KEYS * KEYS, gl.maximum(end, start + 1), end


@gluon.jit
def _bring(pool, book, at, last, column, bar, block, PAGE: gl.constexpr, D: gl.constexpr):
    """One block of keys or values, page by page; where there are no more pages, the last one again."""
    mbarrier.expect(bar, KEYS * D * 2)
    for part in gl.static_range(KEYS // PAGE):
        slot = gl.load(book + gl.minimum(at // PAGE + part, last)) * PAGE
        tma.async_copy_global_to_shared(pool, [slot, column], bar, block.slice(part * PAGE, PAGE))


@gluon.jit
def _fetch(k, v, tiles, high, pages, ks, vs, bars, K: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr):
    count = 0
    for i in range(gl.program_id(0), high, gl.num_programs(0)):
        tile, head, start, _, stop, end = _tile(tiles, i, high, K)
        book, last = pages + gl.load(tile), (gl.maximum(end, 1) - 1) // PAGE
        for at in range(start, stop, KEYS):
            stage, turn = count % STAGES, (count // STAGES & 1) ^ 1
            mbarrier.wait(bars.index(K_DONE * STAGES + stage), turn)
            _bring(k, book, at, last, head * D, bars.index(K_HERE * STAGES + stage), ks.index(stage), PAGE, D)
            mbarrier.wait(bars.index(V_DONE * STAGES + stage), turn)
            _bring(v, book, at, last, head * D, bars.index(V_HERE * STAGES + stage), vs.index(stage), PAGE, D)
            count += 1


@gluon.jit
def _weigh(score, peak, limit, at, scale, MASKED: gl.constexpr):
    if MASKED:
        SCORE: gl.constexpr = score.type.layout
        keys = at + gl.arange(0, KEYS, gl.SliceLayout(0, SCORE))
        score = gl.where(keys[None, :] < limit[:, None], score, float("-inf"))
    top = gl.maximum(peak, gl.max(score, 1) * scale)
    safe = gl.where(top == float("-inf"), 0.0, top) if MASKED else top  # a row that has seen nothing yet
    return gl.exp2(score * scale - safe[:, None]), gl.exp2(peak - safe), top


@gluon.jit
def _clean(values, left, D: gl.constexpr):
    """Zeros for the values that nobody sees: they may be anything, even NaN. Both groups do it, neither waits for the other."""
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    keys = gl.arange(0, 16, gl.SliceLayout(1, LOADED))
    for first in gl.static_range(0, KEYS, 16):
        part = values.slice(first, 16)
        value = part.load(LOADED)
        part.store(gl.where((first + keys < left)[:, None], value, gl.zeros_like(value)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _round(
    x, ks, vs, bars, count, weight, acc, peak, total, limit, at, left, scale,
    D: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Weights of one block, and the sum with those of the block before it."""
    SCORE: gl.constexpr = peak.type.layout.parent
    SUM: gl.constexpr = acc.type.layout
    WEIGHT: gl.constexpr = weight.type.layout
    stage, before = count % STAGES, (count - 1) % STAGES
    mbarrier.wait(bars.index(K_HERE * STAGES + stage), count // STAGES & 1)
    score = gl.zeros([ROWS, KEYS], gl.float32, SCORE)
    score = warpgroup_mma(x, ks.index(stage).permute((1, 0)), score, use_acc=False, is_async=True)
    mbarrier.wait(bars.index(V_HERE * STAGES + before), (count - 1) // STAGES & 1)
    acc = warpgroup_mma(weight, vs.index(before), acc, is_async=True)
    score = warpgroup_mma_wait(1, deps=[score])
    mbarrier.arrive(bars.index(K_DONE * STAGES + stage))
    acc, weight = warpgroup_mma_wait(0, deps=[acc, weight])
    mbarrier.arrive(bars.index(V_DONE * STAGES + before))
    fresh, shrink, peak = _weigh(score, peak, limit, at, scale, MASKED)
    total = total * shrink + gl.sum(fresh, 1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUM))[:, None]
    weight = gl.convert_layout(fresh.to(vs.dtype), WEIGHT)
    if MASKED:  # noqa: SIM102
        if left < KEYS:
            mbarrier.wait(bars.index(V_HERE * STAGES + stage), count // STAGES & 1)
            _clean(vs.index(stage), left, D)
    return weight, acc, peak, total


@gluon.jit
def _look(
    q, tiles, high, query, seen, places, parts, lses, out, scale, x, ks, vs, bars,
    H: gl.constexpr, K: gl.constexpr, G: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    count = 0
    for i in range(gl.program_id(0), high, gl.num_programs(0)):
        tile, head, start, full, _, end = _tile(tiles, i, high, K)
        pair, many, first = gl.load(tile + 4), gl.load(tile + 5) * G, head * G
        rows, dims = GROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LOADED)), gl.arange(0, D, gl.SliceLayout(0, LOADED))
        real = rows < many
        who = gl.load(query + pair + rows // G, mask=real, other=0).to(gl.int64)
        x.store(gl.load(q + (who * H + first + rows % G)[:, None] * D + dims[None, :], mask=real[:, None], other=0.0))
        fence_async_shared()
        gl.thread_barrier()
        rows = GROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORE))
        limit = gl.minimum(gl.load(seen + pair + rows // G, mask=rows < many, other=0), end)

        stage, turn = count % STAGES, count // STAGES & 1
        mbarrier.wait(bars.index(K_HERE * STAGES + stage), turn)
        score = warpgroup_mma(x, ks.index(stage).permute((1, 0)), gl.zeros([ROWS, KEYS], gl.float32, SCORE), use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=[score])
        mbarrier.arrive(bars.index(K_DONE * STAGES + stage))
        peak = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORE))
        fresh, _, peak = _weigh(score, peak, limit, start, scale, True)
        total = gl.sum(fresh, 1)
        weight = gl.convert_layout(fresh.to(vs.dtype), gl.DotOperandLayout(0, SUM, 2))
        if end - start < KEYS:
            mbarrier.wait(bars.index(V_HERE * STAGES + stage), turn)
            _clean(vs.index(stage), end - start, D)
        acc = gl.zeros([ROWS, D], gl.float32, SUM)
        count += 1
        for at in range(start + KEYS, full, KEYS):
            weight, acc, peak, total = _round(x, ks, vs, bars, count, weight, acc, peak, total, limit, at, KEYS, scale, D, STAGES, False)
            count += 1
        for at in range(gl.maximum(full, start + KEYS), end, KEYS):
            weight, acc, peak, total = _round(x, ks, vs, bars, count, weight, acc, peak, total, limit, at, end - at, scale, D, STAGES, True)
            count += 1
        stage, turn = (count - 1) % STAGES, (count - 1) // STAGES & 1
        mbarrier.wait(bars.index(V_HERE * STAGES + stage), turn)
        acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(weight, vs.index(stage), acc, is_async=True)])
        mbarrier.arrive(bars.index(V_DONE * STAGES + stage))

        empty = total == 0.0
        total = gl.where(empty, 1.0, total)
        lse = gl.where(empty, float("-inf"), (peak + gl.log2(total)) * 0.6931471805599453)
        answer = acc * gl.convert_layout(gl.where(empty, 0.0, 1.0 / total), gl.SliceLayout(1, SUM))[:, None]
        rows, dims = GROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SUM)), gl.arange(0, D, gl.SliceLayout(0, SUM))
        real = rows < many
        place = gl.load(places + gl.load(tile + 6) + rows // G, mask=real, other=0)
        partial, only = real & (place >= 0), real & (place < 0)
        to = place.to(gl.int64) * H + first + rows % G
        gl.store(lses + to, gl.convert_layout(lse, gl.SliceLayout(1, SUM)), mask=partial)
        gl.store(parts + to[:, None] * D + dims[None, :], answer, mask=partial[:, None])
        to = (-1 - place).to(gl.int64) * H + first + rows % G  # a token's only part is its answer
        gl.store(out + to[:, None] * D + dims[None, :], answer.to(out.dtype.element_ty), mask=only[:, None])


@gluon.jit
def look(
    q, k, v, tiles, counts, pages, query, seen, places, parts, lses, out, scale,
    H: gl.constexpr, K: gl.constexpr, G: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """One program takes one tile after the other. EARLY: the launch that follows may begin while this one runs, as in `triton.look`."""
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    high = gl.load(counts) * K
    STAGES: gl.constexpr = 256 // D  # so many that a small program finds the shared memory it needs
    DTYPE: gl.constexpr = q.dtype.element_ty
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    one, other = gl.allocate_shared_memory(DTYPE, [ROWS, D], LAYOUT), gl.allocate_shared_memory(DTYPE, [ROWS, D], LAYOUT)
    ks = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, D], LAYOUT)
    vs = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, D], LAYOUT)
    bars = gl.allocate_shared_memory(gl.int64, [4 * STAGES, 1], mbarrier.MBarrierLayout())
    for bar in gl.static_range(4 * STAGES):
        mbarrier.init(bars.index(bar), count=1 if bar < K_DONE * STAGES else 2)  # both groups must be done
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_look, (q, tiles, high, query, seen, places, parts, lses, out, scale, one, ks, vs, bars, H, K, G, D, STAGES, 0)),
            (_look, (q, tiles, high, query, seen, places, parts, lses, out, scale, other, ks, vs, bars, H, K, G, D, STAGES, 1)),
            (_fetch, (k, v, tiles, high, pages, ks, vs, bars, K, D, PAGE, STAGES)),
        ],
        [4, 1], [LOOKS, FETCHES],
    )  # fmt: skip
