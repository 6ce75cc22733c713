// Tensor-core fragments: 16 × 8 × 16 products of bf16 or f16 with f32 sums, 16 × 8 × 32 and 16 × 8 × 16 of signed bytes with whole ones, and the loads that lay tiles
// out for them.
//
// Of a warp, lane t has of A (16 rows × 16) rows t / 4 and t / 4 + 8, columns 2 (t % 4) + {0, 1} and 8 more; of B (16 × 8) rows 2 (t % 4) + {0, 1} and
// 8 more, column t / 4; of C (16 × 8) rows t / 4 and t / 4 + 8, columns 2 (t % 4) + {0, 1}. Of bytes, A and B are twice as long and lie byte for byte
// alike: 4 (t % 4) + {0, 1, 2, 3} and 16 more. Source: PTX ISA, mma.m16n8k16, mma.m16n8k32 and ldmatrix.
#pragma once

#include "elements.cuh"

#ifdef HBMARK_EMULATED
// A and B of a lane as others see them: bytes, and numbers that who brings them has widened.
struct Fragments {
    unsigned a[4], b[2];
};
struct WideFragments {
    float2 a[4], b[2];
};
#endif

// c += a · b.
template <class T>
__device__ inline void multiply_tile(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef HBMARK_EMULATED
    WideFragments mine;
    for (int i = 0; i < 4; ++i) mine.a[i] = widen_pair<T>(a[i]);
    for (int i = 0; i < 2; ++i) mine.b[i] = widen_pair<T>(b[i]);
    const unsigned char* all = hbmark::emulation::exchange(ALL_LANES, "mma", &mine, sizeof mine);
    const int lane = threadIdx.x % WARP, column = 2 * (lane % 4);
    if (lane == 0) hbmark::emulation::asked().tensor_flops += 2 * 16 * 8 * 16;
    float sums[4] = {};
    for (int of_k = 0; of_k < 4; ++of_k) {
        const auto& left = hbmark::emulation::brought<WideFragments>(all, lane / 4 * 4 + of_k);
        for (int i = 0; i < 4; ++i) {
            const auto& right = hbmark::emulation::brought<WideFragments>(all, (column + i % 2) * 4 + of_k);
            for (int half = 0; half < 2; ++half) {
                const float2 x = left.a[i / 2 + half * 2], y = right.b[half];
                sums[i] += x.x * y.x + x.y * y.y;
            }
        }
    }
    for (int i = 0; i < 4; ++i) c[i] += sums[i];
#else
    if constexpr (sizeof(T) == 2 && T::IS_BF16) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
#endif
}

#ifdef HBMARK_EMULATED
// Of signed bytes, the words of A and B from `first` to `end`, four of each half.
inline void multiply_words(int (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], int first, int end) {
    Fragments mine;
    memcpy(mine.a, a, sizeof mine.a);
    memcpy(mine.b, b, sizeof mine.b);
    const unsigned char* all = hbmark::emulation::exchange(ALL_LANES, "mma of bytes", &mine, sizeof mine);
    const int lane = threadIdx.x % WARP;
    if (lane == 0) hbmark::emulation::asked().tensor_flops += 16 * 8 * 4 * (end - first);
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + (i / 2) * 8, column = 2 * (lane % 4) + i % 2;
        for (int word = first; word < end; ++word) {
            const unsigned left = hbmark::emulation::brought<Fragments>(all, row % 8 * 4 + word % 4).a[row / 8 + word / 4 * 2];
            const unsigned right = hbmark::emulation::brought<Fragments>(all, column * 4 + word % 4).b[word / 4];
            c[i] = __dp4a((int)left, (int)right, c[i]);
        }
    }
}
#endif

// c += a · b, of signed bytes.
__device__ inline void multiply_bytes(int (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef HBMARK_EMULATED
    multiply_words(c, a, b, 0, 8);
#else
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// The same of the first or the second half of what a has in columns and b in rows.
template <int HALF>
__device__ inline void multiply_half_of_bytes(int (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef HBMARK_EMULATED
    multiply_words(c, a, b, 4 * HALF, 4 * HALF + 4);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[2 * HALF]), "r"(a[2 * HALF + 1]), "r"(b[HALF]));
#endif
}

// Four 8 × 8 tiles of 16-bit elements: lanes 8 i .. 8 i + 8 name the rows of tile i, 16 bytes each; a lane gets of each tile the pair at row t / 4,
// columns 2 (t % 4) + {0, 1}. Transposed: the pair at rows 2 (t % 4) + {0, 1}, column t / 4.
template <bool TRANSPOSED>
__device__ inline void load_tiles(unsigned (&out)[4], const void* row) {
#ifdef HBMARK_EMULATED
    const unsigned char* all = hbmark::emulation::exchange(ALL_LANES, "ldmatrix", row, 16);
    const int lane = threadIdx.x % WARP;
    for (int tile = 0; tile < 4; ++tile) {
        const auto element = [&](int r, int c) { return (unsigned)((const unsigned short*)(all + (8 * tile + r) * hbmark::emulation::LARGEST_VALUE))[c]; };
        const int r = lane / 4, c = 2 * (lane % 4);
        out[tile] = TRANSPOSED ? element(c, r) | element(c + 1, r) << 16 : element(r, c) | element(r, c + 1) << 16;
    }
#else
    const unsigned at = (unsigned)__cvta_generic_to_shared(row);
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(at)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(at)
                     : "memory");
    }
#endif
}

// Rows of `VECTORS` 16-byte vectors in shared memory, turned so that eight rows of a tile lie in different banks.
template <int VECTORS>
__device__ inline unsigned char* swizzled(unsigned char* tile, int row, int vector) {
    static_assert(VECTORS % 8 == 0 || (VECTORS & (VECTORS - 1)) == 0, "eights, or a power of two");
    const int turn = VECTORS >= 8 ? row % 8 : row * VECTORS / 8 % VECTORS;
    return tile + ((size_t)row * VECTORS + (vector ^ turn)) * 16;
}
