#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "tests/cuda_emulator/scheduler.h"

namespace emulator {

// A node of a graph; it runs after the nodes with those numbers.
struct Node {
  Maker make;
  std::vector<int> after;
};
using Nodes = std::vector<Node>;

// Streams from which one graph is being captured.
struct Capture {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  cudaStream_t origin = nullptr;
  Nodes nodes;
  bool invalid = false;
  bool ended = false;
};

}  // namespace emulator

struct CUstream_st {
  int number = 0;  // for messages
  int device = 0;
  bool blocking = false;  // waits for the legacy stream, and it for this
  bool destroyed = false;
  std::deque<std::shared_ptr<emulator::Work>> queue;
  std::shared_ptr<emulator::Work> last;  // submitted
  std::thread::id submitter;             // of that
  std::uint64_t preference = 0;          // among streams that can go on; drawn again now and then

  std::shared_ptr<emulator::Capture> capture;
  std::vector<int> tips;  // nodes that the next one captured from this stream follows
};

struct CUevent_st {
  unsigned flags = 0;
  std::shared_ptr<emulator::Work> record;  // the latest
  std::shared_ptr<emulator::Capture> capture;  // where the latest was captured
  std::vector<int> tips;
};

struct CUgraph_st {
  emulator::Nodes nodes;
};

struct CUgraphExec_st {
  std::shared_ptr<const emulator::Nodes> nodes;
  std::shared_ptr<emulator::Work> last;  // launch
};

namespace emulator {

using Lock = std::unique_lock<std::mutex>;

// The scheduler's state, guarded by its mutex.
struct Streams {
  std::mutex mutex;
  std::map<cudaStream_t, std::shared_ptr<CUstream_st>> open;  // by handle, also the legacy streams by their own
  std::map<int, cudaStream_t> legacy;                         // by device
  std::vector<std::shared_ptr<CUstream_st>> all;              // those with work are among these
  std::map<cudaEvent_t, std::unique_ptr<CUevent_st>> events;
  std::map<cudaGraph_t, std::unique_ptr<CUgraph_st>> graphs;
  std::map<cudaGraphExec_t, std::unique_ptr<CUgraphExec_st>> executables;
  std::vector<std::shared_ptr<Capture>> captures;  // under way
  int numbers = 0;
};
Streams& streams();

// The stream of a handle, on the current device for the legacy stream; null where there is none.
CUstream_st* stream_of(cudaStream_t handle);
// Appends to the stream's queue; not for a stream that is being captured.
void enqueue(CUstream_st& stream, const std::shared_ptr<Work>& work);
// Adds a node to the stream's capture.
void add_node(CUstream_st& stream, const Maker& make);
// Runs work until `work` is done; null is done.
void wait_for(Lock& lock, const std::shared_ptr<Work>& work);
// Runs some work that can run, or none.
void run_some(Lock& lock);
// Runs at least one piece of work, if any can run: for callers that poll.
void run_for_query(Lock& lock);

void invalidate(const std::shared_ptr<Capture>& capture);
// Like forbidden_in_capture.
cudaError_t forbidden_in_capture(const Lock& lock);
// cudaErrorNotPermitted within a host function of a stream.
cudaError_t forbidden_in_host_function();
// Runs a host function, without access to device memory.
void run_host_function(cudaHostFn_t function, void* data);

// Work that launches a graph.
std::shared_ptr<Work> make_graph_work(std::shared_ptr<const Nodes> nodes);

}  // namespace emulator
