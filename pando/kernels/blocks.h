/* Linear maps whose weights are whole numbers of 4 or 8 bits, as a quantised checkpoint has them. Few rows of input wait for weights to come
   from memory, and these are a fifth of the bytes. blocks.py says what a block is: a scale and an offset, then codes. A weight is code *
   scale + offset, which in float is the very number that the plain weight is. A checkpoint in bfloat16 is half of the bytes of float. */

enum { NIBBLES = 3, BYTES = 5, SHORT = 6, HALVES = 8 }; /* bytes of four weights; SHORT: bytes in blocks of 16; HALVES: bfloat16 */

typedef uint8_t codes_vec __attribute__((vector_size(WIDTH)));

static inline ints numbers(const uint8_t *codes) {
#ifdef WIDE
    return (ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
#elif defined(__AVX2__) && WIDTH == 8
    return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes));
#else
    codes_vec c;
    memcpy(&c, codes, sizeof c);
    return __builtin_convertvector(__builtin_convertvector(c, half_vec), ints); /* in one step gcc would take them one by one */
#endif
}

/* Weights u * WIDTH and on of a block. The first 16 of 32 nibbles are the lower halves of bytes; a byte is 128 more than it means. */
static inline __attribute__((always_inline)) vec weights_of(int kind, const uint8_t *block, int u) {
    if (kind == HALVES) {
        half_vec upper;
        memcpy(&upper, block + u * sizeof upper, sizeof upper);
        return (vec)(__builtin_convertvector(upper, bits_vec) << 16);
    }
    float scale, offset;
    memcpy(&scale, block, 4);
    memcpy(&offset, block + 4, 4);
    block += 8;
    if (kind != NIBBLES) return __builtin_convertvector(numbers(block + u * WIDTH) - 128, vec) * scale + offset;
    ints both = numbers(block + u * WIDTH % 16);
#ifdef WIDE /* the lower four bits choose one of sixteen */
    vec known = (vec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * scale + offset;
    return (vec)_mm512_permutexvar_ps((__m512i)(u ? both >> 4 : both), (__m512)known);
#else
    return __builtin_convertvector(u * WIDTH < 16 ? both & 15 : both >> 4, vec) * scale + offset;
#endif
}

/* Four rows of weights against one or four rows of input. The weights behind them are asked for meanwhile, if they will be wanted. */
static inline __attribute__((always_inline)) void dots_blocks(
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

static inline __attribute__((always_inline)) void linear_of(
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

/* y [T, O] = x [T, I] w [O, I]' + bias [O] or none, of weights in blocks; the input is in float, so that it is widened once. */
void linear_blocks(const float *x, const uint8_t *w, const el *bias, el *y, int T, int I, int O, int kind) {
    if (kind == NIBBLES)
        linear_of(NIBBLES, x, w, bias, y, T, I, O);
    else if (kind == BYTES)
        linear_of(BYTES, x, w, bias, y, T, I, O);
    else if (kind == SHORT)
        linear_of(SHORT, x, w, bias, y, T, I, O);
    else
        linear_of(HALVES, x, w, bias, y, T, I, O);
}

/* Of weights in blocks, or of plain ones, whose kind is 0. `desk` is for the input in float, where it is not. */
static void linear_either(const el *x, const void *w, int kind, const el *bias, el *y, float *desk, int T, int I, int O) {
    if (!kind) {
        linear(x, w, bias, y, T, I, O);
        return;
    }
#ifdef BF16
    for (int64_t i = 0; i < (int64_t)T * I; i += WIDTH) store_float(desk + i, load(x + i)); /* blocks have no rest */
    linear_blocks(desk, w, bias, y, T, I, O, kind);
#else
    linear_blocks(x, w, bias, y, T, I, O, kind);
#endif
}
