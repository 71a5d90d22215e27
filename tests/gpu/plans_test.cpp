// Plans of tiny models on a GPU: compared with the one-rank fp32 reference on the CPU, and equal to
// the bit where plans on the CPU are.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/graph/trained_graph.h"
#include "planner/parallel/techniques.h"
#include "planner/schedule/schedules.h"
#include "tests/gpu/device.h"
#include "tests/numerics/op_graphs.h"
#include "tests/numerics/plan_runs.h"
#include "tests/numerics/trainer.h"
#include "tests/temporary_folder.h"

namespace parplan {

using namespace testing;

namespace {

// The allowed distance of sums of rounded numbers from the reference, by the bits of the fraction:
// 2^-24 in fp32, 2^-11 in tf32 and fp16, 2^-9 in bf16, times what five steps and some tens of
// roundings between a weight and its gradient add up to.
Closeness closeness_of(DataType type) {
  switch (type) {
    case DataType::fp32: return {.loss = 2e-5, .gradient = 2e-5, .all_gradients = 1e-6};
    case DataType::tf32:
    case DataType::fp16: return {.loss = 4e-3, .gradient = 1e-2, .all_gradients = 2e-3};
    // 2^-4 in fp8, 2^-3 for gradients, of which sums take the mean.
    case DataType::fp8: return {.loss = 5e-2, .gradient = 0.3, .all_gradients = 0.1};
    default: return {.loss = 2e-2, .gradient = 5e-2, .all_gradients = 1e-2};
  }
}

constexpr DataType all_types[] = {DataType::fp32, DataType::tf32, DataType::bf16, DataType::fp16};

Outcome run_on_gpu(const std::shared_ptr<Gpu>& gpu, const OpGraph& graph, const TrainingSpec& training,
                   const ParallelSpec& spec, std::int64_t count, GpuBackendOptions options = {}) {
  return run_plan(job_of(graph, training, spec, BackendKind::cuda), one_gpu(gpu, 0, options), count);
}

TrainingSpec training_in(DataType type) {
  TrainingSpec training = training_of();
  state_precision(training, type);
  return training;
}

}  // namespace

TEST_CASE("random legal plans train on a GPU as the one-rank reference does") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  std::mt19937 random(20261122);
  const int trials = is_emulated(*gpu) ? 2 : 20, steps_taken = is_emulated(*gpu) ? 2 : 3;
  const int most_others = is_emulated(*gpu) ? 1 : trials;
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    std::vector<DataType> types(std::begin(all_types), std::end(all_types));
    types.push_back(DataType::fp8);
    for (const DataType type : types)
      for (int trial = 0; trial < (type == DataType::fp32 || type == DataType::bf16 ? trials : most_others); ++trial) {
        TrainingSpec training = training_in(type);
        if (trial % 2 == 1) training.clip_norm = 0.5;
        LayoutRequest request;
        if (trial % 4 == 3) request[Choice::schedule] = ScheduleKind::zero_bubble_h1;
        ParallelSpec spec =
            random_spec(graph, training, is_emulated(*gpu) ? 2 << trial : 1 << trial % 3, request, random);
        if (trial % 2 == 0) spec.input_slots = InputSlots::one_more;
        // Its ReLU's gradient jumps where fp16 rounds to another sign, which no tolerance of a norm
        // bounds. (bf16's tolerance is wider.)
        if (graph.joins_sequences && type == DataType::fp16) continue;
        INFO(model << ": " << std::string(name(type)) << ", " << describe(spec));
        TrainingSpec exact = training;
        state_precision(exact, DataType::fp32);
        check_close(run_on_gpu(gpu, graph, training, spec, steps_taken),
                    run_reference(graph, exact, spec.micro_batch, steps_taken), closeness_of(type));
      }
  }
}

