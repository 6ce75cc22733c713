// The paged cache as kernels see it.
//
// A block holds, per layer, K of all heads and then V of all heads, each [kv_heads, block, head_dim]; then, where vectors have scales, those of K and
// those of V in f32, each [kv_heads, block]. Where a block lies is in a table of
// addresses on the device, so that neither a longer sequence nor a larger pool changes a launch.
#pragma once

#include "elements.cuh"

struct Cache {
    // Addresses of blocks: those of a row's sequence, in order, begin at starts[row].
    const unsigned long long* tables;
    const unsigned* starts;
    unsigned long long layer_bytes;
    int layer, kv_heads, head_dim, block_shift;

    // Element 0 of K (0) or V (1) of a head at a position of a row's sequence.
    template <class T>
    __device__ T* at(unsigned start, int position, int head, int which) const {
        const unsigned long long block = tables[start + (position >> block_shift)];
        const int slot = position & ((1 << block_shift) - 1);
        const size_t element = ((((size_t)which * kv_heads + head) << block_shift) + slot) * head_dim;
        return (T*)(block + layer * layer_bytes) + element;
    }

    // Element 0 of V, whose vectors have a width of their own.
    template <class T>
    __device__ T* value_at(unsigned start, int position, int head, int value_dim) const {
        const unsigned long long block = tables[start + (position >> block_shift)];
        const int slot = position & ((1 << block_shift) - 1);
        const size_t keys = ((size_t)kv_heads << block_shift) * head_dim, element = (((size_t)head << block_shift) + slot) * value_dim;
        return (T*)(block + layer * layer_bytes) + keys + element;
    }

    // The scale of that vector, where elements are one byte and vectors have scales.
    __device__ float* scale(unsigned start, int position, int head, int which) const {
        const unsigned long long block = tables[start + (position >> block_shift)];
        const int slot = position & ((1 << block_shift) - 1);
        const size_t elements = ((size_t)2 * kv_heads << block_shift) * head_dim;
        return (float*)(block + layer * layer_bytes + elements) + (((size_t)which * kv_heads + head) << block_shift) + slot;
    }
};
