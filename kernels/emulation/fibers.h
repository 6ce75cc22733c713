// Schedules the threads of an emulated launch, for emulation.cpp alone: each has a stack of its own, a fiber. A few blocks are resident at a time, their
// fibers started together; a fiber runs until it must wait, and the next one, of any resident block, is drawn from the seed.

#pragma once

#include "emulation.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <set>
#include <string>
#include <utility>
#include <vector>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace hbmark::emulation {

// ---- Switching stacks ----------------------------------------------------------------------------------------------------------------

#if defined(__x86_64__)
// Saves what the calling convention says a callee keeps, on the old stack, and takes the same from the new one.
extern "C" void hbmark_switch(void** save, void* load);
asm(R"(
.text
.type hbmark_switch,@function
hbmark_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size hbmark_switch,.-hbmark_switch
)");
constexpr size_t ENTRY_WORD = 6, FRAME_WORDS = 8;
#elif defined(__aarch64__)
extern "C" void hbmark_switch(void** save, void* load);
asm(R"(
.text
.type hbmark_switch,%function
hbmark_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size hbmark_switch,.-hbmark_switch
)");
constexpr size_t ENTRY_WORD = 11, FRAME_WORDS = 20;
#endif

#if defined(__x86_64__) || defined(__aarch64__)
struct Context {
    void* stack_pointer = nullptr;
    void prepare(char* stack, size_t bytes, void (*entry)()) {
        void** top = reinterpret_cast<void**>(stack + bytes) - FRAME_WORDS;
        std::memset(top, 0, FRAME_WORDS * sizeof(void*));
        top[ENTRY_WORD] = reinterpret_cast<void*>(entry);
        stack_pointer = top;
    }
    static void change(Context& from, Context& to) { hbmark_switch(&from.stack_pointer, to.stack_pointer); }
};
#else
struct Context {
    ucontext_t context;
    void prepare(char* stack, size_t bytes, void (*entry)()) {
        getcontext(&context);
        context.uc_stack.ss_sp = stack;
        context.uc_stack.ss_size = bytes;
        context.uc_link = nullptr;
        makecontext(&context, entry, 0);
    }
    static void change(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
};
#endif

// ---- Blocks of fibers ----------------------------------------------------------------------------------------------------------------

constexpr size_t STACK_BYTES = 128 << 10, MOST_THREADS = 1024, RESIDENT_BLOCKS = 3, STATIC_SHARED_BYTES = 64 << 10;
constexpr size_t CACHE_LINE = 64;
constexpr unsigned char POISON = 0xff;
constexpr uint64_t STACK_MARK = 0x68626d61726b2121;

struct Copy {
    void* to;
    const void* from;
    size_t bytes, zeros;
};

enum class State { ready, at_barrier, in_exchange, at_dependency, returned };

// How far a launch has come: to its end, to a fault, to where all threads that can run wait for the kernel before, or for another device.
enum class Progress { ended, failed, waiting, paused };

struct Block;

struct Fiber {
    Context context;
    Block* block = nullptr;
    char* stack = nullptr;
    Place place;
    State state = State::ready;
    const char* waits_for = "";
    int line = 0;
    unsigned exchanges = 0;
    // Copies under way, in the order they were asked for, and where each group of them ends.
    std::vector<Copy> copies;
    std::vector<size_t> groups;
};

// A collective that lanes of a warp are meeting in. Two take turns: a lane that is ahead brings its next value before a lane behind it
// has read the last.
struct Meeting {
    unsigned mask = 0, arrived = 0;
    const char* collective = nullptr;
    alignas(16) unsigned char values[32][LARGEST_VALUE];
};
struct Warp {
    Meeting meetings[2];
};

// A block and its shared memory.
struct Block {
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<unsigned char> shared;
    size_t shared_used = 0;
    std::vector<std::pair<const void*, void*>> shared_sites;
    size_t at_barrier = 0, live = 0;
    // Threads that run only where no others can, to the next barrier.
    size_t first_straggler = 0, last_straggler = 0;
};

struct Random {
    uint64_t state;
    uint64_t next() {  // splitmix64
        uint64_t z = (state += 0x9e3779b97f4a7c15);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }
    // Of fewer than 2^32, without a division: it is drawn at every turn.
    size_t below(size_t end) { return (next() >> 32) * end >> 32; }
};

struct Machine {
    char* stacks = nullptr;
    Block blocks[RESIDENT_BLOCKS];
    size_t resident_blocks = RESIDENT_BLOCKS;
    std::vector<Fiber*> ready, late;
    // Whether threads are left behind on the way to a barrier: what nothing makes the others wait for, they then miss.
    bool has_stragglers = false;
    // The next fiber is drawn from so many that became ready last: a few of them leave others far behind.
    size_t drawn_from = SIZE_MAX;
    size_t shared_dynamic_bytes = 0;
    Fiber* current = nullptr;
    Context scheduler;
    Random random{0};
    const Kernel* kernel = nullptr;
    void* const* arguments = nullptr;
    Index grid, block_size;
    // Blocks in the order in which they are started.
    std::vector<size_t> order;
    size_t started = 0;
    bool previous_ended = true;
    // Whether a kernel that looks at the clock sees the host's, or one that advances as it is looked at.
    bool real_time = false;
    Asked asked;
    unsigned long long clock_began = 0;
    std::vector<Fiber*> at_dependency, paused;
    std::string error;
    std::set<std::pair<std::string, int>> barriers;
    std::pair<const char*, int> last_barrier{nullptr, 0};
    std::pair<std::string, int> without{"", 0};

