#include "tests/cuda_emulator/grid.h"

#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <numeric>
#include <string>
#include <vector>

#include "tests/cuda_emulator/device_code.h"
#include "tests/cuda_emulator/fiber.h"
#include "tests/cuda_emulator/random.h"
#include "tests/cuda_emulator/symbols.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace {
constexpr std::size_t guard_bytes = 1024;
}
// The guard follows the largest size that a block may ask for.
alignas(1024) thread_local unsigned char dynamic_shared[emulator::shared_bytes_at_most + guard_bytes];

namespace emulator {
namespace {

constexpr int most_threads = 1024;
constexpr unsigned char poison = 0xff;  // of any type a NaN, or -1

struct Lane {
  const char* name = nullptr;  // of the meeting in which it waits
  unsigned mask = 0;
  void* brought = nullptr;
  Meeting meeting = nullptr;
  const char* file = nullptr;
  int line = 0;
};

struct Warp {
  unsigned alive = 0;    // lanes that have not exited, including those that have not started
  unsigned waiting = 0;  // lanes in a meeting
  Lane lanes[32];
};

// The running block. Threads are started one after the other, each as a call on a free fiber. A
// waiting thread keeps its fiber, and another fiber continues with a ready thread, or with the next
// thread to start.
struct Block {
  const Grid* grid = nullptr;
  int threads = 0;
  int first = 0, stride = 1;  // threads start in the order first, first + stride, ... modulo their number
  bool ready_first = false;   // before more threads are started
  bool newest_first = false;  // among the ready ones
  int started = 0;
  int exited = 0;
  int current = -1;

  // __syncthreads
  int arrived = 0;
  const char* barrier_name = nullptr;
  const char* barrier_file = nullptr;
  int barrier_line = 0;
  int predicates = 0;       // that were true so far
  int last_predicates = 0;  // of the barrier before
  bool at_barrier[most_threads];

  uint3 indices[most_threads];  // threadIdx of each

  Warp warps[most_threads / 32];
  Fiber* fiber_of[most_threads];
  std::deque<int> ready;

