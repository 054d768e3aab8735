// The copying warp of backward: the layout of shared memory, and the copies for each tile.

constexpr int STAGES = D == 64 ? 4 : 3;
constexpr int AT_KEYS = 0;  // two slots
constexpr int AT_VALUES = AT_KEYS + 2 * KEY_TILE;
constexpr int AT_QUERIES = AT_VALUES + KEY_TILE;           // stages of queries and output gradients
constexpr int AT_DS = AT_QUERIES + STAGES * 2 * ROW_TILE;  // two of dS, rows are keys; dV and dK in the end
constexpr int AT_LSE = AT_DS + 2 * DS_TILE;                // stages of float[ROWS], times log2(e)
constexpr int AT_DELTA = AT_LSE + STAGES * ROWS * 4;       // rowsum(dO * O), likewise
constexpr int AT_TILES = AT_DELTA + STAGES * ROWS * 4;     // int4 of a slot: k_first, k_count, blocks, head
constexpr int AT_BLOCKS = AT_TILES + 2 * 16;               // two int4 of a stage
constexpr int AT_BARRIERS = AT_BLOCKS + STAGES * 32;
constexpr int BLOCK_FLOATS = ROWS * D;  // of dQ's sum
static_assert(ROWS == 64 && KEYS == 64 * BLOCKS, "a warpgroup's keys are the rows of its matrix products");
static_assert(AT_BARRIERS + (10 + 4 * STAGES) * 8 + 1023 <= 227 * 1024, "more shared memory than a multiprocessor has");

struct Barriers {
    u32 base;
    INLINE u32 keys_full(u32 slot) const { return base + 8 * slot; }
    INLINE u32 keys_empty(u32 slot) const { return base + 16 + 8 * slot; }
    INLINE u32 ds_full(u32 place) const { return base + 32 + 8 * place; }
    INLINE u32 ds_empty(u32 place) const { return base + 48 + 8 * place; }
    INLINE u32 values_full() const { return base + 64; }
    INLINE u32 values_empty() const { return base + 72; }
    INLINE u32 queries_full(u32 stage) const { return base + 80 + 8 * stage; }
    INLINE u32 queries_empty(u32 stage) const { return base + 80 + 8 * (STAGES + stage); }
    INLINE u32 douts_full(u32 stage) const { return base + 80 + 8 * (2 * STAGES + stage); }
    INLINE u32 douts_empty(u32 stage) const { return base + 80 + 8 * (3 * STAGES + stage); }
};

INLINE void copy_ahead(unsigned char* shared, u32 base, const Barriers& barriers, const Maps& maps, const float* lse,
                       const float* delta, const int* table, u32* counter, int items_at, int tasks_at, const int4* pairs,
                       int num_places, int kv_heads, Heads heads, int window, u32 lane) {
    const Work work = {table[0], table[1]};
    const int4* entries = reinterpret_cast<const int4*>(table + items_at);
    const int4* tasks = reinterpret_cast<const int4*>(table + tasks_at);
    const u32 items = work.count * heads.count;
    const int head_places = DS_OUT ? num_places : table[2];
    Ring<2> slots;
    Ring<STAGES> ring;
    u32 next = 0, values_empty = 1;
    if (lane == 0) next = draw(counter, items);
    while (true) {
        const u32 item = __shfl_sync(~0u, next, 0), slot = slots.stage;
        int4* said = reinterpret_cast<int4*>(shared + AT_TILES) + slot;
        if (item >= items) {
            wait(barriers.keys_empty(slot), slots.empty());
            if (lane == 0) {
                *said = make_int4(0, 0, 0, 0);
                arrive(barriers.keys_full(slot));
            }
            return;
        }
        int entry, head;
        locate(work, item, heads.count, entry, head);
        const int head_place = head * head_places;
        head += heads.first;
        const int4 tile = entries[entry];
        const int k_first = tile.x, k_count = count_of(tile.y), k_end = k_first + k_count;
        int left = tile.z;
        for (int number = tile.w; left > 0; number++) {
            const Task task = {tasks[2 * number], tasks[2 * number + 1]};
            const int low = max(k_first, task.k_begin), high = min(min(k_end, task.k_end), task.q_end + task.shift);
            if (low >= high) continue;  // the task sees no key of the tile
            const int first_block = task.first_block(low), stop = task.stop_block(high, window);
            int ds_place = 0;
            // From the last to the first: tiles that start together share queries and sums in the cache.
            for (int block = stop - 1; block >= first_block; block--, left--) {
                if (left == 1 && lane == 0) next = draw(counter, items);  // not earlier, for load balance
                const BlockStep step = {task, block, k_first, window};
                const int q_first = step.q_first, q_count = step.q_count;
                const u32 stage = ring.stage;
                int place = head_place + task.block_base + block;
                if (DS_OUT) {
                    if ((stop - 1 - block) % 32 == 0) {  // each lane loads one of the next 32 blocks
                        const int4 pair = pairs[task.pair_base + max(0, block - static_cast<int>(lane))];
                        ds_place = pair.z + (k_first - pair.x) / KEYS;
                    }
                    place = head_place + __shfl_sync(~0u, ds_place, (stop - 1 - block) % 32);
                }
                wait(barriers.queries_empty(stage), ring.empty());
                if (lane == 0) {
                    int4* block_said = reinterpret_cast<int4*>(shared + AT_BLOCKS) + 2 * stage;
                    block_said[0] = make_int4(step.diagonal, task.k_begin - k_first, task.k_end - k_first, q_count * G);
                    block_said[1] = make_int4(step.masked, place, 0, 0);
                }
                const u32 at = base + AT_QUERIES + stage * 2 * ROW_TILE;
                copy_queries(at, maps.queries, maps.query_rows, barriers.queries_full(stage), q_first, q_count, head,
                             lane);
                copy_numbers(base + AT_LSE + stage * ROWS * 4, lse, barriers.queries_full(stage), q_first, q_count,
                             head, kv_heads, lane);
                if (left == tile.z) {  // queries first: keys and values may have to wait
                    wait(barriers.keys_empty(slot), slots.empty());
                    if (lane == 0) *said = make_int4(tile.x, tile.y, tile.z, head);
                    copy_keys(base + AT_KEYS + slot * KEY_TILE, maps.keys, maps.key_rows, barriers.keys_full(slot),
                              k_first, k_count, head, lane);
                }
                wait(barriers.douts_empty(stage), ring.empty());
                copy_queries(at + ROW_TILE, maps.douts, maps.dout_rows, barriers.douts_full(stage), q_first, q_count,
                             head, lane);
                copy_numbers(base + AT_DELTA + stage * ROWS * 4, delta, barriers.douts_full(stage), q_first, q_count,
                             head, kv_heads, lane);
                if (left == tile.z) {
                    wait(barriers.values_empty(), values_empty);
                    values_empty ^= 1;
                    copy_keys(base + AT_VALUES, maps.values, maps.value_rows, barriers.values_full(), k_first, k_count,
                              head, lane);
                }
                ring.advance();
            }
        }
        slots.advance();
    }
}
