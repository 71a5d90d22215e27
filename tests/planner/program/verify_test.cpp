#include "planner/base/enum_index.h"
#include "planner/program/verify.h"

#include <algorithm>

#include <doctest/doctest.h>

#include "planner/base/error.h"
#include "tests/planner/program/small_programs.h"

using namespace parplan;

namespace {

// Every fault on its own line; "" when there is none.
std::string faults_of(const std::vector<Program>& programs) {
  std::string text;
  for (const Fault& fault : find_faults(programs)) text += (text.empty() ? "" : "\n") + write_fault(fault);
  return text;
}

Instruction& only_instruction(Program& program, int call) {
  const int segment = program.calls[call].segment;
  return program.segments[segment].instructions.back();
}

// One rank with two buffers of 64 B and nothing else.
SmallProgram scratch_pad() {
  SmallProgram p(0);
  p.buffer("a", MemoryCategory::activations, 64);
  p.buffer("b", MemoryCategory::activations, 64);
  return p;
}
std::vector<Program> alone(SmallProgram& p) {
  p.task(std::nullopt);
  return {p.program};
}

// Four ranks as a square: tensor groups (0, 1) and (2, 3), data groups (0, 2) and (1, 3). Each rank
// sums "a" over one and "b" over the other, the ranks of `data_first` over the data group first.
std::vector<Program> square(const std::vector<int>& data_first) {
  std::vector<Program> programs;
  for (int rank = 0; rank < 4; ++rank) {
    SmallProgram p(rank);
    p.group(all_along(Axis::tp), {rank / 2 * 2, rank / 2 * 2 + 1}).group(all_along(Axis::dp), {rank % 2, rank % 2 + 2});
    p.buffer("a", MemoryCategory::buffers, 64, true);
    p.buffer("b", MemoryCategory::buffers, 64, true);
    const auto tensor = [&] {
      p.communicate(InstructionKind::all_reduce_sum, all_along(Axis::tp), Stream::tp, "a", {updates(0, 0, 64)});
    };
    const auto data = [&] {
      p.communicate(InstructionKind::all_reduce_sum, all_along(Axis::dp), Stream::dp, "b", {updates(1, 0, 64)});
    };
    const bool crossed = std::find(data_first.begin(), data_first.end(), rank) != data_first.end();
    if (crossed) data();
    tensor();
    if (!crossed) data();
    p.task(std::nullopt);
    programs.push_back(p.program);
  }
  return programs;
}

// Two ranks that only send to and receive from each other, in the order given; on one stream, or on
// one each.
enum class Streams { one, two };
std::vector<Program> exchange(bool send_first, Streams streams) {
  std::vector<Program> programs;
  for (int rank = 0; rank < 2; ++rank) {
    SmallProgram p(rank);
    const GroupKey peer = rank == 0 ? next_stage : previous_stage;
    p.group(peer, {1 - rank});
    p.buffer("out", MemoryCategory::buffers, 64, true);
    p.buffer("in", MemoryCategory::buffers, 64);
    const Stream sending = rank == 0 ? Stream::send_next : Stream::send_previous;
    const Stream receiving = streams == Streams::one ? sending
                             : rank == 0             ? Stream::receive_next
                                                     : Stream::receive_previous;
    const auto send = [&] { p.communicate(InstructionKind::send, peer, sending, "send", {reads(0, 0, 64)}); };
    if (send_first) send();
    p.communicate(InstructionKind::receive, peer, receiving, "receive", {writes(1, 0, 64)});
    if (!send_first) send();
    p.task(std::nullopt);
    programs.push_back(p.program);
  }
  return programs;
}

}  // namespace

TEST_CASE("small Programs written by hand verify") {
  CHECK(faults_of(data_parallel_job()) == "");
  CHECK(faults_of(zero_job()) == "");
  CHECK(faults_of(pipeline_job()) == "");
  CHECK(faults_of(square({})) == "");
  CHECK(faults_of(exchange(true, Streams::two)) == "");
  CHECK_NOTHROW(verify(pipeline_job()));
}

// Structure ---------------------------------------------------------------------------------------

TEST_CASE("a Program in another rank's place is refused") {
  CHECK(faults_of({data_parallel_program(1), data_parallel_program(0)}) ==
        "rank 0: the Program in place 0 is of rank 1\nrank 1: the Program in place 1 is of rank 0");
}

TEST_CASE("an operand out of its buffer's range is found") {
  std::vector<Program> programs = data_parallel_job();
  only_instruction(programs[1], data_parallel::forward).operands[1].offset = 32;
  CHECK(faults_of(programs) ==
        "rank 1, call 1, instruction 1: operand out of range: embedding 'embedding' uses bytes [32, 96) of 'table', "
        "which has 64 B");
}

