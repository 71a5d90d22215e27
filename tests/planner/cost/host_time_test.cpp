#include "planner/cost/host_time.h"

#include <doctest/doctest.h>

#include "planner/cost/cost_model.h"
#include "planner/cost/kernel_time.h"
#include "planner/program/bucket_work.h"
#include "tests/planner/cost/unit_model.h"

namespace parplan {
namespace {

const HostShare share = {
    .link = BytesPerSecond(4.0), .latency = Seconds(3.0), .memory_bandwidth = BytesPerSecond(60.0)};

TEST_CASE("a copy to or from the host takes the link's latency and its rate") {
  const DeviceKind device = unit_device(BackendKind::cuda);
  CHECK(host_copy_time(Bytes(20), device, device.rates[0], share) == Seconds(8.0));  // 3 + 20 / 4
}

TEST_CASE("the host's update takes its traffic at the share of the memory's rate that optimizers reach") {
  const DeviceKind device = unit_device(BackendKind::cuda);
  TrainingSpec training;
  // Gradient, parameter, two moments, of 4 bytes each; all but the gradient are written, too.
  CHECK(host_kernel_time(update_on_host(15, true, training), device, device.rates[0], share) ==
        Seconds(15.0 * 28.0 / (60.0 * 0.5)));
  // In half precision, the master copy is read and written, and the parameter written.
  training.precision = DataType::bf16;
  CHECK(host_kernel_time(update_on_host(15, true, training), device, device.rates[0], share) ==
        Seconds(15.0 * 30.0 / (60.0 * 0.5)));
  // A sum of squares reads the gradients, and its own 8 bytes.
  CHECK(host_kernel_time(sum_of_squares_on_host(15), device, device.rates[0], share) ==
        Seconds((15.0 * 4.0 + 8.0) / (60.0 * 0.5)));
}

TEST_CASE("cores are their own host") {
  DeviceKind device = unit_device(BackendKind::cpu);
  device.rates[0].memory = BytesPerSecond(2.0);
  // 40 bytes are read and 40 written, at 2 a second.
  CHECK(host_copy_time(Bytes(40), device, device.rates[0], {}) == Seconds(40.0));
  const Instruction update = update_on_host(8, false, TrainingSpec{});
  CHECK(host_kernel_time(update, device, device.rates[0], {}) ==
        kernel_time(update.op, update.shape, update.type, device, device.rates[0]));
}

}  // namespace
}  // namespace parplan
