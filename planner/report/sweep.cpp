#include "planner/report/sweep.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include <fmt/format.h>

#include "planner/base/text.h"
#include "planner/cluster/price_and_power.h"
#include "planner/graph/trained_file.h"
#include "planner/report/csv.h"
#include "planner/report/error_band.h"
#include "planner/report/plan_row.h"
#include "planner/report/table.h"

namespace parplan {
namespace {

constexpr double seconds_per_day = 86400.0;

RowSubject subject_of(const SweepPoint& point) {
  return {.rank = 1,
          .model = point.model,
          .cluster = point.planned(),
          .training = point.training,
          .spec = point.best->spec,
          .result = point.best->result};
}

// Everything that a column reads.
struct PointView {
  const Sweep& sweep;
  const SweepPoint& point;
  Spending spent;
  SweepMarks marked;
};

struct PointColumn {
  std::string_view key;
  std::string_view unit;
  std::string_view description;
  Json (*value)(const PointView& view) = nullptr;
};

Json of_plan(const PointView& view, bool value) { return view.point.best ? Json(value) : Json(nullptr); }

// The columns before the plan's row.
constexpr std::array what_was_asked = {
    PointColumn{"cluster", "", "name of the cluster", [](const PointView& v) { return Json(v.point.cluster.name); }},
    PointColumn{"device", "", "kind of device; of unlike groups all, joined by +",
                [](const PointView& v) { return Json(device_name(v.point.cluster)); }},
    PointColumn{"cluster_devices", "", "devices that the point offers; a plan may use fewer",
                [](const PointView& v) { return Json(v.point.cluster.devices()); }},
    PointColumn{"sequence_length", "tokens", "tokens of a sequence",
                [](const PointView& v) { return Json(v.point.training.sequence_length); }},
};

// The columns after the plan's row.
constexpr std::array what_it_takes = {
    PointColumn{"price_per_hour", "currency/h",
                "price of an hour of the devices that the plan uses; null without prices",
                [](const PointView& v) { return optional_number(v.spent.price_per_hour); }},
    PointColumn{"power_w", "W",
                "what the boards of these devices are rated for, together; null where a device does not say",
                [](const PointView& v) { return optional_number(v.spent.power_w); }},
    PointColumn{"cost_per_million_tokens", "currency", "price of training on a million tokens",
                [](const PointView& v) { return optional_number(v.spent.cost_per_million_tokens); }},
    PointColumn{"tokens", "tokens", "tokens to train on; null where none were asked for, and then so is what they take",
                [](const PointView& v) { return v.sweep.tokens ? Json(*v.sweep.tokens) : Json(nullptr); }},
    PointColumn{"steps", "", "optimizer steps, rounded up to whole ones",
                [](const PointView& v) { return v.spent.steps ? Json(*v.spent.steps) : Json(nullptr); }},
    PointColumn{"days", "d", "tokens / tokens_per_s / goodput / 86400, not rounded",
                [](const PointView& v) { return optional_number(v.spent.days); }},
    PointColumn{"device_hours", "h", "days * 24 * devices",
                [](const PointView& v) { return optional_number(v.spent.device_hours); }},
    PointColumn{"cost", "currency", "days * 24 * price_per_hour",
                [](const PointView& v) { return optional_number(v.spent.cost); }},
    PointColumn{"energy_kwh", "kWh",
                "days * 24 * power_w / 1000: at most what the devices take; hosts, network and cooling are not in it",
                [](const PointView& v) { return optional_number(v.spent.energy_kwh); }},
    PointColumn{"certified", "", "nothing in the plan's search space is better by the objective under the cost model",
                [](const PointView& v) { return of_plan(v, v.point.search.certified); }},
    PointColumn{"gap", "", "else: what the plan takes, by the objective, over the smallest bound left, minus one",
                [](const PointView& v) { return optional_number(v.point.search.gap); }},
    PointColumn{"knee", "",
                "of the points that differ in devices alone, the one beyond which more devices pay off ever less",
                [](const PointView& v) { return of_plan(v, v.marked.knee); }},
    PointColumn{"pareto", "",
                "of the points of equal batch and sequence, none is both as fast and as cheap, and better in one",
                [](const PointView& v) { return of_plan(v, v.marked.pareto); }},
    PointColumn{"reason", "", "why there is no plan",
                [](const PointView& v) { return v.point.best ? Json(nullptr) : Json(v.point.reason); }},
    PointColumn{"cut_gap", "", "the same as gap over all cuts of stages, where some that could be better were left",
                [](const PointView& v) { return optional_number(v.point.search.cut_gap); }},
    PointColumn{
        "space", "", "what was searched, in words",
        [](const PointView& v) { return v.point.search.space.empty() ? Json(nullptr) : Json(v.point.search.space); }},
    PointColumn{"goodput", "", "share of the time in which steps are made (--goodput)",
                [](const PointView& v) { return json_number(v.sweep.goodput); }},
};

// The value of a plan's column for a point without a plan.
Json known_without_plan(const SweepPoint& point, std::string_view key) {
  if (key == "engine") return point.training.engine.name;
  if (key == "precision") return name(stated_precision(point.training));
  if (key == "global_batch") return point.training.global_batch;
  if (key == "currency")
    if (const std::optional<std::string> known = currency(point.cluster);
        known && hourly_price(point.cluster, point.cluster.devices()))
      return *known;
  return nullptr;
}

// Points with the same training, and those of them that differ in nothing but the number of
// devices.
std::tuple<std::int64_t, std::int64_t> workload_of(const SweepPoint& point) {
  return {point.training.global_batch, point.training.sequence_length};
}
std::tuple<std::int64_t, std::int64_t, std::string, std::string> series_of(const SweepPoint& point) {
  return {point.training.global_batch, point.training.sequence_length, point.cluster.name, device_name(point.cluster)};
}

template <class Key>
std::map<Key, std::vector<std::size_t>> planned_points_by(const Sweep& sweep, Key (*key)(const SweepPoint&)) {
  std::map<Key, std::vector<std::size_t>> places;
  for (std::size_t i = 0; i < sweep.points.size(); ++i)
    if (sweep.points[i].best) places[key(sweep.points[i])].push_back(i);
  return places;
}

// Three significant digits, or all digits before the point with separators of thousands: "0.0123",
// "1,234,567 USD".
std::string amount(double value, const std::string& unit) {
  std::string text = format_count(value);
  if (value >= 999.5)
    for (std::size_t at = text.size(); at > 3; at -= 3) text.insert(at - 3, ",");
  return unit.empty() ? text : text + " " + unit;
}

}  // namespace

Spending spending(const Sweep& sweep, const SweepPoint& point) {
  Spending spent;
  if (!point.best) return spent;
  const int devices = point.best->spec.mesh.size();
  const double tokens_per_s = tokens_per_second(subject_of(point));
  spent.price_per_hour = hourly_price(point.planned(), devices);
  if (const std::optional<Watts> power = board_power(point.planned(), devices)) spent.power_w = power->value;
  if (spent.price_per_hour)
    spent.cost_per_million_tokens = *spent.price_per_hour / tokens_per_s / sweep.goodput / 3600.0 * 1e6;
  if (!sweep.tokens) return spent;
  const std::int64_t step = point.training.global_batch * point.training.sequence_length;
  spent.steps = *sweep.tokens / step + (*sweep.tokens % step > 0 ? 1 : 0);
  spent.days = static_cast<double>(*sweep.tokens) / tokens_per_s / sweep.goodput / seconds_per_day;
  spent.device_hours = *spent.days * 24.0 * devices;
  if (spent.price_per_hour) spent.cost = *spent.days * 24.0 * *spent.price_per_hour;
  if (spent.power_w) spent.energy_kwh = *spent.days * 24.0 * *spent.power_w / 1000.0;
  return spent;
}

FrontMeasure front_measure(const Sweep& sweep) {
  const bool priced = std::ranges::all_of(sweep.points, [](const SweepPoint& point) {
    return !point.best || hourly_price(point.planned(), point.best->spec.mesh.size()).has_value();
  });
  return priced ? FrontMeasure::cost : FrontMeasure::device_hours;
}

std::vector<bool> pareto_front(std::span<const std::array<double, 2>> points) {
  std::vector<std::size_t> order(points.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return points[a] < points[b]; });
  std::vector<bool> front(points.size(), false);
  const std::array<double, 2>* last = nullptr;  // on the front, the one with the largest x so far
  for (const std::size_t place : order) {
    const std::array<double, 2>& point = points[place];
    if (last != nullptr && point != *last && point[1] >= (*last)[1]) continue;
    front[place] = true;
    last = &point;
  }
  return front;
}

