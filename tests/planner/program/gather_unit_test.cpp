// Parameters that are gathered one by one, each shared out by itself.
#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "planner/program/bucket_work.h"
#include "planner/program/rank_buckets.h"
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

ParallelSpec sharded(const OpGraph& graph, int dp, int tp, GatherUnit unit) {
  ParallelSpec spec;
  spec.mesh.degree = {.dp = dp, .tp = tp};
  spec.zero_stage = 3;
  spec.micro_batch = 2;
  spec.gather_unit = unit;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  return spec;
}

bool is_titled(const Program& program, const Call& call, const char* title) {
  return program.segments[call.segment].name == title;
}
constexpr const char* gathers = "data.all_gather.parameters";
constexpr const char* reduces = "data.reduce_scatter.gradients";

// By Segment: its instructions without their operands' places.
std::vector<Segment> without_places(const Program& program) {
  std::vector<Segment> segments;
  for (const Call& call : program.calls) {
    Segment segment = program.segments[call.segment];
    if (segment.name == gathers || segment.name == reduces || !call.micro_batch) continue;
    for (Instruction& instruction : segment.instructions)
      for (Operand& operand : instruction.operands) operand.offset = 0;
    segments.push_back(segment);
  }
  return segments;
}

}  // namespace

TEST_CASE("each parameter that is gathered by itself has an equal, aligned part on every rank") {
  for (const char* model : {"tiny-gpt2", "tiny-llama", "tiny-t5"}) {
    const OpGraph graph = graph_of(model);
    for (const Optimizer optimizer : {Optimizer::adamw, Optimizer::adamw_8bit})
      for (const auto& [dp, tp, group] :
           {std::tuple(2, 1, 0), std::tuple(8, 1, 0), std::tuple(2, 4, 0), std::tuple(4, 1, 2)}) {
        TrainingSpec training = training_of();
        training.optimizer = optimizer;
        ParallelSpec spec = sharded(graph, dp, tp, GatherUnit::parameter);
        spec.mesh.dp_shard = group;
        INFO(model << ": " << describe(spec));
        const int ranks = group > 0 ? group : dp;
        const std::vector<Program> programs = lower_all(job_of(graph, training, spec));
        std::vector<std::int64_t> covered(programs.front().buckets.size());
        for (const Program& program : programs)
          for (std::size_t b = 0; b < program.buckets.size(); ++b) {
            const Bucket& bucket = program.buckets[b];
            std::set<TensorId> tensors;
            std::vector<std::int64_t> begins;  // of parameters, which may lie in several rectangles
            for (const ParameterPart& part : program.parameters)
              if (part.bucket == static_cast<int>(b) && tensors.insert(part.tensor).second)
                begins.push_back(part.bucket_offset);
            CHECK(bucket.units.size() == std::max<std::size_t>(tensors.size(), 1));
            std::int64_t end = 0, held = 0;
            for (std::size_t u = 0; u < bucket.units.size(); ++u) {
              const BucketUnit& unit = bucket.units[u];
              if (!tensors.empty()) CHECK(unit.range.begin == begins[u]);
              CHECK(unit.range.begin == end);
              CHECK(unit.own.range.size() * ranks == unit.range.size());
              CHECK(unit.own.range.size() % bucket_alignment(training) == 0);
              CHECK((unit.own.range.begin - unit.range.begin) % std::max<std::int64_t>(unit.own.range.size(), 1) == 0);
              CHECK(unit.own.at == held);
              end = unit.range.end;
              held += unit.own.range.size();
            }
            CHECK(end == bucket.elements);
            CHECK(held == bucket.shard_elements);
            covered[b] += held;
          }
        // All elements, as often as there are ranks that hold the same.
        for (std::size_t b = 0; b < covered.size(); ++b)
          CHECK(covered[b] ==
                programs.front().buckets[b].elements * static_cast<std::int64_t>(programs.size()) / ranks);
      }
  }
}

