// The input of a layer that drafts for a model: each row's embedding, and behind it the model's hidden state.
//
//   joined[row] = [norm(hidden[row]); norm(state)];   hidden[row] = 0
//
// Shapes: hidden [rows, columns] f32; state, norms [columns] f32, the norms null where there are none; joined [rows, 2 * columns] f32.
// Grid: (rows). Block: 256 threads. Bytes: the norms, and activations.

#include "linear.cuh"

HBMARK_KERNEL_BOUNDED(THREADS, 2, join_state, float* hidden, const float* state, const float* hidden_norm, const float* state_norm,
                      float norm_eps, float* joined, int rows, int columns) {
    SHARED(float[WARPS], of_hidden);
    SHARED(float[WARPS], of_state);
    launch_dependents();
    wait_for_dependency();
    float hidden_factor[1] = {1}, state_factor[1] = {1};
    if (hidden_norm) {
        const LinearInput in{hidden, nullptr, hidden_norm, norm_eps, rows, columns}, given{state, nullptr, state_norm, norm_eps, 1, columns};
        norm_factors<1>(given, 0, 1, of_state, state_factor);
        // Behind its barrier all of the row was read.
        norm_factors<1>(in, blockIdx.x, 1, of_hidden, hidden_factor);
    }
    float* row = hidden + (size_t)blockIdx.x * columns;
    float* out = joined + (size_t)blockIdx.x * 2 * columns;
    for (int column = threadIdx.x; column < columns; column += THREADS) {
        out[column] = row[column] * hidden_factor[0] * (hidden_norm ? hidden_norm[column] : 1.0f);
        out[columns + column] = state[column] * state_factor[0] * (hidden_norm ? state_norm[column] : 1.0f);
        row[column] = 0;
    }
}
