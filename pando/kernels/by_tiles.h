/* Looking at keys by tiles. Queries are columns, 16 of them a group: keys are taken from the pool as they lie, and what is done for one query
   is done for its neighbours in the same instruction. Included by attend.h. */

/* Where up to 16 keys are: in the pool, if they are neighbours, or copied. Past the last stands the first, whose score nobody sees. */
static inline Source keys_at(const Work *w, const int32_t *slots, int h, int count, el *copy) {
    int64_t apart = (int64_t)w->K * w->D, size = w->D * sizeof(el);
    const el *k = w->k + h * w->D;
    int together = 1;
    while (together < count && together < SIDE && slots[together] == slots[0] + together) together++;
    if (together == SIDE) return (Source){k + slots[0] * apart, apart * sizeof(el), DEPTH * sizeof(el)};
    for (int i = 0; i < SIDE; i++) memcpy(copy + i * w->D, k + slots[i < count ? i : 0] * apart, size);
    return (Source){copy, size, DEPTH * sizeof(el)};
}

/* A group's scores [keys, 16] of all heads' slopes and places. */
static inline void lean(const Work *w, const Tile *tile, int h, int g, int from, int keys, float *scores) {
    int G = w->H / w->K, rows = tile->pairs * G;
    for (int i = 0; i < SIDE && g * SIDE + i < rows; i++) {
        int r = g * SIDE + i, ahead = w->ahead[tile->pair + r / G] + from;
        float slope = w->slopes[h * G + r % G] * LOG2_E;
        for (int j = 0; j < keys; j++) scores[j * SIDE + i] = scores[j * SIDE + i] * w->scale + slope * (ahead + j);
    }
}

/* A group's scores times `scale` become weights, in pairs of keys, from where the scores began. `ends`, or none: how many keys each query
   sees. As in `weigh` the peaks seldom move. */
static inline void weigh_group(float *scores, int keys, float scale, const int32_t *ends, float *peak, float *sum, float *acc, int D) {
    for (int c = 0; c < SIDE; c += WIDTH) { /* once, where a vector holds all columns */
        vec top = load_float(peak + c), most[4], added[2] = {{0}}; /* several, so that none waits for the one before */
        ints end = {0};
        if (ends) {
            memcpy(&end, ends + c, sizeof end);
            for (int j = 0; j < keys; j++) {
                float *row = scores + j * SIDE + c;
                store_float(row, either((ints){0} + j < end, load_float(row), all(-INFINITY)));
            }
        }
        for (int i = 0; i < 4; i++) most[i] = all(-INFINITY);
        for (int j = 0; j < keys; j += 4)
            for (int i = 0; i < 4; i++) most[i] = larger(load_float(scores + (j + i) * SIDE + c), most[i]);
        vec highest = larger(larger(most[0], most[1]), larger(most[2], most[3])) * scale, from = top;
        int moves = any_above(highest - top, SLACK);
        if (moves) top = larger(highest, top);
        vec base = either(top == -INFINITY, all(0), top);
        if (moves) {
            vec shrink = exp2_fast(from - base);
            store_float(peak + c, top);
            store_float(sum + c, load_float(sum + c) * shrink);
            for (int d = 0; d < D; d++) store_float(acc + d * SIDE + c, load_float(acc + d * SIDE + c) * shrink);
        }
        for (int j = 0; j < keys; j += 4) {
            vec weight[4];
            for (int i = 0; i < 4; i++) weight[i] = load_float(scores + (j + i) * SIDE + c) * scale - base;
            powers_roughly(weight);
            if (ends) /* exactly 0: the values there may be anything finite */
                for (int i = 0; i < 4; i++) weight[i] = either((ints){0} + (j + i) < end, weight[i], all(0));
            for (int i = 0; i < 4; i += 2) store_pairs((pair_of_el *)scores + (j + i) / 2 * SIDE + c, weight[i], weight[i + 1]);
            for (int i = 0; i < 2; i++) added[i] += weight[i] + weight[i + 2];
        }
        store_float(sum + c, load_float(sum + c) + added[0] + added[1]);
    }
}

/* A block that is fetched while others are looked at, a few keys in each of so many turns: more at a time would wait for one another. */
typedef struct {
    Block block;
    int turns, turn, asked;
} Errand;

static inline void go_on(const Work *w, Errand *errand) {
    errand->turn++;
    for (; errand->asked * errand->turns < errand->turn * errand->block.count; errand->asked++) ask_for(w, &errand->block, errand->asked);
}

