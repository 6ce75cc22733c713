// Attention over latents (multi-head latent attention, absorbed): all query heads share one vector of the paged cache for each position, whose first
// elements are also its value.
//
//   out[row][h] = Σ_p softmax_p(scale * query[row][h] · k[p]) * k[p][0..latent],   p up to the row's own position
//
// Shapes: query [rows, heads * width] f32, out [rows, heads * latent] f32; cache: cache.cuh, one vector of `width` elements for each position and no V;
// width and latent multiples of 8, at most 576 and 512.
// partial [rows, heads, splits, latent], statistics [rows, heads, splits] and arrived are those of splits.cuh.
// FLOPs: 2 * heads * (width + latent) per row and position that it sees. Idea: DeepSeek-V2 (2024), Flash-Decoding (Dao et al., 2023).
// Positions, starts and tables come from the host, so they are read before the wait for the last kernel.

#include "cache.cuh"
#include "query_tiles.cuh"
#include "splits.cuh"
#include "tensor.cuh"

constexpr int LATENT_WARPS = 8, LATENT_THREADS = LATENT_WARPS * WARP;
// The widest vector of the cache, and the most of it that is a value.
constexpr int MOST_WIDTH = 576, MOST_LATENT = 512;
// Heads of a warp, and of a block, in latent_attention; tiles of positions in shared memory, of which all but one are on their way.
constexpr int HEADS_OF_WARP = 2, LATENT_HEADS = HEADS_OF_WARP * LATENT_WARPS, LATENT_STAGES = 3;
// Queries of a block and positions of a tile in latent_attention_tiled.
constexpr int LATENT_QUERIES = 64, LATENT_POSITIONS = 32;

struct LatentWork {
    const float* query;
    const unsigned *positions, *last_rows;
    float* out;
    float* partial;
    float2* statistics;
    unsigned* arrived;
    int rows_before, sequences, heads, latent, splits, least;
    float scale;
};

// A 16-byte vector of the cache.
template <class T>
__device__ inline void unpack(const unsigned char* from, float (&out)[16 / sizeof(T)]) {
    const uint4 v = *(const uint4*)from;
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 2) {
            const float2 two = widen_pair<T>(words[i]);
            out[2 * i] = two.x;
            out[2 * i + 1] = two.y;
        } else {
            out[i] = __uint_as_float(words[i]);
        }
    }
}

