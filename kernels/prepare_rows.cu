// Rows of activations as tensor cores take them: normed where the layer norms, rounded, padded with zeros.
//
//   out[row][k] = round(hidden[row_of[row]][k] * norm factor * norm[k])
//
// Shapes: hidden [any, columns] f32, or with a stride [any, stride], whose `parts`, `apart` columns from one to the next, are so many rows;
// out [rows, vectors * COLUMNS] in the inputs of a format (tiled.cuh), those of int8, mxfp4, nvfp4 and int4 with their scales behind; row_of [rows] or
// null; norm [columns] or null.
// Grid: (rows). Block: 256 threads. Bytes: activations only. Each product needs it once, where the streaming product does it in every
// block; attention and tiled_gate_up prepare rows of 16-bit floats themselves.

#include "tiled.cuh"

template <class F>
__device__ inline void prepare_rows(const LinearInput& in, uint4* out, int vectors) {
    SHARED(float[WARPS], scratch);
    launch_dependents();
    if (in.norm)
        for (int column = threadIdx.x * 32; column < in.columns; column += THREADS * 32) prefetch(in.norm + column);
    wait_for_dependency();
    const float* from = in.row(blockIdx.x);
    float factors[1];
    if (in.norm) norm_factors<1>(in, blockIdx.x, 1, scratch, factors);
    // Whole stages: a format may keep more of a row than the row has.
    const int whole = (vectors + 7) / 8 * 8 * F::COLUMNS;
    // Every thread takes every turn: lanes meet in it.
    for (int turn = threadIdx.x * 4; turn - (int)threadIdx.x * 4 < whole; turn += BATCH * THREADS * 4) {
        float4 x[BATCH];
        in.fours(x, from, turn, THREADS * 4);
        if (in.norm) in.apply_norm(x, factors[0], turn, THREADS * 4);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int column = turn + i * THREADS * 4;
            F::put(out, in.rows, vectors, blockIdx.x, column, x[i], column < vectors * F::COLUMNS);
        }
    }
}

#define KERNEL(dtype, F)                                                                                                                \
    HBMARK_KERNEL_BOUNDED(THREADS, 2, prepare_rows_##dtype, const float* hidden, const unsigned* row_of,      \
                          const float* norm, float norm_eps, uint4* out, int rows, int columns, int vectors, int parts, int apart, int stride) { \
        prepare_rows<F>({hidden, row_of, norm, norm_eps, rows, columns, parts, apart, stride}, out, vectors);                                  \
    }
KERNEL(bf16, TiledFloats<Bf16>)
KERNEL(f16, TiledFloats<F16>)
KERNEL(int8, TiledInt8)
KERNEL(fp8, TiledFp8)
KERNEL(mxfp4, TiledMxfp4)
KERNEL(nvfp4, TiledNvfp4)
#undef KERNEL
