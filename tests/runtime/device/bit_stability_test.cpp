#include <doctest/doctest.h>

#include "tests/runtime/device/guarded_arrays.h"

// Pipeline, accumulation and data parallelism promise equal bits, so the kernels must: a token's
// numbers depend neither on the other tokens of the call nor on addresses.
using namespace parplan;
using namespace parplan::testing;

namespace {

struct LinearSize {
  std::int64_t rows, columns, inner;
};
constexpr LinearSize sizes[] = {{13, 50, 37}, {11, 33, 64}, {9, 401, 780}, {10, 64, 33}, {300, 17, 5}, {7, 25, 970}};

}  // namespace

TEST_CASE("linear and its input gradient give a token the same bits in every split of the rows") {
  on_every_instruction_set([](Backend& backend) {
    for (const LinearSize& s : sizes) {
      const Array x(numbers(s.rows * s.inner, 1)), w(numbers(s.columns * s.inner, 2)), bias(numbers(s.columns, 3));
      const Array dy(numbers(s.rows * s.columns, 4));
      OpShape shape{.rows = s.rows, .columns = s.columns, .inner = s.inner, .bias = true};
      Array y(s.rows * s.columns), dx(s.rows * s.inner);
      run(backend, OpKind::linear, shape, x, w, bias, y);
      run(backend, OpKind::linear_input_gradient, shape, dy, w, dx);
      for (std::int64_t split = 1; split < s.rows; split += s.rows > 100 ? 37 : 1) {
        INFO(s.rows, " x ", s.columns, " x ", s.inner, " split at ", split);
        Array y_split(s.rows * s.columns, poison, 3), dx_split(s.rows * s.inner, poison, 5);
        for (const auto& [begin, end] : {std::pair{std::int64_t{0}, split}, std::pair{split, s.rows}}) {
          shape.rows = end - begin;
          run(backend, OpKind::linear, shape, x.data() + begin * s.inner, w, bias,
              y_split.data() + begin * s.columns);
          run(backend, OpKind::linear_input_gradient, shape, dy.data() + begin * s.columns, w,
              dx_split.data() + begin * s.inner);
        }
        CHECK(same_bits(y.data(), y_split.data(), y.size()));
        CHECK(same_bits(dx.data(), dx_split.data(), dx.size()));
      }
    }
  });
}

TEST_CASE("elementwise kernels give an element the same bits wherever the call begins and ends") {
  struct Case {
    OpKind kind;
    ActivationKind activation;
    int inputs;
    int outputs;
  };
  constexpr Case cases[] = {{OpKind::activation, ActivationKind::gelu_tanh, 1, 1},
                            {OpKind::activation, ActivationKind::gelu_erf, 1, 1},
                            {OpKind::activation_gradient, ActivationKind::gelu_tanh, 2, 1},
                            {OpKind::activation_gradient, ActivationKind::gelu_erf, 2, 1},
                            {OpKind::gate, ActivationKind::silu, 2, 1},
                            {OpKind::gate, ActivationKind::gelu_tanh, 2, 1},
                            {OpKind::gate_gradient, ActivationKind::silu, 3, 2},
                            {OpKind::gate_gradient, ActivationKind::gelu_erf, 3, 2},
                            {OpKind::scale, ActivationKind::gelu_tanh, 1, 1},
                            {OpKind::scale_gradient, ActivationKind::gelu_tanh, 1, 1},
                            {OpKind::softcap, ActivationKind::gelu_tanh, 1, 1},
                            {OpKind::softcap_gradient, ActivationKind::gelu_tanh, 2, 1}};
  const std::int64_t count = 101;
  on_every_instruction_set([&](Backend& backend) {
    for (const Case& c : cases) {
      std::vector<Array> arrays;
      for (int i = 0; i < c.inputs; ++i) arrays.emplace_back(numbers(count, i, 4.0));
      for (int i = 0; i < 2 * c.outputs; ++i) arrays.emplace_back(count, poison, i);
      const auto call = [&](std::int64_t begin, std::int64_t end, int first_output) {
        std::vector<void*> operands;
        for (int i = 0; i < c.inputs; ++i) operands.push_back(arrays[i].data() + begin);
        for (int i = 0; i < c.outputs; ++i)
          operands.push_back(arrays[c.inputs + first_output + i].data() + begin);
        backend.run(0, {.kind = c.kind,
                        .shape = {.rows = end - begin, .activation = c.activation, .factor = 0.7, .softcap = 2.0},
                        .operands = operands});
      };
      call(0, count, 0);
      for (std::int64_t split = 1; split < count; split += 3) {
        INFO(name(c.kind), " split at ", split);
        call(0, split, c.outputs);
        call(split, count, c.outputs);
        for (int i = 0; i < c.outputs; ++i)
          CHECK(same_bits(arrays[c.inputs + i].data(),
                          arrays[c.inputs + c.outputs + i].data(), count));
      }
    }
  });
}

