// Grouped-query attention of many rows of a sequence over the paged cache, on tensor cores: the twin of decode_attention.cu, and held against it.
//
//   out[row][h] = Σ_p softmax_p(bend(q[h] · k[p] * scale), sinks[h]) * v[p],   p from max(0, position + 1 - window) to the row's own position
//
// Shapes: query [rows, heads * head_dim], out [rows, heads * value_dim] f32; cache: cache.cuh in bf16, f16, fp8 or int8, with V of value_dim; both multiples
// of 8, at most D and VD.
// Grid: (tiles of 64 queries × splits, kv_heads). Block: 128 threads. The queries of a sequence and a head of K and V are its rows × the query heads of
// the group; a warp has 16 of them, a block 64, and all of them share each tile of 64 positions. Tiles lie as in query_tiles.cuh, by
// the last rows of so many sequences, behind rows_before others of the step: blocks without queries return. Few queries over
// many positions are split by positions, each split `least` tiles or more; a shorter sequence uses fewer, and blocks without a split return.
// partial [rows, heads, splits, value_dim], statistics [rows, heads, splits] and arrived [tiles, kv_heads] are those of splits.cuh.
// Shared: two tiles of K and of V, 64 * D and 64 * VD elements each; one is multiplied while the next one comes. Of elements of one byte, which are widened to f16
// and multiplied with their scales between, one wide tile of each, then two with their scales.
// Bytes: positions * kv_heads * (head_dim + value_dim) elements per 64 queries. FLOPs: 2 * heads * (head_dim + value_dim) per row and position that it sees; queries and
// weights are rounded to the cache's dtype, or that f16, before they are multiplied. Minimum architecture: sm_80. Idea: FlashAttention-2 (Dao, 2023).
// prefill_attention_DTYPE_dD: VD is D, and 128 of 192 (DeepSeek's heads).

#include "cache.cuh"
#include "query_tiles.cuh"
#include "splits.cuh"
#include "tensor.cuh"

constexpr int PREFILL_WARPS = 4, PREFILL_THREADS = PREFILL_WARPS * WARP;
constexpr int QUERIES = 16 * PREFILL_WARPS, POSITIONS = 64;

struct PrefillWork {
    const float* query;
    const unsigned *positions, *last_rows;
    float* out;
    int rows_before, sequences, heads, value_dim, window;
    // Scores are bent towards softcap where that is above 0.
    float scale, softcap;
    // [heads]: one more score of each, without a value; or null.
    const float* sinks;
    int splits, least;
    float* partial;
    float2* statistics;
    unsigned* arrived;
};

