#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "planner/plan/explanation.h"
#include "planner/search/request.h"

namespace parplan {

// The memory of the candidate that needs least among those that fit. Nothing is simulated: the
// estimate knows a Program's memory to the byte.
std::optional<Bytes> least_that_fits(const SuggestRequest& request, bool fewer_devices = false);

// Whether anything fits. What decides it is memory alone: of what the user leaves free, the
// smallest micro-batch, the schedule with fewest micro-batches in flight, and any order of equal
// devices.
bool fits(SuggestRequest request);

bool is_uniform(const Cluster& cluster);

// The changed request's plan as a remedy, simulated; nothing where none fits after all.
std::optional<Remedy> remedy(const SuggestRequest& changed, std::string_view of, std::string instead,
                             RemedyValue value);

// The number in (low, high] nearest to `low` for which `helps` holds, when it holds for `high`, not
// for `low`, and once it does, further on.
std::int64_t nearest_that_helps(std::int64_t low, std::int64_t high, const std::function<bool(std::int64_t)>& helps);

}  // namespace parplan
