// The streaming product: a few rows of activations times all rows of a matrix, each weight read once.
//
//   sums[row][output] = scale[output] * Σ_k weights[output][k] * input[row][k] + bias[output]
//
// Shapes   values [rows, width] f32; weights [outputs, vectors * COLUMNS], rows padded with zeros to whole 16-byte vectors; scales [outputs]
//          f32 for int8 and fp8 only; for mxfp4 a byte of e8m0 for each vector, for mxfp8 for each two, rows padded to words; for nvfp4 as for int8 and
//          behind it two bytes of e4m3 for each vector; for int4 and fp8_block a word for 2^shift vectors of an output, or of every second of 16 outputs; bias [outputs] f32 or null. Outputs come in pairs (2p, 2p + 1): what belongs together is packed together.
// Grid     (any, passes of M rows along y, and along z beyond 65,535 of them). Block: 256 threads. Pairs go round the blocks, then round their
//          warps: a warp owns a pair, a lane 16 bytes of it.
// Shared   32 KiB of weights on their way, for formats with words beside their vectors 8 KiB for each word, then M rows of inputs, `chunk` columns at a time, in the precision that the weights are multiplied in.
// Bytes    outputs * vectors * 16, once per M rows. FLOPs 2 * rows * outputs * columns.
// A lane copies the weights that it will itself multiply to shared memory, so that what is on its way costs no register and needs no barrier. The
// first weights are asked for before the wait for the last kernel: only weights and norms may be read there. The norm is computed by every
// block for itself, from L2. The idea of warp-per-row streaming is in every public batch-1 engine (calm, llama.cpp).
#pragma once

#include "elements.cuh"

