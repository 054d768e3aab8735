// Computation on one block in backward: products, probabilities, dS, and writing results.

constexpr bool IN_TURN = BLOCKS == 3;                        // dQ of a block: one warpgroup, or half on each
constexpr int SUMS = ROWS * D / (IN_TURN ? 128 : 256);       // numbers of dQ per thread

// Transposed scores of 64 keys and a block of queries, or products of their values and output gradients. `add` is never
// true, but the compiler cannot know; it forces the results into the registers of s.
INLINE void issue_transposed(float (&s)[ROWS / 2], u32 keys, u32 queries, bool add = false) {
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            product<0, 0>(s, inner_descriptor(keys + panel * KEY_PANEL) + i * INNER_STEP,
                          inner_descriptor(queries + panel * ROW_PANEL) + i * INNER_STEP, panel + i > 0 || add);
    products_commit();
}

// dV of 64 keys from a block of output gradients, or dK from queries.
INLINE void issue_dv(float (&dv)[D / 2], const u32 (&p)[ROWS / 4], u32 douts) {
    const u64 b = outer_descriptor(douts, ROW_PANEL);
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++)
        product<1>(dv, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], b + i * OUTER_STEP, true);
}

// dK of 64 keys from a block of queries; dS is read from shared memory if dQ leaves no registers for it.
INLINE void issue_dk(float (&dk)[D / 2], u32 ds, u32 queries) {
    const u64 b = outer_descriptor(queries, ROW_PANEL);
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++)
        product<0, 1>(dk, inner_descriptor(ds + i / 4 * KEY_PANEL) + i % 4 * INNER_STEP, b + i * OUTER_STEP, true);
}

// dQ from all keys of the tile, or half of its columns.
INLINE void issue_dq(float (&dq)[SUMS], u32 ds, u32 keys, int half, bool add) {
    const u64 a = outer_descriptor(ds, KEY_PANEL);
    const u64 b = outer_descriptor(IN_TURN ? keys : keys + half * KEY_PANEL, KEY_PANEL);
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) product<1, 1>(dq, a + i * OUTER_STEP, b + i * OUTER_STEP, i > 0 || add);
}

// Add one block of dQ, or half of it, to the sums in global memory, in any order.
INLINE void add_dq(float* dq_sum, const float (&dq)[SUMS], int place, int half, u32 thread) {
    float* to = dq_sum + static_cast<long>(place) * BLOCK_FLOATS + (IN_TURN ? 0 : half * (BLOCK_FLOATS / 2)) + thread * 4;
#pragma unroll
    for (int i = 0; i < SUMS / 4; i++)
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + i * 512), "f"(dq[4 * i]),
                     "f"(dq[4 * i + 1]), "f"(dq[4 * i + 2]), "f"(dq[4 * i + 3])
                     : "memory");
}

INLINE void write_keys(bf16* out, u32 staging, const float (&x)[D / 2], float factor, int4 tile, int half, int kv_heads,
                       u32 warp, u32 lane) {
    stage_rows(staging, KEY_PANEL, x, factor, factor, warp, lane);
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const int row = 16 * warp + (i * 32 + lane) / (D / 8), chunk = (i * 32 + lane) % (D / 8), key = half * 64 + row;
        const uint4 numbers = load_shared(staging + (chunk >> 3) * KEY_PANEL + swizzled(row, chunk & 7));
        if (key < count_of(tile.y))
            reinterpret_cast<uint4*>(out + (static_cast<long>(tile.x + key) * kv_heads + tile.w) * D)[chunk] = numbers;
    }
}

INLINE void differentiate(float (&p)[ROWS / 2], const float (&dp)[ROWS / 2], u32 delta) {
#pragma unroll
    for (int i = 0; i < ROWS / 2; i += 4) {
        const float2 less = load_pair(delta + i * 8);
        p[i] *= dp[i] - less.x;
        p[i + 1] *= dp[i + 1] - less.y;
        p[i + 2] *= dp[i + 2] - less.x;
        p[i + 3] *= dp[i + 3] - less.y;
    }
}
