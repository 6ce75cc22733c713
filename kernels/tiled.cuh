// The tiled product on tensor cores, for more rows than the streaming product takes: it is the streaming product's twin, and its oracle.
//
//   sums[row][output] = scale[output] * Σ_k weights[output][k] * inputs[row][k] + bias[output]
//
// Shapes   inputs as prepare_rows.cu leaves them for the format, weights as in linear.cuh. Grid: (ceil(outputs / BN), ceil(rows / BM)).
// Block    32 * WM * WN * WK threads: warps share the rows, the outputs, and the columns of a tile.
// Shared   stages of 128 bytes of BN outputs and of the columns that meet them of BM rows, of which all but one are on their way.
// Bytes    outputs * vectors * 16 per BM rows. FLOPs 2 * rows * outputs * columns. Minimum architecture: sm_80.
// Weights of the first stages are asked for before the wait for the last kernel. Idea: the multistage pipeline of CUTLASS.
#pragma once

#include "linear.cuh"
#include "tensor.cuh"

// What a format does in the tiled product. A step is 32 bytes of a row of inputs; vectors are of 16 bytes.
//
//             columns of a step   inputs                                  weights
// bf16, f16   16                  rounded alike                           as they are
// int8        32                  8 bits, a scale per row and 32 columns  as they are; a step is summed in whole numbers, then scaled
// fp8         16                  bf16, in the order in which codes come  widened to bf16
// fp8_block   16                  as fp8                                  as fp8; a step is summed, then scaled
// mxfp4       32                  as int8, in the order in which codes    widened to 8 bits; summed as int8, then scaled on both sides
// int4        32                  come                                    the same, less their zeros
// mxfp8       16                  as fp8                                  as fp8_block
// nvfp4       32                  as int8                                 as mxfp4, each half of a step by itself
//
// `put` stores columns column..column + 4 of a prepared row; all lanes of the warp come there together. `put_one` stores a single element of rows that
// have no padding, where a format has elements of their own.
template <class T>
struct TiledFloats {
    using Cache = T;
    // Vectors of inputs that meet 8 vectors of weights, and scales that come with those inputs; whether outputs have scales, and groups of their columns,
    // which come with so many bytes for 8 vectors.
    static constexpr int INPUT_VECTORS = 8, COLUMNS = 8, GROUPS_OF_INPUTS = 0, SCALE_BYTES = 0;
    static constexpr bool SCALED = false, GROUP_SCALED = false;
    using Scale = float;
    __device__ static void put(uint4* out, int, int vectors, int row, int column, float4 x, bool inside) {
        if (inside) ((uint2*)(out + (size_t)row * vectors))[column / 4] = uint2{pair<T>(x.x, x.y), pair<T>(x.z, x.w)};
    }
    __device__ static void put_one(unsigned short* out, size_t at, float x) {
        if (out) out[at] = (unsigned short)pair<T>(x, 0.0f);
    }
    // B of NI times 8 outputs from `first` on.
    template <int NI>
    __device__ static void outputs(unsigned (&b)[NI][2], unsigned char* tile, int first, int step, int lane) {
#pragma unroll
        for (int n = 0; n < NI; n += 2) {
            unsigned four[4];
            load_tiles<false>(four, swizzled<8>(tile, first + n * 8 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
            b[n][0] = four[0], b[n][1] = four[1], b[n + 1][0] = four[2], b[n + 1][1] = four[3];
        }
    }
    __device__ static void add(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&)[2]) {
        multiply_tile<T>(sums, a, b);
    }
};

struct TiledInt8 {
    using Cache = Bf16;
    static constexpr int INPUT_VECTORS = 8, COLUMNS = 16, GROUPS_OF_INPUTS = 4, SCALE_BYTES = 0;
    static constexpr bool SCALED = true, GROUP_SCALED = false;
    using Scale = float;
    // The scales lie behind all rows: a vector of four for every 8 vectors of a row.
    __device__ static void put(uint4* out, int rows, int vectors, int row, int column, float4 x, bool inside) {
        float scale;
        const unsigned four = FormatInt8::round(x, scale);
        if (inside) ((unsigned*)(out + (size_t)row * vectors))[column / 4] = four;
        const int groups = (vectors + 7) / 8 * 4, group = column / FormatInt8::GROUP;
        if (column % FormatInt8::GROUP == 0 && group < groups) ((float*)(out + (size_t)rows * vectors))[(size_t)row * groups + group] = scale;
    }
    __device__ static void put_one(unsigned short*, size_t, float) {}
    template <int NI>
    __device__ static void outputs(unsigned (&b)[NI][2], unsigned char* tile, int first, int step, int lane) {
        TiledFloats<Bf16>::outputs(b, tile, first, step, lane);
    }
    __device__ static void add(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&scales)[2]) {
        int whole[4] = {};
        multiply_bytes(whole, a, b);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] += scales[i / 2] * (float)whole[i];
    }
};