constexpr int WARPS = 8, THREADS = WARPS * WARP;
// 16-byte copies of each of two rows that a lane waits for together, and groups of them on their way: 128 bytes of a lane. Two blocks of the
// next kernel then fit beside two of this one and have asked for their first weights when it ends.
constexpr int UNROLL = 1, GROUPS = 4, STEP = UNROLL * WARP;
// Blocks that fit a multiprocessor, by rows at a time.
constexpr int resident(int rows) { return rows == 1 ? 4 : rows == 2 ? 3 : 2; }
constexpr int VECTOR_BYTES = THREADS * 16, GROUP_BYTES = UNROLL * 2 * VECTOR_BYTES, RING_BYTES = GROUPS * GROUP_BYTES;
// Loads of activations that a thread has in flight.
constexpr int BATCH = 4;

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
    static constexpr bool SCALED = false, GROUP_SCALED = false;
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
    static constexpr bool SCALED = false, GROUP_SCALED = false;
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
    static constexpr bool SCALED = true, GROUP_SCALED = false;
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
    static constexpr bool SCALED = true, GROUP_SCALED = false;
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
    __device__ static void four(float& sum, unsigned codes, unsigned first, unsigned second) {
        const float2 even = alternate_codes(codes), odd = alternate_codes(codes >> 8);
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

struct LinearWeights {
    const uint4* data;
    const float* scales;
    const float* bias;
    int outputs, vectors;
    // 2^shift vectors of a row share a word of scales.
    int shift;

    // Words of scales that a row has.
    __device__ int words() const { return ((vectors - 1) >> shift) + 1; }
};

// The word with a vector's scales, of a byte each, which so many vectors of a row share; rows begin at `first`.
template <int VECTORS_OF_WORD>
__device__ inline const void* byte_scales(const float* first, const LinearWeights& weights, int output, int vector) {
    const int words = (weights.vectors + VECTORS_OF_WORD - 1) / VECTORS_OF_WORD;
    return first + (size_t)output * words + vector / VECTORS_OF_WORD;
}

// 8-bit floats in blocks, whose columns share an f32; the scales of 16 outputs are those of the first two, the even ones' and the odd ones': outputs
// that alternate are of two matrices.
struct FormatFp8Block : FormatFp8 {
    static constexpr bool SCALED = false, GROUP_SCALED = true;
    static constexpr int WORDS = 1;
    struct Wide {
        uint4 q;
        float scale;
    };
    __device__ static const void* scale_word(const LinearWeights& weights, int output, int vector) {
        return weights.scales + (size_t)(output / 16 * 2 + output % 2) * weights.words() + (vector >> weights.shift);
    }
    __device__ static float scale(unsigned word) { return __uint_as_float(word); }
    __device__ static Wide wide(uint4 v, unsigned word, int) { return Wide{v, scale(word)}; }
    __device__ static void add(float& sum, const Wide& w, const In& in) {
        float of_vector = 0;
        FormatFp8::add(of_vector, w.q, in);
        sum += w.scale * of_vector;
    }
};

// 8-bit floats, 32 columns of which share a power of two, two vectors of them.
struct FormatMxfp8 : FormatFp8Block {
    __device__ static const void* scale_word(const LinearWeights& weights, int output, int vector) {
        return byte_scales<8>(weights.scales, weights, output, vector);
    }
    // 2^8 of 2^(byte - 127), for codes that are 1/256 of their values; no byte is above 246.
    __device__ static float scale(unsigned byte) { return __uint_as_float((byte + 8) << 23); }
    __device__ static Wide wide(uint4 v, unsigned word, int vector) { return Wide{v, scale(word >> 8 * (vector / 2 % 4) & 255)}; }
};

// 4-bit codes, a vector of which meets a group of inputs as int8 has them.
struct FourBits {
    using Cache = Bf16;
    static constexpr int COLUMNS = 32, GROUP = 32, WORDS = 1;
    static constexpr bool SCALED = false, GROUP_SCALED = true;
    struct Wide {
        unsigned q[8];
        float scale;
    };
    __device__ static void stage(unsigned char* inputs, int rows, int chunk, int row, int column, float4 x, bool inside) {
        FormatInt8::stage(inputs, rows, chunk, row, column, x, inside);
    }
    struct In {
        uint4 first, second;
        float scale;
    };
    __device__ static In input(const unsigned char* inputs, int rows, int chunk, int row, int vector) {
        const int column = row * chunk + vector * COLUMNS;
        const uint4* from = (const uint4*)(inputs + column);
        return In{from[0], from[1], ((const float*)(inputs + (size_t)rows * chunk))[column / GROUP]};
    }
    __device__ static int dot(const unsigned (&q)[8], const In& in) {
        int dot = __dp4a((int)q[0], (int)in.first.x, 0);
        dot = __dp4a((int)q[1], (int)in.first.y, dot);
        dot = __dp4a((int)q[2], (int)in.first.z, dot);
        dot = __dp4a((int)q[3], (int)in.first.w, dot);
        dot = __dp4a((int)q[4], (int)in.second.x, dot);
        dot = __dp4a((int)q[5], (int)in.second.y, dot);
        dot = __dp4a((int)q[6], (int)in.second.z, dot);
        return __dp4a((int)q[7], (int)in.second.w, dot);
    }
    // Of the first 16 columns, and of the others.
    __device__ static int2 dots_of_halves(const unsigned (&q)[8], const In& in) {
        int first = __dp4a((int)q[0], (int)in.first.x, 0), second = __dp4a((int)q[4], (int)in.second.x, 0);
        first = __dp4a((int)q[1], (int)in.first.y, first), second = __dp4a((int)q[5], (int)in.second.y, second);
        first = __dp4a((int)q[2], (int)in.first.z, first), second = __dp4a((int)q[6], (int)in.second.z, second);
        first = __dp4a((int)q[3], (int)in.first.w, first), second = __dp4a((int)q[7], (int)in.second.w, second);
        return make_int2(first, second);
    }
    __device__ static void add(float& sum, const Wide& w, const In& in) { sum += w.scale * in.scale * (float)dot(w.q, in); }
};

// Integers of 4 bits less a whole zero, 32 << shift columns of which share a word: an f16 scale, and above it the zero.
struct FormatInt4 : FourBits {
    // The codes in the lower half of a word, as bytes.
    __device__ static unsigned four(unsigned codes) {
        unsigned bytes = codes & 0xffffu;
        bytes = (bytes | bytes << 8) & 0x00ff00ffu;
        return (bytes | bytes << 4) & 0x0f0f0f0fu;
    }
    // The zero of a word in every byte.
    __device__ static unsigned zeros(unsigned word) { return (word >> 16) * 0x01010101u; }
    // Four codes less their zeros, signed: no byte borrows from the next.
    __device__ static unsigned less(unsigned bytes, unsigned zeros) { return ((bytes | 0x80808080u) - zeros) ^ 0x80808080u; }
    __device__ static float scale(unsigned word) { return widen_pair<F16>(word).x; }
    __device__ static const void* scale_word(const LinearWeights& weights, int output, int vector) {
        return weights.scales + (size_t)output * weights.words() + (vector >> weights.shift);
    }
    __device__ static Wide wide(uint4 v, unsigned word, int) {
        const unsigned z = zeros(word);
        return Wide{{less(four(v.x), z), less(four(v.x >> 16), z), less(four(v.y), z), less(four(v.y >> 16), z), less(four(v.z), z),
                     less(four(v.z >> 16), z), less(four(v.w), z), less(four(v.w >> 16), z)},
                    scale(word)};
    }
};

// 4-bit floats (e2m1), 32 columns of which share a power of two, a vector of them. Twice a value is a whole number, which two
// tables have by its lower three bits; the highest says which.
struct FormatMxfp4 : FourBits {
    // Twice the values of the codes in the lower half of a word, as bytes.
    __device__ static unsigned four(unsigned codes) {
        const unsigned index = codes & 0x7777u, positive = __byte_perm(0x03020100u, 0x0c080604u, index);
        return __byte_perm(positive, __byte_perm(0xfdfeff00u, 0xf4f8fafcu, index), 0x3210u | (codes & 0x8888u) >> 1);
    }
    // 2^(byte - 127), of which the half meets doubled values; 0 for 0, whose power is denormal.
    __device__ static float half_power(unsigned byte) { return 0.5f * __uint_as_float(byte << 23); }
    __device__ static const void* scale_word(const LinearWeights& weights, int output, int vector) {
        return byte_scales<4>(weights.scales, weights, output, vector);
    }
    __device__ static Wide wide(uint4 v, unsigned word, int vector) {
        return Wide{{four(v.x), four(v.x >> 16), four(v.y), four(v.y >> 16), four(v.z), four(v.z >> 16), four(v.w), four(v.w >> 16)},
                    half_power(word >> 8 * (vector % 4) & 255)};
    }
};

// 4-bit floats as those, 16 columns of which share an e4m3, and an output an f32, which has what doubled values and codes moved up lack. The halves of
// the words of a vector are its first 16 columns and the others.
struct FormatNvfp4 : FourBits {
    static constexpr bool SCALED = true;
    struct Wide {
        unsigned q[8];
        float2 scales;
    };
    __device__ static const void* scale_word(const LinearWeights& weights, int output, int vector) {
        return byte_scales<2>(weights.scales + weights.outputs, weights, output, vector);
    }
    // Of both halves, by two bytes: 1/256 of them.
    __device__ static float2 scales(unsigned bytes) { return alternate_codes((bytes & 255) | (bytes & 0xff00) << 8); }
    __device__ static Wide wide(uint4 v, unsigned word, int vector) {
        return Wide{{FormatMxfp4::four(v.x), FormatMxfp4::four(v.y), FormatMxfp4::four(v.z), FormatMxfp4::four(v.w), FormatMxfp4::four(v.x >> 16),
                     FormatMxfp4::four(v.y >> 16), FormatMxfp4::four(v.z >> 16), FormatMxfp4::four(v.w >> 16)},
                    scales(word >> 16 * (vector % 2))};
    }
    __device__ static void add(float& sum, const Wide& w, const In& in) {
        const int2 dots = dots_of_halves(w.q, in);
        sum += in.scale * (w.scales.x * (float)dots.x + w.scales.y * (float)dots.y);
    }
};

// Rows of activations on their way into a product. `row_of` picks rows where not all are wanted; `norm` is null where there is none. With a stride,
// each of so many parts of a row is an input of its own, which begins `apart` columns behind the one before.
struct LinearInput {
    const float* values;
    const unsigned* row_of;
    const float* norm;
    float norm_eps;
    int rows, columns;
    int parts = 1, apart = 0, stride = 0;

    __device__ const float* row(int row) const {
        const unsigned at = row_of ? row_of[row] : row;
        if (stride == 0) return values + (size_t)at * columns;
        return values + (size_t)(at / parts) * stride + (size_t)(at % parts) * apart;
    }
    // Columns column..column + 4 of a row, and N times as many, `apart` columns on each; zeros behind its end.
    template <int N>
    __device__ void fours(float4 (&x)[N], const float* from, int column, int apart) const {
        if (columns % 4 == 0 && apart % 4 == 0 && stride % 4 == 0) {
            // Loads without a branch, so that all are on their way together.
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] = *(const float4*)(from + min(column + i * apart, columns - 4));
#pragma unroll
            for (int i = 0; i < N; ++i)
                if (column + i * apart >= columns) x[i] = make_float4(0, 0, 0, 0);
            return;
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int at = column + i * apart;
            x[i] = make_float4(at < columns ? from[at] : 0, at + 1 < columns ? from[at + 1] : 0, at + 2 < columns ? from[at + 2] : 0,
                               at + 3 < columns ? from[at + 3] : 0);
        }
    }
    // The norm of what `fours` loaded.
    template <int N>
    __device__ void apply_norm(float4 (&x)[N], float factor, int column, int apart) const {
        float4 g[N];
        fours(g, norm, column, apart);
#pragma unroll
        for (int i = 0; i < N; ++i)
            x[i] = make_float4(x[i].x * factor * g[i].x, x[i].y * factor * g[i].y, x[i].z * factor * g[i].z, x[i].w * factor * g[i].w);
    }
};

