// What products by slices beside the ring of the tensor axis communicate, and what the verifier
// sees of it.
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <fmt/format.h>

#include "planner/program/verify.h"
#include "tests/planner/program/random_plans.h"

using namespace parplan;

namespace {

using Instructions = std::vector<Instruction>;

// Every rank's Program of a model whose tokens `tp` ranks share out.
std::vector<Program> programs_of(const OpGraph& graph, int tp, TensorOverlap overlap,
                                 Recompute recompute = Recompute::none) {
  TrainingSpec training;
  training.global_batch = 4;
  training.sequence_length = 16;
  ParallelSpec spec;
  spec.mesh.degree = {.tp = tp};
  spec.sequence_parallel = true;
  spec.tp_overlap = overlap;
  spec.recompute = recompute;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  return lower_all(job_of(graph, training, spec));
}

std::string faults_of(const std::vector<Program>& programs) {
  std::string found;
  for (const Fault& fault : find_faults(programs)) found += write_fault(fault) + "\n";
  return found;
}

const Segment& segment_of(const Program& program, const std::string& name) {
  return *std::ranges::find(program.segments, name, &Segment::name);
}

int count(const Segment& segment, InstructionKind kind, const std::string& name) {
  return static_cast<int>(std::ranges::count_if(segment.instructions, [&](const Instruction& i) {
    return i.kind == kind && i.name.starts_with("layers.0." + name);
  }));
}

}  // namespace

TEST_CASE("rows around a ring are as many bytes as gathered and scattered ones, in a slice for each rank") {
  for (const char* model : {"tiny-gpt2", "tiny-llama", "tiny-mlp"}) {
    const OpGraph graph = graph_of(model);
    for (const int tp : {2, 4})
      for (const Recompute recompute : {Recompute::none, Recompute::full}) {
        INFO(model << " tp " << tp << " recompute " << name(recompute));
        const std::vector<Program> whole = programs_of(graph, tp, TensorOverlap::none, recompute),
                                   sliced = programs_of(graph, tp, TensorOverlap::ring, recompute);
        CHECK(faults_of(sliced) == "");
        for (std::size_t rank = 0; rank < whole.size(); ++rank)
          CHECK(sliced[rank].communication == whole[rank].communication);
      }
  }
  const OpGraph graph = graph_of("tiny-llama");
  const int tp = 4;
  for (const Program& program : programs_of(graph, tp, TensorOverlap::ring)) {
    const Segment &forward = segment_of(program, "layers.forward"), &backward = segment_of(program, "layers.backward");
    using enum InstructionKind;
    // Two gathers and two scatters of the forward go around; `up` reads what arrived for `gate`.
    for (const char* product : {"attention.qkv", "attention.output", "feed_forward.gate", "feed_forward.down"})
      CHECK(count(forward, kernel, product) >= tp);
    CHECK(count(forward, send, "") == 4 * (tp - 1));
    CHECK(count(forward, receive, "") == 4 * (tp - 1));
    CHECK(count(forward, all_gather, "") + count(forward, reduce_scatter, "") == 0);
    // The backward gathers gradients of the two outputs around the ring. What waits for no product
    // stays whole: the gathers of the weight gradients' inputs, and the sums of input gradients,
    // which weight gradients hide.
    CHECK(count(backward, send, "") == 2 * (tp - 1));
    CHECK(count(backward, all_gather, "") == 2);
    CHECK(count(backward, reduce_scatter, "") == 2);
  }
}

