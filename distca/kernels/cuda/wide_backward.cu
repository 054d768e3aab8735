// dK and dV of wide heads: tiles of 64 keys, one warpgroup for each gradient.
//
// With 256 columns the sums of 64 keys take 128 registers a thread, so a warpgroup can hold those of one gradient. The
// first makes probabilities from transposed scores and dV from them; the second makes dP, takes the probabilities over
// shared memory, where each thread finds those of the same places, and makes dS and dK. So scores and dP have 64
// columns each, and the left operands of dV and dK stay in registers: halves of one product in both warpgroups would
// read shared memory half as often again as the tensor cores can wait for. For the same reason keys and values stay in
// registers as far as there are any. dQ has a kernel of its own (backward_dq.cu): with so few keys in a tile, adding it
// up in memory takes longer than computing scores and dP twice.

constexpr int STAGES = D == 256 ? 2 : 3;
constexpr int DOUT_TILE = ROW_PANEL * (DV / 64);
constexpr int SCORES = ROWS / 2;                           // of a thread
constexpr int HELD_KEYS = D == 256 ? 6 : D / 16;           // steps of 16 columns; two more would spill
constexpr int HELD_VALUES = DV == 256 ? 6 : DV / 16;
constexpr int P_TILE = 4 * 128 * 16;
constexpr int AT_KEYS = 0;
constexpr int AT_VALUES = AT_KEYS + KEY_TILE;
constexpr int AT_QUERIES = AT_VALUES + VALUE_TILE;
constexpr int AT_DOUTS = AT_QUERIES + STAGES * ROW_TILE;
constexpr int AT_P = AT_DOUTS + STAGES * DOUT_TILE;        // two uint4 [4][threads]
constexpr int AT_STAGING = AT_P + 2 * P_TILE;              // 64 columns of dV, and of dK
constexpr int AT_LSE = AT_STAGING + 2 * KEY_PANEL;         // stages of float[ROWS], times log2(e)
constexpr int AT_DELTA = AT_LSE + STAGES * ROWS * 4;       // rowsum(dO * O), likewise
constexpr int AT_TILE = AT_DELTA + STAGES * ROWS * 4;      // int4: k_first, k_count, blocks, head
constexpr int AT_BLOCKS = AT_TILE + 16;                    // two int4 of a stage
constexpr int AT_BARRIERS = AT_BLOCKS + STAGES * 32;
constexpr int BLOCK_FLOATS = ROWS * D;                     // of dQ's sum, where it is added up
static_assert(ROWS == 64 && KEYS == 64, "one product has the scores of a block");
static_assert(AT_BARRIERS + (8 + 4 * STAGES) * 8 + 1023 <= 227 * 1024, "more shared memory than a multiprocessor has");

struct Barriers {
    u32 base;
    INLINE u32 keys_full() const { return base; }
    INLINE u32 keys_empty() const { return base + 8; }
    INLINE u32 values_full() const { return base + 16; }
    INLINE u32 values_empty() const { return base + 24; }
    INLINE u32 p_full(u32 place) const { return base + 32 + 8 * place; }
    INLINE u32 p_empty(u32 place) const { return base + 48 + 8 * place; }
    INLINE u32 queries_full(u32 stage) const { return base + 64 + 8 * stage; }
    INLINE u32 queries_empty(u32 stage) const { return base + 64 + 8 * (STAGES + stage); }
    INLINE u32 douts_full(u32 stage) const { return base + 64 + 8 * (2 * STAGES + stage); }
    INLINE u32 douts_empty(u32 stage) const { return base + 64 + 8 * (3 * STAGES + stage); }
};

struct Maps {
    const TensorMap *queries, *query_rows, *douts, *dout_rows, *keys, *key_rows, *values, *value_rows;
};

// One number per row of a block, which lie apart by token; the barrier counts the lanes that brought theirs.
INLINE void copy_numbers(u32 to, const float* from, u32 barrier, int q_first, int q_count, int head, int kv_heads,
                         u32 lane) {
#pragma unroll
    for (int i = 0; i < ROWS / 32; i++) {
        const int row = i * 32 + lane;
        const bool inside = row < q_count * G;
        const float* source =
            from + (inside ? static_cast<long>(q_first + row / G) * kv_heads * G + head * G + row % G : 0);
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to + row * 4), "l"(source),
                     "r"(inside ? 4 : 0)
                     : "memory");
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

