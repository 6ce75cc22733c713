// Norm, Q, K and V projection with bias, head norms, rotation; K and V go to the cache.
//
//   q, k, v = W · norm(hidden[row]) + b;   q, k = rope(head_norm(q)), rope(head_norm(k))
//
// Shapes: hidden [rows, columns] f32; matrix rows per head of Q, then of K, then of V; within a head, row i beside row i + head_dim / 2, because
// they turn together; query [rows, heads * head_dim] f32 in plain order; cosines, sines [positions, head_dim / 2] f32.
// Where projected is null a warp that has a pair turns and stores it, in the cache that goes with the weights. Otherwise, for norms of heads, for
// caches of one byte an element and where heads are in several formats, whose kernels follow each other, the sums of a head go to projected [rows, stride] f32, and the last warp to bring a pair of a head finishes the head; arrived [ceil(rows / M), heads + 2 * kv_heads] is 0 before the first launch and
// after each; where it is null the sums stay there, for finish_heads (tiled_layers.cu) or latent.cu. cosines and sines are null where nothing turns. Grid, block,
// shared memory, bytes: as linear.cuh, and 2 * rows * kv_heads * head_dim elements written.
// norm_qkv_DTYPE_mM: M rows at a time.

#include "blocks.cuh"
#include "heads.cuh"

template <class F, int M>
__device__ inline void norm_qkv(const LinearInput& in, const LinearWeights& weights, const HeadWork& work, const Cache& cache, int stride, int chunk) {
    const int half = cache.head_dim / 2;
    multiply<F, M>(in, weights, chunk, [&](int pair, int first_row, int count, const float (&sums)[2][M]) {
        const int lane = threadIdx.x % WARP, head = pair / half, i = pair % half;
        if (!work.projected) {
#pragma unroll
            for (int m = 0; m < M; ++m)
                if (lane == m && m < count) store_pair<typename F::Cache>(work, cache, first_row + m, head, i, sums[0][m], sums[1][m]);
            return;
        }
#pragma unroll
        for (int m = 0; m < M; ++m) {
            if (lane != m || m >= count) continue;
            float* out = work.projected + (size_t)(first_row + m) * stride + 2 * pair;
            out[0] = sums[0][m];
            out[1] = sums[1][m];
        }
        if (!work.arrived) return;
        __threadfence();
        __syncwarp();
        unsigned before = 0;
        if (lane == 0) before = atomicInc(work.arrived + pass_of_grid() * (work.heads + 2 * cache.kv_heads) + head, half - 1);
        if ((int)__shfl_sync(ALL_LANES, before, 0) != half - 1) return;
        __threadfence();
        for (int m = 0; m < count; ++m) finish_head<typename F::Cache>(work, cache, first_row + m, head, stride, false);
    });
}

#define KERNEL(dtype, F, M)                                                                                                              \
    HBMARK_KERNEL_BOUNDED(THREADS, resident(M), norm_qkv_##dtype##_m##M, const float* hidden, const float* norm,         \
                          float norm_eps, const uint4* data, const float* scales,                              \
                          const float* bias, const float* query_norm, const float* key_norm,      \
                          const float* cosines, const float* sines, const unsigned* positions,    \
                          const unsigned long long* tables, const unsigned* starts,                            \
                          float* query, float* projected, unsigned* arrived,                      \
                          unsigned long long layer_bytes, int layer, int heads, int kv_heads, int head_dim, int block_shift, int stride, int rows,   \
                          int columns, int outputs, int vectors, int shift, int chunk) {                                                            \
        norm_qkv<F, M>({hidden, nullptr, norm, norm_eps, rows, columns}, {data, scales, bias, outputs, vectors, shift},                         \
                       {query_norm, key_norm, cosines, sines, positions, query, projected, arrived, heads, norm_eps},                    \
                       {tables, starts, layer_bytes, layer, kv_heads, head_dim, block_shift}, stride, chunk);                                    \
    }
#define KERNELS(dtype, F) KERNEL(dtype, F, 1) KERNEL(dtype, F, 2) KERNEL(dtype, F, 4)
HBMARK_FOR_EACH_LINEAR(KERNELS, KERNEL)
HBMARK_FOR_EACH_BLOCK(KERNELS)
#undef KERNELS
#undef KERNEL
