#pragma once

#include <compare>
#include <cstdint>
#include <span>
#include <string>

#include "planner/graph/engine.h"
#include "planner/graph/op_graph.h"

namespace parplan {

// What is computed again in the backward instead of kept from the forward: nothing, all but the
// block's input, or the results of some modules of a block, as in Megatron-LM's selective recompute
// (--recompute-modules; Korthikanti et al. 2022, arXiv:2205.05198, section 5). `mlp` is all between
// its first products and its last, so `activation` is a part of it. `every_other_product` keeps
// attention's results and those of a block's first, third ... product, as torchtitan's selective
// checkpointing by op. `per_stage`: each stage has its own value. Bits: rows hold the combinations
// that there are.
enum class Recompute : std::uint8_t {
  none = 0,
  core_attn = 1,
  norms = 2,
  activation = 4,
  mlp = 8,
  full = 16,
  every_other_product = 32,
  per_stage = 64
};
constexpr Recompute operator|(Recompute a, Recompute b) {
  return static_cast<Recompute>(static_cast<std::uint8_t>(a) | static_cast<std::uint8_t>(b));
}
const char* name(Recompute recompute);

// What a stage recomputes: its first `layers` layers recompute by the rule, its others nothing, as
// Megatron-LM's block method has it (--recompute-method block --recompute-num-layers). 0 stands for
// all of its layers.
struct StageRecompute {
  Recompute rule = Recompute::none;  // not per_stage
  int layers = 0;
  StageRecompute() = default;
  StageRecompute(Recompute of_all) : rule(of_all) {}  // NOLINT(google-explicit-constructor): a rule for all layers
  StageRecompute(Recompute of_first, int number) : rule(of_first), layers(number) {}
  auto operator<=>(const StageRecompute&) const = default;
};
std::string write_stage_recompute(const StageRecompute& stage);  // "none", "full", "full:3"

// What a block between the first and the last keeps. The forward ops whose results the backward
// reads and does not find are executed again before it, from what is kept.
struct RecomputeRow {
  Recompute kind{};
  const char* name = nullptr;  // "norms+activation"
  // Whether the block keeps a tensor that its backward reads; it keeps its input in any case.
  bool (*keeps)(const OpGraph& graph, const Block& block, TensorId tensor) = nullptr;
};
// All that a stage can choose from.
std::span<const RecomputeRow> recompute_rows();
// Those that a search chooses from unless a user names another, from the fastest to the one that
// keeps least: of what the engine has. Attention's core is among them where its scores are written.
std::span<const Recompute> searched_recomputes(const Engine& engine);
// Whether a stage that recomputes `own` recomputes this module by itself.
constexpr bool recomputes_module(Recompute own, Recompute module) {
  return own != Recompute::per_stage && (static_cast<std::uint8_t>(own) & static_cast<std::uint8_t>(module)) != 0;
}
// InternalError for per_stage.
const RecomputeRow& row_of(Recompute recompute);

}  // namespace parplan
