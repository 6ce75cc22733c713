// Runs emulated kernels: see emulation.h for what is emulated and what is not.
//
// One launch runs on one host thread. A few blocks are resident at a time, their fibers started together; a fiber runs until it must wait,
// and the next one, of any resident block, is drawn from the seed. Launches of different host threads share nothing. The entries for the
// driver's ABI, which knows names and addresses of arguments but no kinds, run one launch at a time.

#include "emulation.h"

#include <cxxabi.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
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

// ---- What kernels call ---------------------------------------------------------------------------------------------------------------

const Place& place() { return machine().current->place; }

unsigned lane() {
    const Fiber& self = *machine().current;
    return (&self - self.block->fibers.data()) % 32;
}

void fail(const char* format, ...) {
    char text[256];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    machine().error = text;
    machine().yield();
    __builtin_unreachable();
}

void barrier(const char* file, int line) {
    Machine& m = machine();
    if (m.last_barrier != std::pair(file, line)) m.barriers.emplace(file, line);
    m.last_barrier = {file, line};
    if (m.without.second == line && m.without.first == file) return;
    Fiber& self = *m.current;
    self.state = State::at_barrier;
    self.waits_for = "a barrier";
    self.line = line;
    self.block->at_barrier += 1;
    m.release_barrier(*self.block);
    m.yield();
}

unsigned long long nanoseconds() {
    static thread_local unsigned long long counted = 0;
    Machine& m = machine();
    if (!m.real_time) return counted += 1000;
    const unsigned long long now =
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
    if (m.clock_began == 0) m.clock_began = now;
    m.asked.clock_ns = now - m.clock_began;
    return now;
}

Asked& asked() { return machine().asked; }

// Told of each asynchronous copy from memory, where somebody counts them.
void (*on_copy)(const void* from, size_t bytes) = nullptr;

void wait_for_dependency() {
    Machine& m = machine();
    if (m.previous_ended) return;
    Fiber& self = *m.current;
    self.state = State::at_dependency;
    self.waits_for = "the kernel before";
    m.at_dependency.push_back(&self);
    m.yield();
}

void pause() {
    Machine& m = machine();
    m.paused.push_back(m.current);
    m.yield();
}

const unsigned char* exchange(unsigned mask, const char* collective, const void* value, size_t bytes) {
    Machine& m = machine();
    Fiber& self = *m.current;
    Block& block = *self.block;
    const size_t thread = &self - block.fibers.data();
    Warp& warp = block.warps[thread / 32];
    Meeting& meeting = warp.meetings[self.exchanges++ % 2];
    const unsigned lane = thread % 32;
    if (bytes > LARGEST_VALUE) fail("%s brings %zu bytes", collective, bytes);
    if (!(mask >> lane & 1)) fail("lane %u calls %s with a mask of others, %#x", lane, collective, mask);
    if (meeting.arrived == 0) {
        meeting.mask = mask;
        meeting.collective = collective;
    } else if (meeting.mask != mask || (meeting.collective != collective && std::strcmp(meeting.collective, collective) != 0)) {
        fail("lane %u calls %s (mask %#x) where others of its warp call %s (mask %#x)", lane, collective, mask, meeting.collective,
             meeting.mask);
    }
    std::memcpy(meeting.values[lane], value, bytes);
    meeting.arrived |= 1u << lane;
    if (meeting.arrived == mask) {
        meeting.arrived = 0;
        for (unsigned other = 0; other < 32 && thread / 32 * 32 + other < block.fibers.size(); ++other) {
            Fiber& fiber = block.fibers[thread / 32 * 32 + other];
            if ((mask >> other & 1) && fiber.state == State::in_exchange) m.wake(fiber);
        }
        // Who completes a meeting gets no head start.
        m.wake(self);
    } else {
        self.state = State::in_exchange;
        self.waits_for = collective;
        self.line = 0;
    }
    m.yield();
    return meeting.values[0];
}

void* shared_static(const void* site, size_t bytes) {
    Block& block = *machine().current->block;
    for (const auto& [known, at] : block.shared_sites)
        if (known == site) return at;
    block.shared_used = (block.shared_used + 15) / 16 * 16;
    if (block.shared_used + bytes > block.shared.size()) fail("%zu bytes of static shared memory are too many", bytes);
    void* at = block.shared.data() + block.shared_used;
    block.shared_used += bytes;
    std::memset(at, POISON, bytes);
    block.shared_sites.emplace_back(site, at);
    return at;
}

void* shared_dynamic() { return machine().current->block->shared.data(); }

static void copy_now(const Copy& copy) {
    std::memcpy(copy.to, copy.from, copy.bytes);
    std::memset(static_cast<char*>(copy.to) + copy.bytes, 0, copy.zeros);
}

void copy_later(void* to, const void* from, size_t bytes, size_t zeros) {
    Machine& m = machine();
    const Copy copy{to, from, bytes, zeros};
    if (on_copy && bytes > 0) on_copy(from, bytes);
    if (m.random.below(2)) copy_now(copy);
    else m.current->copies.push_back(copy);
}

