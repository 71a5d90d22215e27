// Every plan compared with the one-rank reference, which shares kernels with it but no lowering;
// and the promises of a Program (bytes of memory and of communication) compared with its execution.
#include <doctest/doctest.h>

#include <array>
#include <random>
#include <utility>
#include <vector>

#include "tests/numerics/op_graphs.h"
#include "tests/numerics/plan_runs.h"

namespace parplan {

using namespace testing;

TEST_CASE("random legal plans train as the one-rank reference does") {
  std::mt19937 random(20261121);
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    References references(graph);
    for (int trial = 0; trial < 40; ++trial) {
      TrainingSpec training = training_of();
      const bool clips = trial % 4 == 3;
      if (clips) training.clip_norm = 0.5;
      LayoutRequest request;
      if (trial % 5 > 2) request[Choice::schedule] = ScheduleKind::zero_bubble_h1;
      ParallelSpec spec = random_spec(graph, training, 1 << trial % 4, request, random);
      if (trial % 3 == 0) spec.input_slots = InputSlots::one_more;
      INFO(model << ": " << describe(spec) << (clips ? ", clipped" : ""));
      check_close(run_plan(graph, training, spec), references.of(training, spec.micro_batch));
    }
  }
}

TEST_CASE("a pipeline equals accumulation on one rank to the bit") {
  std::mt19937 random(5);
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    const TrainingSpec training = training_of();
    for (const int ranks : {1, 2, 4})
      for (int trial = 0; trial < 3; ++trial) {
        LayoutRequest request;
        request[Choice::dp] = request[Choice::tp] = 1;
        request[Choice::tied_gradients] = TiedGradients::apart;
        if (trial == 2) request[Choice::schedule] = ScheduleKind::zero_bubble_h1;
        const ParallelSpec spec = random_spec(graph, training, ranks, request, random);
        INFO(model << ": " << describe(spec));
        const Outcome plan = run_plan(graph, training, spec, 3);
        const Outcome reference = run_reference(graph, training, spec.micro_batch, 3);
        check_equal(plan, reference);
      }
  }
}

TEST_CASE("a pipeline of data-parallel ranks equals data parallelism to the bit") {
  std::mt19937 random(6);
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    const TrainingSpec training = training_of();
    for (int trial = 0; trial < 3; ++trial) {
      LayoutRequest request;
      request[Choice::dp] = 2;
      request[Choice::tp] = 1;
      request[Choice::pp] = 2;
      request[Choice::zero_stage] = 0;
      request[Choice::tied_gradients] = TiedGradients::apart;
      if (trial == 2) request[Choice::schedule] = ScheduleKind::zero_bubble_h1;
      const ParallelSpec spec = random_spec(graph, training, 4, request, random);
      INFO(model << ": " << describe(spec));
      ParallelSpec flat = spec;
      flat.mesh.degree = {.dp = 2};
      row_of(Choice::schedule).set(flat, ScheduleKind::one_f_one_b);
      flat.stage_blocks = {static_cast<int>(graph.blocks.size())};
      check_equal(run_plan(graph, training, spec, 3), run_plan(graph, training, flat, 3));
    }
  }
}

TEST_CASE("one more buffer for arriving activations changes no bit") {
  std::mt19937 random(8);
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    const TrainingSpec training = training_of();
    for (const int stages : {2, 3})
      for (const Recompute recompute : {Recompute::none, Recompute::full}) {
        LayoutRequest request;
        request[Choice::dp] = request[Choice::tp] = request[Choice::micro_batch] = 1;
        request[Choice::pp] = stages;
        request[Choice::schedule] = ScheduleKind::one_f_one_b;
        request[Choice::recompute] = recompute;
        ParallelSpec spec = random_spec(graph, training, stages, request, random);
        INFO(model << ": " << describe(spec));
        const Outcome without = run_plan(graph, training, spec, 2);
        spec.input_slots = InputSlots::one_more;
        check_equal(run_plan(graph, training, spec, 2), without);
      }
  }
}

TEST_CASE("parameters gathered any number of blocks ahead, and without a norm one by one, train to the same bits") {
  std::mt19937 random(20261130);
  int schedules[6] = {}, cut = 0, in_groups = 0;
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    for (int trial = 0; trial < 4; ++trial) {
      TrainingSpec training = training_of();
      if (trial == 1) training.clip_norm = 0.5;
      LayoutRequest request{
          {Choice::zero_stage, 3}, {Choice::prefetch_depth, 1}, {Choice::gather_unit, GatherUnit::block}};
      if (trial == 1 && graph.blocks.size() > 3) {
        request[Choice::pp] = 2;
        request[Choice::schedule] = ScheduleKind::interleaved;
      }
      if (trial == 2) request[Choice::dp] = 4;
      if (trial == 3) request[Choice::tp] = 2;
      ParallelSpec spec = random_spec(graph, training, trial < 2 ? 4 : 8, request, random);
      if (trial == 2) spec.mesh.dp_shard = 2;
      INFO(model << ": " << describe(spec));
      const Outcome one = run_plan(graph, training, spec, 2);
      spec.prefetch_depth = std::array{2, 0, 3, 0}[static_cast<std::size_t>(trial)];
      if (trial != 1) spec.gather_unit = GatherUnit::parameter;
      check_equal(run_plan(graph, training, spec, 2), one);
      ++schedules[static_cast<int>(spec.schedule)];
      cut += spec.tp() > 1;
      in_groups += spec.mesh.dp_shard > 0;
    }
  }
  CHECK(schedules[static_cast<int>(ScheduleKind::interleaved)] > 0);
  CHECK(cut > 1);
  CHECK(in_groups > 0);
}

