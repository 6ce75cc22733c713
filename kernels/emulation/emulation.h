// What CUDA means on a host: a thread is a fiber, barriers and warp collectives are meeting points, a few blocks run at a time.
//
// The same .cu sources are compiled as C++ with this header in place of the CUDA language, and run by emulation.cpp. The aim is right
// answers from right kernels and wrong answers from wrong ones:
// - a fiber runs until it meets others, and who runs next is drawn from a seed: code that lacks a barrier reads what is not there yet;
// - shared memory is poisoned between blocks, with bytes that are not a number as f32, f16 or bf16;
// - an asynchronous copy happens at once or when it is waited for, as the seed says;
// - blocks overlap, and come in any order: a result that is shared before all threads have left theirs is read half done;
// - a dependent launch may be begun before the kernel before it runs: what it reads of that kernel's results without the wait is not there yet;
// - threads that wait for each other for ever, or meet in different collectives, are an error that says who waits where.
// Time, caches, and the order in which writes become visible are not emulated: a missing fence is not found. What a launch asks of tensor cores, of
// L2 and of the clock is counted, for whoever models its time.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace hbmark::emulation {

struct Index {
    unsigned x = 1, y = 1, z = 1;
};

// What a kernel can ask about itself.
struct Place {
    Index thread, block, block_size, grid;
};
const Place& place();

// Waits for all threads of the block that have not returned. The site is the source line, by which a test can take a barrier away.
void barrier(const char* file, int line);

// Waits for the kernel before this one, where this one was begun early.
void wait_for_dependency();

// Lets all others run first, those of other host threads too: what is waited for is on another device.
void pause();

// The number of this thread in its warp.
unsigned lane();

// Waits for the lanes of `mask`, all of which bring so many `bytes`, at most LARGEST_VALUE, to the same collective; returns what each lane
// brought, LARGEST_VALUE bytes apart. Valid until the caller's next but one exchange.
constexpr size_t LARGEST_VALUE = 64;
const unsigned char* exchange(unsigned mask, const char* collective, const void* value, size_t bytes);

// Shared memory of the block: declared at a place in the source, or sized by the launch.
void* shared_static(const void* site, size_t bytes);
void* shared_dynamic();

// Copies that have happened when their group was waited for.
void copy_later(void* to, const void* from, size_t bytes, size_t zeros);
void commit_copies();
void wait_copies(int groups_left);

[[noreturn]] void fail(const char* format, ...);

// What a launch asked of a device, beside memory.
struct Asked {
    // Operations of tensor cores on 16 bits; those on bytes count half.
    uint64_t tensor_flops = 0;
    // Bytes read past the first cache.
    uint64_t l2_bytes = 0;
    // From the first reading of the clock to the last.
    uint64_t clock_ns = 0;
    // Words that other devices wait for.
    uint64_t meets = 0;
};
Asked& asked();

template <class T>
const T& brought(const unsigned char* values, unsigned lane) {
    return *reinterpret_cast<const T*>(values + lane * LARGEST_VALUE);
}

// A kernel by its name, with the kind of each parameter (p pointer, f float, u integer, s structure, and its size), so that a launch whose
// arguments do not fit is refused.
using Invoke = void (*)(void* const* arguments);
struct Kernel {
    const char* name;
    Invoke invoke;
    const char* const* kinds;
    unsigned parameters;
    const Kernel* next;
};
void add(Kernel* kernel);

// "s", and a size.
template <size_t BYTES>
struct KindOfStructure {
    static_assert(BYTES < 1000);
    char text[5] = {'s'};
    constexpr KindOfStructure() {
        int end = 1 + (BYTES > 9) + (BYTES > 99);
        for (size_t rest = BYTES; rest > 0; rest /= 10) text[end--] = char('0' + rest % 10);
    }
};
template <size_t BYTES>
inline constexpr KindOfStructure<BYTES> kind_of_structure{};

template <class T>
constexpr const char* kind() {
    if (std::is_pointer_v<T>) return "p8";
    if (std::is_floating_point_v<T>) return sizeof(T) == 4 ? "f4" : "f8";
    if (std::is_integral_v<T> || std::is_enum_v<T>) return sizeof(T) == 1 ? "u1" : sizeof(T) == 2 ? "u2" : sizeof(T) == 4 ? "u4" : "u8";
    return kind_of_structure<sizeof(T)>.text;
}