TEST_CASE("replicas with unlike numbers of micro-batches train on a GPU as the one-rank reference does") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  std::mt19937 random(20261130);
  for (const std::string model : {"tiny-gpt2", "tiny-llama"}) {
    const OpGraph graph = graph_of(model);
    for (const DataType type : {DataType::fp32, DataType::bf16}) {
      if (is_emulated(*gpu) && type == DataType::fp32) continue;
      for (const std::vector<int>& shares : {std::vector<int>{5, 3}, std::vector<int>{4, 3, 1}}) {
        LayoutRequest request;
        request[Choice::replica_micro_batches] = shares;
        const int ranks = static_cast<int>(shares.size()) * (shares.size() == 2 ? 2 : 1);
        const TrainingSpec training = training_in(type);
        const ParallelSpec spec = random_spec(graph, training, ranks, request, random);
        INFO(model << ": " << std::string(name(type)) << ", " << describe(spec));
        TrainingSpec exact = training;
        exact.precision = DataType::fp32;
        check_close(run_on_gpu(gpu, graph, training, spec, 3), run_reference(graph, exact, spec.micro_batch, 3),
                    closeness_of(type));
      }
    }
  }
}

TEST_CASE("adapters and parts of a model train on a GPU as the one-rank reference does") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  std::mt19937 random(20261125);
  for (const std::string& model : models)
    for (const DataType type : all_types) {
      if (is_emulated(*gpu) && type != DataType::bf16) continue;
      for (const bool adapts : {true, false}) {
        TrainingSpec training = training_in(type);
        training.trainable.all = false;
        if (adapts)
          training.lora = Lora{.r = 4, .alpha = 8.0, .target_modules = {}};
        else
          training.trainable.patterns = {model == "tiny-t5" ? "decoder.1" : "layers.1",
                                         model == "tiny-llama" || model == "tiny-t5" ? "*norm.weight" : "bias"};
        const OpGraph graph = as_trained(training, graph_of(model));
        const ParallelSpec spec = random_spec(graph, training, 4, {}, random);
        INFO(model << ": " << std::string(name(type)) << ", " << describe(spec));
        TrainingSpec exact = training;
        exact.precision = DataType::fp32;
        check_close(run_on_gpu(gpu, graph, training, spec, 2), run_reference(graph, exact, spec.micro_batch, 2),
                    closeness_of(type));
      }
    }
}

TEST_CASE("hybrid sharding trains on GPUs as the one-rank reference does") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const OpGraph graph = graph_of("tiny-gpt2");
  for (int zero = 1; zero <= 3; ++zero) {
    TrainingSpec training = training_in(DataType::bf16);
    if (zero == 2) training.clip_norm = 0.5;
    ParallelSpec spec;
    spec.mesh.degree = {.dp = 4};
    spec.mesh.dp_shard = 2;
    spec.zero_stage = zero;
    spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
    INFO(describe(spec));
    TrainingSpec exact = training;
    exact.precision = DataType::fp32;
    check_close(run_on_gpu(gpu, graph, training, spec, 2), run_reference(graph, exact, spec.micro_batch, 2),
                closeness_of(training.precision));
  }
}

TEST_CASE("a master and its replicas train on GPUs as the one-rank reference does") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const OpGraph graph = graph_of("tiny-gpt2");
  for (const DataType type : all_types) {
    TrainingSpec training = training_in(type);
    if (type == DataType::fp16) training.clip_norm = 0.5;
    ParallelSpec spec;
    spec.mesh.degree = {.dp = 2};
    spec.micro_batch = 2;
    spec.dp_method = DataMethod::master;
    spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
    INFO(std::string(name(type)) << ", " << describe(spec));
    TrainingSpec exact = training;
    exact.precision = DataType::fp32;
    check_close(run_on_gpu(gpu, graph, training, spec, 3), run_reference(graph, exact, spec.micro_batch, 3),
                closeness_of(type));
  }
}

