#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <fmt/core.h>

#include "planner/base/error.h"
#include "runtime/comm/gpu_plugin.h"
#include "tests/gpu/device.h"

using namespace parplan;
using parplan::testing::gpu_or_skip;
using parplan::testing::is_emulated;

namespace {

// --- Values of 4 and 2 bytes on the host ---------------------------------------------------------

struct Format {
  DataType type;
  int fraction_bits;
  int least_exponent;  // of normal numbers
};
constexpr Format formats[] = {{DataType::fp32, 23, -126}, {DataType::bf16, 7, -126}, {DataType::fp16, 10, -14}};

// Nearest number of the format, ties to even.
double rounded(double value, const Format& format) {
  if (value == 0.0) return value;
  const double quantum = std::ldexp(1.0, std::max(std::ilogb(value), format.least_exponent) - format.fraction_bits);
  return std::nearbyint(value / quantum) * quantum;
}

void store(std::byte* to, double value, const Format& format) {
  if (format.type != DataType::fp16) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(static_cast<float>(value));
    if (format.type == DataType::fp32) {
      std::memcpy(to, &bits, 4);
    } else {
      const std::uint16_t upper = static_cast<std::uint16_t>(bits >> 16);
      std::memcpy(to, &upper, 2);
    }
    return;
  }
  const double magnitude = std::fabs(value);
  int bits = 0;
  if (magnitude < std::ldexp(1.0, -14)) {
    bits = static_cast<int>(std::ldexp(magnitude, 24));
  } else {
    const int exponent = std::ilogb(magnitude);
    bits = (exponent + 15) * 1024 + static_cast<int>(std::ldexp(magnitude, 10 - exponent)) - 1024;
  }
  const std::uint16_t half = static_cast<std::uint16_t>(bits + (std::signbit(value) ? 0x8000 : 0));
  std::memcpy(to, &half, 2);
}

