/* Linear maps: of plain weights, and of weights in blocks. Included by native.c. */

/* Four rows of weights against four rows of input: sixteen sums in registers for eight loads. As many weights from `next` on are asked for
   meanwhile, if there is one. */
static inline void dots_4x4(const el *const w[4], const el *const x[4], int n, const el *next, float out[4][4]) {
    vec sum[4][4] = {{{0}}};
    int i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
#ifdef __x86_64__
        if (next)
            for (unsigned line = 0; line < 4 * WIDTH * sizeof(el); line += 64) __builtin_prefetch((const char *)(next + 4 * i) + line, 0, CACHE);
#endif
        vec b0 = load(x[0] + i), b1 = load(x[1] + i), b2 = load(x[2] + i), b3 = load(x[3] + i);
        for (int r = 0; r < 4; r++) {
            vec a = load(w[r] + i);
            sum[r][0] += a * b0;
            sum[r][1] += a * b1;
            sum[r][2] += a * b2;
            sum[r][3] += a * b3;
        }
    }
    for (int r = 0; r < 4; r++) {
        quad sums = totals(sum[r]);
        memcpy(out[r], &sums, sizeof sums);
        for (int c = 0; c < 4; c++)
            for (int j = i; j < n; j++) out[r][c] += up(w[r][j]) * up(x[c][j]);
    }
}

#ifdef TILES
#define MADE 2 /* tiles of weights that are widened ahead of the products */

/* 32 weights of a row, as the plain ones are: in one piece where that can be, for a tile that loads what was stored in two waits for it. */
ALWAYS void widen_row(int kind, const uint8_t *row, el *to) {
    const int group = kind == SHORT ? 16 : 32, bytes = group / 4 * kind;
#if defined(WIDE) && defined(__AVX512BF16__) && defined(__AVX512BW__)
    if (kind == NIBBLES) { /* one of sixteen, which are there twice, since five bits of a number count */
        const __m512i halves = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
        float scale, offset;
        memcpy(&scale, row, 4);
        memcpy(&offset, row + 4, 4);
        __m512i table = _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh((__m512)nibbles_of(scale, offset)));
        __m512i both = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(row + 8))));
        _mm512_store_si512(to, _mm512_permutexvar_epi16(_mm512_srlv_epi16(both, halves), table));
    } else {
        vec first = weights_of(kind, row, 0), second = weights_of(kind, row + 16 / group * bytes, 16 % group / 16);
        _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
    }
#else
    for (int i = 0; i < DEPTH; i += WIDTH) store(to + i, weights_of(kind, row + i / group * bytes, i % group / WIDTH));
#endif
}

ALWAYS void widen_of(int kind, const uint8_t *w, int64_t stride, el *to) {
    for (int r = 0; r < SIDE; r++) widen_row(kind, w + r * stride, to + r * DEPTH);
}

/* Of 16 rows. */
static inline void widen(int kind, const uint8_t *w, int64_t stride, el *to) {
    if (kind == NIBBLES) widen_of(NIBBLES, w, stride, to);
    else if (kind == BYTES) widen_of(BYTES, w, stride, to);
    else widen_of(SHORT, w, stride, to);
}

/* Sixteen rows of weights against up to four groups of inputs; or, if they lie in one or two `places`, against up to two. As many weights
   behind these are asked for, if they are `wanted`. */
ALWAYS void multiply(
    int kind, const uint8_t *const weights[2], int places, const pair_of_el *b, int count, int steps, int wanted, el made[][SIDE * DEPTH]) {
    const int64_t stride = (int64_t)steps * DEPTH / 4 * kind, step = DEPTH / 4 * kind, apart = (int64_t)steps * PACKED;
    int plain = kind == HALVES;
    ZERO(0); ZERO(1); ZERO(2); ZERO(3);
    for (int s = 0; s < MADE && s < steps && !plain; s++) widen(kind, weights[0] + s * step, stride, made[s]);
    for (int s = 0; s < steps; s++, b += PACKED) {
        if (wanted)
            for (int line = 0; line < SIDE * step; line += 64) {
                __builtin_prefetch(weights[0] + SIDE * (stride + s * step) + line, 0, CACHE);
                if (places > 1) __builtin_prefetch(weights[1] + SIDE * (stride + s * step) + line, 0, CACHE);
            }
        if (plain) LOAD(4, weights[0] + s * step, stride);
        else LOAD(4, made[s % (2 * MADE)], 64);
        LOAD(5, b, 64); DOT(0, 4, 5);
        if (count > 1) { LOAD(6, b + apart, 64); DOT(1, 4, 6); }
        if (places > 1) {
            LOAD(4, weights[1] + s * step, stride); DOT(2, 4, 5);
            if (count > 1) DOT(3, 4, 6);
        }
        if (count > 2) { LOAD(5, b + 2 * apart, 64); DOT(2, 4, 5); }
        if (count > 3) { LOAD(6, b + 3 * apart, 64); DOT(3, 4, 6); }
        if (!plain && s + MADE < steps) widen(kind, weights[0] + (s + MADE) * step, stride, made[(s + MADE) % (2 * MADE)]);
    }
}

