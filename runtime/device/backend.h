#pragma once

#include "planner/base/units.h"
#include "runtime/device/kernel.h"

namespace parplan {

// Streams and events are numbered from 0 by the Program; a backend makes them when they are first named.
using StreamId = int;
using EventId = int;

// One rank's device. Work is submitted to streams in order; streams run side by side and meet at events, as in CUDA.
// A backend belongs to the thread of its rank. Failures of the device throw RunError.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;

  // Device memory aligned to 256 bytes, contents undefined. RunError says how much was asked for.
  virtual void* allocate(Bytes bytes) = 0;
  virtual void release(void* memory) = 0;

  virtual void run(StreamId stream, const KernelCall& call) = 0;
  // Between any of host and device memory; the ranges do not overlap.
  virtual void copy(StreamId stream, void* to, const void* from, Bytes bytes) = 0;

  virtual void record(StreamId stream, EventId event) = 0;
  virtual void wait(StreamId stream, EventId event) = 0;  // later work of `stream` runs after `event`
  virtual void synchronize(StreamId stream) = 0;          // the caller waits for all work of `stream`
};

}  // namespace parplan
