#include "planner/report/workbook.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include <fmt/format.h>
#include <xlsxwriter.h>

#include "planner/base/error.h"
#include "planner/base/file.h"
#include "planner/base/text.h"
#include "planner/cluster/price_and_power.h"
#include "planner/report/plan_row.h"

namespace parplan {
namespace {

struct Formula {
  std::string text;
  Json value;  // its result: a number, a text, or null for ""
};
using Cell = std::variant<Json, Formula>;

struct BookCloser {
  void operator()(lxw_workbook* book) const { lxw_workbook_free(book); }
};

// Formats of cells; the book owns them.
struct Formats {
  lxw_format* title;
  lxw_format* header;
  lxw_format* text;
  lxw_format* input;    // what a reader may change
  lxw_format* whole;
  lxw_format* decimal;  // to a thousandth
  lxw_format* money;
  lxw_format* share;
  lxw_format* front;
};

lxw_format* number_format(lxw_workbook* book, const char* pattern) {
  lxw_format* format = workbook_add_format(book);
  format_set_num_format(format, pattern);
  return format;
}

Formats make_formats(lxw_workbook* book) {
  Formats formats{.title = workbook_add_format(book),
                  .header = workbook_add_format(book),
                  .text = workbook_add_format(book),
                  .input = number_format(book, "#,##0.######"),
                  .whole = number_format(book, "#,##0"),
                  .decimal = number_format(book, "#,##0.000"),
                  .money = number_format(book, "#,##0.00"),
                  .share = number_format(book, "0.0%"),
                  .front = workbook_add_format(book)};
  format_set_bold(formats.title);
  format_set_font_size(formats.title, 14);
  format_set_bold(formats.header);
  format_set_text_wrap(formats.header);
  format_set_align(formats.header, LXW_ALIGN_VERTICAL_TOP);
  format_set_bottom(formats.header, LXW_BORDER_THIN);
  format_set_font_color(formats.input, LXW_COLOR_BLUE);
  format_set_bg_color(formats.input, 0xFFF8DC);
  format_set_bg_color(formats.front, 0xE2F0D9);
  return formats;
}

// "A", "AB"
std::string column_letters(int column) {
  std::string letters;
  for (int left = column; left >= 0; left = left / 26 - 1)
    letters.insert(letters.begin(), static_cast<char>('A' + left % 26));
  return letters;
}

lxw_format* format_of(const Formats& formats, const std::string& key, const std::string& unit) {
  if (key == "mfu" || key == "gap") return formats.share;
  if (unit == "currency" || unit == "currency/h") return formats.money;
  if (unit == "B" || unit == "tokens" || unit == "sequences") return formats.whole;
  if (key == "steps" || key == "device_hours" || key == "energy_kwh" || key == "tokens_per_s" || key == "power_w")
    return formats.whole;
  if (unit == "s" || unit == "d" || unit == "1/s" || unit == "TFLOP/s") return formats.decimal;
  return formats.text;
}

void write_cell(lxw_worksheet* sheet, int row, int column, const Cell& cell, lxw_format* format) {
  const auto r = static_cast<lxw_row_t>(row);
  const auto c = static_cast<lxw_col_t>(column);
  if (const Formula* formula = std::get_if<Formula>(&cell)) {
    const std::string text = "=" + formula->text;
    if (formula->value.is_number())
      worksheet_write_formula_num(sheet, r, c, text.c_str(), format, formula->value.get<double>());
    else
      worksheet_write_formula_str(sheet, r, c, text.c_str(), format,
                                  formula->value.is_null() ? "" : formula->value.get<std::string>().c_str());
    return;
  }
  const Json& value = std::get<Json>(cell);
  if (value.is_null()) worksheet_write_blank(sheet, r, c, format);
  else if (value.is_boolean()) worksheet_write_boolean(sheet, r, c, value.get<bool>(), format);
  else if (value.is_number()) worksheet_write_number(sheet, r, c, value.get<double>(), format);
  else worksheet_write_string(sheet, r, c, value.get<std::string>().c_str(), format);
}

// A kind of device of a cluster: a line of Inputs.
struct DeviceLine {
  std::string cluster;
  std::string device;
  std::optional<Price> price;
  std::optional<Watts> power;
  bool operator==(const DeviceLine&) const = default;
};
DeviceLine line_of(const SweepPoint& point, const NodeGroup& group) {
  return {point.cluster.name, group.device.name, group.price, group.device.power};
}

// Positions on the sheet Inputs, from 0.
constexpr int tokens_row = 3;
constexpr int weighs_row = 4;
constexpr int goodput_row = 5;
constexpr int lines_header_row = 6;
constexpr int first_line_row = lines_header_row + 1;
constexpr int price_column = 2;
constexpr int power_column = 4;

class Workbook {
 public:
  Workbook(lxw_workbook* book, const Sweep& sweep)
      : book_(book), sweep_(sweep), formats_(make_formats(book)), columns_(sweep_columns()), rows_(sweep_rows(sweep)) {
    for (const SweepPoint& point : sweep.points)
      for (const NodeGroup& group : point.cluster.groups)
        if (const DeviceLine line = line_of(point, group); std::ranges::find(lines_, line) == lines_.end())
          lines_.push_back(line);
    inputs_ = workbook_add_worksheet(book, "Inputs");
    capacity_ = workbook_add_worksheet(book, "Capacity");
    plans_ = workbook_add_worksheet(book, "Plans");
    meanings_ = workbook_add_worksheet(book, "Columns");
  }