template <auto FUNCTION>
struct Registration;
template <class... Parameters, void (*FUNCTION)(Parameters...)>
struct Registration<FUNCTION> {
    explicit Registration(const char* name) {
        static const char* const kinds[] = {kind<std::remove_cv_t<Parameters>>()..., nullptr};
        static Kernel kernel{name, &Registration::invoke, kinds, sizeof...(Parameters), nullptr};
        add(&kernel);
    }
    static void invoke(void* const* arguments) { unpack(arguments, std::index_sequence_for<Parameters...>{}); }
    template <size_t... I>
    static void unpack([[maybe_unused]] void* const* arguments, std::index_sequence<I...>) {
        FUNCTION(*static_cast<std::remove_const_t<Parameters>*>(arguments[I])...);
    }
};

}  // namespace hbmark::emulation

// The language.
#define __device__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define HBMARK_KERNEL(name, ...)                                                                \
    extern "C" void name(__VA_ARGS__);                                                          \
    static const hbmark::emulation::Registration<&name> registration_of_##name(#name);          \
    extern "C" void name(__VA_ARGS__)
#define HBMARK_KERNEL_BOUNDED(threads, blocks, name, ...) HBMARK_KERNEL(name, __VA_ARGS__)
#define SHARED(type, name)                                                                      \
    static const char name##_site = 0;                                                          \
    As<type>& name = *static_cast<As<type>*>(hbmark::emulation::shared_static(&name##_site, sizeof(As<type>)))
#define SHARED_BYTES(name) unsigned char* name = static_cast<unsigned char*>(hbmark::emulation::shared_dynamic())

#define threadIdx (hbmark::emulation::place().thread)
#define blockIdx (hbmark::emulation::place().block)
#define blockDim (hbmark::emulation::place().block_size)
#define gridDim (hbmark::emulation::place().grid)
#define __syncthreads() hbmark::emulation::barrier(__FILE__, __LINE__)

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// A fiber is never interrupted, so every read sees what was written, and an atomic is a plain operation. Devices are host threads.
inline void __threadfence() {}
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
template <class T>
inline T __ldcs(const T* from) { return *from; }
template <class T>
inline T __ldcg(const T* from) {
    hbmark::emulation::asked().l2_bytes += sizeof(T);
    return *from;
}
template <class T>
inline void __stcs(T* to, T value) { *to = value; }
template <class T>
inline T atomicAdd(T* to, std::enable_if_t<true, T> value) {
    const T old = *to;
    *to = old + value;
    return old;
}
template <class T>
inline T atomicMax(T* to, std::enable_if_t<true, T> value) {
    const T old = *to;
    if (value > old) *to = value;
    return old;
}
inline unsigned atomicInc(unsigned* to, unsigned last) {
    const unsigned old = *to;
    *to = old >= last ? 0 : old + 1;
    return old;
}

// Lanes of a width, a power of two, are by themselves.
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    const unsigned lane = hbmark::emulation::lane(), other = lane ^ lanes;
    const unsigned char* values = hbmark::emulation::exchange(mask, "shfl_xor", &value, sizeof value);
    return hbmark::emulation::brought<T>(values, other <= (lane | (width - 1)) ? other : lane);
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    const unsigned self = hbmark::emulation::lane();
    const unsigned char* values = hbmark::emulation::exchange(mask, "shfl", &value, sizeof value);
    return hbmark::emulation::brought<T>(values, (self & ~(width - 1)) | (lane & (width - 1)));
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
    const char nothing = 0;
    hbmark::emulation::exchange(mask, "syncwarp", &nothing, 1);
}
// Bytes of two words, chosen by four bits each; the highest of them spreads the sign instead.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t both = uint64_t(high) << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned choice = selector >> 4 * i & 15;
        const uint8_t byte = uint8_t(both >> 8 * (choice & 7));
        result |= unsigned(choice & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << 8 * i;
    }
    return result;
}
inline int __dp4a(int a, int b, int sum) {
    for (int byte = 0; byte < 4; ++byte) sum += int8_t(a >> 8 * byte) * int8_t(b >> 8 * byte);
    return sum;
}
inline int __float2int_rn(float x) { return (int)std::nearbyint(x); }
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
template <class T>
inline T min(T a, T b) { return b < a ? b : a; }
template <class T>
inline T max(T a, T b) { return a < b ? b : a; }