TEST_CASE("the verifier finds slices of the wrong rows, before they arrive, and sums that go astray") {
  const OpGraph graph = graph_of("tiny-llama");
  const std::vector<Program> programs = programs_of(graph, 4, TensorOverlap::ring);
  CHECK(faults_of(programs) == "");
  const auto spoilt = [&](const std::string& segment, auto&& spoil) {
    std::vector<Program> broken = programs;
    for (Program& program : broken)
      for (Segment& one : program.segments)
        if (one.name == segment) spoil(one.instructions);
    return faults_of(broken);
  };
  const auto nth = [](Instructions& all, InstructionKind kind, const std::string& name, int n) {
    return std::ranges::find_if(
        all, [&](const Instruction& i) { return i.kind == kind && i.name == "layers.0." + name && n-- == 0; });
  };
  using enum InstructionKind;

  // A slice that is read before it has arrived.
  std::string found = spoilt("layers.forward", [&](Instructions& all) {
    for (Instruction& i : all)
      if (i.kind == kernel && i.name == "layers.0.attention.qkv") i.waits.clear();
  });
  CHECK_MESSAGE(found.find("missing event: linear 'layers.0.attention.qkv'") != std::string::npos, found);

  // Two slices that take each other's rows: all bytes are there, in order.
  found = spoilt("layers.forward", [&](Instructions& all) {
    std::swap(nth(all, kernel, "attention.qkv", 2)->operands.front(),
              nth(all, kernel, "attention.qkv", 3)->operands.front());
  });
  CHECK_MESSAGE(found.find("wrong rows: linear 'layers.0.attention.qkv'") != std::string::npos, found);

  // A slice twice, and another never.
  found = spoilt("layers.backward", [&](Instructions& all) {
    *nth(all, kernel, "feed_forward.down", 2) = *nth(all, kernel, "feed_forward.down", 1);
  });
  CHECK_MESSAGE(found.find("a second time") != std::string::npos, found);
  CHECK_MESSAGE(
      found.find("incomplete ring: linear_input_gradient 'layers.0.feed_forward.down' multiplies the rows of 3 of 4") !=
          std::string::npos,
      found);

  // A ring that turns the other way: rows lie where others belong.
  found = spoilt("layers.backward", [&](Instructions& all) {
    Operand* last = nullptr;
    for (Instruction& i : all)
      if (i.kind == receive) {
        if (last != nullptr && i.operands[0].bytes == last->bytes) std::swap(last->offset, i.operands[0].offset);
        last = last == nullptr ? i.operands.data() : nullptr;
      }
  });
  CHECK(found != "");

  // The own rows are not brought to the others before something reads all of them.
  found = spoilt("layers.backward", [&](Instructions& all) {
    const auto copied =
        std::ranges::find_if(all, [](const Instruction& i) { return i.kind == kernel && i.op == OpKind::copy; });
    REQUIRE(copied != all.end());
    all.erase(copied);
  });
  CHECK_MESSAGE(found.find("missing rows") != std::string::npos, found);

  // A slice adds its product to the sum of another rank's rows.
  found = spoilt("layers.forward", [&](Instructions& all) {
    std::swap(nth(all, kernel, "attention.output", 1)->operands.front(),
              nth(all, kernel, "attention.output", 2)->operands.front());
  });
  CHECK_MESSAGE(found.find("wrong sum: accumulate 'layers.0.attention.output.sums'") != std::string::npos, found);

  // A sum that lacks a rank's part.
  found =
      spoilt("layers.forward", [&](Instructions& all) { all.erase(nth(all, kernel, "feed_forward.down.sums", 2)); });
  CHECK_MESSAGE(found.find("wrong sum") != std::string::npos, found);

  // A transfer into rows that are still being read, and one that one rank leaves out.
  found = spoilt("layers.forward", [&](Instructions& all) {
    for (Instruction& i : all)
      if (i.kind == receive && i.name.ends_with(".sums")) i.waits.clear();
  });
  CHECK_MESSAGE(found.find("missing event: receive") != std::string::npos, found);
  std::vector<Program> broken = programs;
  for (Segment& segment : broken[2].segments)
    if (segment.name == "layers.forward")
      segment.instructions.erase(std::ranges::find(segment.instructions, send, &Instruction::kind));
  CHECK(faults_of(broken) != "");
}
