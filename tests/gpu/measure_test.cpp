#include "runtime/measure_kernels.h"

#include "tests/gpu/device.h"

namespace parplan {
namespace {

TEST_CASE("the kernels that parplan measure times run on a GPU in every precision, and take a time") {
  const auto gpu = testing::gpu_or_skip();
  if (gpu == nullptr) return;
  std::vector<KernelMeasurement> kernels;
  for (const DataType type : {DataType::bf16, DataType::fp16, DataType::tf32, DataType::fp32}) {
    const auto add = [&](OpKind kind, const OpShape& sizes) { kernels.push_back(measured_kernel(kind, type, sizes)); };
    for (const OpKind kind : {OpKind::linear, OpKind::linear_gelu, OpKind::linear_input_gradient,
                              OpKind::linear_input_gradient_gelu, OpKind::linear_weight_gradient})
      add(kind, {.rows = 16, .columns = 32, .inner = 24});
    for (const OpKind kind : {OpKind::attention, OpKind::attention_gradient})
      add(kind, {.sequence = 16, .batch = 1, .heads = 2, .kv_heads = 2, .head_dim = 64});
    if (type == DataType::tf32) continue;
    for (const OpKind kind : {OpKind::layer_norm, OpKind::layer_norm_gradient, OpKind::rms_norm,
                              OpKind::rms_norm_gradient, OpKind::add_layer_norm, OpKind::add_rms_norm, OpKind::add,
                              OpKind::bias_gradient, OpKind::activation, OpKind::activation_gradient, OpKind::gate,
                              OpKind::gate_gradient, OpKind::embedding, OpKind::embedding_gradient,
                              OpKind::cross_entropy_max, OpKind::cross_entropy_sums, OpKind::cross_entropy_gradient})
      add(kind, {.rows = 4, .columns = 64});
    add(OpKind::rotary, {.sequence = 8, .batch = 1, .heads = 2, .kv_heads = 2, .head_dim = 64});
    for (const OpKind kind : {OpKind::copy, OpKind::fill_zero, OpKind::accumulate, OpKind::adamw})
      add(kind, {.rows = 256});
  }
  const std::unique_ptr<Backend> backend = gpu->make_backend(0, {});
  MeasureOptions options;
  options.budget = Seconds(testing::is_emulated(*gpu) ? 100.0 : 5.0);  // shares must not leave any out
  options.memory = Bytes(128 << 20);
  options.footprint = Bytes(1);
  options.copies = {Bytes(1 << 12)};
  const Measurements found = measure_kernels(*backend, kernels, options);
  CHECK(found.kernels.size() == kernels.size());
  for (const KernelMeasurement& kernel : found.kernels) {
    CAPTURE(name(kernel.kind));
    CAPTURE(name(kernel.type));
    CHECK(kernel.time > Seconds(0.0));
  }
  CHECK(found.launch > Seconds(0.0));
  CHECK(found.replayed_launch > Seconds(0.0));
  CHECK(found.copies.size() == 3);
}

}  // namespace
}  // namespace parplan