// Words beside a vector of weights: those of a group of copies, for each row of a pair and thread, and bytes of them all.
template <class F>
constexpr int words_beside() {
    if constexpr (F::GROUP_SCALED) return F::WORDS;
    else return 0;
}
template <class F>
constexpr int SCALE_BYTES = 2 * THREADS * 4 * words_beside<F>();
template <class F>
constexpr int SCALE_RING_BYTES = GROUPS * SCALE_BYTES<F>;
// Where the words of a vector lie, one by one.
template <class F>
__device__ inline const void* word_beside(const LinearWeights& weights, int output, int vector, int word) {
    if constexpr (F::WORDS == 1) return F::scale_word(weights, output, vector);
    else return F::scale_word(weights, output, vector, word);
}
template <class F>
__device__ inline typename F::Wide widened(uint4 v, const unsigned (&words)[F::WORDS], int vector) {
    if constexpr (F::WORDS == 1) return F::wide(v, words[0], vector);
    else return F::wide(v, words, vector);
}
// The weights of a warp's pairs on their way to shared memory, in the order in which they are multiplied.
template <class F>
struct WeightStream {
    const LinearWeights& weights;
    // This thread's place in each group, of weights and of their scales.
    unsigned char *ring, *scales;
    int pairs, stride;
    // What comes next, and where: the group that was asked for longest ago.
    int pair, at, group;

