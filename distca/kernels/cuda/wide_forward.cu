// Forward of wide heads: as forward.cu, with tiles for what dims beyond 128 leave of registers and shared memory.
//
// Outs of 256 columns take 128 registers a thread, so a tile has 80 keys then, and queries stay in shared memory, in one
// slot: a tile's first keys are copied before its queries, which wait for the tile before to be written.

constexpr int STAGES = 2;
constexpr int SCORES = KEYS / 2;                                    // of a thread
constexpr int AT_QUERIES = 0;                                       // two blocks; outs on their way
constexpr int AT_KEYS = AT_QUERIES + 2 * ROW_TILE;
constexpr int AT_VALUES = AT_KEYS + STAGES * KEY_TILE;
constexpr int AT_TILES = AT_VALUES + STAGES * VALUE_TILE;           // int4 of a half: q_first, q_count, steps, head
constexpr int AT_STEPS = AT_TILES + 2 * 16;                         // int4 of a stage: diagonal, keys, masked
constexpr int AT_BARRIERS = AT_STEPS + STAGES * 16;
static_assert(AT_BARRIERS + 12 * 8 + 1023 <= 227 * 1024, "more shared memory than a multiprocessor has");

struct Barriers {
    u32 base;
    INLINE u32 queries_full(u32 half) const { return base + 8 * half; }
    INLINE u32 queries_empty(u32 half) const { return base + 16 + 8 * half; }
    INLINE u32 keys_full(u32 stage) const { return base + 32 + 8 * stage; }
    INLINE u32 keys_empty(u32 stage) const { return base + 48 + 8 * stage; }
    INLINE u32 values_full(u32 stage) const { return base + 64 + 8 * stage; }
    INLINE u32 values_empty(u32 stage) const { return base + 80 + 8 * stage; }
};

// Both blocks of a tile, whole: what they have beyond its queries comes to rows that nobody writes.
INLINE void copy_tile(unsigned char* shared, u32 base, const Barriers& barriers, const TensorMap* queries, int4 tile,
                      int head, u32 empty, u32 lane) {
    for (int half = 0; half < 2; half++) {
        const u32 full = barriers.queries_full(half);
        wait(barriers.queries_empty(half), empty);
        if (lane == 0) {
            reinterpret_cast<int4*>(shared + AT_TILES)[half] = make_int4(tile.x, tile.y, tile.z, head);
            if (tile.z == 0) {
                arrive(full);
            } else {
                arrive_expecting(full, TOKENS * G * D * 2);
                for (int i = 0; i < PANELS; i++)
                    copy_4d(base + AT_QUERIES + half * ROW_TILE + i * ROW_PANEL, queries, full, i * 64, 0, head,
                            tile.x + half * TOKENS);
            }
        }
    }
}

INLINE void copy_values(u32 base, const Barriers& barriers, const TensorMap* values, const TensorMap* value_rows,
                        Ring<STAGES>& ring, int first, int count, int head, u32 lane) {
    wait(barriers.values_empty(ring.stage), ring.empty());
    copy_keys<DV>(base + AT_VALUES + ring.stage * VALUE_TILE, values, value_rows, barriers.values_full(ring.stage),
                  first, count, head, lane);
    ring.advance();
}