// Eight outputs' codes are loaded as pairs of 16 bits: a lane gets four neighbours where it should have two and two. Their order in a sum is free,
// so the inputs are put in the order in which codes come: of four, the first and third, and eight columns on the second and fourth.
// Both registers of each output: the halves of each word that a lane gets, as `half_of` makes them of the word and 0 or 1.
template <int NI, class HalfOf>
__device__ inline void outputs_by_halves(unsigned (&b)[NI][2], unsigned char* tile, int first, int step, int lane, HalfOf half_of) {
    static_assert(NI % 4 == 0, "a load is of 32 outputs");
#pragma unroll
    for (int n = 0; n < NI; n += 4) {
        unsigned four[4];
        load_tiles<false>(four, swizzled<8>(tile, first + n * 8 + lane, step));
#pragma unroll
        for (int i = 0; i < 4; ++i) b[n + i][0] = half_of(four[i], 0), b[n + i][1] = half_of(four[i], 1);
    }
}

struct TiledFp8 {
    using Cache = Bf16;
    static constexpr int INPUT_VECTORS = 16, COLUMNS = 16, GROUPS_OF_INPUTS = 0, SCALE_BYTES = 0;
    static constexpr bool SCALED = true, GROUP_SCALED = false;
    using Scale = float;
    __device__ static void put(uint4* out, int, int vectors, int row, int column, float4 x, bool inside) {
        if (!inside) return;
        unsigned* to = (unsigned*)(out + (size_t)row * vectors * 2) + column / 16 * 8 + column % 16 / 4;
        to[0] = pair<Bf16>(x.x, x.z);
        to[4] = pair<Bf16>(x.y, x.w);
    }
    __device__ static void put_one(unsigned short*, size_t, float) {}
    // Codes 0 and 2 of a word. Moved up by four places a code is the bf16 of 2^-120 of its value, subnormal ones too; the scale of the matrix has
    // 2^8 (FormatFp8), so 2^112 remain.
    __device__ static unsigned alternate(unsigned word) {
        return multiply_pair((word & 0x007f007fu) << 4 | (word & 0x00800080u) << 8, 0x7780u * 0x10001u);
    }
    template <int NI>
    __device__ static void outputs(unsigned (&b)[NI][2], unsigned char* tile, int first, int step, int lane) {
        outputs_by_halves(b, tile, first, step, lane, [](unsigned word, int half) { return alternate(word >> 8 * half); });
    }
    __device__ static void add(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&)[2]) {
        multiply_tile<Bf16>(sums, a, b);
    }
};

struct TiledFp8Block : TiledFp8 {
    static constexpr bool SCALED = false, GROUP_SCALED = true, WITH_ZEROS = false;
    static constexpr int SCALE_BYTES = 32;
    using Format = FormatFp8Block;
    __device__ static float scale(const unsigned char* of_vector) { return FormatFp8Block::scale(*(const unsigned*)of_vector); }
    __device__ static void add(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&)[2], const float (&outputs)[2]) {
        float of_step[4] = {};
        multiply_tile<Bf16>(of_step, a, b);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] += outputs[i % 2] * of_step[i];
    }
};