TEST_CASE("a zero-bubble pipeline equals 1F1B to the bit, with every axis, recompute and precision of gradients") {
  std::mt19937 random(20261127);
  std::vector<OpGraph> graphs = op_graphs(sequence);
  graphs.push_back(normed_sums(sequence));
  for (const std::string& model : models) graphs.push_back(graph_of(model));
  for (const OpGraph& graph : graphs) {
    const bool has_attention = graph.name == "tiny-gpt2" || graph.name == "tiny-llama";
    for (int trial = 0; trial < 12; ++trial) {
      TrainingSpec training = training_of();
      if (trial % 4 == 3) training.clip_norm = 0.5;
      LayoutRequest request;
      request[Choice::pp] = 2;
      request[Choice::schedule] = ScheduleKind::zero_bubble_h1;
      if (trial % 3 != 0) request[Choice::micro_batch] = 1;
      if (has_attention && trial % 3 == 1) request[Choice::cp] = 2;
      ParallelSpec spec = random_spec(graph, training, 4, request, random);
      spec.recompute = recompute_rows()[static_cast<std::size_t>(trial) % recompute_rows().size()].kind;
      if (trial % 3 == 2) spec.input_slots = InputSlots::one_more;
      INFO(graph.name << ": " << describe(spec));
      const Outcome outcome = run_plan(graph, training, spec, 3);
      spec.schedule = ScheduleKind::one_f_one_b;
      check_equal(outcome, run_plan(graph, training, spec, 3));
    }
  }
}

TEST_CASE("interleaved plans train as the reference does, and without a norm as one stage does to the bit") {
  std::mt19937 random(20261126);
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    if (graph.blocks.size() < 4) continue;
    const int most = static_cast<int>(graph.blocks.size()) / 2;
    for (int trial = 0; trial < 24; ++trial) {
      TrainingSpec training = training_of();
      if (trial % 4 == 3) training.clip_norm = 0.5;
      LayoutRequest request;
      request[Choice::pp] = 2;
      request[Choice::schedule] = ScheduleKind::interleaved;
      request[Choice::virtual_stages] = 2 + trial % (most - 1);
      if (trial % 3 != 0) request[Choice::dp] = request[Choice::tp] = 1;
      if (trial % 2 == 0) request[Choice::tied_gradients] = TiedGradients::apart;
      // Groups of more micro-batches than ranks wait in more buffers.
      if (trial % 5 == 4) request[Choice::micro_batch_group] = 4;
      ParallelSpec spec = random_spec(graph, training, trial % 3 == 0 ? 4 : 2, request, random);
      if (trial % 3 == 1) spec.input_slots = InputSlots::one_more;
      INFO(model << ": " << describe(spec) << " virtual stages " << spec.virtual_stages << " groups of "
                 << spec.micro_batch_group);
      const Outcome outcome = run_plan(graph, training, spec, 3);
      check_close(outcome, run_reference(graph, training, spec.micro_batch, 3));
      ParallelSpec alone = spec;
      alone.mesh.degree.pp = 1;
      alone.schedule = ParallelSpec().schedule;
      alone.virtual_stages = 1;
      alone.micro_batch_group = 0;
      alone.input_slots = InputSlots::in_flight;
      alone.stage_blocks = {static_cast<int>(graph.blocks.size())};
      if (training.clip_norm == 0.0 && spec.tied_gradients == TiedGradients::apart)
        check_equal(outcome, run_plan(graph, training, alone, 3));
    }
  }
}

