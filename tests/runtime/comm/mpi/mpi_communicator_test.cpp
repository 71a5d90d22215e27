// The plugin runtime/comm/mpi through the interfaces Rendezvous and Communicator, as the main
// program uses it.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <chrono>
#include <exception>
#include <limits>
#include <thread>

#include "planner/base/error.h"
#include "runtime/comm/local/local_communicator.h"
#include "tests/runtime/comm/mpi/job.h"
#include "tests/runtime/comm/mpi/numbers.h"

using namespace parplan;
using namespace parplan::testing;

namespace {

// Below, at and above the sizes from which a collective is cut into chunks and chunks into pieces
// (64 Ki elements with up to 16 members); no multiples of anything.
constexpr std::int64_t counts[] = {0, 1, 3, 7, 16, 1000, 1024, 1025, 10007, 262144, 600011};

}  // namespace

TEST_CASE("the job is the one that mpirun started, on one machine") {
  CHECK(everywhere(job().processes() > 1));
  CHECK(everywhere(job().local_process() == job().process()));
  CHECK(everywhere(job().local_processes() == job().processes()));
}

TEST_CASE("processes gather contributions of any size, by process") {
  for (int round = 0; round < 5; ++round) {
    const auto of = [&](int process) {
      return std::vector<std::byte>(static_cast<std::size_t>(process * 70001 * (round % 3)),
                                    static_cast<std::byte>(process + 1));
    };
    const auto all = job().all_gather(of(job().process()));
    bool right = all.size() == static_cast<std::size_t>(job().processes());
    for (int process = 0; right && process < job().processes(); ++process) right = all[process] == of(process);
    CHECK(everywhere(right));
    const int source = round % job().processes();
    CHECK(everywhere(broadcast(job(), of(job().process() + 1), source) == of(source + 1)));
    barrier(job());
    job().check();
  }
}

TEST_CASE("all_reduce adds in ascending order of rank, or takes the maximum, to the bit") {
  const auto communicator = job().make_communicator({{.id = 5, .ranks = all_ranks()}}, 1);
  const int rank = communicator->rank();
  CHECK(everywhere(rank == job().process() && communicator->ranks() == job().processes() && communicator->in_order()));
  for (const std::int64_t count : counts)
    for (const Reduction reduction : {Reduction::sum, Reduction::max}) {
      INFO(count, " elements");
      std::vector<float> data = contribution(count, rank);
      const Transfer transfer = communicator->all_reduce(0, 5, reduction, elements(data));
      CHECK(everywhere(same_bits(data, reduced(count, all_ranks(), reduction))));
      CHECK(everywhere(transfer.sent == all_reduce_bytes(count, 4, communicator->ranks(), rank)));
    }
}

TEST_CASE("reduce_scatter leaves each member its chunk of the sum and all_gather collects the chunks") {
  const auto communicator = job().make_communicator({{.id = 0, .ranks = all_ranks()}}, 1);
  const int rank = communicator->rank();
  for (const std::int64_t count : counts) {
    INFO(count, " elements");
    const std::vector<float> wanted = reduced(count, all_ranks(), Reduction::sum);
    const Chunk own = chunk_of(count, communicator->ranks(), rank);
    std::vector<float> data = contribution(count, rank);
    Transfer transfer = communicator->reduce_scatter(0, 0, elements(data));
    CHECK(everywhere(same_bits(data, wanted, own)));
    CHECK(everywhere(transfer.sent == reduce_scatter_bytes(count, 4, communicator->ranks(), rank)));
    for (std::int64_t i = 0; i < count; ++i)
      if (i < own.begin || i >= own.end) data[i] = std::nanf("");
    transfer = communicator->all_gather(0, 0, elements(data));
    CHECK(everywhere(same_bits(data, wanted)));
    CHECK(everywhere(transfer.sent == all_gather_bytes(count, 4, communicator->ranks(), rank)));
  }
}