TEST_CASE("slices of products beside the ring of the tensor axis train on GPUs as the one-rank reference does") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  for (const DataType type : {DataType::fp32, DataType::bf16})
    for (const int tp : {2, 4}) {
      if (is_emulated(*gpu) && (tp == 4) != (type == DataType::fp32)) continue;
      const OpGraph graph = graph_of(tp == 4 ? "tiny-gpt2" : "tiny-llama");
      TrainingSpec training = training_in(type);
      ParallelSpec spec;
      spec.mesh.degree = {.tp = tp};
      spec.sequence_parallel = true;
      spec.tp_overlap = TensorOverlap::ring;
      spec.micro_batch = 2;
      spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
      INFO(std::string(name(type)) << ", " << describe(spec));
      TrainingSpec exact = training;
      exact.precision = DataType::fp32;
      check_close(run_on_gpu(gpu, graph, training, spec, 2), run_reference(graph, exact, spec.micro_batch, 2),
                  closeness_of(type));
    }
}

TEST_CASE("plans that keep state and activations on the host train on a GPU as the one-rank reference does") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const OpGraph graph = graph_of("tiny-gpt2");
  for (const DataType type : all_types)
    for (const auto& [zero, pp, offload] :
         {std::tuple(0, 1, Offload{.optimizer = Home::host}),
          std::tuple(2, 1, Offload{.optimizer = Home::host, .activations = Home::host}),
          std::tuple(0, 2, Offload{.activations = Home::host}), std::tuple(1, 1, Offload{.optimizer = Home::nvme}),
          std::tuple(3, 1, Offload{.optimizer = Home::host, .gradients = Home::host, .parameters = Home::host}),
          std::tuple(0, 2, Offload{.optimizer = Home::host, .gradients = Home::host, .parameters = Home::host}),
          std::tuple(3, 1, Offload{.optimizer = Home::nvme, .parameters = Home::nvme, .activations = Home::nvme}),
          std::tuple(2, 1, Offload{.optimizer = Home::nvme, .gradients = Home::nvme}),
          std::tuple(0, 2, Offload{.optimizer = Home::host, .gradients = Home::nvme, .activations = Home::host})}) {
      if (is_emulated(*gpu) && offload.gradients != Home::device && type != DataType::bf16) continue;
      TrainingSpec training = training_in(type);
      if (zero >= 2) training.clip_norm = 0.5;
      ParallelSpec spec;
      spec.mesh.degree = {.pp = pp, .dp = 2 / pp};
      spec.zero_stage = zero;
      spec.micro_batch = 2;
      spec.offload = offload;
      if (offload.parameters != Home::device) spec.prefetch_depth = zero == 3 ? 2 : 0;
      if (zero == 3) spec.gather_unit = GatherUnit::parameter;
      if (pp > 1) spec.schedule = ScheduleKind::zero_bubble_h1;
      const int blocks = static_cast<int>(graph.blocks.size());
      spec.stage_blocks = pp == 1 ? std::vector{blocks} : std::vector{blocks - 2, 2};
      INFO(std::string(name(type)) << ", " << describe(spec));
      TrainingSpec exact = training;
      exact.precision = DataType::fp32;
      check_close(run_on_gpu(gpu, graph, training, spec, 3), run_reference(graph, exact, spec.micro_batch, 3),
                  closeness_of(type));
    }
}

