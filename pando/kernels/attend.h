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

/* As native.py fills it in, but for what every layer has of its own. */
typedef struct {
    const el *q, *k, *v; /* of a layer: [.., H, D], and the pool [S, K, D] */
    el *out;             /* [T, H, D] */
    const float *slopes; /* [H], or none */
    const Tile *tiles;
    const int32_t *chains;               /* tiles chains[c] to chains[c + 1] are looked at by the same queries, for one part */
    const int32_t *slots;                /* of all runs */
    const int32_t *query, *seen;         /* of each pair: its query, and how many keys it sees, if there are so many */
    const int32_t *starts, *of;          /* the parts of token t are of[starts[t]] to of[starts[t + 1]] */
    const int64_t *moved;                /* tokens that ask again, of placements that are moved: as often as there are `moves` */
    const float *turns;                  /* by what each of these queries is rotated, as `rotate` takes it */
    el *queries;                         /* if there are any: room for those of the step, and these behind them */
    float *parts;                        /* partial results [parts, H, D] */
    float *peaks, *sums;                 /* of each the score, to base 2, that weighs 1, and the sum of weights, [parts, H]: a vector more is read */
    int32_t count, longer, T, H, K, D; /* chains, and those of them behind which all are short */
    int32_t columns; /* packed queries from which they are the lanes of vectors */
    int32_t moves;
    int32_t together; /* heads that a thread looks at by tiles, block by block */
    float scale; /* times log2(e): inside the kernel weights are powers of 2 */
} Work;

/* What a thread works in. */
typedef struct {
    float q[ROWS * SIZE], acc[ROWS * SIZE], scores[ROWS * KEYS], copy[KEYS * SIZE];
#ifdef TILES
    el keys[LONG * SIZE], some[DEPTH * SIZE]; /* copies of what is not in one piece: keys of a block, and some values */
    float block_scores[2][LONG * SIDE];
    pair_of_el weights[2][LONG / 2 * SIDE], values[LONG / 2 * SIZE];
    float sums[ROWS * SIZE / DEPTH], peaks[ROWS * SIZE / DEPTH]; /* of all heads' columns */
#endif
    vec sum[ROWS];
    float peak[ROWS];
} __attribute__((aligned(LINE))) Desk;

/* Keys of some heads. */
typedef struct {
    const int32_t *slots;
    int count, head, heads;
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
    for (int d = 0; d < w->D * block->heads; d += LINE / sizeof(el)) {
        __builtin_prefetch(w->k + place + d, 0, CACHE);
        __builtin_prefetch(w->v + place + d, 0, CACHE);
    }
}

#include "by_vectors.h"
#include "by_columns.h"
#ifdef TILES
#include "by_tiles.h"
#endif

/* Heads of a task from h on: their keys lie side by side, and come from memory sooner together. */
static inline int heads_of(const Work *w, int h) { return w->K - h < w->together ? w->K - h : w->together; }

/* A task is some heads of a chain; or a short chain, all of whose heads lie side by side. */
static inline int tasks_of(const Work *w) { return w->longer * ((w->K - 1) / heads_of(w, 0) + 1) + w->count - w->longer; }

static inline Block first_block(const Work *w, int chain, int h) {
    const Tile *tile = w->tiles + w->chains[chain];
    return (Block){w->slots + tile->slots + tile->from, tile->to - tile->from, h, heads_of(w, h)};
}

static inline int chain_of(const Work *w, int task, int *h) {
    int rest = task - (tasks_of(w) - w->count + w->longer);
    *h = rest < 0 ? task / w->longer * heads_of(w, 0) : 0;
    return rest < 0 ? task % w->longer : w->longer + rest;
}

static Block begin_of(const Work *w, int task) {
    int h;
    if (task >= tasks_of(w)) return (Block){0};
    int chain = chain_of(w, task, &h);
    return first_block(w, chain, h);
}

static void attend_chain(const Work *w, int chain, int h, Block next, Desk *desk) {
    const Tile *tile = w->tiles + w->chains[chain], *last = w->tiles + w->chains[chain + 1];
#ifdef TILES
    if (w->D % DEPTH == 0 && tiles_granted()) { /* few queries, too: most columns are idle then, and still it is faster */
        look_by_tiles(w, tile, last, h, heads_of(w, h), next, desk);
        return;
    }
#endif
    if (rows_of_tile(w, tile) >= w->columns) look_by_columns(w, tile, last, h, next, desk);
    else look_by_vectors(w, tile, last, h, next, desk);
}

static void do_task(const Work *w, int task, int behind, Desk *desk) {
    int h, chain = chain_of(w, task, &h), heads = heads_of(w, h), end = chain < w->longer ? h + heads : w->K;
    Block next = begin_of(w, behind);
    for (; h < end; h += heads) attend_chain(w, chain, h, h + heads < end ? first_block(w, chain, h + heads) : next, desk);
}

/* What up to WIDTH heads of a token, from h on, find in all of its parts. A part that saw nothing weighs nothing; who saw nothing at all
   answers zero. */
static void merge(const Work *w, int t, int h) {
    int H = w->H, D = w->D, heads = H - h < WIDTH ? H - h : WIDTH;
    float rows[WIDTH][SIZE], weight[WIDTH];
    vec top = all(-INFINITY), sum = all(0);
    for (int i = w->starts[t]; i < w->starts[t + 1]; i++) top = larger(load_float(w->peaks + (int64_t)w->of[i] * H + h), top);
    for (int n = 0; n < heads; n++) memset(rows[n], 0, D * sizeof(float));
    for (int i = w->starts[t]; i < w->starts[t + 1]; i++) {
        int64_t from = (int64_t)w->of[i] * H + h;
        vec sums = load_float(w->sums + from), weights = exp2_fast(load_float(w->peaks + from) - top);
        weights = either(sums == 0, all(0), weights);
        sum += either(sums == 0, all(0), weights * sums);
        store_float(weight, weights);
        for (int n = 0; n < heads; n++)
            if (weight[n] != 0)
                for (int d = 0; d < D; d++) rows[n][d] += weight[n] * w->parts[(from + n) * D + d];
    }
    for (int n = 0; n < heads; n++)
        for (int d = 0; d < D; d++) w->out[((int64_t)t * H + h + n) * D + d] = down(sum[n] == 0 ? 0.0f : rows[n][d] / sum[n]);
}

void attend(const Work *plan, const el *q, const el *k, const el *v) {
    Work work = *plan, *w = &work;
    int taken = 0, tasks = tasks_of(w);
    w->q = q, w->k = k, w->v = v;
#pragma omp parallel
    {
        static _Thread_local Desk desk; /* too much for the stack of some threads */
#ifdef TILES
        if (tiles_granted()) tiles_begin();
#endif
        /* Each thread has one, and takes the next before it begins: what that needs first is fetched meanwhile. */
        int threads = omp_get_num_threads(), task, behind = omp_get_thread_num();
        while ((task = behind) < tasks) {
#pragma omp atomic capture
            behind = taken++;
            behind += threads;
            do_task(w, task, behind, &desk);
        }
#ifdef TILES
        if (tiles_granted()) tiles_end();
#endif
#pragma omp barrier
#pragma omp for schedule(static)
        for (int place = 0; place < w->T * ((w->H + WIDTH - 1) / WIDTH); place++) merge(w, place % w->T, place / w->T * WIDTH);
    }
}
