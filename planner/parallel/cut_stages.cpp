#include "planner/parallel/cut_stages.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

constexpr Seconds infinite{std::numeric_limits<double>::infinity()};

bool has_room(const StageOption& option, std::size_t begin, std::size_t end) {
  if (option.state.empty()) return true;
  const std::int64_t bytes =
      option.state[end] - option.state[begin] + option.in_flight * (option.saved[end] - option.saved[begin]);
  return bytes <= option.surely_fits || (bytes <= option.may_fit && option.fits && option.fits(begin, end));
}

// The time of blocks [begin, end) on a stage with its fastest option that fits; infinite where none
// fits.
Seconds stage_seconds(const std::vector<StageOption>& options, std::size_t begin, std::size_t end,
                      int* chosen = nullptr) {
  Seconds least = infinite;
  for (std::size_t i = 0; i < options.size(); ++i) {
    const StageOption& option = options[i];
    const Seconds seconds = option.seconds[end] - option.seconds[begin];
    if (seconds >= least || !has_room(option, begin, end)) continue;
    least = seconds;
    if (chosen != nullptr) *chosen = static_cast<int>(i);
  }
  return least;
}

// The slowest stage of a cut in which no stage takes longer than `most`; infinite where no such cut
// exists.
Seconds slowest_within(std::span<const std::vector<StageOption>> stages, std::size_t blocks, Seconds most) {
  // Each stage takes as many blocks as it can: what fits and is fast enough with more blocks also
  // is with fewer. A stage that cannot take the next block takes none, which no cut allows; so no
  // cut gets further than this one.
  Seconds slowest;
  bool none_empty = true;
  std::size_t filled = 0;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const std::size_t last = blocks - (stages.size() - 1 - s);  // one block is left for each later stage
    std::size_t end = filled;
    Seconds taken;
    // The last stage holds all that is left, and needs no buffer to send from.
    if (s + 1 == stages.size() && filled < blocks) {
      taken = stage_seconds(stages[s], filled, blocks);
      if (taken > most) break;
      end = blocks;
    }
    while (end < last) {
      const Seconds seconds = stage_seconds(stages[s], filled, end + 1);
      if (seconds > most) break;
      taken = seconds;
      ++end;
    }
    none_empty = none_empty && end > filled;
    slowest = std::max(slowest, taken);
    filled = end;
  }
  if (filled < blocks) return infinite;
  if (none_empty) return slowest;
  // With heterogeneous stages, a stage may hold an earlier block than the one that the greedy cut
  // reached.
  const std::size_t p = stages.size();
  // Whether the stages before s can end at block b, and how far stage s gets from there, which is
  // never less far from a later block.
  std::vector<std::vector<char>> ends(p + 1, std::vector<char>(blocks + 1, 0));
  std::vector<std::vector<std::size_t>> farthest(p, std::vector<std::size_t>(blocks + 1, 0));
  ends[0][0] = 1;
  for (std::size_t s = 0; s < p; ++s) {
    const std::size_t last = blocks - (p - 1 - s);
    std::size_t end = s, marked = s;
    for (std::size_t begin = s; begin < last; ++begin) {
      end = std::max(end, begin);
      if (s + 1 == p) end = stage_seconds(stages[s], begin, last) <= most ? last : begin;
      while (s + 1 < p && end < last && stage_seconds(stages[s], begin, end + 1) <= most) ++end;
      farthest[s][begin] = end;
      if (!ends[s][begin]) continue;
      for (marked = std::max(marked, begin); marked < end; ++marked) ends[s + 1][marked + 1] = 1;
    }
  }
  if (!ends[p][blocks]) return infinite;
  slowest = {};
  for (std::size_t s = p, end = blocks; s-- > 0;) {
    std::size_t begin = end - 1;
    while (!ends[s][begin] || farthest[s][begin] < end) --begin;
    slowest = std::max(slowest, stage_seconds(stages[s], begin, end));
    end = begin;
  }
  return slowest;
}

}  // namespace

