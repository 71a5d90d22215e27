#include "planner/calibrate/fit_calibration.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

#include <Eigen/Dense>
#include <fmt/format.h>

#include "planner/base/enum_index.h"
#include "planner/base/error.h"
#include "planner/base/text.h"
#include "planner/plan/parallel_spec_text.h"
#include "planner/suggest.h"

namespace parplan {
namespace {

using Shares = std::array<double, constant_count>;

// By so much a constant is moved to see how steps follow: far above what a simulation rounds.
constexpr double small_change = 0.02;
// A constant is fitted where 1 % of a step moves it by at most 10 %.
constexpr double least_reach = 0.1;
// Steps that are further from their measurement with the shares that fit best have another cause.
constexpr double explained = 0.02;
constexpr int most_rounds = 20;
constexpr double settled = 1e-5;  // of a share, from one round to the next

StepTime step_with(const MeasuredPlan& one, const Shares& shares) {
  Plan plan = *one.plan;
  for (const ClusterConstantRow& row : cluster_constants())
    if (const double share = shares[index_of(row.constant)]; share != 1.0)
      row.take(plan.cluster, plan.training.engine, share);
  return simulate_plan(*one.graph, plan).time;
}

// A round of the fit: the logarithms of measured over predicted steps.
struct Residuals {
  std::vector<StepTime> steps;
  Eigen::VectorXd logs;
  double squares() const { return logs.squaredNorm(); }
  // Whether steps are shorter than predicted: rates are then looked for that are higher.
  bool are_shorter() const { return logs.mean() < 0.0; }
};

Residuals residuals_of(std::span<const MeasuredPlan> measured, const Shares& shares) {
  Residuals result{.steps = {}, .logs = Eigen::VectorXd(static_cast<Eigen::Index>(measured.size()))};
  for (const MeasuredPlan& one : measured) {
    const auto row = static_cast<Eigen::Index>(result.steps.size());
    result.steps.push_back(step_with(one, shares));
    result.logs(row) = std::log(one.measured / result.steps.back().total());
  }
  return result;
}

// How the logarithms of steps fall where those of shares rise, or rise where they fall: the way
// that the residuals ask for, since a step may follow a rate one way alone. A row for each step, a
// column for each of `constants`.
Eigen::MatrixXd reach_of(std::span<const MeasuredPlan> measured, const Shares& shares, const Residuals& now,
                         std::span<const std::size_t> constants) {
  Eigen::MatrixXd reach(static_cast<Eigen::Index>(measured.size()), static_cast<Eigen::Index>(constants.size()));
  const double change = now.are_shorter() ? small_change : -small_change;
  for (std::size_t c = 0; c < constants.size(); ++c) {
    Shares changed = shares;
    changed[constants[c]] *= std::exp(change);
    for (std::size_t i = 0; i < measured.size(); ++i)
      reach(static_cast<Eigen::Index>(i), static_cast<Eigen::Index>(c)) =
          -std::log(step_with(measured[i], changed).total() / now.steps[i].total()) / change;
  }
  return reach;
}

// The constants that the steps can tell from one another.
std::vector<std::size_t> told_apart(const Eigen::MatrixXd& reach) {
  const Eigen::ColPivHouseholderQR<Eigen::MatrixXd> qr(reach);
  std::vector<std::size_t> constants;
  for (Eigen::Index k = 0; k < std::min(reach.rows(), reach.cols()); ++k)
    if (std::abs(qr.matrixR()(k, k)) >= least_reach)
      constants.push_back(static_cast<std::size_t>(qr.colsPermutation().indices()(k)));
  std::ranges::sort(constants);
  return constants;
}

void check_one_cluster(std::span<const MeasuredPlan> measured) {
  const Plan& first = *measured.front().plan;
  for (const MeasuredPlan& one : measured) {
    const Plan& plan = *one.plan;
    if (plan.cluster.calibrated)
      throw ConfigError(
          fmt::format("cluster '{}' is calibrated already ({}); a calibration is fitted to the rates of "
                      "files: give the layout with the cluster that it was made of",
                      plan.cluster.name, *plan.cluster.calibrated));
    if (plan.cluster.name != first.cluster.name || device_name(plan.cluster) != device_name(first.cluster))
      throw ConfigError(
          fmt::format("one measured step is of cluster '{}' with {}, another of '{}' with {}; steps are "
                      "fitted together where they ran on one cluster",
                      first.cluster.name, device_name(first.cluster), plan.cluster.name, device_name(plan.cluster)));
    if (plan.training.engine.name != first.training.engine.name)
      throw ConfigError(
          fmt::format("one measured step is of engine {}, another of {}; steps are fitted together "
                      "where one engine ran them",
                      first.training.engine.name, plan.training.engine.name));
  }
}

std::string percent(double share) {
  return fmt::format("{:.0f} %", 100.0 * share);
}

// Why no constant is fitted.
[[noreturn]] void refuse_independent(const Eigen::MatrixXd& reach) {
  std::vector<std::string> parts;
  for (const ClusterConstantRow& row : cluster_constants()) {
    const double most = reach.col(static_cast<Eigen::Index>(index_of(row.constant))).maxCoeff();
    parts.push_back(fmt::format("{} ({})", row.words, percent(std::max(most, 0.0))));
  }
  throw ConfigError(fmt::format(
      "the step hardly depends on {}: latencies decide it; give a step with more work, such as larger micro-batches",
      join(parts)));
}

// Why the fit is none: where constants are between their bounds, and no share of them comes nearer.
[[noreturn]] void refuse_unexplained(const MeasuredPlan& one, Seconds nearest, std::span<const std::size_t> fitted) {
  std::vector<std::string> words;
  for (const std::size_t constant : fitted) words.emplace_back(cluster_constants()[constant].words);
  throw ConfigError(fmt::format(
      "a step of {} is not explained by {}: the nearest that was found with other rates is {}; check the time, the "
      "batch, the precision, the engine and the layout",
      format_duration(one.measured), join(words, " and "), format_duration(nearest)));
}

// The same where one is held at its bound.
[[noreturn]] void refuse_unexplained(const MeasuredPlan& one, Seconds nearest, std::size_t held, double share,
                                     bool at_most) {
  const ClusterConstantRow& row = cluster_constants()[held];
  throw ConfigError(fmt::format(
      "a step of {} is not explained by {}: {} the rates in the files, {}, it would take {}; check the time, the "
      "batch, the precision, the engine and the layout",
      format_duration(one.measured), row.words, at_most ? fmt::format("with {:.2f} times", share) : "with a tenth of",
      at_most ? row.bound : "the least that is believed", format_duration(nearest)));
}

// Shares are used as they are written.
double rounded(double value) {
  return std::stod(fmt::format("{:.4g}", value));
}

FittedStep line_of(const MeasuredPlan& one, const FittedPlan& fitted) {
  const Plan& plan = *one.plan;
  return {.model = plan.model.name,
          .layout = layout_text(plan.spec),
          .devices = plan.spec.mesh.size(),
          .global_batch = plan.training.global_batch,
          .sequence_length = plan.training.sequence_length,
          .precision = stated_precision(plan.training),
          .measured = one.measured,
          .before = fitted.before.total(),
          .after = fitted.after.total()};
}

}  // namespace

CalibrationFit fit_calibration(std::span<const MeasuredPlan> measured) {
  check_one_cluster(measured);
  Shares most{}, shares{};
  shares.fill(1.0);
  std::vector<std::size_t> all;
  for (const ClusterConstantRow& row : cluster_constants()) {
    all.push_back(index_of(row.constant));
    const Plan& plan = *measured.front().plan;
    most[all.back()] = std::min(row.most(plan.cluster, stated_precision(plan.training)), most_share);
  }
  const Residuals before = residuals_of(measured, shares);
  const Eigen::MatrixXd reach_before = reach_of(measured, shares, before, all);
  const std::vector<std::size_t> fitted = told_apart(reach_before);
  if (fitted.empty()) refuse_independent(reach_before);

  Residuals now = before;
  std::vector<std::size_t> free = fitted;
  for (int round = 0; round < most_rounds; ++round) {
    const Eigen::MatrixXd reach = reach_of(measured, shares, now, fitted);
    // A constant at its bound is held there where the errors ask for more.
    free.clear();
    std::vector<Eigen::Index> columns;
    for (std::size_t c = 0; c < fitted.size(); ++c) {
      const auto column = static_cast<Eigen::Index>(c);
      const double wanted = -reach.col(column).dot(now.logs);  // above 0: a larger share
      const double share = shares[fitted[c]];
      if ((share >= most[fitted[c]] && wanted > 0.0) || (share <= least_share && wanted < 0.0)) continue;
      free.push_back(fitted[c]);
      columns.push_back(column);
    }
    if (free.empty()) break;
    // A longer step asks for smaller shares.
    const Eigen::MatrixXd of_free = reach(Eigen::all, columns);
    const Eigen::VectorXd change = of_free.colPivHouseholderQr().solve(-now.logs);
    // A kink (communication that begins to wait) may lie between: halve the way until it is better.
    bool moved = false;
    for (double way = 1.0; way > 0.05 && !moved; way /= 2.0) {
      Shares next = shares;
      for (std::size_t c = 0; c < free.size(); ++c)
        next[free[c]] = std::clamp(shares[free[c]] * std::exp(way * change(static_cast<Eigen::Index>(c))), least_share,
                                   most[free[c]]);
      Residuals then = residuals_of(measured, next);
      if (then.squares() >= now.squares()) continue;
      double largest = 0.0;
      for (const std::size_t c : free) largest = std::max(largest, std::abs(next[c] / shares[c] - 1.0));
      moved = largest > settled;
      shares = next;
      now = std::move(then);
      if (!moved) break;
    }
    if (!moved) break;
  }
  const double mean = now.logs.mean();
  Eigen::Index worst = 0;
  now.logs.cwiseAbs().maxCoeff(&worst);
  const MeasuredPlan& worst_step = measured[static_cast<std::size_t>(worst)];
  const Seconds nearest = now.steps[static_cast<std::size_t>(worst)].total();
  for (const std::size_t c : fitted) {
    const bool at_most = shares[c] >= most[c];
    if (!at_most && shares[c] > least_share) {
      shares[c] = std::clamp(rounded(shares[c]), least_share, most[c]);
      continue;
    }
    if (std::abs(mean) > explained && (mean < 0.0) == at_most)
      refuse_unexplained(worst_step, nearest, c, shares[c], at_most);
  }
  if (std::abs(mean) > explained) refuse_unexplained(worst_step, nearest, fitted);

  now = residuals_of(measured, shares);

  CalibrationFit fit;
  const Plan& first = *measured.front().plan;
  fit.calibration = {
      .cluster = first.cluster.name, .devices = {}, .engine = first.training.engine.name, .shares = {}, .steps = {}};
  for (const NodeGroup& group : first.cluster.groups)
    if (std::ranges::find(fit.calibration.devices, group.device.name) == fit.calibration.devices.end())
      fit.calibration.devices.push_back(group.device.name);
  // Errors of the steps are taken to be independent: the shares' follow from (reach' reach)^-1.
  std::erase_if(free, [&](std::size_t c) { return shares[c] >= most[c] || shares[c] <= least_share; });
  const Eigen::MatrixXd reach_after = reach_of(measured, shares, now, free);
  const Eigen::MatrixXd spread =
      free.empty() ? Eigen::MatrixXd() : Eigen::MatrixXd((reach_after.transpose() * reach_after).inverse());
  for (const std::size_t c : fitted) {
    fit.at_bound[c] = shares[c] >= most[c] || shares[c] <= least_share;
    const auto at = std::ranges::find(free, c) - free.begin();
    std::optional<double> moves;
    if (at < static_cast<std::ptrdiff_t>(free.size())) moves = rounded(std::sqrt(spread(at, at)));
    // Where the steps do not follow it (any more), they do not tell it.
    if (moves && !(*moves <= 1.0 / least_reach)) moves.reset();
    fit.calibration.shares.push_back(
        {.constant = cluster_constants()[c].constant, .share = shares[c], .percent_per_percent = moves});
  }
  for (std::size_t i = 0; i < measured.size(); ++i) {
    FittedPlan& one = fit.plans.emplace_back(
        FittedPlan{.measured = measured[i].measured, .before = before.steps[i], .after = now.steps[i]});
    for (const std::size_t c : all)
      one.reach[c] = reach_before(static_cast<Eigen::Index>(i), static_cast<Eigen::Index>(c));
    fit.calibration.steps.push_back(line_of(measured[i], one));
  }
  return fit;
}

}  // namespace parplan