INLINE void copy_ahead(unsigned char* shared, u32 base, const Barriers& barriers, const Maps& maps, const float* lse,
                       const float* delta, const int* table, u32* counter, int items_at, int rows_at, int kv_heads,
                       int window, u32 lane) {
    const Work work = {table[0], table[1]};
    const int4* entries = reinterpret_cast<const int4*>(table + items_at);
    const int4* rows = reinterpret_cast<const int4*>(table + rows_at);
    int4* said = reinterpret_cast<int4*>(shared + AT_TILE);
    const u32 items = work.count * kv_heads;
    Ring<STAGES> ring;
    u32 next = 0, tile_empty = 1;
    if (lane == 0) next = draw(counter, items);
    while (true) {
        const u32 item = __shfl_sync(~0u, next, 0);
        if (item >= items) {
            wait(barriers.keys_empty(), tile_empty);
            if (lane == 0) {
                *said = make_int4(0, 0, 0, 0);
                arrive(barriers.keys_full());
            }
            return;
        }
        int entry, head;
        locate(work, item, kv_heads, entry, head);
        const int4 tile = entries[entry];
        const int k_first = tile.x, k_end = tile.x + tile.y;
        int left = tile.z;
        for (int number = tile.w; left > 0; number++) {
            const int4 a = rows[2 * number], b = rows[2 * number + 1];
            const int q_begin = a.x, q_end = a.y, shift = b.x;
            const int low = max(k_first, a.z),
                      high = min(min(k_end, a.w), q_end + shift);  // keys of the tile seen by the row
            if (low >= high) continue;
            const int first_block = max(0, low - shift - q_begin) / TOKENS;
            int stop = (q_end - q_begin + TOKENS - 1) / TOKENS;
            if (WINDOWED) {
                const int reach = high + window - 1 - shift - q_begin;  // queries from here on see no key of the tile
                stop = min(stop, (max(0, reach) + TOKENS - 1) / TOKENS);
            }
            for (int block = stop - 1; block >= first_block; block--, left--) {
                if (left == 1 && lane == 0) next = draw(counter, items);  // not earlier: others may be free before
                const int q_first = q_begin + block * TOKENS, q_count = min(TOKENS, q_end - q_first);
                const int diagonal = q_first + shift - k_first;  // the last key of the tile that the first query sees
                bool masked = diagonal < KEYS - 1 || a.z > k_first || a.w < k_first + KEYS || q_count * G < ROWS;
                if (WINDOWED) masked |= q_first + q_count - 1 + shift - window + 1 > k_first;
                const u32 stage = ring.stage;
                wait(barriers.queries_empty(stage), ring.empty());
                if (lane == 0) {
                    int4* block_said = reinterpret_cast<int4*>(shared + AT_BLOCKS) + 2 * stage;
                    block_said[0] = make_int4(diagonal, a.z - k_first, a.w - k_first, q_count * G);
                    block_said[1] = make_int4(masked, 0, 0, 0);
                }
                copy_queries(base + AT_QUERIES + stage * ROW_TILE, maps.queries, maps.query_rows,
                             barriers.queries_full(stage), q_first, q_count, head, lane);
                copy_numbers(base + AT_LSE + stage * ROWS * 4, lse, barriers.queries_full(stage), q_first, q_count,
                             head, kv_heads, lane);
                if (left == tile.z) {  // what keys and values might wait for comes after queries
                    wait(barriers.keys_empty(), tile_empty);
                    if (lane == 0) *said = make_int4(tile.x, tile.y, tile.z, head);
                    copy_keys(base + AT_KEYS, maps.keys, maps.key_rows, barriers.keys_full(), k_first, tile.y, head,
                              lane);
                }
                wait(barriers.douts_empty(stage), ring.empty());
                copy_queries<DV>(base + AT_DOUTS + stage * DOUT_TILE, maps.douts, maps.dout_rows,
                                 barriers.douts_full(stage), q_first, q_count, head, lane);
                copy_numbers(base + AT_DELTA + stage * ROWS * 4, delta, barriers.douts_full(stage), q_first, q_count,
                             head, kv_heads, lane);
                if (left == tile.z) {
                    wait(barriers.values_empty(), tile_empty);
                    copy_keys<DV>(base + AT_VALUES, maps.values, maps.value_rows, barriers.values_full(), k_first,
                                  tile.y, head, lane);
                }
                ring.advance();
            }
        }
        tile_empty ^= 1;
    }
}

