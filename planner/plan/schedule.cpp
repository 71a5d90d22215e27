#include "planner/plan/schedule.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <numeric>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "planner/base/enum_index.h"
#include "planner/base/error.h"
#include "planner/base/text.h"

namespace parplan {
namespace {

constexpr std::array phases{Phase::forward, Phase::backward};
template <class T>
using PerPhase = std::array<T, phases.size()>;

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
  PerPhase<Marks> done{no_marks(schedule.stages(), micro_batches), no_marks(schedule.stages(), micro_batches)};
  std::vector<int> last_backward(schedule.rank_of_stage.size(), -1);
  for (const Action& action : schedule.ranks[rank]) {
    const std::string text = write_action(action);
    const int stage = action.stage;
    if (std::ranges::find(held, stage) == held.end())
      return fmt::format("{} lists {}, an action of stage {}", lister, text, stage);
    if (action.micro_batch < 0 || action.micro_batch >= micro_batches)
      return fmt::format("stage {} lists {}, and there are {} micro-batches, numbered from 0", stage, text,
                         micro_batches);
    const auto m = static_cast<std::size_t>(action.micro_batch);
    if (done[index_of(action.phase)][stage][m]) return fmt::format("stage {} runs {} twice", stage, text);
    done[index_of(action.phase)][stage][m] = true;
    if (action.phase == Phase::forward) continue;
    if (!done[index_of(Phase::forward)][stage][m])
      return fmt::format("stage {} runs {} before {}", stage, text,
                         write_action({stage, Phase::forward, action.micro_batch}));
    if (action.micro_batch < last_backward[stage])
      return fmt::format("stage {} runs {} after {}; backwards must run in ascending order of micro-batches", stage,
                         text, write_action({stage, Phase::backward, last_backward[stage]}));
    last_backward[stage] = action.micro_batch;
  }
  for (const int stage : held)
    for (int m = 0; m < micro_batches; ++m)
      for (const Phase phase : phases)
        if (!done[index_of(phase)][stage][m])
          return fmt::format("stage {} never runs {}", stage, write_action({stage, phase, m}));
  return std::nullopt;
}

// A channel delivers in order, so both of its ends must list the same order. Receives could be
// listed in the sender's order instead of the actions' order, but an early receive would only hold
// a slot longer.
std::optional<std::string> find_crossed_channel(const Schedule& schedule, int source, int destination, Phase phase) {
  const int stages = schedule.stages();
  std::vector<Action> sent, received;
  for (const Action& action : schedule.ranks[source])
    if (const auto output = output_of(action, stages);
        output && action.phase == phase && schedule.rank_of_stage[output->stage] == destination)
      sent.push_back(action);
  for (const Action& action : schedule.ranks[destination])
    if (const auto input = input_of(action, stages);
        input && action.phase == phase && schedule.rank_of_stage[input->stage] == source)
      received.push_back(action);
  const auto meets = [&](const Action& send, const Action& receive) { return output_of(send, stages) == receive; };
  const auto [send, receive] = std::ranges::mismatch(sent, received, meets);
  if (send == sent.end() || receive == received.end()) return std::nullopt;
  return fmt::format("stage {} sends {} where stage {} receives for {}; neighbours must run their {} in one order",
                     send->stage, write_action(*send), receive->stage, write_action(*receive),
                     phase == Phase::forward ? "forwards" : "backwards");
}

// A dry run of all ranks, each in the order of its list. A send is posted, and its buffer is free
// again when the receiver has taken it; everything else blocks the rank.
class DryRun {
 public:
  DryRun(const Schedule& schedule, int micro_batches)
      : schedule_(schedule),
        ranks_(schedule.ranks.size()),
        done_{no_marks(schedule.stages(), micro_batches), no_marks(schedule.stages(), micro_batches)},
        taken_(done_) {}

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
        waits.push_back(*advance(r, unused));
      }
    return waits;
  }

 private:
  struct Rank {
    std::size_t next = 0;
    bool received = false;                          // the input of the next action
    // Per phase, the actions whose results were put into exchange buffers.
    PerPhase<std::vector<Action>> in_buffers;
  };

  bool is(const PerPhase<Marks>& marks, const Action& action) const {
    return marks[index_of(action.phase)][action.stage][action.micro_batch];
  }
  static void mark(PerPhase<Marks>& marks, const Action& action) {
    marks[index_of(action.phase)][action.stage][action.micro_batch] = true;
  }

  // Takes the next step of a rank, or says what the rank waits for.
  std::optional<std::string> advance(std::size_t r, bool& advanced) {
    Rank& rank = ranks_[r];
    const Action& action = schedule_.ranks[r][rank.next];
    const std::optional<Action> input = input_of(action, schedule_.stages());
    const bool is_forward = action.phase == Phase::forward;
    // A forward receives into a slot of its own and computes into an exchange buffer; a backward
    // receives into the exchange buffer that it computes in.
    if (!is_forward)
      if (auto wait = wait_for_buffer(rank, action)) return wait;
    if (!rank.received && input) {
      if (!is(done_, *input)) return fmt::format("{} waits for {}", write_action(action), write_action(*input));
      mark(taken_, *input);
      rank.received = advanced = true;
    }
    const bool fills_buffer = !is_forward || sends(schedule_, action);
    if (is_forward && fills_buffer)
      if (auto wait = wait_for_buffer(rank, action)) return wait;
    if (fills_buffer) rank.in_buffers[index_of(action.phase)].push_back(action);
    mark(done_, action);
    rank.received = false;
    ++rank.next;
    advanced = true;
    return std::nullopt;
  }

  std::optional<std::string> wait_for_buffer(const Rank& rank, const Action& action) const {
    const std::vector<Action>& before = rank.in_buffers[index_of(action.phase)];
    const auto buffers = static_cast<std::size_t>(schedule_.exchanges);
    if (before.size() < buffers) return std::nullopt;
    const Action& last = before[before.size() - buffers];
    if (!sends(schedule_, last) || is(taken_, last)) return std::nullopt;
    return fmt::format("{} waits for {} to take what {} sent", write_action(action),
                       write_action(*output_of(last, schedule_.stages())), write_action(last));
  }

  const Schedule& schedule_;
  std::vector<Rank> ranks_;
  PerPhase<Marks> done_;
  PerPhase<Marks> taken_;
};

}  // namespace

