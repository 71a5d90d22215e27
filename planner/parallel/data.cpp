#include "planner/parallel/data.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/parallel/techniques.h"
#include "planner/plan/layout_choices.h"

namespace parplan {
namespace {

// Replicas with unlike numbers of micro-batches meet once a step: what all do for every micro-batch
// needs equal numbers.
std::optional<std::string> illegal_replicas(const TrainingSpec& training, const ParallelSpec& spec) {
  const std::vector<int>& replicas = spec.replica_micro_batches;
  const std::string given = fmt::format("replica_micro_batches [{}]", fmt::join(replicas, ", "));
  if (static_cast<int>(replicas.size()) != spec.dp())
    return fmt::format("{} names {} replicas, and dp is {}: name as many numbers as dp", given, replicas.size(),
                       spec.dp());
  if (std::ranges::min(replicas) < 1)
    return fmt::format("{} leaves a replica without work; each has at least 1, or take a smaller dp", given);
  if (std::ranges::adjacent_find(replicas, std::ranges::not_equal_to()) == replicas.end())
    return fmt::format("{} are all alike, as they are without it: leave it out", given);
  if (std::optional<std::string> reason = other_batch_than_replicas(spec, training))
    return *reason + fmt::format(": they must sum to {} / micro_batch", training.global_batch);
  if (spec.dp_method == DataMethod::master)
    return given +
           " needs replicas that go on alone, and dp_method is master, which gathers the logits of every "
           "micro-batch; dp_method must be all_reduce";
  if (is_v_shaped(spec.schedule))
    return fmt::format(
        "{} needs an order of actions that fewer micro-batches share, and the schedule is {}; legal "
        "schedules: gpipe, 1f1b, interleaved, zero_bubble_h1",
        given, name(spec.schedule));
  // Each group of ranks that share out a bucket gathers or reduces it for every micro-batch.
  for (int first = 0; spec.zero_stage > 1 && first < spec.replicas(); first += spec.shard_ranks())
    for (int rank = first; rank < first + spec.shard_ranks(); ++rank)
      if (const int one = first / spec.cp(), other = rank / spec.cp(); replicas[one] != replicas[other])
        return fmt::format(
            "ZeRO stage {} {} for every micro-batch over the ranks that shard, and replicas {} and {} "
            "among them have {} and {} micro-batches: take ZeRO stage 0 or 1, or shard over groups "
            "of replicas with equal numbers (dp_shard)",
            spec.zero_stage, spec.zero_stage == 2 ? "reduces gradients" : "gathers parameters", one, other,
            replicas[one], replicas[other]);
  return std::nullopt;
}

}  // namespace

std::vector<int> legal_data_degrees(const OpGraph& /*graph*/, const TrainingSpec& training, const ParallelSpec& spec,
                                    int most) {
  if (spec.micro_batch < 1 || training.global_batch % spec.micro_batch != 0) return {};
  if (!spec.replica_micro_batches.empty()) {
    ParallelSpec with = spec;
    with.mesh.degree.dp = static_cast<int>(spec.replica_micro_batches.size());
    if (with.dp() > most || illegal_replicas(training, with)) return {};
    return {with.dp()};
  }
  std::vector<int> degrees;
  for (const std::int64_t degree : divisors(training.global_batch / spec.micro_batch))
    if (degree <= most) degrees.push_back(static_cast<int>(degree));
  return degrees;
}

std::optional<std::string> illegal_data(const OpGraph& /*graph*/, const TrainingSpec& training,
                                        const ParallelSpec& spec) {
  const std::int64_t batch = training.global_batch;
  if (spec.dp() < 1) return fmt::format("the data-parallel degree is {}; it must be at least 1", spec.dp());
  if (spec.micro_batch < 1 || batch % spec.micro_batch != 0) {
    const int ranks = spec.mesh.batch_ranks();
    const bool divides = ranks > 1 && batch % ranks == 0;
    return fmt::format("micro-batches of {} cannot split a global batch of {} sequences{}; legal micro-batches: {}",
                       spec.micro_batch, batch, divides ? fmt::format(" over {} data-parallel ranks", ranks) : "",
                       list_degrees(divisors(divides ? batch / ranks : batch)));
  }
  if (!spec.replica_micro_batches.empty()) return illegal_replicas(training, spec);
  if (batch / spec.micro_batch % spec.mesh.batch_ranks() == 0) return std::nullopt;
  const bool may_be_unlike = is_own(training.engine) && spec.dp() <= batch / spec.micro_batch;
  return fmt::format(
      "data parallelism over {} cannot split a global batch of {} sequences in micro-batches of {}; legal degrees: "
      "{}{}",
      spec.dp(), batch, spec.micro_batch, list_degrees(divisors(batch / spec.micro_batch)),
      may_be_unlike ? ", or any with replica_micro_batches" : "");
}

void place_data(const OpGraph& /*graph*/, const ParallelSpec& /*spec*/, Placements& placements) {
  placements.state.parameters.dp = placements.state.gradients.dp = placements.state.optimizer.dp = replicate();
}

}  // namespace parplan