/* y [T, O] = x [T, I] w [O, I]' + bias: 16 outputs at a time for up to 64 rows of input, which are transposed first; weights are read where
   they lie, or widened, each block while the next is being fetched. With few rows of input there is room for as many outputs elsewhere: memory
   is read sooner in two places at once. Answers 0, and has done nothing, where it cannot. */
static int linear_tiles(const el *x, const uint8_t *w, int kind, const el *bias, el *y, int T, int I, int O) {
    int groups = (T + SIDE - 1) / SIDE, steps = I / DEPTH, plain = kind == HALVES;
    int places = plain && groups <= 2 ? 2 : 1, per = 4 / places, each = (O / SIDE + places - 1) / places * SIDE;
    const int64_t stride = (int64_t)I / 4 * kind, apart = (int64_t)steps * PACKED;
    if (I % DEPTH || O % SIDE || !tiles_granted()) return 0;
    pair_of_el *packed = aligned_alloc(64, (size_t)groups * steps * PACKED * sizeof(pair_of_el));
    if (!packed) return 0;
#pragma omp parallel
    {
        el made[2 * MADE][SIDE * DEPTH] __attribute__((aligned(64)));
        tiles_begin();
#pragma omp for schedule(static)
        for (int part = 0; part < groups * steps; part++) {
            int t = part / steps * SIDE, count = T - t < SIDE ? T - t : SIDE;
            const el *rows[SIDE];
            for (int i = 0; i < count; i++) rows[i] = x + (int64_t)(t + i) * I + part % steps * DEPTH;
            transpose_pairs(rows, count, packed + (int64_t)part * PACKED, SIDE);
        }
#pragma omp for schedule(static)
        for (int o = 0; o < each; o += SIDE) {
            const uint8_t *weights[2] = {w + o * stride, w + (o + each) * stride};
            int here = o + each < O ? places : 1;
            for (int first = 0; first < groups; first += 4) {
                int count = groups - first < 4 ? groups - first : 4;
                const pair_of_el *b = packed + first * apart;
                sixteen out[4][SIDE];
                if (plain) multiply(HALVES, weights, here, b, count, steps, !first, made);
                else multiply(kind, weights, 1, b, count, steps, !first, made);
                STORE(0, out[0], 64); STORE(1, out[1], 64); STORE(2, out[2], 64); STORE(3, out[3], 64);
                for (int n = 0; n < 4; n++) {
                    int at = o + n / per * each, t = (first + n % per) * SIDE;
                    if (n / per >= here || n % per >= count) continue;
                    transpose(out[n]);
                    for (int i = 0; i < SIDE && t < T; i++, t++)
                        for (int r = 0; r < SIDE; r += WIDTH) {
                            vec found = load_float((const float *)(out[n] + i) + r);
                            store(y + (int64_t)t * O + at + r, bias ? found + load(bias + at + r) : found);
                        }
                }
            }
        }
        tiles_end();
    }
    free(packed);
    return 1;
}
#endif

/* Four rows of weights against one input: bound by reading the weights. Rows far apart come from memory sooner than neighbours, since the
   processor looks ahead in each of them. */
static inline void dots_of_four(const el *const w[4], const el *x, int n, float out[4]) {
    vec sum[4][2] = {{{0}}};
    int i = 0;
    for (; i + 2 * WIDTH <= n; i += 2 * WIDTH) {
        vec a = load(x + i), b = load(x + i + WIDTH);
        for (int r = 0; r < 4; r++) {
            for (unsigned line = 0; line < 2 * WIDTH * sizeof(el); line += 64) __builtin_prefetch((const char *)(w[r] + i) + AHEAD + line, 0, CACHE);
            sum[r][0] += load(w[r] + i) * a;
            sum[r][1] += load(w[r] + i + WIDTH) * b;
        }
    }
    for (int r = 0; r < 4; r++) {
        int j = i;
        for (; j + WIDTH <= n; j += WIDTH) sum[r][0] += load(w[r] + j) * load(x + j);
        out[r] = total(sum[r][0] + sum[r][1]);
        for (; j < n; j++) out[r] += up(w[r][j]) * up(x[j]);
    }
}

