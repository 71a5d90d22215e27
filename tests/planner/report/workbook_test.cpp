#include "planner/report/workbook.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <unistd.h>

#include "planner/base/error.h"
#include "planner/base/file.h"
#include "tests/planner/base/error_of.h"
#include "tests/planner/report/small_sweep.h"
#include "tests/temporary_folder.h"

namespace parplan {
namespace {

namespace fs = std::filesystem;
using testing::planned_point;
using testing::point_without_plan;
using testing::read_csv;
using Table = std::vector<std::vector<std::string>>;

bool calls(const std::string& command) { return std::system((command + " >/dev/null 2>&1").c_str()) == 0; }

// Two clusters, one of them heterogeneous, two batches, a point without a plan; 10,000 USD and up.
Sweep sweep_of_all_kinds() {
  Sweep sweep;
  sweep.version = "0";
  sweep.tokens = 1234567890;
  sweep.goodput = 0.8;
  sweep.points = {planned_point("four", 1, 10.0), planned_point("four", 2, 5.5), planned_point("four", 4, 4.25),
                  planned_point("mixed, \"odd\"", 2, 6.0), point_without_plan("four")};
  // Half of the 8 devices of the fourth point are more expensive.
  std::vector<NodeGroup>& groups = sweep.points[3].cluster.groups;
  groups.front().nodes = 1;
  groups.push_back(groups.front());
  groups.back().device.name = "crate";
  groups.back().device.power = Watts(400.0);
  groups.back().price = Price{5.5, "USD"};
  sweep.points.push_back(planned_point("four", 2, 5.0));
  sweep.points.back().training.global_batch = 2;
  return sweep;
}

std::string unescaped(std::string text) {
  for (const auto& [name, character] :
       std::map<std::string, std::string>{{"&quot;", "\""}, {"&lt;", "<"}, {"&gt;", ">"}, {"&amp;", "&"}})
    for (std::size_t at = text.find(name); at != std::string::npos; at = text.find(name, at + 1))
      text.replace(at, name.size(), character);
  return text;
}

struct SheetCell {
  std::string formula;
  std::string value;  // the value in the workbook; for a formula, its result when it was written
};

// The cells of a sheet by their names: "J2".
std::map<std::string, SheetCell> cells_of(const std::string& xml) {
  std::map<std::string, SheetCell> cells;
  for (std::size_t at = xml.find("<c r=\""); at != std::string::npos; at = xml.find("<c r=\"", at + 1)) {
    const std::size_t name_at = at + 6;
    const std::string name = xml.substr(name_at, xml.find('"', name_at) - name_at);
    const std::size_t opened = xml.find('>', at);
    if (xml[opened - 1] == '/') continue;
    const std::string inside = xml.substr(opened, xml.find("</c>", at) - opened);
    const auto part = [&](const std::string& tag) {
      const std::size_t begin = inside.find("<" + tag + ">");
      return begin == std::string::npos
                 ? ""
                 : unescaped(
                       inside.substr(begin + tag.size() + 2, inside.find("</" + tag + ">") - begin - tag.size() - 2));
    };
    cells[name] = {part("f"), part("v")};
  }
  return cells;
}

// The parts of a workbook: cmake, which builds parplan, can unpack ZIP archives.
void unpack(const fs::path& workbook, const fs::path& folder) {
  fs::create_directories(folder);
  REQUIRE(calls(fmt::format("cd '{}' && '{}' -E tar xf '{}'", folder.string(), PARPLAN_CMAKE, workbook.string())));
}

TEST_CASE("days, device-hours, cost, energy and the front are formulas of step time, tokens, prices and power") {
  const testing::TemporaryFolder folder;
  const Sweep sweep = sweep_of_all_kinds();
  write_workbook(folder / "plans.xlsx", sweep);
  unpack(folder / "plans.xlsx", folder / "parts");
  const auto inputs = cells_of(read_file(folder / "parts/xl/worksheets/sheet1.xml"));
  const auto capacity = cells_of(read_file(folder / "parts/xl/worksheets/sheet2.xml"));
  const auto formula = [&](const std::string& cell) {
    return capacity.count(cell) == 1 ? capacity.at(cell).formula : std::string("no cell");
  };
  // A cluster, B device, C cluster_devices, D devices, E global_batch, F sequence_length, G layout,
  // H step_time_s, I mfu
  CHECK(formula("H2").empty());
  CHECK(formula("J2") == "E2*F2/H2");                                                   // tokens_per_s
  CHECK(formula("K2") == "IF(COUNT(tokens)=1,tokens/J2/goodput/86400,\"\")");                   // days
  CHECK(formula("L2") == "IF(K2=\"\",\"\",K2*24*D2)");                                  // device_hours
  CHECK(formula("M2") == "IF(OR(K2=\"\",P2=\"\"),\"\",K2*24*P2)");                      // cost
  CHECK(formula("N2") == "IF(OR(K2=\"\",Q2=\"\"),\"\",K2*24*Q2/1000)");                 // energy_kwh
  CHECK(formula("O2") == "IF(COUNT(tokens)=1,ROUNDUP(tokens/(E2*F2),0),\"\")");         // steps
  CHECK(formula("P2") == "IF(COUNT(Inputs!$C$8)=1,D2*Inputs!$C$8,\"\")");               // price_per_hour
  CHECK(formula("Q2") == "IF(COUNT(Inputs!$E$8)=1,D2*Inputs!$E$8,\"\")");               // power_w
  CHECK(formula("R2") == "IF(P2=\"\",\"\",P2/3600*H2)");                                // cost_per_step
  CHECK(formula("S2") == "IF(P2=\"\",\"\",P2/J2/goodput/3600*1000000)");                // cost_per_million_tokens
  CHECK(formula("V2") ==
        "IF(SUMPRODUCT(($E$2:$E$7=E2)*($F$2:$F$7=F2)*($J$2:$J$7>=J2)*($W$2:$W$7<=W2)*((($J$2:$J$7>J2)+($W$2:$W$7<W2))>"
        "0))=0,\"yes\",\"no\")");
  CHECK(formula("W2") == "IF(Inputs!$B$5=\"cost\",P2,D2)/J2");
  // Heterogeneous devices: 4 of each kind.
  CHECK(formula("P5") == "IF(COUNT(Inputs!$C$9,Inputs!$C$10)=2,4*Inputs!$C$9+4*Inputs!$C$10,\"\")");
  CHECK(formula("Q5") == "IF(COUNT(Inputs!$E$9,Inputs!$E$10)=2,4*Inputs!$E$9+4*Inputs!$E$10,\"\")");
  // Nothing is calculated without a plan.
  for (const auto& [name, cell] : capacity)
    if (name.ends_with("6") && name.size() == 2) CHECK(cell.formula.empty());
  // The cells to which they refer.
  CHECK(inputs.at("B4").value == "1234567890");
  CHECK(inputs.at("B5").formula == "IF(COUNT(Capacity!$P$2:$P$7)=COUNT(Capacity!$H$2:$H$7),\"cost\",\"device-hours\")");
  CHECK(inputs.at("B6").value == "0.8");
  CHECK(inputs.at("C8").value == "3");
  CHECK(inputs.at("E8").value == "250");
  CHECK(inputs.at("C10").value == "5.5");
  CHECK(inputs.at("E10").value == "400");
  const std::string book = read_file(folder / "parts/xl/workbook.xml");
  CHECK(book.find("<definedName name=\"tokens\">Inputs!$B$4</definedName>") != std::string::npos);
  CHECK(book.find("<definedName name=\"goodput\">Inputs!$B$6</definedName>") != std::string::npos);
  for (const char* sheet : {"Inputs", "Capacity", "Plans", "Columns"})
    CHECK(book.find(fmt::format("<sheet name=\"{}\"", sheet)) != std::string::npos);
  CHECK(read_file(folder / "parts/xl/worksheets/sheet2.xml").find("state=\"frozen\"") != std::string::npos);
}

TEST_CASE("formulas carry the values of the JSON, for who shows a workbook without calculating it") {
  const testing::TemporaryFolder folder;
  const Sweep sweep = sweep_of_all_kinds();
  write_workbook(folder / "plans.xlsx", sweep);
  unpack(folder / "plans.xlsx", folder / "parts");
  const auto capacity = cells_of(read_file(folder / "parts/xl/worksheets/sheet2.xml"));
  const std::vector<Json> rows = sweep_rows(sweep);
  const std::map<std::string, std::string> columns{{"J", "tokens_per_s"},   {"K", "days"},
                                                   {"L", "device_hours"},   {"M", "cost"},
                                                   {"N", "energy_kwh"},     {"O", "steps"},
                                                   {"P", "price_per_hour"}, {"Q", "power_w"},
                                                   {"R", "cost_per_step"},  {"S", "cost_per_million_tokens"}};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for (const auto& [letter, key] : columns) {
      const auto cell = capacity.find(fmt::format("{}{}", letter, i + 2));
      INFO(key << " of row " << i);
      if (rows[i].at(key).is_null()) {
        CHECK((cell == capacity.end() || cell->second.value.empty()));
        continue;
      }
      REQUIRE(cell != capacity.end());
      CHECK(std::stod(cell->second.value) == doctest::Approx(rows[i].at(key).get<double>()).epsilon(1e-14));
    }
  }
}

TEST_CASE("equal sweeps give equal workbooks, and one that cannot be written leaves nothing") {
  const testing::TemporaryFolder folder;
  const Sweep sweep = sweep_of_all_kinds();
  write_workbook(folder / "a.xlsx", sweep);
  write_workbook(folder / "b.xlsx", sweep);
  CHECK(read_file(folder / "a.xlsx") == read_file(folder / "b.xlsx"));
  CHECK(error_of<RunError>([&] { write_workbook(folder / "absent/plans.xlsx", sweep); }) ==
        fmt::format("cannot write '{}': No such file or directory", (folder / "absent/plans.xlsx").string()));
  fs::create_directory(folder / "taken.xlsx");
  CHECK(error_of<RunError>([&] { write_workbook(folder / "taken.xlsx", sweep); }) ==
        fmt::format("cannot write '{}': Is a directory", (folder / "taken.xlsx").string()));
  std::set<std::string> left;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder / ""))
    left.insert(entry.path().filename().string());
  CHECK(left == std::set<std::string>{"a.xlsx", "b.xlsx", "taken.xlsx"});
}

