// GPT-2 124M trained on this machine: tokens/s and the GFLOP/s of its model FLOPs, on one rank and
// on two, beside Eigen alone on the same matrix products with as many threads at once. Model FLOPs
// count matrix products and attention (as if it were not causal), nothing else; a step also does
// everything between them, and the optimizer.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/parallel/techniques.h"
#include "planner/schedule/schedules.h"
#include "runtime/device/cpu/cpu_backend.h"
#include "runtime/local_job.h"
#include "tests/bench/gemm_bench.h"

namespace parplan {
namespace {

constexpr std::int64_t sequence = 256;
constexpr std::int64_t sequences_a_rank = 4;  // the defaults of `parplan suggest` for CPUs
constexpr std::int64_t steps = 4;             // the first one touches memory for the first time

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// The time of one step of `ranks` data-parallel ranks: the fastest after the first, since others
// may use the machine.
struct Measured {
  double seconds = 0.0;
  double loss = 0.0;
  std::map<std::string, double> parts;  // seconds per step of rank 0, by kind of instruction
  double waited = 0.0;
};

Measured train(const OpGraph& graph, int ranks) {
  TrainingSpec training;
  training.sequence_length = sequence;
  training.global_batch = sequences_a_rank * ranks;
  ParallelSpec spec;
  spec.mesh.degree = {.dp = ranks};
  spec.micro_batch = sequences_a_rank;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  const std::unique_ptr<Rendezvous> rendezvous = alone();
  LocalJob job({.graph = &graph, .training = training, .layout = lay_out(spec, place(graph, spec)),
                .schedule = row_of(spec.schedule).actions({1, static_cast<int>(micro_batches(spec, training))}),
                .backend = BackendKind::cpu, .overhead = {}},
               initializer(training.seed), cpu_threads(), *rendezvous);
  const TokenData data =
      TokenData::load(std::vector{std::string(PARPLAN_SOURCE_DIR) + "/configs/data/public-domain.txt"}, sequence,
                      graph.vocabulary);
  Measured measured;
  measured.seconds = 1e30;
  job.run({.first = 0,
           .count = steps,
           .batch_of = [&](std::int64_t step, Batch& batch) { fill(batch, data, step, training.global_batch); },
           .timing_of = {},
           .on_step = [&](std::int64_t step, const JobStep& result) {
             if (step > 0) measured.seconds = std::min(measured.seconds, result.time.value);
             measured.loss = result.loss;
           }});
  const Program& program = job.programs().front();
  const auto& instructions = job.executor(0).instructions();
  for (std::size_t s = 0; s < program.segments.size(); ++s)
    for (std::size_t i = 0; i < program.segments[s].instructions.size(); ++i) {
      const Instruction& instruction = program.segments[s].instructions[i];
      const char* kind = instruction.kind == InstructionKind::kernel ? name(instruction.op) : name(instruction.kind);
      measured.parts[kind] += instructions[s][i].busy.value / steps;
      measured.waited += instructions[s][i].waited.value / steps;
    }
  return measured;
}

struct CountedProduct {
  std::int64_t columns = 0, inner = 0;
  std::int64_t times = 0;
};

// The matrix products of the model; equal ones are counted.
std::vector<CountedProduct> products_of(const OpGraph& graph) {
  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> counted;
  for (const Op& op : graph.ops)
    if (op.kind == OpKind::linear) {
      const auto& dims = graph.tensors[op.parameters[0]].dims;
      ++counted[{dims[0].size, dims[1].size}];
    }
  std::vector<CountedProduct> products;
  for (const auto& [shape, times] : counted) products.push_back({shape.first, shape.second, times});
  return products;
}

// The total GFLOP/s of `threads` that all compute the products of a step with Eigen, each on its
// own arrays: forward, input gradient and weight gradient of every product as often as the model
// has it, each at the best of its repeats.
double eigen_gflops(const std::vector<CountedProduct>& products, std::int64_t rows, int threads) {
  std::vector<double> rates(static_cast<std::size_t>(threads));
  std::barrier together(threads);
  std::vector<std::thread> workers;
  for (int thread = 0; thread < threads; ++thread)
    workers.emplace_back([&, thread] {
      double operations = 0.0, seconds = 0.0;
      for (const CountedProduct& product : products) {
        std::vector<float> x(static_cast<std::size_t>(rows * product.inner), 0.25f);
        std::vector<float> w(static_cast<std::size_t>(product.columns * product.inner), 0.5f);
        std::vector<float> y(static_cast<std::size_t>(rows * product.columns), 0.125f);
        double best[3] = {1e30, 1e30, 1e30};
        const int repeats = product.columns > 10000 ? 3 : 8;
        together.arrive_and_wait();
        for (int repeat = 0; repeat < repeats; ++repeat) {
          const double begin = now();
          bench::eigen_forward(x.data(), w.data(), y.data(), rows, product.columns, product.inner);
          const double forward = now();
          bench::eigen_input_gradient(y.data(), w.data(), x.data(), rows, product.columns, product.inner);
          const double input = now();
          bench::eigen_weight_gradient(y.data(), x.data(), w.data(), rows, product.columns, product.inner);
          best[0] = std::min(best[0], forward - begin);
          best[1] = std::min(best[1], input - forward);
          best[2] = std::min(best[2], now() - input);
          std::fill(x.begin(), x.end(), 0.25f);  // values must not grow from repeat to repeat
          std::fill(w.begin(), w.end(), 0.5f);
        }
        const double times = static_cast<double>(product.times);
        operations += times * 6.0 * static_cast<double>(rows) * static_cast<double>(product.columns) *
                      static_cast<double>(product.inner);
        seconds += times * (best[0] + best[1] + best[2]);
      }
      rates[thread] = operations / seconds * 1e-9;
    });
  for (std::thread& worker : workers) worker.join();
  double sum = 0.0;
  for (const double rate : rates) sum += rate;
  return sum;
}

}  // namespace
}  // namespace parplan

