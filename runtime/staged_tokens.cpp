#include "runtime/staged_tokens.h"

#include <algorithm>
#include <iterator>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {

bool is_load(const Instruction& instruction) {
  return instruction.kind == InstructionKind::kernel &&
         (instruction.op == OpKind::load_tokens || instruction.op == OpKind::load_targets);
}

namespace {

// The colours of patches in memory order [position, batch, colour].
std::int32_t* stage_colours(const Batch& batch, SampleRange of_rank, const OpShape& shape, std::int64_t micro_batch,
                            std::int32_t* to) {
  const std::int64_t samples = shape.batch, patch = batch.colours_of_patch;
  PARPLAN_ASSERT(shape.columns == patch && std::ssize(batch.colours) > 0,
                 fmt::format("patches of {} and {} colours", shape.columns, patch));
  const std::int64_t loaded_ranks = shape.rows / (shape.sequence * samples * shape.columns);
  for (std::int64_t rank = 0; rank < loaded_ranks; ++rank) {
    const std::int64_t first = of_rank.first + rank * of_rank.count + micro_batch * samples;
    for (std::int64_t s = 0; s < shape.sequence; ++s)
      for (std::int64_t b = 0; b < samples; ++b)
        to = std::copy_n(batch.colours.data() + (first + b) * batch.colours_of_sample + shape.position(s) * patch,
                         patch, to);
  }
  return to;
}

}  // namespace

StagedTokens::StagedTokens(const Program& program, Backend& backend) : program_(program), backend_(backend) {
  std::int64_t count = 0;
  for (const Call& call : program.calls) {
    begin_.push_back(count);
    for (const Instruction& instruction : program.segments[call.segment].instructions)
      if (is_load(instruction)) count += instruction.shape.rows;
  }
  if (count > 0) ids_ = static_cast<std::int32_t*>(backend.allocate_host(Bytes(4 * count)));
}

StagedTokens::~StagedTokens() {
  if (ids_ == nullptr) return;
  backend_.attach_thread();
  backend_.release_host(ids_);
}

void StagedTokens::stage(const Batch& batch, SampleRange of_rank) {
  const std::int64_t stride = batch.sequence + 1;
  std::int32_t* to = ids_;
  for (const Call& call : program_.calls)
    for (const Instruction& instruction : program_.segments[call.segment].instructions) {
      if (!is_load(instruction)) continue;
      const std::int64_t samples = instruction.shape.batch;
      if (instruction.shape.columns > 0) {
        to = stage_colours(batch, of_rank, instruction.shape, *call.micro_batch, to);
        continue;
      }
      const bool is_target = instruction.op == OpKind::load_targets;
      const bool has_own = is_target && !batch.targets.empty();
      const std::int32_t* from = has_own ? batch.targets.data() : batch.ids.data() + (is_target ? 1 : 0);
      const std::int64_t from_stride = has_own ? batch.sequence : stride;
      // A master loads those of its replicas, too, one rank's after another's.
      const std::int64_t loaded_ranks = instruction.shape.rows / (instruction.shape.sequence * samples);
      for (std::int64_t rank = 0; rank < loaded_ranks; ++rank) {
        const std::int64_t first = of_rank.first + rank * of_rank.count + *call.micro_batch * samples;
        for (std::int64_t s = 0; s < instruction.shape.sequence; ++s)
          for (std::int64_t b = 0; b < samples; ++b)
            *to++ = from[(first + b) * from_stride + instruction.shape.position(s)];
      }
    }
}

const std::int32_t* StagedTokens::ids_of(const Instruction& load, std::size_t call) const {
  std::int64_t at = begin_[call];
  for (const Instruction& earlier : program_.segments[program_.calls[call].segment].instructions) {
    if (&earlier == &load) break;
    if (is_load(earlier)) at += earlier.shape.rows;
  }
  return ids_ + at;
}

}  // namespace parplan
