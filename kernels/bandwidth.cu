// Memory bandwidth: read, write, copy and triad, reads of L2, and the pattern they are checked by.
//
// write_pattern  words[i] = i * 2654435761 + 1 (mod 2^32): bits that look random, so that no power is saved on zeros, and a sum known
//                in closed form. Bytes: 16 n.
// read_uN        sums[0] += sum of all words (mod 2^32). Bytes: 16 n. N independent 16-byte loads are in flight per thread.
// read_cached    the same, `passes` times over a buffer that L2 holds, to and fro; past the first cache. Bytes: 16 n passes.
// copy           to[i] = from[i]. Bytes: 32 n, both directions.
// triad          a[i] = b[i] + scale * c[i], f32. Bytes: 48 n, three streams.
//
// Shapes: n counts 16-byte vectors; buffers are 16-byte aligned. Grid: any; each thread strides over the whole buffer.
// Block: a multiple of 32, at most 1024. FLOPs: none that matter. Minimum architecture: sm_80.
// Source of the idea: streaming loads that do not displace the cache (`ld.global.cs`), as in public copy and GEMV studies.
// Every kernel waits for the one before it: launches may ask to overlap.

#include "device.cuh"

HBMARK_KERNEL(write_pattern, uint4* __restrict__ to, unsigned long long n) {
    wait_for_dependency();
    for (unsigned long long i = global_thread(); i < n; i += global_threads()) {
        const unsigned int first = (unsigned int)(4 * i) * 2654435761u + 1u;
        __stcs(to + i, make_uint4(first, first + 2654435761u, first + 2u * 2654435761u, first + 3u * 2654435761u));
    }
}

template <int UNROLL>
__device__ void read_body(const uint4* __restrict__ data, unsigned int* __restrict__ sums, unsigned long long n) {
    wait_for_dependency();
    const unsigned long long stride = global_threads();
    unsigned int sum = 0;
    unsigned long long i = global_thread();
    for (; i + (UNROLL - 1) * stride < n; i += UNROLL * stride) {
        uint4 loaded[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) loaded[u] = __ldcs(data + i + u * stride);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) sum += loaded[u].x + loaded[u].y + loaded[u].z + loaded[u].w;
    }
    for (; i < n; i += stride) {
        const uint4 loaded = __ldcs(data + i);
        sum += loaded.x + loaded.y + loaded.z + loaded.w;
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) atomicAdd(sums, sum);
}

HBMARK_KERNEL(read_u1, const uint4* __restrict__ d, unsigned int* __restrict__ s, unsigned long long n) { read_body<1>(d, s, n); }
HBMARK_KERNEL(read_u2, const uint4* __restrict__ d, unsigned int* __restrict__ s, unsigned long long n) { read_body<2>(d, s, n); }
HBMARK_KERNEL(read_u4, const uint4* __restrict__ d, unsigned int* __restrict__ s, unsigned long long n) { read_body<4>(d, s, n); }
HBMARK_KERNEL(read_u8, const uint4* __restrict__ d, unsigned int* __restrict__ s, unsigned long long n) { read_body<8>(d, s, n); }

HBMARK_KERNEL(read_cached, const uint4* __restrict__ data, unsigned int* __restrict__ sums, unsigned long long n, int passes) {
    wait_for_dependency();
    unsigned int sum = 0;
    for (int pass = 0; pass < passes; ++pass) {
#pragma unroll 4
        for (unsigned long long i = global_thread(); i < n; i += global_threads()) {
            const uint4 loaded = __ldcg(data + (pass % 2 == 0 ? i : n - 1 - i));
            sum += loaded.x + loaded.y + loaded.z + loaded.w;
        }
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) atomicAdd(sums, sum);
}

HBMARK_KERNEL(copy, const uint4* __restrict__ from, uint4* __restrict__ to, unsigned long long n) {
    wait_for_dependency();
    for (unsigned long long i = global_thread(); i < n; i += global_threads()) {
        __stcs(to + i, __ldcs(from + i));
    }
}

HBMARK_KERNEL(triad, float4* __restrict__ a, const float4* __restrict__ b, const float4* __restrict__ c, float scale,
                    unsigned long long n) {
    wait_for_dependency();
    for (unsigned long long i = global_thread(); i < n; i += global_threads()) {
        const float4 x = __ldcs(b + i);
        const float4 y = __ldcs(c + i);
        __stcs(a + i, make_float4(x.x + scale * y.x, x.y + scale * y.y, x.z + scale * y.z, x.w + scale * y.w));
    }
}
