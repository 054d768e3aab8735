// Forward: tiles of two or three blocks of queries, each against its keys from the last to the first.
//
// One persistent thread block of three or four warpgroups runs per multiprocessor. One warp takes tiles, long ones
// first, and prefetches queries, keys and values. The other warpgroups compute, one block of queries each, not in
// lockstep. A warpgroup issues the next scores before the last values, and computes exponentials while these products
// run. For every iteration the copying warp also writes the positions of the diagonal and of the last key, so that the
// computing warpgroups need no task tables.
//
// With two computing warpgroups queries are in registers, which saves a fifth of the reads of shared memory and their
// power. With dim 64 exponentials take as long as products, and three warpgroups overlap better; they have 160
// registers per thread and read queries from shared memory.

constexpr bool QUERIES_HELD = BLOCKS == 2;
constexpr int QUERY_READERS = READERS;  // of a slot
constexpr int COPYING_REGISTERS = QUERIES_HELD ? 40 : 32, COMPUTING_REGISTERS = QUERIES_HELD ? 232 : 160;

INLINE void issue_scores(float (&s)[64], const u32 (&q)[D / 16][4], u32 keys) {
#pragma unroll
    for (int i = 0; i < D / 16; i++)
        product<0>(s, q[i][0], q[i][1], q[i][2], q[i][3],
                   inner_descriptor(keys + i / 4 * KEY_PANEL) + i % 4 * INNER_STEP, i > 0);
    products_commit();
}

// The same from queries in shared memory.
INLINE void issue_scores(float (&s)[64], u32 queries, u32 keys) {
#pragma unroll
    for (int i = 0; i < D / 16; i++)
        product<0, 0>(s, inner_descriptor(queries + i / 4 * ROW_PANEL) + i % 4 * INNER_STEP,
                      inner_descriptor(keys + i / 4 * KEY_PANEL) + i % 4 * INNER_STEP, i > 0);
    products_commit();
}

// Sixteen columns of the warp's 16 rows of queries.
INLINE void load_queries(u32 (&q)[4], u32 queries, int i, u32 warp, u32 lane) {
    load_matrices(q, queries + i / 4 * ROW_PANEL + swizzled(16 * warp + (lane & 15), i % 4 * 2 + (lane >> 4)));
}

// Two numbers in bf16 times a power of two.
INLINE u32 multiply_pairs(u32 x, float by) {
    const u32 factor = __float_as_uint(by) >> 16;
    asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(factor | factor << 16));
    return x;
}

// Compute a warp's scores of its 16 rows from global memory, without the other warps, when the warp must redo an
// iteration. This is rare and may be slow; each product depends (by zero bits) on the previous one to save registers.
template <typename Queries>
INLINE void repeat_scores(float (&s)[64], const Queries& queries, const Keys& keys, int4 step, u32 zero, u32 lane) {
    const bf16* head = keys.first + (step.w >> 1) * keys.head_stride + 2 * (lane & 3);
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++) {
        const int key = step.z + min(8 * j + static_cast<int>(lane >> 2), step.y - 1);
        const u32* row = reinterpret_cast<const u32*>(head + key * keys.token_stride);
#pragma unroll
        for (int e = 0; e < 4; e++) s[4 * j + e] = 0;
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            u32 q[4];
            queries(q, i);
            product_of_warp(s + 4 * j, q, row[8 * i], row[8 * i + 4]);
            if (i % 2 == 1) row += __float_as_uint(s[4 * j]) & zero;
        }
    }
}

INLINE void issue_values(float (&o)[D / 2], const u32 (&p)[32], u32 values) {
    u64 b = outer_descriptor(values, KEY_PANEL);
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        product<1>(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], b + i * OUTER_STEP, true);
    products_commit();
}

