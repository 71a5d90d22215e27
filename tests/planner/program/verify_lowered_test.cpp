// Lowered Programs against the verifier: seeded random plans in every combination of techniques.
#include "planner/program/verify.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <utility>

#include <doctest/doctest.h>

#include "tests/planner/program/random_plans.h"

using namespace parplan;

TEST_CASE("lowered Programs of random legal plans verify, on both backends, in every precision, fused or not") {
  std::mt19937 random(20261122);
  for (const char* model : {"tiny-gpt2", "tiny-llama", "tiny-mlp"}) {
    const OpGraph graph = graph_of(model);
    for (int trial = 0; trial < 96; ++trial) {
      TrainingSpec training;
      training.global_batch = 16;
      training.sequence_length = 16;
      training.precision = std::array{DataType::fp32, DataType::bf16, DataType::fp16, DataType::tf32}[random() % 4];
      const BackendKind backend = random() % 2 == 0 ? BackendKind::cpu : BackendKind::cuda;
      const bool fuse = random() % 4 != 0;
      if (trial % 4 == 3) training.clip_norm = 0.5;
      if (trial % 5 == 4) training.optimizer = Optimizer::sgd;
      if (trial % 5 == 2) training.optimizer = Optimizer::muon;
      if (trial % 10 == 4) training.momentum = 0.9;
      constexpr int ranks[] = {1, 2, 3, 4, 6, 8};
      const ParallelSpec spec = or_with_master(random_spec(graph, training, ranks[trial % 6], random), random);
      INFO(model << ": " << describe(spec) << ", " << name(training.precision) << ", clip " << training.clip_norm
                 << ", " << name(backend) << (fuse ? ", fused" : ""));
      Job job = job_of(graph, training, spec, backend);
      job.fuse = fuse;
      std::string found;
      for (const Fault& fault : find_faults(lower_all(job))) found += write_fault(fault) + "\n";
      CHECK(found == "");
    }
  }
}

namespace {

constexpr TrainingSpec plain_training() {
  TrainingSpec training;
  training.global_batch = 16;
  training.sequence_length = 16;
  return training;
}

// Call and instruction for which `wanted` is true.
struct Spot {
  int call = 0;
  int instruction = 0;
};
std::vector<Spot> spots(const Program& program, const std::function<bool(const Instruction&)>& wanted) {
  std::vector<Spot> found;
  for (std::size_t c = 0; c < program.calls.size(); ++c) {
    const std::vector<Instruction>& instructions = program.segments[program.calls[c].segment].instructions;
    for (std::size_t i = 0; i < instructions.size(); ++i)
      if (wanted(instructions[i])) found.push_back({static_cast<int>(c), static_cast<int>(i)});
  }
  return found;
}

// Gives the call its own segment, so that planted changes stay there.
Segment& own_segment(Program& program, int call) {
  int& segment = program.calls[call].segment;
  program.segments.push_back(program.segments[segment]);
  segment = static_cast<int>(program.segments.size()) - 1;
  return program.segments.back();
}

// Makes the instruction touch no operand and meet nobody, while its events stay.
void silence(Program& program, Spot spot) {
  Instruction& instruction = own_segment(program, spot.call).instructions[spot.instruction];
  instruction.kind = InstructionKind::kernel;
  instruction.op = OpKind::fill_zero;
  instruction.operands = {{instruction.operands.front().binding, 0, 0, Access::write}};
}

bool communicates(const Program& program, const Instruction& instruction) {
  if (instruction.kind == InstructionKind::kernel) return false;
  const bool transfer = instruction.kind == InstructionKind::send || instruction.kind == InstructionKind::receive;
  return transfer || program.group(instruction.group).size() > 1;
}

}  // namespace

TEST_CASE("in lowered Programs every communication that one rank drops is missed") {
  std::mt19937 random(3);
  for (const char* model : {"tiny-gpt2", "tiny-llama"}) {
    const OpGraph graph = graph_of(model);
    for (int trial = 0; trial < 12; ++trial) {
      const TrainingSpec training = plain_training();
      const ParallelSpec spec = or_with_master(random_spec(graph, training, trial % 2 == 0 ? 4 : 8, random), random);
      const std::vector<Program> programs = lower_all(job_of(graph, training, spec));
      for (int drop = 0; drop < 5; ++drop) {
        std::vector<Program> planted = programs;
        Program& program = planted[random() % planted.size()];
        const std::vector<Spot> all = spots(program, [&](const Instruction& i) { return communicates(program, i); });
        REQUIRE(!all.empty());
        const Spot spot = all[random() % all.size()];
        INFO(model << ": " << describe(spec) << ", rank " << program.rank << ", call " << spot.call << ", instruction "
                   << spot.instruction);
        silence(program, spot);
        CHECK(!find_faults(planted).empty());
      }
    }
  }
}

