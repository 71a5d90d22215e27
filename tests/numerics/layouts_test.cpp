// What lowering can do beyond what the search asks for today: blocks that differ from one another,
// and ranks that hold several stages.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/base/enum_index.h"
#include "planner/parallel/techniques.h"
#include "planner/plan/layout.h"
#include "planner/plan/schedule.h"
#include "planner/program/bucket_layout.h"
#include "planner/program/lower.h"
#include "planner/program/memory.h"
#include "planner/program/verify.h"
#include "tests/numerics/op_graphs.h"
#include "tests/numerics/plan_runs.h"

namespace parplan {

using namespace testing;

namespace {

// Gives every block choices of its own. Blocks that tie a parameter agree on its placement.
std::string vary_blocks(const OpGraph& graph, const ParallelSpec& spec, Layout& layout, std::mt19937& random) {
  std::string what;
  layout.layouts.clear();
  layout.layout_of_block.clear();
  ParallelSpec of_tied = spec;
  of_tied.zero_stage = spec.dp() > 1 ? static_cast<int>(random() % 4) : 0;
  of_tied.sequence_parallel = spec.tp() > 1 && random() % 2 == 0;
  for (const Block& block : graph.blocks) {
    ParallelSpec own = of_tied;
    if (!block_parameters(graph, block).tied) {
      own.zero_stage = spec.dp() > 1 ? static_cast<int>(random() % 4) : 0;
      own.sequence_parallel = spec.tp() > 1 && random() % 2 == 0;
    }
    const Recompute recompute = random() % 2 == 0 ? Recompute::none : Recompute::full;
    Placements placements = place(graph, own);
    // A whole table on every rank: each looks up its own tokens, where the sequence is sharded.
    const bool whole_table = !block.input && graph.tied.empty() && spec.tp() > 1 && random() % 2 == 0;
    if (whole_table) placements.parameters["embedding.weight"] = {};
    layout.layout_of_block.push_back(static_cast<int>(layout.layouts.size()));
    layout.layouts.push_back(block_layout(own, placements, recompute));
    what += fmt::format(" {}: zero {} sp {} recompute {}{};", block.name, own.zero_stage, own.sequence_parallel,
                        name(recompute), whole_table ? ", whole table" : "");
  }
  return what;
}

// Whether the tensor axis can cut the parameter as a technique would.
bool can_be_cut(const OpGraph& graph, const std::string& name, int ranks) {
  for (const TensorId id : parameters(graph)) {
    const Tensor& tensor = graph.tensors[id];
    if (name_in_block(tensor.name) != name) continue;
    for (const TensorDim& dim : tensor.dims)
      if (dim.dim == Dim::kv_groups && dim.size / dim.granule % ranks != 0) return false;
  }
  return true;
}

// Leaves parameters of layers whole on the tensor axis: all of them, or some of the products', with
// what belongs to them; or every parameter of the model. Residuals are cut by tokens, or whole.
std::string vary_weights(const OpGraph& graph, const ParallelSpec& spec, Layout& layout, bool every,
                         std::mt19937& random) {
  std::string what;
  layout.layouts.clear();
  layout.layout_of_block.clear();
  const bool of_tied = random() % 4 != 0;
  for (const Block& block : graph.blocks) {
    ParallelSpec own = spec;
    own.sequence_parallel = block_parameters(graph, block).tied ? of_tied : random() % 4 != 0;
    const Recompute recompute = random() % 2 == 0 ? Recompute::none : Recompute::full;
    BlockLayout of_block = block_layout(own, place(graph, own), recompute);
    const bool is_layer = block.input && block.output;
    const bool all_whole = every || random() % 2 == 0;
    what += fmt::format(" {}: sp {} recompute {} whole:", block.name, own.sequence_parallel, name(recompute));
    std::map<std::string, bool> whole;  // by product
    const auto product_of = [](const std::string& parameter) {
      const std::string product = parameter.substr(0, parameter.rfind('.'));
      // The norms of queries and keys are as wide as these.
      return product.ends_with("query_norm") || product.ends_with("key_norm") ? "attention.qkv" : product;
    };
    if (every)
      for (auto& [parameter, placed] : of_block.placements.parameters) placed.tp = replicate();
    if (is_layer)
      for (const TensorId id : block_parameters(graph, block).own) {
        const std::string parameter(name_in_block(graph.tensors[id].name));
        const auto [found, drawn] = whole.try_emplace(product_of(parameter), false);
        if (drawn) found->second = all_whole || random() % 2 == 0;
        found->second = found->second || !can_be_cut(graph, parameter, spec.tp());
      }
    for (const auto& [product, is_whole] : whole) {
      if (!is_whole) continue;
      what += " " + product;
      for (auto& [parameter, placed] : of_block.placements.parameters)
        if (product_of(parameter) == product) placed.tp = replicate();
    }
    what += ";";
    layout.layout_of_block.push_back(static_cast<int>(layout.layouts.size()));
    layout.layouts.push_back(std::move(of_block));
  }
  return what;
}

// Gives the state of every block homes of its own. Blocks that tie a parameter have the same ones.
std::string vary_homes(const OpGraph& graph, Layout& layout, std::mt19937& random) {
  const auto draw = [&] {
    const auto in_memory = [&] { return random() % 2 == 0 ? Home::device : Home::host; };
    const auto any = [&] { return all_homes[random() % all_homes.size()]; };
    return StateHomes{.parameters = in_memory(), .gradients = in_memory(), .optimizer = any()};
  };
  std::string what;
  const StateHomes of_tied = draw();
  for (std::size_t b = 0; b < graph.blocks.size(); ++b) {
    StateHomes& homes = layout.layouts[layout.layout_of_block[b]].placements.state.homes;
    homes = block_parameters(graph, graph.blocks[b]).tied ? of_tied : draw();
    what += fmt::format(" {}: parameters {}, gradients {}, optimizer {};", graph.blocks[b].name,
                        name(homes.parameters), name(homes.gradients), name(homes.optimizer));
  }
  return what;
}

// The buffers of every bucket lie where the layouts of its blocks say, all others on the device.
void check_homes(const Job& job, const Program& program) {
  std::map<std::string, StateHomes> homes_of;  // by bucket
  for (std::size_t b = 0; b < job.graph->blocks.size(); ++b) {
    const Block& block = job.graph->blocks[b];
    const StateHomes& homes = job.layout.of_block(static_cast<int>(b)).placements.state.homes;
    homes_of[block.name] = homes;
    if (const auto tied = block_parameters(*job.graph, block).tied) homes_of[job.graph->tensors[*tied].name] = homes;
  }
  std::vector<Home> expected(program.buffers.size(), Home::device);
  for (const Bucket& bucket : program.buckets) {
    const StateHomes& homes = homes_of.at(bucket.name);
    const auto expect = [&](std::optional<int> buffer, Home home) {
      if (buffer) expected[*buffer] = home;
    };
    expect(bucket.parameters, homes.parameters);
    // Those of a tied parameter stay on the device.
    const bool is_tied = std::ranges::none_of(job.graph->blocks, [&](const Block& b) { return b.name == bucket.name; });
    for (const std::optional<int> gradients : {std::optional(bucket.gradients), bucket.second_gradients})
      expect(gradients, is_tied ? Home::device : homes.gradients);
    for (const std::optional<int> state : {bucket.first_moment, bucket.second_moment, bucket.master})
      expect(state, homes.optimizer);
    for (const std::optional<int> copied : {bucket.host_gradients, bucket.host_parameters}) expect(copied, Home::host);
  }
  for (const std::optional<int> copied : {program.host_norm_buffer, program.host_loss_scale_buffer})
    if (copied) expected[*copied] = Home::host;
  for (std::size_t b = 0; b < program.buffers.size(); ++b) {
    INFO(program.buffers[b].name);
    if (program.buffers[b].name.starts_with("what is updated on its way")) expected[b] = Home::host;
    CHECK(program.buffers[b].home == expected[b]);
  }
}

// The buffers on the device in which buckets take turns.
std::int64_t bytes_in_turns(const Program& program) {
  std::int64_t bytes = 0;
  for (const Buffer& buffer : program.buffers)
    if (buffer.name.starts_with("gathered ") || buffer.name.starts_with("gradients on their way"))
      bytes += align_up(Bytes(buffer.bytes), buffer_alignment).count;
  return bytes;
}

// One order of (phase, chunk, micro-batch) that every rank follows, drawn at random among those in
// which a chunk of stages comes after the one that feeds it and backwards ascend.
Schedule random_interleaved(int ranks, int chunks, int micro_batches, std::mt19937& random) {
  Schedule schedule{.rank_of_stage = {}, .ranks = std::vector<std::vector<Action>>(static_cast<std::size_t>(ranks))};
  for (int stage = 0; stage < ranks * chunks; ++stage) schedule.rank_of_stage.push_back(stage % ranks);
  // The next micro-batch of each chunk, by phase.
  std::vector<int> next_forward(static_cast<std::size_t>(chunks)), next_backward(static_cast<std::size_t>(chunks));
  for (int listed = 0; listed < 2 * chunks * micro_batches;) {
    const int chunk = static_cast<int>(random() % static_cast<unsigned>(chunks));
    const bool is_forward = random() % 2 == 0;
    int& next = is_forward ? next_forward[chunk] : next_backward[chunk];
    if (next == micro_batches) continue;
    if (is_forward && chunk > 0 && next >= next_forward[chunk - 1]) continue;
    if (!is_forward && next >= (chunk + 1 < chunks ? next_backward[chunk + 1] : next_forward[chunk])) continue;
    for (int rank = 0; rank < ranks; ++rank)
      schedule.ranks[rank].push_back({chunk * ranks + rank, is_forward ? Phase::forward : Phase::backward, next});
    ++next;
    ++listed;
  }
  return schedule;
}

}  // namespace

TEST_CASE("blocks that differ in ZeRO stage, sequence parallelism and recompute train as the reference does") {
  std::mt19937 random(20261123);
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    TrainingSpec training = training_of();
    const Outcome plain = run_reference(graph, training, 1, 2);
    training.clip_norm = 0.5;
    const Outcome clipped = run_reference(graph, training, 1, 2);
    bool redistributes = false, loads_a_part = false;
    for (int trial = 0; trial < 24; ++trial) {
      training.clip_norm = trial % 2 == 0 ? 0.0 : 0.5;
      ParallelSpec spec;
      spec.mesh.degree = {.pp = 1 + static_cast<int>(random() % 2), .dp = 1 + static_cast<int>(random() % 2),
                          .tp = 1 + static_cast<int>(random() % 2)};
      spec.micro_batch = 1 + static_cast<int>(random() % 2);
      const int blocks = static_cast<int>(graph.blocks.size());
      const int cut = 1 + static_cast<int>(random() % static_cast<unsigned>(blocks - 1));
      spec.stage_blocks = spec.pp() == 1 ? std::vector{blocks} : std::vector{cut, blocks - cut};
      Job job = job_of(graph, training, spec);
      std::string what = describe(spec) + vary_blocks(graph, spec, job.layout, random);
      std::mt19937 apart = random;  // so that the draw changes no others
      for (BlockLayout& layout : job.layout.layouts) {
        layout.saved = all_homes[apart() % all_homes.size()];
        what += fmt::format(" saved on the {};", name(layout.saved));
      }
      INFO(model << ": " << what);
      check_close(run_plan(job, cpu_threads(), 2), trial % 2 == 0 ? plain : clipped);
      for (const Program& program : lower_all(job))
        for (const Segment& segment : program.segments)
          for (const Instruction& instruction : segment.instructions) {
            redistributes = redistributes || instruction.name.ends_with(".slice");
            loads_a_part = loads_a_part || (instruction.op == OpKind::load_tokens && instruction.shape.begin > 0);
          }
    }
    CHECK(redistributes == (model != "tiny-mlp"));
    CHECK(loads_a_part == graph.tied.empty());
  }
}

