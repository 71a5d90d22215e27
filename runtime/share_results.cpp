#include "runtime/share_results.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

struct SharedStep {
  std::optional<double> loss = {};
  Seconds time = {};
  std::optional<double> gradient_norm = {};
  std::optional<int> signal = {};
};
static_assert(std::is_trivially_copyable_v<SharedStep> && std::is_trivially_copyable_v<StepMeasurement>);
static_assert(std::is_trivially_copyable_v<RankEnd> && std::is_trivially_copyable_v<InstructionMeasurement>);

template <class T>
void append(std::vector<std::byte>& bytes, const T& value) {
  const auto* begin = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), begin, begin + sizeof(T));
}
template <class T>
T take(std::span<const std::byte>& bytes) {
  PARPLAN_ASSERT(bytes.size() >= sizeof(T), fmt::format("{} bytes of a step are left", bytes.size()));
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  bytes = bytes.subspan(sizeof(T));
  return value;
}

// Everyone's values, by process.
template <class T>
std::vector<T> gather(const std::vector<T>& own, Rendezvous& rendezvous) {
  std::vector<T> all;
  for (const std::vector<std::byte>& bytes : rendezvous.all_gather(std::as_bytes(std::span(own)))) {
    std::span<const std::byte> rest = bytes;
    while (!rest.empty()) all.push_back(take<T>(rest));
  }
  return all;
}

}  // namespace

void exchange_step(JobStep& step, std::optional<double> loss, std::span<const int> hosted, Rendezvous& rendezvous) {
  if (rendezvous.processes() == 1) {
    step.loss = loss.value_or(0.0);
    return;
  }
  std::vector<std::byte> bytes;
  append(bytes,
         SharedStep{.loss = loss, .time = step.time, .gradient_norm = step.gradient_norm, .signal = step.signal});
  for (const int number : hosted) {
    append(bytes, number);
    append(bytes, step.ranks[number]);
  }
  loss.reset();
  step.gradient_norm.reset();
  step.signal.reset();
  for (const std::vector<std::byte>& contribution : rendezvous.all_gather(bytes)) {
    std::span<const std::byte> rest = contribution;
    const SharedStep shared = take<SharedStep>(rest);
    step.time = std::max(step.time, shared.time);
    // The first process that has something says it.
    if (!loss) loss = shared.loss;
    if (!step.gradient_norm) step.gradient_norm = shared.gradient_norm;
    if (!step.signal) step.signal = shared.signal;
    while (!rest.empty()) {
      const int number = take<int>(rest);
      step.ranks.at(static_cast<std::size_t>(number)) = take<StepMeasurement>(rest);
    }
  }
  step.loss = loss.value_or(0.0);
}

JobEnd exchange_end(const std::vector<RankEnd>& hosted, const std::vector<InstructionMeasurement>& instructions,
                    Rendezvous& rendezvous) {
  JobEnd end{.ranks = gather(hosted, rendezvous), .instructions = {}};
  end.instructions = gather(instructions, rendezvous);
  std::ranges::sort(end.ranks, {}, &RankEnd::rank);
  return end;
}

}  // namespace parplan
