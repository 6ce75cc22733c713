// Rows of activations as tensor cores take them: normed where the layer norms, rounded, padded with zeros.
//
//   out[row][k] = round(hidden[row_of[row]][k] * norm factor * norm[k])
//
// Shapes: hidden [any, columns] f32; out [rows, vectors * 8] bf16 or f16; row_of [rows] or null; norm [columns] or null. Grid: (rows).
// Block: 256 threads. Bytes: activations only. Each product needs it once, where the streaming product does it in every block.

#include "linear.cuh"

template <class T>
__device__ inline void prepare_rows(const LinearInput& in, T* out, int vectors) {
    SHARED(float[WARPS], scratch);
    launch_dependents();
    wait_for_dependency();
    const float* from = in.row(blockIdx.x);
    const float factor = in.norm ? norm_factor(in, from, scratch) : 1;
    uint2* to = (uint2*)(out + (size_t)blockIdx.x * vectors * 8);
    for (int column = threadIdx.x * 4; column < vectors * 8; column += THREADS * 4) {
        float4 x = in.four(from, column);
        if (in.norm) {
            const float4 g = in.four(in.norm, column);
            x = make_float4(x.x * factor * g.x, x.y * factor * g.y, x.z * factor * g.z, x.w * factor * g.w);
        }
        to[column / 4] = uint2{pair<T>(x.x, x.y), pair<T>(x.z, x.w)};
    }
}

#define KERNEL(dtype, T)                                                                                                                \
    HBMARK_KERNEL_BOUNDED(THREADS, 2, prepare_rows_##dtype, const float* __restrict__ hidden, const unsigned* __restrict__ row_of,      \
                          const float* __restrict__ norm, float norm_eps, uint4* __restrict__ out, int rows, int columns, int vectors) { \
        prepare_rows<T>({hidden, row_of, norm, norm_eps, rows, columns}, (T*)out, vectors);                                             \
    }
KERNEL(bf16, Bf16)
KERNEL(f16, F16)
#undef KERNEL
