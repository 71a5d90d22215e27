// Timing kernels on the CPU backend. Nothing is asserted about times except that they are times.
#include "runtime/measure_kernels.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "runtime/device/cpu/cpu_backend.h"

namespace parplan {
namespace {

// A kernel of every measured kind, in the sizes of its first row.
std::vector<KernelMeasurement> one_of_each(BackendKind backend, DataType type) {
  std::map<OpKind, KernelMeasurement> smallest;
  for (const KernelMeasurement& kernel : kernels_to_measure(backend, {type})) {
    OpShape sizes;
    for (const auto& [field, size] : {std::pair{&OpShape::rows, 8},
                                      {&OpShape::columns, 24},
                                      {&OpShape::inner, 16},
                                      {&OpShape::sequence, 9},
                                      {&OpShape::batch, 2},
                                      {&OpShape::heads, 2},
                                      {&OpShape::kv_heads, 2},
                                      {&OpShape::head_dim, 8}})
      if (kernel.shape.*field > 0) sizes.*field = size;
    smallest.try_emplace(kernel.kind, measured_kernel(kernel.kind, type, sizes));
  }
  std::vector<KernelMeasurement> kernels;
  for (const auto& [kind, kernel] : smallest) kernels.push_back(kernel);
  return kernels;
}

MeasureOptions small_options() {
  return {.budget = Seconds(0.5),
          .memory = Bytes(64 << 20),
          .footprint = Bytes(1 << 16),
          .copies = {Bytes(1 << 12), Bytes(1 << 16)}};
}

TEST_CASE("every kind of kernel that is measured runs, and takes a time") {
  const std::unique_ptr<Backend> backend = make_cpu_backend();
  const std::vector<KernelMeasurement> kernels = one_of_each(BackendKind::cpu, DataType::fp32);
  CHECK(kernels.size() >= 25);
  int last = -1;
  MeasureOptions options = small_options();
  options.budget = Seconds(500.0);  // no kernel is left out, even if the machine stops for seconds
  options.progress = [&](int done, int of) {
    CHECK(done == last + 1);
    CHECK(of == static_cast<int>(kernels.size()));
    last = done;
  };
  const Measurements found = measure_kernels(*backend, kernels, options);
  CHECK(last == static_cast<int>(kernels.size()));
  REQUIRE(found.kernels.size() == kernels.size());
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    CAPTURE(name(kernels[i].kind));
    CHECK(found.kernels[i].kind == kernels[i].kind);
    CHECK(found.kernels[i].shape == kernels[i].shape);
    CHECK(found.kernels[i].time > Seconds(0.0));
    CHECK(found.kernels[i].time < Seconds(1.0));
  }
  CHECK(found.launch > Seconds(0.0));
  CHECK(found.replayed_launch > Seconds(0.0));
  CHECK(found.library_memory == Bytes(0));  // the machine's memory does not belong to one program
  REQUIRE(found.copies.size() == 6);
  std::set<CopyRoute> routes;
  for (const CopyMeasurement& copy : found.copies) {
    CHECK(copy.time > Seconds(0.0));
    routes.insert(copy.route);
  }
  CHECK(routes.size() == 3);
}

TEST_CASE("a kernel that needs more memory than there is, or more time than its share, is left out") {
  const std::unique_ptr<Backend> backend = make_cpu_backend();
  MeasureOptions options = small_options();
  options.memory = Bytes(1 << 20);
  const std::vector<KernelMeasurement> kernels = {
      measured_kernel(OpKind::add, DataType::fp32, {.rows = 1 << 10, .columns = 1 << 10}),
      measured_kernel(OpKind::add, DataType::fp32, {.rows = 8, .columns = 8})};
  const Measurements found = measure_kernels(*backend, kernels, options);
  REQUIRE(found.kernels.size() == 1);
  CHECK(found.kernels[0].shape.rows == 8);

  options = small_options();
  options.budget = Seconds(1e-7);
  CHECK(measure_kernels(*backend,
                        {measured_kernel(OpKind::linear, DataType::fp32, {.rows = 512, .columns = 512, .inner = 512})},
                        options)
            .kernels.empty());
}

TEST_CASE("what is measured is what plans are made of: every kernel of a training step but bookkeeping") {
  for (const BackendKind backend : {BackendKind::cpu, BackendKind::cuda}) {
    std::set<OpKind> measured;
    std::set<std::tuple<OpKind, DataType, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                        std::int64_t>>
        seen;
    for (const KernelMeasurement& kernel : kernels_to_measure(backend, {DataType::fp32, DataType::bf16})) {
      measured.insert(kernel.kind);
      const OpShape& s = kernel.shape;
      CHECK(seen.insert({kernel.kind, kernel.type, s.rows, s.columns, s.inner, s.sequence, s.batch, s.head_dim})
                .second);  // none twice
      CHECK(kernel == [&] { return measured_kernel(kernel.kind, kernel.type, kernel.shape); }());
    }
    for (const OpRow& row : op_rows()) {
      CAPTURE(row.name);
      const std::set<OpKind> left_out = {
          OpKind::add_position, OpKind::add_position_gradient, OpKind::cross_entropy_loss, OpKind::rotary_gradient,
          OpKind::load_tokens, OpKind::load_targets, OpKind::sgd, OpKind::update_loss_scale,
          // of few families, priced as the kinds that move bytes or attend alike (`made_of` in
          // planner/cost/kernel_time.cpp)
          OpKind::head_norm, OpKind::head_norm_gradient, OpKind::query_key_squares, OpKind::query_key_squares_gradient,
          OpKind::query_key_norm, OpKind::query_key_norm_gradient, OpKind::scale, OpKind::scale_gradient,
          OpKind::softcap, OpKind::softcap_gradient, OpKind::transpose_blocks, OpKind::take_columns,
          OpKind::put_columns, OpKind::packed_attention, OpKind::packed_attention_gradient, OpKind::take_rows,
          OpKind::take_rows_gradient, OpKind::put_rows, OpKind::put_rows_gradient, OpKind::append_rows,
          OpKind::append_rows_gradient, OpKind::normalize_pixels,
          // of Muon, once a step; its products are measured
          OpKind::muon_momentum, OpKind::normalize_matrix, OpKind::newton_schulz_polynomial, OpKind::muon};
      CHECK((measured.count(row.kind) == 1) == (left_out.count(row.kind) == 0 && !is_foreign(row.kind)));
    }
  }
}

}  // namespace
}  // namespace parplan