TEST_CASE("what changes its buffer at the turn of a pipeline down the ranks and back, or its channel, is missed") {
  const OpGraph graph = graph_of("tiny-gpt2");
  const TrainingSpec training = plain_training();
  for (const ScheduleKind kind : {ScheduleKind::zero_bubble_v, ScheduleKind::dualpipe_v}) {
    ParallelSpec spec;
    spec.mesh.degree = {.pp = 2};
    spec.micro_batch = 2;
    spec.schedule = kind;
    spec.virtual_stages = 2;
    spec.stage_blocks = {1, 2, 1, static_cast<int>(graph.blocks.size()) - 4};
    const std::vector<Program> programs = lower_all(job_of(graph, training, spec));
    CHECK(find_faults(programs).empty());
    for (const Program& program : programs) {
      // Both uses of the tied parameter are on rank 0.
      CHECK(program.group(tied_stages).empty());
      // A micro-batch crosses between the ranks twice each way.
      CHECK(spots(program, [](const Instruction& i) { return i.kind == InstructionKind::send; }).size() == 2 * 8);
    }
    // Puts another buffer of the same kind into the calls of a task of rank 1.
    const auto moves = [&](const Task& task, const std::string& name) {
      std::vector<Program> planted = programs;
      Program& program = planted[1];
      int moved = 0;
      for (int call = task.first_call; call < task.last_call; ++call)
        for (int& buffer : program.calls[static_cast<std::size_t>(call)].buffers) {
          const std::vector<Buffer>& all = program.buffers;
          if (!all[static_cast<std::size_t>(buffer)].name.starts_with(name)) continue;
          const auto is_other = [&](const Buffer& one) {
            return one.name.starts_with(name) && one.name != all[static_cast<std::size_t>(buffer)].name;
          };
          buffer = static_cast<int>(std::ranges::find_if(all, is_other) - all.begin());
          ++moved;
        }
      CHECK(moved > 0);
      return planted;
    };
    int handed_over = 0;
    for (const Task& task : programs[1].tasks) {
      if (!task.action || task.action->stage != 1 || !flow_of(task.action->phase)) continue;
      INFO(name(kind) << ", " << write_action(*task.action));
      const bool is_forward = task.action->phase == Phase::forward;
      CHECK(!find_faults(moves(task, is_forward ? "arriving activation" : "activation gradient")).empty());
      ++handed_over;
    }
    CHECK(handed_over == 2 * 8);
    for (const auto& [from, to] :
         {std::pair(next_stage_on_return, previous_stage), std::pair(previous_stage, next_stage_on_return)}) {
      std::vector<Program> planted = programs;
      for (Segment& segment : planted[1].segments)
        for (Instruction& instruction : segment.instructions)
          if (instruction.kind == InstructionKind::send && instruction.group == from) instruction.group = to;
      CHECK(!find_faults(planted).empty());
    }
  }
}

TEST_CASE("with hybrid sharding a sum over replicas that is dropped, and a sum over the wrong group, are missed") {
  const OpGraph graph = graph_of("tiny-gpt2");
  const TrainingSpec training = plain_training();
  for (int stage = 1; stage <= 3; ++stage) {
    ParallelSpec spec;
    spec.mesh.degree = {.dp = 4};
    spec.mesh.dp_shard = 2;
    spec.zero_stage = stage;
    spec.micro_batch = 2;
    spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
    const std::vector<Program> programs = lower_all(job_of(graph, training, spec));
    CHECK(find_faults(programs).empty());
    const auto sums = [](const Instruction& i, GroupKey group) {
      return (i.kind == InstructionKind::all_reduce_sum || i.kind == InstructionKind::reduce_scatter) &&
             i.group == group && i.operands.front().bytes > 4;
    };
    const GroupKey shard = shard_group(spec.mesh);
    int planted_faults = 0;
    for (const auto& [from, to] : {std::pair(shard, shard_replicas), std::pair(shard_replicas, shard),
                                   std::pair(shard_replicas, all_along(Axis::dp))})
      for (const Spot spot : spots(programs[0], [&](const Instruction& i) { return sums(i, from); })) {
        INFO("zero " << stage << ", call " << spot.call);
        std::vector<Program> dropped = programs, moved = programs;
        for (Program& program : dropped) silence(program, spot);
        for (Program& program : moved) own_segment(program, spot.call).instructions[spot.instruction].group = to;
        CHECK(!find_faults(dropped).empty());
        CHECK(!find_faults(moved).empty());
        ++planted_faults;
      }
    CHECK(planted_faults > 6);
  }
}