std::string write_action(const Action& action) {
  return fmt::format("{}{}{}", action.stage, action.phase == Phase::forward ? 'F' : 'B', action.micro_batch);
}

Action parse_action(const std::string& text) {
  const std::size_t letter = text.find_first_not_of("0123456789");
  if (letter != std::string::npos && (text[letter] == 'F' || text[letter] == 'B')) {
    const std::string_view view = text;
    const auto stage = parse_number(view.substr(0, letter));
    const auto micro_batch = parse_number(view.substr(letter + 1));
    if (stage && micro_batch)
      return {*stage, text[letter] == 'F' ? Phase::forward : Phase::backward, *micro_batch};
  }
  throw ConfigError(fmt::format(
      "expected an action: a stage, F (forward) or B (backward), and a micro-batch, such as 2F0; found '{}'", text));
}

std::optional<Action> input_of(const Action& action, int stages) {
  const int stage = action.stage + (action.phase == Phase::forward ? -1 : 1);
  if (stage < 0 || stage >= stages) return std::nullopt;
  return Action{stage, action.phase, action.micro_batch};
}

std::optional<Action> output_of(const Action& action, int stages) {
  const int stage = action.stage + (action.phase == Phase::forward ? 1 : -1);
  if (stage < 0 || stage >= stages) return std::nullopt;
  return Action{stage, action.phase, action.micro_batch};
}

bool sends(const Schedule& schedule, const Action& action) {
  const std::optional<Action> output = output_of(action, schedule.stages());
  return output && schedule.rank_of_stage[output->stage] != schedule.rank_of_stage[action.stage];
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
  for (int s = 0; s < schedule.stages(); ++s)
    if (const int ring = ring_rank(s, {ranks, schedule.stages(), micro_batches}); schedule.rank_of_stage[s] != ring)
      return fmt::format("stage {} is on rank {} of the pipeline; stages go around the ring of ranks, so it must be on "
                         "rank {}",
                         s, schedule.rank_of_stage[s], ring);
  for (int r = 0; r < ranks; ++r)
    if (auto fault = find_fault_of_rank(schedule, r, micro_batches)) return fault;
  for (int s = 0; s + 1 < schedule.stages(); ++s) {
    const int one = schedule.rank_of_stage[s], other = schedule.rank_of_stage[s + 1];
    if (one == other) continue;
    if (auto fault = find_crossed_channel(schedule, one, other, Phase::forward)) return fault;
    if (auto fault = find_crossed_channel(schedule, other, one, Phase::backward)) return fault;
  }
  const std::vector<std::string> waits = DryRun(schedule, micro_batches).play();
  if (waits.empty()) return std::nullopt;
  return fmt::format("the schedule cannot run to its end: {}", join(waits));
}

int most_in_flight(const std::vector<Action>& rank) {
  int held = 0, most = 0;
  for (const Action& action : rank) {
    held += action.phase == Phase::forward ? 1 : -1;
    most = std::max(most, held);
  }
  return most;
}

}  // namespace parplan
