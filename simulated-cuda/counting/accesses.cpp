// Counts what kernels touch of a device's memory.
//
// Kernels are compiled with -fsanitize=thread and alignment, which call a function in front of every access, and one where its address is not a
// multiple of what its type demands; those functions are here, and nothing of the sanitizers is linked. A launch counts each sector of 32 bytes once as read and once as written, however often and by how many threads it is
// touched: what must come from memory where the caches hold what a kernel uses again. An access that is not aligned ends the launch, as on a
// device.

#include "emulation/emulation.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <utility>
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

constexpr unsigned DEVICES = 8, SLOTS = 2 * DEVICES;

// Where the memory of each device lies, and from the first of them to the last.
struct Range {
    uintptr_t base = 0;
    size_t bytes = 0;
};
Range devices[DEVICES], all;

// Of each slot in which a kernel can be under way: what it read, what it wrote, and what it touched of other devices.
Sectors touched[SLOTS][2];
uint64_t of_peers[SLOTS];
unsigned slot = 0, peers = 0;
Range watched;

// Memory of another device, or none at all.
__attribute__((noinline)) void count_of_peer(uintptr_t address, size_t bytes) {
    for (unsigned device = 0; device < DEVICES; ++device) {
        if (address - devices[device].base >= devices[device].bytes) continue;
        if (!(peers >> device & 1)) hbmark::emulation::fail("illegal address %#zx of device %u", size_t(address), device);
        of_peers[slot] += bytes;
        return;
    }
}

template <bool WRITE>
inline void count(const void* at, size_t bytes) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(at), offset = address - watched.base;
    if (offset < watched.bytes) touched[slot][WRITE].touch(offset, bytes);
    else if (address - all.base < all.bytes) count_of_peer(address, bytes);
}

}  // namespace

// What asynchronous copies read: the emulation makes them, and it is not watched.
namespace hbmark::emulation {
extern void (*on_copy)(const void* from, size_t bytes);
}

extern "C" {

// Takes note of where the memory of a device lies.
void hbmark_accesses_device(unsigned index, uintptr_t base, size_t bytes) {
    devices[index % DEVICES] = {base, bytes};
    const uintptr_t end = std::max(all.base + all.bytes, base + bytes);
    all.base = all.bytes == 0 ? base : std::min(all.base, base);
    all.bytes = end - all.base;
}

// Counts what a device touches in one of the slots, from now on; `peer_bits` are the devices whose memory it may touch. Addresses are aligned to more
// than any access.
void hbmark_accesses_watch(unsigned index, unsigned peer_bits, unsigned in_slot) {
    watched = devices[index % DEVICES];
    peers = peer_bits;
    slot = in_slot % SLOTS;
    for (Sectors& sectors : touched[slot]) {
        if (sectors.bits) continue;
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void* bits = mmap(nullptr, (watched.bytes >> SECTOR_SHIFT) / 8 + 8, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (bits == MAP_FAILED) {
            std::fputs("simulated CUDA device: no addresses left to count accesses\n", stderr);
            std::abort();
        }
        sectors.bits = static_cast<uint64_t*>(bits);
    }
    hbmark::emulation::on_copy = count<false>;
}

// Bytes read and written in a slot since it was last asked, and those of other devices.
void hbmark_accesses_take(unsigned of_slot, uint64_t* read, uint64_t* written, uint64_t* peer_bytes) {
    *read = touched[of_slot % SLOTS][0].take();
    *written = touched[of_slot % SLOTS][1].take();
    *peer_bytes = std::exchange(of_peers[of_slot % SLOTS], 0);
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
// What devices tell each other.
uint32_t __tsan_atomic32_load(const volatile uint32_t* at, int) {
    count<false>(const_cast<const uint32_t*>(at), 4);
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}
void __tsan_atomic32_store(volatile uint32_t* at, uint32_t value, int) {
    count<true>(const_cast<const uint32_t*>(at), 4);
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
}
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
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
