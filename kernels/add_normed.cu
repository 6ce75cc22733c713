// The norm of a projection's sums, added to the hidden states.
//
//   hidden[row][c] += sums[row][c] * norm factor * norm[c];   sums[row][c] = 0
//
// Shapes: sums, hidden [rows, columns] f32; norm [columns] f32. The sums are those of project_add.cu, which adds to what is there: they are 0
// before it and after this. Grid: (rows). Block: 256 threads. Bytes: the norm, and activations.

#include "linear.cuh"

HBMARK_KERNEL_BOUNDED(THREADS, 2, add_normed, float* sums, const float* norm, float norm_eps, float* hidden, int rows, int columns) {
    SHARED(float[WARPS], scratch);
    launch_dependents();
    for (int column = threadIdx.x * 32; column < columns; column += THREADS * 32) prefetch(norm + column);
    wait_for_dependency();
    const LinearInput in{sums, nullptr, norm, norm_eps, rows, columns};
    float factors[1];
    // Behind its barrier all sums of the row were read.
    norm_factors<1>(in, blockIdx.x, 1, scratch, factors);
    const size_t first = (size_t)blockIdx.x * columns;
    for (int column = threadIdx.x; column < columns; column += THREADS) {
        hidden[first + column] += sums[first + column] * factors[0] * norm[column];
        sums[first + column] = 0;
    }
}