std::optional<std::size_t> knee(std::span<const std::array<double, 2>> curve) {
  if (curve.size() < 3) return std::nullopt;
  const auto [x0, y0] = curve.front();
  const auto [x1, y1] = curve.back();
  if (!(x1 > x0) || !(y1 > y0)) return std::nullopt;
  std::vector<double> above;  // the distance of each point above the chord, along y
  for (const auto& [x, y] : curve) above.push_back((y - y0) / (y1 - y0) - (x - x0) / (x1 - x0));
  const auto farthest = std::ranges::max_element(above);
  const double mean_step = 1.0 / static_cast<double>(curve.size() - 1);
  if (!(*farthest > mean_step)) return std::nullopt;
  return static_cast<std::size_t>(farthest - above.begin());
}

std::vector<SweepMarks> marks(const Sweep& sweep) {
  std::vector<SweepMarks> marked(sweep.points.size());
  const FrontMeasure measure = front_measure(sweep);
  const auto rate = [&](std::size_t i) { return tokens_per_second(subject_of(sweep.points[i])); };
  for (const auto& [workload, places] : planned_points_by(sweep, workload_of)) {
    std::vector<std::array<double, 2>> points;
    for (const std::size_t i : places) {
      const SweepPoint& point = sweep.points[i];
      const int devices = point.best->spec.mesh.size();
      const double spent_per_hour = measure == FrontMeasure::cost ? *hourly_price(point.planned(), devices) : devices;
      points.push_back({-rate(i), spent_per_hour / rate(i)});
    }
    const std::vector<bool> front = pareto_front(points);
    for (std::size_t p = 0; p < places.size(); ++p) marked[places[p]].pareto = front[p];
  }
  for (auto [series, places] : planned_points_by(sweep, series_of)) {
    std::ranges::stable_sort(places, {}, [&](std::size_t i) { return sweep.points[i].cluster.devices(); });
    std::vector<std::array<double, 2>> curve;
    for (const std::size_t i : places)
      curve.push_back({static_cast<double>(sweep.points[i].cluster.devices()), rate(i)});
    if (const std::optional<std::size_t> found = knee(curve)) marked[places[*found]].knee = true;
  }
  return marked;
}

