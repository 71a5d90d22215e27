// The backend of a GPU: memory, copies, order between streams, recorded work, times.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "planner/base/error.h"
#include "tests/gpu/device.h"
#include "tests/gpu/device_array.h"

namespace parplan {

using namespace testing;

namespace {

std::vector<std::byte> counted_bytes(std::int64_t count, int seed) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::byte>((i * 31 + static_cast<std::size_t>(seed)) % 251);
  return bytes;
}

void run(Backend& backend, StreamId stream, OpKind op, const OpShape& shape, std::vector<void*> operands) {
  backend.run(stream, {.kind = op, .shape = shape, .type = DataType::fp32, .operands = operands});
}

// parameter -= learning_rate * gradient
void step(Backend& backend, StreamId stream, const DeviceArray& gradient, const DeviceArray& parameter) {
  run(backend, stream, OpKind::sgd, {.rows = parameter.size()}, {gradient.data(), parameter.data()});
}

template <class Error>
std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "(no error)";
}

}  // namespace

TEST_CASE("a GPU is described and so are the versions of its libraries") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const std::string versions = gpu->versions();
  for (const char* part : {"CUDA ", "driver", "cuBLASLt ", "NCCL "}) CHECK(versions.find(part) != std::string::npos);
  for (const GpuProperties& device : gpu->devices()) {
    CHECK_FALSE(device.name.empty());
    CHECK_FALSE(device.bus_id.empty());
    CHECK(device.compute_major >= 8);
    CHECK(device.multiprocessors > 0);
    CHECK(device.memory > Bytes(0));
  }
}

TEST_CASE("a GPU that is not there is an error that says how many are") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const std::size_t count = gpu->devices().size();
  for (const int device : {-1, static_cast<int>(count)})
    CHECK(message_of<RunError>([&] { static_cast<void>(gpu->make_backend(device, {})); }) ==
          "there is no GPU " + std::to_string(device) + ": this machine has " + std::to_string(count));
}

TEST_CASE("bytes go to the device, across it and back") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const auto backend = gpu->make_backend(0, {});
  CHECK(std::string(backend->name()) == "cuda");
  CHECK_FALSE(backend->works_at_once());
  for (const std::int64_t count : {1, 3, 256, 4097, 1 << 20}) {
    CAPTURE(count);
    const std::vector<std::byte> sent = counted_bytes(count, 7);
    auto* host = static_cast<std::byte*>(backend->allocate_host(Bytes(count)));
    std::copy(sent.begin(), sent.end(), host);
    void* first = backend->allocate(Bytes(count));
    void* second = backend->allocate(Bytes(count));
    CHECK(reinterpret_cast<std::uintptr_t>(first) % 256 == 0);
    CHECK(reinterpret_cast<std::uintptr_t>(second) % 256 == 0);
    backend->copy(0, first, host, Bytes(count));
    backend->copy(0, second, first, Bytes(count));
    std::vector<std::byte> received(sent.size());
    backend->copy(0, received.data(), second, Bytes(count));
    backend->synchronize();
    CHECK(received == sent);
    backend->release(first);
    backend->release(second);
    backend->release_host(host);
  }
}

TEST_CASE("memory is filled word by word and the last unlike word is found") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const auto backend = gpu->make_backend(0, {});
  constexpr std::uint32_t pattern = 0x7fc0dead;
  for (const std::int64_t words : {1, 5, 257, 100003}) {
    CAPTURE(words);
    const DeviceArray array(*backend, DataType::int32, words, 1);
    auto* begin = static_cast<std::uint32_t*>(array.data());
    backend->fill(0, begin, pattern, words);
    CHECK(backend->end_of_unlike(begin, pattern, words) == 0);
    CHECK(backend->end_of_unlike(begin, pattern + 1, words) == words);
    for (const std::int64_t end : {std::int64_t{1}, words / 2 + 1, words}) {
      backend->fill(0, begin, pattern, words);
      backend->fill(0, begin + end - 1, 0, 1);
      CHECK(backend->end_of_unlike(begin, pattern, words) == end);
      backend->fill(0, begin, 3, 1);  // an earlier one does not matter
      CHECK(backend->end_of_unlike(begin, pattern, words) == end);
    }
    CHECK(backend->end_of_unlike(begin, pattern, 0) == 0);
  }
}

