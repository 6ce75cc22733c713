// Norm, gate and up projection, and their product.
//
//   out[row][i] = activated(gate[i]) * up[i],   gate, up = W · norm(hidden[row]) + b;   how they meet: struct Gate
//
// Shapes: hidden [rows, columns] f32; output 2i of the matrix is row i of gate, output 2i + 1 row i of up; out [rows, outputs / 2] f32.
// Grid, block, shared memory, bytes: as linear.cuh. gate_up_DTYPE_mM: M rows at a time.

#include "blocks.cuh"

template <class F, int M>
__device__ inline void gate_up(const LinearInput& in, const LinearWeights& weights, float* out, const Gate& gate, int chunk) {
    multiply<F, M>(in, weights, chunk, [&](int pair, int first_row, int count, const float (&sums)[2][M]) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int m = 0; m < M; ++m) {
            if (lane != m || m >= count) continue;
            out[(size_t)(first_row + m) * (weights.outputs / 2) + pair] = gated(gate, sums[0][m], sums[1][m]);
        }
    });
}

#define KERNEL(dtype, F, M)                                                                                                            \
    HBMARK_KERNEL_BOUNDED(THREADS, resident(M), gate_up_##dtype##_m##M, const float* hidden, const float* norm,        \
                          float norm_eps, const uint4* data, const float* scales,                            \
                          const float* bias, float* out, int function, float limit, int rows, int columns, int outputs, \
                          int vectors, int shift, int chunk) {                                                                                    \
        gate_up<F, M>({hidden, nullptr, norm, norm_eps, rows, columns}, {data, scales, bias, outputs, vectors, shift}, out, {function, limit}, chunk);     \
    }
#define KERNELS(dtype, F) KERNEL(dtype, F, 1) KERNEL(dtype, F, 2) KERNEL(dtype, F, 4)
HBMARK_FOR_EACH_LINEAR(KERNELS, KERNEL)
HBMARK_FOR_EACH_BLOCK(KERNELS)
#undef KERNELS
#undef KERNEL
