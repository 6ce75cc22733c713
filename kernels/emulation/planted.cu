// Kernels that are wrong on purpose: tests of the emulation itself. Never built for a GPU.

#include "../device.cuh"

// Turns 128 words around in shared memory.
HBMARK_KERNEL(planted_reversal, const unsigned* from, unsigned* to) {
    SHARED(unsigned[128], words);
    words[threadIdx.x] = from[threadIdx.x];
    __syncthreads();
    to[threadIdx.x] = words[127 - threadIdx.x];
}
HBMARK_KERNEL(planted_reversal_without_barrier, const unsigned* from, unsigned* to) {
    SHARED(unsigned[128], words);
    words[threadIdx.x] = from[threadIdx.x];
    to[threadIdx.x] = words[127 - threadIdx.x];
}
// The same with copies that nobody waits for.
HBMARK_KERNEL(planted_reversal_without_wait, const unsigned* from, unsigned* to) {
    SHARED(uint4[32], words);
    if (threadIdx.x < 32) copy_async(words + threadIdx.x, from + 4 * threadIdx.x, true);
    commit_copies();
    __syncthreads();
    to[threadIdx.x] = ((unsigned*)words)[127 - threadIdx.x];
}
// Reads what the block before left.
HBMARK_KERNEL(planted_shared_before_written, unsigned* to) {
    SHARED(unsigned, word);
    to[blockIdx.x] = word;
    word = 7;
}
// Half of the block never comes.
HBMARK_KERNEL(planted_half_meets, unsigned* to) {
    if (threadIdx.x % 2 == 0) to[0] = __shfl_xor_sync(ALL_LANES, to[0], 1);
    __syncthreads();
}
