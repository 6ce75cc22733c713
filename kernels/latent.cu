// What is around attention over latents (latent_attention.cu): what a position keeps, and products with a matrix for each head.
//
// Of a layer, `sums` [rows, stride] f32 are those of its first product (norm_qkv.cu, which leaves them to these kernels): the query part, then the latent,
// then the part of the key that turns. The product behind the norm of a query part gives [rows, heads * (plain + rope)].

#include "cache.cuh"
#include "tiled.cuh"

// Norms a part of a row by a warp: `store` takes four elements at a time.
template <class Store>
__device__ inline void norm_part(const LinearInput& in, Store store) {
    constexpr int APART = WARP * 4;
    const int lane = threadIdx.x % WARP;
    float squares = 0;
    for (int column = lane * 4; column < in.columns; column += BATCH * APART) {
        float4 x[BATCH];
        in.fours(x, in.values, column, APART);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) squares += x[i].x * x[i].x + x[i].y * x[i].y + x[i].z * x[i].z + x[i].w * x[i].w;
    }
    const float factor = rsqrtf(warp_sum(squares) / (float)in.columns + in.norm_eps);
    for (int column = lane * 4; column < in.columns; column += BATCH * APART) {
        float4 x[BATCH];
        in.fours(x, in.values, column, APART);
        in.apply_norm(x, factor, column, APART);
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (column + i * APART < in.columns) store(column + i * APART, x[i]);
    }
}

// Two elements that turn together.
__device__ inline float2 turned(float2 x, const float* cosines, const float* sines, int at) {
    if (!cosines) return x;
    return make_float2(x.x * cosines[at] - x.y * sines[at], x.y * cosines[at] + x.x * sines[at]);
}

// What the first product leaves for a position: its vector in the cache, and the query part as the next product takes it.
//
//   cache[position] = [norm(sums[latent part]); turn(sums[rope part])];   normed[row] = norm(sums[query part])
//
// Shapes: normed [rows, query] f32, or query_norm is null and nothing is normed there; cosines, sines [positions, rope / 2] f32, null where nothing turns;
// cache: cache.cuh, one vector of latent + rope elements for each position and no V; query and latent are multiples of 4.
// Grid: (rows). Block: 64 threads, a warp for the cache and one for the query. Bytes: rows * (latent + rope) elements written.
// latent_finish_DTYPE, of the cache.
template <class T>
__device__ inline void latent_finish(const float* sums, const float* latent_norm, const float* query_norm, float norm_eps, const float* cosines,
                                     const float* sines, const unsigned* positions, const Cache& cache, float* normed, int query, int latent,
                                     int stride) {
    launch_dependents();
    wait_for_dependency();
    const int row = blockIdx.x, lane = threadIdx.x % WARP, half = (cache.head_dim - latent) / 2;
    const float* from = sums + (size_t)row * stride;
    if (threadIdx.x >= WARP) {
        if (query_norm)
            norm_part({from, nullptr, query_norm, norm_eps, 1, query, 1, 0, stride},
                      [&](int column, float4 x) { *(float4*)(normed + (size_t)row * query + column) = x; });
        return;
    }
    const int position = positions[row];
    T* to = cache.at<T>(cache.starts[row], position, 0, 0);
    norm_part({from + query, nullptr, latent_norm, norm_eps, 1, latent, 1, 0, stride}, [&](int column, float4 x) {
        const float each[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) to[column + i] = narrow<T>(each[i]);
    });
    const float* rope = from + query + latent;
    for (int i = lane; i < half; i += WARP) {
        const float2 both = turned(make_float2(rope[i], rope[i + half]), cosines, sines, position * half + i);
        to[latent + i] = narrow<T>(both.x);
        to[latent + i + half] = narrow<T>(both.y);
    }
}

#define KERNEL(dtype, T)                                                                                                                    \
    HBMARK_KERNEL_BOUNDED(2 * WARP, 8, latent_finish_##dtype, const float* sums, const float* latent_norm, const float* query_norm,         \
                          float norm_eps, const float* cosines, const float* sines, const unsigned* positions,                              \
                          const unsigned long long* tables, const unsigned* starts, unsigned long long layer_bytes, int layer, int width,   \
                          int block_shift, float* normed, int query, int latent, int stride) {                                              \
        latent_finish<T>(sums, latent_norm, query_norm, norm_eps, cosines, sines, positions,                                                \
                         {tables, starts, layer_bytes, layer, 1, width, block_shift}, normed, query, latent, stride);                       \
    }
KERNEL(bf16, Bf16)
KERNEL(f16, F16)
KERNEL(f32, float)
#undef KERNEL

