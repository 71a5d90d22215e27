#include "runtime/device/cuda/cuda_backend.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "runtime/device/cuda/cuda_check.h"
#include "runtime/device/cuda/kernel_table.h"
#include "runtime/device/cuda/kernels/kernels.h"

namespace parplan {
namespace {

template <class T>
T& at(std::vector<T>& made, int number) {
  PARPLAN_ASSERT(number >= 0, fmt::format("number {}", number));
  if (static_cast<std::size_t>(number) >= made.size()) made.resize(static_cast<std::size_t>(number) + 1, nullptr);
  return made[number];
}

cudaEvent_t make_event(unsigned flags) {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, flags), "make an event");
  return event;
}

cudaEvent_t& made_event(std::vector<cudaEvent_t>& events, int number, unsigned flags) {
  cudaEvent_t& event = at(events, number);
  if (event == nullptr) event = make_event(flags);
  return event;
}

}  // namespace

CudaBackend::CudaBackend(int device, const CudaBackendOptions& options) : device_(device), options_(options) {
  try {
    attach_thread();
    check(cudaDeviceGetStreamPriorityRange(&least_priority_, &greatest_priority_), "ask for the priorities of streams");
    matrices_ = std::make_unique<MatrixProducts>(options.deterministic);
    scalars_ = static_cast<StepScalars*>(allocate(Bytes(sizeof(StepScalars))));
    scalars_from_ = static_cast<StepScalars*>(allocate_host(Bytes(sizeof(StepScalars))));
    end_of_unlike_ = static_cast<std::int64_t*>(allocate(Bytes(sizeof(std::int64_t))));
    end_of_unlike_to_ = static_cast<std::int64_t*>(allocate_host(Bytes(sizeof(std::int64_t))));
    scalars_written_ = make_event(cudaEventDisableTiming);
    streams_joined_ = make_event(cudaEventDisableTiming);
  } catch (...) {
    release_all();
    throw;
  }
}

CudaBackend::~CudaBackend() {
  static_cast<void>(cudaSetDevice(device_));
  for (cudaStream_t stream : streams_)
    if (stream != nullptr) static_cast<void>(cudaStreamSynchronize(stream));
  release_all();
}

// Nothing is checked here: a failed call has reported its own error.
void CudaBackend::release_all() {
  for (const auto& [key, repeated] : repeated_)
    if (repeated.graph != nullptr) static_cast<void>(cudaGraphExecDestroy(repeated.graph));
  matrices_.reset();
  for (std::vector<cudaEvent_t>* events : {&events_, &marks_})
    for (cudaEvent_t event : *events)
      if (event != nullptr) static_cast<void>(cudaEventDestroy(event));
  for (cudaEvent_t event : {scalars_written_, streams_joined_})
    if (event != nullptr) static_cast<void>(cudaEventDestroy(event));
  for (cudaStream_t stream : streams_)
    if (stream != nullptr) static_cast<void>(cudaStreamDestroy(stream));
  release(scalars_);
  release(end_of_unlike_);
  release_host(scalars_from_);
  release_host(end_of_unlike_to_);
}

void CudaBackend::attach_thread() {
  if (const cudaError_t error = cudaSetDevice(device_); error != cudaSuccess)
    throw_cuda_error(error, fmt::format("use GPU {}", device_));
}

void* CudaBackend::allocate(Bytes bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, static_cast<std::size_t>(std::max<std::int64_t>(bytes.count, 1)));
  if (error == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    const DeviceMemory now = this->memory();
    throw RunError(fmt::format("GPU {} has no {} of memory left for a rank: {} of {} are free", device_,
                               format_bytes(bytes), format_bytes(now.total - now.used), format_bytes(now.total)));
  }
  if (error != cudaSuccess) throw_cuda_error(error, fmt::format("allocate {} on GPU {}", format_bytes(bytes), device_));
  return memory;
}

// Not checked: arenas are released while errors are on their way to the user.
void CudaBackend::release(void* memory) {
  if (memory != nullptr) static_cast<void>(cudaFree(memory));
}

void* CudaBackend::allocate_host(Bytes bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaMallocHost(&memory, static_cast<std::size_t>(std::max<std::int64_t>(bytes.count, 1)));
  if (error != cudaSuccess)
    throw_cuda_error(error, fmt::format("allocate {} of page-locked host memory", format_bytes(bytes)));
  return memory;
}

void CudaBackend::release_host(void* memory) {
  if (memory != nullptr) static_cast<void>(cudaFreeHost(memory));
}

DeviceMemory CudaBackend::memory() const {
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "ask for the memory of a GPU");
  return {.total = Bytes(static_cast<std::int64_t>(total)), .used = Bytes(static_cast<std::int64_t>(total - free))};
}

