#include "runtime/executor.h"

#include <doctest/doctest.h>

#include <array>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/comm/forwarding_communicator.h"
#include "runtime/world.h"
#include "tests/planner/program/small_programs.h"

namespace parplan {
namespace {

constexpr int ranks = 3;
constexpr std::int64_t elements = 4;
constexpr std::int64_t bytes = 4 * elements;
constexpr GroupKey next{Axis::cp, Members::next};
constexpr GroupKey previous{Axis::cp, Members::previous};
constexpr std::array writers{Stream::compute, Stream::tp};

// What rank r holds goes around the ring of an axis in one Segment, `rounds` places: each round
// sends it, receives that of the previous rank, and copies it over what was sent, which has to be
// gone by then: one half of it on one stream, the other on another.
Program ring(int rank, int rounds) {
  SmallProgram p(rank);
  p.group(all_along(Axis::cp), {0, 1, 2}).group(next, {(rank + 1) % ranks}).group(previous, {(rank + 2) % ranks});
  const int held = p.buffer("held", MemoryCategory::activations, bytes);
  const int arrived = p.buffer("arrived", MemoryCategory::activations, bytes);
  p.call("ring", Stream::compute);
  for (int round = 0; round < rounds; ++round) {
    const int sent = 4 * round, received = sent + 1;
    const std::array copied{sent + 2, sent + 3};
    for (const InstructionKind kind : {InstructionKind::send, InstructionKind::receive}) {
      const bool sends = kind == InstructionKind::send;
      const GroupKey group = sends ? next : previous;
      Instruction& made = p.instruction(kind, stream_of(kind, group), name(kind),
                                        {sends ? reads(held, 0, bytes) : writes(arrived, 0, bytes)});
      made.group = group;
      made.records = sends ? sent : received;
      if (round > 0) made.waits = {copied[0] - 4, copied[1] - 4};
    }
    const std::int64_t half = bytes / 2;
    for (const int part : {0, 1}) {
      Instruction& copy = p.kernel(OpKind::copy, "copy",
                                   {reads(arrived, part * half, half), writes(held, part * half, half)}, writers[part]);
      copy.shape.rows = elements / 2;
      copy.waits = {sent, received};
      copy.records = copied[part];
    }
  }
  p.program.segments.back().events = 4 * rounds;
  return p.program;
}

// Keeps which streams waited for which sends.
class RecordingCommunicator final : public ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  Transfer wait_sent(StreamId stream, SendTicket ticket) override {
    waits.insert({static_cast<Stream>(stream), ticket.number});
    return ForwardingCommunicator::wait_sent(stream, ticket);
  }
  std::set<std::pair<Stream, std::int64_t>> waits;
};

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
        RecordingCommunicator recording(*communicator);
        Executor executor(programs[rank], groups, *backend, recording, arena, SampleRange{});
        const std::vector<float> own(elements, static_cast<float>(rank));
        found[rank].resize(elements);
        arena.write(0, own.data(), Bytes(bytes));
        // Twice, as steps follow one another: the second starts from what the first left.
        for (int step = 0; step < 2; ++step) {
          const StepMeasurement measured = executor.run_step({}, {}, StepTiming::whole);
          CHECK(measured.communication.cp == Bytes(rounds * bytes));
        }
        arena.read(0, found[rank].data(), Bytes(bytes));
        // On a GPU only the stream that waits is held.
        for (std::int64_t send = 0; send < 2 * rounds; ++send)
          for (const Stream writer : writers) CHECK(recording.waits.contains({writer, send}));
      });
  }
  for (int rank = 0; rank < ranks; ++rank) {
    const int from = (rank + 2 * ranks * rounds - 2 * rounds) % ranks;
    CHECK(found[rank] == std::vector<float>(elements, static_cast<float>(from)));
  }
}

}  // namespace parplan
