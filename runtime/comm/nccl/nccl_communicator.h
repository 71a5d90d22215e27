#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "runtime/comm/communicator.h"
#include "runtime/device/cuda/cuda_backend.h"

namespace parplan {

std::string nccl_version();  // of the library that is loaded: "2.28.9"
std::vector<std::byte> make_nccl_id();

// One rank's communicator in a job of `ranks` that all call this with the same id, groups and
// routes; returns when all have. A missing rank keeps the others waiting: whoever started the job
// ends it.
//
// Every group and every route has its own NCCL communicator, because NCCL runs the operations of
// one communicator in turn: the activations of one stage then do not queue behind another's
// gradients. A thread watches them for asynchronous errors. After an error or `abort` all are
// aborted, which ends kernels that wait for other ranks. The reason reaches the ranks of this
// process; ranks of other processes see NCCL's own error, or are ended by whoever started them. A
// receive whose count differs from the send's is not detected.
std::unique_ptr<Communicator> make_nccl_communicator(const std::vector<std::byte>& id, int rank, int ranks,
                                                     const std::vector<CommunicationGroup>& groups,
                                                     const std::vector<SendRoute>& routes, CudaBackend& backend);

}  // namespace parplan
