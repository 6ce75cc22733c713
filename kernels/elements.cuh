// Elements of weights and caches, and what they are multiplied in.
//
// bf16 and f16 travel as 16 bits; all sums are f32. Conversions round to nearest, ties to even, on the device and on the host.
#pragma once

#include "device.cuh"

struct Bf16 {
    static constexpr bool IS_BF16 = true;
    unsigned short bits;
};
struct F16 {
    static constexpr bool IS_BF16 = false;
    unsigned short bits;
};

// 8-bit floats (e4m3), 3 bits of mantissa, at most 448; no code is NaN.
struct E4m3 {
    static constexpr bool SCALED = false;
    unsigned char bits;
};
// Whole multiples of a scale that each vector has, from -127 to 127.
struct Code8 {
    static constexpr bool SCALED = true;
    signed char code;
};
constexpr float LARGEST_CODE = 127.0f;
// What vectors of an element are multiplied with, all alike: codes of e4m3 are widened to a 256th (four_codes).
template <class T>
__device__ constexpr float unit_of() {
    return 1.0f;
}
template <>
__device__ constexpr float unit_of<E4m3>() {
    return 256.0f;
}

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(Bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float widen(F16 x) {
#ifdef HBMARK_EMULATED
    const unsigned sign = (unsigned)(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 31, mantissa = x.bits & 0x3ff;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000 | mantissa << 13);
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * (float)mantissa * 0x1p-24f;
    return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
#endif
}

template <class T>
__device__ T narrow(float x);
template <>
__device__ inline float narrow<float>(float x) {
    return x;
}
template <>
__device__ inline Bf16 narrow<Bf16>(float x) {
#ifdef HBMARK_EMULATED
    const unsigned bits = __float_as_uint(x);
    if (x != x) return Bf16{0x7fff};
    return Bf16{(unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
#else
    Bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
#endif
}
template <>
__device__ inline F16 narrow<F16>(float x) {
#ifdef HBMARK_EMULATED
    const unsigned short sign = __float_as_uint(x) >> 16 & 0x8000;
    const float size = std::fabs(x);
    if (x != x) return F16{0x7fff};
    if (size >= 65520.0f) return F16{(unsigned short)(sign | 0x7c00)};
    // Below 2^-14 steps are 2^-24; above, one in the last of ten places.
    const int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
    const unsigned steps = (unsigned)std::nearbyint(std::ldexp(size, 10 - exponent));
    return F16{(unsigned short)(sign | (steps + ((unsigned)(exponent + 14) << 10)))};
#else
    F16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
#endif
}

template <class T>
__device__ constexpr bool has_scales() {
    if constexpr (sizeof(T) == 1) return T::SCALED;
    return false;
}

// To nearest, ties to even; what is too large is the largest, and what is not a number is 0.
template <>
__device__ inline E4m3 narrow<E4m3>(float x) {
    if (x != x) return E4m3{0};
    const float size = fminf(fabsf(x), 448.0f);
    // Below 2^-6 steps are those of 2^-6; above, one in the last of three places.
    const int exponent = max((int)(__float_as_uint(size) >> 23) - 127, -6);
    const int steps = (int)rintf(size * __uint_as_float((unsigned)(127 + 3 - exponent) << 23));
    return E4m3{(unsigned char)((__float_as_uint(x) >> 31 << 7) | (((exponent + 6) << 3) + steps))};
}
// Of a value that was multiplied with the inverse of its scale.
template <>
__device__ inline Code8 narrow<Code8>(float x) {
    return Code8{(signed char)(int)fminf(fmaxf(rintf(x), -LARGEST_CODE), LARGEST_CODE)};
}

// Two neighbours in one register, the first in the low half.
template <class T>
__device__ inline unsigned pair(float first, float second) {
    return (unsigned)narrow<T>(first).bits | (unsigned)narrow<T>(second).bits << 16;
}
template <class T>
__device__ inline float2 widen_pair(unsigned both) {
    return make_float2(widen(T{(unsigned short)both}), widen(T{(unsigned short)(both >> 16)}));
}

// Codes 0 and 2 of a word of e4m3, a 256th of their values: moved up by seven places a code is the f16 of that, subnormal ones too.
__device__ inline float2 alternate_codes(unsigned word) { return widen_pair<F16>((word & 0x007f007fu) << 7 | (word & 0x00800080u) << 8); }

// Four codes of a word as floats, less by unit_of<T>.
template <class T>
__device__ inline void four_codes(unsigned word, float (&out)[4]);
template <>
__device__ inline void four_codes<E4m3>(unsigned word, float (&out)[4]) {
    const float2 even = alternate_codes(word), odd = alternate_codes(word >> 8);
    out[0] = even.x, out[1] = odd.x, out[2] = even.y, out[3] = odd.y;
}
template <>
__device__ inline void four_codes<Code8>(unsigned word, float (&out)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = (float)(signed char)(word >> 8 * i);
}

// Two products of bf16, subnormal ones too.
__device__ inline unsigned multiply_pair(unsigned a, unsigned b) {
#ifdef HBMARK_EMULATED
    const float2 x = widen_pair<Bf16>(a), y = widen_pair<Bf16>(b);
    return pair<Bf16>(x.x * y.x, x.y * y.y);
#else
    unsigned product;
    // Plus -0: 0 keeps its sign.
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
    return product;
#endif
}

// Eight elements, at 16 bytes (32 for f32) that are aligned.
template <class T>
__device__ inline void load8(const T* from, float (&out)[8]) {
    const uint4 v = *(const uint4*)from;
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 two = widen_pair<T>(words[i]);
        out[2 * i] = two.x;
        out[2 * i + 1] = two.y;
    }
}
template <>
__device__ inline void load8<float>(const float* from, float (&out)[8]) {
    const float4 a = *(const float4*)from, b = *(const float4*)(from + 4);
    const float all[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = all[i];
}

constexpr float LOG2_E = 1.44269504088896f;

// How a gate meets what goes up: by silu; by gelu as tanh, where (1 + tanh(y)) / 2 is 1 / (1 + e^(-2y)); or as gpt-oss has it, both clamped.
enum GateFunction { SILU = 0, GELU_TANH = 1, CLAMPED_SWIGLU = 2 };
struct Gate {
    int function;
    float limit;
};
__device__ inline float gated(const Gate& with, float gate, float up) {
    float x = gate;
    if (with.function == GELU_TANH) x = 1.5957691216f * (gate + 0.044715f * gate * gate * gate);
    if (with.function == CLAMPED_SWIGLU) {
        // By comparisons: what is not a number stays one.
        gate = gate > with.limit ? with.limit : gate;
        up = (up > with.limit ? with.limit : up < -with.limit ? -with.limit : up) + 1.0f;
        x = 1.702f * gate;
    }
    return gate / (1.0f + expf(-x)) * up;
}

// A value bent towards a cap, where that is above 0.
__device__ inline float bent(float x, float softcap) { return softcap > 0 ? softcap * tanhf(x / softcap) : x; }
