#include "planner/search/lowered_steps.h"

#include <utility>

namespace parplan {
namespace {

constexpr std::int64_t most_kept = std::int64_t{128} << 20;  // bytes

// About what a step takes: its instructions and calls.
std::int64_t bytes_of(const LoweredStep& step) {
  std::size_t bytes = 0;
  for (const Program& program : step.programs)
    for (const Segment& segment : program.segments)
      bytes += sizeof(Segment) + segment.instructions.capacity() * sizeof(Instruction);
  for (const PlayList& list : step.lists)
    bytes += list.calls.capacity() * sizeof(PlayList::Call) + list.waits.capacity() * sizeof(int) +
             list.tasks.capacity() * sizeof(Task);
  return static_cast<std::int64_t>(bytes);
}

}  // namespace

LoweredStep lowered_step(std::vector<Program> programs) {
  LoweredStep step{.programs = std::move(programs), .lists = {}};
  for (Program& program : step.programs) {
    step.lists.push_back(play_list(program));
    program.calls = std::vector<Call>();
    program.buffers = std::vector<Buffer>();
  }
  return step;
}

std::shared_ptr<const LoweredStep> LoweredSteps::of(const ParallelSpec& spec, const Job& job,
                                                    const std::vector<int>& micro_batches, int group,
                                                    const std::function<LoweredStep()>& lower) {
  Known wanted{.training = job.training,
               .backend = job.backend,
               .overhead = job.overhead,
               .micro_batches = micro_batches,
               .group = group,
               .step = nullptr};
  wanted.training.global_batch = 0;
  {
    const std::scoped_lock lock(mutex_);
    const auto [first, end] = known_.equal_range(spec);
    for (auto one = first; one != end; ++one) {
      const Known& known = one->second;
      if (known.micro_batches == micro_batches && known.group == group && known.overhead == job.overhead &&
          known.backend == job.backend && known.training == wanted.training)
        return known.step;
    }
  }
  std::shared_ptr<const LoweredStep> step = std::make_shared<const LoweredStep>(lower());
  wanted.step = step;
  const std::int64_t bytes = bytes_of(*step);
  const std::scoped_lock lock(mutex_);
  if (kept_ + bytes > most_kept) {
    known_.clear();
    kept_ = 0;
  }
  kept_ += bytes;
  known_.emplace(spec, std::move(wanted));
  return step;
}

}  // namespace parplan
