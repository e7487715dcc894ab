/* Products of bfloat16 matrices by the tile instructions of AMX, or, with -DTILES_IN_C, by a plain definition of them, so that what is
   built on them can be tested anywhere. Included by native.c, which defines `el`, `vec` and their loads.

   A tile is 16 rows of 64 bytes. DOT(c, a, b) adds to 16 x 16 floats the product of a, 16 rows of 32 elements, and b, 16 rows of 16 pairs:
   row i of b holds elements 2i and 2i + 1 of each of 16 columns. So a is a matrix as it lies in memory, and b one whose pairs were
   transposed: of a product of two, we transpose the smaller. */

#define SIDE 16 /* rows of a tile, and columns of a product */
#define DEPTH 32 /* elements of a row that one product takes in */

#ifdef TILES_IN_C
static _Thread_local uint8_t tile_registers[8][SIDE][64];

static inline void tile_load(int n, const void *from, int64_t stride) {
    for (int i = 0; i < SIDE; i++) memcpy(tile_registers[n][i], (const char *)from + i * stride, 64);
}
static inline void tile_store(int n, void *to, int64_t stride) {
    for (int i = 0; i < SIDE; i++) memcpy((char *)to + i * stride, tile_registers[n][i], 64);
}
static inline void tile_dot(int c, int a, int b) {
    for (int i = 0; i < SIDE; i++)
        for (int j = 0; j < SIDE; j++) {
            float *sum = (float *)tile_registers[c][i] + j;
            for (int k = 0; k < DEPTH; k++) {
                const el *x = (const el *)tile_registers[a][i] + k, *y = (const el *)tile_registers[b][k / 2] + 2 * j + k % 2;
                *sum += up(*x) * up(*y);
            }
        }
}
#define LOAD(n, from, stride) tile_load(n, from, stride)
#define STORE(n, to, stride) tile_store(n, to, stride)
#define DOT(c, a, b) tile_dot(c, a, b)
#define ZERO(n) memset(tile_registers[n], 0, sizeof tile_registers[n])
static inline int tiles_granted(void) { return 1; }
static inline void tiles_begin(void) {}
static inline void tiles_end(void) {}
#else
#include <sys/syscall.h>
#include <unistd.h>

#define LOAD(n, from, stride) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #n ::"r"(from), "r"((int64_t)(stride)) : "memory")
#define STORE(n, to, stride) __asm__ volatile("tilestored %%tmm" #n ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)) : "memory")
#define DOT(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")
#define ZERO(n) __asm__ volatile("tilezero %%tmm" #n ::: "memory")