TEST_CASE("the optimizer gives a parameter the same bits in every shard") {
  const std::int64_t count = 101;
  const StepScalars scalars{.step = 2, .learning_rate = 0.013, .weight_decay = 0.17, .momentum = 0.93,
                            .clip_norm = 1.0};
  const Array norm(1, 7.0f), gradient(numbers(count, 1));
  on_every_instruction_set([&](Backend& backend) {
    backend.set_scalars(scalars);
    for (const OpKind kind : {OpKind::adamw, OpKind::sgd}) {
      const auto update = [&](std::int64_t split, Array& p, Array& m, Array& v) {
        for (const auto& [begin, end] : {std::pair{std::int64_t{0}, split}, std::pair{split, count}}) {
          const OpShape shape{.rows = end - begin, .second = true, .weight_decay = true, .norm = true};
          if (kind == OpKind::adamw) {
            run(backend, kind, shape, gradient.data() + begin, p.data() + begin, m.data() + begin,
                v.data() + begin, norm);
          } else {
            run(backend, kind, shape, gradient.data() + begin, p.data() + begin, m.data() + begin, norm);
          }
        }
      };
      Array p(numbers(count, 2)), m(numbers(count, 3)), v(count, 0.5f);
      update(0, p, m, v);
      for (std::int64_t split = 1; split < count; ++split) {
        INFO(name(kind), " split at ", split);
        Array p_split(numbers(count, 2), 1), m_split(numbers(count, 3), 2), v_split(count, 0.5f, 3);
        update(split, p_split, m_split, v_split);
        CHECK(same_bits(p.data(), p_split.data(), count));
        CHECK(same_bits(m.data(), m_split.data(), count));
        CHECK(same_bits(v.data(), v_split.data(), count));
      }
    }
  });
}

TEST_CASE("Muon gives a momentum and a parameter the same bits in every shard") {
  const std::int64_t count = 101;
  const Array norm(1, 7.0f), direction(numbers(count, 4));
  on_every_instruction_set([&](Backend& backend) {
    backend.set_scalars({.learning_rate = 0.013, .weight_decay = 0.17, .momentum = 0.93, .clip_norm = 1.0});
    const auto update = [&](std::int64_t split, Array& g, Array& m, Array& p) {
      for (const auto& [begin, end] : {std::pair{std::int64_t{0}, split}, std::pair{split, count}}) {
        const OpShape shape{.rows = end - begin, .weight_decay = true, .norm = true, .factor = 1.7};
        run(backend, OpKind::muon_momentum, shape, g.data() + begin, m.data() + begin, norm);
        run(backend, OpKind::muon, shape, direction.data() + begin, p.data() + begin, norm);
      }
    };
    Array g(numbers(count, 1)), m(numbers(count, 3)), p(numbers(count, 2));
    update(0, g, m, p);
    for (std::int64_t split = 1; split < count; ++split) {
      Array g_split(numbers(count, 1), 1), m_split(numbers(count, 3), 2), p_split(numbers(count, 2), 3);
      update(split, g_split, m_split, p_split);
      CHECK(same_bits(g.data(), g_split.data(), count));
      CHECK(same_bits(m.data(), m_split.data(), count));
      CHECK(same_bits(p.data(), p_split.data(), count));
    }
  });
}

TEST_CASE("the optimizer gives a parameter and its codes the same bits in every shard of whole blocks") {
  const std::int64_t block = 256, count = 5 * block + 37;
  const Array norm(1, 7.0f), gradient(numbers(count, 1));
  on_every_instruction_set([&](Backend& backend) {
    backend.set_scalars({.step = 2, .learning_rate = 0.013, .weight_decay = 0.17, .clip_norm = 1.0});
    struct Updated {
      Array parameter{numbers(1317, 2)};
      std::vector<std::uint8_t> first, second;
      Array first_scales{6, 0.5f}, second_scales{6, 0.25f};
    };
    const auto update = [&](std::int64_t split, Updated& u) {
      for (const auto& [begin, end] : {std::pair{std::int64_t{0}, split}, std::pair{split, count}}) {
        const OpShape shape{.rows = end - begin, .weight_decay = true, .norm = true};
        void* const operands[] = {gradient.data() + begin,
                                  u.parameter.data() + begin,
                                  u.first.data() + begin,
                                  u.second.data() + begin,
                                  u.first_scales.data() + begin / block,
                                  u.second_scales.data() + begin / block,
                                  norm.data()};
        backend.run(0, {.kind = OpKind::adamw_8bit, .shape = shape, .operands = operands});
      }
    };
    const auto fresh = [&] {
      Updated u;
      for (std::int64_t i = 0; i < count; ++i) {
        u.first.push_back(static_cast<std::uint8_t>(i * 37));
        u.second.push_back(static_cast<std::uint8_t>(i * 11));
      }
      return u;
    };
    Updated whole = fresh();
    update(0, whole);
    for (std::int64_t split = block; split < count; split += block) {
      CAPTURE(split);
      Updated parts = fresh();
      update(split, parts);
      CHECK(same_bits(whole.parameter.data(), parts.parameter.data(), count));
      CHECK(whole.first == parts.first);
      CHECK(whole.second == parts.second);
      CHECK(same_bits(whole.first_scales.data(), parts.first_scales.data(), 6));
      CHECK(same_bits(whole.second_scales.data(), parts.second_scales.data(), 6));
    }
  });
}

