// The separate dQ kernel, without sums in memory: tiles of queries against their keys, on forward's tables.
//
// If gradients must be reproducible, `backward.cu` computes only dK and dV, and this kernel computes dQ: seven matrix
// products instead of five, but one warpgroup sums each number in a fixed order, without waiting for others. As in
// forward one warp prefetches and two warpgroups compute, one block of queries each. Scores, output-gradient products
// and dQ stay in registers; the products of one warpgroup overlap the other's exponentials. With wide heads a key tile
// has fewer keys than a tile of forward's tables; the last iteration of a tile is flagged.

constexpr int STAGES = 2;
constexpr int VALUE_STAGES = D > 192 ? 1 : 2;
constexpr bool STAGED_APART = D <= 192;  // separate staging for two blocks of dQ, else over their queries
constexpr int SCORES = KEYS / 2;         // per thread
constexpr int DOUT_TILE = ROW_PANEL * (DV / 64);
constexpr int AT_QUERIES = 0;  // one slot: two blocks
constexpr int AT_DOUTS = AT_QUERIES + 2 * ROW_TILE;
constexpr int AT_KEYS = AT_DOUTS + 2 * DOUT_TILE;
constexpr int AT_VALUES = AT_KEYS + STAGES * KEY_TILE;
constexpr int AT_STAGING = STAGED_APART ? AT_VALUES + VALUE_STAGES * VALUE_TILE : AT_QUERIES;
constexpr int AT_TILES = AT_VALUES + VALUE_STAGES * VALUE_TILE + (STAGED_APART ? 2 * ROW_TILE : 0);
                                             // int4 of a half: q_first, q_count, steps, head
constexpr int AT_STEPS = AT_TILES + 2 * 16;  // int4 of a stage: diagonal, keys, masked, last
constexpr int AT_BARRIERS = AT_STEPS + STAGES * 16;
static_assert(AT_BARRIERS + 16 * 8 + 1023 <= 227 * 1024, "more shared memory than a multiprocessor has");

struct Barriers {
    u32 base;
    INLINE u32 queries_full(u32 half) const { return base + 8 * half; }
    INLINE u32 queries_empty(u32 half) const { return base + 16 + 8 * half; }
    INLINE u32 douts_full(u32 half) const { return base + 32 + 8 * half; }
    INLINE u32 douts_empty(u32 half) const { return base + 48 + 8 * half; }
    INLINE u32 keys_full(u32 stage) const { return base + 64 + 8 * stage; }
    INLINE u32 keys_empty(u32 stage) const { return base + 80 + 8 * stage; }
    INLINE u32 values_full(u32 stage) const { return base + 96 + 8 * stage; }
    INLINE u32 values_empty(u32 stage) const { return base + 112 + 8 * stage; }
};

struct Maps {
    const TensorMap *queries, *douts, *keys, *key_rows, *values, *value_rows;
};