struct TiledMxfp8 : TiledFp8Block {
    static constexpr int SCALE_BYTES = 4;
    using Format = FormatMxfp8;
    __device__ static float scale(const unsigned char* of_vector) { return FormatMxfp8::scale(*of_vector); }
};

// A lane gets a word of a vector, eight neighbouring codes, where it should have four and four that lie 16 columns apart: the inputs are put in the
// order in which codes come.
struct TiledFourBits {
    using Cache = Bf16;
    static constexpr int INPUT_VECTORS = 16, COLUMNS = 32, GROUPS_OF_INPUTS = 8;
    static constexpr bool SCALED = false, GROUP_SCALED = true;
    using Scale = float;
    // The scales lie behind all rows: two vectors of four for every 8 vectors of a row.
    __device__ static void put(uint4* out, int rows, int vectors, int row, int column, float4 x, bool inside) {
        const int place = column % FourBits::GROUP / 4;
        put_at(out, rows, vectors, row, column, place % 2 * 4 + place / 2, x, inside);
    }
    // The same at a place among the eight fours of a group.
    __device__ static void put_at(uint4* out, int rows, int vectors, int row, int column, int place, float4 x, bool inside) {
        float scale;
        const unsigned four = FormatInt8::round(x, scale);
        const int group = column / FourBits::GROUP, groups = (vectors + 7) / 8 * 8;
        if (inside) ((unsigned*)(out + (size_t)row * vectors * 2))[group * 8 + place] = four;
        if (place == 0 && group < groups) ((float*)(out + (size_t)rows * vectors * 2))[(size_t)row * groups + group] = scale;
    }
    __device__ static void put_one(unsigned short*, size_t, float) {}
    __device__ static void add(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&rows)[2], const float (&outputs)[2]) {
        int whole[4] = {};
        multiply_bytes(whole, a, b);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] += rows[i / 2] * outputs[i % 2] * (float)whole[i];
    }
};

struct TiledMxfp4 : TiledFourBits {
    static constexpr int SCALE_BYTES = 8;
    static constexpr bool WITH_ZEROS = false;
    using Format = FormatMxfp4;
    template <int NI>
    __device__ static void outputs(unsigned (&b)[NI][2], unsigned char* tile, int first, int step, int lane) {
        outputs_by_halves(b, tile, first, step, lane, [](unsigned word, int half) { return FormatMxfp4::four(word >> 16 * half); });
    }
    __device__ static float scale(const unsigned char* of_vector) { return FormatMxfp4::half_power(*of_vector); }
};

// Halves of words are the first 16 columns of a vector and the others: inputs are in order, and each half of a step has a scale.
struct TiledNvfp4 : TiledMxfp4 {
    static constexpr int SCALE_BYTES = 16;
    static constexpr bool SCALED = true;
    using Format = FormatNvfp4;
    using Scale = float2;
    __device__ static void put(uint4* out, int rows, int vectors, int row, int column, float4 x, bool inside) {
        put_at(out, rows, vectors, row, column, column % FourBits::GROUP / 4, x, inside);
    }
    __device__ static float2 scale(const unsigned char* of_vector) { return FormatNvfp4::scales(*(const unsigned short*)of_vector); }
    __device__ static void add(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&rows)[2], const float2 (&outputs)[2]) {
        int whole[4] = {};
        multiply_half_of_bytes<0>(whole, a, b);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] += rows[i / 2] * outputs[i % 2].x * (float)whole[i], whole[i] = 0;
        multiply_half_of_bytes<1>(whole, a, b);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] += rows[i / 2] * outputs[i % 2].y * (float)whole[i];
    }
};

struct TiledInt4 : TiledFourBits {
    static constexpr int SCALE_BYTES = 32;
    static constexpr bool WITH_ZEROS = true;
    using Format = FormatInt4;
    template <int NI>
    __device__ static void outputs(unsigned (&b)[NI][2], unsigned char* tile, int first, int step, int lane) {
        outputs_by_halves(b, tile, first, step, lane, [](unsigned word, int half) { return FormatInt4::four(word >> 16 * half); });
    }
    __device__ static float scale(const unsigned char* of_vector) { return FormatInt4::scale(*(const unsigned*)of_vector); }
    // The codes of an output less the zero of its vector.
    __device__ static void subtract(unsigned (&b)[2], const unsigned char* of_vector) {
        const unsigned zeros = FormatInt4::zeros(*(const unsigned*)of_vector);
        b[0] = FormatInt4::less(b[0], zeros), b[1] = FormatInt4::less(b[1], zeros);
    }
};

