#include <doctest/doctest.h>

#include <chrono>
#include <cstdlib>
#include <optional>

#include "planner/base/error.h"
#include "tests/runtime/device/counting_allocator.h"
#include "tests/runtime/device/guarded_arrays.h"

using namespace parplan;
using namespace parplan::testing;

namespace {

// Sets PARPLAN_CPU_ISA and restores the previous value.
class ChosenByEnvironment {
 public:
  explicit ChosenByEnvironment(const char* value) {
    if (const char* before = std::getenv("PARPLAN_CPU_ISA")) before_ = before;
    setenv("PARPLAN_CPU_ISA", value, 1);
  }
  ~ChosenByEnvironment() {
    if (before_) {
      setenv("PARPLAN_CPU_ISA", before_->c_str(), 1);
    } else {
      unsetenv("PARPLAN_CPU_ISA");
    }
  }

 private:
  std::optional<std::string> before_;
};

}  // namespace

TEST_CASE("PARPLAN_CPU_ISA chooses the instruction set and empty means the best there is") {
  CHECK(cpu_instruction_sets().front() == "baseline");
  for (const std::string& name : cpu_instruction_sets()) {
    const ChosenByEnvironment chosen(name.c_str());
    CHECK(chosen_cpu_instruction_set() == name);
  }
  const ChosenByEnvironment chosen("");
  CHECK(chosen_cpu_instruction_set() == cpu_instruction_sets().back());
}

TEST_CASE("an unknown PARPLAN_CPU_ISA is an error that names the known ones") {
  const ChosenByEnvironment chosen("v5");
#if defined(__x86_64__)
  CHECK_THROWS_WITH_AS(
      chosen_cpu_instruction_set(),
      "error: PARPLAN_CPU_ISA: unknown instruction set 'v5'; allowed: baseline, v3, v4; did you mean 'v3'?",
      ConfigError);
#else
  CHECK_THROWS_WITH_AS(chosen_cpu_instruction_set(),
                       "error: PARPLAN_CPU_ISA: unknown instruction set 'v5'; allowed: baseline", ConfigError);
#endif
}

TEST_CASE("an arena is aligned to 256 bytes and copies move bytes") {
  const auto backend = make_cpu_backend();
  CHECK(std::string(backend->name()) == "cpu");
  void* arena = backend->allocate(Bytes(1000));
  CHECK(reinterpret_cast<std::uintptr_t>(arena) % 256 == 0);
  const std::string text = "twelve bytes";
  backend->copy(0, arena, text.data(), Bytes(12));
  backend->record(0, 1);
  backend->wait(1, 1);
  backend->synchronize();
  CHECK(std::string(static_cast<char*>(arena), 12) == text);
  backend->release(arena);
}

// Sanitizers' allocators end the program instead of failing.
TEST_CASE("more memory than there is, is an error that says how much was asked for" *
          doctest::skip(!allocations_are_counted)) {
  const auto backend = make_cpu_backend();
  CHECK_THROWS_WITH_AS(backend->allocate(Bytes(std::int64_t{1} << 60)),
                       "this machine has no 1048576 TiB of memory left for a rank", RunError);
}

TEST_CASE("a call that is no kernel, or has operands too few, is a bug that names the op") {
  const auto backend = make_cpu_backend();
  const auto message = [&](const KernelCall& call) -> std::string {
    try {
      backend->run(0, call);
    } catch (const InternalError& error) {
      return error.what();
    }
    return "nothing thrown";
  };
  Array x(1);
  void* one[] = {x.data()};
  CHECK(
      message({.kind = OpKind::load_tokens, .shape = {.rows = 1}, .operands = one}).find("load_tokens is no kernel") !=
      std::string::npos);
  CHECK(message({.kind = OpKind::accumulate, .shape = {.rows = 1}, .operands = one})
            .find("accumulate with 1 operands") != std::string::npos);
  void* two[] = {x.data(), x.data()};
  CHECK(message({.kind = OpKind::accumulate, .shape = {.rows = 1}, .type = DataType::bf16, .operands = two})
            .find("accumulate in bf16: the CPU computes in fp32") != std::string::npos);
}

TEST_CASE("tf32 is computed in fp32: the same bits") {
  const std::int64_t rows = 5, columns = 21, inner = 13;
  const Array x(numbers(rows * inner, 1)), w(numbers(columns * inner, 2));
  const OpShape shape{.rows = rows, .columns = columns, .inner = inner};
  Array y(rows * columns), z(rows * columns), workspace(row_of(OpKind::linear).cpu_workspace(shape).count / 4);
  const auto backend = make_cpu_backend();
  for (const auto& [type, out] : {std::pair{DataType::fp32, &y}, {DataType::tf32, &z}}) {
    void* operands[] = {x.data(), w.data(), out->data(), workspace.data()};
    backend->run(0, {.kind = OpKind::linear, .shape = shape, .type = type, .operands = operands});
  }
  CHECK(same_bits(y.data(), z.data(), y.size()));
}

