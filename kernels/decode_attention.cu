// Grouped-query attention of single rows over the paged cache, split over positions, merged by the last block to come.
//
//   out[row][h] = Σ_p softmax_p(bend(q[h] · k[p] * scale), sinks[h]) * v[p],   p from max(0, position + 1 - window) to the row's own position
//
// Shapes: query, out [rows, heads * head_dim] f32; cache: cache.cuh, head_dim a multiple of 8, at most 256.
// Grid: (rows, kv_heads * ceil(group / G), splits): only x may exceed 65,535. Block: 256 threads. Of a group of query heads, G share every K and V
// that is loaded.
// Each split takes at least `least` positions, so a short row uses fewer splits than it is given; unused blocks return.
// Shared: 64 KiB of K and V on their way, then what warps and splits are merged in; more only where that needs more.
// rounded [rows, heads * head_dim] is null, or what the next product takes where the cache has 16 bits: out, in the cache's format (prepare_rows.cu).
// partial [rows, heads, splits, head_dim], statistics [rows, heads, splits] and arrived [rows, gridDim.y] are those of splits.cuh.
// Bytes: 2 * positions * kv_heads * head_dim elements per row and chunk of G. FLOPs: 4 * heads * head_dim * positions per row.
// decode_attention_DTYPE_gG_dD: the cache's dtype, of which int8 has scales; head_dim D known when compiled, or d0 for any. Idea: Flash-Decoding (Dao et al., 2023).
//
// Lanes that share a position have 8 elements of the head each; each such group of lanes runs an online softmax of its own, in units of
// log2, and they are merged at the end: within the warp, over warps, over splits. A lane copies what it will itself multiply to shared memory and
// goes on: 256 bytes are on their way without a register or a barrier. Positions, starts and tables come from the host, so
// they are read before the wait for the last kernel.

#include "cache.cuh"
#include "splits.cuh"

constexpr int ATTENTION_WARPS = 8, ATTENTION_THREADS = ATTENTION_WARPS * WARP;
// Bytes of K and V that a lane has on their way.
constexpr int LANE_BYTES = 256;

struct AttentionWork {
    const float* query;
    const unsigned* positions;
    float* out;
    uint2* rounded;
    float* partial;
    float2* statistics;
    unsigned* arrived;
    int heads, window, least;
    // Scores are bent towards softcap where that is above 0.
    float scale, softcap;
    // [heads]: one more score of each, without a value; or null.
    const float* sinks;
};

// Stores four elements of a head of a row.
template <class T>
__device__ inline void store_four(const AttentionWork& work, size_t at, float4 value) {
    ((float4*)work.out)[at] = value;
    if constexpr (sizeof(T) == 2)
        if (work.rounded) work.rounded[at] = uint2{pair<T>(value.x, value.y), pair<T>(value.z, value.w)};
}

// Merges (m1, l1, o1) into (m, l, o): softmaxes over different positions. Nothing was seen where m is -infinity.
__device__ inline float2 merge_weights(float m, float other) {
    const float most = fmaxf(m, other);
    if (most == -INFINITY) return make_float2(0, 0);
    return make_float2(exp2f(m - most), exp2f(other - most));
}

// Eight elements of K or V that a lane copied, `apart` bytes from vector to vector; those of one byte less by unit_of<T>.
template <class T>
__device__ inline void unpack8(const unsigned char* from, int apart, float (&out)[8]) {
    if constexpr (sizeof(T) == 1) {
        const uint2 v = *(const uint2*)from;
        const unsigned words[2] = {v.x, v.y};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float four[4];
            four_codes<T>(words[i], four);
#pragma unroll
            for (int j = 0; j < 4; ++j) out[4 * i + j] = four[j];
        }
    } else {
#pragma unroll
        for (int vector = 0; vector < (int)sizeof(T) / 2; ++vector) {
            const uint4 v = *(const uint4*)(from + vector * apart);
            const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if constexpr (sizeof(T) == 2) {
                    const float2 two = widen_pair<T>(words[i]);
                    out[2 * i] = two.x;
                    out[2 * i + 1] = two.y;
                } else {
                    out[4 * vector + i] = __uint_as_float(words[i]);
                }
            }
        }
    }
}