double load(const std::byte* from, const Format& format) {
  if (format.type == DataType::fp32) {
    float value = 0.0f;
    std::memcpy(&value, from, 4);
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, from, 2);
  if (format.type == DataType::bf16) return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double magnitude = exponent == 31   ? (fraction == 0 ? HUGE_VAL : std::nan(""))
                           : exponent == 0 ? std::ldexp(fraction, -24)
                                           : std::ldexp(1024 + fraction, exponent - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

// The contribution of rank `rank`: numbers of the format whose sums round, and differently in
// another order.
double contribution(std::int64_t i, int rank, const Format& format) {
  const double x = std::sin(static_cast<double>(i * 31 + rank * 17 + 1)) * std::pow(10.0, static_cast<double>(i % 3));
  return rounded(x, format);
}

// In ascending order of rank, in fp32; rounded to the format once.
double reduced(std::int64_t i, const std::vector<int>& ranks, Reduction reduction, const Format& format) {
  float result = static_cast<float>(contribution(i, ranks.front(), format));
  for (std::size_t r = 1; r < ranks.size(); ++r) {
    const float next = static_cast<float>(contribution(i, ranks[r], format));
    result = reduction == Reduction::sum ? result + next : std::max(result, next);
  }
  return rounded(result, format);
}

// The error allowed for a sum that was added in another order, and rounded after every addition.
double tolerance(std::int64_t i, const std::vector<int>& ranks, Reduction reduction, const Format& format) {
  if (reduction == Reduction::max) return 0.0;
  double magnitudes = 0.0;
  for (const int rank : ranks) magnitudes += std::fabs(contribution(i, rank, format));
  return static_cast<double>(ranks.size()) * std::ldexp(magnitudes, -format.fraction_bits);
}

// --- Jobs ---------------------------------------------------------------------------------------

struct JobShape {
  int ranks = 0;
  std::vector<CommunicationGroup> groups = {};
  std::vector<SendRoute> routes = {};
  int channels = 1;
};

struct Transport {
  const char* name;
  bool nccl;
};
constexpr Transport transports[] = {{"threads on one GPU", false}, {"NCCL", true}};

// One rank, in its thread.
struct Rank {
  Communicator& communicator;
  Backend& backend;
};
using Body = std::function<void(Rank)>;

// NCCL takes one GPU per rank.
bool can_run(Gpu& gpu, const Transport& transport, int ranks) {
  if (!transport.nccl || static_cast<int>(gpu.devices().size()) >= ranks) return true;
  MESSAGE(fmt::format("{} ranks of NCCL need {} GPUs, {} here", ranks, ranks, gpu.devices().size()));
  return false;
}

// Runs `body` in a thread per rank and waits for its work. An exception of a rank is thrown here
// after all have ended, the lowest rank's first.
void on_all_ranks(Gpu& gpu, const Transport& transport, const JobShape& shape, const Body& body) {
  const std::unique_ptr<GpuLocalWorld> world =
      transport.nccl ? nullptr : gpu.make_local_world(shape.ranks, shape.groups, shape.channels);
  const std::vector<std::byte> id = transport.nccl ? gpu.make_nccl_id() : std::vector<std::byte>();
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(shape.ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < shape.ranks; ++rank)
    threads.emplace_back([&, rank] {
      try {
        const int device = transport.nccl ? rank : 0;
        const std::unique_ptr<Backend> backend = gpu.make_backend(device, {});
        backend->attach_thread();
        const std::unique_ptr<Communicator> communicator =
            transport.nccl ? gpu.make_nccl_communicator(id, rank, shape.ranks, shape.groups, shape.routes, *backend)
                           : world->communicator(rank, *backend);
        try {
          body({*communicator, *backend});
          backend->synchronize();
          communicator->check();
        } catch (const std::exception& error) {
          communicator->abort(error.what());
          throw;
        }
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

// The emulator takes streams in another order every time.
void repeat(Gpu& gpu, int times, const std::function<void()>& job) {
  for (int time = 0; time < (is_emulated(gpu) ? times : 1); ++time) {
    CAPTURE(time);
    job();
  }
}

void for_each_transport(Gpu& gpu, int ranks, const std::function<void(const Transport&)>& job) {
  for (const Transport& transport : transports) {
    if (!can_run(gpu, transport, ranks)) continue;
    const std::string name = fmt::format("{}, {} ranks", transport.name, ranks);
    CAPTURE(name);
    job(transport);
  }
}

// Memory of one rank, freed with it; the work of all streams must be finished by then.
class Memory {
 public:
  Memory(Backend& backend, std::int64_t bytes, bool on_device) : backend_(backend), on_device_(on_device) {
    memory_ = static_cast<std::byte*>(on_device ? backend.allocate(Bytes(bytes)) : backend.allocate_host(Bytes(bytes)));
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    try {
      backend_.synchronize();
    } catch (const std::exception&) {  // an earlier wait has reported it
    }
    on_device_ ? backend_.release(memory_) : backend_.release_host(memory_);
  }
  std::byte* at(std::int64_t byte = 0) const { return memory_ + byte; }

 private:
  Backend& backend_;
  bool on_device_;
  std::byte* memory_ = nullptr;
};

// Collects the faults of any rank; doctest's own checks stay in the test's thread.
class Findings {
 public:
  void add(const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (count_++ == 0) first_ = text;
  }
  void check() const { CHECK_MESSAGE(count_ == 0, fmt::format("{} wrong, first: {}", count_, first_)); }

 private:
  std::mutex mutex_;
  int count_ = 0;
  std::string first_;
};

std::vector<int> first_ranks(int count) {
  std::vector<int> ranks;
  for (int i = 0; i < count; ++i) ranks.push_back(i);
  return ranks;
}

constexpr std::uint32_t poison = 0x7fc17fc1;  // NaN as one fp32, two bf16 or two fp16

// Device memory that is filled, communicated, copied away and poisoned on one stream without the
// host waiting: only events keep a slow rank from reading what a fast one has overwritten.
class Exchange {
 public:
  Exchange(Backend& backend, StreamId stream, std::int64_t capacity, int uses)
      : backend_(backend), stream_(stream), capacity_((capacity + 255) / 256 * 256), device_(backend, capacity_, true),
        from_(backend, capacity_ * uses, false), to_(backend, capacity_ * uses, false) {}

  std::byte* device() const { return device_.at(); }

  // Returns what will hold the data after `communicate`, once the stream was waited for.
  template <class Value, class Communicate>
  const std::byte* operator()(std::int64_t count, const Format& format, const Value& value,
                              const Communicate& communicate) {
    const std::int64_t bytes = count * size_of(format.type);
    REQUIRE(bytes <= capacity_);
    std::byte* from = from_.at(capacity_ * used_);
    std::byte* to = to_.at(capacity_ * used_);
    ++used_;
    for (std::int64_t i = 0; i < count; ++i) store(from + i * size_of(format.type), value(i), format);
    if (bytes > 0) backend_.copy(stream_, device_.at(), from, Bytes(bytes));
    communicate(Elements{.data = device_.at(), .count = count, .type = format.type});
    if (bytes > 0) backend_.copy(stream_, to, device_.at(), Bytes(bytes));
    backend_.fill(stream_, device_.at(), poison, capacity_ / 4);
    return to;
  }

 private:
  Backend& backend_;
  StreamId stream_;
  std::int64_t capacity_;
  int used_ = 0;
  Memory device_, from_, to_;
};

}  // namespace

TEST_CASE("collectives of GPUs reduce and gather every type and count, in order to the bit where they say so") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  struct Case {
    Format format;
    std::int64_t count;
    int collective;  // all_reduce sum, max, reduce_scatter, all_gather
    const std::byte* found;
  };
  for (const int ranks : {2, 3, 5}) {
    const std::vector<int> all = first_ranks(ranks);
    // None, one, fewer than ranks, one each, divisible, not divisible, and several blocks of a
    // kernel.
    const std::int64_t counts[] = {0, 1, ranks - 1, ranks, 24 * ranks, 1003, 4099};
    constexpr int cases_of_stream = 3 * 7 * 4;
    for_each_transport(*gpu, ranks, [&](const Transport& transport) {
      repeat(*gpu, 3, [&] {
        Findings findings;
        on_all_ranks(*gpu, transport, {.ranks = ranks, .groups = {{.id = 5, .ranks = all}}}, [&](Rank self) {
          const int rank = self.communicator.rank();
          Exchange first(self.backend, 0, 4 * 4099, cases_of_stream),
              second(self.backend, 1, 4 * 4099, cases_of_stream);
          std::vector<Case> cases;
          for (const Format& format : formats)
            for (const std::int64_t count : counts)
              for (int collective = 0; collective < 4; ++collective) {
                const StreamId stream = static_cast<StreamId>(cases.size() % 2);
                Exchange& exchange = stream == 0 ? first : second;
                const Chunk own = chunk_of(count, ranks, rank);
                const auto value = [&](std::int64_t i) {
                  if (collective < 3) return contribution(i, rank, format);
                  return i >= own.begin && i < own.end ? contribution(i, 7, format) : 1e4;
                };
                const auto communicate = [&](Elements data) {
                  Communicator& c = self.communicator;
                  const Transfer transfer = collective == 0   ? c.all_reduce(stream, 5, Reduction::sum, data)
                                            : collective == 1 ? c.all_reduce(stream, 5, Reduction::max, data)
                                            : collective == 2 ? c.reduce_scatter(stream, 5, data)
                                                              : c.all_gather(stream, 5, data);
                  const std::int64_t element = size_of(format.type);
                  const Bytes promised = collective < 2    ? all_reduce_bytes(count, element, ranks, rank)
                                         : collective == 2 ? reduce_scatter_bytes(count, element, ranks, rank)
                                                           : all_gather_bytes(count, element, ranks, rank);
                  if (transfer.sent != promised)
                    findings.add(fmt::format("{} bytes sent, not {}", transfer.sent.count, promised.count));
                };
                cases.push_back({format, count, collective, exchange(count, format, value, communicate)});
              }
          self.backend.synchronize();
          for (const Case& c : cases) {
            const Chunk own = chunk_of(c.count, ranks, rank);
            const Reduction reduction = c.collective == 1 ? Reduction::max : Reduction::sum;
            for (std::int64_t i = c.collective == 2 ? own.begin : 0; i < (c.collective == 2 ? own.end : c.count); ++i) {
              const double found = load(c.found + i * size_of(c.format.type), c.format);
              const double wanted =
                  c.collective == 3 ? contribution(i, 7, c.format) : reduced(i, all, reduction, c.format);
              const double slack =
                  c.collective == 3 || self.communicator.in_order() ? 0.0 : tolerance(i, all, reduction, c.format);
              if (!(std::fabs(found - wanted) <= slack))
                findings.add(fmt::format("rank {}, collective {}, {}, element {} of {}: {} instead of {}", rank,
                                         c.collective, name(c.format.type), i, c.count, found, wanted));
            }
          }
        });
        findings.check();
      });
    });
  }
}

TEST_CASE("all_to_all of GPUs brings each member its chunk from every member, in every type") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  for (const int ranks : {1, 2, 3, 5})
    for_each_transport(*gpu, ranks, [&](const Transport& transport) {
      repeat(*gpu, 3, [&] {
        Findings findings;
        on_all_ranks(*gpu, transport, {.ranks = ranks, .groups = {{.id = 5, .ranks = first_ranks(ranks)}}},
                     [&](Rank self) {
                       const int rank = self.communicator.rank();
                       for (const Format& format : formats)
                         for (const std::int64_t chunk : {0, 1, 24, 1003}) {
                           const std::int64_t count = chunk * ranks, element = size_of(format.type);
                           // The Exchange's memory is sent from, and receives what came elsewhere.
                           const Memory received(self.backend, 4 * 1003 * ranks, true);
                           Exchange exchange(self.backend, 1, 4 * 1003 * ranks, 1);
                           self.backend.fill(1, received.at(), poison, 1003 * ranks);
                           const std::byte* found = exchange(
                               count, format, [&](std::int64_t i) { return contribution(i, rank, format); },
                               [&](Elements from) {
                                 const Elements to{.data = received.at(), .count = count, .type = format.type};
                                 const Transfer transfer = self.communicator.all_to_all(1, 5, from, to);
                                 if (transfer.sent != Bytes(element * (ranks - 1) * chunk))
                                   findings.add(fmt::format("{} bytes sent", transfer.sent.count));
                                 if (count > 0)
                                   self.backend.copy(1, exchange.device(), received.at(), Bytes(count * element));
                               });
                           self.backend.synchronize();
                           for (std::int64_t i = 0; i < count; ++i) {
                             const int member = static_cast<int>(i / chunk);
                             const double wanted = contribution(rank * chunk + i % chunk, member, format);
                             if (load(found + i * element, format) != wanted)
                               findings.add(fmt::format("rank {}, {}, element {}", rank, name(format.type), i));
                           }
                         }
                     });
        findings.check();
      });
    });
}

TEST_CASE("the first of several GPUs hands out its data, collects or scatters parts, and adds up, in every type") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  for (const int ranks : {1, 2, 3}) {
    const std::vector<int> all = first_ranks(ranks);
    for_each_transport(*gpu, ranks, [&](const Transport& transport) {
      Findings findings;
      on_all_ranks(*gpu, transport, {.ranks = ranks, .groups = {{.id = 5, .ranks = all}}}, [&](Rank self) {
        const int rank = self.communicator.rank();
        for (const Format& format : formats)
          for (const std::int64_t count : {0, 1, 1003}) {
            const std::int64_t bytes = count * size_of(format.type);
            const Memory whole(self.backend, 4 * 1003 * ranks, true);
            const Elements parts{.data = rank == 0 ? whole.at() : nullptr,
                                 .count = rank == 0 ? count * ranks : 0,
                                 .type = format.type};
            Exchange exchange(self.backend, 1, 4 * 1003, 3);
            const auto own = [&](std::int64_t i) { return contribution(i, rank, format); };
            const auto expect = [&](const Transfer& transfer, bool hands_out) {
              const std::int64_t sent = hands_out ? (rank == 0 ? (ranks - 1) * bytes : 0) : rank == 0 ? 0 : bytes;
              if (transfer.sent != Bytes(sent)) findings.add(fmt::format("{} bytes sent", transfer.sent.count));
            };
            const std::byte* sum = exchange(
                count, format, own, [&](Elements data) { expect(self.communicator.reduce(1, 5, data), false); });
            const std::byte* first = exchange(
                count, format, own, [&](Elements data) { expect(self.communicator.broadcast(1, 5, data), true); });
            const std::byte* back = exchange(count, format, own, [&](Elements data) {
              expect(self.communicator.gather(1, 5, data, parts), false);
              if (count > 0) self.backend.fill(1, data.data, poison, (bytes + 3) / 4);
              expect(self.communicator.scatter(1, 5, parts, data), true);
            });
            self.backend.synchronize();
            for (std::int64_t i = 0; i < count; ++i) {
              const double added = load(sum + i * size_of(format.type), format);
              const double wanted = rank == 0 ? reduced(i, all, Reduction::sum, format) : own(i);
              const double slack = rank > 0 || self.communicator.in_order()
                                       ? 0.0
                                       : tolerance(i, all, Reduction::sum, format);
              if (!(std::fabs(added - wanted) <= slack)) findings.add(fmt::format("sum, rank {}, element {}", rank, i));
              if (load(first + i * size_of(format.type), format) != contribution(i, 0, format))
                findings.add(fmt::format("broadcast, rank {}, element {}", rank, i));
              if (load(back + i * size_of(format.type), format) != own(i))
                findings.add(fmt::format("gather and scatter, rank {}, element {}", rank, i));
            }
          }
      });
      findings.check();
    });
  }
}

TEST_CASE("only threads on one GPU promise sums in ascending order of rank") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  for_each_transport(*gpu, 2, [&](const Transport& transport) {
    on_all_ranks(*gpu, transport, {.ranks = 2}, [&](Rank self) {
      if (self.communicator.in_order() == transport.nccl || self.communicator.ranks() != 2) throw RunError("wrong");
    });
  });
}

TEST_CASE("a sum over many ranks of one GPU is in order and rounded once") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  constexpr int ranks = 19;
  const std::vector<int> all = first_ranks(ranks);
  Findings findings;
  on_all_ranks(*gpu, transports[0], {.ranks = ranks, .groups = {{.id = 0, .ranks = all}}}, [&](Rank self) {
    for (const Format& format : formats)
      for (const Reduction reduction : {Reduction::sum, Reduction::max}) {
        Exchange exchange(self.backend, 0, 4 * 1003, 1);
        const std::byte* found = exchange(
            1003, format, [&](std::int64_t i) { return contribution(i, self.communicator.rank(), format); },
            [&](Elements data) { self.communicator.all_reduce(0, 0, reduction, data); });
        self.backend.synchronize();
        for (std::int64_t i = 0; i < 1003; ++i)
          if (load(found + i * size_of(format.type), format) != reduced(i, all, reduction, format))
            findings.add(fmt::format("{} element {}", name(format.type), i));
      }
  });
  findings.check();
}

