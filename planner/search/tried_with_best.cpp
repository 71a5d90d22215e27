#include "planner/search/tried_with_best.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <set>
#include <utility>
#include <variant>

#include "planner/base/text.h"
#include "planner/parallel/pipeline.h"
#include "planner/parallel/techniques.h"
#include "planner/plan/recompute.h"
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

bool may_group_micro_batches(const SearchedSpace& space) {
  const Engine& engine = space.training.engine;
  return engine.has_pipeline && engine.has_interleaved && engine.has_other_groups && space.cluster.devices() > 1 &&
         given<std::int64_t>(space.request, Choice::pp).value_or(2) > 1 && !space.request[Choice::stage_blocks] &&
         given<ScheduleKind>(space.request, Choice::schedule).value_or(ScheduleKind::interleaved) ==
             ScheduleKind::interleaved;
}

// Groups of other sizes hold other activations: what recomputes is chosen anew.
std::span<const Recompute> recomputes_for(const SearchedSpace& space, const ParallelSpec& layout) {
  if (space.request[Choice::recompute] || space.request[Choice::recompute_layers]) return {&layout.recompute, 1};
  return searched_recomputes(space.training.engine);
}

// The layout's, and the next smaller and larger ones, of which each has another number.
std::vector<std::int64_t> sizes_for(const SearchedSpace& space, const SpaceContext& context,
                                    const ParallelSpec& layout) {
  std::vector<std::int64_t> sizes = {layout.micro_batch};
  if (space.request[Choice::micro_batch]) return sizes;
  const SpaceRow& row = space_row_of(Choice::micro_batch);
  for (const ChoiceValue& size : row.neighbours(row, context, layout)) sizes.push_back(std::get<std::int64_t>(size));
  return sizes;
}

// Those with an interleaved layout's micro-batches and recompute, or with any number of stages of
// another's.
std::vector<ParallelSpec> groups_of_these(const SpaceContext& context, const LayoutRequest& request,
                                          const ParallelSpec& layout) {
  const std::int64_t count = micro_batches(layout, context.training), ranks = layout.pp();
  std::set<std::int64_t> groups = {next_group(count, layout.pp()), 2 * ranks, count};
  std::erase_if(groups, [&](std::int64_t group) {
    return group <= ranks || !allows_group(count, layout.pp(), group);
  });
  ParallelSpec spec = layout;
  spec.schedule = ScheduleKind::interleaved;
  std::vector<ChoiceValue> stages = {std::int64_t{spec.virtual_stages}};
  if (layout.schedule != ScheduleKind::interleaved) {
    // The space has such pipelines where groups of as many as ranks divide the number.
    if (count % ranks == 0) return {};
    stages.clear();
    if (const auto asked = given<std::int64_t>(request, Choice::virtual_stages)) stages = {*asked};
    else space_row_of(Choice::virtual_stages).values(context, spec, stages);
  }
  std::vector<ParallelSpec> specs;
  for (const ChoiceValue& number : stages)
    for (const std::int64_t group : groups) {
      spec.virtual_stages = static_cast<int>(std::get<std::int64_t>(number));
      spec.micro_batch_group = static_cast<int>(group);
      if (is_legal(context.graph, context.training, spec)) specs.push_back(spec);
    }
  return specs;
}

// Larger groups wait less for transfers, and allow numbers of micro-batches that are no multiple of
// the ranks: two groups' worth, the smallest that the number allows, and all of them.
std::vector<ParallelSpec> groups_of_micro_batches(const BestLayout& best) {
  const SearchedSpace& space = best.space;
  if (best.layout.pp() == 1 || best.layout.zero_stage > 1 || !best.layout.replica_micro_batches.empty()) return {};
  const SpaceContext context{space.graph, space.training, space.cluster.devices(), true, space.width};
  std::vector<ParallelSpec> specs;
  for (const std::int64_t size : sizes_for(space, context, best.layout))
    for (const Recompute recompute : recomputes_for(space, best.layout)) {
      ParallelSpec layout = best.layout;
      layout.micro_batch = size;
      layout.recompute = recompute;
      std::ranges::move(groups_of_these(context, space.request, layout), std::back_inserter(specs));
    }
  return specs;
}

}  // namespace

std::span<const TriedRow> tried_rows() {
  static const std::vector<TriedRow> rows = {
      {.choice = Choice::micro_batch_group,
       .words = "interleaved in other groups of micro-batches",
       .with_each = false,
       .applies = may_group_micro_batches,
       .needs = {},
       .layouts = groups_of_micro_batches},
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