// Rows by themselves, on CUDA cores. Grid: (rows, ceil(heads / 16), splits): only x may exceed 65,535. Block: 256 threads.
// A block has a row, 16 of its heads and a split of `least` positions or more, so a short row uses fewer splits than it is given; unused blocks
// return. A warp has two heads, a lane every 32nd vector of 16 bytes; what it loads of a position serves both heads as K and as V.
// arrived [rows, gridDim.y]. Shared: three tiles of 32 / sizeof(T) positions. Bytes: width elements per row, position and 16 heads.
// latent_attention_DTYPE.
template <class T>
__device__ inline void latent_attention(const LatentWork& work, const Cache& cache) {
    // Elements of a vector; vectors of a lane, and those that are values; positions of a tile, those that a warp brings, and those that are
    // multiplied together.
    constexpr int E = 16 / sizeof(T), VECTORS = (MOST_WIDTH / E + WARP - 1) / WARP, VALUES = MOST_LATENT / E / WARP;
    constexpr int TILE = 32 / sizeof(T), OWN = TILE / LATENT_WARPS, TOGETHER = 2;
    SHARED_BYTES(memory);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int row = blockIdx.x, first_head = blockIdx.y * LATENT_HEADS, count = min(LATENT_HEADS, work.heads - first_head);
    const int width = cache.head_dim, vectors = width / E;

    launch_dependents();
    const int seen = work.positions[row] + 1;
    const int per_split = max((seen + work.splits - 1) / work.splits, work.least), splits = (seen + per_split - 1) / per_split;
    const int split = blockIdx.z;
    // The first split of every row waits, so that a grid ends behind the last one even if these blocks do not.
    if (split >= splits) return;
    const int begin = split * per_split, end = min(begin + per_split, seen), tiles = (end - begin + TILE - 1) / TILE;
    const unsigned long long* table = cache.tables + cache.starts[row];
    unsigned long long blocks[OWN];
    // Where the blocks of a tile are; a position behind the end stands for the last.
    const auto look_up = [&](int tile) {
#pragma unroll
        for (int u = 0; u < OWN; ++u)
            blocks[u] = table[min(begin + tile * TILE + u * LATENT_WARPS + warp, end - 1) >> cache.block_shift] + cache.layer * cache.layer_bytes;
    };
    // Asks for the tile that was looked up, and looks the next one up.
    const auto ask = [&](int tile) {
        if (tile < tiles) {
            unsigned char* to = memory + tile % LATENT_STAGES * TILE * vectors * 16;
#pragma unroll
            for (int u = 0; u < OWN; ++u) {
                const int p = begin + tile * TILE + u * LATENT_WARPS + warp, slot = min(p, end - 1) & ((1 << cache.block_shift) - 1);
                const T* from = (const T*)blocks[u] + (size_t)slot * width;
                for (int v = lane; v < vectors; v += WARP) copy_async(to + ((u * LATENT_WARPS + warp) * vectors + v) * 16, from + v * E, p < end);
            }
            look_up(tile + 1);
        }
        commit_copies();
    };
    look_up(0);

    wait_for_dependency();
#pragma unroll
    for (int tile = 0; tile < LATENT_STAGES - 1; ++tile) ask(tile);
    const float factor = work.scale * LOG2_E;
    float q[HEADS_OF_WARP][VECTORS][E], o[HEADS_OF_WARP][VALUES][E] = {}, m[HEADS_OF_WARP], l[HEADS_OF_WARP];
#pragma unroll
    for (int h = 0; h < HEADS_OF_WARP; ++h) {
        const float* from = work.query + ((size_t)row * work.heads + first_head + min(h * LATENT_WARPS + warp, count - 1)) * width;
        m[h] = -INFINITY;
        l[h] = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
#pragma unroll
            for (int e = 0; e < E; e += 4) {
                const bool exists = lane + v * WARP < vectors;
                const float4 four = *(const float4*)(from + (exists ? (lane + v * WARP) * E + e : 0));
                const float by = exists ? factor : 0;
                q[h][v][e] = four.x * by, q[h][v][e + 1] = four.y * by, q[h][v][e + 2] = four.z * by, q[h][v][e + 3] = four.w * by;
            }
    }
    for (int tile = 0; tile < tiles; ++tile) {
        wait_copies<LATENT_STAGES - 2>();
        // This tile is there for all, and nobody still reads the one that the next copies replace.
        __syncthreads();
        ask(tile + LATENT_STAGES - 1);
        // A warp without heads only brings positions.
        if (warp >= count) continue;
        const int first = begin + tile * TILE;
        const unsigned char* from = memory + tile % LATENT_STAGES * TILE * vectors * 16;
        for (int j = 0; j < TILE && first + j < end; j += TOGETHER) {
            float k[TOGETHER][VECTORS][E], score[HEADS_OF_WARP][TOGETHER];
#pragma unroll
            for (int u = 0; u < TOGETHER; ++u)
#pragma unroll
                for (int v = 0; v < VECTORS; ++v)
                    // Behind the last vector stands one that a query of zeros meets.
                    unpack<T>(from + ((j + u) * vectors + min(lane + v * WARP, vectors - 1)) * 16, k[u][v]);
#pragma unroll
            for (int h = 0; h < HEADS_OF_WARP; ++h) {
                float most = m[h];
#pragma unroll
                for (int u = 0; u < TOGETHER; ++u) {
                    float dot = 0;
#pragma unroll
                    for (int v = 0; v < VECTORS; ++v)
#pragma unroll
                        for (int e = 0; e < E; ++e) dot += q[h][v][e] * k[u][v][e];
                    score[h][u] = warp_sum(dot);
                    if (first + j + u >= end) score[h][u] = -INFINITY;
                    most = fmaxf(most, score[h][u]);
                }
                // The first of them exists, so the largest is a number.
                const float kept = exp2f(m[h] - most);
                m[h] = most;
                l[h] *= kept;
#pragma unroll
                for (int v = 0; v < VALUES; ++v)
#pragma unroll
                    for (int e = 0; e < E; ++e) o[h][v][e] *= kept;
#pragma unroll
                for (int u = 0; u < TOGETHER; ++u) {
                    const float weight = exp2f(score[h][u] - most);
                    l[h] += weight;
#pragma unroll
                    for (int v = 0; v < VALUES; ++v)
#pragma unroll
                        for (int e = 0; e < E; ++e) o[h][v][e] += weight * k[u][v][e];
                }
            }
        }
    }

#pragma unroll
    for (int h = 0; h < HEADS_OF_WARP; ++h) {
        if (h * LATENT_WARPS + warp >= count) continue;
        const size_t head = (size_t)row * work.heads + first_head + h * LATENT_WARPS + warp, part = head * work.splits + split;
        float* to = splits == 1 ? work.out + head * work.latent : work.partial + part * work.latent;
        const float by = splits == 1 ? l[h] : 1;
        if (splits > 1 && lane == 0) work.statistics[part] = make_float2(m[h], l[h]);
#pragma unroll
        for (int v = 0; v < VALUES; ++v)
#pragma unroll
            for (int e = 0; e < E; e += 4) {
                const int element = (lane + v * WARP) * E + e;
                const float4 four = make_float4(o[h][v][e], o[h][v][e + 1], o[h][v][e + 2], o[h][v][e + 3]);
                if (element < work.latent) *(float4*)(to + element) = divided(four, by);
            }
    }
    if (splits == 1) return;
    if (!comes_last(work.arrived + (size_t)row * gridDim.y + blockIdx.y, splits)) return;
    merge_splits<LATENT_WARPS>(
        work.partial, work.statistics, work.splits, splits, count, work.latent, (float*)memory,
        [&](int i) { return (size_t)row * work.heads + first_head + i; }, [&](size_t at, float4 value) { ((float4*)work.out)[at] = value; });
}

