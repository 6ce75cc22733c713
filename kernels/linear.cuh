// The streaming product: a few rows of activations times all rows of a matrix, each weight read once.
//
//   sums[row][output] = scale[output] * Σ_k weights[output][k] * input[row][k] + bias[output]
//
// Shapes   values [rows, width] f32; weights [outputs, vectors * COLUMNS], rows padded with zeros to whole 16-byte vectors; scales [outputs]
//          f32 for int8 and fp8 only; bias [outputs] f32 or null. Outputs come in pairs (2p, 2p + 1): what belongs together is packed together.
// Grid     (any, ceil(rows / M)); a block strides over pairs, a warp owns a pair, a lane 16 bytes of it. Block: 256 threads.
// Shared   M rows of inputs, `chunk` columns at a time, in the precision that the weights are multiplied in.
// Bytes    outputs * vectors * 16, once per M rows. FLOPs 2 * rows * outputs * columns.
// The first tile of weights is asked for before the wait for the last kernel: only weights may be read there. The norm is computed by every
// block for itself, from the second cache. The idea of warp-per-row streaming is in every public batch-1 engine (calm, llama.cpp).
#pragma once

#include "elements.cuh"

constexpr int WARPS = 8, THREADS = WARPS * WARP;
// 16-byte loads of each row that a lane has in flight, twice: one tile is multiplied while the next one comes.
constexpr int UNROLL = 4, STEP = UNROLL * WARP;

// Inputs as they are kept in shared memory, 4 columns at a time, and what a 16-byte vector of weights does with them.
template <class T>
struct Float16Bits {
    using Cache = T;
    static constexpr int COLUMNS = 8;
    struct Wide {
        float w[8];
    };
    __device__ static Wide wide(uint4 v) {
        Wide out;
        load8((const T*)&v, out.w);
        return out;
    }
};

template <class F>
struct InFloats {
    static constexpr bool SCALED = false;
    __device__ static size_t bytes(int rows, int chunk) { return (size_t)rows * chunk * 4; }
    __device__ static void stage(unsigned char* inputs, int, int chunk, int row, int column, float4 x, bool inside) {
        if (inside) *(float4*)((float*)inputs + row * chunk + column) = x;
    }
    struct In {
        float x[F::COLUMNS];
    };
    __device__ static In input(const unsigned char* inputs, int, int chunk, int row, int vector) {
        const float4* from = (const float4*)((const float*)inputs + row * chunk + vector * F::COLUMNS);
        In in;
#pragma unroll
        for (int i = 0; i < F::COLUMNS / 4; ++i) {
            const float4 four = from[i];
            in.x[4 * i] = four.x, in.x[4 * i + 1] = four.y, in.x[4 * i + 2] = four.z, in.x[4 * i + 3] = four.w;
        }
        return in;
    }
    __device__ static void add(float& sum, const typename F::Wide& weights, const In& in) {
#pragma unroll
        for (int i = 0; i < F::COLUMNS; ++i) sum += weights.w[i] * in.x[i];
    }
};

struct FormatF16 : Float16Bits<F16>, InFloats<Float16Bits<F16>> {};

struct F32Vector {
    using Cache = float;
    static constexpr int COLUMNS = 4;
    struct Wide {
        float w[4];
    };
    __device__ static Wide wide(uint4 v) {
        return Wide{{__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)}};
    }
};
struct FormatF32 : F32Vector, InFloats<F32Vector> {};

// Inputs rounded to bf16, as tensor cores take them.
struct FormatBf16 : Float16Bits<Bf16> {
    static constexpr bool SCALED = false;
    __device__ static void stage(unsigned char* inputs, int, int chunk, int row, int column, float4 x, bool inside) {
        if (inside) *(uint2*)((Bf16*)inputs + row * chunk + column) = uint2{pair<Bf16>(x.x, x.y), pair<Bf16>(x.z, x.w)};
    }
    using In = Wide;
    __device__ static In input(const unsigned char* inputs, int, int chunk, int row, int vector) {
        return wide(*(const uint4*)((const Bf16*)inputs + row * chunk + vector * COLUMNS));
    }
    __device__ static void add(float& sum, const Wide& weights, const In& in) {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) sum += weights.w[i] * in.w[i];
    }
};

