#include "planner/report/sweep.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "planner/base/file.h"
#include "planner/cluster/price_and_power.h"
#include "planner/report/plan_row.h"
#include "tests/planner/report/small_sweep.h"

namespace parplan {
namespace {

using testing::planned_point;
using testing::point_without_plan;
using testing::small_sweep;

using Point = std::array<double, 2>;

std::vector<std::string> keys_of(const Json& object) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : object.items()) keys.push_back(key);
  return keys;
}

TEST_CASE("what tokens take is tokens over speed, times devices, price and power") {
  // 4 devices of 250 W and 3 USD per hour; a step of 10 s trains 4 x 5 tokens: 2 tokens per second,
  // 345600 tokens in 172800 s.
  Sweep sweep = small_sweep();
  sweep.tokens = 345600;
  const Spending spent = spending(sweep, sweep.points.front());
  CHECK(spent.price_per_hour == 12.0);                   // 4 x 3
  CHECK(spent.power_w == 1000.0);                        // 4 x 250
  CHECK(spent.steps == 17280);                           // 345600 / 20
  CHECK(spent.days == 2.0);                              // 172800 / 86400
  CHECK(spent.device_hours == 192.0);                    // 2 x 24 x 4
  CHECK(spent.cost == 576.0);                            // 2 x 24 x 12
  CHECK(spent.energy_kwh == 48.0);                       // 2 x 24 x 1 kW
  CHECK(spent.cost_per_million_tokens == doctest::Approx(12.0 / 3600.0 * 500000.0));  // a million tokens take 500,000 s
  const Json row = sweep_rows(sweep).front();
  CHECK(row.at("cost_per_step").get<double>() == doctest::Approx(12.0 / 360.0));  // 10 s of 12 USD an hour
  CHECK(row.at("currency") == "USD");
  CHECK(row.at("cost") == 576.0);
}

TEST_CASE("goodput stretches days, cost and energy, and neither a step nor their number") {
  Sweep sweep = small_sweep();
  sweep.tokens = 345600;
  const Spending all = spending(sweep, sweep.points.front());
  sweep.goodput = 0.8;  // four fifths of the time
  const Spending less = spending(sweep, sweep.points.front());
  CHECK(less.days == doctest::Approx(2.5));  // 2 over 0.8
  CHECK(less.device_hours == doctest::Approx(240.0));
  CHECK(less.cost == doctest::Approx(720.0));
  CHECK(less.energy_kwh == doctest::Approx(60.0));
  CHECK(*less.cost_per_million_tokens == doctest::Approx(*all.cost_per_million_tokens / 0.8));
  CHECK(less.steps == all.steps);
  CHECK(sweep_rows(sweep).front().at("goodput") == 0.8);
  CHECK(sweep_rows(sweep).front().at("step_time_s") == 10.0);
  CHECK(sweep_json(sweep).at("inputs").at("goodput") == 0.8);
  CHECK(assumptions(sweep).front() ==
        "tokens per second are those of a steady step: restarts, evaluation, checkpoints and loading of data are not "
        "in them; they are taken to leave 80 % of the time to steps (goodput)");
}

TEST_CASE("steps are rounded up to whole ones, days are not") {
  Sweep sweep = small_sweep();
  sweep.tokens = 41;  // two steps of 20 tokens and one more
  CHECK(spending(sweep, sweep.points.front()).steps == 3);
  CHECK(spending(sweep, sweep.points.front()).days == 41.0 / 2.0 / 86400.0);
  sweep.tokens = 40;
  CHECK(spending(sweep, sweep.points.front()).steps == 2);
}

