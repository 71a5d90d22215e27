#include "runtime/device/cpu/cpu_backend.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <new>
#include <optional>
#include <string_view>
#include <vector>

#include <sys/mman.h>

#include <fmt/core.h>

#include "planner/base/error.h"
#include "planner/base/text.h"
#include "runtime/device/cpu/file_thread.h"
#include "runtime/device/cpu/instruction_sets.h"

namespace parplan {

namespace {

constexpr std::size_t arena_alignment = 256;
constexpr std::uintptr_t workspace_alignment = 64;  // packed panels are loaded into AVX-512 registers

// The whole number in a file; nothing where there is none ("max" of an unlimited control group).
std::optional<std::int64_t> number_in(const char* path) {
  std::ifstream file(path);
  std::int64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;
}

// The bytes that /proc/meminfo states for `what`; 0 where it does not.
std::int64_t memory_information(std::string_view what) {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(what)) return std::strtoll(line.c_str() + what.size(), nullptr, 10) * 1024;
  return 0;
}

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const CpuKernelTable& table) : table_(table) {}

  const char* name() const override { return "cpu"; }

  void* allocate(Bytes bytes) override {
    void* memory =
        ::operator new (static_cast<std::size_t>(bytes.count), std::align_val_t{arena_alignment}, std::nothrow);
    if (memory == nullptr)
      throw RunError(fmt::format("this machine has no {} of memory left for a rank", format_bytes(bytes)));
#ifdef MADV_HUGEPAGE
    // An arena is touched as a whole: large pages cost fewer faults and fewer misses of the
    // translation buffer. This is only a hint: if the system grants none, nothing is lost.
    constexpr std::uintptr_t page = 2 << 20;
    const std::uintptr_t begin = (reinterpret_cast<std::uintptr_t>(memory) + page - 1) / page * page;
    const std::uintptr_t end =
        (reinterpret_cast<std::uintptr_t>(memory) + static_cast<std::uintptr_t>(bytes.count)) / page * page;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
    return memory;
  }

  void release(void* memory) override { ::operator delete(memory, std::align_val_t{arena_alignment}); }
  void* allocate_host(Bytes bytes) override { return allocate(bytes); }
  void release_host(void* memory) override { release(memory); }

  // Memory of the machine, or of the control group where that allows less.
  DeviceMemory memory() const override {
    const std::int64_t total = memory_information("MemTotal:");
    const auto allowed = number_in("/sys/fs/cgroup/memory.max");
    const auto used = number_in("/sys/fs/cgroup/memory.current");
    if (allowed && used && *allowed < total) return {Bytes(*allowed), Bytes(*used)};
    return {Bytes(total), Bytes(total - memory_information("MemAvailable:"))};
  }

  void set_scalars(const StepScalars& scalars) override { scalars_ = scalars; }

  void run(StreamId, const KernelCall& call) override {
    const OpRow& row = row_of(call.kind);
    const CpuKernel kernel = table_.kernels[static_cast<int>(call.kind)];
    PARPLAN_ASSERT(kernel != nullptr, fmt::format("{} is no kernel", row.name));
    PARPLAN_ASSERT(call.type == DataType::fp32 || call.type == DataType::tf32,
                   fmt::format("{} in {}: the CPU computes in fp32", row.name, parplan::name(call.type)));
    const bool workspace = row.cpu_workspace != nullptr;
    PARPLAN_ASSERT(static_cast<int>(call.operands.size()) == operand_count(row, call.shape, workspace),
                   fmt::format("{} with {} operands", row.name, call.operands.size()));
    if (workspace)
      PARPLAN_ASSERT(reinterpret_cast<std::uintptr_t>(call.operands.back()) % workspace_alignment == 0,
                     fmt::format("workspace of {} at {}", row.name, call.operands.back()));
    kernel({.shape = call.shape, .operands = call.operands.data(), .scalars = &scalars_});
  }

  void run_on_host(StreamId stream, const KernelCall& call) override { run(stream, call); }

  void copy(StreamId, void* to, const void* from, Bytes bytes) override {
    std::memcpy(to, from, static_cast<std::size_t>(bytes.count));
  }
  void fill(StreamId, void* memory, std::uint32_t pattern, std::int64_t words) override {
    std::fill_n(static_cast<std::uint32_t*>(memory), words, pattern);
  }
  std::int64_t end_of_unlike(const void* memory, std::uint32_t pattern, std::int64_t words) override {
    const auto* begin = static_cast<const std::uint32_t*>(memory);
    while (words > 0 && begin[words - 1] == pattern) --words;
    return words;
  }

  void transfer_file(StreamId stream, const FileTransfer& transfer) override {
    file_threads_[stream].post(transfer);
  }

  // An event of a stream of file transfers stands for all that was posted there; that of another
  // stream has passed.
  void record(StreamId stream, EventId event) override {
    if (file_threads_.empty()) return;
    const auto number = static_cast<std::size_t>(event);
    if (number >= events_.size()) events_.resize(number + 1);
    FileThread* const thread = thread_of(stream);
    events_[number] = {thread, thread != nullptr ? thread->posted() : 0};
  }
  void wait(StreamId stream, EventId event) override {
    const auto number = static_cast<std::size_t>(event);
    if (number >= events_.size() || events_[number].thread == nullptr) return;
    FileThread& awaited = *events_[number].thread;
    if (FileThread* const thread = thread_of(stream); thread != nullptr)
      thread->post_wait(awaited, events_[number].posted);
    else
      awaited.wait_for(events_[number].posted);
  }
  void synchronize() override {
    for (auto& [stream, thread] : file_threads_) thread.wait_for(thread.posted());
    for (auto& [stream, thread] : file_threads_) thread.wait_for_all();
  }
  void repeat(StreamId, std::int64_t, const std::function<void()>& work) override { work(); }

  void prepare_marks(int count) override { marks_.resize(std::max(marks_.size(), static_cast<std::size_t>(count))); }
  // Marks were prepared where there are file transfers: their threads keep the place of one.
  void mark(StreamId stream, int mark) override {
    const std::size_t number = static_cast<std::size_t>(mark);
    if (number >= marks_.size()) marks_.resize(number + 1);
    if (FileThread* const thread = thread_of(stream); thread != nullptr) return thread->post_mark(marks_[number]);
    marks_[number] = std::chrono::steady_clock::now();
  }
  Seconds time_at(int mark) override {
    return Seconds(std::chrono::duration<double>(marks_.at(static_cast<std::size_t>(mark)) - marks_.at(0)).count());
  }
  bool works_at_once() const override { return true; }

 private:
  FileThread* thread_of(StreamId stream) {
    const auto found = file_threads_.find(stream);
    return found == file_threads_.end() ? nullptr : &found->second;
  }

  struct FileEvent {
    FileThread* thread = nullptr;
    std::int64_t posted = 0;
  };

  const CpuKernelTable& table_;
  StepScalars scalars_;
  std::vector<FileEvent> events_;
  std::vector<std::chrono::steady_clock::time_point> marks_;
  std::map<StreamId, FileThread> file_threads_;  // last: they end before what they write to
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(const std::string& instruction_set) {
  return std::make_unique<CpuBackend>(cpu_kernels(instruction_set));
}

}  // namespace parplan
