// The copying warp of backward for wide heads: the layout of shared memory, and the copies.

constexpr int QUERY_STAGES = D == 256 ? 3 : 4;             // a block of queries is needed for longer than its gradients
constexpr int DOUT_STAGES = D == 256 ? 2 : 4;
constexpr int DOUT_TILE = ROW_PANEL * (DV / 64);
constexpr int SCORES = ROWS / 2;                           // of a thread
constexpr int HELD_KEYS = D == 256 ? 8 : D / 16;           // steps of 16 columns; two more would serialise products
constexpr int HELD_VALUES = DV == 256 ? 6 : DV / 16;
constexpr bool P_OVER_KEYS = HELD_KEYS < D / 16;           // probabilities overwrite keys that are in registers
constexpr int P_TILE = 4 * 128 * 16;
constexpr int AT_KEYS = 0;
constexpr int AT_VALUES = AT_KEYS + KEY_TILE;
constexpr int AT_QUERIES = AT_VALUES + VALUE_TILE;
constexpr int AT_DOUTS = AT_QUERIES + QUERY_STAGES * ROW_TILE;
constexpr int BEHIND_DOUTS = AT_DOUTS + DOUT_STAGES * DOUT_TILE;
constexpr int AT_P = P_OVER_KEYS ? AT_KEYS : BEHIND_DOUTS;  // two uint4 [4][threads]
constexpr int AT_DS = AT_VALUES;                           // staging of dS; overwrites values that are in registers
constexpr int AT_LSE = P_OVER_KEYS ? BEHIND_DOUTS : AT_P + 2 * P_TILE;  // stages of float[ROWS], times log2(e)
constexpr int AT_DELTA = AT_LSE + QUERY_STAGES * ROWS * 4;  // rowsum(dO * O), likewise
constexpr int AT_TILE = AT_DELTA + DOUT_STAGES * ROWS * 4;  // int4: k_first, k_count, blocks, head
constexpr int AT_BLOCKS = AT_TILE + 16;                    // two int4 of a stage
constexpr int AT_BARRIERS = AT_BLOCKS + QUERY_STAGES * 32;
constexpr int BLOCK_FLOATS = ROWS * D;                     // of dQ's sum, where it is added up
static_assert(ROWS == 64 && KEYS == 64, "one product has the scores of a block");
static_assert(HELD_VALUES * 16 >= 64, "values that are not held stay");
static_assert(!P_OVER_KEYS || 2 * P_TILE <= HELD_KEYS / 4 * KEY_PANEL, "keys that are not held stay");
static_assert(AT_BARRIERS + (8 + 2 * QUERY_STAGES + 2 * DOUT_STAGES) * 8 + 1023 <= 227 * 1024,
              "more shared memory than a multiprocessor has");

struct Barriers {
    u32 base;
    INLINE u32 keys_full() const { return base; }
    INLINE u32 keys_empty() const { return base + 8; }
    INLINE u32 values_full() const { return base + 16; }
    INLINE u32 values_empty() const { return base + 24; }
    INLINE u32 p_full(u32 place) const { return base + 32 + 8 * place; }
    INLINE u32 p_empty(u32 place) const { return base + 48 + 8 * place; }
    INLINE u32 queries_full(u32 stage) const { return base + 64 + 8 * stage; }
    INLINE u32 queries_empty(u32 stage) const { return base + 64 + 8 * (QUERY_STAGES + stage); }
    INLINE u32 douts_full(u32 stage) const { return base + 64 + 8 * (2 * QUERY_STAGES + stage); }
    INLINE u32 douts_empty(u32 stage) const { return base + 64 + 8 * (2 * QUERY_STAGES + DOUT_STAGES + stage); }
};