std::optional<StageCut> cut_stages(std::span<const std::vector<StageOption>> stages) {
  PARPLAN_ASSERT(!stages.empty() && !stages.front().empty(), fmt::format("{} stages", stages.size()));
  const std::size_t n = stages.front().front().seconds.size() - 1, p = stages.size();
  PARPLAN_ASSERT(p <= n, fmt::format("{} stages, {} blocks", p, n));

  // The least possible maximum, nearly, by bisection. Every success gives a maximum that some cut
  // has.
  Seconds reached = slowest_within(stages, n, Seconds(std::numeric_limits<double>::max()));
  if (reached == infinite) return std::nullopt;
  Seconds below;
  for (int halvings = 0; halvings < 8; ++halvings) {
    const Seconds middle = below + (reached - below) / 2;
    const Seconds slowest = slowest_within(stages, n, middle);
    if (slowest == infinite)
      below = middle;
    else
      reached = slowest;
  }
  // Few maxima are left: they are tried one after another.
  for (Seconds slowest = reached; slowest != infinite && slowest > Seconds();
       slowest = slowest_within(stages, n, reached * (1 - 1e-9)))
    reached = slowest;
  // Differences of prefix sums carry rounding errors, which must not decide between equal stages.
  const Seconds largest = reached * (1 + 1e-9);

  // The smallest block at which stage s may end if the later stages are to hold the rest, each of
  // which then begins as early as it can.
  std::vector<std::size_t> least_end(p);
  for (std::size_t s = p, end = n; s-- > 0;) {
    least_end[s] = end;
    std::size_t first = end - 1;
    while (first > s && stage_seconds(stages[s], first - 1, end) <= largest) --first;
    end = std::max(first, s);
  }

  // The least sum of squares among the cuts that reach it: squares[s][e] is for the first e blocks
  // in s + 1 stages.
  const auto at = [&](std::size_t s, std::size_t end) { return s * (n + 1) + end; };
  constexpr double unreached = std::numeric_limits<double>::infinity();
  thread_local std::vector<double> squares;  // of seconds
  thread_local std::vector<std::size_t> begin;
  squares.assign(p * (n + 1), unreached);
  begin.assign(p * (n + 1), 0);
  for (std::size_t s = 0; s < p; ++s)
    for (std::size_t b = s == 0 ? 0 : s; b <= (s == 0 ? 0 : n - 1); ++b) {
      const double so_far = s == 0 ? 0.0 : squares[at(s - 1, b)];
      if (so_far == unreached) continue;
      for (std::size_t e = std::max(b + 1, least_end[s]); e <= n - (p - 1 - s); ++e) {
        const Seconds seconds = stage_seconds(stages[s], b, e);
        if (seconds > largest) break;
        const double sum = so_far + seconds.value * seconds.value;
        if (sum < squares[at(s, e)] * (1 - 1e-12)) {
          squares[at(s, e)] = sum;
          begin[at(s, e)] = b;
        }
      }
    }
  StageCut cut{.blocks = std::vector<int>(p), .options = std::vector<int>(p)};
  for (std::size_t s = p, end = n; s-- > 0;) {
    const std::size_t first = begin[at(s, end)];
    cut.blocks[s] = static_cast<int>(end - first);
    stage_seconds(stages[s], first, end, &cut.options[s]);
    end = first;
  }
  return cut;
}

bool some_cut_fits(std::span<const std::vector<StageOption>> stages) {
  const std::size_t blocks = stages.front().front().seconds.size() - 1;
  return slowest_within(stages, blocks, Seconds(std::numeric_limits<double>::max())) != infinite;
}

std::optional<int> fastest_option(const std::vector<StageOption>& options, std::size_t begin, std::size_t end) {
  int chosen = 0;
  if (stage_seconds(options, begin, end, &chosen) == infinite) return std::nullopt;
  return chosen;
}

std::optional<std::vector<int>> fastest_options(std::span<const std::vector<StageOption>> stages,
                                                std::span<const int> blocks) {
  std::vector<int> choices;
  std::size_t end = 0;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const std::size_t begin = end;
    end += static_cast<std::size_t>(blocks[s]);
    const std::optional<int> choice = fastest_option(stages[s], begin, end);
    if (!choice) return std::nullopt;
    choices.push_back(*choice);
  }
  return choices;
}

// Stages that take as many blocks as they can bound where the next one begins, from either end. A
// stage that cannot take a single block there may begin earlier, so that the next one begins no
// later than it would.
CutWindow cut_window(int blocks, int stages, const StageCost& cost, double limit) {
  CutWindow window(static_cast<std::size_t>(stages) + 1);
  window.front() = {0, 0};
  window.back() = {blocks, blocks};
  for (int s = 0; s + 1 < stages; ++s) {
    const int begin = window[s].second;
    int end = begin;
    while (end < blocks - (stages - 1 - s) && cost(s, begin, end + 1) < limit) ++end;
    window[s + 1].second = std::max(end, s + 1);
  }
  for (int s = stages - 1; s > 0; --s) {
    const int end = window[s + 1].first;
    int begin = end;
    while (begin > s && cost(s, begin - 1, end) < limit) --begin;
    window[s].first = std::max(begin, s);
    if (window[s].first > window[s].second) return {};
  }
  return window;
}

