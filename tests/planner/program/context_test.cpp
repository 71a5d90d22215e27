// What context parallelism communicates, and what the verifier sees of it.
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/program/verify.h"
#include "tests/planner/program/random_plans.h"

using namespace parplan;

namespace {

TrainingSpec training_of(std::int64_t batch) {
  TrainingSpec training;
  training.global_batch = batch;
  training.sequence_length = 16;
  return training;
}

ParallelSpec spec_of(const OpGraph& graph, int dp, int cp, ContextMethod method) {
  ParallelSpec spec;
  spec.mesh.degree = {.dp = dp, .cp = cp};
  spec.cp_method = method;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  return spec;
}

std::vector<std::string> exchanges(const Program& program, const std::string& name) {
  std::vector<std::string> all;
  for (const Segment& segment : program.segments)
    if (segment.name == name)
      for (const Instruction& i : segment.instructions)
        if (i.kind != InstructionKind::kernel)
          all.push_back(fmt::format("{} over {}: {} B", parplan::name(i.kind), parplan::name(i.group),
                                    i.operands.back().bytes));
  return all;
}

std::string faults_of(const std::vector<Program>& programs) {
  std::string found;
  for (const Fault& fault : find_faults(programs)) found += write_fault(fault) + "\n";
  return found;
}

std::vector<Segment*> segments_with(std::vector<Program>& programs, InstructionKind kind) {
  std::vector<Segment*> found;
  for (Program& program : programs)
    for (Segment& segment : program.segments)
      if (std::ranges::any_of(segment.instructions, [&](const Instruction& i) {
            return i.kind == kind && i.group == all_along(Axis::cp);
          }))
        found.push_back(&segment);
  return found;
}

}  // namespace

// tiny-llama: 2 layers, 2 key/value heads of 8, so 32 numbers of a key and a value for each token;
// 4 heads. A micro-batch has one sequence of 16 tokens.
TEST_CASE("context parallelism sends what its closed form says, all else goes over the ranks of both axes") {
  const OpGraph graph = graph_of("tiny-llama");
  const TrainingSpec training = training_of(4);
  const std::int64_t layers = static_cast<std::int64_t>(graph.blocks.size()) - 2;
  const OpShape heads = [&] {
    for (const Op& op : graph.ops)
      if (op.kind == OpKind::attention) return op.attributes;
    return OpShape{};
  }();
  for (const int cp : {2, 4}) {
    const std::int64_t micro_batches = 2;  // of each of 2 data-parallel ranks
    const std::int64_t own_keys = 16 / cp * 2 * heads.kv_heads * heads.head_dim * 4;
    const ParallelSpec spec = spec_of(graph, 2, cp, ContextMethod::all_gather);
    const std::vector<Program> gathering = lower_all(job_of(graph, training, spec));
    for (const Program& program : gathering) {
      CAPTURE(program.rank);
      // Gathered forward and backward, and their gradients reduced: each (cp - 1) chunks.
      CHECK(program.communication.cp.count == layers * micro_batches * 3 * (cp - 1) * own_keys);
      CHECK(exchanges(program, "layers.forward") ==
            std::vector<std::string>{fmt::format("all_gather over context: {} B", cp * own_keys)});
      CHECK(exchanges(program, "layers.backward") ==
            std::vector<std::string>{fmt::format("all_gather over context: {} B", cp * own_keys),
                                     fmt::format("reduce_scatter over context: {} B", cp * own_keys)});
      // Rank r = 2 d + c on neighbouring devices.
      CHECK(program.group(all_along(Axis::dp)).size() == static_cast<std::size_t>(2 * cp));
      CHECK(program.group(all_along(Axis::cp)).size() == static_cast<std::size_t>(cp));
    }
    // The bytes of data parallelism over as many ranks.
    ParallelSpec data = spec_of(graph, 2 * cp, 1, ContextMethod::all_gather);
    const TrainingSpec more = training_of(4 * cp);
    CHECK(gathering.front().communication.dp == lower(job_of(graph, more, data), 0).communication.dp);
  }
  // Around the ring: keys and values take cp - 1 hops in the forward and in the backward, and their
  // gradients one more, back to their rank.
  for (const int cp : {2, 4}) {
    const std::int64_t micro_batches = 2;
    const std::int64_t own_keys = 16 / cp * 2 * heads.kv_heads * heads.head_dim * 4;
    for (const Program& program : lower_all(job_of(graph, training, spec_of(graph, 2, cp, ContextMethod::ring)))) {
      CAPTURE(program.rank);
      CHECK(program.communication.cp.count == layers * micro_batches * (3 * cp - 2) * own_keys);
      const std::vector<std::string> hop = {fmt::format("send over context next: {} B", own_keys),
                                            fmt::format("receive over context previous: {} B", own_keys)};
      std::vector<std::string> hops;
      for (int i = 0; i < cp - 1; ++i) hops.insert(hops.end(), hop.begin(), hop.end());
      CHECK(exchanges(program, "layers.forward") == hops);
      for (int i = 0; i < 2 * cp - 1 - (cp - 1); ++i) hops.insert(hops.end(), hop.begin(), hop.end());
      CHECK(exchanges(program, "layers.backward") == hops);
    }
  }
  // Ulysses: fused queries, keys and values of a token go to the rank of their heads, and the
  // output comes back; of each, the rank keeps its own part.
  const std::int64_t cp = 2, micro_batches = 2;
  const std::int64_t fused = (heads.heads + 2 * heads.kv_heads) * heads.head_dim, mixed = heads.heads * heads.head_dim;
  for (const Program& program : lower_all(job_of(graph, training, spec_of(graph, 2, 2, ContextMethod::ulysses)))) {
    std::int64_t sent = 0;
    for (const Segment& segment : program.segments)
      if (segment.name.starts_with("layers."))
        for (const Instruction& i : segment.instructions)
          if (i.kind == InstructionKind::all_to_all) sent += i.operands.back().bytes * (cp - 1) / cp;
    CHECK(program.communication.cp.count == layers * micro_batches * sent);
    CHECK(exchanges(program, "layers.forward") ==
          std::vector<std::string>{fmt::format("all_to_all over context: {} B", 16 / cp * fused * 4),
                                   fmt::format("all_to_all over context: {} B", 16 / cp * mixed * 4)});
  }
}