TEST_CASE("norms and cross entropy give a token the same bits at every address and in every split") {
  constexpr std::int64_t rows = 7, columns = 53;
  const Array x(numbers(rows * columns, 1, 3.0)), gamma(numbers(columns, 2)), beta(numbers(columns, 3));
  const Array dy(numbers(rows * columns, 4));
  const std::vector<std::int32_t> targets = {0, 52, 5, 16, 31, 32, 48};
  on_every_instruction_set([&](Backend& backend) {
    struct Results {
      explicit Results(std::int64_t shift)
          : y(rows * columns, poison, shift), mean(rows, poison, shift), rstd(rows, poison, shift),
            dx(rows * columns, poison, shift), rms(rows * columns, poison, shift), rms_rstd(rows, poison, shift),
            rms_dx(rows * columns, poison, shift), maximum(rows, poison, shift), sums(2 * rows, poison, shift),
            dlogits(rows * columns, poison, shift), dgamma(columns, 0.0f), dbeta(columns, 0.0f) {}
      Array y, mean, rstd, dx, rms, rms_rstd, rms_dx, maximum, sums, dlogits, dgamma, dbeta;
    };
    const auto compute = [&](const Results& r, std::int64_t begin, std::int64_t end) {
      const OpShape shape{.rows = end - begin, .columns = columns, .valid = columns, .epsilon = 1e-5, .scale = 0.3};
      const std::int64_t first = begin * columns;
      const std::vector<std::int32_t> own(targets.begin() + begin, targets.begin() + end);
      run(backend, OpKind::layer_norm, shape, x.data() + first, gamma, beta, r.y.data() + first,
          r.mean.data() + begin, r.rstd.data() + begin);
      run(backend, OpKind::layer_norm_gradient, shape, dy.data() + first, x.data() + first, gamma,
          r.mean.data() + begin, r.rstd.data() + begin, r.dx.data() + first, r.dgamma, r.dbeta);
      run(backend, OpKind::rms_norm, shape, x.data() + first, gamma, r.rms.data() + first,
          r.rms_rstd.data() + begin);
      run(backend, OpKind::rms_norm_gradient, shape, dy.data() + first, x.data() + first, gamma,
          r.rms_rstd.data() + begin, r.rms_dx.data() + first, r.dgamma);
      run(backend, OpKind::cross_entropy_max, shape, x.data() + first, r.maximum.data() + begin);
      run(backend, OpKind::cross_entropy_sums, shape, x.data() + first, own, r.maximum.data() + begin,
          r.sums.data() + 2 * begin);
      run(backend, OpKind::cross_entropy_gradient, shape, x.data() + first, own, r.maximum.data() + begin,
          r.sums.data() + 2 * begin, r.dlogits.data() + first);
    };
    const Results whole(0);
    compute(whole, 0, rows);
    for (std::int64_t split = 1; split < rows; ++split) {
      INFO("split at ", split);
      const Results parts(split);
      compute(parts, 0, split);
      compute(parts, split, rows);
      for (const auto& [a, b] : {std::pair{&whole.y, &parts.y}, {&whole.mean, &parts.mean}, {&whole.rstd, &parts.rstd},
                                 {&whole.dx, &parts.dx}, {&whole.rms, &parts.rms}, {&whole.rms_dx, &parts.rms_dx},
                                 {&whole.maximum, &parts.maximum}, {&whole.sums, &parts.sums},
                                 {&whole.dlogits, &parts.dlogits}})
        CHECK(same_bits(a->data(), b->data(), a->size()));
    }
  });
}

