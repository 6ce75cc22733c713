// The linear layers on tensor cores: tiled twins of project_add.cu, gate_up.cu, norm_qkv.cu and head.cu.
//
// Formulas and shapes are theirs, except that inputs are prepared rows (prepare_rows.cu); grid, block, shared memory and bytes: tiled.cuh.
// tiled_OPERATION_DTYPE_tBM. tiled_gate_up leaves its outputs also as the next product takes them, where that has floats of the same 16 bits and `rounded`
// is not null. tiled_qkv leaves heads in projected, for finish_heads, where that is not null; tiled_head leaves the largest logit to
// first_largest.

#include "heads.cuh"
#include "tiled.cuh"

#define PRODUCT                                                                                                                          \
    const uint4 *inputs, const uint4 *data, const float *scales, const float *bias,  \
        int rows, int outputs, int vectors, int shift
#define WEIGHTS {data, scales, bias, outputs, vectors, shift}

#define KERNEL(dtype, F, ROWS)                                                                                                           \
    HBMARK_KERNEL_BOUNDED(Tiling##ROWS::TILED_THREADS, 1, tiled_project_add_##dtype##_t##ROWS, float* hidden, PRODUCT) {    \
        multiply_tiled<F, DeepTiling##ROWS>(inputs, rows, WEIGHTS, [&](int row, int pair, float first, float second) {                       \
            float* out = hidden + (size_t)row * outputs + 2 * pair;                                                                      \
            out[0] += first;                                                                                                             \
            if (2 * pair + 1 < outputs) out[1] += second;                                                                                \
        });                                                                                                                              \
    }
HBMARK_FOR_EACH_TILING(KERNEL)
HBMARK_FOR_EACH_GROUPED(KERNEL)
#undef KERNEL

#define KERNEL(dtype, F, ROWS)                                                                                                           \
    HBMARK_KERNEL_BOUNDED(Tiling##ROWS::TILED_THREADS, 1, tiled_gate_up_##dtype##_t##ROWS, float* out, unsigned short* rounded, int function, float limit, PRODUCT) { \
        multiply_tiled<F, Tiling##ROWS>(inputs, rows, WEIGHTS, [&](int row, int pair, float gate, float up) {                            \
            const size_t at = (size_t)row * (outputs / 2) + pair;                                                                        \
            const float inner = gated({function, limit}, gate, up);                                                                        \
            out[at] = inner;                                                                                                             \
            F::put_one(rounded, at, inner);                                                                                              \
        });                                                                                                                              \
    }
HBMARK_FOR_EACH_TILING(KERNEL)
HBMARK_FOR_EACH_GROUPED(KERNEL)
#undef KERNEL

#define KERNEL(dtype, F, ROWS)                                                                                                           \
    HBMARK_KERNEL_BOUNDED(Tiling##ROWS::TILED_THREADS, 1, tiled_head_##dtype##_t##ROWS, float* logits, PRODUCT) {           \
        multiply_tiled<F, Tiling##ROWS>(inputs, rows, WEIGHTS, [&](int row, int pair, float first, float second) {                       \
            float* out = logits + (size_t)row * outputs + 2 * pair;                                                                      \
            out[0] = first;                                                                                                              \
            if (2 * pair + 1 < outputs) out[1] = second;                                                                                 \
        });                                                                                                                              \
    }
HBMARK_FOR_EACH_TILING(KERNEL)
#undef KERNEL

#define HEADS                                                                                                                            \
    const float *query_norm, const float *key_norm, float norm_eps, const float *cosines,         \
        const float *sines, const unsigned *positions, const unsigned long long *tables,          \
        const unsigned *starts, float *query, float *projected, unsigned long long layer_bytes,   \
        int layer, int heads, int kv_heads, int head_dim, int block_shift
#define HEAD_WORK {query_norm, key_norm, cosines, sines, positions, query, projected, nullptr, heads, norm_eps}
#define CACHE {tables, starts, layer_bytes, layer, kv_heads, head_dim, block_shift}

