// The tiled product on tensor cores, for more rows than the streaming product takes: it is the streaming product's twin, and its oracle.
//
//   sums[row][output] = Σ_k weights[output][k] * inputs[row][k] + bias[output]
//
// Shapes   inputs [rows, vectors * 8] bf16 or f16 (prepare_rows.cu), weights as in linear.cuh. Grid: (ceil(outputs / BN), ceil(rows / BM)).
// Block    32 * WM * WN * WK threads: warps share the rows, the outputs, and the columns of a tile.
// Shared   STAGES tiles of BM rows and BN outputs by 64 columns, of which all but one are on their way.
// Bytes    outputs * vectors * 16 per BM rows. FLOPs 2 * rows * outputs * columns. Minimum architecture: sm_80.
// Weights of the first stages are asked for before the wait for the last kernel. Idea: the multistage pipeline of CUTLASS.
#pragma once

#include "linear.cuh"
#include "tensor.cuh"

template <int ROWS, int OUTPUTS, int ROW_WARPS, int OUTPUT_WARPS, int COLUMN_WARPS, int DEPTH_OF_PIPE>
struct Tiling {
    static constexpr int BM = ROWS, BN = OUTPUTS, WM = ROW_WARPS, WN = OUTPUT_WARPS, WK = COLUMN_WARPS, STAGES = DEPTH_OF_PIPE;
    static constexpr int TILED_THREADS = WM * WN * WK * WARP;
    static constexpr int VECTORS = 8, STEPS = VECTORS / 2;
    static constexpr int STAGE_BYTES = (BM + BN) * VECTORS * 16;
    static_assert(BM % (16 * WM) == 0 && BN % (16 * WN) == 0 && STEPS % WK == 0, "whole fragments");
    static_assert(WK * BM * BN * 4 <= STAGES * STAGE_BYTES, "sums fit where tiles were");
};
// By the number of rows: 16 and 32 for decode batches, whose warps share the columns of few outputs; 128 for prefill.
using Tiling16 = Tiling<16, 32, 1, 1, 4, 6>;
using Tiling32 = Tiling<32, 32, 1, 1, 4, 6>;
using Tiling64 = Tiling<64, 32, 4, 1, 1, 6>;
using Tiling128 = Tiling<128, 128, 2, 4, 1, 3>;

// Calls `finish(row, pair, first, second)` for every row and pair of outputs, by one thread each.
template <class T, class Z, class Finish>
__device__ inline void multiply_tiled(const uint4* inputs, int rows, const LinearWeights& weights, Finish finish) {
    SHARED_BYTES(memory);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int wk = warp % Z::WK, wn = warp / Z::WK % Z::WN, wm = warp / (Z::WK * Z::WN);
    const int first_row = blockIdx.y * Z::BM, first_output = blockIdx.x * Z::BN;
    constexpr int V = Z::VECTORS, MI = Z::BM / (16 * Z::WM), NI = Z::BN / (8 * Z::WN);
    const int tiles = (weights.vectors + V - 1) / V;
    const auto rows_of = [&](int stage) { return memory + stage * Z::STAGE_BYTES; };
    const auto outputs_of = [&](int stage) { return memory + stage * Z::STAGE_BYTES + Z::BM * V * 16; };
    const auto load = [&](unsigned char* tile, const uint4* from, int first, int count, int wanted, int at) {
        for (int i = threadIdx.x; i < wanted * V; i += Z::TILED_THREADS) {
            const int row = first + i / V, vector = at * V + i % V;
            const bool exists = row < count && vector < weights.vectors;
            copy_async(swizzled<V>(tile, i / V, i % V), exists ? from + (size_t)row * weights.vectors + vector : from, exists);
        }
    };
    const auto load_outputs = [&](int at) { load(outputs_of(at % Z::STAGES), weights.data, first_output, weights.outputs, Z::BN, at); };
    const auto load_rows = [&](int at) { load(rows_of(at % Z::STAGES), inputs, first_row, rows, Z::BM, at); };

    launch_dependents();
    for (int at = 0; at < Z::STAGES - 1 && at < tiles; ++at) load_outputs(at);
    wait_for_dependency();
    for (int at = 0; at < Z::STAGES - 1; ++at) {
        if (at < tiles) load_rows(at);
        commit_copies();
    }
    float sums[MI][NI][4] = {};
    for (int at = 0; at < tiles; ++at) {
        wait_copies<Z::STAGES - 2>();
        // This tile is there for all, and nobody still reads the one that the next copies replace.
        __syncthreads();
        if (at + Z::STAGES - 1 < tiles) {
            load_outputs(at + Z::STAGES - 1);
            load_rows(at + Z::STAGES - 1);
        }
        commit_copies();
        unsigned char *row_tile = rows_of(at % Z::STAGES), *output_tile = outputs_of(at % Z::STAGES);
#pragma unroll
        for (int step = wk; step < Z::STEPS; step += Z::WK) {
            unsigned a[MI][4], b[NI / 2][4];
#pragma unroll
            for (int m = 0; m < MI; ++m)
                load_tiles<false>(a[m], swizzled<V>(row_tile, (wm * MI + m) * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
            for (int n = 0; n < NI / 2; ++n)
                load_tiles<false>(b[n], swizzled<V>(output_tile, (wn * NI / 2 + n) * 16 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
#pragma unroll
            for (int m = 0; m < MI; ++m)
#pragma unroll
                for (int n = 0; n < NI; ++n) multiply_tile<T>(sums[m][n], a[m], *(const unsigned(*)[2])&b[n / 2][n % 2 * 2]);
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
        if (first_row + row >= rows || first_output + output >= weights.outputs) continue;
        float2 sum = make_float2(0, 0);
        for (int k = 0; k < Z::WK; ++k) {
            const float2 part = *(const float2*)(shared + (k * Z::BM + row) * Z::BN + output);
            sum.x += part.x;
            sum.y += part.y;
        }
        if (weights.bias) {
            sum.x += weights.bias[first_output + output];
            sum.y += first_output + output + 1 < weights.outputs ? weights.bias[first_output + output + 1] : 0;
        }
        finish(first_row + row, (first_output + output) / 2, sum.x, sum.y);
    }
}

// A kernel of each format and tiling.
#define HBMARK_FOR_EACH_TILING(KERNEL)                                                                                  \
    KERNEL(bf16, Bf16, 16) KERNEL(bf16, Bf16, 32) KERNEL(bf16, Bf16, 64) KERNEL(bf16, Bf16, 128) KERNEL(f16, F16, 16) \
        KERNEL(f16, F16, 32) KERNEL(f16, F16, 64) KERNEL(f16, F16, 128)