// Groups of u ranks exchange what a token has of all heads for what u tokens have of some, and r =
// cp / u ranks meet one another's keys: of u times the tokens, for a u-th of the heads, so as many
// bytes.
TEST_CASE("groups exchange for heads and send keys between them as their closed form says") {
  const OpGraph graph = graph_of("tiny-llama");
  const TrainingSpec training = training_of(4);
  const std::int64_t layers = static_cast<std::int64_t>(graph.blocks.size()) - 2, micro_batches = 4;
  const OpShape heads = [&] {
    for (const Op& op : graph.ops)
      if (op.kind == OpKind::attention) return op.attributes;
    return OpShape{};
  }();
  const std::int64_t fused = (heads.heads + 2 * heads.kv_heads) * heads.head_dim, mixed = heads.heads * heads.head_dim;
  constexpr std::int64_t u = 2;
  for (const int cp : {4, 8})
    for (const ContextMethod method : {ContextMethod::ring, ContextMethod::all_gather}) {
      const std::int64_t r = cp / u, tokens = 16 / cp, keys = tokens * 2 * heads.kv_heads * heads.head_dim * 4;
      ParallelSpec spec = spec_of(graph, 1, cp, method);
      spec.mesh.cp_ulysses = static_cast<int>(u);
      const std::vector<Program> programs = lower_all(job_of(graph, training, spec));
      CHECK(faults_of(programs) == "");
      const auto all_to_all = [&](std::int64_t width) {
        return fmt::format("all_to_all over context heads: {} B", tokens * width * 4);
      };
      std::vector<std::string> forward = {all_to_all(fused)}, hops;
      for (int i = 0; i < r - 1; ++i)
        hops.insert(hops.end(), {fmt::format("send over context next: {} B", keys),
                                 fmt::format("receive over context previous: {} B", keys)});
      if (method == ContextMethod::ring)
        forward.insert(forward.end(), hops.begin(), hops.end());
      else
        forward.push_back(fmt::format("all_gather over context keys: {} B", r * keys));
      forward.push_back(all_to_all(mixed));
      for (const Program& program : programs) {
        CAPTURE(program.rank);
        CHECK(exchanges(program, "layers.forward") == forward);
        // Forward: queries, keys and values, and the output. Backward: these, the output's gradient
        // and that of queries, keys and values.
        const std::int64_t exchanged = tokens * (3 * fused + 3 * mixed) * 4 * (u - 1) / u;
        const std::int64_t between = method == ContextMethod::ring ? (3 * r - 2) * keys : 3 * (r - 1) * keys;
        CHECK(program.communication.cp.count == layers * micro_batches * (exchanged + between));
        const int c = program.rank;
        CHECK(program.group(exchange_group) == std::vector{c / 2 * 2, c / 2 * 2 + 1});
        CHECK(program.group(keys_group(2)).size() == static_cast<std::size_t>(r));
        CHECK(program.group(keys_group(2)).front() == c % 2);
        if (method == ContextMethod::ring) CHECK(program.group(next_keys) == std::vector{(c + 2) % cp});
      }
    }
}

