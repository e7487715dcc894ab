/* Looking at keys by vectors whose lanes are queries, where there are enough of them: keys and values are taken element by element, each for
   all queries of a vector at once, so that nothing is ever added up within one. All as fp32, KEYS at a time. Included by attend.h. */

/* Sums of as many keys, or elements of values, for three vectors of queries are what fits the registers. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define ABREAST 8
#else
#define ABREAST 4
#endif
#define VECTORS 3

/* scores [vectors, KEYS, WIDTH] of up to KEYS keys for queries [vectors, D, WIDTH], of which n vectors are taken at a time. */
ALWAYS void score_some(const float *q, int n, const float *const *keys, int count, int D, float *scores) {
    for (int j = 0; j < count; j += ABREAST) {
        vec sum[ABREAST][VECTORS] = {{{0}}};
        const float *b[ABREAST];
        for (int i = 0; i < ABREAST; i++) b[i] = keys[j + i < count ? j + i : j];
        for (int d = 0; d < D; d++) {
            vec a[VECTORS];
            for (int c = 0; c < n; c++) a[c] = load_float(q + (c * D + d) * WIDTH);
            for (int i = 0; i < ABREAST; i++)
                for (int c = 0; c < n; c++) sum[i][c] += b[i][d] * a[c];
        }
        for (int i = 0; i < ABREAST; i++) /* those behind the last fill up KEYS, and nobody reads them */
            for (int c = 0; c < n; c++) store_float(scores + (c * KEYS + j + i) * WIDTH, sum[i][c]);
    }
}

/* acc [vectors, D, WIDTH] += weights [vectors, KEYS, WIDTH] of up to KEYS values, for n vectors, added up by themselves as in `gather`. */
ALWAYS void gather_some(const float *weights, int n, const float *const *values, int count, int D, float *acc) {
    int d = 0;
    for (; d + ABREAST <= D; d += ABREAST) {
        vec sum[ABREAST][VECTORS] = {{{0}}};
        for (int j = 0; j < count; j++) {
            vec a[VECTORS];
            for (int c = 0; c < n; c++) a[c] = load_float(weights + (c * KEYS + j) * WIDTH);
            for (int i = 0; i < ABREAST; i++)
                for (int c = 0; c < n; c++) sum[i][c] += values[j][d + i] * a[c];
        }
        for (int i = 0; i < ABREAST; i++)
            for (int c = 0; c < n; c++) {
                float *to = acc + (c * D + d + i) * WIDTH;
                store_float(to, load_float(to) + sum[i][c]);
            }
    }
    for (; d < D; d++)
        for (int c = 0; c < n; c++) {
            vec sum = {0};
            float *to = acc + (c * D + d) * WIDTH;
            for (int j = 0; j < count; j++) sum += values[j][d] * load_float(weights + (c * KEYS + j) * WIDTH);
            store_float(to, load_float(to) + sum);
        }
}

/* How many of the vectors that are left go together: three, and four as twice two. */
static inline int together(int left) { return left > VECTORS + 1 || left == VECTORS ? VECTORS : left > 1 ? 2 : 1; }

static __attribute__((noinline)) void score_columns(const float *q, int vectors, const float *const *keys, int count, int D, float *scores) {
    for (int v = 0, n; v < vectors; v += n) {
        n = together(vectors - v);
        const float *from = q + (int64_t)v * D * WIDTH;
        float *to = scores + v * KEYS * WIDTH;
        if (n == 3) score_some(from, 3, keys, count, D, to);
        else if (n == 2) score_some(from, 2, keys, count, D, to);
        else score_some(from, 1, keys, count, D, to);
    }
}

static __attribute__((noinline)) void gather_columns(const float *weights, int vectors, const float *const *values, int count, int D, float *acc) {
    for (int v = 0, n; v < vectors; v += n) {
        n = together(vectors - v);
        const float *from = weights + v * KEYS * WIDTH;
        float *to = acc + (int64_t)v * D * WIDTH;
        if (n == 3) gather_some(from, 3, values, count, D, to);
        else if (n == 2) gather_some(from, 2, values, count, D, to);
        else gather_some(from, 1, values, count, D, to);
    }
}

/* What a vector of queries sees of `count` keys behind `from`: how many, and whether each sees all. A lane without a query sees all. */
static inline int sees(const Work *w, const Tile *tile, int v, int rows, int from, int count, ints *visible) {
    int G = w->H / w->K, all_see = 1;
    for (int lane = 0, r = v * WIDTH; lane < WIDTH; lane++, r++) {
        int seen = r < rows ? w->seen[tile->pair + r / G] - from : count;
        (*visible)[lane] = seen < 0 ? 0 : seen > count ? count : seen;
        all_see &= (*visible)[lane] == count;
    }
    return all_see;
}