    // Asks for a group; behind the end for nothing, which counts as one.
    __device__ void ask() {
        const uint4* first = weights.data + (size_t)(2 * pair) * weights.vectors + at;
        const uint4* second = first + (2 * pair + 1 < weights.outputs ? weights.vectors : 0);
        unsigned char* to = ring + group * GROUP_BYTES;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const bool exists = pair < pairs && at + u * WARP < weights.vectors;
            copy_async(to + 2 * u * VECTOR_BYTES, first + u * WARP, exists);
            copy_async(to + (2 * u + 1) * VECTOR_BYTES, second + u * WARP, exists);
            if constexpr (F::GROUP_SCALED) {
                static_assert(UNROLL == 1, "words of one vector for each row");
                // Nothing is read where there is nothing, but an address is made.
                const int output = exists ? 2 * pair : 0, vector = exists ? at : 0, next = min(output + 1, weights.outputs - 1);
                unsigned char* to_scales = scales + group * SCALE_BYTES<F>;
#pragma unroll
                for (int w = 0; w < F::WORDS; ++w) {
                    copy_async<4>(to_scales + w * THREADS * 4, word_beside<F>(weights, output, vector, w), exists);
                    copy_async<4>(to_scales + (F::WORDS + w) * THREADS * 4, word_beside<F>(weights, next, vector, w), exists);
                }
            }
        }
        commit_copies();
        group = group + 1 < GROUPS ? group + 1 : 0;
        at += STEP;
        if (at - (int)(threadIdx.x % WARP) >= weights.vectors) at = threadIdx.x % WARP, pair += stride;
    }
};

