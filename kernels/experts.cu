// The experts of a layer: a router picks some for each row, and only those are read.
//
//   logits = router · norm(hidden[row]) + bias;   the per_row largest are the experts of a row, the first of equal ones; shares = scale * softmax(logits)
//   or, by sigmoids, logits without it: those of the largest sigmoid(logit) + bias in the best groups, shares = scale * sigmoid(logit); then renormalised or not
//   inner[row][i] = gate · norm(hidden[row]) + b and up · norm(hidden[row]) + b, as they meet (struct Gate), of the row's i-th expert by its number, then of the shared one
//   hidden[row] += Σ_i shares[row][i] * (down · inner[row][i] + b), the shared expert's with the sigmoid of its gate
//
// Shapes   hidden [rows, hidden] f32; inner [rows, per_row * width + shared_width] f32; a router has a row for each of `count` experts, then one for
//          the gate of the shared one; matrices of experts as in gate_up.cu and project_add.cu, found through a table: the shared one, then the routed.
// Work     What routing leaves for the kernels behind it, in one piece of memory (struct Work): each row's experts and shares, these choices grouped by
//          expert, and tiles: up to tile_rows choices of one expert. Tiles are numbered: those of the shared expert, which has all rows, and then the
//          routed ones, as many as a word says. A grid has blocks for the most tiles that rows can make; blocks without one return at once. So one
//          recorded graph serves every choice, and no host is asked. Rows from real_rows on are padding: no expert is read for them.
// Grid     experts_router: as linear.cuh. experts_choose: (rows / 8). experts_gate_up, experts_down: (any, tiles along y, and along z beyond
//          65,535). experts_tiled_*: (ceil(outputs / BN), tiles, and along z). experts_combine: (rows, ceil(hidden / 256)). Block: 256 threads or as
//          tiled.cuh. Shared memory: as linear.cuh and tiled.cuh; experts_choose has a word for each expert and warp.
// Bytes    outputs * vectors * 16 of each tile: an expert is read once for all its rows where they fit one tile.
// experts_OPERATION_DTYPE_mM streams for up to M rows of an expert, experts_tiled_OPERATION_DTYPE_tBM multiplies BM on tensor cores. A down projection
// leaves the sum of each choice in parts [rows * per_row + rows, hidden], which experts_combine adds in the order of the experts' numbers: no result
// depends on which block came first. Weights of experts are asked for behind the wait for the last kernel, which says which they are.

#include "blocks.cuh"
#include "heads.cuh"
#include "tiled.cuh"

// Where the parts of the work lie, in words.
struct Work {
    unsigned* words;
    int rows, per_row;

    __device__ size_t choices_count() const { return (size_t)rows * per_row; }
    __device__ unsigned* tile_count() const { return words; }
    // [rows, per_row], by number.
    __device__ unsigned* experts() const { return words + 4; }
    __device__ float* shares() const { return (float*)(experts() + choices_count()); }
    // Places in `experts`, grouped by expert, and the row of each.
    __device__ unsigned* choices() const { return experts() + 2 * choices_count(); }
    __device__ unsigned* rows_of() const { return experts() + 3 * choices_count(); }
    // [rows], and the number of each row: all are the shared expert's.
    __device__ float* shared_shares() const { return (float*)(experts() + 4 * choices_count()); }
    __device__ unsigned* all_rows() const { return experts() + 4 * choices_count() + rows; }
    // Expert, first place in `choices`, and number of choices of each.
    __device__ uint4* tiles() const { return (uint4*)(words + 4 + (4 * choices_count() + 2 * rows + 3) / 4 * 4); }
};

// ---- Routing -------------------------------------------------------------------------------------------------------------------------