/* The queries of a tile, and how many keys they see; a group that is not full is filled with some that ask for nothing and see all. */
static void take_queries(const Work *w, const Tile *tile, int h, Desk *desk) {
    int G = w->H / w->K, rows = tile->pairs * G;
    pair_of_el *to = (pair_of_el *)desk->q;
    for (int g = 0; g * SIDE < rows; g++) {
        const el *from[SIDE];
        int here = rows - g * SIDE < SIDE ? rows - g * SIDE : SIDE;
        desk->fewest[g] = INT32_MAX;
        for (int i = 0, r = g * SIDE; i < SIDE; i++, r++) {
            desk->peak[r] = -INFINITY, desk->sums[r] = 0;
            desk->seen[r] = i < here ? w->seen[tile->pair + r / G] : INT32_MAX;
            if (desk->seen[r] < desk->fewest[g]) desk->fewest[g] = desk->seen[r];
            if (i < here) from[i] = query_of(w, tile, h, r);
        }
        for (int d = 0; d < w->D; d += DEPTH, to += PACKED) {
            transpose_pairs(from, here, to, SIDE);
            for (int i = 0; i < here; i++) from[i] += DEPTH;
        }
    }
}

/* Every group's scores of `count` keys behind `from` are made, weighed, and gathered by, two groups at a time. */
static void look_at_block(const Work *w, const Tile *tile, int h, int from, int count, Errand *errand, Desk *desk) {
    int D = w->D, deep = D / DEPTH, depth = (count + DEPTH - 1) / DEPTH, groups = (tile->pairs * (w->H / w->K) + SIDE - 1) / SIDE;
    int begun = from > tile->from; /* before there are no sums */
    const int32_t *slots = w->slots + tile->slots + from;
    float *scores[2] = {desk->scores, desk->scores + LONG * SIDE};
    Source keys[LONG / SIDE] = {{0}};
    for (int j = 0; j < count; j += SIDE) keys[j / SIDE] = keys_at(w, slots + j, h, count - j, desk->keys + j * D);
    pack_values(w->v + h * D, slots, (int64_t)w->K * D, count, D, desk->values, LONG / DEPTH);
    for (int g = 0; g < groups; g += 2) {
        int both = g + 1 < groups;
        Source queries[2] = {{0}}, weights[2] = {{0}}, values[2];
        float *c[2][2];
        for (int i = 0; i <= both; i++) {
            queries[i] = (Source){(pair_of_el *)desk->q + (g + i) * deep * PACKED, 64, TILE_BYTES};
            weights[i] = (Source){scores[i], 64, TILE_BYTES};
        }
        for (int j = 0; j < count; j += DEPTH) {
            for (int i = 0; i < 4; i++) c[i / 2][i % 2] = scores[i % 2] + (j + i / 2 * SIDE) * SIDE;
            multiply(keys + j / SIDE, queries, deep, c, 0);
            go_on(w, errand);
        }
        for (int i = 0; i <= both; i++) {
            int at = (g + i) * SIDE, hidden = count < depth * DEPTH || desk->fewest[g + i] - from < count;
            int32_t ends[SIDE];
            for (int e = 0; e < SIDE; e++) ends[e] = desk->seen[at + e] - from < count ? desk->seen[at + e] - from : count;
            if (w->slopes) lean(w, tile, h, g + i, from, depth * DEPTH, scores[i]);
            weigh_group(scores[i], depth * DEPTH, w->slopes ? 1.0f : w->scale, hidden ? ends : 0, desk->peak + at, desk->sums + at,
                        desk->acc + at * D, begun ? D : 0);
        }
        for (int d = 0; d < D; d += DEPTH) {
            for (int i = 0; i < 2; i++) values[i] = (Source){desk->values + (d / SIDE + i) * (LONG / DEPTH) * PACKED, 64, TILE_BYTES};
            for (int i = 0; i < 4; i++) c[i / 2][i % 2] = desk->acc + ((g + i % 2) * D + d + i / 2 * SIDE) * SIDE;
            multiply(values, weights, depth, c, begun);
            go_on(w, errand);
        }
    }
}

static void look_by_tiles(const Work *w, const Tile *tile, int h, int to, Block next, Desk *desk) {
    int D = w->D, rows = tile->pairs * (w->H / w->K), pairs = (rows + 2 * SIDE - 1) / (2 * SIDE);
    take_queries(w, tile, h, desk);
    for (int from = tile->from; from < to; from += LONG) {
        int left = to - from - LONG, count = left < 0 ? to - from : LONG;
        Errand errand = {.block = left > 0 ? (Block){w->slots + tile->slots + from + LONG, left, h} : next};
        if (errand.block.count > LONG) errand.block.count = LONG;
        errand.turns = pairs * ((count + DEPTH - 1) / DEPTH + D / DEPTH);
        look_at_block(w, tile, h, from, count, &errand, desk);
    }
    for (int g = 0; g * SIDE < rows; g++) {
        float *found[SIDE];
        int here = rows - g * SIDE < SIDE ? rows - g * SIDE : SIDE;
        for (int i = 0; i < here; i++) {
            int64_t place = place_of(w, tile, h, g * SIDE + i);
            w->peaks[place] = desk->peak[g * SIDE + i];
            w->sums[place] = desk->sums[g * SIDE + i];
            found[i] = w->parts + place * D;
        }
        if (tile->from < to) unpack_sums(desk->acc + g * SIDE * D, D, found, here);
    }
}
