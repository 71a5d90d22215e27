#include "planner/parallel/engine_layouts.h"

#include <algorithm>
#include <array>
#include <vector>

#include <fmt/format.h>

#include "planner/base/text.h"

namespace parplan {
namespace {

template <Recompute module>
bool recomputes(const ParallelSpec& spec) {
  return recomputes_module(spec.recompute, module) ||
         std::ranges::any_of(spec.stage_recompute,
                             [](const StageRecompute& of_stage) { return recomputes_module(of_stage.rule, module); });
}

// Whether some layers of a stage alone recompute: whole layers, or modules of them.
bool recomputes_some(const ParallelSpec& spec, bool whole_layers) {
  const auto does = [&](const StageRecompute& stage) {
    return stage.layers > 0 && (stage.rule == Recompute::full) == whole_layers;
  };
  return does({spec.recompute, spec.recompute_layers}) || std::ranges::any_of(spec.stage_recompute, does);
}

// Whether the axes are in another order than that of an empty layout; the context axis lies inside
// the data axis in any.
bool has_other_order(const ParallelSpec& spec) {
  constexpr AxisOrder plain;
  const auto place = [&](Axis axis) { return std::ranges::find(plain, axis); };
  const Axis* last = plain.begin();
  for (const Axis axis : spec.mesh.order) {
    if (axis == Axis::cp) continue;
    if (place(axis) < last || place(axis) == plain.end()) return true;
    last = place(axis);
  }
  return false;
}

constexpr std::array layout_rows = {
    EngineLayoutRow{Choice::tp, &Engine::has_tensor, "tensor parallelism", "tp must be 1",
                    [](const ParallelSpec& spec) { return spec.tp() > 1; }},
    EngineLayoutRow{Choice::sequence_parallel, &Engine::has_sequence_parallel, "sequence parallelism",
                    "sequence_parallel must be false", [](const ParallelSpec& spec) { return spec.sequence_parallel; }},
    EngineLayoutRow{Choice::tp_overlap, &Engine::has_tensor_overlap, "tensor parallelism overlapped by slices",
                    "tp_overlap must be none",
                    [](const ParallelSpec& spec) { return spec.tp_overlap == TensorOverlap::ring; }},
    EngineLayoutRow{Choice::cp, &Engine::has_context, "context parallelism", "cp must be 1",
                    [](const ParallelSpec& spec) { return spec.cp() > 1; }},
    EngineLayoutRow{Choice::cp_method, &Engine::has_context_by_keys, "keys and values of other context-parallel ranks",
                    "cp_method must be ulysses, or cp 1",
                    [](const ParallelSpec& spec) { return spec.cp() > 1 && keeps_queries(spec.cp_method); }},
    EngineLayoutRow{Choice::cp_ulysses, &Engine::has_hierarchical_context, "hierarchical context parallelism",
                    "cp_ulysses must be 1", [](const ParallelSpec& spec) { return spec.mesh.cp_ulysses > 1; }},
    EngineLayoutRow{Choice::cp_method, &Engine::has_hierarchical_gather,
                    "keys and values gathered between groups that exchange tokens for heads",
                    "cp_method must be ring, or cp_ulysses 1",
                    [](const ParallelSpec& spec) {
                      return spec.mesh.cp_ulysses > 1 && spec.cp_method == ContextMethod::all_gather;
                    }},
    EngineLayoutRow{Choice::pp, &Engine::has_pipeline, "pipelines", "pp must be 1",
                    [](const ParallelSpec& spec) { return spec.pp() > 1; }},
    EngineLayoutRow{Choice::schedule, &Engine::has_gpipe, "GPipe", "schedule must be another, such as 1f1b",
                    [](const ParallelSpec& spec) { return spec.schedule == ScheduleKind::gpipe; }},
    EngineLayoutRow{Choice::virtual_stages, &Engine::has_interleaved, "interleaved pipelines",
                    "virtual_stages must be 1 and schedule another, such as 1f1b",
                    [](const ParallelSpec& spec) {
                      return (spec.virtual_stages > 1 && !is_v_shaped(spec.schedule)) ||
                             spec.schedule == ScheduleKind::interleaved;
                    }},
    EngineLayoutRow{Choice::micro_batch_group, &Engine::has_other_groups,
                    "groups of another number of micro-batches than of ranks", "micro_batch_group must be left out",
                    [](const ParallelSpec& spec) {
                      return spec.micro_batch_group > 0 && spec.micro_batch_group != spec.pp();
                    }},
    EngineLayoutRow{Choice::schedule, &Engine::has_zero_bubble, "zero-bubble pipelines",
                    "schedule must be another, such as 1f1b",
                    [](const ParallelSpec& spec) { return runs_backward_in_parts(spec.schedule); }},
    EngineLayoutRow{Choice::mesh_order, &Engine::has_other_orders, "other orders of the mesh's axes",
                    "mesh_order must be pp-dp-tp", has_other_order},
    EngineLayoutRow{Choice::dp_method, &Engine::has_all_reduce, "data-parallel ranks that each reduce gradients",
                    "dp_method must be master, or dp 1",
                    [](const ParallelSpec& spec) { return spec.dp() > 1 && spec.dp_method == DataMethod::all_reduce; }},
    EngineLayoutRow{Choice::dp_method, &Engine::has_master, "DataParallel", "dp_method must be all_reduce",
                    [](const ParallelSpec& spec) { return spec.dp_method == DataMethod::master; }},
    EngineLayoutRow{Choice::zero_stage, &Engine::has_zero_1, "ZeRO stage 1",
                    "zero_stage must be 0, or one that shards gradients, too",
                    [](const ParallelSpec& spec) { return spec.zero_stage == 1; }},
    EngineLayoutRow{Choice::dp_shard, &Engine::has_hybrid_sharding, "hybrid sharding", "dp_shard must be 0 (all ranks)",
                    [](const ParallelSpec& spec) { return spec.mesh.dp_shard > 0; }},
    EngineLayoutRow{Choice::prefetch_depth, &Engine::has_other_prefetch, "gathers other than one block ahead",
                    "prefetch_depth must be 1", [](const ParallelSpec& spec) { return spec.prefetch_depth != 1; }},
    EngineLayoutRow{Choice::gather_unit, &Engine::has_parameter_gathers, "gathers of each parameter by itself",
                    "gather_unit must be block",
                    [](const ParallelSpec& spec) { return spec.gather_unit == GatherUnit::parameter; }},
    EngineLayoutRow{Choice::recompute, &Engine::has_core_attn_recompute, "recompute of attention's core alone",
                    "recompute must be without core_attn", recomputes<Recompute::core_attn>},
    EngineLayoutRow{Choice::recompute, &Engine::has_norms_recompute, "recompute of norms alone",
                    "recompute must be without norms", recomputes<Recompute::norms>},
    EngineLayoutRow{Choice::recompute, &Engine::has_activation_recompute, "recompute of the activation alone",
                    "recompute must be without activation", recomputes<Recompute::activation>},
    EngineLayoutRow{Choice::recompute, &Engine::has_mlp_recompute, "recompute of the feed-forward alone",
                    "recompute must be without mlp", recomputes<Recompute::mlp>},
    EngineLayoutRow{Choice::recompute, &Engine::has_full_recompute, "recompute of whole layers",
                    "recompute must not be full", recomputes<Recompute::full>},
    EngineLayoutRow{Choice::recompute, &Engine::has_every_other_product_recompute, "recompute of every other product",
                    "recompute must not be every_other_product", recomputes<Recompute::every_other_product>},
    EngineLayoutRow{Choice::recompute, &Engine::has_recompute_per_stage, "stages that recompute differently",
                    "recompute must be the same for all stages",
                    [](const ParallelSpec& spec) { return spec.recompute == Recompute::per_stage; }},
    EngineLayoutRow{Choice::recompute_layers, &Engine::has_recompute_of_some_layers,
                    "recompute of some layers of a stage", "recompute_layers must be left out: all layers recompute",
                    [](const ParallelSpec& spec) { return recomputes_some(spec, true); }},
    EngineLayoutRow{Choice::recompute_layers, &Engine::has_modules_of_some_layers,
                    "recompute of modules in some layers of a stage",
                    "recompute_layers must be left out: all layers recompute",
                    [](const ParallelSpec& spec) { return recomputes_some(spec, false); }},
    EngineLayoutRow{Choice::offload_layers, &Engine::has_offload_of_some_layers,
                    "offload of the activations of some layers", "offload_layers must be left out",
                    [](const ParallelSpec& spec) { return spec.offload_layers > 0; }},
};

// Engines with lists_shards gather each parameter by itself, whatever gather_unit is.
bool lacks(const Engine& engine, const EngineLayoutRow& row) {
  return !(engine.*row.has) && !(row.choice == Choice::gather_unit && engine.lists_shards);
}

}  // namespace

std::span<const EngineLayoutRow> engine_layout_rows() {
  return layout_rows;
}

std::optional<std::string> lacked_by_engine(const Engine& engine, const ParallelSpec& spec) {
  for (const EngineLayoutRow& row : layout_rows)
    if (lacks(engine, row) && row.uses(spec))
      return fmt::format("engine {} has no {}: {}", engine.name, row.name, row.must);
  if (!is_own(engine) && !spec.replica_micro_batches.empty())
    return fmt::format(
        "engine {} gives all replicas equally many micro-batches: replica_micro_batches must be left "
        "out",
        engine.name);
  static const int most_zero_of_any = Engine{}.most_zero;
  if (spec.zero_stage > most_zero_of_any) return std::nullopt;  // the technique's own reason
  if (spec.zero_stage > engine.most_zero)
    return fmt::format("engine {} has no ZeRO stage {}; its highest is {}", engine.name, spec.zero_stage,
                       engine.most_zero);
  if (spec.pp() > 1 && spec.zero_stage > engine.most_zero_in_pipelines)
    return fmt::format("engine {} has no ZeRO stage {} in pipelines; its highest where pp is above 1 is {}",
                       engine.name, spec.zero_stage, engine.most_zero_in_pipelines);
  return std::nullopt;
}

std::optional<std::string> lacked_by_engine(const Engine& engine, Optimizer optimizer) {
  if (is_own(engine) || optimizer != Optimizer::muon) return std::nullopt;
  return fmt::format(
      "optimizer muon is predicted as {} runs it, and engine {} would divide its matrices otherwise, or has it not; "
      "leave the engine out, or take optimizer adamw",
      Engine{}.title, engine.name);
}

std::optional<std::string> lacked_by_engine(const Engine& engine, const LayoutRequest& request) {
  ParallelSpec spec;
  const LayoutRequest whole = with_implied(engine, request);
  for (const ChoiceRow& row : choice_rows())
    if (whole[row.choice]) row.set(spec, *whole[row.choice]);
  return lacked_by_engine(engine, spec);
}

LayoutRequest with_implied(const Engine& engine, LayoutRequest request) {
  if (!engine.has_all_reduce && !request[Choice::dp_method]) request[Choice::dp_method] = DataMethod::master;
  // Other engines that offload do so without a pipeline and without recompute (illegal_offload).
  if (!is_own(engine) && given<Offload>(request, Choice::offload).value_or(Offload{}) != Offload{}) {
    if (!request[Choice::pp]) request[Choice::pp] = std::int64_t{1};
    if (!request[Choice::recompute] && !request[Choice::recompute_layers]) request[Choice::recompute] = Recompute::none;
  }
  if (request[Choice::cp_method]) return request;
  const bool has_ranks = given<std::int64_t>(request, Choice::cp).value_or(1) > 1;
  const bool has_groups = given<std::int64_t>(request, Choice::cp_ulysses).value_or(1) > 1;
  if (has_groups && !engine.has_hierarchical_gather) request[Choice::cp_method] = ContextMethod::ring;
  if (has_ranks && !has_groups && !engine.has_context_by_keys) request[Choice::cp_method] = ContextMethod::ulysses;
  return request;
}

std::string lacking_in_words(const Engine& engine) {
  std::vector<std::string> lacking;
  for (const EngineLayoutRow& row : layout_rows)
    if (lacks(engine, row) && row.choice != Choice::recompute && row.choice != Choice::recompute_layers &&
        row.choice != Choice::offload_layers)
      lacking.emplace_back(row.name);
  const int most = engine.has_pipeline ? std::min(engine.most_zero, engine.most_zero_in_pipelines) : engine.most_zero;
  if (engine.most_zero < Engine{}.most_zero) lacking.push_back(fmt::format("ZeRO above {}", engine.most_zero));
  if (most < engine.most_zero) lacking.push_back(fmt::format("ZeRO above {} in pipelines", most));
  return join(lacking);
}

}  // namespace parplan
