#include "planner/parallel/cut_stages.h"

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "models/families.h"
#include "models/find_model.h"

using namespace parplan;

namespace {

const std::string models_folder = PARPLAN_SOURCE_DIR "/models";
const std::string tiny_folder = PARPLAN_SOURCE_DIR "/tests/data/models";

OpGraph graph_of(const std::string& folder, const std::string& model, std::int64_t sequence) {
  return build_graph(load_model(model, folder).spec, sequence);
}
const OpGraph& tiny_gpt2() {
  static const OpGraph graph = graph_of(tiny_folder, "tiny-gpt2", 32);
  return graph;
}

}  // namespace

TEST_CASE("Stages are cut such that the costliest is as cheap as can be") {
  const auto cut_stages_of = [](const std::vector<double>& blocks, int stages) {
    return cut_stages(std::vector<Seconds>(blocks.begin(), blocks.end()), stages);
  };
  CHECK(cut_stages_of({1, 1, 1, 1, 1, 1}, 3) == std::vector<int>{2, 2, 2});
  CHECK(cut_stages_of({1, 1, 1, 1, 1}, 1) == std::vector<int>{5});
  CHECK(cut_stages_of({3, 1, 2}, 3) == std::vector<int>{1, 1, 1});
  CHECK(cut_stages_of({1, 1, 1, 1, 4}, 2) == std::vector<int>{4, 1});
  // An embedding costs nothing and does not take a layer's place; a head as expensive as two layers
  // does.
  CHECK(cut_stages_of({0, 1, 1, 1, 1, 0}, 2) == std::vector<int>{3, 3});
  CHECK(cut_stages_of({0, 1, 1, 1, 1, 1, 1, 2}, 2) == std::vector<int>{5, 3});
  // The last stage needs 8 whatever comes before; the rest is spread, not piled up to 8.
  CHECK(cut_stages_of({1, 1, 1, 1, 1, 1, 8}, 3) == std::vector<int>{3, 3, 1});
  CHECK(cut_stages_of({0, 0, 0}, 2).size() == 2);
}

TEST_CASE("The stage cut equals the best of all cuts") {
  // All cuts of eight blocks, by where the stages end.
  std::vector<Seconds> cost;
  for (const double seconds : {0.5, 3.0, 3.0, 2.5, 3.0, 1.0, 3.0, 7.0}) cost.push_back(Seconds(seconds));
  const int blocks = static_cast<int>(cost.size());
  for (int stages = 1; stages <= blocks; ++stages) {
    const auto worst_of = [&](const std::vector<int>& cut) {
      Seconds worst;
      auto at = cost.begin();
      for (int n : cut) {
        Seconds sum;
        for (int i = 0; i < n; ++i) sum += *at++;
        worst = std::max(worst, sum);
      }
      return worst;
    };
    Seconds best(1e9);
    for (unsigned ends = 0; ends < (1u << (blocks - 1)); ++ends) {
      std::vector<int> cut = {1};
      for (int i = 0; i + 1 < blocks; ++i) {
        if (ends >> i & 1u) cut.push_back(1);
        else ++cut.back();
      }
      if (static_cast<int>(cut.size()) == stages) best = std::min(best, worst_of(cut));
    }
    CHECK(worst_of(cut_stages(cost, stages)) == best);
  }
}

TEST_CASE("Stages of unlike devices that choose what to recompute are cut as the best of all cuts and choices") {
  std::mt19937 random(7);
  const auto draw = [&](int from, int to) { return std::uniform_int_distribution<int>(from, to)(random); };
  int feasible = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    const std::size_t blocks = static_cast<std::size_t>(draw(2, 7)),
                      stages = static_cast<std::size_t>(draw(1, static_cast<int>(std::min<std::size_t>(blocks, 4))));
    // Option 0 is fast and saves much, option 1 is slower and saves less; each stage has its own
    // speed, memory and micro-batches in flight.
    std::vector<std::int64_t> state(blocks + 1), much(blocks + 1), little(blocks + 1);
    std::vector<double> work(blocks + 1);
    for (std::size_t b = 0; b < blocks; ++b) {
      state[b + 1] = state[b] + draw(0, 5);
      const int saved = draw(1, 6);
      much[b + 1] = much[b] + saved;
      little[b + 1] = little[b] + (saved + 3) / 4;
      work[b + 1] = work[b] + draw(1, 6);
    }
    std::vector<std::array<std::vector<Seconds>, 2>> seconds(stages);
    std::vector<std::vector<StageOption>> options(stages);
    std::vector<std::vector<std::function<bool(std::size_t, std::size_t)>>> rooms(stages);
    for (std::size_t s = 0; s < stages; ++s) {
      const double slow = draw(1, 3);
      for (const double w : work) {
        seconds[s][0].push_back(Seconds(w * slow));
        seconds[s][1].push_back(Seconds(w * slow * 1.25));
      }
      // The last block needs some memory beyond what adds up.
      const int capacity = draw(8, 60), extra = draw(0, 12), in_flight = static_cast<int>(stages - s);
      for (const std::size_t choice : {0u, 1u}) {
        const std::vector<std::int64_t>& saved = choice == 0 ? much : little;
        rooms[s].push_back([&state, &saved, in_flight, capacity, extra, blocks](std::size_t begin, std::size_t end) {
          return state[end] - state[begin] + in_flight * (saved[end] - saved[begin]) + (end == blocks ? extra : 0) <=
                 capacity;
        });
        options[s].push_back({.seconds = seconds[s][choice],
                              .state = state,
                              .saved = saved,
                              .in_flight = in_flight,
                              .surely_fits = capacity - extra,
                              .may_fit = capacity,
                              .fits = rooms[s].back()});
      }
    }
    // The least maximum, then the least sum of squares, over all cuts and all choices.
    std::pair<double, double> best{1e300, 1e300};
    const auto visit = [&](auto&& self, std::size_t s, std::size_t begin, double worst, double squares) -> void {
      if (s == stages) {
        if (begin == blocks) best = std::min(best, {worst, squares});
        return;
      }
      for (std::size_t end = begin + 1; end <= blocks; ++end)
        for (std::size_t choice = 0; choice < options[s].size(); ++choice) {
          const StageOption& option = options[s][choice];
          if (!rooms[s][choice](begin, end)) continue;
          const double t = (option.seconds[end] - option.seconds[begin]).value;
          self(self, s + 1, end, std::max(worst, t), squares + t * t);
        }
    };
    visit(visit, 0, 0, 0.0, 0.0);
    const std::optional<StageCut> cut = cut_stages(options);
    REQUIRE(cut.has_value() == (best.first < 1e300));
    if (!cut) continue;
    ++feasible;
    std::pair<double, double> found{0.0, 0.0};
    std::size_t begin = 0;
    for (std::size_t s = 0; s < stages; ++s) {
      const std::size_t end = begin + static_cast<std::size_t>(cut->blocks[s]);
      const StageOption& option = options[s][cut->options[s]];
      CHECK(rooms[s][cut->options[s]](begin, end));
      const double t = (option.seconds[end] - option.seconds[begin]).value;
      found = {std::max(found.first, t), found.second + t * t};
      begin = end;
    }
    CHECK(begin == blocks);
    CHECK(found.first == doctest::Approx(best.first).epsilon(1e-12));
    CHECK(found.second == doctest::Approx(best.second).epsilon(1e-9));
  }
  CHECK(feasible > 1000);
}

