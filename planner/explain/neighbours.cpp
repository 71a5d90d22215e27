#include "planner/explain/neighbours.h"

#include <cstdint>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "planner/parallel/pipeline.h"
#include "planner/parallel/techniques.h"
#include "planner/schedule/schedules.h"

namespace parplan {
namespace {

std::vector<std::pair<std::string, ParallelSpec>> specs_one_choice_away(const OpGraph& graph, const Plan& plan) {
  std::vector<std::pair<std::string, ParallelSpec>> specs;
  const ParallelSpec& own = plan.spec;
  const auto add = [&](std::string change, const auto& alter) {
    ParallelSpec spec = own;
    alter(spec);
    if (spec != own && !illegal(graph, plan.training, spec)) specs.emplace_back(std::move(change), std::move(spec));
  };
  const auto recompute = [&](const char* change, Recompute as) {
    add(change, [&](ParallelSpec& spec) {
      spec.recompute = as;
      spec.stage_recompute.clear();
    });
  };
  recompute("without recompute", Recompute::none);
  recompute("with full recompute", Recompute::full);
  if (own.dp() > 1)
    for (int zero = 0; zero <= 3; ++zero)
      add(fmt::format("ZeRO-{}", zero), [&](ParallelSpec& spec) { spec.zero_stage = zero; });
  if (own.tp() > 1)
    add(own.sequence_parallel ? "without sequence parallelism" : "with sequence parallelism",
        [&](ParallelSpec& spec) { spec.sequence_parallel = !own.sequence_parallel; });
  if (own.pp() > 1) {
    for (const ScheduleRow& row : schedule_rows())
      add(fmt::format("schedule {}", row.name), [&](ParallelSpec& spec) { spec.schedule = row.kind; });
    add("blocks cut evenly over the stages",
        [&](ParallelSpec& spec) { spec.stage_blocks = even_stages(graph, own.pp()); });
  }
  const std::int64_t each = plan.training.global_batch / own.dp();
  std::int64_t less = own.micro_batch - 1;
  while (less > 0 && each % less != 0) --less;
  std::int64_t more = own.micro_batch + 1;
  while (more <= each && each % more != 0) ++more;
  if (less > 0) add(fmt::format("micro-batch {}", less), [&](ParallelSpec& spec) { spec.micro_batch = less; });
  if (more <= each) add(fmt::format("micro-batch {}", more), [&](ParallelSpec& spec) { spec.micro_batch = more; });
  return specs;
}

}  // namespace

std::vector<Neighbour> find_neighbours(const Inquiry& inquiry, NetworkCache& networks) {
  std::vector<Neighbour> neighbours;
  for (auto& [change, spec] : specs_one_choice_away(inquiry.graph, inquiry.plan)) {
    inquiry.say("one choice away: " + change);
    neighbours.push_back(
        {.change = change,
         .rival = rival(networks.cluster(), inquiry.simulated(networks, inquiry.plan.training, spec))});
  }
  return neighbours;
}

}  // namespace parplan