struct Routing {
    float* logits;
    // Picked by a script, or null.
    const unsigned* scripted;
    // Added to the logits of a softmax, or to sigmoids where experts are chosen; or null.
    const float* bias;
    const unsigned* real_rows;
    Work work;
    // Blocks that came, of all and then of each pass: 0 before the first launch, and again after each.
    unsigned* arrived;
    // Different experts so far, and the tiles of this layer.
    unsigned long long* met;
    unsigned* tiles_met;
    int count, gated, sigmoid, groups, chosen_groups, renormalised;
    float scale;
    int tile_rows;
};

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Of the scores of a row leaves those of its best groups, whose largest score, or of sigmoids the sum of the two largest, is largest; the first of
// equal ones. By one warp, a lane a group.
__device__ inline void keep_best_groups(const Routing& routing, float* scores) {
    const int lane = threadIdx.x % WARP, of_group = routing.count / routing.groups;
    const bool has_group = lane < routing.groups;
    float* own = scores + (has_group ? lane : 0) * of_group;
    float first = -INFINITY, second = -INFINITY;
    for (int i = 0; i < of_group; ++i) {
        second = fmaxf(second, fminf(first, own[i]));
        first = fmaxf(first, own[i]);
    }
    const float sum = routing.sigmoid && of_group > 1 ? first + second : first;
    int better = 0;
    for (int other = 0; other < routing.groups; ++other) {
        const float its = __shfl_sync(ALL_LANES, sum, other);
        better += its > sum || (its == sum && other < lane);
    }
    if (has_group && better >= routing.chosen_groups) {
        for (int i = 0; i < of_group; ++i) own[i] = -INFINITY;
    }
    __syncwarp();
}

// The experts of a row and their shares, by one warp, with room for a copy of the row's logits.
__device__ inline void choose(const Routing& routing, int row, float* copy) {
    const int lane = threadIdx.x % WARP, count = routing.count, per_row = routing.work.per_row;
    const float* logits = routing.logits + (size_t)row * (count + routing.gated);
    const auto score = [&](int i) {
        const float logit = load_shared_result(logits + i);
        return (routing.sigmoid ? sigmoid(logit) : logit) + (routing.bias ? routing.bias[i] : 0.0f);
    };
    float most = -INFINITY, sum = 0;
    for (int i = lane; i < count; i += WARP) {
        copy[i] = score(i);
        most = fmaxf(most, copy[i]);
    }
    __syncwarp();
    if (routing.groups > routing.chosen_groups) keep_best_groups(routing, copy);
    // A lane for each choice.
    const bool chosen = lane < per_row;
    unsigned expert = 0;
    if (routing.scripted) {
        if (chosen) expert = routing.scripted[(size_t)row * per_row + lane];
    } else {
        unsigned long long last = ~0ull;
        for (int place = 0; place < per_row; ++place) {
            unsigned long long best = 0;
            for (int i = lane; i < count; i += WARP) {
                // What is not a number is the least, and still an expert.
                const unsigned long long key = copy[i] == copy[i] ? in_order(copy[i], i) : ~(unsigned)i;
                if (key < last) best = max(best, key);
            }
            for (int offset = WARP / 2; offset > 0; offset /= 2) best = max(best, __shfl_xor_sync(ALL_LANES, best, offset));
            if (lane == place) expert = ~(unsigned)best;
            last = best;
        }
    }
    float share;
    if (routing.sigmoid) {
        share = chosen ? sigmoid(load_shared_result(logits + expert)) : 0;
        // Where all are nothing, so are their shares.
        sum = routing.renormalised ? warp_sum(share) + 1e-20f : 1.0f;
    } else {
        // As a softmax should: nothing is beyond e^0. Of shares that are renormalised, all others cancel.
        const float logit = chosen ? score(expert) : -INFINITY;
        most = warp_max(routing.renormalised ? logit : most);
        share = chosen ? expf(logit - most) : 0;
        if (routing.renormalised) {
            sum = share;
        } else {
            for (int i = lane; i < count; i += WARP) sum += expf(score(i) - most);
        }
        sum = warp_sum(sum);
    }
    int place = 0;
    for (int other = 0; other < per_row; ++other) place += __shfl_sync(ALL_LANES, expert, other) < expert;
    if (chosen) {
        routing.work.experts()[(size_t)row * per_row + place] = expert;
        routing.work.shares()[(size_t)row * per_row + place] = share / sum * routing.scale;
    }
    if (lane == 0) {
        routing.work.shared_shares()[row] = routing.gated ? sigmoid(load_shared_result(logits + count)) : 1.0f;
        routing.work.all_rows()[row] = row;
    }
    __syncwarp();
}