TEST_CASE("Cheap cuts are all cuts below a limit, and the least of them is known where they are too many") {
  std::mt19937 random(11);
  const auto draw = [&](int from, int to) { return std::uniform_int_distribution<int>(from, to)(random); };
  int several = 0;
  for (int trial = 0; trial < 500; ++trial) {
    const int blocks = draw(2, 9), stages = draw(1, std::min(blocks, 4));
    std::vector<int> work(static_cast<std::size_t>(blocks)), slow(static_cast<std::size_t>(stages));
    for (int& one : work) one = draw(1, 6);
    for (int& one : slow) one = draw(1, 3);
    // A stage with an odd number of blocks costs more than its work.
    const auto least = [&](int stage, int begin, int end) {
      double sum = 0.0;
      for (int b = begin; b < end; ++b) sum += work[b] * slow[stage];
      return sum;
    };
    const auto cost = [&](int stage, int begin, int end) {
      return least(stage, begin, end) + 3.0 * ((end - begin) % 2);
    };
    std::vector<std::pair<double, std::vector<int>>> all;
    std::vector<int> cut;
    const auto visit = [&](auto&& self, int begin, double worst) -> void {
      const int stage = static_cast<int>(cut.size());
      if (stage == stages) {
        if (begin == blocks) all.emplace_back(worst, cut);
        return;
      }
      for (int end = begin + 1; end <= blocks; ++end) {
        cut.push_back(end - begin);
        self(self, end, std::max(worst, cost(stage, begin, end)));
        cut.pop_back();
      }
    };
    visit(visit, 0, 0.0);
    std::ranges::sort(all);
    const double limit = all[all.size() / 3].first + 0.5;
    std::vector<std::vector<int>> below;
    for (const auto& [worst, one] : all)
      if (worst < limit) below.push_back(one);
    std::ranges::sort(below);
    const CutWindow window = cut_window(blocks, stages, least, limit);
    REQUIRE(!window.empty());
    CheapCuts found = cheap_cuts(window, cost, limit, 1'000'000);
    CHECK(found.all);
    CHECK(found.least == all.front().first);
    std::ranges::sort(found.cuts);
    CHECK(found.cuts == below);
    for (const auto& [worst, one] : all) {
      if (worst < limit)
        CHECK(found.costliest(one) == worst);
      else
        CHECK(found.costliest(one) >= limit);
    }
    if (below.size() > 1) {
      ++several;
      const CheapCuts some = cheap_cuts(window, cost, limit, below.size() - 1);
      CHECK(!some.all);
      CHECK(some.cuts.size() == below.size() - 1);
      CHECK(some.least == all.front().first);
    }
    const CutWindow none = cut_window(blocks, stages, least, all.front().first - 3.0);
    if (!none.empty()) CHECK(cheap_cuts(none, cost, all.front().first, 10).cuts.empty());
  }
  CHECK(several > 100);
}

TEST_CASE("The default cut counts the head and not the look-up") {
  // tiny GPT-2, multiply-adds per token: a layer 4 * 32^2 + 2 * 32 * 128 + 2 * 32 * 32 = 14336, the
  // head 61 * 32 = 1952.
  CHECK(even_stages(tiny_gpt2(), 2) == std::vector<int>{3, 3});
  CHECK(even_stages(tiny_gpt2(), 4) == std::vector<int>{2, 1, 1, 2});
  CHECK(even_stages(tiny_gpt2(), 6) == std::vector<int>{1, 1, 1, 1, 1, 1});
  // GPT-2: a layer 7.08M + 1.57M for attention over 1024 tokens, the head 38.6M: more than four
  // layers.
  const OpGraph gpt2 = graph_of(models_folder, "gpt2", 1024);
  CHECK(even_stages(gpt2, 2) == std::vector<int>{9, 5});
  // If each token sees only itself, a layer is 7.08M, and the head more than five of them.
  OpGraph windowed = gpt2;
  for (Op& op : windowed.ops)
    if (op.kind == OpKind::attention) op.attributes.window = 1;
  CHECK(even_stages(windowed, 2) == std::vector<int>{10, 4});
}