TEST_CASE("parameters gathered one by one take more collectives of the same elements, but for padding") {
  for (const char* model : {"tiny-gpt2", "tiny-llama", "tiny-t5"}) {
    const OpGraph graph = graph_of(model);
    for (const int tp : {1, 2}) {
      const TrainingSpec training = training_of();
      const ParallelSpec spec = sharded(graph, 4, tp, GatherUnit::parameter);
      INFO(model << ": " << describe(spec));
      const Program one_by_one = lower(job_of(graph, training, spec), 1),
                    together = lower(job_of(graph, training, sharded(graph, 4, tp, GatherUnit::block)), 1);
      // Blocks do the same, with parameters elsewhere in the buffers that they are gathered into.
      CHECK(without_places(one_by_one) == without_places(together));
      REQUIRE(one_by_one.calls.size() == together.calls.size());
      std::int64_t padding = 0, sent = 0;
      for (std::size_t b = 0; b < one_by_one.buckets.size(); ++b) {
        const std::int64_t more = one_by_one.buckets[b].elements - together.buckets[b].elements;
        CHECK(more >= 0);
        CHECK(more < 4 * 16 * static_cast<std::int64_t>(one_by_one.buckets[b].units.size()));
        padding += more;
      }
      for (std::size_t c = 0; c < one_by_one.calls.size(); ++c) {
        const Segment& own = one_by_one.segments[one_by_one.calls[c].segment];
        const Segment& other = together.segments[together.calls[c].segment];
        if (own.name != gathers && own.name != reduces) continue;
        CHECK(own.name == other.name);
        const auto elements = [](const Segment& segment) {
          std::int64_t all = 0;
          for (const Instruction& instruction : segment.instructions)
            if (instruction.kind != InstructionKind::kernel) all += instruction.operands.back().bytes / 4;
          return all;
        };
        CHECK(own.instructions.size() >= other.instructions.size());
        CHECK(elements(own) >= elements(other));
        sent += elements(own) - elements(other);
      }
      CHECK(sent >= padding);
      CHECK(sent % 16 == 0);
    }
  }
}

TEST_CASE("a parameter that is not gathered or reduced, or is put in another's place, is missed") {
  int dropped = 0, swapped = 0, moved = 0;
  for (const char* model : {"tiny-gpt2", "tiny-llama"}) {
    const OpGraph graph = graph_of(model);
    const std::vector<Program> programs =
        lower_all(job_of(graph, training_of(), sharded(graph, 2, 1, GatherUnit::parameter)));
    REQUIRE(find_faults(programs).empty());
    const Program& own = programs.front();
    std::set<int> seen;  // Segments
    for (std::size_t c = 0; c < own.calls.size(); ++c) {
      const bool is_gather = is_titled(own, own.calls[c], gathers);
      if (!is_gather && !is_titled(own, own.calls[c], reduces)) continue;
      if (!seen.insert(own.calls[c].segment).second) continue;
      INFO(model << ", call " << c);
      // All ranks do alike.
      const auto plant = [&](auto change) {
        std::vector<Program> planted = programs;
        for (Program& program : planted) {
          program.segments.push_back(program.segments[program.calls[c].segment]);
          program.calls[c].segment = static_cast<int>(program.segments.size()) - 1;
          change(program.segments.back().instructions);
        }
        std::string text;
        for (const Fault& fault : find_faults(planted)) text += fault.what + "\n";
        return text;
      };
      const std::vector<Instruction>& instructions = own.segments[own.calls[c].segment].instructions;
      for (std::size_t i = 0; i < instructions.size(); ++i) {
        if (!instructions[i].waits.empty() || instructions[i].records) continue;
        CHECK_FALSE(plant([&](std::vector<Instruction>& all) {
                      all.erase(all.begin() + static_cast<std::ptrdiff_t>(i));
                    }).empty());
        ++dropped;
      }
      const std::size_t step = is_gather ? 1 : 2;  // a sum is followed by its addition to the shard
      for (std::size_t i = 0; i + step < instructions.size(); i += step) {
        const std::size_t next = i + step;
        if (is_gather && instructions[i].operands.back().bytes == instructions[next].operands.back().bytes) {
          CHECK(plant([&](std::vector<Instruction>& all) {
                  std::swap(all[i].operands.back(), all[next].operands.back());
                }).find("wrong place: ") != std::string::npos);
          ++swapped;
        }
        if (!is_gather && instructions[i + 1].operands.back().bytes == instructions[next + 1].operands.back().bytes) {
          CHECK(plant([&](std::vector<Instruction>& all) {
                  std::swap(all[i + 1].operands.back(), all[next + 1].operands.back());
                }).find("wrong place: ") != std::string::npos);
          ++moved;
        }
      }
    }
  }
  CHECK(dropped > 20);
  CHECK(swapped > 3);
  CHECK(moved > 3);
}