TEST_CASE("a NaN of any member reaches all through the maximum of GPUs in every type") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  Findings findings;
  on_all_ranks(*gpu, transports[0], {.ranks = 3, .groups = {{.id = 0, .ranks = {0, 1, 2}}}}, [&](Rank self) {
    for (const Format& format : formats)
      for (int source = 0; source < 3; ++source) {
        const Memory device(self.backend, 256, true), host(self.backend, 256, false);
        self.backend.fill(0, device.at(), self.communicator.rank() == source ? poison : 0, 64);
        self.communicator.all_reduce(0, 0, Reduction::max, {.data = device.at(), .count = 3, .type = format.type});
        self.backend.copy(0, host.at(), device.at(), Bytes(256));
        self.backend.synchronize();
        for (int i = 0; i < 3; ++i)
          if (!std::isnan(load(host.at(i * size_of(format.type)), format))) findings.add(name(format.type));
      }
  });
  findings.check();
}

TEST_CASE("groups of a mesh of GPUs work side by side on streams of their own") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const JobShape mesh = {.ranks = 4,
                         .groups = {{.id = 10, .ranks = {0, 1}},
                                    {.id = 11, .ranks = {2, 3}},
                                    {.id = 20, .ranks = {0, 2}},
                                    {.id = 21, .ranks = {1, 3}},
                                    {.id = 30, .ranks = {0, 1, 2, 3}}}};
  constexpr int rounds = 12;
  constexpr std::int64_t count = 1001;
  const Format& format = formats[0];
  for_each_transport(*gpu, 4, [&](const Transport& transport) {
    repeat(*gpu, 5, [&] {
      Findings findings;
      on_all_ranks(*gpu, transport, mesh, [&](Rank self) {
        Communicator& c = self.communicator;
        const int rank = c.rank();
        Exchange tensor(self.backend, 1, 4 * count, rounds), data(self.backend, 2, 4 * count, rounds),
            all(self.backend, 3, 4 * count, rounds);
        std::vector<const std::byte*> of_tensor, of_data, of_all;
        for (int round = 0; round < rounds; ++round) {
          // Whole numbers, so every order of adding is exact.
          const auto value = [&](std::int64_t i) { return static_cast<double>(rank + 10 * round + i % 7); };
          of_tensor.push_back(
              tensor(count, format, value, [&](Elements e) { c.all_reduce(1, 10 + rank / 2, Reduction::sum, e); }));
          of_data.push_back(data(count, format, value, [&](Elements e) {
            c.reduce_scatter(2, 20 + rank % 2, e);
            c.all_gather(2, 20 + rank % 2, e);
          }));
          of_all.push_back(all(count, format, value, [&](Elements e) { c.all_reduce(3, 30, Reduction::max, e); }));
        }
        self.backend.synchronize();
        for (int round = 0; round < rounds; ++round)
          for (std::int64_t i = 0; i < count; ++i) {
            const double both = static_cast<double>(2 * (10 * round + i % 7));
            const std::size_t r = static_cast<std::size_t>(round);
            if (load(of_tensor[r] + 4 * i, format) != both + rank / 2 * 4 + 1)
              findings.add(fmt::format("tensor, round {}", round));
            if (load(of_data[r] + 4 * i, format) != both + rank % 2 * 2 + 2)
              findings.add(fmt::format("data, round {}", round));
            if (load(of_all[r] + 4 * i, format) != both / 2 + 3) findings.add(fmt::format("all, round {}", round));
          }
      });
      findings.check();
    });
  });
}

