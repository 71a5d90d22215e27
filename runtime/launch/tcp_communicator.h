#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "runtime/launch/rendezvous.h"

namespace parplan {

// CPU ranks as processes that are connected by TCP, each with each; fp32. Reductions add in
// ascending order of rank, as those of threads and of MPI do, so that all three give the same bits.
// The processes of `job` call it together, with equal groups and channels; the others reach this
// one at `address`. `job`, which learns of failures, outlives it.
std::unique_ptr<Communicator> make_tcp_communicator(Rendezvous& job, const std::string& address,
                                                    std::chrono::milliseconds silence,
                                                    const std::vector<CommunicationGroup>& groups, int channels);

}  // namespace parplan
