/* Looking at keys by tiles. Queries are columns, 16 of them a group: keys are taken from the pool as they lie, and what is done for one query
   is done for its neighbours in the same instruction. Included by attend.h.

   A unit is a block of keys of one head and a group of queries. Three of them are under way: while vectors weigh one, the tile unit makes the
   scores of the next, and gathers values by the weights of the one before. Block by block all groups of all heads have their turn: what
   groups need of a block stays in the first cache, and what heads need of it lies side by side and is fetched in that order. Of the eight
   tile registers six are used: a processor that holds all of them has none left to load ahead into, and next to a busy neighbour waits. */

/* The tiles of a chain, for some heads. */
typedef struct {
    const Work *w;
    const Tile *last; /* behind the last */
    int h, heads;     /* the first, and how many */
    int groups;       /* of queries, for each */
    float scale;      /* of scores; 1 where they have been scaled */
    Block next;       /* what comes behind them */
    Desk *desk;
} Look;

typedef struct {
    const Tile *tile;             /* or none */
    int from, count, depth;       /* keys, which are `depth` tiles */
    int end, all;                 /* keys of the tile that somebody sees, and that all see */
    int block, head, group;       /* how many blocks there were before, heads of this one, and groups of its */
    int place;                    /* of its columns, among those of all heads and groups */
    float *scores;                /* [keys, 16] */
    pair_of_el *weights;          /* [pairs of keys, 16] */
} Unit;

/* The queries of a tile; a group that is not full is filled with some that ask for nothing. */
static void take_queries(const Look *look, const Tile *tile) {
    int rows = rows_of_tile(look->w, tile);
    pair_of_el *to = (pair_of_el *)look->desk->q;
    for (int h = look->h; h < look->h + look->heads; h++)
        for (int g = 0; g < rows; g += SIDE) {
            const el *from[SIDE];
            int here = rows - g < SIDE ? rows - g : SIDE;
            for (int i = 0; i < here; i++) from[i] = query_of(look->w, tile, h, g + i);
            for (int d = 0; d < look->w->D; d += DEPTH, to += PACKED) {
                transpose_pairs(from, here, to, SIDE);
                for (int i = 0; i < here; i++) from[i] += DEPTH;
            }
        }
}

/* Whether two tiles of a chain have the very same queries. */
static inline int asks_alike(const Work *w, const Tile *one, const Tile *other) {
    return !memcmp(w->query + one->pair, w->query + other->pair, one->pairs * sizeof *w->query);
}

static inline void unit_at(const Look *look, const Tile *tile, int from, int end, int all, int block, int head, int group, Unit *unit) {
    int count = end - from < LONG ? end - from : LONG, odd = ((block * look->heads + head) * look->groups + group) & 1;
    Desk *desk = look->desk;
    unit->tile = tile, unit->from = from, unit->count = count, unit->depth = (count + DEPTH - 1) / DEPTH, unit->end = end, unit->all = all;
    unit->block = block, unit->head = head, unit->group = group, unit->place = head * look->groups + group;
    unit->scores = desk->block_scores[odd], unit->weights = desk->weights[odd];
}

/* The first unit of the first tile from `tile` on of which somebody sees a key. */
static inline void unit_of(const Look *look, const Tile *tile, int block, Unit *unit) {
    for (; tile < look->last; tile++) {
        int end = end_of(look->w, tile), all = end;
        for (int p = tile->pair; p < tile->pair + tile->pairs; p++) all = look->w->seen[p] < all ? look->w->seen[p] : all;
        if (tile->from < end) { unit_at(look, tile, tile->from, end, all, block, 0, 0, unit); return; }
    }
    unit->tile = 0;
}

static inline void first_of_next_block(const Look *look, const Unit *unit, Unit *next) {
    if (unit->from + LONG < unit->end) unit_at(look, unit->tile, unit->from + LONG, unit->end, unit->all, unit->block + 1, 0, 0, next);
    else unit_of(look, unit->tile + 1, unit->block + 1, next);
}

