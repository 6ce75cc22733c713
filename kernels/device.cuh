// Helpers that every kernel may use. No kernel lives here.
#pragma once

// A kernel with an unmangled name, so that the host finds it by the name in the file.
#define HBMARK_KERNEL extern "C" __global__ void

__device__ inline unsigned long long global_thread() {
    return (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
}

__device__ inline unsigned long long global_threads() {
    return (unsigned long long)gridDim.x * blockDim.x;
}

// The sum over the lanes of a full warp; every lane must call it.
__device__ inline unsigned int warp_sum(unsigned int value) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}
