// Blocks that keep only some of the tensors that their backward reads.
#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "planner/plan/recompute.h"
#include "planner/program/lower_block.h"
#include "planner/program/verify.h"
#include "runtime/device/cpu/cpu_backend.h"
#include "tests/numerics/op_graphs.h"
#include "tests/planner/program/random_plans.h"

using namespace parplan;

namespace {

// Keeps what the test has put here.
std::set<TensorId> kept_here;
constexpr RecomputeRow keeps_some{
    .kind = Recompute::full, .name = "some", .keeps = [](const OpGraph&, const Block&, TensorId tensor) {
      return kept_here.contains(tensor);
    }};

// The context of each rank of a block under `tp` tensor-parallel ranks; empty where it is illegal.
std::vector<BlockContext> contexts(const OpGraph& graph, int tp, bool sequence_parallel) {
  ParallelSpec spec;
  spec.mesh.degree.tp = tp;
  spec.sequence_parallel = sequence_parallel;
  spec.micro_batch = 2;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  TrainingSpec training;
  training.global_batch = 2;
  training.sequence_length = graph.sequence;
  std::vector<BlockContext> ranks;
  if (illegal(graph, training, spec)) return ranks;
  const Job job = job_of(graph, training, spec);
  for (int rank = 0; rank < tp; ++rank) ranks.push_back(block_context(job, 1, Coordinates{.tp = rank}));
  return ranks;
}

std::vector<std::string> kept_by(const OpGraph& graph, const LoweredBlock& block) {
  std::vector<std::string> names;
  for (const SavedTensor& saved : block.saved) names.push_back(graph.tensors[saved.tensor].name);
  return names;
}

// The kernels that compute again, by op and name.
std::vector<std::string> computed_again(const LoweredBlock& block) {
  std::vector<std::string> kernels;
  for (const Instruction& instruction : block.backward.instructions)
    if (instruction.label == Label::recompute)
      kernels.push_back(fmt::format("{} {}", name(instruction.op), instruction.name));
  return kernels;
}

struct Release {
  void operator()(float* memory) const { ::operator delete (memory, std::align_val_t{256}); }
};

// Executes a block's Segments on the CPU, all ranks in step, each with scratch that begins as
// not-a-number.
class Machine {
 public:
  explicit Machine(const std::vector<LoweredBlock>& ranks) : backend_(make_cpu_backend()), memory_(ranks.size()) {
    const LoweredBlock& block = ranks[0];
    std::map<std::string, std::int64_t> sizes;  // bytes, by binding
    for (const LoweredBlock& rank : ranks)
      for (const Segment* segment : {&rank.forward, &rank.backward})
        for (const Instruction& instruction : segment->instructions)
          for (const Operand& operand : instruction.operands) {
            std::int64_t& size = sizes[segment->bindings[operand.binding]];
            size = std::max(size, operand.offset + operand.bytes);
          }
    const auto everywhere = [&](const std::string& name, std::int64_t size, auto value) {
      for (std::size_t rank = 0; rank < ranks.size(); ++rank)
        for (std::int64_t i = 0; i < size / 4; ++i) memory_[rank].at(name).get()[i] = value(i + 1000 * rank);
    };
    const auto poison = [](std::uint64_t) { return std::numeric_limits<float>::quiet_NaN(); };
    for (const auto& [name, size] : sizes) {
      for (auto& memory : memory_)
        memory[name].reset(static_cast<float*>(::operator new (static_cast<std::size_t>(size), std::align_val_t{256})));
      everywhere(name, size, poison);
    }
    everywhere("parameters", sizes.at("parameters"), noise);
    everywhere("gradients", sizes.at("gradients"), [](std::uint64_t) { return 0.0f; });
    everywhere("saved", block.saved[0].bytes, noise);
    run(ranks, &LoweredBlock::forward);
    keep("output", block.output_bytes);
    everywhere("gradient", block.output_bytes, noise);
    everywhere("scratch", sizes.at("scratch"), poison);
    run(ranks, &LoweredBlock::backward);
    keep("gradients", sizes.at("gradients"));
    keep("gradient", block.input_bytes);
  }

  std::map<std::string, std::vector<float>> results;  // of all ranks, by binding

 private:
  static float noise(std::uint64_t i) {
    return static_cast<float>((static_cast<std::uint32_t>(i) * 2654435761u) >> 8) / static_cast<float>(1 << 24) - 0.5f;
  }
  void keep(const std::string& name, std::int64_t size) {
    for (const auto& memory : memory_)
      results[name].insert(results[name].end(), memory.at(name).get(), memory.at(name).get() + size / 4);
  }