// The parts of queries that turn, behind what a product with the matrix of each head leaves there, or behind the elements before them, `copied` of each head.
//
//   out[row][h][latent..] = turn(queries[row][h][plain..]);   out[row][h][0..copied] = queries[row][h][0..copied]
//
// Shapes: queries [rows, stride] f32, whose heads are plain + rope elements each; out [rows, heads * (latent + rope)] f32; cosines and sines as above.
// Grid: (rows, ceil(heads * rope / 512)). Block: 256 threads.
HBMARK_KERNEL_BOUNDED(THREADS, 2, latent_turn, const float* queries, const float* cosines, const float* sines, const unsigned* positions, float* out,
                      int heads, int plain, int rope, int latent, int copied, int stride) {
    launch_dependents();
    wait_for_dependency();
    const int row = blockIdx.x, half = rope / 2, at = blockIdx.y * THREADS + threadIdx.x, head = at / half, i = at % half;
    if (head >= heads) return;
    const float* query = queries + (size_t)row * stride + head * (plain + rope);
    float* made = out + ((size_t)row * heads + head) * (latent + rope);
    for (int element = i; element < copied; element += half) made[element] = query[element];
    const float* from = query + plain;
    float* to = made + latent;
    const float2 both = turned(make_float2(from[i], from[i + half]), cosines, sines, (int)positions[row] * half + i);
    to[i] = both.x;
    to[i + half] = both.y;
}

// Latents of a cache for products that make K and V of each head of them, and the part of K that is the same for all heads.
//
//   latents[k][slot] = cache[k][slot][0..latent];   K[k][h][slot][plain..] = cache[k][slot][latent..]
//
// Shapes: tables [k], of blocks of 2^block_shift positions with a vector of `width` elements each; latents [positions, latent] f32, position k * 2^block_shift
// + slot; K and V: cache.cuh, of one layer, in the blocks of `expanded`, with vectors of head_dim = plain + (width - latent).
// Grid: (positions). Block: 256 threads. Bytes: per position `width` elements read, latent f32 and heads * (width - latent) elements written.
// latent_gather_DTYPE, of the cache.
template <class T>
__device__ inline void latent_gather(const unsigned long long* tables, unsigned long long layer_bytes, int layer, int width, int latent,
                                     int block_shift, float* latents, const unsigned long long* expanded, int heads, int head_dim) {
    launch_dependents();
    wait_for_dependency();
    const int position = blockIdx.x, block = position >> block_shift, slot = position & ((1 << block_shift) - 1), rope = width - latent;
    const T* from = in_global((const T*)(tables[block] + layer * layer_bytes) + (size_t)slot * width);
    for (int i = threadIdx.x; i < latent; i += THREADS) latents[(size_t)position * latent + i] = widen(from[i]);
    for (int i = threadIdx.x; i < heads * rope; i += THREADS) {
        const int head = i / rope, element = i % rope;
        ((T*)expanded[block])[(((size_t)head << block_shift) + slot) * head_dim + head_dim - rope + element] = from[latent + element];
    }
}

#define KERNEL(dtype, T)                                                                                                                    \
    HBMARK_KERNEL_BOUNDED(THREADS, 2, latent_gather_##dtype, const unsigned long long* tables, unsigned long long layer_bytes, int layer,  \
                          int width, int latent, int block_shift, float* latents, const unsigned long long* expanded, int heads,           \
                          int head_dim) {                                                                                                   \
        latent_gather<T>(tables, layer_bytes, layer, width, latent, block_shift, latents, expanded, heads, head_dim);                       \
    }
KERNEL(bf16, Bf16)
KERNEL(f16, F16)
#undef KERNEL

// A product for each head.
//
//   out[row][h] = M[h] · input[row][h]
//
// Shapes: matrices [heads * outputs, columns], those of a head together, outputs even, and of fp8_block a multiple of 16; the input of a head of a
// row is at input + row * in_stride + h * in_apart, or prepared (prepare_rows.cu) with heads as parts of a row; its output at
// out + row * out_stride + h * out_apart.
// Grid: (any, heads, passes of M rows) or (ceil(outputs / BN), heads, ceil(rows / BM)). Block, shared memory, bytes: linear.cuh and tiled.cuh, of each head.
// latent_product_DTYPE_mM streams, latent_tiled_product_DTYPE_tBM multiplies on tensor cores.
template <class F>
__device__ inline LinearWeights of_head(const LinearWeights& all) {
    LinearWeights own = all;
    const size_t first = (size_t)blockIdx.y * all.outputs;
    own.data += first * all.vectors;
    if constexpr (F::GROUP_SCALED) own.scales += first / 16 * 2 * all.words();
    else if constexpr (F::SCALED) own.scales += first;
    return own;
}

template <class F, int M>
__device__ inline void latent_product(const LinearInput& in, const LinearWeights& weights, float* out, int out_stride, int chunk) {
    const int first_row = blockIdx.z * M;
    multiply_rows<F, M>(in, weights, chunk, first_row, min(M, in.rows - first_row), [&](int pair, int first, int count, const float (&sums)[2][M]) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int m = 0; m < M; ++m) {
            if (lane != m || m >= count) continue;
            float* to = out + (size_t)(first + m) * out_stride + 2 * pair;
            to[0] = sums[0][m];
            to[1] = sums[1][m];
        }
    });
}

