#pragma once

#include <vector>

#include "planner/plan/explanation.h"
#include "planner/search/request.h"
#include "planner/search/search.h"

namespace parplan {

// What would make a request fit of which `failed` is the search: more memory a device, more
// devices, each given part of the layout left free, a smaller micro-batch, global batch or
// sequence, another precision, an optimizer with less state. Each is the smallest change of its
// kind that halving finds, for batches with a look at those next to it (with other divisors more
// may fit worse), and its plan is simulated; kinds that do not help are absent.
std::vector<Remedy> find_remedies(const SuggestRequest& request, const SearchResult& failed);

}  // namespace parplan
