// dQ from the gradients of scores (dS) that backward stored in memory: one product instead of three.
//
// dS of a key tile and 64 rows is stored transposed, in the layout that the tensor cores read. One warp prefetches keys
// and their dS; each of the other warpgroups computes a block of queries. Blocks of a tile see different keys near the
// diagonal and at a window's end; the copying warp flags which blocks take part in an iteration.

constexpr int TILES_AT = 16;  // ints
constexpr int STAGE = KEY_TILE + BLOCKS * DS_TILE;  // bytes
constexpr int STAGES = 4 * STAGE <= 224 * 1024 ? 4 : 2;
constexpr int AT_STEPS = STAGES * STAGE;            // two int4 of a stage: the tile, and which blocks, last
constexpr int AT_BARRIERS = AT_STEPS + STAGES * 32;
static_assert(AT_BARRIERS + 2 * STAGES * 8 + 1023 <= 227 * 1024, "more shared memory than a multiprocessor has");

struct Barriers {
    u32 base;
    INLINE u32 full(u32 stage) const { return base + 8 * stage; }
    INLINE u32 empty(u32 stage) const { return base + 8 * (STAGES + stage); }
};

INLINE void copy_ahead(unsigned char* shared, u32 base, const Barriers& barriers, const TensorMap* keys,
                       const TensorMap* key_rows, const unsigned char* ds, const int* table, u32* counter, int pairs_at,
                       Heads heads, u32 lane) {
    const Work work = {table[0], table[1]};
    const int4* tiles = reinterpret_cast<const int4*>(table + TILES_AT);
    const int4* pairs = reinterpret_cast<const int4*>(table + pairs_at);
    const u32 items = work.count * heads.count;
    Ring<STAGES> ring;
    u32 next = 0;
    if (lane == 0) next = draw(counter, items);
    while (true) {
        const u32 item = __shfl_sync(~0u, next, 0);
        int4* said = reinterpret_cast<int4*>(shared + AT_STEPS);
        if (item >= items) {
            wait(barriers.empty(ring.stage), ring.empty());
            if (lane == 0) {
                said[2 * ring.stage] = make_int4(0, 0, 0, 0);
                arrive_expecting(barriers.full(ring.stage), 0);
                arrive(barriers.full(ring.stage));
            }
            return;
        }
        int entry, head;
        locate(work, item, heads.count, entry, head);
        const int4 tile = tiles[entry];  // q_first, q_count + 256 * tasks, pair of its first task, pairs to the next
        const unsigned char* mine = ds + static_cast<long>(head) * table[2] * DS_TILE;
        head += heads.first;
        const int num_rows = tile.y >> 8, q_count = tile.y & 255, used = (q_count + TOKENS - 1) / TOKENS;
        for (int row = 0; row < num_rows; row++) {
            // Lane b loads what block b sees: first key, number of tiles, place of the first tile, the task's k_end.
            const int4 pair = lane < used ? pairs[tile.z + row * tile.w + lane] : make_int4(1 << 30, 0, 0, 0);
            const int stop = lane < used ? pair.x + pair.y * KEYS : 0;
            int low = pair.x, high = stop;
#pragma unroll
            for (int hop = 1; hop < 4; hop *= 2) {
                low = min(low, __shfl_xor_sync(~0u, low, hop));
                high = max(high, __shfl_xor_sync(~0u, high, hop));
            }
            low = __shfl_sync(~0u, low, 0);
            high = __shfl_sync(~0u, high, 0);
            const int k_end = __shfl_sync(~0u, pair.w, 0);
            for (int first = high - KEYS; first >= low; first -= KEYS) {
                const bool is_last = row == num_rows - 1 && first == low;
                if (is_last && lane == 0) next = draw(counter, items);
                const u32 stage = ring.stage, at = base + stage * STAGE, barrier = barriers.full(stage);
                const bool has = pair.x <= first && first < stop;
                const u32 blocks = __ballot_sync(~0u, has);
                wait(barriers.empty(stage), ring.empty());
                if (lane == 0) {
                    said[2 * stage] = make_int4(tile.x, q_count, 1, head);
                    said[2 * stage + 1] = make_int4(blocks, is_last, 0, 0);
                    arrive_expecting(barrier, __popc(blocks) * DS_TILE);
                }
                copy_keys(at, keys, key_rows, barrier, first, min(KEYS, k_end - first), head, lane);
                if (has)
                    bulk_copy(at + KEY_TILE + lane * DS_TILE,
                               mine + static_cast<long>(pair.z + (first - pair.x) / KEYS) * DS_TILE, DS_TILE, barrier);
                ring.advance();
            }
        }
    }
}

INLINE void compute(u32 base, const Barriers& barriers, bf16* dq, int number, int kv_heads, float scale) {
    const u32 warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
    Ring<STAGES> ring;
    while (true) {
        float sum[D / 2];
        clear(sum);
        int4 tile, step;
        do {
            wait(barriers.full(ring.stage), ring.full);
            tile = load_said(base + AT_STEPS + 32 * ring.stage);
            step = load_said(base + AT_STEPS + 32 * ring.stage + 16);
            if (tile.z == 0) return;
            if (step.x >> number & 1) {
                const u32 keys = base + ring.stage * STAGE;
                const u64 a = outer_descriptor(keys + KEY_TILE + number * DS_TILE, KEY_PANEL);
                const u64 b = outer_descriptor(keys, KEY_PANEL);
                hold(sum);
                products_begin();
#pragma unroll
                for (int i = 0; i < KEYS / 16; i++)
                    product<1, 1>(sum, a + i * OUTER_STEP, b + i * OUTER_STEP, true);
                products_commit();
                products_wait<0>();
                hold(sum);
            }
            arrive(barriers.empty(ring.stage));
            ring.advance();
        } while (!step.y);
        write_rows<D>(dq, sum, scale, scale, Block(tile, number, kv_heads), warp, lane);
    }
}

extern "C" __global__ void __launch_bounds__(128 * (BLOCKS + 1), 1)
    attention_kept_dq(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap key_rows,
                      const unsigned char* ds, bf16* dq, const int* table, u32* counter, int pairs_at, int kv_heads,
                      float scale, int first_head, int num_heads) {
    unsigned char* shared = open_shared(AT_STEPS);
    const u32 base = shared_address(shared);
    const Barriers barriers = {base + AT_BARRIERS};
    if (threadIdx.x == 0)
        for (u32 i = 0; i < STAGES; i++) {
            barrier_init(barriers.full(i), 2);  // keys and gradients
            barrier_init(barriers.empty(i), READERS);
        }
    barriers_are_set();
    const int warpgroup = __shfl_sync(~0u, threadIdx.x >> 7, 0);  // so the compiler knows it is uniform in a warp
    if (warpgroup == 0) {
        if (threadIdx.x < 32)
            copy_ahead(shared, base, barriers, &keys, &key_rows, ds, table, counter, pairs_at, {first_head, num_heads},
                       threadIdx.x);
    } else {
        compute(base, barriers, dq, warpgroup - 1, kv_heads, scale);
    }
}