TEST_CASE("blocks with whole weights, which exchange tokens for heads and features, train as the reference does") {
  std::mt19937 random(20261125);
  std::vector<OpGraph> graphs = op_graphs(sequence);
  graphs.push_back(two_sequences(sequence));
  for (const char* model : {"tiny-gpt2", "tiny-llama"}) graphs.push_back(graph_of(model));
  std::map<std::string, int> moved;  // by redistribution: along inner dims, which are packed or unpacked
  int exchanges = 0;
  for (const OpGraph& graph : graphs) {
    TrainingSpec training = training_of();
    const Outcome plain = run_reference(graph, training, 1, 2);
    training.clip_norm = 0.5;
    const Outcome clipped = run_reference(graph, training, 1, 2);
    for (int trial = 0; trial < 16; ++trial) {
      training.clip_norm = trial % 2 == 0 ? 0.0 : 0.5;
      ParallelSpec spec;
      spec.mesh.degree = {.pp = 1 + static_cast<int>(random() % 2), .dp = 1 + static_cast<int>(random() % 2),
                          .tp = trial % 4 == 3 ? 4 : 2};
      if (trial == 7) spec.mesh.degree = {.tp = 8};  // more ranks than any graph has groups of heads
      spec.zero_stage = spec.dp() > 1 ? static_cast<int>(random() % 4) : 0;
      spec.micro_batch = 1 + static_cast<int>(random() % 2);
      const int blocks = static_cast<int>(graph.blocks.size());
      const int cut = 1 + static_cast<int>(random() % static_cast<unsigned>(blocks - 1));
      spec.stage_blocks = spec.pp() == 1 ? std::vector{blocks} : std::vector{cut, blocks - cut};
      Job job = job_of(graph, training, spec);
      const std::string what = describe(spec) + vary_weights(graph, spec, job.layout, trial % 3 == 2, random);
      INFO(graph.name << ": " << what);
      check_close(run_plan(job, cpu_threads(), 2), trial % 2 == 0 ? plain : clipped);
      // Adam hides a norm that a rank misses: it is the same for gradients of any scale.
      for (const Program& program : lower_all(job))
        for (const Segment& segment : program.segments) {
          if (segment.name != "gradient_norm") continue;
          CHECK(std::ranges::any_of(segment.instructions, [](const Instruction& instruction) {
            return instruction.op == OpKind::sum_squares || instruction.group == all_along(Axis::tp);
          }));
        }
      for (const Segment& segment : lower(job, 0).segments)
        for (const Instruction& instruction : segment.instructions) {
          exchanges += instruction.kind == InstructionKind::all_to_all;
          if (instruction.op == OpKind::transpose_blocks)
            ++moved[instruction.name.substr(instruction.name.rfind('.') + 1)];
        }
    }
  }
  CHECK(exchanges > 0);
  for (const char* redistribution : {"all-to-all", "all-gather", "slice"}) {
    CAPTURE(redistribution);
    CHECK(moved[redistribution] > 0);
  }
}