INLINE void hide(float (&p)[SCORES], int4 block, int row, int window, u32 lane) {
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        const int key = row + ((i & 2) ? 8 : 0), column = 8 * (i / 4) + 2 * (lane & 3) + (i & 1);
        const int last = block.x + column / G;
        bool hidden = key > last || key < block.y || key >= block.z || column >= block.w;
        if (WINDOWED) hidden |= key <= last - window;
        if (hidden) p[i] = 0;
    }
}

// Keys or values of this warp's rows, as left operands.
template <int COUNT>
INLINE void load_rows(u32 (&to)[COUNT][4], u32 tile, u32 warp, u32 lane) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        load_matrices(to[i], tile + i / 4 * KEY_PANEL + swizzled(16 * warp + (lane & 15), i % 4 * 2 + (lane >> 4)));
}

// Products of 64 keys with a block over DIM: transposed scores, or those of values and output gradients.
template <int DIM, int COUNT>
INLINE void issue_transposed(float (&s)[SCORES], const u32 (&held)[COUNT][4], u32 tile, u32 block) {
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
        const u64 b = inner_descriptor(block + i / 4 * ROW_PANEL) + i % 4 * INNER_STEP;
        if (i < COUNT)
            product<0>(s, held[i][0], held[i][1], held[i][2], held[i][3], b, i > 0);
        else
            product<0, 0>(s, inner_descriptor(tile + i / 4 * KEY_PANEL) + i % 4 * INNER_STEP, b, true);
    }
    products_commit();
}

// A warp writes its 16 keys' gradients, 64 columns at a time.
template <int DIM>
INLINE void write_keys(bf16* out, u32 staging, const float (&x)[DIM / 2], float factor, int4 tile, int kv_heads,
                       u32 warp, u32 lane) {
    const u32 staged_row = 16 * warp + ((lane >> 3) & 1) * 8 + (lane & 7);
#pragma unroll
    for (int panel = 0; panel < DIM / 64; panel++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float scaled[8];
#pragma unroll
            for (int e = 0; e < 8; e++) scaled[e] = x[32 * panel + 8 * j + e] * factor;
            u32 pairs[4];
            round_pairs(pairs, scaled);
            store_matrices(staging + swizzled(staged_row, 2 * j + (lane >> 4)), pairs[0], pairs[1], pairs[2], pairs[3]);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = 16 * warp + 4 * i + lane / 8, chunk = lane % 8;
            const uint4 numbers = load_shared(staging + swizzled(row, chunk));
            if (row < tile.y)
                reinterpret_cast<uint4*>(out + (static_cast<long>(tile.x + row) * kv_heads + tile.w) * DIM +
                                         panel * 64)[chunk] = numbers;
        }
        __syncwarp();
    }
}

