// Output and down projection with the residual.
//
//   hidden[row][o] += Σ_k weights[o][k] * input[row][k] + bias[o]
//
// Shapes: input [rows, columns] f32, hidden [rows, outputs] f32. Grid, block, shared memory, bytes: as linear.cuh.
// project_add_DTYPE_mM: M rows at a time.

#include "blocks.cuh"

template <class F, int M>
__device__ inline void project_add(const LinearInput& in, const LinearWeights& weights, float* hidden, int chunk) {
    multiply<F, M>(in, weights, chunk, [&](int pair, int first_row, int count, const float (&sums)[2][M]) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int m = 0; m < M; ++m) {
            if (lane != m || m >= count) continue;
            float* out = hidden + (size_t)(first_row + m) * weights.outputs + 2 * pair;
            out[0] += sums[0][m];
            if (2 * pair + 1 < weights.outputs) out[1] += sums[1][m];
        }
    });
}

#define KERNEL(dtype, F, M)                                                                                                         \
    HBMARK_KERNEL_BOUNDED(THREADS, resident(M), project_add_##dtype##_m##M, const float* input, const uint4* data,  \
                          const float* scales, const float* bias, float* hidden, int rows,   \
                          int columns, int outputs, int vectors, int shift, int chunk) {                                                       \
        project_add<F, M>({input, nullptr, nullptr, 0, rows, columns}, {data, scales, bias, outputs, vectors, shift}, hidden, chunk);      \
    }
#define KERNELS(dtype, F) KERNEL(dtype, F, 1) KERNEL(dtype, F, 2) KERNEL(dtype, F, 4)
HBMARK_FOR_EACH_LINEAR(KERNELS, KERNEL)
HBMARK_FOR_EACH_BLOCK(KERNELS)
#undef KERNELS
#undef KERNEL
