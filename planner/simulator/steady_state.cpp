#include "planner/simulator/steady_state.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "planner/base/enum_index.h"
#include "planner/simulator/play_calls.h"
#include "planner/simulator/simulate.h"
#include "planner/simulator/simulation_results.h"

namespace parplan {
namespace {

constexpr double rounding = 1e-9;

// The tasks that are forwards, in order.
std::vector<int> forwards_of(const PlayList& list) {
  std::vector<int> forwards;
  for (std::size_t t = 0; t < list.tasks.size(); ++t)
    if (list.tasks[t].action && list.tasks[t].action->phase == Phase::forward) forwards.push_back(static_cast<int>(t));
  return forwards;
}

// The task that is the forward of this number.
const Task& forward_task(const PlayList& list, int number) {
  const auto begins = [&](const Task& task) {
    return task.action && task.action->phase == Phase::forward && number-- == 0;
  };
  return *std::ranges::find_if(list.tasks, begins);
}

// The number of a task: of the last forward up to it.
int number_of(const std::vector<int>& forwards, int task) {
  return static_cast<int>(std::ranges::upper_bound(forwards, task) - forwards.begin()) - 1;
}

// What the last repetition of the middles reaches.
class Reaching {
 public:
  explicit Reaching(const RepeatingStep& step) : step_(step) {
    for (std::size_t r = 0; r < step.shortest.ranks.size(); ++r) {
      int forwards = 0;
      std::vector<int>& numbers = numbers_.emplace_back();
      for (const Task& task : list(r).tasks) {
        forwards += task.action && task.action->phase == Phase::forward;
        numbers.push_back(forwards - 1);
        if (!task.action) continue;
        const std::optional<Flow> flow = flow_of(task.action->phase);
        if (!flow) continue;
        const auto stage = static_cast<std::size_t>(task.action->stage);
        if (stages_.size() <= stage) stages_.resize(stage + 1);
        std::vector<int>& of_flow = stages_[stage][index_of(*flow)];
        of_flow.resize(std::max(of_flow.size(), static_cast<std::size_t>(task.action->micro_batch) + 1));
        of_flow[static_cast<std::size_t>(task.action->micro_batch)] = forwards - 1;
      }
    }
  }

  std::optional<Reach> find() const {
    int own = 0, back = 0, ahead = 0;
    for (std::size_t r = 0; r < numbers_.size(); ++r) {
      if (numbers_[r].back() != numbers_[0].back() || meets_others(r)) return std::nullopt;
      own = std::max(own, of_calls(r));
      for (int t = step_.middle[r].first_task; t < step_.middle[r].end_task; ++t) {
        const Action& action = *list(r).tasks[t].action;
        const int stages = static_cast<int>(stages_.size());
        for (const std::optional<Action>& partner : {input_of(action, stages), output_of(action, stages)}) {
          if (!partner) continue;
          const int distance = numbers_[r][t] - number_of(*partner);
          back = std::max(back, distance);
          ahead = std::max(ahead, -distance);
        }
      }
    }
    // A send may be posted: what waits for it waits for its receiver.
    return Reach{.back = own + back, .ahead = ahead};
  }

 private:
  const PlayList& list(std::size_t rank) const { return step_.shortest.ranks[rank].list; }
  // A neighbour's action: the backward there may be one action where it is two here.
  int number_of(const Action& action) const {
    const std::vector<int>& of_flow = stages_[static_cast<std::size_t>(action.stage)][index_of(*flow_of(action.phase))];
    return of_flow[static_cast<std::size_t>(action.micro_batch)];
  }

  bool meets_others(std::size_t rank) const {
    const PlayedRank& own = step_.shortest.ranks[rank];
    for (int t = step_.middle[rank].first_task; t < step_.middle[rank].end_task; ++t)
      for (int c = own.list.tasks[t].first_call; c < own.list.tasks[t].last_call; ++c)
        for (const std::optional<SeatAt>& seat : own.segment_of(c).seats)
          if (seat && !step_.shortest.meetings[seat->meeting].is_channel) return true;
    return false;
  }