TEST_CASE("buffers that overlap are found, neighbours are not") {
  std::vector<Program> programs = data_parallel_job();
  programs[0].buffers[data_parallel::gradients].offset = 63;
  CHECK(faults_of(programs) == "rank 0: buffers overlap: 'table' at [0, 64) and 'gradients' at [63, 127)");
}

TEST_CASE("a buffer within another is found behind a third") {
  SmallProgram p = scratch_pad();
  p.program.buffers[1].bytes = 16;
  p.buffer("c", MemoryCategory::buffers, 8);
  p.program.buffers[1].offset = 8;
  p.program.buffers[2].offset = 40;
  CHECK(faults_of(alone(p)) ==
        "rank 0: buffers overlap: 'a' at [0, 64) and 'b' at [8, 24)\nrank 0: buffers overlap: 'a' at [0, 64) and 'c' "
        "at [40, 48)");
}

TEST_CASE("a buffer outside the arena is found") {
  std::vector<Program> programs = data_parallel_job();
  programs[0].arena_bytes.device -= 1;
  CHECK(faults_of(programs) == "rank 0: buffer 'saved' at [256, 336) is outside the arena of 335 B");
}

TEST_CASE("buffers of different homes do not overlap, each lies in the arena of its own") {
  std::vector<Program> programs = data_parallel_job();
  Program& program = programs[0];
  Buffer& first = program.buffers[data_parallel::first_moment];
  Buffer& second = program.buffers[data_parallel::second_moment];
  for (Buffer* moment : {&first, &second}) moment->home = Home::host;
  CHECK(faults_of(programs) ==
        "rank 0: buffer 'first moment' at [128, 192) is outside the arena of 0 B on the host\n"
        "rank 0: buffer 'second moment' at [192, 256) is outside the arena of 0 B on the host");
  program.arena_bytes.host = 128;
  first.offset = 0;
  second.offset = 64;
  CHECK(faults_of(programs) == "");
  second.offset = 63;
  CHECK(faults_of(programs) ==
        "rank 0: buffers overlap on the host: 'first moment' at [0, 64) and 'second moment' at [63, 127)");
  second.offset = 65;
  CHECK(faults_of(programs) == "rank 0: buffer 'second moment' at [65, 129) is outside the arena of 128 B on the host");
  second.offset = 64;
  first.home = Home::device;  // where 'table' lies
  CHECK(faults_of(programs) == "rank 0: buffers overlap: 'table' at [0, 64) and 'first moment' at [0, 64)");
}

TEST_CASE("indices out of range are found before they are used") {
  std::vector<Program> programs = data_parallel_job();
  programs[0].calls[0].segment = 9;
  programs[0].calls[1].buffers[0] = 7;
  programs[0].calls[2].frees = {-1};
  programs[0].calls[3].buffers.clear();
  only_instruction(programs[0], data_parallel::optimizer).operands[0].binding = 4;
  programs[0].loss_buffer = 5;
  CHECK(faults_of(programs) ==
        "rank 0: the loss is buffer 5 of 5\n"
        "rank 0, call 0: calls segment 9 of 5\n"
        "rank 0, call 1: binds buffer 7 of 5\n"
        "rank 0, call 2: frees buffer -1 of 5\n"
        "rank 0, call 3: binds 0 buffers to the 1 bindings of 'reduce'\n"
        "rank 0, call 4, instruction 0: adamw 'optimizer' uses binding 4 of 4");
}

TEST_CASE("tasks hold every call once, in order") {
  std::vector<Program> programs = data_parallel_job();
  programs[0].tasks[1].first_call = 2;
  programs[1].tasks.pop_back();
  CHECK(faults_of(programs) ==
        "rank 0: a task has calls [2, 2) where call 1 is next\nrank 1: the tasks hold 4 calls of 5");
}

TEST_CASE("operands fit their op's row") {
  std::vector<Program> programs = data_parallel_job();
  only_instruction(programs[0], data_parallel::optimizer).operands.pop_back();
  only_instruction(programs[1], data_parallel::reduce).operands[0].access = Access::read;
  CHECK(faults_of(programs) ==
        "rank 0, call 4, instruction 0: the operands of adamw 'optimizer' do not fit its row\n"
        "rank 1, call 3, instruction 0: the operands of all_reduce_sum 'reduce' do not fit its kind");
}

