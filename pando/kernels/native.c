/* The CPU kernels of Pando: what torch does in many small calls, done in few.

   Compiled once per machine and element type (-DBF16 for bfloat16, else float) by native.py. Threads are torch's own OpenMP pool.
   All arithmetic is fp32. Shapes: T tokens, H heads, K kv heads, G = H / K, D head size, I inputs, O outputs. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef float vec_any __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

#ifdef BF16
typedef uint16_t el;
typedef uint16_t half_vec __attribute__((vector_size(2 * WIDTH)));
typedef uint32_t bits_vec __attribute__((vector_size(4 * WIDTH)));
static inline float up(el x) {
    union { uint32_t bits; float number; } c = {.bits = (uint32_t)x << 16};
    return c.number;
}
static inline el down(float x) { /* to nearest, ties to even; NaN stays NaN */
    union { float number; uint32_t bits; } c = {.number = x};
    uint32_t rounded = (c.bits + 0x7fff + ((c.bits >> 16) & 1)) >> 16;
    return x != x ? 0x7fc0 : (el)rounded;
}
static inline vec load(const el *p) {
    half_vec h;
    memcpy(&h, p, sizeof h);
    return (vec)(__builtin_convertvector(h, bits_vec) << 16);
}
static inline void store(el *p, vec x) { /* `down` of every lane */
#if defined(__AVX512BF16__) && WIDTH == 16
    __m256bh narrow = _mm512_cvtneps_pbh((__m512)x);
    memcpy(p, &narrow, sizeof narrow);
#else
    bits_vec bits = (bits_vec)x, number = (bits_vec)(x == x);
    bits_vec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    half_vec h = __builtin_convertvector((rounded & number) | (0x7fc0 & ~number), half_vec);
    memcpy(p, &h, sizeof h);
#endif
}
#else
typedef float el;
static inline float up(el x) { return x; }
static inline el down(float x) { return x; }
static inline vec load(const el *p) { return *(const vec_any *)p; }
static inline void store(el *p, vec x) { *(vec_any *)p = x; }
#endif

static inline vec load_float(const float *p) { return *(const vec_any *)p; }
static inline void store_float(float *p, vec x) { *(vec_any *)p = x; }
static inline vec all(float x) { return x - (vec){0}; }

typedef float quad __attribute__((vector_size(16)));

static inline quad fold(vec x) { /* four sums of lanes */
    quad part[WIDTH / 4], sum;
    memcpy(part, &x, sizeof x);
    sum = part[0];
    for (int i = 1; i < WIDTH / 4; i++) sum += part[i];
    return sum;
}

static inline float total(vec x) {
    quad q = fold(x);
    return (q[0] + q[1]) + (q[2] + q[3]);
}

typedef int32_t four __attribute__((vector_size(16)));
typedef int32_t sixteen __attribute__((vector_size(64)));
#ifdef __clang__
#define PICK(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif

static inline quad add_pairs(quad a, quad b) {
    return PICK(four, a, b, 0, 2, 4, 6) + PICK(four, a, b, 1, 3, 5, 7);
}

/* The totals of four vectors at once: a quarter of the work of one by one. */
static inline quad totals(const vec x[4]) { return add_pairs(add_pairs(fold(x[0]), fold(x[1])), add_pairs(fold(x[2]), fold(x[3]))); }

typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));

static inline vec larger(vec a, vec b) { /* b, where one of them is NaN */
#ifdef __AVX512F__
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    ints mask = a > b;
    return (vec)(((ints)a & mask) | ((ints)b & ~mask));
#endif
}

static inline vec smaller(vec a, vec b) { return -larger(-a, -b); }

static inline float largest(vec x) {
    quad part[WIDTH / 4];
    memcpy(part, &x, sizeof x);
    for (int i = 1; i < WIDTH / 4; i++)
        for (int lane = 0; lane < 4; lane++) part[0][lane] = part[i][lane] > part[0][lane] ? part[i][lane] : part[0][lane];
    float a = part[0][0] > part[0][1] ? part[0][0] : part[0][1], b = part[0][2] > part[0][3] ? part[0][2] : part[0][3];
    return a > b ? a : b;
}

static inline int any_above(vec x, float limit) {
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0; /* a third of the work of finding the largest */
#else
    return largest(x) > limit;
#endif
}

#define LOG2_E 1.44269504f

/* 2^x, 2e-7 relative: a whole power times a polynomial. Below -126 it answers that of -126, which is nothing; x is at most 127. NaN stays
   NaN: a row without numbers must be found out. */