TEST_CASE("sends between GPUs cross on two channels in both directions and may be overwritten once waited for") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const JobShape ring = {
      .ranks = 3,
      .routes = {{0, 1, 0}, {1, 2, 0}, {2, 0, 0}, {1, 0, 1}, {2, 1, 1}, {0, 2, 1}},  // forward on 0, backward on 1
      .channels = 2};
  constexpr int messages = 20;
  for_each_transport(*gpu, 3, [&](const Transport& transport) {
    repeat(*gpu, 5, [&] {
      Findings findings;
      on_all_ranks(*gpu, transport, ring, [&](Rank self) {
        Communicator& c = self.communicator;
        const int rank = c.rank(), next = (rank + 1) % 3, previous = (rank + 2) % 3;
        const int to[] = {next, previous}, from[] = {previous, next};
        const auto value = [](int source, int channel, int message, std::int64_t i) {
          return static_cast<double>(100 * source + 1000 * channel + 10 * message + i % 10);
        };
        const auto count_of = [](int channel, int message) {
          return static_cast<std::int64_t>(message % 5 == 4 ? 0 : 257 * (channel + 1));
        };
        const Memory device(self.backend, 4 * 4096, true);
        const Memory host(self.backend, 2 * 4096, false);
        const Memory found(self.backend, 2 * messages * 4096, false);
        // Streams 0 and 1 send, 2 and 3 receive; each has its own device memory.
        const auto place = [&](StreamId stream) { return device.at(4096 * stream); };
        std::vector<std::unique_ptr<Memory>> sources;
        for (int message = 0; message < messages; ++message) {
          SendTicket tickets[2];
          for (int channel = 0; channel < 2; ++channel) {
            const std::int64_t count = count_of(channel, message);
            sources.push_back(std::make_unique<Memory>(self.backend, 4096, false));
            for (std::int64_t i = 0; i < count; ++i)
              store(sources.back()->at(4 * i), value(rank, channel, message, i), formats[0]);
            self.backend.copy(channel, place(channel), sources.back()->at(), Bytes(4096));
            tickets[channel] = c.send(channel, to[channel], channel, {.data = place(channel), .count = count});
          }
          for (int channel = 1; channel >= 0; --channel) {
            const StreamId stream = 2 + channel;
            const std::int64_t count = count_of(channel, message);
            if (c.receive(stream, from[channel], channel, {.data = place(stream), .count = count}).sent != Bytes(0))
              findings.add("bytes");
            self.backend.copy(stream, found.at((2 * message + channel) * 4096), place(stream), Bytes(4096));
            self.backend.fill(stream, place(stream), poison, 1024);
          }
          for (int channel = 0; channel < 2; ++channel) {
            // A stream other than the send's waits for it, and lets the send's own continue.
            const StreamId other = 4 + channel;
            if (c.wait_sent(other, tickets[channel]).sent != Bytes(4 * count_of(channel, message)))
              findings.add("bytes of a send");
            self.backend.fill(other, place(channel), poison, 1024);
            self.backend.record(other, channel);
            self.backend.wait(channel, channel);
          }
        }
        self.backend.synchronize();
        for (int message = 0; message < messages; ++message)
          for (int channel = 0; channel < 2; ++channel)
            for (std::int64_t i = 0; i < count_of(channel, message); ++i)
              if (load(found.at((2 * message + channel) * 4096 + 4 * i), formats[0]) !=
                  value(from[channel], channel, message, i))
                findings.add(fmt::format("rank {}, channel {}, message {}, element {}", rank, channel, message, i));
      });
      findings.check();
    });
  });
}

