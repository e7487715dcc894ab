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

/* y [T, O] = x [T, I] w [O, I]' + bias: 16 outputs at a time for up to 64 rows of input, which are transposed first; weights are read
   where they lie, or widened, each block while the next is being fetched. Answers 0, and has done nothing, where it cannot. */
static int linear_tiles(const el *x, const uint8_t *w, int kind, const el *bias, el *y, int T, int I, int O) {
    int groups = (T + SIDE - 1) / SIDE, steps = I / DEPTH, plain = kind == HALVES;
    const int64_t stride = (int64_t)I / 4 * kind, step = DEPTH / 4 * kind;
    if (I % DEPTH || O % SIDE || !tiles_granted()) return 0;
    pair_of_el *packed = aligned_alloc(64, (size_t)groups * steps * SIDE * SIDE * sizeof(pair_of_el));
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
            transpose_pairs(rows, count, packed + (int64_t)part * SIDE * SIDE, SIDE);
        }
#pragma omp for schedule(static)
        for (int o = 0; o < O; o += SIDE) {
            const uint8_t *weights = w + o * stride;
            vec offset[SIDE / WIDTH];
            for (int r = 0; r < SIDE; r += WIDTH) offset[r / WIDTH] = bias ? load(bias + o + r) : all(0);
            for (int first = 0; first < groups; first += 4) {
                int count = groups - first < 4 ? groups - first : 4;
                const pair_of_el *b = packed + (int64_t)first * steps * SIDE * SIDE;
                int64_t apart = (int64_t)steps * SIDE * SIDE;
                sixteen out[4][SIDE];
                ZERO(0); ZERO(1); ZERO(2); ZERO(3);
                for (int s = 0; s < MADE && s < steps && !plain; s++) widen(kind, weights + s * step, stride, made[s]);
                for (int s = 0; s < steps; s++, b += SIDE * SIDE) {
                    if (!first)
                        for (int line = 0; line < SIDE * step; line += 64)
                            __builtin_prefetch(weights + SIDE * (stride + s * step) + line, 0, CACHE);
                    if (plain) LOAD(4, weights + s * step, stride);
                    else LOAD(4, made[s % (2 * MADE)], 64);
                    LOAD(5, b, 64);
                    DOT(0, 4, 5);
                    if (count > 1) { LOAD(6, b + apart, 64); DOT(1, 4, 6); }
                    if (count > 2) { LOAD(5, b + 2 * apart, 64); DOT(2, 4, 5); }
                    if (count > 3) { LOAD(6, b + 3 * apart, 64); DOT(3, 4, 6); }
                    if (!plain && s + MADE < steps) widen(kind, weights + (s + MADE) * step, stride, made[(s + MADE) % (2 * MADE)]);
                }
                STORE(0, out[0], 64);
                if (count > 1) STORE(1, out[1], 64);
                if (count > 2) STORE(2, out[2], 64);
                if (count > 3) STORE(3, out[3], 64);
                for (int group = 0; group < count; group++) {
                    transpose(out[group]);
                    for (int i = 0, t = (first + group) * SIDE; i < SIDE && t < T; i++, t++) {
                        const float *row = (const float *)(out[group] + i);
                        for (int r = 0; r < SIDE; r += WIDTH) store(y + (int64_t)t * O + o + r, load_float(row + r) + offset[r / WIDTH]);
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

/* One row of weights against one input: bound by reading the weights, so they are read strictly in order. */
static inline float dot(const el *w, const el *x, int n) {
    vec sum[8] = {{0}};
    int i = 0;
    for (; i + 8 * WIDTH <= n; i += 8 * WIDTH) {
        for (unsigned line = 0; line < 8 * WIDTH * sizeof(el); line += 64) __builtin_prefetch((const char *)(w + i) + AHEAD + line, 0, CACHE);
        for (int u = 0; u < 8; u++) sum[u] += load(w + i + u * WIDTH) * load(x + i + u * WIDTH);
    }
    for (; i + WIDTH <= n; i += WIDTH) sum[0] += load(w + i) * load(x + i);
    float rest = total(((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7])));
    for (; i < n; i++) rest += up(w[i]) * up(x[i]);
    return rest;
}

/* y [T, O] = x [T, I] w [O, I]' + bias [O] or none; every weight is read once. */
void linear(const el *x, const el *w, const el *bias, el *y, int T, int I, int O) {
#ifdef TILES
    if (linear_tiles(x, (const uint8_t *)w, HALVES, bias, y, T, I, O)) return;
#endif
#pragma omp parallel for schedule(static)
    for (int block = 0; block < (O + 3) / 4; block++) {
        int o = block * 4, rows = O - o < 4 ? O - o : 4;
        const el *weights[4];
        for (int r = 0; r < 4; r++) weights[r] = w + (int64_t)(o + (r < rows ? r : 0)) * I; /* rows past the end repeat, and are dropped */
        for (int t = 0; t < T; t += 4) {
            int columns = T - t < 4 ? T - t : 4;
            float out[4][4];
            if (columns == 1) {
                for (int r = 0; r < rows; r++) out[r][0] = dot(weights[r], x + (int64_t)t * I, I);
            } else {
                const el *inputs[4];
                for (int c = 0; c < 4; c++) inputs[c] = x + (int64_t)(t + (c < columns ? c : 0)) * I;
                dots_4x4(weights, inputs, I, t ? 0 : w + (int64_t)(o + 4) * I, out);
            }
            for (int c = 0; c < columns; c++)
                for (int r = 0; r < rows; r++) y[(int64_t)(t + c) * O + o + r] = down(out[r][c] + (bias ? up(bias[o + r]) : 0.0f));
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