TEST_CASE("a sweep without tokens, prices and power gives a workbook to fill in") {
  const testing::TemporaryFolder folder;
  Sweep sweep = sweep_of_all_kinds();
  sweep.tokens.reset();
  for (SweepPoint& point : sweep.points)
    for (NodeGroup& group : point.cluster.groups) {
      group.price.reset();
      group.device.power.reset();
    }
  write_workbook(folder / "plans.xlsx", sweep);
  unpack(folder / "plans.xlsx", folder / "parts");
  const auto capacity = cells_of(read_file(folder / "parts/xl/worksheets/sheet2.xml"));
  CHECK(capacity.at("M2").formula == "IF(OR(K2=\"\",P2=\"\"),\"\",K2*24*P2)");
  CHECK(capacity.at("M2").value.empty());
  const auto inputs = cells_of(read_file(folder / "parts/xl/worksheets/sheet1.xml"));
  CHECK(inputs.count("B4") == 0);
  CHECK(inputs.at("B5").value == "device-hours");
}

// ---- LibreOffice, where it is installed ----

bool office_is_here() {
  const bool here = calls("command -v soffice");
  if (!here) MESSAGE("skipped: LibreOffice (soffice) is not installed");
  return here;
}

// Recalculates a workbook, whatever values it has, and returns each sheet as a table of unformatted
// text.
std::map<std::string, Table> calculated(const fs::path& folder, const fs::path& workbook) {
  const fs::path profile = folder / "profile";
  fs::create_directories(profile / "user");
  // 0: always, in the settings "Recalculation on File Load".
  std::ofstream(profile / "user/registrymodifications.xcu")
      << "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<oor:items xmlns:oor=\"http://openoffice.org/2001/registry\" "
         "xmlns:xs=\"http://www.w3.org/2001/XMLSchema\" xmlns:xsi=\"http://www.w3.org/2001/XMLSchema-instance\">\n"
         "<item oor:path=\"/org.openoffice.Office.Calc/Formula/Load\"><prop oor:name=\"OOXMLRecalcMode\" "
         "oor:op=\"fuse\"><value>0</value></prop></item>\n"
         "</oor:items>\n";
  // 44, 34: comma and quote; 76: UTF-8; the eighth: not as shown but in full; -1: every sheet, to
  // NAME-SHEET.csv
  REQUIRE(
      calls(fmt::format("soffice -env:UserInstallation=file://{} --headless --convert-to 'csv:Text - txt - csv "
                        "(StarCalc):44,34,76,1,,0,false,false,false,false,false,-1' "
                        "--outdir '{}' '{}'",
                        profile.string(), (folder / "csv").string(), workbook.string())));
  std::map<std::string, Table> sheets;
  for (const char* sheet : {"Inputs", "Capacity", "Plans", "Columns"})
    sheets[sheet] = read_csv(read_file(folder / "csv" / fmt::format("{}-{}.csv", workbook.stem().string(), sheet)));
  return sheets;
}

