#include "planner/schedule/interleaved.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

int chunks_of(const PipelineShape& shape) { return shape.stages / shape.ranks; }
int turns_of(const PipelineShape& shape) { return shape.micro_batches * chunks_of(shape); }

// The forwards that a rank runs before it alternates.
int warm_up_of(int rank, const PipelineShape& shape) {
  return std::min(2 * (shape.ranks - 1 - rank) + (chunks_of(shape) - 1) * shape.group, turns_of(shape));
}

struct Turn {
  int chunk = 0;
  int micro_batch = 0;
};

// What every rank runs forward, in this order; backwards take the same micro-batches, and count
// chunks from the last.
std::vector<Turn> list_turns(const PipelineShape& shape) {
  std::vector<Turn> turns;
  turns.reserve(static_cast<std::size_t>(turns_of(shape)));
  for (int first = 0; first < shape.micro_batches; first += shape.group)
    for (int chunk = 0; chunk < chunks_of(shape); ++chunk)
      for (int m = first; m < std::min(first + shape.group, shape.micro_batches); ++m) turns.push_back({chunk, m});
  return turns;
}

enum class Turns { first, last };

// The time of a rank's first forwards, or of its last backwards in reverse order: both take the
// chunks from the first to the last. `seconds` by stage.
Seconds time_of_turns(Turns which, int turns, std::span<const Seconds> seconds, int rank, const PipelineShape& shape) {
  const int remainder = shape.micro_batches % shape.group;
  Seconds time;
  for (int left = turns, begin = 0; left > 0;) {
    int group = std::min(shape.group, shape.micro_batches - begin);
    if (which == Turns::last && begin == 0 && remainder != 0) group = remainder;
    for (int chunk = 0; chunk < chunks_of(shape) && left > 0; ++chunk) {
      const int some = std::min(left, group);
      time += some * seconds[chunk * shape.ranks + rank];
      left -= some;
    }
    begin += group;
  }
  return time;
}

}  // namespace

Schedule interleaved_actions(const PipelineShape& shape) {
  const int ranks = shape.ranks, chunks = chunks_of(shape), all = turns_of(shape);
  PARPLAN_ASSERT(ranks >= 1 && chunks >= 1 && shape.stages == chunks * ranks && shape.group >= 1 && all >= 1,
                 fmt::format("{} stages on {} ranks, {} micro-batches in groups of {}", shape.stages, ranks,
                             shape.micro_batches, shape.group));
  Schedule schedule{.rank_of_stage = {},
                    .ranks = std::vector<std::vector<Action>>(static_cast<std::size_t>(ranks)),
                    .exchanges = most_exchange_buffers(shape)};
  for (int stage = 0; stage < shape.stages; ++stage) schedule.rank_of_stage.push_back(ring_rank(stage, shape));
  const std::vector<Turn> turns = list_turns(shape);
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<Action>& actions = schedule.ranks[rank];
    actions.reserve(2 * turns.size());
    const auto run_forward = [&](int turn) {
      actions.push_back({turns[turn].chunk * ranks + rank, Phase::forward, turns[turn].micro_batch});
    };
    const auto run_backward = [&](int turn) {
      actions.push_back({(chunks - 1 - turns[turn].chunk) * ranks + rank, Phase::backward, turns[turn].micro_batch});
    };
    const int warm_up = warm_up_of(rank, shape);
    for (int turn = 0; turn < warm_up; ++turn) run_forward(turn);
    for (int turn = warm_up; turn < all; ++turn) {
      run_forward(turn);
      run_backward(turn - warm_up);
    }
    for (int turn = all - warm_up; turn < all; ++turn) run_backward(turn);
  }
  return schedule;
}

