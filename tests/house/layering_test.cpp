// The table of rooms of docs/architecture.md as data, and other checks that read the tree's text.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
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

enum class Subfolders { belong_to_the_room, must_have_their_own_row };

struct Room {
  std::string_view folder;
  std::vector<std::string_view> may_include;  // and what these may include
  Subfolders subfolders = Subfolders::belong_to_the_room;
};

const std::vector<Room>& rooms() {
  static const std::vector<Room> table = {
      {"planner/base", {}},
      {"planner/graph", {"planner/base"}},
      {"models", {"planner/graph"}},
      {"planner/cluster", {"planner/graph"}},
      {"planner/plan", {"planner/cluster"}},
      {"planner/parallel", {"planner/plan"}},
      {"planner/schedule", {"planner/plan"}},
      {"planner/program", {"planner/plan"}},
      {"planner/cost", {"planner/program"}},
      {"planner/simulator", {"planner/cost"}},
      {"planner/search", {"planner/parallel", "planner/schedule", "planner/simulator"}},
      {"planner/report", {"planner/plan", "planner/program"}},
      {"planner/export", {"planner/plan", "planner/program"}},
      {"planner/explain", {"planner/search"}},
      {"planner", {"planner/explain"}, Subfolders::must_have_their_own_row},
      {"planner/validate", {"planner", "planner/report"}},
      {"planner/calibrate", {"planner", "planner/report"}},
      {"runtime/device", {"planner/graph"}},
      {"runtime/plugin", {"planner/base"}},
      {"runtime/comm", {"runtime/device", "runtime/plugin"}},
      {"runtime/launch", {"runtime/comm"}},
      {"runtime/comm/mpi", {"runtime/launch"}},
      {"runtime/checkpoint", {"runtime/launch", "planner/program"}},
      {"runtime", {"runtime/checkpoint"}, Subfolders::must_have_their_own_row},
      {"cli",
       {"planner", "planner/validate", "planner/calibrate", "runtime", "models", "planner/report", "planner/export"}},
      {"tests", {"cli"}},
  };
  return table;
}

// Libraries that take long to compile, or that not every machine has: never in a header, and only
// in the folders of `only_in` if it names any (tests may use them too).
struct HeavyLibrary {
  std::string_view name;
  std::string_view include;  // a regular expression for the text between < and > or the quotes
  std::vector<std::string_view> only_in;
  // The folders are closed: their headers may include the library, and nothing outside includes
  // their headers.
  bool shut = false;
};

const std::vector<HeavyLibrary>& heavy_libraries() {
  static const std::vector<HeavyLibrary> table = {
      // But small_vector, the type of lists in planner/program, which adds 0.07 s to a file.
      {"Boost", "boost/(?!container/small_vector\\.hpp).*", {"planner/graph", "planner/cluster"}},
      {"Eigen", "(unsupported/)?Eigen/.*", {"planner/cost", "planner/calibrate", "runtime/device/cpu"}},
      // Only base reads; a writer of files may use the emitter.
      {"yaml-cpp", "yaml-cpp/.*", {"planner/base", "planner/cluster"}},
      {"pugixml", "pugixml\\.hpp", {"planner/cluster"}},
      {"CLI11", "CLI/.*", {"cli"}},
      {"libfccp", "libfccp/.*", {"planner/validate"}},
      {"libxlsxwriter", "xlsxwriter(/.*|\\.h)", {"planner/report"}},
      {"MPI", "mpi\\.h", {"runtime/comm/mpi"}},
      {"CUDA",
       "(cuda|cublas|cudnn|cub/|thrust/|nvml|nvtx3/).*",
       {"runtime/device/cuda", "runtime/comm/nccl", "runtime/comm/cuda_local", "runtime/comm/cuda_plugin"},
       true},
      {"NCCL", "nccl\\.h", {"runtime/comm/nccl", "runtime/comm/cuda_plugin"}, true},
  };
  return table;
}

// Only cli/ prints and ends the process.
struct ReservedCall {
  std::string_view what;
  std::regex pattern;
};

const std::vector<ReservedCall>& reserved_for_cli() {
  static const std::vector<ReservedCall> table = {
      {"prints",
       std::regex("\\bstd::(cout|cerr|clog)\\b|\\b(printf|puts|putchar)\\s*\\(|\\bfmt::print\\s*\\(|<iostream>")},
      {"ends the process", std::regex("\\b(std::)?(exit|_Exit|quick_exit|abort)\\s*\\(\\s*(\\d|EXIT_|\\))")},
  };
  return table;
}

