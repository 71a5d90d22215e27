// GFLOP/s of the CPU backend's kernels on one core at the shapes of GPT-2 124M, beside Eigen alone:
// the fastest of several runs, since other programs may share the machine. Eigen's file needs
// AVX-512.
#include "tests/bench/gemm_bench.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "planner/graph/cpu_workspace.h"
#include "runtime/device/cpu/cpu_backend.h"

namespace parplan {

namespace {

double gflops(double operations, const std::function<void()>& work) {
  work();
  double best = 1e30;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return operations / best * 1e-9;
}

class Arena {
 public:
  Arena(Backend& backend, std::int64_t elements)
      : backend_(backend), data_(static_cast<float*>(backend.allocate(Bytes(4 * elements)))) {
    for (std::int64_t i = 0; i < elements; ++i) data_[i] = static_cast<float>(i * 7919 % 1009) / 1009.0f - 0.5f;
  }
  ~Arena() { backend_.release(data_); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  operator float*() const { return data_; }

 private:
  Backend& backend_;
  float* data_;
};

void run(Backend& backend, OpKind kind, const OpShape& shape, const std::vector<void*>& operands) {
  backend.run(0, {.kind = kind, .shape = shape, .operands = operands});
}

void bench_linear(Backend& backend, bool eigen, std::int64_t rows, std::int64_t columns, std::int64_t inner) {
  const OpShape shape{.rows = rows, .columns = columns, .inner = inner};
  Arena x(backend, rows * inner), w(backend, columns * inner), y(backend, rows * columns);
  Arena workspace(backend, std::max({linear_workspace(rows, columns, inner).count,
                                     linear_input_gradient_workspace(rows, columns, inner).count,
                                     linear_weight_gradient_workspace(rows, columns, inner).count}) / 4);
  const double operations = 2.0 * static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(inner);
  const auto line = [&](const char* name, const std::function<void()>& ours, const std::function<void()>& theirs) {
    const double rate = gflops(operations, ours);
    std::printf("%6lld %6lld %6lld  %-16s %8.1f", static_cast<long long>(rows), static_cast<long long>(columns),
                static_cast<long long>(inner), name, rate);
    if (eigen) {
      const double alone = gflops(operations, theirs);
      std::printf(" %8.1f  %5.2f", alone, rate / alone);
    }
    std::printf("\n");
    std::fflush(stdout);
  };
  line("forward", [&] { run(backend, OpKind::linear, shape, {x, w, y, workspace}); },
       [&] { bench::eigen_forward(x, w, y, rows, columns, inner); });
  line("input gradient", [&] { run(backend, OpKind::linear_input_gradient, shape, {y, w, x, workspace}); },
       [&] { bench::eigen_input_gradient(y, w, x, rows, columns, inner); });
  line("weight gradient", [&] { run(backend, OpKind::linear_weight_gradient, shape, {y, x, w, workspace}); },
       [&] { bench::eigen_weight_gradient(y, x, w, rows, columns, inner); });
}

// GFLOP/s of the causal half: 2 products forward, 5 backward.
void bench_attention(Backend& backend, std::int64_t sequence, std::int64_t batch) {
  const std::int64_t heads = 12, head_dim = 64;
  const OpShape shape{.rows = sequence * batch, .sequence = sequence, .batch = batch, .heads = heads,
                      .kv_heads = heads, .head_dim = head_dim};
  const std::int64_t width = heads * head_dim;
  Arena qkv(backend, sequence * batch * 3 * width), dqkv(backend, sequence * batch * 3 * width);
  Arena y(backend, sequence * batch * width), dy(backend, sequence * batch * width);
  Arena lse(backend, sequence * batch * heads);
  Arena workspace(backend, attention_gradient_workspace(sequence, head_dim).count / 4);
  const double product = static_cast<double>(sequence * sequence * batch * width);
  std::printf("attention, sequence %lld, batch %lld, 12 heads of 64: forward %.1f, ", static_cast<long long>(sequence),
              static_cast<long long>(batch),
              gflops(2 * product, [&] { run(backend, OpKind::attention, shape, {qkv, y, lse, workspace}); }));
  std::printf("gradient %.1f\n", gflops(5 * product, [&] {
    run(backend, OpKind::attention_gradient, shape, {dy, qkv, y, lse, dqkv, workspace});
  }));
}

// GB/s of bytes read and written, each counted once.
void bench_elementwise(Backend& backend) {
  const std::int64_t rows = 1024, columns = 3072;
  const OpShape shape{.rows = rows, .columns = columns, .epsilon = 1e-5};
  Arena x(backend, rows * columns), y(backend, rows * columns), z(backend, rows * columns);
  Arena gamma(backend, columns), beta(backend, columns), mean(backend, rows), rstd(backend, rows);
  const double array = 4.0 * static_cast<double>(rows * columns);
  const auto line = [&](const char* name, double arrays, const std::function<void()>& work) {
    std::printf("%-24s %6.1f GB/s\n", name, gflops(arrays * array, work));
  };
  line("gelu", 2, [&] { run(backend, OpKind::activation, shape, {x, y}); });
  line("gelu gradient", 3, [&] { run(backend, OpKind::activation_gradient, shape, {x, y, z}); });
  line("layer norm", 2, [&] { run(backend, OpKind::layer_norm, shape, {x, gamma, beta, y, mean, rstd}); });
  line("layer norm gradient", 3, [&] {
    run(backend, OpKind::layer_norm_gradient, shape, {x, y, gamma, mean, rstd, z, gamma, beta});
  });
  line("add", 3, [&] {
    OpShape two = shape;
    two.second = true;
    run(backend, OpKind::add, two, {x, y, z});
  });
  Arena parameter(backend, rows * columns), first(backend, rows * columns), second(backend, rows * columns);
  std::fill_n(static_cast<float*>(second), rows * columns, 1.0f);
  const StepScalars scalars{.learning_rate = 1e-9};
  backend.set_scalars(scalars);
  line("adamw", 7, [&] { run(backend, OpKind::adamw, shape, {x, parameter, first, second}); });
}

}  // namespace

}  // namespace parplan

int main() {
  using namespace parplan;
  const std::string instruction_set = chosen_cpu_instruction_set();
  const bool eigen = cpu_instruction_sets().back() == "v4";
  const auto backend = make_cpu_backend();
  std::printf("kernels of %s, GFLOP/s on one core\n%6s %6s %6s  %-16s %8s %8s  %5s\n", instruction_set.c_str(), "rows",
              "out", "in", "", "parplan", "Eigen v4", "ratio");
  for (const std::int64_t rows : {256, 1024}) {
    bench_linear(*backend, eigen, rows, 768, 768);
    bench_linear(*backend, eigen, rows, 2304, 768);
    bench_linear(*backend, eigen, rows, 3072, 768);
    bench_linear(*backend, eigen, rows, 768, 3072);
    bench_linear(*backend, eigen, rows, 50257, 768);
  }
  bench_attention(*backend, 256, 4);
  bench_attention(*backend, 1024, 1);
  bench_elementwise(*backend);
}