TEST_CASE("the first member hands out its data, collects or scatters parts, and adds up in ascending order of rank") {
  const auto communicator = job().make_communicator({{.id = 0, .ranks = all_ranks()}}, 1);
  const int rank = communicator->rank(), ranks = communicator->ranks();
  for (const std::int64_t count : counts) {
    INFO(count, " elements");
    const std::vector<float> own = contribution(count, rank);
    std::vector<float> data = own, whole(static_cast<std::size_t>(rank == 0 ? ranks * count : 0));
    CHECK(everywhere(communicator->reduce(0, 0, elements(data)).sent == Bytes(rank == 0 ? 0 : 4 * count)));
    CHECK(everywhere(same_bits(data, rank == 0 ? reduced(count, all_ranks(), Reduction::sum) : own)));
    data = own;
    CHECK(everywhere(communicator->gather(0, 0, elements(data), elements(whole)).sent ==
                     Bytes(rank == 0 ? 0 : 4 * count)));
    std::vector<float> wanted;
    for (int member = 0; member < ranks && rank == 0; ++member) {
      const std::vector<float> part = contribution(count, member);
      wanted.insert(wanted.end(), part.begin(), part.end());
    }
    CHECK(everywhere(same_bits(whole, wanted)));
    const Bytes handed_out(rank == 0 ? 4 * (ranks - 1) * count : 0);
    data.assign(data.size(), std::nanf(""));
    CHECK(everywhere(communicator->scatter(0, 0, elements(whole), elements(data)).sent == handed_out));
    CHECK(everywhere(same_bits(data, own)));
    CHECK(everywhere(communicator->broadcast(0, 0, elements(data)).sent == handed_out));
    CHECK(everywhere(same_bits(data, contribution(count, 0))));
  }
}

TEST_CASE("all_to_all brings each member its chunk from every member, and leaves what it sends") {
  const auto communicator = job().make_communicator({{.id = 0, .ranks = all_ranks()}, {.id = 1, .ranks = {0}}}, 1);
  const int rank = communicator->rank();
  const int ranks = communicator->ranks();
  for (const std::int64_t chunk : counts) {
    INFO(chunk, " elements from each to each");
    const std::int64_t count = chunk * ranks;
    std::vector<float> from = contribution(count, rank), to(static_cast<std::size_t>(count), std::nanf(""));
    const Transfer transfer = communicator->all_to_all(0, 0, elements(from), elements(to));
    std::vector<float> wanted;
    for (int member = 0; member < ranks; ++member) {
      const std::vector<float> whole = contribution(count, member);
      wanted.insert(wanted.end(), whole.begin() + rank * chunk, whole.begin() + (rank + 1) * chunk);
    }
    CHECK(everywhere(same_bits(to, wanted)));
    CHECK(everywhere(same_bits(from, contribution(count, rank))));
    CHECK(everywhere(transfer.sent == Bytes(4 * (ranks - 1) * chunk)));
  }
  bool right = true;
  if (rank == 0) {
    std::vector<float> from = {1.0f, 2.0f}, to(2);
    right = communicator->all_to_all(0, 1, elements(from), elements(to)).sent == Bytes(0) && to == from;
  }
  CHECK(everywhere(right));
}

TEST_CASE("ranks as processes and ranks as threads get the same bits") {
  const int ranks = job().processes();
  const std::vector<CommunicationGroup> groups = {{.id = 0, .ranks = all_ranks()}};
  const auto communicator = job().make_communicator(groups, 1);
  for (const std::int64_t count : {777, 50021}) {
    LocalWorld world(ranks, groups);
    std::vector<std::vector<float>> of_threads(static_cast<std::size_t>(ranks));
    {
      std::vector<std::jthread> threads;
      for (int rank = 0; rank < ranks; ++rank)
        threads.emplace_back([&, rank] {
          std::vector<float>& data = of_threads[rank];
          data = contribution(count, rank);
          world.communicator(rank).all_reduce(0, 0, Reduction::sum, elements(data));
        });
    }
    std::vector<float> data = contribution(count, communicator->rank());
    communicator->all_reduce(0, 0, Reduction::sum, elements(data));
    CHECK(everywhere(same_bits(data, of_threads[communicator->rank()])));
  }
}

TEST_CASE("a NaN of any member reaches all through the maximum") {
  const auto communicator = job().make_communicator({{.id = 0, .ranks = all_ranks()}}, 1);
  for (int source = 0; source < communicator->ranks(); ++source) {
    std::vector<float> data = {communicator->rank() == source ? std::numeric_limits<float>::quiet_NaN() : 1.0f};
    communicator->all_reduce(0, 0, Reduction::max, elements(data));
    CHECK(everywhere(std::isnan(data[0])));
  }
}