TEST_CASE("more sends between GPUs than may be outstanding arrive in order") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  constexpr int messages = 150;
  for_each_transport(*gpu, 2, [&](const Transport& transport) {
    Findings findings;
    std::atomic<int> posted{0};
    int posted_before_receiving = 0;
    on_all_ranks(*gpu, transport, {.ranks = 2, .routes = {{0, 1, 0}}}, [&](Rank self) {
      const Memory device(self.backend, 256 * messages, true), host(self.backend, 256 * messages, false);
      if (self.communicator.rank() == 0) {
        std::vector<SendTicket> tickets;
        for (int message = 0; message < messages; ++message) {
          self.backend.fill(1, device.at(256 * message), static_cast<std::uint32_t>(message), 64);
          tickets.push_back(self.communicator.send(1, 1, 0, {.data = device.at(256 * message), .count = 64}));
          ++posted;
        }
        for (const SendTicket& ticket : tickets) self.communicator.wait_sent(1, ticket);
        self.backend.fill(1, device.at(), poison, 64 * messages);
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        posted_before_receiving = posted;
        for (int message = 0; message < messages; ++message)
          self.communicator.receive(message % 3, 0, 0, {.data = device.at(256 * message), .count = 64});
        for (int message = 0; message < messages; ++message)
          self.backend.copy(message % 3, host.at(256 * message), device.at(256 * message), Bytes(256));
        self.backend.synchronize();
        for (int word = 0; word < 64 * messages; ++word) {
          std::uint32_t found = 0;
          std::memcpy(&found, host.at(4 * word), 4);
          if (found != static_cast<std::uint32_t>(word / 64)) findings.add(fmt::format("word {} is {}", word, found));
        }
      }
    });
    findings.check();
    CHECK(posted_before_receiving <= 64);
  });
}

