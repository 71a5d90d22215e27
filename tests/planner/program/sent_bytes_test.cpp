#include <doctest/doctest.h>

#include "planner/base/error.h"
#include "planner/program/program.h"

using namespace parplan;

TEST_CASE("bytes sent follow from the chunks") {
  // 10 elements of 4 B over 4 ranks: chunks [0, 2), [2, 5), [5, 7), [7, 10).
  const auto sent = [](InstructionKind kind, int index) { return sent_bytes(kind, 40, 4, 4, index); };
  const std::int64_t own[] = {8, 12, 8, 12};
  for (int index = 0; index < 4; ++index) {
    CHECK(sent(InstructionKind::reduce_scatter, index) == 40 - own[index]);
    CHECK(sent(InstructionKind::all_gather, index) == 3 * own[index]);
    CHECK(sent(InstructionKind::all_reduce_sum, index) == 40 + 2 * own[index]);
    CHECK(sent(InstructionKind::all_reduce_max, index) == 40 + 2 * own[index]);
  }
}

TEST_CASE("an all-to-all sends every chunk but one's own") {
  for (int index = 0; index < 4; ++index) CHECK(sent_bytes(InstructionKind::all_to_all, 48, 4, 4, index) == 36);
}

TEST_CASE("the first rank sends to every other one, or they send to it") {
  // The first rank has the whole of a gather or scatter, 48 B, and the others 12 B of their own.
  CHECK(sent_bytes(InstructionKind::broadcast, 40, 4, 4, 0) == 120);
  CHECK(sent_bytes(InstructionKind::scatter, 48, 4, 4, 0) == 36);
  CHECK(sent_bytes(InstructionKind::reduce_sum, 40, 4, 4, 0) == 0);
  CHECK(sent_bytes(InstructionKind::gather, 48, 4, 4, 0) == 0);
  for (int index = 1; index < 4; ++index) {
    CHECK(sent_bytes(InstructionKind::broadcast, 40, 4, 4, index) == 0);
    CHECK(sent_bytes(InstructionKind::scatter, 12, 4, 4, index) == 0);
    CHECK(sent_bytes(InstructionKind::reduce_sum, 40, 4, 4, index) == 40);
    CHECK(sent_bytes(InstructionKind::gather, 12, 4, 4, index) == 12);
  }
}

TEST_CASE("a group of one rank sends nothing, and neither do kernels and receives") {
  for (InstructionKind kind : {InstructionKind::all_reduce_sum, InstructionKind::all_reduce_max,
                               InstructionKind::all_gather, InstructionKind::reduce_scatter,
                               InstructionKind::all_to_all, InstructionKind::broadcast, InstructionKind::reduce_sum,
                               InstructionKind::gather, InstructionKind::scatter})
    CHECK(sent_bytes(kind, 40, 4, 1, 0) == 0);
  CHECK(sent_bytes(InstructionKind::kernel, 40, 4, 4, 0) == 0);
  CHECK(sent_bytes(InstructionKind::receive, 40, 4, 1, 0) == 0);
  CHECK(sent_bytes(InstructionKind::send, 40, 4, 1, 0) == 40);
}

TEST_CASE("bytes that are no whole number of elements are our mistake") {
  CHECK_THROWS_AS(sent_bytes(InstructionKind::all_reduce_sum, 41, 4, 2, 0), InternalError);
  CHECK_THROWS_AS(sent_bytes(InstructionKind::all_reduce_sum, 40, 4, 2, 2), InternalError);
}
