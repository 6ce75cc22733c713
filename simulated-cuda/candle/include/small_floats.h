// Numbers of 16 bits as CUDA has them: conversions round to the nearest, ties to even, and arithmetic is that of f32, rounded once. cuda_fp16.h,
// cuda_bf16.h and cuda_fp8.h give them CUDA's names.
#pragma once

#include "cuda_runtime.h"

namespace hbmark::small {

// The f32 beside which no value of the double is lost when it is rounded again to fewer bits: the last bit tells of what was cut off.
inline float towards_odd(double x) {
    const float nearest = float(x);
    if (double(nearest) == x || std::isnan(nearest) || std::isinf(nearest)) return nearest;
    const bool away = std::fabs(double(nearest)) > std::fabs(x);
    return same_bits<float>((same_bits<uint32_t>(nearest) - away) | 1);
}

struct Half {
    static float widen(uint16_t bits) {
        const uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = uint32_t(bits & 0x7fff) << 13;
        // Subnormals become normal by the factor.
        const float scaled = same_bits<float>(rest) * 0x1p112f;
        const uint32_t result = (bits & 0x7c00) == 0x7c00 ? rest | 0x7f800000 : same_bits<uint32_t>(scaled);
        return same_bits<float>(result | sign);
    }
    static uint16_t narrow(float x) {
        const uint32_t bits = same_bits<uint32_t>(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
        if (size > 0x7f800000) return 0x7fff;
        if (size >= 0x477ff000) return sign | 0x7c00;
        if (size < 0x38800000) {
            // Subnormal: the sum's last bit is a subnormal's.
            const float sum = same_bits<float>(size) + 0.5f;
            return sign | uint16_t(same_bits<uint32_t>(sum) - 0x3f000000);
        }
        return sign | uint16_t((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
    }
};

struct Brain {
    static float widen(uint16_t bits) { return same_bits<float>(uint32_t(bits) << 16); }
    static uint16_t narrow(float x) {
        const uint32_t bits = same_bits<uint32_t>(x);
        if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
};

struct Raw {
    unsigned short x;
};

template <class FORMAT>
struct Number {
    uint16_t bits;

    Number() = default;
    Number(float x) : bits(FORMAT::narrow(x)) {}
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
    Number(T x) : bits(FORMAT::narrow(towards_odd(double(x)))) {}
    Number(Raw raw) : bits(raw.x) {}
    operator float() const { return FORMAT::widen(bits); }
    static Number of_bits(uint16_t bits) { return Number(Raw{bits}); }

    friend Number operator+(const Number& a, const Number& b) { return float(a) + float(b); }
    friend Number operator-(const Number& a, const Number& b) { return float(a) - float(b); }
    friend Number operator*(const Number& a, const Number& b) { return float(a) * float(b); }
    friend Number operator/(const Number& a, const Number& b) { return float(a) / float(b); }
    friend Number operator-(const Number& a) { return of_bits(a.bits ^ 0x8000); }
    friend Number& operator+=(Number& a, const Number& b) { return a = a + b; }
    friend Number& operator-=(Number& a, const Number& b) { return a = a - b; }
    friend Number& operator*=(Number& a, const Number& b) { return a = a * b; }
    friend Number& operator/=(Number& a, const Number& b) { return a = a / b; }
    friend bool operator==(const Number& a, const Number& b) { return float(a) == float(b); }
    friend bool operator!=(const Number& a, const Number& b) { return float(a) != float(b); }
    friend bool operator<(const Number& a, const Number& b) { return float(a) < float(b); }
    friend bool operator<=(const Number& a, const Number& b) { return float(a) <= float(b); }
    friend bool operator>(const Number& a, const Number& b) { return float(a) > float(b); }
    friend bool operator>=(const Number& a, const Number& b) { return float(a) >= float(b); }
};

template <class FORMAT>
struct alignas(4) Pair {
    Number<FORMAT> x, y;

    friend Pair operator+(const Pair& a, const Pair& b) { return {a.x + b.x, a.y + b.y}; }
    friend Pair operator-(const Pair& a, const Pair& b) { return {a.x - b.x, a.y - b.y}; }
    friend Pair operator*(const Pair& a, const Pair& b) { return {a.x * b.x, a.y * b.y}; }
};

// An f32's functions. Found by the type of their arguments.
#define HBMARK_OF_ONE(name, value)                                                      \
    template <class FORMAT>                                                             \
    inline Number<FORMAT> name(Number<FORMAT> a) {                                      \
        const float x = a;                                                              \
        return Number<FORMAT>(value);                                                   \
    }
HBMARK_OF_ONE(hsqrt, sqrtf(x))
HBMARK_OF_ONE(hrsqrt, 1.0f / sqrtf(x))
HBMARK_OF_ONE(hrcp, 1.0f / x)
HBMARK_OF_ONE(hcos, cosf(x))
HBMARK_OF_ONE(hsin, sinf(x))
HBMARK_OF_ONE(hlog, logf(x))
HBMARK_OF_ONE(hexp, expf(x))
HBMARK_OF_ONE(__habs, fabsf(x))
#undef HBMARK_OF_ONE

#define HBMARK_OF_TWO(name, pairs, value)                                               \
    template <class FORMAT>                                                             \
    inline Number<FORMAT> name(Number<FORMAT> a, Number<FORMAT> b) {                    \
        return value;                                                                   \
    }                                                                                   \
    template <class FORMAT>                                                             \
    inline Pair<FORMAT> pairs(Pair<FORMAT> a, Pair<FORMAT> b) {                         \
        return {name(a.x, b.x), name(a.y, b.y)};                                        \
    }
HBMARK_OF_TWO(__hadd, __hadd2, a + b)
HBMARK_OF_TWO(__hsub, __hsub2, a - b)
HBMARK_OF_TWO(__hmul, __hmul2, a* b)
HBMARK_OF_TWO(__hdiv, __h2div, a / b)
HBMARK_OF_TWO(__hmax, __hmax2, Number<FORMAT>(fmaxf(a, b)))
HBMARK_OF_TWO(__hmin, __hmin2, Number<FORMAT>(fminf(a, b)))
HBMARK_OF_TWO(__hmax_nan, __hmax2_nan, Number<FORMAT>(std::isnan(float(a)) || std::isnan(float(b)) ? NAN : fmaxf(a, b)))
HBMARK_OF_TWO(__hmin_nan, __hmin2_nan, Number<FORMAT>(std::isnan(float(a)) || std::isnan(float(b)) ? NAN : fminf(a, b)))
#undef HBMARK_OF_TWO

template <class FORMAT>
inline bool __hisnan(Number<FORMAT> a) { return std::isnan(float(a)); }
template <class FORMAT>
inline Number<FORMAT> __low2half(Pair<FORMAT> pair) { return pair.x; }
template <class FORMAT>
inline Number<FORMAT> __high2half(Pair<FORMAT> pair) { return pair.y; }
template <class FORMAT>
inline float __low2float(Pair<FORMAT> pair) { return pair.x; }
template <class FORMAT>
inline float __high2float(Pair<FORMAT> pair) { return pair.y; }

}  // namespace hbmark::small
