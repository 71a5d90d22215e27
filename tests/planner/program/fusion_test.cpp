// Fused kernels: the table, the pass on lists made by hand, and its effect on lowered Programs.
#include "planner/program/fusion.h"

#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <new>

#include <doctest/doctest.h>

#include "runtime/device/cpu/cpu_backend.h"
#include "tests/planner/program/random_plans.h"

using namespace parplan;

namespace {

Operand reads(int place, std::int64_t offset, std::int64_t bytes) { return {place, offset, bytes, Access::read}; }
Operand writes(int place, std::int64_t offset, std::int64_t bytes) { return {place, offset, bytes, Access::write}; }
Operand updates(int place, std::int64_t offset, std::int64_t bytes) { return {place, offset, bytes, Access::update}; }

Instruction kernel(OpKind op, OpShape shape, Operands operands) {
  Instruction instruction;
  instruction.kind = InstructionKind::kernel;
  instruction.op = op;
  instruction.shape = shape;
  instruction.operands = std::move(operands);
  instruction.name = name(op);
  return instruction;
}

std::vector<OpKind> kinds(const std::vector<Instruction>& instructions) {
  std::vector<OpKind> result;
  for (const Instruction& instruction : instructions) result.push_back(instruction.op);
  return result;
}

// Buffers of the lists below, of 8 rows by 4 columns (128 B): an input, a weight [4, 4], a bias,
// three temporaries.
enum Place { input, weight, bias, one, two, three, kept, place_count };
const std::vector<bool> temporary{false, false, false, true, true, true, false};
static_assert(place_count == 7);

Instruction linear_into(int place) {
  return kernel(OpKind::linear, {.rows = 8, .columns = 4, .inner = 4},
                {reads(input, 0, 128), reads(weight, 0, 64), writes(place, 0, 128)});
}
Instruction activation(int from, int to, ActivationKind kind = ActivationKind::gelu_tanh) {
  return kernel(OpKind::activation, {.rows = 8, .columns = 4, .activation = kind},
                {reads(from, 0, 128), writes(to, 0, 128)});
}
Instruction input_gradient_into(int place) {
  return kernel(OpKind::linear_input_gradient, {.rows = 8, .columns = 4, .inner = 4},
                {reads(input, 0, 128), reads(weight, 0, 64), writes(place, 0, 128)});
}
Instruction activation_gradient(int dy, int before, int dx) {
  return kernel(OpKind::activation_gradient, {.rows = 8, .columns = 4},
                {reads(dy, 0, 128), reads(before, 0, 128), writes(dx, 0, 128)});
}
Instruction copy(int from, int to) {
  return kernel(OpKind::copy, {.rows = 32}, {reads(from, 0, 128), writes(to, 0, 128)});
}

std::vector<Instruction> fused_list(std::vector<Instruction> instructions) {
  fuse(instructions, temporary, {});
  return instructions;
}

}  // namespace

TEST_CASE("the operands of a fused op are those that its two kernels hand it") {
  for (const FusionRow& row : fusion_rows()) {
    CAPTURE(name(row.fused));
    const OpRow& fused = row_of(row.fused);
    REQUIRE(fused.operands.size() == row.operands.size());
    for (std::size_t i = 0; i < row.operands.size(); ++i) {
      const OpRow& of = row_of(row.operands[i].kernel == 0 ? row.first : row.second);
      const OperandRow& operand = of.operands[row.operands[i].position];
      CHECK(operand.access == fused.operands[i].access);
      CHECK((operand.optional == fused.operands[i].optional));
      CHECK((operand.source == OperandSource::workspace) == (fused.operands[i].source == OperandSource::workspace));
    }
    const OperandRow& produced = row_of(row.first).operands[row.produced];
    CHECK(produced.access == Access::write);
    CHECK(row_of(row.second).operands[row.consumed].access == Access::read);
  }
}

