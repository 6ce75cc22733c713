// A matrix of ggml's blocks in bf16, for a product of the device's library.
//
//   out[output][column] = round(weights[output][column])
//
// Shapes: weights as a matrix of blocks.cuh; out [outputs, vectors * COLUMNS]. Grid: (outputs). Block: any.
// Bytes: the matrix, and 2 * outputs * vectors * COLUMNS written.

#include "blocks.cuh"

template <class F>
__device__ inline void widen_blocks(const LinearWeights& weights, uint4* out) {
    launch_dependents();
    // The product before may still read what was there.
    wait_for_dependency();
    values_of_row<F>(weights, blockIdx.x, [&](int vector, const float (&values)[F::COLUMNS]) {
        uint4* to = out + ((size_t)blockIdx.x * weights.vectors + vector) * (F::COLUMNS / 8);
#pragma unroll
        for (int i = 0; i < F::COLUMNS; i += 8)
            to[i / 8] = make_uint4(pair<Bf16>(values[i], values[i + 1]), pair<Bf16>(values[i + 2], values[i + 3]),
                                   pair<Bf16>(values[i + 4], values[i + 5]), pair<Bf16>(values[i + 6], values[i + 7]));
    });
}

#define KERNEL(dtype, F)                                                                                                        \
    HBMARK_KERNEL_BOUNDED(THREADS, 2, widen_##dtype, const uint4* data, const float* scales, uint4* out, int outputs, int vectors) { \
        widen_blocks<F>({data, scales, nullptr, outputs, vectors, 0}, out);                                                     \
    }
HBMARK_FOR_EACH_BLOCK(KERNEL)
#undef KERNEL
