// Plans with state of parameters or what layers save in host memory, against the same without.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "planner/parallel/recompute.h"
#include "planner/parallel/techniques.h"
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

TEST_CASE("random legal plans that offload the optimizer train to the same bits as without") {
  std::mt19937 random(20261126);
  int clipped = 0, tied_apart = 0, pipelines = 0, sharded[4] = {};
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    for (int trial = 0; trial < 14; ++trial) {
      TrainingSpec training = training_of();
      if (trial % 2 == 1) training.clip_norm = 0.5;
      if (trial % 5 == 2) training.optimizer = Optimizer::adam;
      if (trial % 5 == 4) training.optimizer = Optimizer::sgd;
      if (trial % 10 == 4) training.momentum = 0.9;
      LayoutRequest request;
      if (trial % 7 == 3) request[Choice::schedule] = ScheduleKind::zero_bubble_h1;
      ParallelSpec spec = random_spec(graph, training, 1 << trial % 4, request, random);
      if (trial % 3 == 0) spec.tied_gradients = TiedGradients::apart;
      INFO(model << ": " << describe(spec) << ", clip " << training.clip_norm);
      const Outcome without = run_plan(graph, training, spec, 3);
      spec.offload = Offload{.optimizer = Home::host};
      REQUIRE(!illegal(graph, training, spec));
      check_equal(run_plan(graph, training, spec, 3), without);
      clipped += training.clip_norm > 0.0;
      tied_apart += spec.tied_gradients == TiedGradients::apart;
      pipelines += spec.pp() > 1;
      ++sharded[spec.zero_stage];
    }
  }
  CHECK(clipped > 10);
  CHECK(tied_apart > 5);
  CHECK(pipelines > 5);
  for (const int count : sharded) CHECK(count > 1);
}

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

TEST_CASE("random legal plans that keep what layers save on the host train to the same bits as without") {
  std::mt19937 random(20261127);
  int schedules[6] = {}, sharded[4] = {}, both = 0, apart = 0, recomputed = 0, masters = 0, of_some = 0;
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    for (int trial = 0; trial < 14; ++trial) {
      const bool goes_back = trial >= 12;
      if (goes_back && graph.blocks.size() < 4) break;
      TrainingSpec training = training_of();
      if (trial % 3 == 1) training.clip_norm = 0.5;
      LayoutRequest request;
      if (goes_back) {
        request[Choice::pp] = 2;
        request[Choice::schedule] = trial == 12 ? ScheduleKind::zero_bubble_v : ScheduleKind::dualpipe_v;
      } else if (trial % 6 == 1) {
        request[Choice::schedule] = ScheduleKind::zero_bubble_h1;
      }
      if (trial % 6 == 3) request[Choice::schedule] = ScheduleKind::interleaved;
      ParallelSpec spec = random_spec(graph, training, 1 << (trial + 1) % 4, request, random);
      if (trial % 6 == 5) {
        const Recompute recompute = spec.recompute;
        spec = ParallelSpec();
        spec.mesh.degree.dp = 2;
        spec.dp_method = DataMethod::master;
        spec.recompute = recompute;
        spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
      }
      if (spec.pp() > 1 && trial % 2 == 0) spec.input_slots = InputSlots::one_more;
      INFO(model << ": " << describe(spec));
      const Outcome without = run_plan(graph, training, spec, 2);
      spec.offload = Offload{.activations = Home::host};
      if (trial % 4 == 2 && spec.dp_method != DataMethod::master) spec.offload.optimizer = Home::host;
      // The first of four layers takes turns in the places of the others, of three it does not.
      const int most = most_layers_of_a_stage(graph, spec);
      if (trial % 3 != 0 && most > 1) spec.offload_layers = 1 + trial % (most - 1);
      INFO("of " << spec.offload_layers << " layers");
      of_some += spec.offload_layers > 0;
      REQUIRE(!illegal(graph, training, spec));
      check_equal(run_plan(graph, training, spec, 2), without);
      ++schedules[static_cast<int>(spec.schedule)];
      ++sharded[spec.zero_stage];
      both += spec.offload.optimizer != Home::device;
      apart += spec.input_slots == InputSlots::one_more;
      recomputed += spec.recompute != Recompute::none;
      masters += spec.dp_method == DataMethod::master;
    }
  }
  for (const int count : schedules) CHECK(count > 0);
  for (const int count : sharded) CHECK(count > 1);
  CHECK(both > 5);
  CHECK(apart > 5);
  CHECK(recomputed > 5);
  CHECK(masters > 1);
  CHECK(of_some > 20);
}

TEST_CASE("random legal plans with gradients and parameters on the host train to the same bits as without") {
  std::mt19937 random(20261128);
  int schedules[6] = {}, sharded[4] = {}, gradients = 0, parameters = 0, activations = 0, clipped = 0, alone = 0,
      sequence_parallel = 0;
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    for (int trial = 0; trial < 18; ++trial) {
      const bool goes_back = trial >= 16;
      if (goes_back && graph.blocks.size() < 4) break;
      TrainingSpec training = training_of();
      if (trial % 2 == 1) training.clip_norm = 0.5;
      if (trial % 5 == 4) training.optimizer = Optimizer::sgd;
      LayoutRequest request;
      if (goes_back) {
        request[Choice::pp] = 2;
        request[Choice::schedule] = trial == 16 ? ScheduleKind::zero_bubble_v : ScheduleKind::dualpipe_v;
      } else if (trial % 6 == 1) {
        request[Choice::schedule] = ScheduleKind::zero_bubble_h1;
      }
      if (trial % 6 == 3) request[Choice::schedule] = ScheduleKind::interleaved;
      const int ranks = 1 << (trial + 1) % 4;
      if (trial % 3 == 2 && ranks > 1 && !goes_back) request[Choice::zero_stage] = 3;
      ParallelSpec spec = random_spec(graph, training, ranks, request, random);
      if (trial % 4 == 0) spec.tied_gradients = TiedGradients::apart;
      std::vector<Offload> legal;
      for (const Offload& other : all_offloads()) {
        ParallelSpec with = spec;
        with.offload = other;
        if ((other.gradients != Home::device || other.parameters != Home::device) && !illegal(graph, training, with))
          legal.push_back(other);
      }
      REQUIRE(!legal.empty());
      INFO(model << ": " << describe(spec));
      const Outcome without = run_plan(graph, training, spec, 2);
      spec.offload = legal[random() % legal.size()];
      if (brings_parameters(spec)) spec.prefetch_depth = trial % 4;
      INFO(name(spec.offload) << " " << spec.prefetch_depth << " blocks ahead");
      check_equal(run_plan(graph, training, spec, 2), without);
      ++schedules[static_cast<int>(spec.schedule)];
      ++sharded[spec.zero_stage];
      gradients += spec.offload.gradients != Home::device;
      parameters += spec.offload.parameters != Home::device;
      activations += spec.offload.activations != Home::device;
      clipped += training.clip_norm > 0.0;
      alone += spec.replicas() == 1 && spec.offload.parameters != Home::device;
      sequence_parallel += spec.sequence_parallel && spec.offload.gradients != Home::device;
    }
  }
  for (const int count : schedules) CHECK(count > 0);
  for (const int count : sharded) CHECK(count > 1);
  for (const int count : {gradients, parameters, activations, clipped}) CHECK(count > 10);
  for (const int count : {alone, sequence_parallel}) CHECK(count > 1);
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
