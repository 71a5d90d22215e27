#include "planner/schedule/schedules.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

using namespace parplan;

namespace {

std::string text_of(const std::vector<Action>& stage) {
  std::string text;
  for (const Action& action : stage) {
    if (!text.empty()) text += ' ';
    text += write_action(action);
  }
  return text;
}

struct Size {
  int stages;
  int micro_batches;
};
const std::vector<Size> sizes = [] {
  std::vector<Size> all;
  for (int p : {1, 2, 3, 4, 7, 8, 16})
    for (int m : {1, 2, 3, 4, 5, 8, 16, 33}) all.push_back({p, m});
  return all;
}();

// Those of a schedule: with one stage a rank, interleaved ones with several, and two in the shape
// of a V.
std::vector<PipelineShape> shapes_of(const ScheduleRow& row) {
  std::vector<PipelineShape> shapes;
  for (const Size& size : sizes) {
    const int p = size.stages, m = size.micro_batches;
    if (is_v_shaped(row.kind)) {
      if (p > 1 && (row.kind != ScheduleKind::dualpipe_v || m >= 2 * p)) shapes.emplace_back(p, 2 * p, m);
      continue;
    }
    if (row.kind != ScheduleKind::interleaved) {
      shapes.emplace_back(p, m);
      continue;
    }
    if (p < 2 || p > 8) continue;
    for (const int chunks : {2, 3, 4})
      for (const int group : {p, p + 1, p + 3, 2 * p, 3 * p}) {
        const int left = m % group;
        if (group <= m && (left == 0 || left >= p)) shapes.emplace_back(p, p * chunks, m, group);
      }
  }
  return shapes;
}

std::string describe(const ScheduleRow& row, const PipelineShape& shape) {
  return std::string(row.name) + ", " + std::to_string(shape.stages) + " stages on " + std::to_string(shape.ranks) +
         " ranks, " + std::to_string(shape.micro_batches) + " micro-batches in groups of " +
         std::to_string(shape.group);
}

std::vector<Seconds> repeat(int stages, double value) {
  return std::vector<Seconds>(static_cast<std::size_t>(stages), Seconds(value));
}

}  // namespace

TEST_CASE("Every schedule has one row, under its name") {
  CHECK(schedule_rows().size() == 6);
  for (ScheduleKind kind : {ScheduleKind::gpipe, ScheduleKind::one_f_one_b, ScheduleKind::interleaved,
                            ScheduleKind::zero_bubble_h1, ScheduleKind::zero_bubble_v, ScheduleKind::dualpipe_v}) {
    CHECK(row_of(kind).kind == kind);
    CHECK(row_of(kind).name == name(kind));
  }
}

TEST_CASE("Every schedule verifies itself at every size") {
  for (const ScheduleRow& row : schedule_rows())
    for (const PipelineShape& shape : shapes_of(row)) {
      INFO(describe(row, shape));
      CHECK(find_fault(row.actions(shape), shape.micro_batches).value_or("none") == "none");
    }
}

TEST_CASE("A replica with fewer micro-batches runs the row's own order for so many") {
  int shorter = 0;
  for (const ScheduleRow& row : schedule_rows()) {
    if (is_v_shaped(row.kind)) continue;
    for (const PipelineShape& shape : shapes_of(row))
      for (int count = 1; count < shape.micro_batches; ++count) {
        // Interleaved pipelines run whole groups.
        const bool interleaves = row.kind == ScheduleKind::interleaved;
        if (interleaves && (count % shape.group != 0 || shape.micro_batches % shape.group != 0)) continue;
        PipelineShape fewer = shape;
        fewer.micro_batches = count;
        INFO(describe(row, shape) << ", of which " << count);
        CHECK(first_micro_batches(row.actions(shape), count) == row.actions(fewer));
        ++shorter;
      }
  }
  CHECK(shorter > 1000);
  // Whatever can run can run without its last micro-batches.
  for (const ScheduleRow& row : schedule_rows())
    for (const PipelineShape& shape : shapes_of(row))
      for (const int count : {1, shape.micro_batches / 2})
        if (count > 0)
          CHECK(find_fault(first_micro_batches(row.actions(shape), count), count).value_or("none") == "none");
}