    static constexpr size_t STACKS_BYTES = RESIDENT_BLOCKS * MOST_THREADS * STACK_BYTES;
    ~Machine() {
        if (stacks) munmap(stacks, STACKS_BYTES);
    }
    bool has_stacks() {
        if (stacks) return true;
        void* mapped = mmap(nullptr, STACKS_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapped == MAP_FAILED) return false;
        stacks = static_cast<char*>(mapped);
        return true;
    }
    void wake(Fiber& fiber) {
        fiber.state = State::ready;
        const Block& block = *fiber.block;
        const size_t thread = &fiber - block.fibers.data();
        (block.first_straggler <= thread && thread < block.last_straggler ? late : ready).push_back(&fiber);
    }
    void draw_stragglers(Block& block) {
        const size_t threads = block.fibers.size();
        const bool some = has_stragglers && random.below(2);
        block.first_straggler = some ? random.below(threads) : 0;
        block.last_straggler = some ? block.first_straggler + 1 + random.below(threads - block.first_straggler) : 0;
    }
    // The fiber that runs next, or none: all have ended, wait, or one has failed.
    Fiber* draw() {
        if (!error.empty()) return nullptr;
        if (ready.empty()) {
            // Who came last: a block that was left behind stays behind.
            if (late.empty()) return nullptr;
            ready.push_back(late.back());
            late.pop_back();
        }
        const size_t among = std::min(ready.size(), drawn_from);
        std::swap(ready[ready.size() - 1 - random.below(among)], ready.back());
        Fiber* drawn = ready.back();
        ready.pop_back();
        return drawn;
    }
    // From fiber to fiber: by way of the scheduler would be twice as many switches.
    void yield() {
        Fiber* self = current;
        // The stacks of a block that has ended are those of the next one, which nobody on one of them can start.
        const bool has_ended = self->block->live == 0;
        Fiber* next = has_ended ? nullptr : draw();
        if (next == self) return;
        if (next) current = next;
        Context::change(self->context, next ? next->context : scheduler);
    }
    void release_barrier(Block& block) {
        if (block.live == 0 || block.at_barrier < block.live) return;
        block.at_barrier = 0;
        draw_stragglers(block);
        // From any thread on, so that who became ready last is not always the same.
        const size_t count = block.fibers.size(), first = random.below(count);
        for (size_t i = 0; i < count; ++i) {
            Fiber& fiber = block.fibers[(first + i) % count];
            if (fiber.state == State::at_barrier) wake(fiber);
        }
    }
    void start(Block& block, Index index);
    void start_next(Block& block);
    Progress begin();
    Progress proceed();
    Progress finish();
    Progress resume();
    void describe_deadlock();
};

// For callers of the driver's ABI there are two for each device, so that a kernel can be begun while the one before runs, and be run on by another host
// thread; every other host thread has its own.
constexpr unsigned SLOTS = 16;
static Machine* machines() {
    static Machine all[SLOTS];
    return all;
}
static Machine& own_machine() {
    static thread_local Machine own;
    return own;
}
// The one that runs. By a pointer that needs no initialisation, which kernels ask for at every turn; a function, so that no fiber keeps an address
// of another host thread's machine.
static thread_local Machine* active = nullptr;
static Machine& activate(unsigned slot) { return *(active = &machines()[slot % SLOTS]); }
__attribute__((noinline)) Machine& machine() { return active ? *active : own_machine(); }

static void fiber_main() {
    Machine& m = machine();
    m.kernel->invoke(m.arguments);
    Fiber& self = *m.current;
    const bool is_first = &self == self.block->fibers.data();
    if (is_first && *reinterpret_cast<const uint64_t*>(self.stack) != STACK_MARK) m.error = "the stack of an emulated thread overflowed";
    self.state = State::returned;
    self.block->live -= 1;
    m.release_barrier(*self.block);
    m.yield();
    __builtin_unreachable();
}

void Machine::start(Block& block, Index index) {
    const size_t threads = size_t(block_size.x) * block_size.y * block_size.z;
    // What is declared is poisoned when the first thread comes by: few kernels have that much.
    block.shared.resize(shared_dynamic_bytes + STATIC_SHARED_BYTES);
    std::memset(block.shared.data(), POISON, shared_dynamic_bytes);
    block.shared_sites.clear();
    block.shared_used = shared_dynamic_bytes;
    block.fibers.resize(threads);
    block.warps.resize((threads + 31) / 32);
    for (Warp& warp : block.warps)
        for (Meeting& meeting : warp.meetings) meeting.arrived = 0;
    block.at_barrier = 0;
    block.live = threads;
    draw_stragglers(block);
    for (size_t thread = 0; thread < threads; ++thread) {
        Fiber& fiber = block.fibers[thread];
        const unsigned x = thread % block_size.x, y = thread / block_size.x % block_size.y, z = thread / block_size.x / block_size.y;
        fiber.block = &block;
        fiber.stack = stacks + ((&block - blocks) * MOST_THREADS + thread) * STACK_BYTES;
        fiber.place = Place{{x, y, z}, index, block_size, grid};
        fiber.exchanges = 0;
        fiber.copies.clear();
        fiber.groups.clear();
        // The first speaks for all, which take about as much: a page of each would be as many pages to touch.
        if (thread == 0) std::memcpy(fiber.stack, &STACK_MARK, sizeof STACK_MARK);
        // What is in use of the stacks begins in different lines of the cache, or all would compete for a few.
        fiber.context.prepare(fiber.stack, STACK_BYTES - thread % 64 * 5 * CACHE_LINE, fiber_main);
        wake(fiber);
    }
}

void Machine::start_next(Block& block) {
    if (started == order.size()) return;
    const size_t i = order[started++];
    start(block, Index{unsigned(i % grid.x), unsigned(i / grid.x % grid.y), unsigned(i / grid.x / grid.y)});
}

// Starts the blocks of a grid in their order, and runs them.
Progress Machine::begin() {
    ready.clear();
    late.clear();
    at_dependency.clear();
    paused.clear();
    started = 0;
    for (size_t i = 0; i < RESIDENT_BLOCKS; ++i) {
        blocks[i].live = 0;
        if (i < resident_blocks) start_next(blocks[i]);
    }
    return proceed();
}

Progress Machine::proceed() {
    while (Fiber* next = draw()) {
        current = next;
        Context::change(scheduler, current->context);
        if (current->block->live == 0) start_next(*current->block);
    }
    if (error.empty() && !paused.empty()) return Progress::paused;
    if (error.empty() && !at_dependency.empty()) return Progress::waiting;
    if (error.empty()) describe_deadlock();
    return error.empty() ? Progress::ended : Progress::failed;
}

// The kernel before has ended.
Progress Machine::finish() {
    previous_ended = true;
    for (Fiber* fiber : at_dependency) wake(*fiber);
    at_dependency.clear();
    return proceed();
}

// Another device may have come further.
Progress Machine::resume() {
    ready.swap(paused);
    paused.clear();
    return proceed();
}

void Machine::describe_deadlock() {
    for (const Block& block : blocks) {
        for (size_t thread = 0; thread < block.fibers.size() && block.live > 0; ++thread) {
            const Fiber& fiber = block.fibers[thread];
            if (fiber.state == State::returned) continue;
            char text[256];
            snprintf(text, sizeof text, "threads wait for ever, %zu of %zu have not returned: thread %zu waits at %s, line %d", block.live,
                     block.fibers.size(), thread, fiber.waits_for, fiber.line);
            error = text;
            return;
        }
    }
}

}  // namespace hbmark::emulation
