// Instructions that kernels give as text, as functions of their operands in order; the build turns an `asm` into a call of the function
// with the instruction's name. Where there is none, the call is an error of the launch. The layouts are those of the PTX manual.
#pragma once

#include "cuda_runtime.h"

namespace hbmark::ptx {

// Each lane gives the address of a row of 16 bytes; of matrix m, lane l gets four bytes: row l / 4, column l % 4.
template <int MATRICES>
inline void load_matrices(const void* row, int* (&into)[MATRICES]) {
    const unsigned lane = emulation::lane();
    const unsigned char* rows = emulation::exchange(0xffffffffu, "ldmatrix", &row, sizeof row);
    for (int m = 0; m < MATRICES; ++m) {
        const int* from = emulation::brought<const int*>(rows, 8 * m + lane / 4);
        *into[m] = from[lane % 4];
    }
}
inline void ldmatrix_sync_aligned_m8n8_x2_b16(int& a, int& b, const void* row) {
    int* into[] = {&a, &b};
    load_matrices(row, into);
}
inline void ldmatrix_sync_aligned_m8n8_x4_b16(int& a, int& b, int& c, int& d, const void* row) {
    int* into[] = {&a, &b, &c, &d};
    load_matrices(row, into);
}

// 16 rows by 16 bytes times 16 bytes by 8 columns, `STEPS` times, added to 16 by 8 sums. Lane l holds the bytes l % 4 of rows l / 4 and l / 4 + 8
// and of column l / 4; sums 2 (l % 4) and the next, of both rows.
template <int STEPS>
struct Operands {
    int rows[2 * STEPS], column[STEPS];
};
template <int STEPS>
inline void multiply(int& a, int& b, int& c, int& d, const Operands<STEPS>& own) {
    static_assert(sizeof own <= emulation::LARGEST_VALUE);
    int* const sums[2][2] = {{&a, &b}, {&c, &d}};
    const unsigned lane = emulation::lane();
    const unsigned char* values = emulation::exchange(0xffffffffu, "mma", &own, sizeof own);
    if (lane == 0) emulation::asked().tensor_flops += 16 * 8 * 16 * STEPS;
    for (int part = 0; part < 4; ++part) {
        const auto& of_rows = emulation::brought<Operands<STEPS>>(values, lane / 4 * 4 + part);
        for (int side = 0; side < 2; ++side) {
            const auto& of_column = emulation::brought<Operands<STEPS>>(values, (lane % 4 * 2 + side) * 4 + part);
            for (int step = 0; step < STEPS; ++step)
                for (int half = 0; half < 2; ++half)
                    *sums[half][side] = __dp4a(of_rows.rows[2 * step + half], of_column.column[step], *sums[half][side]);
        }
    }
}
inline void mma_sync_aligned_m16n8k16_row_col_s32_s8_s8_s32(int& a, int& b, int& c, int& d, int x, int y, int column) {
    multiply<1>(a, b, c, d, {{x, y}, {column}});
}
inline void mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32(int& a, int& b, int& c, int& d, int x, int y, int z, int w, int column,
                                                            int next_column) {
    multiply<2>(a, b, c, d, {{x, y, z, w}, {column, next_column}});
}

}  // namespace hbmark::ptx
