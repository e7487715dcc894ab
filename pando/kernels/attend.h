/* Attention over a plan: every tile for every kv head, then the merge of their parts. Included by native.c. */

#define ROWS 96      /* the most packed queries of a tile: pairs x G */
#define LINE 64      /* bytes that are fetched together */
#define SLACK 8.0f   /* powers of 2 that a score may lie above the peak */
#define LONG 128     /* keys that go through the tiles together: a multiple of KEYS */

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

/* What a thread works in, all rows of a tile behind one another. */
typedef struct {
    float q[ROWS * SIZE], acc[ROWS * SIZE], scores[ROWS * LONG], copy[KEYS * SIZE];
#ifdef TILES
    pair_of_el keys[LONG / 2 * SIZE], values[LONG / 2 * SIZE];
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

/* Has a key and its value fetched: a head's rows lie too far apart for the processor to guess. */
static inline void ask_for(const Work *w, const Block *block, int j) {
    int64_t place = ((int64_t)block->slots[j] * w->K + block->head) * w->D;
    for (int d = 0; d < w->D; d += LINE / sizeof(el)) {
        __builtin_prefetch(w->k + place + d, 0, CACHE);
        __builtin_prefetch(w->v + place + d, 0, CACHE);
    }
}

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

/* `keys` scores, a multiple of KEYS, times `scale`, become weights. The peak moves, and sums and what was gathered so far are scaled to it,
   only when a score lies more than SLACK above it: after the first keys hardly ever. `narrow`: weights are left as elements, from the row's
   start. */
static inline void weigh(float *scores, int keys, int visible, float scale, float *peak, vec *sum, float *acc, int D, int narrow) {
    if (!visible) {
        memset(scores, 0, keys * sizeof(float));
        return;
    }
    for (int j = visible; j < keys; j++) scores[j] = -INFINITY;
    vec most[4]; /* four, so that none waits for the one before */
    for (int i = 0; i < 4; i++) most[i] = load_float(scores + i * WIDTH);
    for (int j = 4 * WIDTH; j < keys; j += 4 * WIDTH)
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
    for (int j = 0; j < keys; j += 4 * WIDTH) {
        vec weight[4];
        for (int i = 0; i < 4; i++) weight[i] = load_float(scores + j + i * WIDTH) * scale - from;
        powers(weight, 4, narrow);
        for (int i = 0; i < 4; i++)
            if (narrow) store((el *)scores + j + i * WIDTH, weight[i]); /* behind what was read */
            else store_float(scores + j + i * WIDTH, weight[i]);
        added += (weight[0] + weight[1]) + (weight[2] + weight[3]);
    }
    size_t size = narrow ? sizeof(el) : sizeof(float); /* weights past the last key are exactly 0: what lies there may be anything finite */
    if (visible < keys) memset((char *)scores + visible * size, 0, (keys - visible) * size);
    *sum += added;
}

/* The same for row r of a tile, whose scores are those of `count` keys behind `from`. */
static inline void weigh_row(const Work *w, const Tile *tile, int h, int r, int from, int count, float scale, float *scores, Desk *desk,
                             int narrow) {
    int G = w->H / w->K, pair = tile->pair + r / G, visible = w->seen[pair] - from, keys = (count + KEYS - 1) / KEYS * KEYS;
    visible = visible < 0 ? 0 : visible > count ? count : visible;
    if (w->slopes) {
        float slope = w->slopes[h * G + r % G] * LOG2_E;
        for (int j = 0; j < visible; j++) scores[j] = scores[j] * scale + slope * (w->ahead[pair] + from + j);
        scale = 1.0f;
    }
    weigh(scores, keys, visible, scale, desk->peak + r, desk->sum + r, desk->acc + r * w->D, w->D, narrow);
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

/* Keys up to `to` of a tile; then those that come `next` are asked for. */
static void look_by_vectors(const Work *w, const Tile *tile, int h, int to, Block next, Desk *desk) {
    int D = w->D, rows = tile->pairs * (w->H / w->K);
    const float *block[KEYS];
    for (int r = 0; r < rows; r++) {
        const el *from = query_of(w, tile, h, r);
        for (int d = 0; d < D; d++) desk->q[r * D + d] = up(from[d]) * w->scale;
    }
    for (int from = tile->from; from < to; from += KEYS) {
        int count = to - from < KEYS ? to - from : KEYS;
        const int32_t *slots = w->slots + tile->slots + from;
        rows_of(w->k, slots, count, w->K, h, D, desk->copy, block);
        if (from + KEYS >= to)
            for (int j = 0; j < next.count && j < KEYS; j++) ask_for(w, &next, j);
        score(desk->q, rows, block, count, D, desk->scores);
        for (int r = 0; r < rows; r++) weigh_row(w, tile, h, r, from, count, 1.0f, desk->scores + r * KEYS, desk, 0);
        rows_of(w->v, slots, count, w->K, h, D, desk->copy, block);
        gather(desk->scores, rows, block, count, D, desk->acc);
    }
}

#ifdef TILES
#define WHOLE(n) (((n) + SIDE - 1) / SIDE * SIDE)

/* The keys and values of a block are packed, then every row's scores are made, weighed, and gathered by. Meanwhile the block after it is
   asked for, a few keys at a time: more would wait for one another. */
static void look_by_tiles(const Work *w, const Tile *tile, int h, int to, Block next, Desk *desk) {
    int D = w->D, rows = tile->pairs * (w->H / w->K), whole = WHOLE(rows);
    el *q = (el *)desk->q; /* as they are: tiles multiply bfloat16 */
    for (int r = 0; r < rows; r++) memcpy(q + r * D, query_of(w, tile, h, r), D * sizeof(el));
    memset(q + rows * D, 0, (whole - rows) * D * sizeof(el));
    for (int from = tile->from; from < to; from += LONG) {
        int left = to - from - LONG, count = left < 0 ? to - from : LONG, depth = (count + DEPTH - 1) / DEPTH * DEPTH, asked = 0;
        const int32_t *slots = w->slots + tile->slots + from;
        Block ahead = left > 0 ? (Block){slots + LONG, left, h} : next;
        if (ahead.count > LONG) ahead.count = LONG;
        pack_keys(w->k + h * D, slots, (int64_t)w->K * D, count, D, desk->keys);
        pack_values(w->v + h * D, slots, (int64_t)w->K * D, count, D, desk->values, LONG / DEPTH);
        multiply(q, D, desk->keys, D / DEPTH * PACKED, desk->scores, LONG, whole, WHOLE(count), D, 0);
        for (int r = 0; r < rows; r++) {
            for (; asked * rows < (r + 1) * ahead.count; asked++) ask_for(w, &ahead, asked);
            weigh_row(w, tile, h, r, from, count, w->scale, desk->scores + r * LONG, desk, 1);
        }
        multiply((const el *)desk->scores, 2 * LONG, desk->values, LONG / DEPTH * PACKED, desk->acc, D, whole, D, depth, 1);
    }
}
#endif

/* Of a task, a tile and a head: what it begins with. */
static Block first_block(const Work *w, int task) {
    if (task >= w->count * w->K) return (Block){0};
    const Tile *tile = w->tiles + task % w->count;
    return (Block){w->slots + tile->slots + tile->from, tile->to - tile->from, task / w->count};
}

static void attend_tile(const Work *w, const Tile *tile, int h, Block next, Desk *desk) {
    int G = w->H / w->K, D = w->D, rows = tile->pairs * G, to = 0;
    for (int p = tile->pair; p < tile->pair + tile->pairs; p++) to = w->seen[p] > to ? w->seen[p] : to;
    if (to > tile->to) to = tile->to;
    memset(desk->acc, 0, (int64_t)rows * D * sizeof(float));
    for (int r = 0; r < rows; r++) desk->peak[r] = -INFINITY, desk->sum[r] = all(0);
#ifdef TILES
    if (rows >= SIDE && D % DEPTH == 0 && tiles_granted()) look_by_tiles(w, tile, h, to, next, desk);
    else
#endif
    look_by_vectors(w, tile, h, to, next, desk);
    for (int r = 0; r < rows; r++) {
        int64_t place = (int64_t)(tile->part + r / G) * w->H + h * G + r % G;
        w->peaks[place] = desk->peak[r];
        w->sums[place] = total(desk->sum[r]);
        memcpy(w->parts + place * D, desk->acc + r * D, D * sizeof(float));
    }
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
