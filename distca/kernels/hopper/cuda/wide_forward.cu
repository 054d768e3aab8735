// Forward for wide heads: like forward.cu, with tiles that fit registers and shared memory for dims beyond 128.
//
// Outs of 256 columns take 128 registers per thread, so a tile has 80 keys and queries stay in shared memory, in one
// slot. The iterations of all tiles form one stream here too: a tile's queries are copied after the previous tile's
// last scores, and the previous tile's outs are written from registers during the first scores.

constexpr int STAGES = 2;
constexpr int SLOTS = 2, QUERY_READERS = READERS / 2;               // a block's own
constexpr int COPYING_REGISTERS = 24, COMPUTING_REGISTERS = 240;
constexpr int AT_QUERIES = 0;                                       // two blocks
constexpr int AT_KEYS = AT_QUERIES + 2 * ROW_TILE;
constexpr int AT_VALUES = AT_KEYS + STAGES * KEY_TILE;
constexpr int AT_TILES = AT_VALUES + STAGES * VALUE_TILE;           // two int4 of a half: q_first, q_count, steps, head
constexpr int AT_STEPS = AT_TILES + 4 * 16;                         // int4 of a stage: diagonal, keys, first, flags
constexpr int AT_BARRIERS = AT_STEPS + STAGES * 16;
static_assert(AT_BARRIERS + 12 * 8 + 1023 <= 227 * 1024, "more shared memory than a multiprocessor has");

constexpr int MASKED = 1, LAST = 2, MORE = 4, HEADS_FROM = 3;  // flags of an iteration; the head is stored above them

struct Barriers {
    u32 base;
    INLINE u32 queries_full(u32 half) const { return base + 8 * half; }
    INLINE u32 queries_empty(u32 half) const { return base + 16 + 8 * half; }
    INLINE u32 keys_full(u32 stage) const { return base + 32 + 8 * stage; }
    INLINE u32 keys_empty(u32 stage) const { return base + 48 + 8 * stage; }
    INLINE u32 values_full(u32 stage) const { return base + 64 + 8 * stage; }
    INLINE u32 values_empty(u32 stage) const { return base + 80 + 8 * stage; }
};

// Both blocks of a tile, whole.
INLINE void copy_tile(unsigned char* shared, u32 base, const Barriers& barriers, const TensorMap* queries, int4 tile,
                      int head, u32 turn, u32 lane) {
    for (int half = 0; half < 2; half++) {
        const u32 full = barriers.queries_full(half);
        wait(barriers.queries_empty(half), turn ^ 1);
        if (lane == 0) {
            reinterpret_cast<int4*>(shared + AT_TILES)[2 * half + turn] = make_int4(tile.x, tile.y, tile.z, head);
            if (tile.z == 0) {
                arrive(full);
                continue;
            }
            copy_whole_queries(base + AT_QUERIES + half * ROW_TILE, queries, full, tile.x + half * TOKENS, head);
        }
    }
}