  void fill() {
    fill_inputs();
    fill_capacity();
    fill_plans();
    fill_columns();
    worksheet_activate(capacity_);
  }

 private:
  // The columns of the sheet Capacity, in this order. A key's entry in rows_ is either a value or,
  // here, a formula.
  static constexpr std::array capacity_keys = {"cluster",
                                               "device",
                                               "cluster_devices",
                                               "devices",
                                               "global_batch",
                                               "sequence_length",
                                               "layout",
                                               "step_time_s",
                                               "mfu",
                                               "tokens_per_s",
                                               "days",
                                               "device_hours",
                                               "cost",
                                               "energy_kwh",
                                               "steps",
                                               "price_per_hour",
                                               "power_w",
                                               "cost_per_step",
                                               "cost_per_million_tokens",
                                               "currency",
                                               "knee",
                                               "pareto",
                                               "weighed",
                                               "reason"};

  // Keys of a row that are on the sheet Inputs, or are calculated on Capacity and not repeated.
  static constexpr std::array not_of_plans = {"price_per_hour", "power_w", "cost_per_million_tokens",
                                              "tokens",         "steps",   "days",
                                              "device_hours",   "cost",    "energy_kwh",
                                              "knee",           "pareto",  "goodput"};

  const SweepColumn& column(const std::string& key) const {
    static const std::vector<SweepColumn> own{
        {"layout", "", "the plan in short: degrees above 1 and what differs from the plainest choice"},
        {"weighed", "",
         "what the front weighs against speed: price_per_hour (devices, where not every point has a price) over "
         "tokens_per_s"}};
    const auto found = std::ranges::find(columns_, key, &SweepColumn::key);
    if (found != columns_.end()) return *found;
    const auto ours = std::ranges::find(own, key, &SweepColumn::key);
    PARPLAN_ASSERT(ours != own.end(), fmt::format("no column '{}'", key));
    return *ours;
  }

  // "cost (USD)", "days (d)", "device"
  std::string title(const SweepColumn& column) const {
    if (column.unit.empty()) return column.key;
    std::string unit = column.unit;
    const std::string word = "currency";
    for (const SweepPoint& point : sweep_.points)
      if (const std::optional<std::string> known = currency(point.cluster); known && unit.starts_with(word))
        unit = *known + unit.substr(word.size());
    return fmt::format("{} ({})", column.key, unit);
  }

  void write_header(lxw_worksheet* sheet, const std::vector<std::string>& titles) const {
    worksheet_set_row(sheet, 0, 45, formats_.header);
    for (std::size_t c = 0; c < titles.size(); ++c) {
      write_cell(sheet, 0, static_cast<int>(c), Json(titles[c]), formats_.header);
      const double width = std::clamp(static_cast<double>(titles[c].size()) * 0.7 + 4.0, 11.0, 22.0);
      worksheet_set_column(sheet, static_cast<lxw_col_t>(c), static_cast<lxw_col_t>(c), width, nullptr);
    }
  }

  static std::string input(int row, int column) {
    return fmt::format("Inputs!${}${}", column_letters(column), row + 1);
  }

