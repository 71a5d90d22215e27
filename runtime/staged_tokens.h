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

// A step's token ids in host memory, from where the device copies them.
class StagedTokens {
 public:
  StagedTokens(const Program& program, Backend& backend);
  ~StagedTokens();
  StagedTokens(const StagedTokens&) = delete;
  StagedTokens& operator=(const StagedTokens&) = delete;

  // Brings the ids of the micro-batches into memory order [sequence, batch]; targets are the
  // batch's own, or the ids one position later. `data_rank` of `data_ranks` determines the samples.
  void stage(const Batch& batch, int data_rank, int data_ranks);
  // Those that `load`, an instruction of call number `call`, takes.
  const std::int32_t* ids_of(const Instruction& load, std::size_t call) const;

 private:
  const Program& program_;
  Backend& backend_;
  std::int32_t* ids_ = nullptr;
  std::vector<std::int64_t> begin_;  // by call: the first of its ids
};

}  // namespace parplan