TEST_CASE("moments of 8 bits and images train on a GPU as the one-rank reference does") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  for (const DataType type : {DataType::fp32, DataType::bf16})
    for (const std::string model : {"tiny-gpt2", "tiny-vit"})
      for (const auto& [dp, tp, zero] : {std::tuple(2, 1, 1), std::tuple(1, 2, 0)}) {
        const OpGraph graph = graph_of(model);
        TrainingSpec training = training_in(type);
        training.clip_norm = 0.5;
        if (model == "tiny-gpt2" || tp == 1) training.optimizer = Optimizer::adamw_8bit;
        ParallelSpec spec;
        spec.mesh.degree = {.dp = dp, .tp = tp};
        spec.zero_stage = zero;
        spec.micro_batch = 2;
        spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
        INFO(model << ": " << std::string(name(type)) << ", " << describe(spec));
        TrainingSpec exact = training;
        exact.precision = DataType::fp32;
        // Sums in another order may lie on the other side of a bound between two codes.
        Closeness closeness = closeness_of(type);
        closeness.loss = std::max(closeness.loss, 1e-3);
        check_close(run_on_gpu(gpu, graph, training, spec, 3), run_reference(graph, exact, spec.micro_batch, 3),
                    closeness);
      }
}

TEST_CASE("matrices move along orthogonal momenta on a GPU as the one-rank reference's do") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  struct ShortPlan {
    DataType type;
    int dp, tp, zero_stage;
  };
  for (const ShortPlan& of : {ShortPlan{DataType::fp32, 2, 1, 1}, ShortPlan{DataType::bf16, 2, 2, 1}}) {
    const OpGraph graph = graph_of("tiny-llama");
    TrainingSpec training = training_in(of.type);
    training.clip_norm = 0.5;
    training.optimizer = Optimizer::muon;
    training.momentum = default_muon_momentum;
    ParallelSpec spec;
    spec.mesh.degree = {.dp = of.dp, .tp = of.tp};
    spec.zero_stage = of.zero_stage;
    spec.micro_batch = 2;
    spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
    INFO(std::string(name(of.type)) << ", " << describe(spec));
    TrainingSpec exact = training;
    exact.precision = DataType::fp32;
    Outcome plan = run_on_gpu(gpu, graph, training, spec, 2),
            reference = run_reference(graph, exact, spec.micro_batch, 2);
    // A step leaves directions in the place of gradients, or parts of them.
    plan.first_gradients.clear();
    reference.first_gradients.clear();
    check_close(plan, reference, closeness_of(of.type));
  }
}

TEST_CASE("more tensor-parallel ranks than key/value heads train on a GPU as the one-rank reference does") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const OpGraph graph = graph_of("tiny-llama");  // two key/value heads
  for (const DataType type : all_types) {
    if (is_emulated(*gpu) && type != DataType::bf16) continue;
    TrainingSpec training = training_in(type);
    training.clip_norm = 0.5;
    ParallelSpec spec;
    spec.mesh.degree = {.tp = 4};
    spec.sequence_parallel = true;
    spec.micro_batch = 2;
    spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
    INFO(name(type));
    TrainingSpec exact = training;
    exact.precision = DataType::fp32;
    check_close(run_on_gpu(gpu, graph, training, spec, 2), run_reference(graph, exact, spec.micro_batch, 2),
                closeness_of(type));
  }
}

TEST_CASE("graphs with every op train on a GPU as the one-rank reference does, heads whole and split") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  std::mt19937 random(20261123);
  for (const OpGraph& graph : op_graphs(sequence))
    for (const DataType type : all_types)
      for (const int tp : {1, 2}) {
        if (is_emulated(*gpu) && (type == DataType::fp32 || type == DataType::fp16) != (tp == 1)) continue;
        const TrainingSpec training = training_in(type);
        LayoutRequest request;
        request[Choice::tp] = tp;
        const ParallelSpec spec = random_spec(graph, training, 2, request, random);
        INFO(graph.name << ": " << std::string(name(type)) << ", " << describe(spec));
        TrainingSpec exact = training;
        exact.precision = DataType::fp32;
        check_close(run_on_gpu(gpu, graph, training, spec, 2), run_reference(graph, exact, spec.micro_batch, 2),
                    closeness_of(type));
      }
}