TEST_CASE("a rank that fails wakes the ranks of GPUs that wait, on the host or on the device, with its reason") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  using Wait = std::function<void(Communicator&, Elements)>;
  const Wait waits[] = {
      [](Communicator& c, Elements data) { c.all_reduce(0, 0, Reduction::sum, data); },
      [](Communicator& c, Elements data) { c.reduce_scatter(0, 0, data); },
      [](Communicator& c, Elements data) { c.all_gather(0, 0, data); },
      [](Communicator& c, Elements data) {
        const std::int64_t half = data.count / 2;
        c.all_to_all(0, 0, {.data = data.data, .count = half},
                     {.data = static_cast<float*>(data.data) + half, .count = half});
      },
      [](Communicator& c, Elements data) { c.receive(0, 1, 0, data); },
      [](Communicator& c, Elements data) { c.wait_sent(0, c.send(0, 1, 0, data)); },
      [](Communicator& c, Elements data) {
        for (int i = 0; i < 65; ++i) c.send(0, 1, 0, data);
      },
  };
  for_each_transport(*gpu, 2, [&](const Transport& transport) {
    for (const Wait& wait : waits) {
      const JobShape pair = {.ranks = 2, .groups = {{.id = 0, .ranks = {0, 1}}}, .routes = {{0, 1, 0}, {1, 0, 0}}};
      std::string later, checked;
      const auto run = [&] {
        on_all_ranks(*gpu, transport, pair, [&](Rank self) {
          if (self.communicator.rank() == 1) {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            throw RunError("out of disk");
          }
          const Memory device(self.backend, 1 << 20, true);
          const Elements data = {.data = device.at(), .count = 1 << 18};
          try {
            wait(self.communicator, data);
            self.backend.synchronize();
            self.communicator.check();
          } catch (const std::exception&) {
            // Later calls fail too, and the first reason stays.
            self.communicator.abort("something else");
            try {
              self.communicator.send(0, 1, 0, data);
            } catch (const std::exception& error) {
              later = error.what();
            }
            try {
              self.communicator.check();
            } catch (const std::exception& error) {
              checked = error.what();
            }
            throw;
          }
        });
      };
      CHECK_THROWS_WITH_AS(run(), "rank 1 stopped: out of disk", RunError);
      CHECK(later == "rank 1 stopped: out of disk");
      CHECK(checked == "rank 1 stopped: out of disk");
    }
  });
}