// 8-bit weights with a scale per output; inputs in groups of 32 columns with a scale each, behind the bytes of all rows.
struct FormatInt8 {
    using Cache = Bf16;
    static constexpr int COLUMNS = 16, GROUP = 32;
    static constexpr bool SCALED = true;
    using Wide = uint4;
    __device__ static Wide wide(uint4 v) { return v; }
    // Four columns of a group of 32, which eight lanes have together: all lanes of the warp come here.
    __device__ static unsigned round(float4 x, float& scale) {
        float largest = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
        for (int offset = 4; offset > 0; offset /= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, offset));
        scale = largest / 127.0f;
        const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        return (__float2int_rn(x.x * inverse) & 255) | (__float2int_rn(x.y * inverse) & 255) << 8 | (__float2int_rn(x.z * inverse) & 255) << 16 |
               (unsigned)(__float2int_rn(x.w * inverse) & 255) << 24;
    }
    __device__ static void stage(unsigned char* inputs, int rows, int chunk, int row, int column, float4 x, bool inside) {
        float scale;
        const unsigned q = round(x, scale);
        if (!inside) return;
        *(unsigned*)(inputs + (size_t)row * chunk + column) = q;
        if (column % GROUP == 0) ((float*)(inputs + (size_t)rows * chunk))[(row * chunk + column) / GROUP] = scale;
    }
    struct In {
        uint4 q;
        float scale;
    };
    __device__ static In input(const unsigned char* inputs, int rows, int chunk, int row, int vector) {
        const int column = row * chunk + vector * COLUMNS;
        return In{*(const uint4*)(inputs + column), ((const float*)(inputs + (size_t)rows * chunk))[column / GROUP]};
    }
    __device__ static void add(float& sum, const Wide& w, const In& in) {
        int dot = __dp4a((int)w.x, (int)in.q.x, 0);
        dot = __dp4a((int)w.y, (int)in.q.y, dot);
        dot = __dp4a((int)w.z, (int)in.q.z, dot);
        dot = __dp4a((int)w.w, (int)in.q.w, dot);
        sum += in.scale * (float)dot;
    }
};

// 8-bit floats (e4m3) with a scale per output; inputs rounded to bf16. Moved up by seven places a code is the f16 of 1/256 of its value, subnormal
// ones too: two of them are made from a word at once, and the scale has the 256. No code is NaN.
struct FormatFp8 {
    using Cache = Bf16;
    static constexpr int COLUMNS = 16;
    static constexpr bool SCALED = true;
    using Wide = uint4;
    __device__ static Wide wide(uint4 v) { return v; }
    __device__ static void stage(unsigned char* inputs, int, int chunk, int row, int column, float4 x, bool inside) {
        FormatBf16::stage(inputs, 0, chunk, row, column, x, inside);
    }
    struct In {
        uint4 low, high;
    };
    __device__ static In input(const unsigned char* inputs, int, int chunk, int row, int vector) {
        const uint4* from = (const uint4*)((const Bf16*)inputs + row * chunk + vector * COLUMNS);
        return In{from[0], from[1]};
    }
    // Codes 0 and 2 of a word as a pair of f16.
    __device__ static float2 alternate(unsigned word) {
        return widen_pair<F16>((word & 0x007f007fu) << 7 | (word & 0x00800080u) << 8);
    }
    __device__ static void four(float& sum, unsigned codes, unsigned first, unsigned second) {
        const float2 even = alternate(codes), odd = alternate(codes >> 8);
        const float2 a = widen_pair<Bf16>(first), b = widen_pair<Bf16>(second);
        sum += even.x * a.x;
        sum += odd.x * a.y;
        sum += even.y * b.x;
        sum += odd.y * b.y;
    }
    __device__ static void add(float& sum, const Wide& w, const In& in) {
        four(sum, w.x, in.low.x, in.low.y);
        four(sum, w.y, in.low.z, in.low.w);
        four(sum, w.z, in.high.x, in.high.y);
        four(sum, w.w, in.high.z, in.high.w);
    }
};

// Rows of activations on their way into a product. `row_of` picks rows where not all are wanted; `norm` is null where there is none.
struct LinearInput {
    const float* values;
    const unsigned* row_of;
    const float* norm;
    float norm_eps;
    int rows, columns;

    __device__ const float* row(int row) const { return values + (size_t)(row_of ? row_of[row] : row) * columns; }
    // Columns column..column + 4 of a row, zeros behind its end.
    __device__ float4 four(const float* from, int column) const {
        if (columns % 4 == 0) return column < columns ? *(const float4*)(from + column) : make_float4(0, 0, 0, 0);
        return make_float4(column < columns ? from[column] : 0, column + 1 < columns ? from[column + 1] : 0,
                           column + 2 < columns ? from[column + 2] : 0, column + 3 < columns ? from[column + 3] : 0);
    }
};

struct LinearWeights {
    const uint4* data;
    const float* scales;
    const float* bias;
    int outputs, vectors;
};

// 16 bytes of two rows, UNROLL times.
struct WeightTile {
    uint4 first[UNROLL], second[UNROLL];
    __device__ void load(const LinearWeights& weights, int pair, int at) {
        const uint4* first_row = weights.data + (size_t)(2 * pair) * weights.vectors;
        const uint4* second_row = first_row + (2 * pair + 1 < weights.outputs ? weights.vectors : 0);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (at + u * WARP >= weights.vectors) break;
            first[u] = load_once(first_row + at + u * WARP);
            second[u] = load_once(second_row + at + u * WARP);
        }
    }
};