TEST_CASE("without tokens, prices or power what rests on them is null") {
  Sweep sweep = small_sweep();
  sweep.tokens = std::nullopt;
  Json row = sweep_rows(sweep).front();
  for (const char* key : {"tokens", "steps", "days", "device_hours", "cost", "energy_kwh"}) {
    INFO(key);
    CHECK(row.at(key).is_null());
  }
  CHECK(row.at("price_per_hour") == 12.0);
  sweep.tokens = 20;
  sweep.points.front().cluster.groups.front().price.reset();
  row = sweep_rows(sweep).front();
  for (const char* key : {"price_per_hour", "cost_per_step", "cost_per_million_tokens", "cost", "currency"}) {
    INFO(key);
    CHECK(row.at(key).is_null());
  }
  CHECK(row.at("days").is_number());
  CHECK(row.at("energy_kwh").is_number());
  sweep.points.front().cluster.groups.front().device.power.reset();
  row = sweep_rows(sweep).front();
  CHECK(row.at("power_w").is_null());
  CHECK(row.at("energy_kwh").is_null());
  CHECK(row.at("device_hours").is_number());
}

TEST_CASE("of unlike devices each costs its own price and power, and only those that the plan uses") {
  Cluster cluster = small_sweep().points.front().cluster;  // 4 devices at 3 USD, 250 W
  cluster.groups.push_back(cluster.groups.front());
  cluster.groups.back().price = Price{5.0, "USD"};
  cluster.groups.back().device.power = Watts(400.0);
  CHECK(hourly_price(cluster, 8) == 32.0);  // 4 x 3 + 4 x 5
  CHECK(hourly_price(cluster, 6) == 22.0);  // 4 x 3 + 2 x 5
  CHECK(hourly_price(cluster, 3) == 9.0);
  CHECK(board_power(cluster, 6) == Watts(1800.0));  // 4 x 250 + 2 x 400
  CHECK(devices_of_group(cluster, 0, 6) == 4);
  CHECK(devices_of_group(cluster, 1, 6) == 2);
  CHECK(devices_of_group(cluster, 1, 3) == 0);
  // The price of the second kind is missing: the cost is known as long as no device of that kind is
  // used.
  cluster.groups.back().price.reset();
  CHECK(hourly_price(cluster, 4) == 12.0);
  CHECK_FALSE(hourly_price(cluster, 5).has_value());
  cluster.groups.back().device.power.reset();
  CHECK(board_power(cluster, 4) == Watts(1000.0));
  CHECK_FALSE(board_power(cluster, 5).has_value());
}

TEST_CASE("prices in two currencies are not added") {
  Cluster cluster = small_sweep().points.front().cluster;
  CHECK(currency(cluster) == "USD");
  CHECK_FALSE(problem_with_prices(cluster).has_value());
  cluster.groups.push_back(cluster.groups.front());
  cluster.groups.back().device.name = "crate";
  cluster.groups.back().price = Price{2.5, "EUR"};
  CHECK_FALSE(currency(cluster).has_value());
  CHECK_FALSE(hourly_price(cluster, 8).has_value());
  CHECK(problem_with_prices(cluster) ==
        "cluster 'four': box costs 3 USD and crate costs 2.5 EUR, and currencies cannot be added; give all prices in "
        "one currency");
}

TEST_CASE("the Pareto front is what no other point beats") {
  std::mt19937 random(20240607);
  for (int round = 0; round < 400; ++round) {
    // Few values, to produce ties.
    std::uniform_int_distribution<int> coordinate(0, round % 2 == 0 ? 5 : 1000);
    std::vector<Point> points(static_cast<std::size_t>(round % 23));
    for (Point& point : points)
      point = {static_cast<double>(coordinate(random)), static_cast<double>(coordinate(random))};
    const std::vector<bool> front = pareto_front(points);
    for (std::size_t i = 0; i < points.size(); ++i) {
      bool beaten = false;
      for (const Point& other : points)
        beaten = beaten || (other[0] <= points[i][0] && other[1] <= points[i][1] &&
                            (other[0] < points[i][0] || other[1] < points[i][1]));
      INFO("seed 20240607, round " << round << ", point " << i << ": " << points[i][0] << ", " << points[i][1]);
      CHECK(front[i] == !beaten);
    }
  }
}

