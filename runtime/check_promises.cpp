#include "runtime/check_promises.h"

#include <string>
#include <vector>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/base/text.h"

namespace parplan {
namespace {

// "396613632 + 0 + 0", and the names of its parts: "tensor, data, pipeline".
std::string counts(const CommunicationVolume& volume) {
  std::vector<std::string> words;
  for (const Axis axis : inner_axes_first)
    if (is_planned(axis)) words.push_back(fmt::format("{}", volume[axis].count));
  return join(words, " + ");
}
std::string counted_axes() {
  std::vector<std::string> words;
  for (const Axis axis : inner_axes_first)
    if (is_planned(axis)) words.push_back(axis_word(axis));
  return join(words);
}

}  // namespace

void check_promises(const Program& program, const Arena& arena, const CommunicationVolume& sent) {
  const std::int64_t touched = arena.highest_touched();
  if (touched != program.arena_bytes)
    throw InternalError(fmt::format("rank {} was promised an arena of {} bytes and touched {}", program.rank,
                                    program.arena_bytes, touched));
  const CommunicationVolume& promised = program.communication;
  if (sent != promised)
    throw InternalError(fmt::format("rank {} was to send {} bytes a step ({}) and sent {}", program.rank,
                                    counts(promised), counted_axes(), counts(sent)));
}

void check_prediction(const Plan& plan, const StepResult& measured) {
  if (measured.memory.arena() != plan.prediction.memory.arena())
    throw InternalError(
        fmt::format("the worst rank's arena is {} bytes; the plan promises {} (was the plan changed by hand?)",
                    measured.memory.arena().count, plan.prediction.memory.arena().count));
  const CommunicationVolume& sent = measured.communication;
  const CommunicationVolume& promised = plan.prediction.communication;
  if (sent != promised)
    throw InternalError(
        fmt::format("{} bytes were sent a step ({}); the plan promises {} (was the plan changed by hand?)",
                    counts(sent), counted_axes(), counts(promised)));
}

}  // namespace parplan