  Fiber host;  // the stack of the host thread
  std::vector<Fiber*> free;
  unsigned fibers = 0;
  Fiber* running = nullptr;
};
Block block;
bool in_kernel = false;

uint3 index_of(int thread) {
  const auto linear = static_cast<unsigned>(thread);
  return {linear % blockDim.x, linear / blockDim.x % blockDim.y, linear / blockDim.x / blockDim.y};
}

std::string text_of(uint3 index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

std::string place(const char* file, int line) { return std::string(file) + ":" + std::to_string(line); }

[[noreturn]] void fail_with(const std::string& text) { fail(text.c_str()); }

// Reports who waits for what, when nobody can continue.
[[noreturn]] void fail_for_deadlock() {
  std::string text = "no thread of the block can go on:";
  if (block.exited > 0) text += "\n  " + std::to_string(block.exited) + " threads have exited";
  if (block.arrived > 0)
    text += "\n  " + std::to_string(block.arrived) + " threads wait in " + block.barrier_name + " at " +
            place(block.barrier_file, block.barrier_line);
  for (int w = 0; w * 32 < block.threads; ++w) {
    const Warp& warp = block.warps[w];
    for (int l = 0; l < 32; ++l) {
      if ((warp.waiting >> l & 1) == 0) continue;
      char mask[16];
      std::snprintf(mask, sizeof(mask), "0x%08x", warp.lanes[l].mask);
      text += "\n  thread " + text_of(index_of(w * 32 + l)) + " waits in " + warp.lanes[l].name + " with mask " + mask +
              " at " + place(warp.lanes[l].file, warp.lanes[l].line);
    }
  }
  fail_with(text);
}

void make_current(int thread) {
  block.current = thread;
  threadIdx = block.indices[thread];
}

void run_threads();

void switch_to(Fiber& to) {
  Fiber& from = *block.running;
  block.running = &to;
  switch_fiber(from, to);
}

Fiber& free_fiber() {
  if (block.free.empty()) {
    auto* made = new Fiber;
    make_fiber(*made, [] {
      entered_fiber();
      run_threads();
    }, block.fibers++);
    return *made;
  }
  Fiber* fiber = block.free.back();
  block.free.pop_back();
  return *fiber;
}

int take_ready() {
  const int thread = block.newest_first ? block.ready.back() : block.ready.front();
  if (block.newest_first) {
    block.ready.pop_back();
  } else {
    block.ready.pop_front();
  }
  return thread;
}

// The current thread cannot continue; it is ready when this returns.
void wait_for_others() {
  const int thread = block.current;
  block.fiber_of[thread] = block.running;
  const bool can_start = block.started < block.threads;
  if (block.ready.empty() && !can_start) fail_for_deadlock();
  if (!block.ready.empty() && (block.ready_first || !can_start)) {
    const int next = take_ready();
    make_current(next);
    switch_to(*block.fiber_of[next]);
  } else {
    switch_to(free_fiber());
  }
  // The fiber that switched here has made this thread current.
}

void become_ready(int thread) { block.ready.push_back(thread); }

// Releases those lanes that wait in `warp` whose meeting is complete; `lane` is one of them.
// Returns whether it was complete.
bool hold_meeting(Warp& warp, int first_thread, int lane, int caller) {
  const Lane& own = warp.lanes[lane];
  const unsigned expected = own.mask & warp.alive;
  if ((warp.waiting & expected) != expected) return false;
  for (unsigned left = expected; left != 0; left &= left - 1) {
    const int l = std::countr_zero(left);
    const Lane& other = warp.lanes[l];
    if (other.mask != own.mask || other.meeting != own.meeting) {
      char masks[64];
      std::snprintf(masks, sizeof(masks), "masks 0x%08x and 0x%08x", own.mask, other.mask);
      fail_with(std::string("lanes of a warp meet in different calls: thread ") +
                text_of(index_of(first_thread + lane)) + " in " + own.name + " at " + place(own.file, own.line) +
                ", thread " + text_of(index_of(first_thread + l)) + " in " + other.name + " at " +
                place(other.file, other.line) + ", " + masks);
    }
  }
  void* brought[32] = {};
  for (unsigned left = expected; left != 0; left &= left - 1) {
    const int l = std::countr_zero(left);
    brought[l] = warp.lanes[l].brought;
  }
  own.meeting(own.mask, brought);
  warp.waiting &= ~expected;
  for (unsigned left = expected; left != 0; left &= left - 1) {
    const int l = std::countr_zero(left);
    if (l != caller) become_ready(first_thread + l);
  }
  return true;
}

void exit_thread() {
  const int thread = block.current;
  block.exited += 1;
  Warp& warp = block.warps[thread / 32];
  warp.alive &= ~(1u << (thread % 32));
  if (block.arrived > 0)
    fail_with("thread " + text_of(threadIdx) + " exits while " + std::to_string(block.arrived) + " threads wait in " +
              block.barrier_name + " at " + place(block.barrier_file, block.barrier_line));
  while (warp.waiting != 0) {
    // Lanes that waited for this lane alone.
    bool any = false;
    for (unsigned left = warp.waiting; left != 0 && !any; left &= left - 1)
      any = hold_meeting(warp, thread / 32 * 32, std::countr_zero(left), -1);
    if (!any) break;
  }
}

// The loop of every fiber: starts threads, and gives itself up when there is none left to start.
void run_threads() {
  for (;;) {
    while (block.started < block.threads && (block.ready.empty() || !block.ready_first)) {
      const int thread = (block.first + block.started * block.stride) % block.threads;
      block.started += 1;
      make_current(thread);
      block.grid->thread();
      exit_thread();
    }
    block.free.push_back(block.running);
    if (!block.ready.empty()) {
      const int next = take_ready();
      make_current(next);
      switch_to(*block.fiber_of[next]);
    } else if (block.exited == block.threads) {
      switch_to(block.host);
    } else {
      fail_for_deadlock();
    }
  }
}

int coprime_stride(Random& random, int count) {
  if (count < 3) return 1;
  for (;;) {
    const int stride = static_cast<int>(random.below(static_cast<std::uint64_t>(count) - 1)) + 1;
    if (std::gcd(stride, count) == 1) return stride;
  }
}

void check_shared_guard(std::size_t shared) {
  static const std::vector<unsigned char> untouched(guard_bytes, poison);
  if (std::memcmp(dynamic_shared + shared, untouched.data(), guard_bytes) == 0) return;
  std::size_t at = shared;
  while (dynamic_shared[at] == poison) ++at;
  fail_with("a block of kernel " + kernel_at(block.grid->kernel).name + " wrote " + std::to_string(at - shared) +
            " bytes behind its " + std::to_string(shared) + " bytes of dynamic shared memory");
}

// Shared memory has arbitrary contents at the start.
void poison_shared(const Kernel& kernel, std::byte* variables, std::size_t dynamic) {
  std::memset(dynamic_shared, poison, dynamic + guard_bytes);
  if (variables == nullptr) return;
  for (const Kernel::Variable& variable : kernel.shared)
    std::memset(variables + variable.offset, poison, variable.bytes);
}

void run_block(const Grid& grid, const Kernel& kernel, std::byte* variables, Random& random) {
  block.grid = &grid;
  block.threads = static_cast<int>(grid.threads.x * grid.threads.y * grid.threads.z);
  block.started = block.exited = block.arrived = 0;
  block.predicates = block.last_predicates = 0;
  // Half of the blocks run in ascending order, whole warps one after the other; the others in
  // another order.
  const bool ascending = random.below(2) == 0;
  block.first = ascending ? 0 : static_cast<int>(random.below(static_cast<std::uint64_t>(block.threads)));
  block.stride = ascending ? 1 : coprime_stride(random, block.threads);
  block.ready_first = random.below(2) == 0;
  block.newest_first = random.below(2) == 0;
  block.ready.clear();
  std::memset(block.at_barrier, 0, static_cast<std::size_t>(block.threads));
  for (int w = 0; w * 32 < block.threads; ++w) {
    const int lanes = block.threads - w * 32 < 32 ? block.threads - w * 32 : 32;
    block.warps[w].alive = lanes == 32 ? full_warp : (1u << lanes) - 1;
    block.warps[w].waiting = 0;
  }
  poison_shared(kernel, variables, grid.shared);
  block.host = Fiber{};
  block.running = &block.host;
  in_kernel = true;
  switch_to(free_fiber());
  in_kernel = false;
  check_shared_guard(grid.shared);
}

// Every thread of the block arrives here; returns how many predicates were true.
int meet_block(const char* name, int predicate, const char* file, int line) {
  if (!in_kernel) fail_with(std::string(name) + " outside of a kernel at " + place(file, line));
  if (block.exited > 0)
    fail_with(std::string(name) + " at " + place(file, line) + " after " + std::to_string(block.exited) +
              " threads of the block have exited");
  if (block.arrived == 0) {
    block.barrier_name = name;
    block.barrier_file = file;
    block.barrier_line = line;
    block.predicates = 0;
  } else if (block.barrier_line != line || block.barrier_file != file || block.barrier_name != name) {
    fail_with("threads of a block meet in different barriers: " + std::string(block.barrier_name) + " at " +
              place(block.barrier_file, block.barrier_line) + " and " + name + " at " + place(file, line));
  }
  block.predicates += predicate != 0;
  if (++block.arrived < block.threads) {
    block.at_barrier[block.current] = true;
    wait_for_others();
    return block.last_predicates;
  }
  block.last_predicates = block.predicates;
  block.arrived = 0;
  for (int i = 0; i < block.threads; ++i) {
    const int thread = (block.first + i * block.stride) % block.threads;
    if (block.at_barrier[thread]) become_ready(thread);
    block.at_barrier[thread] = false;
  }
  return block.last_predicates;
}

}  // namespace

void run_grid(const Grid& grid, std::uint64_t seed) {
  Random random(seed);
  const Kernel& kernel = kernel_at(grid.kernel);
  dynamic_shared[0] = poison;  // the first access creates this thread's variables
  std::byte* const variables = thread_variables(kernel);
  blockDim = grid.threads;
  gridDim = grid.blocks;
  for (int thread = 0; thread < static_cast<int>(blockDim.x * blockDim.y * blockDim.z); ++thread)
    block.indices[thread] = index_of(thread);
  const std::uint64_t blocks = std::uint64_t{grid.blocks.x} * grid.blocks.y * grid.blocks.z;
  const bool ascending = random.below(2) == 0;
  const std::uint64_t first = ascending ? 0 : random.below(blocks);
  const std::uint64_t stride = ascending || blocks > 1'000'000
                                   ? 1
                                   : static_cast<std::uint64_t>(coprime_stride(random, static_cast<int>(blocks)));
  for (std::uint64_t i = 0; i < blocks; ++i) {
    const std::uint64_t number = (first + i * stride) % blocks;
    blockIdx = {static_cast<unsigned>(number % gridDim.x), static_cast<unsigned>(number / gridDim.x % gridDim.y),
                static_cast<unsigned>(number / gridDim.x / gridDim.y)};
    run_block(grid, kernel, variables, random);
  }
}

const char* where_in_kernel() {
  static std::string text;
  if (!in_kernel) return "";
  text = "kernel " + kernel_at(block.grid->kernel).name + ", block " + text_of(blockIdx) + ", thread " +
         text_of(threadIdx) + ", of " + text_of(gridDim) + " blocks of " + text_of(blockDim) + " threads";
  return text.c_str();
}

void fail(const char* text) {
  std::fprintf(stderr, "CUDA emulator: %s\n", text);
  if (in_kernel) std::fprintf(stderr, "  in %s\n", where_in_kernel());
  std::fflush(stderr);
  std::abort();
}

unsigned lane() { return static_cast<unsigned>(block.current) % 32; }

void warp_meeting(const char* name, unsigned mask, void* mine, Meeting meeting, const char* file, int line) {
  if (!in_kernel) fail_with(std::string(name) + " outside of a kernel at " + place(file, line));
  const int thread = block.current;
  const int l = thread % 32;
  Warp& warp = block.warps[thread / 32];
  if ((mask >> l & 1) == 0)
    fail_with(std::string(name) + " at " + place(file, line) + " without the calling lane in its mask");
  warp.lanes[l] = {.name = name, .mask = mask, .brought = mine, .meeting = meeting, .file = file, .line = line};
  warp.waiting |= 1u << l;
  if (!hold_meeting(warp, thread - l, l, l)) wait_for_others();
}

void whole_warp_meeting(const char* name, void* mine, Meeting meeting, const char* file, int line) {
  if (in_kernel && block.warps[block.current / 32].alive != full_warp)
    fail_with(std::string(name) + " at " + place(file, line) +
              " in a warp of fewer than 32 threads, or after some have exited");
  warp_meeting(name, full_warp, mine, meeting, file, line);
}

namespace {
struct Exchanged {
  const void* mine;
  std::size_t bytes;
  void* all;
};
}  // namespace

void warp_exchange(const void* mine, std::size_t bytes, void* all32, const char* file, int line) {
  Exchanged exchanged{mine, bytes, all32};
  whole_warp_meeting("warp_exchange", &exchanged, [](unsigned, void* const* lanes) {
    for (int to = 0; to < 32; ++to)
      for (int from = 0; from < 32; ++from) {
        const auto* source = static_cast<const Exchanged*>(lanes[from]);
        const auto* target = static_cast<const Exchanged*>(lanes[to]);
        if (source->bytes != target->bytes) fail("lanes exchange different numbers of bytes");
        std::memcpy(static_cast<std::byte*>(target->all) + static_cast<std::size_t>(from) * source->bytes, source->mine,
                    source->bytes);
      }
  }, file, line);
}

namespace {

struct Shuffled {
  std::uint64_t bits;
  int source;
};

// The lane that `lane` reads (PTX ISA, "shfl.sync").
int source_lane(Shuffle kind, int lane, int parameter, int width) {
  const int first = lane / width * width;
  switch (kind) {
    case Shuffle::index: return first + (parameter & (width - 1));
    case Shuffle::up: return lane - (parameter & 31) < first ? lane : lane - (parameter & 31);
    case Shuffle::down: return lane + (parameter & 31) >= first + width ? lane : lane + (parameter & 31);
    case Shuffle::exclusive_or: {
      const int other = lane ^ (parameter & 31);
      return other >= first + width ? lane : other;
    }
  }
  return lane;
}

template <Shuffle kind>
void exchange_values(unsigned mask, void* const* lanes) {
  std::uint64_t results[32];
  for (int l = 0; l < 32; ++l) {
    if (lanes[l] == nullptr) continue;
    const int source = static_cast<const Shuffled*>(lanes[l])->source;
    const bool there = (mask >> source & 1) != 0 && lanes[source] != nullptr;
    results[l] = there ? static_cast<const Shuffled*>(lanes[source])->bits : ~std::uint64_t{0};
  }
  for (int l = 0; l < 32; ++l)
    if (lanes[l] != nullptr) static_cast<Shuffled*>(lanes[l])->bits = results[l];
}

struct Vote {
  int predicate;
  unsigned result;
};

}  // namespace

std::uint64_t shuffle(Shuffle kind, unsigned mask, std::uint64_t bits, int parameter, int width, const char* file,
                      int line) {
  if (width < 1 || width > 32 || (width & (width - 1)) != 0)
    fail_with("a shuffle of width " + std::to_string(width) + " at " + place(file, line));
  static constexpr const char* names[] = {"__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync"};
  static constexpr Meeting meetings[] = {exchange_values<Shuffle::index>, exchange_values<Shuffle::up>,
                                         exchange_values<Shuffle::down>, exchange_values<Shuffle::exclusive_or>};
  Shuffled shuffled{bits, source_lane(kind, static_cast<int>(lane()), parameter, width)};
  const auto i = static_cast<std::size_t>(kind);
  warp_meeting(names[i], mask, &shuffled, meetings[i], file, line);
  return shuffled.bits;
}

unsigned ballot(unsigned mask, int predicate, const char* file, int line) {
  Vote vote{predicate, 0};
  warp_meeting("a vote", mask, &vote, [](unsigned, void* const* lanes) {
    unsigned result = 0;
    for (unsigned l = 0; l < 32; ++l)
      if (lanes[l] != nullptr && static_cast<const Vote*>(lanes[l])->predicate != 0) result |= 1u << l;
    for (unsigned l = 0; l < 32; ++l)
      if (lanes[l] != nullptr) static_cast<Vote*>(lanes[l])->result = result;
  }, file, line);
  return vote.result;
}

}  // namespace emulator

void __syncthreads(const char* file, int line) { emulator::meet_block("__syncthreads", 0, file, line); }
int __syncthreads_count(int predicate, const char* file, int line) {
  return emulator::meet_block("__syncthreads_count", predicate, file, line);
}
int __syncthreads_and(int predicate, const char* file, int line) {
  return emulator::meet_block("__syncthreads_and", predicate, file, line) == emulator::block.threads;
}
int __syncthreads_or(int predicate, const char* file, int line) {
  return emulator::meet_block("__syncthreads_or", predicate, file, line) > 0;
}
void __syncwarp(unsigned mask, const char* file, int line) {
  emulator::warp_meeting("__syncwarp", mask, nullptr, [](unsigned, void* const*) {}, file, line);
}