// Ranks that share out the tokens of each sequence: keys and values gathered from all or going
// around a ring, or tokens exchanged for heads.
TEST_CASE("plans with context parallelism train on GPUs as the one-rank reference does") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const bool emulated = is_emulated(*gpu);
  std::mt19937 random(20261124);
  for (const char* model : {"tiny-gpt2", "tiny-llama"}) {
    const OpGraph graph = graph_of(model);
    for (const DataType type : all_types)
      for (const ContextMethod method : context_methods)
        for (int trial = 0; trial < 4; ++trial) {
          const bool gathers = keeps_queries(method);
          // (A run of two ranks takes the emulator a second.)
          if (emulated &&
              (trial > 0 || type != (gathers == (graph.name == "tiny-gpt2") ? DataType::fp32 : DataType::bf16)))
            continue;
          TrainingSpec training = training_in(type);
          if (trial == 1) training.clip_norm = 0.5;
          LayoutRequest request;
          // (tiny-llama's two groups of key/value heads are exchanged over two ranks at most.)
          request[Choice::cp] = trial == 3 && (gathers || graph.name != "tiny-llama") ? 4 : 2;
          request[Choice::cp_method] = method;
          if (trial == 2 && gathers) request[Choice::tp] = 2;
          const int ranks = trial == 0 ? 2 : 4;
          const ParallelSpec spec = random_spec(graph, training, ranks, request, random);
          INFO(model << ": " << std::string(name(type)) << ", " << describe(spec) << ", " << name(method));
          TrainingSpec exact = training;
          exact.precision = DataType::fp32;
          const Outcome reference = run_reference(graph, exact, spec.micro_batch, 2);
          check_close(run_on_gpu(gpu, graph, training, spec, 2), reference, closeness_of(type));
          if (static_cast<int>(gpu->devices().size()) < ranks || !gathers || (emulated && graph.name == "tiny-gpt2"))
            continue;
          std::vector<int> numbers(static_cast<std::size_t>(ranks));
          std::iota(numbers.begin(), numbers.end(), 0);
          const std::unique_ptr<Rendezvous> rendezvous = alone();
          check_close(run_plan(job_of(graph, training, spec, BackendKind::cuda),
                               gpu_per_rank(gpu, numbers, *rendezvous, {}), 2),
                      reference, closeness_of(type));
        }
  }
}

TEST_CASE("groups that exchange tokens for heads train on GPUs as the one-rank reference does") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const bool emulated = is_emulated(*gpu);
  std::mt19937 random(20261127);
  for (const char* model : {"tiny-gpt2", "tiny-llama"}) {
    const OpGraph graph = graph_of(model);
    for (const DataType type : all_types)
      for (const ContextMethod method : {ContextMethod::all_gather, ContextMethod::ring}) {
        const bool of_emulator = (graph.name == "tiny-gpt2") == (method == ContextMethod::all_gather) &&
                                 type == (method == ContextMethod::ring ? DataType::bf16 : DataType::fp32);
        if (emulated && !of_emulator) continue;
        const TrainingSpec training = training_in(type);
        LayoutRequest request;
        request[Choice::cp] = 4;
        request[Choice::cp_method] = method;
        request[Choice::cp_ulysses] = 2;
        const ParallelSpec spec = random_spec(graph, training, 4, request, random);
        INFO(model << ": " << std::string(name(type)) << ", " << describe(spec) << ", " << name(method));
        TrainingSpec exact = training;
        exact.precision = DataType::fp32;
        const int steps_taken = emulated ? 1 : 2;
        const Outcome reference = run_reference(graph, exact, spec.micro_batch, steps_taken);
        check_close(run_on_gpu(gpu, graph, training, spec, steps_taken), reference, closeness_of(type));
        if (emulated || gpu->devices().size() < 4) continue;
        const std::unique_ptr<Rendezvous> rendezvous = alone();
        check_close(run_plan(job_of(graph, training, spec, BackendKind::cuda),
                             gpu_per_rank(gpu, {0, 1, 2, 3}, *rendezvous, {}), steps_taken),
                    reference, closeness_of(type));
      }
  }
}

