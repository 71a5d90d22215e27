// What one measured step tells of others: published runs of one job, of which one is measured and
// the others are predicted.
#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <vector>

#include "cli/published_model.h"
#include "planner/base/error.h"
#include "planner/calibrate/fit_calibration.h"
#include "planner/graph/engine_graph.h"
#include "planner/suggest.h"
#include "planner/validate/validate.h"

namespace parplan {
namespace {

const std::string source = PARPLAN_SOURCE_DIR;
const ValidationRequest as_stated{.catalog = {source + "/configs/devices", source + "/configs/clusters"},
                                  .engines = source + "/configs/engines",
                                  .engine = {}};

struct Simulated {
  OpGraph graph;
  Plan plan;
};

Simulated simulate(const PublishedRun& run) {
  const StatedRun stated = state(run, as_stated);
  Simulated result{.graph = as_run_by(stated.training, graph_of_published(stated.model)), .plan = {}};
  SuggestRequest request;
  request.graph = &result.graph;
  request.model_name = stated.model.name;
  request.cluster = stated.cluster;
  request.training = stated.training;
  request.layout = stated.layout;
  result.plan = simulate_layout(request);
  return result;
}

}  // namespace

TEST_CASE("one measured step takes the bias from the predictions of other layouts of the job") {
  std::vector<ValidatedRun> runs = validate(read_published_runs(source + "/tests/data/published/runs.csv"), as_stated,
                                            graph_of_published, 0, nullptr);
  std::erase_if(runs, [](const ValidatedRun& one) { return !one.assumed.empty() || !one.step_error(); });
  struct Errors {
    double before = 0.0, after = 0.0;            // sums of absolute ones
    double bias_before = 0.0, bias_after = 0.0;  // and of signed ones
    int count = 0;
  };
  constexpr std::size_t most_measured = 3;  // of a job
  Errors all, korthikanti;
  int refused = 0;
  for (const std::vector<std::size_t>& job : jobs_of(runs)) {
    for (const std::size_t measured : std::span(job).first(std::min(job.size(), most_measured))) {
      const Simulated one = simulate(runs[measured].run);
      const MeasuredPlan step{
          .graph = &one.graph, .plan = &one.plan, .measured = Seconds(*runs[measured].run.step_seconds)};
      CalibrationFit fit;
      try {
        fit = fit_calibration({&step, 1});
      } catch (const ConfigError& error) {
        // No share within the bounds explains the step.
        CHECK(std::string(error.what()).find("is not explained by") != std::string::npos);
        ++refused;
        continue;
      }
      for (const std::size_t other : job) {
        if (other == measured) continue;
        Simulated rival = simulate(runs[other].run);
        calibrate(rival.plan.cluster, rival.plan.training.engine, fit.calibration);
        const double truth = *runs[other].run.step_seconds;
        const double before = runs[other].step.value / truth - 1.0;
        const double after = simulate_plan(rival.graph, rival.plan).time.total().value / truth - 1.0;
        for (Errors* const of : {&all, &korthikanti}) {
          if (of == &korthikanti && !runs[other].run.source.starts_with("Korthikanti")) continue;
          of->before += std::abs(before);
          of->after += std::abs(after);
          of->bias_before += before;
          of->bias_after += after;
          ++of->count;
        }
      }
    }
  }
  // In per cent, as docs/calibration.md says.
  const auto mean = [](double sum, const Errors& of) { return 100.0 * sum / of.count; };
  const auto near = [](double value, double said) { return std::abs(value - said) < 0.3; };
  CHECK(refused == 0);
  CHECK(all.count == 116);
  CHECK_MESSAGE(near(mean(all.bias_before, all), -1.8), mean(all.bias_before, all));
  CHECK_MESSAGE(near(mean(all.bias_after, all), 2.2), mean(all.bias_after, all));
  CHECK_MESSAGE(near(mean(all.before, all), 5.2), mean(all.before, all));
  CHECK_MESSAGE(near(mean(all.after, all), 7.9), mean(all.after, all));
  CHECK(korthikanti.count == 8);
  CHECK_MESSAGE(near(mean(korthikanti.before, korthikanti), 4.0), mean(korthikanti.before, korthikanti));
  CHECK_MESSAGE(near(mean(korthikanti.after, korthikanti), 1.8), mean(korthikanti.after, korthikanti));
}

}  // namespace parplan
