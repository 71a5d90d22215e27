#include "planner/plan/recompute.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

using enum Recompute;

constexpr bool has(Recompute set, Recompute module) {
  return (static_cast<std::uint8_t>(set) & static_cast<std::uint8_t>(module)) != 0;
}

std::span<const Op> ops_of(const OpGraph& graph, const Block& block) {
  return std::span(graph.ops).subspan(static_cast<std::size_t>(block.first_op),
                                      static_cast<std::size_t>(block.last_op - block.first_op));
}

bool contains(const std::vector<TensorId>& ids, TensorId id) { return std::ranges::find(ids, id) != ids.end(); }

Recompute with(OpModule module) {
  switch (module) {
    case OpModule::none: return none;
    case OpModule::norm: return norms;
    case OpModule::core_attention: return core_attn;
    case OpModule::activation: return activation;
  }
  return none;
}

// Whether a tensor is widened by a product of the feed-forward, or made from one that is.
bool is_within_mlp(const OpGraph& graph, const Block& block, TensorId tensor) {
  const auto is_of = [&](const Op& op) {
    return row_of(op.kind).module == OpModule::activation &&
           (contains(op.outputs, tensor) || contains(op.inputs, tensor));
  };
  return std::ranges::any_of(ops_of(graph, block), is_of);
}

template <Recompute modules>
bool all_but(const OpGraph& graph, const Block& block, TensorId tensor) {
  for (const Op& op : ops_of(graph, block))
    if (contains(op.outputs, tensor) && has(modules, with(row_of(op.kind).module))) return false;
  return !has(modules, mlp) || !is_within_mlp(graph, block, tensor);
}

bool nothing(const OpGraph& /*graph*/, const Block& /*block*/, TensorId /*tensor*/) { return false; }

template <Recompute modules>
constexpr RecomputeRow row(const char* name) {
  return {.kind = modules, .name = name, .keeps = all_but<modules>};
}

constexpr RecomputeRow rows[] = {
    row<none>("none"),
    row<norms>("norms"),
    row<activation>("activation"),
    row<norms | activation>("norms+activation"),
    row<core_attn>("core_attn"),
    row<core_attn | norms>("core_attn+norms"),
    row<core_attn | activation>("core_attn+activation"),
    row<core_attn | norms | activation>("core_attn+norms+activation"),
    row<mlp>("mlp"),
    row<norms | mlp>("norms+mlp"),
    row<core_attn | mlp>("core_attn+mlp"),
    row<core_attn | norms | mlp>("core_attn+norms+mlp"),
    {.kind = full, .name = "full", .keeps = nothing},
};

// The second takes elementwise work alone, the third the first products of the feed-forward as
// well. Attention never writes its scores, so its own result is little memory for much work.
constexpr std::array searched = {none, norms | activation, norms | mlp, full};

}  // namespace

std::span<const RecomputeRow> recompute_rows() { return rows; }

std::span<const Recompute> searched_recomputes() { return searched; }

const RecomputeRow& row_of(Recompute recompute) {
  const auto* const found = std::ranges::find(rows, recompute, &RecomputeRow::kind);
  PARPLAN_ASSERT(found != std::end(rows), fmt::format("recompute {}", static_cast<int>(recompute)));
  return *found;
}

const char* name(Recompute recompute) {
  return recompute == Recompute::per_stage ? "per_stage" : row_of(recompute).name;
}

}  // namespace parplan