  void fill_inputs() {
    write_cell(inputs_, 0, 0,
               Json(fmt::format("parplan {}: capacity for {}", sweep_.version, sweep_.points.front().model.name)),
               formats_.title);
    write_cell(inputs_, 1, 0,
               Json("Change what is blue: tokens, goodput, prices and power. Days, cost, energy and the front of the "
                    "sheet Capacity follow."),
               formats_.text);
    write_cell(inputs_, tokens_row, 0, Json("tokens"), formats_.text);
    write_cell(inputs_, tokens_row, 1, sweep_.tokens ? Json(*sweep_.tokens) : Json(nullptr), formats_.input);
    write_cell(inputs_, tokens_row, 2, Json("to train on"), formats_.text);
    write_cell(inputs_, weighs_row, 0, Json("the front weighs time against"), formats_.text);
    write_cell(inputs_, weighs_row, 1,
               Formula{fmt::format("IF(COUNT(Capacity!{})=COUNT(Capacity!{}),\"cost\",\"device-hours\")",
                                   all_of("price_per_hour"), all_of("step_time_s")),
                       front_measure(sweep_) == FrontMeasure::cost ? "cost" : "device-hours"},
               formats_.text);
    write_cell(inputs_, weighs_row, 2, Json("cost as soon as every point has a price"), formats_.text);
    write_cell(inputs_, goodput_row, 0, Json("goodput"), formats_.text);
    write_cell(inputs_, goodput_row, 1, Json(sweep_.goodput), formats_.input);
    write_cell(inputs_, goodput_row, 2, Json("share of the time in which steps are made"), formats_.text);
    const std::vector<std::string> titles{"cluster", "device", "price of a device for an hour", "currency",
                                          "power of a board (W)"};
    for (std::size_t c = 0; c < titles.size(); ++c)
      write_cell(inputs_, lines_header_row, static_cast<int>(c), Json(titles[c]), formats_.header);
    for (std::size_t i = 0; i < lines_.size(); ++i) {
      const DeviceLine& line = lines_[i];
      const int row = first_line_row + static_cast<int>(i);
      write_cell(inputs_, row, 0, Json(line.cluster), formats_.text);
      write_cell(inputs_, row, 1, Json(line.device), formats_.text);
      write_cell(inputs_, row, price_column, line.price ? Json(line.price->per_device_hour) : Json(nullptr),
                 formats_.input);
      write_cell(inputs_, row, 3, line.price ? Json(line.price->currency) : Json(nullptr), formats_.input);
      write_cell(inputs_, row, power_column, line.power ? Json(line.power->value) : Json(nullptr), formats_.input);
    }
    int row = first_line_row + static_cast<int>(lines_.size()) + 1;
    write_cell(inputs_, row++, 0, Json("What the numbers rest on"), formats_.header);
    for (const std::string& note : assumptions(sweep_)) write_cell(inputs_, row++, 0, Json(note), formats_.text);
    write_cell(inputs_, row++, 0,
               Json("pareto is yes where no other point of equal batch and sequence is both as fast and as cheap, and "
                    "better in one"),
               formats_.text);
    write_cell(inputs_, row++, 0,
               Json("prices of all lines must be in one currency: they are compared and added as they stand"),
               formats_.text);
    worksheet_set_column(inputs_, 0, 0, 30, nullptr);
    worksheet_set_column(inputs_, 1, 4, 20, nullptr);
    workbook_define_name(book_, "tokens", ("=" + input(tokens_row, 1)).c_str());
    workbook_define_name(book_, "goodput", ("=" + input(goodput_row, 1)).c_str());
  }

  static int column_of(const std::string& key) {
    const auto found = std::ranges::find(capacity_keys, key);
    PARPLAN_ASSERT(found != capacity_keys.end(), fmt::format("Capacity has no column '{}'", key));
    return static_cast<int>(found - capacity_keys.begin());
  }
  // "$J$2:$J$9"
  std::string all_of(const std::string& key) const {
    const std::string letters = column_letters(column_of(key));
    return fmt::format("${0}$2:${0}${1}", letters, rows_.size() + 1);
  }

