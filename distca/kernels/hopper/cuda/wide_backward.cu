// dK and dV of wide heads: tiles of 64 keys, one warpgroup for each gradient.
//
// With 256 columns the sums of 64 keys take 128 registers per thread, so a warpgroup can hold only one gradient. The
// first warpgroup computes probabilities from transposed scores, and dV from them. The second computes dP, reads the
// probabilities of its elements from shared memory, and computes dS and dK. So scores and dP have 64 columns each, and
// the left operands of dV and dK stay in registers. Splitting each product over both warpgroups instead would need half
// as much again of the bandwidth of shared memory as the tensor cores allow. For the same reason as many keys and
// values as possible stay in registers. If shared memory is short, probabilities overwrite keys that are in registers,
// which leaves room for a third block of queries: a block is free only after dK, so with two the next would arrive
// late. dQ has a separate kernel: with so few keys per tile, atomic adds take longer than computing scores and dP twice
// (backward_dq.cu). If memory has room for dS (DS_OUT), the second warpgroup stores it, and dQ takes one product
// (kept_dq.cu).

// Probabilities and dV.
INLINE void compute_dv(u32 base, const Barriers& barriers, bf16* dv, float4* part_sums, int kv_heads,
                       const Scaling& scaling, int window) {
    const u32 thread = threadIdx.x & 127, warp = thread >> 5, lane = threadIdx.x & 31;
    const int row = 16 * warp + lane / 4;
    const u32 columns = 2 * (lane & 3) * 4;  // bytes to this lane's first column
    Ring<QUERY_STAGES> query_ring;
    Ring<DOUT_STAGES> dout_ring;
    Ring<2> p_ring;
    u32 tile_full = 0;
    while (true) {
        wait(barriers.keys_full(), tile_full);
        tile_full ^= 1;
        const int4 tile = load_said(base + AT_TILE);
        if (tile.z == 0) return;
        float s[SCORES], sums[DV / 2];
        u32 keys[HELD_KEYS][4], p[SCORES / 2], next_p[SCORES / 2];
        load_rows(keys, base + AT_KEYS, KEY_PANEL, warp, lane);
        if (P_OVER_KEYS)
            sync_named(1, 128);  // all warps have theirs
        else
            arrive(barriers.keys_empty());
        clear(sums);

        auto begin_scores = [&] {
            wait(barriers.queries_full(query_ring.stage), query_ring.full);
            hold(s);
            products_begin();
            issue_rows<D, HELD_KEYS>(s, base + AT_KEYS, KEY_PANEL, base + AT_QUERIES + query_ring.stage * ROW_TILE,
                                     ROW_PANEL, keys);
        };
        auto hand_over = [&](const u32(&x)[SCORES / 2]) {
            wait(barriers.p_empty(p_ring.stage), p_ring.empty());
#pragma unroll
            for (int i = 0; i < SCORES / 8; i++)
                store_shared(base + AT_P + p_ring.stage * P_TILE + (i * 128 + thread) * 16, x[4 * i], x[4 * i + 1],
                             x[4 * i + 2], x[4 * i + 3]);
            arrive(barriers.p_full(p_ring.stage));
            p_ring.advance();
        };
        auto finish_scores = [&] {
            hold(s);
            const int masked = load_said(base + AT_BLOCKS + 32 * query_ring.stage + 16).x;
            const u32 lse = base + AT_LSE + query_ring.stage * ROWS * 4 + columns;
            const auto load_lse = [=](int i) { return load_pair(lse + i * 8); };
            const auto hide_unseen = [&](float hidden) {
                if (masked) hide(s, load_said(base + AT_BLOCKS + 32 * query_ring.stage), row, window, lane, hidden);
            };
            if constexpr (SOFTCAP) {
                cap_roughly(s, scaling.tangent);
                hide_unseen(HIDDEN_TANGENT);
                exponentiate_capped(s, next_p, load_lse, scaling.log2);
                u32 slopes[SCORES / 2];
                round_pairs(slopes, s);
                hand_over(slopes);
            } else {
                exponentiate(s, load_lse, scaling.log2);
                hide_unseen(0);
            }
            arrive(barriers.queries_empty(query_ring.stage));
        };
        auto take_probabilities = [&] {  // with a softcap they have been handed over times the slope
            if (SOFTCAP) {
#pragma unroll
                for (int i = 0; i < SCORES / 2; i++)  // products own p until they have ended
                    asm volatile("mov.b32 %0, %1;" : "=r"(p[i]) : "r"(next_p[i]));
            } else {
                round_pairs(p, s);
                hand_over(p);
            }
        };
        auto begin_dv = [&] {
            wait(barriers.douts_full(dout_ring.stage), dout_ring.full);
            hold(p);
            hold(sums);
            products_begin();
            issue_sums<ROWS>(sums, p, base + AT_DOUTS + dout_ring.stage * DOUT_TILE, ROW_PANEL);
        };
        auto finish_dv = [&] {
            products_wait<0>();
            hold(sums);
            hold(p);
            arrive(barriers.douts_empty(dout_ring.stage));
            dout_ring.advance();
        };

        begin_scores();
        products_wait<0>();
        finish_scores();
        take_probabilities();
        for (int left = tile.z - 1; left > 0; left--) {
            query_ring.advance();
            begin_scores();
            begin_dv();
            products_wait<1>();
            finish_scores();
            finish_dv();
            take_probabilities();
        }
        query_ring.advance();
        if (P_OVER_KEYS) {
            fence_async_proxy();
            arrive(barriers.keys_empty());
        }
        begin_dv();
        finish_dv();
        if (SPLIT && is_part(tile))
            write_part(part_sums + part_block<KEY_BLOCKS>(tile, 0, kv_heads) * KEY_SUMS + DV_SUMS_AT, sums, 0);
        else
            write_rows<DV>(dv, sums, 1.f, 1.f, KeyRows(tile, 0, kv_heads), warp, lane);
    }
}

