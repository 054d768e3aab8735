// dK and dV of wide heads: tiles of 64 keys, one warpgroup for each gradient.
//
// With 256 columns the sums of 64 keys take 128 registers a thread, so a warpgroup can hold those of one gradient. The
// first makes probabilities from transposed scores and dV from them; the second makes dP, takes the probabilities over
// shared memory, where each thread finds those of the same places, and makes dS and dK. So scores and dP have 64
// columns each, and the left operands of dV and dK stay in registers: halves of one product in both warpgroups would
// read shared memory half as often again as the tensor cores can wait for. For the same reason keys and values stay in
// registers as far as there are any. dQ has a kernel of its own (backward_dq.cu): with so few keys in a tile, adding it
// up in memory takes longer than computing scores and dP twice.

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
