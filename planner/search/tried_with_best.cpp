#include "planner/search/tried_with_best.h"

#include <algorithm>

#include "planner/base/text.h"
#include "planner/parallel/techniques.h"
#include "planner/search/space_rows.h"

namespace parplan {
namespace {

bool may_group_heads(const SearchedSpace& space) {
  return space.training.engine.has_hierarchical_context && space.width.most_context_ranks > 1;
}

// Groups of context-parallel ranks that exchange tokens for heads pay inside a node.
std::vector<ParallelSpec> groups_of_heads(const BestLayout& best) {
  const SearchedSpace& space = best.space;
  std::vector<ParallelSpec> specs;
  ParallelSpec spec = best.layout;
  for (const ContextMethod method : context_methods) {
    if (given<ContextMethod>(space.request, Choice::cp_method).value_or(method) != method) continue;
    spec.cp_method = method;
    for (const std::int64_t ranks : divisors(spec.cp())) {
      spec.mesh.cp_ulysses = static_cast<int>(ranks);
      if (is_legal(space.graph, space.training, spec) && best.networks.exchange(spec.mesh).nodes <= 1)
        specs.push_back(spec);
    }
  }
  return specs;
}

bool may_overlap_tensor_ranks(const SearchedSpace& space) {
  return space.training.engine.has_tensor_overlap &&
         given<bool>(space.request, Choice::sequence_parallel).value_or(true);
}

// Products by slices beside the ring of the tensor axis pay inside a node. What is waited for is a
// part of what a rank does, and of what others wait for it: no plan gains more.
std::vector<ParallelSpec> tensor_rings(const BestLayout& best) {
  ParallelSpec spec = best.layout;
  if (spec.tp() == 1 || best.networks.group(spec.mesh, Axis::tp).nodes > 1) return {};
  const Seconds waits = best.time.exposed[Axis::tp], busy = best.time.compute + best.time.recompute + waits;
  if (best.behind * (1.0 - waits / busy) >= 1.0) return {};
  spec.sequence_parallel = true;
  spec.tp_overlap = TensorOverlap::ring;
  return {spec};
}

}  // namespace

std::span<const TriedRow> tried_rows() {
  static const std::vector<TriedRow> rows = {
      {.choice = Choice::cp_ulysses,
       .words = "cp_ulysses with any cp_method",
       .with_each = false,
       .applies = may_group_heads,
       .needs = {},
       .layouts = groups_of_heads},
      {.choice = Choice::tp_overlap,
       .words = "tp_overlap ring",
       .with_each = true,
       .applies = may_overlap_tensor_ranks,
       .needs = {{Choice::sequence_parallel, true}},
       .layouts = tensor_rings},
  };
  return rows;
}

bool is_tried(const TriedRow& row, const SearchedSpace& space) {
  return space.objective != Objective::memory && !space.request[row.choice] && row.applies(space);
}

std::string tried_in_words(const SearchedSpace& space, const Space::NamedValues& named) {
  const auto has = [&](const std::pair<Choice, ChoiceValue>& needed) {
    const auto& [choice, value] = needed;
    if (space.request[choice]) return *space.request[choice] >= value;
    const auto values = std::ranges::find(named, choice, &Space::NamedValues::value_type::first);
    return values != named.end() && !values->second.empty() && values->second.back() >= value;
  };
  std::vector<std::string> tried;
  for (const TriedRow& row : tried_rows())
    if (is_tried(row, space) && (!row.needs || has(*row.needs))) tried.emplace_back(row.words);
  return tried.empty() ? "" : "; with the layouts of the best plans also " + join(tried);
}

}  // namespace parplan