TEST_CASE("the knee is the point farthest above the chord, if it is so by more than the mean step") {
  std::mt19937 random(20110620);
  int found = 0;
  int straight = 0;
  for (int round = 0; round < 2000; ++round) {
    std::vector<Point> curve;
    const double bend = std::uniform_real_distribution<double>(0.05, 1.5)(random);
    double x = 1.0;
    std::uniform_real_distribution<double> more(0.01, 1.0);
    for (int i = 0; i < 3 + round % 9; ++i) {
      x += more(random);
      curve.push_back({x, std::pow(x, bend) + 0.01 * i});
    }
    // In the square from (0, 0) to (1, 1): the distance from its diagonal by the area of a
    // triangle, which is half of diagonal times height.
    std::vector<double> height;
    for (const Point& point : curve) {
      const double u = (point[0] - curve.front()[0]) / (curve.back()[0] - curve.front()[0]);
      const double v = (point[1] - curve.front()[1]) / (curve.back()[1] - curve.front()[1]);
      height.push_back((1.0 * v - u * 1.0) / std::sqrt(2.0));
    }
    // Both axes return to the diagonal at the end, where the height is 0.
    const std::size_t farthest = static_cast<std::size_t>(std::ranges::max_element(height) - height.begin());
    const double wanted = 1.0 / static_cast<double>(curve.size() - 1) / std::sqrt(2.0);
    INFO("seed 20110620, round " << round);
    if (std::abs(height[farthest] - wanted) < 1e-9) continue;
    if (height[farthest] > wanted) {
      ++found;
      CHECK(knee(curve) == farthest);
    } else {
      ++straight;
      CHECK_FALSE(knee(curve).has_value());
    }
  }
  CHECK(found > 50);
  CHECK(straight > 50);
}

TEST_CASE("the knee of Amdahl's law is where its chord's slope is") {
  // Speed x / (1 + s (x - 1)) with s = 0.1, from 1 to 16: speeds 1 and 6.4. The distance from the
  // chord is largest where the derivative 0.9 / (0.9 + 0.1 x)^2 is 5.4 / 15: x = 10 (sqrt(2.5) -
  // 0.9) = 6.81; of whole numbers 7.
  std::vector<Point> curve;
  for (int x = 1; x <= 16; ++x) curve.push_back({static_cast<double>(x), x / (1.0 + 0.1 * (x - 1))});
  REQUIRE(knee(curve).has_value());
  CHECK(curve[*knee(curve)][0] == 7.0);
}

TEST_CASE("what has no bend has no knee") {
  CHECK_FALSE(knee(std::vector<Point>{}).has_value());
  CHECK_FALSE(knee(std::vector<Point>{{1, 1}, {2, 5}}).has_value());
  CHECK_FALSE(knee(std::vector<Point>{{8, 80}, {16, 160}, {32, 320}}).has_value());    // doubling doubles
  CHECK_FALSE(knee(std::vector<Point>{{8, 80}, {16, 160}, {32, 640}}).has_value());    // ever better
  CHECK_FALSE(knee(std::vector<Point>{{8, 80}, {16, 80}, {32, 80}}).has_value());      // nothing gained
  CHECK_FALSE(knee(std::vector<Point>{{8, 80}, {16, 156}, {32, 300}}).has_value());    // nearly in proportion
  CHECK(knee(std::vector<Point>{{8, 80}, {16, 150}, {32, 160}}) == 1);
}

TEST_CASE("points are marked among those that train the same, knees along one cluster's sizes") {
  Sweep sweep;
  // tokens/s are 20 over the step: 4, 11.4, 12.5 and, on another batch, half of that.
  sweep.points = {planned_point("four", 1, 5.0), planned_point("four", 2, 1.75), planned_point("four", 4, 1.6),
                  planned_point("four", 4, 1.6)};
  sweep.points.back().training.global_batch = 2;
  const std::vector<SweepMarks> marked = marks(sweep);
  // 12 USD per hour for each node of 4: 1 node 12/4 = 3, 2 nodes 24/11.4 = 2.1, 4 nodes 48/12.5 =
  // 3.84 per hour and token per second.
  CHECK_FALSE(marked[0].pareto);  // slower and more expensive than the second
  CHECK(marked[1].pareto);
  CHECK(marked[2].pareto);  // more expensive, and faster
  CHECK(marked[3].pareto);  // alone with its batch
  // From (4, 4) to (16, 12.5) the second lies at (1/3, 0.87): 0.54 above, more than the mean step
  // of 1/2.
  CHECK_FALSE(marked[0].knee);
  CHECK(marked[1].knee);
  CHECK_FALSE(marked[2].knee);
  CHECK_FALSE(marked[3].knee);
}