bool is_inside(std::string_view path, std::string_view folder) {
  return path.size() > folder.size() && path.starts_with(folder) && path[folder.size()] == '/';
}

const Room* row_for(std::string_view folder) {
  for (const Room& room : rooms()) {
    if (room.folder == folder) return &room;
  }
  return nullptr;
}

// The room that a file belongs to: the longest folder of the table that holds it.
const Room* room_of(const std::string& path) {
  const Room* best = nullptr;
  for (const Room& room : rooms()) {
    if (!is_inside(path, room.folder)) continue;
    const bool directly = path.find('/', room.folder.size() + 1) == std::string::npos;
    if (!directly && room.subfolders == Subfolders::must_have_their_own_row) continue;
    if (best == nullptr || room.folder.size() > best->folder.size()) best = &room;
  }
  return best;
}

void add_reachable(const Room& room, std::set<std::string_view>& reached) {
  if (!reached.insert(room.folder).second) return;
  for (std::string_view next : room.may_include) add_reachable(*row_for(next), reached);
}

// Folders that files of `room` may include from, itself among them.
std::set<std::string_view> reachable_from(const Room& room) {
  std::set<std::string_view> reached;
  add_reachable(room, reached);
  return reached;
}

struct Include {
  int line = 0;
  std::string target;
  bool quoted = false;  // "target", not <target>
};