INLINE void copy_ahead(unsigned char* shared, u32 base, const Barriers& barriers, const TensorMap* queries,
                       const TensorMap* keys, const TensorMap* values, const TensorMap* value_rows, const int* table,
                       u32* counter, int tiles_at, int segments_at, int kv_heads, int window, u32 lane) {
    const QueryTable entries = {table, tiles_at, segments_at, kv_heads};
    Ring<STAGES> key_ring, value_ring;
    u32 next = 0, turn = 0;
    if (lane == 0) next = draw(counter, entries.items);
    while (true) {
        const u32 item = __shfl_sync(~0u, next, 0);
        int entry = 0, head = 0;
        locate(entries.work, item, kv_heads, entry, head);
        const int4 tile = item < entries.items ? entries.tiles[entry] : make_int4(0, 0, 0, 0);
        if (tile.z == 0) {
            copy_tile(shared, base, barriers, queries, tile, head, turn, lane);
            return;
        }
        const int q_first = tile.x, q_end = tile.x + count_of(tile.y);
        int value_first = 0, value_count = 0;  // values are copied one iteration after their keys
        int left = tile.z;
        for (int number = tile.w; left > 0; number++) {
            const Segment segment = {entries.segments[number], q_first, q_end, window};
            const int stop = segment.first_tile();
            for (int n = segment.last_tile(); n >= stop; n--, left--) {
                if (left == 1 && lane == 0) next = draw(counter, entries.items);  // not earlier, for load balance
                const Step step = {segment, n, q_first, q_end, window, q_end - q_first < 2 * TOKENS};
                const u32 stage = key_ring.stage;
                wait(barriers.keys_empty(stage), key_ring.empty());
                if (lane == 0) {
                    const int flags = step.masked * MASKED + (left == 1) * LAST + (next < entries.items) * MORE;
                    reinterpret_cast<int4*>(shared + AT_STEPS)[stage] =
                        make_int4(step.diagonal, step.count, step.first, (head << HEADS_FROM) + flags);
                    copy_whole_keys(base + AT_KEYS + stage * KEY_TILE, keys, barriers.keys_full(stage), step.first,
                                    head);
                }
                key_ring.advance();
                if (value_count)
                    copy_values(base + AT_VALUES, barriers, values, value_rows, value_ring, value_first, value_count, head, lane);
                else
                    copy_tile(shared, base, barriers, queries, tile, head, turn, lane);
                value_first = step.first;
                value_count = step.count;
            }
        }
        copy_values(base + AT_VALUES, barriers, values, value_rows, value_ring, value_first, value_count, head, lane);
        turn ^= 1;
    }
}

// Recompute a warp's scores with keys from global memory, without the other warps.
INLINE void repeat_scores(float (&s)[SCORES], u32 queries, const Keys& keys, int4 step, u32 warp, u32 lane) {
    const bf16* head = keys.first + (step.w >> HEADS_FROM) * keys.head_stride + 2 * (lane & 3);
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++) {
        const int key = step.z + min(8 * j + static_cast<int>(lane >> 2), step.y - 1);
        const u32* row = reinterpret_cast<const u32*>(head + key * keys.token_stride);
#pragma unroll
        for (int e = 0; e < 4; e++) s[4 * j + e] = 0;
#pragma unroll 1
        for (int i = 0; i < D / 16; i++) {
            u32 q[4];
            load_matrices(q, queries + i / 4 * ROW_PANEL + swizzled(16 * warp + (lane & 15), i % 4 * 2 + (lane >> 4)));
            product_of_warp(s + 4 * j, q, row[8 * i], row[8 * i + 4]);
        }
    }
}

// Data beyond a block's last row, even NaN, must not count as scores out of range.
INLINE void quieten(float (&s)[SCORES], int rows, u32 warp, u32 lane) {
    const int row = 16 * warp + lane / 4;
#pragma unroll
    for (int i = 0; i < SCORES; i++)
        if (row + ((i & 2) ? 8 : 0) >= rows) s[i] = 0;
}

