
// Merge the float32 sums of tiles that were split, in the order of the parts.
//
// Each forward part has a separate reference per row, which was subtracted before its exponentials; a part in which a
// row saw no key adds nothing. Parts of dQ, dK and dV are summed. A thread block merges eight columns of 64 rows in the
// layout of a warpgroup's accumulators: four numbers per thread, in two rows.

constexpr int AHEAD = 8;  // parts loaded at once

// A thread's sums over the parts so far: two columns of two rows.
struct Merged {
    float from[2] = {NONE, NONE}, sum[2] = {0, 0};  // references of exponentials, and their sums
    float total[4] = {0, 0, 0, 0};

    INLINE void add(float4 x, float2 upper, float2 lower) {
        const float reference[2] = {upper.x, lower.x}, more[2] = {upper.y, lower.y}, numbers[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float now = fmaxf(from[i], reference[i]);
            const float keep = exp2_fast(from[i] - now), by = exp2_fast(reference[i] - now);
            sum[i] = sum[i] * keep + more[i] * by;
            from[i] = now;
#pragma unroll
            for (int j = 2 * i; j < 2 * i + 2; j++) total[j] = total[j] * keep + (by > 0 ? numbers[j] * by : 0.f);
        }
    }
    INLINE void add(float4 x) {
        total[0] += x.x;
        total[1] += x.y;
        total[2] += x.z;
        total[3] += x.w;
    }
};

// Tiles are `num_merges` entries of first token, count, first part, parts; HALVES blocks of 64 rows each, of which a part
// has SKIP float4.
template <class Rows, int DIM, bool WEIGHTED, int HALVES = 2, int SKIP = 16 * DIM>
INLINE void merge(bf16* out, float* lse, const Parts& parts, float factor, const int4* merges, int num_merges,
                  int kv_heads) {
    constexpr int CHUNKS = DIM / 8;
    const u32 lane = threadIdx.x & 31;
    const int row = 16 * (threadIdx.x >> 5) + lane / 4, items = num_merges * kv_heads * HALVES * CHUNKS;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const int chunk = item % CHUNKS, half = item / CHUNKS % HALVES, head = item / (HALVES * CHUNKS) % kv_heads;
        const int4 tile = merges[item / (HALVES * CHUNKS * kv_heads)];
        const Rows block = {make_int4(tile.x, tile.y, 0, head), half, kv_heads};
        const long first = (static_cast<long>(tile.z) * kv_heads + head) * HALVES + half, skip = HALVES * kv_heads;
        const float4* sums = parts.sums + first * SKIP + chunk * 128 + threadIdx.x;
        const float2* references = parts.references + first * ROWS + row;
        Merged merged;
        for (int part = 0; part < tile.w; part += AHEAD) {
            float4 x[AHEAD];
            float2 upper[AHEAD], lower[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const bool is_there = part + i < tile.w;  // otherwise it adds nothing; avoids a branch before the loads
                const long at = (part + i) * skip;
                x[i] = is_there ? sums[at * SKIP] : make_float4(0, 0, 0, 0);
                if (WEIGHTED) upper[i] = is_there ? references[at * ROWS] : make_float2(NONE, 0);
                if (WEIGHTED) lower[i] = is_there ? references[at * ROWS + 8] : make_float2(NONE, 0);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (WEIGHTED)
                    merged.add(x[i], upper[i], lower[i]);
                else
                    merged.add(x[i]);
            }
        }
        float scaled[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float sum = merged.sum[j / 2];
            scaled[j] = merged.total[j] * (!WEIGHTED ? factor : sum == 0 ? 0.f : 1 / sum);
        }
        u32 pairs[2];
        round_pairs(pairs, scaled);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (row + 8 * i >= block.rows) continue;
            const long place = block.place(row + 8 * i);
            reinterpret_cast<u32*>(out + place * DIM + 8 * chunk)[lane & 3] = pairs[i];
            if (WEIGHTED && chunk == 0 && (lane & 3) == 0)
                lse[place] = (merged.from[i] + log2f(merged.sum[i])) * (1 / LOG2E);
        }
    }
}

INLINE const int4* merges_of(const int* table, int merges_at) {
    return reinterpret_cast<const int4*>(table + merges_at);
}

extern "C" __global__ void __launch_bounds__(128)
    attention_merge(bf16* out, float* lse, float4* part_sums, float2* part_references, const int* table, int merges_at,
                    int kv_heads) {
    merge<Block, DV, true>(out, lse, {part_sums, part_references}, 1.f, merges_of(table, merges_at), table[2],
                           kv_heads);
}

extern "C" __global__ void __launch_bounds__(128)
    attention_merge_dq(bf16* dq, float4* part_sums, const int* table, int merges_at, int kv_heads, float scale) {
    merge<Block, D, false>(dq, nullptr, {part_sums, nullptr}, scale, merges_of(table, merges_at), table[2], kv_heads);
}

extern "C" __global__ void __launch_bounds__(128)
    attention_merge_keys(bf16* dk, bf16* dv, float4* part_sums, const int* table, int merges_at, int kv_heads,
                         float scale) {
    constexpr int BLOCKS_OF_TILE = KEYS / 64, SKIP = 16 * (D + DV);
    const int4* merges = merges_of(table, merges_at);
    merge<KeyRows, D, false, BLOCKS_OF_TILE, SKIP>(dk, nullptr, {part_sums, nullptr}, scale, merges, table[3],
                                                   kv_heads);
    merge<KeyRows, DV, false, BLOCKS_OF_TILE, SKIP>(dv, nullptr, {part_sums + 16 * D, nullptr}, 1.f, merges, table[3],
                                                    kv_heads);
}
