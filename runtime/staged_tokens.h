#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "planner/program/program.h"
#include "runtime/device/backend.h"
#include "runtime/token_data.h"

namespace parplan {

// Whether a kernel takes its output from the data loader.
bool is_load(const Instruction& instruction);

// The samples of a batch that a rank trains in a step. A master's replicas have as many each,
// behind its own.
struct SampleRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

// A step's token ids in host memory, from where the device copies them.
class StagedTokens {
 public:
  StagedTokens(const Program& program, Backend& backend);
  ~StagedTokens();
  StagedTokens(const StagedTokens&) = delete;
  StagedTokens& operator=(const StagedTokens&) = delete;

  // Brings the ids of the micro-batches into memory order [sequence, batch]; targets are the
  // batch's own, or the ids one position later.
  void stage(const Batch& batch, SampleRange of_rank);
  // Those that `load`, an instruction of call number `call`, takes.
  const std::int32_t* ids_of(const Instruction& load, std::size_t call) const;

 private:
  const Program& program_;
  Backend& backend_;
  std::int32_t* ids_ = nullptr;
  std::vector<std::int64_t> begin_;  // by call: the first of its ids
};

}  // namespace parplan