  void run(const std::vector<LoweredBlock>& ranks, Segment LoweredBlock::*segment) {
    const std::size_t count = (ranks[0].*segment).instructions.size();
    for (std::size_t i = 0; i < count; ++i) {
      std::vector<std::vector<float*>> operands;  // by rank
      for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
        const Segment& of = ranks[rank].*segment;
        operands.emplace_back();
        for (const Operand& operand : of.instructions[i].operands)
          operands.back().push_back(memory_[rank].at(of.bindings[operand.binding]).get() + operand.offset / 4);
      }
      if ((ranks[0].*segment).instructions[i].kind != InstructionKind::kernel) {
        communicate(ranks, segment, i, operands);
        continue;
      }
      for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
        const Instruction& kernel = (ranks[rank].*segment).instructions[i];
        const std::vector<void*> pointers(operands[rank].begin(), operands[rank].end());
        backend_->run(0, {.kind = kernel.op, .shape = kernel.shape, .type = kernel.type, .operands = pointers});
      }
    }
  }

  // Ranks add in ascending order. A reduce-scatter leaves the sums of the other ranks, too.
  static void communicate(const std::vector<LoweredBlock>& ranks, Segment LoweredBlock::*segment, std::size_t number,
                          const std::vector<std::vector<float*>>& operands) {
    const Instruction& instruction = (ranks[0].*segment).instructions[number];
    const std::int64_t elements = instruction.operands.back().bytes / 4;
    const int members = static_cast<int>(ranks.size());
    std::vector<float> result(static_cast<std::size_t>(elements));
    for (int rank = 0; rank < members; ++rank) {
      const float* own = operands[rank][0];
      const bool gathers = instruction.kind == InstructionKind::all_gather;
      const std::int64_t begin = gathers ? chunk_begin(elements, members, rank) : 0;
      const std::int64_t end = gathers ? chunk_begin(elements, members, rank + 1) : elements;
      for (std::int64_t i = begin; i < end; ++i) result[i] = gathers || rank == 0 ? own[i - begin] : result[i] + own[i];
    }
    REQUIRE(instruction.kind != InstructionKind::all_reduce_max);  // only heads have one
    for (int rank = 0; rank < members; ++rank) std::ranges::copy(result, operands[rank].back());
  }

  std::unique_ptr<Backend> backend_;
  std::vector<std::map<std::string, std::unique_ptr<float, Release>>> memory_;  // by rank, then binding
};

}  // namespace

TEST_CASE("every way to recompute has its row, and each stage's is one of them") {
  for (const RecomputeRow& row : recompute_rows()) {
    CHECK(&row_of(row.kind) == &row);
    CHECK(std::string(name(row.kind)) == row.name);
    CHECK((row.keeps != nullptr));
  }
  for (const Recompute one : searched_recomputes(Engine{})) CHECK(row_of(one).kind == one);
  CHECK(std::string(name(Recompute::per_stage)) == "per_stage");
  CHECK_THROWS_AS(row_of(Recompute::per_stage), InternalError);
}

TEST_CASE("a search recomputes attention's core where its scores are written, and nothing that the engine lacks") {
  const auto searched = [](const Engine& engine) {
    std::string names;
    for (const Recompute one : searched_recomputes(engine)) names += fmt::format("{} ", name(one));
    return names;
  };
  CHECK(searched({}) == "none norms+activation norms+mlp full ");
  CHECK(searched({.fused_attention = false}) == "none core_attn core_attn+norms+activation core_attn+norms+mlp full ");
  Engine layers_or_core{.fused_attention = false,
                        .has_norms_recompute = false,
                        .has_activation_recompute = false,
                        .has_mlp_recompute = false};
  CHECK(searched(layers_or_core) == "none core_attn full ");
  layers_or_core.has_core_attn_recompute = false;
  CHECK(searched(layers_or_core) == "none full ");
  CHECK(searched({.has_activation_recompute = false}) == "none norms norms+mlp full ");
  CHECK(searched({.has_mlp_recompute = false, .has_full_recompute = false}) == "none norms+activation ");
  // Whatever an engine has, the first is none, each has a row, and none comes twice.
  for (unsigned set = 0; set < 64; ++set) {
    const auto has = [&](unsigned bit) { return (set >> bit & 1u) != 0; };
    const Engine engine{.fused_attention = has(0),
                        .has_core_attn_recompute = has(1),
                        .has_norms_recompute = has(2),
                        .has_activation_recompute = has(3),
                        .has_mlp_recompute = has(4),
                        .has_full_recompute = has(5)};
    const std::span<const Recompute> kinds = searched_recomputes(engine);
    CHECK(kinds.front() == Recompute::none);
    std::set<Recompute> seen;
    for (const Recompute kind : kinds) {
      CHECK(row_of(kind).kind == kind);
      CHECK(seen.insert(kind).second);
      CHECK((engine.has_core_attn_recompute || !recomputes_module(kind, Recompute::core_attn)));
      CHECK((engine.has_norms_recompute || !recomputes_module(kind, Recompute::norms)));
      CHECK((engine.has_activation_recompute || !recomputes_module(kind, Recompute::activation)));
      CHECK((engine.has_mlp_recompute || !recomputes_module(kind, Recompute::mlp)));
      CHECK((engine.has_full_recompute || !recomputes_module(kind, Recompute::full)));
    }
  }
}