void commit_copies() {
    Fiber& self = *machine().current;
    self.groups.push_back(self.copies.size());
}

void wait_copies(int groups_left) {
    Fiber& self = *machine().current;
    if (self.groups.size() <= (size_t)groups_left) return;
    const size_t ended = self.groups.size() - groups_left, copies = self.groups[ended - 1];
    for (size_t i = 0; i < copies; ++i) copy_now(self.copies[i]);
    self.copies.erase(self.copies.begin(), self.copies.begin() + copies);
    self.groups.erase(self.groups.begin(), self.groups.begin() + ended);
    for (size_t& end : self.groups) end -= copies;
}

// ---- What the host calls -------------------------------------------------------------------------------------------------------------

static const Kernel*& kernels() {
    static const Kernel* first = nullptr;
    return first;
}
void add(Kernel* kernel) {
    kernel->next = kernels();
    kernels() = kernel;
}
static const std::unordered_map<std::string_view, const Kernel*>& by_name() {
    static const auto map = [] {
        std::unordered_map<std::string_view, const Kernel*> map;
        for (const Kernel* kernel = kernels(); kernel; kernel = kernel->next) map.emplace(kernel->name, kernel);
        return map;
    }();
    return map;
}
static const Kernel* find(const char* name) {
    const auto found = by_name().find(name);
    return found == by_name().end() ? nullptr : found->second;
}
// The same, by the name a linker knows: of an instance of a template, what stands before its parameters, `f<(kind)8, 16, false>`.
static const Kernel* find_mangled(const char* name) {
    if (const Kernel* kernel = find(name)) return kernel;
    int status = 0;
    char* demangled = abi::__cxa_demangle(name, nullptr, nullptr, &status);
    if (!demangled) return nullptr;
    std::string text = demangled;
    std::free(demangled);
    // `void f<(kind)8>(int const*)`: the parameters open outside of angle brackets.
    size_t end = 0;
    for (int depth = 0; end < text.size() && !(text[end] == '(' && depth == 0); ++end) depth += (text[end] == '<') - (text[end] == '>');
    text.resize(end);
    if (text.compare(0, 5, "void ") == 0) text.erase(0, 5);
    return find(text.c_str());
}

// Whether a kernel can be launched with so many arguments of these kinds.
static bool fits(Machine& m, const char* const* kinds, unsigned count) {
    if (count != m.kernel->parameters) {
        m.error = "it takes " + std::to_string(m.kernel->parameters) + " arguments and was given " + std::to_string(count);
        return false;
    }
    for (unsigned i = 0; i < count; ++i) {
        if (std::strcmp(kinds[i], m.kernel->kinds[i]) == 0) continue;
        m.error = "argument " + std::to_string(i) + " is " + m.kernel->kinds[i] + " and was given as " + kinds[i];
        return false;
    }
    return true;
}

// Runs the kernel that `m` has, to its end unless it waits for the one before.
static Progress launch(Machine& m, Index grid, Index block, size_t shared_bytes, void* const* arguments, uint64_t seed, bool previous_ended = true) {
    m.previous_ended = previous_ended;
    m.asked = {};
    m.clock_began = 0;
    m.grid = grid;
    m.block_size = block;
    m.arguments = arguments;
    m.random.state = seed;
    const size_t threads = size_t(block.x) * block.y * block.z;
    if (threads == 0 || threads > MOST_THREADS) return m.error = "a block has 1 to 1024 threads", Progress::failed;
    if (!m.has_stacks()) return m.error = "no memory for the stacks of emulated threads", Progress::failed;
    m.shared_dynamic_bytes = shared_bytes;
    m.drawn_from = m.random.below(2) ? SIZE_MAX : 4;
    m.has_stragglers = m.random.below(2);
    // Blocks come in any order too, or as they are numbered, x or z first: neighbours share more.
    m.order.resize(size_t(grid.x) * grid.y * grid.z);
    const size_t planes = m.random.below(2) ? 1 : grid.z, in_plane = m.order.size() / planes;
    for (size_t i = 0; i < m.order.size(); ++i) m.order[i] = i % planes * in_plane + i / planes;
    for (size_t i = m.random.below(2) ? m.order.size() : 0; i > 1; --i) std::swap(m.order[i - 1], m.order[m.random.below(i)]);
    return m.begin();
}

}  // namespace hbmark::emulation

static std::mutex one_at_a_time;

static int hbmark_emulated_status(hbmark::emulation::Machine& m, hbmark::emulation::Progress progress, char* error, size_t error_bytes) {
    using hbmark::emulation::Progress;
    hbmark::emulation::active = nullptr;
    snprintf(error, error_bytes, "%s", m.error.c_str());
    return progress == Progress::ended ? 0 : progress == Progress::failed ? 1 : progress == Progress::waiting ? 2 : 3;
}

