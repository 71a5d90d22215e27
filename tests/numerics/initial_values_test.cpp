#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

#include <fmt/format.h>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/program/lower.h"
#include "runtime/arena.h"
#include "runtime/device/cpu/cpu_backend.h"
#include "runtime/parameters.h"
#include "tests/numerics/plan_runs.h"

namespace parplan {
namespace {

using namespace testing;

TEST_CASE("initial values are the same whether one thread draws them or several, also of shards cut within a row") {
  ModelSpec model = load_model(fmt::format("{}/tests/data/models/tiny-gpt2.yaml", PARPLAN_SOURCE_DIR), "").spec;
  model.vocabulary = 20'011;  // tables so large that several threads share them out
  const OpGraph graph = build_graph(model, sequence);
  for (const int shards : {1, 3}) {
    ParallelSpec spec;
    spec.micro_batch = 2;
    spec.mesh.degree.dp = shards;
    spec.zero_stage = shards > 1 ? 3 : 0;
    spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
    TrainingSpec training = training_of();
    training.global_batch = spec.micro_batch * shards;
    const Job job = job_of(graph, training, spec);
    for (int rank = 0; rank < shards; ++rank) {
      const Program program = lower(job, rank);
      const auto backend = make_cpu_backend();
      const auto drawn_by = [&](int threads) {
        const Arena arena(*backend, program);
        initialise(graph, program, arena, DataType::fp32, initializer(7), threads);
        std::vector<std::vector<float>> values;
        for (const Bucket& bucket : program.buckets) {
          const Bytes bytes(program.buffers[bucket.parameters].bytes);
          auto& read = values.emplace_back(static_cast<std::size_t>(bytes.count) / sizeof(float));
          arena.read(bucket.parameters, read.data(), bytes);
        }
        return values;
      };
      const auto by_one = drawn_by(1);
      CHECK(drawn_by(5) == by_one);
      CHECK(drawn_by(16) == by_one);
    }
  }
}

}  // namespace
}  // namespace parplan