// A cache of C, multiplied as T.
template <class T, class C, int D, int VD>
__device__ inline void prefill_attention(const PrefillWork& work, const Cache& cache) {
    constexpr bool WIDENED = sizeof(C) == 1;
    // Vectors of 16 bytes in rows of K and V; tiles as they are multiplied, and of K and V in elements of one byte.
    constexpr int V = D / 8, VV = VD / 8, STEPS = D / 16, KEY_BYTES = POSITIONS * D * 2, TILE_BYTES = KEY_BYTES + POSITIONS * VD * 2;
    constexpr int NARROW_BYTES = POSITIONS * D;
    static_assert(!WIDENED || D == VD, "K and V alike");
    SHARED_BYTES(memory);
    launch_dependents();
    wait_for_dependency();
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int kv_head = blockIdx.y, head_dim = cache.head_dim, value_dim = work.value_dim, group = work.heads / cache.kv_heads;
    const int tile = blockIdx.x / work.splits, split = blockIdx.x % work.splits;
    const QueryTile mine = query_tile<QUERIES>(work.last_rows, work.rows_before, work.sequences, group, tile);
    const int first_row = mine.first_row, queries = mine.queries, first_query = mine.first_query;
    if (first_query >= queries) return;
    const unsigned start = cache.starts[first_row];
    const int first_position = work.positions[first_row] + first_query / group;
    const int last_position = work.positions[first_row] + (min(first_query + QUERIES, queries) - 1) / group;
    const int seen_from = max(0, first_position + 1 - work.window) / POSITIONS * POSITIONS;
    const int tiles_seen = (last_position - seen_from) / POSITIONS + 1;
    const int per_split = max((tiles_seen + work.splits - 1) / work.splits, work.least), splits = (tiles_seen + per_split - 1) / per_split;
    if (split >= splits) return;
    const int begin = seen_from + split * per_split * POSITIONS, end = min(begin + per_split * POSITIONS, last_position + 1);

    const auto keys_of = [&](int stage) { return memory + (WIDENED ? 0 : stage * TILE_BYTES); };
    const auto values_of = [&](int stage) { return keys_of(stage) + KEY_BYTES; };
    // K and then V of a tile as they come, and their scales.
    const auto narrow_of = [&](int stage) { return memory + TILE_BYTES + stage * (2 * NARROW_BYTES + 2 * POSITIONS * 4); };
    const auto scales_of = [&](int stage) { return narrow_of(stage) + 2 * NARROW_BYTES; };
    const auto load = [&](int base, int stage) {
        for (int i = threadIdx.x; i < POSITIONS * V; i += PREFILL_THREADS) {
            const int position = base + i / V, vector = i % V;
            // V may be the wider of the two.
            const bool exists = position < end, in_key = exists && vector * 8 < head_dim, in_value = exists && vector * 8 < value_dim;
            const int there = exists ? position : begin;
            const C* key = cache.at<C>(start, there, kv_head, 0) + (in_key ? vector * 8 : 0);
            const C* value = cache.value_at<C>(start, there, kv_head, value_dim) + (in_value ? vector * 8 : 0);
            if constexpr (WIDENED) {
                copy_async<8>(narrow_of(stage) + i * 8, key, in_key);
                copy_async<8>(narrow_of(stage) + NARROW_BYTES + i * 8, value, in_value);
            } else {
                copy_async(swizzled<V>(keys_of(stage), i / V, vector), key, in_key);
                if (VV == V || vector < VV) copy_async(swizzled<VV>(values_of(stage), i / V, vector), value, in_value);
            }
        }
        if constexpr (has_scales<C>()) {
            static_assert(PREFILL_THREADS == 2 * POSITIONS, "a thread for each scale of K and V");
            const int position = base + (int)threadIdx.x % POSITIONS;
            const bool exists = position < end;
            copy_async<4>(scales_of(stage) + threadIdx.x * 4, cache.scale(start, exists ? position : begin, kv_head, threadIdx.x / POSITIONS), exists);
        }
        commit_copies();
    };
    // Makes the wide tile of one that came.
    const auto widen_tile = [&](int stage) {
        if constexpr (WIDENED) {
            for (int i = threadIdx.x; i < 2 * POSITIONS * V; i += PREFILL_THREADS) {
                const int values = i / (POSITIONS * V), position = i / V % POSITIONS, vector = i % V;
                const uint2 codes = *(const uint2*)(narrow_of(stage) + i * 8);
                const float scale = has_scales<C>() ? ((const float*)scales_of(stage))[values * POSITIONS + position] : unit_of<C>();
                float low[4], high[4];
                four_codes<C>(codes.x, low);
                four_codes<C>(codes.y, high);
                *(uint4*)swizzled<V>(values ? values_of(stage) : keys_of(stage), position, vector) =
                    make_uint4(pair<T>(low[0] * scale, low[1] * scale), pair<T>(low[2] * scale, low[3] * scale),
                               pair<T>(high[0] * scale, high[1] * scale), pair<T>(high[2] * scale, high[3] * scale));
            }
            __syncthreads();
        }
    };
    load(begin, 0);

    // Two queries of a lane: of the warp's sixteen, lane / 4 and 8 more. One that does not exist sees nothing.
    unsigned q[STEPS][4];
    int own[2];
    size_t places[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int query = first_query + warp * 16 + lane / 4 + half * 8, row = first_row + min(query, queries - 1) / group;
        own[half] = query < queries ? (int)work.positions[row] : -1;
        places[half] = ((size_t)row * work.heads + kv_head * group + min(query, queries - 1) % group) * head_dim;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const int element = step * 16 + part * 8 + lane % 4 * 2;
                float2 two = make_float2(0, 0);
                if (element < head_dim) two = *(const float2*)(work.query + places[half] + element);
                q[step][part * 2 + half] = pair<T>(two.x, two.y);
            }
        }
    }
    // What scores are multiplied with before and after they are bent.
    const bool bends = work.softcap > 0;
    const float factor = bends ? work.scale / work.softcap : work.scale * LOG2_E, cap = work.softcap * LOG2_E;
    float o[VD / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};
    // The first split has seen the sinks.
    if (work.sinks && split == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = min(first_query + warp * 16 + lane / 4 + half * 8, queries - 1);
            m[half] = work.sinks[kv_head * group + query % group] * LOG2_E;
            // The four lanes of a query sum theirs in the end.
            l[half] = lane % 4 == 0 ? 1 : 0;
        }
    }
    for (int base = begin, stage = 0; base < end; base += POSITIONS, stage ^= 1) {
        // Nobody still multiplies with the tile that the next copies replace.
        __syncthreads();
        if (base + POSITIONS < end) load(base + POSITIONS, stage ^ 1);
        else commit_copies();
        wait_copies<1>();
        __syncthreads();
        widen_tile(stage);

        float s[POSITIONS / 8][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int n = 0; n < POSITIONS / 16; ++n) {
                unsigned b[4];
                load_tiles<false>(b, swizzled<V>(keys_of(stage), n * 16 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
                multiply_tile<T>(s[2 * n], q[step], {b[0], b[1]});
                multiply_tile<T>(s[2 * n + 1], q[step], {b[2], b[3]});
            }
        }
        // Scores become weights relative to the largest so far, in units of log2.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float most = m[half];
#pragma unroll
            for (int n = 0; n < POSITIONS / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int position = base + n * 8 + lane % 4 * 2 + i;
                    const bool seen = position <= own[half] && position > own[half] - work.window;
                    float& score = s[n][2 * half + i];
                    score *= factor;
                    if (bends) score = cap * tanhf(score);
                    if (!seen) score = -INFINITY;
                    most = fmaxf(most, score);
                }
            }
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
            const float reference = most == -INFINITY ? 0 : most, kept = exp2f(m[half] - reference);
            m[half] = most;
            l[half] *= kept;
#pragma unroll
            for (int n = 0; n < VD / 8; ++n) {
                o[n][2 * half] *= kept;
                o[n][2 * half + 1] *= kept;
            }
#pragma unroll
            for (int n = 0; n < POSITIONS / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& score = s[n][2 * half + i];
                    score = exp2f(score - reference);
                    l[half] += score;
                }
            }
        }