INLINE void compute(u32 base, const Barriers& barriers, const Keys& keys, bf16* out, float* lse, const Parts& parts,
                    int half, int kv_heads, const Scaling& scaling, int window) {
    const u32 warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
    const u32 queries = base + AT_QUERIES + half * ROW_TILE;
    Ring<STAGES> key_ring, value_ring;
    u32 turn = 0, p[SCORES / 2];
    float s[SCORES], o[DV / 2];
    Softmax softmax;
    const Units units = {scaling, false};
    int flags;  // of the iteration whose probabilities are in p

    auto tile_said = [&](u32 of_turn) { return load_said(base + AT_TILES + 16 * (2 * half + not_before(of_turn))); };
    auto begin_scores = [&] {
        hold(s);
        products_begin();
        issue_rows<D>(s, queries, ROW_PANEL, base + AT_KEYS + key_ring.stage * KEY_TILE, KEY_PANEL);
    };
    auto begin_values = [&] {
        wait(barriers.values_full(value_ring.stage), value_ring.full);
        hold(o);
        hold(p);
        products_begin();
        issue_sums<KEYS>(o, p, base + AT_VALUES + value_ring.stage * VALUE_TILE, KEY_PANEL);
    };
    auto finish_scores = [&](int4 step, bool is_first) {  // no product writes s any more
        hold(s);
        softmax.keep0 = softmax.keep1 = 1;
        arrive(barriers.keys_empty(key_ring.stage));
        key_ring.advance();
        flags = step.w;
        const u32 zero = flags >> 31;  // zero, but the compiler cannot know
        auto mask = [&](float hidden_score) {
            softmax.mask(s, hidden_score, step, half, window, not_before(warp), not_before(lane));
            const int rows = Block(tile_said(turn), half, kv_heads).rows;
            if (rows < ROWS) quieten(s, rows, not_before(warp), not_before(lane));
        };
        const auto run = [&](const auto& exponent, bool masked, float hidden_score) {
            if (masked) mask(hidden_score);
            if (is_first || softmax.lacks_references()) softmax.find_references(s, exponent);
            return softmax.exponentiate(s, exponent, zero, is_first);
        };
        if (!with_exponents<false>(s, flags & MASKED, scaling, units, run)) {
            const Line line = {scaling.log2};
            repeat_scores(s, queries, keys, step, not_before(warp), not_before(lane));
            if (SOFTCAP) cap(s, scaling.tangent);
            if (flags & MASKED) mask(-INFINITE);
            softmax.find_references(s, line);
            softmax.exponentiate(s, line, zero, true);
        }
        hold(s);
        if (flags & LAST) arrive(barriers.queries_empty(half));
        // This branch and the vote on sums keep the exponentials ahead of the wait for values.
        else wait(barriers.keys_full(key_ring.stage), key_ring.full);
    };
    auto finish_values = [&] {
        hold(o);
        hold(p);
        arrive(barriers.values_empty(value_ring.stage));
        value_ring.advance();
    };
    auto begin_tile = [&] {
        wait(barriers.queries_full(half), turn);
        wait(barriers.keys_full(key_ring.stage), key_ring.full);
    };
    auto finish_tile = [&] {  // the previous tile
        return finish_sums(lse, parts, softmax, tile_said(turn ^ 1), half, kv_heads, not_before(warp),
                           not_before(lane));
    };
    auto write = [&](float2 factors) {
        const int4 tile = tile_said(turn ^ 1);
        if (SPLIT && is_part(tile))
            write_part(parts.sums, o, part_block(tile, half, kv_heads));
        else
            write_rows<DV>(out, o, factors.x, factors.y, Block(tile, half, kv_heads), not_before(warp),
                           not_before(lane));
    };
    auto step_said = [&] { return load_said(base + AT_STEPS + 16 * key_ring.stage); };

    wait(barriers.queries_full(half), turn);
    if (load_said(base + AT_TILES + 32 * half).z == 0) return;
    begin_tile();
    begin_scores();
    products_wait<0>();
    while (true) {
        clear(o);
        softmax = Softmax();
        finish_scores(step_said(), true);
        round_pairs(p, s);
        while (!(flags & LAST)) {
            const int4 step = step_said();
            begin_scores();
            begin_values();
            products_wait<1>();
            finish_scores(step, false);
            products_wait<0>();
            finish_values();
            softmax.rescale(o);
            round_pairs(p, s);
        }
        turn ^= 1;
        if (!(flags & MORE)) break;
        begin_values();
        begin_tile();
        begin_scores();
        const float2 factors = finish_tile();
        products_wait<1>();
        finish_values();
        write(factors);
        wait(barriers.queries_full(half), turn);  // already complete; keeps the writes ahead of the wait for scores
        products_wait<0>();
    }
    begin_values();
    products_wait<0>();
    finish_values();
    write(finish_tile());
}