TEST_CASE("a block keeps what its row says and its input, and computes again what is missing and no more") {
  const OpGraph graph = graph_of("tiny-gpt2");
  const BlockContext context = contexts(graph, 1, false)[0];
  const LoweredBlock whole = lower_block(graph, 1, context);
  CHECK(computed_again(whole).empty());
  const std::vector<std::string> all = kept_by(graph, whole);

  // The activation alone: its input is kept.
  kept_here.clear();
  for (const SavedTensor& saved : whole.saved)
    if (graph.tensors[saved.tensor].name != "layers.0.feed_forward.activation") kept_here.insert(saved.tensor);
  const LoweredBlock one = lower_block(graph, 1, context, keeps_some);
  CHECK(one.saved.size() + 1 == all.size());
  CHECK(computed_again(one) == std::vector<std::string>{"activation layers.0.feed_forward.activation"});

  // Nothing: all ops but the last product and the sum, whose results only the next block reads.
  kept_here.clear();
  const LoweredBlock none = lower_block(graph, 1, context, keeps_some);
  CHECK(kept_by(graph, none) == std::vector<std::string>{all.front()});
  LoweredBlock full = lower_block(graph, 1, context, row_of(Recompute::full));
  CHECK(none.forward == full.forward);
  CHECK(none.backward == full.backward);
  CHECK(none.saved_bytes == full.saved_bytes);

  // The first and the last block keep everything.
  const int last = static_cast<int>(graph.blocks.size()) - 1;
  for (const int block : {0, last}) {
    const LoweredBlock end = lower_block(graph, block, context, row_of(Recompute::full));
    CHECK(end.backward == lower_block(graph, block, context).backward);
    CHECK(computed_again(end).empty());
  }
}

TEST_CASE("whatever a block keeps, its output and its gradients have the same bits") {
  std::mt19937 random(20261122);
  std::vector<OpGraph> graphs = testing::op_graphs(8);
  for (const char* model : {"tiny-gpt2", "tiny-llama", "tiny-mlp"}) graphs.push_back(graph_of(model));
  int partly = 0, communicating = 0;
  for (const OpGraph& graph : graphs)
    for (const int tp : {1, 2})
      for (const bool sequence_parallel : {false, true}) {
        if (sequence_parallel && tp == 1) continue;
        const std::vector<BlockContext> ranks = contexts(graph, tp, sequence_parallel);
        if (ranks.empty()) continue;
        for (int block = 1; block + 1 < static_cast<int>(graph.blocks.size()); ++block) {
          const auto lowered = [&](const RecomputeRow& row) {
            std::vector<LoweredBlock> blocks;
            for (const BlockContext& rank : ranks) blocks.push_back(lower_block(graph, block, rank, row));
            return blocks;
          };
          const std::vector<LoweredBlock> whole = lowered(row_of(Recompute::none));
          const Machine wanted(whole);
          for (int trial = 0; trial < 8; ++trial) {
            kept_here.clear();
            for (const SavedTensor& saved : whole[0].saved)
              if (random() % 3 != 0) kept_here.insert(saved.tensor);
            const std::vector<LoweredBlock> some = lowered(keeps_some);
            const std::vector<std::string> again = computed_again(some[0]);
            if (some[0].saved.size() < whole[0].saved.size() && !again.empty()) ++(tp == 1 ? partly : communicating);
            CAPTURE(graph.name);
            CAPTURE(tp);
            CAPTURE(sequence_parallel);
            CAPTURE(fmt::format("{}", fmt::join(kept_by(graph, some[0]), ", ")));
            CHECK((Machine(some).results == wanted.results));  // not a number would not be equal
          }
        }
      }
  CHECK(partly > 50);
  CHECK(communicating > 50);
}

TEST_CASE("a layer whose backward reads what its forward does not keep is a fault") {
  const OpGraph graph = graph_of("tiny-gpt2");
  TrainingSpec training;
  training.global_batch = 4;
  training.sequence_length = 16;
  ParallelSpec spec;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  spec.recompute_layers = 1;
  for (const RecomputeRow& row : recompute_rows()) {
    if (row.kind == Recompute::none) continue;
    INFO(row.name);
    spec.recompute = row.kind;
    const std::vector<Program> programs = lower_all(job_of(graph, training, spec));
    CHECK(find_faults(programs).empty());
    // The first layer, whose backward comes last, gets the backward of one that keeps all.
    std::vector<Program> planted = programs;
    Program& program = planted.front();
    std::vector<Call*> backwards;
    for (Call& call : program.calls)
      if (program.segments[call.segment].name == "layers.backward") backwards.push_back(&call);
    const std::size_t layers = graph.blocks.size() - 2;
    REQUIRE(backwards.size() == layers * 4);
    REQUIRE(backwards.front()->segment == backwards[layers - 2]->segment);
    REQUIRE(backwards.front()->segment != backwards[layers - 1]->segment);
    backwards[layers - 1]->segment = backwards.front()->segment;
    CHECK(!find_faults(planted).empty());
  }
}