#pragma unroll
        for (int k = 0; k < POSITIONS / 16; ++k) {
            const unsigned a[4] = {pair<T>(s[2 * k][0], s[2 * k][1]), pair<T>(s[2 * k][2], s[2 * k][3]),
                                   pair<T>(s[2 * k + 1][0], s[2 * k + 1][1]), pair<T>(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
            for (int n = 0; n < VD / 16; ++n) {
                unsigned b[4];
                load_tiles<true>(b, swizzled<VV>(values_of(stage), k * 16 + lane % 16, n * 2 + lane / 16));
                multiply_tile<T>(o[2 * n], a, {b[0], b[1]});
                multiply_tile<T>(o[2 * n + 1], a, {b[2], b[3]});
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = l[half] + __shfl_xor_sync(ALL_LANES, l[half], 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        if (own[half] < 0) continue;
        const size_t head = places[half] / head_dim;
        float* to = splits == 1 ? work.out + head * value_dim : work.partial + (head * work.splits + split) * value_dim;
        const float by = splits == 1 ? sum : 1;
        if (splits > 1 && lane % 4 == 0) work.statistics[head * work.splits + split] = make_float2(m[half], sum);
#pragma unroll
        for (int n = 0; n < VD / 8; ++n) {
            const int element = n * 8 + lane % 4 * 2;
            if (element < value_dim) *(float2*)(to + element) = make_float2(o[n][2 * half] / by, o[n][2 * half + 1] / by);
        }
    }
    if (splits == 1) return;
    if (!comes_last(work.arrived + (size_t)tile * gridDim.y + kv_head, splits)) return;
    const auto head_of = [&](int i) {
        const int query = first_query + i;
        return (size_t)(first_row + query / group) * work.heads + kv_head * group + query % group;
    };
    merge_splits<PREFILL_WARPS>(work.partial, work.statistics, work.splits, splits, min(QUERIES, queries - first_query), value_dim, (float*)memory,
                                head_of, [&](size_t at, float4 value) { ((float4*)work.out)[at] = value; });
}

#define KERNEL(dtype, T, C, D, VD)                                                                                                        \
    HBMARK_KERNEL_BOUNDED(PREFILL_THREADS, 2, prefill_attention_##dtype##_d##D, const float* query, const unsigned* positions,            \
                          const unsigned* last_rows, const unsigned long long* tables, const unsigned* starts, float* out,                \
                          unsigned long long layer_bytes, int layer, int heads, int kv_heads, int head_dim, int value_dim,                \
                          int block_shift, int window, float scale, float softcap, const float* sinks, int splits, int least,             \
                          int rows_before, int sequences, float* partial, float2* statistics, unsigned* arrived) {                          \
        prefill_attention<T, C, D, VD>({query, positions, last_rows, out, rows_before, sequences, heads, value_dim, window, scale, softcap, \
                                        sinks, splits, least, partial, statistics, arrived},                                              \
                                       {tables, starts, layer_bytes, layer, kv_heads, head_dim, block_shift});                            \
    }
#define KERNELS(dtype, T, C) KERNEL(dtype, T, C, 64, 64) KERNEL(dtype, T, C, 128, 128)
KERNELS(bf16, Bf16, Bf16) KERNELS(f16, F16, F16) KERNELS(fp8, F16, E4m3) KERNELS(int8, F16, Code8)
KERNEL(bf16, Bf16, Bf16, 192, 128) KERNEL(f16, F16, F16, 192, 128)
#undef KERNELS
#undef KERNEL