INLINE void copy_ahead(unsigned char* shared, u32 base, const Barriers& barriers, const TensorMap* queries,
                       const TensorMap* keys, const TensorMap* values, const TensorMap* value_rows, const int* table,
                       u32* counter, int tiles_at, int segments_at, int kv_heads, int window, u32 lane) {
    const Work work = {table[0], table[1]};
    const int4* tiles = reinterpret_cast<const int4*>(table + tiles_at);
    const int4* segments = reinterpret_cast<const int4*>(table + segments_at);
    const u32 items = work.count * kv_heads;
    Ring<STAGES> key_ring, value_ring;
    u32 next = 0, tile_empty = 1;
    if (lane == 0) next = draw(counter, items);
    while (true) {
        const u32 item = __shfl_sync(~0u, next, 0);
        int entry = 0, head = 0;
        locate(work, item, kv_heads, entry, head);
        const int4 tile = item < items ? tiles[entry] : make_int4(0, 0, 0, 0);
        if (tile.z == 0) {
            copy_tile(shared, base, barriers, queries, tile, head, tile_empty, lane);
            return;
        }
        const int q_first = tile.x, q_end = tile.x + queries_of(tile.y);
        int value_first = 0, value_count = 0;  // values are copied one step behind their keys
        int left = tile.z;
        for (int number = tile.w; left > 0; number++) {
            const int4 segment = segments[number];
            const int k_begin = segment.x, k_end = segment.y, shift = segment.z;
            const int high = min(k_end, q_end + shift);
            const int low = WINDOWED ? max(k_begin, q_first + shift - window + 1) : k_begin;
            const int stop = (low - k_begin) / KEYS;
            for (int n = (high - k_begin + KEYS - 1) / KEYS - 1; n >= stop; n--, left--) {
                if (left == 1 && lane == 0) next = draw(counter, items);  // not earlier: others may be free before
                const int first = k_begin + n * KEYS, count = min(KEYS, k_end - first);
                const int diagonal = q_first + shift - first;  // the last key that the first query sees
                bool masked = diagonal < KEYS - 1 || count < KEYS;
                if (WINDOWED) masked |= q_end - 1 + shift - window + 1 > first;
                const u32 stage = key_ring.stage;
                wait(barriers.keys_empty(stage), key_ring.empty());
                if (lane == 0) {
                    reinterpret_cast<int4*>(shared + AT_STEPS)[stage] = make_int4(diagonal, count, masked, 0);
                    arrive_expecting(barriers.keys_full(stage), KEY_TILE);
                    for (int i = 0; i < PANELS; i++)
                        copy_3d(base + AT_KEYS + stage * KEY_TILE + i * KEY_PANEL, keys, barriers.keys_full(stage),
                                i * 64, head, first);
                }
                key_ring.advance();
                if (value_count)
                    copy_values(base, barriers, values, value_rows, value_ring, value_first, value_count, head, lane);
                else
                    copy_tile(shared, base, barriers, queries, tile, head, tile_empty, lane);
                value_first = first;
                value_count = count;
            }
        }
        copy_values(base, barriers, values, value_rows, value_ring, value_first, value_count, head, lane);
        tile_empty ^= 1;
    }
}

// Two rows of a lane: running maximum and this lane's part of the sum, and what the earlier sum is to be scaled by.
struct Softmax {
    float max0 = -INFINITE, max1 = -INFINITE, sum0 = 0, sum1 = 0, keep0 = 0, keep1 = 0;

    INLINE void mask(float (&s)[SCORES], int4 step, int token0, int token1, int window, u32 lane) {
        const int last0 = min(step.x + token0, step.y - 1), last1 = min(step.x + token1, step.y - 1);
        const int first0 = step.x + token0 - window + 1, first1 = step.x + token1 - window + 1;
#pragma unroll
        for (int i = 0; i < SCORES; i++) {
            const int column = 8 * (i / 4) + 2 * (lane & 3) + (i & 1);
            bool hidden = column > ((i & 2) ? last1 : last0);
            if (WINDOWED) hidden |= column < ((i & 2) ? first1 : first0);
            if (hidden) s[i] = -INFINITE;
        }
    }