// The sum of what lanes below bring.
__device__ inline unsigned sum_below(unsigned value) {
    const int lane = threadIdx.x % WARP;
    unsigned sum = value;
    for (int offset = 1; offset < WARP; offset *= 2) {
        const unsigned other = __shfl_sync(ALL_LANES, sum, max(lane - offset, 0));
        if (lane >= offset) sum += other;
    }
    return sum - value;
}

// Groups the choices of all rows by expert and cuts them into tiles, by one block; `next` has a word for each expert.
__device__ inline void group(const Routing& routing, unsigned* next) {
    const Work& work = routing.work;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, tile_rows = routing.tile_rows;
    const unsigned choices = *routing.real_rows * work.per_row;
    for (int expert = threadIdx.x; expert < routing.count; expert += THREADS) next[expert] = 0;
    __syncthreads();
    for (unsigned choice = threadIdx.x; choice < choices; choice += THREADS) atomicAdd(next + __ldcg(work.experts() + choice), 1u);
    __syncthreads();
    if (warp == 0) {
        const int of_lane = (routing.count + WARP - 1) / WARP, begin = lane * of_lane, end = min(begin + of_lane, routing.count);
        unsigned rows = 0, tiles = 0, met = 0;
        for (int expert = begin; expert < end; ++expert) {
            rows += next[expert];
            tiles += (next[expert] + tile_rows - 1) / tile_rows;
            met += next[expert] > 0;
        }
        unsigned first = sum_below(rows), tile = sum_below(tiles);
        met += sum_below(met);
        for (int expert = begin; expert < end; ++expert) {
            const unsigned own = next[expert];
            next[expert] = first;
            for (unsigned at = 0; at < own; at += tile_rows) work.tiles()[tile++] = make_uint4(expert, first + at, min(own - at, (unsigned)tile_rows), 0);
            first += own;
        }
        if (lane == WARP - 1) {
            *work.tile_count() = tile;
            *routing.tiles_met = tile;
            *routing.met += met;
        }
    }
    __syncthreads();
    for (unsigned choice = threadIdx.x; choice < choices; choice += THREADS) {
        const unsigned at = atomicAdd(next + __ldcg(work.experts() + choice), 1u);
        work.choices()[at] = choice;
        work.rows_of()[at] = choice / work.per_row;
    }
}

// Of the sums of M rows that of a lane's own: the first of lane 0, and so on. Not by equality, which makes an index of the lane, and puts the sums in
// memory.
template <int M>
__device__ inline float of_lane(const float (&sums)[M]) {
    float own = sums[0];
#pragma unroll
    for (int m = 1; m < M; ++m) own = (int)threadIdx.x % WARP >= m ? sums[m] : own;
    return own;
}

// The last block of a pass routes its rows, and that of all passes groups them.
template <class F, int M>
__device__ inline void router(const LinearInput& in, const LinearWeights& weights, const Routing& routing, int chunk) {
    SHARED_BYTES(memory);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, first_row = pass_of_grid() * M;
    multiply<F, M>(in, weights, chunk, [&](int pair, int first_row, int count, const float (&sums)[2][M]) {
        const float first = of_lane(sums[0]), second = of_lane(sums[1]);
        if (lane >= count) return;
        float* out = routing.logits + (size_t)(first_row + lane) * weights.outputs + 2 * pair;
        out[0] = first;
        if (2 * pair + 1 < weights.outputs) out[1] = second;
    });
    if (first_row >= in.rows || !comes_last(routing.arrived + 1 + pass_of_grid(), gridDim.x)) return;
    for (int row = first_row + warp; row < min(first_row + M, in.rows); row += WARPS) choose(routing, row, (float*)memory + warp * routing.count);
    if (comes_last(routing.arrived, (in.rows + M - 1) / M)) group(routing, (unsigned*)memory);
}

#define ROUTING                                                                                                                         \
    float *logits, const unsigned *scripted, const float *bias, const unsigned *real_rows, unsigned *work, unsigned *arrived,      \
        unsigned long long *met, unsigned *tiles_met, int count, int gated, int sigmoid, int groups, int chosen_groups,                  \
        int renormalised, float scale, int tile_rows, int per_row
#define ROUTING_OF(rows)                                                                                                                \
    {logits,  scripted, bias, real_rows, {work, rows, per_row}, arrived, met,  tiles_met,                                          \
     count,   gated,    sigmoid,    groups,    chosen_groups,         renormalised, scale, tile_rows}

