/* Looking at keys by tiles. Queries are columns, 16 of them a group: keys are taken from the pool as they lie, and what is done for one query
   is done for its neighbours in the same instruction. Included by attend.h.

   A unit is a block of keys and a group of queries. Three of them are under way: while vectors weigh one, the tile unit makes the scores of
   the next, and gathers values by the weights of the one before. What all groups need of a block stays in the first cache. Of the eight
   tile registers six are used: a processor that holds all of them has none left to load ahead into, and next to a busy neighbour waits. */

/* The tiles of a chain, for one head. */
typedef struct {
    const Work *w;
    const Tile *last; /* behind the last */
    int h, groups;    /* of queries */
    float scale;      /* of scores; 1 where they have been scaled */
    Block next;       /* what comes behind them */
    Desk *desk;
} Look;

typedef struct {
    const Tile *tile;             /* or none */
    int from, count, depth;       /* keys, which are `depth` tiles */
    int end, all;                 /* keys of the tile that somebody sees, and that all see */
    int block, group;             /* how many blocks there were before, and groups of this one */
    float *scores;                /* [keys, 16] */
    pair_of_el *weights, *values; /* [pairs of keys, 16]; for every 32 keys [D, 32] */
} Unit;

/* The queries of a tile; a group that is not full is filled with some that ask for nothing. */
static void take_queries(const Look *look, const Tile *tile) {
    int rows = rows_of_tile(look->w, tile);
    pair_of_el *to = (pair_of_el *)look->desk->q;
    for (int g = 0; g < rows; g += SIDE) {
        const el *from[SIDE];
        int here = rows - g < SIDE ? rows - g : SIDE;
        for (int i = 0; i < here; i++) from[i] = query_of(look->w, tile, look->h, g + i);
        for (int d = 0; d < look->w->D; d += DEPTH, to += PACKED) {
            transpose_pairs(from, here, to, SIDE);
            for (int i = 0; i < here; i++) from[i] += DEPTH;
        }
    }
}

static inline Unit unit_at(const Look *look, const Tile *tile, int from, int end, int all, int block, int group) {
    int count = end - from < LONG ? end - from : LONG, odd = (block * look->groups + group) & 1;
    return (Unit){tile, from, count, (count + DEPTH - 1) / DEPTH, end, all, block, group,
                  look->desk->block_scores[odd], look->desk->weights[odd], look->desk->values[block & 1]};
}

/* The first unit of the first tile from `tile` on of which somebody sees a key. */
static inline Unit unit_of(const Look *look, const Tile *tile, int block) {
    for (; tile < look->last; tile++) {
        int end = end_of(look->w, tile), all = end;
        for (int p = tile->pair; p < tile->pair + tile->pairs; p++) all = look->w->seen[p] < all ? look->w->seen[p] : all;
        if (tile->from < end) return unit_at(look, tile, tile->from, end, all, block, 0);
    }
    return (Unit){0};
}

static inline Unit first_of_next_block(const Look *look, const Unit *unit) {
    if (unit->from + LONG < unit->end) return unit_at(look, unit->tile, unit->from + LONG, unit->end, unit->all, unit->block + 1, 0);
    return unit_of(look, unit->tile + 1, unit->block + 1);
}

static inline Unit unit_behind(const Look *look, const Unit *unit) {
    if (!unit->tile) return *unit;
    if (unit->group + 1 == look->groups) return first_of_next_block(look, unit);
    return unit_at(look, unit->tile, unit->from, unit->end, unit->all, unit->block, unit->group + 1);
}