TEST_CASE("a sum over the holders of copied keys and values that is dropped, moved, repeated or too wide is missed") {
  const OpGraph graph = graph_of("tiny-llama");  // two key/value heads on four tensor-parallel ranks
  for (const int dp : {1, 2})
    for (int stage = 0; stage <= (dp == 1 ? 0 : 3); ++stage)
      for (const bool sequence_parallel : {false, true}) {
        TrainingSpec training = plain_training();
        if (stage % 2 == 1) training.clip_norm = 0.5;
        ParallelSpec spec;
        spec.mesh.degree = {.dp = dp, .tp = 4};
        spec.sequence_parallel = sequence_parallel;
        spec.zero_stage = stage;
        spec.micro_batch = 2;
        spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
        const std::vector<Program> programs = lower_all(job_of(graph, training, spec));
        REQUIRE(find_faults(programs).empty());
        const GroupKey copies = holders_of_copies(2);
        CHECK(programs[2].group(copies) == std::vector{2, 3});
        const std::vector<Spot> sums = spots(
            programs[0], [&](const Instruction& i) { return i.kind != InstructionKind::kernel && i.group == copies; });
        // With ZeRO a rank's shard of a bucket may hold none of them.
        CHECK((stage > 0 || sums.size() == 4));
        CHECK(!sums.empty());
        for (const Spot spot : sums) {
          INFO("dp " << dp << " zero " << stage << ", call " << spot.call);
          const int members = static_cast<int>(programs.size()) / dp;
          const auto planted = [&](auto plant) {
            std::vector<Program> changed = programs;
            for (Program& program : changed)
              if (program.rank < members) plant(program);
            std::string text;
            for (const Fault& fault : find_faults(changed)) text += fault.what + "\n";
            return text;
          };
          const std::string dropped = planted([&](Program& program) { silence(program, spot); });
          CHECK(dropped.find("not yet summed over the ranks that hold copies of the same rows (0, 1)") !=
                std::string::npos);
          const std::string moved = planted([&](Program& program) {
            own_segment(program, spot.call).instructions[spot.instruction].group = all_along(Axis::tp);
          });
          CHECK(moved.find("dropped reduction: ") != std::string::npos);
          // Other neighbours: ranks 1 and 2 together, and 0 and 3.
          const std::string shifted = planted([&](Program& program) {
            program.set_group({Axis::tp, Members::tied},
                              program.rank % 4 == 1 || program.rank % 4 == 2 ? std::vector{1, 2} : std::vector{0, 3});
            own_segment(program, spot.call).instructions[spot.instruction].group = {Axis::tp, Members::tied};
          });
          CHECK(shifted.find("dropped reduction: ") != std::string::npos);
          const std::string repeated = planted([&](Program& program) {
            Segment& segment = own_segment(program, spot.call);
            const Instruction again = segment.instructions[spot.instruction];
            segment.instructions.insert(segment.instructions.begin() + spot.instruction, again);
          });
          CHECK(repeated.find("reduced twice: ") != std::string::npos);
          const std::string wide = planted([&](Program& program) {
            Operand& operand = own_segment(program, spot.call).instructions[spot.instruction].operands.front();
            operand.offset -= 4;
            operand.bytes += 4;
          });
          CHECK((wide.find("hold no copies") != std::string::npos || wide.find("outside") != std::string::npos));
        }
      }
}

TEST_CASE("in lowered Programs every gradient reduction that all ranks drop is missed") {
  const OpGraph graph = graph_of("tiny-gpt2");
  const TrainingSpec training = plain_training();
  for (int stage = 0; stage <= 3; ++stage) {
    ParallelSpec spec;
    spec.mesh.degree = {.dp = 2};
    spec.zero_stage = stage;
    spec.micro_batch = 4;
    spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
    const std::vector<Program> programs = lower_all(job_of(graph, training, spec));
    const std::vector<Spot> reductions = spots(programs[0], [&](const Instruction& i) {
      return (i.kind == InstructionKind::all_reduce_sum || i.kind == InstructionKind::reduce_scatter) &&
             i.operands[0].bytes > 4;
    });
    REQUIRE(reductions.size() >= graph.blocks.size());
    for (const Spot& spot : reductions) {
      std::vector<Program> planted = programs;
      for (Program& program : planted) silence(program, spot);
      const std::vector<Fault> faults = find_faults(planted);
      INFO("zero " << stage << ", call " << spot.call);
      REQUIRE(faults.size() >= 2);
      CHECK(faults[0].what.starts_with("dropped reduction: "));
    }
  }
}

TEST_CASE("with offload, a copy that is dropped, too early, of a part or to the wrong home is missed") {
  std::mt19937 random(8);
  int dropped = 0, moved = 0;
  for (const char* model : {"tiny-gpt2", "tiny-llama"}) {
    const OpGraph graph = graph_of(model);
    for (int trial = 0; trial < 18; ++trial) {
      TrainingSpec training = plain_training();
      if (trial % 2 == 0) training.precision = DataType::bf16;
      if (trial % 5 == 0) training.precision = DataType::fp16;
      if (trial % 4 != 3) training.clip_norm = 0.5;
      ParallelSpec spec;
      do {
        spec = random_spec(graph, training, trial % 2 == 0 ? 2 : 4, random);
        spec.offload = all_offloads()[1 + trial % (all_offloads().size() - 1)];
        if (spec.offload.activations != Home::device && trial % 3 != 0)
          spec.offload_layers = std::min(1 + trial % 3, most_layers_of_a_stage(graph, spec));
      } while (illegal(graph, training, spec));
      const std::vector<Program> programs = lower_all(job_of(graph, training, spec));
      std::string found;
      for (const Fault& fault : find_faults(programs)) found += write_fault(fault) + "\n";
      CHECK(found == "");
      const auto is_copy = [](const Instruction& i) { return i.kind == InstructionKind::copy; };
      // Some of many: each plants three faults in all Programs.
      const std::vector<Spot> copies = spots(programs[0], is_copy);
      for (std::size_t at = 0; at < copies.size(); at += 1 + copies.size() / 8) {
        const Spot spot = copies[at];
        // What a backward does not read, such as an embedding's table, may be missing where there
        // are no ranks to gather it from.
        const bool is_of_forward = std::ranges::any_of(programs[0].tasks, [&](const Task& task) {
          return task.first_call <= spot.call && spot.call < task.last_call && task.action &&
                 task.action->phase == Phase::forward;
        });
        const std::string& segment = programs[0].segments[programs[0].calls[spot.call].segment].name;
        if (segment == "fetch.parameters" && spec.replicas() == 1 && !is_of_forward) continue;
        INFO(model << ": " << describe(spec) << ", offload " << name(spec.offload) << ", call " << spot.call << " "
                   << segment);
        std::vector<Program> without = programs, of_a_part = programs, back = programs;
        silence(without[0], spot);
        CHECK(!find_faults(without).empty());
        for (Operand& operand : own_segment(of_a_part[0], spot.call).instructions[spot.instruction].operands)
          operand.bytes /= 2;
        CHECK(!find_faults(of_a_part).empty());
        Instruction& instruction = own_segment(back[0], spot.call).instructions[spot.instruction];
        instruction.stream = instruction.stream == Stream::to_host ? Stream::from_host : Stream::to_host;
        const std::vector<Fault> wrong = find_faults(back);
        REQUIRE(!wrong.empty());
        CHECK(wrong.front().what.starts_with("wrong home: "));
        ++dropped;
      }
      // Waits of what the copies and the host do.
      std::size_t waiting = 0;
      for (std::size_t c = 0; c < programs[0].calls.size(); ++c) {
        const Segment& segment = programs[0].segments[programs[0].calls[c].segment];
        if (!homes_of_copies(segment.stream) && segment.stream != Stream::host) continue;
        if (programs[0].calls[c].waits.empty() || ++waiting % (1 + copies.size() / 8) != 0) continue;
        std::vector<Program> planted = programs;
        planted[0].calls[c].waits.clear();
        const std::vector<Fault> faults = find_faults(planted);
        REQUIRE(!faults.empty());
        CHECK(faults.front().what.starts_with("missing event: "));
        ++moved;
      }
    }
  }
  CHECK(dropped > 100);
  CHECK(moved > 100);
}