// A row of the pair whose group of copies is there, from its vector `at` on.
template <class F>
__device__ inline typename F::Wide weights_of_row(const WeightStream<F>& stream, int u, int row, int at) {
    const uint4 v = *(const uint4*)(stream.ring + stream.group * GROUP_BYTES + (2 * u + row) * VECTOR_BYTES);
    if constexpr (F::GROUP_SCALED) {
        unsigned words[F::WORDS];
#pragma unroll
        for (int w = 0; w < F::WORDS; ++w)
            words[w] = *(const unsigned*)(stream.scales + stream.group * SCALE_BYTES<F> + (row * F::WORDS + w) * THREADS * 4);
        return widened<F>(v, words, at);
    } else {
        return F::wide(v);
    }
}

// 1 / √(mean(x²) + ε) of M rows; `scratch` has a place per warp and row.
template <int M>
__device__ inline void norm_factors(const LinearInput& in, int first_row, int count, float* scratch, float (&factors)[M]) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (int m = 0; m < M; ++m) {
        const float* from = in.row(first_row + min(m, count - 1));
        float squares = 0;
        for (int column = threadIdx.x * 4; column < in.columns; column += BATCH * THREADS * 4) {
            float4 x[BATCH];
            in.fours(x, from, column, THREADS * 4);
#pragma unroll
            for (int i = 0; i < BATCH; ++i) squares += x[i].x * x[i].x + x[i].y * x[i].y + x[i].z * x[i].z + x[i].w * x[i].w;
        }
        squares = warp_sum(squares);
        if (lane == 0) scratch[m * WARPS + warp] = squares;
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < M; ++m) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += scratch[m * WARPS + w];
        factors[m] = rsqrtf(sum / (float)in.columns + in.norm_eps);
    }
}

// Which M rows a block has: more of them than y may have blocks go on along z.
__device__ inline int pass_of_grid() { return blockIdx.z * gridDim.y + blockIdx.y; }

