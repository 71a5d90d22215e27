#include "runtime/check_promises.h"

#include <algorithm>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/base/text.h"
#include "planner/plan/unlike_replicas.h"

namespace parplan {
namespace {

// "396613632 + 0 + 0", and the names of its parts: "tensor, data, pipeline".
std::string counts(const CommunicationVolume& volume, const std::vector<Axis>& axes) {
  std::vector<std::string> words;
  for (const Axis axis : axes) words.push_back(fmt::format("{}", volume[axis].count));
  return join(words, " + ");
}
std::string names_of(const std::vector<Axis>& axes) {
  std::vector<std::string> words;
  for (const Axis axis : axes) words.emplace_back(axis_word(axis));
  return join(words);
}
std::vector<Axis> counted_axes(const CommunicationVolume& promised, const CommunicationVolume& sent) {
  std::vector<Axis> axes;
  for (const Axis axis : inner_axes_first)
    if (is_planned(axis) && (!may_be_unnamed(axis) || promised[axis].count > 0 || sent[axis].count > 0))
      axes.push_back(axis);
  return axes;
}

}  // namespace

std::vector<int> predicted_ranks(const Plan& plan) {
  std::vector<int> ranks;
  for (const int replica : unlike_replicas(plan.cluster, plan.spec))
    for (int stage = 0; stage < plan.spec.pp(); ++stage)
      ranks.push_back(rank_at(plan.spec.mesh, {.pp = stage, .dp = replica}));
  return ranks;
}

void check_promises(const Program& program, const Arena& arena, const CommunicationVolume& sent,
                    const CopiedBytes& copied) {
  const PerHome<std::int64_t> touched = arena.highest_touched();
  // That of the device is filled to its last byte; on the host, a slot that no step fills may come
  // last.
  for (const Home home : all_homes)
    if (const std::int64_t used = home == Home::device ? program.arena_bytes[home] : end_of_use(program, home);
        touched[home] != used)
      throw InternalError(fmt::format("rank {} was promised an arena of {} bytes{} and touched {}", program.rank, used,
                                      where(home), touched[home]));
  const CommunicationVolume& promised = program.communication;
  if (sent != promised) {
    const std::vector<Axis> axes = counted_axes(promised, sent);
    throw InternalError(fmt::format("rank {} was to send {} bytes a step ({}) and sent {}", program.rank,
                                    counts(promised, axes), names_of(axes), counts(sent, axes)));
  }
  for (const Home from : all_homes)
    for (const Home to : all_homes)
      if (copied[from][to] != program.copied[from][to])
        throw InternalError(fmt::format("rank {} was to copy {} bytes a step from its {} to its {} and copied {}",
                                        program.rank, program.copied[from][to].count, name(from), name(to),
                                        copied[from][to].count));
}

void check_prediction(const Plan& plan, std::span<const Program> programs) {
  const auto worst =
      std::ranges::max_element(programs, {}, [](const Program& program) { return program.memory.peak(); });
  for (const Home home : all_homes)
    if (worst->memory.arena(home) != plan.prediction.memory.arena(home))
      throw InternalError(
          fmt::format("the worst rank's arena{} is {} bytes; the plan promises {} (was the plan changed by hand?)",
                      where(home), worst->memory.arena(home).count, plan.prediction.memory.arena(home).count));
  CommunicationVolume sent;
  for (const int rank : predicted_ranks(plan))
    if (const CommunicationVolume& own = programs[rank].communication; sum(own) > sum(sent)) sent = own;
  const CommunicationVolume& promised = plan.prediction.communication;
  if (sent != promised) {
    const std::vector<Axis> axes = counted_axes(promised, sent);
    throw InternalError(
        fmt::format("{} bytes are sent a step ({}); the plan promises {} (was the plan changed by hand?)",
                    counts(sent, axes), names_of(axes), counts(promised, axes)));
  }
}

}  // namespace parplan