    INLINE void exponentiate(float (&s)[SCORES], float scale_log2) {
        float high0 = max0, high1 = max1;
#pragma unroll
        for (int i = 0; i < SCORES; i += 4) {
            high0 = fmaxf(high0, fmaxf(s[i], s[i + 1]));
            high1 = fmaxf(high1, fmaxf(s[i + 2], s[i + 3]));
        }
#pragma unroll
        for (int hop = 1; hop <= 2; hop++) {
            high0 = fmaxf(high0, __shfl_xor_sync(~0u, high0, hop));
            high1 = fmaxf(high1, __shfl_xor_sync(~0u, high1, hop));
        }
        const float from0 = high0 == -INFINITE ? 0.f : high0, from1 = high1 == -INFINITE ? 0.f : high1;
        keep0 = exp2_fast((max0 - from0) * scale_log2);
        keep1 = exp2_fast((max1 - from1) * scale_log2);
        max0 = high0;
        max1 = high1;
        sum0 *= keep0;
        sum1 *= keep1;
        const float less0 = from0 * scale_log2, less1 = from1 * scale_log2;
#pragma unroll
        for (int i = 0; i < SCORES; i += 4) {
            s[i] = exp2_fast(s[i] * scale_log2 - less0);
            s[i + 1] = exp2_fast(s[i + 1] * scale_log2 - less0);
            s[i + 2] = exp2_fast(s[i + 2] * scale_log2 - less1);
            s[i + 3] = exp2_fast(s[i + 3] * scale_log2 - less1);
            sum0 += s[i] + s[i + 1];
            sum1 += s[i + 2] + s[i + 3];
        }
    }

    INLINE void rescale(float (&o)[DV / 2]) const {
        if (__any_sync(~0u, keep0 != 1.f || keep1 != 1.f)) {
#pragma unroll
            for (int i = 0; i < DV / 2; i++) o[i] *= (i & 2) ? keep1 : keep0;
        }
    }
};

INLINE void write_tile(bf16* out, float* lse, const Parts& parts, u32 staging, const float (&o)[DV / 2],
                       const Softmax& softmax, int4 tile, int half, int kv_heads, float scale_log2, u32 warp,
                       u32 lane) {
    float sum0 = softmax.sum0, sum1 = softmax.sum1;
#pragma unroll
    for (int hop = 1; hop <= 2; hop++) {
        sum0 += __shfl_xor_sync(~0u, sum0, hop);
        sum1 += __shfl_xor_sync(~0u, sum1, hop);
    }
    if (SPLIT && is_part(tile)) {
        const long block = part_block(tile, half, kv_heads);
        write_part(parts.sums, o, block);
        float2* to = parts.references + block * ROWS + 16 * warp + lane / 4;
        if ((lane & 3) == 0) to[0] = make_float2(fmaxf(softmax.max0 * scale_log2, NONE), sum0);
        if ((lane & 3) == 0) to[8] = make_float2(fmaxf(softmax.max1 * scale_log2, NONE), sum1);
        return;
    }
    const Block block = {tile, half, kv_heads};
    stage_rows(staging, ROW_PANEL, o, sum0 > 0 ? 1 / sum0 : 0.f, sum1 > 0 ? 1 / sum1 : 0.f, warp, lane);
    write_block<DV>(out, staging, block, warp, lane);
    if ((lane & 3) == 0) {
        const int row = 16 * warp + lane / 4;
        if (row < block.rows) lse[block.place(row)] = (softmax.max0 * scale_log2 + log2f(sum0)) / LOG2E;
        if (row + 8 < block.rows) lse[block.place(row + 8)] = (softmax.max1 * scale_log2 + log2f(sum1)) / LOG2E;
    }
}

