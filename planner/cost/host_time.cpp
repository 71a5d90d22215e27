#include "planner/cost/host_time.h"

#include "planner/base/error.h"
#include "planner/cost/kernel_time.h"

namespace parplan {

Seconds host_copy_time(Bytes bytes, const DeviceKind& device, const DeviceRates& rates,
                       const std::optional<HostShare>& host) {
  if (!is_accelerator(device.backend)) {
    OpShape shape;
    shape.rows = ceil_div(bytes.count, size_of(DataType::fp32));
    return kernel_time(OpKind::copy, shape, DataType::fp32, device, rates);
  }
  PARPLAN_ASSERT(host.has_value(), device.name);
  return host->latency + bytes / host->link;
}

Seconds file_time(Stream stream, Bytes bytes, const std::optional<NvmeShare>& nvme) {
  PARPLAN_ASSERT(nvme.has_value() && is_of_file(stream), name(stream));
  return nvme->latency + bytes / (stream == Stream::to_nvme ? nvme->write : nvme->read);
}

Seconds host_kernel_time(const Instruction& kernel, const DeviceKind& device, const DeviceRates& rates,
                         const std::optional<HostShare>& host) {
  if (!is_accelerator(device.backend)) return kernel_time(kernel.op, kernel.shape, kernel.type, device, rates);
  PARPLAN_ASSERT(host.has_value(), device.name);
  return row_of(kernel.op).work(kernel.shape, kernel.type).bytes / (host->memory_bandwidth * host_update_share);
}

}  // namespace parplan
