#include "planner/plan/schedule.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <numeric>
#include <set>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "planner/base/enum_index.h"
#include "planner/base/error.h"
#include "planner/base/text.h"

namespace parplan {
namespace {

template <class T>
using PerPhase = std::array<T, 4>;
template <class T>
using PerFlow = std::array<T, 2>;

constexpr PerPhase<char> letters{'F', 'B', 'I', 'W'};

std::optional<int> parse_number(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

// Whether something has happened, per stage and micro-batch.
using Marks = std::vector<std::vector<bool>>;

Marks no_marks(int stages, int micro_batches) {
  return Marks(static_cast<std::size_t>(stages), std::vector<bool>(static_cast<std::size_t>(micro_batches)));
}

// Faults that one rank's list shows by itself.
std::optional<std::string> find_fault_of_rank(const Schedule& schedule, int rank, int micro_batches) {
  std::vector<int> held;  // stages
  for (int s = 0; s < schedule.stages(); ++s)
    if (schedule.rank_of_stage[s] == rank) held.push_back(s);
  const std::string lister = held.size() == 1 ? fmt::format("stage {}", held[0]) : fmt::format("rank {}", rank);
  PerPhase<Marks> done;
  done.fill(no_marks(schedule.stages(), micro_batches));
  std::vector<int> last_backward(schedule.rank_of_stage.size(), -1), last_weights = last_backward;
  for (const Action& action : schedule.ranks[rank]) {
    const auto text = [&] { return write_action(action); };
    const int stage = action.stage;
    if (std::ranges::find(held, stage) == held.end())
      return fmt::format("{} lists {}, an action of stage {}", lister, text(), stage);
    if (action.micro_batch < 0 || action.micro_batch >= micro_batches)
      return fmt::format("stage {} lists {}, and there are {} micro-batches, numbered from 0", stage, text(),
                         micro_batches);
    const auto m = static_cast<std::size_t>(action.micro_batch);
    if (done[index_of(action.phase)][stage][m]) return fmt::format("stage {} runs {} twice", stage, text());
    done[index_of(action.phase)][stage][m] = true;
    if (action.phase == Phase::forward) continue;
    const auto is_done = [&](Phase phase) { return static_cast<bool>(done[index_of(phase)][stage][m]); };
    const auto same = [&](Phase phase) { return write_action({stage, phase, action.micro_batch}); };
    const Phase needed = action.phase == Phase::backward_weights ? Phase::backward_inputs : Phase::forward;
    if (!is_done(needed)) return fmt::format("stage {} runs {} before {}", stage, text(), same(needed));
    if (is_done(Phase::backward) && (is_done(Phase::backward_inputs) || is_done(Phase::backward_weights)))
      return fmt::format("stage {} runs {} and {}; a backward is one action (B) or two (I and W)", stage,
                         same(Phase::backward), same(Phase::backward_inputs));
    // Gradients are added up in the order of micro-batches: those of products in the second part.
    if (const bool in_flow = flow_of(action.phase).has_value();
        action.micro_batch < (in_flow ? last_backward : last_weights)[stage]) {
      const int last = (in_flow ? last_backward : last_weights)[stage];
      const auto ran = [&](Phase phase) { return static_cast<bool>(done[index_of(phase)][stage][last]); };
      const Phase before = ran(Phase::backward) ? Phase::backward
                           : in_flow            ? Phase::backward_inputs
                                                : Phase::backward_weights;
      return fmt::format("stage {} runs {} after {}; backwards must run in ascending order of micro-batches", stage,
                         text(), write_action({stage, before, last}));
    }
    if (action.phase == Phase::backward && action.micro_batch < last_weights[stage])
      return fmt::format("stage {} runs {} after {}; backwards must run in ascending order of micro-batches", stage,
                         text(), write_action({stage, Phase::backward_weights, last_weights[stage]}));
    if (action.phase != Phase::backward_weights) last_backward[stage] = action.micro_batch;
    if (action.phase != Phase::backward_inputs) last_weights[stage] = action.micro_batch;
  }
  for (const int stage : held)
    for (int m = 0; m < micro_batches; ++m) {
      const auto is_done = [&](Phase phase) { return static_cast<bool>(done[index_of(phase)][stage][m]); };
      const bool is_split = is_done(Phase::backward_inputs);
      const auto never = [&](Phase phase) {
        return fmt::format("stage {} never runs {}", stage, write_action({stage, phase, m}));
      };
      if (!is_done(Phase::forward)) return never(Phase::forward);
      if (!is_split && !is_done(Phase::backward)) return never(Phase::backward);
      if (is_split && !is_done(Phase::backward_weights)) return never(Phase::backward_weights);
    }
  return std::nullopt;
}

// A channel delivers in order, so both of its ends must list the same order. Receives could be
// listed in the sender's order instead of the actions' order, but an early receive would only hold
// a slot longer.
std::optional<std::string> find_crossed_channel(const Schedule& schedule, int source, int destination, Flow flow) {
  const int stages = schedule.stages();
  std::vector<Action> sent, received;
  for (const Action& action : schedule.ranks[source])
    if (const auto output = output_of(action, stages);
        output && flow_of(action.phase) == flow && schedule.rank_of_stage[output->stage] == destination)
      sent.push_back(action);
  for (const Action& action : schedule.ranks[destination])
    if (const auto input = input_of(action, stages);
        input && flow_of(action.phase) == flow && schedule.rank_of_stage[input->stage] == source)
      received.push_back(action);
  const auto meets = [&](const Action& send, const Action& receive) {
    const Action output = *output_of(send, stages);
    return output.stage == receive.stage && output.micro_batch == receive.micro_batch;
  };
  const auto [send, receive] = std::ranges::mismatch(sent, received, meets);
  if (send == sent.end() || receive == received.end()) return std::nullopt;
  return fmt::format("stage {} sends {} where stage {} receives for {}; neighbours must run their {} in one order",
                     send->stage, write_action(*send), receive->stage, write_action(*receive),
                     flow == Flow::forward ? "forwards" : "backwards");
}

// A dry run of all ranks, each in the order of its list. A send is posted, and its buffer is free
// again when the receiver has taken it; everything else blocks the rank.
class DryRun {
 public:
  DryRun(const Schedule& schedule, int micro_batches)
      : schedule_(schedule),
        ranks_(schedule.ranks.size()),
        done_{no_marks(schedule.stages(), micro_batches), no_marks(schedule.stages(), micro_batches)},
        taken_(done_),
        in_parts_(done_.front()) {
    for (const std::vector<Action>& actions : schedule.ranks)
      for (const Action& action : actions)
        if (action.phase == Phase::backward_inputs) in_parts_[action.stage][action.micro_batch] = true;
  }

  // What the blocked ranks wait for if they cannot all run to the end: "0B0 waits for 1B0".
  std::vector<std::string> play() {
    for (bool advanced = true; advanced;) {
      advanced = false;
      for (std::size_t r = 0; r < ranks_.size(); ++r)
        while (ranks_[r].next < schedule_.ranks[r].size() && !advance(r, advanced)) {}
    }
    std::vector<std::string> waits;
    for (std::size_t r = 0; r < ranks_.size(); ++r)
      if (ranks_[r].next < schedule_.ranks[r].size()) {
        bool unused = false;
        waits.push_back(write(*advance(r, unused)));
      }
    return waits;
  }

 private:
  struct Rank {
    std::size_t next = 0;
    bool received = false;                          // the input of the next action
    // Per flow and way, the actions whose results were put into exchange buffers.
    PerFlow<std::array<std::vector<Action>, 2>> in_buffers;
  };

  // An action that cannot run before another one has: one that takes what `sent` sent, if that is
  // what it waits for.
  struct Wait {
    Action action, other;
    std::optional<Action> sent;
  };

  static std::size_t index_of_flow(const Action& action) { return index_of(*flow_of(action.phase)); }
  bool is(const PerFlow<Marks>& marks, const Action& action) const {
    return marks[index_of_flow(action)][action.stage][action.micro_batch];
  }
  static void mark(PerFlow<Marks>& marks, const Action& action) {
    marks[index_of_flow(action)][action.stage][action.micro_batch] = true;
  }
  // As the list of its stage has it: a backward, or the first part of one.
  std::string as_listed(const Action& action) const {
    return write_action(flow_of(action.phase) == Flow::backward ? as_kept(action) : action);
  }
  std::string write(const Wait& wait) const {
    if (!wait.sent) return fmt::format("{} waits for {}", write_action(wait.action), as_listed(wait.other));
    return fmt::format("{} waits for {} to take what {} sent", write_action(wait.action), as_listed(wait.other),
                       write_action(*wait.sent));
  }

  // Takes the next step of a rank, or says what the rank waits for.
  std::optional<Wait> advance(std::size_t r, bool& advanced) {
    Rank& rank = ranks_[r];
    const Action& action = schedule_.ranks[r][rank.next];
    if (!flow_of(action.phase)) {
      ++rank.next;
      advanced = true;
      return std::nullopt;
    }
    const std::optional<Action> input = input_of(action, schedule_.stages());
    const bool is_forward = action.phase == Phase::forward;
    // A forward receives into a slot of its own and computes into an exchange buffer; a backward
    // receives into the exchange buffer that it computes in.
    if (!is_forward && !takes_over(action))
      if (auto wait = wait_for_buffer(rank, action)) return wait;
    if (!rank.received && input) {
      if (!is(done_, *input)) return Wait{.action = action, .other = *input, .sent = std::nullopt};
      mark(taken_, *input);
      rank.received = advanced = true;
    }
    const bool fills_buffer = !is_forward || sends(schedule_, action);
    if (is_forward && fills_buffer)
      if (auto wait = wait_for_buffer(rank, action)) return wait;
    // A gradient that was handed over is where the backward before left it.
    std::vector<Action>& filled = rank.in_buffers[index_of_flow(action)][way_of(action)];
    if (takes_over(action))
      *std::find(filled.rbegin(), filled.rend(), as_kept(*input)) = action;
    else if (fills_buffer)
      filled.push_back(action);
    mark(done_, action);
    rank.received = false;
    ++rank.next;
    advanced = true;
    return std::nullopt;
  }

  std::size_t way_of(const Action& action) const {
    const bool is_forward = action.phase == Phase::forward;
    return static_cast<std::size_t>(is_forward ? output_way(schedule_, action.stage)
                                               : gradient_way(schedule_, action.stage));
  }
  // Whether it computes in the buffer in which a backward on the same rank left its gradient.
  bool takes_over(const Action& action) const {
    const std::optional<Action> input = input_of(action, schedule_.stages());
    return input && flow_of(action.phase) == Flow::backward && hands_over(schedule_, *input);
  }
  // The backward that left it, as it is in the list of its stage.
  Action as_kept(Action action) const {
    action.phase = in_parts_[action.stage][action.micro_batch] ? Phase::backward_inputs : Phase::backward;
    return action;
  }

  std::optional<Wait> wait_for_buffer(const Rank& rank, const Action& action) const {
    const std::vector<Action>& before = rank.in_buffers[index_of_flow(action)][way_of(action)];
    const auto buffers = static_cast<std::size_t>(schedule_.exchanges);
    if (before.size() < buffers) return std::nullopt;
    const Action& last = before[before.size() - buffers];
    if (!output_of(last, schedule_.stages()) || is(taken_, last)) return std::nullopt;
    return Wait{.action = action, .other = *output_of(last, schedule_.stages()), .sent = last};
  }

  const Schedule& schedule_;
  std::vector<Rank> ranks_;
  PerFlow<Marks> done_;
  PerFlow<Marks> taken_;
  Marks in_parts_;  // whose backwards have two
};

}  // namespace

std::string write_action(const Action& action) {
  return fmt::format("{}{}{}", action.stage, letters[index_of(action.phase)], action.micro_batch);
}

Action parse_action(const std::string& text) {
  const std::size_t letter = text.find_first_not_of("0123456789");
  const auto known = letter == std::string::npos ? letters.end() : std::ranges::find(letters, text[letter]);
  if (known != letters.end()) {
    const std::string_view view = text;
    const auto stage = parse_number(view.substr(0, letter));
    const auto micro_batch = parse_number(view.substr(letter + 1));
    if (stage && micro_batch) return {*stage, static_cast<Phase>(known - letters.begin()), *micro_batch};
  }
  throw ConfigError(
      fmt::format("expected an action: a stage, F (forward), B (backward), I or W (its two parts: gradients of inputs, "
                  "of weights), "
                  "and a micro-batch, such as 2F0; found '{}'",
                  text));
}

std::optional<Action> input_of(const Action& action, int stages) {
  if (!flow_of(action.phase)) return std::nullopt;
  const int stage = action.stage + (action.phase == Phase::forward ? -1 : 1);
  if (stage < 0 || stage >= stages) return std::nullopt;
  return Action{stage, action.phase, action.micro_batch};
}

std::optional<Action> output_of(const Action& action, int stages) {
  if (!flow_of(action.phase)) return std::nullopt;
  const int stage = action.stage + (action.phase == Phase::forward ? 1 : -1);
  if (stage < 0 || stage >= stages) return std::nullopt;
  return Action{stage, action.phase, action.micro_batch};
}

bool is_v(const Schedule& schedule) {
  const int ranks = static_cast<int>(schedule.ranks.size());
  if (ranks < 2 || schedule.stages() != 2 * ranks) return false;
  for (int stage = 0; stage < 2 * ranks; ++stage)
    if (schedule.rank_of_stage[stage] != v_rank(stage, ranks)) return false;
  return true;
}

bool sends(const Schedule& schedule, const Action& action) {
  const std::optional<Action> output = output_of(action, schedule.stages());
  return output && schedule.rank_of_stage[output->stage] != schedule.rank_of_stage[action.stage];
}

bool hands_over(const Schedule& schedule, const Action& action) {
  const std::optional<Action> output = output_of(action, schedule.stages());
  return output && schedule.rank_of_stage[output->stage] == schedule.rank_of_stage[action.stage];
}

Schedule one_stage_a_rank(std::vector<std::vector<Action>> ranks) {
  Schedule schedule;
  schedule.rank_of_stage.resize(ranks.size());
  schedule.ranks = std::move(ranks);
  std::iota(schedule.rank_of_stage.begin(), schedule.rank_of_stage.end(), 0);
  return schedule;
}

int most_exchange_buffers(const PipelineShape& shape) { return 2 + std::max(shape.group - shape.ranks, 0); }

int exchange_buffers(const PipelineShape& shape) {
  return shape.ranks > 1 ? std::min(most_exchange_buffers(shape), shape.micro_batches) : 1;
}

namespace {

// On a rank with buffers for `ways`: 1 for its stage on the way back of a V.
int way_of(const Schedule& schedule, int stage, int ExchangeWays::*ways, int first_back) {
  const int ranks = static_cast<int>(schedule.ranks.size()), stages = schedule.stages();
  if (stages != 2 * ranks || 2 * stage < stages || !is_v(schedule)) return 0;
  return exchange_ways(true, schedule.rank_of_stage[stage], ranks, first_back).*ways - 1;
}

}  // namespace

int output_way(const Schedule& schedule, int stage) {
  return way_of(schedule, stage, &ExchangeWays::outputs, 0);
}
int gradient_way(const Schedule& schedule, int stage, int first_back) {
  return way_of(schedule, stage, &ExchangeWays::gradients, first_back);
}

Schedule first_micro_batches(Schedule schedule, int micro_batches) {
  for (std::vector<Action>& rank : schedule.ranks)
    std::erase_if(rank, [&](const Action& action) { return action.micro_batch >= micro_batches; });
  return schedule;
}

std::optional<std::string> find_fault(const Schedule& schedule, int micro_batches) {
  if (schedule.rank_of_stage.empty()) return "the schedule has no stages";
  if (micro_batches < 1)
    return fmt::format("the schedule needs at least 1 micro-batch, and there are {}", micro_batches);
  const int ranks = static_cast<int>(schedule.ranks.size());
  for (int s = 0; s < schedule.stages(); ++s)
    if (const int rank = schedule.rank_of_stage[s]; rank < 0 || rank >= ranks)
      return fmt::format("stage {} is on rank {} of the pipeline, which has {}", s, rank, ranks);
  if (schedule.stages() % ranks != 0)
    return fmt::format("{} stages cannot be shared out among {} ranks", schedule.stages(), ranks);
  if (ranks == 1 && schedule.stages() > 1)
    return fmt::format("one rank holds {} stages; make them one", schedule.stages());
  const bool goes_back = is_v(schedule);
  for (int s = 0; s < schedule.stages() && !goes_back; ++s)
    if (const int ring = ring_rank(s, {ranks, schedule.stages(), micro_batches}); schedule.rank_of_stage[s] != ring)
      return fmt::format("stage {} is on rank {} of the pipeline; stages go around the ring of ranks, so it must be on "
                         "rank {}",
                         s, schedule.rank_of_stage[s], ring);
  for (int r = 0; r < ranks; ++r)
    if (auto fault = find_fault_of_rank(schedule, r, micro_batches)) return fault;
  // Behind the first stages of all ranks, channels are those between the same ranks again.
  for (int s = 0; s + 1 < schedule.stages() && (goes_back || s < ranks); ++s) {
    const int one = schedule.rank_of_stage[s], other = schedule.rank_of_stage[s + 1];
    if (one == other) continue;
    if (auto fault = find_crossed_channel(schedule, one, other, Flow::forward)) return fault;
    if (auto fault = find_crossed_channel(schedule, other, one, Flow::backward)) return fault;
  }
  const std::vector<std::string> waits = DryRun(schedule, micro_batches).play();
  if (waits.empty()) return std::nullopt;
  return fmt::format("the schedule cannot run to its end: {}", join(waits));
}

int most_in_flight(const std::vector<Action>& rank) {
  int held = 0, most = 0;
  for (const Action& action : rank) {
    if (const std::optional<Flow> flow = flow_of(action.phase); flow) held += *flow == Flow::forward ? 1 : -1;
    most = std::max(most, held);
  }
  return most;
}

SlotsForWeights slots_for_weights(const std::vector<Action>& rank) {
  std::set<int> split;  // stages
  for (const Action& action : rank)
    if (action.phase == Phase::backward_inputs) split.insert(action.stage);
  SlotsForWeights slots;
  int saved = 0, left = 0;
  for (const Action& action : rank) {
    if (!split.contains(action.stage)) continue;
    saved += action.phase == Phase::forward;
    left += action.phase == Phase::backward_inputs;
    slots.saved = std::max(slots.saved, saved);
    slots.left = std::max(slots.left, left);
    saved -= action.phase == Phase::backward || action.phase == Phase::backward_weights;
    left -= action.phase == Phase::backward_weights;
  }
  return slots;
}

int most_in_flight_of_last_stage(const Schedule& schedule) {
  const int last = schedule.stages() - 1;
  std::vector<Action> of_stage;
  std::ranges::copy_if(schedule.ranks[schedule.rank_of_stage[last]], std::back_inserter(of_stage),
                       [&](const Action& action) { return action.stage == last; });
  return most_in_flight(of_stage);
}

bool splits_backward(const Schedule& schedule, int stage) {
  return std::ranges::any_of(schedule.ranks[schedule.rank_of_stage[stage]], [&](const Action& action) {
    return action.stage == stage && action.phase == Phase::backward_inputs;
  });
}

std::vector<char> splits_backward(const Schedule& schedule) {
  std::vector<char> splits(schedule.rank_of_stage.size(), false);
  for (const std::vector<Action>& rank : schedule.ranks)
    for (const Action& action : rank)
      if (action.phase == Phase::backward_inputs) splits[action.stage] = true;
  return splits;
}

}  // namespace parplan