static inline vec exp2_fast(vec x) {
    x = larger(all(-126.0f), x);
    vec n = x + 12582912.0f; /* adding 1.5 * 2^23 rounds to a whole number */
    vec scale = (vec)(((ints)n + 127) << 23);
    vec r = x - (n - 12582912.0f);
    vec p = r * 1.535336188e-4f + 1.339887440e-3f;
    p = p * r + 9.618437357e-3f;
    p = p * r + 5.550332471e-2f;
    p = p * r + 2.402264791e-1f;
    p = p * r + 6.931472029e-1f;
    return (p * r + 1.0f) * scale;
}

static inline float exp2_one(float x) { return exp2_fast(all(x))[0]; }

/* ---- linear maps -------------------------------------------------------------------------------------------------------------- */

/* Four rows of weights against four rows of input: sixteen sums in registers for eight loads. */
static inline void dots_4x4(const el *const w[4], const el *const x[4], int n, float out[4][4]) {
    vec sum[4][4] = {{{0}}};
    int i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
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

/* How far ahead weights are asked for, and into which cache: as measured on an Intel Xeon with AMX and on a Neoverse N1. */
#ifdef __x86_64__
#define AHEAD 8192
#define CACHE 2
#else
#define AHEAD 2048
#define CACHE 3
#endif

#define ROWS 96  /* the most packed queries of a tile: pairs x G */
#define KEYS 64  /* keys looked at together */
#define SIZE 256 /* the largest head */

#if defined(BF16) && (defined(TILES_IN_C) || defined(__AMX_BF16__) && defined(__linux__))
#define TILES
#include "tiles.h"
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
    if (linear_tiles(x, w, bias, y, T, I, O)) return;
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
                dots_4x4(weights, inputs, I, out);
            }
            for (int c = 0; c < columns; c++)
                for (int r = 0; r < rows; r++) y[(int64_t)(t + c) * O + o + r] = down(out[r][c] + (bias ? up(bias[o + r]) : 0.0f));
        }
    }
}

/* ---- between the linear maps -------------------------------------------------------------------------------------------------- */

/* out = x / rms(x), rounded as the model's dtype does, times weight. x may lie in rows `stride` apart. */
void rms_norm(const el *x, const el *weight, el *out, int T, int size, int64_t stride, float eps) {
#pragma omp parallel for schedule(static) if (T > 16)
    for (int t = 0; t < T; t++) {
        const el *row = x + t * stride;
        el *to = out + (int64_t)t * size;
        vec squares = {0};
        float sum = 0;
        int i = 0, j = 0;
        for (; i + WIDTH <= size; i += WIDTH) squares += load(row + i) * load(row + i);
        for (; i < size; i++) sum += up(row[i]) * up(row[i]);
        float scale = 1.0f / sqrtf((sum + total(squares)) / size + eps);
        for (; j + WIDTH <= size; j += WIDTH) {
            store(to + j, load(row + j) * scale);
            store(to + j, load(to + j) * load(weight + j));
        }
        for (; j < size; j++) to[j] = down(up(down(up(row[j]) * scale)) * up(weight[j]));
    }
}

/* out [T, I] = silu(x[:, :I]) * x[:, I:]. */
void silu_gate(const el *x, el *out, int T, int I) {
#pragma omp parallel for schedule(static) if (T > 8)
    for (int t = 0; t < T; t++) {
        const el *gate = x + (int64_t)t * 2 * I, *other = gate + I;
        el *to = out + (int64_t)t * I;
        int i = 0;
        for (; i + WIDTH <= I; i += WIDTH) {
            vec g = load(gate + i);
            store(to + i, g / (1.0f + exp2_fast(smaller(g * -LOG2_E, all(126.0f)))) * load(other + i));
        }
        for (; i < I; i++) to[i] = down(up(gate[i]) / (1.0f + exp2_one(fminf(up(gate[i]) * -LOG2_E, 126.0f))) * up(other[i]));
    }
}

/* qkv [T, H + 2K, D]: rotates queries into `turned` [T, H, D], and keys, with their values, into the pool [S, K, D]. `turn` holds a cosine
   and a sine for each of `pairs` adjacent pairs; the rest of a head passes through. */