// dS from the first warpgroup's probabilities, and dK.
INLINE void compute_dk(u32 base, const Barriers& barriers, bf16* dk, float4* part_sums, unsigned char* ds_out,
                       int num_places, Heads heads, int kv_heads, float scale) {
    const u32 thread = threadIdx.x & 127, warp = thread >> 5, lane = threadIdx.x & 31;
    const u32 columns = 2 * (lane & 3) * 4;
    const u32 ds_at = base + AT_DS + swizzled(16 * warp + ((lane >> 3) & 1) * 8 + (lane & 7), lane >> 4);
    Ring<QUERY_STAGES> query_ring;
    Ring<DOUT_STAGES> dout_ring;
    Ring<2> p_ring;
    u32 tile_full = 0;
    while (true) {
        wait(barriers.keys_full(), tile_full);
        const int4 tile = load_said(base + AT_TILE);
        unsigned char* head_ds =
            ds_out + static_cast<long>(tile.w - heads.first) * num_places * DS_TILE + warp * DS_TILE / 4;
        if (!P_OVER_KEYS) arrive(barriers.keys_empty());
        if (tile.z == 0) return;
        wait(barriers.values_full(), tile_full);
        tile_full ^= 1;
        float dp[SCORES], sums[D / 2];
        u32 values[HELD_VALUES][4], ds[SCORES / 2], kept[SCORES / 2];
        load_rows(values, base + AT_VALUES, KEY_PANEL, warp, lane);
        if (DS_OUT)
            sync_named(2, 128);  // all warps have theirs
        else if (HELD_VALUES == DV / 16)
            arrive(barriers.values_empty());
        clear(sums);

        auto begin_dp = [&] {
            wait(barriers.douts_full(dout_ring.stage), dout_ring.full);
            hold(dp);
            products_begin();
            issue_rows<DV, HELD_VALUES>(dp, base + AT_VALUES, KEY_PANEL, base + AT_DOUTS + dout_ring.stage * DOUT_TILE,
                                        ROW_PANEL, values);
        };
        auto make_ds = [&] {
            const u32 delta = base + AT_DELTA + dout_ring.stage * ROWS * 4 + columns;
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
            arrive(barriers.douts_empty(dout_ring.stage));
            dout_ring.advance();
            round_pairs(ds, dp);
#pragma unroll
            for (int i = 0; DS_OUT && i < SCORES / 2; i++)  // products own the others until they have ended
                asm volatile("mov.b32 %0, %1;" : "=r"(kept[i]) : "r"(ds[i]));
        };
        auto keep_ds = [&] {  // overlaps the products that read it; a warp's keys are 2 contiguous KB
            if (!DS_OUT) return;
            const int place = load_said(base + AT_BLOCKS + 32 * query_ring.stage + 16).y;
            if (lane == 0) bulk_wait<0>();  // for the previous block
            __syncwarp();
#pragma unroll
            for (int j = 0; j < ROWS / 16; j++)  // chunk 2j + lane / 16 of the row, swizzled
                store_matrices(ds_at ^ (j * 32), kept[4 * j], kept[4 * j + 1], kept[4 * j + 2], kept[4 * j + 3]);
            fence_async_proxy();
            __syncwarp();
            if (lane == 0)
                bulk_store(head_ds + static_cast<long>(place) * DS_TILE, base + AT_DS + warp * DS_TILE / 4,
                           DS_TILE / 4);
        };
        auto begin_dk = [&] {
            wait(barriers.queries_full(query_ring.stage), query_ring.full);
            hold(ds);
            hold(sums);
            products_begin();
            issue_sums<ROWS>(sums, ds, base + AT_QUERIES + query_ring.stage * ROW_TILE, ROW_PANEL);
        };
        auto finish_dk = [&] {
            hold(sums);
            hold(ds);
            arrive(barriers.queries_empty(query_ring.stage));
            query_ring.advance();
        };

        begin_dp();
        products_wait<0>();
        hold(dp);
        for (int left = tile.z - 1; left > 0; left--) {
            make_ds();
            begin_dk();
            begin_dp();
            keep_ds();
            products_wait<1>();
            finish_dk();
            products_wait<0>();
            hold(dp);
        }
        make_ds();
        if (P_OVER_KEYS) {
            fence_async_proxy();
            arrive(barriers.keys_empty());
        }
        begin_dk();
        keep_ds();
        if (DS_OUT && lane == 0) bulk_wait<0>();
        if (DS_OUT || HELD_VALUES < DV / 16) arrive(barriers.values_empty());
        products_wait<0>();
        finish_dk();
        if (SPLIT && is_part(tile))
            write_part(part_sums + part_block<KEY_BLOCKS>(tile, 0, kv_heads) * KEY_SUMS, sums, 0);
        else
            write_rows<D>(dk, sums, scale, scale, KeyRows(tile, 0, kv_heads), warp, lane);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_backward(BACKWARD_PARAMETERS(unsigned char* ds)) {
    unsigned char* shared = open_shared(AT_TILE);
    const u32 base = shared_address(shared);
    const Barriers barriers = {base + AT_BARRIERS};
    if (threadIdx.x == 0) {
        barrier_init(barriers.keys_full(), 1);
        barrier_init(barriers.keys_empty(), READERS);
        barrier_init(barriers.values_full(), 1);
        barrier_init(barriers.values_empty(), READERS / 2);
        for (u32 i = 0; i < 2; i++) {
            barrier_init(barriers.p_full(i), READERS / 2);
            barrier_init(barriers.p_empty(i), READERS / 2);
        }
        for (u32 i = 0; i < QUERY_STAGES; i++) {
            barrier_init(barriers.queries_full(i), 33);  // the block, and 32 lanes' lse
            barrier_init(barriers.queries_empty(i), READERS);
        }
        for (u32 i = 0; i < DOUT_STAGES; i++) {
            barrier_init(barriers.douts_full(i), 33);
            barrier_init(barriers.douts_empty(i), READERS);
        }
    }
    barriers_are_set();
    const Heads heads = {first_head, num_heads};
    const int warpgroup = threadIdx.x >> 7;
    if (warpgroup == 0) {
        give_registers<24>();
        if (threadIdx.x < 32) {
            const Maps maps = {&queries, &query_rows, &douts, &dout_rows, &keys, &key_rows, &values, &value_rows};
            copy_ahead(shared, base, barriers, maps, lse, delta, table, counter, items_at, tasks_at, pairs, kv_heads,
                       heads, window, threadIdx.x);
        }
    } else {
        take_registers<240>();
        if (warpgroup == 1)
            compute_dv(base, barriers, dv, part_sums, kv_heads, {scale, softcap}, window);
        else
            compute_dk(base, barriers, dk, part_sums, ds, num_places, heads, kv_heads, scale);
    }
}