  // To what calls wait for, or follow on a stream.
  int of_calls(std::size_t rank) const {
    const PlayedRank& own = step_.shortest.ranks[rank];
    const Repeat& repeat = step_.middle[rank];
    std::vector<int> numbers(own.list.calls.size());      // by call
    std::array<std::optional<int>, stream_count> before;  // by stream, of the call before
    int reach = 0;
    for (int t = 0; t < repeat.end_task; ++t) {
      const Task& task = own.list.tasks[t];
      const int number = numbers_[rank][t];
      for (int c = task.first_call; c < task.last_call; ++c) {
        numbers[c] = number;
        if (t >= repeat.first_task)
          for (const int wait : own.list.waits_of(own.list.calls[c])) reach = std::max(reach, number - numbers[wait]);
        for (std::size_t s = 0; s < stream_count; ++s)
          if (own.segment_of(c).costed.streams >> s & 1u) {
            const std::optional<int> last = std::exchange(before[s], number);
            if (t >= repeat.first_task && last) reach = std::max(reach, number - *last);
          }
      }
    }
    return reach;
  }

  const RepeatingStep& step_;
  std::vector<std::vector<int>> numbers_;                // by rank and task
  std::vector<std::array<std::vector<int>, 2>> stages_;  // numbers by stage, flow and micro-batch
};

// Whether the calls of tasks [first, end) of a rank have ended, and each later by `later` than its
// counterpart so many tasks before.
bool repeats(const PlayedRank& rank, int first, int end, int tasks_apart, int micro_batches_apart, Seconds later) {
  const Seconds least = (1.0 - rounding) * later, most = (1.0 + rounding) * later;
  for (int t = first; t < end; ++t) {
    const Task &other = rank.list.tasks[t], &one = rank.list.tasks[t - tasks_apart];
    if (!one.action || !other.action || one.action->stage != other.action->stage ||
        one.action->phase != other.action->phase ||
        one.action->micro_batch + micro_batches_apart != other.action->micro_batch ||
        other.last_call - other.first_call != one.last_call - one.first_call)
      return false;
    for (int b = other.first_call, a = one.first_call; b < other.last_call; ++a, ++b) {
      if (!rank.is_over(b) || rank.list.calls[a].segment != rank.list.calls[b].segment) return false;
      // One of them may have been played as one piece, the other instruction by instruction.
      if (rank.calls[a].whole != rank.calls[b].whole) return false;
      const Played *of_a = rank.pieces.data() + rank.calls[a].first, *of_b = rank.pieces.data() + rank.calls[b].first;
      for (std::size_t i = 0; i < rank.pieces_of(b); ++i) {
        if (!of_a[i].done() || !of_b[i].done()) return false;
        if (const Seconds apart = of_b[i].end - of_a[i].end; apart < least || apart > most) return false;
      }
    }
  }
  return true;
}

// When the first call of a task ended; nothing where it has not.
std::optional<Seconds> first_end(const PlayedRank& rank, int task) {
  const int call = rank.list.tasks[task].first_call;
  if (!rank.is_over(call)) return std::nullopt;
  const Played& piece = rank.pieces[static_cast<std::size_t>(rank.calls[call].first) + rank.pieces_of(call) - 1];
  return piece.done() ? std::optional(piece.end) : std::nullopt;
}

StepTime difference(const StepTime& longer, const StepTime& shorter) {
  StepTime apart = shorter;
  apart *= -1.0;
  apart += longer;
  return apart;
}
CommunicationVolume difference(const CommunicationVolume& longer, const CommunicationVolume& shorter) {
  CommunicationVolume apart;
  for (const Axis axis : all_axes) apart[axis] = longer[axis] - shorter[axis];
  return apart;
}

// Adds `times` periods.
void extend(StepTime& time, StepTime of_period, int times) {
  of_period *= static_cast<double>(times);
  time += of_period;
}
void extend(CommunicationVolume& volume, const CommunicationVolume& of_period, int times) {
  for (const Axis axis : all_axes) volume[axis] += of_period[axis] * times;
}
template <class Of>
void extend(TimeBy<Of>& time, const TimeBy<Of>& less, int times) {
  TimeBy<Of> of_period = less;
  of_period *= -1.0;
  of_period += time;
  of_period *= static_cast<double>(times);
  time += of_period;
}
// False where the critical path lacks work that the step without a period has.
bool extend(StepDetails& details, const StepDetails& a_period_less, int times) {
  for (std::size_t r = 0; r < details.ranks.size(); ++r) {
    RankResult& rank = details.ranks[r];
    const RankResult& less = a_period_less.ranks[r];
    extend(rank.time, difference(rank.time, less.time), times);
    extend(rank.communication, difference(rank.communication, less.communication), times);
    extend(rank.kernels, less.kernels, times);
    extend(rank.collectives, less.collectives, times);
  }
  std::size_t known = 0;
  for (CriticalWork& work : details.critical_path) {
    std::int64_t runs = work.runs;
    Seconds time = work.time;
    if (known < a_period_less.critical_path.size()) {
      const CriticalWork& less = a_period_less.critical_path[known];
      if (std::tie(less.rank, less.segment, less.label) == std::tie(work.rank, work.segment, work.label)) {
        runs -= less.runs;
        time -= less.time;
        ++known;
      }
    }
    if (runs < 0) return false;
    work.runs += runs * times;
    work.time += time * static_cast<double>(times);
  }
  return known == a_period_less.critical_path.size();
}

std::vector<CommunicationVolume> sent_by(const Simulation& step) {
  std::vector<CommunicationVolume> sent;
  for (const PlayedRank& rank : step.ranks) sent.push_back(rank.list.sent);
  return sent;
}

// What each further period adds: to the parts of the step's time, and to what each rank sends.
struct Period {
  StepTime time;
  std::vector<CommunicationVolume> sent;
};

// One step, of whole periods more than the shortest.
class SteadyPlay {
 public:
  SteadyPlay(const RepeatingStep& step, int micro_batches, StepDetails* details)
      : step_(step), all_((micro_batches - step.micro_batches) / step.period), details_(details) {
    for (std::size_t r = 0; r < step.middle.size(); ++r) {
      const std::vector<int> forwards = forwards_of(step.shortest.ranks[r].list);
      const int end = number_of(forwards, step.middle[r].end_task - 1);
      first_ = std::max(first_, number_of(forwards, step.middle[r].begin_task));
      end_ = r == 0 ? end : std::min(end_, end);
      each_ = static_cast<int>(forwards.size()) / step.micro_batches;
    }
  }