/* The peaks of a unit's columns rise to the largest of their scores where that lies more than SLACK above; sums are scaled to them. */
static void settle(const Look *look, const Unit *unit, int keys) {
    int D = unit->block ? look->w->D : 0; /* before there are no sums */
    int at = unit->group * SIDE;
    float *peak = look->desk->peak + at, *sum = look->desk->sums + at, *acc = look->desk->acc + at * look->w->D;
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
        float slope = w->slopes[look->h * G + r % G] * LOG2_E, *score = unit->scores + c;
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
    for (int c = 0; c < SIDE; c += WIDTH) none |= any_above(-load_float(look->desk->peak + unit->group * SIDE + c), FLT_MAX);
    return none || hides(unit);
}

/* Scores that can be weighed. Any of them would do for a peak, since weights are floats: the first keys give one. */
static void make_ready(const Look *look, const Unit *unit) {
    if (look->w->slopes) lean(look, unit);
    if (hides(unit)) hide(look, unit);
    if (is_unsettled(look, unit)) settle(look, unit, hides(unit) ? unit->depth * DEPTH : DEPTH);
    memset(look->desk->fresh, 0, sizeof look->desk->fresh);
}

/* Scores from key j on become weights, in pairs of keys. */
static inline void weigh_keys(const Look *look, const Unit *unit, int j, int keys) {
    const float *scores = unit->scores + j * SIDE, *peak = look->desk->peak + unit->group * SIDE;
    float *sum = look->desk->fresh, scale = look->scale;
    pair_of_el *to = unit->weights + j / 2 * SIDE;
    for (int c = 0; c < SIDE; c += WIDTH) {
        vec base = load_float(peak + c), sums[2] = {load_float(sum + c), {0}};
        base = either(base == -INFINITY, all(0), base);
        for (int k = 0; k < keys; k += 4) {
            vec weight[4];
            for (int m = 0; m < 4; m++) weight[m] = load_float(scores + (k + m) * SIDE + c) * scale - base;
            powers_roughly(weight);
            for (int m = 0; m < 2; m++) sums[m] = store_pairs(to + (k / 2 + m) * SIDE + c, weight[2 * m], weight[2 * m + 1], sums[m]);
        }
        store_float(sum + c, sums[0] + sums[1]);
    }
}

/* Sums take in those of a unit. Where these are too large it is weighed again, from a higher peak. */
static inline void finish(const Look *look, const Unit *unit) {
    float *fresh = look->desk->fresh, *sum = look->desk->sums + unit->group * SIDE;
    int large = 0;
    for (int c = 0; c < SIDE; c += WIDTH) large |= any_above(load_float(fresh + c), LARGE);
    if (large) {
        settle(look, unit, unit->depth * DEPTH);
        memset(fresh, 0, sizeof look->desk->fresh);
        weigh_keys(look, unit, 0, unit->depth * DEPTH);
    }
    for (int c = 0; c < SIDE; c += WIDTH) store_float(sum + c, load_float(sum + c) + load_float(fresh + c));
}

/* Values of 32 keys of a unit, 32 elements of each; past the last key stands the first, which weighs nothing. */
static void take_values(const Look *look, const Unit *unit, int piece) {
    const Work *w = look->w;
    int deep = w->D / DEPTH, j = piece / deep * DEPTH, d = piece % deep * DEPTH;
    const int32_t *slots = w->slots + unit->tile->slots + unit->from;
    const el *rows[DEPTH], *v = w->v + look->h * w->D + d;
    for (int i = 0; i < DEPTH; i++) rows[i] = v + (int64_t)slots[j + i < unit->count ? j + i : 0] * w->K * w->D;
    transpose_values(rows, (el *)unit->values + j * w->D + d * DEPTH);
}

/* What vectors do while tiles are multiplied, a piece of each in every turn: have keys fetched, transpose values, and weigh. */
typedef struct {
    const Look *look;
    Block fetched;
    int each, asked; /* keys in a turn, and so far */
    const Unit *unit;
    int pieces, taken;    /* of values, and so far */
    int weights, weighed; /* of 16 keys, and so far */
} Turns;

static inline void ask_for_some(Turns *t, int keys) {
    for (int i = 0; i < keys && t->asked < t->fetched.count; i++) ask_for(t->look->w, &t->fetched, t->asked++);
}

