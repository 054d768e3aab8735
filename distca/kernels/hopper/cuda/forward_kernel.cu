// The forward kernel, for narrow and wide heads: one warp copies, the other warpgroups compute.

extern "C" __global__ void __launch_bounds__(128 * (BLOCKS + 1), 1)
    attention_forward(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap keys,
                      const __grid_constant__ TensorMap values, const __grid_constant__ TensorMap value_rows, bf16* out,
                      float* lse, const int* table, u32* counter, int tiles_at, int segments_at, int kv_heads,
                      float scale, float softcap, int window, const bf16* k, long k_token_stride,
                      long k_head_stride, float4* part_sums, float2* part_references) {
    unsigned char* shared = open_shared(AT_TILES);
    const u32 base = shared_address(shared);
    const Barriers barriers = {base + AT_BARRIERS};
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < SLOTS; i++) {
            barrier_init(barriers.queries_full(i), 1);
            barrier_init(barriers.queries_empty(i), QUERY_READERS);
        }
        for (u32 i = 0; i < STAGES; i++) {
            barrier_init(barriers.keys_full(i), 1);
            barrier_init(barriers.values_full(i), 1);
            barrier_init(barriers.keys_empty(i), READERS);
            barrier_init(barriers.values_empty(i), READERS);
        }
    }
    barriers_are_set();
    const int warpgroup = threadIdx.x >> 7;
    if (warpgroup == 0) {
        give_registers<COPYING_REGISTERS>();
        if (threadIdx.x < 32)
            copy_ahead(shared, base, barriers, &queries, &keys, &values, &value_rows, table, counter, tiles_at,
                       segments_at, kv_heads, window, threadIdx.x);
    } else {
        take_registers<COMPUTING_REGISTERS>();
        compute(base, barriers, {k, k_token_stride, k_head_stride}, out, lse, {part_sums, part_references},
                warpgroup - 1, kv_heads, {scale, softcap}, window);
    }
}