#define KERNEL(dtype, F, ROWS)                                                                                                           \
    HBMARK_KERNEL_BOUNDED(Tiling##ROWS::TILED_THREADS, 1, tiled_qkv_##dtype##_t##ROWS, HEADS, PRODUCT) {                                 \
        const HeadWork work = HEAD_WORK;                                                                                                 \
        const Cache cache = CACHE;                                                                                                       \
        multiply_tiled<F, DeepTiling##ROWS>(inputs, rows, WEIGHTS, [&](int row, int pair, float first, float second) {                       \
            if (projected) {                                                                                                             \
                *(float2*)(projected + (size_t)row * outputs + 2 * pair) = make_float2(first, second);                                   \
            } else {                                                                                                                     \
                store_pair<F::Cache>(work, cache, row, pair / (head_dim / 2), pair % (head_dim / 2), first, second);                            \
            }                                                                                                                            \
        });                                                                                                                              \
    }
HBMARK_FOR_EACH_TILING(KERNEL)
HBMARK_FOR_EACH_GROUPED(KERNEL)
#undef KERNEL

// The heads that a projection left, by the format of the cache; those of Q together and of K together where `joint`.
// Grid: (rows, ceil((heads + 2 * kv_heads) / 8)). Block: 256 threads, a warp per head.
#define KERNEL(dtype, T)                                                                                                                 \
    HBMARK_KERNEL_BOUNDED(THREADS, 2, finish_heads_##dtype, HEADS, int joint, int outputs) {                                             \
        launch_dependents();                                                                                                             \
        wait_for_dependency();                                                                                                           \
        const int head = blockIdx.y * WARPS + threadIdx.x / WARP;                                                                        \
        if (head < heads + 2 * kv_heads) finish_head<T>(HEAD_WORK, CACHE, blockIdx.x, head, outputs, joint);                             \
    }
KERNEL(bf16, Bf16)
KERNEL(f16, F16)
KERNEL(f32, float)
KERNEL(fp8, E4m3)
KERNEL(int8, Code8)
#undef KERNEL

// out[row][pair] = activated(sums[row][2 * pair]) * sums[row][2 * pair + 1], behind a product of the library. Grid: (rows, ceil(pairs / 256)).
HBMARK_KERNEL_BOUNDED(THREADS, 2, finish_gate_up, const float* sums, float* out, int function, float limit, int pairs) {
    launch_dependents();
    wait_for_dependency();
    const int pair = blockIdx.y * THREADS + threadIdx.x;
    if (pair >= pairs) return;
    const float2 both = ((const float2*)sums)[(size_t)blockIdx.x * pairs + pair];
    out[(size_t)blockIdx.x * pairs + pair] = gated({function, limit}, both.x, both.y);
}

// next[s] = the first largest of logits[s], which are bent towards softcap where that is above 0. best and arrived [sequences]: as in head.cu.
// Grid: (sequences, parts). Block: 256 threads. A thread asks for 16 logits at once.
HBMARK_KERNEL_BOUNDED(THREADS, 2, first_largest, float* logits, unsigned long long* best, unsigned* arrived, unsigned* next, float softcap,
                      int outputs) {
    SHARED(unsigned long long[WARPS], of_warps);
    launch_dependents();
    wait_for_dependency();
    const LinearInput in{logits, nullptr, nullptr, 0, (int)gridDim.x, outputs};
    const int sequence = blockIdx.x, apart = gridDim.y * THREADS * 4;
    unsigned long long mine = NO_LOGIT;
    for (int first = (blockIdx.y * THREADS + threadIdx.x) * 4; first < outputs; first += BATCH * apart) {
        float4 four[BATCH];
        in.fours(four, in.row(sequence), first, apart);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const float each[4] = {four[i].x, four[i].y, four[i].z, four[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int at = first + i * apart + j;
                if (at >= outputs) continue;
                const float logit = bent(each[j], softcap);
                if (softcap > 0) logits[(size_t)sequence * outputs + at] = logit;
                mine = max(mine, in_order(logit, at));
            }
        }
    }
    for (int offset = WARP / 2; offset > 0; offset /= 2) mine = max(mine, __shfl_xor_sync(ALL_LANES, mine, offset));
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = mine;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int warp = 1; warp < WARPS; ++warp) mine = max(mine, of_warps[warp]);
    atomicMax(best + sequence, mine);
    // The last block to come has the largest of all.
    __threadfence();
    if (atomicInc(arrived + sequence, gridDim.y - 1) != gridDim.y - 1) return;
    __threadfence();
    next[sequence] = ~(unsigned)__ldcg(best + sequence);
    best[sequence] = NO_LOGIT;
}