// Letters: p ranks with v chunks each, M micro-batches; f_s, b_s, c_s = f_s + b_s the times of
// stage s, and t_s that of a transfer between the stages s and s + 1; W_r = sum of c_s over the
// stages of rank r. w_r forwards warm rank r up; its first backward is of stage z = (v - 1) p + r.
//   T >= max over r of  A_r + fill_r + (M W_r - F_r - B_r) + drain_r
//     A_r     = sum_{j<r} (c_j + 2 t_j)
//     F_r     = the first w_r + 1 forwards of rank r, B_r its last w_r + 1 backwards
//     fill_r  = max(F_r, sum_{j>=r} (f_j + t_j) + sum_{j>z} b_j + sum_{j>=z} t_j)
//     drain_r = max(B_r, sum_{j>z} f_j + sum_{j>=z} t_j + sum_{j>=r} (b_j + t_j))
// Each is the length of a path that every run must take, as in 1F1B: rank r gets its first input
// after the stages before it on the ring's first round, and its last gradient still has to pass
// their backwards. Before its first backward it runs F_r, and micro-batch 0 must go from stage r to
// the last one and back to stage z; after its last forward it runs B_r, and the last micro-batch
// must go from stage z to the last one and back to stage r. Where no backward lies between that
// first one and the last forward, only one of the two ways counts. Equal stages without transfers:
// (M v + p - 1) c, with a bubble of (p - 1) c, the v-th part of 1F1B's.
Seconds interleaved_time(std::span<const Seconds> forward, std::span<const Seconds> backward,
                         std::span<const Seconds> transfer, const PipelineShape& shape) {
  const int stages = shape.stages, ranks = shape.ranks, chunks = chunks_of(shape), all = turns_of(shape);
  PARPLAN_ASSERT(static_cast<int>(forward.size()) == stages && backward.size() == forward.size() &&
                     transfer.size() + 1 == forward.size() && all >= 1,
                 fmt::format("{} stages, {} forwards, {} backwards, {} transfers, {} micro-batches", stages,
                             forward.size(), backward.size(), transfer.size(), shape.micro_batches));
  // Stages from each one on.
  std::vector<Seconds> forwards(forward.size() + 1), backwards(forward.size() + 1), transfers(forward.size() + 1);
  for (std::size_t s = forward.size(); s-- > 0;) {
    forwards[s] = forwards[s + 1] + forward[s];
    backwards[s] = backwards[s + 1] + backward[s];
    transfers[s] = transfers[s + 1] + (s < transfer.size() ? transfer[s] : Seconds(0.0));
  }
  Seconds before, longest;
  for (int rank = 0; rank < ranks; ++rank) {
    const int first_back = (chunks - 1) * ranks + rank;
    Seconds work;
    for (int stage = rank; stage < stages; stage += ranks) work += forward[stage] + backward[stage];
    work *= static_cast<double>(shape.micro_batches);
    const int warm_up = warm_up_of(rank, shape);
    const int turns = std::min(warm_up + 1, all);
    const Seconds fill = time_of_turns(Turns::first, turns, forward, rank, shape);
    const Seconds drain = time_of_turns(Turns::last, turns, backward, rank, shape);
    const Seconds way = transfers[rank] + transfers[first_back];
    const Seconds down = std::max(forwards[rank] + backwards[first_back + 1] + way - fill, Seconds(0.0));
    const Seconds up = std::max(forwards[first_back + 1] + backwards[rank] + way - drain, Seconds(0.0));
    longest = std::max(longest, before + work + (all - warm_up >= 2 ? down + up : std::max(down, up)));
    before += forward[rank] + backward[rank] + (rank + 1 < stages ? 2.0 * transfer[rank] : Seconds(0.0));
  }
  return longest;
}

// Some rank has at least the mean of the work, and each does that of its slowest stage; a
// micro-batch passes all stages.
Seconds interleaved_least_time(Seconds total, Seconds computing, Seconds slowest, const PipelineShape& shape) {
  return std::max({total, shape.micro_batches * (computing / shape.ranks), shape.micro_batches * slowest});
}

// Letters as above; all groups have g = p micro-batches. Before rank r runs its first micro-batch
// through stage k p + r, that one has passed all stages before, and the rank has run p
// micro-batches through each of its stages before: it has waited at least
//   sum_{s < k p + r} (f_s + t_s) - p sum_{k' < k} f_{k' p + r},
// which is sum_{j < r} f_{k p + j} on average over the ranks, beside transfers; and the mean over k
// is sum_j F_j (p - 1 - j) / (p v), where F_j is the sum of f_s over the stages of rank j. The same
// holds, in reverse, after the last micro-batch's backwards; both waits lie apart. With M W_r of
// work on rank r, the mean over the ranks is
//   T >= M C / p + sum_j W_j (p - 1 - j) / (p v) + (v p - 1) t,   C = sum_j W_j, W_j <= T / M.
// The sum over j is least where the last ranks have as much as they may, T / M. Larger groups keep
// ranks busy for longer before they wait: then only the transfers to the first stage of each rank
// count.
Seconds least_interleaved_time(Seconds all, Seconds transfer, const PipelineShape& shape) {
  const int ranks = shape.ranks, micro_batches = shape.micro_batches;
  const Seconds work = micro_batches * (all / ranks);
  const Seconds pass = all + 2 * (shape.stages - 1) * transfer;
  if (shape.group != ranks || micro_batches % ranks != 0)
    return std::max(work + (ranks - 1) * transfer, pass) * (1 - 1e-9);
  const Seconds without_waits = work + (shape.stages - 1) * transfer;
  // Where the last k ranks have T / M each, and the one before them the rest, the mean is
  //   T >= without_waits + (k C - k (k + 1) / 2 T / M) / (p v)
  // That holds for every k, and tells the most where its derivative is 0.
  const double gain = all / shape.stages / without_waits, loss = 0.5 / micro_batches / shape.stages;
  const double best_k = (std::sqrt(loss * loss - gain * loss * (loss - gain)) - loss) / (gain * loss);
  Seconds least = pass;
  for (const double k : {std::floor(best_k), std::ceil(best_k)})
    if (k >= 0.0 && k <= ranks)
      least = std::max(least, without_waits * ((1.0 + k * gain) / (1.0 + loss * k * (k + 1.0))));
  return least * (1 - 1e-9);
}

int interleaved_in_flight(int rank, const PipelineShape& shape) {
  return std::min(warm_up_of(rank, shape) + 1, turns_of(shape));
}

// The last rank runs backward turn t after forward turn (v - 1) g + t. In whole groups both are of
// the same micro-batch of the last stage. A last group of r micro-batches has gone forward through
// it (v - 1) (g - r) turns earlier.
int interleaved_last_stage_in_flight(const PipelineShape& shape) {
  const int remainder = shape.micro_batches % shape.group;
  return std::max(1, std::min(remainder, (chunks_of(shape) - 1) * (shape.group - remainder) + 1));
}

int interleaved_period(const PipelineShape& shape) { return std::lcm(shape.group, most_exchange_buffers(shape)); }

}  // namespace parplan