  // The sum over a plan's devices of a column of Inputs for their kinds; "" where one of these
  // cells is empty.
  std::string sum_over_devices(const SweepPoint& point, int input_column, const std::string& devices_cell) const {
    const int devices = point.best->spec.mesh.size();
    std::vector<std::string> cells;
    std::vector<std::string> terms;
    for (std::size_t g = 0; g < point.planned().groups.size(); ++g) {
      const int taken = devices_of_group(point.planned(), g, devices);
      if (taken == 0) continue;
      const auto line = std::ranges::find(lines_, line_of(point, point.planned().groups[g]));
      cells.push_back(input(first_line_row + static_cast<int>(line - lines_.begin()), input_column));
      terms.push_back(fmt::format("{}*{}", taken == devices ? devices_cell : fmt::format("{}", taken), cells.back()));
    }
    return fmt::format("IF(COUNT({})={},{},\"\")", join(cells, ","), cells.size(), join(terms, "+"));
  }

  // The formula of a cell of Capacity; empty where it is a value.
  std::string formula(const std::string& key, const SweepPoint& point, int row) const {
    const auto cell = [&](const char* of) { return fmt::format("{}{}", column_letters(column_of(of)), row + 1); };
    const std::string days = cell("days");
    const std::string rate = cell("tokens_per_s");
    const std::string price = cell("price_per_hour");
    const std::string power = cell("power_w");
    if (key == "tokens_per_s")
      return fmt::format("{}*{}/{}", cell("global_batch"), cell("sequence_length"), cell("step_time_s"));
    if (key == "days") return fmt::format("IF(COUNT(tokens)=1,tokens/{}/goodput/86400,\"\")", rate);
    if (key == "device_hours") return fmt::format("IF({0}=\"\",\"\",{0}*24*{1})", days, cell("devices"));
    if (key == "cost") return fmt::format("IF(OR({0}=\"\",{1}=\"\"),\"\",{0}*24*{1})", days, price);
    if (key == "energy_kwh") return fmt::format("IF(OR({0}=\"\",{1}=\"\"),\"\",{0}*24*{1}/1000)", days, power);
    if (key == "steps")
      return fmt::format("IF(COUNT(tokens)=1,ROUNDUP(tokens/({}*{}),0),\"\")", cell("global_batch"),
                         cell("sequence_length"));
    if (key == "price_per_hour") return sum_over_devices(point, price_column, cell("devices"));
    if (key == "power_w") return sum_over_devices(point, power_column, cell("devices"));
    if (key == "cost_per_step") return fmt::format("IF({0}=\"\",\"\",{0}/3600*{1})", price, cell("step_time_s"));
    if (key == "cost_per_million_tokens")
      return fmt::format("IF({0}=\"\",\"\",{0}/{1}/goodput/3600*1000000)", price, rate);
    if (key == "weighed")
      return fmt::format("IF({}=\"cost\",{},{})/{}", input(weighs_row, 1), price, cell("devices"), rate);
    if (key == "pareto")
      return fmt::format(
          "IF(SUMPRODUCT(({0}={1})*({2}={3})*({4}>={5})*({6}<={7})*((({4}>{5})+({6}<{7}))>0))=0,\"yes\",\"no\")",
          all_of("global_batch"), cell("global_batch"), all_of("sequence_length"), cell("sequence_length"),
          all_of("tokens_per_s"), rate, all_of("weighed"), cell("weighed"));
    return "";
  }

  // The value of `key` for a point; for keys of Capacity alone, calculated like the formula.
  Json value(const std::string& key, std::size_t i) const {
    const SweepPoint& point = sweep_.points[i];
    const Json& row = rows_[i];
    if (key == "layout") return point.best ? Json(layout_text(point.best->spec)) : Json(nullptr);
    if (key == "weighed") {
      if (!point.best) return nullptr;
      const Json& spent = row.at(front_measure(sweep_) == FrontMeasure::cost ? "price_per_hour" : "devices");
      return Json(spent.get<double>() / row.at("tokens_per_s").get<double>());
    }
    const Json& found = row.at(key);
    return found.is_boolean() ? Json(found.get<bool>() ? "yes" : "no") : found;
  }

