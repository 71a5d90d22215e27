#pragma once

#include <optional>

#include "planner/base/units.h"
#include "planner/cluster/device.h"
#include "planner/cluster/host_share.h"
#include "planner/program/program.h"

namespace parplan {

// What a rank's use of its host's memory takes. Cores are their own host: a copy is a kernel that
// reads and writes their memory, and the host's kernels are theirs. Accelerators have a share of
// the host, which is known (lacks_host).

// A copy of so many bytes: the link's latency, and its rate.
Seconds host_copy_time(Bytes bytes, const DeviceKind& device, const DeviceRates& rates,
                       const std::optional<HostShare>& host);

// A read or a write of a file on NVMe, by its stream: the drives' latency, and this rank's share of
// their rate, which is known (lacks_nvme). Reads do not slow writes down.
Seconds file_time(Stream stream, Bytes bytes, const std::optional<NvmeShare>& nvme);

// A kernel by the host's processor: its traffic at the rate of memory that such kernels reach.
Seconds host_kernel_time(const Instruction& kernel, const DeviceKind& device, const DeviceRates& rates,
                         const std::optional<HostShare>& host);

// The share of the memory's datasheet rate that an optimizer reaches on hosts. DeepSpeed's CPU-Adam
// updates 1 to 10 billion parameters in 0.22 to 2.57 s on a DGX-2 (arXiv:2101.06840, table 4, from
// memory, not opened): with 30 bytes each 117 to 136 GB/s, of the 256 GB/s of two Xeon 8168 with
// six channels of DDR4-2666.
inline constexpr double host_update_share = 0.5;

}  // namespace parplan
