#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "planner/graph/training_spec.h"
#include "planner/program/lower.h"
#include "planner/search/space.h"
#include "runtime/local_job.h"

// What tests need to train tiny models under plans and to compare them with the one-rank reference.
namespace parplan::testing {

inline constexpr std::int64_t sequence = 16;
inline constexpr std::int64_t global_batch = 8;
inline constexpr std::int64_t steps = 5;
inline const std::vector<std::string> models{"tiny-gpt2", "tiny-llama", "tiny-mlp", "tiny-bert", "tiny-t5"};

OpGraph graph_of(const std::string& model);
TrainingSpec training_of();

struct Outcome {
  std::vector<double> losses;
  LogicalTensors first_gradients;
  LogicalTensors parameters;  // after the last step
};

std::string describe(const ParallelSpec& spec);
Job job_of(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec,
           BackendKind backend = BackendKind::cpu);

// Trains under a plan and checks its promises: the Programs verify, and the bytes sent and the
// arenas touched are the promised ones.
Outcome run_plan(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec,
                 std::int64_t count = steps);
Outcome run_plan(const Job& job, const MakeWorld& make_world, std::int64_t count = steps);
// The one-rank reference, fp32 on the CPU. `values`: the parameters that it starts from; null:
// those that plans start from.
Outcome run_reference(const OpGraph& graph, const TrainingSpec& training, std::int64_t micro_batch,
                      std::int64_t count = steps, const LogicalTensors* values = nullptr);
// References of a graph that outlives it, each run once: by micro-batch and clipping, the only
// things in which the trainings of one test differ.
class References {
 public:
  explicit References(const OpGraph& graph, std::int64_t count = steps) : graph_(graph), count_(count) {}
  const Outcome& of(const TrainingSpec& training, std::int64_t micro_batch);

 private:
  const OpGraph& graph_;
  std::int64_t count_;
  std::map<std::pair<std::int64_t, double>, Outcome> known_;
};

// How far a plan may be from the reference: absolute for losses; for each gradient relative to its
// norm plus the norm of all gradients.
struct Closeness {
  double loss = 1e-5;
  double gradient = 1e-5;
  double all_gradients = 1e-7;
};
void check_close(const Outcome& plan, const Outcome& reference, const Closeness& closeness = {});
void check_equal(const Outcome& a, const Outcome& b);

// A legal plan of `ranks` ranks, cut anywhere.
ParallelSpec random_spec(const OpGraph& graph, const TrainingSpec& training, int ranks, const LayoutRequest& request,
                         std::mt19937& random);

}  // namespace parplan::testing