#define KERNEL(dtype, F, M)                                                                                                             \
    HBMARK_KERNEL_BOUNDED(THREADS, resident(M), experts_router_##dtype##_m##M, const float* hidden, const float* norm, float norm_eps,   \
                          const uint4* data, ROUTING, int rows, int columns, int outputs, int vectors, int shift, int chunk) {                      \
        router<F, M>({hidden, nullptr, norm, norm_eps, rows, columns}, {data, nullptr, nullptr, outputs, vectors, shift}, ROUTING_OF(rows),     \
                     chunk);                                                                                                             \
    }
#define KERNELS(dtype, F) KERNEL(dtype, F, 1) KERNEL(dtype, F, 2) KERNEL(dtype, F, 4)
// A router is never quantised.
KERNELS(bf16, FormatBf16)
KERNELS(f16, FormatF16)
KERNELS(f32, FormatF32)
#undef KERNELS
#undef KERNEL

// Behind a router's product on tensor cores.
HBMARK_KERNEL_BOUNDED(THREADS, 2, experts_choose, ROUTING, int rows) {
    SHARED_BYTES(memory);
    launch_dependents();
    wait_for_dependency();
    const Routing routing = ROUTING_OF(rows);
    const int warp = threadIdx.x / WARP, row = blockIdx.x * WARPS + warp;
    if (row < rows) choose(routing, row, (float*)memory + warp * count);
    if (comes_last(routing.arrived, gridDim.x)) group(routing, (unsigned*)memory);
}

// ---- Products ------------------------------------------------------------------------------------------------------------------------

struct ExpertMatrix {
    const uint4* data;
    // Of each output, or null.
    const float *scales, *bias;
    // 2^shift vectors of a row share a word of scales.
    long long shift;
};

struct Experts {
    const ExpertMatrix* table;
    Work work;
    int width, shared_width, shared_tiles, tile_rows;
};

// Up to tile_rows choices of a routed expert, or rows of the shared one, which are then its choices.
struct ExpertTile {
    ExpertMatrix matrix;
    const unsigned *choices, *rows;
    int count;
    bool shared;
};

__device__ inline bool has_tile(const Experts& experts) { return pass_of_grid() < experts.shared_tiles + (int)*experts.work.tile_count(); }

// That of a block which has one.
__device__ inline ExpertTile tile_of_grid(const Experts& experts) {
    const int index = pass_of_grid(), first = index * experts.tile_rows;
    const bool shared = index < experts.shared_tiles;
    const uint4 tile = shared ? make_uint4(0, first, min(experts.work.rows - first, experts.tile_rows), 0)
                              : experts.work.tiles()[index - experts.shared_tiles];
    const unsigned* choices = (shared ? experts.work.all_rows() : experts.work.choices()) + tile.y;
    const unsigned* rows = (shared ? experts.work.all_rows() : experts.work.rows_of()) + tile.y;
    return {experts.table[shared ? 0 : 1 + tile.x], in_global(choices), in_global(rows), (int)tile.z, shared};
}

// Its matrix, of a format.
template <class F>
__device__ inline LinearWeights weights_of(const ExpertTile& tile, int outputs, int vectors) {
    return {tile.matrix.data, F::SCALED || F::GROUP_SCALED ? in_global(tile.matrix.scales) : nullptr, tile.matrix.bias, outputs, vectors, (int)tile.matrix.shift};
}

// Where gate_up leaves row `i` of a tile.
__device__ inline float* inner_of(const Experts& experts, const ExpertTile& tile, float* inner, int i) {
    const int per_row = experts.work.per_row, stride = per_row * experts.width + experts.shared_width;
    return inner + (size_t)tile.rows[i] * stride + (tile.shared ? per_row : tile.choices[i] % per_row) * experts.width;
}

// Where down leaves it.
__device__ inline float* part_of(const Experts& experts, const ExpertTile& tile, float* parts, int outputs, int i) {
    return parts + ((tile.shared ? experts.work.choices_count() : 0) + tile.choices[i]) * outputs;
}