static inline void unit_behind(const Look *look, const Unit *unit, Unit *next) {
    if (!unit->tile) next->tile = 0;
    else if (unit->group + 1 < look->groups) unit_at(look, unit->tile, unit->from, unit->end, unit->all, unit->block, unit->head, unit->group + 1, next);
    else if (unit->head + 1 < look->heads) unit_at(look, unit->tile, unit->from, unit->end, unit->all, unit->block, unit->head + 1, 0, next);
    else first_of_next_block(look, unit, next);
}

/* The peaks of a unit's columns rise to the largest of their scores where that lies more than SLACK above; sums are scaled to them. */
static void settle(const Look *look, const Unit *unit, int keys) {
    int D = unit->block ? look->w->D : 0; /* before there are no sums */
    int at = unit->place * SIDE;
    float *peak = look->desk->peaks + at, *sum = look->desk->sums + at, *acc = look->desk->acc + at * look->w->D;
    for (int c = 0; c < SIDE; c += WIDTH) { /* once, where a vector holds all columns */
        vec from = load_float(peak + c), most[4]; /* several, so that none waits for the one before */
        for (int m = 0; m < 4; m++) most[m] = all(-INFINITY);
        for (int j = 0; j < keys; j += 4)
            for (int m = 0; m < 4; m++) most[m] = larger(load_float(unit->scores + (j + m) * SIDE + c), most[m]);
        vec highest = larger(larger(most[0], most[1]), larger(most[2], most[3])) * look->scale;
        if (!any_above(highest - from, SLACK)) continue;
        vec top = larger(highest, from), shrink = exp2_fast(from - either(top == -INFINITY, all(0), top));
        store_float(peak + c, top);
        store_float(sum + c, load_float(sum + c) * shrink);
        for (int d = 0; d < D; d++) store_float(acc + d * SIDE + c, load_float(acc + d * SIDE + c) * shrink);
    }
}

/* Scores take in their heads' slopes and their queries' places. */
static void lean(const Look *look, const Unit *unit) {
    const Work *w = look->w;
    int G = w->H / w->K, rows = rows_of_tile(w, unit->tile);
    for (int c = 0, r = unit->group * SIDE; c < SIDE && r < rows; c++, r++) {
        int ahead = 1 - w->seen[unit->tile->pair + r / G] + unit->from;
        float slope = w->slopes[(look->h + unit->head) * G + r % G] * LOG2_E, *score = unit->scores + c;
        for (int j = 0; j < unit->depth * DEPTH; j++, score += SIDE) *score = *score * w->scale + slope * (ahead + j);
    }
}

/* The score of what a query does not see becomes minus infinity. */
static void hide(const Look *look, const Unit *unit) {
    const Work *w = look->w;
    int G = w->H / w->K, rows = rows_of_tile(w, unit->tile);
    int32_t ends[SIDE];
    for (int c = 0, r = unit->group * SIDE; c < SIDE; c++, r++) {
        int seen = r < rows ? w->seen[unit->tile->pair + r / G] - unit->from : unit->count;
        ends[c] = seen < unit->count ? seen : unit->count;
    }
    for (int c = 0; c < SIDE; c += WIDTH) {
        ints end;
        memcpy(&end, ends + c, sizeof end);
        for (int j = 0; j < unit->depth * DEPTH; j++) {
            float *row = unit->scores + j * SIDE + c;
            store_float(row, either((ints){0} + j < end, load_float(row), all(-INFINITY)));
        }
    }
}

static inline int hides(const Unit *unit) { return unit->count < unit->depth * DEPTH || unit->all < unit->from + unit->count; }

/* Whether a unit's peaks may move before it is weighed: if one of its queries has none yet, or does not see all. */
static inline int is_unsettled(const Look *look, const Unit *unit) {
    int none = 0;
    for (int c = 0; c < SIDE; c += WIDTH) none |= any_above(-load_float(look->desk->peaks + unit->place * SIDE + c), FLT_MAX);
    return none || hides(unit);
}

