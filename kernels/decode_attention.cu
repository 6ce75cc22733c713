// Grouped-query attention of single rows over the paged cache, split over positions, merged by the last block to come.
//
//   out[row][h] = Σ_p softmax_p(q[h] · k[p] * scale) * v[p],   p from max(0, position + 1 - window) to the row's own position
//
// Shapes: query, out [rows, heads * head_dim] f32; cache: cache.cuh, head_dim a multiple of 8, at most 256.
// Grid: (splits, kv_heads * ceil(group / G), rows). Block: 128 threads. Of a group of query heads, G share every K and V that is loaded.
// Each split takes at least `least` positions, so a short row uses fewer splits than it is given; unused blocks return.
// partial [rows, heads, splits, head_dim] and statistics [rows, heads, splits] (largest score, sum) f32 are scratch; arrived [rows,
// gridDim.y] is 0 before the first launch and after each.
// Bytes: 2 * positions * kv_heads * head_dim elements per row and chunk of G. FLOPs: 4 * heads * head_dim * positions per row.
// decode_attention_DTYPE_gG_dD: head_dim D known when compiled, or d0 for any. Idea: Flash-Decoding (Dao et al., 2023).
//
// Lanes that share a position have 8 elements of the head each; each such group of lanes runs an online softmax of its own, in units of
// log2, and they are merged at the end: within the warp, over warps, over splits.

#include "cache.cuh"

constexpr int ATTENTION_WARPS = 4, ATTENTION_THREADS = ATTENTION_WARPS * WARP;
// Positions that a lane has in flight.
constexpr int DEPTH = 4;
constexpr float LOG2_E = 1.44269504088896f;

struct AttentionWork {
    const float* query;
    const unsigned* positions;
    float* out;
    float* partial;
    float2* statistics;
    unsigned* arrived;
    int heads, window, least;
    float scale;
};

// Merges (m1, l1, o1) into (m, l, o): softmaxes over different positions. Nothing was seen where m is -infinity.
__device__ inline float2 merge_weights(float m, float other) {
    const float most = fmaxf(m, other);
    if (most == -INFINITY) return make_float2(0, 0);
    return make_float2(exp2f(m - most), exp2f(other - most));
}