TEST_CASE("state that is read or written in the wrong place, or for another bucket, is missed") {
  int planted_faults = 0;
  for (const DataType type : {DataType::fp32, DataType::bf16}) {
    const OpGraph graph = graph_of("tiny-gpt2");
    TrainingSpec training = plain_training();
    training.precision = type;
    ParallelSpec spec;
    spec.mesh.degree = {.dp = 2};
    spec.zero_stage = 2;
    spec.micro_batch = 4;
    spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
    spec.offload = Offload{.optimizer = Home::nvme};
    const std::vector<Program> programs = lower_all(job_of(graph, training, spec));
    REQUIRE(find_faults(programs).empty());
    const auto calls_of = [&](std::string_view name) {
      std::vector<std::size_t> calls;
      for (std::size_t c = 0; c < programs[0].calls.size(); ++c)
        if (programs[0].segments[programs[0].calls[c].segment].name == name) calls.push_back(c);
      return calls;
    };
    const std::vector<std::size_t> reads = calls_of("read.state"), writes = calls_of("write.state");
    REQUIRE(reads.size() > 4);
    REQUIRE(writes.size() == reads.size());
    const auto faults_with = [&](const auto& plant) {
      std::vector<Program> planted = programs;
      plant(planted[0]);
      const std::vector<Fault> faults = find_faults(planted);
      ++planted_faults;
      REQUIRE(!faults.empty());
      return faults.front().what;
    };
    const auto operands = [](Program& program, std::size_t call, int instruction) -> Operands& {
      return own_segment(program, static_cast<int>(call)).instructions[instruction].operands;
    };
    // The second moment goes where the first belongs.
    CHECK(faults_with([&](Program& program) {
            std::swap(operands(program, writes[1], 0)[0], operands(program, writes[1], 1)[0]);
          }).starts_with("wrong state: copy"));
    // Two equal layers' first moments, exchanged.
    CHECK(faults_with([&](Program& program) {
            std::swap(program.calls[reads[1]].buffers[0], program.calls[reads[2]].buffers[0]);
          }).starts_with("wrong state: "));
    // The write of one part is left out.
    CHECK(faults_with([&](Program& program) {
            own_segment(program, static_cast<int>(writes[2])).instructions.pop_back();
          }).starts_with("dropped write: frees "));
    // A buffer is reused too soon: the read of the bucket after does not wait for the write.
    CHECK(faults_with([&](Program& program) {
            program.calls[reads.back()].waits.clear();
          }).starts_with("missing event: copy"));
    // A write does not wait for the update, nor the update for the read.
    CHECK(faults_with([&](Program& program) {
            program.calls[writes[0]].waits.clear();
          }).starts_with("missing event: copy"));
    CHECK(faults_with([&](Program& program) {
            program.calls[writes[0] - 2].waits.clear();
          }).starts_with("missing event: "));
  }
  CHECK(planted_faults == 12);
}

