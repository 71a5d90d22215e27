#include "tests/cuda_emulator/scheduler.h"

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>

#include "tests/cuda_emulator/device.h"
#include "tests/cuda_emulator/memory.h"
#include "tests/cuda_emulator/random.h"
#include "tests/cuda_emulator/streams.h"

namespace emulator {
namespace {

using Clock = std::chrono::steady_clock;

thread_local bool in_host_function = false;

std::uint64_t number_of(const char* variable, std::uint64_t otherwise) {
  const char* value = std::getenv(variable);
  return value == nullptr || *value == '\0' ? otherwise : std::strtoull(value, nullptr, 10);
}

struct Scheduler {
  std::condition_variable changed;
  bool running = false;  // some host thread is within Work::run
  Random random{number_of("PARPLAN_EMULATOR_SEED", 1)};
  Clock::time_point last_change = Clock::now();
  std::vector<std::shared_ptr<CUstream_st>> candidates;
};
Scheduler& scheduler() {
  static auto* made = new Scheduler;
  return *made;
}

// How long awaited work may be impossible before the program is ended.
std::chrono::seconds patience() {
  static const std::chrono::seconds seconds(number_of("PARPLAN_EMULATOR_PATIENCE", 30));
  return seconds;
}

void note_change() {
  scheduler().last_change = Clock::now();
  scheduler().changed.notify_all();
}

bool after_is_done(Work& work) {
  std::erase_if(work.after, [](const std::shared_ptr<Work>& other) { return other->done; });
  return work.after.empty();
}

// Chooses the preferred stream among those that can go on. Preferences last a while, so that one
// stream gets far ahead of others.
std::shared_ptr<CUstream_st> choose() {
  Scheduler& s = scheduler();
  s.candidates.clear();
  for (const std::shared_ptr<CUstream_st>& stream : streams().all)
    if (!stream->queue.empty() && after_is_done(*stream->queue.front()) && stream->queue.front()->ready())
      s.candidates.push_back(stream);
  if (s.candidates.empty()) return nullptr;
  if (s.random.below(8) == 0)
    for (const std::shared_ptr<CUstream_st>& stream : streams().all) stream->preference = s.random.next();
  return *std::max_element(s.candidates.begin(), s.candidates.end(),
                           [](const auto& a, const auto& b) { return a->preference < b->preference; });
}

// False: nothing can run, or another host thread is running something.
bool run_one(Lock& lock) {
  Scheduler& s = scheduler();
  if (s.running) return false;
  const std::shared_ptr<CUstream_st> stream = choose();
  if (stream == nullptr) return false;
  const std::shared_ptr<Work> work = stream->queue.front();
  work->start();
  s.running = true;
  lock.unlock();
  {
    const DeviceMemoryAccess access;
    work->run();
  }
  lock.lock();
  s.running = false;
  if (work->finish()) {
    work->done = true;
    work->time = Clock::now();
    stream->queue.pop_front();
    if (stream->queue.empty() && stream->destroyed) std::erase(streams().all, stream);
  }
  note_change();
  return true;
}

[[noreturn]] void fail_for_deadlock(const Work& awaited) {
  std::fprintf(stderr, "CUDA emulator: nothing can go on, and nothing was submitted for %lld s. Waited for: %s\n",
               static_cast<long long>(patience().count()), awaited.text().c_str());
  for (const std::shared_ptr<CUstream_st>& stream : streams().all) {
    if (stream->queue.empty()) continue;
    std::fprintf(stderr, "  stream %d of device %d, %zu pieces of work, first: %s\n", stream->number, stream->device,
                 stream->queue.size(), stream->queue.front()->text().c_str());
    for (const std::shared_ptr<Work>& other : stream->queue.front()->after)
      if (!other->done) std::fprintf(stderr, "    which waits for: %s\n", other->text().c_str());
  }
  std::fflush(stderr);
  std::abort();
}

class FunctionWork final : public Work {
 public:
  FunctionWork(const char* name, std::function<void()> function) : name_(name), function_(std::move(function)) {}
  std::string text() const override { return name_; }
  void run() override {
    if (function_) function_();
  }

 private:
  const char* name_;
  std::function<void()> function_;
};

}  // namespace

Streams& streams() {
  static auto* made = new Streams;
  return *made;
}

std::shared_ptr<Work> make_work(const char* name, std::function<void()> function) {
  return std::make_shared<FunctionWork>(name, std::move(function));
}

std::mutex& scheduler_mutex() { return streams().mutex; }
void notify_scheduler() { note_change(); }

CUstream_st* stream_of(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) {
    cudaStream_t& made = streams().legacy[current_device()];
    if (made == nullptr) {
      auto stream = std::make_shared<CUstream_st>();
      stream->number = streams().numbers++;
      stream->device = current_device();
      made = stream.get();
      streams().open.emplace(made, stream);
      streams().all.push_back(stream);
    }
    return made;
  }
  const auto place = streams().open.find(handle);
  return place == streams().open.end() ? nullptr : place->second.get();
}