TEST_CASE("pipelines down the ranks and back train as the reference does, and without a norm as one stage to the bit") {
  std::mt19937 random(20261125);
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    const int blocks = static_cast<int>(graph.blocks.size());
    if (blocks < 4) continue;
    for (int trial = 0; trial < 16; ++trial) {
      TrainingSpec training = training_of();
      if (trial % 4 == 3) training.clip_norm = 0.5;
      const bool has_other_axes = trial % 3 == 0;
      const int pp = !has_other_axes && blocks >= 6 && trial % 4 == 1 ? 3 : 2;
      LayoutRequest request;
      request[Choice::pp] = std::int64_t{pp};
      request[Choice::schedule] = trial % 2 == 0 ? ScheduleKind::zero_bubble_v : ScheduleKind::dualpipe_v;
      request[Choice::micro_batch] = 1;
      if (!has_other_axes) request[Choice::dp] = request[Choice::tp] = 1;
      if (trial % 8 < 4) request[Choice::tied_gradients] = TiedGradients::apart;
      ParallelSpec spec = random_spec(graph, training, has_other_axes ? 4 : pp, request, random);
      if (trial % 5 < 2) spec.input_slots = InputSlots::one_more;
      spec.recompute = recompute_rows()[static_cast<std::size_t>(trial) % recompute_rows().size()].kind;
      INFO(model << ": " << describe(spec));
      const Outcome outcome = run_plan(graph, training, spec, 3);
      check_close(outcome, run_reference(graph, training, spec.micro_batch, 3));
      ParallelSpec alone = spec;
      alone.mesh.degree.pp = 1;
      row_of(Choice::schedule).set(alone, ScheduleKind::one_f_one_b);
      alone.input_slots = InputSlots::in_flight;
      alone.stage_blocks = {static_cast<int>(graph.blocks.size())};
      if (training.clip_norm == 0.0 && (spec.tied_gradients == TiedGradients::apart || graph.tied.empty()))
        check_equal(outcome, run_plan(graph, training, alone, 3));
    }
  }
}

TEST_CASE("one accumulator for both uses of a tied parameter trains as the reference does, and so do two") {
  const OpGraph graph = graph_of("tiny-gpt2");
  TrainingSpec training = training_of();
  const Outcome reference = run_reference(graph, training, 2);
  for (const auto& [tp, sequence_parallel] : {std::pair{1, false}, {2, false}, {2, true}})
    for (int zero = 0; zero <= 3; ++zero)
      for (const TiedGradients gradients : {TiedGradients::together, TiedGradients::apart}) {
        ParallelSpec spec;
        spec.mesh.degree = {.dp = 2, .tp = tp};
        spec.sequence_parallel = sequence_parallel;
        spec.zero_stage = zero;
        spec.micro_batch = 2;
        spec.tied_gradients = gradients;
        spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
        INFO(describe(spec) << " tied gradients " << name(gradients));
        check_close(run_plan(graph, training, spec), reference);
      }
}

TEST_CASE("hybrid sharding trains as the reference does, and its stages to the same bits without accumulation") {
  std::mt19937 random(20261123);
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    References references(graph);
    for (int trial = 0; trial < 12; ++trial) {
      TrainingSpec training = training_of();
      const bool clips = trial % 3 == 2;
      if (clips) training.clip_norm = 0.5;
      LayoutRequest request;
      // Four groups of two, two of four, and two of two beside other axes.
      const int dp = trial % 3 == 0 ? 8 : 4;
      request[Choice::dp] = dp;
      request[Choice::zero_stage] = 1 + trial % 3;
      request[Choice::dp_shard] = trial % 6 == 3 ? 4 : 2;
      ParallelSpec spec = random_spec(graph, training, 8, request, random);
      REQUIRE(spec.mesh.dp_shard == (trial % 6 == 3 ? 4 : 2));
      if (trial % 2 == 0) spec.tied_gradients = TiedGradients::apart;
      // Shards by parameter have other sums of squares, which a norm adds up.
      if (clips) spec.gather_unit = GatherUnit::block;
      INFO(model << ": " << describe(spec) << (clips ? ", clipped" : ""));
      const Outcome outcome = run_plan(graph, training, spec);
      check_close(outcome, references.of(training, spec.micro_batch));
      if (spec.zero_stage == 1 || micro_batches(spec, training) > 1) continue;
      spec.zero_stage = 1;
      check_equal(outcome, run_plan(graph, training, spec));
    }
  }
}

TEST_CASE("one group of all ranks is ZeRO without groups, and groups of the context axis are as good") {
  const OpGraph graph = graph_of("tiny-llama");
  const TrainingSpec training = training_of();
  ParallelSpec spec;
  spec.mesh.degree = {.dp = 4};
  spec.zero_stage = 3;
  row_of(Choice::dp_shard).set(spec, std::int64_t{4});
  CHECK(spec.mesh.dp_shard == 0);
  spec.mesh.degree = {.dp = 2, .cp = 2};
  spec.mesh.dp_shard = 2;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  check_close(run_plan(graph, training, spec), run_reference(graph, training, spec.micro_batch));
}

TEST_CASE("ZeRO equals data parallelism to the bit: stage 1 always, 2 and 3 without accumulation") {
  std::mt19937 random(9);
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    const TrainingSpec training = training_of();
    for (int zero = 1; zero <= 3; ++zero)
      for (int trial = 0; trial < 4; ++trial) {
        LayoutRequest request;
        const int dp = trial % 2 ? 4 : 2;
        request[Choice::dp] = dp;
        request[Choice::zero_stage] = zero;
        if (zero > 1) request[Choice::micro_batch] = global_batch / dp;
        ParallelSpec spec = random_spec(graph, training, trial < 2 ? 4 : 8, request, random);
        INFO(model << ": " << describe(spec));
        const Outcome sharded = run_plan(graph, training, spec, 3);
        spec.zero_stage = 0;
        check_equal(sharded, run_plan(graph, training, spec, 3));
      }
  }
}

}  // namespace parplan
