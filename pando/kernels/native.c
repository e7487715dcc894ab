/* The CPU kernels of Pando: what torch does in many small calls, done in few.

   Compiled once per machine and element type (-DBF16 for bfloat16, else float) by native.py. Threads are torch's own OpenMP pool.
   All arithmetic is fp32. Shapes: T tokens, H heads, K kv heads, G = H / K, D head size, I inputs, O outputs. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* As in omp.h, which not every compiler has. */
int omp_get_num_threads(void);
int omp_get_thread_num(void);

/* Behind all headers, whose functions are others': what is defined here is called here, whatever else a process has of that name. */
#pragma GCC visibility push(protected)

#define ALWAYS static inline __attribute__((always_inline))

#ifdef WIDTH /* lanes of a vector, as on another machine */
#elif defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#if defined(__AVX512F__) && WIDTH == 16
#define WIDE
#endif

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef float vec_any __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint16_t half_vec __attribute__((vector_size(2 * WIDTH)));
typedef uint32_t bits_vec __attribute__((vector_size(4 * WIDTH)));

#ifdef BF16
typedef uint16_t el;
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
#if defined(__AVX512BF16__) && defined(WIDE)
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

static inline vec either(ints which, vec a, vec b) { return (vec)(((ints)a & which) | ((ints)b & ~which)); }

