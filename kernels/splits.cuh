// Attention that several blocks share by positions, merged by the block that comes last.
//
//   out[h] = Σ_s 2^(m[h][s] - m) * partial[h][s] / Σ_s 2^(m[h][s] - m) * l[h][s],   m the largest of m[h]
//
// A head here is a query head of a row. Shapes: partial [heads, stride, head_dim] f32, not yet divided; statistics [heads, stride]: (m, the
// largest score in units of log2; l, the sum of weights); arrived, a word for the blocks that share heads, is 0 before the first launch and
// after each. Bytes: what the splits wrote, once more. Idea: Flash-Decoding (Dao et al., 2023).
#pragma once

#include "elements.cuh"

// Splits whose values are asked for together.
constexpr int MERGED_AT_ONCE = 16;

__device__ inline void add_scaled(float4& sum, float weight, float4 x) {
    sum.x += weight * x.x;
    sum.y += weight * x.y;
    sum.z += weight * x.z;
    sum.w += weight * x.w;
}
__device__ inline float4 divided(float4 x, float by) { return make_float4(x.x / by, x.y / by, x.z / by, x.w / by); }

// Merges `count` heads of `splits` splits each, by all WARPS_OF_BLOCK warps of a block: `head_of(i)` is the head of the i-th, `store(at, value)` takes
// four elements of it at a time. counts: count * splits floats of shared memory.
template <int WARPS_OF_BLOCK, class HeadOf, class Store>
__device__ inline void merge_splits(const float* partial, const float2* statistics, int stride, int splits, int count, int head_dim, float* counts,
                                    HeadOf head_of, Store store) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, fours = head_dim / 4;
    // What each split counts, [i][split], by a warp per head; the sum over them divides it.
    for (int i = warp; i < count; i += WARPS_OF_BLOCK) {
        const float2* of_splits = statistics + head_of(i) * stride;
        float most = -INFINITY, sum = 0;
        for (int s = lane; s < splits; s += WARP) most = fmaxf(most, __ldcg(of_splits + s).x);
        most = warp_max(most);
        for (int s = lane; s < splits; s += WARP) {
            const float2 one = __ldcg(of_splits + s);
            const float weight = exp2f(one.x - most);
            sum += weight * one.y;
            counts[i * splits + s] = weight;
        }
        sum = warp_sum(sum);
        for (int s = lane; s < splits; s += WARP) counts[i * splits + s] /= sum;
    }
    __syncthreads();
    for (int at = threadIdx.x; at < count * fours; at += WARPS_OF_BLOCK * WARP) {
        const int i = at / fours, four = at % fours;
        const size_t head = head_of(i);
        const float4* from = (const float4*)(partial + head * stride * head_dim) + four;
        float4 value = make_float4(0, 0, 0, 0);
        for (int s = 0; s < splits; s += MERGED_AT_ONCE) {
            float4 one[MERGED_AT_ONCE];
#pragma unroll
            for (int u = 0; u < MERGED_AT_ONCE; ++u) one[u] = __ldcg(from + (size_t)min(s + u, splits - 1) * fours);
#pragma unroll
            for (int u = 0; u < MERGED_AT_ONCE; ++u)
                if (s + u < splits) add_scaled(value, counts[i * splits + s + u], one[u]);
        }
        store(head * fours + four, value);
    }
}
