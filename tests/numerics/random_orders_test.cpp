// A user's own schedules: whatever find_fault accepts trains as the reference does.
#include <doctest/doctest.h>

#include <map>
#include <optional>
#include <random>
#include <string>

#include <fmt/format.h>

#include "planner/parallel/techniques.h"
#include "planner/plan/schedule.h"
#include "tests/numerics/plan_runs.h"
#include "tests/planner/schedule/random_orders.h"

namespace parplan {

using namespace testing;

namespace {

std::string write(const Schedule& schedule) {
  std::string text;
  for (const std::vector<Action>& actions : schedule.ranks) {
    for (const Action& action : actions) text += write_action(action) + " ";
    text += "/ ";
  }
  return text;
}

}  // namespace

TEST_CASE("random legal orders, each stage its own, train as the reference does, to the bit of any other order") {
  std::mt19937 random(20261122);
  const std::int64_t steps = 2;
  const OpGraph graph = graph_of("tiny-gpt2");
  std::map<std::int64_t, Outcome> references;           // by global batch
  std::map<std::string, Outcome> ascending;             // by layout
  int ran = 0, refused = 0;
  while (ran < 120 || refused < 30) {
    const int stages = 2 + static_cast<int>(random() % 3), count = 2 + static_cast<int>(random() % 4);
    const Backwards backwards = random() % 2 == 0 ? Backwards::whole : Backwards::in_parts;
    ParallelSpec spec;
    spec.mesh.degree = {.pp = stages, .dp = 1 + static_cast<int>(random() % 2)};
    spec.zero_stage = spec.dp() > 1 ? static_cast<int>(random() % (backwards == Backwards::whole ? 4 : 2)) : 0;
    if (random() % 3 == 0) spec.recompute = random() % 2 == 0 ? Recompute::full : Recompute::norms;
    spec.schedule = ScheduleKind::gpipe;
    if (ran % 2 != 0) spec.input_slots = InputSlots::one_more;
    spec.stage_blocks.assign(static_cast<std::size_t>(stages), 1);
    spec.stage_blocks[random() % spec.stage_blocks.size()] += static_cast<int>(graph.blocks.size()) - stages;
    TrainingSpec training = training_of();
    training.global_batch = count * spec.dp();
    Job job = job_of(graph, training, spec);
    job.schedule = random_orders(stages, count, random() % 5 == 0, random, backwards);
    const std::string what = describe(spec) + ": " + write(job.schedule);
    INFO(what);
    if (const std::optional<std::string> fault = find_fault(job.schedule, count)) {
      INFO(*fault);
      // Two actions that wait for each other, or that meet as neighbours; both are named.
      CHECK((fault->starts_with("the schedule cannot run to its end: ") ||
             fault->find("neighbours must run their forwards in one order") != std::string::npos));
      int named = 0;
      for (const std::vector<Action>& actions : job.schedule.ranks)
        for (const Action& action : actions) named += fault->find(write_action(action)) != std::string::npos;
      CHECK(named >= 2);
      ++refused;
      continue;
    }
    if (++ran > 120) continue;
    const Outcome outcome = run_plan(job, cpu_threads(), steps);
    auto reference = references.find(training.global_batch);
    if (reference == references.end())
      reference = references.emplace(training.global_batch, run_reference(graph, training, 1, steps)).first;
    check_close(outcome, reference->second);
    const std::string layout = fmt::format("{}: {}", describe(spec), count);
    auto known = ascending.find(layout);
    if (known == ascending.end())
      known = ascending.emplace(layout, run_plan(job_of(graph, training, spec), cpu_threads(), steps)).first;
    check_equal(outcome, known->second);
  }
  MESSAGE(ran << " orders ran, " << refused << " were refused");
}

}  // namespace parplan