static inline vec larger(vec a, vec b) { /* b, where one of them is NaN */
#ifdef WIDE
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return either(a > b, a, b);
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

static inline int any_above(vec x, float limit) { /* NaN is not */
#ifdef WIDE
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0; /* a third of the work of finding the largest */
#else
    ints above = x > limit;
    uint64_t part[sizeof above / 8], any = 0;
    memcpy(part, &above, sizeof above);
    for (unsigned i = 0; i < sizeof above / 8; i++) any |= part[i];
    return any != 0;
#endif
}

#define LOG2_E 1.44269504f

/* 2^x of `count` vectors at once, so that none waits for itself: 2e-7 relative. A polynomial, times a power whose exponent is a whole number.
   Below -126 it answers that of -126, which is nothing; x is at most 127. NaN stays NaN: a row without numbers must be found out. */
static inline void powers(vec *x, int count) {
    vec n[4], p[4];
    for (int i = 0; i < count; i++) x[i] = larger(all(-126.0f), x[i]);
    for (int i = 0; i < count; i++) n[i] = x[i] + 12583039.0f; /* adding 1.5 * 2^23 rounds to a whole number, and 127 is 2^0 */
    for (int i = 0; i < count; i++) x[i] -= n[i] - 12583039.0f;
    for (int i = 0; i < count; i++) p[i] = x[i] * 1.535336188e-4f + 1.339887440e-3f;
    for (int i = 0; i < count; i++) p[i] = p[i] * x[i] + 9.618437357e-3f;
    for (int i = 0; i < count; i++) p[i] = p[i] * x[i] + 5.550332471e-2f;
    for (int i = 0; i < count; i++) p[i] = p[i] * x[i] + 2.402264791e-1f;
    for (int i = 0; i < count; i++) p[i] = p[i] * x[i] + 6.931472029e-1f;
    for (int i = 0; i < count; i++) p[i] = p[i] * x[i] + 1.0f;
    for (int i = 0; i < count; i++) x[i] = p[i] * (vec)((ints)n[i] << 23);
}

static inline vec exp2_fast(vec x) {
    powers(&x, 1);
    return x;
}

static inline float exp2_one(float x) { return exp2_fast(all(x))[0]; }

#define KEYS 64  /* keys looked at together */
#define SIZE 256 /* the largest head */

#if defined(BF16) && (defined(TILES_IN_C) || defined(__AMX_BF16__) && defined(__linux__))
#define TILES
#include "tiles.h"
#endif

/* ---- linear maps -------------------------------------------------------------------------------------------------------------- */

/* How far ahead weights are asked for, and into which cache: as measured on an Intel Xeon with AMX and on a Neoverse N1. */
#ifdef __x86_64__
#define AHEAD 8192
#define CACHE 2
#else
#define AHEAD 2048
#define CACHE 3
#endif

#include "blocks.h"
#include "linear.h"

/* ---- between the linear maps -------------------------------------------------------------------------------------------------- */

/* to = x / rms(x), rounded as the model's dtype does, times weight; to may be x. */
static inline void norm_one(const el *x, const el *weight, el *to, int size, float eps) {
    vec squares = {0};
    float sum = 0;
    int i = 0, j = 0;
    for (; i + WIDTH <= size; i += WIDTH) squares += load(x + i) * load(x + i);
    for (; i < size; i++) sum += up(x[i]) * up(x[i]);
    float scale = 1.0f / sqrtf((sum + total(squares)) / size + eps);
    for (; j + WIDTH <= size; j += WIDTH) {
        store(to + j, load(x + j) * scale);
        store(to + j, load(to + j) * load(weight + j));
    }
    for (; j < size; j++) to[j] = down(up(down(up(x[j]) * scale)) * up(weight[j]));
}

/* The same of every row of x, which may lie `stride` apart. */
void rms_norm(const el *x, const el *weight, el *out, int T, int size, int64_t stride, float eps) {
#pragma omp parallel for schedule(static) if (T > 16)
    for (int t = 0; t < T; t++) norm_one(x + t * stride, weight, out + (int64_t)t * size, size, eps);
}

/* The same in place, of the first heads of qkv [T, heads, D], each of which has a weight of its own. */
static void norm_heads(el *qkv, const el *weights, int T, int heads, int normed, int D, float eps) {
#pragma omp parallel for schedule(static) if (T > 16)
    for (int t = 0; t < T; t++)
        for (int h = 0; h < normed; h++) {
            el *head = qkv + ((int64_t)t * heads + h) * D;
            norm_one(head, weights + h * D, head, D, eps);
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

/* Rotates a head: `turn` holds a cosine and a sine for each of `pairs` adjacent pairs; the rest passes through. */
static inline void rotate_head(const el *head, const float *turn, int pairs, int D, el *to) {
    int p = 0;
#ifdef WIDE
    for (; 2 * p + WIDTH <= 2 * pairs; p += WIDTH / 2) { /* neighbours change places, and of two products one is taken away or added */
        __m512 x = (__m512)load(head + 2 * p), both = (__m512)load_float(turn + 2 * p);
        __m512 crossed = _mm512_mul_ps(_mm512_permute_ps(x, 0xb1), _mm512_movehdup_ps(both));
        store(to + 2 * p, (vec)_mm512_fmaddsub_ps(x, _mm512_moveldup_ps(both), crossed));
    }
#endif
    for (; p < pairs; p++) {
        float a = up(head[2 * p]), b = up(head[2 * p + 1]), c = turn[2 * p], s = turn[2 * p + 1];
        to[2 * p] = down(a * c - b * s);
        to[2 * p + 1] = down(a * s + b * c);
    }
    memcpy(to + 2 * pairs, head + 2 * pairs, (D - 2 * pairs) * sizeof(el));
}

/* out [N, H, D]: queries of q [T, H, D], whose tokens are `stride` apart, each as its placement turns it. */
void rotate(const el *q, int64_t stride, const int64_t *which, const float *turn, int pairs, el *out, int N, int H, int D) {
#pragma omp parallel for schedule(static) if (N > 16)
    for (int n = 0; n < N; n++)
        for (int h = 0; h < H; h++) rotate_head(q + which[n] * stride + h * D, turn + (int64_t)n * 2 * pairs, pairs, D, out + ((int64_t)n * H + h) * D);
}

/* qkv [T, H + 2K, D]: rotates queries into `turned` [T, H, D], and keys, with their values, into the pool [S, K, D]. */
void rotate_and_store(const el *qkv, const float *turn, int pairs, const int64_t *slots, el *turned, el *k, el *v, int T, int H, int K, int D) {
#pragma omp parallel for schedule(static) if (T > 16)
    for (int t = 0; t < T; t++) {
        const el *row = qkv + (int64_t)t * (H + 2 * K) * D;
        const float *angle = turn + (int64_t)t * 2 * pairs;
        for (int h = 0; h < H + K; h++, row += D) {
            el *to = h < H ? turned + ((int64_t)t * H + h) * D : k + (slots[t] * K + h - H) * D;
            rotate_head(row, angle, pairs, D, to);
        }
        memcpy(v + slots[t] * K * D, row, (int64_t)K * D * sizeof(el));
    }
}

/* ---- attention over a plan ---------------------------------------------------------------------------------------------------- */

#include "attend.h"

/* ---- a layer of a decoder ------------------------------------------------------------------------------------------------------ */

/* Its weights, and their sizes: C of the stream, I of what is gated. */
typedef struct {
    const el *norm, *qkv, *qkv_bias, *qk_norm, *o, *o_bias, *mlp_norm, *up, *up_bias, *down, *down_bias; /* a bias, and qk_norm, or none */
    int32_t qkv_kind, o_kind, up_kind, down_kind; /* as `linear_either` takes it */
    int32_t C, I, H, K, D;
    float eps;
} Layer;

static void add(el *x, const el *more, int T, int C) {
#pragma omp parallel for schedule(static) if (T > 16)
    for (int t = 0; t < T; t++) {
        el *to = x + (int64_t)t * C;
        const el *from = more + (int64_t)t * C;
        int i = 0;
        for (; i + WIDTH <= C; i += WIDTH) store(to + i, load(to + i) + load(from + i));
        for (; i < C; i++) to[i] = down(up(to[i]) + up(from[i]));
    }
}

/* All of the above for tokens [T, C], one behind the other. They take in `more`, or none, that the layer before wants added; what this one
   does is `out`, which may be the same. It works on a desk of [T, C + 2 H D + 2 K D + 3 I], behind which, from the next line of the
   cache on, bfloat16 needs what its longest input takes in float. */
void layer(const Layer *l, const Work *plan, el *x, const el *more, el *out, el *desk, const float *turn, int pairs, const int64_t *slots, el *k, el *v, int T) {
    int C = l->C, I = l->I, H = l->H, K = l->K, D = l->D;
    el *normed = desk, *qkv = normed + (int64_t)T * C, *turned = qkv + (int64_t)T * (H + 2 * K) * D;
    el *both = turned + (int64_t)T * H * D, *gated = both + (int64_t)T * 2 * I;
    if (plan->moves) turned = plan->queries;
    float *wide = (float *)(((uintptr_t)(gated + (int64_t)T * I) + LINE - 1) / LINE * LINE);
    if (more) add(x, more, T, C);
    rms_norm(x, l->norm, normed, T, C, C, l->eps);
    linear_either(normed, l->qkv, l->qkv_kind, l->qkv_bias, qkv, wide, T, C, (H + 2 * K) * D);
    if (l->qk_norm) norm_heads(qkv, l->qk_norm, T, H + 2 * K, H + K, D, l->eps);
    rotate_and_store(qkv, turn, pairs, slots, turned, k, v, T, H, K, D);
    if (plan->moves) rotate(qkv, (H + 2 * K) * D, plan->moved, plan->turns, pairs, turned + (int64_t)T * H * D, plan->moves, H, D);
    attend(plan, turned, k, v);
    linear_either(plan->out, l->o, l->o_kind, l->o_bias, out, wide, T, H * D, C);
    add(x, out, T, C);
    rms_norm(x, l->mlp_norm, normed, T, C, C, l->eps);
    linear_either(normed, l->up, l->up_kind, l->up_bias, both, wide, T, C, 2 * I);
    silu_gate(both, gated, T, I);
    linear_either(gated, l->down, l->down_kind, l->down_bias, out, wide, T, I, C);
}

/* Lanes of a vector. */
int width(void) { return WIDTH; }

/* Whether there are tile instructions, and they may be used. */
int has_tiles(void) {
#ifdef TILES
    return tiles_granted();
#else
    return 0;
#endif
}