TEST_CASE("calls of threads on one GPU that do not match are a bug that names both sides") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const auto message_of = [&](const std::function<void(Communicator&, std::byte*)>& first,
                              const std::function<void(Communicator&, std::byte*)>& second) {
    std::string message;
    try {
      on_all_ranks(*gpu, transports[0], {.ranks = 2, .groups = {{.id = 3, .ranks = {0, 1}}, {.id = 4, .ranks = {1}}}},
                   [&](Rank self) {
                     const Memory device(self.backend, 256, true);
                     (self.communicator.rank() == 0 ? first : second)(self.communicator, device.at());
                   });
    } catch (const std::exception& error) {
      message = error.what();
    }
    return message;
  };
  const auto sum = [](Communicator& c, std::byte* data) {
    c.all_reduce(0, 3, Reduction::sum, {.data = data, .count = 8});
  };
  const auto says = [](const std::string& message, const std::string& part) {
    INFO(message);
    CHECK(message.find(part) != std::string::npos);
  };
  says(message_of(sum, [](Communicator& c, std::byte* data) { c.all_gather(0, 3, {.data = data, .count = 4}); }),
       "group 3: rank 0 calls all_reduce (sum) of 8 fp32 elements, rank 1 all_gather of 4 fp32 elements");
  says(message_of(sum, [](Communicator& c,
                          std::byte* data) { c.all_reduce(0, 3, Reduction::max, {.data = data, .count = 8}); }),
       "group 3: rank 0 calls all_reduce (sum) of 8 fp32 elements, rank 1 all_reduce (max) of 8 fp32 elements");
  says(message_of(sum,
                  [](Communicator& c, std::byte* data) {
                    c.all_reduce(0, 3, Reduction::sum, {.data = data, .count = 8, .type = DataType::bf16});
                  }),
       "group 3: rank 0 calls all_reduce (sum) of 8 fp32 elements, rank 1 all_reduce (sum) of 8 bf16 elements");
  says(message_of(sum,
                  [](Communicator& c, std::byte* data) {
                    c.all_to_all(0, 3, {.data = data, .count = 8}, {.data = data + 32, .count = 8});
                  }),
       "group 3: rank 0 calls all_reduce (sum) of 8 fp32 elements, rank 1 all_to_all of 8 fp32 elements");
  const auto quiet = [](Communicator&, std::byte*) {};
  says(message_of([](Communicator& c, std::byte* data) { c.send(0, 1, 0, {.data = data, .count = 8}); },
                  [](Communicator& c, std::byte* data) {
                    c.receive(0, 0, 0, {.data = data, .count = 4, .type = DataType::fp16});
                  }),
       "rank 0 sends 8 fp32 elements on channel 0, rank 1 receives 4 fp16 elements");
  says(message_of([](Communicator& c, std::byte* data) { c.all_gather(0, 4, {.data = data, .count = 8}); }, quiet),
       "rank 0 is no member of group 4");
  says(message_of([](Communicator& c, std::byte* data) { c.send(0, 1, 1, {.data = data, .count = 8}); }, quiet),
       "from rank 0 to rank 1 on channel 1: 2 ranks, 1 channels");
}