TEST_CASE("parameters that are read before their update is written, and slots on NVMe reused too early, are missed") {
  const OpGraph graph = graph_of("tiny-llama");
  ParallelSpec spec;
  spec.mesh.degree = {.pp = 2};
  spec.micro_batch = 4;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size()) - 2, 2};
  spec.offload = {.optimizer = Home::host, .parameters = Home::nvme, .activations = Home::nvme};
  const std::vector<Program> programs = lower_all(job_of(graph, plain_training(), spec));
  REQUIRE(find_faults(programs).empty());
  const auto calls_of = [](const Program& program, std::string_view name) {
    std::vector<std::size_t> calls;
    for (std::size_t c = 0; c < program.calls.size(); ++c)
      if (program.segments[program.calls[c].segment].name == name) calls.push_back(c);
    return calls;
  };
  const auto has_fault = [&](std::string_view begin, const auto& plant) {
    std::vector<Program> planted = programs;
    plant(planted[0]);
    const std::vector<Fault> faults = find_faults(planted);
    return std::ranges::any_of(faults, [&](const Fault& fault) { return fault.what.starts_with(begin); });
  };
  const auto own_calls = [&](std::string_view name) { return calls_of(programs[0], name); };

  // The next step's parameters are read between the update and the write.
  CHECK(has_fault("dropped write: copy", [&](Program& program) {
    const std::size_t written = own_calls("write.state").front();
    const int file = program.calls[written].buffers.back();
    const std::vector<std::size_t> reads = own_calls("read.parameters");
    const auto read =
        std::ranges::find_if(reads, [&](std::size_t call) { return program.calls[call].buffers.front() == file; });
    REQUIRE(read != reads.end());
    Call early = program.calls[*read];
    early.records.reset();
    program.calls.insert(program.calls.begin() + static_cast<std::ptrdiff_t>(written), early);
    ++program.tasks.back().last_call;
  }));
  // The parameters are not written.
  CHECK(has_fault("dropped write: frees", [&](Program& program) {
    own_segment(program, static_cast<int>(own_calls("write.state").front())).instructions.pop_back();
  }));
  // Another bucket's are written instead.
  CHECK(has_fault("wrong state: copy", [&](Program& program) {
    const std::vector<std::size_t> writes = own_calls("write.state");
    program.calls[writes[1]].buffers.back() = program.calls[writes[2]].buffers.back();
  }));

  // A micro-batch's forward writes over what the one before has left for its backward.
  const std::vector<std::size_t> writes = own_calls("write.saved"), reads = own_calls("read.saved");
  int reused = 0;
  for (std::size_t w = 1; w < writes.size(); ++w) {
    const int own = programs[0].calls[writes[w]].buffers.back();
    for (std::size_t before = 0; before < w; ++before) {
      const int other = programs[0].calls[writes[before]].buffers.back();
      const bool is_read = std::ranges::any_of(reads, [&](std::size_t read) {
        return read > writes[before] && read < writes[w] && programs[0].calls[read].buffers.front() == other;
      });
      if (own == other || is_read) continue;
      CHECK(has_fault("lost value: copy", [&](Program& program) { program.calls[writes[w]].buffers.back() = other; }));
      ++reused;
      break;
    }
  }
  CHECK(reused > 2);
  // One buffer on the host for two reads: the second comes before the first is taken on.
  const std::vector<std::size_t> brought = own_calls("read.parameters");
  CHECK(has_fault("lost value: copy", [&](Program& program) {
    program.calls[brought[1]].buffers.back() = program.calls[brought[0]].buffers.back();
  }));
  // A read that does not wait for the buffer, or for the write, and a copy that does not wait for
  // it.
  for (const std::string_view name : {"read.saved", "fetch.saved", "fetch.parameters", "write.saved"})
    CHECK(has_fault("missing event: copy", [&](Program& program) {
      for (const std::size_t call : own_calls(name)) program.calls[call].waits.clear();
    }));
}

TEST_CASE("lowered Programs of random legal plans with sums of gradients on NVMe verify, in every precision") {
  std::mt19937 random(20261126);
  int several = 0, sharded = 0, clipped = 0;
  std::set<ScheduleKind> schedules;
  for (const char* model : {"tiny-gpt2", "tiny-llama", "tiny-mlp"}) {
    const OpGraph graph = graph_of(model);
    for (const Offload& offload : all_offloads()) {
      if (offload.gradients != Home::nvme) continue;
      TrainingSpec training = plain_training();
      training.precision = std::array{DataType::fp32, DataType::bf16, DataType::fp16}[random() % 3];
      if (random() % 2 == 0) training.clip_norm = 0.5;
      if (random() % 4 == 0) training.optimizer = Optimizer::sgd;
      ParallelSpec spec;
      do {
        spec = random_spec(graph, training, std::array{1, 2, 4, 8}[random() % 4], random);
        spec.offload = offload;
      } while (illegal(graph, training, spec));
      INFO(model << ": " << describe(spec) << ", " << name(training.precision) << ", offload " << name(offload));
      const BackendKind backend = random() % 2 == 0 ? BackendKind::cpu : BackendKind::cuda;
      std::string found;
      for (const Fault& fault : find_faults(lower_all(job_of(graph, training, spec, backend))))
        found += write_fault(fault) + "\n";
      CHECK(found == "");
      several += micro_batches(spec, training) > 1;
      sharded += spec.zero_stage >= 2;
      clipped += training.clip_norm > 0.0;
      schedules.insert(spec.schedule);
    }
  }
  for (const int count : {several, sharded, clipped}) CHECK(count > 10);
  CHECK(schedules.size() > 2);
}