std::vector<Include> includes_of(const std::string& text) {
  static const std::regex pattern(R"re(^\s*#\s*include\s*(<([^>]+)>|"([^"]+)"))re");
  std::vector<Include> includes;
  std::istringstream lines(text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    std::smatch match;
    if (!std::regex_search(line, match, pattern)) continue;
    const bool quoted = match[3].matched;
    includes.push_back({number, quoted ? match[3].str() : match[2].str(), quoted});
  }
  return includes;
}

// The line without its comment and without the contents of its string literals.
std::string code_of(const std::string& line) {
  static const std::regex literal(R"re("([^"\\]|\\.)*")re");
  std::string code = std::regex_replace(line, literal, "\"\"");
  const std::size_t comment = code.find("//");
  return comment == std::string::npos ? code : code.substr(0, comment);
}

// Source files of the tree by path from `root`, in order; build folders and data are outside of the
// top folders that are read.
std::vector<std::string> sources(const fs::path& root) {
  static const std::set<std::string> kinds = {".h", ".cpp", ".cu", ".cuh", ".inc"};
  std::vector<std::string> found;
  for (const char* top : {"planner", "models", "runtime", "cli", "tests"}) {
    if (!fs::exists(root / top)) continue;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(root / top)) {
      if (entry.is_regular_file() && kinds.contains(entry.path().extension().string())) {
        found.push_back(entry.path().lexically_relative(root).generic_string());
      }
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

void check_house_include(const fs::path& root, const std::string& path, const Room& room, const Include& include,
                         std::vector<std::string>& faults) {
  const std::string place = fmt::format("{}:{}: ", path, include.line);
  if (!fs::exists(root / include.target)) {
    faults.push_back(place + fmt::format("\"{}\" is no file by its path from the top folder", include.target));
    return;
  }
  const Room* target = room_of(include.target);
  if (target == nullptr) {
    faults.push_back(place + fmt::format("\"{}\" belongs to no room of the table", include.target));
  } else if (!reachable_from(room).contains(target->folder)) {
    faults.push_back(place +
                     fmt::format("{} may not include {} (\"{}\")", room.folder, target->folder, include.target));
  }
}

void check_library_include(const std::string& path, const Include& include, std::vector<std::string>& faults) {
  const std::string place = fmt::format("{}:{}: ", path, include.line);
  for (const HeavyLibrary& library : heavy_libraries()) {
    const auto is_its = [&](std::string_view file) {
      return std::any_of(library.only_in.begin(), library.only_in.end(),
                         [&](auto folder) { return is_inside(file, folder); });
    };
    const bool allowed = is_inside(path, "tests") || is_its(path);
    if (library.shut && include.quoted && is_its(include.target) && !allowed) {
      faults.push_back(place +
                       fmt::format("\"{}\" is for files of {} only", include.target, fmt::join(library.only_in, ", ")));
    }
    if (!std::regex_match(include.target, std::regex(std::string(library.include)))) continue;
    if ((path.ends_with(".h") || path.ends_with(".cuh")) && !(library.shut && allowed)) {
      faults.push_back(place + fmt::format("{} belongs in .cpp and .cu files, not in headers", library.name));
    }
    if (!allowed) {
      faults.push_back(place + fmt::format("{} is used in {} only", library.name, fmt::join(library.only_in, ", ")));
    }
  }
}

// Everything in the tree at `root` that breaks a rule of the house, as "path:line: what".
std::vector<std::string> house_faults(const fs::path& root) {
  std::vector<std::string> faults;
  for (const std::string& path : sources(root)) {
    const Room* room = room_of(path);
    if (room == nullptr) {
      faults.push_back(path + ": belongs to no room of the table");
      continue;
    }
    const std::string text = text_of(root / path);
    const std::vector<Include> includes = includes_of(text);
    for (const Include& include : includes) {
      if (include.quoted) {
        check_house_include(root, path, *room, include, faults);
      } else if (fs::exists(root / include.target)) {
        faults.push_back(fmt::format("{}:{}: <{}> is a file of the house and stands in quotes", path, include.line,
                                     include.target));
      }
      check_library_include(path, include, faults);
    }
    if (path.ends_with(".h") && text.find("#pragma once") == std::string::npos) {
      faults.push_back(path + ": no #pragma once");
    }
    if (path.ends_with(".cpp")) {
      const std::string header = path.substr(0, path.size() - 4) + ".h";
      if (fs::exists(root / header) && (includes.empty() || includes.front().target != header)) {
        faults.push_back(fmt::format("{}: its own header \"{}\" is not its first include", path, header));
      }
    }
    if (room->folder == "cli" || room->folder == "tests") continue;
    std::istringstream lines(text);
    std::string line;
    for (int number = 1; std::getline(lines, line); ++number) {
      const std::string code = code_of(line);
      for (const ReservedCall& call : reserved_for_cli()) {
        if (std::regex_search(code, call.pattern)) {
          faults.push_back(fmt::format("{}:{}: {}; only cli/ may", path, number, call.what));
        }
      }
    }
  }
  return faults;
}

using Faults = std::vector<std::string>;

}  // namespace

TEST_CASE("every file of the tree keeps to the table of rooms") {
  const Faults faults = house_faults(PARPLAN_SOURCE_DIR);
  for (const std::string& fault : faults) MESSAGE(fault);
  CHECK(faults == Faults{});
  CHECK(sources(PARPLAN_SOURCE_DIR).size() > 50);  // the tree was read
}

TEST_CASE("the table of rooms names rooms that it holds and has no cycle") {
  for (const Room& room : rooms()) {
    for (std::string_view next : room.may_include) {
      CAPTURE(room.folder);
      CAPTURE(next);
      REQUIRE(row_for(next) != nullptr);
      CHECK_FALSE(reachable_from(*row_for(next)).contains(room.folder));
    }
  }
}

TEST_CASE("the absences that matter follow from the table of rooms") {
  for (const char* folder : {"runtime", "runtime/comm", "runtime/device"}) {
    const auto reached = reachable_from(*row_for(folder));
    for (const char* absent : {"planner/parallel", "planner/schedule", "planner/cost", "planner/simulator",
                               "planner/search", "planner", "planner/report", "models", "cli"}) {
      CHECK_FALSE(reached.contains(absent));
    }
  }
  for (const Room& room : rooms()) {
    if (room.folder != "planner" && !is_inside(room.folder, "planner")) continue;
    for (const char* absent : {"runtime", "runtime/comm", "runtime/device", "models", "cli", "tests"}) {
      CHECK_FALSE(reachable_from(room).contains(absent));
    }
  }
}

TEST_CASE("the reference trainer shares kernels but no lowering with the Program") {
  for (const char* path : {"tests/numerics/reference.h", "tests/numerics/reference.cpp"}) {
    const std::vector<Include> includes = includes_of(text_of(fs::path(PARPLAN_SOURCE_DIR) / path));
    CHECK_FALSE(includes.empty());
    for (const Include& include : includes) {
      if (!include.quoted) continue;
      CAPTURE(include.target);
      CHECK((is_inside(include.target, "planner/base") || is_inside(include.target, "planner/graph") ||
             is_inside(include.target, "runtime/device") || is_inside(include.target, "tests/numerics")));
    }
  }
}

// doctest's CMake script makes a list of the names, one CTest entry each: a name with one of these
// characters is split into pieces that are no test case, and an entry that runs no test case
// passes.
std::vector<std::string> names_that_ctest_splits(const std::string& text) {
  static const std::regex pattern(R"re(TEST_CASE\(\s*"(([^"\\]|\\.)*)")re");
  std::vector<std::string> names;
  for (auto match = std::sregex_iterator(text.begin(), text.end(), pattern); match != std::sregex_iterator(); ++match) {
    if ((*match)[1].str().find_first_of(";[]\\*?") != std::string::npos) names.push_back((*match)[1]);
  }
  return names;
}

TEST_CASE("every test case has a name that CTest runs as one") {
  for (const std::string& path : sources(PARPLAN_SOURCE_DIR)) {
    if (!is_inside(path, "tests") || is_inside(path, "tests/house")) continue;
    CAPTURE(path);
    for (const std::string& name : names_that_ctest_splits(text_of(fs::path(PARPLAN_SOURCE_DIR) / path))) {
      FAIL_CHECK("a test case's name holds one of ; [ ] \\ * ?: " << name);
    }
  }
  CHECK(names_that_ctest_splits("TEST_CASE(\"a\") {}\nTEST_CASE(\n    \"b; c\" * skip()) {}\nTEST_CASE(\"[d]\") {}") ==
        Faults{"b; c", "[d]"});
}

// Whether a temporary file has a name that another test, or the same one in another build, may use
// at the same time.
bool names_a_shared_temporary_file(const std::string& text) {
  static const std::regex pattern(
      R"re(\b(temp_directory_path|tmpnam|tempnam|tmpfile|P_tmpdir)\b|"TMPDIR"|"/tmp/parplan)re");
  return std::regex_search(text, pattern);
}

TEST_CASE("tests put their files into folders of their own") {
  for (const std::string& path : sources(PARPLAN_SOURCE_DIR)) {
    if (!is_inside(path, "tests") || is_inside(path, "tests/house") || path == "tests/temporary_folder.h") continue;
    CAPTURE(path);
    CHECK_MESSAGE(!names_a_shared_temporary_file(text_of(fs::path(PARPLAN_SOURCE_DIR) / path)),
                  "a test's files are for TemporaryFolder of tests/temporary_folder.h");
  }
  CHECK(names_a_shared_temporary_file("std::filesystem::temp_directory_path() / \"data.bin\""));
  CHECK_FALSE(names_a_shared_temporary_file("TemporaryFolder folder;"));
}

TEST_CASE("a tree that keeps to the table has no faults") {
  const FakeTree tree({
      {"planner/base/units.h", "#pragma once\n#include <string>\n"},
      {"planner/graph/op_kind.h", "#pragma once\n#include \"planner/base/units.h\"\n"},
      {"planner/graph/op_kind.cpp",
       "#include \"planner/graph/op_kind.h\"\n#include <boost/graph/adjacency_list.hpp>\n"},
      {"planner/search/space.cpp", "#include \"planner/base/units.h\"  // reached through many rooms\n"},
      {"runtime/device/cpu/kernels/gemm.cpp", "#include <Eigen/Core>\n#include \"planner/graph/op_kind.h\"\n"},
      {"runtime/comm/local/ranks.cpp", "#include \"runtime/device/cpu/cpu.h\"\n"},
      {"runtime/device/cpu/cpu.h", "#pragma once\n// prints with std::cout only in this comment\n"},
      {"cli/main.cpp", "#include <iostream>\n#include \"runtime/device/cpu/cpu.h\"\nint main() { std::exit(0); }\n"},
      {"tests/cli/cli_test.cpp", "#include \"planner/graph/op_kind.h\"\n"},
  });
  CHECK(house_faults(tree.root()) == Faults{});
}

TEST_CASE("an include against the table of rooms is found") {
  const FakeTree tree({
      {"planner/base/units.h", "#pragma once\n#include \"planner/graph/op_kind.h\"\n"},
      {"planner/graph/op_kind.h", "#pragma once\n"},
      {"planner/program/lower.h", "#pragma once\n"},
      {"planner/schedule/gpipe.h", "#pragma once\n"},
      {"planner/schedule/one.cpp", "#include \"planner/program/lower.h\"\n"},
      {"planner/suggest.h", "#pragma once\n#include \"runtime/run.h\"\n"},
      {"planner/search/space.cpp", "#include \"planner/suggest.h\"\n"},
      {"runtime/run.h", "#pragma once\n#include \"planner/schedule/gpipe.h\"\n"},
      {"runtime/device/cpu/gemm.cpp", "\n#include \"planner/program/lower.h\"\n"},
  });
  CHECK(
      house_faults(tree.root()) ==
      Faults{
          "planner/base/units.h:2: planner/base may not include planner/graph (\"planner/graph/op_kind.h\")",
          "planner/schedule/one.cpp:1: planner/schedule may not include planner/program (\"planner/program/lower.h\")",
          "planner/search/space.cpp:1: planner/search may not include planner (\"planner/suggest.h\")",
          "planner/suggest.h:2: planner may not include runtime (\"runtime/run.h\")",
          "runtime/device/cpu/gemm.cpp:2: runtime/device may not include planner/program (\"planner/program/lower.h\")",
          "runtime/run.h:2: runtime may not include planner/schedule (\"planner/schedule/gpipe.h\")"});
}

TEST_CASE("a folder without a row and an include without its path are found") {
  const FakeTree tree({
      {"planner/utils/strings.h", "#pragma once\n"},
      {"runtime/metrics/count.cpp", "int count;\n"},
      {"planner/base/units.h", "#pragma once\n"},
      {"planner/base/text.cpp", "#include \"units.h\"\n#include <planner/base/units.h>\n"},
      {"planner/graph/op_kind.cpp", "#include \"planner/utils/strings.h\"\n"},
  });
  CHECK(house_faults(tree.root()) ==
        Faults{"planner/base/text.cpp:1: \"units.h\" is no file by its path from the top folder",
               "planner/base/text.cpp:2: <planner/base/units.h> is a file of the house and stands in quotes",
               "planner/graph/op_kind.cpp:1: \"planner/utils/strings.h\" belongs to no room of the table",
               "planner/utils/strings.h: belongs to no room of the table",
               "runtime/metrics/count.cpp: belongs to no room of the table"});
}

TEST_CASE("a heavy library in a header or in the wrong room is found") {
  const FakeTree tree({
      {"planner/graph/order.h", "#pragma once\n#include <boost/graph/topological_sort.hpp>\n"},
      {"planner/cost/fit.h", "#pragma once\n#include <Eigen/Dense>\n"},
      {"planner/simulator/play.cpp", "#include <cuda_runtime.h>\n"},
      {"planner/plan/plan.cpp", "#include <yaml-cpp/yaml.h>\n"},
      {"runtime/comm/mpi/mpi.h", "#pragma once\n#include <mpi.h>\n"},
      {"runtime/device/cuda/kernels.cu", "#include <cublas_v2.h>\n"},
      {"runtime/device/cuda/kernel_launch.h", "#pragma once\n#include <cuda_runtime.h>\n"},
      {"runtime/comm/nccl/ranks.cpp", "#include <nccl.h>\n#include \"runtime/device/cuda/kernel_launch.h\"\n"},
      {"runtime/comm/a_world.cpp", "#include \"runtime/device/cuda/kernel_launch.h\"\n"},
      {"runtime/comm/gpu_plugin.h", "#pragma once\n#include <cuda_runtime.h>\n"},
  });
  const std::string cuda_rooms =
      "runtime/device/cuda, runtime/comm/nccl, runtime/comm/cuda_local, runtime/comm/cuda_plugin";
  CHECK(house_faults(tree.root()) ==
        Faults{"planner/cost/fit.h:2: Eigen belongs in .cpp and .cu files, not in headers",
               "planner/graph/order.h:2: Boost belongs in .cpp and .cu files, not in headers",
               "planner/plan/plan.cpp:1: yaml-cpp is used in planner/base, planner/cluster only",
               "planner/simulator/play.cpp:1: CUDA is used in " + cuda_rooms + " only",
               "runtime/comm/a_world.cpp:1: \"runtime/device/cuda/kernel_launch.h\" is for files of " + cuda_rooms +
                   " only",
               "runtime/comm/gpu_plugin.h:2: CUDA belongs in .cpp and .cu files, not in headers",
               "runtime/comm/gpu_plugin.h:2: CUDA is used in " + cuda_rooms + " only",
               "runtime/comm/mpi/mpi.h:2: MPI belongs in .cpp and .cu files, not in headers"});
}

TEST_CASE("library code that prints or ends the process is found and so are headers out of order") {
  const FakeTree tree({
      {"planner/base/error.h", "// no guard\n"},
      {"planner/base/error.cpp", "#include <string>\n#include \"planner/base/error.h\"\n"},
      {"planner/cost/fit.cpp", "void f() { std::cerr << 1; }\nvoid g() { std::exit(1); }\nauto h = \"printf(\";\n"},
      {"runtime/run.cpp", "#include <iostream>\nvoid f() { abort(\"a rank's own function\"); printf(\"x\"); }\n"},
  });
  CHECK(house_faults(tree.root()) ==
        Faults{"planner/base/error.cpp: its own header \"planner/base/error.h\" is not its first include",
               "planner/base/error.h: no #pragma once",
               "planner/cost/fit.cpp:1: prints; only cli/ may",
               "planner/cost/fit.cpp:2: ends the process; only cli/ may",
               "runtime/run.cpp:1: prints; only cli/ may",
               "runtime/run.cpp:2: prints; only cli/ may"});
}