TEST_CASE("looking for unlike words waits for every stream") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const auto backend = gpu->make_backend(0, {});
  const DeviceArray array(*backend, DataType::int32, 1000);
  for (int trial = 0; trial < 10; ++trial)
    for (StreamId stream = 0; stream < 4; ++stream) {
      const auto pattern = static_cast<std::uint32_t>(trial * 4 + stream);
      backend->fill(stream, array.data(), pattern, 1000);
      CHECK(backend->end_of_unlike(array.data(), pattern, 1000) == 0);
    }
}

TEST_CASE("events order streams") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const auto backend = gpu->make_backend(0, {});
  // Stream 0 doubles a into b, stream 1 copies b back to a: without its events a round is lost.
  const DeviceArray a(*backend, DataType::fp32, std::vector<double>(300, 1.0)), b(*backend, DataType::fp32, 300);
  constexpr int rounds = 20;
  for (int round = 0; round < rounds; ++round) {
    run(*backend, 0, OpKind::copy, {.rows = 300}, {a.data(), b.data()});
    run(*backend, 0, OpKind::accumulate, {.rows = 300}, {a.data(), b.data()});
    backend->record(0, 0);
    backend->wait(1, 0);
    backend->copy(1, a.data(), b.data(), Bytes(a.bytes()));
    backend->record(1, 1);
    backend->wait(0, 1);
  }
  CHECK(a.values() == std::vector<double>(300, static_cast<double>(1 << rounds)));
}

TEST_CASE("a stream waits for the last record of an event and not for one that never was") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const auto backend = gpu->make_backend(0, {});
  const DeviceArray a(*backend, DataType::int32, 4);
  backend->wait(2, 5);
  backend->fill(1, a.data(), 1, 4);
  backend->record(1, 5);
  backend->fill(1, a.data(), 2, 4);
  backend->record(1, 5);
  backend->wait(2, 5);
  backend->fill(2, a.data(), 3, 4);
  CHECK(a.values() == std::vector<double>(4, 3.0));
}

TEST_CASE("scalars hold for what is submitted after them and on every stream") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  // Several times: a missing event shows only when streams run in an order that it would have
  // forbidden.
  for (int trial = 0; trial < 8; ++trial) {
    const auto backend = gpu->make_backend(0, {});
    const DeviceArray gradient(*backend, DataType::fp32, std::vector<double>(100, 1.0));
    constexpr int streams = 12;
    std::vector<DeviceArray> parameters;
    for (int stream = 0; stream < streams; ++stream)
      parameters.emplace_back(*backend, DataType::fp32, std::vector<double>(100, 0.0));
    // Without waiting in between; every round names one more stream, whose first work is a step.
    std::vector<double> wanted(streams, 0.0);
    for (int round = 0; round < streams; ++round) {
      const double rate = std::ldexp(1.0, round);
      backend->set_scalars({.learning_rate = rate});
      for (int stream = round; stream >= 0; --stream) {
        step(*backend, stream, gradient, parameters[stream]);
        wanted[stream] -= rate;
      }
    }
    backend->synchronize();
    for (std::size_t stream = 0; stream < streams; ++stream)
      CHECK(parameters[stream].values() == std::vector<double>(100, wanted[stream]));
  }
}

TEST_CASE("repeated work is recorded once and replayed with the scalars of the step") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  struct Variant {
    GpuBackendOptions options;
    int calls;  // of the work: a first time, and one to record it
  };
  for (const Variant& variant : {Variant{{.graphs = true}, 2}, Variant{{.graphs = false}, 5},
                                 Variant{{.graphs = true, .synchronous = true}, 5}}) {
    CAPTURE(variant.calls);
    const auto backend = gpu->make_backend(0, variant.options);
    const DeviceArray gradient(*backend, DataType::fp32, std::vector<double>(100, 1.0));
    const DeviceArray parameter(*backend, DataType::fp32, std::vector<double>(100, 0.0)),
        copied(*backend, DataType::fp32, 100);
    int calls = 0;
    double sum = 0.0;
    for (const double rate : {1.0, 2.0, 4.0, 8.0, 16.0}) {
      backend->set_scalars({.learning_rate = rate});
      backend->repeat(0, 17, [&] {
        ++calls;
        step(*backend, 0, gradient, parameter);
        backend->copy(0, copied.data(), parameter.data(), Bytes(parameter.bytes()));
      });
      sum += rate;
      CHECK(copied.values() == std::vector<double>(100, -sum));
    }
    CHECK(calls == variant.calls);
  }
}