TEST_CASE("a sum and the norm of it become one kernel that writes both") {
  const Instruction add = kernel(OpKind::add, {.rows = 8, .columns = 4, .bias = true, .second = true},
                                 {reads(input, 0, 128), reads(one, 0, 128), reads(bias, 0, 16), writes(one, 0, 128)});
  const Instruction norm = kernel(OpKind::layer_norm, {.rows = 8, .columns = 4, .epsilon = 1e-5},
                                  {reads(one, 0, 128), reads(kept, 0, 16), reads(kept, 64, 16), writes(two, 0, 128),
                                   writes(three, 0, 32), writes(three, 64, 32)});
  Instruction wanted =
      kernel(OpKind::add_layer_norm, {.rows = 8, .columns = 4, .bias = true, .second = true, .epsilon = 1e-5},
             {reads(input, 0, 128), reads(one, 0, 128), reads(bias, 0, 16), reads(kept, 0, 16), reads(kept, 64, 16),
              writes(one, 0, 128), writes(two, 0, 128), writes(three, 0, 32), writes(three, 64, 32)});
  wanted.name = "add";
  CHECK(fused_list({add, norm, copy(one, input)}) == std::vector<Instruction>{wanted, copy(one, input)});
}

TEST_CASE("a product and its GELU become one kernel, also where GELU writes over the product") {
  CHECK(fused_list({linear_into(one), activation(one, two)})[0].operands ==
        Operands{reads(input, 0, 128), reads(weight, 0, 64), writes(one, 0, 128), writes(two, 0, 128)});
  CHECK(fused_list({linear_into(one), activation(one, one)})[0].operands ==
        Operands{reads(input, 0, 128), reads(weight, 0, 64), writes(one, 0, 128), writes(one, 0, 128)});
  // Others may read the product later.
  CHECK(kinds(fused_list({linear_into(one), activation(one, two), copy(one, three)})) ==
        std::vector<OpKind>{OpKind::linear_gelu, OpKind::copy});
}

TEST_CASE("the gradient through a product and GELU becomes one kernel, past what does not concern it") {
  const Instruction weight_gradient = kernel(OpKind::linear_weight_gradient, {.rows = 8, .columns = 4, .inner = 4},
                                             {reads(input, 0, 128), reads(three, 0, 128), updates(kept, 0, 64)});
  const std::vector<Instruction> found =
      fused_list({input_gradient_into(one), weight_gradient, activation_gradient(one, two, one)});
  REQUIRE(kinds(found) == std::vector<OpKind>{OpKind::linear_input_gradient_gelu, OpKind::linear_weight_gradient});
  CHECK(found[0].operands ==
        Operands{reads(input, 0, 128), reads(weight, 0, 64), reads(two, 0, 128), writes(one, 0, 128)});
}

TEST_CASE("two kernels stay two where one would not do the same") {
  const auto stays = [](std::vector<Instruction> list) { return fused_list(list) == list; };
  // Another activation, and another part of the product.
  CHECK(stays({linear_into(one), activation(one, two, ActivationKind::gelu_erf)}));
  Instruction half = activation(one, two);
  half.operands[0].bytes = 64;
  CHECK(stays({linear_into(one), half}));
  // Another instruction touches it first: a sum over the tensor axis, or a reader.
  Instruction sum;
  sum.kind = InstructionKind::all_reduce_sum;
  sum.operands = {updates(one, 0, 128)};
  CHECK(stays({linear_into(one), sum, activation(one, two)}));
  CHECK(stays({linear_into(one), copy(one, three), activation(one, two)}));
  // An operand of the second is written in between, or its result's storage is still read.
  CHECK(stays({input_gradient_into(one), copy(input, two), activation_gradient(one, two, one)}));
  CHECK(stays({input_gradient_into(one), copy(three, two), activation_gradient(one, weight, three)}));
  // Others need the gradient in between: in this list, or after it.
  CHECK(stays({input_gradient_into(one), activation_gradient(one, two, three), copy(one, two)}));
  CHECK(stays({input_gradient_into(kept), activation_gradient(kept, two, three)}));
  // It is added to.
  Instruction adding = input_gradient_into(one);
  adding.shape.accumulate = true;
  adding.operands[2].access = Access::update;
  CHECK(stays({adding, activation_gradient(one, two, one)}));
  // The second writes an operand of the first.
  CHECK(stays({linear_into(one), activation(one, input)}));
  // One repeats work for the backward, the other does not.
  Instruction again = linear_into(one);
  again.label = Label::recompute;
  CHECK(stays({again, activation(one, two)}));
}