#define KERNEL(dtype, F, M)                                                                                                                 \
    HBMARK_KERNEL_BOUNDED(THREADS, resident(M), latent_product_##dtype##_m##M, const float* input, const uint4* data, const float* scales,  \
                          float* out, int in_stride, int in_apart, int out_stride, int out_apart, int rows, int columns, int outputs,       \
                          int vectors, int shift, int chunk) {                                                                              \
        latent_product<F, M>(                                                                                                               \
            {input + (size_t)blockIdx.y * in_apart, nullptr, nullptr, 0, rows, columns, 1, in_apart, in_stride},                            \
            of_head<F>({data, scales, nullptr, outputs, vectors, shift}), out + (size_t)blockIdx.y * out_apart, out_stride, chunk);         \
    }
#define KERNELS(dtype, F) KERNEL(dtype, F, 1) KERNEL(dtype, F, 2) KERNEL(dtype, F, 4)
HBMARK_FOR_EACH_FORMAT(KERNELS)
KERNEL(fp8, FormatFp8, 1)
KERNEL(fp8, FormatFp8, 2)
KERNEL(fp8_block, FormatFp8Block, 1)
KERNEL(fp8_block, FormatFp8Block, 2)
#undef KERNELS
#undef KERNEL

// The prepared rows of the block's head.
struct OfHead {
    __device__ int operator()(int row) const { return row * gridDim.y + blockIdx.y; }
};

#define KERNEL(dtype, F, ROWS)                                                                                                              \
    HBMARK_KERNEL_BOUNDED(Tiling##ROWS::TILED_THREADS, 1, latent_tiled_product_##dtype##_t##ROWS, float* out, int out_stride,               \
                          int out_apart, const uint4* inputs, const uint4* data, const float* scales, int rows, int outputs, int vectors,   \
                          int shift) {                                                                                                      \
        multiply_tile_of_rows<F, Tiling##ROWS>(                                                                                             \
            inputs, rows * gridDim.y, blockIdx.z * ROWS, rows, OfHead{}, of_head<F>({data, scales, nullptr, outputs, vectors, shift}),       \
            [&](int row, int pair, float first, float second) {                                                                             \
                float* to = out + (size_t)row * out_stride + (size_t)blockIdx.y * out_apart + 2 * pair;                                      \
                to[0] = first;                                                                                                              \
                to[1] = second;                                                                                                             \
            });                                                                                                                             \
    }
HBMARK_FOR_EACH_TILING(KERNEL)
HBMARK_FOR_EACH_ROWS(KERNEL, fp8_block, TiledFp8Block)
#undef KERNEL

// The same of prepared rows that all heads share, to a cache: K, or V, of each head and position.
//
//   out[k][h][slot] = M[h] · input[k][slot]
//
// Shapes: matrices as above; inputs [positions, columns], prepared; out: cache.cuh, of one layer, in the blocks of `tables`: outputs are the first elements
// of vectors of `width`, which begin `before` elements behind the beginning of a block. Of elements of 16 bits, bf16 or f16.
// Grid: (ceil(outputs / BN), heads, ceil(positions / BM)). latent_tiled_expand_DTYPE_tBM.
struct ToCache {
    const unsigned long long* tables;
    unsigned long long before;
    int width, block_shift, is_bf16;

    __device__ void operator()(int position, int pair_of_outputs, float first, float second) const {
        const int slot = position & ((1 << block_shift) - 1);
        unsigned short* vectors = (unsigned short*)tables[position >> block_shift] + before;
        unsigned* to = (unsigned*)(vectors + (((size_t)blockIdx.y << block_shift) + slot) * width) + pair_of_outputs;
        *to = is_bf16 ? pair<Bf16>(first, second) : pair<F16>(first, second);
    }
};

#define KERNEL(dtype, F, ROWS)                                                                                                              \
    HBMARK_KERNEL_BOUNDED(Tiling##ROWS::TILED_THREADS, 1, latent_tiled_expand_##dtype##_t##ROWS, const unsigned long long* tables,          \
                          unsigned long long before, int width, int block_shift, int is_bf16, const uint4* inputs, const uint4* data,      \
                          const float* scales, int rows, int outputs, int vectors, int shift) {                                             \
        multiply_tile_of_rows<F, Tiling##ROWS>(inputs, rows, blockIdx.z * ROWS, rows, InOrder{},                                            \
                                               of_head<F>({data, scales, nullptr, outputs, vectors, shift}),                                \
                                               ToCache{tables, before, width, block_shift, is_bf16});                                       \
    }
HBMARK_FOR_EACH_TILING(KERNEL)
HBMARK_FOR_EACH_ROWS(KERNEL, fp8_block, TiledFp8Block)
#undef KERNEL
