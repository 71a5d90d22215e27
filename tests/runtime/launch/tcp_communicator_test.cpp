#include "runtime/launch/tcp_communicator.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <sys/socket.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <span>
#include <thread>

#include "planner/base/error.h"
#include "runtime/comm/local/local_communicator.h"
#include "runtime/launch/free_port.h"
#include "runtime/launch/tcp_rendezvous.h"
#include "runtime/launch/tcp_socket.h"
#include "tests/runtime/comm/mpi/numbers.h"

using namespace parplan;
using namespace parplan::testing;
using namespace std::chrono_literals;

namespace {

// Below, at and above the sizes from which a collective is cut into chunks and chunks into pieces.
constexpr std::int64_t counts[] = {0, 1, 3, 7, 1000, 1024, 1025, 10007, 262144, 600011};

std::vector<int> all_of(int ranks) {
  std::vector<int> numbers(static_cast<std::size_t>(ranks));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

// What each of the processes throws, which are threads here with a rendezvous over TCP; empty where
// it throws nothing.
std::vector<std::string> as_processes(int processes, const std::vector<CommunicationGroup>& groups, int channels,
                                      const std::function<void(Communicator&)>& body) {
  const LoopbackPort port;
  std::vector<std::string> messages(static_cast<std::size_t>(processes));
  std::vector<std::jthread> threads;
  for (int process = 0; process < processes; ++process)
    threads.emplace_back([&, process] {
      try {
        const auto job = tcp_rendezvous({.process = process,
                                         .processes = processes,
                                         .local_process = process,
                                         .local_processes = processes,
                                         .address = "127.0.0.1",
                                         .port = port.number()},
                                        300s);
        const auto communicator = job->make_communicator(groups, channels);
        try {
          body(*communicator);
          barrier(*job);
        } catch (const std::exception& error) {
          communicator->abort(error.what());
          throw;
        }
      } catch (const std::exception& error) {
        messages[static_cast<std::size_t>(process)] = error.what();
      }
    });
  threads.clear();
  return messages;
}

// A rendezvous whose process 1, once it has learned where process 0 listens, first lets a hundred
// others connect there, which say nothing or nonsense.
class BesetRendezvous final : public Rendezvous {
 public:
  BesetRendezvous(Rendezvous& job, std::vector<Socket>& strangers) : job_(job), strangers_(strangers) {}
  int process() const override { return job_.process(); }
  int processes() const override { return job_.processes(); }
  int local_process() const override { return job_.local_process(); }
  int local_processes() const override { return job_.local_processes(); }
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> own) override {
    auto all = job_.all_gather(own);
    if (process() != 1) return all;
    std::int64_t port = 0;  // behind a secret of 8 bytes
    std::memcpy(&port, all.at(0).data() + 8, sizeof port);
    std::string failure;
    for (int stranger = 0; stranger < 100; ++stranger) {
      strangers_.push_back(
          connect_once("127.0.0.1", static_cast<int>(port), std::chrono::steady_clock::now() + 300s, failure));
      const std::string said(stranger % 3 == 0 ? 0 : stranger % 3 == 1 ? 5 : 16, 'x');
      CHECK(send(strangers_.back().get(), said.data(), said.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(said.size()));
    }
    return all;
  }
  void check() override { job_.check(); }
  void fail(const std::string& text) noexcept override { job_.fail(text); }
  std::vector<Heard> beat(const Position& own) noexcept override { return job_.beat(own); }
  std::unique_ptr<Communicator> make_communicator(const std::vector<CommunicationGroup>&, int) override {
    return nullptr;
  }

 private:
  Rendezvous& job_;
  std::vector<Socket>& strangers_;
};

void expect(bool right, const std::string& what) {
  if (!right) throw RunError(what);
}

}  // namespace

TEST_CASE("processes that are connected by TCP get the bits of ranks that are threads") {
  for (const int ranks : {2, 3, 4}) {
    const std::vector<CommunicationGroup> groups = {{.id = 3, .ranks = all_of(ranks)}, {.id = 4, .ranks = {0}}};
    const auto messages = as_processes(ranks, groups, 1, [&](Communicator& c) {
      expect(c.ranks() == ranks && c.in_order(), "another job");
      for (const std::int64_t count : counts) {
        for (const Reduction reduction : {Reduction::sum, Reduction::max}) {
          std::vector<float> data = contribution(count, c.rank());
          const Transfer transfer = c.all_reduce(0, 3, reduction, elements(data));
          expect(same_bits(data, reduced(count, all_of(ranks), reduction)), fmt::format("all_reduce of {}", count));
          expect(transfer.sent == all_reduce_bytes(count, 4, ranks, c.rank()), "bytes of all_reduce");
        }
        const std::vector<float> wanted = reduced(count, all_of(ranks), Reduction::sum);
        const Chunk own = chunk_of(count, ranks, c.rank());
        std::vector<float> data = contribution(count, c.rank());
        expect(c.reduce_scatter(0, 3, elements(data)).sent == reduce_scatter_bytes(count, 4, ranks, c.rank()),
               "bytes of reduce_scatter");
        expect(same_bits(data, wanted, own), fmt::format("reduce_scatter of {}", count));
        for (std::int64_t i = 0; i < count; ++i)
          if (i < own.begin || i >= own.end) data[static_cast<std::size_t>(i)] = -1.0f;
        c.all_gather(0, 3, elements(data));
        expect(same_bits(data, wanted), fmt::format("all_gather of {}", count));
        // With the first member.
        const bool is_first = c.rank() == 0;
        const std::vector<float> mine = contribution(count, c.rank());
        std::vector<float> part = mine, collected(static_cast<std::size_t>(is_first ? count * ranks : 0)), parts;
        expect(c.reduce(0, 3, elements(part)).sent == Bytes(is_first ? 0 : 4 * count), "bytes of reduce");
        expect(same_bits(part, is_first ? wanted : mine), fmt::format("reduce of {}", count));
        part = mine;
        expect(c.gather(0, 3, elements(part), elements(collected)).sent == Bytes(is_first ? 0 : 4 * count),
               "bytes of gather");
        for (int member = 0; member < ranks && is_first; ++member) {
          const std::vector<float> of_member = contribution(count, member);
          parts.insert(parts.end(), of_member.begin(), of_member.end());
        }
        expect(same_bits(collected, parts), fmt::format("gather of {}", count));
        const Bytes handed_out(is_first ? 4 * (ranks - 1) * count : 0);
        part.assign(part.size(), -1.0f);
        expect(c.scatter(0, 3, elements(collected), elements(part)).sent == handed_out, "bytes of scatter");
        expect(same_bits(part, mine), fmt::format("scatter of {}", count));
        expect(c.broadcast(0, 3, elements(part)).sent == handed_out, "bytes of broadcast");
        expect(same_bits(part, contribution(count, 0)), fmt::format("broadcast of {}", count));
        std::vector<float> from = contribution(count * ranks, c.rank()), to(from.size());
        c.all_to_all(0, 3, elements(from), elements(to));
        std::vector<float> exchanged;
        for (int member = 0; member < ranks; ++member) {
          const std::vector<float> whole = contribution(count * ranks, member);
          exchanged.insert(exchanged.end(), whole.begin() + c.rank() * count, whole.begin() + (c.rank() + 1) * count);
        }
        expect(same_bits(to, exchanged), fmt::format("all_to_all of {}", count));
      }
    });
    CHECK(messages == std::vector<std::string>(static_cast<std::size_t>(ranks)));
  }
}

// More of them than process 0 would have patience for one after the other.
TEST_CASE("strangers that reach a process before its peers do keep nobody waiting") {
  const LoopbackPort port;
  std::vector<Socket> strangers;
  std::vector<double> sums(2);
  std::vector<std::jthread> threads;
  for (int process = 0; process < 2; ++process)
    threads.emplace_back([&, process] {
      const auto job = tcp_rendezvous({.process = process,
                                       .processes = 2,
                                       .local_process = process,
                                       .local_processes = 2,
                                       .address = "127.0.0.1",
                                       .port = port.number()},
                                      300s);
      BesetRendezvous beset(*job, strangers);
      const auto communicator = make_tcp_communicator(beset, "127.0.0.1", 300s, {{.id = 0, .ranks = {0, 1}}}, 0);
      float number = static_cast<float>(process + 1);
      communicator->all_reduce(0, 0, Reduction::sum, {.data = &number, .count = 1, .type = DataType::fp32});
      sums[static_cast<std::size_t>(process)] = number;
      barrier(*job);
    });
  threads.clear();
  CHECK(strangers.size() == 100);
  CHECK(sums == std::vector<double>{3.0, 3.0});
}

TEST_CASE("over TCP, sends match receives in order, channels do not mix, and a send returns before it is received") {
  constexpr int channels = 3, messages_each = 40;
  const auto messages = as_processes(3, {}, channels, [&](Communicator& c) {
    const int next = (c.rank() + 1) % 3, previous = (c.rank() + 2) % 3;
    const auto value = [](int source, int channel, int number) {
      return static_cast<float>(source * 10000 + channel * 1000 + number);
    };
    const auto length = [](int number) { return static_cast<std::size_t>(number % 10 == 0 ? 300007 : number % 7); };
    std::vector<std::vector<float>> sent;
    std::vector<SendTicket> tickets;
    for (int number = 0; number < messages_each; ++number)
      for (int channel = 0; channel < channels; ++channel)
        sent.emplace_back(length(number), value(c.rank(), channel, number));
    for (int number = 0; number < messages_each; ++number)
      for (int channel = 0; channel < channels; ++channel)
        tickets.push_back(
            c.send(0, next, channel, elements(sent[static_cast<std::size_t>(number * channels + channel)])));
    for (int channel = channels - 1; channel >= 0; --channel)
      for (int number = 0; number < messages_each; ++number) {
        std::vector<float> data(length(number), -1.0f);
        c.receive(0, previous, channel, elements(data));
        expect(data == std::vector<float>(length(number), value(previous, channel, number)), "another message");
      }
    for (const SendTicket& ticket : tickets) c.wait_sent(0, ticket);
  });
  CHECK(messages == std::vector<std::string>(3));
}

TEST_CASE("over TCP, a rank that fails or leaves wakes those that wait for it") {
  const std::vector<CommunicationGroup> groups = {{.id = 0, .ranks = all_of(3)}};
  const auto failed = as_processes(3, groups, 1, [&](Communicator& c) {
    std::vector<float> data = contribution(400000, c.rank());
    c.all_reduce(0, 0, Reduction::sum, elements(data));
    if (c.rank() == 1) throw RunError("out of paper");
    c.all_reduce(0, 0, Reduction::sum, elements(data));
  });
  CHECK(failed == std::vector<std::string>{"rank 1 stopped: out of paper", "out of paper",
                                           "rank 1 stopped: out of paper"});
  const auto mismatch = as_processes(2, {{.id = 0, .ranks = all_of(2)}}, 1, [&](Communicator& c) {
    std::vector<float> data(c.rank() == 1 ? 11 : 10);
    c.all_reduce(0, 0, Reduction::sum, elements(data));
  });
  for (const std::string& message : mismatch) {
    INFO(message);
    CHECK(message.find("group 0: rank ") != std::string::npos);
    CHECK(message.find(" calls all_reduce (sum) of 1") != std::string::npos);
  }
}
