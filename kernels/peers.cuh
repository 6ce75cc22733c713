// Ranks of a tensor parallel group, each on its own GPU, and how their kernels wait for each other.
//
// Every rank has a peer buffer: memory that the others read and write. Its first words are
//   arrived_from[MAX_RANKS]   the epoch that each rank has reached, written by that rank
//   epoch, blocks, lost       of this rank: barriers so far; blocks of this launch that are done; 1 + the rank that did not reach a barrier in time, 0 for none
//   used[2]                   floats of each sum that are not zero
// and all are 0 before the first launch. Every rank launches the same kernels in the same order with the same grid.
#pragma once

#include "linear.cuh"

constexpr int MAX_RANKS = 16;

struct Group {
    // Where the peer buffer of each rank lies.
    const unsigned long long* buffers;
    int rank, ranks;
    // How long a barrier waits for a rank.
    unsigned long long timeout_ns;

    __device__ unsigned* words_of(int other) const { return (unsigned*)buffers[other]; }
    __device__ unsigned* words() const { return words_of(rank); }
};

constexpr int EPOCH = MAX_RANKS, BLOCKS_DONE = MAX_RANKS + 1, LOST = MAX_RANKS + 2, USED = MAX_RANKS + 3;

// What another GPU reads or has written.
__device__ inline void store_for_peers(unsigned* to, unsigned value) {
#ifdef HBMARK_EMULATED
    hbmark::emulation::asked().meets += 1;
    __atomic_store_n(to, value, __ATOMIC_RELEASE);
#else
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
#endif
}
__device__ inline unsigned load_of_peers(const unsigned* from) {
#ifdef HBMARK_EMULATED
    return __atomic_load_n(from, __ATOMIC_ACQUIRE);
#else
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
#endif
}

// Waits until every rank has launched as far: what its kernels before this one wrote is there then. All threads of every block call it first. False
// where a rank did not in time, of which all ranks are told; nothing may be read then.
__device__ inline bool rank_barrier(const Group& group) {
    unsigned* own = group.words();
    const unsigned epoch = own[EPOCH] + 1;
    const int other = threadIdx.x;
    if (other < group.ranks && other != group.rank) {
        store_for_peers(group.words_of(other) + group.rank, epoch);
        const unsigned long long began = device_nanoseconds();
        while ((int)(load_of_peers(own + other) - epoch) < 0 && load_of_peers(own + LOST) == 0) {
            if (device_nanoseconds() - began > group.timeout_ns)
                for (int rank = 0; rank < group.ranks; ++rank) store_for_peers(group.words_of(rank) + LOST, other + 1);
            pause();
        }
    }
    __syncthreads();
    return load_of_peers(own + LOST) == 0;
}

// Behind rank_barrier(), by all threads of every block: the next barrier is another one.
__device__ inline bool end_barrier(const Group& group) {
    unsigned* own = group.words();
    const bool last = comes_last(own + BLOCKS_DONE, gridDim.x);
    if (last && threadIdx.x == 0) own[EPOCH] += 1;
    return last;
}