void rotate_and_store(const el *qkv, const float *turn, int pairs, const int64_t *slots, el *turned, el *k, el *v, int T, int H, int K, int D) {
#pragma omp parallel for schedule(static) if (T > 16)
    for (int t = 0; t < T; t++) {
        const el *row = qkv + (int64_t)t * (H + 2 * K) * D;
        const float *angle = turn + (int64_t)t * 2 * pairs;
        for (int h = 0; h < H + K; h++, row += D) {
            el *to = h < H ? turned + ((int64_t)t * H + h) * D : k + (slots[t] * K + h - H) * D;
            for (int p = 0; p < pairs; p++) {
                float a = up(row[2 * p]), b = up(row[2 * p + 1]), c = angle[2 * p], s = angle[2 * p + 1];
                to[2 * p] = down(a * c - b * s);
                to[2 * p + 1] = down(a * s + b * c);
            }
            memcpy(to + 2 * pairs, row + 2 * pairs, (D - 2 * pairs) * sizeof(el));
        }
        memcpy(v + slots[t] * K * D, row, (int64_t)K * D * sizeof(el));
    }
}

/* ---- attention over a plan ---------------------------------------------------------------------------------------------------- */

typedef struct {
    int32_t slots, from, to; /* keys from..to of the run whose slots begin there */
    int32_t pair, pairs;     /* (read, query) pairs that look at them */
    int32_t part;            /* where their partial results go */
} Tile;

typedef struct {
    const el *q, *k, *v;
    const float *slopes;
    const int32_t *slots, *query, *seen, *ahead;
    int H, K, D;
    float scale; /* times log2(e): inside the kernel weights are powers of 2 */
    float *out, *peak, *sum; /* partial results: [parts, H, D], and the score, to base 2, that weighs 1, and the sum of weights, [parts, H] */
} Work;

/* scores [rows, KEYS] of up to KEYS keys. */
static void score(const float *q, int rows, const float *const *keys, int count, int D, float *scores) {
    for (int r = 0; r < rows; r += 4)
        for (int j = 0; j < count; j += 4) {
            vec sum[4][4] = {{{0}}};
            const float *a[4], *b[4];
            for (int i = 0; i < 4; i++) {
                a[i] = q + (r + i < rows ? r + i : r) * D;
                b[i] = keys[j + i < count ? j + i : j];
            }
            int d = 0;
            for (; d + WIDTH <= D; d += WIDTH) {
                vec b0 = load_float(b[0] + d), b1 = load_float(b[1] + d), b2 = load_float(b[2] + d), b3 = load_float(b[3] + d);
                for (int i = 0; i < 4; i++) {
                    vec x = load_float(a[i] + d);
                    sum[i][0] += x * b0;
                    sum[i][1] += x * b1;
                    sum[i][2] += x * b2;
                    sum[i][3] += x * b3;
                }
            }
            for (int i = 0; i < 4 && r + i < rows; i++) {
                float *to = scores + (r + i) * KEYS + j;
                quad sums = totals(sum[i]);
                memcpy(to, &sums, sizeof sums);
                for (int c = 0; c < 4; c++)
                    for (int e = d; e < D; e++) to[c] += a[i][e] * b[c][e];
            }
        }
}

/* acc [rows, D] += weights [rows, KEYS] x values. */
static void gather(const float *weights, int rows, const float *const *values, int count, int D, float *acc) {
    int d = 0;
    for (; d + 4 * WIDTH <= D; d += 4 * WIDTH)
        for (int r = 0; r < rows; r += 4) {
            int n = rows - r < 4 ? rows - r : 4;
            vec sum[4][4];
            for (int i = 0; i < 4; i++)
                for (int c = 0; c < 4; c++) sum[i][c] = load_float(acc + (r + (i < n ? i : 0)) * D + d + c * WIDTH);
            for (int j = 0; j < count; j++) {
                vec v0 = load_float(values[j] + d), v1 = load_float(values[j] + d + WIDTH);
                vec v2 = load_float(values[j] + d + 2 * WIDTH), v3 = load_float(values[j] + d + 3 * WIDTH);
                for (int i = 0; i < 4; i++) {
                    vec w = all(weights[(r + (i < n ? i : 0)) * KEYS + j]);
                    sum[i][0] += w * v0;
                    sum[i][1] += w * v1;
                    sum[i][2] += w * v2;
                    sum[i][3] += w * v3;
                }
            }
            for (int i = 0; i < n; i++)
                for (int c = 0; c < 4; c++) store_float(acc + (r + i) * D + d + c * WIDTH, sum[i][c]);
        }
    for (; d < D; d++)
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < count; j++) acc[r * D + d] += weights[r * KEYS + j] * values[j][d];
}