template <class T, int G, int D>
__device__ inline void decode_attention(const AttentionWork& work, const Cache& cache) {
    // 8 elements are so many vectors of so many bytes, and a position has them of K and of V, then its scales; positions of a lane that are multiplied
    // together, and such groups on their way. Four positions and four heads would spill.
    constexpr bool SCALED = has_scales<T>();
    constexpr int VECTORS = sizeof(T) > 2 ? 2 : 1, COPIED = 8 * sizeof(T) / VECTORS, POSITION = 2 * VECTORS * COPIED + (SCALED ? 8 : 0);
    constexpr int DEPTH = (G < 4 ? 4 : 2) / VECTORS, ATTENTION_RING = LANE_BYTES / (DEPTH * POSITION);
    constexpr int VECTOR_BYTES = ATTENTION_THREADS * COPIED, POSITION_BYTES = ATTENTION_THREADS * POSITION, GROUP_BYTES = DEPTH * POSITION_BYTES;
    constexpr int VALUES_AT = VECTORS * VECTOR_BYTES, SCALES_AT = 2 * VALUES_AT, SCALE_BYTES = ATTENTION_THREADS * 4;
    SHARED_BYTES(memory);
    const int head_dim = D > 0 ? D : cache.head_dim;
    // Lanes per position: a power of two, some of them idle where the head is not one.
    int lanes = 1;
    while (lanes * 8 < head_dim) lanes *= 2;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int group = work.heads / cache.kv_heads, chunks = (group + G - 1) / G;
    const int kv_head = blockIdx.y / chunks, first = blockIdx.y % chunks * G, count = min(G, group - first);
    const int row = blockIdx.x, first_head = kv_head * group + first;
    const bool active = lane % lanes * 8 < head_dim;
    const int element = active ? lane % lanes * 8 : 0;

    launch_dependents();
    const int position = work.positions[row];
    const unsigned start = cache.starts[row];
    const int seen_from = max(0, position + 1 - work.window), seen = position + 1 - seen_from;
    const int per_split = max((seen + (int)gridDim.z - 1) / (int)gridDim.z, work.least), splits = (seen + per_split - 1) / per_split;
    const int split = blockIdx.z;
    // The first split of every row waits, so that a grid ends behind the last one even if these blocks do not.
    if (split >= splits) return;
    const int begin = seen_from + split * per_split, end = min(begin + per_split, position + 1);

    // A lane's positions: `own`, and every `per_block` on.
    const int per_warp = WARP / lanes, per_block = per_warp * ATTENTION_WARPS;
    const int own = begin + warp * per_warp + lane / lanes, groups = (end - begin + per_block * DEPTH - 1) / (per_block * DEPTH);
    const unsigned values_after = ((unsigned)cache.kv_heads << cache.block_shift) * head_dim * sizeof(T);
    const unsigned long long* table = cache.tables + start;
    const size_t of_head = cache.layer * cache.layer_bytes + (((size_t)kv_head << cache.block_shift) * head_dim + element) * sizeof(T);
    // From K of a head to its scales, and from those to the ones of V.
    const size_t scales_after = ((size_t)2 * cache.kv_heads << cache.block_shift) * head_dim + ((size_t)kv_head << cache.block_shift) * 4
                                - (of_head - cache.layer * cache.layer_bytes);
    const unsigned value_scales_after = (unsigned)cache.kv_heads << cache.block_shift << 2;
    unsigned char *ring = memory + threadIdx.x * COPIED, *scale_ring = memory + SCALES_AT + threadIdx.x * 4;
    unsigned long long blocks[DEPTH];
    // Where the blocks of a group are; a position behind the end stands for the last.
    const auto look_up = [&](int of_group) {
#pragma unroll
        for (int u = 0; u < DEPTH; ++u) {
            const int p = min(own + (of_group * DEPTH + u) * per_block, end - 1);
            blocks[u] = table[p >> cache.block_shift] + of_head;
        }
    };
    // Asks for the group that was looked up, and looks the next one up.
    const auto ask = [&](int of_group) {
        if (of_group < groups) {
            const int stage = of_group % ATTENTION_RING * GROUP_BYTES;
#pragma unroll
            for (int u = 0; u < DEPTH; ++u) {
                const int p = own + (of_group * DEPTH + u) * per_block, slot = min(p, end - 1) & ((1 << cache.block_shift) - 1);
                const bool exists = active && p < end;
                const unsigned char* from = (const unsigned char*)blocks[u] + slot * head_dim * (unsigned)sizeof(T);
#pragma unroll
                for (int vector = 0; vector < VECTORS; ++vector) {
                    unsigned char* to = ring + stage + u * POSITION_BYTES + vector * VECTOR_BYTES;
                    copy_async<COPIED>(to, from + vector * COPIED, exists);
                    copy_async<COPIED>(to + VALUES_AT, from + values_after + vector * COPIED, exists);
                }
                if constexpr (SCALED) {
                    const unsigned char* scale = (const unsigned char*)blocks[u] + scales_after + slot * 4;
                    unsigned char* to = scale_ring + stage + u * POSITION_BYTES;
                    copy_async<4>(to, scale, p < end);
                    copy_async<4>(to + SCALE_BYTES, scale + value_scales_after, p < end);
                }
            }
            look_up(of_group + 1);
        }
        commit_copies();
    };
    look_up(0);

    wait_for_dependency();
#pragma unroll
    for (int i = 0; i < ATTENTION_RING; ++i) ask(i);
    // What queries are multiplied with, and what a bent score is.
    const bool bends = work.softcap > 0;
    const float factor = (bends ? work.scale / work.softcap : work.scale * LOG2_E) * unit_of<T>(), cap = work.softcap * LOG2_E;
    float q[G][8], o[G][8] = {}, m[G], l[G];
#pragma unroll
    for (int g = 0; g < G; ++g) {
        const float4* from = (const float4*)(work.query + ((size_t)row * work.heads + first_head + min(g, count - 1)) * head_dim + element);
        const float4 a = from[0], b = from[1];
        const float all[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int e = 0; e < 8; ++e) q[g][e] = all[e] * factor;
        // The first lanes of the first split have seen the sink.
        const bool sees = work.sinks && split == 0 && (int)threadIdx.x < lanes;
        m[g] = sees ? work.sinks[first_head + min(g, count - 1)] * LOG2_E : -INFINITY;
        l[g] = sees ? 1 : 0;
    }
    for (int i = 0; i < groups; ++i) {
        wait_copies<ATTENTION_RING - 1>();
        const int stage = i % ATTENTION_RING * GROUP_BYTES;
        const auto scale_of = [&](int u, int which) {
            return SCALED ? *(const float*)(scale_ring + stage + u * POSITION_BYTES + which * SCALE_BYTES) : unit_of<T>();
        };
        float score[G][DEPTH];
#pragma unroll
        for (int u = 0; u < DEPTH; ++u) {
            const bool exists = own + (i * DEPTH + u) * per_block < end;
            float k[8];
            unpack8<T>(ring + stage + u * POSITION_BYTES, VECTOR_BYTES, k);
#pragma unroll
            for (int g = 0; g < G; ++g) {
                // Lanes without elements have zeros of K.
                float dot = 0;
#pragma unroll
                for (int e = 0; e < 8; ++e) dot += q[g][e] * k[e];
                dot = warp_sum(dot, lanes);
                if constexpr (SCALED) dot *= scale_of(u, 0);
                if (bends) dot = cap * tanhf(dot);
                score[g][u] = exists ? dot : -INFINITY;
            }
        }
#pragma unroll
        for (int g = 0; g < G; ++g) {
            float most = m[g];
#pragma unroll
            for (int u = 0; u < DEPTH; ++u) most = fmaxf(most, score[g][u]);
            // Before the first position of these lanes there is nothing, and -infinity less itself would be no number.
            const float reference = most == -INFINITY ? 0 : most, kept = exp2f(m[g] - reference);
            m[g] = most;
            l[g] *= kept;
#pragma unroll
            for (int e = 0; e < 8; ++e) o[g][e] *= kept;
#pragma unroll
            for (int u = 0; u < DEPTH; ++u) {
                score[g][u] = exp2f(score[g][u] - reference);
                l[g] += score[g][u];
            }
        }
#pragma unroll
        for (int u = 0; u < DEPTH; ++u) {
            float v[8];
            unpack8<T>(ring + stage + u * POSITION_BYTES + VALUES_AT, VECTOR_BYTES, v);
            if constexpr (sizeof(T) == 1) {
#pragma unroll
                for (int g = 0; g < G; ++g) score[g][u] *= scale_of(u, 1);
            }
#pragma unroll
            for (int g = 0; g < G; ++g)
#pragma unroll
                for (int e = 0; e < 8; ++e) o[g][e] += score[g][u] * v[e];
        }
        ask(i + ATTENTION_RING);
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
    // Warps, where K and V were: [warp][g][head_dim], then (m, l) of each.
    float* values = (float*)memory;
    float2* statistics = (float2*)(values + ATTENTION_WARPS * G * head_dim);
    __syncthreads();
    if (lane < lanes) {
#pragma unroll
        for (int g = 0; g < G; ++g) {
            float4* to = (float4*)(values + (warp * G + g) * head_dim + element);
            if (active) to[0] = make_float4(o[g][0], o[g][1], o[g][2], o[g][3]), to[1] = make_float4(o[g][4], o[g][5], o[g][6], o[g][7]);
            if (lane == 0) statistics[warp * G + g] = make_float2(m[g], l[g]);
        }
    }
    __syncthreads();
    const int fours = head_dim / 4;
    for (int i = threadIdx.x; i < count * fours; i += ATTENTION_THREADS) {
        const int g = i / fours, four = i % fours;
        float most = -INFINITY, sum = 0;
        float4 value = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int w = 0; w < ATTENTION_WARPS; ++w) most = fmaxf(most, statistics[w * G + g].x);
#pragma unroll
        for (int w = 0; w < ATTENTION_WARPS; ++w) {
            const float weight = exp2f(statistics[w * G + g].x - most);
            sum += weight * statistics[w * G + g].y;
            add_scaled(value, weight, ((const float4*)(values + (w * G + g) * head_dim))[four]);
        }
        const size_t head = (size_t)row * work.heads + first_head + g;
        if (splits == 1) {
            store_four<T>(work, head * fours + four, divided(value, sum));
        } else {
            ((float4*)(work.partial + (head * gridDim.z + split) * head_dim))[four] = value;
            if (four == 0) work.statistics[head * gridDim.z + split] = make_float2(most, sum);
        }
    }
    if (splits == 1) return;

    if (!comes_last(work.arrived + (size_t)row * gridDim.y + blockIdx.y, splits)) return;
    merge_splits<ATTENTION_WARPS>(
        work.partial, work.statistics, gridDim.z, splits, count, head_dim, (float*)memory,
        [&](int g) { return (size_t)row * work.heads + first_head + g; }, [&](size_t at, float4 value) { store_four<T>(work, at, value); });
}