// The rows of a sequence together, on tensor cores: the twin of latent_attention, and held against it, for caches of 16 bits.
// Grid: (tiles of 64 queries × splits). Block: 256 threads. The queries of a sequence are its rows × their heads: a block has 64 of them, and all of them
// share each tile of 32 positions. Tiles lie as in query_tiles.cuh, by the last rows of so many sequences, behind rows_before others of the
// step: blocks without queries return. A warp has 16 queries: for the products with K half of the elements, whose sums
// it exchanges with the warp that has the other half, for those with V half of the values. Splits have `least` tiles of positions or more; a shorter
// sequence uses fewer, and blocks without a split return.
// arrived [tiles]. Shared: the queries, two tiles of positions, one of which is on its way, and 16 KiB of scores: 160 KiB.
// Bytes: width elements per 64 queries and position; queries and weights are rounded to the cache's dtype before they are multiplied. Minimum
// architecture: sm_80. latent_attention_tiled_DTYPE.
template <class T>
__device__ inline void latent_attention_tiled(const LatentWork& work, const Cache& cache) {
    constexpr int V = MOST_WIDTH / 8, QUERY_BYTES = LATENT_QUERIES * V * 16, TILE_BYTES = LATENT_POSITIONS * V * 16;
    // Positions of a tile that a warp brings; pairs of 8 columns that it has of the values, at most.
    constexpr int OWN = LATENT_POSITIONS / LATENT_WARPS, PAIRS = MOST_LATENT / 32;
    SHARED_BYTES(memory);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, of_queries = warp % 4, side = warp / 4;
    const int heads = work.heads, width = cache.head_dim, vectors = width / 8;
    const int tile = blockIdx.x / work.splits, split = blockIdx.x % work.splits;

    launch_dependents();
    const QueryTile mine = query_tile<LATENT_QUERIES>(work.last_rows, work.rows_before, work.sequences, heads, tile);
    const int first_row = mine.first_row, queries = mine.queries, first_query = mine.first_query;
    if (first_query >= queries) return;
    const int last_position = work.positions[first_row] + (min(first_query + LATENT_QUERIES, queries) - 1) / heads;
    const int tiles_seen = last_position / LATENT_POSITIONS + 1;
    const int per_split = max((tiles_seen + work.splits - 1) / work.splits, work.least), splits = (tiles_seen + per_split - 1) / per_split;
    // The first block of all has queries and waits, so that a grid ends behind the last one even if these blocks do not.
    if (split >= splits) return;
    const int begin = split * per_split * LATENT_POSITIONS, end = min(begin + per_split * LATENT_POSITIONS, last_position + 1);
    const unsigned long long* table = cache.tables + cache.starts[first_row];
    // A lane knows the block of the warp's position lane % OWN; a position behind the end stands for the last.
    const auto look_up = [&](int base) {
        return table[min(base + lane % OWN * LATENT_WARPS + warp, end - 1) >> cache.block_shift] + cache.layer * cache.layer_bytes;
    };
    unsigned long long block = look_up(begin);

    const auto tile_of = [&](int stage) { return memory + QUERY_BYTES + stage * TILE_BYTES; };
    const auto load = [&](int base, int stage) {
#pragma unroll
        for (int u = 0; u < OWN; ++u) {
            const int place = u * LATENT_WARPS + warp, p = base + place, slot = min(p, end - 1) & ((1 << cache.block_shift) - 1);
            const T* from = (const T*)__shfl_sync(ALL_LANES, block, u) + (size_t)slot * width;
            // Whole steps of 16 elements, of zeros behind the last.
            for (int v = lane; v < (vectors + 1) / 2 * 2; v += WARP) {
                const bool exists = p < end && v < vectors;
                copy_async(swizzled<V>(tile_of(stage), place, v), from + (exists ? v * 8 : 0), exists);
            }
        }
        commit_copies();
        block = look_up(base + LATENT_POSITIONS);
    };

    wait_for_dependency();
    load(begin, 0);
    for (int i = warp; i < LATENT_QUERIES; i += LATENT_WARPS) {
        const bool exists = first_query + i < queries;
        const float* from = work.query + ((size_t)first_row * heads + first_query + (exists ? i : 0)) * width;
        for (int v = lane; v < (vectors + 1) / 2 * 2; v += WARP) {
            uint4 eight = make_uint4(0, 0, 0, 0);
            if (exists && v < vectors) {
                const float4 a = *(const float4*)(from + v * 8), b = *(const float4*)(from + v * 8 + 4);
                eight = make_uint4(pair<T>(a.x, a.y), pair<T>(a.z, a.w), pair<T>(b.x, b.y), pair<T>(b.z, b.w));
            }
            *(uint4*)swizzled<V>(memory, i, v) = eight;
        }
    }
    // Two queries of a lane: of the warp's sixteen, lane / 4 and 8 more. One that does not exist sees nothing.
    int own[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int query = first_query + of_queries * 16 + lane / 4 + half * 8;
        own[half] = query < queries ? (int)work.positions[first_row + query / heads] : -1;
    }
    // Steps of this warp's half of the elements, and pairs of its half of the values.
    const int steps = (vectors + 1) / 2, first_step = side * ((steps + 1) / 2), last_step = side ? steps : (steps + 1) / 2;
    const int pairs = (work.latent + 31) / 32;
    const float factor = work.scale * LOG2_E;
    float4* sums = (float4*)(memory + QUERY_BYTES + 2 * TILE_BYTES);
    float o[2 * PAIRS][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};
    for (int base = begin, stage = 0; base < end; base += LATENT_POSITIONS, stage ^= 1) {
        wait_copies<0>();
        // This tile is there for all, and nobody still reads the one that the next copies replace, or the last sums.
        __syncthreads();
        if (base + LATENT_POSITIONS < end) load(base + LATENT_POSITIONS, stage ^ 1);

        float s[4][4] = {};
#pragma unroll 2
        for (int step = first_step; step < last_step; ++step) {
            unsigned a[4];
            load_tiles<false>(a, swizzled<V>(memory, of_queries * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                unsigned b[4];
                load_tiles<false>(b, swizzled<V>(tile_of(stage), n * 16 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
                multiply_tile<T>(s[2 * n], a, {b[0], b[1]});
                multiply_tile<T>(s[2 * n + 1], a, {b[2], b[3]});
            }
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) sums[(warp * 4 + n) * WARP + lane] = make_float4(s[n][0], s[n][1], s[n][2], s[n][3]);
        // The sums of the other half of the elements are there.
        __syncthreads();
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float4 other = sums[((warp ^ 4) * 4 + n) * WARP + lane];
            s[n][0] += other.x, s[n][1] += other.y, s[n][2] += other.z, s[n][3] += other.w;
        }
        // Scores become weights relative to the largest so far, in units of log2.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float most = m[half];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& score = s[n][2 * half + i];
                    score = base + n * 8 + lane % 4 * 2 + i <= own[half] ? score * factor : -INFINITY;
                    most = fmaxf(most, score);
                }
            }
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
            const float reference = most == -INFINITY ? 0 : most, kept = exp2f(m[half] - reference);
            m[half] = most;
            l[half] *= kept;
#pragma unroll
            for (int n = 0; n < 2 * PAIRS; ++n) {
                o[n][2 * half] *= kept;
                o[n][2 * half + 1] *= kept;
            }
#pragma unroll
            for (int n = 0; n < 4; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& score = s[n][2 * half + i];
                    score = exp2f(score - reference);
                    l[half] += score;
                }
            }
        }
