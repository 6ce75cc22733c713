// What kernels of others, beside ours, use of the CUDA language and its run time, as plain C++ for the emulation in kernels/emulation.
// Written from CUDA's documentation. What a kernel's launcher needs is declared so that it compiles; nothing launches from here.
#pragma once

#include <math.h>
#include <stdlib.h>

#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <type_traits>

#include "emulation/emulation.h"

#include "cassert"

#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define CUDART_VERSION 13000
#define CUDA_VERSION 13000

#ifndef __global__
#define __global__
#endif
#define __host__
#define __constant__
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __trap() hbmark::emulation::fail("a trap at %s, line %d", __FILE__, __LINE__)

// ---- Vectors -------------------------------------------------------------------------------------------------------------------------

struct alignas(4) char4 {
    signed char x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline char4 make_char4(signed char x, signed char y, signed char z, signed char w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

// ---- For launchers -------------------------------------------------------------------------------------------------------------------

using cudaStream_t = void*;
using cudaError_t = int;
constexpr int cudaFuncAttributeMaxDynamicSharedMemorySize = 8;
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
template <class F>
inline cudaError_t cudaFuncSetAttribute(F*, int, int) { return 0; }

// ---- Functions -----------------------------------------------------------------------------------------------------------------------

// Of two types the device takes what C++ makes of both, as an operator would.
template <class A, class B, class = std::enable_if_t<!std::is_same_v<A, B>>>
inline std::common_type_t<A, B> min(A a, B b) {
    const std::common_type_t<A, B> x = a, y = b;
    return y < x ? y : x;
}
template <class A, class B, class = std::enable_if_t<!std::is_same_v<A, B>>>
inline std::common_type_t<A, B> max(A a, B b) {
    const std::common_type_t<A, B> x = a, y = b;
    return x < y ? y : x;
}

template <class TO, class FROM>
inline TO same_bits(FROM from) {
    static_assert(sizeof(TO) == sizeof(FROM));
    TO to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline int __float_as_int(float x) { return same_bits<int>(x); }
inline float __int_as_float(int bits) { return same_bits<float>(bits); }
inline long long __double_as_longlong(double x) { return same_bits<long long>(x); }
inline double __longlong_as_double(long long bits) { return same_bits<double>(bits); }

inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.707106781186547524f); }
inline double normcdf(double x) { return 0.5 * erfc(-x * 0.707106781186547524); }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float fdividef(float x, float y) { return x / y; }

template <class T>
inline T __ldg(const T* from) { return *from; }

template <class T>
inline T atomicCAS(T* to, std::enable_if_t<true, T> expected, std::enable_if_t<true, T> value) {
    const T old = *to;
    if (old == expected) *to = value;
    return old;
}
template <class T>
inline T atomicMin(T* to, std::enable_if_t<true, T> value) {
    const T old = *to;
    if (value < old) *to = value;
    return old;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

inline int __reduce_add_sync(unsigned mask, int value) {
    const unsigned char* values = hbmark::emulation::exchange(mask, "reduce_add", &value, sizeof value);
    int sum = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) sum += hbmark::emulation::brought<int>(values, lane);
    return sum;
}
inline int __reduce_max_sync(unsigned mask, int value) {
    const unsigned char* values = hbmark::emulation::exchange(mask, "reduce_max", &value, sizeof value);
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) value = max(value, hbmark::emulation::brought<int>(values, lane));
    return value;
}

// Four bytes in a word, each by itself.
template <class F>
inline unsigned each_byte(unsigned a, unsigned b, F f) {
    unsigned result = 0;
    for (int byte = 0; byte < 32; byte += 8) result |= unsigned(uint8_t(f(uint8_t(a >> byte), uint8_t(b >> byte)))) << byte;
    return result;
}
inline unsigned __vsub4(unsigned a, unsigned b) {
    return each_byte(a, b, [](uint8_t a, uint8_t b) { return a - b; });
}
inline unsigned __vsubss4(unsigned a, unsigned b) {
    return each_byte(a, b, [](uint8_t a, uint8_t b) {
        const int difference = int8_t(a) - int8_t(b);
        return difference < -128 ? -128 : difference > 127 ? 127 : difference;
    });
}
inline unsigned __vcmpne4(unsigned a, unsigned b) {
    return each_byte(a, b, [](uint8_t a, uint8_t b) { return a != b ? 0xff : 0; });
}
