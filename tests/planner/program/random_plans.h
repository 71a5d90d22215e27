#pragma once

#include <algorithm>
#include <array>
#include <random>
#include <string>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/parallel/recompute.h"
#include "planner/parallel/techniques.h"
#include "planner/program/lower.h"
#include "planner/schedule/schedules.h"

// Jobs of tiny models under seeded random plans.
namespace parplan {

inline OpGraph graph_of(const std::string& model) {
  const std::string folder = PARPLAN_SOURCE_DIR "/tests/data/models";
  return build_graph(load_model(folder + "/" + model + ".yaml", folder).spec, 16);
}

inline Job job_of(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec,
                  BackendKind backend = BackendKind::cpu) {
  return {.graph = &graph, .training = training, .layout = lay_out(spec, place(graph, spec)),
          .schedule = schedule_of(spec, training),
          .backend = backend, .overhead = {}};
}

inline std::string describe(const ParallelSpec& spec) {
  return fmt::format(
      "dp {} tp {} pp {} cp {} by {} in groups of {} order {} sequence parallel {} overlap {} zero {} in groups of {} "
      "ahead {} by {} micro-batch {} "
      "{} recompute {} tied gradients {} input slots {} stages [{}] data by {}",
      spec.dp(), spec.tp(), spec.pp(), spec.cp(), name(spec.cp_method), spec.mesh.cp_ulysses,
      write_order(spec.mesh.order), spec.sequence_parallel, name(spec.tp_overlap), spec.zero_stage, spec.mesh.dp_shard,
      spec.prefetch_depth, name(spec.gather_unit), spec.micro_batch, name(spec.schedule),
      write_stage_recompute({spec.recompute, spec.recompute_layers}), name(spec.tied_gradients), name(spec.input_slots),
      fmt::join(spec.stage_blocks, ", "), name(spec.dp_method));
}

// A legal layout of `ranks` ranks; drawn again until the techniques allow it.
inline ParallelSpec random_spec(const OpGraph& graph, const TrainingSpec& training, int ranks, std::mt19937& random) {
  const auto pick = [&](auto... values) {
    const std::array<std::common_type_t<decltype(values)...>, sizeof...(values)> all{values...};
    return all[random() % all.size()];
  };
  for (;;) {
    ParallelSpec spec;
    const int dp = pick(1, 2, 4, 8), tp = pick(1, 2, 4), pp = pick(1, 2, 3, 4), cp = pick(1, 1, 2, 4);
    if (dp * tp * pp * cp != ranks) continue;
    spec.mesh.degree = {.pp = pp, .dp = dp, .cp = cp, .tp = tp};
    if (cp > 1) spec.cp_method = pick(ContextMethod::all_gather, ContextMethod::ulysses, ContextMethod::ring);
    std::shuffle(spec.mesh.order.begin(), spec.mesh.order.end(), random);
    spec.sequence_parallel = pick(false, true) && tp > 1;
    spec.zero_stage = dp * cp > 1 ? pick(0, 1, 2, 3) : 0;
    if (spec.zero_stage > 0 && dp * cp >= 4 && pick(false, true)) spec.mesh.dp_shard = 2;
    spec.micro_batch = pick(1, 2);
    spec.schedule = pick(ScheduleKind::gpipe, ScheduleKind::one_f_one_b, ScheduleKind::zero_bubble_h1);
    spec.recompute = recompute_rows()[random() % recompute_rows().size()].kind;
    spec.tied_gradients = pick(TiedGradients::together, TiedGradients::apart);
    spec.input_slots = pick(InputSlots::in_flight, InputSlots::one_more);
    spec.stage_blocks.assign(static_cast<std::size_t>(pp), 1);
    for (int left = static_cast<int>(graph.blocks.size()) - pp; left > 0; --left)
      ++spec.stage_blocks[random() % spec.stage_blocks.size()];
    std::mt19937 apart = random;  // so that the draw changes no others
    if (spec.sequence_parallel && apart() % 2 == 0) spec.tp_overlap = TensorOverlap::ring;
    if (runs_backward_in_parts(spec.schedule) && pp > 1 && 2 * pp <= static_cast<int>(graph.blocks.size()) &&
        apart() % 2 == 0) {
      spec.schedule = apart() % 2 == 0 ? ScheduleKind::zero_bubble_v : ScheduleKind::dualpipe_v;
      spec.virtual_stages = 2;
      spec.stage_blocks.resize(static_cast<std::size_t>(2 * pp), 0);
      // Each block more is taken from a stage that has two.
      for (int stage = pp; stage < 2 * pp; ++stage) {
        --*std::ranges::max_element(spec.stage_blocks);
        ++spec.stage_blocks[static_cast<std::size_t>(stage)];
      }
      std::ranges::shuffle(spec.stage_blocks, apart);
    }
    if (spec.recompute != Recompute::none && apart() % 2 == 0)
      spec.recompute_layers = std::min(static_cast<int>(apart() % 3), most_layers_of_a_stage(graph, spec));
    if (cp > 2 && keeps_queries(spec.cp_method) && apart() % 2 == 0) spec.mesh.cp_ulysses = 2;
    if (spec.zero_stage == 3 && apart() % 2 == 0) spec.prefetch_depth = std::array{0, 2, 3}[apart() % 3];
    if (spec.zero_stage == 3 && apart() % 2 == 0) spec.gather_unit = GatherUnit::parameter;
    if (!illegal(graph, training, spec)) return spec;
  }
}

// The same with a master half of the time where all ranks are data-parallel.
inline ParallelSpec or_with_master(ParallelSpec spec, const std::mt19937& random) {
  std::mt19937 apart = random;  // so that the draw changes no others
  if (spec.dp() == 1 || spec.dp() < spec.mesh.size() || apart() % 2 != 0) return spec;
  spec.dp_method = DataMethod::master;
  spec.zero_stage = spec.mesh.dp_shard = 0;
  return spec;
}

}  // namespace parplan
