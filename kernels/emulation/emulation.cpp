// Runs emulated kernels: see emulation.h for what is emulated and what is not. Here is what kernels call and what the host calls; fibers.h schedules
// the threads.
//
// One launch runs on one host thread. Launches of different host threads share nothing. The entries for the driver's ABI, which knows names and
// addresses of arguments but no kinds, run one launch at a time.

#include "emulation.h"
#include "fibers.h"

#include <cxxabi.h>

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>

namespace hbmark::emulation {

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