TEST_CASE("optional operands and workspaces are told apart by the shape") {
  // 4 operands: gradient, input, weight gradient, and either bias gradient or workspace. Undefined
  // contents of the workspace may be read, those of the bias gradient may not.
  const auto job = [](bool bias) {
    SmallProgram p = scratch_pad();
    p.compute(OpKind::fill_zero, "fill_zero", {writes(0, 0, 64)});
    p.compute(OpKind::linear_weight_gradient, "linear",
              {reads(0, 0, 16), reads(0, 16, 16), updates(0, 32, 16), updates(1, 0, 64)});
    p.program.segments.back().instructions[0].shape.bias = bias;
    return alone(p);
  };
  CHECK(faults_of(job(false)) == "");
  CHECK(faults_of(job(true)) ==
        "rank 0, call 1, instruction 0: use before definition: linear_weight_gradient 'linear' reads bytes [0, 64) of "
        "'b', which nothing "
        "has written");
}

TEST_CASE("groups are ascending and hold the rank") {
  std::vector<Program> programs = data_parallel_job();
  programs[0].set_group(all_along(Axis::dp), {1, 0});
  programs[1].set_group(all_along(Axis::dp), {0});
  CHECK(faults_of(programs) ==
        "rank 0: the data group (1, 0) is not an ascending list of ranks of a job of 2\n"
        "rank 1, call 3, instruction 0: all_reduce_sum 'reduce' over the data group (0), which this rank is not in");
}

TEST_CASE("sends and receives are with one neighbour") {
  std::vector<Program> programs = pipeline_job();
  only_instruction(programs[0], first_stage::send).group = all_along(Axis::pp);
  only_instruction(programs[1], second_stage::send).group = next_stage;
  CHECK(faults_of(programs) ==
        "rank 0, call 2, instruction 0: send 'send' with the pipeline group (0, 1): not one neighbouring rank\n"
        "rank 1, call 3, instruction 0: send 'send' with the next group (): not one neighbouring rank");
}

TEST_CASE("an all-gather takes this rank's chunk, from its place when in place") {
  std::vector<Program> programs = zero_job();
  only_instruction(programs[0], zero::gather).operands[0].bytes = 28;
  only_instruction(programs[1], zero::gather).operands[0].offset = 0;
  CHECK(faults_of(programs) ==
        "rank 0, call 5, instruction 0: all_gather 'gather' of 64 B gathers a shard of 28 B where member 0 of 2 holds "
        "32 B\n"
        "rank 1, call 5, instruction 0: all_gather 'gather' gathers in place from byte 0 of the whole where member 1 "
        "of 2 holds bytes "
        "from 32");
}

// Two ranks that exchange halves of a buffer.
std::vector<Program> exchange_job() {
  std::vector<Program> programs;
  for (const int rank : {0, 1}) {
    SmallProgram p = scratch_pad();
    p.program.rank = rank;
    p.group(all_along(Axis::tp), {0, 1});
    p.compute(OpKind::fill_zero, "zero", {writes(0, 0, 64)});
    p.communicate(InstructionKind::all_to_all, all_along(Axis::tp), Stream::tp, "exchange",
                  {reads(0, 0, 64), writes(1, 0, 64)});
    p.compute(OpKind::transpose_blocks, "unpack", {reads(1, 0, 64), writes(0, 0, 64)});
    p.task(std::nullopt);
    p.program.events = 2;
    SmallProgram::wait(p.program.calls[0], 0, p.program.calls[1]);
    SmallProgram::wait(p.program.calls[1], 1, p.program.calls[2]);
    programs.push_back(p.program);
  }
  return programs;
}

TEST_CASE("an all-to-all has equal chunks for all members, apart from where it receives") {
  CHECK(faults_of(exchange_job()) == "");
  std::vector<Program> programs = exchange_job();
  only_instruction(programs[0], 1).operands[0].bytes = 32;
  only_instruction(programs[1], 1).operands[1].access = Access::update;
  CHECK(faults_of(programs) ==
        "rank 0, call 1, instruction 0: all_to_all 'exchange' sends 32 B and receives 64 B\n"
        "rank 1, call 1, instruction 0: the operands of all_to_all 'exchange' do not fit its kind");
  programs = exchange_job();
  for (Operand& operand : only_instruction(programs[0], 1).operands) operand.bytes = 60;
  only_instruction(programs[1], 1).operands[1] = {0, 0, 64, Access::write};
  CHECK(faults_of(programs) ==
        "rank 0, call 1, instruction 0: all_to_all 'exchange' of 60 B (fp32) has no equal chunks for 2 members\n"
        "rank 1, call 1, instruction 0: all_to_all 'exchange' receives where it sends from");
}