TEST_CASE("graphs with every op train on GPUs with gathered keys as the one-rank reference does") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const bool emulated = is_emulated(*gpu);
  std::mt19937 random(20261125);
  for (const OpGraph& graph : op_graphs(sequence))
    for (const DataType type : all_types) {
      if (emulated && type != DataType::fp32) continue;
      const TrainingSpec training = training_in(type);
      LayoutRequest request;
      request[Choice::cp] = 2;
      request[Choice::cp_method] = ContextMethod::all_gather;
      const ParallelSpec spec = random_spec(graph, training, emulated ? 2 : 4, request, random);
      INFO(graph.name << ": " << std::string(name(type)) << ", " << describe(spec));
      TrainingSpec exact = training;
      exact.precision = DataType::fp32;
      const int steps_taken = emulated ? 1 : 2;
      check_close(run_on_gpu(gpu, graph, training, spec, steps_taken),
                  run_reference(graph, exact, spec.micro_batch, steps_taken), closeness_of(type));
    }
}

TEST_CASE("on a GPU a pipeline equals accumulation on one rank to the bit, and ZeRO data parallelism") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const int steps_taken = is_emulated(*gpu) ? 2 : 3;
  std::mt19937 random(23);
  int emulated_stage = 0;  // one stage of ZeRO a model on the emulator, in turn
  for (const std::string& model : models) {
    emulated_stage = emulated_stage % 3 + 1;
    const OpGraph graph = graph_of(model);
    const TrainingSpec training = training_in(DataType::bf16);
    LayoutRequest pipelined;
    pipelined[Choice::dp] = pipelined[Choice::tp] = 1;
    pipelined[Choice::micro_batch] = 2;
    pipelined[Choice::tied_gradients] = TiedGradients::apart;
    const ParallelSpec stages = random_spec(graph, training, 2, pipelined, random);
    ParallelSpec flat = stages;
    flat.mesh.degree = {};
    row_of(Choice::schedule).set(flat, ScheduleKind::one_f_one_b);
    flat.stage_blocks = {static_cast<int>(graph.blocks.size())};
    INFO(model << ": " << describe(stages));
    const Outcome accumulated = run_on_gpu(gpu, graph, training, flat, steps_taken);
    check_equal(run_on_gpu(gpu, graph, training, stages, steps_taken), accumulated);
    pipelined[Choice::schedule] = ScheduleKind::zero_bubble_h1;
    const ParallelSpec in_parts = random_spec(graph, training, 2, pipelined, random);
    check_equal(run_on_gpu(gpu, graph, training, in_parts, steps_taken), accumulated);
    if (graph.blocks.size() >= 4) {
      {
        pipelined[Choice::schedule] = model == models.front() ? ScheduleKind::dualpipe_v : ScheduleKind::zero_bubble_v;
        std::mt19937 apart = random;  // so that the draw changes no others
        ParallelSpec back = random_spec(graph, training, 2, pipelined, apart);
        back.recompute = stages.recompute;
        back.recompute_layers = 0;
        back.stage_recompute.clear();
        INFO(model << ": " << describe(back));
        check_equal(run_on_gpu(gpu, graph, training, back, steps_taken), accumulated);
      }
      pipelined[Choice::schedule] = ScheduleKind::interleaved;
      pipelined[Choice::virtual_stages] = 2;
      const ParallelSpec interleaved = random_spec(graph, training, 2, pipelined, random);
      INFO(model << ": " << describe(interleaved) << " on virtual stages");
      check_equal(run_on_gpu(gpu, graph, training, interleaved, steps_taken), accumulated);
    }

    for (int zero = 1; zero <= 3; ++zero) {
      if (is_emulated(*gpu) && zero != emulated_stage) continue;
      LayoutRequest sharded;
      sharded[Choice::dp] = 2;
      sharded[Choice::tp] = sharded[Choice::pp] = 1;
      sharded[Choice::zero_stage] = zero;
      sharded[Choice::micro_batch] = zero > 1 ? global_batch / 2 : 2;
      ParallelSpec spec = random_spec(graph, training, 2, sharded, random);
      INFO(model << ": " << describe(spec));
      const Outcome shards = run_on_gpu(gpu, graph, training, spec, steps_taken);
      spec.zero_stage = 0;
      check_equal(shards, run_on_gpu(gpu, graph, training, spec, steps_taken));
    }
  }
}