// A rank's rows are consecutive rows of the two chunks that its group holds: every position is on
// one rank, and the ranks of a group have as many pairs of queries and keys together as any other.
TEST_CASE("groups share out the rows of two chunks in order") {
  const OpGraph graph = graph_of("tiny-gpt2");
  for (const int u : {2, 4}) {
    ParallelSpec spec = spec_of(graph, 1, 8, ContextMethod::ring);
    spec.mesh.cp_ulysses = u;
    const std::vector<Program> programs = lower_all(job_of(graph, training_of(4), spec));
    std::vector<std::int64_t> positions, of_group;
    for (const Program& program : programs) {
      const auto load = [&] {
        for (const Segment& segment : program.segments)
          for (const Instruction& i : segment.instructions)
            if (i.op == OpKind::load_tokens && i.kind == InstructionKind::kernel) return i.shape;
        return OpShape{};
      }();
      if (program.rank % u == 0) of_group.push_back(0);
      for (std::int64_t row = 0; row < load.sequence; ++row) {
        positions.push_back(load.position(row));
        of_group.back() += load.position(row) + 1;
      }
    }
    CHECK(of_group == std::vector<std::int64_t>(static_cast<std::size_t>(8 / u), 16 * 17 / 2 / (8 / u)));
    std::ranges::sort(positions);
    for (std::int64_t at = 0; at < 16; ++at) CHECK(positions.at(static_cast<std::size_t>(at)) == at);
  }
}

