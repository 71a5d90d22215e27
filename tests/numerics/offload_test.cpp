// What plans with state of parameters or what layers save in host memory copy and hold.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "planner/program/lower.h"
#include "planner/program/memory.h"
#include "tests/numerics/plan_runs.h"

namespace parplan {

using namespace testing;

namespace {

// Else a bucket is that of a tied parameter.
bool graph_has_block(const OpGraph& graph, const std::string& name) {
  return std::ranges::any_of(graph.blocks, [&](const Block& block) { return block.name == name; });
}

}  // namespace

TEST_CASE("a step copies each rank's gradients to its host once, and its parameters back") {
  const OpGraph graph = graph_of("tiny-gpt2");
  for (int zero = 0; zero <= 3; ++zero)
    for (const double clip_norm : {0.0, 0.5}) {
      TrainingSpec training = training_of();
      training.clip_norm = clip_norm;
      ParallelSpec spec;
      spec.mesh.degree = {.dp = 2, .tp = 2};
      spec.sequence_parallel = true;
      spec.zero_stage = zero;
      spec.micro_batch = 2;
      spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
      spec.offload = Offload{.optimizer = Home::host};
      CAPTURE(zero);
      for (const Program& program : lower_all(job_of(graph, training, spec))) {
        std::int64_t shards = 0, elements = 0;
        for (const Bucket& bucket : program.buckets) {
          shards += bucket.shard_elements;
          elements += bucket.elements;
        }
        CHECK(shards == (zero == 0 ? elements : elements / 2));
        CHECK(program.copied.device.host == Bytes(4 * shards + (clip_norm > 0.0 ? 4 : 0)));
        CHECK(program.copied.host.device == Bytes(4 * shards));
        // Two moments, the master copy and a copy of the gradients.
        CHECK(program.memory.host >= Bytes(4 * 4 * shards));
        CHECK(program.memory.host <= Bytes(4 * 4 * shards) + static_cast<std::int64_t>(4 * program.buckets.size() + 1) *
                                                                 Bytes(buffer_alignment));
        CHECK(program.memory.optimizer == Bytes(0));
      }
    }
}

TEST_CASE("a step copies sums of gradients out once a micro-batch, and parameters up once a gather") {
  for (const std::string model : {"tiny-gpt2", "tiny-llama"}) {
    const OpGraph graph = graph_of(model);
    for (const int replicas : {1, 2})
      for (int zero = 0; zero <= (replicas > 1 ? 3 : 0); ++zero)
        for (const bool brings : {false, true}) {
          if (brings && replicas > 1 && zero < 3) continue;
          TrainingSpec training = training_of();
          training.clip_norm = 0.5;
          ParallelSpec spec;
          spec.mesh.degree = {.dp = replicas, .tp = 2};
          spec.sequence_parallel = true;
          spec.zero_stage = zero;
          spec.micro_batch = 1;
          spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
          const std::vector<Program> on_device = lower_all(job_of(graph, training, spec));
          spec.offload = Offload{.optimizer = Home::host, .gradients = Home::host};
          if (brings) spec.offload.parameters = Home::host;
          INFO(model << ": " << describe(spec));
          const std::int64_t micro = global_batch / replicas;
          REQUIRE(micro > 1);
          const std::vector<Program> programs = lower_all(job_of(graph, training, spec));
          for (std::size_t rank = 0; rank < programs.size(); ++rank) {
            const Program& program = programs[rank];
            // In bytes, for the norm: out once more than without gradients there, and back. A tied
            // parameter's gradients go out once, and its parameters come for each of two uses.
            std::int64_t out = 4 + 4, back = 4, largest_sum = 0, on_host = 0;
            for (const Bucket& bucket : program.buckets) {
              const bool is_tied = !graph_has_block(graph, bucket.name);
              const std::int64_t shard = 4 * bucket.shard_elements,
                                 sum = zero >= 2 ? shard : 4 * bucket.elements;
              out += (is_tied ? 0 : (micro - 1) * sum) + shard;
              back += is_tied ? 0 : (micro - 1) * sum;
              back += brings ? micro * 2 * (is_tied ? 2 : 1) * (zero == 3 ? shard : 4 * bucket.elements) : shard;
              if (!is_tied) largest_sum = std::max(largest_sum, sum);
              on_host += (is_tied ? shard : sum) + (brings ? 0 : shard);
              on_host += 2 * shard + (brings ? (zero == 3 ? shard : 4 * bucket.elements) : 0);
              CHECK(program.buffers[*bucket.gradients].home == (is_tied ? Home::device : Home::host));
            }
            CHECK(program.copied.device.host == Bytes(out));
            CHECK(program.copied.host.device == Bytes(back));
            CHECK(program.memory.host >= Bytes(on_host));
            CHECK(program.memory.host <= Bytes(on_host) + static_cast<std::int64_t>(5 * program.buckets.size() + 1) *
                                                              Bytes(buffer_alignment));
            CHECK(program.memory.optimizer == Bytes(0));
            CHECK((program.memory.parameters == Bytes(0)) == brings);
            CHECK(program.communication == on_device[rank].communication);
            std::int64_t staged = 0;
            for (const Buffer& buffer : program.buffers)
              if (buffer.name.starts_with("gradients on their way")) staged += buffer.bytes;
            CHECK(staged == staging_buffers * largest_sum);
          }
        }
  }
}

TEST_CASE("of so many layers alone a step copies what they save, and three others lend them their places") {
  const OpGraph graph = graph_of("tiny-llama");
  const TrainingSpec training = training_of();
  const int layers = static_cast<int>(graph.blocks.size()) - 2;
  REQUIRE(layers == 4);
  for (const ScheduleKind schedule : {ScheduleKind::one_f_one_b, ScheduleKind::zero_bubble_h1}) {
    ParallelSpec spec;
    spec.mesh.degree.pp = 2;
    spec.schedule = schedule;
    spec.micro_batch = 2;
    spec.stage_blocks = {1, layers + 1};
    const Program on_device = lower_all(job_of(graph, training, spec)).back();
    spec.offload = Offload{.activations = Home::host};
    const Program all = lower_all(job_of(graph, training, spec)).back();
    const std::int64_t out = all.copied.device.host.count / layers, on_host = all.memory.host.count / layers;
    for (int number = 1; number < layers; ++number) {
      spec.offload_layers = number;
      const Program some = lower_all(job_of(graph, training, spec)).back();
      CAPTURE(number);
      CHECK(some.copied.device.host == Bytes(number * out));
      CHECK(some.memory.host == Bytes(number * on_host));
      const std::int64_t staged = std::ranges::count_if(some.buffers, [](const Buffer& buffer) {
        return buffer.name.starts_with("saved on its way to and from the host");
      });
      CHECK(staged == (number == 1 ? 0 : staging_buffers));
      if (number == 1) CHECK(some.memory.activations < on_device.memory.activations);
    }
  }
}

TEST_CASE("with full recompute, a step copies each layer's input to the host and back once a micro-batch") {
  const OpGraph graph = graph_of("tiny-llama");
  const TrainingSpec training = training_of();
  const auto layers = static_cast<std::int64_t>(graph.blocks.size()) - 2;
  const Tensor& input = graph.tensors[*graph.blocks[1].input];
  const std::int64_t hidden = input.dims.back().size;
  for (const bool sequence_parallel : {false, true})
    for (const std::int64_t micro_batch : {1, 2}) {
      ParallelSpec spec;
      spec.mesh.degree = {.dp = 2, .tp = 2};
      spec.sequence_parallel = sequence_parallel;
      spec.micro_batch = micro_batch;
      spec.recompute = Recompute::full;
      spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
      const std::vector<Program> on_device = lower_all(job_of(graph, training, spec));
      spec.offload = Offload{.activations = Home::host};
      const std::vector<Program> on_host = lower_all(job_of(graph, training, spec));
      const std::int64_t saved = sequence * micro_batch * hidden * 4 / (sequence_parallel ? 2 : 1);
      const std::int64_t micro_batches = global_batch / 2 / micro_batch;
      for (std::size_t rank = 0; rank < on_host.size(); ++rank) {
        CHECK(on_host[rank].copied.device.host == Bytes(layers * micro_batches * saved));
        CHECK(on_host[rank].copied.host.device == on_host[rank].copied.device.host);
        // With one stage, one micro-batch is in flight.
        CHECK(on_host[rank].memory.host == Bytes(layers * saved));
        CHECK(on_device[rank].memory.activations - on_host[rank].memory.activations ==
              Bytes((layers - staging_buffers) * saved));
        CHECK(on_host[rank].memory.parameters == on_device[rank].memory.parameters);
        CHECK(on_host[rank].communication == on_device[rank].communication);
      }
    }
}

}  // namespace parplan
