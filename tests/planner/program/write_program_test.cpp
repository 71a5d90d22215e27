#include <doctest/doctest.h>

#include "planner/program/program.h"
#include "tests/planner/program/small_programs.h"

using namespace parplan;

TEST_CASE("streams, groups and instructions have names of their own") {
  const auto all_differ = [](const std::vector<std::string>& names) {
    for (std::size_t i = 0; i < names.size(); ++i)
      for (std::size_t j = 0; j < i; ++j)
        if (names[i] == names[j] || names[i].empty()) return false;
    return true;
  };
  std::vector<std::string> streams, groups, kinds;
  for (int i = 0; i < static_cast<int>(Stream::count_); ++i) streams.push_back(name(static_cast<Stream>(i)));
  for (const Axis axis : all_axes)
    for (const Members members : {Members::all, Members::tied, Members::next, Members::previous,
                                  Members::next_on_return, Members::previous_on_return})
      groups.push_back(name(GroupKey{axis, members}));
  for (int i = 0; i <= static_cast<int>(InstructionKind::receive); ++i)
    kinds.push_back(name(static_cast<InstructionKind>(i)));
  CHECK(all_differ(streams));
  CHECK(all_differ(groups));
  CHECK(all_differ(kinds));
  CHECK(name(Stream::receive_next) == std::string("receive_next"));
  CHECK(name(holders_of_copies(2)) == "tensor copies");
  CHECK(name(previous_stage) == std::string("previous"));
  CHECK(name(InstructionKind::receive) == std::string("receive"));
}

TEST_CASE("a Program reads as text") {
  CHECK(write_program(data_parallel_program(1)) == R"(rank 1, stage 0, arena 336 B
groups
  tensor: 1
  data: 0, 1
  pipeline: 1
buffers
  0 'table' parameters [0, 64) persistent
  1 'gradients' gradients [64, 128) persistent
  2 'first moment' optimizer [128, 192) persistent
  3 'second moment' optimizer [192, 256) persistent
  4 'saved' activations [256, 336)
buckets
  'embedding' 16 elements, shard [0, 16), 'table', 'gradients', 'first moment', 'second moment'
segments
  0 'fill_zero' on compute, binds buffer 0
    fill_zero 'fill_zero' fp32 on compute as compute: write buffer 0[0, 64)
  1 'forward' on compute, binds buffer 0, buffer 1
    load_tokens 'tokens' int32 on compute as compute: write buffer 0[0, 16)
    embedding 'embedding' fp32 rows=4 columns=4 on compute as compute: read buffer 0[0, 16), read buffer 1[0, 64), write buffer 0[16, 80)
  2 'embedding' on compute, binds buffer 0, buffer 1
    embedding_gradient 'embedding' fp32 on compute as compute: read buffer 0[16, 80), read buffer 0[0, 16), update buffer 1[0, 64)
  3 'reduce' on data, binds buffer 0
    all_reduce_sum 'reduce' fp32 group=data on data as data: update buffer 0[0, 64)
  4 'optimizer' on compute, binds buffer 0, buffer 1, buffer 2, buffer 3
    adamw 'optimizer' fp32 on compute as compute: read buffer 0[0, 64), update buffer 1[0, 64), update buffer 2[0, 64), update buffer 3[0, 64)
calls
  around the step
    0 'fill_zero' (gradients)
  0F0
    1 'forward' (saved, table), micro-batch 0
  0B0
    2 'embedding' (saved, gradients), records 0, frees saved
    3 'reduce' (gradients), waits 0, records 1
  around the step
    4 'optimizer' (gradients, table, first moment, second moment), waits 1
)");
}

TEST_CASE("buffers on the host read as such") {
  Program program = data_parallel_program(1);
  Buffer& moved = program.buffers[data_parallel::second_moment];
  moved.home = Home::host;
  moved.offset = 0;
  program.arena_bytes.host = 64;
  const std::string text = write_program(program);
  CHECK(text.starts_with("rank 1, stage 0, arena 336 B, host arena 64 B\n"));
  CHECK(text.find("  3 'second moment' optimizer [0, 64) on the host persistent\n") != std::string::npos);
}

TEST_CASE("events and scratch of a segment read as text") {
  SmallProgram p(0);
  p.buffer("scratch", MemoryCategory::activations, 64);
  p.call("work", Stream::compute);
  p.kernel(OpKind::fill_zero, "first", {writes(0, 0, 64)}).records = 0;
  Instruction& second = p.kernel(OpKind::fill_zero, "second", {writes(0, 0, 64)}, Stream::tp);
  second.waits = {0, 1};
  second.shape.bias = true;
  p.buffer("received", MemoryCategory::activations, 64);
  p.instruction(InstructionKind::all_to_all, Stream::tp, "exchange", {reads(0, 0, 64), writes(1, 0, 64)}).group =
      all_along(Axis::tp);
  p.program.segments[0].scratch_bytes = 64;
  const std::string text = write_program(p.program);
  CHECK(text.substr(text.find("segments")) == R"(segments
  0 'work' on compute, binds buffer 0, buffer 1, scratch 64 B
    fill_zero 'first' fp32 on compute as compute: write buffer 0[0, 64), records 0
    fill_zero 'second' fp32 bias on tensor as compute: write buffer 0[0, 64), waits 0 1
    all_to_all 'exchange' fp32 group=tensor on tensor as compute: read buffer 0[0, 64), write buffer 1[0, 64)
calls
)");
}
