#include "planner/base/allocated.h"

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/base/units.h"

namespace parplan {
namespace {

std::string asked_for(double bytes) {
  constexpr double most = 9e18;
  const std::string size = bytes < most ? format_bytes(Bytes(static_cast<std::int64_t>(bytes))) : "more than 8 EiB";
  return fmt::format("out of memory: {} were asked for", size);
}

}  // namespace

std::string out_of_memory_text(const std::bad_alloc& failure) {
  const auto* refused = dynamic_cast<const RefusedAllocation*>(&failure);
  return refused == nullptr ? "out of memory" : asked_for(static_cast<double>(refused->bytes()));
}

void out_of_memory(double bytes, std::string_view what) {
  throw RunError(fmt::format("{}, for {}", asked_for(bytes), what));
}

}  // namespace parplan
