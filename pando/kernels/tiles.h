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

/* c [rows, columns] = a [rows, depth] b, or is added to: whole tiles, those of b packed, `b_column` apart from one column to the next;
   `across` is a row's length in memory. Four tiles of c are made at a time: a product waits for the one before it in the same tile, and
   what is loaded is used twice. */
static inline void multiply(const el *a, int a_across, const pair_of_el *b, int b_column, float *c, int c_across, int rows, int columns,
                            int depth, int add) {
    int64_t a_row = a_across * sizeof *a, c_row = c_across * sizeof *c;
    for (int r = 0; r < rows; r += 2 * SIDE)
        for (int j = 0; j < columns; j += 2 * SIDE) {
            int below = r + SIDE < rows, beside = j + SIDE < columns;
            float *here = c + r * c_across + j, *under = here + SIDE * c_across;
            const pair_of_el *of_b = b + j / SIDE * b_column;
            ZERO(0); ZERO(1); ZERO(2); ZERO(3);
            if (add) {
                LOAD(0, here, c_row);
                if (beside) LOAD(1, here + SIDE, c_row);
                if (below) LOAD(2, under, c_row);
                if (below && beside) LOAD(3, under + SIDE, c_row);
            }
            for (int k = 0; k < depth; k += DEPTH, of_b += PACKED) {
                LOAD(4, a + r * a_across + k, a_row);
                LOAD(6, of_b, 64);
                DOT(0, 4, 6);
                if (beside) { LOAD(7, of_b + b_column, 64); DOT(1, 4, 7); }
                if (below) { LOAD(5, a + (r + SIDE) * a_across + k, a_row); DOT(2, 5, 6); }
                if (below && beside) DOT(3, 5, 7);
            }
            STORE(0, here, c_row);
            if (beside) STORE(1, here + SIDE, c_row);
            if (below) STORE(2, under, c_row);
            if (below && beside) STORE(3, under + SIDE, c_row);
        }
}

/* Has a line fetched that will be written soon: a store that finds none holds up all behind it. */
static inline void ask_to_write(pair_of_el *line) { __builtin_prefetch(line, 1, 3); }

/* Keys of the pool, `apart` elements from slot to slot: for each 16 of them D / DEPTH tiles. Past the last key tiles are zero. */
static inline void pack_keys(const el *k, const int32_t *slots, int64_t apart, int count, int D, pair_of_el *to) {
    for (int j = 0; j < count; j += SIDE) {
        const el *from[SIDE];
        int here = count - j < SIDE ? count - j : SIDE;
        for (int i = 0; i < here; i++) from[i] = k + slots[j + i] * apart;
        for (int d = 0; d < D; d += DEPTH, to += PACKED) {
            for (int i = 0; i < SIDE; i++) ask_to_write(to + PACKED + i * SIDE);
            transpose_pairs(from, here, to, SIDE);
            for (int i = 0; i < here; i++) from[i] += DEPTH;
        }
    }
}

/* Their values: for each 16 elements of a head one tile for each 32 keys, with room for `tiles`. Past the last, up to a whole tile, stands
   the first, which weighs nothing. */
static inline void pack_values(const el *v, const int32_t *slots, int64_t apart, int count, int D, pair_of_el *to, int tiles) {
    for (int j = 0; j < count; j += DEPTH, to += PACKED)
        for (int i = 0; i < SIDE; i++) {
            int one = j + 2 * i;
            const el *a = v + slots[one < count ? one : 0] * apart, *b = v + slots[one + 1 < count ? one + 1 : 0] * apart;
            for (int d = 0; d < D; d += WIDTH) {
                half_vec x, y;
                memcpy(&x, a + d, sizeof x);
                memcpy(&y, b + d, sizeof y);
                bits_vec pair = __builtin_convertvector(x, bits_vec) | __builtin_convertvector(y, bits_vec) << 16;
                pair_of_el *place = to + d / SIDE * tiles * PACKED + i * SIDE + d % SIDE;
                ask_to_write(place + 4 * SIDE);
                memcpy(place, &pair, sizeof pair);
            }
        }
}