static int granted;
/* The kernel of the system lends tile registers on request; once for the process. */
__attribute__((constructor)) static void ask_for_tiles(void) { granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
static inline int tiles_granted(void) { return granted; }

/* The shape of its tiles is a thread's own state: set before use, and given back, for others configure theirs. */
static inline void tiles_begin(void) {
    struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = SIDE;
    __asm__ volatile("ldtilecfg %0" ::"m"(shape) : "memory");
}
static inline void tiles_end(void) { __asm__ volatile("tilerelease" ::: "memory"); }
#endif

typedef uint32_t pair_of_el __attribute__((may_alias)); /* two neighbours, moved as one */

#define SWAP(i, s, lower, upper)                  \
    do {                                          \
        sixteen a = x[i], b = x[(i) + s];         \
        x[i] = PICK(sixteen, a, b, lower);        \
        x[(i) + s] = PICK(sixteen, a, b, upper);  \
    } while (0)
#define LOW_1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH_1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define LOW_2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW_4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31

/* Sixteen rows of sixteen lanes become columns: ever larger squares beside the diagonal change places. */
static inline void transpose(sixteen x[SIDE]) {
    for (int i = 0; i < SIDE; i += 2) SWAP(i, 1, LOW_1, HIGH_1);
    for (int i = 0; i < SIDE; i++) if (!(i & 2)) SWAP(i, 2, LOW_2, HIGH_2);
    for (int i = 0; i < SIDE; i++) if (!(i & 4)) SWAP(i, 4, LOW_4, HIGH_4);
    for (int i = 0; i < SIDE / 2; i++) SWAP(i, 8, LOW_8, HIGH_8);
}

/* to [16 pairs, 16 columns] of 16 rows of 16 pairs, of which `count` are there and the rest is zero. */
static inline void transpose_pairs(const el *const rows[SIDE], int count, pair_of_el *to, int64_t stride) {
    sixteen x[SIDE];
    for (int i = 0; i < SIDE; i++)
        if (i < count) memcpy(x + i, rows[i], sizeof *x);
        else memset(x + i, 0, sizeof *x);
    transpose(x);
    for (int i = 0; i < SIDE; i++) memcpy(to + i * stride, x + i, sizeof *x);
}

/* y [T, O] = x [T, I] w [O, I]' + bias: 16 outputs at a time for up to 64 rows of input, which are transposed first; weights are read
   where they lie, each block while the next is being fetched. Answers 0, and has done nothing, where it cannot. */
static int linear_tiles(const el *x, const el *w, const el *bias, el *y, int T, int I, int O) {
    int groups = (T + SIDE - 1) / SIDE, steps = I / DEPTH;
    if (T == 1 || I % DEPTH || O % SIDE || !tiles_granted()) return 0;
    pair_of_el *packed = aligned_alloc(64, (size_t)groups * steps * SIDE * SIDE * sizeof(pair_of_el));
    if (!packed) return 0;
#pragma omp parallel
    {
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
            const el *weights = w + (int64_t)o * I;
            vec offset[SIDE / WIDTH];
            for (int r = 0; r < SIDE; r += WIDTH) offset[r / WIDTH] = bias ? load(bias + o + r) : all(0);
            for (int first = 0; first < groups; first += 4) {
                int count = groups - first < 4 ? groups - first : 4;
                const pair_of_el *b = packed + (int64_t)first * steps * SIDE * SIDE;
                int64_t apart = (int64_t)steps * SIDE * SIDE;
                sixteen out[4][SIDE];
                ZERO(0); ZERO(1); ZERO(2); ZERO(3);
                for (int s = 0; s < steps; s++, b += SIDE * SIDE) {
                    if (!first)
                        for (int line = 0; line < SIDE; line++)
                            __builtin_prefetch((const char *)(weights + (int64_t)SIDE * I) + (s * SIDE + line) * 64, 0, CACHE);
                    LOAD(4, weights + s * DEPTH, I * sizeof(el));
                    LOAD(5, b, 64);
                    DOT(0, 4, 5);
                    if (count > 1) { LOAD(6, b + apart, 64); DOT(1, 4, 6); }
                    if (count > 2) { LOAD(5, b + 2 * apart, 64); DOT(2, 4, 5); }
                    if (count > 3) { LOAD(6, b + 3 * apart, 64); DOT(3, 4, 6); }
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

#define PACKED (SIDE * SIDE) /* pairs of a tile, whose rows lie one behind the other */
#define TILE_BYTES (SIDE * 64)

/* Where the tiles of a product are: rows `row` bytes apart, and `step` bytes from one tile to the next. At 0: there is none. */
typedef struct {
    const void *at;
    int64_t row, step;
} Source;

/* Four tiles of sums, c[i][j] of a[i] and b[j], are made of `steps` products each, or are added to: a product waits for the one before it
   in the same tile, and what is loaded is used twice. */
static inline void multiply(const Source a[2], const Source b[2], int steps, float *const c[2][2], int add) {
    int below = a[1].at != 0, beside = b[1].at != 0;
    ZERO(0); ZERO(1); ZERO(2); ZERO(3);
    if (add) {
        LOAD(0, c[0][0], 64);
        if (beside) LOAD(1, c[0][1], 64);
        if (below) LOAD(2, c[1][0], 64);
        if (below && beside) LOAD(3, c[1][1], 64);
    }
    for (int i = 0; i < steps; i++) {
        LOAD(4, (const char *)a[0].at + i * a[0].step, a[0].row);
        LOAD(6, (const char *)b[0].at + i * b[0].step, b[0].row);
        DOT(0, 4, 6);
        if (beside) { LOAD(7, (const char *)b[1].at + i * b[1].step, b[1].row); DOT(1, 4, 7); }
        if (below) { LOAD(5, (const char *)a[1].at + i * a[1].step, a[1].row); DOT(2, 5, 6); }
        if (below && beside) DOT(3, 5, 7);
    }
    STORE(0, c[0][0], 64);
    if (beside) STORE(1, c[0][1], 64);
    if (below) STORE(2, c[1][0], 64);
    if (below && beside) STORE(3, c[1][1], 64);
}

typedef uint16_t words __attribute__((vector_size(64)));
#define TURNS(i) i, 32 + i, 1 + i, 33 + i, 2 + i, 34 + i, 3 + i, 35 + i

/* Values of the pool, transposed: for every 32 elements of a head two rows of tiles, with room for `tiles` in each, of which one takes in
   32 keys. Elements 0 to 3, 8 to 11, 16 to 19 and 24 to 27 are in the first of the two: so two keys meet by one instruction. Past the last
   key, up to a whole tile, stands the first, which weighs nothing. */
static inline void pack_values(const el *v, const int32_t *slots, int64_t apart, int count, int D, pair_of_el *to, int tiles) {
    for (int j = 0; j < count; j += DEPTH, to += PACKED)
        for (int d = 0; d < D; d += DEPTH) {
            sixteen low[SIDE], high[SIDE];
            for (int i = 0; i < SIDE; i++) {
                int one = j + 2 * i;
                words a, b;
                memcpy(&a, v + slots[one < count ? one : 0] * apart + d, sizeof a);
                memcpy(&b, v + slots[one + 1 < count ? one + 1 : 0] * apart + d, sizeof b);
                low[i] = (sixteen)PICK(words, a, b, TURNS(0), TURNS(8), TURNS(16), TURNS(24));
                high[i] = (sixteen)PICK(words, a, b, TURNS(4), TURNS(12), TURNS(20), TURNS(28));
            }
            transpose(low);
            transpose(high);
            memcpy(to + d / SIDE * tiles * PACKED, low, sizeof low);
            memcpy(to + (d / SIDE + 1) * tiles * PACKED, high, sizeof high);
        }
}

/* What was gathered by such values, `count` of 16 columns, becomes rows of D. */
static inline void unpack_sums(const float *sums, int D, float *const *rows, int count) {
    for (int d = 0; d < D; d += SIDE) {
        sixteen tile[SIDE];
        memcpy(tile, sums + d * SIDE, sizeof tile);
        transpose(tile);
        int first = d / DEPTH * DEPTH + d % DEPTH / 4;
        for (int i = 0; i < count; i++)
            for (int four = 0; four < 4; four++) memcpy(rows[i] + first + 8 * four, (float *)(tile + i) + 4 * four, 4 * sizeof(float));
    }
}

/* 2^x of four vectors, 1e-4 relative, a fraction of what a bfloat16 keeps; else as `powers`. */
static inline void powers_roughly(vec x[4]) {
    vec f[4], p[4];
#ifdef __AVX512DQ__
    for (int i = 0; i < 4; i++) f[i] = (vec)_mm512_reduce_ps((__m512)x[i], 1); /* less the next lower whole number */
#else
    vec n[4];
    for (int i = 0; i < 4; i++) x[i] = larger(all(-126.0f), x[i]);
    for (int i = 0; i < 4; i++) n[i] = (x[i] - 0.5f) + 12582912.0f;
    for (int i = 0; i < 4; i++) f[i] = x[i] - (n[i] - 12582912.0f);
#endif
    for (int i = 0; i < 4; i++) p[i] = f[i] * 7.802452e-2f + 2.2606717e-1f;
    for (int i = 0; i < 4; i++) p[i] = p[i] * f[i] + 6.9583353e-1f;
    for (int i = 0; i < 4; i++) p[i] = p[i] * f[i] + 9.9992522e-1f;
#ifdef __AVX512DQ__
    for (int i = 0; i < 4; i++) x[i] = (vec)_mm512_scalef_ps((__m512)p[i], (__m512)x[i]);
#else
    for (int i = 0; i < 4; i++) x[i] = (vec)((ints)p[i] + ((ints)n[i] << 23));
#endif
}

/* Weights of two keys, for WIDTH columns, as pairs of elements. */
static inline void store_pairs(pair_of_el *to, vec one, vec other) {
#if defined(__AVX512BF16__) && WIDTH == 16
    static const words turns = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)other, (__m512)one);
    both = _mm512_permutexvar_epi16((__m512i)turns, both);
    memcpy(to, &both, sizeof both);
#else
    el a[WIDTH], b[WIDTH];
    store(a, one);
    store(b, other);
    for (int i = 0; i < WIDTH; i++) to[i] = a[i] | (uint32_t)b[i] << 16;
#endif
}
