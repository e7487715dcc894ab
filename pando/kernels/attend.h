/* Attention over a plan: every tile for every kv head, then the merge of their parts. Included by native.c. */

#define ROWS 96      /* the most packed queries of a tile: pairs x G */
#define LINE 64      /* bytes that are fetched together */
#define SLACK 8.0f   /* powers of 2 that a score may lie above the peak */
#define LONG 128     /* keys that go through the tiles together */

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
    pair_of_el values[LONG / 2 * SIZE];
    float sums[ROWS];
    int32_t seen[ROWS], fewest[ROWS / SIDE]; /* keys, and of a group */
#endif
    vec sum[ROWS];
    float peak[ROWS];
} __attribute__((aligned(LINE))) Desk;

/* Keys of one head. */
typedef struct {
    const int32_t *slots;
    int count, head;
} Block;

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

/* Of a task, a tile and a head: what it begins with. */
static Block first_block(const Work *w, int task) {
    if (task >= w->count * w->K) return (Block){0};
    const Tile *tile = w->tiles + task % w->count;
    return (Block){w->slots + tile->slots + tile->from, tile->to - tile->from, task / w->count};
}

static void attend_tile(const Work *w, const Tile *tile, int h, Block next, Desk *desk) {
    int to = 0;
    for (int p = tile->pair; p < tile->pair + tile->pairs; p++) to = w->seen[p] > to ? w->seen[p] : to;
    if (to > tile->to) to = tile->to;
#ifdef TILES
    if (tile->pairs * (w->H / w->K) >= SIDE && w->D % DEPTH == 0 && tiles_granted()) {
        look_by_tiles(w, tile, h, to, next, desk);
        return;
    }
#endif
    look_by_vectors(w, tile, h, to, next, desk);
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
        for (int task = 0; task < w->count * w->K; task++) /* a head's keys stay in the cache */
            attend_tile(w, w->tiles + task % w->count, task / w->count, first_block(w, task + w->threads), &desk); /* threads take turns */
#ifdef TILES
        if (tiles_granted()) tiles_end();
#endif
#pragma omp for schedule(static)
        for (int place = 0; place < w->T * w->H; place++) merge(w, place / w->H, place % w->H);
    }
}
