#include "planner/schedule/one_f_one_b.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {

Schedule one_f_one_b_actions(const PipelineShape& shape) {
  const int stages = shape.stages, micro_batches = shape.micro_batches;
  PARPLAN_ASSERT(stages >= 1 && stages == shape.ranks && micro_batches >= 1,
                 fmt::format("{} stages on {} ranks, {} micro-batches", stages, shape.ranks, micro_batches));
  std::vector<std::vector<Action>> ranks(static_cast<std::size_t>(stages));
  for (int s = 0; s < stages; ++s) {
    std::vector<Action>& actions = ranks[s];
    const int warm_up = std::min(stages - 1 - s, micro_batches);
    for (int m = 0; m < warm_up; ++m) actions.push_back({s, Phase::forward, m});
    for (int m = warm_up; m < micro_batches; ++m) {
      actions.push_back({s, Phase::forward, m});
      actions.push_back({s, Phase::backward, m - warm_up});
    }
    for (int m = micro_batches - warm_up; m < micro_batches; ++m) actions.push_back({s, Phase::backward, m});
  }
  return one_stage_a_rank(std::move(ranks));
}

// Letters: p stages, M micro-batches; f_s and b_s are the times of stage s, and c_s = f_s + b_s;
// t_s is the time of a transfer between the stages s and s + 1, in either direction; k_s = min(p -
// s, M) is the number of forwards that stage s runs before its first backward; D_s = sum_{j>s} c_j
// + 2 sum_{j>=s} t_j is the way from stage s down and back; A_s = sum_{j<s} (c_j + 2 t_j) is the
// way to stage s and back.
//   T >= max over s of  A_s + fill_s + (M - k_s) c_s + drain_s
//     fill_s  = max(k_s f_s, f_s + D_s)
//     drain_s = max(k_s b_s, b_s + D_s)
// Each is the length of a path that every run must take. Stage s gets its first input after the
// forwards and transfers before it, and its last gradient still has to pass the backwards before
// it. From its first forward to its first backward, stage s runs k_s forwards, and the first
// micro-batch must go down and back. Then it has M - k_s forwards and as many backwards to do. Its
// last forward is followed by k_s backwards, and that micro-batch too must go down and back. With M
// = k_s there is no steady part in between, and only one of the two ways down and back counts:
//   max(k_s c_s, D_s + f_s + k_s b_s, D_s + k_s f_s + b_s).
// In the steady part, the forward of micro-batch i + n on stage s, n = p - s, follows the backward
// of micro-batch i, which has been down and back: n micro-batches take at least W_s = c_s + D_s.
// After q = (M - 1) / n such rounds, with i = q n:
//   T >= A_s + q W_s + max((M - i) f_s + (M - i + n - 1) b_s, (M - 1 - i) c_s + W_s).
// This is how transfers slow the steady state of 1F1B: by up to 2 t (p - 1) / p for each
// micro-batch. A round may also turn back before the last stage: on stage u >= s, the forward of
// micro-batch i is followed by the backward of micro-batch i - (p - 1 - u), and this on stage s by
// the forward of micro-batch i + l, l = u - s + 1, so that l micro-batches take at least
//   W_su = sum_{s<=j<=u} c_j + 2 sum_{s<=j<u} t_j,
// where all that they wait for are micro-batches of this step: after a first round by the last
// stage. With i = n + q l, q = (M - 1 - n) / l:
//   T >= A_s + W_s + q W_su + max((M - i) f_s + (M - i + n - 1) b_s, (M - 1 - i) c_s + W_s).
// Only the pair of s and u with the greatest W_su / l is looked at: stages in a row that are slower
// than those behind them. For equal stages without transfers, every stage gives (M + p - 1)(f + b),
// with a bubble of (p - 1)(f + b), which is exact. For unequal stages, the steady rate is exact
// (one micro-batch per max c_s). A path that turns back more than once can be longer, but only
// where stages differ much: no such path was longer for forwards and backwards drawn independently
// within a factor of 1.5, and within a factor of 2 the schedule took 0.1% longer on average
// (tests/planner/schedule holds both).

