// The running softmax of forward, without a running maximum, whose search took a quarter of an iteration.
//
// A row's reference, the largest score of its first key tile, is subtracted before exponentials. Any number near enough
// to the row's maximum gives the same result, since rounding of probabilities and sums is relative, so later iterations
// need no maximum. If a sum exceeds MOST, the reference was too small; the warp then redoes the iteration with that
// iteration's largest score.

constexpr float MOST = 1e18f;     // largest sum: far below float32's limit, and never reached by a model's scores
constexpr int SCORES = KEYS / 2;  // of a thread

INLINE float depending(float x, float on, u32 zero) {
    return __uint_as_float(__float_as_uint(x) | (__float_as_uint(on) & zero));
}

struct Keys {  // as they lie in memory, in numbers
    const bf16* first;
    long token_stride, head_stride;
};

// Exponents to base 2 of scores, or of tangents of capped scores.
struct Line {
    float by;

    INLINE float operator()(float x, float reference) const { return x * by - reference; }
    INLINE Line depending_on(float x, u32 zero) const { return {depending(by, x, zero)}; }
};

// Exponents of capped scores by polynomials for the tangent, in units in which a score of 2 is at most a quarter of the
// cap. Up to there SLIGHT has a relative error below 6.4e-5; up to twice that the other has one below 2.3e-5, and falls
// without bound for negative scores, so HIDDEN_SCORE gets no probability.
#define HIDDEN_SCORE -1e15f

template <bool SLIGHT>
struct Bend {
    float by1, by3, by5;

    INLINE Bend(float by1, float by3, float by5) : by1(by1), by3(by3), by5(by5) {}
    INLINE Bend(float log2, float tangent)
        : by1((SLIGHT ? 0.999936648f : 0.999977436f) * tangent * log2),
          by3((SLIGHT ? -0.325185005f : -0.331691491f) * tangent * tangent * tangent * log2),
          by5(0.115209699f * tangent * tangent * tangent * tangent * tangent * log2) {}
    INLINE float operator()(float x, float reference) const {
        const float y = x * x;
        return x * ((SLIGHT ? by3 : by5 * y + by3) * y + by1) - reference;
    }
    INLINE Bend depending_on(float x, u32 zero) const {
        return {by1, SLIGHT ? depending(by3, x, zero) : by3, SLIGHT ? by5 : depending(by5, x, zero)};
    }
};

// The units for Bend. Where queries can be changed, they are multiplied by a power of two instead of every score: that
// is exact, and saves an instruction per score.
struct Units {
    float by;       // q·k times this is in these units
    float tangent;  // a score in these units times this is the argument of the tangent

    INLINE Units(const Scaling& scaling, bool of_queries) : by(8 * scaling.tangent) {
        if (of_queries) by = 2 * __uint_as_float(__float_as_uint(by) & 0x7F800000);
        tangent = scaling.tangent / by;
    }
};

// Return whether all scores of a warp times `by` are below 2.
INLINE bool are_small(const float (&s)[SCORES], float by) {
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < SCORES; i++) bits |= __float_as_uint(s[i] * by);  // bit 30 is set from 2 on
    return !__any_sync(~0u, bits & 1u << 30);
}

// Of two rows of a lane.
struct Softmax {
    float from0 = NONE, from1 = NONE;  // references, scaled to base 2
    float sum0 = 0, sum1 = 0;          // this lane's parts
    float keep0 = 1, keep1 = 1;        // scale for earlier sums if references have moved

    INLINE void mask(float (&s)[SCORES], float hidden_score, int4 step, int half, int window, u32 warp, u32 lane) {
        const int row = 16 * warp + lane / 4, token0 = row / G + half * TOKENS, token1 = (row + 8) / G + half * TOKENS;
        hide_keys(s, hidden_score, step, token0, token1, window, lane);
    }

    INLINE bool lacks_references() const { return __any_sync(~0u, from0 == NONE || from1 == NONE); }

    template <class Exponent>
    INLINE void find_references(const float (&s)[SCORES], const Exponent& exponent) {
        float high0 = -INFINITE, high1 = -INFINITE;
#pragma unroll
        for (int i = 0; i < SCORES; i += 4) {
            high0 = fmaxf(high0, fmaxf(s[i], s[i + 1]));
            high1 = fmaxf(high1, fmaxf(s[i + 2], s[i + 3]));
        }
#pragma unroll
        for (int hop = 1; hop <= 2; hop++) {
            high0 = fmaxf(high0, __shfl_xor_sync(~0u, high0, hop));
            high1 = fmaxf(high1, __shfl_xor_sync(~0u, high1, hop));
        }
        const float new0 = fmaxf(from0, exponent(high0, 0)), new1 = fmaxf(from1, exponent(high1, 0));
        const float by0 = exp2_fast(from0 - new0), by1 = exp2_fast(from1 - new1);
        sum0 *= by0;
        sum1 *= by1;
        keep0 *= by0;
        keep1 *= by1;
        from0 = new0;
        from1 = new1;
    }