namespace {

ParallelSpec one_rank(const OpGraph& graph) {
  ParallelSpec spec;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  spec.micro_batch = 2;
  return spec;
}

TrainingSpec plain_training() {
  TrainingSpec training;
  training.global_batch = 4;
  training.sequence_length = 16;
  return training;
}

std::map<std::string, int> count_kinds(const Segment& segment) {
  std::map<std::string, int> count;
  for (const Instruction& instruction : segment.instructions)
    if (instruction.kind == InstructionKind::kernel) ++count[name(instruction.op)];
  return count;
}
const Segment& segment_of(const Program& program, const std::string& wanted) {
  for (const Segment& segment : program.segments)
    if (segment.name == wanted) return segment;
  FAIL("no segment " << wanted);
  return program.segments[0];
}

}  // namespace

TEST_CASE("layers fuse sums with norms and products with GELU in every placement, forward, recomputed and backward") {
  for (const int tp : {1, 2})
    for (const bool sequence_parallel : {false, true})
      for (const Recompute recompute : {Recompute::none, Recompute::full}) {
        if (sequence_parallel && tp == 1) continue;
        CAPTURE(tp);
        CAPTURE(sequence_parallel);
        CAPTURE(name(recompute));
        for (const char* model : {"tiny-gpt2", "tiny-llama"}) {
          const bool gelu = std::string(model) == "tiny-gpt2";
          const OpGraph graph = graph_of(model);
          ParallelSpec spec = one_rank(graph);
          spec.mesh.degree = {.tp = tp};
          spec.sequence_parallel = sequence_parallel;
          spec.recompute = recompute;
          const Program program = lower(job_of(graph, plain_training(), spec), 0);
          std::map<std::string, int> forward = count_kinds(segment_of(program, "layers.forward"));
          std::map<std::string, int> backward = count_kinds(segment_of(program, "layers.backward"));
          const char* add_norm = gelu ? "add_layer_norm" : "add_rms_norm";
          CHECK(forward[add_norm] == 1);  // the norm of the attention follows another block's sum
          CHECK(forward["add"] == 1);
          CHECK(forward["linear_gelu"] == (gelu ? 1 : 0));
          CHECK(forward["activation"] == 0);
          CHECK(backward["linear_input_gradient_gelu"] == (gelu ? 1 : 0));
          CHECK(backward["activation_gradient"] == 0);
          CHECK(backward[add_norm] == (recompute == Recompute::full ? 1 : 0));
          CHECK(backward["linear_gelu"] == (gelu && recompute == Recompute::full ? 1 : 0));
        }
      }
}

TEST_CASE("fusing never takes more memory, and changes neither buffers nor communication") {
  std::mt19937 random(5);
  for (const char* model : {"tiny-gpt2", "tiny-llama", "tiny-mlp"}) {
    const OpGraph graph = graph_of(model);
    for (int trial = 0; trial < 60; ++trial) {
      TrainingSpec training = plain_training();
      training.global_batch = 16;
      training.precision = trial % 2 == 0 ? DataType::fp32 : DataType::bf16;
      constexpr int ranks[] = {1, 2, 4, 8};
      const ParallelSpec spec = or_with_master(random_spec(graph, training, ranks[trial % 4], random), random);
      Job job = job_of(graph, training, spec, trial % 3 == 0 ? BackendKind::cuda : BackendKind::cpu);
      INFO(model << ": " << describe(spec));
      const std::vector<Program> fused = lower_representatives(job);
      job.fuse = false;
      const std::vector<Program> apart = lower_representatives(job);
      for (std::size_t stage = 0; stage < fused.size(); ++stage) {
        CHECK(fused[stage].arena_bytes <= apart[stage].arena_bytes);
        CHECK(fused[stage].communication == apart[stage].communication);
        CHECK(fused[stage].calls.size() == apart[stage].calls.size());
        REQUIRE(fused[stage].segments.size() == apart[stage].segments.size());
        for (std::size_t s = 0; s < fused[stage].segments.size(); ++s)
          CHECK(fused[stage].segments[s].scratch_bytes <= apart[stage].segments[s].scratch_bytes);
      }
    }
  }
}

