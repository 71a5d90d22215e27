#include "runtime/device/cpu/host_update.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "planner/base/error.h"
#include "planner/graph/dynamic_quantization.h"
#include "runtime/device/cpu/host_conversion.h"
#include "runtime/device/cpu/instruction_sets.h"

namespace parplan {
namespace {

// Enough that starting a thread costs little beside it, and a multiple of what one vector holds and
// of a block of quantized state.
constexpr std::int64_t least_elements = 1 << 18;

std::int64_t host_cores() {
  return std::max(std::thread::hardware_concurrency(), 1u);
}

// An operand of the call: an array of its elements, or of one for each `shared_by` of them, or what
// all elements share.
struct Part {
  std::byte* begin = nullptr;
  std::int64_t element = 0;  // bytes; 0: shared
  std::int64_t shared_by = 1;
  void* from(std::int64_t index) const { return begin + index / shared_by * element; }
};

// A call in fp32, in which the parameters are the master copy, and what is rounded from it.
struct Wide {
  OpShape shape;
  std::vector<Part> operands;
  Part rounded;  // absent in fp32
};

Wide widened(const KernelCall& call) {
  const OpRow& row = row_of(call.kind);
  Wide wide{.shape = call.shape, .operands = {}, .rounded = {}};
  std::size_t next = 0, parameters = 0, master = 0;
  for (const OperandRow& operand : row.operands) {
    if (!is_present(operand, call.shape, false)) continue;
    if (operand.source == OperandSource::parameter) parameters = wide.operands.size();
    if (call.shape.master && operand.source == OperandSource::output) master = wide.operands.size();  // the last one
    const bool of_blocks = operand.size.content == OperandContent::block_scales;
    const bool is_array = of_blocks || operand.size.elements(call.shape) == call.shape.rows;
    wide.operands.push_back({.begin = static_cast<std::byte*>(call.operands[next++]),
                             .element = is_array ? size_of(type_of(operand.size.content, call.type)) : 0,
                             .shared_by = of_blocks ? quantization_block : 1});
  }
  if (!call.shape.master) return wide;
  wide.shape.master = false;
  wide.rounded = wide.operands[parameters];
  wide.operands[parameters] = wide.operands[master];
  wide.operands.erase(wide.operands.begin() + static_cast<std::ptrdiff_t>(master));
  return wide;
}

void update_range(CpuKernel kernel, const KernelCall& call, const Wide& wide, const StepScalars& scalars,
                  std::int64_t begin, std::int64_t end) {
  OpShape shape = wide.shape;
  shape.rows = end - begin;
  std::vector<void*> operands;
  for (const Part& part : wide.operands) operands.push_back(part.from(begin));
  kernel({.shape = shape, .operands = operands.data(), .scalars = &scalars});
  if (wide.rounded.begin == nullptr) return;
  constexpr std::size_t parameters = 1;  // of all optimizers' kernels
  narrow(call.type, static_cast<const float*>(operands[parameters]), shape.rows, wide.rounded.from(begin));
}

// Part by part, each by one thread, and added in their order, so that the sum does not depend on
// the number of cores.
void sum_squares(CpuKernel kernel, const KernelCall& call) {
  const std::int64_t parts = ceil_div(call.shape.rows, least_elements);
  std::vector<float> sums(static_cast<std::size_t>(parts));
  const auto* const x = static_cast<const float*>(call.operands.front());
  std::atomic<std::int64_t> next = 0;
  const auto work = [&] {
    for (std::int64_t part; (part = next++) < parts;) {
      const std::int64_t begin = part * least_elements;
      OpShape shape = call.shape;
      shape.rows = std::min(least_elements, call.shape.rows - begin);
      void* operands[] = {const_cast<float*>(x + begin), &sums[static_cast<std::size_t>(part)]};
      kernel({.shape = shape, .operands = operands, .scalars = nullptr});
    }
  };
  std::vector<std::jthread> others;
  for (std::int64_t thread = 1; thread < std::min(parts, host_cores()); ++thread) others.emplace_back(work);
  work();
  others.clear();  // joins them
  double total = 0.0;
  for (const float sum : sums) total += sum;
  *static_cast<float*>(call.operands.back()) += static_cast<float>(total);
}

}  // namespace

void update_on_host(const KernelCall& call, const StepScalars& scalars) {
  const CpuKernel kernel = cpu_kernels(chosen_cpu_instruction_set()).kernels[static_cast<int>(call.kind)];
  if (call.kind == OpKind::sum_squares) return sum_squares(kernel, call);
  const Wide wide = widened(call);
  const std::int64_t elements = call.shape.rows;
  const std::int64_t threads = std::clamp(elements / least_elements, std::int64_t{1}, host_cores());
  const auto begin_of = [&](std::int64_t thread) {
    return thread == threads ? elements : elements / threads * thread / quantization_block * quantization_block;
  };
  std::vector<std::jthread> others;
  for (std::int64_t thread = 1; thread < threads; ++thread)
    others.emplace_back(
        [&, thread] { update_range(kernel, call, wide, scalars, begin_of(thread), begin_of(thread + 1)); });
  update_range(kernel, call, wide, scalars, 0, begin_of(1));
}

}  // namespace parplan