    // Compute exponentials in place and their sums; return false, without sums, if out of range and to be redone.
    template <class Exponent>
    INLINE bool exponentiate(float (&s)[SCORES], const Exponent& exponent, u32 zero, bool is_last_try) {
        // By default the compiler schedules all products first, and then the slow special function unit is the
        // bottleneck. So products get a fake dependency (zero bits) on earlier exponentials.
        constexpr int GROUP = D == 64 && !SOFTCAP ? 4 : 8, LAG = D != 64 ? 12 : SOFTCAP ? 24 : 8;
        Exponent exponent0 = exponent, exponent1 = exponent;
        float add0 = sum0, add1 = sum1;
        float then0[SCORES / 4], then1[SCORES / 4];
#pragma unroll
        for (int i = 0; i < SCORES; i += 4) {
            if (i >= LAG && i % GROUP == 0) {
                exponent0 = exponent.depending_on(then0[(i - LAG) / 4], zero);
                exponent1 = exponent.depending_on(then1[(i - LAG) / 4], zero);
            }
            s[i] = exp2_fast(exponent0(s[i], from0));
            s[i + 1] = exp2_fast(exponent0(s[i + 1], from0));
            s[i + 2] = exp2_fast(exponent1(s[i + 2], from1));
            s[i + 3] = exp2_fast(exponent1(s[i + 3], from1));
            then0[i / 4] = add0 += s[i] + s[i + 1];
            then1[i / 4] = add1 += s[i + 2] + s[i + 3];
        }
        if (!is_last_try && __any_sync(~0u, add0 > MOST || add1 > MOST)) return false;
        sum0 = add0;
        sum1 = add1;
        return true;
    }

    INLINE void rescale(float (&o)[DV / 2]) const {
        if (__any_sync(~0u, keep0 != 1.f || keep1 != 1.f)) {
#pragma unroll
            for (int i = 0; i < DV / 2; i++) o[i] *= (i & 2) ? keep1 : keep0;
        }
    }
};

// Call `run` with what makes exponents of s, whether keys are to be hidden, and the score of hidden keys. With OF_QUERIES
// scores are in `units` already.
template <bool OF_QUERIES, class Run>
INLINE bool with_exponents(float (&s)[SCORES], bool masked, const Scaling& scaling, const Units& units,
                           const Run& run) {
    if constexpr (SOFTCAP) {
#pragma unroll
        for (int i = 0; i < SCORES; i++)
            if (!OF_QUERIES) s[i] *= units.by;
        const bool small = are_small(s, 1.f);
        if (small && !masked) return run(Bend<true>(scaling.log2, units.tangent), false, 0.f);
        if (small || are_small(s, 0.5f)) return run(Bend<false>(scaling.log2, units.tangent), masked, HIDDEN_SCORE);
        cap(s, units.tangent);
    }
    return run(Line{scaling.log2}, masked, -INFINITE);
}

// Return the factors for a tile's sums, and write the log-sum-exp.
INLINE float2 finish_sums(float* lse, const Parts& parts, const Softmax& softmax, int4 tile, int half, int kv_heads,
                          u32 warp, u32 lane) {
    float sum0 = softmax.sum0, sum1 = softmax.sum1;
#pragma unroll
    for (int hop = 1; hop <= 2; hop++) {
        sum0 += __shfl_xor_sync(~0u, sum0, hop);
        sum1 += __shfl_xor_sync(~0u, sum1, hop);
    }
    const Block block = {tile, half, kv_heads};
    const int row = 16 * warp + lane / 4;
    if (SPLIT && is_part(tile)) {
        float2* to = parts.references + part_block(tile, half, kv_heads) * ROWS + row;
        if ((lane & 3) == 0) to[0] = make_float2(softmax.from0, sum0);
        if ((lane & 3) == 0) to[8] = make_float2(softmax.from1, sum1);
        return make_float2(1.f, 1.f);
    }
    if ((lane & 3) == 0 && row < block.rows) lse[block.place(row)] = (softmax.from0 + log2f(sum0)) * (1 / LOG2E);
    if ((lane & 3) == 0 && row + 8 < block.rows)
        lse[block.place(row + 8)] = (softmax.from1 + log2f(sum1)) * (1 / LOG2E);
    return make_float2(sum0 > 0 ? __fdividef(1.f, sum0) : 0.f, sum1 > 0 ? __fdividef(1.f, sum1) : 0.f);
}

