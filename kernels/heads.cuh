// What becomes of the sums of a projection: heads are normed, turned and stored; logits are put in an order.
#pragma once

#include "cache.cuh"

struct HeadWork {
    // Norms are null where there are none, cosines and sines where nothing turns.
    const float *query_norm, *key_norm, *cosines, *sines;
    const unsigned* positions;
    float* query;
    float* projected;
    unsigned* arrived;
    int heads;
    float norm_eps;
};

// Elements i and i + half of one head of a row, normed, turned where they are Q or K, and stored.
template <class T>
__device__ inline void store_pair(const HeadWork& work, const Cache& cache, int row, int head, int i, float a, float b) {
    const int half = cache.head_dim / 2, position = work.positions[row];
    if (work.cosines && head < work.heads + cache.kv_heads) {
        const float cosine = work.cosines[(size_t)position * half + i], sine = work.sines[(size_t)position * half + i];
        const float turned = a * cosine - b * sine;
        b = b * cosine + a * sine;
        a = turned;
    }
    if (head < work.heads) {
        float* out = work.query + ((size_t)row * work.heads + head) * cache.head_dim;
        out[i] = a;
        out[i + half] = b;
        return;
    }
    const int of_cache = (head - work.heads) % cache.kv_heads, which = (head - work.heads) / cache.kv_heads;
    T* out = cache.at<T>(cache.starts[row], position, of_cache, which);
    out[i] = narrow<T>(a);
    out[i + half] = narrow<T>(b);
}

// All of a head whose sums lie in `projected`, by one warp. `joint`: the heads of Q are normed together, and so are those of K.
template <class T>
__device__ inline void finish_head(const HeadWork& work, const Cache& cache, int row, int head, int outputs, bool joint) {
    const int half = cache.head_dim / 2, lane = threadIdx.x % WARP;
    const float* sums = work.projected + (size_t)row * outputs + head * cache.head_dim;
    const bool is_query = head < work.heads;
    const float* norm = is_query ? work.query_norm : head < work.heads + cache.kv_heads ? work.key_norm : nullptr;
    float factor = 1;
    if (norm) {
        // What is normed together: this head, or all of its kind.
        const int before = (is_query ? head : head - work.heads) * cache.head_dim;
        const float* first = joint ? sums - before : sums;
        const int width = joint ? (is_query ? work.heads : cache.kv_heads) * cache.head_dim : cache.head_dim;
        float squares = 0;
        for (int at = lane; at < width; at += WARP) {
            const float x = load_shared_result(first + at);
            squares += x * x;
        }
        factor = rsqrtf(warp_sum(squares) / (float)width + work.norm_eps);
        if (joint) norm += before;
    }
    for (int i = lane; i < half; i += WARP) {
        float a = load_shared_result(sums + 2 * i), b = load_shared_result(sums + 2 * i + 1);
        if (norm) {
            a *= factor * norm[i];
            b *= factor * norm[i + half];
        }
        store_pair<T>(work, cache, row, head, i, a, b);
    }
}

constexpr unsigned long long NO_LOGIT = 0xffffffffull;

// Larger for a larger logit, and of equal ones for the lower index.
__device__ inline unsigned long long in_order(float logit, unsigned index) {
    if (!(logit == logit)) return NO_LOGIT;
    const unsigned bits = __float_as_uint(logit == 0.0f ? 0.0f : logit);
    const unsigned order = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (unsigned long long)order << 32 | ~index;
}