TEST_CASE("where a price is missing the front weighs device-hours") {
  Sweep sweep;
  sweep.points = {planned_point("four", 1, 5.0), planned_point("five", 1, 5.0)};
  sweep.points.back().cluster.groups.front().price = Price{7.0, "USD"};
  CHECK(front_measure(sweep) == FrontMeasure::cost);
  CHECK(marks(sweep)[0].pareto);
  CHECK_FALSE(marks(sweep)[1].pareto);  // as fast, and more expensive
  sweep.points.front().cluster.groups.front().price.reset();
  CHECK(front_measure(sweep) == FrontMeasure::device_hours);
  CHECK(marks(sweep)[0].pareto);
  CHECK(marks(sweep)[1].pareto);  // as fast on as many devices
  CHECK(sweep_notes(sweep).back() ==
        "pareto weighs time against device-hours, among points of equal batch and sequence, for not every device has a "
        "price");
  // A point without a plan has no price to miss.
  sweep.points.front() = point_without_plan("four");
  sweep.points.front().cluster.groups.front().price.reset();
  CHECK(front_measure(sweep) == FrontMeasure::cost);
}

TEST_CASE("a point without a plan says why and keeps what was asked") {
  Sweep sweep = small_sweep();
  sweep.points.push_back(point_without_plan("four"));
  const Json row = sweep_rows(sweep).back();
  CHECK(row.at("cluster") == "four");
  CHECK(row.at("cluster_devices") == 4);
  CHECK(row.at("global_batch") == 4);
  CHECK(row.at("sequence_length") == 5);
  CHECK(row.at("reason") == "none of 12 candidates fits in 1000 B of memory a device");
  for (const char* key :
       {"rank", "devices", "step_time_s", "tokens_per_s", "days", "cost", "knee", "pareto", "certified"}) {
    INFO(key);
    CHECK(row.at(key).is_null());
  }
  CHECK(keys_of(row) == keys_of(sweep_rows(sweep).front()));
  CHECK(sweep_rows(sweep).front().at("reason").is_null());
}

TEST_CASE("a row is the plan's row between what was asked and what it takes, a column a key") {
  const Sweep sweep = small_sweep();
  std::vector<std::string> keys;
  for (const SweepColumn& column : sweep_columns()) {
    INFO(column.key);
    CHECK_FALSE(column.description.empty());
    CHECK(std::ranges::find(keys, column.key) == keys.end());
    keys.push_back(column.key);
  }
  const Json row = sweep_rows(sweep).front();
  CHECK(keys_of(row) == keys);
  const SweepPoint& point = sweep.points.front();
  const Json of_plan = parplan::row({.rank = 1,
                                     .model = point.model,
                                     .cluster = point.cluster,
                                     .training = point.training,
                                     .spec = point.best->spec,
                                     .result = point.best->result});
  for (const auto& [key, value] : of_plan.items()) CHECK(row.at(key) == value);
}

TEST_CASE("JSON names its schema, devices with prices once, columns and rows") {
  Sweep sweep = small_sweep();
  sweep.points.push_back(planned_point("four", 2, 4.0));
  sweep.tokens = 1000;
  const Json json = sweep_json(sweep);
  CHECK(json.at("schema") == "parplan.sweep/1");
  CHECK(keys_of(json) == std::vector<std::string>{"schema", "tool", "inputs", "columns", "rows", "notes"});
  CHECK(json.at("inputs").at("tokens") == 1000);
  CHECK(
      json.at("inputs").at("devices").dump() ==
      R"([{"cluster":"four","device":"box","backend":"cpu","memory_capacity_bytes":1000,"power_w":250.0,"price_per_device_hour":3.0,"currency":"USD"}])");
  CHECK(json.at("columns").size() == sweep_columns().size());
  CHECK(json.at("rows").size() == 2);
  CHECK(write_json(json) == write_json(sweep_json(sweep)));
}

