// Code shared by all task kernels: matrix products, copies of tiles, and work items read from tables.
//
// Compiled with D (head dim, 64 or 128), G (query heads per KV head), ROWS (of a block of queries, 64 or 128) and
// WINDOWED defined; backward also with WITH_DQ; wide heads (wide.cuh) also with KEYS and DV; SPLIT if tiles may be split
// into parts. Tiles are stored in shared memory as panels of 64 columns (128 bytes a row) in the
// 128-byte swizzle: chunk c of 16 bytes in row r is at c ^ (r & 7). Tensor copies write this layout, matrix descriptors
// read it, and `swizzled` computes it for all other accesses.

#ifndef KEYS
#define KEYS 128  // in a key tile
#endif
#ifndef DV
#define DV D  // head dim of values, if it differs from that of queries and keys
#endif
#ifndef SPLIT
#define SPLIT 0
#endif
#ifndef BLOCKS
#define BLOCKS 2  // of queries in a tile, one for each warpgroup that computes
#endif

constexpr int TOKENS = ROWS / G;  // in a block, whose rows are pairs of a token and a query head
constexpr int PANELS = D / 64;
constexpr int KEY_PANEL = KEYS * 128;  // bytes
constexpr int ROW_PANEL = ROWS * 128;
constexpr int KEY_TILE = KEY_PANEL * PANELS;
[[maybe_unused]] constexpr int VALUE_TILE = KEY_PANEL * (DV / 64);
[[maybe_unused]] constexpr int ROW_TILE = ROW_PANEL * PANELS;
[[maybe_unused]] constexpr int DS_TILE = KEYS * ROWS * 2;  // gradients of the scores of a block and a tile of keys
constexpr int READERS = 128 * BLOCKS;  // threads that compute
[[maybe_unused]] constexpr float LOG2E = 1.4426950408889634f;

#define INFINITE __int_as_float(0x7F800000)
#define NONE -1e30f  // below all references of exponentials

// Dynamic shared memory, aligned to 1024 bytes for swizzled tiles. Tiles are zeroed first, so that data that no copy
// has written yet is finite; it is multiplied by probabilities of zero.
INLINE unsigned char* open_shared(u32 tile_bytes) {
    extern __shared__ unsigned char unaligned[];
    unsigned char* shared = unaligned + (-shared_address(unaligned) & 1023);
    for (u32 i = threadIdx.x; i < tile_bytes / 16; i += blockDim.x)
        reinterpret_cast<uint4*>(shared)[i] = make_uint4(0, 0, 0, 0);
    return shared;
}

INLINE void barriers_are_set() {
    fence_async_proxy();
    __syncthreads();
}

