// Parameters that are gathered some blocks ahead of the one that computes.
#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "planner/program/memory.h"
#include "planner/program/verify.h"
#include "tests/planner/program/random_plans.h"

using namespace parplan;

namespace {

TrainingSpec training_of() {
  TrainingSpec training;
  training.global_batch = 16;
  training.sequence_length = 16;
  return training;
}

ParallelSpec sharded(const OpGraph& graph, int depth) {
  ParallelSpec spec;
  spec.mesh.degree = {.dp = 2};
  spec.zero_stage = 3;
  spec.micro_batch = 2;
  spec.prefetch_depth = depth;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  return spec;
}

bool is_gather(const Program& program, const Call& call) {
  return program.segments[call.segment].name == "data.all_gather.parameters";
}

// The buffers that hold parameters while their block computes.
std::vector<int> gathered(const Program& program) {
  std::vector<int> buffers;
  for (std::size_t b = 0; b < program.buffers.size(); ++b)
    if (program.buffers[b].name.starts_with("gathered parameters ")) buffers.push_back(static_cast<int>(b));
  return buffers;
}

// The gathers before each of a task's blocks, in their order, less the blocks before it. A block's
// call frees the buffer of its parameters, whether or not it reads them.
std::vector<int> gathers_ahead(const Program& program, const Task& task) {
  const std::vector<int> buffers = gathered(program);
  std::vector<int> ahead;
  int gathers = 0;
  for (int c = task.first_call; c < task.last_call; ++c) {
    const Call& call = program.calls[c];
    gathers += is_gather(program, call);
    if (std::ranges::any_of(call.frees,
                            [&](int buffer) { return std::ranges::find(buffers, buffer) != buffers.end(); }))
      ahead.push_back(gathers - static_cast<int>(ahead.size()));
  }
  return ahead;
}

}  // namespace

TEST_CASE("parameters are gathered as many blocks ahead as the plan says, in one more buffer, once for each use") {
  const OpGraph graph = graph_of("tiny-llama");  // no tied parameter
  const TrainingSpec training = training_of();
  const auto blocks = static_cast<int>(graph.blocks.size());
  const Program usual = lower(job_of(graph, training, sharded(graph, 1)), 0);
  const std::int64_t block = usual.buffers[static_cast<std::size_t>(gathered(usual).front())].bytes;
  for (int depth = 0; depth <= blocks; ++depth) {
    CAPTURE(depth);
    const Program program = lower(job_of(graph, training, sharded(graph, depth)), 0);
    CHECK(static_cast<int>(gathered(program).size()) == depth + 1);
    for (const Task& task : program.tasks) {
      if (!task.action) continue;
      std::vector<int> expected;
      for (int b = 0; b < blocks; ++b) expected.push_back(std::min(depth + 1, blocks - b));
      CHECK(gathers_ahead(program, task) == expected);
    }
    CHECK(program.communication == usual.communication);
    CHECK(program.calls.size() == usual.calls.size());
    CHECK((program.memory.buffers - usual.memory.buffers).count ==
          (depth - 1) * align_up(Bytes(block), buffer_alignment).count);
  }
}

TEST_CASE("under an engine whose gathers run further ahead in forwards alone, its buffers are as many as these need") {
  const OpGraph graph = graph_of("tiny-llama");
  TrainingSpec training = training_of();
  const auto blocks = static_cast<int>(graph.blocks.size());
  for (const auto& [forward, backward] : {std::pair(1, 0), std::pair(0, 1), std::pair(2, 1)}) {
    training.engine = {.name = "other", .gathers_further_forward = forward, .gathers_further_backward = backward};
    const Program program = lower(job_of(graph, training, sharded(graph, 1)), 0);
    CHECK(static_cast<int>(gathered(program).size()) == 2 + std::max(forward, backward));
    for (const Task& task : program.tasks) {
      if (!task.action) continue;
      const int ahead = 1 + (task.action->phase == Phase::forward ? forward : backward);
      std::vector<int> expected;
      for (int b = 0; b < blocks; ++b) expected.push_back(std::min(ahead + 1, blocks - b));
      CHECK(gathers_ahead(program, task) == expected);
    }
  }
}

TEST_CASE("a gather into the buffer of a block that has not computed, or that waits for none, is missed") {
  int overwritten = 0, raced = 0;
  for (const char* model : {"tiny-gpt2", "tiny-llama"}) {
    const OpGraph graph = graph_of(model);
    for (const int depth : {0, 1, 2}) {
      const std::vector<Program> programs = lower_all(job_of(graph, training_of(), sharded(graph, depth)));
      REQUIRE(find_faults(programs).empty());
      const Program& own = programs.front();
      for (std::size_t c = 0; c < own.calls.size(); ++c) {
        if (!is_gather(own, own.calls[c])) continue;
        INFO(model << ", " << depth << " ahead, call " << c);
        // All ranks gather into the buffer that the gather before has filled, as with one too few.
        const auto is_other = [&](const Call& call) { return is_gather(own, call); };
        const auto before = std::find_if(own.calls.rend() - static_cast<std::ptrdiff_t>(c), own.calls.rend(), is_other);
        const int whole = own.calls[c].buffers.back();
        const bool is_of_blocks = own.buffers[static_cast<std::size_t>(whole)].name.starts_with("gathered parameters ");
        if (depth > 0 && is_of_blocks && before != own.calls.rend() && before->buffers.back() != whole) {
          const auto used =
              std::find_if(own.calls.begin() + static_cast<std::ptrdiff_t>(c), own.calls.end(), [&](const Call& call) {
                return !is_gather(own, call) &&
                       std::ranges::find(call.frees, before->buffers.back()) != call.frees.end();
              });
          const auto again = std::find_if(
              own.calls.begin() + static_cast<std::ptrdiff_t>(c), own.calls.end(),
              [&](const Call& call) { return is_gather(own, call) && call.buffers.back() == before->buffers.back(); });
          if (used < again) {
            std::vector<Program> planted = programs;
            for (Program& program : planted) program.calls[c].buffers.back() = before->buffers.back();
            CHECK_FALSE(find_faults(planted).empty());
            ++overwritten;
          }
        }
        if (own.calls[c].waits.empty()) continue;
        std::vector<Program> planted = programs;
        planted.front().calls[c].waits.clear();
        const std::vector<Fault> faults = find_faults(planted);
        REQUIRE_FALSE(faults.empty());
        CHECK(faults.front().what.starts_with("missing event: "));
        ++raced;
      }
    }
  }
  CHECK(overwritten > 20);
  CHECK(raced > 20);
}