TEST_CASE("the verifier finds rows that no exchange has brought, and heads that do not go back") {
  const OpGraph graph = graph_of("tiny-llama");
  for (const ContextMethod method : {ContextMethod::ring, ContextMethod::all_gather}) {
    ParallelSpec spec = spec_of(graph, 1, 4, method);
    spec.mesh.cp_ulysses = 2;
    const std::vector<Program> programs = lower_all(job_of(graph, training_of(4), spec));
    CHECK(faults_of(programs) == "");
    const auto spoilt = [&](auto&& spoil) {
      std::vector<Program> broken = programs;
      for (Program& program : broken) spoil(program);
      return faults_of(broken);
    };
    const auto in_segments = [&](const std::string& name, auto&& spoil) {
      return spoilt([&](Program& program) {
        for (Segment& segment : program.segments)
          if (segment.name == name) spoil(segment.instructions);
      });
    };
    using Instructions = std::vector<Instruction>;
    const auto exchange = [](Instructions& all, int n) {
      return std::ranges::find_if(
          all, [&](const Instruction& i) { return i.kind == InstructionKind::all_to_all && n-- == 0; });
    };
    const auto transposition = [](Instructions& all, int n) {
      return std::ranges::find_if(all, [&](const Instruction& i) {
        return i.kind == InstructionKind::kernel && i.op == OpKind::transpose_blocks && n-- == 0;
      });
    };

    // A copy instead of an exchange: own rows where those of the group should be, and heads that do
    // not go back.
    const auto copies_instead = [](Instruction& i) {
      i.kind = InstructionKind::kernel;
      i.op = OpKind::copy;
      i.shape = {.rows = i.operands.front().bytes / 4};
      i.stream = Stream::compute;
      i.group = {};
    };
    std::string found = in_segments("layers.forward", [&](Instructions& all) { copies_instead(*exchange(all, 0)); });
    CHECK_MESSAGE(found.find("wrong rows: operand 0 of attention") != std::string::npos, found);
    found = in_segments("layers.forward", [&](Instructions& all) { copies_instead(*exchange(all, 1)); });
    CHECK_MESSAGE(found.find("leaves rows of some heads that are not exchanged back") != std::string::npos, found);

    // Heads that are exchanged before they are packed, and rows that are not put together after.
    found = in_segments("layers.forward", [&](Instructions& all) {
      exchange(all, 0)->operands.front() = transposition(all, 0)->operands.front();
      exchange(all, 0)->operands.front().access = Access::read;
    });
    CHECK_MESSAGE(found.find("neither packed by rank nor of some heads") != std::string::npos, found);
    found = in_segments("layers.forward", [&](Instructions& all) {
      Instruction& i = *transposition(all, 1);
      i.shape = {.rows = i.shape.inner * i.shape.rows, .columns = i.shape.columns, .inner = 1};
    });
    CHECK_MESSAGE(found.find("rows of heads that came back") != std::string::npos, found);

    // The gradient of attention reads the output's own rows, as they were saved.
    found = in_segments("layers.backward", [&](Instructions& all) {
      const Operand own = transposition(all, 2)->operands.front();
      for (Instruction& i : all)
        if (i.kind == InstructionKind::kernel && i.op == OpKind::attention_gradient) i.operands[3] = own;
    });
    CHECK_MESSAGE(found.find("wrong rows: operand 3 of attention_gradient") != std::string::npos, found);

    // An exchange with all ranks of the axis, which has other sizes for each.
    found = in_segments("layers.forward", [&](Instructions& all) { exchange(all, 0)->group = all_along(Axis::cp); });
    CHECK_MESSAGE(found.find("wrong rows: ") != std::string::npos, found);

    // Groups of ranks that are no neighbours, on one rank.
    std::vector<Program> broken = programs;
    broken[1].set_group(exchange_group, {1, 3});
    CHECK(faults_of(broken) != "");

    // A ring of all ranks instead of one between groups: every transfer is met.
    if (method != ContextMethod::ring) continue;
    found = spoilt([](Program& program) {
      program.set_group(next_keys, {(program.rank + 1) % 4});
      program.set_group(previous_keys, {(program.rank + 3) % 4});
    });
    CHECK_MESSAGE(found.find("wrong ring: group context next holds ranks") != std::string::npos, found);
  }
}

TEST_CASE("the verifier finds what is wrong with groups and instructions of the context axis") {
  const OpGraph graph = graph_of("tiny-llama");
  const Job job = job_of(graph, training_of(4), spec_of(graph, 1, 4, ContextMethod::all_gather));
  std::vector<Program> programs = lower_all(job);
  CHECK(faults_of(programs) == "");

  // A rank that takes part in another group than the others say.
  std::vector<Program> broken = programs;
  broken[1].set_group(all_along(Axis::cp), {0, 1});
  CHECK(faults_of(broken) != "");

  // Attention that does not wait for the gathered keys.
  broken = programs;
  for (Segment* segment : segments_with(broken, InstructionKind::all_gather))
    for (Instruction& i : segment->instructions)
      if (i.kind == InstructionKind::kernel &&
          (i.op == OpKind::attention || i.op == OpKind::attention_gradient))
        i.waits.clear();
  CHECK(faults_of(broken).find("missing event") != std::string::npos);

  // Keys that are never gathered.
  broken = programs;
  for (Segment* segment : segments_with(broken, InstructionKind::all_gather))
    std::erase_if(segment->instructions, [](const Instruction& i) { return i.kind == InstructionKind::all_gather; });
  CHECK(faults_of(broken) != "");

  // One rank that leaves out a reduction.
  broken = programs;
  for (Segment& segment : broken[2].segments)
    std::erase_if(segment.instructions, [](const Instruction& i) {
      return i.kind == InstructionKind::reduce_scatter && i.group == all_along(Axis::cp);
    });
  CHECK(faults_of(broken) != "");
}