std::vector<SweepColumn> sweep_columns() {
  std::vector<SweepColumn> all;
  const auto add = [&](const auto& column) {
    all.push_back({std::string(column.key), std::string(column.unit), std::string(column.description)});
  };
  for (const PointColumn& column : what_was_asked) add(column);
  for (const Column& column : columns()) add(column);
  for (const PointColumn& column : what_it_takes) add(column);
  return all;
}

std::vector<Json> sweep_rows(const Sweep& sweep) {
  const std::vector<SweepMarks> marked = marks(sweep);
  std::vector<Json> rows;
  for (std::size_t i = 0; i < sweep.points.size(); ++i) {
    const SweepPoint& point = sweep.points[i];
    const PointView view{.sweep = sweep, .point = point, .spent = spending(sweep, point), .marked = marked[i]};
    Json& object = rows.emplace_back(Json::object());
    for (const PointColumn& column : what_was_asked) object[std::string(column.key)] = column.value(view);
    for (const Column& column : columns())
      object[std::string(column.key)] =
          point.best ? column.value(subject_of(point)) : known_without_plan(point, column.key);
    for (const PointColumn& column : what_it_takes) object[std::string(column.key)] = column.value(view);
  }
  return rows;
}

namespace {

constexpr const char* energy_is_an_upper_bound =
    "energy is the rated power of the boards times time: at most what the devices take; hosts, network and cooling are "
    "not in it";

bool any_plan(const Sweep& sweep) {
  return std::ranges::any_of(sweep.points, [](const SweepPoint& point) { return point.best.has_value(); });
}

}  // namespace