TEST_CASE("an all-to-all whose members differ, or that overtakes what it reads, is found") {
  std::vector<Program> programs = exchange_job();
  for (Operand& operand : only_instruction(programs[1], 1).operands) operand.bytes = 32;
  only_instruction(programs[1], 2).operands = {{0, 0, 32, Access::read}, {1, 0, 32, Access::write}};
  CHECK(faults_of(programs) ==
        "rank 0, call 1, instruction 0: collectives that do not match: rank 0 launches all_to_all 'exchange' of 64 B "
        "(fp32) over its tensor group (0, 1) in call 1 where rank 1 launches all_to_all 'exchange' of 32 B (fp32) over "
        "its tensor group (0, 1) in call 1");
  programs = exchange_job();
  programs[0].calls[1].waits.clear();
  programs[1].calls[2].waits.clear();
  CHECK(faults_of(programs) ==
        "rank 0, call 1, instruction 0: missing event: all_to_all 'exchange' on stream tensor reads bytes [0, 64) of "
        "'a' without waiting for fill_zero 'zero' of call 0 on stream compute, which writes them\n"
        "rank 1, call 2, instruction 0: missing event: transpose_blocks 'unpack' on stream compute reads bytes [0, 64) "
        "of 'b' without waiting for all_to_all 'exchange' of call 1 on stream tensor, which writes them");
}

TEST_CASE("events are recorded once, and before they are waited for") {
  std::vector<Program> programs = data_parallel_job();
  programs[0].calls[data_parallel::forward].waits = {1};
  programs[0].calls[data_parallel::optimizer].records = 0;
  programs[1].calls[data_parallel::optimizer].waits = {2};
  CHECK(faults_of(programs) ==
        "rank 0, call 1: missing event: 'forward' waits for event 1, which no call before it records\n"
        "rank 0, call 4: 'optimizer' records event 0 a second time\n"
        "rank 1, call 4: missing event: 'optimizer' waits for event 2, which no call before it records");
}

TEST_CASE("events of a segment are recorded once, and before they are waited for") {
  SmallProgram p = scratch_pad();
  p.call("work", Stream::compute);
  p.kernel(OpKind::fill_zero, "first", {writes(0, 0, 64)}).waits = {0};
  p.kernel(OpKind::fill_zero, "second", {writes(0, 0, 64)}).records = 0;
  p.kernel(OpKind::fill_zero, "third", {writes(0, 0, 64)}).records = 0;
  p.kernel(OpKind::fill_zero, "fourth", {writes(0, 0, 64)}).records = 1;
  p.program.segments[0].events = 1;
  CHECK(faults_of(alone(p)) ==
        "rank 0, call 0, instruction 0: missing event: fill_zero 'first' waits for event 0 of its segment, which "
        "nothing before it "
        "records\n"
        "rank 0, call 0, instruction 2: fill_zero 'third' records event 0 of its segment a second time\n"
        "rank 0, call 0, instruction 3: fill_zero 'fourth' records event 1 of a segment of 1");
}

// Order -------------------------------------------------------------------------------------------

TEST_CASE("a missing event between calls is found: a write before a read") {
  std::vector<Program> programs = data_parallel_job();
  programs[0].calls[data_parallel::optimizer].waits.clear();
  CHECK(faults_of(programs) ==
        "rank 0, call 4, instruction 0: missing event: adamw 'optimizer' on stream compute reads bytes [0, 64) of "
        "'gradients' without "
        "waiting for all_reduce_sum 'reduce' of call 3 on stream data, which writes them");
}

TEST_CASE("a missing event between calls is found: a write before an update") {
  std::vector<Program> programs = data_parallel_job();
  programs[1].calls[data_parallel::reduce].waits.clear();
  CHECK(faults_of(programs) ==
        "rank 1, call 3, instruction 0: missing event: all_reduce_sum 'reduce' on stream data updates bytes [0, 64) of "
        "'gradients' "
        "without waiting for embedding_gradient 'embedding' of call 2 on stream compute, which writes them");
}

TEST_CASE("a missing event between calls is found: a read before a write") {
  SmallProgram p = scratch_pad();
  p.compute(OpKind::fill_zero, "zero", {writes(0, 0, 64)});
  p.call("copy", Stream::dp);
  p.kernel(OpKind::copy, "copy", {reads(0, 0, 32), writes(1, 0, 32)}, Stream::dp);
  p.compute(OpKind::fill_zero, "again", {writes(0, 16, 48)});
  p.program.events = 2;
  SmallProgram::wait(p.program.calls[0], 0, p.program.calls[1]);
  const std::vector<Program> raced = alone(p);
  CHECK(faults_of(raced) ==
        "rank 0, call 2, instruction 0: missing event: fill_zero 'again' on stream compute writes bytes [16, 32) of "
        "'a' without waiting "
        "for copy 'copy' of call 1 on stream data, which reads them");
  // Disjoint bytes need no event, and neither do two readers.
  std::vector<Program> apart = raced;
  only_instruction(apart[0], 2).operands[0] = {0, 32, 32, Access::write};
  CHECK(faults_of(apart) == "");
  SmallProgram::wait(p.program.calls[1], 1, p.program.calls[2]);
  CHECK(faults_of({p.program}) == "");
}