// Probabilities and dV.
INLINE void compute_dv(u32 base, const Barriers& barriers, bf16* dv, int kv_heads, float scale_log2, int window) {
    const u32 thread = threadIdx.x & 127, warp = thread >> 5, lane = threadIdx.x & 31;
    const int row = 16 * warp + lane / 4;
    const u32 columns = 2 * (lane & 3) * 4;  // bytes to this lane's first column
    Ring<STAGES> ring;
    Ring<2> p_ring;
    u32 tile_full = 0;
    while (true) {
        wait(barriers.keys_full(), tile_full);
        tile_full ^= 1;
        const int4 tile = load_said(base + AT_TILE);
        if (tile.z == 0) return;
        float s[SCORES], sums[DV / 2];
        u32 keys[HELD_KEYS][4], p[SCORES / 2];
        load_rows(keys, base + AT_KEYS, warp, lane);
        if (HELD_KEYS == D / 16) arrive(barriers.keys_empty());
#pragma unroll
        for (int i = 0; i < DV / 2; i++) sums[i] = 0;

        auto begin_scores = [&] {
            wait(barriers.queries_full(ring.stage), ring.full);
            hold(s);
            products_begin();
            issue_transposed<D>(s, keys, base + AT_KEYS, base + AT_QUERIES + ring.stage * ROW_TILE);
        };
        auto finish_scores = [&] {
            hold(s);
            const int masked = load_said(base + AT_BLOCKS + 32 * ring.stage + 16).x;
            const u32 lse = base + AT_LSE + ring.stage * ROWS * 4 + columns;
#pragma unroll
            for (int i = 0; i < SCORES; i += 4) {
                const float2 less = load_pair(lse + i * 8);
                s[i] = exp2_fast(s[i] * scale_log2 - less.x);
                s[i + 1] = exp2_fast(s[i + 1] * scale_log2 - less.y);
                s[i + 2] = exp2_fast(s[i + 2] * scale_log2 - less.x);
                s[i + 3] = exp2_fast(s[i + 3] * scale_log2 - less.y);
            }
            if (masked) hide(s, load_said(base + AT_BLOCKS + 32 * ring.stage), row, window, lane);
            arrive(barriers.queries_empty(ring.stage));
        };
        auto hand_over = [&] {
            round_pairs(p, s);
            wait(barriers.p_empty(p_ring.stage), p_ring.empty());
#pragma unroll
            for (int i = 0; i < SCORES / 8; i++)
                store_shared(base + AT_P + p_ring.stage * P_TILE + (i * 128 + thread) * 16, p[4 * i], p[4 * i + 1],
                             p[4 * i + 2], p[4 * i + 3]);
            arrive(barriers.p_full(p_ring.stage));
            p_ring.advance();
        };
        auto begin_dv = [&](const Ring<STAGES>& at) {
            wait(barriers.douts_full(at.stage), at.full);
            hold(p);
            hold(sums);
            products_begin();
            issue_sums<ROWS>(sums, p, base + AT_DOUTS + at.stage * DOUT_TILE, ROW_PANEL);
        };
        auto finish_dv = [&](u32 stage) {
            products_wait<0>();
            hold(sums);
            hold(p);
            arrive(barriers.douts_empty(stage));
        };

        begin_scores();
        products_wait<0>();
        finish_scores();
        hand_over();
        for (int left = tile.z - 1; left > 0; left--) {
            const Ring<STAGES> at = ring;
            ring.advance();
            begin_scores();
            begin_dv(at);
            products_wait<1>();
            finish_scores();
            finish_dv(at.stage);
            hand_over();
        }
        if (HELD_KEYS < D / 16) arrive(barriers.keys_empty());
        begin_dv(ring);
        finish_dv(ring.stage);
        ring.advance();
        write_keys<DV>(dv, base + AT_STAGING, sums, 1.f, tile, kv_heads, warp, lane);
    }
}

