#include <doctest/doctest.h>

#include <cstdlib>
#include <optional>

#include "planner/base/error.h"
#include "tests/runtime/device/counting_allocator.h"
#include "tests/runtime/device/kernel_call.h"

using namespace parplan;
using namespace parplan::testing;

namespace {

// Sets PARPLAN_CPU_ISA and puts back what was there.
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
  backend->synchronize(1);
  CHECK(std::string(static_cast<char*>(arena), 12) == text);
  backend->release(arena);
}

// Sanitizers' allocators end the program instead of saying no.
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
  CHECK(message({.kind = OpKind::load_tokens, .shape = {.rows = 1}, .operands = one}).find("load_tokens is no kernel") !=
        std::string::npos);
  CHECK(message({.kind = OpKind::accumulate, .shape = {.rows = 1}, .operands = one})
            .find("accumulate with 1 operands") != std::string::npos);
  CHECK(message({.kind = OpKind::sgd, .shape = {.rows = 1}, .operands = one}).find("sgd without its scalars") !=
        std::string::npos);
}

TEST_CASE("kernels allocate nothing, from the first call on" * doctest::skip(!allocations_are_counted)) {
  // All sizes have rests, and the products several blocks.
  const std::int64_t rows = 263, columns = 401, inner = 775, sequence = 263, heads = 4, kv_heads = 2, head_dim = 20;
  const std::int64_t largest = columns * inner;
  on_every_instruction_set([&](Backend& backend) {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(rows), 3);
    const StepScalars scalars{.learning_rate = 0.1, .momentum = 0.9, .clip_norm = 1.0, .has_norm = true};
    std::vector<Array> arrays;
    for (int i = 0; i < 8; ++i) arrays.emplace_back(numbers(largest, i));
    for (const OpRow& row : op_rows()) {
      if (row.kind == OpKind::load_tokens || row.kind == OpKind::load_targets) continue;
      OpShape shape{.rows = rows, .columns = columns, .inner = inner, .sequence = sequence, .batch = 1,
                    .heads = heads, .kv_heads = kv_heads, .head_dim = head_dim, .valid = columns, .bias = true,
                    .second = true, .epsilon = 1e-5, .theta = 10000.0, .scale = 1.0};
      if (row.kind == OpKind::embedding || row.kind == OpKind::embedding_gradient) shape.valid = 100;
      std::vector<void*> operands;
      for (const OperandRow& operand : row.operands) {
        const bool master = (row.kind == OpKind::adamw || row.kind == OpKind::sgd) && &operand == &row.operands.back();
        if (master) continue;
        operands.push_back(arrays[operands.size()].data());
      }
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
      backend.run(0, {.kind = row.kind, .shape = shape, .operands = operands, .scalars = &scalars});
      const std::int64_t after = allocation_count;
      INFO(row.name);
      CHECK(after - before == 0);
    }
    const std::int64_t before = allocation_count;
    backend.release(backend.allocate(Bytes(64)));
    CHECK(allocation_count - before > 0);  // the counter counts
  });
}
