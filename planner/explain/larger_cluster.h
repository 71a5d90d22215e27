#pragma once

#include <optional>

#include "planner/plan/reasons.h"
#include "planner/search/search.h"
#include "planner/search/suggest_request.h"

namespace parplan {

// The least memory per device with which the request fits; `failed` is its search.
std::optional<Remedy> more_memory(const SuggestRequest& request, const SearchResult& failed);

// The fewest devices, of the kind of the last group, with which the request fits.
std::optional<Remedy> more_devices(const SuggestRequest& request);

}  // namespace parplan