TEST_CASE("sums of gradients that miss their file, read it too early, or are another bucket's are missed") {
  int dropped = 0, raced = 0, early = 0, swapped = 0, squared = 0, shared = 0;
  const OpGraph graph = graph_of("tiny-llama");
  struct ShortPlan {
    int pp, dp, tp, zero;
    ScheduleKind schedule;
    bool brings;  // parameters from a file, too
  };
  constexpr ScheduleKind plain = ScheduleKind::one_f_one_b;
  for (const ShortPlan& of : {ShortPlan{1, 1, 1, 0, plain, false}, ShortPlan{1, 2, 4, 1, plain, false},
                              ShortPlan{1, 2, 1, 3, plain, false}, ShortPlan{1, 2, 1, 3, plain, true},
                              ShortPlan{2, 1, 1, 0, ScheduleKind::zero_bubble_h1, false}}) {
    TrainingSpec training = plain_training();
    training.clip_norm = 0.5;
    if (of.dp == 2) training.precision = DataType::bf16;
    ParallelSpec spec;
    spec.mesh.degree = {.pp = of.pp, .dp = of.dp, .tp = of.tp};
    spec.zero_stage = of.zero;
    spec.schedule = of.schedule;
    spec.micro_batch = 4;
    spec.stage_blocks = of.pp == 1 ? std::vector{static_cast<int>(graph.blocks.size())}
                                   : std::vector{static_cast<int>(graph.blocks.size()) - 2, 2};
    spec.offload = {.optimizer = of.dp == 2 ? Home::nvme : Home::host,
                    .gradients = Home::nvme,
                    .parameters = of.brings ? Home::nvme : Home::device};
    const std::vector<Program> programs = lower_all(job_of(graph, training, spec));
    const Program& own = programs[0];
    std::string found;
    for (const Fault& fault : find_faults(programs)) found += write_fault(fault) + "\n";
    INFO(describe(spec));
    REQUIRE(found == "");
    const auto name_of = [&](std::size_t call) { return std::string_view(own.segments[own.calls[call].segment].name); };
    const auto calls_of = [&](std::string_view name) {
      std::vector<std::size_t> calls;
      for (std::size_t c = 0; c < own.calls.size(); ++c)
        if (name_of(c) == name) calls.push_back(c);
      return calls;
    };
    // The first fault; nothing where there is none.
    const auto fault_with = [&](const auto& plant) {
      std::vector<Program> planted = programs;
      plant(planted[0]);
      const std::vector<Fault> faults = find_faults(planted);
      return faults.empty() ? std::string() : faults.front().what;
    };
    const std::vector<std::size_t> reads = calls_of("read.gradients"), writes = calls_of("write.gradients");
    REQUIRE(reads.size() > 4);
    REQUIRE(writes.size() > 4);

    // A copy on the way, either way, that is left out, and one that waits for nothing.
    for (const char* name : {"read.gradients", "write.gradients", "offload.sums", "fetch.gradients"})
      for (const std::size_t call : calls_of(name)) {
        INFO("call " << call << " " << name);
        const std::string without =
            fault_with([&](Program& program) { silence(program, {static_cast<int>(call), 0}); });
        CHECK(without != "");
        if (std::string_view(name) == "write.gradients")
          CHECK((without.starts_with("dropped write: ") || without.starts_with("lost value: ")));
        ++dropped;
        if (own.calls[call].waits.empty()) continue;
        CHECK(fault_with([&](Program& program) {
                program.calls[call].waits.clear();
              }).starts_with("missing event: "));
        ++raced;
      }
    // The read of a sum before its write.
    for (const std::size_t read : reads) {
      const int file = own.calls[read].buffers.front();
      std::optional<std::size_t> write;  // the last one before it
      for (const std::size_t other : writes)
        if (other < read && own.calls[other].buffers.back() == file) write = other;
      REQUIRE(write);
      CHECK(fault_with([&](Program& program) {
              Call moved = program.calls[read];
              moved.waits.clear();
              program.calls.erase(program.calls.begin() + static_cast<std::ptrdiff_t>(read));
              program.calls.insert(program.calls.begin() + static_cast<std::ptrdiff_t>(*write), moved);
              for (Task& task : program.tasks)
                for (int* end : {&task.first_call, &task.last_call})
                  if (*end > static_cast<int>(*write) && *end <= static_cast<int>(read)) ++*end;
            }).starts_with("dropped write: copy"));
      ++early;
    }
    // Two equal layers' sums, exchanged: written to one another's file, or read from it for a
    // backward or for the update.
    const auto next_like = [&](const std::vector<std::size_t>& calls, std::size_t i, std::size_t file) {
      const Call& call = own.calls[calls[i]];
      std::size_t j = i + 1;
      while (j < calls.size() && (own.calls[calls[j]].segment != call.segment ||
                                  own.calls[calls[j]].buffers[file] == call.buffers[file]))
        ++j;
      return j;
    };
    for (const auto& [calls, file] : {std::pair(&reads, 0), std::pair(&writes, 1)})
      for (std::size_t i = 0; i + 1 < calls->size(); ++i) {
        const std::size_t j = next_like(*calls, i, static_cast<std::size_t>(file));
        if (j == calls->size()) continue;
        INFO(name_of((*calls)[i]) << " of calls " << (*calls)[i] << " and " << (*calls)[j]);
        const std::string what = fault_with([&](Program& program) {
          std::swap(program.calls[(*calls)[i]].buffers[static_cast<std::size_t>(file)],
                    program.calls[(*calls)[j]].buffers[static_cast<std::size_t>(file)]);
        });
        // The norm is that of all, whichever comes first.
        const std::size_t taker = [&] {
          std::size_t c = (*calls)[i] + 1;
          const int on_host = own.calls[(*calls)[i]].buffers[1];
          while (std::ranges::find(own.calls[c].buffers, on_host) == own.calls[c].buffers.end()) ++c;
          return c;
        }();
        if (file == 0 && name_of(taker) == "gradient_norm") continue;
        CHECK((what.starts_with("wrong sum: ") || what.starts_with("wrong state: ") ||
               what.starts_with("dropped write: ") || what.starts_with("lost value: ")));
        ++swapped;
      }
    // The norm takes one bucket's sum twice, and another's not at all.
    for (std::size_t i = 0; i + 1 < reads.size(); ++i) {
      const std::size_t j = next_like(reads, i, 0);
      const auto norm_after = [&](std::size_t read) {
        for (std::size_t c = read + 1; c < own.calls.size(); ++c)
          if (std::ranges::find(own.calls[c].buffers, own.calls[read].buffers[1]) != own.calls[c].buffers.end())
            return name_of(c) == "gradient_norm";
        return false;
      };
      if (j == reads.size() || !norm_after(reads[i]) || !norm_after(reads[j])) continue;
      CHECK(fault_with([&](Program& program) {
              program.calls[reads[j]].buffers[0] = program.calls[reads[i]].buffers[0];
            }).starts_with("summed twice: "));
      ++squared;
    }
    // A buffer on the host is read into before it is taken on.
    for (std::size_t i = 0; i + 1 < reads.size(); ++i) {
      if (reads[i + 1] != reads[i] + 1) continue;
      CHECK(fault_with([&](Program& program) {
              program.calls[reads[i + 1]].buffers[1] = program.calls[reads[i]].buffers[1];
            }).starts_with("lost value: copy"));
      ++shared;
    }
  }
  MESSAGE(dropped << " dropped, " << raced << " raced, " << early << " early, " << swapped << " swapped, " << squared
                  << " squared, " << shared << " shared");
  for (const int count : {dropped, raced, early, swapped}) CHECK(count > 40);
  for (const int count : {squared, shared}) CHECK(count > 4);
}