static inline void lean_columns(const Work *w, const Tile *tile, int h, int v, int rows, int from, int count, float *scores) {
    int G = w->H / w->K;
    vec slope = {0}, ahead = {0};
    for (int lane = 0, r = v * WIDTH; lane < WIDTH && r < rows; lane++, r++) {
        slope[lane] = w->slopes[h * G + r % G] * LOG2_E;
        ahead[lane] = 1 - w->seen[tile->pair + r / G] + from;
    }
    for (int j = 0; j < count; j++) store_float(scores + j * WIDTH, load_float(scores + j * WIDTH) + slope * (ahead + (float)j));
}

/* The scores of a vector of queries become weights, as in `weigh`. */
static inline void weigh_columns(float *scores, int count, const ints *visible, vec *peak, vec *sum, float *acc, int D) {
    if (visible)
        for (int j = 0; j < count; j++) {
            float *at = scores + j * WIDTH;
            store_float(at, either((ints){0} + j < *visible, load_float(at), all(-INFINITY)));
        }
    vec most[4]; /* four, so that none waits for the one before */
    for (int i = 0; i < 4; i++) most[i] = all(-INFINITY);
    int j = 0;
    for (; j + 4 <= count; j += 4)
        for (int i = 0; i < 4; i++) most[i] = larger(load_float(scores + (j + i) * WIDTH), most[i]);
    for (; j < count; j++) most[0] = larger(load_float(scores + j * WIDTH), most[0]);
    vec highest = larger(larger(most[0], most[1]), larger(most[2], most[3])), base = either(*peak == -INFINITY, all(0), *peak);
    if (any_above(highest - *peak, SLACK)) {
        vec top = larger(highest, *peak);
        base = either(top == -INFINITY, all(0), top);
        vec shrink = exp2_fast(*peak - base);
        *sum *= shrink;
        for (int d = 0; d < D; d++) store_float(acc + d * WIDTH, load_float(acc + d * WIDTH) * shrink);
        *peak = top;
    }
    vec added = {0};
    for (j = 0; j < count; j += 4) {
        int n = count - j < 4 ? count - j : 4;
        vec weight[4] = {{0}};
        for (int i = 0; i < n; i++) weight[i] = load_float(scores + (j + i) * WIDTH) - base;
        powers(weight, 4);
        for (int i = 0; i < n; i++) {
            if (visible) weight[i] = either((ints){0} + (j + i) < *visible, weight[i], all(0)); /* exactly: what lies there may be anything finite */
            store_float(scores + (j + i) * WIDTH, weight[i]);
            added += weight[i];
        }
    }
    *sum += added;
}

/* As `look_by_vectors`. */
static __attribute__((noinline)) void look_by_columns(const Work *w, const Tile *tile, const Tile *last, int h, Block next, Desk *desk) {
    int D = w->D, rows = rows_of_tile(w, tile), vectors = (rows + WIDTH - 1) / WIDTH;
    const float *block[KEYS];
    vec *peak = (vec *)desk->peak, *sum = desk->sum;
    memset(desk->acc, 0, (int64_t)vectors * WIDTH * D * sizeof(float));
    for (int v = 0; v < vectors; v++) peak[v] = all(-INFINITY), sum[v] = all(0);
    for (const Tile *at = tile; at < last; at++) {
        Block behind = behind_of(w, at, last, h, next);
        int to = end_of(w, at);
        for (int r = 0; r < vectors * WIDTH; r++) {
            const el *from = query_of(w, at, h, r < rows ? r : 0);
            float *column = desk->q + (int64_t)(r / WIDTH) * D * WIDTH + r % WIDTH;
            for (int d = 0; d < D; d++) column[d * WIDTH] = up(from[d]) * w->scale;
        }
        for (int from = at->from; from < to; from += KEYS) {
            int count = keys_of(w, at, from, to, h, behind, 0, desk->copy, block);
            score_columns(desk->q, vectors, block, count, D, desk->scores);
            for (int v = 0; v < vectors; v++) {
                ints visible = {0};
                int all_see = sees(w, at, v, rows, from, count, &visible);
                float *scores = desk->scores + v * KEYS * WIDTH;
                if (w->slopes) lean_columns(w, at, h, v, rows, from, count, scores);
                weigh_columns(scores, count, all_see ? 0 : &visible, peak + v, sum + v, desk->acc + (int64_t)v * D * WIDTH, D);
            }
            rows_of(w->v, w->slots + at->slots + from, count, w->K, h, D, desk->copy, block);
            gather_columns(desk->scores, vectors, block, count, D, desk->acc);
        }
    }
    for (int r = 0; r < rows; r++) {
        int64_t place = place_of(w, tile, h, r);
        const float *column = desk->acc + (int64_t)(r / WIDTH) * D * WIDTH + r % WIDTH;
        w->peaks[place] = peak[r / WIDTH][r % WIDTH];
        w->sums[place] = sum[r / WIDTH][r % WIDTH];
        for (int d = 0; d < D; d++) w->parts[place * D + d] = column[d * WIDTH];
    }
}
