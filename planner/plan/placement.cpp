#include "planner/plan/placement.h"

#include <array>
#include <vector>

#include <fmt/format.h>

#include "planner/base/enum_index.h"
#include "planner/base/error.h"
#include "planner/base/text.h"

namespace parplan {
namespace {

// Every placement as text; Shard appears once per dim.
struct Spelling {
  std::string text;
  Placement placement;
};
std::vector<Spelling> spellings() {
  std::vector<Spelling> all = {{"Replicate", replicate()}};
  for (std::size_t d = 0; d < count_of<Dim>; ++d) {
    const Dim dim = static_cast<Dim>(d);
    all.push_back({fmt::format("Shard({})", name(dim)), shard(dim)});
  }
  all.push_back({"FlatShard", flat_shard()});
  all.push_back({"Partial(sum)", partial_sum()});
  all.push_back({"Partial(max)", partial_max()});
  all.push_back({"First", on_first()});
  return all;
}

// What redistributes a tensor from the row's kind to the column's over one axis, as in PyTorch's
// DTensor; `no` marks pairs without meaning. Shard to another Shard is decided by the dims. A
// maximum has no reduce-scatter because nothing asks for one: maxima are per token and small.
using enum Redistribution;
struct Pair {
  bool allowed = false;
  Redistribution redistribution = none;
};
constexpr Pair no{};
constexpr Pair with(Redistribution redistribution) { return {true, redistribution}; }
constexpr std::array<std::array<Pair, 6>, 6> pairs = {{
    //                 Replicate             Shard                 FlatShard
    //                 Partial(sum)  Partial(max)  First
    /* Replicate    */ {{with(none),           with(slice),          with(slice),
                         no,         no,         with(gather)}},
    /* Shard        */ {{with(all_gather),     with(all_to_all),     no,                   no,         no,         no}},
    /* FlatShard    */ {{with(all_gather),     no,                   with(none),           no,         no,         no}},
    /* Partial(sum) */ {{with(all_reduce_sum), with(reduce_scatter), with(reduce_scatter),
                         with(none), no,         no}},
    /* Partial(max) */ {{with(all_reduce_max), no,                   no,                   no,         with(none), no}},
    /* First        */ {{with(scatter),        no,                   no,
                         no,         no,         with(none)}},
}};

}  // namespace

std::string write_placement(Placement placement) {
  for (const Spelling& s : spellings())
    if (s.placement == placement) return s.text;
  assertion_failed("placement has a spelling", __FILE__, __LINE__,
                   fmt::format("kind {}, dim {}", static_cast<int>(placement.kind), static_cast<int>(placement.dim)));
}

Placement parse_placement(const std::string& text) {
  std::vector<std::string> allowed;
  for (const Spelling& s : spellings()) {
    if (s.text == text) return s.placement;
    allowed.push_back(s.text);
  }
  throw ConfigError(fmt::format("expected a placement, one of {}, found '{}'{}", join(allowed), text,
                                did_you_mean(text, allowed)));
}

const char* name(Redistribution redistribution) {
  constexpr std::array<const char*, 9> names = {"none",       "all-reduce (sum)", "all-reduce (max)",
                                                "reduce-scatter", "all-gather", "slice", "all-to-all",
                                                "gather", "scatter"};
  const auto i = static_cast<std::size_t>(redistribution);
  PARPLAN_ASSERT(i < names.size(), fmt::format("redistribution {}", i));
  return names[i];
}

Redistribution redistribute(Placement from, Placement to) {
  if (from == to) return Redistribution::none;
  const Pair pair = pairs[index_of(from.kind)][index_of(to.kind)];
  if (!pair.allowed)
    throw InternalError(fmt::format("no redistribution takes {} to {}", write_placement(from), write_placement(to)));
  return pair.redistribution;
}

std::vector<RedistributionStep> redistribute(const TensorLayout& from, const TensorLayout& to) {
  std::vector<RedistributionStep> steps;
  for (const Axis axis : inner_axes_first)
    if (const Redistribution redistribution = redistribute(from[axis], to[axis]);
        redistribution != Redistribution::none)
      steps.push_back({axis, redistribution});
  return steps;
}

Placement gradient_placement(Placement placement) {
  switch (placement.kind) {
    case PlacementKind::replicate: return partial_sum();
    case PlacementKind::partial_sum: return replicate();
    case PlacementKind::shard:
    case PlacementKind::flat_shard:
    case PlacementKind::first: return placement;
    case PlacementKind::partial_max: break;
  }
  throw InternalError("a Partial(max) tensor has no gradient");
}

DataShards data_shards(const Placements& placements, int replicas) {
  const auto is_shard = [&](Placement placement) { return replicas > 1 && placement == flat_shard(); };
  return {.parameters = is_shard(placements.state.parameters.dp),
          .gradients = is_shard(placements.state.gradients.dp),
          .optimizer = is_shard(placements.state.optimizer.dp)};
}

std::string_view name_in_block(std::string_view parameter) {
  // "layers.3.mlp.up.weight": a word, a number, the rest.
  const std::size_t first = parameter.find('.');
  if (first == std::string_view::npos) return parameter;
  const std::size_t second = parameter.find('.', first + 1);
  if (second == std::string_view::npos || second == first + 1) return parameter;
  const bool numbered = parameter.find_first_not_of("0123456789", first + 1) == second;
  return numbered ? parameter.substr(second + 1) : parameter;
}

}  // namespace parplan