#define SLACK 8.0f /* powers of 2 that a score may lie above the peak */

/* One block of scores, times `scale`, becomes weights. The peak moves, and sums and what was gathered so far are scaled to it, only when a
   score lies more than SLACK above it: after the first block hardly ever. `narrow`: weights are left as elements, from the row's start. */
static inline void weigh(float *scores, int visible, float scale, float *peak, vec *sum, float *acc, int D, int narrow) {
    if (!visible) {
        memset(scores, 0, KEYS * sizeof(float));
        return;
    }
    for (int j = visible; j < KEYS; j++) scores[j] = -INFINITY;
    vec most[4] = {all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY)}; /* four, so that none waits for the one before */
    for (int j = 0; j < KEYS; j += 4 * WIDTH)
        for (int i = 0; i < 4; i++) most[i] = larger(load_float(scores + j + i * WIDTH), most[i]);
    vec highest = larger(larger(most[0], most[1]), larger(most[2], most[3])) * scale;
    if (any_above(highest, *peak + SLACK)) {
        float top = largest(highest), shrink = *peak == -INFINITY ? 0.0f : exp2_one(*peak - top);
        *sum *= shrink;
        for (int d = 0; d < D; d++) acc[d] *= shrink;
        *peak = top;
    }
    float from = *peak;
    vec added = {0};
    for (int j = 0; j < KEYS; j += WIDTH) {
        vec weight = exp2_fast(load_float(scores + j) * scale - from);
        if (narrow) store((el *)scores + j, weight); /* behind what was read */
        else store_float(scores + j, weight);
        added += weight;
    }
    size_t size = narrow ? sizeof(el) : sizeof(float); /* weights past the last key are exactly 0: what lies there may be anything finite */
    if (visible < KEYS) memset((char *)scores + visible * size, 0, (KEYS - visible) * size);
    *sum += added;
}

/* Pointers to the rows of a block, as fp32. */
static inline void rows_of(const el *pool, const int32_t *slots, int count, int K, int h, int D, float *scratch, const float **rows) {
    for (int j = 0; j < count; j++) {
        const el *row = pool + ((int64_t)slots[j] * K + h) * D;
#ifdef BF16
        float *copy = scratch + j * D;
        for (int d = 0; d < D; d++) copy[d] = up(row[d]);
        rows[j] = copy;
#else
        (void)scratch;
        rows[j] = row;
#endif
    }
}

#ifdef TILES
#define WHOLE(rows) (((rows) + SIDE - 1) / SIDE * SIDE)
#define BY_TILES(rows, D) ((rows) >= SIDE && (D) % DEPTH == 0 && tiles_granted())
#else
#define WHOLE(rows) (rows)
#endif

#ifdef TILES
/* Has the keys and values of the next block fetched: a head's rows lie too far apart for the processor to guess. */
static inline void ask_for(const Work *w, int h, const int32_t *slots, int count) {
    for (int j = 0; j < count && j < KEYS; j++)
        for (int d = 0; d < w->D; d += DEPTH) {
            int64_t place = ((int64_t)slots[j] * w->K + h) * w->D + d;
            __builtin_prefetch(w->k + place, 0, CACHE);
            __builtin_prefetch(w->v + place, 0, CACHE);
        }
}
#endif

