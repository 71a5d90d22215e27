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
  // All processes of a job have the same token and the same build; others are refused.
  std::string token = {};
  std::string build = {};
  // The system gives a connection up whose other end has not acknowledged anything for so long.
  std::chrono::milliseconds silence{6000};
};

// Returns when all processes have arrived. Throws RunError when they have not within `patience`; it
// names address, port and the missing processes, in every process. A connection that is no process
// of this job (no parplan, another token, number of processes or build, a place that is taken) is
// refused and does not stop the others. A process that dies before all have arrived may come again.
// Until it is known to belong to the job, a connection costs 40 bytes of memory, and there are at
// most 256 of them.
std::unique_ptr<Rendezvous> tcp_rendezvous(const TcpPlace& place, std::chrono::milliseconds patience);

}  // namespace parplan