template <class F, int M>
__device__ inline void gate_up(const LinearInput& in, const Experts& experts, float* inner, int vectors, const Gate& how, int chunk) {
    launch_dependents();
    wait_for_dependency();
    if (!has_tile(experts)) return;
    const ExpertTile tile = tile_of_grid(experts);
    const int lane = threadIdx.x % WARP, outputs = 2 * (tile.shared ? experts.shared_width : experts.width);
    float* out = lane < tile.count ? inner_of(experts, tile, inner, lane) : nullptr;
    const LinearInput rows{in.values, tile.rows, in.norm, in.norm_eps, in.rows, in.columns};
    multiply_rows<F, M>(rows, weights_of<F>(tile, outputs, vectors), chunk, 0, tile.count,
                        [&](int pair, int, int count, const float (&sums)[2][M]) {
                            const float gate = of_lane(sums[0]), up = of_lane(sums[1]);
                            if (lane < count) out[pair] = gated(how, gate, up);
                        });
}

template <class F, int M>
__device__ inline void down(const float* inner, const Experts& experts, float* parts, int outputs, int vectors, int shared_vectors, int chunk) {
    launch_dependents();
    wait_for_dependency();
    if (!has_tile(experts)) return;
    const ExpertTile tile = tile_of_grid(experts);
    const int lane = threadIdx.x % WARP, per_row = experts.work.per_row, stride = per_row * experts.width + experts.shared_width;
    float* out = lane < tile.count ? part_of(experts, tile, parts, outputs, lane) : nullptr;
    const bool shared = tile.shared;
    const int columns = shared ? experts.shared_width : experts.width;
    const LinearInput rows{shared ? inner + per_row * experts.width : inner, tile.choices, nullptr, 0, experts.work.rows, columns,
                           shared ? 1 : per_row, columns, stride};
    multiply_rows<F, M>(rows, weights_of<F>(tile, outputs, shared ? shared_vectors : vectors), chunk, 0, tile.count,
                        [&](int pair, int, int count, const float (&sums)[2][M]) {
                            const float first = of_lane(sums[0]), second = of_lane(sums[1]);
                            if (lane >= count) return;
                            out[2 * pair] = first;
                            if (2 * pair + 1 < outputs) out[2 * pair + 1] = second;
                        });
}

#define EXPERTS const ExpertMatrix *table, unsigned *work, int rows, int per_row, int width, int shared_width, int shared_tiles, int tile_rows
#define EXPERTS_OF {table, {work, rows, per_row}, width, shared_width, shared_tiles, tile_rows}

// The routed and the shared tiles differ in their sizes, which costs registers: two blocks of any fit.
#define KERNEL(dtype, F, M)                                                                                                             \
    HBMARK_KERNEL_BOUNDED(THREADS, 2, experts_gate_up_##dtype##_m##M, const float* hidden, const float* norm, float norm_eps,            \
                          float* inner, EXPERTS, int columns, int vectors, int function, float limit, int chunk) {                       \
        gate_up<F, M>({hidden, nullptr, norm, norm_eps, rows, columns}, EXPERTS_OF, inner, vectors, {function, limit}, chunk);           \
    }                                                                                                                                    \
    HBMARK_KERNEL_BOUNDED(THREADS, 2, experts_down_##dtype##_m##M, const float* inner, float* parts, EXPERTS, int outputs, int vectors,  \
                          int shared_vectors, int chunk) {                                                                               \
        down<F, M>(inner, EXPERTS_OF, parts, outputs, vectors, shared_vectors, chunk);                                                   \
    }
#define KERNELS(dtype, F) KERNEL(dtype, F, 1) KERNEL(dtype, F, 2) KERNEL(dtype, F, 4)
HBMARK_FOR_EACH_LINEAR(KERNELS, KERNEL)
HBMARK_FOR_EACH_BLOCK(KERNELS)
#undef KERNELS
#undef KERNEL

// Which prepared rows those of a tile are.
struct Placed {
    const int* places;
    __device__ int operator()(int row) const { return places[row]; }
};