static void attend_tile(const Work *w, const Tile *tile, int h) {
    int G = w->H / w->K, D = w->D, rows = tile->pairs * G;
    float q[ROWS * SIZE] __attribute__((aligned(64))), acc[ROWS * SIZE] __attribute__((aligned(64)));
    float scores[ROWS * KEYS] __attribute__((aligned(64))), peak[ROWS];
    vec sum[ROWS];
#ifdef BF16
    float scratch[KEYS * SIZE];
#else
    float *scratch = 0;
#endif
#ifdef TILES
    int tiles = BY_TILES(rows, D);
    el *narrow = (el *)q; /* as they are: tiles multiply bfloat16 */
#endif
    const float *block[KEYS];
    int longest = 0;
    for (int p = 0; p < tile->pairs; p++) {
        int seen = w->seen[tile->pair + p];
        longest = seen > longest ? seen : longest;
        for (int g = 0; g < G; g++) {
            const el *from = w->q + ((int64_t)w->query[tile->pair + p] * w->H + h * G + g) * D;
#ifdef TILES
            if (tiles) {
                memcpy(narrow + (p * G + g) * D, from, D * sizeof(el));
                continue;
            }
#endif
            for (int d = 0; d < D; d++) q[(p * G + g) * D + d] = up(from[d]) * w->scale;
        }
    }
    for (int r = 0; r < WHOLE(rows); r++) {
        peak[r] = -INFINITY;
        sum[r] = all(0);
        memset(acc + r * D, 0, D * sizeof(float));
#ifdef TILES
        if (tiles && r >= rows) memset(narrow + r * D, 0, D * sizeof(el));
#endif
    }
    int to = tile->to < longest ? tile->to : longest;
    for (int from = tile->from; from < to; from += KEYS) {
        int count = to - from < KEYS ? to - from : KEYS;
        const int32_t *slots = w->slots + tile->slots + from;
#ifdef TILES
        if (tiles) {
            ask_for(w, h, slots + KEYS, to - from - KEYS);
            score_tiles(narrow, WHOLE(rows), w->k + h * D, slots, (int64_t)w->K * D, count, D, scores);
        } else
#endif
        {
            rows_of(w->k, slots, count, w->K, h, D, scratch, block);
            score(q, rows, block, count, D, scores);
        }
        for (int r = 0; r < rows; r++) {
            int pair = tile->pair + r / G, visible = w->seen[pair] - from;
            visible = visible < 0 ? 0 : visible > count ? count : visible;
            float *row = scores + r * KEYS, scale = 1.0f;
#ifdef TILES
            if (tiles) scale = w->scale; /* otherwise it is in q */
#endif
            if (w->slopes) {
                float slope = w->slopes[h * G + r % G] * LOG2_E;
                for (int j = 0; j < visible; j++) row[j] = row[j] * scale + slope * (w->ahead[pair] + from + j);
                scale = 1.0f;
            }
#ifdef TILES
            if (tiles) {
                weigh(row, visible, scale, peak + r, sum + r, acc + r * D, D, 1);
                continue;
            }
#endif
            weigh(row, visible, scale, peak + r, sum + r, acc + r * D, D, 0);
        }
#ifdef TILES
        if (tiles) {
            gather_tiles((const el *)scores, WHOLE(rows), w->v + h * D, slots, (int64_t)w->K * D, count, D, acc);
            continue;
        }
#endif
        rows_of(w->v, slots, count, w->K, h, D, scratch, block);
        gather(scores, rows, block, count, D, acc);
    }
    for (int r = 0; r < rows; r++) {
        int64_t place = (int64_t)(tile->part + r / G) * w->H + h * G + r % G;
        w->peak[place] = peak[r];
        w->sum[place] = total(sum[r]);
        memcpy(w->out + place * D, acc + r * D, D * sizeof(float));
    }
}

/* out [T, H, D]: every tile for every kv head, then for each token the parts that `of` lists from starts[t] to starts[t + 1]. A part that
   saw nothing weighs nothing; a token that saw nothing at all answers zero. */
void attend(const el *q, const el *k, const el *v, const float *slopes, const Tile *tiles, int count, const int32_t *slots,
            const int32_t *query, const int32_t *seen, const int32_t *ahead, const int32_t *starts, const int32_t *of, float *parts,
            float *peaks, float *sums, el *out, int T, int H, int K, int D, float scale) {
    Work work = {q, k, v, slopes, slots, query, seen, ahead, H, K, D, scale * LOG2_E, parts, peaks, sums};
#pragma omp parallel
    {
#ifdef TILES
        if (tiles_granted()) tiles_begin();
#endif
#pragma omp for schedule(dynamic)
        for (int task = 0; task < count * K; task++) attend_tile(&work, tiles + task % count, task / count); /* a head's keys stay in the cache */
#ifdef TILES
        if (tiles_granted()) tiles_end();
#endif
#pragma omp for schedule(static)
        for (int place = 0; place < T * H; place++) {
            int t = place / H, h = place % H;
            float top = -INFINITY, sum = 0, row[SIZE] = {0};
            for (int i = starts[t]; i < starts[t + 1]; i++) top = peaks[of[i] * H + h] > top ? peaks[of[i] * H + h] : top;
            for (int i = starts[t]; i < starts[t + 1]; i++) {
                int64_t from = (int64_t)of[i] * H + h;
                if (sums[from] == 0) continue;
                float weight = exp2_one(peaks[from] - top);
                sum += weight * sums[from];
                for (int d = 0; d < D; d++) row[d] += weight * parts[from * D + d];
            }
            for (int d = 0; d < D; d++) out[(int64_t)place * D + d] = down(sum == 0 ? 0.0f : row[d] / sum);
        }
    }
}
