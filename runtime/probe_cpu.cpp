#include "runtime/probe_cpu.h"

#include <algorithm>
#include <barrier>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <thread>

#include "runtime/comm/local/local_communicator.h"
#include "runtime/device/cpu/cpu_backend.h"

namespace parplan {
namespace {

Seconds now() {
  return Seconds(std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count());
}

// Long enough to average over the clock's ramp and other programs' time slices.
constexpr Seconds time_per_kernel(0.3);
// Elements of a tensor that stays in no cache: 64 MiB for one thread, divided among several down to
// 16 MiB.
std::int64_t large_elements(int threads) { return (std::int64_t{16} << 20) / std::min(threads, 4); }

// A kernel on its own operands: elements for each operand in the order of the op's row; the
// workspace is added automatically.
class Probe {
 public:
  Probe(Backend& backend, OpKind kind, const OpShape& shape, const std::vector<std::int64_t>& elements)
      : backend_(backend), kind_(kind), shape_(shape) {
    for (const std::int64_t count : elements) add(Bytes(4 * count));
    if (const auto workspace = row_of(kind).cpu_workspace) add(workspace(shape));
  }
  ~Probe() {
    for (void* memory : operands_) backend_.release(memory);
  }
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  void run() { backend_.run(0, {.kind = kind_, .shape = shape_, .operands = operands_}); }
  OpWork work() const { return row_of(kind_).work(shape_, DataType::fp32); }

 private:
  void add(Bytes bytes) {
    void* memory = backend_.allocate(bytes);
    operands_.push_back(memory);
    // Numbers of ordinary size: denormals and NaN would be slow.
    std::fill_n(static_cast<float*>(memory), bytes.count / 4, 0.01f);
  }

  Backend& backend_;
  OpKind kind_;
  OpShape shape_;
  std::vector<void*> operands_;
};

// The typical one of `times`: the lower quartile, since other programs only make runs longer.
Seconds typical(std::vector<Seconds>& times) {
  const auto quartile = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 4);
  std::nth_element(times.begin(), quartile, times.end());
  return *quartile;
}

// The time of one run of all `probes`, one after the other, repeated.
Seconds time_of(const std::vector<Probe*>& probes) {
  for (Probe* probe : probes) probe->run();
  std::vector<Seconds> runs;
  const Seconds begin = now();
  for (Seconds last = begin; last - begin < time_per_kernel;) {
    for (Probe* probe : probes) probe->run();
    const Seconds end = now();
    runs.push_back(end - last);
    last = end;
  }
  return typical(runs);
}

// Calls `body(thread)` in `threads` threads at once; an exception of one is thrown here.
void in_threads(int threads, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(threads));
  {
    std::vector<std::jthread> running;
    for (int t = 0; t < threads; ++t)
      running.emplace_back([&, t] {
        try {
          body(t);
        } catch (...) {
          failures[t] = std::current_exception();
        }
      });
  }
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

}  // namespace

MeasuredRates measure_rates(int threads) {
  constexpr std::int64_t tokens = 256;
  constexpr std::int64_t in = 768;
  constexpr std::int64_t out = 3072;
  std::vector<MeasuredRates> measured(static_cast<std::size_t>(threads));
  std::barrier together(threads);
  in_threads(threads, [&](int thread) {
    // A thread that fails must not leave the others waiting for it.
    struct Leave {
      std::barrier<>& barrier;
      ~Leave() { barrier.arrive_and_drop(); }
    } leave{together};
    const std::unique_ptr<Backend> backend = make_cpu_backend();
    const OpShape linear{.rows = tokens, .columns = out, .inner = in};
    Probe forward(*backend, OpKind::linear, linear, {tokens * in, out * in, tokens * out});
    Probe input_gradient(*backend, OpKind::linear_input_gradient, linear, {tokens * out, out * in, tokens * in});
    Probe weight_gradient(*backend, OpKind::linear_weight_gradient, linear, {tokens * out, tokens * in, out * in});
    const OpShape activation{.rows = 32, .columns = out};
    Probe gelu(*backend, OpKind::activation, activation, {32 * out, 32 * out});
    const std::int64_t elements = large_elements(threads);
    Probe accumulate(*backend, OpKind::accumulate, {.rows = elements}, {elements, elements});

    MeasuredRates& rates = measured[thread];
    together.arrive_and_wait();
    const Flops products = forward.work().flops + input_gradient.work().flops + weight_gradient.work().flops;
    rates.matrix = products / time_of({&forward, &input_gradient, &weight_gradient});
    together.arrive_and_wait();
    rates.vector = gelu.work().flops / time_of({&gelu});
    together.arrive_and_wait();
    rates.memory = accumulate.work().bytes / time_of({&accumulate});
  });
  MeasuredRates mean;
  for (const MeasuredRates& rates : measured) {
    mean.matrix += rates.matrix;
    mean.vector += rates.vector;
    mean.memory += rates.memory;
  }
  return {.matrix = mean.matrix / threads, .vector = mean.vector / threads, .memory = mean.memory / threads};
}

Seconds measure_kernel_launch() {
  const std::unique_ptr<Backend> backend = make_cpu_backend();
  Probe tiny(*backend, OpKind::accumulate, {.rows = 16}, {16, 16});
  // Enough that the clock's resolution does not matter.
  constexpr std::size_t runs = 100;
  return time_of(std::vector<Probe*>(runs, &tiny)) / static_cast<double>(runs);
}

std::vector<MeasuredTransfer> measure_all_reduce(int ranks) {
  CommunicationGroup group;
  for (int rank = 0; rank < ranks; ++rank) group.ranks.push_back(rank);
  LocalWorld world(ranks, {group});
  std::vector<MeasuredTransfer> transfers;
  for (std::int64_t bytes = 1024; bytes <= std::int64_t{64} << 20; bytes *= 8) {
    const std::int64_t count = bytes / 4;
    const int repeats = static_cast<int>(std::clamp<std::int64_t>((std::int64_t{1} << 27) / bytes, 7, 500));
    std::vector<Seconds> times;
    in_threads(ranks, [&](int rank) {
      std::vector<float> data(static_cast<std::size_t>(count), 0.0f);
      Communicator& communicator = world.communicator(rank);
      for (int i = 0; i < 3; ++i) communicator.all_reduce(0, 0, Reduction::sum, {data.data(), count});
      for (int i = 0; i < repeats; ++i) {
        const Seconds begin = now();
        communicator.all_reduce(0, 0, Reduction::sum, {data.data(), count});
        if (rank == 0) times.push_back(now() - begin);
      }
    });
    transfers.push_back({.bytes = Bytes(bytes), .time = typical(times)});
  }
  return transfers;
}

}  // namespace parplan