TEST_CASE("Activations in flight are as the row says") {
  for (const ScheduleRow& row : schedule_rows())
    for (const PipelineShape& shape : shapes_of(row)) {
      const Schedule schedule = row.actions(shape);
      for (int rank = 0; rank < shape.ranks; ++rank) {
        INFO(describe(row, shape) << ", rank " << rank);
        CHECK(row.in_flight(rank, shape) == most_in_flight(schedule.ranks[rank]));
        if (row.for_weights) CHECK(row.for_weights(rank, shape) == slots_for_weights(schedule.ranks[rank]));
      }
      if (row.last_stage_in_flight) {
        INFO(describe(row, shape));
        CHECK(row.last_stage_in_flight(shape) == most_in_flight_of_last_stage(schedule));
      }
    }
  CHECK(row_of(ScheduleKind::interleaved).last_stage_in_flight({2, 4, 8}) == 1);
  CHECK(row_of(ScheduleKind::interleaved).last_stage_in_flight({2, 4, 5, 3}) == 2);
  CHECK(row_of(ScheduleKind::gpipe).in_flight(3, {4, 8}) == 8);
  CHECK(row_of(ScheduleKind::one_f_one_b).in_flight(0, {4, 8}) == 4);
  CHECK(row_of(ScheduleKind::one_f_one_b).in_flight(3, {4, 8}) == 1);
  CHECK(row_of(ScheduleKind::one_f_one_b).in_flight(0, {4, 2}) == 2);
}

TEST_CASE("GPipe runs all forwards, then all backwards, both ascending") {
  const Schedule schedule = row_of(ScheduleKind::gpipe).actions({2, 3});
  CHECK(text_of(schedule.ranks[0]) == "0F0 0F1 0F2 0B0 0B1 0B2");
  CHECK(text_of(schedule.ranks[1]) == "1F0 1F1 1F2 1B0 1B1 1B2");
}

TEST_CASE("1F1B warms up, alternates, drains") {
  const Schedule schedule = row_of(ScheduleKind::one_f_one_b).actions({4, 5});
  CHECK(text_of(schedule.ranks[0]) == "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0B2 0B3 0B4");
  CHECK(text_of(schedule.ranks[1]) == "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4");
  CHECK(text_of(schedule.ranks[2]) == "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2B4");
  CHECK(text_of(schedule.ranks[3]) == "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4");
  CHECK(text_of(row_of(ScheduleKind::one_f_one_b).actions({4, 2}).ranks[0]) == "0F0 0F1 0B0 0B1");
}