// MOST stages, and no more than fit STAGES_BYTES.
template <int ROWS, int OUTPUTS, int ROW_WARPS, int OUTPUT_WARPS, int COLUMN_WARPS, int MOST, int STAGES_BYTES>
struct Tiling {
    static constexpr int BM = ROWS, BN = OUTPUTS, WM = ROW_WARPS, WN = OUTPUT_WARPS, WK = COLUMN_WARPS;
    static constexpr int TILED_THREADS = WM * WN * WK * WARP;
    static_assert(BM % (16 * WM) == 0 && BN % (32 * WN) == 0, "whole fragments");
    template <int STAGE_BYTES>
    static constexpr int STAGES = STAGES_BYTES / STAGE_BYTES < MOST ? STAGES_BYTES / STAGE_BYTES : MOST;
};
// By the number of rows: 16 and 32 for decode batches, whose warps share the columns of few outputs; 128 for prefill. The outputs of gate_up and head
// make several blocks for each multiprocessor, those of project_add and qkv about one: their pipe is deeper, so that it alone keeps the memory busy.
// Two of the deep ones fit a multiprocessor of 8.0.
constexpr int ANY = 227 << 10, DEEP = 80 << 10;
using Tiling16 = Tiling<16, 32, 1, 1, 4, 6, ANY>;
using Tiling32 = Tiling<32, 32, 1, 1, 4, 6, ANY>;
using Tiling64 = Tiling<64, 32, 4, 1, 1, 6, ANY>;
using Tiling128 = Tiling<128, 128, 2, 4, 1, 3, ANY>;
using DeepTiling16 = Tiling<16, 32, 1, 1, 4, 12, DEEP>;
using DeepTiling32 = Tiling<32, 32, 1, 1, 4, 12, DEEP>;
using DeepTiling64 = Tiling64;
using DeepTiling128 = Tiling128;

// Rows that lie in order.
struct InOrder {
    __device__ int operator()(int row) const { return row; }
};

// Asks for `V` vectors of `wanted` rows from `first` on, zeros where there are none; `place` says where a row lies.
template <int V, int THREADS_OF_BLOCK, class Place = InOrder>
__device__ inline void load_rows(unsigned char* tile, const uint4* from, int vectors, int first, int count, int wanted, int at, Place place = {}) {
    for (int i = threadIdx.x; i < wanted * V; i += THREADS_OF_BLOCK) {
        const int row = first + i / V, vector = at * V + i % V;
        const bool exists = row < count && vector < vectors;
        copy_async(swizzled<V>(tile, i / V, i % V), exists ? from + (size_t)place(row) * vectors + vector : from, exists);
    }
}