/* Scores that can be weighed. Any of them would do for a peak, since weights are floats: the first keys give one. */
static void make_ready(const Look *look, const Unit *unit) {
    if (look->w->slopes) lean(look, unit);
    if (hides(unit)) hide(look, unit);
    if (is_unsettled(look, unit)) settle(look, unit, hides(unit) ? unit->depth * DEPTH : DEPTH);
}

#define VECS (SIDE / WIDTH) /* vectors that hold all columns */

/* What vectors make of the scores of a unit. */
typedef struct {
    const float *scores;
    pair_of_el *to;
    int keys;
    float scale;
    vec peak[VECS], sums[VECS][2];
} Weighing;

ALWAYS void begin_weighing(const Look *look, const Unit *unit, Weighing *to) {
    to->scores = unit->scores, to->to = unit->weights, to->keys = unit->depth * DEPTH, to->scale = look->scale;
    for (int c = 0; c < VECS; c++) {
        vec peak = load_float(look->desk->peaks + unit->place * SIDE + c * WIDTH);
        to->peak[c] = either(peak == -INFINITY, all(0), peak);
        to->sums[c][0] = to->sums[c][1] = all(0);
    }
}

/* Scores of four keys become weights, in pairs of keys. */
ALWAYS void weigh_four(Weighing *w, int key) {
    for (int c = 0; c < VECS; c++) {
        vec weight[4];
        for (int m = 0; m < 4; m++) weight[m] = load_float(w->scores + (key + m) * SIDE + c * WIDTH) * w->scale - w->peak[c];
        powers_roughly(weight);
        for (int m = 0; m < 2; m++)
            w->sums[c][m] = store_pairs(w->to + (key / 2 + m) * SIDE + c * WIDTH, weight[2 * m], weight[2 * m + 1], w->sums[c][m]);
    }
}

/* Sums take in those of a unit. Where these are too large it is weighed again, from a higher peak. */
ALWAYS void finish(const Look *look, const Unit *unit, Weighing *weighing) {
    float *sum = look->desk->sums + unit->place * SIDE;
    int large = 0;
    for (int c = 0; c < VECS; c++) large |= any_above(weighing->sums[c][0] + weighing->sums[c][1], LARGE);
    if (large) {
        settle(look, unit, unit->depth * DEPTH);
        begin_weighing(look, unit, weighing);
        for (int j = 0; j < weighing->keys; j += 4) weigh_four(weighing, j);
    }
    for (int c = 0; c < VECS; c++) store_float(sum + c * WIDTH, load_float(sum + c * WIDTH) + (weighing->sums[c][0] + weighing->sums[c][1]));
}

/* Some keys of a head, or values: where the first is, or none, and how many elements the next one is from it. */
typedef struct {
    const el *at;
    int64_t apart;
} Source;

/* Where up to `most` keys or values are: in the pool `all`, if they are neighbours, or copied. Past the last stands the first: nobody sees its
   score, and its value weighs nothing. */
static inline Source find(const Work *w, const el *all, const int32_t *slots, int h, int count, int most, el *copy) {
    int64_t apart = (int64_t)w->K * w->D;
    int together = 1;
    all += h * w->D;
    while (together < count && together < most && slots[together] == slots[0] + together) together++;
    if (together == most) return (Source){all + slots[0] * apart, apart};
    for (int i = 0; i < most; i++) memcpy(copy + i * w->D, all + slots[i < count ? i : 0] * apart, w->D * sizeof(el));
    return (Source){copy, w->D};
}

static inline const int32_t *slots_of(const Look *look, const Unit *unit) { return look->w->slots + unit->tile->slots + unit->from; }

static void find_keys(const Look *look, const Unit *unit, Source *keys) {
    const Work *w = look->w;
    memset(keys, 0, LONG / SIDE * sizeof *keys);
    for (int j = 0; j < unit->count; j += SIDE)
        keys[j / SIDE] = find(w, w->k, slots_of(look, unit) + j, look->h + unit->head, unit->count - j, SIDE, look->desk->keys + j * w->D);
}