TEST_CASE("a parameter that is read from a file and put in another's place is missed") {
  int swapped = 0;
  for (const GatherUnit unit : {GatherUnit::block, GatherUnit::parameter}) {
    const OpGraph graph = graph_of("tiny-gpt2");
    ParallelSpec spec = sharded(graph, 2, 1, unit);
    spec.offload = {.optimizer = Home::host, .parameters = Home::nvme};
    const std::vector<Program> programs = lower_all(job_of(graph, training_of(), spec));
    REQUIRE(find_faults(programs).empty());
    for (std::size_t c = 0; c < programs.front().calls.size(); ++c) {
      if (!is_titled(programs.front(), programs.front().calls[c], "fetch.parameters")) continue;
      std::vector<Program> planted = programs;
      for (Program& program : planted) {
        std::vector<Instruction>& copies = program.segments[program.calls[c].segment].instructions;
        // The place of the next parameter as large, or the other rank's.
        const auto same = std::ranges::find(copies.begin() + 1, copies.end(), copies.front().operands.back().bytes,
                                            [](const Instruction& copy) { return copy.operands.back().bytes; });
        Operand& place = copies.front().operands.back();
        if (same != copies.end())
          std::swap(place.offset, same->operands.back().offset);
        else
          place.offset = place.offset == 0 ? place.bytes : 0;
      }
      std::string text;
      for (const Fault& fault : find_faults(planted)) text += fault.what + "\n";
      CHECK(text.find("wrong place: ") != std::string::npos);
      ++swapped;
      break;
    }
  }
  CHECK(swapped == 2);
}

TEST_CASE("no more buffers take turns for gathered parameters than a stage has blocks, and one") {
  const OpGraph graph = graph_of("tiny-llama");
  const auto blocks = static_cast<int>(graph.blocks.size());
  const auto buffers = [&](int depth) {
    ParallelSpec spec = sharded(graph, 2, 1, GatherUnit::block);
    spec.prefetch_depth = depth;
    const Program program = lower(job_of(graph, training_of(), spec), 0);
    CHECK(find_faults(lower_all(job_of(graph, training_of(), spec))).empty());
    return static_cast<int>(std::ranges::count_if(
        program.buffers, [](const Buffer& buffer) { return buffer.name.starts_with("gathered parameters "); }));
  };
  CHECK(buffers(blocks - 1) == blocks);
  CHECK(buffers(blocks) == blocks + 1);
  CHECK(buffers(100) == blocks + 1);
}

TEST_CASE("a buffer that forwards alone need is not counted where what backwards reduce takes as much") {
  const OpGraph graph = graph_of("tiny-llama");
  TrainingSpec training = training_of();
  const auto memory = [&](int forward, int backward) {
    training.engine = {.name = "other", .gathers_further_forward = forward, .gathers_further_backward = backward};
    const ParallelSpec spec = sharded(graph, 2, 1, GatherUnit::block);
    const Program program = lower(job_of(graph, training, spec), 0);
    std::int64_t counted = 0;
    for (const Buffer& buffer : program.buffers)
      counted += buffer.name.starts_with("gathered parameters ") && buffer.counted;
    CHECK(counted == 2 + std::max(backward, forward > 2 ? forward : 0));
    return program.memory.buffers;
  };
  const Bytes usual = memory(0, 0);
  CHECK(memory(1, 0) == usual);
  CHECK(memory(2, 0) == usual);
  CHECK(memory(0, 1) > usual);
  CHECK(memory(1, 1) == memory(0, 1));
  // Three blocks of parameters are more than two of gradients.
  CHECK(memory(3, 0) > usual);
}
