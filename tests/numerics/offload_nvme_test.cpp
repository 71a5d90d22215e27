// Plans whose optimizer state is in files on NVMe, against the same with nothing offloaded.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "planner/base/error.h"
#include "planner/parallel/techniques.h"
#include "planner/program/lower.h"
#include "planner/program/memory.h"
#include "tests/numerics/plan_runs.h"

namespace parplan {

using namespace testing;

namespace {

ParallelSpec spec_of(const OpGraph& graph, int dp, int zero) {
  ParallelSpec spec;
  spec.mesh.degree = {.dp = dp};
  spec.zero_stage = zero;
  spec.micro_batch = 2;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  spec.offload = Offload::optimizer | Offload::nvme;
  return spec;
}

}  // namespace

TEST_CASE("random legal plans with optimizer state on NVMe train to the same bits as with none offloaded") {
  std::mt19937 random(20261128);
  int with_gradients = 0, with_parameters = 0, with_activations = 0, pipelines = 0, sharded = 0;
  std::vector<Offload> on_nvme;
  for (const OffloadRow& row : offload_rows())
    if (includes(row.kind, Offload::nvme)) on_nvme.push_back(row.kind);
  for (const std::string model : {"tiny-gpt2", "tiny-llama", "tiny-t5"}) {
    const OpGraph graph = graph_of(model);
    for (std::size_t trial = 0; trial < on_nvme.size(); ++trial) {
      TrainingSpec training = training_of();
      if (trial % 2 == 1) training.clip_norm = 0.5;
      if (trial % 4 == 2) training.optimizer = Optimizer::sgd;  // whose state is the master copy, if anything
      if (trial == 6) training.momentum = 0.9;
      ParallelSpec spec = random_spec(graph, training, 1 << trial % 3, {}, random);
      const Outcome plain = run_plan(graph, training, spec, 3);
      spec.offload = on_nvme[trial];
      if (illegal(graph, training, spec)) spec.offload = without(spec.offload, Offload::parameters);
      INFO(model << ": " << describe(spec) << ", offload " << name(spec.offload));
      REQUIRE(!illegal(graph, training, spec));
      check_equal(run_plan(graph, training, spec, 3), plain);
      with_gradients += includes(spec.offload, Offload::gradients);
      with_parameters += includes(spec.offload, Offload::parameters);
      with_activations += includes(spec.offload, Offload::activations);
      pipelines += spec.pp() > 1;
      sharded += spec.zero_stage > 0;
    }
  }
  for (const int count : {with_gradients, with_parameters, with_activations, pipelines, sharded}) CHECK(count > 1);
}

TEST_CASE("state on NVMe is read and written once a step, and the host holds buffers of the largest bucket for it") {
  const OpGraph graph = graph_of("tiny-gpt2");
  const TrainingSpec training = training_of();
  for (const int zero : {0, 2, 3}) {
    CAPTURE(zero);
    ParallelSpec spec = spec_of(graph, 2, zero);
    const std::vector<Program> on_nvme = lower_all(job_of(graph, training, spec));
    spec.offload = Offload::optimizer;
    const std::vector<Program> on_host = lower_all(job_of(graph, training, spec));
    for (std::size_t rank = 0; rank < on_nvme.size(); ++rank) {
      const Program& program = on_nvme[rank];
      std::int64_t shards = 0, largest = 0;
      for (const Bucket& bucket : program.buckets) {
        shards += bucket.shard_elements;
        largest = std::max(largest, bucket.shard_elements);
      }
      // Two moments and the master copy, in fp32.
      constexpr std::int64_t state = 3 * 4;
      const Bytes padding = static_cast<std::int64_t>(5 * program.buckets.size()) * Bytes(buffer_alignment);
      CHECK(program.copied.nvme.host == Bytes(state * shards));
      CHECK(program.copied.host.nvme == Bytes(state * shards));
      CHECK(program.copied.device == on_host[rank].copied.device);
      CHECK(program.copied.host.device == on_host[rank].copied.host.device);
      CHECK(program.memory.nvme >= Bytes(state * shards));
      CHECK(program.memory.nvme <= Bytes(state * shards) + padding);
      CHECK(program.memory.nvme.count == program.arena_bytes.nvme);
      const Bytes freed = on_host[rank].memory.host - program.memory.host;
      CHECK(freed >= Bytes(state * (shards - state_buffers * largest)) - padding);
      CHECK(freed <= Bytes(state * (shards - state_buffers * largest)) + padding);
      CHECK(program.memory.peak() == on_host[rank].memory.peak());
    }
  }
}

TEST_CASE("while a bucket is updated, the next ones' state is read and the one before it is written") {
  const OpGraph graph = graph_of("tiny-gpt2");
  const Program program = lower_all(job_of(graph, training_of(), spec_of(graph, 1, 0))).front();
  std::vector<std::string> order;
  for (const Call& call : program.calls) {
    const Segment& segment = program.segments[call.segment];
    if (segment.name == "read.state" || segment.name == "write.state" || segment.name == "optimizer")
      order.push_back(segment.name.substr(0, 1));
  }
  const auto buckets = static_cast<int>(program.buckets.size());
  REQUIRE(buckets > state_buffers);
  std::vector<std::string> expected(state_buffers, "r");  // before the first forward
  for (int b = 0; b < buckets; ++b) {
    expected.insert(expected.end(), {"o", "w"});
    if (b + state_buffers < buckets) expected.push_back("r");
  }
  CHECK(order == expected);
}

TEST_CASE("a folder that takes no file ends the run before its first step, and says what to do") {
  const OpGraph graph = graph_of("tiny-mlp");
  const TrainingSpec training = training_of();
  const auto reason = [&](const std::string& folder) {
    const std::unique_ptr<Rendezvous> rendezvous = alone();
    try {
      LocalJob job(job_of(graph, training, spec_of(graph, 1, 0)), initializer(1), cpu_threads(), *rendezvous, folder);
    } catch (const RunError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(reason("/nonexistent/folder") ==
        "cannot create a file in '/nonexistent/folder' for what a rank keeps on NVMe: No such file or directory; name "
        "a folder with room, which this user may write to, with --nvme-dir (rank 0, before the first step)");
  CHECK(reason("/dev/null").starts_with("cannot create a file in '/dev/null' for what a rank keeps on NVMe: Not a "));
}

}  // namespace parplan
