#include "runtime/comm/local/local_communicator.h"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <thread>

#include "planner/base/error.h"
#include "tests/runtime/device/counting_allocator.h"

using namespace parplan;

namespace {

// Runs `body` in a thread per rank. An exception of a rank is thrown here after all have ended, the
// lowest rank's first.
void on_all_ranks(LocalWorld& world, int ranks, const std::function<void(Communicator&)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(world.communicator(rank));
      } catch (const std::exception& error) {
        errors[rank] = std::current_exception();
        world.communicator(rank).abort(error.what());
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

std::vector<int> first_ranks(int count) {
  std::vector<int> ranks;
  for (int i = 0; i < count; ++i) ranks.push_back(i);
  return ranks;
}

// The contribution of rank `rank`: numbers whose sums round, and differently in another order.
std::vector<float> contribution(std::int64_t count, int rank) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i)
    values.push_back(static_cast<float>(std::sin(static_cast<double>(i * 31 + rank * 17 + 1)) * std::pow(10.0, i % 5)));
  return values;
}

std::vector<float> reduced(std::int64_t count, const std::vector<int>& ranks, Reduction reduction) {
  std::vector<float> result = contribution(count, ranks.front());
  for (std::size_t r = 1; r < ranks.size(); ++r) {
    const std::vector<float> next = contribution(count, ranks[r]);
    for (std::size_t i = 0; i < result.size(); ++i)
      result[i] = reduction == Reduction::sum ? result[i] + next[i] : std::max(result[i], next[i]);
  }
  return result;
}

bool same_bits(const float* a, const float* b, std::int64_t count) {
  return count == 0 || std::memcmp(a, b, static_cast<std::size_t>(count) * sizeof(float)) == 0;
}

// Below, at and above the size from which members share the work; no multiples of anything.
constexpr std::int64_t counts[] = {0, 1, 3, 7, 16, 1000, 1024, 1025, 10007};
constexpr int rank_counts[] = {1, 2, 3, 4, 8};

}  // namespace

TEST_CASE("chunks are contiguous, cover everything and are as even as can be") {
  CHECK(chunk_of(10, 4, 0) == Chunk{0, 2});
  CHECK(chunk_of(10, 4, 1) == Chunk{2, 5});
  CHECK(chunk_of(10, 4, 2) == Chunk{5, 7});
  CHECK(chunk_of(10, 4, 3) == Chunk{7, 10});
  CHECK(chunk_of(2, 4, 0) == Chunk{0, 0});
}

TEST_CASE("logical bytes: every chunk but one's own, one's own to all others, or both") {
  // 10 elements over 4: chunks of 2, 3, 2, 3.
  CHECK(reduce_scatter_bytes(10, 4, 4, 0) == Bytes(4 * 8));
  CHECK(reduce_scatter_bytes(10, 4, 4, 1) == Bytes(4 * 7));
  CHECK(all_gather_bytes(10, 4, 4, 0) == Bytes(4 * 3 * 2));
  CHECK(all_gather_bytes(10, 4, 4, 1) == Bytes(4 * 3 * 3));
  CHECK(all_reduce_bytes(10, 4, 4, 1) == Bytes(4 * (7 + 9)));
  CHECK(all_reduce_bytes(10, 4, 1, 0) == Bytes(0));
  CHECK(all_to_all_bytes(12, 4, 4) == Bytes(4 * 9));
  CHECK(all_to_all_bytes(12, 4, 1) == Bytes(0));
}

TEST_CASE("all_reduce adds in ascending order of rank, or takes the maximum, to the bit") {
  for (const int ranks : rank_counts) {
    LocalWorld world(ranks, {{.id = 5, .ranks = first_ranks(ranks)}});
    for (const std::int64_t count : counts)
      for (const Reduction reduction : {Reduction::sum, Reduction::max}) {
        const std::vector<float> wanted = reduced(count, first_ranks(ranks), reduction);
        std::atomic<int> wrong{0};
        on_all_ranks(world, ranks, [&](Communicator& communicator) {
          std::vector<float> data = contribution(count, communicator.rank());
          const Transfer transfer = communicator.all_reduce(0, 5, reduction, {data.data(), count});
          wrong += !same_bits(data.data(), wanted.data(), count);
          wrong += transfer.sent != all_reduce_bytes(count, 4, ranks, communicator.rank());
        });
        INFO(ranks, " ranks, ", count, " elements");
        CHECK(wrong == 0);
      }
  }
}