TEST_CASE("groups that overlap work side by side, many times over") {
  // All; each neighbouring pair, with members in two of them; one alone each.
  const int ranks = job().processes();
  std::vector<CommunicationGroup> groups = {{.id = 7, .ranks = all_ranks()}};
  for (int r = 0; r + 1 < ranks; ++r) groups.push_back({.id = 100 + r, .ranks = {r, r + 1}});
  for (int r = 0; r < ranks; ++r) groups.push_back({.id = 200 + r, .ranks = {r}});
  const auto communicator = job().make_communicator(groups, 1);
  bool right = true;
  for (int round = 0; round < 200; ++round)
    for (const CommunicationGroup& group : groups) {
      if (std::find(group.ranks.begin(), group.ranks.end(), communicator->rank()) == group.ranks.end()) continue;
      const std::int64_t count = round % 2 == 0 ? 33 : 1500;
      std::vector<float> data = contribution(count, communicator->rank());
      communicator->all_reduce(0, group.id, Reduction::sum, elements(data));
      right = right && same_bits(data, reduced(count, group.ranks, Reduction::sum));
    }
  CHECK(everywhere(right));
}

TEST_CASE("sends match receives in order, channels do not mix, and a send returns before it is received") {
  constexpr int channels = 3;
  constexpr int messages = 40;
  constexpr std::int64_t large = 100003;
  const auto communicator = job().make_communicator({}, channels);
  const int rank = communicator->rank();
  const int ranks = communicator->ranks();
  const int next = (rank + 1) % ranks;
  const int previous = (rank + ranks - 1) % ranks;
  const auto value = [](int source, int channel, int number) {
    return static_cast<float>(source * 10000 + channel * 1000 + number);
  };
  const auto length = [](int number) { return static_cast<std::size_t>(number % 10 == 0 ? large : number % 7); };
  std::vector<std::vector<float>> sent;
  std::vector<SendTicket> tickets;
  for (int number = 0; number < messages; ++number)
    for (int channel = 0; channel < channels; ++channel)
      sent.emplace_back(length(number), value(rank, channel, number));
  // Everybody sends everything before anybody receives.
  for (int number = 0; number < messages; ++number)
    for (int channel = 0; channel < channels; ++channel)
      tickets.push_back(communicator->send(0, next, channel, elements(sent[number * channels + channel])));
  bool right = true;
  for (int channel = channels - 1; channel >= 0; --channel)
    for (int number = 0; number < messages; ++number) {
      std::vector<float> data(length(number), -1.0f);
      const Transfer transfer = communicator->receive(0, previous, channel, elements(data));
      right = right && transfer.sent == Bytes(0) &&
              data == std::vector<float>(length(number), value(previous, channel, number));
    }
  Bytes bytes;
  for (const SendTicket& ticket : tickets) bytes = bytes + communicator->wait_sent(0, ticket).sent;
  Bytes promised;
  for (const std::vector<float>& data : sent) promised = promised + Bytes(static_cast<std::int64_t>(4 * data.size()));
  CHECK(everywhere(right));
  CHECK(everywhere(bytes == promised));
}

TEST_CASE("the time until the last member arrived counts as waiting") {
  using namespace std::chrono_literals;
  const auto communicator = job().make_communicator({{.id = 0, .ranks = all_ranks()}}, 1);
  std::vector<float> data(100);
  communicator->all_reduce(0, 0, Reduction::sum, elements(data));
  const int last = communicator->ranks() - 1;
  // A process may be suspended anywhere, which looks like waiting, moving or coming late itself;
  // but not in every one of many attempts.
  bool reported = false;
  for (int attempt = 0; attempt < 50 && !reported; ++attempt) {
    barrier(job());
    if (communicator->rank() == last) std::this_thread::sleep_for(100ms);
    const Transfer transfer = communicator->all_reduce(0, 0, Reduction::sum, elements(data));
    reported = everywhere((communicator->rank() == last || transfer.waited > Seconds(0.08)) &&
                          transfer.moving < Seconds(0.08));
  }
  CHECK(reported);
  reported = false;
  for (int attempt = 0; attempt < 50 && !reported; ++attempt) {
    barrier(job());
    Seconds waited(1.0);
    if (communicator->rank() == last) {
      std::this_thread::sleep_for(100ms);
      communicator->wait_sent(0, communicator->send(0, 0, 0, elements(data)));
    } else if (communicator->rank() == 0) {
      waited = communicator->receive(0, last, 0, elements(data)).waited;
    }
    reported = everywhere(waited > Seconds(0.08));
  }
  CHECK(reported);
}
