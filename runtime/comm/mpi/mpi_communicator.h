#pragma once

#include <memory>
#include <vector>

#include "runtime/comm/communicator.h"
#include "runtime/comm/mpi/mpi_process.h"
#include "runtime/launch/mpi_plugin_interface.h"

namespace parplan {

// CPU ranks as MPI processes, rank r being process r; fp32 (or tf32) in host memory, and streams
// have no meaning. All processes call it with equal arguments. Reductions add in ascending order of
// rank: every member sends each chunk to the member that owns it, which adds the received ones in
// order (host.sum), and everyone fetches the sums. Bytes sent are those of communicator.h. Messages
// progress only inside calls of MPI: a send to another machine that is posted before long work
// moves at the next call. Times: `waited` ends when the announcement of every other member (for a
// receive: of the sender) was seen; whatever else MPI did meanwhile counts as waiting.
std::unique_ptr<Communicator> make_mpi_communicator(std::shared_ptr<MpiProcess> process, const MpiHost& host,
                                                    const std::vector<CommunicationGroup>& groups, int channels);

}  // namespace parplan
