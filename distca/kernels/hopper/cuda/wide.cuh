// Wide heads: products with more columns, and tile sizes for values whose head dim differs from that of keys.
//
// D is the head dim of queries and keys, DV that of values and outs, and KEYS the keys of a tile. TABLE_KEYS is the
// tile size of the tables, if it differs.

#ifndef TABLE_KEYS
#define TABLE_KEYS KEYS
#endif

#define TEXT40 TEXT32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define TEXT96                                                         \
    TEXT64                                                             \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
    ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define TEXT128                                                                        \
    TEXT96                                                                             \
    ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"     \
    ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define HELD40(d) HELD32(d, 0), HELD4(d, 32), HELD4(d, 36)
#define HELD96(d) HELD64(d), HELD32(d, 64)
#define HELD128(d) HELD96(d), HELD32(d, 96)

PRODUCT_SHARED(40, "m64n80k16", TEXT40, HELD40(d), "%40", "%41", "%42", "%43", "%44")
PRODUCT_SHARED(96, "m64n192k16", TEXT96, HELD96(d), "%96", "%97", "%98", "%99", "%100")
PRODUCT_SHARED(128, "m64n256k16", TEXT128, HELD128(d), "%128", "%129", "%130", "%131", "%132")
PRODUCT_REGISTERS(96, "m64n192k16", TEXT96, HELD96(d), "{%96,%97,%98,%99}", "%100", "%101", "%102")
PRODUCT_REGISTERS(128, "m64n256k16", TEXT128, HELD128(d), "{%128,%129,%130,%131}", "%132", "%133", "%134")

// Rows of this warp as left operands, 16 columns of them at a time.
template <int COUNT>
INLINE void load_rows(u32 (&to)[COUNT][4], u32 rows, u32 panel, u32 warp, u32 lane) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        load_matrices(to[i], rows + i / 4 * panel + swizzled(16 * warp + (lane & 15), i % 4 * 2 + (lane >> 4)));
}

// Products of 64 rows with the columns of a tile, over DIM: scores, or those of output gradients and values. Rows are
// those of a block or of a tile of keys, whichever is given first; HELD times 16 columns of them are in registers.
template <int DIM, int HELD = 0, int N>
INLINE void issue_rows(float (&s)[N], u32 rows, u32 row_panel, u32 columns, u32 column_panel,
                       const u32 (*held)[4] = nullptr) {
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
        const u64 a = inner_descriptor(rows + i / 4 * row_panel) + i % 4 * INNER_STEP;
        const u64 b = inner_descriptor(columns + i / 4 * column_panel) + i % 4 * INNER_STEP;
        if constexpr (HELD > 0) {
            if (i < HELD) {
                product<0>(s, held[i][0], held[i][1], held[i][2], held[i][3], b, i > 0);
                continue;
            }
        }
        product<0, 0>(s, a, b, i > 0);
    }
    products_commit();
}

// Sums (+)= left operand in registers times COUNT rows of a tile: outs from values, or gradients.
template <int COUNT, int N>
INLINE void issue_sums(float (&sums)[N], const u32 (&left)[COUNT / 4], u32 tile, u32 panel) {
    const u64 b = outer_descriptor(tile, panel);
#pragma unroll
    for (int i = 0; i < COUNT / 16; i++)
        product<1>(sums, left[4 * i], left[4 * i + 1], left[4 * i + 2], left[4 * i + 3], b + i * OUTER_STEP, true);
    products_commit();
}

// A warp writes its 16 rows from registers. Lanes swap pairs with their neighbours, so that each lane writes eight
// bytes of a row and four lanes write 32 contiguous bytes.
template <int DIM, class Rows>
INLINE void write_rows(bf16* out, const float (&x)[DIM / 2], float factor0, float factor1, const Rows& rows, u32 warp,
                       u32 lane) {
    const bool odd = lane & 1;
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
        const int row = 16 * warp + lane / 4 + 4 * e;
        const float factor = e ? factor1 : factor0;
        uint2* to = reinterpret_cast<uint2*>(out + rows.place(row) * DIM + (odd ? 8 : 0) + (lane & 2) * 2);
#pragma unroll
        for (int i = 0; i < DIM / 2; i += 8) {
            const float scaled[4] = {x[i + e] * factor, x[i + e + 1] * factor, x[i + e + 4] * factor,
                                     x[i + e + 5] * factor};
            u32 pairs[2];
            round_pairs(pairs, scaled);
            const u32 kept = odd ? pairs[1] : pairs[0], traded = __shfl_xor_sync(~0u, odd ? pairs[0] : pairs[1], 1);
            if (row < rows.rows) to[i / 2] = odd ? make_uint2(traded, kept) : make_uint2(kept, traded);
        }
    }
}