int main() {
  using namespace parplan;
  const OpGraph graph = build_graph(load_model("gpt2", std::string(PARPLAN_SOURCE_DIR) + "/models").spec, sequence);
  const std::vector<CountedProduct> products = products_of(graph);
  const bool eigen = cpu_instruction_sets().back() == "v4";  // gemm_bench_eigen.cpp is compiled for it
  std::printf("gpt2 (%lld parameters), fp32, AdamW, sequence %lld, %lld sequences a rank and step, kernels of %s\n",
              static_cast<long long>(parameter_count(graph)), static_cast<long long>(sequence),
              static_cast<long long>(sequences_a_rank), chosen_cpu_instruction_set().c_str());
  std::printf("%6s %10s %10s %10s %12s %7s %8s\n", "ranks", "s a step", "tokens/s", "GFLOP/s", "Eigen alone", "ratio",
              "loss");
  const unsigned cores = std::max(std::thread::hardware_concurrency(), 1u);
  for (int ranks = 1; ranks <= 2 && static_cast<unsigned>(ranks) <= cores; ++ranks) {
    const Measured measured = train(graph, ranks);
    const double sequences = static_cast<double>(sequences_a_rank * ranks);
    const double rate = model_flops_per_sample(graph).value * sequences / measured.seconds * 1e-9;
    std::printf("%6d %10.3f %10.0f %10.1f", ranks, measured.seconds,
                sequences * static_cast<double>(sequence) / measured.seconds, rate);
    if (eigen) {
      const double alone = eigen_gflops(products, sequences_a_rank * sequence, ranks);
      std::printf(" %12.1f %6.0f%%", alone, 100.0 * rate / alone);
    } else {
      std::printf(" %12s %7s", "needs AVX-512", "");
    }
    std::printf(" %8.4f\n", measured.loss);
    std::vector<std::pair<double, std::string>> parts;
    for (const auto& [kind, seconds] : measured.parts) parts.push_back({seconds, kind});
    std::sort(parts.rbegin(), parts.rend());
    parts.resize(std::min<std::size_t>(parts.size(), 10));
    std::printf("       rank 0, ms a step (mean):");
    for (const auto& [seconds, kind] : parts) std::printf(" %s %.0f,", kind.c_str(), 1e3 * seconds);
    std::printf(" waiting %.0f\n", 1e3 * measured.waited);
    std::fflush(stdout);
  }
}