#pragma unroll
        for (int k = 0; k < LATENT_POSITIONS / 16; ++k) {
            const unsigned a[4] = {pair<T>(s[2 * k][0], s[2 * k][1]), pair<T>(s[2 * k][2], s[2 * k][3]),
                                   pair<T>(s[2 * k + 1][0], s[2 * k + 1][1]), pair<T>(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
            for (int n = 0; n < PAIRS; ++n) {
                if (n >= pairs) break;
                unsigned b[4];
                load_tiles<true>(b, swizzled<V>(tile_of(stage), k * 16 + lane % 16, (side * pairs + n) * 2 + lane / 16));
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
        const size_t head = (size_t)first_row * heads + first_query + of_queries * 16 + lane / 4 + half * 8, part = head * work.splits + split;
        float* to = splits == 1 ? work.out + head * work.latent : work.partial + part * work.latent;
        const float by = splits == 1 ? sum : 1;
        if (splits > 1 && side == 0 && lane % 4 == 0) work.statistics[part] = make_float2(m[half], sum);
#pragma unroll
        for (int n = 0; n < 2 * PAIRS; ++n) {
            const int element = (side * pairs * 2 + n) * 8 + lane % 4 * 2;
            if (n < 2 * pairs && element < work.latent) *(float2*)(to + element) = make_float2(o[n][2 * half] / by, o[n][2 * half + 1] / by);
        }
    }
    if (splits == 1) return;
    if (!comes_last(work.arrived + tile, splits)) return;
    merge_splits<LATENT_WARPS>(
        work.partial, work.statistics, work.splits, splits, min(LATENT_QUERIES, queries - first_query), work.latent, (float*)memory,
        [&](int i) { return (size_t)first_row * heads + first_query + i; }, [&](size_t at, float4 value) { ((float4*)work.out)[at] = value; });
}

#define KERNEL(name, function, T)                                                                                                          \
    HBMARK_KERNEL_BOUNDED(LATENT_THREADS, 1, name, const float* query, const unsigned* positions, const unsigned* last_rows,                \
                          const unsigned long long* tables, const unsigned* starts, float* out, float* partial, float2* statistics,        \
                          unsigned* arrived, unsigned long long layer_bytes, int layer, int heads, int width, int latent, int block_shift, \
                          int splits, int least, float scale, int rows_before, int sequences) {                                              \
        function<T>({query, positions, last_rows, out, partial, statistics, arrived, rows_before, sequences, heads, latent, splits, least,   \
                     scale},                                                                                                               \
                    {tables, starts, layer_bytes, layer, 1, width, block_shift});                                                          \
    }
KERNEL(latent_attention_bf16, latent_attention, Bf16)
KERNEL(latent_attention_f16, latent_attention, F16)
KERNEL(latent_attention_f32, latent_attention, float)
KERNEL(latent_attention_tiled_bf16, latent_attention_tiled, Bf16)
KERNEL(latent_attention_tiled_f16, latent_attention_tiled, F16)
#undef KERNEL
