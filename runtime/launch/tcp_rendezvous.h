#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "runtime/launch/rendezvous.h"

namespace parplan {

// A process's place in a job that meets over TCP. Process 0 listens at `address`:`port` (on that
// address alone if it is a loopback address, otherwise on all addresses of the machine), all others
// connect to it, and everything that they exchange passes through it.
struct TcpPlace {
  int process = 0;
  int processes = 1;
  int local_process = 0;
  int local_processes = 1;
  std::string address;  // a name, IPv4 or IPv6
  int port = 0;
};

// Returns when all processes have arrived. Throws RunError when they have not within `patience`; it
// names address, port and the missing processes, in every process. A connection that is no process
// of this job (no parplan, another version, another number of processes, a place that is taken) is
// refused and does not stop the others.
std::unique_ptr<Rendezvous> tcp_rendezvous(const TcpPlace& place, std::chrono::milliseconds patience);

}  // namespace parplan
