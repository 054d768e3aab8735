// Backward: each tile of keys against all blocks of queries that see it, over all tasks.
//
// dK and dV of a tile stay in registers until every task has added to them, so shared keys cost nothing extra. dQ is
// summed in float32 in global memory, in the register order of accumulators; `write_dq` converts it to the final
// layout. As in forward one warp prefetches and two warpgroups compute, 64 keys each, on transposed scores: rows are
// keys, columns are queries, and the rounded probabilities are left operands directly from registers. Only dS goes
// through shared memory, since each warpgroup computes half of dQ's columns from the keys of both. It does so one block
// later, when the other warpgroup has written its half, so that the two need not run in lockstep. With dim 64 there are
// three warpgroups, and they take turns to compute all of a block's dQ.
//
// Atomic adds hold their source registers for long: the next product must not write to these registers, and adds must
// not be issued shortly before a fence, which waits for them, or before loads, which queue behind them. So dQ is
// computed with the next block's dV, in the registers of that block's dP. It is added during the scores of the block
// after that, when the inputs of its exponentials have been loaded; dP's products then overlap the exponentials.
//
// Without WITH_DQ dS stays in registers too. With DS_OUT dS is stored in memory and `kept_dq.cu` computes dQ from it;
// otherwise `backward_dq.cu` computes dQ.