cudaStream_t CudaBackend::stream(StreamId number) {
  cudaStream_t& stream = at(streams_, number);
  if (stream == nullptr) {
    // Stream 0 computes; the others communicate. Their few blocks go first, so that the work that
    // waits for them can start.
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                       number == 0 ? least_priority_ : greatest_priority_),
          "make a stream");
    if (has_scalars_) check(cudaStreamWaitEvent(stream, scalars_written_, 0), "wait for the step's scalars");
  }
  return stream;
}

// Stream 0 writes the scalars when all streams have reached this point, and all streams continue
// after that.
void CudaBackend::set_scalars(const StepScalars& scalars) {
  PARPLAN_ASSERT(!recording_, "scalars are set within recorded work");
  if (has_scalars_) check(cudaEventSynchronize(scalars_written_), "wait for the scalars of the step before");
  *scalars_from_ = scalars;
  const cudaStream_t writer = stream(0);
  for (cudaStream_t other : streams_) {
    if (other == nullptr || other == writer) continue;
    check(cudaEventRecord(streams_joined_, other), "record an event");
    check(cudaStreamWaitEvent(writer, streams_joined_, 0), "wait for an event");
  }
  check(cudaMemcpyAsync(scalars_, scalars_from_, sizeof(StepScalars), cudaMemcpyDefault, writer),
        "copy the step's scalars");
  check(cudaEventRecord(scalars_written_, writer), "record an event");
  has_scalars_ = true;
  for (cudaStream_t other : streams_)
    if (other != nullptr && other != writer)
      check(cudaStreamWaitEvent(other, scalars_written_, 0), "wait for the step's scalars");
}

void CudaBackend::run(StreamId number, const KernelCall& call) {
  const CudaKernel kernel = cuda_kernel(call.kind);
  const OpRow& row = row_of(call.kind);
  PARPLAN_ASSERT(kernel != nullptr, fmt::format("{} is no kernel", row.name));
  PARPLAN_ASSERT(
      static_cast<int>(call.operands.size()) == operand_count(row, call.shape, row.cuda_workspace != nullptr),
      fmt::format("{} with {} operands", row.name, call.operands.size()));
  kernel({.shape = call.shape,
          .type = call.type,
          .operands = call.operands.data(),
          .scalars = scalars_,
          .stream = stream(number),
          .matrices = matrices_.get()});
  finish(number, parplan::name(call.kind));
}

namespace {

// One kernel of the host, with all that it reads.
struct HostWork {
  HostKernel kernel = nullptr;
  KernelCall call;
  std::vector<void*> operands;
  StepScalars scalars;
};

void run_host_work(void* data) {
  const std::unique_ptr<HostWork> work(static_cast<HostWork*>(data));
  work->kernel(work->call, work->scalars);
}

}  // namespace

void CudaBackend::run_on_host(StreamId number, const KernelCall& call) {
  PARPLAN_ASSERT(!recording_ && options_.host_kernel != nullptr && has_scalars_, parplan::name(call.kind));
  auto work = std::make_unique<HostWork>();
  *work = {.kernel = options_.host_kernel,
           .call = call,
           .operands = {call.operands.begin(), call.operands.end()},
           .scalars = *scalars_from_};
  work->call.operands = work->operands;
  check(cudaLaunchHostFunc(stream(number), run_host_work, work.get()), "hand work to the host");
  static_cast<void>(work.release());  // run_host_work's
  finish(number, parplan::name(call.kind));
}

void CudaBackend::carry_out_transfer(void* data) {
  const std::unique_ptr<PostedTransfer> posted(static_cast<PostedTransfer*>(data));
  FileFailure& failure = *posted->failure;
  {
    const std::lock_guard lock(failure.mutex);
    if (failure.first) return;
  }
  try {
    posted->transfer.carry_out(posted->transfer);
  } catch (...) {
    const std::lock_guard lock(failure.mutex);
    if (!failure.first) failure.first = std::current_exception();
  }
}

void CudaBackend::transfer_file(StreamId number, const FileTransfer& transfer) {
  PARPLAN_ASSERT(!recording_, fmt::format("{} bytes of a file within recorded work", transfer.bytes));
  auto posted = std::make_unique<PostedTransfer>(PostedTransfer{transfer, &file_failure_});
  check(cudaLaunchHostFunc(stream(number), carry_out_transfer, posted.get()), "hand a file transfer to the host");
  static_cast<void>(posted.release());  // carry_out_transfer's
  finish(number, "file transfer");
}

void CudaBackend::copy(StreamId number, void* to, const void* from, Bytes bytes) {
  check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes.count), cudaMemcpyDefault, stream(number)), "copy");
  finish(number, "copy");
}

void CudaBackend::fill(StreamId number, void* memory, std::uint32_t pattern, std::int64_t words) {
  // What is filled is copied behind itself, and doubles each time.
  constexpr std::int64_t most_by_kernel = 1 << 16;
  auto* const to = static_cast<std::uint32_t*>(memory);
  std::int64_t filled = std::min(words, most_by_kernel);
  fill_words(to, pattern, filled, stream(number));
  for (std::int64_t more = 0; filled < words; filled += more) {
    more = std::min(filled, words - filled);
    check(cudaMemcpyAsync(to + filled, to, static_cast<std::size_t>(more) * sizeof(std::uint32_t), cudaMemcpyDefault,
                          stream(number)),
          "fill");
  }
  finish(number, "fill");
}

