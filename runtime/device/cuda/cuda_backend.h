#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/device/backend.h"
#include "runtime/device/cuda/matrix_products.h"

namespace parplan {

struct CudaBackendOptions {
  bool deterministic = true;  // fixed order of every sum
  bool graphs = true;         // replay repeated work as CUDA graphs
  bool synchronous = false;   // wait after every kernel and copy; nothing is recorded then
  HostKernel host_kernel = nullptr;
};

// One GPU. Streams do not wait for the legacy default stream. After the first step nothing is
// allocated on the device except the graphs that the second step records: the constructor allocates
// the scalars, the result of `end_of_unlike` and cuBLASLt's handle, and workspaces are operands.
class CudaBackend final : public Backend {
 public:
  CudaBackend(int device, const CudaBackendOptions& options);
  ~CudaBackend() override;
  CudaBackend(const CudaBackend&) = delete;
  CudaBackend& operator=(const CudaBackend&) = delete;

  const char* name() const override { return "cuda"; }
  void attach_thread() override;

  void* allocate(Bytes bytes) override;
  void release(void* memory) override;
  void* allocate_host(Bytes bytes) override;
  void release_host(void* memory) override;
  DeviceMemory memory() const override;

  void set_scalars(const StepScalars& scalars) override;
  void run(StreamId stream, const KernelCall& call) override;
  // On a thread of the driver's, by GpuBackendOptions::host_kernel.
  void run_on_host(StreamId stream, const KernelCall& call) override;
  void copy(StreamId stream, void* to, const void* from, Bytes bytes) override;
  // On a thread of the driver's.
  void transfer_file(StreamId stream, const FileTransfer& transfer) override;
  void fill(StreamId stream, void* memory, std::uint32_t pattern, std::int64_t words) override;
  std::int64_t end_of_unlike(const void* memory, std::uint32_t pattern, std::int64_t words) override;

  // An event that was never recorded counts as passed.
  void record(StreamId stream, EventId event) override;
  void wait(StreamId stream, EventId event) override;
  void synchronize() override;

  // The first call with a key runs `work`, so that libraries choose their algorithms; the second
  // records it as a CUDA graph. Work that cannot be recorded runs directly from then on;
  // `not_recorded` says why.
  void repeat(StreamId stream, std::int64_t key, const std::function<void()>& work) override;

  void prepare_marks(int count) override;
  void mark(StreamId stream, int mark) override;
  Seconds time_at(int mark) override;
  bool works_at_once() const override { return false; }

  // For communicators.
  int device() const { return device_; }
  cudaStream_t stream(StreamId stream);
  // Why work runs directly though graphs were asked for; empty if it does not.
  std::string not_recorded() const override { return not_recorded_; }

 private:
  struct Repeated {
    int runs = 0;
    cudaGraphExec_t graph = nullptr;  // null: runs directly
  };

  void finish(StreamId stream, const char* what);  // what `synchronous` asks for
  void record_graph(StreamId stream, const std::function<void()>& work, Repeated& repeated);
  void release_all();

  int device_ = 0;
  CudaBackendOptions options_;
  int least_priority_ = 0, greatest_priority_ = 0;
  std::unique_ptr<MatrixProducts> matrices_;
  std::vector<cudaStream_t> streams_;  // null until named
  std::vector<cudaEvent_t> events_;    // null until named
  std::vector<cudaEvent_t> marks_;     // null until named; they hold the time
  std::map<std::int64_t, Repeated> repeated_;
  std::string not_recorded_;
  bool recording_ = false;

  // What file transfers have thrown on the driver's threads: the first, until `synchronize`.
  struct FileFailure {
    std::mutex mutex;
    std::exception_ptr first;
  };
  FileFailure file_failure_;
  static void carry_out_transfer(void* data);
  struct PostedTransfer {
    FileTransfer transfer;
    FileFailure* failure = nullptr;
  };

  StepScalars* scalars_ = nullptr;           // on the device
  StepScalars* scalars_from_ = nullptr;      // page-locked
  cudaEvent_t scalars_written_ = nullptr;
  cudaEvent_t streams_joined_ = nullptr;
  bool has_scalars_ = false;
  std::int64_t* end_of_unlike_ = nullptr;       // on the device
  std::int64_t* end_of_unlike_to_ = nullptr;    // page-locked
};

}  // namespace parplan
