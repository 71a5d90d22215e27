#include "planner/plan/recompute.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

using enum Recompute;

std::span<const Op> ops_of(const OpGraph& graph, const Block& block) {
  return std::span(graph.ops).subspan(static_cast<std::size_t>(block.first_op),
                                      static_cast<std::size_t>(block.last_op - block.first_op));
}

bool contains(const std::vector<TensorId>& ids, TensorId id) {
  return std::ranges::find(ids, id) != ids.end();
}

Recompute with(OpModule module) {
  switch (module) {
    case OpModule::none:
      return none;
    case OpModule::norm:
      return norms;
    case OpModule::core_attention:
      return core_attn;
    case OpModule::activation:
      return activation;
  }
  return none;
}

// Whether a tensor is widened by a product of the feed-forward, or made from one that is.
bool is_within_mlp(const OpGraph& graph, const Block& block, TensorId tensor) {
  const std::span<const Op> ops = ops_of(graph, block);
  const auto meets_activation = [&](TensorId one) {
    return std::ranges::any_of(ops, [&](const Op& op) {
      return row_of(op.kind).module == OpModule::activation && (contains(op.outputs, one) || contains(op.inputs, one));
    });
  };
  // Products of an adapter and of what it adapts are widened apart, and then added up.
  const auto is_addend = [&](const Op& op) {
    return row_of(op.kind).cost != CostClass::product && contains(op.inputs, tensor) &&
           std::ranges::any_of(op.outputs, meets_activation);
  };
  return meets_activation(tensor) || std::ranges::any_of(ops, is_addend);
}

template <Recompute modules>
bool all_but(const OpGraph& graph, const Block& block, TensorId kept) {
  const TensorId tensor = unquantized(graph, block, kept);
  for (const Op& op : ops_of(graph, block))
    if (contains(op.outputs, tensor) && recomputes_module(modules, with(row_of(op.kind).module))) return false;
  return !recomputes_module(modules, mlp) || !is_within_mlp(graph, block, tensor);
}

// torchtitan@9dec370 torchtitan/parallelisms/parallelize_llama.py, _save_list and the policy of
// selective activation checkpointing by op: what attention and every second aten.mm.default but
// those of even number give. Where query, key and value are three products there, a block has one.
bool every_second_product(const OpGraph& graph, const Block& block, TensorId tensor) {
  int product = 0;
  for (const Op& op : ops_of(graph, block)) {
    const CostClass cost = row_of(op.kind).cost;
    const bool is_kept = cost == CostClass::attention || (cost == CostClass::product && product % 2 == 0);
    if (is_kept && contains(op.outputs, tensor)) return true;
    if (cost == CostClass::product) ++product;
  }
  return false;
}

bool nothing(const OpGraph& /*graph*/, const Block& /*block*/, TensorId /*tensor*/) {
  return false;
}

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
    {.kind = every_other_product, .name = "every_other_product", .keeps = every_second_product},
    {.kind = full, .name = "full", .keeps = nothing},
};

// Modules that an engine recomputes by themselves.
struct EngineModule {
  Recompute module;
  bool Engine::*has;
};
constexpr std::array engine_modules = {
    EngineModule{core_attn, &Engine::has_core_attn_recompute},
    EngineModule{norms, &Engine::has_norms_recompute},
    EngineModule{activation, &Engine::has_activation_recompute},
    EngineModule{mlp, &Engine::has_mlp_recompute},
    EngineModule{full, &Engine::has_full_recompute},
};

// Norms and activation are elementwise work alone; `mlp` takes the first products of the
// feed-forward as well. Attention that never writes its scores has a result that is little memory
// for much work. Scores that are written are most of what a layer saves, for little work
// (Korthikanti et al. 2022, arXiv:2205.05198, section 5): they come first.
constexpr std::array searched_fused = {none, norms | activation, norms | mlp, full};
constexpr std::array searched_written = {none, core_attn, core_attn | norms | activation, core_attn | norms | mlp,
                                         full};

// What is left of these with some modules alone, without those that recompute no more than one
// before them.
struct Searched {
  std::array<Recompute, searched_written.size()> kinds{};
  std::size_t count = 0;
};
constexpr Searched searched_with(std::uint8_t modules, bool fused_attention) {
  Searched searched;
  const auto add = [&](Recompute kind) {
    const auto left = static_cast<Recompute>(static_cast<std::uint8_t>(kind) & modules);
    for (std::size_t before = 0; before < searched.count; ++before)
      if ((searched.kinds[before] | left) == searched.kinds[before]) return;
    searched.kinds[searched.count++] = left;
  };
  if (fused_attention)
    for (const Recompute kind : searched_fused) add(kind);
  else
    for (const Recompute kind : searched_written) add(kind);
  return searched;
}
constexpr std::size_t module_sets = std::size_t{2} * static_cast<std::size_t>(full);
constexpr auto every_searched = [] {
  std::array<std::array<Searched, module_sets>, 2> all;
  for (std::size_t modules = 0; modules < module_sets; ++modules)
    for (const bool fused : {false, true})
      all[fused ? 1 : 0][modules] = searched_with(static_cast<std::uint8_t>(modules), fused);
  return all;
}();

}  // namespace

std::span<const RecomputeRow> recompute_rows() {
  return rows;
}

std::span<const Recompute> searched_recomputes(const Engine& engine) {
  std::size_t modules = 0;
  for (const EngineModule& one : engine_modules)
    if (engine.*one.has) modules |= static_cast<std::size_t>(one.module);
  const Searched& searched = every_searched[engine.fused_attention ? 1 : 0][modules];
  return std::span(searched.kinds).first(searched.count);
}

const RecomputeRow& row_of(Recompute recompute) {
  const auto* const found = std::ranges::find(rows, recompute, &RecomputeRow::kind);
  PARPLAN_ASSERT(found != std::end(rows), fmt::format("recompute {}", static_cast<int>(recompute)));
  return *found;
}

const char* name(Recompute recompute) {
  return recompute == Recompute::per_stage ? "per_stage" : row_of(recompute).name;
}

std::string write_stage_recompute(const StageRecompute& stage) {
  return stage.layers == 0 ? std::string(name(stage.rule)) : fmt::format("{}:{}", name(stage.rule), stage.layers);
}

}  // namespace parplan
