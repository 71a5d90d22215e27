#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "planner/base/units.h"
#include "planner/graph/op_graph.h"

namespace parplan {

// Blocks per stage, none empty, such that the slowest stage is as fast as possible, and among those
// cuts the one with the least sum of squares (so that slack is spread; ties go to shorter early
// stages). `1 <= stages <= blocks.size()`.
std::vector<int> cut_stages(std::span<const Seconds> blocks, int stages);

// One way in which a stage can hold blocks, as prefix sums over the model's blocks (one more than
// blocks): the time of a micro-batch, the bytes of state, and those saved for each micro-batch in
// flight. Without `state`, everything fits.
struct StageOption {
  std::span<const Seconds> seconds;
  std::span<const std::int64_t> state;
  std::span<const std::int64_t> saved;
  std::int64_t in_flight = 0;
  // Any blocks fit with at most `surely_fits` bytes of these and do not fit with more than
  // `may_fit`; in between `fits` decides. If it accepts some blocks, it must accept fewer of them,
  // too.
  std::int64_t surely_fits = 0;
  std::int64_t may_fit = 0;
  std::function<bool(std::size_t begin, std::size_t end)> fits = nullptr;
};
struct StageCut {
  std::vector<int> blocks;   // of each stage, at least one
  std::vector<int> options;  // the option of each stage
  bool operator==(const StageCut&) const = default;
};
// The cut whose slowest stage is the fastest, and among those the one with the least sum of
// squares, for stages that each choose between options (heterogeneous devices, more or less
// recompute). Nothing where no cut fits.
std::optional<StageCut> cut_stages(std::span<const std::vector<StageOption>> stages);
// Whether any cut fits.
bool some_cut_fits(std::span<const std::vector<StageOption>> stages);
// The fastest of the options with which the blocks fit on a stage.
std::optional<int> fastest_option(const std::vector<StageOption>& options, std::size_t begin, std::size_t end);
// The same for each stage of a cut; nothing where the blocks of a stage fit with none.
std::optional<std::vector<int>> fastest_options(std::span<const std::vector<StageOption>> stages,
                                                std::span<const int> blocks);

// What blocks [begin, end) on a stage cost.
using StageCost = std::function<double(int stage, int begin, int end)>;
// For each stage, the first and the last block at which it may begin if every stage is to cost less
// than a limit; one more for the end. Empty where no cut does. The cost must never fall where a
// stage takes over blocks of its neighbours.
using CutWindow = std::vector<std::pair<int, int>>;
CutWindow cut_window(int blocks, int stages, const StageCost& cost, double limit);

struct CheapCuts {
  std::vector<std::vector<int>> cuts;  // blocks of each stage
  // The least that the costliest stage of any cut within the limit costs; infinite where there is
  // no such cut.
  double least = 0.0;
  bool all = true;  // whether `cuts` are all of them

  // The cost of the costliest stage of a cut; infinite where that is not below the limit.
  double costliest(std::span<const int> blocks) const;

  // By stage and the blocks at which it begins and ends, as far as they are in the window; infinite
  // where the stages behind it cannot all be below the limit.
  CutWindow window;
  std::vector<std::vector<double>> costs;
};
// Cuts in the window whose every stage costs less than the limit: all, where they are at most
// `most`, and else as many of them.
CheapCuts cheap_cuts(const CutWindow& window, const StageCost& cost, double limit, std::size_t most);

// The default cut without a cost model: blocks weighted by the multiply-adds of their matrix
// products (an embedding look-up has none, the head has its vocabulary).
std::vector<int> even_stages(const OpGraph& graph, int stages);

}  // namespace parplan
