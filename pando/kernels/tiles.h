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
typedef float columns __attribute__((vector_size(64)));

/* All columns side by side: each is added up as it would be alone, pair by pair. */
static inline void tile_dot(int c, int a, int b) {
    sixteen pairs[SIDE];
    memcpy(pairs, tile_registers[b], sizeof pairs);
    for (int i = 0; i < SIDE; i++) {
        const el *x = (const el *)tile_registers[a][i];
        columns sum;
        memcpy(&sum, tile_registers[c][i], sizeof sum);
        for (int k = 0; k < SIDE; k++) {
            sum += up(x[2 * k]) * (columns)(pairs[k] << 16);
            sum += up(x[2 * k + 1]) * (columns)(pairs[k] & -65536); /* the upper half */
        }
        memcpy(tile_registers[c][i], &sum, sizeof sum);
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

#define PACKED (SIDE * SIDE) /* pairs of a tile, whose rows lie one behind the other */

typedef uint16_t words __attribute__((vector_size(64)));
#define LOW(i) i, 32 + i, 1 + i, 33 + i, 2 + i, 34 + i, 3 + i, 35 + i
#define HIGH(i) LOW(4 + i)

/* Eight elements of each of four rows that are `apart`, one behind the other. */
static inline words of_four(const el *row, int64_t apart) {
#ifdef __AVX512F__
    __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)row));
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(row + apart)), 1);
    for (int i = 2; i < 4; i++) x = _mm512_mask_broadcast_i32x4(x, 0xf << 4 * i, _mm_loadu_si128((const __m128i *)(row + i * apart)));
    return (words)x;
#else
    words x;
    for (int i = 0; i < 4; i++) memcpy((char *)&x + 16 * i, row + i * apart, 16);
    return x;
#endif
}

static inline void riffle(const words x[8], words y[8]) {
    for (int i = 0; i < 4; i++) {
        y[2 * i] = PICK(words, x[i], x[i + 4], LOW(0), LOW(8), LOW(16), LOW(24));
        y[2 * i + 1] = PICK(words, x[i], x[i + 4], HIGH(0), HIGH(8), HIGH(16), HIGH(24));
    }
}

/* to [D, 32]: 32 rows of D elements, which are `apart`, transposed. Eight vectors of eight are riffled like cards: of the number of its vector
   each element gives one bit for one of its place in it, and after three times they have changed. */
static inline void transpose_values(const el *rows, int64_t apart, int D, el *to) {
    for (int e = 0; e < D; e += 8, to += 8 * DEPTH) {
        words x[8], y[8];
        for (int i = 0; i < 8; i++) x[i] = of_four(rows + i * apart + e, 8 * apart);
        riffle(x, y);
        riffle(y, x);
        riffle(x, y);
        for (int i = 0; i < 8; i++) memcpy(to + i * DEPTH, y + i, sizeof *y);
    }
}

#define LOW_LANE 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define HIGH_LANE 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31

/* Of sixteen rows of sixteen lanes the first four columns. */
static inline void first_columns(const float *from, sixteen to[4]) {
    const el *rows = (const el *)from;
    int64_t apart = SIDE * sizeof *from / sizeof(el);
    sixteen x[4], low[2], high[2];
    for (int i = 0; i < 4; i++) x[i] = (sixteen)of_four(rows + i * apart, 4 * apart);
    for (int i = 0; i < 2; i++) low[i] = PICK(sixteen, x[2 * i], x[2 * i + 1], LOW_LANE);
    for (int i = 0; i < 2; i++) high[i] = PICK(sixteen, x[2 * i], x[2 * i + 1], HIGH_LANE);
    to[0] = PICK(sixteen, low[0], low[1], LOW_2), to[1] = PICK(sixteen, low[0], low[1], HIGH_2);
    to[2] = PICK(sixteen, high[0], high[1], LOW_2), to[3] = PICK(sixteen, high[0], high[1], HIGH_2);
}

/* What was gathered by such values, `count` of 16 columns, becomes rows of D. */
static inline void unpack_sums(const float *sums, int D, float *const *rows, int count) {
    for (int d = 0; d < D; d += SIDE) {
        sixteen tile[SIDE];
        if (count <= 4) first_columns(sums + d * SIDE, tile);
        else {
            memcpy(tile, sums + d * SIDE, sizeof tile);
            transpose(tile);
        }
        for (int i = 0; i < count; i++) memcpy(rows[i] + d, tile + i, sizeof *tile);
    }
}

#if defined(WIDE) && defined(__AVX512DQ__) && defined(__AVX512BW__) && defined(__AVX512BF16__)
#define CUT
#define HALF 0x1p-8f /* of the last place that a bfloat16 keeps: what has it added is rounded by being cut */
#else
#define HALF 0.0f
#endif

/* 2^x of four vectors for `store_pairs`: 1e-4 relative, a fraction of what a bfloat16 keeps. Exactly 0 of minus infinity, more than LARGE
   where it is too large for a float, and NaN stays NaN. */
ALWAYS void powers_roughly(vec x[4]) {
    vec f[4], p[4];
#if defined(WIDE) && defined(__AVX512DQ__)
    for (int i = 0; i < 4; i++) f[i] = (vec)_mm512_reduce_ps((__m512)x[i], 1); /* less the next lower whole number */
#else
    vec n[4];
    ints nothing[4];
    for (int i = 0; i < 4; i++) nothing[i] = x[i] < -126.0f;
    for (int i = 0; i < 4; i++) x[i] = smaller(all(127.0f), larger(all(-126.0f), x[i]));
    for (int i = 0; i < 4; i++) n[i] = (x[i] - 0.5f) + 12582912.0f;
    for (int i = 0; i < 4; i++) f[i] = x[i] - (n[i] - 12582912.0f);
#endif
    for (int i = 0; i < 4; i++) p[i] = f[i] * 7.802452e-2f + 2.2606717e-1f;
    for (int i = 0; i < 4; i++) p[i] = p[i] * f[i] + 6.9583353e-1f;
    for (int i = 0; i < 4; i++) p[i] = p[i] * f[i] + (9.9992522e-1f + HALF);
#if defined(WIDE) && defined(__AVX512DQ__)
    for (int i = 0; i < 4; i++) x[i] = (vec)_mm512_scalef_ps((__m512)p[i], (__m512)x[i]);
#else
    for (int i = 0; i < 4; i++) x[i] = either(nothing[i], all(0), (vec)((ints)p[i] + ((ints)n[i] << 23)));
#endif
}

/* Weights of two keys, for WIDTH columns, as pairs of elements; answers `sum` and what was kept of them. */
ALWAYS vec store_pairs(pair_of_el *to, vec one, vec other, vec sum) {
#ifdef CUT
    const __m512i upper = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302), ones = _mm512_set1_epi32(0x3f803f80);
    __m512i both = _mm512_mask_shuffle_epi8((__m512i)other, 0x3333333333333333, (__m512i)one, upper);
    memcpy(to, &both, sizeof both);
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)both, (__m512bh)ones);
#else
    el a[WIDTH], b[WIDTH];
    store(a, one);
    store(b, other);
    for (int i = 0; i < WIDTH; i++) to[i] = a[i] | (uint32_t)b[i] << 16;
    return sum + (load(a) + load(b));
#endif
}