TEST_CASE("norms of queries and keys give a token the same bits in every split of the rows") {
  const std::int64_t rows = 7, heads = 4, kv_heads = 2, head_dim = 13, width = (heads + 2 * kv_heads) * head_dim;
  const Array x(numbers(rows * width, 1)), dy(numbers(rows * width, 2)), gammas(numbers(heads * head_dim, 3));
  on_every_instruction_set([&](Backend& backend) {
    struct Results {
      Array y{rows * width}, rstd{rows * (heads + kv_heads)}, dx{rows * width}, squares{rows * 2}, whole{rows * width};
      Array dwhole{rows * width}, dsquares{rows * 2}, dgammas{numbers(heads * head_dim, 4)};
    };
    const auto compute = [&](const Results& r, std::int64_t begin, std::int64_t end) {
      const OpShape shape{.rows = end - begin,
                          .sequence = end - begin,
                          .batch = 1,
                          .heads = heads,
                          .kv_heads = kv_heads,
                          .head_dim = head_dim,
                          .all_heads = heads,
                          .epsilon = 1e-5};
      const std::int64_t first = begin * width;
      float* rstd = r.rstd.data() + begin * (heads + kv_heads);
      float* squares = r.squares.data() + begin * 2;
      run(backend, OpKind::head_norm, shape, x.data() + first, gammas, gammas, r.y.data() + first, rstd);
      run(backend, OpKind::head_norm_gradient, shape, dy.data() + first, x.data() + first, gammas, gammas, rstd,
          r.dx.data() + first, r.dgammas, r.dgammas);
      run(backend, OpKind::query_key_squares, shape, x.data() + first, squares);
      run(backend, OpKind::query_key_norm, shape, x.data() + first, squares, gammas, gammas, r.whole.data() + first);
      run(backend, OpKind::query_key_norm_gradient, shape, dy.data() + first, x.data() + first, squares, gammas, gammas,
          r.dwhole.data() + first, r.dsquares.data() + begin * 2, r.dgammas, r.dgammas);
      run(backend, OpKind::query_key_squares_gradient, shape, r.dsquares.data() + begin * 2, x.data() + first,
          r.dwhole.data() + first);
    };
    const Results whole;
    compute(whole, 0, rows);
    for (std::int64_t split = 1; split < rows; ++split) {
      const Results parts;
      compute(parts, 0, split);
      compute(parts, split, rows);
      for (const auto& [a, b] : {std::pair{&whole.y, &parts.y},
                                 {&whole.rstd, &parts.rstd},
                                 {&whole.dx, &parts.dx},
                                 {&whole.squares, &parts.squares},
                                 {&whole.whole, &parts.whole},
                                 {&whole.dwhole, &parts.dwhole},
                                 {&whole.dsquares, &parts.dsquares}})
        CHECK(same_bits(a->data(), b->data(), a->size()));
    }
  });
}

TEST_CASE("attention gives a sample the same bits alone as in a batch") {
  const std::int64_t sequence = 133, heads = 4, kv_heads = 2, head_dim = 12, batch = 3;
  const std::int64_t width = (heads + 2 * kv_heads) * head_dim, out = heads * head_dim;
  on_every_instruction_set([&](Backend& backend) {
    OpShape shape{.rows = sequence * batch, .sequence = sequence, .batch = batch, .heads = heads,
                  .kv_heads = kv_heads, .head_dim = head_dim};
    const Array qkv(numbers(sequence * batch * width, 1)), dy(numbers(sequence * batch * out, 2));
    Array y(sequence * batch * out), lse(batch * heads * sequence), dqkv(sequence * batch * width);
    run(backend, OpKind::attention, shape, qkv, y, lse);
    run(backend, OpKind::attention_gradient, shape, dy, qkv, y, lse, dqkv);
    shape.batch = 1;
    shape.rows = sequence;
    for (std::int64_t sample = 0; sample < batch; ++sample) {
      Array one_qkv(sequence * width), one_dy(sequence * out);
      for (std::int64_t s = 0; s < sequence; ++s) {
        for (std::int64_t i = 0; i < width; ++i) one_qkv[s * width + i] = qkv[(s * batch + sample) * width + i];
        for (std::int64_t i = 0; i < out; ++i) one_dy[s * out + i] = dy[(s * batch + sample) * out + i];
      }
      Array one_y(sequence * out), one_lse(heads * sequence), one_dqkv(sequence * width);
      run(backend, OpKind::attention, shape, one_qkv, one_y, one_lse);
      run(backend, OpKind::attention_gradient, shape, one_dy, one_qkv, one_y, one_lse, one_dqkv);
      CHECK(same_bits(one_lse.data(), lse.data() + sample * heads * sequence, heads * sequence));
      for (std::int64_t s = 0; s < sequence; ++s) {
        CHECK(same_bits(one_y.data() + s * out, y.data() + (s * batch + sample) * out, out));
        CHECK(same_bits(one_dqkv.data() + s * width, dqkv.data() + (s * batch + sample) * width, width));
      }
    }
  });
}