TEST_CASE("memory is filled with a pattern, and the last word that differs is found") {
  const auto backend = make_cpu_backend();
  constexpr std::int64_t words = 100;
  auto* memory = static_cast<std::uint32_t*>(backend->allocate_host(Bytes(4 * words)));
  backend->fill(0, memory, 0xdeadbeef, words);
  CHECK(backend->end_of_unlike(memory, 0xdeadbeef, words) == 0);
  CHECK(backend->end_of_unlike(memory, 0, words) == words);
  memory[0] = 1;
  CHECK(backend->end_of_unlike(memory, 0xdeadbeef, words) == 1);
  memory[41] = 1;
  CHECK(backend->end_of_unlike(memory, 0xdeadbeef, words) == 42);
  CHECK(backend->end_of_unlike(memory, 0xdeadbeef, 41) == 1);
  CHECK(backend->end_of_unlike(memory, 0xdeadbeef, 0) == 0);
  memory[words - 1] = 1;
  CHECK(backend->end_of_unlike(memory, 0xdeadbeef, words) == words);
  backend->release_host(memory);
}

TEST_CASE("this machine's memory is more than what is used of it") {
  const DeviceMemory memory = make_cpu_backend()->memory();
  CHECK(memory.used > Bytes(0));
  CHECK(memory.used < memory.total);
}

TEST_CASE("work is done at once, repeated work each time, and marks tell the seconds since mark 0") {
  const auto backend = make_cpu_backend();
  CHECK(backend->works_at_once());
  int runs = 0;
  for (int i = 0; i < 3; ++i) backend->repeat(0, 7, [&] { ++runs; });
  CHECK(runs == 3);
  backend->mark(0, 0);
  backend->mark(1, 5);
  const auto begin = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(2)) {
  }
  backend->mark(0, 2);
  CHECK(backend->time_at(0) == Seconds(0.0));
  CHECK(backend->time_at(5) >= Seconds(0.0));
  CHECK(backend->time_at(2) >= backend->time_at(5) + Seconds(0.002));
}

TEST_CASE("scalars are copied, and hold until others are set") {
  const auto backend = make_cpu_backend();
  const Array gradient(1, 1.0f);
  Array parameter(1, 1.0f);
  StepScalars scalars{.learning_rate = 0.5};
  backend->set_scalars(scalars);
  scalars.learning_rate = 100.0;
  run(*backend, OpKind::sgd, {.rows = 1}, gradient, parameter);
  CHECK(parameter[0] == 0.5f);
  backend->set_scalars({.learning_rate = 0.25});
  run(*backend, OpKind::sgd, {.rows = 1}, gradient, parameter);
  CHECK(parameter[0] == 0.25f);
}

TEST_CASE("kernels allocate nothing, from the first call on" * doctest::skip(!allocations_are_counted)) {
  // All sizes have rests, and the products have several blocks.
  const std::int64_t rows = 263, columns = 401, inner = 775, sequence = 263, heads = 4, kv_heads = 2, head_dim = 20;
  const std::int64_t largest = columns * inner;
  on_every_instruction_set([&](Backend& backend) {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(rows), 3);
    const StepScalars scalars{.learning_rate = 0.1, .momentum = 0.9, .clip_norm = 1.0};
    backend.set_scalars(scalars);
    std::vector<Array> arrays;
    for (int i = 0; i < 10; ++i) arrays.emplace_back(numbers(largest, i));
    for (const OpRow& row : op_rows()) {
      if (row.kind == OpKind::load_tokens || row.kind == OpKind::load_targets || is_foreign(row.kind)) continue;
      OpShape shape{.rows = rows, .columns = columns, .inner = inner, .sequence = sequence, .batch = 1,
                    .heads = heads, .kv_heads = kv_heads, .head_dim = head_dim, .valid = columns, .bias = true,
                    .second = true, .norm = true, .master = true, .scaled = true, .epsilon = 1e-5, .theta = 10000.0,
                    .scale = 1.0};
      if (row.kind == OpKind::embedding || row.kind == OpKind::embedding_gradient) shape.valid = 100;
      if (row.kind == OpKind::transpose_blocks) shape.rows = 1;
      if (row.kind == OpKind::packed_attention || row.kind == OpKind::packed_attention_gradient) {
        shape.keys = sequence;
        shape.kv_heads = shape.all_heads = heads;
        shape.buckets = 32;
        shape.most_distance = 128;
      }
      std::vector<void*> operands;
      for (int i = 0; i < operand_count(row, shape, row.cpu_workspace != nullptr); ++i)
        operands.push_back(arrays[i].data());
      const bool takes_tokens = row.kind == OpKind::embedding;
      if (takes_tokens) operands[0] = tokens.data();
      if (row.kind == OpKind::embedding_gradient || row.name.starts_with("cross_entropy"))
        if (row.kind != OpKind::cross_entropy_max) operands[1] = tokens.data();
      std::unique_ptr<Array> workspace;
      if (row.cpu_workspace != nullptr) {
        workspace = std::make_unique<Array>(row.cpu_workspace(shape).count / 4);
        operands.back() = workspace->data();
      }
      const std::int64_t before = allocation_count;
      backend.run(0, {.kind = row.kind, .shape = shape, .operands = operands});
      const std::int64_t after = allocation_count;
      INFO(row.name);
      CHECK(after - before == 0);
    }
    const std::int64_t before = allocation_count;
    backend.release(backend.allocate(Bytes(64)));
    CHECK(allocation_count - before > 0);  // the counter counts
  });
}