TEST_CASE("order is passed on through events of other streams") {
  SmallProgram p = scratch_pad();
  p.compute(OpKind::fill_zero, "zero", {writes(0, 0, 64)});
  p.call("copy", Stream::dp);
  p.kernel(OpKind::copy, "copy", {reads(0, 0, 64), writes(1, 0, 64)}, Stream::dp);
  p.call("last", Stream::tp);
  p.kernel(OpKind::fill_zero, "last", {writes(0, 0, 64)}, Stream::tp);
  p.program.events = 2;
  SmallProgram::wait(p.program.calls[0], 0, p.program.calls[1]);
  SmallProgram::wait(p.program.calls[1], 1, p.program.calls[2]);
  CHECK(faults_of(alone(p)) == "");
}

TEST_CASE(
    "a missing event within a segment is found and its side streams fork where the call starts and are joined at its "
    "end") {
  SmallProgram p = scratch_pad();
  p.compute(OpKind::fill_zero, "zero", {writes(0, 0, 64)});
  p.call("work", Stream::compute);
  // Forked: sees call 0.
  p.kernel(OpKind::copy, "out", {reads(0, 0, 64), writes(1, 0, 64)}, Stream::tp).records = 0;
  p.kernel(OpKind::fill_zero, "again", {writes(0, 0, 64)}).waits = {0};
  p.program.segments[1].instructions[1].records = 1;
  p.kernel(OpKind::copy, "back", {reads(0, 0, 64), writes(1, 0, 64)}, Stream::tp).waits = {1};
  p.program.segments[1].events = 2;
  p.compute(OpKind::sum_squares, "norm", {reads(1, 0, 64), updates(0, 0, 4)});  // joined: sees the copy back
  const std::vector<Program> good = alone(p);
  CHECK(faults_of(good) == "");

  std::vector<Program> no_first_wait = good;
  no_first_wait[0].segments[1].instructions[1].waits.clear();
  CHECK(faults_of(no_first_wait) ==
        "rank 0, call 1, instruction 1: missing event: fill_zero 'again' on stream compute writes bytes [0, 64) of 'a' "
        "without waiting "
        "for copy 'out' of call 1 on stream tensor, which reads them");
  std::vector<Program> no_second_wait = good;
  no_second_wait[0].segments[1].instructions[2].waits.clear();
  CHECK(faults_of(no_second_wait) ==
        "rank 0, call 1, instruction 2: missing event: copy 'back' on stream tensor reads bytes [0, 64) of 'a' without "
        "waiting for "
        "fill_zero 'again' of call 1 on stream compute, which writes them");
}

// Definition --------------------------------------------------------------------------------------

TEST_CASE("a use after free is found") {
  std::vector<Program> programs = data_parallel_job();
  programs[0].calls[data_parallel::forward].frees = {data_parallel::saved};
  CHECK(faults_of(programs) ==
        "rank 0, call 2, instruction 0: use after free: embedding_gradient 'embedding' reads bytes [16, 80) of "
        "'saved', which call 1 freed");
}

TEST_CASE("a use before definition is found, also of a part") {
  std::vector<Program> programs = data_parallel_job();
  only_instruction(programs[0], data_parallel::forward).operands[2] = {0, 16, 32, Access::write};
  CHECK(faults_of(programs) ==
        "rank 0, call 2, instruction 0: use before definition: embedding_gradient 'embedding' reads bytes [48, 80) of "
        "'saved', which "
        "nothing has written");
}

TEST_CASE("what is not persistent is undefined in the next step") {
  SmallProgram p = scratch_pad();
  p.program.buffers[0].persistent = true;
  p.compute(OpKind::copy, "keep", {reads(0, 0, 64), writes(1, 0, 64)});
  CHECK(faults_of(alone(p)) == "");  // persistent: set at the start of the run
  only_instruction(p.program, 0).operands = {{1, 0, 64, Access::read}, {0, 0, 64, Access::write}};
  CHECK(faults_of({p.program}) ==
        "rank 0, call 0, instruction 0: use before definition: copy 'keep' reads bytes [0, 64) of 'b', which nothing "
        "has written");
}

TEST_CASE("persistent buffers are never freed") {
  std::vector<Program> programs = data_parallel_job();
  programs[0].calls[data_parallel::reduce].frees = {data_parallel::table};
  CHECK(faults_of(programs) == "rank 0, call 3: frees 'table', which keeps its value between steps");
}