template <class T, int G, int D>
__device__ inline void decode_attention(const AttentionWork& work, const Cache& cache) {
    const int head_dim = D > 0 ? D : cache.head_dim;
    // Lanes per position: a power of two, some of them idle where the head is not one.
    int lanes = 1;
    while (lanes * 8 < head_dim) lanes *= 2;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int group = work.heads / cache.kv_heads, chunks = (group + G - 1) / G;
    const int kv_head = blockIdx.y / chunks, first = blockIdx.y % chunks * G, count = min(G, group - first);
    const int row = blockIdx.z, first_head = kv_head * group + first;
    const int element = lane % lanes * 8;
    const bool active = element < head_dim;

    launch_dependents();
    wait_for_dependency();
    const int position = work.positions[row];
    const unsigned start = cache.starts[row];
    const int seen_from = max(0, position + 1 - work.window), seen = position + 1 - seen_from;
    const int per_split = max((seen + (int)gridDim.x - 1) / (int)gridDim.x, work.least), splits = (seen + per_split - 1) / per_split;
    const int split = blockIdx.x;
    if (split >= splits) return;
    const int begin = seen_from + split * per_split, end = min(begin + per_split, position + 1);

    float q[G][8], o[G][8] = {}, m[G], l[G];
#pragma unroll
    for (int g = 0; g < G; ++g) {
        const float* from = work.query + ((size_t)row * work.heads + first_head + min(g, count - 1)) * head_dim + element;
#pragma unroll
        for (int e = 0; e < 8; ++e) q[g][e] = active ? from[e] * (work.scale * LOG2_E) : 0;
        m[g] = -INFINITY;
        l[g] = 0;
    }
    const int per_warp = WARP / lanes, per_block = per_warp * ATTENTION_WARPS;
    const int own = warp * per_warp + lane / lanes;
    for (int base = begin; base < end; base += per_block * DEPTH) {
        float k[DEPTH][8], v[DEPTH][8];
#pragma unroll
        for (int u = 0; u < DEPTH; ++u) {
            const int p = base + u * per_block + own;
#pragma unroll
            for (int e = 0; e < 8; ++e) k[u][e] = v[u][e] = 0;
            if (p < end && active) {
                load8(cache.at<T>(start, p, kv_head, 0) + element, k[u]);
                load8(cache.at<T>(start, p, kv_head, 1) + element, v[u]);
            }
        }
#pragma unroll
        for (int g = 0; g < G; ++g) {
            float score[DEPTH], most = m[g];
#pragma unroll
            for (int u = 0; u < DEPTH; ++u) {
                float dot = 0;
#pragma unroll
                for (int e = 0; e < 8; ++e) dot += q[g][e] * k[u][e];
                score[u] = warp_sum(dot, lanes);
                if (base + u * per_block + own >= end) score[u] = -INFINITY;
                most = fmaxf(most, score[u]);
            }
            if (most == -INFINITY) continue;
            const float kept = exp2f(m[g] - most);
            m[g] = most;
            l[g] *= kept;
#pragma unroll
            for (int e = 0; e < 8; ++e) o[g][e] *= kept;
#pragma unroll
            for (int u = 0; u < DEPTH; ++u) {
                const float weight = exp2f(score[u] - most);
                l[g] += weight;
#pragma unroll
                for (int e = 0; e < 8; ++e) o[g][e] += weight * v[u][e];
            }
        }
    }

    // Groups of lanes within the warp.
    for (int offset = lanes; offset < WARP; offset *= 2) {
#pragma unroll
        for (int g = 0; g < G; ++g) {
            const float other = __shfl_xor_sync(ALL_LANES, m[g], offset);
            const float2 weights = merge_weights(m[g], other);
            l[g] = l[g] * weights.x + __shfl_xor_sync(ALL_LANES, l[g], offset) * weights.y;
#pragma unroll
            for (int e = 0; e < 8; ++e) o[g][e] = o[g][e] * weights.x + __shfl_xor_sync(ALL_LANES, o[g][e], offset) * weights.y;
            m[g] = fmaxf(m[g], other);
        }
    }
    // Warps: [warp][g][head_dim], then (m, l) of each.
    SHARED_BYTES(memory);
    float* values = (float*)memory;
    float2* statistics = (float2*)(values + ATTENTION_WARPS * G * head_dim);
    if (lane < lanes) {
#pragma unroll
        for (int g = 0; g < G; ++g) {
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (active) values[(warp * G + g) * head_dim + element + e] = o[g][e];
            if (lane == 0) statistics[warp * G + g] = make_float2(m[g], l[g]);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count * head_dim; i += ATTENTION_THREADS) {
        const int g = i / head_dim, e = i % head_dim;
        float most = -INFINITY, sum = 0, value = 0;
        for (int w = 0; w < ATTENTION_WARPS; ++w) most = fmaxf(most, statistics[w * G + g].x);
        for (int w = 0; w < ATTENTION_WARPS; ++w) {
            const float weight = exp2f(statistics[w * G + g].x - most);
            sum += weight * statistics[w * G + g].y;
            value += weight * values[(w * G + g) * head_dim + e];
        }
        const size_t head = (size_t)row * work.heads + first_head + g;
        if (splits == 1) {
            work.out[head * head_dim + e] = value / sum;
        } else {
            work.partial[(head * gridDim.x + split) * head_dim + e] = value;
            if (e == 0) work.statistics[head * gridDim.x + split] = make_float2(most, sum);
        }
    }
    if (splits == 1) return;

    // Splits: whoever comes last has them all.
    SHARED(unsigned, before);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) before = atomicInc(work.arrived + row * gridDim.y + blockIdx.y, splits - 1);
    __syncthreads();
    if (before != (unsigned)splits - 1) return;
    __threadfence();
    for (int i = threadIdx.x; i < count * head_dim; i += ATTENTION_THREADS) {
        const int g = i / head_dim, e = i % head_dim;
        const size_t head = (size_t)row * work.heads + first_head + g;
        float most = -INFINITY, sum = 0, value = 0;
        for (int s = 0; s < splits; ++s) most = fmaxf(most, __ldcg(work.statistics + head * gridDim.x + s).x);
        for (int s = 0; s < splits; ++s) {
            const float2 one = __ldcg(work.statistics + head * gridDim.x + s);
            const float weight = exp2f(one.x - most);
            sum += weight * one.y;
            value += weight * load_shared_result(work.partial + (head * gridDim.x + s) * head_dim + e);
        }
        work.out[head * head_dim + e] = value / sum;
    }
}

#define KERNEL(dtype, T, G, D)                                                                                                            \
    HBMARK_KERNEL_BOUNDED(ATTENTION_THREADS, 2, decode_attention_##dtype##_g##G##_d##D, const float* __restrict__ query,                  \
                          const unsigned* __restrict__ positions, const unsigned long long* __restrict__ tables,                          \
                          const unsigned* __restrict__ starts, float* __restrict__ out, float* __restrict__ partial,                      \
                          float2* __restrict__ statistics, unsigned* __restrict__ arrived, unsigned long long layer_bytes, int layer,     \
                          int heads, int kv_heads, int head_dim, int block_shift, int window, int least, float scale) {                   \
        decode_attention<T, G, D>({query, positions, out, partial, statistics, arrived, heads, window, least, scale},                     \
                                  {tables, starts, layer_bytes, layer, kv_heads, head_dim, block_shift});                                 \
    }
#define KERNELS(dtype, T, D) KERNEL(dtype, T, 1, D) KERNEL(dtype, T, 2, D) KERNEL(dtype, T, 4, D) KERNEL(dtype, T, 8, D)
KERNELS(bf16, Bf16, 0) KERNELS(bf16, Bf16, 64) KERNELS(bf16, Bf16, 128)
KERNELS(f16, F16, 0) KERNELS(f16, F16, 64) KERNELS(f16, F16, 128)
KERNELS(f32, float, 0)
#undef KERNELS
#undef KERNEL
