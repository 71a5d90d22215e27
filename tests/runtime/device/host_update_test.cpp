#include "runtime/device/cpu/host_update.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "runtime/device/cpu/cpu_backend.h"
#include "runtime/device/cpu/host_conversion.h"

namespace parplan {
namespace {

constexpr std::int64_t elements = (1 << 20) + 37;  // several threads, and a rest

struct State {
  std::vector<float> gradient, parameter, first, second;
  float norm = 3.0f;
};

State state_of() {
  State state;
  for (std::int64_t i = 0; i < elements; ++i) {
    const auto x = static_cast<float>(i % 1013) / 1013.0f - 0.4f;
    state.gradient.push_back(x);
    state.parameter.push_back(1.0f - x);
    state.first.push_back(0.1f * x);
    state.second.push_back(0.01f * x * x);
  }
  return state;
}

StepScalars scalars_of() {
  return {.step = 3, .learning_rate = 1e-3, .weight_decay = 0.1, .clip_norm = 1.0};
}

OpShape shape_of_update() {
  OpShape shape;
  shape.rows = elements;
  shape.weight_decay = true;
  shape.norm = true;
  return shape;
}

TEST_CASE("the host updates each element as a CPU rank does, on however many threads") {
  State by_rank = state_of(), by_host = state_of();
  const auto backend = make_cpu_backend();
  backend->set_scalars(scalars_of());
  const auto update = [](State& state, auto run) {
    void* operands[] = {state.gradient.data(), state.parameter.data(), state.first.data(), state.second.data(),
                        &state.norm};
    run(KernelCall{.kind = OpKind::adamw, .shape = shape_of_update(), .type = DataType::fp32, .operands = operands});
  };
  update(by_rank, [&](const KernelCall& call) { backend->run(0, call); });
  update(by_host, [&](const KernelCall& call) { update_on_host(call, scalars_of()); });
  CHECK(by_host.parameter == by_rank.parameter);
  CHECK(by_host.first == by_rank.first);
  CHECK(by_host.second == by_rank.second);
  CHECK(by_host.parameter != state_of().parameter);
}

TEST_CASE("the host updates moments of 8 bits as a CPU rank does, block by block on however many threads") {
  struct Quantized {
    State state = state_of();
    std::vector<std::uint8_t> first, second;
    std::vector<float> first_scales, second_scales;
    Quantized()
        : first(elements), second(elements), first_scales(elements / 256 + 1), second_scales(elements / 256 + 1) {
      quantize(true, state.first.data(), elements, first.data(), first_scales.data());
      quantize(false, state.second.data(), elements, second.data(), second_scales.data());
    }
  };
  Quantized by_rank, by_host;
  const std::vector<float> before = by_rank.first_scales;
  const auto call = [](Quantized& q, auto run) {
    void* operands[] = {q.state.gradient.data(), q.state.parameter.data(), q.first.data(), q.second.data(),
                        q.first_scales.data(),   q.second_scales.data(),   &q.state.norm};
    run(KernelCall{
        .kind = OpKind::adamw_8bit, .shape = shape_of_update(), .type = DataType::fp32, .operands = operands});
  };
  const auto backend = make_cpu_backend();
  backend->set_scalars(scalars_of());
  call(by_rank, [&](const KernelCall& one) { backend->run(0, one); });
  call(by_host, [&](const KernelCall& one) { update_on_host(one, scalars_of()); });
  CHECK(by_host.state.parameter == by_rank.state.parameter);
  CHECK(by_host.first == by_rank.first);
  CHECK(by_host.second == by_rank.second);
  CHECK(by_host.first_scales == by_rank.first_scales);
  CHECK(by_host.second_scales == by_rank.second_scales);
  CHECK(by_host.first_scales != before);
}

TEST_CASE("in half precision the host updates the master copy, and rounds the parameters from it") {
  for (const DataType half : {DataType::bf16, DataType::fp16}) {
    State in_fp32 = state_of(), state = state_of();
    const auto backend = make_cpu_backend();
    backend->set_scalars(scalars_of());
    void* plain[] = {in_fp32.gradient.data(), in_fp32.parameter.data(), in_fp32.first.data(), in_fp32.second.data(),
                     &in_fp32.norm};
    backend->run(0, {.kind = OpKind::adamw, .shape = shape_of_update(), .type = DataType::fp32, .operands = plain});
    std::vector<std::uint16_t> parameters(elements), wanted(elements);
    OpShape shape = shape_of_update();
    shape.master = true;
    void* operands[] = {state.gradient.data(), parameters.data(),      state.first.data(),
                        state.second.data(),   &state.norm,            state.parameter.data()};
    update_on_host({.kind = OpKind::adamw, .shape = shape, .type = half, .operands = operands}, scalars_of());
    CHECK(state.parameter == in_fp32.parameter);
    narrow(half, state.parameter.data(), elements, wanted.data());
    CHECK(parameters == wanted);
  }
}

TEST_CASE("the host adds the squares of all elements to what is there, on however many threads") {
  const State state = state_of();
  double wanted = 2.0;
  for (const float x : state.gradient) wanted += static_cast<double>(x) * x;
  OpShape shape;
  shape.rows = elements;
  float sum = 2.0f;
  void* operands[] = {const_cast<float*>(state.gradient.data()), &sum};
  update_on_host({.kind = OpKind::sum_squares, .shape = shape, .type = DataType::fp32, .operands = operands},
                 scalars_of());
  CHECK(sum == doctest::Approx(wanted).epsilon(1e-6));
  const float first = std::exchange(sum, 2.0f);
  update_on_host({.kind = OpKind::sum_squares, .shape = shape, .type = DataType::fp32, .operands = operands},
                 scalars_of());
  CHECK(sum == first);
}

}  // namespace
}  // namespace parplan
