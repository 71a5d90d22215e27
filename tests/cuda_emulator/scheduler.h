#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/cuda_emulator/cuda_runtime_api.h"

// Work of streams is not done when it is submitted. Threads that wait or query execute work of all
// streams of the process, in an order that depends on a seed and respects only CUDA's guarantees:
// the order within a stream, events and the edges of graphs. Some work is executed when something
// is submitted, so that both "too early" and "too late" occur.
namespace emulator {

// An item of work of a stream or a graph. One piece of work runs at a time.
class Work {
 public:
  virtual ~Work() = default;
  Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  virtual std::string text() const = 0;
  // All but `run` are called with the scheduler's lock held. Asked when it is first in its stream
  // and all of `after` is done:
  virtual bool ready() { return true; }
  virtual void start() {}
  virtual void run() {}
  // After `run`: whether nothing of it is left to run.
  virtual bool finish() { return true; }

  std::vector<std::shared_ptr<Work>> after;  // besides what precedes it in its stream
  bool done = false;
  std::chrono::steady_clock::time_point time;  // when it was done
};

// Work that consists of one function, which may touch device memory.
std::shared_ptr<Work> make_work(const char* name, std::function<void()> function);

// Creates the work each time it is to be done: once, or at every launch of the graph into which it
// was captured.
using Maker = std::function<std::shared_ptr<Work>()>;

// Submits to a stream, or adds to the graph that is being captured from it. `submitted`, where
// given, gets the work; null where it was captured.
cudaError_t submit(cudaStream_t stream, const Maker& make, std::shared_ptr<Work>* submitted = nullptr);
// Waits until the work is done, executing work meanwhile.
void wait_for(const std::shared_ptr<Work>& work);
// The scheduler's lock, for work whose `ready` others change; held by its callbacks.
std::mutex& scheduler_mutex();
// Called when something has become ready.
void notify_scheduler();

// The device of a stream; -1 where there is no such stream.
int device_of(cudaStream_t stream);

// Restarts the sequence of choices. By default the seed is PARPLAN_EMULATOR_SEED, or 1.
void set_seed(std::uint64_t seed);
std::uint64_t next_random();
// For makers and callbacks, which hold the lock.
std::uint64_t next_random_with_lock_held();

}  // namespace emulator
