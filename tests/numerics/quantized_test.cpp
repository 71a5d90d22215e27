// Plans whose optimizer keeps its moments in 8 bits, against the reference and one another, and
// their promises of memory.
#include <doctest/doctest.h>

#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "planner/graph/dynamic_quantization.h"
#include "planner/parallel/techniques.h"
#include "planner/program/bucket_work.h"
#include "planner/program/verify.h"
#include "tests/numerics/plan_runs.h"
#include "tests/numerics/trainer.h"
#include "tests/temporary_folder.h"

namespace parplan {

using namespace testing;

namespace {

TrainingSpec quantized_training() {
  TrainingSpec training = testing::training_of();
  training.optimizer = Optimizer::adamw_8bit;
  return training;
}

ParallelSpec alone(const OpGraph& graph) {
  ParallelSpec spec;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  return spec;
}

}  // namespace

TEST_CASE("moments of 8 bits are the same to the bit in stages, in shards and on the host") {
  std::mt19937 random(3);
  for (const std::string& model : models) {
    const OpGraph graph = testing::graph_of(model);
    const TrainingSpec training = quantized_training();
    LayoutRequest request;
    request[Choice::dp] = request[Choice::tp] = 1;
    request[Choice::tied_gradients] = TiedGradients::apart;
    ParallelSpec spec = random_spec(graph, training, 2, request, random);
    INFO(model << ": " << describe(spec));
    const Outcome reference = run_reference(graph, training, spec.micro_batch, 3);
    check_equal(run_plan(graph, training, spec, 3), reference);
    spec.offload = Offload{.optimizer = Home::host};
    check_equal(run_plan(graph, training, spec, 3), reference);
    ParallelSpec data = alone(graph);
    data.mesh.degree.dp = 4;
    data.micro_batch = 2;
    const Outcome plain = run_plan(graph, training, data, 3);
    for (data.zero_stage = 1; data.zero_stage <= 3; ++data.zero_stage) {
      CAPTURE(data.zero_stage);
      check_equal(run_plan(graph, training, data, 3), plain);
    }
    data.zero_stage = 3;
    data.gather_unit = GatherUnit::parameter;
    check_equal(run_plan(graph, training, data, 3), plain);
  }
}

TEST_CASE("moments of 8 bits take a byte each, and 4 for each block of 256, in shards of whole blocks") {
  for (const int ranks : {1, 2, 4})
    for (const Offload offload : {Offload{}, Offload{.optimizer = Home::host}}) {
      const OpGraph graph = testing::graph_of("tiny-gpt2");
      ParallelSpec spec = alone(graph);
      spec.mesh.degree.dp = ranks;
      spec.zero_stage = ranks > 1 ? 1 : 0;
      spec.offload = offload;
      TrainingSpec training = quantized_training();
      for (const DataType precision : {DataType::fp32, DataType::bf16}) {
        training.precision = precision;
        const bool has_master = is_half(precision) || offload == Offload{.optimizer = Home::host};
        for (const Program& program : lower_all(testing::job_of(graph, training, spec))) {
          std::int64_t bytes = 0;
          for (const Bucket& bucket : program.buckets) {
            CHECK(bucket.shard_elements % quantization_block == 0);
            CHECK(bucket.shard_elements * ranks == bucket.elements);
            const std::int64_t blocks = bucket.shard_elements / quantization_block;
            CHECK(program.buffers[*bucket.first_moment].bytes == bucket.shard_elements);
            CHECK(program.buffers[*bucket.second_moment].bytes == bucket.shard_elements);
            CHECK(program.buffers[*bucket.first_scales].bytes == 4 * blocks);
            CHECK(program.buffers[*bucket.second_scales].bytes == 4 * blocks);
            CHECK(bucket.master.has_value() == has_master);
            const Home home = offload == Offload{} ? Home::device : Home::host;
            for (const int buffer : {*bucket.first_moment, *bucket.second_scales})
              CHECK(program.buffers[buffer].home == home);
            // Buffers begin at multiples of 256 bytes.
            const auto aligned = [](std::int64_t count) { return (count + 255) / 256 * 256; };
            bytes += 2 * aligned(bucket.shard_elements) + 2 * aligned(4 * blocks) +
                     (has_master ? aligned(4 * bucket.shard_elements) : 0);
          }
          if (offload == Offload{}) CHECK(program.memory.optimizer == Bytes(bytes));
          for (const ParameterPart& part : program.parameters) CHECK(part.bucket_offset % quantization_block == 0);
        }
      }
    }
}

TEST_CASE("an optimizer whose codes have the scales of other blocks is found") {
  const OpGraph graph = testing::graph_of("tiny-llama");
  ParallelSpec spec = alone(graph);
  spec.mesh.degree.dp = 2;
  spec.zero_stage = 1;
  const std::vector<Program> programs = lower_all(testing::job_of(graph, quantized_training(), spec));
  CHECK(find_faults(programs).empty());
  int planted = 0;
  for (const std::size_t operand : {2, 3, 4, 5}) {
    std::vector<Program> broken = programs;
    for (Segment& segment : broken[1].segments)
      for (Instruction& instruction : segment.instructions) {
        if (instruction.op != OpKind::adamw_8bit || instruction.operands[operand].bytes < 512 || planted > 3) continue;
        Operand& changed = instruction.operands[operand];
        // One block later, or one scale.
        const std::int64_t one = operand < 4 ? quantization_block : 4;
        changed.offset += one;
        changed.bytes -= one;
        ++planted;
        const std::vector<Fault> faults = find_faults(broken);
        REQUIRE(!faults.empty());
        changed.offset -= one;
        changed.bytes += one;
      }
  }
  CHECK(planted > 0);
}

TEST_CASE("a checkpoint of moments of 8 bits loses no bit, whoever holds the blocks") {
  std::mt19937 random(5);
  for (const std::string& model : {std::string("tiny-gpt2"), std::string("tiny-llama")}) {
    const OpGraph graph = testing::graph_of(model);
    const TrainingSpec training = quantized_training();
    const auto draw = [&](int ranks) {
      LayoutRequest request;
      request[Choice::tp] = 1;
      ParallelSpec spec = random_spec(graph, training, ranks, request, random);
      if (spec.dp_method != DataMethod::master && random() % 2 == 0) spec.offload = Offload{.optimizer = Home::host};
      if (illegal(graph, training, spec)) spec.offload = Offload{};
      return spec;
    };
    for (int trial = 0; trial < 6; ++trial) {
      const ParallelSpec from = draw(1 << trial % 3), to = draw(1 << (trial + 1) % 4);
      INFO(model << "\nfrom " << describe(from) << "\nto " << describe(to));
      const TemporaryFolder folder;
      const std::string first = folder.path("first"), second = folder.path("second");
      make_folder(first);
      make_folder(second);
      Trainer writer(graph, testing::job_of(graph, training, from));
      writer.train(0, 2);
      writer.save(first, 2);
      TrainingSpec other = training;
      other.seed += 1;
      Trainer reader(graph, testing::job_of(graph, other, to));
      reader.load(first);
      reader.save(second, 2);
      CHECK(content_of(first) == content_of(second));
    }
    // And a job that goes on equals one that was not interrupted.
    const ParallelSpec spec = draw(4);
    INFO(describe(spec));
    const TemporaryFolder folder;
    Trainer whole(graph, testing::job_of(graph, training, spec)), before(graph, testing::job_of(graph, training, spec)),
        after(graph, testing::job_of(graph, training, spec));
    whole.train(0, 4);
    before.train(0, 2);
    before.save(folder.root().string(), 2);
    after.load(folder.root().string());
    after.train(2, 2);
    CHECK(after.losses == std::vector<double>{whole.losses[2], whole.losses[3]});
    CHECK(after.job.collect(ParameterContent::values) == whole.job.collect(ParameterContent::values));
  }
}

}  // namespace parplan
