// An op kind is a row and kernels: elsewhere, a kind is named only where it is chosen. All other
// code loops over the rows and asks them.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "tests/house/fake_tree.h"

namespace {

namespace fs = std::filesystem;
using parplan::testing::FakeTree;
using parplan::testing::text_of;
using Faults = std::vector<std::string>;

enum class Kinds {
  all,
  around_the_step,  // they have no forward op: lowering itself decides that they run
};

// The longest row that holds a file counts.
struct NamingRow {
  std::string_view place;  // a file, or a folder with everything below it
  Kinds kinds{};
  std::string_view why;
};

constexpr NamingRow naming_rows[] = {
    {"planner/graph/op_kind.h", Kinds::all, "the list of kinds"},
    {"planner/graph/ops", Kinds::all, "their rows, a file per family"},
    {"models", Kinds::all, "families build graphs"},
    {"planner/graph/engine_graph.cpp", Kinds::all, "which kinds other engines run instead"},
    {"planner/graph/trained_graph.cpp", Kinds::all, "which kinds an adapter is made of"},
    {"planner/program/orthogonalize.cpp", Kinds::all, "which products orthogonalize a matrix"},
    {"planner/program/fusion.cpp", Kinds::all, "which two kinds become which third"},
    {"runtime/device", Kinds::all, "kernels and their tables"},
    {"runtime/probe_cpu.cpp", Kinds::all, "the kernels that stand for a CPU's rates"},
    {"planner/graph", Kinds::around_the_step, "gradients of several uses are added and copied"},
    {"planner/program", Kinds::around_the_step,
     "lowering clears, widens, adds, copies, loads and updates; verifying knows so"},
    {"planner/cost/host_time.cpp", Kinds::around_the_step, "between the homes of a core, a copy is the kernel"},
    {"runtime", Kinds::around_the_step, "the executor stages what kernels load"},
};

constexpr std::string_view kinds_around_the_step[] = {
    "accumulate",  "fill_zero", "copy", "transpose_blocks",  "load_tokens",  "load_targets",
    "sum_squares", "adamw",     "sgd",  "update_loss_scale", "take_columns", "put_columns",
    "widen",       "adamw_8bit", "muon_momentum", "normalize_matrix", "newton_schulz_polynomial", "muon",
    "merge_attention", "widen_gradient", "join_magnitudes", "update_scales"};

bool holds(std::string_view place, std::string_view path) {
  return path == place || (path.size() > place.size() && path.starts_with(place) && path[place.size()] == '/');
}

const NamingRow* naming_row_for(std::string_view path) {
  const NamingRow* best = nullptr;
  for (const NamingRow& row : naming_rows)
    if (holds(row.place, path) && (best == nullptr || row.place.size() > best->place.size())) best = &row;
  return best;
}

// The kinds that the text names, each with its line; "*" stands for all of them at once.
struct Named {
  int line = 0;
  std::string kind;
};
std::vector<Named> named_kinds(const std::string& text) {
  static const std::regex pattern(R"re(\bOpKind::(\w+)|\busing\s+enum\s+(?:\w+::)*OpKind\b)re");
  std::vector<Named> found;
  std::istringstream lines(text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    const std::string code = line.substr(0, line.find("//"));
    for (auto match = std::sregex_iterator(code.begin(), code.end(), pattern); match != std::sregex_iterator(); ++match)
      found.push_back({number, (*match)[1].matched ? (*match)[1].str() : "*"});
  }
  return found;
}

std::vector<std::string> product_sources(const fs::path& root) {
  static const std::set<std::string> endings = {".h", ".cpp", ".cu", ".cuh", ".inc"};
  std::vector<std::string> found;
  for (const char* top : {"planner", "models", "runtime", "cli"}) {
    if (!fs::exists(root / top)) continue;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(root / top))
      if (entry.is_regular_file() && endings.contains(entry.path().extension().string()))
        found.push_back(entry.path().lexically_relative(root).generic_string());
  }
  std::sort(found.begin(), found.end());
  return found;
}

Faults naming_faults(const fs::path& root) {
  Faults faults;
  for (const std::string& path : product_sources(root)) {
    const NamingRow* row = naming_row_for(path);
    for (const Named& named : named_kinds(text_of(root / path))) {
      const bool step = std::ranges::find(kinds_around_the_step, named.kind) != std::end(kinds_around_the_step);
      if (row != nullptr && (row->kinds == Kinds::all || step)) continue;
      faults.push_back(fmt::format("{}:{}: names {}; what it asks belongs in the kind's row (planner/graph/ops)",
                                   path, named.line, named.kind == "*" ? "every op kind" : "op kind " + named.kind));
    }
  }
  return faults;
}

}  // namespace

TEST_CASE("op kinds are named by their rows, their kernels and those who choose them, and nowhere else") {
  const Faults faults = naming_faults(PARPLAN_SOURCE_DIR);
  for (const std::string& fault : faults) MESSAGE(fault);
  CHECK(faults == Faults{});
}

TEST_CASE("every place that may name op kinds does") {
  const fs::path root = PARPLAN_SOURCE_DIR;
  for (const NamingRow& row : naming_rows) {
    CAPTURE(row.place);
    bool names_one = row.place == "planner/graph/op_kind.h";  // it declares them
    for (const std::string& path : product_sources(root))
      names_one = names_one || (naming_row_for(path) == &row && !named_kinds(text_of(root / path)).empty());
    CHECK(names_one);
  }
  const std::string declared = text_of(root / "planner/graph/op_kind.h");
  for (const std::string_view kind : kinds_around_the_step) {
    CAPTURE(kind);
    CHECK(std::regex_search(declared, std::regex(fmt::format("\n  {},", kind))));
  }
}

TEST_CASE("an op kind that is named outside its row is found") {
  const FakeTree tree({
      {"planner/graph/ops/products.cpp", "const auto row = OpKind::linear;\n"},
      {"planner/graph/backward.cpp", "emit(OpKind::accumulate);\nif (kind == OpKind::linear) return;\n"},
      {"planner/cost/kernel_time.cpp", "// OpKind::linear\nif (kind == OpKind::copy) return;\n"},
      {"planner/program/lower.cpp", "flat_kernel(sgd ? OpKind::sgd : OpKind::adamw);\n"},
      {"planner/search/device_count_bound.cpp", "using enum OpKind;\n"},
      {"runtime/device/cuda/linear.cu", "case OpKind::linear:\n"},
      {"runtime/executor.cpp", "op == OpKind::load_tokens || op == OpKind::embedding\n"},
      {"tests/graph_test.cpp", "OpKind::linear\n"},
  });
  const std::string why = "; what it asks belongs in the kind's row (planner/graph/ops)";
  CHECK(naming_faults(tree.root()) == Faults{"planner/cost/kernel_time.cpp:2: names op kind copy" + why,
                                             "planner/graph/backward.cpp:2: names op kind linear" + why,
                                             "planner/search/device_count_bound.cpp:1: names every op kind" + why,
                                             "runtime/executor.cpp:1: names op kind embedding" + why});
}
