#include <algorithm>
#include <utility>

#include "tests/cuda_emulator/device.h"
#include "tests/cuda_emulator/random.h"
#include "tests/cuda_emulator/streams.h"

namespace emulator {
namespace {

thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

// A launched graph: nodes run one at a time, in an order that respects only its edges, with work of
// other streams in between.
class GraphWork final : public Work {
 public:
  explicit GraphWork(std::shared_ptr<const Nodes> nodes, std::uint64_t seed)
      : nodes_(std::move(nodes)), random_(seed), left_(nodes_->size()) {
    for (const Node& node : *nodes_) works_.push_back(node.make());
  }

  std::string text() const override {
    std::string text = "a graph of " + std::to_string(nodes_->size()) + " nodes, " + std::to_string(left_) + " left";
    for (std::size_t i = 0; i < works_.size(); ++i)
      if (!works_[i]->done && nodes_before_are_done(i)) text += "; next " + works_[i]->text();
    return text;
  }
  bool ready() override {
    if (left_ == 0) return true;
    can_run_.clear();
    for (std::size_t i = 0; i < works_.size(); ++i)
      if (!works_[i]->done && nodes_before_are_done(i) && works_[i]->ready()) can_run_.push_back(i);
    return !can_run_.empty();
  }
  void start() override {
    running_ = nullptr;
    if (left_ == 0) return;
    running_ = works_[can_run_[random_.below(can_run_.size())]].get();
    running_->start();
  }
  void run() override {
    if (running_ != nullptr) running_->run();
  }
  bool finish() override {
    if (running_ != nullptr && running_->finish()) {
      running_->done = true;
      --left_;
    }
    return left_ == 0;
  }

 private:
  bool nodes_before_are_done(std::size_t i) const {
    const auto& before = (*nodes_)[i].after;
    return std::all_of(before.begin(), before.end(),
                       [&](int j) { return works_[static_cast<std::size_t>(j)]->done; }) &&
           std::all_of(works_[i]->after.begin(), works_[i]->after.end(), [](const auto& other) { return other->done; });
  }