// The iterations of all tiles form one stream: the first scores of a tile are issued with the last values of the
// previous tile, whose results are written while the other warpgroup's products run.
INLINE void compute(u32 base, const Barriers& barriers, const Keys& keys, bf16* out, float* lse, const Parts& parts,
                    int half, int kv_heads, const Scaling& scaling, int window) {
    const u32 warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
    const u32 my_queries = base + AT_QUERIES + half * ROW_TILE;
    Ring<SLOTS> slots;
    Ring<STAGES> key_ring, value_ring;
    u32 q[D / 16][4], p[32];
    float s[64], o[D / 2];
    Softmax softmax;
    const Units units = {scaling, true};
    u32 slot;         // of the tile whose sums are in o
    u32 scores_slot;  // of the tile whose scores are in s
    int left;         // iterations left in the tile whose probabilities are in p

    auto begin_tile = [&] {  // returns whether there is a tile
        wait(barriers.queries_full(slots.stage), slots.full);
        const int4 tile = load_said(base + AT_TILES + 16 * slots.stage);
        left = tile.z;
        if (left == 0) return false;
        scores_slot = slots.stage;
        const u32 queries = my_queries + scores_slot * QUERY_SLOT;
        const int row = 16 * warp + lane / 4, rows = Block(tile, half, kv_heads).rows;
        // Data beyond the last row, even NaN, must not count as scores out of range: set it to zero.
        if (QUERIES_HELD) {
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
                load_queries(q[i], queries, i, warp, lane);
#pragma unroll
                for (int e = 0; SOFTCAP && e < 4; e++) q[i][e] = multiply_pairs(q[i][e], units.by);
            }
            if (rows < ROWS) {
#pragma unroll
                for (int i = 0; i < D / 16; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) q[i][e] = row + 8 * (e & 1) < rows ? q[i][e] : 0;
            }
        } else {
            const int mine = (threadIdx.x & 127) / 2;
            if (SOFTCAP || mine >= rows)
#pragma unroll
                for (int i = 0; i < 4 * PANELS; i++) {
                    const u32 at = queries + i / 4 * ROW_PANEL + mine * 128 + (lane & 1) * 64 + i % 4 * 16;
                    uint4 x = make_uint4(0, 0, 0, 0);
                    if (SOFTCAP && mine < rows) {
                        x = load_shared(at);
                        x = {multiply_pairs(x.x, units.by), multiply_pairs(x.y, units.by),
                             multiply_pairs(x.z, units.by), multiply_pairs(x.w, units.by)};
                    }
                    store_shared(at, x.x, x.y, x.z, x.w);
                }
            fence_async_proxy();
            sync_named(1 + half, 128);
        }
        slots.advance();
        wait(barriers.keys_full(key_ring.stage), key_ring.full);
        return true;
    };
    auto begin_scores = [&] {
        hold(s);
        products_begin();
        const u32 keys_at = base + AT_KEYS + key_ring.stage * KEY_TILE;
        if (QUERIES_HELD)
            issue_scores(s, q, keys_at);
        else
            issue_scores(s, my_queries + scores_slot * QUERY_SLOT, keys_at);
    };
    auto queries = [&](u32 (&to)[4], int i) {
        if (QUERIES_HELD) {
#pragma unroll
            for (int e = 0; e < 4; e++) to[e] = q[i][e];
        } else {
            load_queries(to, my_queries + scores_slot * QUERY_SLOT, i, not_before(warp), not_before(lane));
        }
    };
    auto begin_values = [&] {
        wait(barriers.values_full(value_ring.stage), value_ring.full);
        hold(o);
        hold(p);
        products_begin();
        issue_values(o, p, base + AT_VALUES + value_ring.stage * KEY_TILE);
    };
    auto finish_scores = [&](int4 step, bool is_first = false) {  // no product writes s any more
        hold(s);
        softmax.keep0 = softmax.keep1 = 1;
        arrive(barriers.keys_empty(key_ring.stage));
        key_ring.advance();
        const bool masked = step.w & 1;
        const u32 zero = left >> 31;  // zero, but the compiler cannot know
        const auto run = [&](const auto& exponent, bool masked, float hidden_score) {
            if (masked) softmax.mask(s, hidden_score, step, half, window, warp, lane);
            if (softmax.lacks_references()) softmax.find_references(s, exponent);
            return softmax.exponentiate(s, exponent, zero, is_first);
        };
        if (!with_exponents<true>(s, masked, scaling, units, run)) {
            const Line line = {scaling.log2};
            repeat_scores(s, queries, keys, step, zero, not_before(lane));
            if (SOFTCAP) cap(s, units.tangent);
            if (masked) softmax.mask(s, -INFINITE, step, half, window, warp, not_before(lane));
            softmax.find_references(s, line);
            softmax.exponentiate(s, line, zero, true);
        }
        hold(s);
        // This branch and the vote on sums keep the exponentials ahead of the wait for values.
        if (left > 0) wait(barriers.keys_full(key_ring.stage), key_ring.full);
    };
    auto finish_values = [&] {
        products_wait<0>();
        hold(o);
        hold(p);
        arrive(barriers.values_empty(value_ring.stage));
        value_ring.advance();
    };
    auto finish_tile = [&] {
        return finish_sums(lse, parts, softmax, load_said(base + AT_TILES + 16 * slot), half, kv_heads,
                           not_before(warp), not_before(lane));
    };
    auto write = [&](float2 factors) {
        const u32 w = not_before(warp), l = not_before(lane), staging = my_queries + not_before(slot) * QUERY_SLOT;
        const auto tile = [&] { return load_said(base + AT_TILES + 16 * slot); };
        if (!QUERIES_HELD) sync_named(1 + half, 128);  // no warp reads this block's queries any more
        if (SPLIT && is_part(tile())) {
            write_part(parts.sums, o, part_block(tile(), half, kv_heads));
        } else {
            stage_rows(staging, ROW_PANEL, o, factors.x, factors.y, w, l);
            write_block(out, staging, Block(tile(), half, kv_heads), w, l);
        }
        fence_async_proxy();
        arrive(barriers.queries_empty(slot));
    };

    slot = slots.stage;
    if (!begin_tile()) return;
    left--;
    clear(o);
    begin_scores();
    products_wait<0>();
    finish_scores(load_said(base + AT_STEPS + 16 * key_ring.stage), true);
    round_pairs(p, s);
    while (true) {
        const bool begins = left == 0;  // the next tile
        const u32 next_slot = slots.stage;
        if (begins && !begin_tile()) break;
        left--;
        const int4 step = load_said(base + AT_STEPS + 16 * key_ring.stage);
        begin_scores();
        begin_values();
        float2 factors;  // of the tile that ends
        if (begins) {
            factors = finish_tile();
            softmax = Softmax();
        }
        products_wait<1>();
        finish_scores(step);
        finish_values();
        if (!begins) softmax.rescale(o);
        round_pairs(p, s);
        if (begins) {
            write(factors);
            slot = next_slot;
            clear(o);
        }
    }
    begin_values();
    finish_values();
    write(finish_tile());
}