TEST_CASE("what a reduce-scatter leaves to other ranks is not read") {
  std::vector<Program> programs = zero_job();
  only_instruction(programs[1], zero::optimizer).operands[0].offset = 16;
  CHECK(faults_of(programs) ==
        "rank 1, call 4, instruction 0: use before definition: adamw 'optimizer' reads bytes [16, 32) of 'gradients', "
        "which "
        "reduce_scatter of call 3 left to other ranks");
}

// Reductions --------------------------------------------------------------------------------------

TEST_CASE("a dropped reduction is found") {
  std::vector<Program> programs = data_parallel_job();
  for (Program& program : programs) drop_call(program, data_parallel::reduce);
  CHECK(faults_of(programs) ==
        "rank 0, call 3, instruction 0: dropped reduction: adamw 'optimizer' reads gradients in bytes [0, 64) of "
        "'gradients', which are "
        "not yet summed over the data group (0, 1)\n"
        "rank 1, call 3, instruction 0: dropped reduction: adamw 'optimizer' reads gradients in bytes [0, 64) of "
        "'gradients', which are "
        "not yet summed over the data group (0, 1)");
}

TEST_CASE("a reduction of a part is a dropped reduction of the rest") {
  std::vector<Program> programs = data_parallel_job();
  for (Program& program : programs) only_instruction(program, data_parallel::reduce).operands[0].bytes = 48;
  const std::vector<Fault> faults = find_faults(programs);
  REQUIRE(faults.size() == 2);
  CHECK(write_fault(faults[0]) ==
        "rank 0, call 4, instruction 0: dropped reduction: adamw 'optimizer' reads gradients in bytes [48, 64) of "
        "'gradients', which are "
        "not yet summed over the data group (0, 1)");
}

TEST_CASE("a dropped reduction is found through an accumulator, and in the gradient norm") {
  SmallProgram p(0);
  p.group(all_along(Axis::dp), {0, 1});
  p.buffer("accumulator", MemoryCategory::gradients, 64, true);
  p.buffer("unreduced", MemoryCategory::buffers, 128);
  p.buffer("norm", MemoryCategory::buffers, 4);
  p.compute(OpKind::fill_zero, "zero", {writes(0, 0, 64)});
  p.compute(OpKind::fill_zero, "zero", {writes(1, 0, 128)});
  p.compute(OpKind::fill_zero, "zero", {writes(2, 0, 4)});
  p.compute(OpKind::bias_gradient, "bias", {reads(1, 0, 16), updates(1, 72, 16)});
  p.program.segments.back().instructions[0].shape.bias = true;
  p.compute(OpKind::accumulate, "accumulate", {reads(1, 64, 64), updates(0, 0, 64)});
  p.compute(OpKind::sum_squares, "norm", {reads(0, 0, 64), updates(2, 0, 4)});
  p.task(std::nullopt);
  Program other = p.program;
  other.rank = 1;
  const std::vector<Fault> faults = find_faults(std::vector<Program>{p.program, other});
  REQUIRE(faults.size() == 2);
  CHECK(write_fault(faults[0]) ==
        "rank 0, call 5, instruction 0: dropped reduction: sum_squares 'norm' reads gradients in bytes [8, 24) of "
        "'accumulator', which "
        "are not yet summed over the data group (0, 1)");
}

TEST_CASE("a dropped reduction is found through an all-to-all and a transposition") {
  std::vector<Program> programs;
  for (const int rank : {0, 1}) {
    SmallProgram p(rank);
    p.group(all_along(Axis::dp), {0, 1}).group(all_along(Axis::tp), {rank});
    for (const char* name : {"gradients", "packed", "received"}) p.buffer(name, MemoryCategory::gradients, 64);
    p.buffer("norm", MemoryCategory::buffers, 4);
    p.compute(OpKind::fill_zero, "zero", {writes(0, 0, 64)});
    p.compute(OpKind::fill_zero, "zero", {writes(3, 0, 4)});
    p.compute(OpKind::bias_gradient, "bias", {reads(0, 0, 16), updates(0, 16, 16)});
    p.program.segments.back().instructions[0].shape.bias = true;
    p.compute(OpKind::transpose_blocks, "pack", {reads(0, 0, 64), writes(1, 0, 64)});
    p.communicate(InstructionKind::all_to_all, all_along(Axis::dp), Stream::compute, "exchange",
                  {reads(1, 0, 64), writes(2, 0, 64)});
    p.compute(OpKind::sum_squares, "norm", {reads(2, 0, 64), updates(3, 0, 4)});
    p.task(std::nullopt);
    programs.push_back(p.program);
  }
  const std::vector<Fault> faults = find_faults(programs);
  REQUIRE(faults.size() == 2);
  CHECK(write_fault(faults[0]) ==
        "rank 0, call 5, instruction 0: dropped reduction: sum_squares 'norm' reads gradients in bytes [0, 64) of "
        "'received', which are not yet summed over the data group (0, 1)");
}