TEST_CASE("state on the host trains to the same bits as on the device, block by block") {
  std::mt19937 random(20261125);
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    for (int trial = 0; trial < 12; ++trial) {
      TrainingSpec training = training_of();
      training.clip_norm = trial % 2 == 0 ? 0.0 : 0.5;
      ParallelSpec spec;
      spec.mesh.degree = {.pp = 1 + static_cast<int>(random() % 2), .dp = 1 + static_cast<int>(random() % 2),
                          .tp = 1 + static_cast<int>(random() % 2)};
      const int blocks = static_cast<int>(graph.blocks.size());
      const int cut = 1 + static_cast<int>(random() % static_cast<unsigned>(blocks - 1));
      spec.stage_blocks = spec.pp() == 1 ? std::vector{blocks} : std::vector{cut, blocks - cut};
      Job job = job_of(graph, training, spec);
      std::string what = describe(spec) + vary_blocks(graph, spec, job.layout, random);
      const Outcome on_device = run_plan(job, cpu_threads(), 2);
      std::int64_t bytes_on_device = 0;
      for (const Program& program : lower_all(job))
        bytes_on_device += program.arena_bytes.device - bytes_in_turns(program);
      if (trial < 2) {
        for (BlockLayout& layout : job.layout.layouts) layout.placements.state.homes.optimizer = Home::host;
      } else {
        what += vary_homes(graph, job.layout, random);
      }
      INFO(model << ": " << what);
      check_equal(run_plan(job, cpu_threads(), 2), on_device);
      PerHome<std::int64_t> bytes;
      std::int64_t padding = 0;  // an arena's last buffer has none
      for (const Program& program : lower_all(job)) {
        check_homes(job, program);
        for (const Home home : all_homes) bytes[home] += program.arena_bytes[home];
        padding += count_of<Home> * buffer_alignment;
        bytes.device -= bytes_in_turns(program);
        // What is there twice where the host updates.
        std::vector<std::optional<int>> copies{program.host_norm_buffer};
        for (const Bucket& bucket : program.buckets)
          copies.insert(copies.end(), {bucket.master, bucket.host_gradients, bucket.host_parameters});
        // What is on the host only while it is updated.
        for (std::size_t b = 0; b < program.buffers.size(); ++b)
          if (program.buffers[b].name.starts_with("what is updated on its way")) copies.push_back(static_cast<int>(b));
        for (const std::optional<int> copy : copies)
          if (copy)
            bytes[program.buffers[*copy].home] -= align_up(Bytes(program.buffers[*copy].bytes), buffer_alignment).count;
      }
      CHECK(bytes.host > 0);
      CHECK(bytes.device + bytes.host + bytes.nvme <= bytes_on_device);
      CHECK(bytes.device + bytes.host + bytes.nvme > bytes_on_device - padding);
    }
  }
}