INLINE void copy_ahead(unsigned char* shared, u32 base, const Barriers& barriers, const Maps& maps, const int* table,
                       u32* counter, int tiles_at, int segments_at, int kv_heads, int window, u32 lane) {
    const QueryTable entries = {table, tiles_at, segments_at, kv_heads};
    int4* said = reinterpret_cast<int4*>(shared + AT_TILES);
    Ring<STAGES> ring;
    Ring<VALUE_STAGES> value_ring;
    u32 next = 0, blocks_empty = 1;
    if (lane == 0) next = draw(counter, entries.items);
    while (true) {
        const u32 item = __shfl_sync(~0u, next, 0);
        int entry = 0, head = 0;
        locate(entries.work, item, kv_heads, entry, head);
        const int4 tile = item < entries.items ? entries.tiles[entry] : make_int4(0, 0, 0, 0);
        for (int half = 0; half < 2; half++) {
            wait(barriers.queries_empty(half), blocks_empty);
            if (lane == 0) {
                said[half] = make_int4(tile.x, tile.y, tile.z, head);
                if (tile.z == 0)
                    arrive(barriers.queries_full(half));
                else
                    copy_whole_queries(base + AT_QUERIES + half * ROW_TILE, maps.queries, barriers.queries_full(half),
                                  tile.x + half * TOKENS, head);
            }
        }
        if (tile.z == 0) return;
        const int q_first = tile.x, q_end = tile.x + count_of(tile.y);
        int left = tile.z;  // in forward's key tiles
        bool is_first = true;
        for (int number = tile.w; left > 0; number++) {
            const Segment keys = {entries.segments[number], q_first, q_end, window};
            const int stop = keys.first_tile();
            left -= keys.num_tiles<TABLE_KEYS>();
            for (int n = keys.last_tile(); n >= stop; n--) {
                const bool is_last = left == 0 && n == stop;
                if (is_last && lane == 0) next = draw(counter, entries.items);  // not earlier, for load balance
                const Step step = {keys, n, q_first, q_end, window};
                const u32 stage = ring.stage;
                wait(barriers.keys_empty(stage), ring.empty());
                if (lane == 0)
                    reinterpret_cast<int4*>(shared + AT_STEPS)[stage] = 
                        make_int4(step.diagonal, step.count, step.masked, is_last);
                copy_keys(base + AT_KEYS + stage * KEY_TILE, maps.keys, maps.key_rows, barriers.keys_full(stage),
                          step.first, step.count, head, lane);
                if (is_first)
                    for (int half = 0; half < 2; half++) {
                        wait(barriers.douts_empty(half), blocks_empty);
                        if (lane == 0)
                            copy_whole_queries<DV>(base + AT_DOUTS + half * DOUT_TILE, maps.douts, barriers.douts_full(half),
                                           tile.x + half * TOKENS, head);
                    }
                is_first = false;
                copy_values(base + AT_VALUES, barriers, maps.values, maps.value_rows, value_ring, step.first,
                            step.count, head, lane);
                ring.advance();
            }
        }
        blocks_empty ^= 1;
    }
}

// Probabilities of two rows of a lane from their scores, in place; the log-sum-exp is to base 2. With a softcap,
// probabilities times its slope from the tangents of scores.
INLINE void exponentiate(float (&s)[SCORES], float lse0, float lse1, float scale_log2) {
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        const float p = exp2_fast(s[i] * scale_log2 - ((i & 2) ? lse1 : lse0));
        s[i] = SOFTCAP ? p * (1.f - s[i] * s[i]) : p;
    }
}

// Returns x with a fake dependency (zero bits) on a barrier that is full. Otherwise the compiler would move
// exponentials ahead of the products that are issued before them.
INLINE float behind(float x, u32 barrier, u32 parity) {
    u32 bits;
    asm volatile(
        "{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.b32 %0, 0, 1, done;\n}"
        : "=r"(bits)
        : "r"(barrier), "r"(parity)
        : "memory");
    return __uint_as_float(__float_as_uint(x) | bits);
}

