#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "planner/base/units.h"
#include "runtime/device/file_transfer.h"
#include "runtime/device/kernel_call.h"

namespace parplan {

// The Program numbers streams and events from 0; a backend creates them when they are first used.
using StreamId = int;
using EventId = int;

// Runs an element-wise kernel by the host's processor, on operands in its memory; returns when it
// is done.
using HostKernel = void (*)(const KernelCall& call, const StepScalars& scalars);

// A device's memory according to the driver.
struct DeviceMemory {
  Bytes total;
  Bytes used;  // by all programs together
};

// One rank's device. Work is submitted to streams in order; streams run concurrently and meet at
// events, as in CUDA. A call may return before its work is done (a GPU) or do it immediately (the
// CPU, but for file transfers): callers wait by `synchronize`. One thread at a time uses it.
// Failures of the device throw RunError, at the latest from `synchronize`.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;
  // A thread calls this before it uses the backend, and again if it used another one in between
  // (CUDA: the current device belongs to the thread).
  virtual void attach_thread() {}

  // Device memory aligned to 256 bytes, contents undefined. RunError states the size that was asked
  // for.
  virtual void* allocate(Bytes bytes) = 0;
  virtual void release(void* memory) = 0;
  // Host memory that copies to and from the device access directly (CUDA: page-locked).
  virtual void* allocate_host(Bytes bytes) = 0;
  virtual void release_host(void* memory) = 0;
  virtual DeviceMemory memory() const = 0;

  // The values that the optimizer's kernels read from here on, including those of recorded work.
  virtual void set_scalars(const StepScalars& scalars) = 0;
  virtual void run(StreamId stream, const KernelCall& call) = 0;
  // Runs an element-wise kernel on operands in host memory by the host's processor, in the stream's
  // order.
  virtual void run_on_host(StreamId stream, const KernelCall& call) = 0;
  // Copies between host and device memory in any direction; the ranges do not overlap.
  virtual void copy(StreamId stream, void* to, const void* from, Bytes bytes) = 0;
  // Carries out a transfer between host memory and a file in the stream's order, beside the work of
  // other streams, also where these take turns. What it throws is thrown by `synchronize`.
  virtual void transfer_file(StreamId stream, const FileTransfer& transfer) = 0;
  // `words` words of 4 bytes.
  virtual void fill(StreamId stream, void* memory, std::uint32_t pattern, std::int64_t words) = 0;
  // One past the index of the last of `words` words that differs from `pattern`; 0 when none does.
  // Waits for all streams.
  virtual std::int64_t end_of_unlike(const void* memory, std::uint32_t pattern, std::int64_t words) = 0;

  virtual void record(StreamId stream, EventId event) = 0;
  virtual void wait(StreamId stream, EventId event) = 0;  // later work of `stream` runs after `event`
  virtual void synchronize() = 0;                         // the caller waits for all work of all streams

  // Calls `work`, which submits kernels and copies to `stream` alone, and the same ones for the
  // same `key`. A backend may record what it submits and replay that the next time instead of
  // calling it.
  virtual void repeat(StreamId stream, std::int64_t key, const std::function<void()>& work) = 0;
  // Why repeated work could not be recorded and is called each time; empty if all was recorded.
  virtual std::string not_recorded() const { return ""; }

  // Creates what marks 0 to `count` - 1 need, so that setting them allocates nothing.
  virtual void prepare_marks(int count) = 0;
  // Records the time at which `stream` gets here as mark number `mark` (from 0).
  virtual void mark(StreamId stream, int mark) = 0;
  // Seconds from mark 0 to `mark`; after `synchronize`.
  virtual Seconds time_at(int mark) = 0;
  // Whether work other than file transfers is done when the call that submits it returns: streams
  // then take turns, and marks are almost free.
  virtual bool works_at_once() const = 0;
};

}  // namespace parplan