INLINE void compute(u32 base, const Barriers& barriers, float* dq_sum, bf16* dk, bf16* dv, float4* part_sums, int half,
                    int kv_heads, float scale, const Scaling& scaling, int window) {
    const u32 thread = threadIdx.x & 127, warp = thread >> 5, lane = threadIdx.x & 31;
    const int row = half * 64 + 16 * warp + lane / 4;
    const u32 columns = 2 * (lane & 3) * 4;  // bytes to this lane's first column
    const u32 my_values = base + AT_VALUES + half * 64 * 128, my_ds = base + AT_DS + half * 64 * 128;
    unsigned char* kept = reinterpret_cast<unsigned char*>(dq_sum);  // dS, instead of sums
    const u32 ds_place = my_ds + swizzled(16 * warp + ((lane >> 3) & 1) * 8 + (lane & 7), lane >> 4);
    Ring<2> slots, ds_ring;
    Ring<STAGES> ring;
    u32 values_full = 0;
    while (true) {
        wait(barriers.keys_full(slots.stage), slots.full);
        int left = load_said(base + AT_TILES + 16 * slots.stage).z;
        if (left == 0) return;
        const u32 keys = base + AT_KEYS + slots.stage * KEY_TILE, my_keys = keys + half * 64 * 128;
        float s[ROWS / 2], dp[ROWS / 2], dk_sum[D / 2], dv_sum[D / 2];
        static_assert(SUMS == ROWS / 2, "dQ stands where dP or scores were");
        float(&dq)[SUMS] = dp, (&last_dq)[SUMS] = s;
        u32 ds[ROWS / 4], p[ROWS / 4];
        int place;  // offset of this block in dQ's sums
        const bool never = WITH_DQ && left < 0;
        const u32 zero = never ? ~0u : 0;
#pragma unroll
        for (int i = 0; i < D / 2; i++) dk_sum[i] = dv_sum[i] = 0;
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++)
            if (WITH_DQ) dp[i] = 0;

        // Issue the products for the scores of the block at the ring's position.
        auto begin_scores = [&] {
            wait(barriers.queries_full(ring.stage), ring.full);
            products_begin();
            issue_transposed(s, my_keys, base + AT_QUERIES + ring.stage * 2 * ROW_TILE);
        };
        auto load_lse = [&](int i) { return load_pair(base + AT_LSE + ring.stage * ROWS * 4 + columns + i * 8); };
        auto load_block = [&] {  // returns whether the block is masked
            const int4 said = load_said(base + AT_BLOCKS + 32 * ring.stage + 16);
            place = said.y;
            return said.x;
        };
        auto finish_scores = [&](int masked, const auto& lse) {
            const auto hide_unseen = [&](float hidden) {
                if (masked) hide(s, load_said(base + AT_BLOCKS + 32 * ring.stage), row, window, lane, hidden);
            };
            if constexpr (SOFTCAP) {  // p is free: its product has ended
                cap_roughly(s, scaling.tangent);
                hide_unseen(HIDDEN_TANGENT);
                exponentiate_capped(s, p, lse, scaling.log2);
            } else {
                exponentiate(s, lse, scaling.log2);
                hide_unseen(0);
            }
        };
        auto begin_dp = [&] {
            wait(barriers.douts_full(ring.stage), ring.full);
            hold(dp);
            products_begin();
            issue_transposed(dp, my_values, base + AT_QUERIES + ring.stage * 2 * ROW_TILE + ROW_TILE, never);
        };
        auto begin_dk = [&](u32 stage, u32 ds_stage) {
            const u32 queries = base + AT_QUERIES + stage * 2 * ROW_TILE;
            hold(dk_sum);
            if (!WITH_DQ) hold(ds);
            products_begin();
            if (!WITH_DQ)
                issue_dv(dk_sum, ds, queries);
            else
                issue_dk(dk_sum, my_ds + ds_stage * DS_TILE, queries);
            products_commit();
        };
        auto finish_dk = [&](u32 stage) {
            hold(dk_sum);
            if (!WITH_DQ) hold(ds);
            arrive(barriers.queries_empty(stage));
        };
        auto begin_dq = [&](float(&sums)[SUMS], const Ring<2>& at, bool add) {
            wait(barriers.ds_full(at.stage), at.full);
            products_begin();
            issue_dq(sums, base + AT_DS + at.stage * DS_TILE, keys, half, add);
            products_commit();
        };
        auto finish_dq = [&](float(&sums)[SUMS], u32 ds_stage) {
            hold(sums);
            arrive(barriers.ds_empty(ds_stage));
        };
        auto stage_ds = [&] {
            if (WITH_DQ) wait(barriers.ds_empty(ds_ring.stage), ds_ring.empty());
            if (DS_OUT && lane == 0) bulk_wait<1>();  // all stores but the previous block's have been read
            __syncwarp();
#pragma unroll
            for (int j = 0; j < ROWS / 16; j++)  // chunk 2j + lane / 16 of the row, swizzled
                store_matrices((ds_place + ds_ring.stage * DS_TILE) ^ (j * 32), ds[4 * j], ds[4 * j + 1], ds[4 * j + 2],
                               ds[4 * j + 3]);
            fence_async_proxy();
            __syncwarp();
        };
        auto send_ds = [&] {  // a warp's keys are 2 contiguous KB
            const u32 at = ds_ring.stage * DS_TILE + half * 64 * 128 + warp * 2048;
            if (DS_OUT && lane == 0)
                bulk_store(kept + static_cast<long>(place) * DS_TILE + half * 64 * 128 + warp * 2048, base + AT_DS + at,
                           2048);
        };
        // Compute dV and dS from the probabilities in s; only dP's product is in flight before, and none after.
        auto middle = [&](bool is_last, bool with_dq, const Ring<2>& due) {
            const u32 douts = base + AT_QUERIES + ring.stage * 2 * ROW_TILE + ROW_TILE;
            if (!WITH_DQ) wait(barriers.douts_full(ring.stage), ring.full);
            if (!SOFTCAP) round_pairs(p, s);
            hold(p);
            hold(dv_sum);
            products_begin();
            if (!WITH_DQ) issue_transposed(dp, my_values, douts);
            issue_dv(dv_sum, p, douts);
            products_commit();
            products_wait<1>();
            hold(dp);
            if (is_last) arrive(barriers.values_empty());
            differentiate(s, dp, base + AT_DELTA + ring.stage * ROWS * 4 + columns);
            round_pairs(ds, s);
            hold(ds);
            if (with_dq) begin_dq(dq, due, never);
            if (WITH_DQ || DS_OUT) stage_ds();
            if (WITH_DQ) {
                sync_named(4 + half, 128);
                arrive(barriers.ds_full(ds_ring.stage));
            }
            products_wait<0>();
            hold(dv_sum);
            hold(p);
            arrive(barriers.douts_empty(ring.stage));
            if (with_dq) finish_dq(dq, due.stage);
        };

        begin_scores();
        products_wait<0>();
        hold(s);
        if constexpr (WITH_DQ) {
            wait(barriers.values_full(), values_full);
            begin_dp();
            finish_scores(load_block(), load_lse);
        } else {
            finish_scores(load_block(), load_lse);
            wait(barriers.values_full(), values_full);
        }
        values_full ^= 1;
        Ring<2> due = ds_ring;  // stage of the previous block's dS, whose dQ is to be computed or added
        int due_place = 0;
        auto add_due = [&] { add_dq(dq_sum, dq, due_place, half, thread); };
        bool is_due = false;  // registers hold a dQ that is to be added
        int turn = 0;         // the warpgroup that computes this block's dQ
        auto next_block = [&](bool with_dq) {
            const u32 stage = ring.stage;
            const Ring<2> last = ds_ring;
            const int last_place = place;
            ring.advance();
            begin_scores();
            send_ds();
            begin_dk(stage, last.stage);
            if constexpr (WITH_DQ) {
                float2 lse[ROWS / 8];
                u32 bits = 0;
#pragma unroll
                for (int i = 0; i < ROWS / 8; i++) {
                    lse[i] = load_lse(4 * i);
                    bits |= __float_as_uint(lse[i].x) | __float_as_uint(lse[i].y);
                }
                const int masked = load_block();
                if (!(IN_TURN && with_dq) && (is_due || (bits & zero)))  // by zero bits, or loads would be moved behind
                    add_due();
                products_wait<1>();
                hold(s);
                begin_dp();
                finish_scores(masked, [&](int i) { return lse[i / 4]; });
                products_wait<1>();
            } else {
                products_wait<1>();
                hold(s);
                finish_scores(load_block(), load_lse);
                products_wait<0>();
            }
            finish_dk(stage);
            due = last;
            due_place = last_place;
            ds_ring.advance();
            middle(--left == 0, with_dq, due);
            is_due = with_dq;
        };
        middle(--left == 0, false, due);
        while (left > 0) {
            if (!IN_TURN || turn == half)
                next_block(WITH_DQ);
            else
                next_block(false);
            turn = turn == BLOCKS - 1 ? 0 : turn + 1;
        }
        send_ds();
        begin_dk(ring.stage, ds_ring.stage);
        if (WITH_DQ && !IN_TURN) begin_dq(last_dq, ds_ring, false);
        if (WITH_DQ && is_due) add_due();
        products_wait<0>();
        finish_dk(ring.stage);
        if (WITH_DQ && (!IN_TURN || turn == half)) {
            if (IN_TURN) {
                begin_dq(last_dq, ds_ring, false);
                products_wait<0>();
            }
            finish_dq(last_dq, ds_ring.stage);
            add_dq(dq_sum, last_dq, place, half, thread);
        }
        const int4 tile = load_said(base + AT_TILES + 16 * slots.stage);
        arrive(barriers.keys_empty(slots.stage));
        ring.advance();
        ds_ring.advance();
        slots.advance();
        if (DS_OUT && lane == 0) bulk_wait<0>();
        __syncwarp();
        if (WITH_DQ) {  // all warps have read both stages of dS
            Ring<2> free = ds_ring;
            wait(barriers.ds_empty(free.stage), free.empty());
            free.advance();
            wait(barriers.ds_empty(free.stage), free.empty());
        }
        if (SPLIT && is_part(tile)) {
            float4* sums = part_sums + part_block<KEY_BLOCKS>(tile, half, kv_heads) * KEY_SUMS;
            write_part(sums, dk_sum, 0);
            write_part(sums + DV_SUMS_AT, dv_sum, 0);
        } else {
            write_keys(dv, my_ds, dv_sum, 1.f, tile, half, kv_heads, warp, lane);
            __syncwarp();
            write_keys(dk, my_ds, dk_sum, scale, tile, half, kv_heads, warp, lane);
            __syncwarp();
        }
    }
}

