// How a tensor of a block passes from one placement to another: the instructions that lowering
// derives where weights are whole on the tensor axis and tokens are cut over it, or the other way
// round.
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <fmt/format.h>

#include "planner/program/verify.h"
#include "tests/planner/program/random_plans.h"

using namespace parplan;

namespace {

// tiny-gpt2 on two ranks of the tensor axis: hidden 32, 4 heads of 8, a feed-forward width of 128;
// one sequence of 16. Parameters of layers are whole where `whole` says so.
template <class Whole>
std::vector<Program> lowered(const OpGraph& graph, bool cuts_tokens, DataType precision, const Whole& whole) {
  TrainingSpec training;
  training.global_batch = 1;
  training.sequence_length = 16;
  training.precision = precision;
  ParallelSpec spec;
  spec.mesh.degree = {.tp = 2};
  spec.sequence_parallel = cuts_tokens;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  Job job = job_of(graph, training, spec);
  const BlockLayout cut = job.layout.layouts.at(0);
  BlockLayout of_layers = cut;
  for (auto& [name, layout] : of_layers.placements.parameters)
    if (whole(name)) layout.tp = replicate();
  job.layout.layouts = {cut, of_layers};
  for (std::size_t b = 0; b < graph.blocks.size(); ++b)
    job.layout.layout_of_block[b] = graph.blocks[b].input && graph.blocks[b].output ? 1 : 0;
  return lower_all(job);
}

// The communication of a layer's Segment, and the kernels that pack and unpack for it.
std::vector<std::string> moves(const Program& program, const std::string& segment_name) {
  std::vector<std::string> all;
  for (const Segment& segment : program.segments) {
    if (segment.name != segment_name) continue;
    for (const Instruction& i : segment.instructions)
      if (i.kind != InstructionKind::kernel)
        all.push_back(fmt::format("{} {} {} B", name(i.kind), i.name, i.operands.back().bytes));
      else if (i.op == OpKind::transpose_blocks)
        all.push_back(
            fmt::format("{} {} {} x {} x {}", name(i.op), i.name, i.shape.rows, i.shape.inner, i.shape.columns));
    break;
  }
  return all;
}

std::string lines(const std::vector<std::string>& all) { return fmt::format("\n{}\n", fmt::join(all, "\n")); }

std::string faults_of(const std::vector<Program>& programs) {
  std::string found;
  for (const Fault& fault : find_faults(programs)) found += write_fault(fault) + "\n";
  return found;
}

}  // namespace

TEST_CASE("with whole weights, tokens are exchanged for heads around attention, and back") {
  const OpGraph graph = graph_of("tiny-gpt2");
  const std::vector<Program> programs =
      lowered(graph, true, DataType::fp32, [](const std::string&) { return true; });
  CHECK(faults_of(programs) == "");
  // 8 tokens of 96 elements are exchanged for 16 of 48, and the results, 16 of 16, for 8 of 32.
  CHECK(lines(moves(programs[0], "layers.forward")) == R"(
transpose_blocks layers.0.attention.qkv.all-to-all 8 x 2 x 48
all_to_all layers.0.attention.qkv.all-to-all 3072 B
all_to_all layers.0.attention.mixed.all-to-all 1024 B
transpose_blocks layers.0.attention.mixed.all-to-all 2 x 8 x 16
)");
  // The weight's gradient reads the results by tokens, attention's gradient the queries by heads:
  // each is kept as it was made, and exchanged again. Their gradients go the other way.
  CHECK(lines(moves(programs[0], "layers.backward")) == R"(
all_to_all layers.0.attention.mixed.all-to-all 1024 B
transpose_blocks layers.0.attention.mixed.all-to-all 2 x 8 x 16
transpose_blocks layers.0.attention.mixed.all-to-all 8 x 2 x 16
all_to_all layers.0.attention.mixed.all-to-all 1024 B
transpose_blocks layers.0.attention.qkv.all-to-all 8 x 2 x 48
all_to_all layers.0.attention.qkv.all-to-all 3072 B
all_to_all layers.0.attention.qkv.all-to-all 3072 B
transpose_blocks layers.0.attention.qkv.all-to-all 2 x 8 x 48
)");
  CHECK(moves(programs[1], "layers.forward") == moves(programs[0], "layers.forward"));
}

TEST_CASE("a whole weight behind a cut one gathers features, and a cut one behind a whole one slices them") {
  const OpGraph graph = graph_of("tiny-gpt2");
  const auto is = [](const char* wanted) {
    return [=](const std::string& name) { return name.starts_with(wanted); };
  };
  const std::vector<Program> gathers = lowered(graph, false, DataType::fp32, is("feed_forward.down"));
  CHECK(faults_of(gathers) == "");
  CHECK(lines(moves(gathers[0], "layers.forward")) == R"(
all_reduce_sum layers.0.attention.output.all-reduce (sum) 2048 B
all_gather layers.0.feed_forward.activation.all-gather 8192 B
transpose_blocks layers.0.feed_forward.activation.all-gather 2 x 16 x 64
)");
  const std::vector<Program> slices = lowered(graph, false, DataType::fp32, is("feed_forward.up"));
  CHECK(faults_of(slices) == "");
  CHECK(lines(moves(slices[0], "layers.forward")) == R"(
all_reduce_sum layers.0.attention.output.all-reduce (sum) 2048 B
transpose_blocks layers.0.feed_forward.activation.slice 16 x 2 x 64
all_reduce_sum layers.0.feed_forward.down.all-reduce (sum) 2048 B
)");
  const std::vector<Program> exchanges = lowered(graph, true, DataType::bf16, is("feed_forward.up"));
  CHECK(faults_of(exchanges) == "");
  CHECK(lines(moves(exchanges[0], "layers.forward")) == R"(
all_gather layers.0.attention_norm.all-gather 1024 B
reduce_scatter layers.0.attention.output.reduce-scatter 1024 B
transpose_blocks layers.0.feed_forward.activation.all-to-all 8 x 2 x 64
all_to_all layers.0.feed_forward.activation.all-to-all 2048 B
reduce_scatter layers.0.feed_forward.down.reduce-scatter 1024 B
)");
}

TEST_CASE("an exchange that a rank drops, or whose result is read too early, is missed") {
  const OpGraph graph = graph_of("tiny-llama");
  const std::vector<Program> programs =
      lowered(graph, true, DataType::fp32, [](const std::string&) { return true; });
  int exchanges = 0;
  for (std::size_t s = 0; s < programs[1].segments.size(); ++s) {
    const std::vector<Instruction>& instructions = programs[1].segments[s].instructions;
    for (std::size_t i = 0; i < instructions.size(); ++i) {
      if (instructions[i].kind != InstructionKind::all_to_all) continue;
      ++exchanges;
      INFO(programs[1].segments[s].name << ", instruction " << i);
      std::vector<Program> dropped = programs;
      Instruction& planted = dropped[1].segments[s].instructions[i];
      planted.kind = InstructionKind::kernel;
      planted.op = OpKind::transpose_blocks;
      CHECK(faults_of(dropped).find("collective") != std::string::npos);
      std::vector<Program> unordered = programs;
      for (Instruction& later : unordered[1].segments[s].instructions)
        if (const std::optional<int> event = instructions[i].records)
          later.waits.erase(std::ranges::remove(later.waits, *event).begin(), later.waits.end());
      CHECK(faults_of(unordered).find("missing event") != std::string::npos);
    }
  }
  CHECK(exchanges > 0);
}
