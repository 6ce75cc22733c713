// Final norm, head, and the greedy next token.
//
//   logits[i][o] = bend(Σ_k head[o][k] * norm(hidden[row_of[i]])[k]);   next[i] = the first largest of logits[i]
//
// Shapes: hidden [any, columns] f32, row_of [rows], logits [rows, outputs] f32, next [rows].
// best [rows] (64 bits: a logit in order, then the complement of its index) and arrived [ceil(rows / M)] belong to the kernel between
// launches: 0xffffffff and 0 before the first, and again after each. Grid, block, shared memory, bytes: as linear.cuh, and 4 per logit.
// Logits are bent towards softcap where that is above 0. head_DTYPE_mM: M rows at a time. A logit that is not a number is never the largest.

#include "blocks.cuh"
#include "heads.cuh"

template <class F, int M>
__device__ inline void head(const LinearInput& in, const LinearWeights& weights, float* logits, unsigned long long* best, unsigned* arrived,
                            unsigned* next, float softcap, int chunk) {
    // The best of a warp's pairs; lane m has that of row m.
    unsigned long long mine = NO_LOGIT;
    multiply<F, M>(in, weights, chunk, [&](int pair, int first_row, int count, const float (&sums)[2][M]) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int m = 0; m < M; ++m) {
            if (lane != m || m >= count) continue;
            float* out = logits + (size_t)(first_row + m) * weights.outputs + 2 * pair;
            const float first = bent(sums[0][m], softcap);
            out[0] = first;
            mine = max(mine, in_order(first, 2 * pair));
            if (2 * pair + 1 < weights.outputs) {
                const float second = bent(sums[1][m], softcap);
                out[1] = second;
                mine = max(mine, in_order(second, 2 * pair + 1));
            }
        }
    });
    SHARED(unsigned long long[WARPS * M], of_warps);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (lane < M) of_warps[warp * M + lane] = mine;
    __syncthreads();
    if (warp > 0) return;
    const int row = pass_of_grid() * M + lane;
    const bool has_row = lane < M && row < in.rows;
    if (has_row) {
        for (int w = 1; w < WARPS; ++w) mine = max(mine, of_warps[w * M + lane]);
        atomicMax(best + row, mine);
    }
    // The last block to come has the largest of all.
    __threadfence();
    __syncwarp();
    unsigned before = 0;
    if (lane == 0) before = atomicInc(arrived + pass_of_grid(), gridDim.x - 1);
    if (__shfl_sync(ALL_LANES, before, 0) != gridDim.x - 1) return;
    __threadfence();
    if (has_row) {
        next[row] = ~(unsigned)__ldcg(best + row);
        best[row] = NO_LOGIT;
    }
}

#define KERNEL(dtype, F, M)                                                                                                            \
    HBMARK_KERNEL_BOUNDED(THREADS, resident(M), head_##dtype##_m##M, const float* hidden, const unsigned* row_of,      \
                          const float* norm, float norm_eps, const uint4* data,                              \
                          const float* scales, float* logits, unsigned long long* best,         \
                          unsigned* arrived, unsigned* next, float softcap, int rows, int columns, int outputs, \
                          int vectors, int shift, int chunk) {                                                                                    \
        head<F, M>({hidden, row_of, norm, norm_eps, rows, columns}, {data, scales, nullptr, outputs, vectors, shift}, logits, best,   \
                   arrived, next, softcap, chunk);                                                                                              \
    }
#define KERNELS(dtype, F) KERNEL(dtype, F, 1) KERNEL(dtype, F, 2) KERNEL(dtype, F, 4)
HBMARK_FOR_EACH_FORMAT(KERNELS)
HBMARK_FOR_EACH_BLOCK(KERNELS)
KERNEL(fp8, FormatFp8, 1)
KERNEL(fp8, FormatFp8, 2)
#undef KERNELS
#undef KERNEL