// Sum over all threads of a block, in every thread; `scratch` has a place per warp.
__device__ inline float block_sum(float value, float* scratch) {
    value = warp_sum(value);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = value;
    __syncthreads();
    float sum = 0;
    for (unsigned warp = 0; warp < blockDim.x / WARP; ++warp) sum += scratch[warp];
    __syncthreads();
    return sum;
}

// 1 / √(mean(x²) + ε) of a row.
__device__ inline float norm_factor(const LinearInput& in, const float* from, float* scratch) {
    float squares = 0;
    for (int column = threadIdx.x * 4; column < in.columns; column += blockDim.x * 4) {
        const float4 x = in.four(from, column);
        squares += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
    }
    return rsqrtf(block_sum(squares, scratch) / (float)in.columns + in.norm_eps);
}

// Calls `finish(pair, first_row, count, sums)` with all lanes of the warp that owns the pair.
template <class F, int M, class Finish>
__device__ inline void multiply(const LinearInput& in, const LinearWeights& weights, int chunk, Finish finish) {
    SHARED_BYTES(inputs);
    SHARED(float[WARPS], scratch);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int pairs = (weights.outputs + 1) / 2, stride = gridDim.x * WARPS;
    const int first_row = blockIdx.y * M, count = min(M, in.rows - first_row);
    const int chunk_vectors = chunk / F::COLUMNS, chunks = (weights.vectors + chunk_vectors - 1) / chunk_vectors;

    launch_dependents();
    WeightTile tile;
    int base = blockIdx.x * WARPS;
    if (base + warp < pairs) tile.load(weights, base + warp, lane);
    wait_for_dependency();

    float factors[M];
#pragma unroll
    for (int m = 0; m < M; ++m) {
        factors[m] = 1;
        if (in.norm && m < count) factors[m] = norm_factor(in, in.row(first_row + m), scratch);
    }
    bool staged = false;
    for (; base < pairs; base += stride) {
        const int pair = base + warp;
        float sums[2][M] = {};
        for (int c = 0; c < chunks; ++c) {
            if (!staged || chunks > 1) {
                // Nobody still multiplies with the chunk before.
                if (staged) __syncthreads();
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    const float* from = in.row(first_row + min(m, count - 1));
                    // Every thread takes every turn: lanes meet in it.
                    for (int turn = 0; turn < chunk; turn += THREADS * 4) {
                        const int at = turn + threadIdx.x * 4, column = c * chunk + at;
                        float4 x = make_float4(0, 0, 0, 0);
                        if (at < chunk && m < count) x = in.four(from, column);
                        if (in.norm) {
                            const float4 g = at < chunk ? in.four(in.norm, column) : x;
                            x = make_float4(x.x * factors[m] * g.x, x.y * factors[m] * g.y, x.z * factors[m] * g.z, x.w * factors[m] * g.w);
                        }
                        F::stage(inputs, M, chunk, m, at, x, at < chunk);
                    }
                }
                staged = true;
                __syncthreads();
            }
            if (pair >= pairs) continue;
            const int begin = c * chunk_vectors, end = min(begin + chunk_vectors, weights.vectors);
            for (int at = begin + lane; at - lane < end; at += STEP) {
                WeightTile next;
                if (at - lane + STEP < weights.vectors) {
                    next.load(weights, pair, at + STEP);
                } else if (pair + stride < pairs) {
                    next.load(weights, pair + stride, lane);
                }
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) {
                    if (at + u * WARP >= end) break;
                    const auto first = F::wide(tile.first[u]), second = F::wide(tile.second[u]);
#pragma unroll
                    for (int m = 0; m < M; ++m) {
                        const auto x = F::input(inputs, M, chunk, m, at + u * WARP - begin);
                        F::add(sums[0][m], first, x);
                        F::add(sums[1][m], second, x);
                    }
                }
                tile = next;
            }
        }
        if (pair >= pairs) continue;
        const int second = min(2 * pair + 1, weights.outputs - 1);
        const float scale0 = F::SCALED ? weights.scales[2 * pair] : 1, scale1 = F::SCALED ? weights.scales[second] : 1;
        const float bias0 = weights.bias ? weights.bias[2 * pair] : 0, bias1 = weights.bias ? weights.bias[second] : 0;
#pragma unroll
        for (int m = 0; m < M; ++m) {
            sums[0][m] = warp_sum(sums[0][m]) * scale0 + bias0;
            sums[1][m] = warp_sum(sums[1][m]) * scale1 + bias1;
        }
        finish(pair, first_row, count, sums);
    }
}

// A kernel of each format and number of rows. Four rows beside fp8 would spill on sm_80.
#define HBMARK_FOR_EACH_FORMAT(KERNEL) \
    KERNEL(bf16, FormatBf16) KERNEL(f16, FormatF16) KERNEL(f32, FormatF32) KERNEL(int8, FormatInt8)