/* The values of a block, transposed for all of its groups: for every 32 keys [D, 32]. */
static void take_values(const Look *look, const Unit *unit) {
    const Work *w = look->w;
    for (int j = 0; j < unit->count; j += DEPTH) {
        Source some = find(w, w->v, slots_of(look, unit) + j, look->h + unit->head, unit->count - j, DEPTH, look->desk->some);
        transpose_values(some.at, some.apart, w->D, (el *)look->desk->values + j * w->D);
    }
}

/* Keys that are asked for ahead, some in every turn. */
typedef struct {
    const Work *w;
    Block block;
    int each, asked; /* in a turn, and so far */
} Fetch;

ALWAYS void ask(Fetch *f, int keys) {
    for (int i = 0; i < keys && f->asked < f->block.count; i++) ask_for(f->w, &f->block, f->asked++);
}

/* What vectors do between two products. */
#define TURN()                                                                                                  \
    do {                                                                                                        \
        ask(fetch, fetch->each);                                                                                \
        if (whole ? turn < LONG / 4 : 4 * turn < weighing->keys) weigh_four(weighing, 4 * turn);                \
        turn++;                                                                                                 \
    } while (0)
#define SCORE(n)                                                         \
    if (whole || keys[n].at) {                                           \
        LOAD(4, keys[n].at + d, keys[n].apart * sizeof(el));             \
        DOT(n, 4, 5);                                                    \
        TURN();                                                          \
    }
#define KEEP(n) if (!d && after->tile) STORE(n, after->scores + (n) * PACKED, 64)
#define BEGIN(n) if (before->block) LOAD(n, acc + (n) * PACKED, 64); else ZERO(n)
#define GATHER(n) LOAD(4, values + (n) * PACKED, 64); DOT(n, 4, 5); TURN()

/* One round: scores of the unit `after`, weights of `now`, and what comes of those of the one `before`. Each of them may be missing, unless
   all are `whole` blocks. Scores stay in the first four registers until other products are under way: a store that waits for its own would
   keep the processor from looking further ahead. */
ALWAYS void go_round(
    const Look *look, int D, int whole, const Unit *before, const Unit *after, const Source *keys, Weighing *weighing, Fetch *fetch) {
    int turn = 0;
    if (whole || after->tile) {
        const pair_of_el *queries = (pair_of_el *)look->desk->q + after->place * D / DEPTH * PACKED;
        ZERO(0); ZERO(1); ZERO(2); ZERO(3);
        for (int d = 0; d < D; d += DEPTH, queries += PACKED) {
            LOAD(5, queries, 64);
            SCORE(0) SCORE(1) SCORE(2) SCORE(3)
        }
    }
    if (whole || before->tile) {
        for (int d = 0; d < D; d += 2 * DEPTH) { /* 64 elements at a time */
            float *acc = look->desk->acc + (before->place * D + d) * SIDE;
            const pair_of_el *values = look->desk->values + d * SIDE;
            int both = d + DEPTH < D;
            LOAD(5, before->weights, 64);
            KEEP(0); BEGIN(0); GATHER(0);
            KEEP(1); BEGIN(1); GATHER(1);
            KEEP(2); KEEP(3);
            if (both) { BEGIN(2); GATHER(2); BEGIN(3); GATHER(3); }
            if (whole || before->depth > 1) {
                values += D * SIDE;
                LOAD(5, before->weights + PACKED, 64);
                GATHER(0); GATHER(1);
                if (both) { GATHER(2); GATHER(3); }
            }
            STORE(0, acc, 64); STORE(1, acc + PACKED, 64);
            if (both) { STORE(2, acc + 2 * PACKED, 64); STORE(3, acc + 3 * PACKED, 64); }
        }
    } else {
        int d = 0;
        KEEP(0); KEEP(1); KEEP(2); KEEP(3);
    }
    while (4 * turn < weighing->keys) TURN();
}

/* From a unit on a share of the block behind its own is fetched: as much as it is of its own. Behind the last unit there are two more rounds:
   asked for at once, they would hold up the unit itself. */