std::vector<std::string> assumptions(const Sweep& sweep) {
  if (!any_plan(sweep)) return {};
  std::vector<std::string> notes{
      "tokens per second are those of a steady step: restarts, evaluation, checkpoints and loading of data are not in "
      "them"};
  if (sweep.goodput < 1.0)
    notes.back() +=
        fmt::format("; they are taken to leave {:.4g} % of the time to steps (goodput)", 100.0 * sweep.goodput);
  if (sweep.tokens)
    notes.push_back(fmt::format("days are tokens / tokens_per_s{} / 86400, not rounded up to whole steps",
                                sweep.goodput < 1.0 ? " / goodput" : ""));
  notes.emplace_back(
      "only devices that a plan uses are counted; those that it leaves idle are taken to be free for others");
  notes.emplace_back(energy_is_an_upper_bound);
  const bool several_sizes = std::ranges::any_of(planned_points_by(sweep, series_of),
                                                 [](const auto& series) { return series.second.size() > 1; });
  if (several_sizes)
    notes.emplace_back(
        "knee is the point farthest above the chord of tokens per second over devices, both scaled to 0..1 (Kneedle at "
        "sensitivity 1: Satopaa et al. 2011); it depends "
        "on the sizes swept");
  if (several_sizes && std::ranges::none_of(marks(sweep), &SweepMarks::knee))
    notes.emplace_back(
        "no knee: over the sizes swept speed grows nearly in proportion or not at all, or they are too few");
  const SweepPoint& first = sweep.points.front();
  if (std::ranges::any_of(sweep.points, [&](const SweepPoint& p) {
        return stated_precision(p.training) != stated_precision(first.training);
      }))
    notes.emplace_back("precision differs between devices; its column says where");
  return notes;
}

std::vector<std::string> sweep_notes(const Sweep& sweep) {
  std::vector<std::string> notes = assumptions(sweep);
  if (notes.empty()) return notes;
  const bool says_energy = sweep.tokens && std::ranges::any_of(sweep.points, [&](const SweepPoint& point) {
                             return spending(sweep, point).energy_kwh.has_value();
                           });
  if (!says_energy) std::erase(notes, energy_is_an_upper_bound);
  notes.emplace_back(front_measure(sweep) == FrontMeasure::cost
                         ? "pareto weighs time against cost, among points of equal batch and sequence"
                         : "pareto weighs time against device-hours, among points of equal batch and sequence, for not "
                           "every device has a price");
  const auto open = std::ranges::count_if(
      sweep.points, [](const SweepPoint& point) { return point.best && !point.search.certified; });
  if (open > 0)
    notes.push_back(
        fmt::format("{} of {} points are not certified: a better plan may be left (certified and gap in JSON and CSV); "
                    "--max-candidates looks further",
                    open, sweep.points.size()));
  for (const SweepPoint& point : sweep.points)
    if (point.arranged && point.best) {
      const Cluster taken = first_nodes(point.planned(), point.best->spec.mesh.size());
      notes.push_back(fmt::format("of {} devices of {}, batch {}, sequence {}, the plan takes {}{}",
                                  point.cluster.devices(), point.cluster.name, point.training.global_batch,
                                  point.training.sequence_length, describe_groups(taken),
                                  taken.groups.size() > 1 ? " in this order" : " alone"));
    }
  return notes;
}

