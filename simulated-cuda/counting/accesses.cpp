// Counts what kernels touch of a device's memory.
//
// Kernels are compiled with -fsanitize=thread and alignment, which call a function in front of every access, and one where its address is not a
// multiple of what its type demands; those functions are here, and nothing of the sanitizers is linked. A launch counts each sector of 32 bytes once as read and once as written, however often and by how many threads it is
// touched: what must come from memory where the caches hold what a kernel uses again. An access that is not aligned ends the launch, as on a
// device.

#include "emulation/emulation.h"

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr unsigned SECTOR_SHIFT = 5;

// A bit for each sector of the watched addresses. Pages of it that no launch touches cost nothing.
struct Sectors {
    uint64_t* bits = nullptr;
    std::vector<size_t> words;
    uint64_t count = 0;

    void touch(uintptr_t offset, size_t bytes) {
        for (uintptr_t sector = offset >> SECTOR_SHIFT; sector <= (offset + bytes - 1) >> SECTOR_SHIFT; ++sector) {
            uint64_t& word = bits[sector / 64];
            const uint64_t bit = uint64_t(1) << sector % 64;
            if (word & bit) continue;
            if (word == 0) words.push_back(sector / 64);
            word |= bit;
            ++count;
        }
    }
    uint64_t take() {
        for (size_t word : words) bits[word] = 0;
        words.clear();
        const uint64_t bytes = count << SECTOR_SHIFT;
        count = 0;
        return bytes;
    }
};

// Of each slot in which a kernel can be under way: what it read, and what it wrote.
Sectors touched[2][2];
unsigned slot = 0;
uintptr_t watched = 0;
size_t watched_bytes = 0;

template <bool WRITE>
inline void count(const void* address, size_t bytes) {
    const uintptr_t offset = reinterpret_cast<uintptr_t>(address) - watched;
    if (offset < watched_bytes) touched[slot][WRITE].touch(offset, bytes);
}

}  // namespace

// What asynchronous copies read: the emulation makes them, and it is not watched.
namespace hbmark::emulation {
extern void (*on_copy)(const void* from, size_t bytes);
}

extern "C" {

// Counts accesses from `base` on in one of two slots, from now on. The addresses are aligned to more than any access.
void hbmark_accesses_watch(uintptr_t base, size_t bytes, unsigned in_slot) {
    for (auto& of_slot : touched) {
        for (Sectors& sectors : of_slot) {
            if (sectors.bits) continue;
            const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
            void* bits = mmap(nullptr, (bytes >> SECTOR_SHIFT) / 8 + 8, PROT_READ | PROT_WRITE, flags, -1, 0);
            if (bits == MAP_FAILED) {
                std::fputs("simulated CUDA device: no addresses left to count accesses\n", stderr);
                std::abort();
            }
            sectors.bits = static_cast<uint64_t*>(bits);
        }
    }
    hbmark::emulation::on_copy = count<false>;
    watched = base;
    watched_bytes = bytes;
    slot = in_slot % 2;
}

// Bytes read and written in a slot since it was last asked.
void hbmark_accesses_take(unsigned of_slot, uint64_t* read, uint64_t* written) {
    *read = touched[of_slot % 2][0].take();
    *written = touched[of_slot % 2][1].take();
}

// What the compiler calls.
#define ACCESS(bytes)                                                        \
    void __tsan_read##bytes(void* at) { count<false>(at, bytes); }           \
    void __tsan_write##bytes(void* at) { count<true>(at, bytes); }           \
    void __tsan_unaligned_read##bytes(void* at) { count<false>(at, bytes); } \
    void __tsan_unaligned_write##bytes(void* at) { count<true>(at, bytes); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* at, size_t bytes) {
    if (bytes > 0) count<false>(at, bytes);
}
void __tsan_write_range(void* at, size_t bytes) {
    if (bytes > 0) count<true>(at, bytes);
}
// Of the guards of static variables.
uint8_t __tsan_atomic8_load(const volatile uint8_t* at, int) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
void __ubsan_handle_type_mismatch_v1_abort(void*, uintptr_t address) {
    hbmark::emulation::fail("misaligned address %#zx", size_t(address));
}
}