namespace {

struct Round {
  int first = 0, last = 0;  // stages, where the second turns back
  Seconds time;             // W_su
};

// The round that takes longest for a micro-batch. A round beats a rate r where its stages and
// transfers sum to more than r for each: the greatest such sum is found in one pass, and gives the
// next rate, until none beats it.
Round slowest_round(std::span<const Seconds> forward, std::span<const Seconds> backward,
                    std::span<const Seconds> transfer) {
  const int stages = static_cast<int>(forward.size());
  Round slowest{.time = forward[0] + backward[0]};
  for (int s = 1; s < stages; ++s)
    if (forward[s] + backward[s] > slowest.time) slowest = {.first = s, .last = s, .time = forward[s] + backward[s]};
  while (true) {
    const Seconds rate = slowest.time / (slowest.last - slowest.first + 1);
    // The round that turns back on stage u and takes most above the rate.
    Round round, best = slowest;
    Seconds above(-1.0), most;
    for (int u = 0; u < stages; ++u) {
      const Seconds own = forward[u] + backward[u];
      const Seconds with_way = u > 0 ? above + 2.0 * transfer[u - 1] : Seconds(-1.0);
      if (with_way > Seconds(0.0)) {
        round.time += 2.0 * transfer[u - 1] + own;
        above = with_way + own - rate;
      } else {
        round = {.first = u, .time = own};
        above = own - rate;
      }
      round.last = u;
      if (above > most) {
        most = above;
        best = round;
      }
    }
    if (most <= 1e-9 * rate) return slowest;
    slowest = best;
  }
}

// The time of a step that goes on with these rounds once it has been through the pipeline; nothing
// where it ends before.
Seconds time_of_rounds(const Round& round, std::span<const Seconds> forward, std::span<const Seconds> backward,
                       std::span<const Seconds> transfer, int micro_batches) {
  const int n = static_cast<int>(forward.size()) - round.first;
  const int rounds = (micro_batches - 1 - n) / (round.last - round.first + 1);
  if (rounds <= 0) return {};
  Seconds before, through;
  for (std::size_t s = 0; s < forward.size(); ++s) {
    Seconds& side = static_cast<int>(s) < round.first ? before : through;
    side += forward[s] + backward[s] + (s + 1 < forward.size() ? 2.0 * transfer[s] : Seconds(0.0));
  }
  const Seconds f = forward[round.first], b = backward[round.first];
  const int i = n + rounds * (round.last - round.first + 1);
  return before + through + rounds * round.time +
         std::max((micro_batches - i) * f + (micro_batches - i + n - 1) * b,
                  (micro_batches - 1 - i) * (f + b) + through);
}

}  // namespace

Seconds one_f_one_b_time(std::span<const Seconds> forward, std::span<const Seconds> backward,
                         std::span<const Seconds> transfer, const PipelineShape& shape) {
  const int micro_batches = shape.micro_batches;
  PARPLAN_ASSERT(!forward.empty() && forward.size() == backward.size() && transfer.size() + 1 == forward.size() &&
                     micro_batches >= 1,
                 fmt::format("{} forwards, {} backwards, {} transfers, {} micro-batches", forward.size(),
                             backward.size(), transfer.size(), micro_batches));
  const int stages = static_cast<int>(forward.size());
  Seconds before, after, longest;
  for (std::size_t s = 0; s < forward.size(); ++s) after += forward[s] + backward[s];
  for (const Seconds t : transfer) after += 2.0 * t;
  for (int s = 0; s < stages; ++s) {
    const Seconds f = forward[s], b = backward[s];
    const Seconds round_trip = after;
    after -= f + b;
    longest = std::max(longest, one_f_one_b_through_stage({.stage = s,
                                                           .forward = f,
                                                           .backward = b,
                                                           .before = before,
                                                           .after = after,
                                                           .round_trip = round_trip,
                                                           .slowest_transfer = {}},
                                                          shape));
    before += f + b;
    if (s + 1 < stages) {
      const Seconds t = transfer[s];
      before += 2.0 * t;
      after -= 2.0 * t;
    }
  }
  return std::max(longest, time_of_rounds(slowest_round(forward, backward, transfer), forward, backward, transfer,
                                          micro_batches));
}

// The term of stage s: A_s is `before`, D_s `after`, W_s `round_trip`. Each maximum grows with its
// parts, and where work moves to stage s from the stages around it, since every path counts stage s
// at least as often as any other.
Seconds one_f_one_b_through_stage(const StagePath& path, const PipelineShape& shape) {
  const int micro_batches = shape.micro_batches;
  const Seconds f = path.forward, b = path.backward, after = path.after;
  const int n = shape.stages - path.stage;
  const int k = std::min(n, micro_batches);
  Seconds own = micro_batches > k
                    ? std::max(k * f, f + after) + (micro_batches - k) * (f + b) + std::max(k * b, b + after)
                    : std::max({k * (f + b), after + f + k * b, after + k * f + b});
  if (const int rounds = (micro_batches - 1) / n; rounds > 0) {
    const int i = rounds * n;
    own = std::max(own, rounds * path.round_trip + std::max((micro_batches - i) * f + (micro_batches - i + n - 1) * b,
                                                            (micro_batches - 1 - i) * (f + b) + path.round_trip));
  }
  return path.before + own;
}