extern "C" {

// Runs a kernel to its end; 0, or 1 with a text in `error`.
int hbmark_emulated_launch(const char* name, const unsigned* grid, unsigned threads, size_t shared_bytes, void* const* arguments,
                           const char* const* kinds, unsigned count, uint64_t seed, char* error, size_t error_bytes) {
    using namespace hbmark::emulation;
    Machine& m = machine();
    m.error.clear();
    m.kernel = find(name);
    m.resident_blocks = RESIDENT_BLOCKS;
    m.real_time = false;
    if (!m.kernel) m.error = "there is no such kernel";
    Progress progress = Progress::failed;
    if (m.kernel && fits(m, kinds, count)) progress = launch(m, {grid[0], grid[1], grid[2]}, {threads, 1, 1}, shared_bytes, arguments, seed);
    // Other devices are other host threads.
    for (; progress == Progress::paused; progress = m.resume()) std::this_thread::yield();
    snprintf(error, error_bytes, "%s", m.error.c_str());
    return progress == Progress::ended ? 0 : 1;
}

// The same for a caller that knows the addresses of the arguments but no kinds; the name may be a mangled one, of an instance of a
// template. At most so many blocks are resident. One launch at a time: launches of several host threads wait for each other. Where the kernel
// before has not ended, 2 says that it runs up to its wait and is to be finished; 3 says that it waits for another device and is to be resumed. The
// arguments must live until then, and the next kernel takes another slot.
int hbmark_emulated_launch_raw(const char* name, const unsigned grid[3], const unsigned block[3], size_t shared_bytes,
                               void* const* arguments, unsigned resident_blocks, uint64_t seed, unsigned slot, int previous_ended,
                               char* error, size_t error_bytes) {
    using namespace hbmark::emulation;
    const std::lock_guard<std::mutex> guard(one_at_a_time);
    Machine& m = activate(slot);
    m.error.clear();
    m.kernel = find_mangled(name);
    m.resident_blocks = std::clamp<size_t>(resident_blocks, 1, RESIDENT_BLOCKS);
    m.real_time = true;
    if (!m.kernel) m.error = "there is no such kernel";
    const Index grid_size{grid[0], grid[1], grid[2]}, block_size{block[0], block[1], block[2]};
    const Progress progress =
        m.kernel ? launch(m, grid_size, block_size, shared_bytes, arguments, seed, previous_ended != 0) : Progress::failed;
    return hbmark_emulated_status(m, progress, error, error_bytes);
}

// Runs the kernel of a slot on: the kernel before has ended, or another device may have come further.
int hbmark_emulated_finish(unsigned slot, char* error, size_t error_bytes) {
    using namespace hbmark::emulation;
    const std::lock_guard<std::mutex> guard(one_at_a_time);
    Machine& m = activate(slot);
    return hbmark_emulated_status(m, m.paused.empty() ? m.finish() : m.resume(), error, error_bytes);
}

// What the last kernel of a slot asked of a device beside memory, once: operations of tensor cores, bytes of L2, nanoseconds of the clock, whether it met
// those of other devices.
void hbmark_emulated_asked(unsigned slot, uint64_t* tensor_flops, uint64_t* l2_bytes, uint64_t* clock_ns, uint64_t* meets) {
    const auto asked = std::exchange(hbmark::emulation::machines()[slot % hbmark::emulation::SLOTS].asked, {});
    *tensor_flops = asked.tensor_flops;
    *l2_bytes = asked.l2_bytes;
    *clock_ns = asked.clock_ns;
    *meets = asked.meets;
}

// Ends the launch that this host thread runs, for a handler of signals that one of its kernel's threads has raised.
void hbmark_emulated_fail(const char* text) { hbmark::emulation::fail("%s", text); }

// The kinds of a kernel's parameters and their number: a letter and the size in bytes, as "p8". Null where there is no such kernel.
const char* const* hbmark_emulated_parameters(const char* name, unsigned* count) {
    const hbmark::emulation::Kernel* kernel = hbmark::emulation::find_mangled(name);
    if (!kernel) return nullptr;
    *count = kernel->parameters;
    return kernel->kinds;
}

// The name of kernel number `index`, or null behind the last.
const char* hbmark_emulated_name(size_t index) {
    const hbmark::emulation::Kernel* kernel = hbmark::emulation::kernels();
    while (kernel && index-- > 0) kernel = kernel->next;
    return kernel ? kernel->name : nullptr;
}

// Takes the barrier at a source line away from the launches of this host thread; line 0 puts it back.
void hbmark_emulated_without_barrier(const char* file, int line) { hbmark::emulation::machine().without = {file, line}; }

// Barrier number `index` that launches of this host thread have met: its line and file, or 0.
int hbmark_emulated_barrier(size_t index, char* file, size_t file_bytes) {
    for (const auto& [name, line] : hbmark::emulation::machine().barriers) {
        if (index-- > 0) continue;
        snprintf(file, file_bytes, "%s", name.c_str());
        return line;
    }
    return 0;
}
}
