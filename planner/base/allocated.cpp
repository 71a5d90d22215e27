#include "planner/base/allocated.h"

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/base/units.h"

namespace parplan {

void out_of_memory(double bytes, std::string_view what) {
  constexpr double most = 9e18;
  const std::string size = bytes < most ? format_bytes(Bytes(static_cast<std::int64_t>(bytes))) : "more than 8 EiB";
  throw RunError(fmt::format("out of memory: {} were asked for, for {}", size, what));
}

}  // namespace parplan