Json sweep_json(const Sweep& sweep) {
  Json json;
  json["schema"] = "parplan.sweep/1";
  json["tool"] = {{"name", "parplan"}, {"version", sweep.version}};
  const SweepPoint& first = sweep.points.front();
  json["inputs"]["model"] = {{"name", first.model.name}, {"parameters", first.model.parameters}};
  // Each kind of device of each cluster once, whatever the number of points that have it.
  json["inputs"]["devices"] = Json::array();
  for (const SweepPoint& point : sweep.points) {
    for (const NodeGroup& group : point.cluster.groups) {
      const Json device = {
          {"cluster", point.cluster.name},
          {"device", group.device.name},
          {"backend", name(group.device.backend)},
          {"memory_capacity_bytes", group.device.memory_capacity.count},
          {"power_w", group.device.power ? json_number(group.device.power->value) : Json(nullptr)},
          {"price_per_device_hour", group.price ? json_number(group.price->per_device_hour) : Json(nullptr)},
          {"currency", group.price ? Json(group.price->currency) : Json(nullptr)}};
      Json& known = json["inputs"]["devices"];
      if (std::ranges::find(known, device) == known.end()) known.push_back(device);
    }
  }
  json["inputs"]["training"] = {{"optimizer", name(first.training.optimizer)},
                                {"engine", first.training.engine.name},
                                {"trained", describe_trained(first.training)},
                                {"defaults", sweep.defaults}};
  json["inputs"]["objective"] = sweep.objective;
  json["inputs"]["tokens"] = sweep.tokens ? Json(*sweep.tokens) : Json(nullptr);
  json["inputs"]["goodput"] = json_number(sweep.goodput);
  json["columns"] = Json::array();
  for (const SweepColumn& column : sweep_columns())
    json["columns"].push_back({{"key", column.key},
                               {"unit", column.unit.empty() ? Json(nullptr) : Json(column.unit)},
                               {"description", column.description}});
  json["rows"] = sweep_rows(sweep);
  json["notes"] = sweep_notes(sweep);
  return json;
}

std::string sweep_csv(const Sweep& sweep) {
  std::vector<std::string> keys;
  for (const SweepColumn& column : sweep_columns()) keys.push_back(column.key);
  return write_csv(keys, sweep_rows(sweep));
}

namespace {

// How far measured steps are from such predictions: a line for each band that points have.
std::string band_lines(const Sweep& sweep) {
  struct Line {
    std::string words;
    std::vector<std::string> of;  // devices
  };
  std::vector<Line> lines;
  for (const SweepPoint& point : sweep.points) {
    if (!point.best) continue;
    const int devices = point.best->spec.mesh.size();
    const std::optional<StepBand> band = step_band(point.training.engine, point.planned(), devices);
    if (!band) continue;
    const std::string words = words_of(*band);
    auto line = std::ranges::find(lines, words, &Line::words);
    if (line == lines.end()) line = lines.insert(lines.end(), Line{.words = words, .of = {}});
    const std::string of = fmt::format("{}", devices);
    if (std::ranges::find(line->of, of) == line->of.end()) line->of.push_back(of);
  }
  std::string text;
  for (const Line& line : lines)
    text += lines.size() == 1 ? fmt::format("step: {}\n", line.words)
                              : fmt::format("step on {} device{}: {}\n", join(line.of),
                                            line.of == std::vector<std::string>{"1"} ? "" : "s", line.words);
  return text;
}

}  // namespace