// Compares every cell under a header that is a key of the rows with the row; returns how many
// numbers there were.
int compare(const Table& table, const std::vector<Json>& rows) {
  int numbers = 0;
  REQUIRE(table.size() >= rows.size() + 1);
  for (std::size_t c = 0; c < table.front().size(); ++c) {
    const std::string key = table.front()[c].substr(0, table.front()[c].find(" ("));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (!rows[i].contains(key)) continue;
      const Json& value = rows[i].at(key);
      const std::string& text = table[i + 1].at(c);
      INFO(key << " of row " << i << ": " << text << " and " << value.dump());
      if (value.is_null()) {
        CHECK(text.empty());
      } else if (value.is_boolean()) {
        CHECK((value.get<bool>() ? text == "yes" || text == "TRUE" : text == "no" || text == "FALSE"));
      } else if (value.is_string()) {
        CHECK(text == value.get<std::string>());
      } else {
        ++numbers;
        REQUIRE_FALSE(text.empty());
        const double scale = text.ends_with('%') ? 0.01 : 1.0;
        CHECK(std::stod(text) * scale == doctest::Approx(value.get<double>()).epsilon(1e-12));
      }
    }
  }
  return numbers;
}

TEST_CASE("LibreOffice calculates every number of the JSON") {
  if (!office_is_here()) return;
  const testing::TemporaryFolder folder;
  const Sweep sweep = sweep_of_all_kinds();
  write_workbook(folder / "plans.xlsx", sweep);
  const auto sheets = calculated(folder / "", folder / "plans.xlsx");
  const std::vector<Json> rows = sweep_rows(sweep);
  CHECK(compare(sheets.at("Capacity"), rows) >= 5 * 15);
  CHECK(compare(sheets.at("Plans"), rows) >= 5 * 40);
  // Each key of the JSON is on a sheet, and is explained.
  std::set<std::string> shown{"tokens", "goodput"};
  for (const char* sheet : {"Capacity", "Plans"})
    for (const std::string& title : sheets.at(sheet).front()) shown.insert(title.substr(0, title.find(" (")));
  std::set<std::string> explained;
  for (const std::vector<std::string>& line : sheets.at("Columns")) explained.insert(line.front());
  for (const SweepColumn& column : sweep_columns()) {
    INFO(column.key);
    CHECK(shown.contains(column.key));
    CHECK(explained.contains(column.key));
  }
  for (const std::string& title : shown) CHECK(explained.contains(title));
}

