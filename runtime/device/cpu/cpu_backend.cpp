#include "runtime/device/cpu/cpu_backend.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include <sys/mman.h>

#include <fmt/core.h>

#include "planner/base/error.h"
#include "planner/base/text.h"
#include "runtime/device/cpu/instruction_sets.h"

namespace parplan {

namespace {

constexpr std::size_t arena_alignment = 256;
constexpr std::uintptr_t workspace_alignment = 64;  // packed panels are loaded into AVX-512 registers

// How many operands a call has: those of the row, without the optional ones that the shape or the scalars leave out.
std::size_t operand_count(const OpRow& row, const KernelCall& call) {
  std::size_t count = 0;
  for (const OperandRow& operand : row.operands) count += operand.optional ? 0 : 1;
  switch (call.kind) {
    case OpKind::linear:
    case OpKind::linear_weight_gradient: return count + call.shape.bias;
    case OpKind::add: return count + call.shape.bias + call.shape.second;
    case OpKind::bias_gradient: return count + 1;
    case OpKind::adamw: return count + call.scalars->has_norm;  // no master copy: parameters are fp32
    case OpKind::sgd: return count + call.scalars->has_norm + call.shape.second;
    default: return count;
  }
}

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const CpuKernelTable& table) : table_(table) {}

  const char* name() const override { return "cpu"; }

  void* allocate(Bytes bytes) override {
    void* memory = ::operator new(static_cast<std::size_t>(bytes.count), std::align_val_t{arena_alignment}, std::nothrow);
    if (memory == nullptr)
      throw RunError(fmt::format("this machine has no {} of memory left for a rank", format_bytes(bytes)));
#ifdef MADV_HUGEPAGE
    // An arena is touched as a whole: large pages cost fewer faults and fewer misses of the translation buffer. A wish:
    // where the system grants none, nothing is lost.
    constexpr std::uintptr_t page = 2 << 20;
    const std::uintptr_t begin = (reinterpret_cast<std::uintptr_t>(memory) + page - 1) / page * page;
    const std::uintptr_t end = (reinterpret_cast<std::uintptr_t>(memory) + static_cast<std::uintptr_t>(bytes.count)) / page * page;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
    return memory;
  }

  void release(void* memory) override { ::operator delete(memory, std::align_val_t{arena_alignment}); }

  void run(StreamId, const KernelCall& call) override {
    const OpRow& row = row_of(call.kind);
    const CpuKernel kernel = table_.kernels[static_cast<int>(call.kind)];
    PARPLAN_ASSERT(kernel != nullptr, fmt::format("{} is no kernel", row.name));
    PARPLAN_ASSERT(call.scalars != nullptr || (call.kind != OpKind::adamw && call.kind != OpKind::sgd),
                   fmt::format("{} without its scalars", row.name));
    PARPLAN_ASSERT(call.operands.size() == operand_count(row, call),
                   fmt::format("{} with {} operands", row.name, call.operands.size()));
    if (!row.operands.empty() && row.operands.back().source == OperandSource::workspace)
      PARPLAN_ASSERT(reinterpret_cast<std::uintptr_t>(call.operands.back()) % workspace_alignment == 0,
                     fmt::format("workspace of {} at {}", row.name, call.operands.back()));
    kernel({.shape = call.shape, .operands = call.operands.data(), .scalars = call.scalars});
  }

  void copy(StreamId, void* to, const void* from, Bytes bytes) override {
    std::memcpy(to, from, static_cast<std::size_t>(bytes.count));
  }

  void record(StreamId, EventId) override {}
  void wait(StreamId, EventId) override {}
  void synchronize(StreamId) override {}

 private:
  const CpuKernelTable& table_;
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(const std::string& instruction_set) {
  return std::make_unique<CpuBackend>(cpu_kernels(instruction_set));
}

}  // namespace parplan