INLINE void copy_ahead(unsigned char* shared, u32 base, const Barriers& barriers, const Maps& maps, const float* lse,
                       const float* delta, const int* table, u32* counter, int items_at, int tasks_at, const int4* pairs,
                       int kv_heads, Heads heads, int window, u32 lane) {
    const Work work = {table[0], table[1]};
    const int4* entries = reinterpret_cast<const int4*>(table + items_at);
    const int4* tasks = reinterpret_cast<const int4*>(table + tasks_at);
    int4* said = reinterpret_cast<int4*>(shared + AT_TILE);
    const u32 items = work.count * heads.count;
    Ring<QUERY_STAGES> query_ring;
    Ring<DOUT_STAGES> dout_ring;
    u32 next = 0, tile_empty = 1;
    if (lane == 0) next = draw(counter, items);
    while (true) {
        const u32 item = __shfl_sync(~0u, next, 0);
        if (item >= items) {
            wait(barriers.keys_empty(), tile_empty);
            if (lane == 0) {
                *said = make_int4(0, 0, 0, 0);
                arrive(barriers.keys_full());
            }
            return;
        }
        int entry, head;
        locate(work, item, heads.count, entry, head);
        head += heads.first;
        const int4 tile = entries[entry];
        const int k_first = tile.x, k_count = count_of(tile.y), k_end = k_first + k_count;
        int left = tile.z;
        for (int number = tile.w; left > 0; number++) {
            const Task task = {tasks[2 * number], tasks[2 * number + 1]};
            const int low = max(k_first, task.k_begin), high = min(min(k_end, task.k_end), task.q_end + task.shift);
            if (low >= high) continue;  // the task sees no key of the tile
            const int first_block = task.first_block(low), stop = task.stop_block(high, window);
            int place = 0;
            for (int block = stop - 1; block >= first_block; block--, left--) {
                if (DS_OUT && (stop - 1 - block) % 32 == 0) {  // each lane loads one of the next 32 blocks
                    const int4 pair = pairs[task.pair_base + max(0, block - static_cast<int>(lane))];
                    place = pair.z + (k_first - pair.x) / KEYS;
                }
                const int ds_place = DS_OUT ? __shfl_sync(~0u, place, (stop - 1 - block) % 32) : 0;
                if (left == 1 && lane == 0) next = draw(counter, items);  // not earlier, for load balance
                const BlockStep step = {task, block, k_first, window};
                const int q_first = step.q_first, q_count = step.q_count;
                const u32 stage = query_ring.stage, dout_stage = dout_ring.stage;
                wait(barriers.queries_empty(stage), query_ring.empty());
                if (lane == 0) {
                    int4* block_said = reinterpret_cast<int4*>(shared + AT_BLOCKS) + 2 * stage;
                    block_said[0] = make_int4(step.diagonal, task.k_begin - k_first, task.k_end - k_first, q_count * G);
                    block_said[1] = make_int4(step.masked, ds_place, 0, 0);
                }
                copy_queries(base + AT_QUERIES + stage * ROW_TILE, maps.queries, maps.query_rows,
                             barriers.queries_full(stage), q_first, q_count, head, lane);
                copy_numbers(base + AT_LSE + stage * ROWS * 4, lse, barriers.queries_full(stage), q_first, q_count,
                             head, kv_heads, lane);
                if (left == tile.z) {  // queries first: keys and values may have to wait
                    wait(barriers.keys_empty(), tile_empty);
                    if (lane == 0) *said = make_int4(tile.x, tile.y, tile.z, head);
                    copy_keys(base + AT_KEYS, maps.keys, maps.key_rows, barriers.keys_full(), k_first, k_count, head,
                              lane);
                }
                wait(barriers.douts_empty(dout_stage), dout_ring.empty());
                copy_queries<DV>(base + AT_DOUTS + dout_stage * DOUT_TILE, maps.douts, maps.dout_rows,
                                 barriers.douts_full(dout_stage), q_first, q_count, head, lane);
                copy_numbers(base + AT_DELTA + dout_stage * ROWS * 4, delta, barriers.douts_full(dout_stage), q_first,
                             q_count, head, kv_heads, lane);
                if (left == tile.z) {
                    wait(barriers.values_empty(), tile_empty);
                    copy_keys<DV>(base + AT_VALUES, maps.values, maps.value_rows, barriers.values_full(), k_first,
                                  k_count, head, lane);
                }
                query_ring.advance();
                dout_ring.advance();
            }
        }
        tile_empty ^= 1;
    }
}
