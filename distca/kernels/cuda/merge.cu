
// Tiles whose keys were split: their parts' sums in float32, put together in the order of the parts.
//
// Forward's parts have references of their own, from which a row's exponentials were taken; what a row saw no key of
// has none and adds nothing. Parts of dQ are added up. A block of threads takes eight columns of 64 rows, as a
// warpgroup's accumulators hold them: four numbers a thread, of two rows.

template <int DIM, bool WEIGHTED>
INLINE void merge(bf16* out, float* lse, const Parts& parts, float factor, const int* table, int merges_at,
                  int kv_heads) {
    constexpr int CHUNKS = DIM / 8;
    const int4* merges = reinterpret_cast<const int4*>(table + merges_at);  // q_first, q_count, first part, parts
    const u32 lane = threadIdx.x & 31;
    const int row = 16 * (threadIdx.x >> 5) + lane / 4, blocks = table[2] * kv_heads * 2;
    for (int item = blockIdx.x; item < blocks * CHUNKS; item += gridDim.x) {
        const int chunk = item % CHUNKS, half = item / CHUNKS % 2, head = item / (2 * CHUNKS) % kv_heads;
        const int4 tile = merges[item / (2 * CHUNKS * kv_heads)];
        const Block block = {make_int4(tile.x, tile.y, 0, head), half, kv_heads};
        const long first = (static_cast<long>(tile.z) * kv_heads + head) * 2 + half;
        const float4* sums = parts.sums + (first * CHUNKS + chunk) * 128 + threadIdx.x;
        const float2* references = parts.references + first * ROWS + row;
        float4 total = make_float4(0, 0, 0, 0);
        float from0 = NONE, from1 = NONE, sum0 = 0, sum1 = 0;
#pragma unroll 4
        for (int part = 0; part < tile.w; part++) {
            const float4 x = sums[static_cast<long>(part) * kv_heads * 2 * CHUNKS * 128];
            float keep0 = 1, keep1 = 1, by0 = 1, by1 = 1;
            if (WEIGHTED) {
                const float2* of = references + static_cast<long>(part) * kv_heads * 2 * ROWS;
                const float2 first_row = of[0], second_row = of[8];
                const float new0 = fmaxf(from0, first_row.x), new1 = fmaxf(from1, second_row.x);
                keep0 = exp2_fast(from0 - new0);
                keep1 = exp2_fast(from1 - new1);
                by0 = exp2_fast(first_row.x - new0);
                by1 = exp2_fast(second_row.x - new1);
                sum0 = sum0 * keep0 + first_row.y * by0;
                sum1 = sum1 * keep1 + second_row.y * by1;
                from0 = new0;
                from1 = new1;
            }
            total.x = total.x * keep0 + (by0 > 0 ? x.x * by0 : 0.f);
            total.y = total.y * keep0 + (by0 > 0 ? x.y * by0 : 0.f);
            total.z = total.z * keep1 + (by1 > 0 ? x.z * by1 : 0.f);
            total.w = total.w * keep1 + (by1 > 0 ? x.w * by1 : 0.f);
        }
        const float factor0 = !WEIGHTED ? factor : sum0 == 0 ? 0.f : 1 / sum0;
        const float factor1 = !WEIGHTED ? factor : sum1 == 0 ? 0.f : 1 / sum1;
        const float scaled[4] = {total.x * factor0, total.y * factor0, total.z * factor1, total.w * factor1};
        u32 pairs[2];
        round_pairs(pairs, scaled);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (row + 8 * i >= block.rows) continue;
            const long place = block.place(row + 8 * i);
            reinterpret_cast<u32*>(out + place * DIM + 8 * chunk)[lane & 3] = pairs[i];
            if (WEIGHTED && chunk == 0 && (lane & 3) == 0)
                lse[place] = ((i ? from1 : from0) + log2f(i ? sum1 : sum0)) * (1 / LOG2E);
        }
    }
}

extern "C" __global__ void __launch_bounds__(128)
    attention_merge(bf16* out, float* lse, float4* part_sums, float2* part_references, const int* table, int merges_at,
                    int kv_heads) {
    merge<DV, true>(out, lse, {part_sums, part_references}, 1.f, table, merges_at, kv_heads);
}

extern "C" __global__ void __launch_bounds__(128)
    attention_merge_dq(bf16* dq, float4* part_sums, const int* table, int merges_at, int kv_heads, float scale) {
    merge<D, false>(dq, nullptr, {part_sums, nullptr}, scale, table, merges_at, kv_heads);
}