std::int64_t CudaBackend::end_of_unlike(const void* memory, std::uint32_t pattern, std::int64_t words) {
  synchronize();
  const cudaStream_t first = stream(0);
  find_end_of_unlike(static_cast<const std::uint32_t*>(memory), pattern, words, end_of_unlike_, first);
  check(cudaMemcpyAsync(end_of_unlike_to_, end_of_unlike_, sizeof(std::int64_t), cudaMemcpyDefault, first), "copy");
  check(cudaStreamSynchronize(first), "look for what is unlike a pattern");
  return *end_of_unlike_to_;
}

void CudaBackend::finish(StreamId number, const char* what) {
  if (options_.synchronous) check(cudaStreamSynchronize(stream(number)), what);
}

void CudaBackend::record(StreamId number, EventId event) {
  PARPLAN_ASSERT(!recording_, fmt::format("event {} within recorded work", event));
  check(cudaEventRecord(made_event(events_, event, cudaEventDisableTiming), stream(number)), "record an event");
}

void CudaBackend::wait(StreamId number, EventId event) {
  PARPLAN_ASSERT(!recording_, fmt::format("event {} within recorded work", event));
  check(cudaStreamWaitEvent(stream(number), made_event(events_, event, cudaEventDisableTiming), 0),
        "wait for an event");
}

// Stream by stream: other threads may have ranks on the same GPU, which are not waited for.
void CudaBackend::synchronize() {
  for (cudaStream_t stream : streams_) {
    if (stream == nullptr) continue;
    if (const cudaError_t error = cudaStreamSynchronize(stream); error != cudaSuccess)
      throw_cuda_error(error, fmt::format("the work of GPU {}", device_));
  }
  const std::lock_guard lock(file_failure_.mutex);
  if (file_failure_.first) std::rethrow_exception(std::exchange(file_failure_.first, nullptr));
}

void CudaBackend::repeat(StreamId number, std::int64_t key, const std::function<void()>& work) {
  PARPLAN_ASSERT(!recording_, fmt::format("repeated work {} within repeated work", key));
  if (!options_.graphs || options_.synchronous) return work();
  Repeated& repeated = repeated_[key];
  repeated.runs = std::min(repeated.runs + 1, 3);
  if (repeated.runs == 2) record_graph(number, work, repeated);
  if (repeated.graph == nullptr) return work();
  check(cudaGraphLaunch(repeated.graph, stream(number)), "launch recorded work");
}

void CudaBackend::record_graph(StreamId number, const std::function<void()>& work, Repeated& repeated) {
  const cudaStream_t recorder = stream(number);
  // Other threads of the process, with ranks of their own, continue to allocate.
  check(cudaStreamBeginCapture(recorder, cudaStreamCaptureModeThreadLocal), "begin to record work");
  recording_ = true;
  std::string failure;
  try {
    work();
  } catch (const RunError& error) {
    // A call that cannot be recorded; any other failure occurs again when the work runs directly.
    failure = error.what();
  } catch (...) {
    cudaGraph_t unfinished = nullptr;
    if (cudaStreamEndCapture(recorder, &unfinished) == cudaSuccess) static_cast<void>(cudaGraphDestroy(unfinished));
    recording_ = false;
    throw;
  }
  recording_ = false;
  cudaGraph_t graph = nullptr;
  cudaError_t error = cudaStreamEndCapture(recorder, &graph);
  if (error == cudaSuccess && failure.empty()) error = cudaGraphInstantiate(&repeated.graph, graph, 0);
  if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
  if (error == cudaSuccess && failure.empty()) return;
  if (failure.empty()) failure = fmt::format("{} ({})", cudaGetErrorName(error), cudaGetErrorString(error));
  static_cast<void>(cudaGetLastError());
  repeated.graph = nullptr;
  not_recorded_ = failure;
}

void CudaBackend::prepare_marks(int count) {
  for (int mark = 0; mark < count; ++mark) made_event(marks_, mark, cudaEventDefault);
}

void CudaBackend::mark(StreamId number, int mark) {
  PARPLAN_ASSERT(!recording_, fmt::format("mark {} within recorded work", mark));
  check(cudaEventRecord(made_event(marks_, mark, cudaEventDefault), stream(number)), "note the time");
}

Seconds CudaBackend::time_at(int mark) {
  float milliseconds = 0.0f;
  check(cudaEventElapsedTime(&milliseconds, at(marks_, 0), at(marks_, mark)), "read the time");
  return Seconds(static_cast<double>(milliseconds) * 1e-3);
}

}  // namespace parplan
