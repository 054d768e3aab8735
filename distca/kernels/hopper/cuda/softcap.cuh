// Softcap c, if SOFTCAP: a score x becomes c tanh(x / c), and its gradient is multiplied by 1 - tanh(x / c)^2.
//
// The special function unit's tangents are good to 11 bits only, which scores of 20 would turn into errors of 1 % in
// their probabilities. So forward, whose outs and log-sum-exps everything else refers to, computes tangents by a
// polynomial if all scores of a warp are small enough (forward_softmax.cuh), or else from exponentials. Backward takes
// the unit's: from exponentials that unit is the limit, and no vote on sizes is worth it there.

#ifndef SOFTCAP
#define SOFTCAP 0
#endif

#define HIDDEN_TANGENT -1e18f  // of keys that a query does not see: no probability, and a finite square

struct Scaling {
    float log2;     // exponents to base 2 are scores, or tangents, times this
    float tangent;  // q·k times this is the argument of the tangent

    INLINE Scaling(float scale, float softcap)
        : log2((SOFTCAP ? softcap : scale) * LOG2E), tangent(SOFTCAP ? scale / softcap : 0.f) {}
};

// Replace scores by the tangents of scores times `by`, in place.
template <int N>
INLINE void cap(float (&s)[N], float by) {
#pragma unroll
    for (int i = 0; i < N; i++) s[i] = 1.f - __fdividef(2.f, 1.f + exp2_fast(s[i] * (2 * LOG2E * by)));
}

// The same to 11 bits.
template <int N>
INLINE void cap_roughly(float (&s)[N], float by) {
#pragma unroll
    for (int i = 0; i < N; i++) asm("tanh.approx.f32 %0, %1;" : "=f"(s[i]) : "f"(s[i] * by));
}