TEST_CASE("Interleaved 1F1B runs groups of micro-batches through one chunk after another") {
  const ScheduleRow& row = row_of(ScheduleKind::interleaved);
  const Schedule schedule = row.actions({2, 4, 4});
  CHECK(schedule.rank_of_stage == std::vector{0, 1, 0, 1});
  CHECK(text_of(schedule.ranks[0]) == "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3");
  CHECK(text_of(schedule.ranks[1]) == "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3");
  // All forwards warm up where there are no more micro-batches than ranks.
  CHECK(text_of(row.actions({2, 4, 2}).ranks[0]) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1");
  // A last group that is smaller, and more buffers for activations that wait for the first rank.
  const Schedule groups = row.actions({2, 4, 5, 3});
  CHECK(text_of(groups.ranks[1]) ==
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4");
  CHECK(groups.exchanges == 3);
  CHECK(schedule.exchanges == 2);
}

TEST_CASE("ZB-H1 delays the weight gradients of stage s by s micro-batches, and divides none of the first stage") {
  const ScheduleRow& row = row_of(ScheduleKind::zero_bubble_h1);
  const Schedule schedule = row.actions({3, 4});
  CHECK(text_of(schedule.ranks[0]) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3");
  CHECK(text_of(schedule.ranks[1]) == "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3");
  CHECK(text_of(schedule.ranks[2]) == "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3");
  CHECK(text_of(row.actions({3, 1}).ranks[2]) == "2F0 2I0 2W0");
  for (const PipelineShape& shape : shapes_of(row)) {
    INFO(describe(row, shape));
    const Schedule at_size = row.actions(shape);
    // No stage holds more micro-batches, until their weight gradients, than the first of 1F1B.
    const int most = row_of(ScheduleKind::one_f_one_b).in_flight(0, shape);
    for (int stage = 0; stage < shape.stages; ++stage) {
      CHECK(splits_backward(at_size, stage) == runs_backward_in_parts(row.kind, stage));
      CHECK(row.for_weights(stage, shape).saved == (stage == 0 ? 0 : most));
    }
  }
}

TEST_CASE("Schedules in the shape of a V take their stages down the ranks and back") {
  const Schedule zero_bubble = row_of(ScheduleKind::zero_bubble_v).actions({2, 4, 4});
  CHECK(zero_bubble.rank_of_stage == std::vector{0, 1, 1, 0});
  CHECK(text_of(zero_bubble.ranks[0]) ==
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0B0 3F2 3I2 3W2 0B1 3F3 3I3 3W3 0B2 0B3");
  CHECK(text_of(zero_bubble.ranks[1]) ==
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3");
  // As many micro-batches as would not fill the pipeline are the first of those that do.
  CHECK(text_of(row_of(ScheduleKind::zero_bubble_v).actions({2, 4, 1}).ranks[1]) == "1F0 2F0 2I0 2W0 1I0 1W0");
  // DeepSeek's order: step 4 of the last rank, F0 B1 F1 B0, is that of rank 1 here.
  const Schedule dual = row_of(ScheduleKind::dualpipe_v).actions({2, 4, 4});
  CHECK(dual.rank_of_stage == std::vector{0, 1, 1, 0});
  CHECK(text_of(dual.ranks[0]) == "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0B2 0B3");
  CHECK(text_of(dual.ranks[1]) == "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3");
}

TEST_CASE("On equal stages ZB-V and DualPipeV wait for the first input alone where forwards and both parts are equal") {
  for (const ScheduleKind kind : {ScheduleKind::zero_bubble_v, ScheduleKind::dualpipe_v}) {
    const ScheduleRow& row = row_of(kind);
    for (const PipelineShape& shape : shapes_of(row)) {
      if (shape.micro_batches < 2 * shape.ranks - 1) continue;
      INFO(describe(row, shape));
      const int p = shape.ranks;
      const Schedule schedule = row.actions(shape);
      const std::vector<Seconds> none = repeat(2 * p - 1, 0);
      const auto bubble = [&](double f, double b, double w) {
        return played_time(schedule, repeat(2 * p, f), repeat(2 * p, b + w), none, repeat(2 * p, w)).value -
               2 * shape.micro_batches * (f + b + w);
      };
      CHECK(bubble(1, 1, 1) == p - 1);
      // Gradients of inputs that take longer than the other two are waited for, once by each rank.
      if (kind == ScheduleKind::zero_bubble_v) {
        CHECK(bubble(1, 2, 1) == 2 * (p - 1));
        CHECK(bubble(3, 4, 2) == 4 * (p - 1));
      } else {
        CHECK(bubble(1, 2, 1) >= 2 * (p - 1));
      }
      // A rank of ZB-V holds no more activations than the first of 1F1B, whose stages are twice as
      // large, and one of DualPipeV half of such a stage more.
      for (int rank = 0; rank < p; ++rank)
        CHECK(row.in_flight(rank, shape) == 2 * p + (kind == ScheduleKind::dualpipe_v ? 1 : 0));
    }
  }
}

TEST_CASE("On equal stages ZB-H1 has a bubble of (p - 1)(f + max(b - w, 0)), a third of 1F1B's where these are equal") {
  const ScheduleRow& row = row_of(ScheduleKind::zero_bubble_h1);
  struct Times {
    double forward, inputs, weights;
  };
  for (const auto& [f, b, w] : {Times{1, 1, 1}, Times{1, 2, 1}, Times{2, 1, 1}, Times{1, 1, 3}, Times{4, 5, 4}})
    for (const PipelineShape& shape : shapes_of(row)) {
      if (shape.micro_batches < shape.stages) continue;
      INFO(describe(row, shape) << ": " << f << ", " << b << ", " << w);
      const int p = shape.stages;
      const Seconds time =
          played_time(row.actions(shape), repeat(p, f), repeat(p, b + w), repeat(p - 1, 0), repeat(p, w));
      const double bubble = time.value - shape.micro_batches * (f + b + w);
      CHECK(bubble == (p - 1) * (f + std::max(b - w, 0.0)));
      const Seconds whole = row_of(ScheduleKind::one_f_one_b)
                                .closed_form(repeat(p, f), repeat(p, b + w), repeat(p - 1, 0), shape);
      CHECK(whole.value - shape.micro_batches * (f + b + w) == (p - 1) * (f + b + w));
    }
}

TEST_CASE("The least times of schedules with backwards in two parts are below the play of any stages") {
  for (const ScheduleRow& row : schedule_rows()) {
    if (!runs_backward_in_parts(row.kind)) continue;
    std::mt19937 random(20261123);
    std::uniform_real_distribution<double> factor(0.2, 4.0), of_transfer(0.0, 2.0);
    for (int round = 0; round < 50; ++round)
      for (const PipelineShape& shape : shapes_of(row)) {
        INFO(describe(row, shape) << ", round " << round);
        std::vector<Seconds> forward, backward, weights, transfer;
        Seconds all, slowest, least_transfer(2.0);
        for (int s = 0; s < shape.stages; ++s) {
          forward.emplace_back(factor(random));
          backward.emplace_back(2 * factor(random));
          weights.push_back(backward.back() * (round % 4 / 4.0));
          all += forward.back() + backward.back();
          slowest = std::max(slowest, forward.back() + backward.back());
        }
        Seconds total = all;
        for (int s = 0; s + 1 < shape.stages; ++s) {
          transfer.emplace_back(of_transfer(random));
          least_transfer = std::min(least_transfer, transfer.back());
          total += 2.0 * transfer.back();
        }
        const Seconds played = played_time(row.actions(shape), forward, backward, transfer, weights) * (1 + 1e-12);
        CHECK(row.least(all, least_transfer, shape) <= played);
        CHECK(row.least_time(total, all, slowest, shape) <= played);
      }
  }
}

TEST_CASE(
    "On equal stages all schedules with whole backwards have a bubble of (p - 1)(f + b) of a stage, with v stages a "
    "rank the fraction (p - 1) / (v M + p - 1)") {
  for (const ScheduleRow& row : schedule_rows())
    for (const PipelineShape& shape : shapes_of(row)) {
      if (runs_backward_in_parts(row.kind)) continue;
      if (shape.micro_batches % shape.group != 0 && row.kind == ScheduleKind::interleaved) continue;
      INFO(describe(row, shape));
      const int stages = shape.stages, turns = shape.micro_batches * stages / shape.ranks;
      const std::vector<Seconds> forward = repeat(stages, 1), backward = repeat(stages, 2),
                                 transfer = repeat(stages - 1, 0);
      const Seconds time = pipeline_time(forms_of(row), forward, backward, transfer, shape);
      CHECK(time == Seconds(3.0 * (turns + shape.ranks - 1)));
      CHECK(time == played_time(row.actions(shape), forward, backward, transfer));
      const double idle = (time.value - 3.0 * turns) / time.value;
      CHECK(idle == doctest::Approx((shape.ranks - 1.0) / (turns + shape.ranks - 1.0)));
    }
}

TEST_CASE("The interleaved closed form is a lower bound of the play, and a tight one") {
  const ScheduleRow& row = row_of(ScheduleKind::interleaved);
  std::mt19937 random(20261123);
  for (const double slowest_transfer : {0.0, 0.2, 3.0})
    for (const double spread : {0.0, 0.5, 4.0}) {
      std::uniform_real_distribution<double> factor(1.0, 1.0 + spread), of_transfer(0.0, slowest_transfer);
      double sum = 0;
      int count = 0;
      for (int round = 0; round < 8; ++round)
        for (const PipelineShape& shape : shapes_of(row)) {
          INFO(describe(row, shape) << ", round " << round);
          std::vector<Seconds> forward, backward, transfer;
          Seconds all, slowest;
          for (int s = 0; s < shape.stages; ++s) {
            forward.emplace_back(factor(random));
            backward.emplace_back(2 * factor(random));
            all += forward.back() + backward.back();
            slowest = std::max(slowest, forward.back() + backward.back());
          }
          Seconds total = all;
          for (int s = 0; s + 1 < shape.stages; ++s) {
            transfer.emplace_back(of_transfer(random));
            total += 2.0 * transfer.back();
          }
          const Seconds form = row.closed_form(forward, backward, transfer, shape);
          const Seconds played = played_time(row.actions(shape), forward, backward, transfer);
          CHECK(form <= played * (1 + 1e-12));
          CHECK(row.least_time(total, all, slowest, shape) <= form * (1 + 1e-12));
          sum += played / form - 1;
          ++count;
        }
      INFO("spread " << spread << ", transfers up to " << slowest_transfer << ": " << sum / count);
      if (slowest_transfer < 1.0) CHECK(sum / count < (spread < 1.0 ? 0.03 : 0.15));
    }
}

TEST_CASE("What is known of a single stage, or of no stage, bounds the closed form") {
  std::mt19937 random(20261122);
  std::uniform_real_distribution<double> factor(0.2, 4.0), of_transfer(0.0, 1.0);
  for (const ScheduleRow& row : schedule_rows()) {
    // Their form for one stage is its work alone.
    if (row.kind == ScheduleKind::interleaved || runs_backward_in_parts(row.kind)) continue;
    const ScheduleForms forms = forms_of(row);
    for (int round = 0; round < 200; ++round)
      for (const Size& size : sizes) {
        const int p = size.stages, m = size.micro_batches;
        INFO(row.name << ", " << p << " stages, " << m << " micro-batches, round " << round);
        std::vector<Seconds> forward, backward, transfer;
        for (int s = 0; s < p; ++s) {
          forward.emplace_back(factor(random));
          backward.emplace_back(factor(random));
        }
        for (int s = 0; s + 1 < p; ++s) transfer.emplace_back(round % 2 * of_transfer(random));
        const auto through = [&](int stage) {
          StagePath path{.stage = stage,
                         .forward = forward[stage],
                         .backward = backward[stage],
                         .before = {},
                         .after = {},
                         .round_trip = {},
                         .slowest_transfer = {}};
          for (int s = 0; s < p; ++s)
            if (s != stage) (s < stage ? path.before : path.after) += forward[s] + backward[s];
          for (int s = 0; s + 1 < p; ++s) {
            (s < stage ? path.before : path.after) += 2.0 * transfer[s];
            path.slowest_transfer = std::max(path.slowest_transfer, transfer[s]);
          }
          path.round_trip = path.forward + path.backward + path.after;
          return time_through_stage(forms, path, {p, m}).value;
        };
        const double time = row.closed_form(forward, backward, transfer, {p, m}).value;
        Seconds computing, total, slowest;
        for (int s = 0; s < p; ++s) {
          CHECK(through(s) <= time * (1 + 1e-12));
          computing += forward[s] + backward[s];
          slowest = std::max(slowest, forward[s] + backward[s]);
        }
        total = computing;
        for (const Seconds t : transfer) total += 2.0 * t;
        CHECK(least_pipeline_time(forms, total, computing, slowest, {p, m}).value <= time * (1 + 1e-12));
        if (p == 1) continue;
        // Stage `to` takes over some of the work of its neighbour.
        const int to = round % p, from = to + 1 < p ? to + 1 : to - 1;
        const double before = through(to);
        const Seconds moved_forward = 0.5 * forward[from], moved_backward = 0.25 * backward[from];
        forward[to] += moved_forward;
        forward[from] -= moved_forward;
        backward[to] += moved_backward;
        backward[from] -= moved_backward;
        CHECK(through(to) >= before * (1 - 1e-12));
      }
  }
}

TEST_CASE(
    "On unequal stages GPipe's closed form is exact, 1F1B's is exact or a tight lower bound, with transfers too") {
  std::mt19937 random(20240607);
  for (double slowest_transfer : {0.0, 0.2, 3.0})
  for (double spread : {0.5, 1.0}) {
    std::uniform_real_distribution<double> of_transfer(0.0, slowest_transfer);
    std::uniform_real_distribution<double> factor(1.0, 1.0 + spread);
    double worst = 0, sum = 0;
    int count = 0;
    for (int round = 0; round < 50; ++round)
      for (const Size& size : sizes) {
        const int p = size.stages, m = size.micro_batches;
        std::vector<Seconds> forward, backward;
        for (int s = 0; s < p; ++s) {
          forward.emplace_back(factor(random));
          backward.emplace_back(2 * factor(random));
        }
        std::vector<Seconds> transfer;
        for (int s = 0; s + 1 < p; ++s) transfer.emplace_back(of_transfer(random));
        INFO(p << " stages, " << m << " micro-batches, round " << round);
        const ScheduleRow& gpipe = row_of(ScheduleKind::gpipe);
        CHECK(gpipe.closed_form(forward, backward, transfer, {p, m}).value ==
              doctest::Approx(played_time(gpipe.actions({p, m}), forward, backward, transfer).value).epsilon(1e-12));
        const ScheduleRow& row = row_of(ScheduleKind::one_f_one_b);
        const double form = row.closed_form(forward, backward, transfer, {p, m}).value;
        const double played = played_time(row.actions({p, m}), forward, backward, transfer).value;
        CHECK(form <= played * (1 + 1e-12));
        worst = std::max(worst, played / form - 1);
        sum += played / form - 1;
        ++count;
      }
    INFO("spread " << spread << ", transfers up to " << slowest_transfer << ": " << worst << ", " << sum / count);
    if (slowest_transfer > 0.0) {
      CHECK(sum / count < (slowest_transfer < 1.0 ? 0.01 : 0.06));
      continue;
    }
    CHECK(worst < (spread < 1 ? 1e-12 : 0.04));
    CHECK(sum / count < (spread < 1 ? 1e-12 : 0.001));
  }
}

TEST_CASE("No cut of the same work takes less than a schedule's least time, and equal stages are close to it") {
  std::mt19937 random(20261122);
  for (const double spread : {0.0, 0.1, 1.0, 10.0})
    for (const double transfer : {0.0, 0.3, 5.0})
      for (int round = 0; round < 40; ++round)
        for (const Size& size : sizes) {
          const int p = size.stages, m = size.micro_batches;
          std::uniform_real_distribution<double> factor(1.0, 1.0 + spread);
          std::vector<Seconds> forward, backward, transfers;
          Seconds all, slowest;
          for (int s = 0; s < p; ++s) {
            // Where stages differ, also by the share of their forwards.
            forward.emplace_back(factor(random));
            backward.emplace_back((1.0 + (spread > 0.0 ? random() % 2 : 1)) * factor(random));
            all += forward.back() + backward.back();
            slowest = std::max(slowest, forward.back() + backward.back());
          }
          for (int s = 0; s + 1 < p; ++s) transfers.emplace_back(transfer * factor(random));
          for (const ScheduleRow& row : schedule_rows()) {
            if (row.kind == ScheduleKind::interleaved || runs_backward_in_parts(row.kind)) continue;
            INFO(row.name << ": " << p << " stages, " << m << " micro-batches, spread " << spread << ", transfers "
                          << transfer);
            const Seconds form = row.closed_form(forward, backward, transfers, {p, m}) * (1 + 1e-12);
            const Seconds least = row.least(all, Seconds(transfer), {p, m});
            CHECK(least <= form);
            CHECK(row.least_time(all + 2 * (p - 1) * Seconds(transfer), all, slowest, {p, m}) <= form);
            if (spread == 0.0 && transfer == 0.0) CHECK(least >= form * (m > p ? 1 - 1e-3 : 0.86));
          }
        }
}

TEST_CASE("No cut of the same work takes less than interleaved 1F1B's least time, and equal stages are close to it") {
  std::mt19937 random(20261123);
  const ScheduleRow& row = row_of(ScheduleKind::interleaved);
  for (const double spread : {0.0, 0.1, 10.0, 1000.0})
    for (const double transfer : {0.0, 0.3, 5.0})
      for (int round = 0; round < 200; ++round) {
        const int p = 2 + static_cast<int>(random() % 5), v = 1 + static_cast<int>(random() % 4);
        const int group = p + static_cast<int>(random() % 4 == 0 ? random() % 3 : 0);
        const int m = group * (1 + static_cast<int>(random() % 4));
        const PipelineShape shape{p, p * v, m, group};
        std::uniform_real_distribution<double> factor(1.0, 1.0 + spread);
        std::vector<Seconds> forward, backward, transfers;
        Seconds all;
        for (int s = 0; s < shape.stages; ++s) {
          forward.emplace_back(factor(random));
          backward.emplace_back((1.0 + (spread > 0.0 ? random() % 2 : 1)) * factor(random));
          all += forward.back() + backward.back();
        }
        for (int s = 0; s + 1 < shape.stages; ++s) transfers.emplace_back(transfer * factor(random));
        INFO(p << " ranks with " << v << " stages, " << m << " micro-batches in groups of " << group << ", spread "
               << spread << ", transfers " << transfer);
        const Seconds played = played_time(row.actions(shape), forward, backward, transfers) * (1 + 1e-12);
        const Seconds least = row.least(all, Seconds(transfer), shape);
        CHECK(least <= played);
        // Nearly half of the bubble of equal stages is in it.
        if (spread == 0.0 && transfer == 0.0 && group == p && m * v >= 4 * p)
          CHECK(least >= Seconds(3.0 * (m * v + 0.4 * (p - 1))) * (1 - 1e-3));
      }
}

TEST_CASE("One slow stage sets 1F1B's pace, wherever it is") {
  for (int slow = 0; slow < 4; ++slow) {
    std::vector<Seconds> forward = repeat(4, 1), backward = repeat(4, 2);
    forward[slow] = Seconds(2);
    backward[slow] = Seconds(4);
    const auto time = row_of(ScheduleKind::one_f_one_b).closed_form;
    INFO("stage " << slow);
    const auto of = [&](int m) { return time(forward, backward, repeat(3, 0), {4, m}); };
    CHECK(of(101) - of(100) == Seconds(6));
  }
}

TEST_CASE("Transfers slow the steady state of 1F1B on equal stages by 2 t (p - 1) / p for each micro-batch") {
  // Four stages: in the time of four micro-batches one travels down and back, 4 * 3 + 6 t.
  const ScheduleRow& row = row_of(ScheduleKind::one_f_one_b);
  const auto time = [&](int m) { return row.closed_form(repeat(4, 1), repeat(4, 2), repeat(3, 0.5), {4, m}); };
  CHECK(time(104) - time(100) == Seconds(4 * 3 + 6 * 0.5));
  const auto played = [&](int m) {
    return played_time(row.actions({4, m}), repeat(4, 1), repeat(4, 2), repeat(3, 0.5));
  };
  CHECK(played(104) - played(100) == Seconds(4 * 3 + 6 * 0.5));
}

TEST_CASE("Stages in a row that are slower than those behind them set 1F1B's pace, with the transfers between them") {
  const ScheduleRow& row = row_of(ScheduleKind::one_f_one_b);
  // Stages 1 to 3 of six are slow: three micro-batches go down and back in 3 * 6 + 4 t.
  const std::vector<Seconds> forward = {Seconds(1), Seconds(2), Seconds(2), Seconds(2), Seconds(1), Seconds(1)};
  const std::vector<Seconds> backward = {Seconds(2), Seconds(4), Seconds(4), Seconds(4), Seconds(2), Seconds(2)};
  const std::vector<Seconds> transfer = repeat(5, 0.25);
  const auto form = [&](int m) { return row.closed_form(forward, backward, transfer, {6, m}); };
  const auto played = [&](int m) { return played_time(row.actions({6, m}), forward, backward, transfer); };
  CHECK(form(103) - form(100) == Seconds(3 * 6 + 4 * 0.25));
  CHECK(played(103) - played(100) == Seconds(3 * 6 + 4 * 0.25));
  CHECK(form(100).value == doctest::Approx(played(100).value).epsilon(0.002));
  CHECK(form(100) <= played(100));
}
