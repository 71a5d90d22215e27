#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <map>

#include "planner/parallel/techniques.h"
#include "planner/plan/layout.h"
#include "planner/program/job.h"
#include "planner/program/lower.h"
#include "planner/program/memory.h"
#include "planner/schedule/schedules.h"
#include "tests/planner/search/random_settings.h"

// Closed forms of what a plan keeps and sends (those of time are tested in tests/planner/cost,
// schedule and simulator).
namespace parplan {

using testing::graph_of;
using testing::training_of;

TEST_CASE("ZeRO's memory follows its closed form") {
  // Rajbhandari et al. 2020, section 3: with P parameters over N ranks, in fp32 here (4 + 4 + 8
  // bytes per parameter):
  //   stage 0: 16 P; 1: 8 P + 8 P / N; 2: 4 P + 12 P / N; 3: 16 P / N.
  // Buckets of tiny-llama are multiples of 16 N elements at N = 2, so nothing is padded except each
  // of the 6 buffers of a part, to 256 bytes.
  const OpGraph graph = graph_of("tiny-llama", 16);
  const std::int64_t whole = 4 * parameter_count(graph);
  const TrainingSpec training = training_of(8, DataType::fp32);
  const auto is = [](Bytes memory, std::int64_t closed_form, int parts) {
    return memory.count >= closed_form && memory.count < closed_form + 256 * 6 * parts;
  };
  for (int zero = 0; zero <= 3; ++zero) {
    ParallelSpec spec;
    spec.mesh.degree = {.dp = 2};
    spec.zero_stage = zero;
    spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
    const Job job{.graph = &graph, .training = training, .layout = lay_out(spec, place(graph, spec)),
                  .schedule = row_of(spec.schedule).actions({1, 4}), .backend = BackendKind::cpu, .overhead = {}};
    const MemoryUse memory = lower(job, 0).memory;
    CHECK(is(memory.parameters, zero >= 3 ? whole / 2 : whole, 1));
    CHECK(is(memory.gradients, zero >= 2 ? whole / 2 : whole, 1));
    CHECK(is(memory.optimizer, zero >= 1 ? whole : 2 * whole, 2));
  }
}

TEST_CASE("data-parallel and tensor-parallel bytes follow their closed forms") {
  const OpGraph graph = graph_of("tiny-llama", 16);
  const TrainingSpec training = training_of(8, DataType::fp32);
  const auto lowered = [&](int dp, int tp, bool sequence_parallel, int zero) {
    ParallelSpec spec;
    spec.mesh.degree = {.dp = dp, .tp = tp};
    spec.sequence_parallel = sequence_parallel;
    spec.zero_stage = zero;
    spec.micro_batch = 8 / dp;
    spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
    const Job job{.graph = &graph, .training = training, .layout = lay_out(spec, place(graph, spec)),
                  .schedule = row_of(spec.schedule).actions({1, 1}), .backend = BackendKind::cpu, .overhead = {}};
    return lower(job, 0).communication;
  };
  const std::int64_t parameters_bytes = 4 * parameter_count(graph);
  // An all-reduce sends 2 (n - 1) / n of the buffer, which is all of it over two ranks;
  // reduce-scatter and all-gather send half of it each. Stage 3 gathers the parameters for forward
  // and backward. The loss's single element makes rank 0 send 4 bytes.
  CHECK(lowered(2, 1, false, 0).dp.count == parameters_bytes + 4);
  CHECK(lowered(2, 1, false, 1).dp.count == parameters_bytes + 4);
  CHECK(lowered(2, 1, false, 2).dp.count == parameters_bytes + 4);
  CHECK(lowered(2, 1, false, 3).dp.count == 3 * parameters_bytes / 2 + 4);

  // Megatron (Shoeybi et al. 2019): two all-reduces of s b h forward and two backward in each of 4
  // layers, one forward for the embedding, one backward for the head: 18, each sending 2 (n - 1) /
  // n = 1 times 16 x 8 x 32 x 4 bytes over two ranks. The vocabulary-parallel loss sends a maximum
  // and two sums per token: 3 x 16 x 8 x 4 bytes.
  const std::int64_t activation = 16 * 8 * 32 * 4;
  const std::int64_t loss_terms = 3 * 16 * 8 * 4;
  CHECK(lowered(1, 2, false, 0).tp.count == 18 * activation + loss_terms);
  // Korthikanti et al. 2022: with sequence parallelism an all-gather and a reduce-scatter replace
  // each all-reduce, and the backward gathers each of the layer's two inputs (and the head's) once
  // more for the weight gradients: per layer 4 x 2 / 2 + 2 / 2 activations; embedding: 1/2 forward,
  // 1/2 backward; head: 1/2 forward, 1/2 again and 1/2 backward. At the end the norms' gradients (9
  // of 32 elements, each 4 bytes) are all-reduced.
  const std::int64_t norms = 9 * 32 * 4;
  CHECK(lowered(1, 2, true, 0).tp.count ==
        4 * 5 * activation + activation + 3 * activation / 2 + loss_terms + norms);
}

TEST_CASE("copies of keys and values take their closed form of memory, and of bytes for their gradients") {
  // tiny-llama has 4 layers of hidden 32 with 4 query and 2 key/value heads of 8, a feed-forward of
  // 48 and a vocabulary of 64. Each of t = 4 tensor-parallel ranks has a quarter of everything cut,
  // but half of the keys and values: 2 x 8 rows of 32 in each layer, held by R = 2 ranks.
  const OpGraph graph = graph_of("tiny-llama", 16);
  const TrainingSpec training = training_of(8, DataType::fp32);
  const std::int64_t keys_and_values = 4 * 2 * 8 * 32;
  const std::int64_t norms = 9 * 32;
  const std::int64_t cut = 2 * 64 * 32 + 4 * (2 * 32 * 32 + 3 * 32 * 48);  // without keys and values
  REQUIRE(parameter_count(graph) == cut + 2 * keys_and_values + norms);
  for (const bool sequence_parallel : {false, true}) {
    ParallelSpec spec;
    spec.mesh.degree = {.tp = 4};
    spec.sequence_parallel = sequence_parallel;
    spec.micro_batch = 8;
    spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
    const Job job{.graph = &graph,
                  .training = training,
                  .layout = lay_out(spec, place(graph, spec)),
                  .schedule = row_of(spec.schedule).actions({1, 1}),
                  .backend = BackendKind::cpu,
                  .overhead = {}};
    for (int rank = 0; rank < 4; ++rank) {
      const Program program = lower(job, rank);
      CHECK(program.group(holders_of_copies(2)) == std::vector{rank / 2 * 2, rank / 2 * 2 + 1});
      // Rank r computes query head r, and holds the key and the value of head r / 2: rows [32 (r /
      // 2), + 32) of the fused weight are query, query, key, value.
      std::int64_t copied = 0;
      for (const ParameterPart& part : program.parameters) {
        if (graph.tensors[part.tensor].name.find("qkv") == std::string::npos) continue;
        CHECK(part.row_begin == 32 * (rank / 2) + (part.copies == 2 ? 16 : rank % 2 * 8));
        CHECK(part.rows == (part.copies == 2 ? 16 : 8));
        if (part.copies == 2) copied += part.rows * part.columns;
      }
      CHECK(copied == keys_and_values);
      std::int64_t held = 0;
      for (const Bucket& bucket : program.buckets) held += bucket.elements;
      CHECK(held == cut / 4 + keys_and_values + norms);
      // An all-reduce of n bytes over R ranks sends 2 (R - 1) / R n: once a step, in fp32.
      std::int64_t of_copies = 0, others = 0;
      for (const Call& call : program.calls)
        for (const Instruction& instruction : program.segments[call.segment].instructions) {
          if (instruction.kind == InstructionKind::kernel) continue;
          const std::vector<int>& ranks = program.group(instruction.group);
          const auto at = std::ranges::find(ranks, program.rank) - ranks.begin();
          (instruction.group.members == Members::copies ? of_copies : others) +=
              sent_bytes(instruction.kind, instruction.operands.back().bytes, 4, static_cast<int>(ranks.size()),
                         static_cast<int>(at));
        }
      CHECK(of_copies == 2 * (2 - 1) * 4 * keys_and_values / 2);
      CHECK(program.communication.tp.count + program.communication.dp.count == of_copies + others);
      // Activations go around as over any four ranks: 18 all-reduces of s b h, at 2 (t - 1) / t.
      const std::int64_t activation = 16 * 8 * 32 * 4, loss_terms = 3 * 16 * 8 * 4;
      if (!sequence_parallel)
        CHECK(program.communication.tp.count == 3 * (18 * activation + loss_terms) / 2 + of_copies);
    }
  }
}

TEST_CASE("hybrid sharding sends its closed form inside a shard group, and across these") {
  // With P bytes of parameters, S ranks of a shard group, R groups and m micro-batches, in fp32, a
  // rank sends inside its group (S - 1) / S P for each reduction and each gather: once each
  // (ZeRO-1), m reductions and one gather (2), m reductions and 2 m gathers (3). Across groups, it
  // sends 2 (R - 1) / R of a shard of P / S, once a step. A rank keeps 1 / S of what is sharded.
  const OpGraph graph = graph_of("tiny-llama", 16);
  const TrainingSpec training = training_of(16, DataType::fp32);
  for (const auto& [dp, size] : {std::pair{4, 2}, {8, 2}, {8, 4}})
    for (int zero = 1; zero <= 3; ++zero)
      for (const int micro_batches : {1, 2}) {
        ParallelSpec spec;
        spec.mesh.degree = {.dp = dp};
        spec.mesh.dp_shard = size;
        spec.zero_stage = zero;
        spec.micro_batch = 16 / dp / micro_batches;
        spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
        const Job job{.graph = &graph,
                      .training = training,
                      .layout = lay_out(spec, place(graph, spec)),
                      .schedule = row_of(spec.schedule).actions({1, micro_batches}),
                      .backend = BackendKind::cpu,
                      .overhead = {}};
        const Program program = lower(job, 1);
        INFO("ZeRO-" << zero << " over " << size << " of " << dp << ", " << micro_batches << " micro-batches");
        CHECK(program.group(shard_group(spec.mesh)).size() == static_cast<std::size_t>(size));
        CHECK(program.group(shard_replicas).size() == static_cast<std::size_t>(dp / size));
        std::int64_t whole = 0;  // with padding
        for (const Bucket& bucket : program.buckets) {
          whole += 4 * bucket.elements;
          CHECK(bucket.shard_elements * size == bucket.elements);
        }
        std::map<Members, std::int64_t> sent;
        for (const Call& call : program.calls)
          for (const Instruction& instruction : program.segments[call.segment].instructions) {
            if (instruction.kind == InstructionKind::kernel) continue;
            const std::vector<int>& ranks = program.group(instruction.group);
            const auto at = std::ranges::find(ranks, program.rank) - ranks.begin();
            sent[instruction.group.members] += sent_bytes(instruction.kind, instruction.operands.back().bytes, 4,
                                                          static_cast<int>(ranks.size()), static_cast<int>(at));
          }
        const int passes = zero == 1 ? 2 : zero == 2 ? micro_batches + 1 : 3 * micro_batches;
        CHECK(sent[Members::shard] == passes * (whole / size) * (size - 1));
        const int groups = dp / size;
        CHECK(sent[Members::replicas] == 2 * (whole / size / groups) * (groups - 1));
        CHECK(program.communication.dp.count == sent[Members::shard] + sent[Members::replicas] + sent[Members::all]);
      }
}

TEST_CASE("gradients of a tied parameter go over the data axis once, and once per use where uses add up apart") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  const TrainingSpec training = training_of(8, DataType::fp32);
  for (const int zero : {0, 1, 2})
    for (const int micro_batches : {1, 2}) {
      const auto lowered = [&](TiedGradients gradients) {
        ParallelSpec spec;
        spec.mesh.degree = {.dp = 2};
        spec.zero_stage = zero;
        spec.micro_batch = 4 / micro_batches;
        spec.tied_gradients = gradients;
        spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
        const Job job{.graph = &graph, .training = training, .layout = lay_out(spec, place(graph, spec)),
                      .schedule = row_of(spec.schedule).actions({1, micro_batches}), .backend = BackendKind::cpu,
                      .overhead = {}};
        return lower(job, 0);
      };
      INFO("ZeRO " << zero << ", " << micro_batches << " micro-batches");
      const Program together = lowered(TiedGradients::together), apart = lowered(TiedGradients::apart);
      std::int64_t all = 0;
      for (const Bucket& bucket : together.buckets) all += 4 * bucket.elements;
      REQUIRE(together.buckets.back().name == "embedding.weight");
      const std::int64_t tied = 4 * together.buckets.back().elements;
      // Over two ranks an all-reduce sends all of a bucket, a reduce-scatter and the all-gather of
      // updated parameters half of it each. ZeRO-2 reduces every micro-batch. The loss takes 4
      // bytes.
      const std::int64_t reductions = zero == 2 ? micro_batches : 1;
      CHECK(together.communication.dp.count == (zero == 0 ? all : (reductions + 1) * all / 2) + 4);
      CHECK(apart.communication.dp.count - together.communication.dp.count ==
            (zero == 0 ? tied : reductions * tied / 2));
      // Two accumulators take one more bucket, or a shard of it.
      CHECK(apart.memory.gradients - together.memory.gradients ==
            align_up(Bytes(zero == 2 ? tied / 2 : tied), buffer_alignment));
    }
}

}  // namespace parplan