std::string sweep_table(const Sweep& sweep) {
  const std::vector<SweepMarks> marked = marks(sweep);
  // Values that all rows share, or none has, get no column.
  const auto any = [&](auto predicate) { return std::ranges::any_of(sweep.points, predicate); };
  const auto differ = [&](auto value) {
    return any([&](const SweepPoint& point) { return value(point) != value(sweep.points.front()); });
  };
  const bool clusters = differ([](const SweepPoint& p) { return p.cluster.name; });
  const bool kinds = differ([](const SweepPoint& p) { return device_name(p.cluster); });
  const bool priced =
      any([](const SweepPoint& p) { return p.best && hourly_price(p.planned(), p.best->spec.mesh.size()); });
  const bool powered =
      any([](const SweepPoint& p) { return p.best && board_power(p.planned(), p.best->spec.mesh.size()); });

  struct TableColumn {
    std::string title;
    std::string (*text)(const PointView& view);
    bool shown;
  };
  const auto optional_amount = [](const std::optional<double>& value, const std::string& unit) {
    return value ? amount(*value, unit) : std::string("-");
  };
  const std::vector<TableColumn> table{
      {"cluster", [](const PointView& v) { return v.point.cluster.name; }, clusters},
      {"device", [](const PointView& v) { return device_name(v.point.cluster); }, kinds},
      {"layout",
       [](const PointView& v) {
         if (v.point.best) return layout_text(v.point.best->spec);
         return std::string(v.point.search.candidates > 0 ? "nothing fits" : "no plan");
       },
       true},
      {"devices", [](const PointView& v) { return fmt::format("{}", v.point.cluster.devices()); }, true},
      {"batch", [](const PointView& v) { return fmt::format("{}", v.point.training.global_batch); },
       differ([](const SweepPoint& p) { return p.training.global_batch; })},
      {"sequence", [](const PointView& v) { return fmt::format("{}", v.point.training.sequence_length); },
       differ([](const SweepPoint& p) { return p.training.sequence_length; })},
      {"step",
       [](const PointView& v) { return v.point.best ? format_duration(v.point.best->result.time.total()) : "-"; },
       true},
      {"tokens/s",
       [](const PointView& v) { return v.point.best ? amount(tokens_per_second(subject_of(v.point)), "") : "-"; },
       true},
      {"MFU",
       [](const PointView& v) {
         const Json mfu = v.point.best ? model_flops_utilization(subject_of(v.point)) : Json(nullptr);
         return mfu.is_null() ? "-" : format_share(mfu.get<double>(), 1.0);
       },
       true},
      {"memory peak",
       [](const PointView& v) { return v.point.best ? format_bytes(v.point.best->result.memory.peak()) : "-"; }, true},
  };
  std::vector<std::vector<std::string>> rows(1);
  int left = 0;
  for (const TableColumn& column : table) {
    if (!column.shown) continue;
    rows.front().push_back(column.title);
    if (column.title == "layout") left = static_cast<int>(rows.front().size());
  }
  if (sweep.tokens) rows.front().insert(rows.front().end(), {"days", "device-hours"});
  if (priced) rows.front().push_back(sweep.tokens ? "cost" : "cost of 1M tokens");
  if (powered && sweep.tokens) rows.front().push_back("energy");
  rows.front().push_back("marks");

  std::string reasons;
  for (std::size_t i = 0; i < sweep.points.size(); ++i) {
    const SweepPoint& point = sweep.points[i];
    const PointView view{.sweep = sweep, .point = point, .spent = spending(sweep, point), .marked = marked[i]};
    std::vector<std::string>& cells = rows.emplace_back();
    for (const TableColumn& column : table)
      if (column.shown) cells.push_back(column.text(view));
    if (sweep.tokens) {
      cells.push_back(optional_amount(view.spent.days, ""));
      cells.push_back(optional_amount(view.spent.device_hours, ""));
    }
    if (priced)
      cells.push_back(optional_amount(sweep.tokens ? view.spent.cost : view.spent.cost_per_million_tokens,
                                      currency(point.cluster).value_or("")));
    if (powered && sweep.tokens) cells.push_back(optional_amount(view.spent.energy_kwh, "kWh"));
    std::vector<std::string> words;
    if (view.marked.knee) words.emplace_back("knee");
    if (view.marked.pareto) words.emplace_back("front");
    cells.push_back(join(words, " "));
    if (!point.best)
      reasons += fmt::format("{} device{} of {}, batch {}, sequence {}: {}\n", point.cluster.devices(),
                             point.cluster.devices() == 1 ? "" : "s", point.cluster.name, point.training.global_batch,
                             point.training.sequence_length, point.reason);
  }
  return align_columns(rows, left) + reasons + band_lines(sweep);
}

}  // namespace parplan