CheapCuts cheap_cuts(const CutWindow& window, const StageCost& cost, double limit, std::size_t most) {
  constexpr double none = std::numeric_limits<double>::infinity();
  const int stages = static_cast<int>(window.size()) - 1;
  const auto width = [&](int s) { return window[s].second - window[s].first + 1; };
  // The cost of each stage, and by the block at which it begins the least cost of it and those
  // behind it.
  std::vector<std::vector<double>> costs(static_cast<std::size_t>(stages)), least(static_cast<std::size_t>(stages) + 1);
  least.back() = {0.0};
  for (int s = stages - 1; s >= 0; --s) {
    costs[s].assign(static_cast<std::size_t>(width(s)) * static_cast<std::size_t>(width(s + 1)), none);
    least[s].assign(static_cast<std::size_t>(width(s)), none);
    for (int b = 0; b < width(s); ++b)
      for (int e = 0; e < width(s + 1); ++e) {
        const int begin = window[s].first + b, end = window[s + 1].first + e;
        if (end <= begin || least[s + 1][e] >= limit) continue;
        const double own = cost(s, begin, end);
        costs[s][static_cast<std::size_t>(b) * width(s + 1) + e] = own;
        least[s][b] = std::min(least[s][b], std::max(own, least[s + 1][e]));
      }
  }
  CheapCuts found{
      .cuts = {}, .least = least[0][0] < limit ? least[0][0] : none, .all = true, .window = {}, .costs = {}};
  std::vector<int> cut;
  const auto visit = [&](auto&& self, int s, int b) -> void {
    if (s == stages) {
      if (found.cuts.size() == most)
        found.all = false;
      else
        found.cuts.push_back(cut);
      return;
    }
    // The cheapest continuation first.
    std::vector<std::pair<double, int>> ends;
    for (int e = 0; e < width(s + 1); ++e) {
      const double both = std::max(costs[s][static_cast<std::size_t>(b) * width(s + 1) + e], least[s + 1][e]);
      if (both < limit) ends.emplace_back(both, e);
    }
    std::ranges::stable_sort(ends, {}, &std::pair<double, int>::first);
    for (const auto& [both, e] : ends) {
      if (!found.all) return;
      cut.push_back(window[s + 1].first + e - (window[s].first + b));
      self(self, s + 1, e);
      cut.pop_back();
    }
  };
  visit(visit, 0, 0);
  found.window = window;
  found.costs = std::move(costs);
  return found;
}

double CheapCuts::costliest(std::span<const int> blocks) const {
  constexpr double none = std::numeric_limits<double>::infinity();
  double most = 0.0;
  int end = window.front().first;
  for (std::size_t s = 0; s < blocks.size() && most < none; ++s) {
    const int begin = std::exchange(end, end + blocks[s]);
    const auto& [first, last] = window[s + 1];
    if (end < first || end > last) return none;
    const std::size_t width = static_cast<std::size_t>(last - first) + 1;
    most = std::max(most, costs[s][static_cast<std::size_t>(begin - window[s].first) * width +
                                   static_cast<std::size_t>(end - first)]);
  }
  return most;
}

std::vector<int> cut_stages(std::span<const Seconds> blocks, int stages) {
  PARPLAN_ASSERT(stages >= 1 && static_cast<std::size_t>(stages) <= blocks.size(),
                 fmt::format("{} stages, {} blocks", stages, blocks.size()));
  std::vector<Seconds> prefix(blocks.size() + 1);
  std::partial_sum(blocks.begin(), blocks.end(), prefix.begin() + 1);
  const std::vector<std::vector<StageOption>> alike(static_cast<std::size_t>(stages),
                                                    {StageOption{.seconds = prefix, .state = {}, .saved = {}}});
  return cut_stages(alike)->blocks;
}

namespace {

// Multiply-adds of a block's matrix products for one token, counted as in model_flops_per_sample:
// linear layers by their weights, attention by scores and values, not halved for causality.
double block_weight(const OpGraph& graph, const Block& block) {
  double weight = 0;
  for (int i = block.first_op; i < block.last_op; ++i) {
    const ModelProducts products = model_products(graph, graph.ops[i]);
    weight += products.pairs / static_cast<double>(graph.sequence) * products.multiply_adds;
  }
  return weight;
}

}  // namespace

std::vector<int> even_stages(const OpGraph& graph, int stages) {
  std::vector<Seconds> blocks;  // at one multiply-add per second
  for (const Block& block : graph.blocks) blocks.push_back(Seconds(block_weight(graph, block)));
  return cut_stages(blocks, stages);
}

}  // namespace parplan