  ExtendedStep run() {
    const std::optional<Reach> reach = reach_of(step_);
    if (!reach) return play_all();
    const int period = step_.period * each_, window = reach->back + 2;
    Simulation playing = longer(step_, times_);
    for (int until = first_ + window + 2 * period + 8;; until += std::max(period, (until - first_) / 2)) {
      if (!reaches(until)) return play_all(std::move(playing));
      if (const int times = periods_until(until); times > times_) set_length(playing, step_, times_ = times);
      for (PlayedRank& rank : playing.ranks) rank.calls_to_play = forward_task(rank.list, until).first_call;
      play_on(playing);
      if (const auto steady = find_steady_state(playing, first_, until - reach->ahead, window, period))
        return play_end(std::move(playing), until, *steady);
    }
  }

 private:
  int micro_batches(int times) const { return step_.micro_batches + times * step_.period; }
  // Periods to add so that the middles last until the forward of this number.
  int periods_until(int number) const {
    const int period = step_.period * each_;
    return std::max(0, (number - end_ + period - 1) / period);
  }
  // Whether the step would be shortened, if it were steady there.
  bool reaches(int number) const { return periods_until(number) < all_; }
  ExtendedStep play_all() { return play_all(longer(step_, all_)); }
  ExtendedStep play_all(Simulation playing) {
    set_length(playing, step_, all_);
    play_to_end(playing);
    return {.result = play_step(playing, details_), .micro_batches = micro_batches(all_), .steady = std::nullopt};
  }
  static void play_to_end(Simulation& playing) {
    for (PlayedRank& rank : playing.ranks) rank.calls_to_play.reset();
  }

  // After the forward `until` the step is steady: periods between there and the end are left out.
  ExtendedStep play_end(Simulation playing, int until, const SteadyState& steady) {
    const int apart = steady.period / (step_.period * each_);  // periods of the step
    times_ = periods_until(until);
    times_ += (all_ - times_) % apart;
    set_length(playing, step_, times_);
    play_to_end(playing);
    StepResult result = play_step(playing, details_);
    if (times_ == all_) return {.result = result, .micro_batches = micro_batches(all_), .steady = std::nullopt};
    std::vector<CommunicationVolume> sent = sent_by(playing);
    int played = micro_batches(times_);
    std::optional<Period> period;
    if (details_ == nullptr) period = period_in(playing, until, steady);
    StepDetails less;
    if (!period) {
      // The step without one of its periods tells what that adds.
      if (times_ < apart) {
        times_ += apart;
        playing = longer(step_, times_);
        result = play_step(playing, details_);
        sent = sent_by(playing);
        played += micro_batches(times_);
      }
      Simulation shorter = longer(step_, times_ - apart);
      const StepResult before = play_step(shorter, details_ == nullptr ? nullptr : &less);
      played += micro_batches(times_ - apart);
      period = {.time = difference(result.time, before.time), .sent = {}};
      const std::vector<CommunicationVolume> sent_before = sent_by(shorter);
      for (std::size_t r = 0; r < sent.size(); ++r) period->sent.push_back(difference(sent[r], sent_before[r]));
      if (!is_period(period->time, steady)) return play_all();
    }
    const int more = (all_ - times_) / apart;
    if (details_ != nullptr && !extend(*details_, less, more)) return play_all();
    extend(result.time, period->time, more);
    Bytes most(-1);
    for (std::size_t r = 0; r < sent.size(); ++r) {
      extend(sent[r], period->sent[r], more);
      if (const Bytes in_all = sum(sent[r]); in_all > most) {
        most = in_all;
        result.communication = sent[r];
      }
    }
    return {.result = result, .micro_batches = played, .steady = steady};
  }

