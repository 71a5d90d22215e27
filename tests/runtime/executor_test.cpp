#include "runtime/executor.h"

#include <doctest/doctest.h>

#include <array>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "runtime/world.h"
#include "tests/planner/program/small_programs.h"

namespace parplan {
namespace {

constexpr int ranks = 3;
constexpr std::int64_t elements = 4;
constexpr std::int64_t bytes = 4 * elements;
constexpr GroupKey next{Axis::cp, Members::next};
constexpr GroupKey previous{Axis::cp, Members::previous};

// What rank r holds goes around the ring of an axis in one Segment, `rounds` places: each round
// sends it, receives that of the previous rank, and copies it over what was sent, which has to be
// gone by then.
Program ring(int rank, int rounds) {
  SmallProgram p(rank);
  p.group(all_along(Axis::cp), {0, 1, 2}).group(next, {(rank + 1) % ranks}).group(previous, {(rank + 2) % ranks});
  const int held = p.buffer("held", MemoryCategory::activations, bytes);
  const int arrived = p.buffer("arrived", MemoryCategory::activations, bytes);
  p.call("ring", Stream::compute);
  for (int round = 0; round < rounds; ++round) {
    const int sent = 3 * round, received = 3 * round + 1, copied = 3 * round + 2;
    for (const InstructionKind kind : {InstructionKind::send, InstructionKind::receive}) {
      const bool sends = kind == InstructionKind::send;
      const GroupKey group = sends ? next : previous;
      Instruction& made = p.instruction(kind, stream_of(kind, group), name(kind),
                                        {sends ? reads(held, 0, bytes) : writes(arrived, 0, bytes)});
      made.group = group;
      made.records = sends ? sent : received;
      if (round > 0) made.waits = {copied - 3};
    }
    Instruction& copy = p.kernel(OpKind::copy, "copy", {reads(arrived, 0, bytes), writes(held, 0, bytes)});
    copy.shape.rows = elements;
    copy.waits = {sent, received};
    copy.records = copied;
  }
  p.program.segments.back().events = 3 * rounds;
  return p.program;
}

}  // namespace

TEST_CASE("what a Segment sends around the ring of an axis may be overwritten after its event") {
  constexpr int rounds = 4;  // one more than ranks
  std::vector<Program> programs;
  for (int rank = 0; rank < ranks; ++rank) programs.push_back(ring(rank, rounds));
  const GroupTable groups(programs);
  const std::unique_ptr<World> world = cpu_threads()(groups, ranks);
  std::array<std::vector<float>, ranks> found;
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < ranks; ++rank)
      threads.emplace_back([&, rank] {
        const std::unique_ptr<Backend> backend = world->make_backend(rank);
        const Arena arena(*backend, programs[rank]);
        const std::unique_ptr<Communicator> communicator = world->make_communicator(rank, *backend);
        Executor executor(programs[rank], groups, *backend, *communicator, arena, SampleRange{});
        const std::vector<float> own(elements, static_cast<float>(rank));
        found[rank].resize(elements);
        arena.write(0, own.data(), Bytes(bytes));
        // Twice, as steps follow one another: the second starts from what the first left.
        for (int step = 0; step < 2; ++step) {
          const StepMeasurement measured = executor.run_step({}, {}, StepTiming::whole);
          CHECK(measured.communication.cp == Bytes(rounds * bytes));
        }
        arena.read(0, found[rank].data(), Bytes(bytes));
      });
  }
  for (int rank = 0; rank < ranks; ++rank) {
    const int from = (rank + 2 * ranks * rounds - 2 * rounds) % ranks;
    CHECK(found[rank] == std::vector<float>(elements, static_cast<float>(from)));
  }
}

}  // namespace parplan
