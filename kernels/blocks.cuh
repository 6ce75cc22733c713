// ggml's blocks: weights of GGUF files, in as many bytes as there and another order.
//
// Format  a 16-byte vector has    and beside it, in words                                                                      a weight is
// q8_0    16 integers             an f16 for every two vectors                                                                 scale * q
// q4_0    32 codes                an f16 for every vector                                                                      scale * (q - 8)
// q4_k    32 codes                a word for every two vectors: scale and minimum of the first, of the second, 6 bits each,
//                                 and a byte of d and d_min, of which four words of 256 columns have one each                  d * scale * q - d_min * minimum
// q5_k    the lower 4 bits of 32  the same, and a word of fifth bits for every vector: bit i of byte b is of column 4i + b     the same
// q6_k    the lower 4 bits of 32  a word for every two vectors: signed scales of 16 columns each; an f16 d for every 8
//                                 vectors; two words of upper bits for every vector: bits 2i of byte b are of column 4i + b    d * scale * (q - 32)
// Words of one kind of all outputs lie together, rows padded to whole words; the kinds follow each other.
#pragma once

#include "linear.cuh"

// One of the halves of a word.
__device__ inline float half_of_word(unsigned word, int half) { return widen_pair<F16>(word >> 16 * half).x; }

// Of an integer among the bytes of words.
__device__ inline float signed_byte(unsigned word, int byte) { return (float)(signed char)(word >> 8 * byte); }

struct FormatQ8_0 : FormatInt8 {
    static constexpr bool SCALED = false, GROUP_SCALED = true;
    static constexpr int WORDS = 1;
    struct Wide {
        uint4 q;
        float scale;
    };
    __device__ static const void* scale_word(const LinearWeights& weights, int output, int vector) {
        return byte_scales<4>(weights.scales, weights, output, vector);
    }
    __device__ static Wide wide(uint4 v, unsigned word, int vector) { return Wide{v, half_of_word(word, vector / 2 % 2)}; }
    __device__ static void add(float& sum, const Wide& w, const In& in) {
        float of_vector = 0;
        FormatInt8::add(of_vector, w.q, in);
        sum += w.scale * of_vector;
    }
    __device__ static void values(const Wide& w, float (&out)[COLUMNS]) {
        const unsigned words[4] = {w.q.x, w.q.y, w.q.z, w.q.w};
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) out[i] = w.scale * signed_byte(words[i / 4], i % 4);
    }
};

// The codes of a vector as bytes.
__device__ inline void codes_of(uint4 v, unsigned (&q)[8]) {
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) q[2 * i] = FormatInt4::four(words[i]), q[2 * i + 1] = FormatInt4::four(words[i] >> 16);
}

struct FormatQ4_0 : FourBits {
    __device__ static const void* scale_word(const LinearWeights& weights, int output, int vector) {
        return byte_scales<2>(weights.scales, weights, output, vector);
    }
    __device__ static Wide wide(uint4 v, unsigned word, int vector) {
        Wide out{{}, half_of_word(word, vector % 2)};
        codes_of(v, out.q);
#pragma unroll
        for (int i = 0; i < 8; ++i) out.q[i] = FormatInt4::less(out.q[i], 0x08080808u);
        return out;
    }
    __device__ static void values(const Wide& w, float (&out)[COLUMNS]) {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) out[i] = w.scale * signed_byte(w.q[i / 4], i % 4);
    }
};

struct FormatQ4K : FourBits {
    struct Wide {
        unsigned q[8];
        float scale, minimum;
    };
    // Beside the inputs their sum, which meets minima.
    struct In : FourBits::In {
        int sum;
    };
    __device__ static In input(const unsigned char* inputs, int rows, int chunk, int row, int vector) {
        constexpr unsigned ONE = 0x01010101u, ONES[8] = {ONE, ONE, ONE, ONE, ONE, ONE, ONE, ONE};
        const FourBits::In in = FourBits::input(inputs, rows, chunk, row, vector);
        return In{in, dot(ONES, in)};
    }
    __device__ static const void* scale_word(const LinearWeights& weights, int output, int vector) {
        return byte_scales<2>(weights.scales, weights, output, vector);
    }
    // d and d_min of 256 columns, which 8 lanes have together: all lanes of the warp come here.
    __device__ static float2 of_block(unsigned word) {
        unsigned both = (word >> 24) << 8 * (threadIdx.x / 2 % 4);
        both |= __shfl_xor_sync(ALL_LANES, both, 2);
        both |= __shfl_xor_sync(ALL_LANES, both, 4);
        return widen_pair<F16>(both);
    }
    __device__ static Wide wide(uint4 v, unsigned word, int vector) {
        const float2 of_all = of_block(word);
        const unsigned own = word >> 12 * (vector % 2);
        Wide out{{}, of_all.x * (float)(own & 63), of_all.y * (float)(own >> 6 & 63)};
        codes_of(v, out.q);
        return out;
    }
    __device__ static void add(float& sum, const Wide& w, const In& in) {
        sum += in.scale * (w.scale * (float)dot(w.q, in) - w.minimum * (float)in.sum);
    }
    __device__ static void values(const Wide& w, float (&out)[COLUMNS]) {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) out[i] = w.scale * signed_byte(w.q[i / 4], i % 4) - w.minimum;
    }
};