// Calls `finish(row, pair, first, second)` for every pair of outputs of a block and row of a tile, from `first_row` on and before `end`, by one thread
// each. `place` says which of the `prepared` rows that is.
template <class F, class Z, class Place, class Finish>
__device__ inline void multiply_tile_of_rows(const uint4* inputs, int prepared, int first_row, int end, Place place, const LinearWeights& weights,
                                             Finish finish) {
    SHARED_BYTES(memory);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int wk = warp % Z::WK, wn = warp / Z::WK % Z::WN, wm = warp / (Z::WK * Z::WN);
    const int first_output = blockIdx.x * Z::BN;
    constexpr int V = 8, IV = F::INPUT_VECTORS, STEPS = IV / 2, MI = Z::BM / (16 * Z::WM), NI = Z::BN / (8 * Z::WN);
    constexpr int SV = F::GROUPS_OF_INPUTS / 4, OUTPUTS_AT = Z::BM * IV * 16, SCALES_AT = OUTPUTS_AT + Z::BN * V * 16;
    // Then the scales of each output.
    constexpr int OUTPUT_SCALES_AT = SCALES_AT + Z::BM * SV * 16, STAGE_BYTES = OUTPUT_SCALES_AT + Z::BN * F::SCALE_BYTES;
    constexpr int STAGES = Z::template STAGES<STAGE_BYTES>;
    static_assert(STEPS % Z::WK == 0, "warps share the steps of a stage");
    static_assert(Z::WK * Z::BM * Z::BN * 4 <= STAGES * STAGE_BYTES, "sums fit where tiles were");
    const int tiles = (weights.vectors + V - 1) / V;
    const auto stage = [&](int at) { return memory + at % STAGES * STAGE_BYTES; };
    const auto load_weights = [&](int at) {
        load_rows<V, Z::TILED_THREADS>(stage(at) + OUTPUTS_AT, weights.data, weights.vectors, first_output, weights.outputs, Z::BN, at);
        if constexpr (F::GROUP_SCALED) {
            constexpr int WORDS = F::SCALE_BYTES / 4;
            // Addresses of several at once would spill.
#pragma unroll 1
            for (int i = threadIdx.x; i < Z::BN * WORDS; i += Z::TILED_THREADS) {
                const int output = first_output + i / WORDS, vector = at * V + i % WORDS * (V / WORDS);
                const bool exists = output < weights.outputs && vector < weights.vectors;
                const void* from = F::Format::scale_word(weights, exists ? output : 0, exists ? vector : 0);
                copy_async<4>(stage(at) + OUTPUT_SCALES_AT + i * 4, from, exists);
            }
        }
    };
    const auto load_inputs = [&](int at) {
        load_rows<IV, Z::TILED_THREADS>(stage(at), inputs, weights.vectors * IV / V, first_row, end, Z::BM, at, place);
        if constexpr (SV > 0) {
            const uint4* scales = inputs + (size_t)prepared * (weights.vectors * IV / V);
            load_rows<SV, Z::TILED_THREADS>(stage(at) + SCALES_AT, scales, tiles * SV, first_row, end, Z::BM, at, place);
        }
    };

    launch_dependents();
    for (int at = 0; at < STAGES - 1 && at < tiles; ++at) load_weights(at);
    wait_for_dependency();
    for (int at = 0; at < STAGES - 1; ++at) {
        if (at < tiles) load_inputs(at);
        commit_copies();
    }
    float sums[MI][NI][4] = {};
    for (int at = 0; at < tiles; ++at) {
        wait_copies<STAGES - 2>();
        // This tile is there for all, and nobody still reads the one that the next copies replace.
        __syncthreads();
        if (at + STAGES - 1 < tiles) {
            load_weights(at + STAGES - 1);
            load_inputs(at + STAGES - 1);
        }
        commit_copies();
        unsigned char* tile = stage(at);
        // Whole sums of several steps at once would spill.
        constexpr int STEPS_AT_ONCE = SV > 0 || F::GROUP_SCALED ? 1 : STEPS;
#pragma unroll STEPS_AT_ONCE
        for (int step = wk; step < STEPS; step += Z::WK) {
            unsigned b[NI][2];
            F::outputs(b, tile + OUTPUTS_AT, wn * NI * 8, step, lane);
            typename F::Scale of_outputs[F::GROUP_SCALED ? NI : 1][2];
            if constexpr (F::GROUP_SCALED) {
#pragma unroll
                for (int n = 0; n < NI; ++n) {
                    const auto of_vector = [&](int output) {
                        return tile + OUTPUT_SCALES_AT + ((wn * NI + n) * 8 + output) * F::SCALE_BYTES + step * F::SCALE_BYTES / V;
                    };
                    of_outputs[n][0] = F::scale(of_vector(lane % 4 * 2)), of_outputs[n][1] = F::scale(of_vector(lane % 4 * 2 + 1));
                    if constexpr (F::WITH_ZEROS) F::subtract(b[n], of_vector(lane / 4));
                }
            }
#pragma unroll
            for (int m = 0; m < MI; ++m) {
                const int row = (wm * MI + m) * 16;
                unsigned a[4];
                load_tiles<false>(a, swizzled<IV>(tile, row + lane % 16, step * 2 + lane / 16));
                float scales[2] = {};
                if constexpr (SV > 0) {
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        scales[half] = ((const float*)swizzled<SV>(tile + SCALES_AT, row + lane / 4 + 8 * half, step / 4))[step % 4];
                }
#pragma unroll
                for (int n = 0; n < NI; ++n) {
                    if constexpr (F::GROUP_SCALED) F::add(sums[m][n], a, b[n], scales, of_outputs[n]);
                    else F::add(sums[m][n], a, b[n], scales);
                }
            }
        }
    }
    // Sums meet where the tiles were: [wk][row][output].
    wait_copies<0>();
    __syncthreads();
    float* shared = (float*)memory;
#pragma unroll
    for (int m = 0; m < MI; ++m)
#pragma unroll
        for (int n = 0; n < NI; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = (wm * MI + m) * 16 + lane / 4 + half * 8, output = (wn * NI + n) * 8 + lane % 4 * 2;
                *(float2*)(shared + (wk * Z::BM + row) * Z::BN + output) = make_float2(sums[m][n][2 * half], sums[m][n][2 * half + 1]);
            }
    __syncthreads();
    for (int i = threadIdx.x; i < Z::BM * Z::BN / 2; i += Z::TILED_THREADS) {
        const int row = i / (Z::BN / 2), output = i % (Z::BN / 2) * 2;
        if (first_row + row >= end || first_output + output >= weights.outputs) continue;
        float2 sum = make_float2(0, 0);
        for (int k = 0; k < Z::WK; ++k) {
            const float2 part = *(const float2*)(shared + (k * Z::BM + row) * Z::BN + output);
            sum.x += part.x;
            sum.y += part.y;
        }
        if (F::SCALED) {
            sum.x *= weights.scales[first_output + output];
            sum.y *= first_output + output + 1 < weights.outputs ? weights.scales[first_output + output + 1] : 0;
        }
        if (weights.bias) {
            sum.x += in_global(weights.bias)[first_output + output];
            sum.y += first_output + output + 1 < weights.outputs ? in_global(weights.bias)[first_output + output + 1] : 0;
        }
        finish(first_row + row, (first_output + output) / 2, sum.x, sum.y);
    }
}

