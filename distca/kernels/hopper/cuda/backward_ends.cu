// The kernels before and after backward's main kernel; both are memory-bound.

// Before: delta = rowsum(dO * O), the log-sum-exp to base 2 (a query without keys gets probabilities of zero), and
// zeros in the workspace of dQ's sums.
extern "C" __global__ void __launch_bounds__(256)
    attention_delta(const bf16* out, const bf16* dout, const float* lse, float* lse_log2, float* delta, long rows,
                    uint4* zeros, long num_zeros) {
    constexpr int LANES = DV / 8;  // 8 numbers each
    const long first = blockIdx.x * 256L + threadIdx.x, step = gridDim.x * 256L;
    for (long i = first; i < num_zeros; i += step) zeros[i] = make_uint4(0, 0, 0, 0);
    const u32 lane = threadIdx.x % LANES;
    for (long thread = first; thread - threadIdx.x < rows * LANES; thread += step) {
        const long place = thread / LANES, row = min(place, rows - 1);
        const uint4 a = reinterpret_cast<const uint4*>(out + row * DV)[lane];
        const uint4 b = reinterpret_cast<const uint4*>(dout + row * DV)[lane];
        const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 4; i++)
            sum += __uint_as_float(x[i] << 16) * __uint_as_float(y[i] << 16) +
                   __uint_as_float(x[i] & 0xFFFF0000u) * __uint_as_float(y[i] & 0xFFFF0000u);
#pragma unroll
        for (int hop = LANES / 2; hop > 0; hop /= 2) sum += __shfl_xor_sync(~0u, sum, hop);
        if (lane == 0 && place < rows) {
            const float value = lse[row];
            delta[row] = sum;
            lse_log2[row] = value == -INFINITE ? INFINITE : value * LOG2E;
        }
    }
}

// After: convert dQ from accumulator order, scale and round it. A thread block loops over blocks; a thread converts
// eight columns of a row and of the row eight below, which are in 64 bytes. A warpgroup's 64 columns are contiguous.
extern "C" __global__ void __launch_bounds__(256)
    attention_write_dq(bf16* dq, const float* dq_sum, const int* table, int blocks_at, int kv_heads, float scale) {
    constexpr int CHUNKS = D / 8;  // eight columns each
    const int2* entries = reinterpret_cast<const int2*>(table + blocks_at);
    const int used = table[2];
    for (int item = blockIdx.x; item < used * kv_heads; item += gridDim.x) {
        const int head = item / used;
        const int2 block = entries[item % used];
        for (int part = threadIdx.x; part < CHUNKS * 32; part += 256) {
            const int chunk = part % CHUNKS, upper = part / CHUNKS;  // of 32 upper rows
            const float4* from = reinterpret_cast<const float4*>(dq_sum + static_cast<long>(item) * BLOCK_FLOATS) +
                                 chunk * 128 + upper * 4;
            float above[8], below[8];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float4 x = from[i];
                above[2 * i] = x.x * scale;
                above[2 * i + 1] = x.y * scale;
                below[2 * i] = x.z * scale;
                below[2 * i + 1] = x.w * scale;
            }
            u32 rounded[2][4];
            round_pairs(rounded[0], above);
            round_pairs(rounded[1], below);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = upper / 8 * 16 + upper % 8 + 8 * i;
                const long place = static_cast<long>(block.x + row / G) * kv_heads * G + head * G + row % G;
                if (row < block.y * G)
                    reinterpret_cast<uint4*>(dq + place * D)[chunk] =
                        make_uint4(rounded[i][0], rounded[i][1], rounded[i][2], rounded[i][3]);
            }
        }
    }
}