TEST_CASE("NCCL refuses a send for which no route was named, and groups that a rank is not in") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  if (!can_run(*gpu, transports[1], 2)) return;
  const auto message_of = [&](const std::function<void(Communicator&, Elements)>& call) {
    std::string message;
    try {
      on_all_ranks(*gpu, transports[1], {.ranks = 2, .groups = {{.id = 4, .ranks = {1}}}, .routes = {{0, 1, 0}}},
                   [&](Rank self) {
                     const Memory device(self.backend, 256, true);
                     if (self.communicator.rank() == 0) call(self.communicator, {.data = device.at(), .count = 8});
                   });
    } catch (const InternalError& error) {
      message = error.what();
    }
    return message;
  };
  CHECK(message_of([](Communicator& c, Elements data) { c.send(0, 1, 1, data); }) ==
        "no route from rank 0 to rank 1 on channel 1");
  CHECK(message_of([](Communicator& c, Elements data) { c.receive(0, 1, 0, data); }) ==
        "no route from rank 1 to rank 0 on channel 0");
  CHECK(message_of([](Communicator& c, Elements data) { c.all_gather(0, 4, data); }) ==
        "rank 0 is no member of group 4");
  CHECK(message_of([](Communicator& c, Elements data) { c.all_to_all(0, 4, data, data); }) ==
        "rank 0 is no member of group 4");
}

TEST_CASE("memory that is registered with NCCL is communicated as any other") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  for_each_transport(*gpu, 2, [&](const Transport& transport) {
    Findings findings;
    on_all_ranks(
        *gpu, transport, {.ranks = 2, .groups = {{.id = 0, .ranks = {0, 1}}}, .routes = {{0, 1, 0}}}, [&](Rank self) {
          Exchange exchange(self.backend, 0, 4 * 1000, 1);
          self.communicator.register_memory(exchange.device(), Bytes(4 * 1000));
          const std::byte* found = exchange(
              1000, formats[0], [&](std::int64_t i) { return static_cast<double>(i + self.communicator.rank()); },
              [&](Elements data) { self.communicator.all_reduce(0, 0, Reduction::sum, data); });
          self.backend.synchronize();
          for (std::int64_t i = 0; i < 1000; ++i)
            if (load(found + 4 * i, formats[0]) != static_cast<double>(2 * i + 1))
              findings.add(fmt::format("element {}", i));
        });
    findings.check();
  });
}