TEST_CASE("a backward that does not wait for what it fetches, and a buffer that is free too early, are missed") {
  int raced = 0, freed = 0;
  for (const ScheduleKind schedule : {ScheduleKind::one_f_one_b, ScheduleKind::zero_bubble_h1}) {
    const OpGraph graph = graph_of("tiny-llama");
    const TrainingSpec training = plain_training();
    ParallelSpec spec;
    spec.mesh.degree = {.pp = 2, .tp = 2};
    spec.schedule = schedule;
    spec.micro_batch = 4;
    spec.stage_blocks = {static_cast<int>(graph.blocks.size()) - 3, 3};
    spec.offload = Offload{.activations = Home::host};
    const std::vector<Program> programs = lower_all(job_of(graph, training, spec));
    REQUIRE(find_faults(programs).empty());
    const Program& own = programs[2];  // of the last stage
    const auto stream_of = [&](std::size_t call) { return own.segments[own.calls[call].segment].stream; };
    std::set<int> fetched;  // events
    for (std::size_t c = 0; c < own.calls.size(); ++c) {
      INFO(name(schedule) << ", call " << c << " " << own.segments[own.calls[c].segment].name);
      if (stream_of(c) == Stream::from_host && own.calls[c].records) fetched.insert(*own.calls[c].records);
      if (stream_of(c) == Stream::compute) {
        std::vector<Program> planted = programs;
        EventIds& waits = planted[2].calls[c].waits;
        const auto dropped = std::ranges::remove_if(waits, [&](int event) { return fetched.contains(event); });
        if (dropped.empty()) continue;
        waits.erase(dropped.begin(), dropped.end());
        const std::vector<Fault> faults = find_faults(planted);
        REQUIRE(!faults.empty());
        CHECK(faults.front().what.starts_with("missing event: "));
        ++raced;
      }
      if (stream_of(c) == Stream::to_host) {
        // The forward frees what is still to be copied.
        std::vector<Program> planted = programs;
        planted[2].calls[c - 1].frees.push_back(planted[2].calls[c].buffers.front());
        const std::vector<Fault> faults = find_faults(planted);
        REQUIRE(!faults.empty());
        CHECK(faults.front().what.starts_with("use after free: copy"));
        ++freed;
      }
    }
  }
  CHECK(raced > 5);
  CHECK(freed > 5);
}

TEST_CASE("what a master and its replicas exchange is missed where it is dropped, changed or sent twice") {
  int planted_faults = 0;
  for (const char* model : {"tiny-gpt2", "tiny-llama"}) {
    const OpGraph graph = graph_of(model);
    for (const std::int64_t micro_batch : {2, 4}) {
      TrainingSpec training = plain_training();
      training.clip_norm = 0.5;
      ParallelSpec spec;
      spec.mesh.degree = {.dp = 4};
      spec.dp_method = DataMethod::master;
      spec.micro_batch = micro_batch;
      spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
      const std::vector<Program> programs = lower_all(job_of(graph, training, spec));
      std::string found;
      for (const Fault& fault : find_faults(programs)) found += write_fault(fault) + "\n";
      CHECK(found == "");
      const auto exchanged = [](const Instruction& i) { return has_root(i.kind); };
      for (const Spot spot : spots(programs[1], exchanged)) {
        INFO(model << ", call " << spot.call << ", instruction " << spot.instruction);
        std::vector<Program> alone = programs, less = programs;
        silence(alone[1], spot);
        CHECK(!find_faults(alone).empty());
        own_segment(less[1], spot.call).instructions[spot.instruction].operands.front().bytes /= 2;
        CHECK(!find_faults(less).empty());
        ++planted_faults;
      }
      // Broadcasts and reductions dropped by everybody.
      for (const InstructionKind kind : {InstructionKind::broadcast, InstructionKind::reduce_sum}) {
        const auto is_kind = [&](const Instruction& i) { return i.kind == kind && i.operands.front().bytes > 0; };
        const std::size_t count = spots(programs[0], is_kind).size();
        for (std::size_t n = 0; n < count; ++n) {
          std::vector<Program> dropped = programs;
          for (Program& program : dropped) silence(program, spots(programs[program.rank], is_kind)[n]);
          const std::vector<Fault> faults = find_faults(dropped);
          // The parameters of a later micro-batch are those of the first.
          if (kind == InstructionKind::broadcast && n >= programs[0].buckets.size()) continue;
          REQUIRE(!faults.empty());
          CHECK(faults.front().what.starts_with("dropped "));
          ++planted_faults;
        }
      }
    }
  }
  CHECK(planted_faults > 60);
}