  void fill_capacity() {
    std::vector<std::string> titles;
    for (const char* key : capacity_keys) titles.push_back(title(column(key)));
    write_header(capacity_, titles);
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      const SweepPoint& point = sweep_.points[i];
      const int row = static_cast<int>(i) + 1;
      for (std::size_t c = 0; c < capacity_keys.size(); ++c) {
        const std::string key = capacity_keys[c];
        const std::string text = point.best ? formula(key, point, row) : "";
        const Cell cell = text.empty() ? Cell(value(key, i)) : Cell(Formula{text, value(key, i)});
        write_cell(capacity_, row, static_cast<int>(c), cell, format_of(formats_, key, column(key).unit));
      }
    }
    worksheet_set_column(capacity_, static_cast<lxw_col_t>(column_of("layout")),
                         static_cast<lxw_col_t>(column_of("layout")), 34, nullptr);
    worksheet_freeze_panes(capacity_, 1, static_cast<lxw_col_t>(column_of("cluster_devices") + 1));
    const auto last_row = static_cast<lxw_row_t>(rows_.size());
    const auto last_column = static_cast<lxw_col_t>(capacity_keys.size() - 1);
    worksheet_autofilter(capacity_, 0, 0, last_row, last_column);
    std::string on_front = fmt::format("=${}2=\"yes\"", column_letters(column_of("pareto")));
    lxw_conditional_format coloured{};
    coloured.type = LXW_CONDITIONAL_TYPE_FORMULA;
    coloured.value_string = on_front.data();
    coloured.format = formats_.front;
    worksheet_conditional_format_range(capacity_, 1, 0, last_row, last_column, &coloured);
  }

  void fill_plans() {
    std::vector<const SweepColumn*> shown;
    for (const SweepColumn& column : columns_)
      if (std::ranges::find(not_of_plans, column.key) == not_of_plans.end()) shown.push_back(&column);
    std::vector<std::string> titles;
    for (const SweepColumn* column : shown) titles.push_back(title(*column));
    write_header(plans_, titles);
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      const int row = static_cast<int>(i) + 1;
      for (std::size_t c = 0; c < shown.size(); ++c) {
        const std::string& key = shown[c]->key;
        const Json& known = rows_[i].at(key);
        const bool calculated = key == "cost_per_step" && sweep_.points[i].best;
        const Cell cell =
            calculated ? Cell(Formula{fmt::format("Capacity!{}{}", column_letters(column_of(key)), row + 1), known})
                       : Cell(known);
        write_cell(plans_, row, static_cast<int>(c), cell, format_of(formats_, key, shown[c]->unit));
      }
    }
    worksheet_freeze_panes(plans_, 1, 3);
    worksheet_autofilter(plans_, 0, 0, static_cast<lxw_row_t>(rows_.size()), static_cast<lxw_col_t>(shown.size() - 1));
  }

  void fill_columns() {
    write_header(meanings_, {"column", "unit", "meaning"});
    int row = 1;
    const auto write = [&](const SweepColumn& column) {
      write_cell(meanings_, row, 0, Json(column.key), formats_.text);
      write_cell(meanings_, row, 1, Json(column.unit), formats_.text);
      write_cell(meanings_, row++, 2, Json(column.description), formats_.text);
    };
    for (const SweepColumn& column : columns_) write(column);
    for (const char* key : {"layout", "weighed"}) write(column(key));
    worksheet_set_column(meanings_, 0, 0, 30, nullptr);
    worksheet_set_column(meanings_, 1, 1, 12, nullptr);
    worksheet_set_column(meanings_, 2, 2, 110, nullptr);
    worksheet_freeze_panes(meanings_, 1, 0);
  }

  lxw_workbook* book_;
  const Sweep& sweep_;
  Formats formats_;
  std::vector<SweepColumn> columns_;
  std::vector<Json> rows_;
  std::vector<DeviceLine> lines_;
  lxw_worksheet* inputs_;
  lxw_worksheet* capacity_;
  lxw_worksheet* plans_;
  lxw_worksheet* meanings_;
};

}  // namespace

void write_workbook(const std::filesystem::path& path, const Sweep& sweep) {
  write_through_temporary(path, [&](const std::string& temporary) {
    std::unique_ptr<lxw_workbook, BookCloser> book(workbook_new(temporary.c_str()));
    if (!book) throw RunError(fmt::format("cannot write '{}': no memory for a workbook", path.string()));
    // The first day that a ZIP archive can store, so that equal sweeps give equal bytes.
    lxw_doc_properties properties{};
    std::string name = "parplan sweep";
    properties.title = name.data();
    properties.created = 315532800;  // 1980-01-01
    workbook_set_properties(book.get(), &properties);
    Workbook(book.get(), sweep).fill();
    if (const lxw_error error = workbook_close(book.release()); error != LXW_NO_ERROR)
      throw RunError(fmt::format("cannot write '{}': {}", path.string(), lxw_strerror(error)));
  });
}

}  // namespace parplan
