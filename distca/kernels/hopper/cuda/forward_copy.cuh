// The copying warp of forward: the layout of shared memory, and the copies for each tile.

constexpr int STAGES = D == 64 ? 4 : 2;  // of keys, and of values
constexpr int SLOTS = 3;                 // of tiles: one is written, one computed, one copied
constexpr int QUERY_SLOT = BLOCKS * ROW_TILE;
constexpr int AT_QUERIES = 0;
constexpr int AT_KEYS = AT_QUERIES + SLOTS * QUERY_SLOT;
constexpr int AT_VALUES = AT_KEYS + STAGES * KEY_TILE;
constexpr int AT_TILES = AT_VALUES + STAGES * KEY_TILE;  // int4 of a slot: q_first, q_count, steps, head
constexpr int AT_STEPS = AT_TILES + SLOTS * 16;          // int4 of a stage: diagonal, keys, first, 2 * head + masked
constexpr int AT_BARRIERS = AT_STEPS + STAGES * 16;
static_assert(AT_BARRIERS + (2 * SLOTS + 4 * STAGES) * 8 + 1023 <= 227 * 1024,
              "more shared memory than a multiprocessor has");

struct Barriers {
    u32 base;
    INLINE u32 queries_full(u32 slot) const { return base + 8 * slot; }
    INLINE u32 queries_empty(u32 slot) const { return base + 8 * (SLOTS + slot); }
    INLINE u32 keys_full(u32 stage) const { return base + 8 * (2 * SLOTS + stage); }
    INLINE u32 keys_empty(u32 stage) const { return base + 8 * (2 * SLOTS + STAGES + stage); }
    INLINE u32 values_full(u32 stage) const { return base + 8 * (2 * SLOTS + 2 * STAGES + stage); }
    INLINE u32 values_empty(u32 stage) const { return base + 8 * (2 * SLOTS + 3 * STAGES + stage); }
};

INLINE void copy_ahead(unsigned char* shared, u32 base, const Barriers& barriers, const TensorMap* queries,
                       const TensorMap* keys, const TensorMap* values, const TensorMap* value_rows, const int* table,
                       u32* counter, int tiles_at, int segments_at, int kv_heads, int window, u32 lane) {
    const QueryTable entries = {table, tiles_at, segments_at, kv_heads};
    Ring<SLOTS> slots;
    Ring<STAGES> key_ring, value_ring;
    // Loading a tile's number and its entry takes two memory round trips, begun in the previous tile's last iterations.
    u32 next = 0, item = 0, trips = 1;  // to make
    int4 tile = make_int4(0, 0, 0, 0);
    if (lane == 0) next = draw(counter, entries.items);
    auto look_up = [&] {
        item = __shfl_sync(~0u, next, 0);
        int entry, head;
        locate(entries.work, item, kv_heads, entry, head);
        if (item < entries.items) tile = entries.tiles[entry];
    };
    while (true) {
        if (trips > 0) look_up();
        u32 slot = slots.stage;
        wait(barriers.queries_empty(slot), slots.empty());
        int4* said = reinterpret_cast<int4*>(shared + AT_TILES) + slot;
        if (item >= entries.items) {
            if (lane == 0) {
                *said = make_int4(0, 0, 0, 0);
                arrive(barriers.queries_full(slot));
            }
            return;
        }
        int entry, head;
        locate(entries.work, item, kv_heads, entry, head);
        const int q_first = tile.x, q_end = tile.x + count_of(tile.y);
        if (lane == 0) {
            *said = make_int4(tile.x, tile.y, tile.z, head);
            arrive_expecting(barriers.queries_full(slot), BLOCKS * TOKENS * G * D * 2);
            for (int i = 0; i < BLOCKS * PANELS; i++)
                copy_4d(base + AT_QUERIES + slot * QUERY_SLOT + i * ROW_PANEL, queries, barriers.queries_full(slot),
                        (i % PANELS) * 64, 0, head, q_first + (i / PANELS) * TOKENS);
        }
        slots.advance();
        int value_first = 0, value_count = 0;  // values are copied one iteration after their keys
        int left = tile.z;
        trips = 2;
        for (int number = tile.w; left > 0; number++) {
            const Segment segment = {entries.segments[number], q_first, q_end, window};
            const int stop = segment.first_tile();
            for (int n = segment.last_tile(); n >= stop; n--, left--) {
                if (left <= 3 && trips > 0) {  // not earlier, for load balance
                    if (trips == 1)
                        look_up();
                    else if (lane == 0)
                        next = draw(counter, entries.items);
                    trips--;
                }
                const Step step = {segment, n, q_first, q_end, window};
                u32 stage = key_ring.stage;
                wait(barriers.keys_empty(stage), key_ring.empty());
                if (lane == 0) {
                    reinterpret_cast<int4*>(shared + AT_STEPS)[stage] =
                        make_int4(step.diagonal, step.count, step.first, 2 * head + step.masked);
                    copy_whole_keys(base + AT_KEYS + stage * KEY_TILE, keys, barriers.keys_full(stage), step.first,
                                    head);
                }
                key_ring.advance();
                if (value_count)
                    copy_values(base + AT_VALUES, barriers, values, value_rows, value_ring, value_first, value_count, head, lane);
                value_first = step.first;
                value_count = step.count;
            }
        }
        copy_values(base + AT_VALUES, barriers, values, value_rows, value_ring, value_first, value_count, head, lane);
    }
}
