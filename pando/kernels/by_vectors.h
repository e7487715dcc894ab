/* Looking at keys by vectors, KEYS at a time, all as fp32. Included by attend.h. */

/* Whether each block of keys is asked for ahead: few queries wait for memory. As measured with AVX-512; on ARM it was not. */
#ifdef __x86_64__
#define EACH 1
#else
#define EACH 0
#endif

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

/* acc [rows, D] += weights [rows, KEYS] x values, which are added up by themselves first: over 100,000 keys, one by one, roundings tell. */
static void gather(const float *weights, int rows, const float *const *values, int count, int D, float *acc) {
    int d = 0;
    for (; d + 4 * WIDTH <= D; d += 4 * WIDTH)
        for (int r = 0; r < rows; r += 4) {
            int n = rows - r < 4 ? rows - r : 4;
            vec sum[4][4] = {{{0}}};
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
                for (int c = 0; c < 4; c++) {
                    float *to = acc + (r + i) * D + d + c * WIDTH;
                    store_float(to, load_float(to) + sum[i][c]);
                }
        }
    for (; d < D; d++)
        for (int r = 0; r < rows; r++) {
            float sum = 0;
            for (int j = 0; j < count; j++) sum += weights[r * KEYS + j] * values[j][d];
            acc[r * D + d] += sum;
        }
}

/* The scores of KEYS keys become weights. The peak moves, and sums and what was gathered so far are scaled to it, only when a score lies
   more than SLACK above it: after the first keys hardly ever. */
static inline void weigh(float *scores, int visible, float *peak, vec *sum, float *acc, int D) {
    if (!visible) {
        memset(scores, 0, KEYS * sizeof(float));
        return;
    }
    for (int j = visible; j < KEYS; j++) scores[j] = -INFINITY;
    vec most[4]; /* four, so that none waits for the one before */
    for (int i = 0; i < 4; i++) most[i] = load_float(scores + i * WIDTH);
    for (int j = 4 * WIDTH; j < KEYS; j += 4 * WIDTH)
        for (int i = 0; i < 4; i++) most[i] = larger(load_float(scores + j + i * WIDTH), most[i]);
    vec highest = larger(larger(most[0], most[1]), larger(most[2], most[3]));
    if (any_above(highest, *peak + SLACK)) {
        float top = largest(highest), shrink = *peak == -INFINITY ? 0.0f : exp2_one(*peak - top);
        *sum *= shrink;
        for (int d = 0; d < D; d++) acc[d] *= shrink;
        *peak = top;
    }
    float from = *peak;
    vec added = {0};
    for (int j = 0; j < KEYS; j += 4 * WIDTH) {
        vec weight[4];
        for (int i = 0; i < 4; i++) weight[i] = load_float(scores + j + i * WIDTH) - from;
        powers(weight, 4);
        for (int i = 0; i < 4; i++) store_float(scores + j + i * WIDTH, weight[i]);
        added += (weight[0] + weight[1]) + (weight[2] + weight[3]);
    }
    if (visible < KEYS) memset(scores + visible, 0, (KEYS - visible) * sizeof(float)); /* exactly 0: what lies there may be anything finite */
    *sum += added;
}

/* The same for row r of a tile, whose scores are those of `count` keys behind `from`. */
static inline void weigh_row(const Work *w, const Tile *tile, int h, int r, int from, int count, Desk *desk) {
    int G = w->H / w->K, pair = tile->pair + r / G, visible = w->seen[pair] - from;
    float *scores = desk->scores + r * KEYS;
    visible = visible < 0 ? 0 : visible > count ? count : visible;
    if (w->slopes) {
        float slope = w->slopes[h * G + r % G] * LOG2_E;
        for (int j = 0; j < visible; j++) scores[j] += slope * (1 - w->seen[pair] + from + j);
    }
    weigh(scores, visible, desk->peak + r, desk->sum + r, desk->acc + r * w->D, w->D);
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

/* What comes behind a tile of a chain. */
static inline Block behind_of(const Work *w, const Tile *tile, const Tile *last, int h, Block next) {
    return tile + 1 < last ? (Block){w->slots + tile[1].slots + tile[1].from, tile[1].to - tile[1].from, h, 1} : next;
}

/* The next keys of a tile, from `from` to `to` at most, as fp32; answers how many. With the last of them, or with each, those behind them
   are asked for. */
static inline int keys_of(
    const Work *w, const Tile *tile, int from, int to, int h, Block behind, int each, float *scratch, const float **keys) {
    int count = to - from < KEYS ? to - from : KEYS, left = to - from - count;
    rows_of(w->k, w->slots + tile->slots + from, count, w->K, h, w->D, scratch, keys);
    if (left) behind = (Block){w->slots + tile->slots + from + count, each ? left : 0, h, 1};
    for (int j = 0; j < behind.count && j < KEYS; j++) ask_for(w, &behind, j);
    return count;
}

/* Keys of each tile that somebody sees. Not inlined, so that its loops need not share registers with others. */
static __attribute__((noinline)) void look_by_vectors(const Work *w, const Tile *tile, const Tile *last, int h, Block next, Desk *desk) {
    int D = w->D, rows = rows_of_tile(w, tile);
    const float *block[KEYS];
    memset(desk->acc, 0, (int64_t)rows * D * sizeof(float));
    for (int r = 0; r < rows; r++) desk->peak[r] = -INFINITY, desk->sum[r] = all(0);
    for (const Tile *at = tile; at < last; at++) {
        Block behind = behind_of(w, at, last, h, next);
        int to = end_of(w, at);
        for (int r = 0; r < rows; r++) {
            const el *from = query_of(w, at, h, r);
            for (int d = 0; d < D; d++) desk->q[r * D + d] = up(from[d]) * w->scale;
        }
        for (int from = at->from; from < to; from += KEYS) {
            int count = keys_of(w, at, from, to, h, behind, EACH, desk->copy, block);
            score(desk->q, rows, block, count, D, desk->scores);
            for (int r = 0; r < rows; r++) weigh_row(w, at, h, r, from, count, desk);
            rows_of(w->v, w->slots + at->slots + from, count, w->K, h, D, desk->copy, block);
            gather(desk->scores, rows, block, count, D, desk->acc);
        }
    }
    for (int r = 0; r < rows; r++) {
        int64_t place = place_of(w, tile, h, r);
        w->peaks[place] = desk->peak[r];
        w->sums[place] = total(desk->sum[r]);
        memcpy(w->parts + place * D, desk->acc + r * D, D * sizeof(float));
    }
}
