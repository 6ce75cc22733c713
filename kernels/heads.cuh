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

// Elements i and i + half of one head of a row, normed before: turned where they are Q or K.
__device__ inline float2 turned_pair(const HeadWork& work, const Cache& cache, int row, int head, int i, float a, float b) {
    if (!work.cosines || head >= work.heads + cache.kv_heads) return make_float2(a, b);
    const size_t at = (size_t)work.positions[row] * (cache.head_dim / 2) + i;
    const float cosine = work.cosines[at], sine = work.sines[at];
    return make_float2(a * cosine - b * sine, b * cosine + a * sine);
}

// Stores them; those of K and V multiplied with `factor`.
template <class T>
__device__ inline void store_turned(const HeadWork& work, const Cache& cache, int row, int head, int i, float2 pair, float factor) {
    const int half = cache.head_dim / 2;
    if (head < work.heads) {
        float* out = work.query + ((size_t)row * work.heads + head) * cache.head_dim;
        out[i] = pair.x;
        out[i + half] = pair.y;
        return;
    }
    const int of_cache = (head - work.heads) % cache.kv_heads, which = (head - work.heads) / cache.kv_heads;
    T* out = cache.at<T>(cache.starts[row], work.positions[row], of_cache, which);
    out[i] = narrow<T>(pair.x * factor);
    out[i + half] = narrow<T>(pair.y * factor);
}
template <class T>
__device__ inline void store_pair(const HeadWork& work, const Cache& cache, int row, int head, int i, float a, float b) {
    store_turned<T>(work, cache, row, head, i, turned_pair(work, cache, row, head, i, a, b), 1);
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
    const auto finished = [&](int i) {
        float a = load_shared_result(sums + 2 * i), b = load_shared_result(sums + 2 * i + 1);
        if (norm) {
            a *= factor * norm[i];
            b *= factor * norm[i + half];
        }
        return turned_pair(work, cache, row, head, i, a, b);
    };
    float inverse = 1;
    if constexpr (sizeof(T) == 1) {
        if (T::SCALED && !is_query) {
            float most = 0;
            for (int i = lane; i < half; i += WARP) {
                const float2 pair = finished(i);
                most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
            }
            const float scale = warp_max(most) / LARGEST_CODE;
            inverse = scale > 0 ? 1 / scale : 0;
            const int of_cache = (head - work.heads) % cache.kv_heads, which = (head - work.heads) / cache.kv_heads;
            if (lane == 0) *cache.scale(cache.starts[row], work.positions[row], of_cache, which) = scale;
        }
    }
    for (int i = lane; i < half; i += WARP) store_turned<T>(work, cache, row, head, i, finished(i), inverse);
}

constexpr unsigned long long NO_LOGIT = 0xffffffffull;

// Larger for a larger logit, and of equal ones for the lower index.
__device__ inline unsigned long long in_order(float logit, unsigned index) {
    if (!(logit == logit)) return NO_LOGIT;
    const unsigned bits = __float_as_uint(logit == 0.0f ? 0.0f : logit);
    const unsigned order = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (unsigned long long)order << 32 | ~index;
}