// dS from the other's probabilities, and dK.
INLINE void compute_dk(u32 base, const Barriers& barriers, bf16* dk, int kv_heads, float scale) {
    const u32 thread = threadIdx.x & 127, warp = thread >> 5, lane = threadIdx.x & 31;
    const u32 columns = 2 * (lane & 3) * 4;
    Ring<STAGES> ring;
    Ring<2> p_ring;
    u32 tile_full = 0;
    while (true) {
        wait(barriers.keys_full(), tile_full);
        const int4 tile = load_said(base + AT_TILE);
        arrive(barriers.keys_empty());
        if (tile.z == 0) return;
        wait(barriers.values_full(), tile_full);
        tile_full ^= 1;
        float dp[SCORES], sums[D / 2];
        u32 values[HELD_VALUES][4], ds[SCORES / 2];
        load_rows(values, base + AT_VALUES, warp, lane);
        if (HELD_VALUES == DV / 16) arrive(barriers.values_empty());
#pragma unroll
        for (int i = 0; i < D / 2; i++) sums[i] = 0;

        auto begin_dp = [&] {
            wait(barriers.douts_full(ring.stage), ring.full);
            hold(dp);
            products_begin();
            issue_transposed<DV>(dp, values, base + AT_VALUES, base + AT_DOUTS + ring.stage * DOUT_TILE);
        };
        auto make_ds = [&] {
            const u32 delta = base + AT_DELTA + ring.stage * ROWS * 4 + columns;
            wait(barriers.p_full(p_ring.stage), p_ring.full);
#pragma unroll
            for (int i = 0; i < SCORES / 8; i++) {
                const uint4 p = load_shared(base + AT_P + p_ring.stage * P_TILE + (i * 128 + thread) * 16);
                const u32 pairs[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
                for (int j = 0; j < 4; j++) {  // numbers 2j and 2j + 1 of eight; two pairs stand in the same columns
                    const float2 less = load_pair(delta + (8 * i + j / 2 * 4) * 8);
                    const int at = 8 * i + 2 * j;
                    dp[at] = __uint_as_float(pairs[j] << 16) * (dp[at] - less.x);
                    dp[at + 1] = __uint_as_float(pairs[j] & 0xFFFF0000u) * (dp[at + 1] - less.y);
                }
            }
            arrive(barriers.p_empty(p_ring.stage));
            p_ring.advance();
            arrive(barriers.douts_empty(ring.stage));
            round_pairs(ds, dp);
        };
        auto begin_dk = [&] {
            wait(barriers.queries_full(ring.stage), ring.full);
            hold(ds);
            hold(sums);
            products_begin();
            issue_sums<ROWS>(sums, ds, base + AT_QUERIES + ring.stage * ROW_TILE, ROW_PANEL);
        };
        auto finish_dk = [&](u32 stage) {
            hold(sums);
            hold(ds);
            arrive(barriers.queries_empty(stage));
        };

        begin_dp();
        products_wait<0>();
        hold(dp);
        for (int left = tile.z - 1; left > 0; left--) {
            make_ds();
            begin_dk();
            const u32 stage = ring.stage;
            ring.advance();
            begin_dp();
            products_wait<1>();
            finish_dk(stage);
            products_wait<0>();
            hold(dp);
        }
        make_ds();
        if (HELD_VALUES < DV / 16) arrive(barriers.values_empty());
        begin_dk();
        products_wait<0>();
        finish_dk(ring.stage);
        ring.advance();
        write_keys<D>(dk, base + AT_STAGING + KEY_PANEL, sums, scale, tile, kv_heads, warp, lane);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_backward(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap query_rows,
                       const __grid_constant__ TensorMap douts, const __grid_constant__ TensorMap dout_rows,
                       const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap key_rows,
                       const __grid_constant__ TensorMap values, const __grid_constant__ TensorMap value_rows,
                       const float* lse, const float* delta, float* dq_sum, bf16* dk, bf16* dv,
                       const int* table, u32* counter, int items_at, int rows_at, int kv_heads, float scale,
                       int window) {
    extern __shared__ unsigned char unaligned[];
    unsigned char* shared = unaligned + (-shared_address(unaligned) & 1023);
    const u32 base = shared_address(shared);
    const Barriers barriers = {base + AT_BARRIERS};
    for (u32 i = threadIdx.x; i < AT_TILE / 16; i += blockDim.x)
        reinterpret_cast<uint4*>(shared)[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) {
        barrier_init(barriers.keys_full(), 1);
        barrier_init(barriers.keys_empty(), READERS);
        barrier_init(barriers.values_full(), 1);
        barrier_init(barriers.values_empty(), READERS / 2);
        for (u32 i = 0; i < 2; i++) {
            barrier_init(barriers.p_full(i), READERS / 2);
            barrier_init(barriers.p_empty(i), READERS / 2);
        }
        for (u32 i = 0; i < STAGES; i++) {
            barrier_init(barriers.queries_full(i), 33);  // the block and 32 lanes' numbers
            barrier_init(barriers.queries_empty(i), READERS);
            barrier_init(barriers.douts_full(i), 33);
            barrier_init(barriers.douts_empty(i), READERS);
        }
    }
    fence_async_proxy();
    __syncthreads();
    const int warpgroup = threadIdx.x >> 7;
    if (warpgroup == 0) {
        give_registers<24>();
        if (threadIdx.x < 32) {
            const Maps maps = {&queries, &query_rows, &douts, &dout_rows, &keys, &key_rows, &values, &value_rows};
            copy_ahead(shared, base, barriers, maps, lse, delta, table, counter, items_at, rows_at, kv_heads, window,
                       threadIdx.x);
        }
    } else {
        take_registers<240>();
        if (warpgroup == 1)
            compute_dv(base, barriers, dv, kv_heads, scale * LOG2E, window);
        else
            compute_dk(base, barriers, dk, kv_heads, scale);
    }
}