extern "C" __global__ void __launch_bounds__(128 * (BLOCKS + 1), 1)
    attention_backward(BACKWARD_PARAMETERS(float* dq_sum)) {
    unsigned char* shared = open_shared(AT_TILES);
    const u32 base = shared_address(shared);
    const Barriers barriers = {base + AT_BARRIERS};
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < 2; i++) {
            barrier_init(barriers.keys_full(i), 1);
            barrier_init(barriers.keys_empty(i), READERS);
            barrier_init(barriers.ds_full(i), READERS);
            barrier_init(barriers.ds_empty(i), IN_TURN ? 128 : READERS);
        }
        for (u32 i = 0; i < STAGES; i++) {
            barrier_init(barriers.queries_full(i), 33);  // the block, and 32 lanes' lse
            barrier_init(barriers.queries_empty(i), READERS);
            barrier_init(barriers.douts_full(i), 33);
            barrier_init(barriers.douts_empty(i), READERS);
        }
        barrier_init(barriers.values_full(), 1);
        barrier_init(barriers.values_empty(), READERS);
    }
    barriers_are_set();
    const int warpgroup = __shfl_sync(~0u, threadIdx.x >> 7, 0);  // so the compiler knows it is uniform in a warp
    if (warpgroup == 0) {
        give_registers<BLOCKS == 3 ? 32 : WITH_DQ || DS_OUT ? 24 : 40>();
        if (threadIdx.x < 32) {
            const Maps maps = {&queries, &query_rows, &douts, &dout_rows, &keys, &key_rows, &values, &value_rows};
            copy_ahead(shared, base, barriers, maps, lse, delta, table, counter, items_at, tasks_at, pairs,
                       num_places, kv_heads, {first_head, num_heads}, window, threadIdx.x);
        }
    } else {
        take_registers<BLOCKS == 3 ? 160 : WITH_DQ || DS_OUT ? 240 : 232>();
        compute(base, barriers, dq_sum, dk, dv, part_sums, warpgroup - 1, kv_heads, scale, {scale, softcap}, window);
    }
}