TEST_CASE("the JSON Schema has exactly the keys that are written, and their types") {
  Sweep sweep = small_sweep();
  sweep.points.push_back(point_without_plan("four"));
  sweep.tokens = 1000;
  const Json json = sweep_json(sweep);
  const Json schema = Json::parse(read_file(std::string(PARPLAN_SOURCE_DIR) + "/docs/schemas/sweep.schema.json"));
  CHECK(schema.at("properties").at("schema").at("const") == json.at("schema"));
  const auto check = [](const Json& described, const Json& object, const auto& again) -> void {
    CHECK(keys_of(described.at("properties")) == keys_of(object));
    CHECK(described.at("required").get<std::vector<std::string>>() == keys_of(object));
    CHECK(described.at("additionalProperties") == false);
    for (const auto& [key, value] : object.items()) {
      INFO(key);
      const Json& property = described.at("properties").at(key);
      if (value.is_object()) {
        again(property, value, again);
        continue;
      }
      if (!property.contains("type")) continue;  // "const"
      const Json types = property.at("type").is_array() ? property.at("type") : Json::array({property.at("type")});
      const auto is = [&](const char* type) { return std::ranges::find(types, Json(type)) != types.end(); };
      const bool fits = value.is_null()             ? is("null")
                        : value.is_boolean()        ? is("boolean")
                        : value.is_string()         ? is("string")
                        : value.is_number_integer() ? is("integer") || is("number")
                        : value.is_number()         ? is("number")
                                                    : is("array");
      CHECK(fits);
    }
  };
  check(schema, json, check);
  for (const Json& row : json.at("rows")) check(schema.at("properties").at("rows").at("items"), row, check);
  check(schema.at("properties").at("columns").at("items"), json.at("columns").front(), check);
  check(schema.at("properties").at("inputs").at("properties").at("devices").at("items"),
        json.at("inputs").at("devices").front(), check);
}

TEST_CASE("CSV has the JSON's rows, number by number") {
  Sweep sweep = small_sweep();
  sweep.points.push_back(point_without_plan("four"));
  sweep.tokens = 123457;
  const std::vector<std::vector<std::string>> lines = testing::read_csv(sweep_csv(sweep));
  const std::vector<Json> rows = sweep_rows(sweep);
  REQUIRE(lines.size() == rows.size() + 1);
  CHECK(lines.front() == keys_of(rows.front()));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    REQUIRE(lines[i + 1].size() == lines.front().size());
    for (std::size_t c = 0; c < lines.front().size(); ++c) {
      const Json& value = rows[i].at(lines.front()[c]);
      INFO(lines.front()[c]);
      if (value.is_null()) CHECK(lines[i + 1][c].empty());
      else if (value.is_string()) CHECK(lines[i + 1][c] == value.get<std::string>());
      else if (value.is_boolean()) CHECK(lines[i + 1][c] == (value.get<bool>() ? "true" : "false"));
      else CHECK(std::stod(lines[i + 1][c]) == value.get<double>());
    }
  }
}

TEST_CASE("the table shows what differs, what it costs, and what does not fit") {
  Sweep sweep = small_sweep();
  sweep.points.push_back(planned_point("four", 2, 4.0));
  sweep.points.push_back(point_without_plan("four"));
  sweep.tokens = 345600000;
  // 2 tokens per second on 4 devices for 12 USD per hour; 5 on 8 for 24: 2000 and 800 days.
  CHECK(sweep_table(sweep) ==
        "layout                            devices    step  tokens/s     MFU  memory peak   days  device-hours         "
        "cost      energy  marks\n"
        "dp2 tp1 pp2 zero1 mb1 1f1b pp>dp        4  10.0 s         2  50.0 %        640 B  2,000       192,000  "
        "576,000 USD  48,000 kWh\n"
        "dp4 tp1 pp2 zero1 mb1 1f1b pp>dp        8  4.00 s         5  62.5 %        640 B    800       153,600  "
        "460,800 USD  38,400 kWh  front\n"
        "nothing fits                            4       -         -       -            -      -             -         "
        "   -           -\n"
        "4 devices of four, batch 4, sequence 5: none of 12 candidates fits in 1000 B of memory a device\n");
}

}  // namespace
}  // namespace parplan