TEST_CASE("a buffer in the wrong home does not verify") {
  const OpGraph graph = graph_of("tiny-gpt2");
  ParallelSpec spec;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  Job job = job_of(graph, training_of(), spec);
  for (BlockLayout& layout : job.layout.layouts) layout.placements.state.homes.optimizer = Home::host;
  const Program program = lower(job, 0);
  REQUIRE(find_faults({&program, 1}).empty());
  for (std::size_t b = 0; b < program.buffers.size(); ++b) {
    if (program.buffers[b].bytes == 0) continue;
    Program broken = program;
    Home& home = broken.buffers[b].home;
    home = home == Home::device ? Home::host : Home::device;
    INFO(program.buffers[b].name);
    CHECK(!find_faults({&broken, 1}).empty());
  }
}

TEST_CASE("ranks with several stages train as a single stage does, to the bit without a norm") {
  std::mt19937 random(20261124);
  const OpGraph graph = graph_of("tiny-gpt2");
  std::map<std::pair<ParallelSpec, std::pair<int, bool>>, Outcome> references;  // micro-batches, clipping
  int ran = 0;
  for (int trial = 0; ran < 40; ++trial) {
    REQUIRE(trial < 4000);
    const int ranks = 2 + static_cast<int>(random() % 2);
    const int chunks = ranks == 2 ? 2 + static_cast<int>(random() % 2) : 2;
    const int count = 1 + static_cast<int>(random() % 5), stages = ranks * chunks;
    ParallelSpec spec;
    spec.mesh.degree = {.pp = ranks, .dp = 1 + static_cast<int>(random() % 2),
                        .tp = 1 + static_cast<int>(random() % 2)};
    spec.zero_stage = spec.dp() > 1 ? static_cast<int>(random() % 4) : 0;
    spec.sequence_parallel = spec.tp() > 1 && random() % 2 == 0;
    if (trial % 4 != 0) spec.tied_gradients = TiedGradients::apart;
    if (trial % 2 != 0) spec.input_slots = InputSlots::one_more;
    TrainingSpec training = training_of();
    training.global_batch = count * spec.dp();
    training.clip_norm = random() % 2 == 0 ? 0.0 : 0.5;
    ParallelSpec cut = spec;
    cut.recompute = Recompute::per_stage;
    for (int s = 0; s < stages; ++s)
      cut.stage_recompute.push_back(random() % 2 == 0 ? Recompute::none : Recompute::full);
    cut.stage_blocks.assign(static_cast<std::size_t>(stages), 1);
    cut.stage_blocks[random() % cut.stage_blocks.size()] += static_cast<int>(graph.blocks.size()) - stages;
    const Schedule schedule = random_interleaved(ranks, chunks, count, random);
    if (find_fault(schedule, count)) continue;
    ++ran;
    if (ran % 3 == 0) cut.offload = Offload{.activations = Home::host};
    const Job job{.graph = &graph, .training = training, .layout = lay_out(cut, place(graph, spec)),
                  .schedule = schedule, .backend = BackendKind::cpu, .overhead = {}};
    INFO(describe(cut) << ", " << count << " micro-batches");
    ParallelSpec alone = spec;
    alone.mesh.degree.pp = 1;
    alone.stage_blocks = {static_cast<int>(graph.blocks.size())};
    const std::pair key{alone, std::pair{count, training.clip_norm > 0.0}};
    if (!references.contains(key)) references.emplace(key, run_plan(graph, training, alone, 2));
    const Outcome outcome = run_plan(job, cpu_threads(), 2);
    // The norm of all gradients is summed in another order, and so are tied gradients that share an
    // accumulator on one rank alone.
    const bool in_one_order = training.clip_norm == 0.0 && spec.tied_gradients == TiedGradients::apart;
    if (in_one_order) check_equal(outcome, references.at(key));
    else check_close(outcome, references.at(key));
  }
}

}  // namespace parplan
