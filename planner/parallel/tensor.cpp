#include "planner/parallel/tensor.h"

#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/parallel/techniques.h"

namespace parplan {
namespace {

// The dim along which a parameter is cut, decided by its dims alone: a bias follows the dim of its
// weight's output; a parameter with only hidden and position dims stays whole.
std::optional<TensorDim> cut_dim(const Tensor& tensor) {
  for (const TensorDim& dim : tensor.dims)
    if (dim.dim == Dim::kv_groups || dim.dim == Dim::feature || dim.dim == Dim::vocabulary) return dim;
  return std::nullopt;
}

// A size that a degree must divide (or, for the padded vocabulary, must not exceed), or share out
// piece by piece.
struct Limit {
  Dim dim{};
  std::int64_t pieces = 0;
  std::int64_t parts = 1;  // TensorDim::parts, of a piece
  bool padded = false;
  bool operator==(const Limit&) const = default;
  bool allows(int degree) const {
    if (padded) return degree <= pieces;
    return divides_into({.dim = dim, .size = pieces, .granule = 1, .parts = parts}, degree);
  }
  std::int64_t most() const { return pieces * parts; }
};

// Those of parameters; equal ones more than once. Muon gathers a matrix from ranks that hold rows
// or columns of it: none may be a copy.
template <class Visit>
void visit_limits(const OpGraph& graph, const TrainingSpec& training, const Visit& visit) {
  const bool may_copy = training.optimizer != Optimizer::muon;
  for (const int first : graph.kinds)
    for (int i = graph.blocks[first].first_op; i < graph.blocks[first].last_op; ++i)
      for (const TensorId id : graph.ops[i].parameters)
        if (const auto dim = cut_dim(graph.tensors[id]))
          visit(Limit{dim->dim, dim->granules(), may_copy ? dim->parts : 1, dim->dim == Dim::vocabulary});
}

Limit sequence_limit(const OpGraph& graph) {
  return {Dim::sequence, graph.joins_sequences ? 1 : graph.sequence};
}

std::vector<Limit> limits(const OpGraph& graph, const TrainingSpec& training, bool sequence_parallel) {
  std::vector<Limit> all;
  visit_limits(graph, training, [&](const Limit& limit) {
    if (std::ranges::find(all, limit) == all.end()) all.push_back(limit);
  });
  // Heads first, then the feed-forward width: the order in which people think of them.
  std::ranges::stable_sort(all, {}, [](const Limit& limit) { return limit.dim; });
  if (sequence_parallel) all.push_back(sequence_limit(graph));
  return all;
}

// Whether any parameter can be cut.
bool splits(const std::vector<Limit>& all) {
  return std::ranges::any_of(all, [](const Limit& limit) { return limit.dim != Dim::sequence; });
}

bool allowed(const std::vector<Limit>& all, int degree) {
  if (degree == 1) return true;
  return splits(all) && std::ranges::all_of(all, [&](const Limit& limit) { return limit.allows(degree); });
}

std::string describe(const OpGraph& graph, const Limit& limit) {
  if (limit.dim == Dim::kv_groups) {
    for (const Op& op : graph.ops)
      if (row_of(op.kind).cost == CostClass::attention &&
          (op.attributes.kv_heads == limit.pieces || op.attributes.kv_heads == op.attributes.heads))
        return fmt::format("{} attention heads ({} key/value groups)", op.attributes.heads, limit.pieces);
    return fmt::format("{} key/value groups", limit.pieces);
  }
  if (limit.dim == Dim::feature) return fmt::format("a feed-forward width of {}", limit.pieces);
  if (limit.dim == Dim::vocabulary) return fmt::format("a vocabulary of {}", limit.pieces);
  return fmt::format("a sequence of {} tokens (sequence parallelism is on)", limit.pieces);
}

}  // namespace

std::vector<int> legal_tensor_degrees(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec,
                                      int most) {
  if (!training.engine.has_tensor) return {1};
  const std::vector<Limit> all = limits(graph, training, spec.sequence_parallel);
  std::int64_t last = splits(all) ? most : std::min(most, 1);
  for (const Limit& limit : all) last = std::min(last, limit.most());
  std::vector<int> degrees;
  for (int degree = spec.sequence_parallel ? 2 : 1; degree <= last; ++degree)
    if (allowed(all, degree)) degrees.push_back(degree);
  return degrees;
}

std::optional<std::string> illegal_tensor(const OpGraph& graph, const TrainingSpec& training,
                                          const ParallelSpec& spec) {
  const int tp = spec.tp();
  if (tp < 1) return fmt::format("the tensor-parallel degree is {}; it must be at least 1", tp);
  if (spec.sequence_parallel && tp == 1)
    return "sequence parallelism spreads work over tensor-parallel ranks, and there is 1 (tp 1)";
  if (spec.tp_overlap == TensorOverlap::ring && !spec.sequence_parallel)
    return "tp_overlap ring passes on the tokens that tensor-parallel ranks share out, and sequence_parallel is false; "
           "it must be true, or tp_overlap none";
  if (spec.sequence_parallel && graph.joins_sequences)
    return "sequence parallelism cannot cut activations whose rows are taken apart, such as those of an encoder and a "
           "decoder, or of an image and its class: leave --sequence-parallel out";
  const std::vector<Limit> all = limits(graph, training, spec.sequence_parallel);
  if (allowed(all, tp)) return std::nullopt;
  const std::vector<int> legal = legal_tensor_degrees(graph, training, spec, std::numeric_limits<int>::max());
  const std::string degrees = list_degrees({legal.begin(), legal.end()});
  for (const Limit& limit : all)
    if (!limit.allows(tp))
      return fmt::format("tensor parallelism over {} cannot split {}{}; legal degrees: {}", tp, describe(graph, limit),
                         limit.dim == Dim::kv_groups && training.optimizer == Optimizer::muon
                             ? " where optimizer muon gathers matrices without copies"
                             : "",
                         degrees);
  return fmt::format("tensor parallelism over {} finds nothing to split in this model; legal degrees: {}", tp, degrees);
}

bool allows_tensor(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec) {
  const int tp = spec.tp();
  if (tp < 1 || (spec.sequence_parallel && (tp == 1 || graph.joins_sequences)) ||
      (spec.tp_overlap == TensorOverlap::ring && !spec.sequence_parallel))
    return false;
  if (tp == 1) return true;
  bool splits = false, allows = !spec.sequence_parallel || sequence_limit(graph).allows(tp);
  visit_limits(graph, training, [&](const Limit& limit) {
    splits = true;
    allows = allows && limit.allows(tp);
  });
  return splits && allows;
}

void place_tensor(const OpGraph& graph, const ParallelSpec& spec, Placements& placements) {
  for (TensorId id : parameters(graph)) {
    const Tensor& tensor = graph.tensors[id];
    const auto dim = spec.tp() > 1 ? cut_dim(tensor) : std::nullopt;
    const Placement placement = dim ? shard(dim->dim) : replicate();
    const std::string_view name = name_in_block(tensor.name);
    auto entry = placements.parameters.find(name);
    if (entry == placements.parameters.end()) {
      entry = placements.parameters.emplace(name, TensorLayout{}).first;
      entry->second.tp = placement;
    }
    PARPLAN_ASSERT(entry->second.tp == placement,
                   fmt::format("{} is {}, and in an earlier layer it was {}", tensor.name, write_placement(placement),
                               write_placement(entry->second.tp)));
  }
  placements.residual.tp = spec.sequence_parallel && spec.tp() > 1 ? shard(Dim::sequence) : replicate();
}

}  // namespace parplan