TEST_CASE("reduce_scatter leaves each member its chunk of the sum, all_gather collects the chunks") {
  for (const int ranks : rank_counts) {
    LocalWorld world(ranks, {{.id = 0, .ranks = first_ranks(ranks)}});
    for (const std::int64_t count : counts) {
      const std::vector<float> wanted = reduced(count, first_ranks(ranks), Reduction::sum);
      std::atomic<int> wrong{0};
      on_all_ranks(world, ranks, [&](Communicator& communicator) {
        const int rank = communicator.rank();
        std::vector<float> data = contribution(count, rank);
        Transfer transfer = communicator.reduce_scatter(0, 0, {data.data(), count});
        wrong += transfer.sent != reduce_scatter_bytes(count, 4, ranks, rank);
        const Chunk own = chunk_of(count, ranks, rank);
        wrong += !same_bits(data.data() + own.begin, wanted.data() + own.begin, own.end - own.begin);
        for (std::int64_t i = 0; i < count; ++i)
          if (i < own.begin || i >= own.end) data[i] = std::nanf("");
        transfer = communicator.all_gather(0, 0, {data.data(), count});
        wrong += transfer.sent != all_gather_bytes(count, 4, ranks, rank);
        wrong += !same_bits(data.data(), wanted.data(), count);
      });
      INFO(ranks, " ranks, ", count, " elements");
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("the first member hands out its data, collects or scatters parts, and adds up in ascending order of rank") {
  for (const int ranks : rank_counts) {
    LocalWorld world(ranks, {{.id = 0, .ranks = first_ranks(ranks)}});
    for (const std::int64_t count : counts) {
      const std::vector<float> sum = reduced(count, first_ranks(ranks), Reduction::sum);
      std::atomic<int> wrong{0};
      on_all_ranks(world, ranks, [&](Communicator& communicator) {
        const int rank = communicator.rank();
        const std::vector<float> own = contribution(count, rank);
        std::vector<float> data = own, whole(static_cast<std::size_t>(rank == 0 ? ranks * count : 0));
        const Elements all{whole.data(), static_cast<std::int64_t>(whole.size())};
        wrong += communicator.reduce(0, 0, {data.data(), count}).sent != Bytes(rank == 0 ? 0 : 4 * count);
        wrong += !same_bits(data.data(), rank == 0 ? sum.data() : own.data(), count);
        data = own;
        wrong += communicator.gather(0, 0, {data.data(), count}, all).sent != Bytes(rank == 0 ? 0 : 4 * count);
        for (int member = 0; member < ranks && rank == 0; ++member)
          wrong += !same_bits(whole.data() + member * count, contribution(count, member).data(), count);
        const Bytes handed_out(rank == 0 ? 4 * (ranks - 1) * count : 0);
        data.assign(data.size(), std::nanf(""));
        wrong += communicator.scatter(0, 0, all, {data.data(), count}).sent != handed_out;
        wrong += !same_bits(data.data(), own.data(), count);
        wrong += communicator.broadcast(0, 0, {data.data(), count}).sent != handed_out;
        wrong += !same_bits(data.data(), contribution(count, 0).data(), count);
      });
      INFO(ranks, " ranks, ", count, " elements");
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("all_to_all brings each member its chunk from every member, and leaves what it sends") {
  for (const int ranks : rank_counts) {
    LocalWorld world(ranks, {{.id = 0, .ranks = first_ranks(ranks)}});
    for (const std::int64_t chunk : counts) {
      const std::int64_t count = chunk * ranks;
      std::atomic<int> wrong{0};
      on_all_ranks(world, ranks, [&](Communicator& communicator) {
        const int rank = communicator.rank();
        std::vector<float> from = contribution(count, rank), to(static_cast<std::size_t>(count), std::nanf(""));
        const Transfer transfer = communicator.all_to_all(0, 0, {from.data(), count}, {to.data(), count});
        wrong += transfer.sent != Bytes(4 * (ranks - 1) * chunk);
        wrong += from != contribution(count, rank);
        for (int member = 0; member < ranks; ++member)
          wrong += !same_bits(to.data() + member * chunk, contribution(count, member).data() + rank * chunk, chunk);
      });
      INFO(ranks, " ranks, ", count, " elements");
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("a NaN of any member reaches all through the maximum") {
  LocalWorld world(3, {{.id = 0, .ranks = {0, 1, 2}}});
  for (int source = 0; source < 3; ++source) {
    std::atomic<int> seen{0};
    on_all_ranks(world, 3, [&](Communicator& communicator) {
      float value = communicator.rank() == source ? std::numeric_limits<float>::quiet_NaN() : 1.0f;
      communicator.all_reduce(0, 0, Reduction::max, {&value, 1});
      seen += std::isnan(value);
    });
    CHECK(seen == 3);
  }
}

TEST_CASE("groups of a grid work side by side, many times over") {
  // Rows {0,1} {2,3} and columns {0,2} {1,3} of a 2 x 2 grid.
  LocalWorld world(4, {{.id = 10, .ranks = {0, 1}}, {.id = 11, .ranks = {2, 3}},
                       {.id = 20, .ranks = {0, 2}}, {.id = 21, .ranks = {1, 3}}});
  std::atomic<int> wrong{0};
  on_all_ranks(world, 4, [&](Communicator& communicator) {
    const int rank = communicator.rank();
    for (int round = 0; round < 300; ++round) {
      std::vector<float> data(2000, static_cast<float>(rank + round));
      communicator.all_reduce(0, 10 + rank / 2, Reduction::sum, {data.data(), 2000});
      communicator.all_reduce(0, 20 + rank % 2, Reduction::sum, {data.data(), 1 + round % 5});
      wrong += data[0] != static_cast<float>(6 + 4 * round);
      const int of_pair = rank / 2 * 4 + 1 + 2 * round;
      wrong += data[1999] != static_cast<float>(of_pair);
    }
  });
  CHECK(wrong == 0);
}

TEST_CASE("crossed sends and receives pass, in order per channel") {
  LocalWorld world(2, {}, 2);
  std::atomic<int> wrong{0};
  on_all_ranks(world, 2, [&](Communicator& communicator) {
    const int rank = communicator.rank(), other = 1 - rank;
    for (int round = 0; round < 200; ++round) {
      std::vector<float> first = contribution(1000, rank + round), second = contribution(10, rank + round + 7);
      std::vector<float> found_first(1000), found_second(10);
      const SendTicket a = communicator.send(0, other, 0, {first.data(), 1000});
      const SendTicket b = communicator.send(0, other, 1, {second.data(), 10});
      wrong += communicator.receive(0, other, 1, {found_second.data(), 10}).sent != Bytes(0);
      communicator.receive(0, other, 0, {found_first.data(), 1000});
      wrong += communicator.wait_sent(0, b).sent != Bytes(40);
      wrong += communicator.wait_sent(0, a).sent != Bytes(4000);
      wrong += found_first != contribution(1000, other + round);
      wrong += found_second != contribution(10, other + round + 7);
    }
  });
  CHECK(wrong == 0);
}

TEST_CASE("many posted sends arrive in order and posting waits when 64 are outstanding") {
  LocalWorld world(2, {});
  std::vector<float> values(500), found(500);
  for (std::size_t i = 0; i < 500; ++i) values[i] = static_cast<float>(i);
  std::atomic<int> posted{0};
  int posted_before_receiving = 0;
  on_all_ranks(world, 2, [&](Communicator& communicator) {
    if (communicator.rank() == 0) {
      SendTicket last;
      for (float& value : values) {
        last = communicator.send(0, 1, 0, {&value, 1});
        ++posted;
      }
      communicator.wait_sent(0, last);
    } else {
      while (posted < 64) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // time for a 65th
      posted_before_receiving = posted;
      for (float& value : found) communicator.receive(0, 0, 0, {&value, 1});
    }
  });
  CHECK(posted_before_receiving == 64);
  CHECK(found == values);
}

TEST_CASE("waiting for a late member is reported as such, not as moving data") {
  // A thread may be suspended anywhere, which looks like waiting, moving or coming late itself; but
  // not in every one of many attempts.
  const auto is_reported = [] {
    LocalWorld world(2, {{.id = 0, .ranks = {0, 1}}});
    Transfer transfers[2];
    on_all_ranks(world, 2, [&](Communicator& communicator) {
      if (communicator.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      float value = 1.0f;
      transfers[communicator.rank()] = communicator.all_reduce(0, 0, Reduction::sum, {&value, 1});
    });
    return transfers[0].waited > Seconds(0.08) && transfers[1].waited < Seconds(0.08) &&
           transfers[0].moving < Seconds(0.08);
  };
  bool reported = false;
  for (int attempt = 0; attempt < 50 && !reported; ++attempt) reported = is_reported();
  CHECK(reported);
}

TEST_CASE("a rank that fails wakes the others, wherever they wait, with its reason") {
  using Wait = std::function<void(Communicator&)>;
  float value = 0.0f;
  const Wait waits[] = {
      [&](Communicator& c) { c.all_reduce(0, 0, Reduction::sum, {&value, 1}); },
      [&](Communicator& c) { c.reduce_scatter(0, 0, {&value, 1}); },
      [&](Communicator& c) { c.all_gather(0, 0, {&value, 1}); },
      [&](Communicator& c) {
        float from[2] = {}, to[2] = {};
        c.all_to_all(0, 0, {from, 2}, {to, 2});
      },
      [&](Communicator& c) { c.receive(0, 1, 0, {&value, 1}); },
      [&](Communicator& c) { c.wait_sent(0, c.send(0, 1, 0, {&value, 1})); },
      [&](Communicator& c) {
        for (;;) c.send(0, 1, 0, {&value, 1});
      },
  };
  for (const Wait& wait : waits) {
    LocalWorld world(2, {{.id = 0, .ranks = {0, 1}}});
    const auto run = [&] {
      on_all_ranks(world, 2, [&](Communicator& communicator) {
        if (communicator.rank() == 0) return wait(communicator);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        throw RunError("out of disk");
      });
    };
    CHECK_THROWS_WITH_AS(run(), "rank 1 stopped: out of disk", RunError);
    // Later calls fail too, and the first reason stays.
    world.communicator(0).abort("something else");
    CHECK_THROWS_WITH_AS(world.communicator(0).send(0, 1, 0, {&value, 1}), "rank 1 stopped: out of disk", RunError);
  }
}

TEST_CASE("calls that do not match are a bug that names both sides") {
  float values[8] = {};
  {
    LocalWorld world(2, {{.id = 3, .ranks = {0, 1}}});
    std::string message;
    try {
      on_all_ranks(world, 2, [&](Communicator& communicator) {
        if (communicator.rank() == 0) {
          communicator.all_reduce(0, 3, Reduction::sum, {values, 8});
        } else {
          communicator.all_gather(0, 3, {values, 4});
        }
      });
    } catch (const InternalError& error) {
      message = error.what();
    }
    CHECK(message.find("group 3: rank 0 calls all_reduce (sum) of 8 fp32 elements, rank 1 all_gather of 4") !=
          std::string::npos);
  }
  {
    LocalWorld world(2, {{.id = 3, .ranks = {0, 1}}});
    std::string message;
    try {
      on_all_ranks(world, 2, [&](Communicator& communicator) {
        if (communicator.rank() == 0) {
          communicator.all_to_all(0, 3, {values, 4}, {values + 4, 4});
        } else {
          communicator.all_to_all(0, 3, {values, 2}, {values + 4, 2});
        }
      });
    } catch (const InternalError& error) {
      message = error.what();
    }
    CHECK(message.find("group 3: rank 0 calls all_to_all of 4 fp32 elements, rank 1 all_to_all of 2") !=
          std::string::npos);
    const auto exchange = [&](std::int64_t from, std::int64_t to) {
      try {
        world.communicator(0).all_to_all(0, 3, {values, from}, {values + 4, to});
      } catch (const InternalError& error) {
        message = error.what();
      }
      return message.substr(message.find("all_to_all of"));
    };
    CHECK(exchange(3, 3) == "all_to_all of 3 fp32 elements into 3 fp32 elements by 2 members");
    CHECK(exchange(4, 2) == "all_to_all of 4 fp32 elements into 2 fp32 elements by 2 members");
  }
  LocalWorld world(2, {{.id = 3, .ranks = {0}}});
  world.communicator(0).send(0, 1, 0, {values, 8});
  std::string message;
  try {
    world.communicator(1).receive(0, 0, 0, {values, 4});
  } catch (const InternalError& error) {
    message = error.what();
  }
  CHECK(message.find("rank 0 sends 8 elements on channel 0, rank 1 receives 4") != std::string::npos);
  CHECK_THROWS_WITH_AS(world.communicator(1).all_gather(0, 3, {values, 1}), "rank 1 is no member of group 3",
                       InternalError);
}

TEST_CASE("communication allocates nothing" * doctest::skip(!allocations_are_counted)) {
  LocalWorld world(3, {{.id = 0, .ranks = {0, 1, 2}}});
  std::atomic<std::int64_t> allocated{0};
  std::atomic<int> ready{0}, finished{0};
  on_all_ranks(world, 3, [&](Communicator& communicator) {
    const int next = (communicator.rank() + 1) % 3, previous = (communicator.rank() + 2) % 3;
    std::vector<float> data(5000, 1.0f), received(5000);
    // All vectors and threads exist before the first counts, and until the last has counted.
    for (++ready; ready < 3;) std::this_thread::yield();
    const std::int64_t before = allocation_count;
    for (const std::int64_t count : {std::int64_t{10}, std::int64_t{5000}}) {
      communicator.all_reduce(0, 0, Reduction::sum, {data.data(), count});
      communicator.all_reduce(0, 0, Reduction::max, {data.data(), count});
      communicator.reduce_scatter(0, 0, {data.data(), count});
      communicator.all_gather(0, 0, {data.data(), count});
      const std::int64_t divisible = count / 3 * 3;
      communicator.all_to_all(0, 0, {data.data(), divisible}, {received.data(), divisible});
      const SendTicket ticket = communicator.send(0, next, 0, {data.data(), count});
      communicator.receive(0, previous, 0, {received.data(), count});
      communicator.wait_sent(0, ticket);
    }
    allocated += allocation_count - before;
    for (++finished; finished < 3;) std::this_thread::yield();
  });
  CHECK(allocated == 0);
}
