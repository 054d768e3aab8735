// The copying warp of forward: where everything stands in shared memory, and what is brought there for each tile.

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

INLINE void copy_values(u32 base, const Barriers& barriers, const TensorMap* values, const TensorMap* value_rows,
                        Ring<STAGES>& ring, int first, int count, int head, u32 lane) {
    wait(barriers.values_empty(ring.stage), ring.empty());
    copy_keys(base + AT_VALUES + ring.stage * KEY_TILE, values, value_rows, barriers.values_full(ring.stage), first,
              count, head, lane);
    ring.advance();
}

INLINE void copy_ahead(unsigned char* shared, u32 base, const Barriers& barriers, const TensorMap* queries,
                       const TensorMap* keys, const TensorMap* values, const TensorMap* value_rows, const int* table,
                       u32* counter, int tiles_at, int segments_at, int kv_heads, int window, u32 lane) {
    const Work work = {table[0], table[1]};
    const int4* tiles = reinterpret_cast<const int4*>(table + tiles_at);
    const int4* segments = reinterpret_cast<const int4*>(table + segments_at);
    const u32 items = work.count * kv_heads;
    Ring<SLOTS> slots;
    Ring<STAGES> key_ring, value_ring;
    // A tile's number and its entry are a trip to memory each, begun with one of the last steps of the tile before.
    u32 next = 0, item = 0, trips = 1;  // to make
    int4 tile = make_int4(0, 0, 0, 0);
    if (lane == 0) next = draw(counter, items);
    auto look_up = [&] {
        item = __shfl_sync(~0u, next, 0);
        int entry, head;
        locate(work, item, kv_heads, entry, head);
        if (item < items) tile = tiles[entry];
    };
    while (true) {
        if (trips > 0) look_up();
        u32 slot = slots.stage;
        wait(barriers.queries_empty(slot), slots.empty());
        int4* said = reinterpret_cast<int4*>(shared + AT_TILES) + slot;
        if (item >= items) {
            if (lane == 0) {
                *said = make_int4(0, 0, 0, 0);
                arrive(barriers.queries_full(slot));
            }
            return;
        }
        int entry, head;
        locate(work, item, kv_heads, entry, head);
        const int q_first = tile.x, q_end = tile.x + queries_of(tile.y);
        if (lane == 0) {
            *said = make_int4(tile.x, tile.y, tile.z, head);
            arrive_expecting(barriers.queries_full(slot), BLOCKS * TOKENS * G * D * 2);
            for (int i = 0; i < BLOCKS * PANELS; i++)
                copy_4d(base + AT_QUERIES + slot * QUERY_SLOT + i * ROW_PANEL, queries, barriers.queries_full(slot),
                        (i % PANELS) * 64, 0, head, q_first + (i / PANELS) * TOKENS);
        }
        slots.advance();
        int value_first = 0, value_count = 0;  // values are copied one step behind their keys
        int left = tile.z;
        trips = 2;
        for (int number = tile.w; left > 0; number++) {
            const int4 segment = segments[number];
            const int k_begin = segment.x, k_end = segment.y, shift = segment.z;
            const int high = min(k_end, q_end + shift);
            const int low = WINDOWED ? max(k_begin, q_first + shift - window + 1) : k_begin;
            const int stop = (low - k_begin) / KEYS;
            for (int n = (high - k_begin + KEYS - 1) / KEYS - 1; n >= stop; n--, left--) {
                if (left <= 3 && trips > 0) {  // not earlier: others may be free before
                    if (trips == 1)
                        look_up();
                    else if (lane == 0)
                        next = draw(counter, items);
                    trips--;
                }
                const int first = k_begin + n * KEYS, count = min(KEYS, k_end - first);
                const int diagonal = q_first + shift - first;  // the last key that the first query sees
                bool masked = diagonal < KEYS - 1 || count < KEYS;
                if (WINDOWED) masked |= q_end - 1 + shift - window + 1 > first;
                u32 stage = key_ring.stage;
                wait(barriers.keys_empty(stage), key_ring.empty());
                if (lane == 0) {
                    reinterpret_cast<int4*>(shared + AT_STEPS)[stage] =
                        make_int4(diagonal, count, first, 2 * head + masked);
                    arrive_expecting(barriers.keys_full(stage), KEY_TILE);
                    for (int i = 0; i < PANELS; i++)
                        copy_3d(base + AT_KEYS + stage * KEY_TILE + i * KEY_PANEL, keys, barriers.keys_full(stage),
                                i * 64, head, first);
                }
                key_ring.advance();
                if (value_count)
                    copy_values(base, barriers, values, value_rows, value_ring, value_first, value_count, head, lane);
                value_first = first;
                value_count = count;
            }
        }
        copy_values(base, barriers, values, value_rows, value_ring, value_first, value_count, head, lane);
    }
}