static inline void take_turn(Turns *t) {
    ask_for_some(t, t->each);
    if (t->taken < t->pieces) take_values(t->look, t->unit, t->taken++);
    if (t->weighed < t->weights) weigh_keys(t->look, t->unit, t->weighed++ * SIDE, SIDE);
}

static inline int is_left(const Turns *t) { return t->taken < t->pieces || t->weighed < t->weights; }

/* 16 keys: where the first is, or none, and how many bytes the next one is from it. */
typedef struct {
    const el *at;
    int64_t row;
} Source;

/* Where up to 16 keys are: in the pool, if they are neighbours, or copied. Past the last stands the first, whose score nobody sees. */
static inline Source keys_at(const Work *w, const int32_t *slots, int h, int count, el *copy) {
    int64_t apart = (int64_t)w->K * w->D, size = w->D * sizeof(el);
    const el *k = w->k + h * w->D;
    int together = 1;
    while (together < count && together < SIDE && slots[together] == slots[0] + together) together++;
    if (together == SIDE) return (Source){k + slots[0] * apart, apart * sizeof(el)};
    for (int i = 0; i < SIDE; i++) memcpy(copy + i * w->D, k + slots[i < count ? i : 0] * apart, size);
    return (Source){copy, size};
}

static void find_keys(const Look *look, const Unit *unit, Source *keys) {
    const int32_t *slots = look->w->slots + unit->tile->slots + unit->from;
    memset(keys, 0, LONG / SIDE * sizeof *keys);
    for (int j = 0; j < unit->count; j += SIDE)
        keys[j / SIDE] = keys_at(look->w, slots + j, look->h, unit->count - j, look->desk->keys + j * look->w->D);
}

/* Scores of a unit, 32 keys at a time. */
static inline void make_scores(const Look *look, const Unit *unit, const Source *keys, Turns *turns) {
    int deep = look->w->D / DEPTH;
    const pair_of_el *queries = (pair_of_el *)look->desk->q + unit->group * deep * PACKED;
    for (int j = 0; j < unit->count; j += DEPTH, keys += 2) {
        ZERO(0); ZERO(1);
        for (int s = 0; s < deep; s++) {
            LOAD(3, queries + s * PACKED, 64);
            LOAD(2, keys[0].at + s * DEPTH, keys[0].row);
            DOT(0, 2, 3);
            if (keys[1].at) { LOAD(2, keys[1].at + s * DEPTH, keys[1].row); DOT(1, 2, 3); }
        }
        take_turn(turns);
        STORE(0, unit->scores + j * SIDE, 64);
        STORE(1, unit->scores + (j + SIDE) * SIDE, 64);
    }
}

/* What a unit's weights make of its values is added to what was gathered, 64 elements at a time. */
static inline void gather_values(const Look *look, const Unit *unit, Turns *turns) {
    int D = look->w->D;
    for (int d = 0; d < D; d += 2 * DEPTH) {
        float *acc = look->desk->acc + (unit->group * D + d) * SIDE;
        const pair_of_el *values = unit->values + d * SIDE;
        int whole = d + DEPTH < D;
        ZERO(0); ZERO(1); ZERO(2); ZERO(3);
        if (unit->block) {
            LOAD(0, acc, 64); LOAD(1, acc + PACKED, 64);
            if (whole) { LOAD(2, acc + 2 * PACKED, 64); LOAD(3, acc + 3 * PACKED, 64); }
        }
        for (int s = 0; s < unit->depth; s++, values += D * SIDE) {
            LOAD(5, unit->weights + s * PACKED, 64);
            LOAD(4, values, 64); DOT(0, 4, 5);
            LOAD(4, values + PACKED, 64); DOT(1, 4, 5);
            if (whole) {
                LOAD(4, values + 2 * PACKED, 64); DOT(2, 4, 5);
                LOAD(4, values + 3 * PACKED, 64); DOT(3, 4, 5);
            }
            take_turn(turns);
        }
        STORE(0, acc, 64); STORE(1, acc + PACKED, 64);
        if (whole) { STORE(2, acc + 2 * PACKED, 64); STORE(3, acc + 3 * PACKED, 64); }
    }
}