TEST_CASE("replayed work and work that is submitted each time give the same bits, as do two runs") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const OpGraph graph = graph_of("tiny-llama");
  const TrainingSpec training = training_in(DataType::bf16);
  std::mt19937 random(29);
  const ParallelSpec spec = random_spec(graph, training, 2, {}, random);
  INFO(describe(spec));
  const Outcome replayed = run_on_gpu(gpu, graph, training, spec, 5);
  check_equal(replayed, run_on_gpu(gpu, graph, training, spec, 5));
  check_equal(replayed, run_on_gpu(gpu, graph, training, spec, 5, {.graphs = false}));
  check_equal(replayed, run_on_gpu(gpu, graph, training, spec, 5, {.graphs = false, .synchronous = true}));
}

// The parameters that kernels read are rounded from fp32 ones, and gradients of fp16 are multiplied
// by a loss scale, whose steps since it last changed are state, too.
TEST_CASE("in half precision a job on a GPU goes on from its checkpoint to the bit") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  std::mt19937 random(20261126);
  const OpGraph graph = graph_of("tiny-llama");
  for (const DataType type : {DataType::bf16, DataType::fp16}) {
    if (is_emulated(*gpu) && type == DataType::bf16) continue;  // fp16 has all that bf16 has, and more
    LayoutRequest request;
    request[Choice::dp] = 2;
    request[Choice::zero_stage] = 1;
    const TrainingSpec training = training_in(type);
    const Job description =
        job_of(graph, training, random_spec(graph, training, 2, request, random), BackendKind::cuda);
    INFO(std::string(name(type)));
    const TemporaryFolder uninterrupted, interrupted;
    const auto trainer = [&] { return Trainer(graph, description, one_gpu(gpu, 0, {})); };
    Trainer whole = trainer();
    whole.train(0, 2);
    whole.save(uninterrupted.root().string(), 2);
    {
      Trainer before = trainer();
      before.train(0, 1);
      before.save(interrupted.root().string(), 1);
    }
    Trainer after = trainer();
    after.load(interrupted.root().string());
    after.train(1, 1);
    after.save(interrupted.root().string(), 2);
    CHECK(after.losses == std::vector<double>{whole.losses[1]});
    CHECK(after.job.collect(ParameterContent::values) == whole.job.collect(ParameterContent::values));
    CHECK(content_of(interrupted.root().string()) == content_of(uninterrupted.root().string()));
    for (const TemporaryFolder* folder : {&uninterrupted, &interrupted}) {
      const std::string path = path_of_checkpoint(folder->root().string(), 2);
      const std::optional<LossScale> scale = read_index(read_file(path + "/checkpoint.json"), path).loss_scale;
      REQUIRE(scale.has_value() == (type == DataType::fp16));
      if (scale) CHECK(scale->good_steps == 2);
    }
  }
}

// Sums may then be in any order, but are still in fp32.
TEST_CASE("plans that need not be deterministic train as the one-rank reference does") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  std::mt19937 random(37);
  const int trials = is_emulated(*gpu) ? 1 : 6;
  std::size_t turn = 0;
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    const DataType emulated_type = all_types[turn++ % std::size(all_types)];  // one a model
    for (const DataType type : all_types)
      for (int trial = 0; trial < trials; ++trial) {
        if (is_emulated(*gpu) && type != emulated_type) continue;
        const TrainingSpec training = training_in(type);
        const ParallelSpec spec = random_spec(graph, training, 1 + trial % 2, {}, random);
        INFO(model << ": " << std::string(name(type)) << ", " << describe(spec));
        TrainingSpec exact = training;
        exact.precision = DataType::fp32;
        check_close(run_on_gpu(gpu, graph, training, spec, 4, {.deterministic = false}),
                    run_reference(graph, exact, spec.micro_batch, 4), closeness_of(type));
      }
  }
}