  std::shared_ptr<const Nodes> nodes_;
  Random random_;
  std::vector<std::shared_ptr<Work>> works_;
  std::vector<std::size_t> can_run_;
  Work* running_ = nullptr;
  std::size_t left_;
};

void leave_capture(const std::shared_ptr<Capture>& capture) {
  capture->ended = true;
  for (const auto& [handle, stream] : streams().open) {
    if (stream->capture != capture) continue;
    stream->capture = nullptr;
    stream->tips.clear();
  }
  std::erase(streams().captures, capture);
}

// Whether every node comes before the stream's next one.
bool all_joined(const Capture& capture, const std::vector<int>& tips) {
  std::vector<bool> reached(capture.nodes.size());
  std::vector<int> left = tips;
  while (!left.empty()) {
    const auto node = static_cast<std::size_t>(left.back());
    left.pop_back();
    if (reached[node]) continue;
    reached[node] = true;
    left.insert(left.end(), capture.nodes[node].after.begin(), capture.nodes[node].after.end());
  }
  return std::find(reached.begin(), reached.end(), false) == reached.end();
}

}  // namespace

std::shared_ptr<Work> make_graph_work(std::shared_ptr<const Nodes> nodes) {
  return std::make_shared<GraphWork>(std::move(nodes), next_random_with_lock_held());
}

void add_node(CUstream_st& stream, const Maker& make) {
  stream.capture->nodes.push_back({.make = make, .after = stream.tips});
  stream.tips = {static_cast<int>(stream.capture->nodes.size()) - 1};
}

void invalidate(const std::shared_ptr<Capture>& capture) { capture->invalid = true; }

// "cudaThreadExchangeStreamCaptureMode": which calls a thread may make during a capture.
cudaError_t forbidden_in_capture(const Lock&) {
  if (const cudaError_t error = forbidden_in_host_function(); error != cudaSuccess) return error;
  if (mode_of_thread == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (const std::shared_ptr<Capture>& capture : streams().captures) {
    if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
    const bool own = capture->thread == std::this_thread::get_id();
    const bool of_all = capture->mode == cudaStreamCaptureModeGlobal && mode_of_thread == cudaStreamCaptureModeGlobal;
    if (!own && !of_all) continue;
    invalidate(capture);
    return cudaErrorStreamCaptureUnsupported;
  }
  return cudaSuccess;
}

cudaError_t forbidden_in_capture() {
  const Lock lock(streams().mutex);
  return forbidden_in_capture(lock);
}

namespace {

cudaError_t begin_capture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  const Lock lock(streams().mutex);
  CUstream_st* stream = stream_of(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (mode < cudaStreamCaptureModeGlobal || mode > cudaStreamCaptureModeRelaxed) return cudaErrorInvalidValue;
  if (streams().legacy[stream->device] == stream) return cudaErrorStreamCaptureUnsupported;
  if (stream->capture != nullptr) return cudaErrorIllegalState;
  auto capture = std::make_shared<Capture>();
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->origin = handle;
  stream->capture = capture;
  stream->tips.clear();
  streams().captures.push_back(capture);
  return cudaSuccess;
}

cudaError_t end_capture(cudaStream_t handle, cudaGraph_t* graph) {
  const Lock lock(streams().mutex);
  if (graph == nullptr) return cudaErrorInvalidValue;
  *graph = nullptr;
  CUstream_st* stream = stream_of(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture == nullptr) return cudaErrorIllegalState;
  if (capture->origin != handle) {
    invalidate(capture);
    return cudaErrorStreamCaptureUnmatched;
  }
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    return cudaErrorStreamCaptureWrongThread;
  const std::vector<int> tips = stream->tips;
  leave_capture(capture);
  if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
  if (!all_joined(*capture, tips)) return cudaErrorStreamCaptureUnjoined;
  auto made = std::make_unique<CUgraph_st>();
  made->nodes = capture->nodes;
  *graph = made.get();
  streams().graphs.emplace(made.get(), std::move(made));
  return cudaSuccess;
}

}  // namespace
}  // namespace emulator

using namespace emulator;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return remember(begin_capture(stream, mode));
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return remember(end_capture(stream, graph));
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  const Lock lock(streams().mutex);
  const CUstream_st* stream = stream_of(handle);
  if (stream == nullptr) return remember(cudaErrorInvalidResourceHandle);
  if (status == nullptr) return remember(cudaErrorInvalidValue);
  *status = stream->capture == nullptr   ? cudaStreamCaptureStatusNone
            : stream->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                       : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  if (mode == nullptr) return remember(cudaErrorInvalidValue);
  std::swap(*mode, mode_of_thread);
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* nodes, std::size_t* count) {
  const Lock lock(streams().mutex);
  const auto place = streams().graphs.find(handle);
  // (Nodes have no handles here: only their number is available.)
  if (place == streams().graphs.end() || count == nullptr || nodes != nullptr) return remember(cudaErrorInvalidValue);
  *count = place->second->nodes.size();
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t handle, unsigned long long) {
  const Lock lock(streams().mutex);
  const auto place = streams().graphs.find(handle);
  if (place == streams().graphs.end() || executable == nullptr) return remember(cudaErrorInvalidValue);
  auto made = std::make_unique<CUgraphExec_st>();
  made->nodes = std::make_shared<const Nodes>(place->second->nodes);
  *executable = made.get();
  streams().executables.emplace(made.get(), std::move(made));
  return cudaSuccess;
}

// Launches of one executable graph run one after the other, whatever their streams.
cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
  std::shared_ptr<const Nodes> nodes;
  {
    const Lock lock(streams().mutex);
    const auto place = streams().executables.find(handle);
    if (place == streams().executables.end()) return remember(cudaErrorInvalidValue);
    nodes = place->second->nodes;
  }
  return remember(submit(stream, [nodes, handle] {
    std::shared_ptr<Work> work = make_graph_work(nodes);
    const auto place = streams().executables.find(handle);
    if (place != streams().executables.end()) {
      if (place->second->last != nullptr) work->after.push_back(place->second->last);
      place->second->last = work;
    }
    return work;
  }));
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  const Lock lock(streams().mutex);
  return remember(streams().graphs.erase(graph) == 1 ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  const Lock lock(streams().mutex);
  return remember(streams().executables.erase(executable) == 1 ? cudaSuccess : cudaErrorInvalidValue);
}