  static bool is_period(const StepTime& time, const SteadyState& steady) {
    return std::abs((time.total() - steady.later).value) <= rounding * steady.later.value;
  }

  // What the last period before the forward `until` adds; nothing where that does not show, since
  // the bottleneck computes on two streams at once.
  std::optional<Period> period_in(const Simulation& step, int until, const SteadyState& steady) const {
    const PlayedRank& bottleneck = bottleneck_of(step);
    // Until the last computation of the forward of this number.
    const auto parts_until = [&](int number) {
      const Task& task = forward_task(bottleneck.list, number);
      int call = task.last_call - 1;
      while (call > task.first_call && bottleneck.program_segment_of(call).stream != Stream::compute) --call;
      return time_until(bottleneck, call);
    };
    const std::optional<StepTime> before = parts_until(until - 1 - steady.period), after = parts_until(until - 1);
    if (!before || !after) return std::nullopt;
    Period period{.time = difference(*after, *before), .sent = {}};
    if (!is_period(period.time, steady)) return std::nullopt;
    for (const PlayedRank& rank : step.ranks) {
      const std::vector<CommunicationVolume> by_segment = sent_by_segment(rank);
      CommunicationVolume& sent = period.sent.emplace_back();
      const int first = forward_task(rank.list, until - 1 - steady.period).first_call;
      const int end = forward_task(rank.list, until - 1).first_call;
      for (int call = first; call < end; ++call) sent += by_segment[rank.list.calls[call].segment];
    }
    return period;
  }

  const RepeatingStep& step_;
  int all_ = 0;    // periods that the step has more than the shortest
  int times_ = 0;  // that are played
  StepDetails* details_;
  int each_ = 1;             // forwards of a micro-batch on a rank
  int first_ = 0, end_ = 0;  // of the shortest step: the forwards within which every rank is in its middle
};

}  // namespace

std::optional<Reach> reach_of(const RepeatingStep& step) {
  return Reaching(step).find();
}

std::optional<SteadyState> find_steady_state(const Simulation& step, int first, int end, int window, int period) {
  std::vector<std::vector<int>> forwards;
  for (const PlayedRank& rank : step.ranks) forwards.push_back(forwards_of(rank.list));
  const auto begin = static_cast<std::size_t>(end - window);
  for (int apart = period; end - apart >= first && end - window - apart >= 0; apart += period) {
    const auto task_of = [&](std::size_t rank, std::size_t number) { return forwards[rank][number]; };
    const auto before = begin - static_cast<std::size_t>(apart);
    const std::optional<Seconds> one = first_end(step.ranks[0], task_of(0, before)),
                                 other = first_end(step.ranks[0], task_of(0, begin));
    if (!one || !other || *other <= *one) continue;
    const Seconds later = *other - *one;
    bool holds = true;
    for (std::size_t r = 0; r < step.ranks.size() && holds; ++r) {
      const PlayedRank& rank = step.ranks[r];
      const int from = task_of(r, begin), to = task_of(r, static_cast<std::size_t>(end));
      const int tasks_apart = from - task_of(r, before);
      const int micro_batches_apart =
          rank.list.tasks[from].action->micro_batch - rank.list.tasks[from - tasks_apart].action->micro_batch;
      holds = repeats(rank, from, to, tasks_apart, micro_batches_apart, later);
    }
    if (holds) return SteadyState{.period = apart, .later = later};
  }
  return std::nullopt;
}

ExtendedStep play_until_steady(const RepeatingStep& step, int micro_batches, StepDetails* details) {
  return SteadyPlay(step, micro_batches, details).run();
}

}  // namespace parplan