/* y [T, O] = x [T, I] w [O, I]' + bias [O] or none; every weight is read once. */
void linear(const el *x, const el *w, const el *bias, el *y, int T, int I, int O) {
#ifdef TILES
    if (linear_tiles(x, (const uint8_t *)w, HALVES, bias, y, T, I, O)) return;
#endif
    int blocks = (O + 3) / 4, apart = T == 1 ? blocks : 1;
#pragma omp parallel for schedule(static)
    for (int block = 0; block < blocks; block++) {
        int o = T == 1 ? block : block * 4, rows = 1;
        const el *weights[4] = {w + (int64_t)o * I};
        for (; rows < 4 && o + rows * apart < O; rows++) weights[rows] = weights[0] + (int64_t)rows * apart * I;
        for (int r = rows; r < 4; r++) weights[r] = weights[0]; /* rows past the end repeat, and are dropped */
        for (int t = 0; t < T; t += 4) {
            int columns = T - t < 4 ? T - t : 4;
            float out[4][4];
            if (columns == 1) {
                float found[4];
                dots_of_four(weights, x + (int64_t)t * I, I, found);
                for (int r = 0; r < rows; r++) out[r][0] = found[r];
            } else {
                const el *inputs[4];
                for (int c = 0; c < 4; c++) inputs[c] = x + (int64_t)(t + (c < columns ? c : 0)) * I;
                dots_4x4(weights, inputs, I, t ? 0 : weights[0] + 4 * (int64_t)I, out);
            }
            for (int c = 0; c < columns; c++)
                for (int r = 0, at = o; r < rows; r++, at += apart) y[(int64_t)(t + c) * O + at] = down(out[r][c] + (bias ? up(bias[at]) : 0.0f));
        }
    }
}

/* Four rows of weights against one or four rows of input. The weights behind them are asked for meanwhile, if they will be wanted. */
ALWAYS void dots_blocks(
    int kind, const uint8_t *const w[4], const float *const x[4], int columns, int I, int wanted, float out[4][4]) {
    const int group = kind == SHORT ? 16 : 32, bytes = group / 4 * kind;
    vec sum[4][4] = {{{0}}};
    for (int b = 0; b < I / group; b++) {
        if (wanted)
            for (int line = 0; line < 4 * bytes; line += 64) __builtin_prefetch(w[0] + 4 * b * bytes + AHEAD + line, 0, CACHE);
        for (int u = 0; u < group / WIDTH; u++) {
            vec in[4];
            for (int c = 0; c < columns; c++) in[c] = load_float(x[c] + b * group + u * WIDTH);
            for (int r = 0; r < 4; r++) {
                vec weights = weights_of(kind, w[r] + b * bytes, u);
                for (int c = 0; c < columns; c++) sum[r][c] += weights * in[c];
            }
        }
    }
    for (int r = 0; r < 4; r++) {
        quad sums = totals(sum[r]);
        memcpy(out[r], &sums, sizeof sums);
    }
}

ALWAYS void linear_of(
    int kind, const float *x, const uint8_t *w, const el *bias, el *y, int T, int I, int O) {
    const int64_t stride = (int64_t)I / 4 * kind;
#pragma omp parallel for schedule(static)
    for (int block = 0; block < (O + 3) / 4; block++) {
        int o = block * 4, rows = O - o < 4 ? O - o : 4;
        const uint8_t *weights[4];
        for (int r = 0; r < 4; r++) weights[r] = w + (o + (r < rows ? r : 0)) * stride; /* rows past the end repeat, and are dropped */
        for (int t = 0; t < T; t += 4) {
            int columns = T - t < 4 ? T - t : 4;
            const float *inputs[4];
            for (int c = 0; c < 4; c++) inputs[c] = x + (int64_t)(t + (c < columns ? c : 0)) * I;
            float out[4][4];
            if (columns == 1)
                dots_blocks(kind, weights, inputs, 1, I, t == 0, out);
            else
                dots_blocks(kind, weights, inputs, 4, I, t == 0, out);
            for (int c = 0; c < columns; c++)
                for (int r = 0; r < rows; r++) y[(int64_t)(t + c) * O + o + r] = down(out[r][c] + (bias ? up(bias[o + r]) : 0.0f));
        }
    }
}

/* Of weights in blocks. Where there are tiles, a single row needs none. `desk` [T, I] is for the input in float, where it is not. */
void linear_blocks(const el *x, const void *w, int kind, const el *bias, el *y, float *desk, int T, int I, int O) {
    const float *wide = (const float *)x;
#ifdef TILES
    if (T > 1 && linear_tiles(x, w, kind, bias, y, T, I, O)) return;
#endif
#ifdef BF16
    for (int64_t i = 0; i < (int64_t)T * I; i += WIDTH) store_float(desk + i, load(x + i)); /* blocks have no rest */
    wide = desk;
#endif
    if (kind == NIBBLES) linear_of(NIBBLES, wide, w, bias, y, T, I, O);
    else if (kind == BYTES) linear_of(BYTES, wide, w, bias, y, T, I, O);
    else if (kind == SHORT) linear_of(SHORT, wide, w, bias, y, T, I, O);
    else linear_of(HALVES, wide, w, bias, y, T, I, O);
}

/* Of weights in blocks, or of plain ones, whose kind is 0. */
static void linear_either(const el *x, const void *w, int kind, const el *bias, el *y, float *desk, int T, int I, int O) {
    if (kind) linear_blocks(x, w, kind, bias, y, desk, T, I, O);
    else linear(x, w, bias, y, T, I, O);
}