// A tile of a matrix of `outputs`, of which `count` rows lie at `place(i)` among so many prepared ones and go to `to(i)`; `finish(to, pair, first, second)`.
template <class F, class Z, class Place, class To, class Finish>
__device__ inline void multiply_expert_tile(const ExpertTile& tile, const uint4* inputs, int prepared, int outputs, int vectors, Place place, To to,
                                     Finish finish) {
    SHARED(int[Z::BM], places);
    SHARED(float* [Z::BM], rows_to);
    for (int i = threadIdx.x; i < tile.count; i += Z::TILED_THREADS) {
        places[i] = place(i);
        rows_to[i] = to(i);
    }
    __syncthreads();
    multiply_tile_of_rows<F, Z>(inputs, prepared, 0, tile.count, Placed{places}, weights_of<F>(tile, outputs, vectors),
                                [&](int row, int pair, float first, float second) { finish(in_global(rows_to[row]), pair, first, second); });
}

template <class F, class Z>
__device__ inline void tiled_gate_up(const uint4* inputs, const Experts& experts, float* inner, int vectors, const Gate& how) {
    launch_dependents();
    wait_for_dependency();
    if (!has_tile(experts)) return;
    const ExpertTile tile = tile_of_grid(experts);
    const int outputs = 2 * (tile.shared ? experts.shared_width : experts.width);
    if ((int)blockIdx.x * Z::BN >= outputs) return;
    multiply_expert_tile<F, Z>(
        tile, inputs, experts.work.rows, outputs, vectors, [&](int i) { return (int)tile.rows[i]; },
        [&](int i) { return inner_of(experts, tile, inner, i); },
        [&](float* to, int pair, float gate, float up) { to[pair] = gated(how, gate, up); });
}

template <class F, class Z>
__device__ inline void tiled_down(const uint4* inputs, const uint4* shared_inputs, const Experts& experts, float* parts, int outputs,
                                  int vectors, int shared_vectors) {
    launch_dependents();
    wait_for_dependency();
    if (!has_tile(experts)) return;
    const ExpertTile tile = tile_of_grid(experts);
    const bool shared = tile.shared;
    multiply_expert_tile<F, Z>(
        tile, shared ? shared_inputs : inputs, shared ? experts.work.rows : (int)experts.work.choices_count(), outputs,
        shared ? shared_vectors : vectors, [&](int i) { return (int)tile.choices[i]; },
        [&](int i) { return part_of(experts, tile, parts, outputs, i); },
        [=](float* to, int pair, float first, float second) {
            to[2 * pair] = first;
            if (2 * pair + 1 < outputs) to[2 * pair + 1] = second;
        });
}

#define KERNEL(dtype, F, ROWS)                                                                                                          \
    HBMARK_KERNEL_BOUNDED(Tiling##ROWS::TILED_THREADS, 1, experts_tiled_gate_up_##dtype##_t##ROWS, const uint4* inputs, float* inner,    \
                          EXPERTS, int vectors, int function, float limit) {                                                             \
        tiled_gate_up<F, Tiling##ROWS>(inputs, EXPERTS_OF, inner, vectors, {function, limit});                                           \
    }                                                                                                                                    \
    HBMARK_KERNEL_BOUNDED(Tiling##ROWS::TILED_THREADS, 1, experts_tiled_down_##dtype##_t##ROWS, const uint4* inputs,                     \
                          const uint4* shared_inputs, float* parts, EXPERTS, int outputs, int vectors, int shared_vectors) {             \
        tiled_down<F, Tiling##ROWS>(inputs, shared_inputs, EXPERTS_OF, parts, outputs, vectors, shared_vectors);                         \
    }
HBMARK_FOR_EACH_TILING(KERNEL)
HBMARK_FOR_EACH_GROUPED(KERNEL)
#undef KERNEL

// hidden[row] += Σ share * part. Grid: (rows, ceil(hidden / 256)).
HBMARK_KERNEL_BOUNDED(THREADS, 2, experts_combine, const float* parts, float* hidden, unsigned* work_words, const unsigned* real_rows, int rows,
                      int per_row, int shared, int columns) {
    launch_dependents();
    wait_for_dependency();
    const int row = blockIdx.x, column = blockIdx.y * THREADS + threadIdx.x;
    if (row >= (int)*real_rows || column >= columns) return;
    const Work work{work_words, rows, per_row};
    float sum = 0;
#pragma unroll 8
    for (int i = 0; i < per_row; ++i) sum += work.shares()[(size_t)row * per_row + i] * parts[((size_t)row * per_row + i) * columns + column];
    if (shared) sum += work.shared_shares()[row] * parts[(work.choices_count() + row) * columns + column];
    hidden[(size_t)row * columns + column] += sum;
}