TEST_CASE("a rank that has no GPU keeps no other waiting for it") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const OpGraph graph = graph_of("tiny-llama");
  const TrainingSpec training = training_in(DataType::bf16);
  std::mt19937 random(41);
  const ParallelSpec spec = random_spec(graph, training, 2, {}, random);
  const std::unique_ptr<Rendezvous> rendezvous = alone();
  const std::string message =
      fmt::format("there is no GPU 1000: this machine has {} (rank 1, before the first step)", gpu->devices().size());
  CHECK_THROWS_WITH_AS(
      run_plan(job_of(graph, training, spec, BackendKind::cuda), gpu_per_rank(gpu, {0, 1000}, *rendezvous, {}), 1),
      message.c_str(), RunError);
}

TEST_CASE("ranks with a GPU each train over NCCL as the one-rank reference does") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const int devices = static_cast<int>(gpu->devices().size());
  if (devices < 2) {
    MESSAGE("skipped: " << devices << " GPU, NCCL wants one a rank");
    return;
  }
  std::mt19937 random(31);
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    for (const int ranks : {2, 4}) {
      if (ranks > devices) continue;
      const TrainingSpec training = training_in(ranks == 2 ? DataType::fp32 : DataType::bf16);
      const ParallelSpec spec = random_spec(graph, training, ranks, {}, random);
      INFO(model << ": " << describe(spec));
      std::vector<int> numbers;
      for (int device = 0; device < ranks; ++device) numbers.push_back(device);
      const std::unique_ptr<Rendezvous> rendezvous = alone();
      TrainingSpec exact = training;
      exact.precision = DataType::fp32;
      check_close(
          run_plan(job_of(graph, training, spec, BackendKind::cuda), gpu_per_rank(gpu, numbers, *rendezvous, {}), 3),
          run_reference(graph, exact, spec.micro_batch, 3), closeness_of(training.precision));
    }
  }
}

TEST_CASE("layers with whole weights exchange tokens for heads on GPUs, whose ranks share one or have one each") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  for (const char* model : {"tiny-gpt2", "tiny-llama"}) {
    const OpGraph graph = graph_of(model);
    for (const DataType type : {DataType::fp32, DataType::bf16}) {
      const TrainingSpec training = training_in(type);
      ParallelSpec spec;
      spec.mesh.degree = {.tp = 2};
      spec.sequence_parallel = true;
      spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
      Job job = job_of(graph, training, spec, BackendKind::cuda);
      BlockLayout whole = job.layout.layouts.at(0);
      for (auto& [parameter, placed] : whole.placements.parameters) placed.tp = replicate();
      job.layout.layouts.push_back(whole);
      for (std::size_t b = 0; b < graph.blocks.size(); ++b)
        if (graph.blocks[b].input && graph.blocks[b].output) job.layout.layout_of_block[b] = 1;
      INFO(model << ": " << std::string(name(type)));
      TrainingSpec exact = training;
      exact.precision = DataType::fp32;
      const Outcome reference = run_reference(graph, exact, spec.micro_batch, 2);
      check_close(run_plan(job, one_gpu(gpu, 0, {}), 2), reference, closeness_of(type));
      if (gpu->devices().size() < 2) continue;
      const std::unique_ptr<Rendezvous> rendezvous = alone();
      check_close(run_plan(job, gpu_per_rank(gpu, {0, 1}, *rendezvous, {}), 2), reference, closeness_of(type));
    }
  }
}

}  // namespace parplan
