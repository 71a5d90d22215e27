#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "planner/plan/reasons.h"
#include "planner/search/suggest_request.h"

namespace parplan {

// The memory of the candidate that needs the least among those that fit, on all devices in their
// order; with `fewer_devices` of the first arrangement of groups of nodes in which any does, on any
// number of them. Nothing is simulated: the estimate knows a Program's memory to the byte.
std::optional<Bytes> least_that_fits(const SuggestRequest& request, bool fewer_devices);

// Whether any plan fits, on fewer devices too where the request allows that. Memory alone decides,
// so the free choices are set to the smallest micro-batch, the schedule with the fewest
// micro-batches in flight and any order of equal devices.
bool fits(SuggestRequest request);

bool is_uniform(const Cluster& cluster);

// The changed request's plan as a remedy, simulated; nothing where none fits after all.
std::optional<Remedy> remedy(const SuggestRequest& changed, std::string_view of, std::string instead,
                             RemedyValue value);

// The number in (low, high] nearest to `low` for which `helps` holds. `helps` must hold for `high`,
// not for `low`, and for every number above one for which it holds.
std::int64_t nearest_that_helps(std::int64_t low, std::int64_t high, const std::function<bool(std::int64_t)>& helps);

}  // namespace parplan
