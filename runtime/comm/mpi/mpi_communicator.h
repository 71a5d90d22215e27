#pragma once

#include <memory>
#include <vector>

#include "runtime/comm/communicator.h"
#include "runtime/comm/mpi/mpi_process.h"
#include "runtime/launch/mpi.h"

namespace parplan {

// CPU ranks as processes of MPI, rank r being process r; fp32 (or tf32) in host memory, streams
// mean nothing. Called by all processes with equal arguments. Reductions add in ascending order of
// rank: every member sends each chunk to the member that owns it, which adds what it got in order
// (host.sum), and everyone fetches the sums. Bytes sent are those of communicator.h. Messages move
// while MPI is called: a send to another machine that is posted before long work moves when the
// next call is made. Times: `waited` ends when every other member's first message, which says what
// it calls, was seen (receive: the sender's); what else MPI did meanwhile counts as waiting.
std::unique_ptr<Communicator> make_mpi_communicator(std::shared_ptr<MpiProcess> process, const MpiHost& host,
                                                    const std::vector<CommunicationGroup>& groups, int channels);

}  // namespace parplan