TEST_CASE("a gradient that is reduced twice is found, and one that is not zeroed between steps") {
  const std::string twice =
      "reduced twice: all_reduce_sum 'reduce' sums bytes [0, 64) of 'gradients' over the data group (0, 1), where they "
      "were summed before";
  std::vector<Program> programs = data_parallel_job();
  for (Program& program : programs) {
    Call again = program.calls[data_parallel::reduce];
    again.waits.clear();
    again.records = std::nullopt;
    program.calls[data_parallel::reduce].records = std::nullopt;
    again.records = 1;
    program.calls.insert(program.calls.begin() + data_parallel::optimizer, again);
    program.tasks.back() = {std::nullopt, 4, 6};
  }
  CHECK(faults_of(programs) == "rank 0, call 4, instruction 0: " + twice + "\nrank 1, call 4, instruction 0: " + twice);

  std::vector<Program> grown = data_parallel_job();
  for (Program& program : grown) drop_call(program, data_parallel::zero);
  CHECK(faults_of(grown) == "rank 0, call 2, instruction 0: " + twice + "\nrank 1, call 2, instruction 0: " + twice);
}

TEST_CASE("a dropped gather of updated parameters is found in the next step") {
  std::vector<Program> programs = zero_job();
  for (Program& program : programs) drop_call(program, zero::gather);
  CHECK(faults_of(programs) ==
        "rank 0, call 1, instruction 1: dropped gather: embedding 'embedding' reads bytes [32, 64) of 'table', which "
        "other ranks of the "
        "data group (0, 1) have updated\n"
        "rank 1, call 1, instruction 1: dropped gather: embedding 'embedding' reads bytes [0, 32) of 'table', which "
        "other ranks of the "
        "data group (0, 1) have updated");
}

// Communication -----------------------------------------------------------------------------------

TEST_CASE("two groups launched in crossed order are found") {
  // 0 waits for 1, which waits for 3, which waits for 2, which waits for 0.
  CHECK(faults_of(square({1, 2})) ==
        "rank 0, call 0, instruction 0: two groups launched in crossed order: "
        "rank 0 waits in all_reduce_sum 'a' of 64 B (fp32) over its tensor group (0, 1) in call 0 for rank 1; "
        "rank 1 waits in all_reduce_sum 'b' of 64 B (fp32) over its data group (1, 3) in call 0 for rank 3; "
        "rank 3 waits in all_reduce_sum 'a' of 64 B (fp32) over its tensor group (2, 3) in call 0 for rank 2; "
        "rank 2 waits in all_reduce_sum 'b' of 64 B (fp32) over its data group (0, 2) in call 0 for rank 0");
  // One rank alone delays the others, but blocks nobody.
  CHECK(faults_of(square({1})) == "");
}

TEST_CASE("two groups of the same ranks launched in crossed order are found") {
  std::vector<Program> programs;
  for (int rank = 0; rank < 2; ++rank) {
    SmallProgram p(rank);
    p.group(all_along(Axis::pp), {0, 1}).group(tied_stages, {0, 1});
    p.buffer("norm", MemoryCategory::buffers, 4, true);
    const auto sum = [&](GroupKey group) {
      p.communicate(InstructionKind::all_reduce_sum, group, Stream::dp, "norm", {updates(0, 0, 4)});
    };
    sum(rank == 0 ? all_along(Axis::pp) : tied_stages);
    sum(rank == 0 ? tied_stages : all_along(Axis::pp));
    p.task(std::nullopt);
    programs.push_back(p.program);
  }
  CHECK(faults_of(programs) ==
        "rank 0, call 0, instruction 0: two groups launched in crossed order: "
        "rank 0 launches all_reduce_sum 'norm' of 4 B (fp32) over its pipeline group (0, 1) in call 0 where "
        "rank 1 launches all_reduce_sum 'norm' of 4 B (fp32) over its tied group (0, 1) in call 0");
}

TEST_CASE("collectives that do not match are found") {
  std::vector<Program> programs = data_parallel_job();
  only_instruction(programs[1], data_parallel::reduce).type = DataType::bf16;
  CHECK(faults_of(programs) ==
        "rank 0, call 3, instruction 0: collectives that do not match: "
        "rank 0 launches all_reduce_sum 'reduce' of 64 B (fp32) over its data group (0, 1) in call 3 where "
        "rank 1 launches all_reduce_sum 'reduce' of 64 B (bf16) over its data group (0, 1) in call 3");
}

