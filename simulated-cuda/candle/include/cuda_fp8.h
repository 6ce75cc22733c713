// Four bits of exponent and three of fraction, no infinity: what is too large becomes the largest.
#pragma once

#include "cuda_fp16.h"

enum __nv_fp8_interpretation_t { __NV_E4M3 };

struct __nv_fp8_e4m3 {
    unsigned char __x;

    __nv_fp8_e4m3() = default;
    template <class T, class = std::enable_if_t<std::is_convertible_v<T, float>>>
    explicit __nv_fp8_e4m3(T x) : __x(narrow(std::is_same_v<T, double> ? hbmark::small::towards_odd(double(x)) : float(x))) {}
    explicit operator float() const { return widen(__x); }

    static float widen(unsigned char bits) {
        const int exponent = bits >> 3 & 15, fraction = bits & 7;
        const float size = (bits & 0x7f) == 0x7f ? NAN : exponent == 0 ? ldexpf(fraction, -9) : ldexpf(8 + fraction, exponent - 10);
        return bits & 0x80 ? -size : size;
    }
    static unsigned char narrow(float x) {
        const unsigned char sign = std::signbit(x) ? 0x80 : 0;
        const float size = fabsf(x);
        if (std::isnan(x)) return 0x7f;
        if (size >= 448.0f) return sign | 0x7e;
        if (size == 0.0f) return sign;
        // The step between neighbours is a subnormal's at least.
        int exponent = 0;
        frexpf(size, &exponent);
        const int step = exponent - 4 < -9 ? -9 : exponent - 4;
        const int steps = int(nearbyintf(ldexpf(size, -step)));
        // Sixteen steps are eight of the next exponent: the carry does that.
        return sign | (unsigned char)(step == -9 ? steps : (step + 9) * 8 + steps);
    }
};

inline __half_raw __nv_cvt_fp8_to_halfraw(unsigned char bits, __nv_fp8_interpretation_t) {
    return {__half(__nv_fp8_e4m3::widen(bits)).bits};
}