// Where words of the next kind begin, behind those that so many vectors of a row share.
template <int VECTORS_OF_WORD>
__device__ inline const float* behind(const float* first, const LinearWeights& weights) {
    return first + (size_t)weights.outputs * ((weights.vectors + VECTORS_OF_WORD - 1) / VECTORS_OF_WORD);
}

struct FormatQ5K : FormatQ4K {
    static constexpr int WORDS = 2;
    __device__ static const void* scale_word(const LinearWeights& weights, int output, int vector, int word) {
        if (word == 0) return FormatQ4K::scale_word(weights, output, vector);
        return behind<2>(weights.scales, weights) + (size_t)output * weights.vectors + vector;
    }
    __device__ static Wide wide(uint4 v, const unsigned (&words)[WORDS], int vector) {
        Wide out = FormatQ4K::wide(v, words[0], vector);
#pragma unroll
        for (int i = 0; i < 8; ++i) out.q[i] |= (words[1] >> i & 0x01010101u) << 4;
        return out;
    }
};

struct FormatQ6K : FourBits {
    static constexpr int WORDS = 4;
    struct Wide {
        unsigned q[8];
        float2 scales;
    };
    __device__ static const void* scale_word(const LinearWeights& weights, int output, int vector, int word) {
        if (word == 0) return byte_scales<2>(weights.scales, weights, output, vector);
        const float* of_blocks = behind<2>(weights.scales, weights);
        if (word == 1) return byte_scales<16>(of_blocks, weights, output, vector);
        return behind<16>(of_blocks, weights) + ((size_t)output * weights.vectors + vector) * 2 + word - 2;
    }
    __device__ static Wide wide(uint4 v, const unsigned (&words)[WORDS], int vector) {
        const float d = half_of_word(words[1], vector / 8 % 2);
        Wide out{{}, make_float2(d * signed_byte(words[0], vector % 2 * 2), d * signed_byte(words[0], vector % 2 * 2 + 1))};
        codes_of(v, out.q);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            out.q[i] = FormatInt4::less(out.q[i] | (words[2 + i / 4] >> 2 * (i % 4) & 0x03030303u) << 4, 0x20202020u);
        return out;
    }
    __device__ static void add(float& sum, const Wide& w, const In& in) {
        const int2 dots = dots_of_halves(w.q, in);
        sum += in.scale * (w.scales.x * (float)dots.x + w.scales.y * (float)dots.y);
    }
    __device__ static void values(const Wide& w, float (&out)[COLUMNS]) {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) out[i] = (i < 16 ? w.scales.x : w.scales.y) * signed_byte(w.q[i / 4], i % 4);
    }
};

// Calls `take(vector, values)` for each vector of a row, by one thread of the block each. All lanes of a warp take every turn, those behind the last
// vector with that one: lanes exchange d and d_min by shuffles.
template <class F, class Take>
__device__ inline void values_of_row(const LinearWeights& weights, int row, Take take) {
    for (int turn = threadIdx.x; turn - (int)(threadIdx.x % WARP) < weights.vectors; turn += blockDim.x) {
        const int vector = min(turn, weights.vectors - 1);
        unsigned words[F::WORDS];
#pragma unroll
        for (int w = 0; w < F::WORDS; ++w) words[w] = *(const unsigned*)word_beside<F>(weights, row, vector, w);
        float values[F::COLUMNS];
        F::values(widened<F>(weights.data[(size_t)row * weights.vectors + vector], words, vector), values);
        if (turn == vector) take(vector, values);
    }
}

// A kernel of each format, and number of rows.
#define HBMARK_FOR_EACH_BLOCK(KERNELS) \
    KERNELS(q8_0, FormatQ8_0) KERNELS(q4_0, FormatQ4_0) KERNELS(q4_k, FormatQ4K) KERNELS(q5_k, FormatQ5K) KERNELS(q6_k, FormatQ6K)
