#pragma once

#include "small_floats.h"

using __half_raw = hbmark::small::Raw;
using __half = hbmark::small::Number<hbmark::small::Half>;
using __half2 = hbmark::small::Pair<hbmark::small::Half>;
using half = __half;
using half2 = __half2;

inline float __half2float(__half x) { return x; }
inline __half __float2half(float x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline __half __double2half(double x) { return x; }
inline __half __int2half_rn(int x) { return x; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short bits) { return __half::of_bits(bits); }
inline __half2 make_half2(__half x, __half y) { return {x, y}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline __half2 __float22half2_rn(float2 v) { return {v.x, v.y}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
