// The rows of the embedding table that a step's tokens name.
//
//   hidden[row][c] = scale * table[tokens[row]][c]
//
// Shapes: table as a matrix of linear.cuh; hidden [rows, columns] f32. Grid: (rows). Block: any.
// Bytes: rows * vectors * 16 read, rows * columns * 4 written.

#include "blocks.cuh"

template <class T>
__device__ inline void embed(const void* table, const unsigned* tokens, float* hidden, float scale, int columns, int stride) {
    launch_dependents();
    wait_for_dependency();
    const T* from = (const T*)table + (size_t)tokens[blockIdx.x] * stride;
    float* to = hidden + (size_t)blockIdx.x * columns;
    for (int column = threadIdx.x; column < columns; column += blockDim.x) to[column] = scale * widen(from[column]);
}

#define KERNEL(dtype, T)                                                                                                            \
    HBMARK_KERNEL(embed_##dtype, const uint4* table, const float*, const unsigned* tokens,                \
                  float* hidden, float scale, int columns, int vectors, int) {                                          \
        embed<T>(table, tokens, hidden, scale, columns, vectors * 16 / sizeof(T));                                                         \
    }
KERNEL(bf16, Bf16)
KERNEL(f16, F16)
KERNEL(f32, float)
#undef KERNEL

template <class F>
__device__ inline void embed_blocks(const LinearWeights& table, const unsigned* tokens, float* hidden, float scale, int columns) {
    launch_dependents();
    wait_for_dependency();
    float* to = hidden + (size_t)blockIdx.x * columns;
    values_of_row<F>(table, tokens[blockIdx.x], [&](int vector, const float (&values)[F::COLUMNS]) {
        const int first = vector * F::COLUMNS;
#pragma unroll
        for (int i = 0; i < F::COLUMNS; ++i)
            if (first + i < columns) to[first + i] = scale * values[i];
    });
}

#define KERNEL(dtype, F)                                                                                                            \
    HBMARK_KERNEL(embed_##dtype, const uint4* table, const float* scales, const unsigned* tokens,                \
                  float* hidden, float scale, int columns, int vectors, int outputs) {                                                  \
        embed_blocks<F>({table, scales, nullptr, outputs, vectors, 0}, tokens, hidden, scale, columns);                                 \
    }
HBMARK_FOR_EACH_BLOCK(KERNEL)
#undef KERNEL

HBMARK_KERNEL(embed_int8, const uint4* table, const float* scales, const unsigned* tokens,
              float* hidden, float scale, int columns, int vectors, int) {
    launch_dependents();
    wait_for_dependency();
    const unsigned token = tokens[blockIdx.x];
    const signed char* from = (const signed char*)table + (size_t)token * vectors * 16;
    float* to = hidden + (size_t)blockIdx.x * columns;
    for (int column = threadIdx.x; column < columns; column += blockDim.x) to[column] = scale * ((float)from[column] * scales[token]);
}

HBMARK_KERNEL(embed_fp8, const uint4* table, const float* scales, const unsigned* tokens,
              float* hidden, float scale, int columns, int vectors, int) {
    launch_dependents();
    wait_for_dependency();
    const unsigned token = tokens[blockIdx.x];
    const unsigned char* from = (const unsigned char*)table + (size_t)token * vectors * 16;
    float* to = hidden + (size_t)blockIdx.x * columns;
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
        const unsigned code = from[column];
        to[column] = scale * (widen(F16{(unsigned short)((code & 0x7f) << 7 | (code & 0x80) << 8)}) * scales[token]);
    }
}