TEST_CASE("work with another key is recorded by itself") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const auto backend = gpu->make_backend(0, {});
  const DeviceArray one(*backend, DataType::fp32, std::vector<double>(10, 1.0)),
      ten(*backend, DataType::fp32, std::vector<double>(10, 10.0));
  const DeviceArray sum(*backend, DataType::fp32, std::vector<double>(10, 0.0));
  for (int time = 0; time < 4; ++time)
    for (const DeviceArray* added : {&one, &ten})
      backend->repeat(0, added == &one ? 1 : 2, [&] {
        run(*backend, 0, OpKind::accumulate, {.rows = 10}, {added->data(), sum.data()});
      });
  CHECK(sum.values() == std::vector<double>(10, 44.0));
}

TEST_CASE("an error of ours within recorded work comes out and leaves the stream usable") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const auto backend = gpu->make_backend(0, {});
  const DeviceArray a(*backend, DataType::int32, 4);
  int calls = 0;
  const auto work = [&] {
    backend->fill(0, a.data(), 1, 4);
    if (++calls == 2) backend->record(0, 0);
  };
  backend->repeat(0, 1, work);
  CHECK_THROWS_AS(backend->repeat(0, 1, work), InternalError);
  backend->fill(0, a.data(), 2, 4);
  CHECK(a.values() == std::vector<double>(4, 2.0));
}

TEST_CASE("work that cannot be recorded runs each time, and the backend says why") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const std::unique_ptr<Backend> backend = gpu->make_backend(0, {});
  backend->attach_thread();
  int calls = 0;
  const auto allocates = [&] {
    ++calls;
    backend->release(backend->allocate(Bytes(256)));
  };
  backend->repeat(0, 1, allocates);
  CHECK(backend->not_recorded() == "");
  for (int time = 0; time < 3; ++time) backend->repeat(0, 1, allocates);
  backend->synchronize();
  CHECK(calls == 5);  // once more than requested: the attempt to record it
  CHECK(backend->not_recorded().find("cudaErrorStreamCapture") != std::string::npos);
}

TEST_CASE("times of marks ascend from mark 0") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const auto backend = gpu->make_backend(0, {});
  const DeviceArray a(*backend, DataType::int32, 100000);
  for (int step = 0; step < 2; ++step) {  // marks are reused
    backend->mark(0, 0);
    for (int mark = 1; mark < 4; ++mark) {
      backend->fill(0, a.data(), 1, 100000);
      backend->mark(0, mark);
    }
    backend->synchronize();
    CHECK(backend->time_at(0) == Seconds(0.0));
    for (int mark = 1; mark < 4; ++mark) CHECK(backend->time_at(mark) >= backend->time_at(mark - 1));
    CHECK(backend->time_at(3) < Seconds(60.0));
  }
}

TEST_CASE("memory that is not there is an error that says what was asked for and what is free") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const auto backend = gpu->make_backend(0, {});
  const DeviceMemory memory = backend->memory();
  CHECK(memory.used <= memory.total);
  const Bytes asked(std::int64_t{1} << 50);
  const std::string message = message_of<RunError>([&] { static_cast<void>(backend->allocate(asked)); });
  CHECK(message.starts_with("GPU 0 has no " + format_bytes(asked) + " of memory left for a rank: "));
  CHECK(message.ends_with(" of " + format_bytes(memory.total) + " are free"));
  void* some = backend->allocate(Bytes(1000));  // the error is not sticky
  backend->release(some);
  backend->synchronize();
}

TEST_CASE("what a GPU has no kernel for and calls with missing operands are errors of ours") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const auto backend = gpu->make_backend(0, {});
  const DeviceArray a(*backend, DataType::fp32, 4);
  CHECK_THROWS_AS(run(*backend, 0, OpKind::load_tokens, {.rows = 4}, {a.data()}), InternalError);
  CHECK_THROWS_AS(run(*backend, 0, OpKind::copy, {.rows = 4}, {a.data()}), InternalError);
}

TEST_CASE("a backend works in a thread that attached itself") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const auto backend = gpu->make_backend(0, {});
  const DeviceArray a(*backend, DataType::int32, 4);
  std::thread([&] {
    backend->attach_thread();
    backend->fill(0, a.data(), 9, 4);
    backend->synchronize();
  }).join();
  CHECK(a.values() == std::vector<double>(4, 9.0));
}

}  // namespace parplan