// Attention that computes with other keys than those that have come around, and gradients that go
// astray: the bytes and the order of all transfers are as they should be.
TEST_CASE("the verifier finds keys under a wrong name, and gradients of keys that go astray in a ring") {
  const OpGraph graph = graph_of("tiny-llama");
  const std::vector<Program> programs =
      lower_all(job_of(graph, training_of(4), spec_of(graph, 1, 4, ContextMethod::ring)));
  CHECK(faults_of(programs) == "");
  const auto of_ring = [](const Instruction& i) { return i.shape.chunks.holder.has_value(); };
  const auto spoilt = [&](const std::string& segment, auto&& spoil) {
    std::vector<Program> broken = programs;
    for (Program& program : broken)
      for (Segment& one : program.segments)
        if (one.name == segment) spoil(program, one.instructions);
    return faults_of(broken);
  };
  using Instructions = std::vector<Instruction>;
  const auto nth = [&](Instructions& all, OpKind op, int n) {
    return std::ranges::find_if(all, [&](const Instruction& i) {
      return i.kind == InstructionKind::kernel && i.op == op && (i.op == OpKind::accumulate || of_ring(i)) && n-- == 0;
    });
  };

  // The third step takes the keys of the second one's rank.
  std::string found = spoilt("layers.forward", [&](const Program&, Instructions& all) {
    nth(all, OpKind::attention, 2)->shape.chunks.holder = nth(all, OpKind::attention, 1)->shape.chunks.holder;
  });
  CHECK(found.find("wrong keys: attention 'layers.0.attention'") != std::string::npos);
  CHECK(found.find("incomplete ring: attention 'layers.0.attention' meets the keys of 3 of 4 ranks") !=
        std::string::npos);

  // A ring that turns the other way: what comes is not what the steps say.
  found = spoilt("layers.forward", [&](const Program&, Instructions& all) {
    for (Instruction& i : all)
      if (of_ring(i)) i.shape.chunks.holder = (2 * i.shape.chunks.rank + 4 - *i.shape.chunks.holder) % 4;
  });
  CHECK(found.find("wrong keys") != std::string::npos);

  // A step that is left out, and one that writes over what the steps before have left.
  found = spoilt("layers.forward",
                 [&](const Program&, Instructions& all) { all.erase(nth(all, OpKind::attention, 3)); });
  CHECK(found.find("incomplete ring") != std::string::npos);
  found = spoilt("layers.forward", [&](const Program&, Instructions& all) {
    Instruction& second = *nth(all, OpKind::attention, 1);
    second.shape.accumulate = false;
    for (Operand& operand : second.operands)
      if (operand.access == Access::update) operand.access = Access::write;
  });
  CHECK(found != "");

  // The last step adds its part to the sum of the step before, which is on its way to another rank.
  found = spoilt("layers.backward", [&](const Program&, Instructions& all) {
    nth(all, OpKind::accumulate, 2)->operands.back() = nth(all, OpKind::accumulate, 1)->operands.back();
  });
  CHECK(found.find("wrong sum: accumulate") != std::string::npos);

  // A sum that stays a hop short of its rank: the one that was sent is put in place.
  found = spoilt("layers.backward", [&](const Program&, Instructions& all) {
    const auto put = std::ranges::find(all, OpKind::put_columns, &Instruction::op);
    put->operands.front() = nth(all, OpKind::accumulate, 2)->operands.back();
    put->operands.front().access = Access::read;
  });
  CHECK_MESSAGE(found.find("wrong sum: put_columns") != std::string::npos, found);

  // A transfer into the buffer that is still being read.
  found = spoilt("layers.forward", [&](const Program&, Instructions& all) {
    for (Instruction& i : all)
      if (i.kind == InstructionKind::receive) i.waits.clear();
  });
  CHECK(found.find("missing event: receive") != std::string::npos);

  // Attention that does not wait for what comes.
  found = spoilt("layers.backward", [&](const Program&, Instructions& all) {
    for (Instruction& i : all)
      if (of_ring(i)) i.waits.clear();
  });
  CHECK(found.find("missing event") != std::string::npos);

  // One rank that leaves out a hop.
  std::vector<Program> broken = programs;
  for (Segment& segment : broken[2].segments)
    if (segment.name == "layers.backward")
      segment.instructions.erase(std::ranges::find(segment.instructions, InstructionKind::send, &Instruction::kind));
  CHECK(faults_of(broken) != "");
}