INLINE u32 swizzled(u32 row, u32 chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// Copy keys [first, first + count) of one head. An incomplete tile is copied row by row, so that no other row is read:
// beyond the last key are then stale rows, which are finite and multiplied by probabilities of zero.
template <int DIM = D>
INLINE void copy_keys(u32 to, const TensorMap* tile, const TensorMap* row, u32 barrier, int first, int count, int head,
                      u32 lane) {
    if (lane == 0) arrive_expecting(barrier, count * DIM * 2);
    __syncwarp();
    if (count == KEYS) {
        if (lane < DIM / 64) copy_3d(to + lane * KEY_PANEL, tile, barrier, lane * 64, head, first);
    } else {
#pragma unroll 1
        for (int r = lane; r < count * (DIM / 64); r += 32) {
            int panel = r / count, key = r % count;
            copy_3d(to + panel * KEY_PANEL + key * 128, row, barrier, panel * 64, head, first + key);
        }
    }
}

// Copy queries [first, first + count) of all heads of a group in the same way.
template <int DIM = D>
INLINE void copy_queries(u32 to, const TensorMap* block, const TensorMap* row, u32 barrier, int first, int count,
                         int head, u32 lane) {
    if (lane == 0) arrive_expecting(barrier, count * G * DIM * 2);
    __syncwarp();
    if (count == TOKENS) {
        if (lane < DIM / 64) copy_4d(to + lane * ROW_PANEL, block, barrier, lane * 64, 0, head, first);
    } else {
#pragma unroll 1
        for (int r = lane; r < count * (DIM / 64); r += 32) {
            int panel = r / count, token = r % count;
            copy_4d(to + panel * ROW_PANEL + token * G * 128, row, barrier, panel * 64, 0, head, first + token);
        }
    }
}

// Copy the values of one iteration to the next stage of their ring.
template <class Barriers, int STAGES>
INLINE void copy_values(u32 stages, const Barriers& barriers, const TensorMap* tile, const TensorMap* row,
                        Ring<STAGES>& ring, int first, int count, int head, u32 lane) {
    wait(barriers.values_empty(ring.stage), ring.empty());
    copy_keys<DV>(stages + ring.stage * VALUE_TILE, tile, row, barriers.values_full(ring.stage), first, count, head,
                  lane);
    ring.advance();
}

// Copy a full tile of keys with one lane, including rows beyond its last key.
INLINE void copy_whole_keys(u32 to, const TensorMap* tile, u32 barrier, int first, int head) {
    arrive_expecting(barrier, KEY_TILE);
    for (int i = 0; i < PANELS; i++) copy_3d(to + i * KEY_PANEL, tile, barrier, i * 64, head, first);
}

// Copy a full block of queries in the same way; results of rows beyond the tile's queries are never written.
template <int DIM = D>
INLINE void copy_whole_queries(u32 to, const TensorMap* block, u32 barrier, int first, int head) {
    arrive_expecting(barrier, TOKENS * G * DIM * 2);
    for (int i = 0; i < DIM / 64; i++) copy_4d(to + i * ROW_PANEL, block, barrier, i * 64, 0, head, first);
}

// ---- matrix products: D[64, N] (+)= A[64, 16] B[16, N] on a warpgroup ----

constexpr u64 SWIZZLE_128 = 1ull << 62;

// Sixteen numbers of the inner dimension side by side in a row; the next sixteen stand 32 bytes on.
INLINE u64 inner_descriptor(u32 address) {
    return SWIZZLE_128 | (64ull << 32) | (1ull << 16) | ((address & 0x3FFFF) >> 4);
}

// The inner dimension runs over rows; the next sixteen stand 16 rows on, the next 64 columns one panel on.
INLINE u64 outer_descriptor(u32 address, u32 panel_bytes) {
    return SWIZZLE_128 | (64ull << 32) | (static_cast<u64>(panel_bytes >> 4) << 16) | ((address & 0x3FFFF) >> 4);
}

[[maybe_unused]] constexpr u64 INNER_STEP = 32 >> 4;
constexpr u64 OUTER_STEP = (16 * 128) >> 4;

INLINE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

INLINE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
INLINE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Prevents the compiler from moving registers that an asynchronous product uses before this point.
template <int N>
INLINE void hold(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

template <int N>
INLINE void hold(u32 (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(x[i])::"memory");
}

template <int N>
INLINE void clear(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = 0;
}

// Keeps computations on x after this point; the compiler would repeat them in every iteration of a loop.
INLINE u32 not_before(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

#define TEXT16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define TEXT32 TEXT16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define TEXT64                                                         \
    TEXT32                                                             \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
    ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define HELD4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define HELD16(d, i) HELD4(d, i), HELD4(d, i + 4), HELD4(d, i + 8), HELD4(d, i + 12)
#define HELD32(d, i) HELD16(d, i), HELD16(d, i + 16)
#define HELD64(d) HELD32(d, 0), HELD32(d, 32)

// A and B in shared memory, each with its inner dimension inside rows or, OUTER, over rows.
#define PRODUCT_SHARED(COUNT, SHAPE, TEXT, HELD, A, B, ADD, TA, TB)                                          \
    template <int OUTER_A, int OUTER_B>                                                                      \
    INLINE void product(float(&d)[COUNT], u64 a, u64 b, bool add) {                                          \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\nwgmma.mma_async.sync.aligned." SHAPE \
                     ".f32.bf16.bf16 {" TEXT "}, " A ", " B ", add, 1, 1, " TA ", " TB ";\n}"                \
                     : HELD                                                                                  \
                     : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(OUTER_A), "n"(OUTER_B));              \
    }

PRODUCT_SHARED(32, "m64n64k16", TEXT32, HELD32(d, 0), "%32", "%33", "%34", "%35", "%36")
PRODUCT_SHARED(64, "m64n128k16", TEXT64, HELD64(d), "%64", "%65", "%66", "%67", "%68")

// A in registers, B in shared memory.
#define PRODUCT_REGISTERS(COUNT, SHAPE, TEXT, HELD, A, B, ADD, TB)                                            \
    template <int OUTER_B>                                                                                    \
    INLINE void product(float(&d)[COUNT], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool add) {                  \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\nwgmma.mma_async.sync.aligned." SHAPE  \
                     ".f32.bf16.bf16 {" TEXT "}, " A ", " B ", add, 1, 1, " TB ";\n}"                         \
                     : HELD                                                                                   \
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<int>(add)), "n"(OUTER_B)); \
    }

PRODUCT_REGISTERS(32, "m64n64k16", TEXT32, HELD32(d, 0), "{%32,%33,%34,%35}", "%36", "%37", "%38")
PRODUCT_REGISTERS(64, "m64n128k16", TEXT64, HELD64(d), "{%64,%65,%66,%67}", "%68", "%69", "%70")

// A product of one warp by itself: D[16, 8] += A[16, 16] B[16, 8], rows and columns as in a warpgroup's.
INLINE void product_of_warp(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Accumulators of a warpgroup: number 4j + e of a lane is row 16 * warp + lane / 4 + 8 * (e / 2),
// column 8j + 2 * (lane % 4) + e % 2. Rounded in pairs they are the left operand of a product over those columns.
template <int N>
INLINE void round_pairs(u32 (&to)[N / 2], const float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(to[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
}

// ---- work ----

struct Work {
    int count;        // entries of the table
    int heads_outer;  // all entries of a head before the next head, or all heads of an entry before the next entry
};

struct Heads {  // KV heads of a launch
    int first, count;
};

// The counter returns to zero without a reset: every thread block draws exactly one number past the end.
INLINE u32 draw(u32* counter, u32 items) { return atomicInc(counter, items + gridDim.x - 1); }

INLINE void locate(const Work& work, u32 item, int kv_heads, int& entry, int& head) {
    if (work.heads_outer) {
        head = item / work.count;
        entry = item % work.count;
    } else {
        head = item % kv_heads;
        entry = item / kv_heads;
    }
}

// A table of tiles of queries, and of the segments of keys that they walk.
struct QueryTable {
    Work work;
    const int4 *tiles, *segments;
    u32 items;

    INLINE QueryTable(const int* table, int tiles_at, int segments_at, int kv_heads)
        : work{table[0], table[1]},
          tiles(reinterpret_cast<const int4*>(table + tiles_at)),
          segments(reinterpret_cast<const int4*>(table + segments_at)),
          items(work.count * kv_heads) {}
};

// The keys of a segment that queries of a tile see, [low, high), and their tiles, which are walked from the last on.
struct Segment {
    int k_begin, k_end, shift, high, low;

    INLINE Segment(int4 entry, int q_first, int q_end, int window)
        : k_begin(entry.x),
          k_end(entry.y),
          shift(entry.z),
          high(min(k_end, q_end + shift)),
          low(WINDOWED ? max(k_begin, q_first + shift - window + 1) : k_begin) {}
    template <int TILE>
    INLINE int num_tiles() const {
        return (high - k_begin + TILE - 1) / TILE - (low - k_begin) / TILE;
    }
    INLINE int first_tile() const { return (low - k_begin) / KEYS; }
    INLINE int last_tile() const { return (high - k_begin + KEYS - 1) / KEYS - 1; }
};

// A tile of queries and one of keys.
struct Step {
    int first, count;  // keys
    int diagonal;      // the last key that the first query sees
    bool masked;       // some query does not see all keys, or the tile has rows of no query (`part`)

    INLINE Step(const Segment& segment, int number, int q_first, int q_end, int window, bool part = false)
        : first(segment.k_begin + number * KEYS),
          count(min(KEYS, segment.k_end - first)),
          diagonal(q_first + segment.shift - first),
          masked(diagonal < KEYS - 1 || count < KEYS || part) {
        if (WINDOWED) masked |= q_end - 1 + segment.shift - window + 1 > first;
    }
};

// Scores of two rows of a lane, of tokens token0 and token1 of the tile: those of keys that they do not see.
template <int N>
INLINE void hide_keys(float (&s)[N], float hidden_score, int4 step, int token0, int token1, int window, u32 lane) {
    const int last0 = min(step.x + token0, step.y - 1), last1 = min(step.x + token1, step.y - 1);
    const int first0 = step.x + token0 - window + 1, first1 = step.x + token1 - window + 1;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int column = 8 * (i / 4) + 2 * (lane & 3) + (i & 1);
        bool hidden = column > ((i & 2) ? last1 : last0);
        if (WINDOWED) hidden |= column < ((i & 2) ? first1 : first0);
        if (hidden) s[i] = hidden_score;
    }
}

// A warp writes its 16 rows of a 64-row tile in shared memory.
template <int N>
INLINE void stage_rows(u32 tile, u32 panel_bytes, const float (&x)[N], float factor0, float factor1, u32 warp,
                       u32 lane) {
    u32 row = 16 * warp + ((lane >> 3) & 1) * 8 + (lane & 7);
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        float scaled[8];
#pragma unroll
        for (int e = 0; e < 8; e++) scaled[e] = x[8 * j + e] * ((e & 2) ? factor1 : factor0);
        u32 pairs[4];
        round_pairs(pairs, scaled);
        u32 chunk = 2 * j + (lane >> 4);
        store_matrices(tile + (chunk >> 3) * panel_bytes + swizzled(row, chunk & 7), pairs[0], pairs[1], pairs[2],
                       pairs[3]);
    }
    __syncwarp();
}

// If long tiles are split, each part is a separate item, and its number, counted from 1, is stored above the lowest byte
// of the tile's count of queries, or of keys in backward.
INLINE int count_of(int count) { return SPLIT ? count & 255 : count; }

INLINE bool is_part(int4 tile) { return tile.y > 255; }

struct Parts {  // to be merged
    float4* sums;
    float2* references;  // of a row's exponentials, and their sum
};

// Index of a part's block of sums: [parts, heads, halves].
template <int HALVES = 2>
INLINE long part_block(int4 tile, int half, int kv_heads) {
    return (static_cast<long>((tile.y >> 8) - 1) * kv_heads + tile.w) * HALVES + half;
}

// Store a warpgroup's sums of a part in register order; merge.cu merges the parts of a tile.
template <int N>
INLINE void write_part(float4* sums, const float (&x)[N], long block) {
    float4* to = sums + block * (N / 4) * 128 + (threadIdx.x & 127);
#pragma unroll
    for (int i = 0; i < N / 4; i++) to[i * 128] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
}

// Memory layout of one of the two blocks of a tile of queries.
struct Block {
    int rows;
    long first;  // in heads of tokens
    int skip;    // from token to token

    INLINE Block(int4 tile, int half, int kv_heads)  // tile: q_first, q_count, steps, head
        : rows(min(TOKENS, count_of(tile.y) - half * TOKENS) * G),
          first(static_cast<long>(tile.x + half * TOKENS) * kv_heads * G + tile.w * G),
          skip((kv_heads - 1) * G) {}
    INLINE long place(int row) const { return first + row + (row / G) * skip; }
};

// Memory layout of 64 of a tile's keys, as Block.
struct KeyRows {
    int rows;
    long first;
    int skip;

    INLINE KeyRows(int4 tile, int half, int kv_heads)  // tile: k_first, k_count, blocks, head
        : rows(min(64, count_of(tile.y) - half * 64)),
          first(static_cast<long>(tile.x + half * 64) * kv_heads + tile.w),
          skip(kv_heads) {}
    INLINE long place(int row) const { return first + row * skip; }
};

// A warp writes its 16 rows of a block, which it has staged.
template <int DIM = D>
INLINE void write_block(bf16* out, u32 staging, const Block& block, u32 warp, u32 lane) {
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
        const int row = 16 * warp + (i * 32 + lane) / (DIM / 8), chunk = (i * 32 + lane) % (DIM / 8);
        const uint4 x = load_shared(staging + (chunk >> 3) * ROW_PANEL + swizzled(row, chunk & 7));
        if (row < block.rows) reinterpret_cast<uint4*>(out + block.place(row) * DIM)[chunk] = x;
    }
}

INLINE int4 load_said(u32 address) {  // written by the copying warp
    const uint4 x = load_shared(address);
    return make_int4(x.x, x.y, x.z, x.w);
}