// The same of the rows that the grid gives a block.
template <class F, class Z, class Finish>
__device__ inline void multiply_tiled(const uint4* inputs, int rows, const LinearWeights& weights, Finish finish) {
    multiply_tile_of_rows<F, Z>(inputs, rows, blockIdx.y * Z::BM, rows, InOrder{}, weights, finish);
}

// A kernel of each format whose scales are of groups, and tiling.
#define HBMARK_FOR_EACH_GROUPED(KERNEL)                                                                         \
    HBMARK_FOR_EACH_ROWS(KERNEL, mxfp4, TiledMxfp4) HBMARK_FOR_EACH_ROWS(KERNEL, int4, TiledInt4)               \
        HBMARK_FOR_EACH_ROWS(KERNEL, fp8_block, TiledFp8Block) HBMARK_FOR_EACH_ROWS(KERNEL, mxfp8, TiledMxfp8)  \
            HBMARK_FOR_EACH_ROWS(KERNEL, nvfp4, TiledNvfp4)
// A kernel of each format and tiling.
#define HBMARK_FOR_EACH_ROWS(KERNEL, dtype, F) KERNEL(dtype, F, 16) KERNEL(dtype, F, 32) KERNEL(dtype, F, 64) KERNEL(dtype, F, 128)
#define HBMARK_FOR_EACH_TILING(KERNEL)                                                                              \
    HBMARK_FOR_EACH_ROWS(KERNEL, bf16, TiledFloats<Bf16>) HBMARK_FOR_EACH_ROWS(KERNEL, f16, TiledFloats<F16>)         \
        HBMARK_FOR_EACH_ROWS(KERNEL, int8, TiledInt8) HBMARK_FOR_EACH_ROWS(KERNEL, fp8, TiledFp8)