// Calls `finish(pair, first_row, count, sums)` with all lanes of the warp that owns the pair, of at least one row and at most M from `first_row` on.
template <class F, int M, class Finish>
__device__ inline void multiply_rows(const LinearInput& in, const LinearWeights& weights, int chunk, int first_row, int count, Finish finish) {
    SHARED_BYTES(memory);
    SHARED(float[WARPS * M], scratch);
    unsigned char* inputs = memory + RING_BYTES + SCALE_RING_BYTES<F>;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int pairs = (weights.outputs + 1) / 2, stride = gridDim.x * WARPS;
    const int chunk_vectors = chunk / F::COLUMNS, chunks = (weights.vectors + chunk_vectors - 1) / chunk_vectors;

    launch_dependents();
    WeightStream<F> stream{weights, memory + threadIdx.x * 16, memory + RING_BYTES + threadIdx.x * 4, pairs, stride,
                           (int)(blockIdx.x + warp * gridDim.x), lane, 0};
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) stream.ask();
    if (in.norm)
        for (int column = threadIdx.x * 32; column < in.columns; column += THREADS * 32) prefetch(in.norm + column);
    wait_for_dependency();

    float factors[M];
    if (in.norm) norm_factors<M>(in, first_row, count, scratch, factors);
    bool staged = false;
    for (int base = blockIdx.x; base < pairs; base += stride) {
        const int pair = base + warp * gridDim.x;
        float sums[2][M] = {};
        for (int c = 0; c < chunks; ++c) {
            if (!staged || chunks > 1) {
                // Nobody still multiplies with the chunk before.
                if (staged) __syncthreads();
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    const float* from = in.row(first_row + min(m, count - 1));
                    // Every thread takes every turn: lanes meet in it.
                    for (int turn = threadIdx.x * 4; turn - (int)threadIdx.x * 4 < chunk; turn += BATCH * THREADS * 4) {
                        float4 x[BATCH];
                        in.fours(x, from, c * chunk + turn, THREADS * 4);
                        if (in.norm) in.apply_norm(x, factors[m], c * chunk + turn, THREADS * 4);
#pragma unroll
                        for (int i = 0; i < BATCH; ++i) {
                            const int at = turn + i * THREADS * 4;
                            F::stage(inputs, M, chunk, m, at, x[i], at < chunk);
                        }
                    }
                }
                staged = true;
                __syncthreads();
            }
            if (pair >= pairs) continue;
            const int begin = c * chunk_vectors, end = min(begin + chunk_vectors, weights.vectors);
            for (int at = begin + lane; at - lane < end; at += STEP) {
                wait_copies<GROUPS - 1>();
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) {
                    // By all lanes, some of which may have zeros: those of a format meet there.
                    const auto first = weights_of_row(stream, u, 0, at), second = weights_of_row(stream, u, 1, at);
                    if (at + u * WARP >= end) break;
#pragma unroll
                    for (int m = 0; m < M; ++m) {
                        const auto x = F::input(inputs, M, chunk, m, at + u * WARP - begin);
                        F::add(sums[0][m], first, x);
                        F::add(sums[1][m], second, x);
                    }
                }
                stream.ask();
            }
        }
        if (pair >= pairs) continue;
        const int second = min(2 * pair + 1, weights.outputs - 1);
        const float scale0 = F::SCALED ? weights.scales[2 * pair] : 1, scale1 = F::SCALED ? weights.scales[second] : 1;
        const float bias0 = weights.bias ? in_global(weights.bias)[2 * pair] : 0, bias1 = weights.bias ? in_global(weights.bias)[second] : 0;
#pragma unroll
        for (int m = 0; m < M; ++m) {
            sums[0][m] = warp_sum(sums[0][m]) * scale0 + bias0;
            sums[1][m] = warp_sum(sums[1][m]) * scale1 + bias1;
        }
        finish(pair, first_row, count, sums);
    }
    // Nothing is on its way when the block ends.
    wait_copies<0>();
}

// The same of the rows that the grid gives a block.
template <class F, int M, class Finish>
__device__ inline void multiply(const LinearInput& in, const LinearWeights& weights, int chunk, Finish finish) {
    const int first_row = pass_of_grid() * M, count = min(M, in.rows - first_row);
    if (count > 0) multiply_rows<F, M>(in, weights, chunk, first_row, count, finish);
}

// A kernel of each format that embeddings and heads have, and number of rows. Four rows beside fp8 would spill on sm_80.
#define HBMARK_FOR_EACH_FORMAT(KERNEL) \
    KERNEL(bf16, FormatBf16) KERNEL(f16, FormatF16) KERNEL(f32, FormatF32) KERNEL(int8, FormatInt8)
// The same of linear layers: KERNELS is of a format and each number of rows, KERNEL of one.
#define HBMARK_FOR_EACH_LINEAR(KERNELS, KERNEL)                                                                   \
    HBMARK_FOR_EACH_FORMAT(KERNELS) KERNELS(mxfp4, FormatMxfp4) KERNELS(nvfp4, FormatNvfp4) KERNELS(int4, FormatInt4) \
        KERNEL(fp8, FormatFp8, 1) KERNEL(fp8, FormatFp8, 2) KERNEL(fp8_block, FormatFp8Block, 1)                  \
            KERNEL(fp8_block, FormatFp8Block, 2) KERNEL(mxfp8, FormatMxfp8, 1) KERNEL(mxfp8, FormatMxfp8, 2)