TEST_CASE("in LibreOffice a changed price changes costs and the front, and nothing else") {
  if (!office_is_here()) return;
  const testing::TemporaryFolder folder;
  Sweep sweep = sweep_of_all_kinds();
  for (SweepPoint& point : sweep.points)
    for (NodeGroup& group : point.cluster.groups)
      if (group.price->per_device_hour == 3.0 && point.cluster.name == "four") group.price->per_device_hour = 3.0625;
  write_workbook(folder / "plans.xlsx", sweep);
  unpack(folder / "plans.xlsx", folder / "parts");
  std::string text = read_file(folder / "parts/xl/worksheets/sheet1.xml");
  const std::string before = "<v>3.0625</v>";
  const std::size_t at = text.find(before);
  REQUIRE(at != std::string::npos);
  REQUIRE(text.find(before, at + 1) == std::string::npos);
  text.replace(at, before.size(), "<v>30.5</v>");
  std::ofstream(folder / "parts/xl/worksheets/sheet1.xml", std::ios::binary) << text;
  REQUIRE(calls(
      fmt::format("cd '{}' && '{}' -E tar cf ../changed.xlsx --format=zip '[Content_Types].xml' _rels docProps xl",
                  (folder / "parts").string(), PARPLAN_CMAKE)));
  const auto sheets = calculated(folder / "", folder / "changed.xlsx");
  const std::vector<Json> unchanged = sweep_rows(sweep);
  for (SweepPoint& point : sweep.points)
    for (NodeGroup& group : point.cluster.groups)
      if (group.price->per_device_hour == 3.0625) group.price->per_device_hour = 30.5;
  const std::vector<Json> rows = sweep_rows(sweep);
  // Now the mixed cluster, slower than two others, is the cheapest.
  CHECK(unchanged[3].at("pareto") == false);
  CHECK(rows[3].at("pareto") == true);
  CHECK(rows[0].at("cost").get<double>() == doctest::Approx(unchanged[0].at("cost").get<double>() * 30.5 / 3.0625));
  CHECK(compare(sheets.at("Capacity"), rows) >= 5 * 15);
}

}  // namespace
}  // namespace parplan
