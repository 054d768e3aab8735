// What both backward kernels copy: where tensors lie, and numbers of query rows.

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

