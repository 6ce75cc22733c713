// Sums over the ranks of a tensor parallel group, in memory of all its GPUs.
//
//   all_reduce:      hidden[i] += Σ_r sums_r[i]                        every rank reads all of it: few bytes
//   reduce_slice:    sums_own[i] = Σ_r sums_r[i],  i in the own slice   every rank sums its part,
//   gather_slices:   hidden[i] += sums_owner(i)[i]                      and then has those of the others: many bytes
//   first_of_ranks:  next[s] = the first largest logit of all ranks, whose parts of the vocabulary begin at `first`
//
// Shapes: hidden [count] f32; sums [count] f32, at `sums` bytes of each rank's peer buffer (peers.cuh), zeros before a product adds to them. Two such sums
// take turns: while one is read, the kernel that reads it zeroes the other, at `other`, which by then all ranks have read. slot: which of the two.
// logits [rows, outputs] f32, next [rows], and keys [rows] of 64 bits at `keys` bytes of each peer buffer. Sums are in the order of ranks, so that all have the
// same bits. Grid: (blocks), first_of_ranks: (1). Block: 256 threads. Bytes between GPUs: 4 * count * (ranks - 1) read by each rank, or twice
// 4 * count * (ranks - 1) / ranks.

#include "heads.cuh"
#include "peers.cuh"

struct Sums {
    unsigned long long sums, other;
    int slot;
    unsigned count;
};

__device__ inline float4* vectors_of(const Group& group, int rank, unsigned long long at) { return (float4*)(group.buffers[rank] + at); }

__device__ inline void add(float4& to, const float4& value) { to.x += value.x, to.y += value.y, to.z += value.z, to.w += value.w; }

__device__ inline float4 sum_of_ranks(const Group& group, const Sums& sums, size_t vector) {
    float4 sum = __ldcg(vectors_of(group, 0, sums.sums) + vector);
    for (int rank = 1; rank < group.ranks; ++rank) add(sum, __ldcg(vectors_of(group, rank, sums.sums) + vector));
    return sum;
}

// The other sum becomes zeros, as far as it is not, and this one is noted as used.
__device__ inline void turn(const Group& group, const Sums& sums) {
    unsigned* own = group.words();
    float4* other = vectors_of(group, group.rank, sums.other);
    const unsigned used = own[USED + 1 - sums.slot];
    for (size_t vector = global_thread(); vector < used / 4; vector += global_threads()) other[vector] = make_float4(0, 0, 0, 0);
    if (end_barrier(group) && threadIdx.x == 0) own[USED + sums.slot] = sums.count, own[USED + 1 - sums.slot] = 0;
}

HBMARK_KERNEL_BOUNDED(THREADS, 2, all_reduce, const unsigned long long* buffers, int rank, int ranks, unsigned long long timeout_ns,
                      unsigned long long at, unsigned long long other, int slot, unsigned count, float* hidden) {
    launch_dependents();
    wait_for_dependency();
    const Group group{buffers, rank, ranks, timeout_ns};
    const Sums sums{at, other, slot, count};
    if (!rank_barrier(group)) return;
    for (size_t vector = global_thread(); vector < count / 4; vector += global_threads())
        add(((float4*)hidden)[vector], sum_of_ranks(group, sums, vector));
    turn(group, sums);
}

HBMARK_KERNEL_BOUNDED(THREADS, 2, reduce_slice, const unsigned long long* buffers, int rank, int ranks, unsigned long long timeout_ns,
                      unsigned long long at, unsigned long long other, int slot, unsigned count) {
    launch_dependents();
    wait_for_dependency();
    const Group group{buffers, rank, ranks, timeout_ns};
    const Sums sums{at, other, slot, count};
    if (!rank_barrier(group)) return;
    const size_t slice = (count / 4 + ranks - 1) / ranks, end = min((size_t)count / 4, slice * (rank + 1));
    for (size_t vector = slice * rank + global_thread(); vector < end; vector += global_threads())
        vectors_of(group, rank, at)[vector] = sum_of_ranks(group, sums, vector);
    end_barrier(group);
}

HBMARK_KERNEL_BOUNDED(THREADS, 2, gather_slices, const unsigned long long* buffers, int rank, int ranks, unsigned long long timeout_ns,
                      unsigned long long at, unsigned long long other, int slot, unsigned count, float* hidden) {
    launch_dependents();
    wait_for_dependency();
    const Group group{buffers, rank, ranks, timeout_ns};
    const Sums sums{at, other, slot, count};
    if (!rank_barrier(group)) return;
    const size_t slice = (count / 4 + ranks - 1) / ranks;
    for (size_t vector = global_thread(); vector < count / 4; vector += global_threads())
        add(((float4*)hidden)[vector], __ldcg(vectors_of(group, (int)(vector / slice), at) + vector));
    turn(group, sums);
}

HBMARK_KERNEL_BOUNDED(THREADS, 2, first_of_ranks, const unsigned long long* buffers, int rank, int ranks, unsigned long long timeout_ns,
                      unsigned long long keys, const float* logits, unsigned* next, int first, int rows, int outputs) {
    launch_dependents();
    wait_for_dependency();
    const Group group{buffers, rank, ranks, timeout_ns};
    unsigned long long* own = (unsigned long long*)(buffers[rank] + keys);
    for (int row = threadIdx.x; row < rows; row += THREADS)
        own[row] = in_order(logits[(size_t)row * outputs + next[row]], first + (int)next[row]);
    __threadfence_system();
    __syncthreads();
    const bool met = rank_barrier(group);
    for (int row = threadIdx.x; row < rows; row += THREADS) {
        unsigned long long best = NO_LOGIT;
        for (int other = 0; met && other < ranks; ++other)
            best = max(best, __ldcg((const unsigned long long*)(buffers[other] + keys) + row));
        // What no vocabulary has says that a rank was lost.
        next[row] = met ? ~(unsigned)best : 0xffffffffu;
    }
    if (met) end_barrier(group);
}
