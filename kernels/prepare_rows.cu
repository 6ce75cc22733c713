// Rows of activations as tensor cores take them: normed where the layer norms, rounded, padded with zeros.
//
//   out[row][k] = round(hidden[row_of[row]][k] * norm factor * norm[k])
//
// Shapes: hidden [any, columns] f32; out [rows, vectors * COLUMNS] in the inputs of a format (tiled.cuh), int8 with its scales behind; row_of
// [rows] or null; norm [columns] or null. Grid: (rows). Block: 256 threads. Bytes: activations only. Each product needs it once, where the
// streaming product does it in every block.

#include "tiled.cuh"

template <class F>
__device__ inline void prepare_rows(const LinearInput& in, uint4* out, int vectors) {
    SHARED(float[WARPS], scratch);
    launch_dependents();
    wait_for_dependency();
    const float* from = in.row(blockIdx.x);
    const float factor = in.norm ? norm_factor(in, from, scratch) : 1;
    // Whole stages: a format may keep more of a row than the row has.
    const int whole = (vectors + 7) / 8 * 8 * F::COLUMNS;
    // Every thread takes every turn: lanes meet in it.
    for (int turn = 0; turn < whole; turn += THREADS * 4) {
        const int column = turn + threadIdx.x * 4;
        float4 x = in.four(from, column);
        if (in.norm) {
            const float4 g = in.four(in.norm, column);
            x = make_float4(x.x * factor * g.x, x.y * factor * g.y, x.z * factor * g.z, x.w * factor * g.w);
        }
        F::put(out, in.rows, vectors, blockIdx.x, column, x, column < vectors * F::COLUMNS);
    }
}

#define KERNEL(dtype, F)                                                                                                                \
    HBMARK_KERNEL_BOUNDED(THREADS, 2, prepare_rows_##dtype, const float* __restrict__ hidden, const unsigned* __restrict__ row_of,      \
                          const float* __restrict__ norm, float norm_eps, uint4* __restrict__ out, int rows, int columns, int vectors) { \
        prepare_rows<F>({hidden, row_of, norm, norm_eps, rows, columns}, out, vectors);                                                 \
    }
KERNEL(bf16, TiledFloats<Bf16>)
KERNEL(f16, TiledFloats<F16>)
KERNEL(int8, TiledInt8)
KERNEL(fp8, TiledFp8)
#undef KERNEL