TEST_CASE("a kernel of the host on memory of the device is found") {
  const OpGraph graph = graph_of("tiny-gpt2");
  ParallelSpec spec;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  std::vector<Program> programs = lower_all(job_of(graph, plain_training(), spec));
  const Spot spot = spots(programs[0], [](const Instruction& i) { return i.op == OpKind::adamw; }).front();
  own_segment(programs[0], spot.call).instructions[spot.instruction].home = Home::host;
  REQUIRE(!find_faults(programs).empty());
  CHECK(find_faults(programs).front().what.starts_with("wrong home: adamw 'adamw' on stream compute uses 'gradients"));
}

TEST_CASE("in lowered Programs waits order what streams would race for") {
  // Waits order whole buffers, so some of them guard bytes that no two calls share; most are
  // needed.
  std::mt19937 random(4);
  int waits = 0;
  int missed = 0;
  const OpGraph graph = graph_of("tiny-llama");
  for (int trial = 0; trial < 8; ++trial) {
    const TrainingSpec training = plain_training();
    const ParallelSpec spec = or_with_master(random_spec(graph, training, 4, random), random);
    const std::vector<Program> programs = lower_all(job_of(graph, training, spec));
    for (std::size_t c = 0; c < programs[0].calls.size(); ++c)
      for (std::size_t w = 0; w < programs[0].calls[c].waits.size(); ++w) {
        std::vector<Program> planted = programs;
        EventIds& of_call = planted[0].calls[c].waits;
        of_call.erase(of_call.begin() + static_cast<std::ptrdiff_t>(w));
        ++waits;
        const std::vector<Fault> faults = find_faults(planted);
        if (faults.empty()) continue;
        ++missed;
        CHECK(faults[0].what.starts_with("missing event: "));
      }
  }
  MESSAGE(missed << " of " << waits << " waits are missed when dropped");
  CHECK(missed * 10 >= waits * 9);
}

TEST_CASE("in Programs with backwards in two parts, parts that are missing, too early or reduced too early are found") {
  const OpGraph graph = graph_of("tiny-llama");
  const TrainingSpec training = plain_training();
  ParallelSpec spec;
  spec.mesh.degree = {.pp = 2, .dp = 2};
  spec.micro_batch = 2;
  spec.stage_blocks = {2, static_cast<int>(graph.blocks.size()) - 2};
  Job job = job_of(graph, training, spec);
  const auto list = [](const std::string& text) {
    std::vector<Action> actions;
    for (std::size_t at = 0; at < text.size(); at = text.find(' ', at) + 1) {
      actions.push_back(parse_action(text.substr(at, text.find(' ', at) - at)));
      if (text.find(' ', at) == std::string::npos) break;
    }
    return actions;
  };
  job.schedule = one_stage_a_rank(
      {list("0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"), list("1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3")});
  const std::vector<Program> programs = lower_all(job);
  REQUIRE(find_faults(programs).empty());
  const auto task_of = [](Program& program, const Action& action) -> Task& {
    return *std::ranges::find(program.tasks, std::optional(action), &Task::action);
  };
  // The faults of what is planted into the Programs of stage 1.
  const auto found = [&](auto plant) {
    std::vector<Program> planted = programs;
    for (Program& program : planted)
      if (program.pipeline_rank == 1) plant(program);
    std::string text;
    for (const Fault& fault : find_faults(planted)) text += fault.what + "\n";
    return text;
  };
  // The call of a task that runs a layer's Segment of this name.
  const auto call_of = [&](Program& program, const Action& action, const char* segment) {
    int call = task_of(program, action).first_call;
    while (program.segments[program.calls[call].segment].name != segment) ++call;
    return call;
  };
  for (const int m : {0, 2, 3}) {
    INFO("micro-batch " << m);
    const Action inputs{1, Phase::backward_inputs, m}, weights{1, Phase::backward_weights, m};
    const std::string missing = found([&](Program& program) {
      const int call = call_of(program, weights, "layers.backward_weights");
      program.calls[call].frees.clear();
      for (int i = 0; i < static_cast<int>(program.segments[program.calls[call].segment].instructions.size()); ++i)
        silence(program, {call, i});
    });
    CHECK(missing.find("lost value: ") != std::string::npos);
    const std::string early = found([&](Program& program) {
      std::swap(program.calls[call_of(program, inputs, "layers.backward_inputs")],
                program.calls[call_of(program, weights, "layers.backward_weights")]);
    });
    CHECK(early.find(m == 0 ? "use before definition: " : "use after free: ") != std::string::npos);
  }
  const std::string reduced = found([&](Program& program) {
    const int call = call_of(program, {1, Phase::backward_weights, 3}, "layers.backward_weights");
    REQUIRE(program.segments[program.calls[call + 1].segment].name == "data.all_reduce_sum.gradients");
    std::swap(program.calls[call], program.calls[call + 1]);
    program.calls[call].waits.clear();
  });
  INFO(reduced);
  CHECK(reduced.find("dropped reduction: ") != std::string::npos);
}