INLINE void compute(u32 base, const Barriers& barriers, const float* lse, const float* delta, bf16* dq,
                    float4* part_sums, int half, int kv_heads, float scale, const Scaling& scaling, int window) {
    const u32 warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
    const int row = 16 * warp + lane / 4, token0 = row / G + half * TOKENS, token1 = (row + 8) / G + half * TOKENS;
    const u32 queries = base + AT_QUERIES + half * ROW_TILE, douts = base + AT_DOUTS + half * DOUT_TILE;
    Ring<STAGES> ring;
    Ring<VALUE_STAGES> value_ring;
    u32 blocks_full = 0;
    while (true) {
        wait(barriers.queries_full(half), blocks_full);
        const int4 tile = load_said(base + AT_TILES + 16 * half);
        if (tile.z == 0) return;
        const Block block = {tile, half, kv_heads};
        const bool inside0 = row < block.rows, inside1 = row + 8 < block.rows;
        const float lse0 = inside0 ? lse[block.place(row)] : INFINITE, delta0 = inside0 ? delta[block.place(row)] : 0.f;
        const float lse1 = inside1 ? lse[block.place(row + 8)] : INFINITE,
                    delta1 = inside1 ? delta[block.place(row + 8)] : 0.f;
        float s[SCORES], dp[SCORES], sum[D / 2];
        u32 ds[SCORES / 2];
        clear(sum);
        u32 stage = ring.stage;
        wait(barriers.keys_full(stage), ring.full);
        products_begin();
        issue_rows<D>(s, queries, ROW_PANEL, base + AT_KEYS + stage * KEY_TILE, KEY_PANEL);
        products_wait<0>();
        hold(s);
        wait(barriers.douts_full(half), blocks_full);
        while (true) {  // this stage's scores are ready, and no product is in flight
            wait(barriers.values_full(value_ring.stage), value_ring.full);
            const int4 step = load_said(base + AT_STEPS + 16 * stage);
            products_begin();
            issue_rows<DV>(dp, douts, ROW_PANEL, base + AT_VALUES + value_ring.stage * VALUE_TILE, KEY_PANEL);
            const u32 values_full = barriers.values_full(value_ring.stage);
            if (SOFTCAP) cap_roughly(s, behind(scaling.tangent, values_full, value_ring.full));
            exponentiate(s, lse0, lse1, SOFTCAP ? scaling.log2 : behind(scaling.log2, values_full, value_ring.full));
            if (step.z) hide_keys(s, 0, step, token0, token1, window, lane);
            products_wait<0>();
            hold(dp);
            arrive(barriers.values_empty(value_ring.stage));
            value_ring.advance();
#pragma unroll
            for (int i = 0; i < SCORES; i++) s[i] *= dp[i] - ((i & 2) ? delta1 : delta0);
            round_pairs(ds, s);
            hold(ds);
            hold(sum);
            products_begin();
            issue_sums<KEYS>(sum, ds, base + AT_KEYS + stage * KEY_TILE, KEY_PANEL);
            ring.advance();
            if (!step.w) {
                wait(barriers.keys_full(ring.stage), ring.full);
                products_begin();
                issue_rows<D>(s, queries, ROW_PANEL, base + AT_KEYS + ring.stage * KEY_TILE, KEY_PANEL);
            }
            products_wait<0>();
            hold(sum);
            hold(ds);
            hold(s);
            arrive(barriers.keys_empty(stage));
            if (step.w) break;
            stage = ring.stage;
        }
        if (STAGED_APART)
            arrive(barriers.queries_empty(half));
        else
            sync_named(1 + half, 128);  // no warp reads this block's queries any more
        arrive(barriers.douts_empty(half));
        blocks_full ^= 1;
        const u32 staging = base + AT_STAGING + half * ROW_TILE;
        if (SPLIT && is_part(tile)) {
            write_part(part_sums, sum, part_block(tile, half, kv_heads));
        } else {
            stage_rows(staging, ROW_PANEL, sum, scale, scale, warp, lane);
            write_block(dq, staging, block, warp, lane);
            __syncwarp();
        }
        if (!STAGED_APART) {
            fence_async_proxy();
            arrive(barriers.queries_empty(half));
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_dq(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap douts,
                 const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap key_rows,
                 const __grid_constant__ TensorMap values, const __grid_constant__ TensorMap value_rows,
                 const float* lse, const float* delta, bf16* dq, const int* table, u32* counter, int tiles_at,
                 int segments_at, int kv_heads, float scale, float softcap, int window, float4* part_sums) {
    unsigned char* shared = open_shared(AT_TILES);
    const u32 base = shared_address(shared);
    const Barriers barriers = {base + AT_BARRIERS};
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < 2; i++) {
            barrier_init(barriers.queries_full(i), 1);
            barrier_init(barriers.queries_empty(i), READERS / 2);
            barrier_init(barriers.douts_full(i), 1);
            barrier_init(barriers.douts_empty(i), READERS / 2);
            barrier_init(barriers.keys_full(i), 1);
            barrier_init(barriers.keys_empty(i), READERS);
            barrier_init(barriers.values_full(i), 1);
            barrier_init(barriers.values_empty(i), READERS);
        }
    }
    barriers_are_set();
    const int warpgroup = threadIdx.x >> 7;
    if (warpgroup == 0) {
        give_registers<40>();
        if (threadIdx.x < 32) {
            const Maps maps = {&queries, &douts, &keys, &key_rows, &values, &value_rows};
            copy_ahead(shared, base, barriers, maps, table, counter, tiles_at, segments_at, kv_heads, window,
                       threadIdx.x);
        }
    } else {
        take_registers<232>();
        compute(base, barriers, lse, delta, dq, part_sums, warpgroup - 1, kv_heads, scale, {scale, softcap},
                window);
    }
}
