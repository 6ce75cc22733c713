// What kernels may use beside plain CUDA. Every wrapper has a meaning on the device and one on the host, where the same sources run on
// emulated threads (emulation/emulation.h). No kernel lives here.
#pragma once

// A type as one word: `float[8]` can then be declared like any other.
template <class T>
using As = T;

#ifdef HBMARK_EMULATED
#include "emulation/emulation.h"
#else
// A kernel with an unmangled name, so that the host finds it by the name in the file; bounded: by threads of a block, and blocks that must
// fit a multiprocessor.
#define HBMARK_KERNEL(name, ...) extern "C" __global__ void name(__VA_ARGS__)
#define HBMARK_KERNEL_BOUNDED(threads, blocks, name, ...) extern "C" __global__ void __launch_bounds__(threads, blocks) name(__VA_ARGS__)
// Shared memory: a variable, or as many bytes as the launch gives.
#define SHARED(type, name) __shared__ As<type> name
#define SHARED_BYTES(name) extern __shared__ __align__(16) unsigned char name[]
#endif

#define ALL_LANES 0xffffffffu

constexpr int WARP = 32;

__device__ inline unsigned long long global_thread() {
    return (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
}

__device__ inline unsigned long long global_threads() {
    return (unsigned long long)gridDim.x * blockDim.x;
}

#ifdef HBMARK_EMULATED
// What shuffles by 16, 8, 4, 2 and 1 leave in every lane, in the same order, by one collective: its emulation stops each lane once.
template <class T, class Join>
T joined(const char* collective, T value, int lanes, Join join) {
    const unsigned char* all = hbmark::emulation::exchange(ALL_LANES, collective, &value, sizeof value);
    const int first = threadIdx.x % WARP / lanes * lanes;
    T values[WARP];
    for (int i = 0; i < lanes; ++i) values[i] = hbmark::emulation::brought<T>(all, first + i);
    for (int offset = lanes / 2; offset > 0; offset /= 2)
        for (int i = 0; i < offset; ++i) values[i] = join(values[i], values[i + offset]);
    return values[0];
}
#endif

// The sum, or the largest, over the lanes of a full warp, or over neighbours of a power of two; every lane must call it.
template <class T>
__device__ inline T warp_sum(T value, int lanes = WARP) {
#ifdef HBMARK_EMULATED
    return joined("warp_sum", value, lanes, [](T a, T b) { return a + b; });
#else
    for (int offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(ALL_LANES, value, offset);
    return value;
#endif
}
__device__ inline float warp_max(float value) {
#ifdef HBMARK_EMULATED
    return joined("warp_max", value, WARP, [](float a, float b) { return fmaxf(a, b); });
#else
    for (int offset = WARP / 2; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, offset));
    return value;
#endif
}

// Asks L2 for the line of an address and goes on.
__device__ inline void prefetch(const void* at) {
#ifndef HBMARK_EMULATED
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
}

// An address that was itself loaded, which is never null, lies in global memory: loads through it need not find out.
template <class T>
__device__ inline T* in_global(T* at) {
#ifndef HBMARK_EMULATED
    __builtin_assume(__isGlobal(at));
#endif
    return at;
}

// What other blocks may have written during this launch, so never through the first cache.
__device__ inline float load_shared_result(const float* from) { return __ldcg(from); }

// Programmatic dependent launch: the next kernel may start now; nothing that the last one wrote is read before the wait. Without effect
// below 9.0, and where the launch does not ask for it.
__device__ inline void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_dependency() {
#ifdef HBMARK_EMULATED
    hbmark::emulation::wait_for_dependency();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Between two looks at what another device is about to write.
__device__ inline void pause() {
#ifdef HBMARK_EMULATED
    hbmark::emulation::pause();
#endif
}

// 4, 8 or 16 bytes from global to shared memory while the thread goes on; zeros where there is nothing to copy.
template <int BYTES = 16>
__device__ inline void copy_async(void* shared, const void* global, bool exists) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "sizes that the instruction has");
#ifdef HBMARK_EMULATED
    hbmark::emulation::copy_later(shared, global, exists ? BYTES : 0, exists ? 0 : BYTES);
#else
    const unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    // Past the first cache, where the instruction can.
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(exists ? 16 : 0) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(global), "r"(exists ? BYTES : 0), "n"(BYTES) : "memory");
#endif
}
__device__ inline void commit_copies() {
#ifdef HBMARK_EMULATED
    hbmark::emulation::commit_copies();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until all but the last `LEFT` groups of this thread's copies are there. Others see them behind a barrier.
template <int LEFT>
__device__ inline void wait_copies() {
#ifdef HBMARK_EMULATED
    hbmark::emulation::wait_copies(LEFT);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}

#ifdef HBMARK_EMULATED
namespace hbmark::emulation {
unsigned long long nanoseconds();
}
#endif
__device__ inline unsigned long long device_nanoseconds() {
#ifdef HBMARK_EMULATED
    return hbmark::emulation::nanoseconds();
#else
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
#endif
}

// Whether this is the last of so many blocks to come here, which then sees what the others wrote before. All its threads ask; arrived is 0 before the
// first launch and after each.
__device__ inline bool comes_last(unsigned* arrived, int blocks) {
    SHARED(unsigned, before);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) before = atomicInc(arrived, blocks - 1);
    __syncthreads();
    __threadfence();
    return (int)before == blocks - 1;
}
