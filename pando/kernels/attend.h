/* Attention over a plan: every tile for every kv head, then the merge of their parts. Included by native.c. */

#define ROWS 256      /* the most packed queries of a tile: pairs x G */
#define LINE 64       /* bytes that are fetched together */
#define SLACK 8.0f    /* powers of 2 that a score may lie above the peak */
#define LARGE 0x1p60f /* a sum of weights that they must not come to */
#define LONG 64       /* keys that go through the tiles together */

typedef struct {
    int32_t slots, from, to; /* keys from..to of the run whose slots begin there */
    int32_t pair, pairs;     /* (read, query) pairs that look at them */
    int32_t part;            /* where their partial results go */
} Tile;

/* As native.py fills it in. */
typedef struct {
    const el *q, *k, *v; /* [.., H, D], and the pool [S, K, D] */
    el *out;             /* [T, H, D] */
    const float *slopes; /* [H], or none */
    const Tile *tiles;
    const int32_t *chains;               /* tiles chains[c] to chains[c + 1] are looked at by the same queries, for one part */
    const int32_t *slots;                /* of all runs */
    const int32_t *query, *seen, *ahead; /* of each pair: its query, how many keys it sees, how far ahead of it the first one lies */
    const int32_t *starts, *of;          /* the parts of token t are of[starts[t]] to of[starts[t + 1]] */
    float *parts;                        /* partial results [parts, H, D] */
    float *peaks, *sums;                 /* of each the score, to base 2, that weighs 1, and the sum of weights, [parts, H] */
    int32_t count, threads, T, H, K, D;
    float scale; /* times log2(e): inside the kernel weights are powers of 2 */
} Work;

/* What a thread works in. */
typedef struct {
    float q[ROWS * SIZE], acc[ROWS * SIZE], scores[ROWS * KEYS], copy[KEYS * SIZE];
#ifdef TILES
    el keys[LONG * SIZE];
    float block_scores[2][LONG * SIDE];
    pair_of_el weights[2][LONG / 2 * SIDE], values[2][LONG / 2 * SIZE];
    float sums[ROWS], fresh[SIDE]; /* all, and those of a unit */
#endif
    vec sum[ROWS];
    float peak[ROWS];
} __attribute__((aligned(LINE))) Desk;

/* Keys of one head. */
typedef struct {
    const int32_t *slots;
    int count, head;
} Block;

static inline int rows_of_tile(const Work *w, const Tile *tile) { return tile->pairs * (w->H / w->K); }

/* Keys of a tile that somebody sees. */
static inline int end_of(const Work *w, const Tile *tile) {
    int to = 0;
    for (int p = tile->pair; p < tile->pair + tile->pairs; p++) to = w->seen[p] > to ? w->seen[p] : to;
    return to < tile->to ? to : tile->to;
}

/* What row r of a tile asks with. */
static inline const el *query_of(const Work *w, const Tile *tile, int h, int r) {
    int G = w->H / w->K;
    return w->q + ((int64_t)w->query[tile->pair + r / G] * w->H + h * G + r % G) * w->D;
}

/* Where it leaves what it found, as a row of the parts [parts, H]. */
static inline int64_t place_of(const Work *w, const Tile *tile, int h, int r) {
    int G = w->H / w->K;
    return (int64_t)(tile->part + r / G) * w->H + h * G + r % G;
}

/* Has a key and its value fetched: a head's rows lie too far apart for the processor to guess. */
static inline void ask_for(const Work *w, const Block *block, int j) {
    int64_t place = ((int64_t)block->slots[j] * w->K + block->head) * w->D;
    for (int d = 0; d < w->D; d += LINE / sizeof(el)) {
        __builtin_prefetch(w->k + place + d, 0, CACHE);
        __builtin_prefetch(w->v + place + d, 0, CACHE);
    }
}

#include "by_vectors.h"
#ifdef TILES
#include "by_tiles.h"
#endif

/* Of a task, a chain and a head: what it begins with. */
static Block first_block(const Work *w, int task) {
    if (task >= w->count * w->K) return (Block){0};
    const Tile *tile = w->tiles + w->chains[task % w->count];
    return (Block){w->slots + tile->slots + tile->from, tile->to - tile->from, task / w->count};
}

static void attend_chain(const Work *w, int task, Desk *desk) {
    const int32_t *chain = w->chains + task % w->count;
    const Tile *tile = w->tiles + chain[0], *last = w->tiles + chain[1];
    Block next = first_block(w, task + w->threads); /* threads take turns */
#ifdef TILES
    if (w->D % DEPTH == 0 && tiles_granted()) { /* few queries, too: most columns are idle then, and still it is faster */
        look_by_tiles(w, tile, last, task / w->count, next, desk);
        return;
    }
#endif
    look_by_vectors(w, tile, last, task / w->count, next, desk);
}

/* What one head of a token finds in all of its parts. A part that saw nothing weighs nothing; who saw nothing at all answers zero. */
static void merge(const Work *w, int t, int h) {
    int H = w->H, D = w->D;
    float top = -INFINITY, sum = 0, row[SIZE] = {0};
    for (int i = w->starts[t]; i < w->starts[t + 1]; i++) top = w->peaks[w->of[i] * H + h] > top ? w->peaks[w->of[i] * H + h] : top;
    for (int i = w->starts[t]; i < w->starts[t + 1]; i++) {
        int64_t from = (int64_t)w->of[i] * H + h;
        if (w->sums[from] == 0) continue;
        float weight = exp2_one(w->peaks[from] - top);
        sum += weight * w->sums[from];
        for (int d = 0; d < D; d++) row[d] += weight * w->parts[from * D + d];
    }
    for (int d = 0; d < D; d++) w->out[((int64_t)t * H + h) * D + d] = down(sum == 0 ? 0.0f : row[d] / sum);
}

void attend(const Work *w) {
#pragma omp parallel
    {
        Desk desk;
#ifdef TILES
        if (tiles_granted()) tiles_begin();
#endif
#pragma omp for schedule(dynamic)
        for (int task = 0; task < w->count * w->K; task++) attend_chain(w, task, &desk); /* a head's keys stay in the cache */
#ifdef TILES
        if (tiles_granted()) tiles_end();
#endif
#pragma omp for schedule(static)
        for (int place = 0; place < w->T * w->H; place++) merge(w, place / w->H, place % w->H);
    }
}