/* From a unit on a share of the block behind its own is fetched: as much as it is of its own. Behind the last unit there are two more rounds:
   asked for at once, they would hold up the unit itself. */
static inline void fetch_next(Turns *t, const Unit *unit) {
    const Look *look = t->look;
    Unit next = first_of_next_block(look, unit);
    Block block = next.tile ? (Block){look->w->slots + next.tile->slots + next.from, next.count, look->h} : look->next;
    int count = block.count < LONG ? block.count : LONG, begin = count * unit->group / look->groups;
    int last = !next.tile && unit->group + 1 == look->groups;
    ask_for_some(t, LONG);
    t->fetched = (Block){block.slots + begin, count * (unit->group + 1) / look->groups - begin, block.head};
    t->each = t->fetched.count / ((last ? 4 : 2) * unit->depth) + 1;
    t->asked = 0;
}

/* What was found is written as parts. */
static void tell(const Look *look, const Tile *tile, int any) {
    const Work *w = look->w;
    int rows = rows_of_tile(w, tile);
    for (int g = 0; g < rows; g += SIDE) {
        float *found[SIDE];
        int here = rows - g < SIDE ? rows - g : SIDE;
        for (int i = 0; i < here; i++) {
            int64_t place = place_of(w, tile, look->h, g + i);
            w->peaks[place] = look->desk->peak[g + i];
            w->sums[place] = look->desk->sums[g + i];
            found[i] = w->parts + place * w->D;
        }
        if (any) unpack_sums(look->desk->acc + g * w->D, w->D, found, here);
    }
}

/* One round: scores of the unit `after`, weights of `now`, and what comes of those of the one `before`. */
static inline void go_round(const Look *look, Unit *before, const Unit *now, const Unit *after, Source *keys, Turns *turns) {
    turns->unit = now;
    turns->pieces = turns->taken = turns->weights = turns->weighed = 0;
    if (now->tile && before->tile && before->group == now->group && is_unsettled(look, now)) { /* before peaks move */
        gather_values(look, before, turns);
        before->tile = 0;
    }
    if (now->tile) {
        make_ready(look, now);
        turns->weights = now->depth * (DEPTH / SIDE);
        turns->pieces = now->group ? 0 : now->depth * (look->w->D / DEPTH);
    }
    if (after->tile) {
        fetch_next(turns, after);
        if (!after->group) find_keys(look, after, keys);
        make_scores(look, after, keys, turns);
    }
    if (before->tile) gather_values(look, before, turns);
    while (is_left(turns)) take_turn(turns);
    if (now->tile) finish(look, now);
}

static void look_by_tiles(const Work *w, const Tile *tile, const Tile *last, int h, Block next, Desk *desk) {
    Look look = {w, last, h, (rows_of_tile(w, tile) + SIDE - 1) / SIDE, w->slopes ? 1.0f : w->scale, next, desk};
    Source keys[LONG / SIDE];
    Turns turns = {.look = &look};
    for (int r = 0; r < look.groups * SIDE; r++) desk->peak[r] = -INFINITY, desk->sums[r] = 0;
    Unit before = {0}, now = {0}, after = unit_of(&look, tile, 0);
    int any = after.tile != 0;
    for (; before.tile || now.tile || after.tile; before = now, now = after, after = unit_behind(&look, &after)) {
        if (after.tile && after.tile != now.tile) take_queries(&look, after.tile);
        go_round(&look, &before, &now, &after, keys, &turns);
    }
    ask_for_some(&turns, LONG);
    tell(&look, tile, any);
}