TEST_CASE("a collective that not all join is found") {
  std::vector<Program> programs = zero_job();
  drop_call(programs[0], zero::gather);
  const std::vector<Fault> faults = find_faults(programs);
  REQUIRE(faults.size() == 2);
  CHECK(write_fault(faults[1]) ==
        "rank 1, call 5, instruction 0: a collective that not all join: "
        "rank 1 launches all_gather 'gather' of 64 B (fp32) over its data group (0, 1) in call 5, "
        "rank 0 launches only 1 collective in that group");
}

TEST_CASE("a send without its receive is found") {
  std::vector<Program> programs = pipeline_job();
  programs[1].buffers[second_stage::input].persistent = true;
  programs[1].calls[second_stage::backward].frees = {};
  drop_call(programs[1], second_stage::receive);
  CHECK(faults_of(programs) ==
        "rank 0, call 2, instruction 0: a send without its receive: "
        "rank 0 launches send 'send' of 64 B (fp32) to its next group (1) in call 2, rank 1 launches only 0 receives "
        "from it");
}

TEST_CASE("a receive without its send is found") {
  std::vector<Program> programs = pipeline_job();
  drop_call(programs[1], second_stage::send);
  CHECK(faults_of(programs) ==
        "rank 0, call 3, instruction 0: a receive without its send: "
        "rank 0 launches receive 'receive' of 64 B (fp32) from its next group (1) in call 3, rank 1 launches only 0 "
        "sends to it");
}

TEST_CASE("a send and a receive of other sizes are found") {
  std::vector<Program> programs = pipeline_job();
  only_instruction(programs[0], first_stage::send).operands[0].bytes = 32;
  CHECK(faults_of(programs) ==
        "rank 0, call 2, instruction 0: a send and a receive that do not match: "
        "rank 0 launches send 'send' of 32 B (fp32) to its next group (1) in call 2 where "
        "rank 1 launches receive 'receive' of 64 B (fp32) from its previous group (0) in call 0");
}

TEST_CASE("ranks that both receive before they send wait for each other") {
  CHECK(faults_of(exchange(false, Streams::two)) ==
        "rank 0, call 0, instruction 0: deadlock in launch order: "
        "rank 0 waits in receive 'receive' of 64 B (fp32) from its next group (1) in call 0 for rank 1; "
        "rank 1 waits in receive 'receive' of 64 B (fp32) from its previous group (0) in call 0 for rank 0");
}

TEST_CASE("a wait for a send that is received too late is a deadlock") {
  // Each rank sends, waits for its end, then receives.
  std::vector<Program> programs = exchange(true, Streams::two);
  for (Program& program : programs) {
    program.events = 1;
    SmallProgram::wait(program.calls[0], 0, program.calls[1]);
  }
  CHECK(faults_of(programs) ==
        "rank 0, call 0, instruction 0: deadlock in launch order: "
        "rank 0 waits for the end of send 'send' of 64 B (fp32) to its next group (1) in call 0 for rank 1; "
        "rank 1 waits for the end of send 'send' of 64 B (fp32) to its previous group (0) in call 0 for rank 0");
}

TEST_CASE("sends that need a buffer in between are a deadlock of concurrent streams") {
  // In launch order both post their sends and continue. On one stream the receive waits behind the
  // send.
  CHECK(faults_of(exchange(true, Streams::one)) ==
        "rank 0, call 0, instruction 0: deadlock of concurrent streams: "
        "stream send_next of rank 0 waits in send 'send' of 64 B (fp32) to its next group (1) in call 0 for stream "
        "send_previous of rank "
        "1; "
        "stream send_previous of rank 1 waits in send 'send' of 64 B (fp32) to its previous group (0) in call 0 for "
        "stream send_next of "
        "rank 0");
}

TEST_CASE("verify throws the first faults") {
  std::vector<Program> programs = data_parallel_job();
  programs[0].arena_bytes.device = 0;
  std::string message;
  try {
    verify(programs);
  } catch (const InternalError& error) {
    message = error.what();
  }
  CHECK(message ==
        "the Programs of 2 ranks do not verify, 5 faults found:\n"
        "  rank 0: buffer 'table' at [0, 64) is outside the arena of 0 B\n"
        "  rank 0: buffer 'gradients' at [64, 128) is outside the arena of 0 B\n"
        "  rank 0: buffer 'first moment' at [128, 192) is outside the arena of 0 B\n"
        "  rank 0: buffer 'second moment' at [192, 256) is outside the arena of 0 B\n"
        "  rank 0: buffer 'saved' at [256, 336) is outside the arena of 0 B");
  programs[1].buffers[0].bytes = -1;  // and the two operands in it
  try {
    verify(programs);
  } catch (const InternalError& error) {
    message = error.what();
  }
  CHECK(message.substr(0, 54) == "the Programs of 2 ranks do not verify, 8 faults found:");
  CHECK(message.substr(message.rfind('\n')) == "\n  and 3 more");
}