// Two blocks on a multiprocessor, but where eight heads need the registers of both.
#define KERNEL(dtype, T, G, D)                                                                                                            \
    HBMARK_KERNEL_BOUNDED(ATTENTION_THREADS, G > 4 ? 1 : 2, decode_attention_##dtype##_g##G##_d##D, const float* query,                   \
                          const unsigned* positions, const unsigned long long* tables, const unsigned* starts, float* out, uint2* rounded, \
                          float* partial, float2* statistics, unsigned* arrived, unsigned long long layer_bytes, int layer, int heads,    \
                          int kv_heads, int head_dim, int block_shift, int window, int least, float scale, float softcap,                 \
                          const float* sinks) {                                                                                           \
        decode_attention<T, G, D>({query, positions, out, rounded, partial, statistics, arrived, heads, window, least, scale, softcap, sinks},     \
                                  {tables, starts, layer_bytes, layer, kv_heads, head_dim, block_shift});                                 \
    }
#define KERNELS(dtype, T, D) KERNEL(dtype, T, 1, D) KERNEL(dtype, T, 2, D) KERNEL(dtype, T, 4, D) KERNEL(dtype, T, 8, D)
KERNELS(bf16, Bf16, 0) KERNELS(bf16, Bf16, 64) KERNELS(bf16, Bf16, 128)
KERNELS(f16, F16, 0) KERNELS(f16, F16, 64) KERNELS(f16, F16, 128)
KERNELS(f32, float, 0)
KERNELS(fp8, E4m3, 0) KERNELS(fp8, E4m3, 64) KERNELS(fp8, E4m3, 128)
KERNELS(int8, Code8, 0) KERNELS(int8, Code8, 64) KERNELS(int8, Code8, 128)
#undef KERNELS
#undef KERNEL