INLINE void compute(u32 base, const Barriers& barriers, bf16* out, float* lse, const Parts& parts, int half,
                    int kv_heads, float scale_log2, int window) {
    const u32 warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
    const int row = 16 * warp + lane / 4, token0 = row / G + half * TOKENS, token1 = (row + 8) / G + half * TOKENS;
    const int my_turn = 1 + half, other_turn = 2 - half;
    const u32 queries = base + AT_QUERIES + half * ROW_TILE;
    Ring<STAGES> key_ring, value_ring;
    u32 tile_full = 0;
    if (half == 1) arrive_named(other_turn, 256);
    while (true) {
        wait(barriers.queries_full(half), tile_full);
        tile_full ^= 1;
        const int4 tile = load_said(base + AT_TILES + 16 * half);
        if (tile.z == 0) return;
        float s[SCORES], o[DV / 2];
        u32 p[KEYS / 4];
#pragma unroll
        for (int i = 0; i < DV / 2; i++) o[i] = 0;
        Softmax softmax;
        {
            const u32 stage = key_ring.stage;
            wait(barriers.keys_full(stage), key_ring.full);
            const int4 step = load_said(base + AT_STEPS + 16 * stage);
            hold(s);
            products_begin();
            issue_rows<D>(s, queries, ROW_PANEL, base + AT_KEYS + stage * KEY_TILE, KEY_PANEL);
            products_wait<0>();
            hold(s);
            arrive(barriers.keys_empty(stage));
            key_ring.advance();
            if (step.z) softmax.mask(s, step, token0, token1, window, lane);
            softmax.exponentiate(s, scale_log2);
            round_pairs(p, s);
        }
        for (int left = tile.z - 1; left > 0; left--) {
            const u32 stage = key_ring.stage, value_stage = value_ring.stage;
            wait(barriers.keys_full(stage), key_ring.full);
            const int4 step = load_said(base + AT_STEPS + 16 * stage);
            sync_named(my_turn, 256);
            hold(s);
            hold(o);
            hold(p);
            products_begin();
            issue_rows<D>(s, queries, ROW_PANEL, base + AT_KEYS + stage * KEY_TILE, KEY_PANEL);
            wait(barriers.values_full(value_stage), value_ring.full);
            products_begin();
            issue_sums<KEYS>(o, p, base + AT_VALUES + value_stage * VALUE_TILE, KEY_PANEL);
            arrive_named(other_turn, 256);
            products_wait<1>();
            hold(s);
            arrive(barriers.keys_empty(stage));
            key_ring.advance();
            if (step.z) softmax.mask(s, step, token0, token1, window, lane);
            softmax.exponentiate(s, scale_log2);
            products_wait<0>();
            hold(o);
            hold(p);
            arrive(barriers.values_empty(value_stage));
            value_ring.advance();
            softmax.rescale(o);
            round_pairs(p, s);
        }
        const u32 stage = value_ring.stage;
        wait(barriers.values_full(stage), value_ring.full);
        hold(o);
        hold(p);
        products_begin();
        issue_sums<KEYS>(o, p, base + AT_VALUES + stage * VALUE_TILE, KEY_PANEL);
        products_wait<0>();
        hold(o);
        hold(p);
        arrive(barriers.values_empty(stage));
        value_ring.advance();
        sync_named(3 + half, 128);  // no warp reads this block's queries any more
        write_tile(out, lse, parts, queries, o, softmax, tile, half, kv_heads, scale_log2, warp, lane);
        fence_async_proxy();
        arrive(barriers.queries_empty(half));
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_forward(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap keys,
                      const __grid_constant__ TensorMap values, const __grid_constant__ TensorMap value_rows, bf16* out,
                      float* lse, const int* table, u32* counter, int tiles_at, int segments_at, int kv_heads,
                      float scale, int window, const bf16*, long, long, float4* part_sums, float2* part_references) {
    extern __shared__ unsigned char unaligned[];
    unsigned char* shared = unaligned + (-shared_address(unaligned) & 1023);
    const u32 base = shared_address(shared);
    const Barriers barriers = {base + AT_BARRIERS};
    for (u32 i = threadIdx.x; i < AT_TILES / 16; i += blockDim.x)
        reinterpret_cast<uint4*>(shared)[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < 2; i++) {
            barrier_init(barriers.queries_full(i), 1);
            barrier_init(barriers.queries_empty(i), READERS / 2);
            barrier_init(barriers.keys_full(i), 1);
            barrier_init(barriers.keys_empty(i), READERS);
            barrier_init(barriers.values_full(i), 1);
            barrier_init(barriers.values_empty(i), READERS);
        }
    }
    fence_async_proxy();
    __syncthreads();
    const int warpgroup = threadIdx.x >> 7;
    if (warpgroup == 0) {
        give_registers<24>();
        if (threadIdx.x < 32)
            copy_ahead(shared, base, barriers, &queries, &keys, &values, &value_rows, table, counter, tiles_at,
                       segments_at, kv_heads, window, threadIdx.x);
    } else {
        take_registers<240>();
        compute(base, barriers, out, lse, {part_sums, part_references}, warpgroup - 1, kv_heads, scale * LOG2E, window);
    }
}
