#pragma once

#include <vector>

#include "planner/plan/reasons.h"
#include "planner/search/search.h"
#include "planner/search/suggest_request.h"

namespace parplan {

// What would make a request fit whose search `failed`: more memory per device, more devices, each
// given part of the layout left free, parameters gathered late, sequences shared by
// context-parallel ranks, what is kept on the host or its drives, a smaller global batch, a shorter
// sequence, another precision, an optimizer with less state, and, where all of a model is trained,
// LoRA adapters in its place, which trains something else. Each is the smallest change of its
// kind that bisection finds (batches next to it are tried too, since other divisors may fit worse),
// and its plan is simulated; kinds that do not help are absent.
std::vector<Remedy> find_remedies(const SuggestRequest& request, const SearchResult& failed);

}  // namespace parplan