static inline void fetch_next(const Look *look, Fetch *f, const Unit *unit) {
    Block block = look->next;
    const Tile *tile = unit->tile;
    int at = unit->from + LONG, units = look->heads * look->groups, rounds = units;
    if (at < unit->end) block = (Block){look->w->slots + tile->slots + at, unit->end - at, look->h, look->heads};
    else if (++tile < look->last) block = (Block){look->w->slots + tile->slots + tile->from, tile->to - tile->from, look->h, look->heads};
    else rounds += 2;
    int count = block.count < LONG ? block.count : LONG, begin = count * unit->place / rounds, behind = unit->place + 1 == units ? rounds : unit->place + 1;
    ask(f, LONG);
    f->block = (Block){block.slots + begin, count * behind / rounds - begin, block.head, block.heads};
    f->each = f->block.count / ((behind - unit->place) * 2 * unit->depth * 4) + 1;
    f->asked = 0;
}

/* What was found is written as parts. */
static void tell(const Look *look, const Tile *tile, int any) {
    const Work *w = look->w;
    int rows = rows_of_tile(w, tile);
    for (int h = 0; h < look->heads; h++)
        for (int g = 0; g < rows; g += SIDE) {
            float *found[SIDE];
            int here = rows - g < SIDE ? rows - g : SIDE, at = h * look->groups * SIDE + g;
            for (int i = 0; i < here; i++) {
                int64_t place = place_of(w, tile, look->h + h, g + i);
                w->peaks[place] = look->desk->peaks[at + i];
                w->sums[place] = look->desk->sums[at + i];
                found[i] = w->parts + place * w->D;
            }
            if (any) unpack_sums(look->desk->acc + at * w->D, w->D, found, here);
        }
}

ALWAYS int is_whole(const Unit *unit) { return unit->tile && unit->count > LONG - SIDE; }

ALWAYS void look_at_all(const Look *look, const Tile *tile, int D) {
    Desk *desk = look->desk;
    Source keys[LONG / SIDE];
    Fetch fetch = {.w = look->w};
    Weighing weighing;
    const Unit none = {0};
    Unit units[3] = {{0}}, *before = units, *now = units + 1, *after = units + 2;
    for (int r = 0; r < look->heads * look->groups * SIDE; r++) desk->peaks[r] = -INFINITY, desk->sums[r] = 0;
    unit_of(look, tile, 0, after);
    int any = after->tile != 0;
    while (before->tile || now->tile || after->tile) {
        if (after->tile) {
            int other = !after->head && !after->group && after->tile != now->tile && !(now->tile && asks_alike(look->w, after->tile, now->tile));
            if (other) take_queries(look, after->tile);
            if (!after->group) find_keys(look, after, keys);
            fetch_next(look, &fetch, after);
        }
        if (before->tile && !before->group) take_values(look, before);
        weighing.keys = 0;
        if (now->tile) {
            if (before->tile && before->place == now->place && is_unsettled(look, now)) { /* before peaks move */
                go_round(look, D, 0, before, &none, keys, &weighing, &fetch);
                before->tile = 0;
            }
            make_ready(look, now);
            begin_weighing(look, now, &weighing);
        }
        if (is_whole(before) && is_whole(now) && is_whole(after)) go_round(look, D, 1, before, after, keys, &weighing, &fetch);
        else go_round(look, D, 0, before, after, keys, &weighing, &fetch);
        if (now->tile) finish(look, now, &weighing);
        Unit *free = before;
        before = now, now = after, after = free;
        unit_behind(look, now, after);
    }
    ask(&fetch, LONG);
    tell(look, tile, any);
}

static void look_by_tiles(const Work *w, const Tile *tile, const Tile *last, int h, int heads, Block next, Desk *desk) {
    Look look = {w, last, h, heads, (rows_of_tile(w, tile) + SIDE - 1) / SIDE, w->slopes ? 1.0f : w->scale, next, desk};
    if (w->D == 64) look_at_all(&look, tile, 64); /* as a constant: no branch within a round */
    else if (w->D == 128) look_at_all(&look, tile, 128);
    else look_at_all(&look, tile, w->D);
}