int device_of(cudaStream_t handle) {
  const Lock lock(streams().mutex);
  const CUstream_st* stream = stream_of(handle);
  return stream == nullptr ? -1 : stream->device;
}

// The legacy stream waits for all blocking streams of its device, and they wait for it ("Stream
// synchronization behavior").
void enqueue(CUstream_st& stream, const std::shared_ptr<Work>& work) {
  const auto legacy = streams().legacy.find(stream.device);
  if (legacy != streams().legacy.end()) {
    if (legacy->second == &stream) {
      for (const std::shared_ptr<CUstream_st>& other : streams().all)
        if (other->blocking && other->device == stream.device && other->last != nullptr && !other->last->done)
          work->after.push_back(other->last);
    } else if (stream.blocking && legacy->second->last != nullptr && !legacy->second->last->done) {
      work->after.push_back(legacy->second->last);
    }
  }
  stream.queue.push_back(work);
  stream.last = work;
  stream.submitter = std::this_thread::get_id();
  note_change();
}

cudaError_t submit(cudaStream_t handle, const Maker& make, std::shared_ptr<Work>* submitted) {
  if (const cudaError_t error = forbidden_in_host_function(); error != cudaSuccess) return error;
  Lock lock(streams().mutex);
  CUstream_st* stream = stream_of(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (stream->capture != nullptr) {
    if (stream->capture->invalid) return cudaErrorStreamCaptureInvalidated;
    add_node(*stream, make);
    return cudaSuccess;
  }
  const auto legacy = streams().legacy.find(stream->device);
  if (legacy != streams().legacy.end() && legacy->second == stream) {
    for (const auto& [other_handle, other] : streams().open) {
      if (!other->blocking || other->device != stream->device || other->capture == nullptr) continue;
      invalidate(other->capture);
      return cudaErrorStreamCaptureImplicit;
    }
  }
  const std::shared_ptr<Work> work = make();
  enqueue(*stream, work);
  if (submitted != nullptr) *submitted = work;
  run_some(lock);
  return cudaSuccess;
}

void run_some(Lock& lock) {
  const std::uint64_t draw = scheduler().random.below(8);
  std::uint64_t count = draw < 4 ? 0 : draw < 6 ? 1 : draw < 7 ? scheduler().random.below(8) : 64;
  while (count > 0 && run_one(lock)) --count;
}

void run_for_query(Lock& lock) {
  std::uint64_t count = 1 + scheduler().random.below(4);
  while (count > 0 && run_one(lock)) --count;
}

void wait_for(Lock& lock, const std::shared_ptr<Work>& work) {
  if (work == nullptr) return;
  while (!work->done) {
    if (run_one(lock)) continue;
    scheduler().changed.wait_for(lock, std::chrono::milliseconds(200));
    if (!scheduler().running && Clock::now() - scheduler().last_change > patience()) fail_for_deadlock(*work);
  }
}

void wait_for(const std::shared_ptr<Work>& work) {
  Lock lock(streams().mutex);
  wait_for(lock, work);
}

void finish_device_work() {
  Lock lock(streams().mutex);
  std::vector<std::shared_ptr<Work>> lasts;
  for (const std::shared_ptr<CUstream_st>& stream : streams().all)
    if (stream->device == current_device() && stream->last != nullptr) lasts.push_back(stream->last);
  for (const std::shared_ptr<Work>& last : lasts) wait_for(lock, last);
}

void finish_work_before_release() {
  Lock lock(streams().mutex);
  std::vector<std::shared_ptr<Work>> own, others;
  for (const std::shared_ptr<CUstream_st>& stream : streams().all)
    if (stream->device == current_device() && stream->last != nullptr)
      (stream->submitter == std::this_thread::get_id() ? own : others).push_back(stream->last);
  for (const std::shared_ptr<Work>& last : own) wait_for(lock, last);
  for (const std::shared_ptr<Work>& last : others)
    while (!last->done)
      if (!run_one(lock)) {
        if (!scheduler().running) return;
        scheduler().changed.wait_for(lock, std::chrono::milliseconds(200));
      }
}

cudaError_t forbidden_in_host_function() { return in_host_function ? cudaErrorNotPermitted : cudaSuccess; }

void run_host_function(cudaHostFn_t function, void* data) {
  const HostMemoryOnly no_device_memory;
  in_host_function = true;
  function(data);
  in_host_function = false;
}

void set_seed(std::uint64_t seed) {
  const Lock lock(streams().mutex);
  scheduler().random = Random(seed);
  for (const std::shared_ptr<CUstream_st>& stream : streams().all) stream->preference = scheduler().random.next();
}

std::uint64_t next_random() {
  const Lock lock(streams().mutex);
  return scheduler().random.next();
}

std::uint64_t next_random_with_lock_held() { return scheduler().random.next(); }

}  // namespace emulator