namespace {

struct Release {
  void operator()(void* memory) const { ::operator delete(memory, std::align_val_t{256}); }
};

// Executes one rank's Program on the CPU, step after step. Memory that a step does not keep starts
// as not-a-number.
class Machine {
 public:
  Machine(const Program& program, std::int64_t vocabulary)
      : program_(program),
        vocabulary_(vocabulary),
        backend_(make_cpu_backend()),
        arena_(static_cast<char*>(
            ::operator new (static_cast<std::size_t>(program.arena_bytes.device), std::align_val_t{256}))) {
    const float poison = std::numeric_limits<float>::quiet_NaN();
    for (std::int64_t i = 0; i + 4 <= program.arena_bytes.device; i += 4) std::memcpy(arena_.get() + i, &poison, 4);
    std::uint32_t state = 1;
    for (const Buffer& buffer : program.buffers) {
      if (!buffer.persistent) continue;
      for (std::int64_t i = 0; i < buffer.bytes; i += 4) {
        state = state * 1664525u + 1013904223u;
        const float random = static_cast<float>(state >> 8) / static_cast<float>(1 << 24) - 0.5f;
        const float value = buffer.category == MemoryCategory::parameters ? 0.25f * random : 0.0f;
        std::memcpy(arena_.get() + buffer.offset + i, &value, 4);
      }
    }
  }

  void step(std::int64_t number) {
    backend_->set_scalars({.step = number, .learning_rate = 0.01, .weight_decay = 0.1, .clip_norm = 1.0});
    for (const Call& call : program_.calls)
      for (const Instruction& instruction : program_.segments[call.segment].instructions) {
        REQUIRE(instruction.kind == InstructionKind::kernel);
        std::vector<void*> operands;
        for (const Operand& operand : instruction.operands)
          operands.push_back(arena_.get() + program_.buffers[call.buffers[operand.binding]].offset + operand.offset);
        if (instruction.op == OpKind::load_tokens || instruction.op == OpKind::load_targets) {
          auto* tokens = static_cast<std::int32_t*>(operands[0]);
          const std::int64_t first =
              7 * call.micro_batch.value_or(0) + 31 * number + (instruction.op == OpKind::load_targets ? 1 : 0);
          for (std::int64_t i = 0; i < instruction.shape.rows; ++i)
            tokens[i] = static_cast<std::int32_t>((first + i * i) % vocabulary_);
        } else {
          backend_->run(
              0, {.kind = instruction.op, .shape = instruction.shape, .type = instruction.type, .operands = operands});
        }
      }
  }

  // The bytes of a buffer that both Programs have.
  std::string bytes(const std::string& name) const {
    for (const Buffer& buffer : program_.buffers)
      if (buffer.name == name) return {arena_.get() + buffer.offset, static_cast<std::size_t>(buffer.bytes)};
    return "no such buffer";
  }
  float loss() const {
    float loss = 0.0f;
    std::memcpy(&loss, arena_.get() + program_.buffers[*program_.loss_buffer].offset, 4);
    return loss;
  }

 private:
  const Program& program_;
  std::int64_t vocabulary_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<char, Release> arena_;
};

}  // namespace

TEST_CASE("fused and unfused Programs give the same bits") {
  for (const char* model : {"tiny-gpt2", "tiny-llama", "tiny-mlp"})
    for (const Recompute recompute : {Recompute::none, Recompute::full})
      for (const DataType precision : {DataType::fp32, DataType::tf32}) {
        INFO(model << ", recompute " << name(recompute) << ", " << name(precision));
        const OpGraph graph = graph_of(model);
        TrainingSpec training = plain_training();
        training.precision = precision;
        training.clip_norm = 1.0;
        ParallelSpec spec = one_rank(graph);
        spec.recompute = recompute;
        Job job = job_of(graph, training, spec);
        const Program fused = lower(job, 0);
        job.fuse = false;
        const Program apart = lower(job, 0);
        Machine a(fused, graph.vocabulary), b(apart, graph.vocabulary);
        float first_loss = 0.0f;
        for (int step = 1; step <= 3; ++step) {
          a.step(step);
          b.step(step);
          if (step == 1) first_loss = a.loss();
          CHECK(a.loss() == b.loss());  // not a number would not be equal
        }
        CHECK(a.loss() != first_loss);
        for (const Buffer& buffer : fused.buffers)
          if (buffer.persistent) {
            CAPTURE(buffer.name);
            CHECK((a.bytes(buffer.name) == b.bytes(buffer.name)));
          }
      }
}