// With c the slowest stage's time, S the sum of the stages and R that with transfers, and the
// slowest stage at place s:
// - M > k_s: T >= R + (M - k_s) c + D_s by both ways down and back, and T >= R - D_s + (M - 1) c by
//   its own work. D_s is at least S - (s + 1) c, since no earlier stage takes longer, which gives T
//   >= R + S + (M - p - 1) c; the mean of the two gives T >= R + (M - (p + 1) / 2) c.
// - M = k_s: T >= R + (M - 1) max(f, b) by one way down and back, so that T >= R + (M - 1) / 2 c.
Seconds one_f_one_b_least_time(Seconds total, Seconds computing, Seconds slowest, const PipelineShape& shape) {
  const int micro_batches = shape.micro_batches;
  Seconds more = 0.5 * (micro_batches - 1) * slowest;
  if (micro_batches > shape.stages)
    more = std::max({more, computing + (micro_batches - shape.stages - 1) * slowest,
                     (micro_batches - 0.5 * (shape.stages + 1)) * slowest});
  return std::max(total + more, micro_batches * slowest);
}

// Letters as above, and C = sum_s c_s + 2 sum_s t_s, n = p - 1 - s stages after s, D their way down
// and back. From the formula above, with D + A_s = C - c_s:
//   T >= C - D + (M - 1) c_s             for every stage
//   T >= C + D + (M - 1 - n) c_s         where n < M - 1: the way down and back is waited for twice
//   T >= C + (M - 1) max(f_s, b_s)       elsewhere, and max(f_s, b_s) >= c_s / 2
// A time is possible only if stages that obey these can hold everything. From the last stage on,
// each takes as much as it may: the more the stages after it hold (within what the second line
// allows), the more it and they can hold together. What is returned is a time that is not possible.
//
// Without transfers the second line then allows each of its stages exactly (T - C) / (M - 1), and
// the first line no less; every other stage may take twice that.
Seconds least_one_f_one_b_time(Seconds all, Seconds transfer, const PipelineShape& shape) {
  const int stages = shape.stages, micro_batches = shape.micro_batches;
  const Seconds ways = 2 * (stages - 1) * transfer;
  if (micro_batches == 1) return all + ways;
  const int late = std::min(stages, micro_batches - 1);  // the stages of the second line
  const Seconds without_transfers = all + (micro_batches - 1) * (all / (2 * stages - late));
  if (transfer == Seconds(0.0)) return without_transfers * (1 - 1e-9);
  const double ahead = 1.0 / (micro_batches - 1);
  // The midpoints of three halvings are asked at once, as a heap: what is known of one does not
  // wait for another.
  constexpr int levels = 3, asked = (1 << levels) - 1;
  const auto are_possible = [&](const std::array<double, asked>& times) {
    std::array<double, asked> beyond{}, held{}, least{};
    for (int i = 0; i < asked; ++i) beyond[i] = times[i] - all.value - ways.value;
    for (int n = 0; n < late; ++n) {
      const double down = 2 * n * transfer.value, left = 1.0 / (micro_batches - 1 - n);
      for (int i = 0; i < asked; ++i) {
        const double most = beyond[i] - down;
        const double so_far = held[i] < most ? held[i] : most;
        least[i] = least[i] < so_far ? least[i] : so_far;
        const double twice = (beyond[i] + so_far + down) * ahead, once = (beyond[i] - so_far - down) * left;
        held[i] = so_far + (twice < once ? twice : once);
      }
    }
    std::array<bool, asked> possible{};
    for (int i = 0; i < asked; ++i)
      possible[i] = least[i] >= 0.0 && held[i] + 2 * (stages - late) * (beyond[i] / (micro_batches - 1)) >= all.value;
    return possible;
  };
  Seconds below = std::max(all + ways, without_transfers);
  Seconds above = all + ways + (micro_batches - 1) * (all / stages + 2.0 * transfer);
  for (int halvings = 0; halvings < 12; halvings += levels) {
    std::array<Seconds, asked> from, to;
    std::array<double, asked> middles{};
    for (int i = 0; i < asked; ++i) {
      const int parent = (i - 1) / 2;
      const Seconds middle_of_parent(middles[parent]);
      from[i] = i == 0 ? below : i % 2 == 1 ? from[parent] : middle_of_parent;
      to[i] = i == 0 ? above : i % 2 == 1 ? middle_of_parent : to[parent];
      middles[i] = (from[i] + (to[i] - from[i]) / 2).value;
    }
    const std::array<bool, asked> possible = are_possible(middles);
    for (int i = 0; i < asked; i = possible[i] ? 2 * i + 1 : 2 * i + 2)
      (possible[i] ? above : below) = Seconds(middles[i]);
  }
  return below * (1 - 1e-9);
}

int one_f_one_b_in_flight(int rank, const PipelineShape& shape) {
  return std::min(shape.ranks - rank, shape.micro_batches);
}

}  // namespace parplan
