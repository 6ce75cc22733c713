// K and V from a seed: the host's random_kv.rs to the bit, where the cache lies.
//
//   cache[block n][layer][part, K or V][i] = quantiles[draw i of the ChaCha8 stream of (seed, layer, n, K or V)]
//
// Shapes: quantiles [65536], the values as the cache keeps them, by 16 random bits; blocks: addresses of a
// sequence's blocks, in order. Grid: (blocks, parts * layers, ceil(elements / 32 / 256)), parts 2, or 1 where there is K alone. Block: 256 threads, each of
// which computes 64 bytes of a stream and with them 32 elements; elements of a part is a multiple of 32. Where scale is above 0 vectors, of head_dim
// elements, have scales (cache.cuh), all of them that.
// Bytes: parts * layers * elements * sizeof(T) written per block. FLOPs: none; about 40 integer operations an element.
// fill_kv_BITS: by the size of an element. ChaCha: Bernstein, 2008; key, counter and stream as the crate rand_chacha has them.

#include "device.cuh"

constexpr int FILL_THREADS = 256, DRAWS = 32;

struct StreamKey {
    unsigned words[8];
};

__device__ inline unsigned rotated(unsigned x, int by) { return x << by | x >> (32 - by); }
__device__ inline void quarter_round(unsigned& a, unsigned& b, unsigned& c, unsigned& d) {
    a += b, d = rotated(d ^ a, 16);
    c += d, b = rotated(b ^ c, 12);
    a += b, d = rotated(d ^ a, 8);
    c += d, b = rotated(b ^ c, 7);
}

// The counter-th 64 bytes of a stream.
__device__ inline void chacha8(const StreamKey& key, unsigned counter, unsigned (&out)[16]) {
    const unsigned start[16] = {0x61707865, 0x3320646e,   0x79622d32,   0x6b206574,   key.words[0], key.words[1],
                                key.words[2], key.words[3], key.words[4], key.words[5], key.words[6], key.words[7],
                                counter,      0,            0,            0};
#pragma unroll
    for (int i = 0; i < 16; ++i) out[i] = start[i];
#pragma unroll
    for (int round = 0; round < 8; round += 2) {
        quarter_round(out[0], out[4], out[8], out[12]);
        quarter_round(out[1], out[5], out[9], out[13]);
        quarter_round(out[2], out[6], out[10], out[14]);
        quarter_round(out[3], out[7], out[11], out[15]);
        quarter_round(out[0], out[5], out[10], out[15]);
        quarter_round(out[1], out[6], out[11], out[12]);
        quarter_round(out[2], out[7], out[8], out[13]);
        quarter_round(out[3], out[4], out[9], out[14]);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) out[i] += start[i];
}

template <class T>
__device__ inline void fill_kv(const T* quantiles, const unsigned long long* blocks, unsigned long long seed, unsigned long long layer_bytes,
                               int elements, int parts, int head_dim, float scale) {
    launch_dependents();
    wait_for_dependency();
    const int layer = blockIdx.y / parts, values = blockIdx.y % parts, chunk = blockIdx.z * FILL_THREADS + threadIdx.x, first = chunk * DRAWS;
    if (first >= elements) return;
    // "hbmark kv 1" behind seed, layer, number and K or V.
    const StreamKey key{{(unsigned)seed, (unsigned)(seed >> 32), (unsigned)layer, 0, blockIdx.x, 0x6d626800u | (unsigned)values, 0x206b7261,
                         0x3120766b}};
    unsigned words[16];
    chacha8(key, (unsigned)chunk, words);
    uint4* to = (uint4*)((T*)(blocks[blockIdx.x] + layer * layer_bytes) + (size_t)values * elements + first);
    const auto low = [&](int word) { return (unsigned)quantiles[words[word] & 0xffff]; };
    const auto high = [&](int word) { return (unsigned)quantiles[words[word] >> 16]; };
    if constexpr (sizeof(T) == 1) {
        // Four elements of two draws each.
        const auto four = [&](int word) { return low(word) | high(word) << 8 | low(word + 1) << 16 | high(word + 1) << 24; };
#pragma unroll
        for (int v = 0; v < 2; ++v) to[v] = make_uint4(four(8 * v), four(8 * v + 2), four(8 * v + 4), four(8 * v + 6));
        if (scale > 0) {
            float* scales = (float*)(blocks[blockIdx.x] + layer * layer_bytes + (size_t)parts * elements) + values * (elements / head_dim);
            // Of the vectors that begin here.
            for (int vector = (first + head_dim - 1) / head_dim; vector * head_dim < first + DRAWS; ++vector) scales[vector] = scale;
        }
    } else if constexpr (sizeof(T) == 2) {
        const auto both = [&](int word) { return low(word) | high(word) << 16; };
#pragma unroll
        for (int v = 0; v < 4; ++v) to[v] = make_uint4(both(4 * v), both(4 * v + 1), both(4 * v + 2), both(4 * v + 3));
    } else {
#pragma unroll
        for (int v = 0; v < 8; ++v) to[v] = make_uint4(low(2 * v), high(2 * v), low(2 * v + 1), high(2 * v + 1));
    }
}

#define KERNEL(bits, T)                                                                                                               \
    HBMARK_KERNEL_BOUNDED(FILL_THREADS, 2, fill_kv_##bits, const T* quantiles, const unsigned long long* blocks, unsigned long long seed, \
                          unsigned long long layer_bytes, int elements, int parts, int head_dim, float scale) {                       \
        fill_kv<T>(quantiles, blocks, seed, layer_bytes, elements, parts, head_dim, scale);                                           \
    }
KERNEL(8, unsigned char)
KERNEL(16, unsigned short)
KERNEL(32, unsigned)
#undef KERNEL
