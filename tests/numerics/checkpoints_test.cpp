// Checkpoints: any plan goes on from any plan's, to the bit; a job that goes on ends with the bits
// of one that was never interrupted.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <set>

#include <fmt/format.h>

#include "planner/base/file.h"
#include "planner/parallel/techniques.h"
#include "planner/program/bucket_layout.h"
#include "runtime/checkpoints.h"
#include "runtime/run.h"
#include "tests/numerics/plan_runs.h"
#include "tests/numerics/trainer.h"
#include "tests/temporary_folder.h"

namespace parplan {
namespace {

using testing::content_of;
using testing::TemporaryFolder;
using testing::Trainer;

// Gives the state of every block a ZeRO stage and homes of its own; blocks that tie a parameter
// have the same ones.
void vary_state(const OpGraph& graph, const ParallelSpec& spec, Layout& layout, std::mt19937& random) {
  const auto draw = [&] {
    ParallelSpec own = spec;
    // Gradients of a backward in two parts are not sharded, and hybrid sharding shards something.
    const int most = runs_backward_in_parts(spec.schedule) ? 1 : 3, least = spec.mesh.dp_shard > 0 ? 1 : 0;
    if (spec.dp() > 1) own.zero_stage = least + static_cast<int>(random() % static_cast<unsigned>(most - least + 1));
    BlockLayout drawn = block_layout(own, place(graph, own), spec.recompute);
    const auto in_memory = [&] { return random() % 2 == 0 ? Home::device : Home::host; };
    StateHomes& homes = drawn.placements.state.homes;
    homes = {
        .parameters = in_memory(), .gradients = in_memory(), .optimizer = random() % 8 == 0 ? Home::nvme : in_memory()};
    // Neither a device's updates nor gathers of what was updated reach a file.
    const bool gathers = own.zero_stage < 3 && own.replicas() > 1;
    if (homes.optimizer != Home::device && !gathers && random() % 4 == 0) homes.parameters = Home::nvme;
    return drawn;
  };
  const BlockLayout of_tied = draw();
  layout.layouts.clear();
  layout.layout_of_block.clear();
  for (const Block& block : graph.blocks) {
    layout.layout_of_block.push_back(static_cast<int>(layout.layouts.size()));
    layout.layouts.push_back(block_parameters(graph, block).tied ? of_tied : draw());
  }
}

// What a layout must have, beside what is drawn.
struct Kind {
  std::string name;
  LayoutRequest request;
  bool hybrid = false;
};
const std::vector<Kind> kinds = {
    {"any", {}},
    {"keys gathered over the context axis", {{Choice::cp, 2}, {Choice::cp_method, ContextMethod::all_gather}}},
    {"tokens exchanged over the context axis", {{Choice::cp, 2}, {Choice::cp_method, ContextMethod::ulysses}}},
    {"keys around the ring of the context axis", {{Choice::cp, 2}, {Choice::cp_method, ContextMethod::ring}}},
    {"tokens around the ring of the tensor axis",
     {{Choice::tp, 2}, {Choice::sequence_parallel, true}, {Choice::tp_overlap, TensorOverlap::ring}}},
    {"interleaved", {{Choice::pp, 2}, {Choice::schedule, ScheduleKind::interleaved}}},
    {"zero bubble", {{Choice::pp, 2}, {Choice::schedule, ScheduleKind::zero_bubble_h1}}},
    {"down the ranks and back", {{Choice::pp, 2}, {Choice::schedule, ScheduleKind::zero_bubble_v}}},
    {"hybrid sharding", {{Choice::dp, 4}}, true},
    {"one process with a master",
     {{Choice::dp_method, DataMethod::master}, {Choice::tp, 1}, {Choice::pp, 1}, {Choice::cp, 1}}},
};

// A way to train the model: any layout of the kind, by blocks or alike. Models whose positions do
// not depend on each other have no context axis, nor have those of two sequences: any other layout
// then.
Job random_job(const OpGraph& graph, const TrainingSpec& training, std::mt19937& random, std::string& what,
               const Kind& kind = kinds.front()) {
  int ranks = 1 << random() % 4;
  if (kind.hybrid) ranks = std::max(ranks, 4);
  if (kind.name != "any") ranks = std::max(ranks, 2);
  const bool has = !enumerate_specs(graph, training, ranks, kind.request).empty();
  CHECK((has || graph.name == "tiny-mlp" || graph.joins_sequences));
  ParallelSpec spec = testing::random_spec(graph, training, ranks, has ? kind.request : LayoutRequest{}, random);
  if (kind.hybrid) {
    const int most = runs_backward_in_parts(spec.schedule) ? 1 : 3;
    spec.mesh.dp_shard = 2;
    spec.zero_stage = 1 + static_cast<int>(random() % static_cast<unsigned>(most));
  }
  Job job = testing::job_of(graph, training, spec);
  what = fmt::format("{}: {} cp {}", has ? kind.name : "any", testing::describe(spec), spec.cp());
  if (random() % 2 == 0 && spec.dp_method != DataMethod::master) {
    vary_state(graph, spec, job.layout, random);
    what += ", blocks of their own state";
  }
  return job;
}

// What the ranks write: every element once, by parts that are about equal.
void check_division(const OpGraph& graph, const std::vector<Program>& programs, const TrainingSpec& training) {
  const auto written = divide_state(graph, programs, training.precision);
  std::map<std::pair<State, TensorId>, std::vector<int>> times;
  for (const auto& of_rank : written)
    for (const WrittenSlice& one : of_rank) {
      const Tensor& tensor = graph.tensors[one.tensor];
      std::vector<int>& counted = times[{one.state, one.tensor}];
      counted.resize(static_cast<std::size_t>(element_count(tensor)));
      for (std::int64_t row = 0; row < one.slice.rows; ++row)
        for (std::int64_t column = 0; column < one.slice.columns; ++column)
          ++counted[(one.slice.row + row) * whole_of(tensor).columns + one.slice.column + column];
    }
  for (const auto& [key, counted] : times) CHECK(std::ranges::all_of(counted, [](int count) { return count == 1; }));
  CHECK(times.size() % parameters(graph).size() == 0);
}

// CPUs compute in fp32 alone: jobs of other precisions keep their state, and make no steps here.
bool trains(const TrainingSpec& training) {
  return !is_half(training.precision);
}

TrainingSpec training_of(int trial) {
  TrainingSpec training = testing::training_of();
  constexpr Optimizer optimizers[] = {Optimizer::adamw, Optimizer::adam, Optimizer::sgd};
  training.optimizer = optimizers[trial % 3];
  training.momentum = trial % 2 == 0 ? 0.9 : 0.0;
  constexpr DataType precisions[] = {DataType::fp32, DataType::fp32, DataType::bf16, DataType::fp16};
  training.precision = precisions[trial % 4];
  return training;
}

}  // namespace

TEST_CASE("any plan goes on from any plan's checkpoint to the bit") {
  std::mt19937 random(20261122);
  for (const std::string& model : testing::models) {
    const OpGraph graph = testing::graph_of(model);
    // Every pair of kinds.
    const int count = static_cast<int>(kinds.size());
    for (int trial = 0; trial < count * count; ++trial) {
      const TrainingSpec training = training_of(trial + trial / count);
      std::string from, to;
      const Job writes = random_job(graph, training, random, from, kinds[static_cast<std::size_t>(trial / count)]);
      const Job reads = random_job(graph, training, random, to, kinds[static_cast<std::size_t>(trial % count)]);
      INFO(model << " trial " << trial << "\nfrom " << from << "\nto " << to);
      const TemporaryFolder folder;
      const std::string first = folder.path("first"), second = folder.path("second");
      make_folder(first);
      make_folder(second);
      Trainer writer(graph, writes);
      check_division(graph, writer.job.programs(), training);
      if (trains(training)) writer.train(0, 2);
      writer.save(first, 2);
      // Another initial state, of which nothing may be left.
      Job other = reads;
      other.training.seed += 1;
      Trainer reader(graph, other);
      reader.load(first);
      reader.save(second, 2);
      CHECK(content_of(first) == content_of(second));
      if (!trains(training)) continue;
      reader.train(2, 1);
      writer.train(2, 1);
      CHECK(reader.losses.back() == doctest::Approx(writer.losses.back()).epsilon(1e-5));
    }
  }
}

TEST_CASE("state and parameters on NVMe go to a checkpoint and come back in pieces, and the host holds no copy") {
  const OpGraph graph = testing::graph_of("tiny-gpt2");
  const TrainingSpec training = testing::training_of();
  constexpr std::int64_t small = 100;  // bytes, less than a row of most matrices
  std::map<std::string, std::vector<std::uint32_t>> whole;
  for (const Offload& offload :
       {Offload{}, Offload{.optimizer = Home::nvme, .parameters = Home::nvme},
        Offload{.optimizer = Home::nvme, .gradients = Home::nvme, .parameters = Home::nvme}}) {
    ParallelSpec spec;
    spec.mesh.degree = {.dp = 2};
    spec.zero_stage = 3;
    spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
    spec.offload = offload;
    const Job job = testing::job_of(graph, training, spec);
    Trainer trainer(graph, job);
    trainer.train(0, 2);
    const TemporaryFolder folder;
    const std::string path = folder.path("checkpoints");
    make_folder(path);
    Checkpoints checkpoints({.folder = path, .piece_bytes = small}, trainer.job, graph, trainer.plan, trainer.facts(),
                            *trainer.rendezvous, {.say = [](const std::string&) {}, .complain = {}});
    checkpoints.save(trainer.position(2));
    std::int64_t in_files = 0, state = 0;
    for (const Program& program : trainer.job.programs()) {
      in_files += program.arena_bytes.nvme;
      for (const Bucket& bucket : program.buckets) state += 3 * 4 * bucket.shard_elements;
    }
    // All of it, without padding between parameters; or nothing.
    if (offload == Offload{})
      CHECK(checkpoints.held() > state * 9 / 10);
    else
      CHECK(checkpoints.held() == 0);
    CHECK((in_files > 0) == (offload != Offload{}));
    checkpoints.finish();
    CHECK(checkpoints.failures() == 0);
    if (offload == Offload{}) whole = content_of(path);
    CHECK(content_of(path) == whole);
    Job other = job;
    other.training.seed += 1;
    Trainer reader(graph, other);
    restore(reader.job, graph, training, *find_checkpoint(path, graph, reader.plan, reader.facts(), *reader.rendezvous),
            small);
    const std::string again = folder.path("again");
    make_folder(again);
    reader.save(again, 2);
    CHECK(content_of(again) == whole);
  }
}

TEST_CASE("a job that goes on from its checkpoint equals one that was not interrupted, to the bit") {
  std::mt19937 random(7);
  for (const std::string& model : testing::models) {
    const OpGraph graph = testing::graph_of(model);
    for (int trial = 0; trial < 12; ++trial) {
      TrainingSpec training = training_of(trial);
      training.precision = DataType::fp32;
      std::string what;
      const Kind& kind = kinds[static_cast<std::size_t>(trial) % kinds.size()];
      const Job description = random_job(graph, training, random, what, kind);
      INFO(model << " trial " << trial << ": " << what);
      const TemporaryFolder folder;
      const std::string path = folder.root().string();
      Trainer whole(graph, description);
      whole.train(0, 5);
      Trainer before(graph, description);
      before.train(0, 3);
      before.save(path, 3);
      Trainer after(graph, description);
      after.load(path);
      after.train(3, 2);
      CHECK(after.losses == std::vector<double>{whole.losses[3], whole.losses[4]});
      CHECK(after.job.collect(ParameterContent::values) == whole.job.collect(ParameterContent::values));
    }
  }
}

TEST_CASE("checkpoints written beside the steps hold what the job had at theirs") {
  const OpGraph graph = testing::graph_of("tiny-gpt2");
  std::mt19937 random(3);
  for (int trial = 0; trial < 4; ++trial) {
    std::string what;
    TrainingSpec training = training_of(trial);
    training.precision = DataType::fp32;
    const Job description = random_job(graph, training, random, what);
    INFO(what);
    const TemporaryFolder folder, expected;
    Trainer trainer(graph, description);
    int written = 0;
    Checkpoints checkpoints(
        {.folder = folder.root().string(), .keep = 2}, trainer.job, graph, trainer.plan, trainer.facts(),
        *trainer.rendezvous,
        {.say = [&](const std::string&) { ++written; }, .complain = [](const std::string& line) { FAIL(line); }});
    trainer.train(0, 6, &checkpoints);
    checkpoints.finish();
    CHECK(written == 6);
    CHECK(complete_checkpoints(folder.root().string()) == std::vector<std::int64_t>{5, 6});
    trainer.save(expected.root().string(), 6);
    CHECK(content_of(folder.root().string()) == content_of(expected.root().string()));
  }
}

TEST_CASE("a plan in another precision goes on from the fp32 numbers of a checkpoint") {
  const OpGraph graph = testing::graph_of("tiny-llama");
  const TemporaryFolder folder, again;
  TrainingSpec half = testing::training_of();
  half.precision = DataType::bf16;
  ParallelSpec spec;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  Trainer in_half(graph, testing::job_of(graph, half, spec));
  in_half.save(folder.root().string(), 2);
  Trainer in_full(graph, testing::job_of(graph, testing::training_of(), spec));
  in_full.load(folder.root().string());
  in_full.save(again.root().string(), 2);
  CHECK(content_of(folder.root().string()) == content_of(again.root().string()));
}

TEST_CASE("a checkpoint that was cut off, altered, or is of another training is refused with what is wrong") {
  const OpGraph graph = testing::graph_of("tiny-llama");
  const TemporaryFolder folder;
  const std::string path = folder.root().string();
  ParallelSpec spec;
  spec.mesh.degree = {.dp = 2};
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  Trainer trainer(graph, testing::job_of(graph, testing::training_of(), spec));
  CHECK(find_checkpoint(path, graph, trainer.plan, trainer.facts(), *trainer.rendezvous) == nullptr);
  trainer.save(path, 1);
  begin_checkpoint(path, 2);  // of a run that died
  const std::string whole = path_of_checkpoint(path, 1);
  const auto refusal = [&](const OpGraph& of, const Plan& plan, const std::vector<Fact>& facts) {
    try {
      find_checkpoint(path, of, plan, facts, *trainer.rendezvous);
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto own = [&] { return refusal(graph, trainer.plan, trainer.facts()); };
  CHECK(own().empty());
  // One byte of each file, and its last one.
  const std::string shard = whole + "/rank-00001-of-00002.safetensors";
  for (const std::string& file : {shard, whole + "/checkpoint.json"}) {
    const std::string good = read_file(file);
    std::string altered = good;
    altered[altered.size() / 2] = static_cast<char>(altered[altered.size() / 2] ^ 4);
    write_file_atomically(file, altered);
    CHECK(own().starts_with(file + ": error: "));
    CHECK(own().find("altered") != std::string::npos);
    write_file_atomically(file, std::string_view(good).substr(0, good.size() - 1));
    CHECK(own().find("cut off") != std::string::npos);
    std::filesystem::remove(file);
    CHECK(own() == fmt::format("error: cannot read '{}': No such file or directory", file));
    write_file_atomically(file, good);
    CHECK(own().empty());
  }
  const std::string begins = whole + "/checkpoint.json: error: this checkpoint is not of the plan's training: ";
  const std::string ends = "; resume with the plan's own checkpoints, or give another folder";
  CHECK(refusal(graph, trainer.plan, {{"optimizer", "sgd"}}) ==
        begins + "optimizer is adamw there and sgd in the plan" + ends);
  Plan deeper = trainer.plan;
  deeper.model_text = "name: other\nlayers: 9\n";
  CHECK(refusal(graph, deeper, trainer.facts()) == begins + "the model has 'layers: 9' only in the plan" + ends);
  const OpGraph wider = testing::graph_of("tiny-gpt2");
  CHECK(refusal(wider, trainer.plan, trainer.facts()).find("there is no ") != std::string::npos);
}

}  // namespace parplan
