// Code shared by backward for narrow and wide heads: tensors, a task and a tile of keys, and transposed scores.

#define BACKWARD_PARAMETERS(SUMS)                                                                               \
    const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap query_rows,                    \
        const __grid_constant__ TensorMap douts, const __grid_constant__ TensorMap dout_rows,                   \
        const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap key_rows,                     \
        const __grid_constant__ TensorMap values, const __grid_constant__ TensorMap value_rows,                 \
        const float *lse, const float *delta, SUMS, bf16 *dk, bf16 *dv, const int *table, u32 *counter,         \
        int items_at, int tasks_at, int kv_heads, float scale, float softcap, int window, const int4 *pairs,    \
        int num_places, int first_head, int num_heads, float4 *part_sums

struct Maps {
    const TensorMap *queries, *query_rows, *douts, *dout_rows, *keys, *key_rows, *values, *value_rows;
};

// Copy one number per row of a block, strided by token; the barrier counts the lanes that have copied theirs.
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

constexpr int KEY_BLOCKS = KEYS / 64;                 // in a tile
constexpr int KEY_SUMS = 64 * (D + DV) / 4;           // float4 of a block of a part: dK, then dV
constexpr int DV_SUMS_AT = 64 * D / 4;

struct Task {
    int q_begin, q_end, k_begin, k_end, shift;
    int block_base, pair_base;  // index of its first block among all blocks, and among all pairs if dS is kept

    INLINE Task(int4 a, int4 b)
        : q_begin(a.x), q_end(a.y), k_begin(a.z), k_end(a.w), shift(b.x), block_base(b.y), pair_base(b.z) {}

    // Blocks [first, stop) of its queries see some of keys [low, high).
    INLINE int first_block(int low) const { return max(0, low - shift - q_begin) / TOKENS; }
    INLINE int stop_block(int high, int window) const {
        const int stop = (q_end - q_begin + TOKENS - 1) / TOKENS;
        const int reach = high + window - 1 - shift - q_begin;  // queries from here on see none of them
        return WINDOWED ? min(stop, (max(0, reach) + TOKENS - 1) / TOKENS) : stop;
    }
};

// A block of a task's queries and a tile of keys.
struct BlockStep {
    int q_first, q_count;
    int diagonal;  // the last key of the tile that the first query sees
    bool masked;   // some query does not see all keys

    INLINE BlockStep(const Task& task, int block, int k_first, int window)
        : q_first(task.q_begin + block * TOKENS),
          q_count(min(TOKENS, task.q_end - q_first)),
          diagonal(q_first + task.shift - k_first),
          masked(diagonal < KEYS - 1 || task.k_begin > k_first || task.k_end < k_first + KEYS || q_count * G < ROWS) {
        if (WINDOWED) masked |= q_first + q_count - 1 + task.shift - window + 1 > k_first;
    }
};

// Zero the probabilities of keys (rows) that a query (column) does not see, or set what else stands for them.
INLINE void hide(float (&p)[ROWS / 2], int4 block, int row, int window, u32 lane, float hidden_number = 0) {
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) {
        const int key = row + ((i & 2) ? 8 : 0), column = 8 * (i / 4) + 2 * (lane & 3) + (i & 1);
        const int last = block.x + column / G;
        bool hidden = key > last || key < block.y || key >= block.z || column >= block.w;
        if (WINDOWED) hidden |= key <= last - window;
        if (hidden) p[i] = hidden_number;
    }
}

// Compute probabilities from transposed scores, in place; `lse` returns the values of a lane's columns.
template <typename Lse>
INLINE void exponentiate(float (&s)[ROWS / 2], const Lse& lse, float scale_log2) {
#pragma unroll
    for (int i = 0; i < ROWS / 2; i += 4) {
        const float2 less = lse(i);
        s[i] = exp2_fast(s[i] * scale_log2 - less.x);
        s[i + 1] = exp2_fast(s[i + 1] * scale_log2 - less.y);
        s[i + 2] = exp2_fast(s[i + 2] * scale_log2 - less.x);
        s[i + 3] = exp2_fast(s[i + 3] * scale_log2 - less.y);
    }
}

// The same from tangents of capped scores: probabilities are rounded to p, and s becomes probabilities times the cap's
// slope, which dS needs.
template <typename Lse>
INLINE void exponentiate_capped(float (&s)[ROWS / 2], u32 (&p)[ROWS / 4], const Lse& lse, float scale_log2) {
#pragma unroll
    for (int i = 0; i < ROWS / 2; i += 4) {
        const float2 less = lse(i);
        float x[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            x[e] = exp2_fast(s[i + e] * scale_log2 - ((e & 1) ? less.y : less.x));
            s[i + e] = x[e] * (1.f - s[i + e] * s[i + e]);
        }
        u32 pairs[2];
        round_pairs(pairs, x);
        p[i / 2] = pairs[0];
        p[i / 2 + 1] = pairs[1];
    }
}
