// The length of lines and the openings of sentences, checked by reading the tree's text.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
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

constexpr int prose_columns = 100;  // of comments and of the prose of pages
constexpr int code_columns = 120;
constexpr int no_limit = 0;

enum class Syntax { cpp, hash_comments, markdown };

struct Kind {
  std::vector<std::string_view> endings;  // of a file's path
  Syntax syntax;
  int code;  // limit for lines that are no prose
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> table = {
      {{".h", ".cpp", ".cu", ".cuh", ".inc"}, Syntax::cpp, code_columns},
      {{"CMakeLists.txt", ".cmake", ".sh", ".py", ".ci/run", ".ci/sanitizers", ".ci/tidy"},
       Syntax::hash_comments,
       code_columns},
      {{".yaml", ".yml"}, Syntax::hash_comments, no_limit},  // data: numbers and where they come from
      {{".md"}, Syntax::markdown, no_limit},                 // tables, blocks of code
  };
  return table;
}

// The parts of the tree that are read; and the folders with texts of others, or inputs of tests.
const std::vector<std::string_view> tops = {"planner", "models",    "runtime",        "cli",      "tests",  "configs",
                                            "docs",    "README.md", "CMakeLists.txt", "setup.sh", ".ci"};
const std::vector<std::string_view> not_read = {"tests/data/", "tests/fuzz/corpus/"};

// Lines that may be longer, besides raw string literals, and tables, blocks of code and generated
// parts in pages.
struct Exception {
  std::string_view what;
  std::string_view pattern;
};
const std::vector<Exception>& exceptions() {
  static const std::vector<Exception> table = {
      {"an address", "https?://"},
      {"nowhere to break", R"(^\s*((//|#|[-*]|[0-9]+\.)\s+)?\S+$)"},
      {"an interpreter's line", "^#!"},
  };
  return table;
}

enum class Part { code, prose, verbatim };

struct Line {
  std::string text;
  Part part = Part::code;  // the line as a whole
  std::string prose;       // a comment, perhaps after code, or the text of a page
};

std::string stripped(const std::string& text) {
  const auto begin = text.find_first_not_of(" \t");
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(" \t\r") + 1 - begin);
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// Tells comments, strings and raw strings of C++ apart, character by character.
std::vector<Line> cpp_lines(const std::string& text) {
  std::vector<Line> lines(1);
  enum class State { code, string, character, raw, line_comment, block_comment } state = State::code;
  std::string raw_end;
  bool has_code = false, has_raw = false;
  const auto end_line = [&] {
    Line& line = lines.back();
    line.part = has_raw ? Part::verbatim : !has_code && !line.prose.empty() ? Part::prose : Part::code;
    has_code = false;
    has_raw = state == State::raw;
  };
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\n') {
      if (state == State::line_comment) state = State::code;
      end_line();
      lines.emplace_back();
      continue;
    }
    lines.back().text += c;
    const auto take = [&](std::size_t more) {
      lines.back().text += text.substr(i + 1, more);
      i += more;
    };
    switch (state) {
      case State::code:
        if (text.compare(i, 2, "//") == 0 || text.compare(i, 2, "/*") == 0) {
          state = text[i + 1] == '/' ? State::line_comment : State::block_comment;
          take(1);
          break;
        }
        if (!std::isspace(static_cast<unsigned char>(c))) has_code = true;
        if (c == '"' && i > 0 && text[i - 1] == 'R') {
          const std::size_t open = text.find('(', i);
          raw_end = ")" + text.substr(i + 1, open - i - 1) + "\"";
          take(open - i);
          state = State::raw;
          has_raw = true;
        } else if (c == '"') {
          state = State::string;
        } else if (c == '\'' && (i == 0 || !std::isalnum(static_cast<unsigned char>(text[i - 1])))) {
          state = State::character;  // and no separator of thousands
        }
        break;
      case State::string:
      case State::character:
        if (c == '\\' && i + 1 < text.size() && text[i + 1] != '\n')
          take(1);
        else if (c == (state == State::string ? '"' : '\''))
          state = State::code;
        break;
      case State::raw:
        if (text.compare(i, raw_end.size(), raw_end) == 0) {
          take(raw_end.size() - 1);
          state = State::code;
        }
        break;
      case State::line_comment:
        lines.back().prose += c;
        break;
      case State::block_comment:
        if (text.compare(i, 2, "*/") == 0) {
          take(1);
          state = State::code;
        } else {
          lines.back().prose += c;
        }
        break;
    }
  }
  end_line();
  return lines;
}

std::vector<Line> hash_comment_lines(const std::string& text) {
  std::vector<Line> lines;
  for (const std::string& line : split_lines(text)) {
    const std::string content = stripped(line);
    const bool comment = content.starts_with("#");
    lines.push_back({line, comment ? Part::prose : Part::code, comment ? content.substr(1) : ""});
  }
  return lines;
}

std::vector<Line> markdown_lines(const std::string& text) {
  static const std::regex list_mark("^([-*]|[0-9]+\\.) ");
  std::vector<Line> lines;
  bool fenced = false, generated = false, indented = false, blank_before = true, in_list = false;
  for (const std::string& line : split_lines(text)) {
    const std::string content = stripped(line);
    const bool fence = content.starts_with("```");
    if (fence) fenced = !fenced;
    if (content.starts_with("<!-- generated: ")) generated = true;  // tests/cli/generated_parts.h
    if (content.starts_with("<!-- end of generated")) generated = false;
    if (!content.empty() && line[0] != ' ') in_list = std::regex_search(content, list_mark);
    indented = !in_list && line.starts_with("    ") && (indented || blank_before);
    const bool verbatim =
        fence || fenced || indented || generated || content.starts_with("|") || content.starts_with("<!--");
    // Cells of a table are prose of any length.
    const bool prose = !fence && !fenced && !indented;
    lines.push_back({line, verbatim ? Part::verbatim : Part::prose, prose ? content : ""});
    blank_before = content.empty();
  }
  return lines;
}

std::vector<Line> lines_of(Syntax syntax, const std::string& text) {
  return syntax == Syntax::cpp             ? cpp_lines(text)
         : syntax == Syntax::hash_comments ? hash_comment_lines(text)
                                           : markdown_lines(text);
}

// Characters of UTF-8, not bytes.
int columns(const std::string& text) {
  return static_cast<int>(std::ranges::count_if(text, [](char c) { return (c & 0xC0) != 0x80; }));
}

bool is_excepted(const std::string& line) {
  return std::ranges::any_of(exceptions(), [&](const Exception& exception) {
    return std::regex_search(line, std::regex(std::string(exception.pattern)));
  });
}

// Indices of the lines whose prose has a sentence that opens with "Of": the subject comes first.
std::vector<std::size_t> sentences_that_open_with_of(const std::vector<Line>& lines) {
  static const std::regex opening(R"((^|[.:;!?|]["')]* |[-*] )Of($|[ ,]))");
  std::vector<std::size_t> found;
  std::string before;  // the line before, in the same comment or paragraph
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const std::string prose = stripped(lines[i].prose);
    const bool behind_code = lines[i].part == Part::code;
    const bool continues =
        !before.empty() && !behind_code && std::string(".:;!?|").find(before.back()) == std::string::npos;
    if (std::regex_search(continues ? "_ " + prose : prose, opening)) found.push_back(i);
    before = prose;
  }
  return found;
}

const Kind* kind_of(const std::string& path) {
  for (const Kind& kind : kinds())
    if (std::ranges::any_of(kind.endings, [&](std::string_view ending) { return path.ends_with(ending); }))
      return &kind;
  return nullptr;
}

std::vector<std::string> files_to_read(const fs::path& root) {
  std::vector<std::string> found;
  const auto add = [&](const fs::path& path) {
    const std::string name = path.lexically_relative(root).generic_string();
    const bool skipped =
        std::ranges::any_of(not_read, [&](std::string_view folder) { return name.starts_with(folder); });
    if (!skipped && kind_of(name) != nullptr) found.push_back(name);
  };
  for (const std::string_view top : tops) {
    const fs::path path = root / top;
    if (fs::is_regular_file(path)) add(path);
    if (!fs::is_directory(path)) continue;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(path))
      if (entry.is_regular_file()) add(entry.path());
  }
  std::ranges::sort(found);
  return found;
}

Faults prose_faults(const fs::path& root) {
  Faults faults;
  for (const std::string& path : files_to_read(root)) {
    const Kind& kind = *kind_of(path);
    const std::vector<Line> lines = lines_of(kind.syntax, text_of(root / path));
    for (std::size_t i = 0; i < lines.size(); ++i) {
      const Line& line = lines[i];
      const int most = line.part == Part::prose ? prose_columns : line.part == Part::code ? kind.code : no_limit;
      if (most != no_limit && columns(line.text) > most && !is_excepted(line.text))
        faults.push_back(fmt::format("{}:{}: {} columns of at most {}", path, i + 1, columns(line.text), most));
    }
    for (const std::size_t i : sentences_that_open_with_of(lines))
      faults.push_back(fmt::format("{}:{}: a sentence opens with \"Of\"", path, i + 1));
  }
  return faults;
}

std::string words(int columns) {
  std::string text;
  while (static_cast<int>(text.size()) < columns) text += "word ";
  text.resize(static_cast<std::size_t>(columns - 1));
  return text + "x";
}

}  // namespace

TEST_CASE("lines of code, comments and pages are not too long and no sentence opens with Of") {
  const Faults faults = prose_faults(PARPLAN_SOURCE_DIR);
  for (const std::string& fault : faults) MESSAGE(fault);
  CHECK(faults == Faults{});
  CHECK(files_to_read(PARPLAN_SOURCE_DIR).size() > 500);  // the tree was read
}

TEST_CASE("lines that are too long are found in every kind of file") {
  const FakeTree tree({
      {"planner/base/a.h", "// " + words(97) + "\n// " + words(98) + "\n"},
      {"planner/base/b.cpp", "int " + words(116) + "\nint " + words(117) + "\nint c;  // " + words(108) + "\n"},
      {"runtime/device/cuda/k.cu", "/* " + words(98) + " */\n"},
      {"CMakeLists.txt", "# " + words(99) + "\nset(" + words(117) + "\n"},
      {"configs/devices/d.yaml", "# " + words(99) + "\nsources: " + words(200) + "\n"},
      {"docs/page.md", words(100) + "\n\n" + words(101) + "\n\n- " + words(99) + "\n"},
      {"README.md", "# " + words(99) + "\n"},
  });
  CHECK(prose_faults(tree.root()) ==
        Faults{"CMakeLists.txt:1: 101 columns of at most 100", "CMakeLists.txt:2: 121 columns of at most 120",
               "README.md:1: 101 columns of at most 100", "configs/devices/d.yaml:1: 101 columns of at most 100",
               "docs/page.md:3: 101 columns of at most 100", "docs/page.md:5: 101 columns of at most 100",
               "planner/base/a.h:2: 101 columns of at most 100", "planner/base/b.cpp:2: 121 columns of at most 120",
               "runtime/device/cuda/k.cu:1: 104 columns of at most 100"});
}

TEST_CASE("lines that may be longer are let be") {
  const std::string unbroken(150, 'x');
  const FakeTree tree({
      {"planner/base/a.cpp", "// https://example.org/" + unbroken + " for this\n// " + unbroken + "\nauto a = R\"(\n" +
                                 words(150) + "\n// " + words(150) + ")\";\n" + unbroken + "\n"},
      {"docs/page.md", "| " + words(150) + " |\n\n```text\n" + words(150) + "\n```\n\n    " + words(150) + "\n    # " +
                           words(150) + "\n\n[page](https://example.org/" + unbroken + ") of this\n"},
      {"tests/data/models/m.yaml", "# " + words(150) + "\n"},
      {"tests/fuzz/corpus/plan/p.yaml", "# Of " + words(150) + "\n"},
      {"models/m.yaml", "source: " + words(150) + "\n"},
      // 100 characters, 103 bytes.
      {"README.md", words(97) + " \xE2\x86\x90"
                                "x\n"},
  });
  CHECK(prose_faults(tree.root()) == Faults{});
}

TEST_CASE("sentences that open with Of are found in comments and pages") {
  const FakeTree tree({
      {"planner/base/a.h",
       "// Of two, the first.\n"
       "int a;  // of these the least\n"
       "int c;  // Of c\n"
       "// One is taken. Of the others\n"
       "// nothing is known; it is one\n"
       "// Of them.\n"
       "// That is all.\n"
       "// Of these the last.\n"
       "int b;  // Of b.\n"
       "const char* text = \"Of this text\";\n"
       "const int thousand = 1'000; /* Of a block. */\n"},
      {"setup.sh", "# Of packages the missing ones.\necho Of\n"},
      {"docs/page.md",
       "Of these.\n\n- Of a list\n\n| Of a cell | of |\n| a | Of a cell. |\n\n```text\nOf a block\n```\n"},
  });
  std::string found;
  for (const std::string& fault : prose_faults(tree.root())) found += fault.substr(0, fault.find(": ")) + " ";
  CHECK(found ==
        "docs/page.md:1 docs/page.md:3 docs/page.md:5 docs/page.md:6 planner/base/a.h:1 planner/base/a.h:3 "
        "planner/base/a.h:4 planner/base/a.h:8 planner/base/a.h:9 planner/base/a.h:11 setup.sh:1 ");
}

namespace {

// What pages name that is not there: places for the reader's own names, and a file that the reader
// makes.
const std::set<std::string_view> names_to_fill_in = {"tests/<room>/*.cpp", "tests/fuzz/corpus/TARGET/",
                                                     "tests/planner/program/print_test.cpp"};

// Files and folders of the tree that pages name between backticks.
std::vector<std::string> paths_named(const std::string& page) {
  static const std::regex pattern("`((planner|models|runtime|cli|tests|configs|docs)/[^` ]*)`");
  std::vector<std::string> paths;
  for (std::sregex_iterator found(page.begin(), page.end(), pattern), end; found != end; ++found)
    paths.push_back((*found)[1]);
  return paths;
}

// `planner/graph/op_kind.*` is there if one such file is.
bool is_there(const fs::path& root, const std::string& path) {
  const std::size_t star = path.find('*');
  if (star == std::string::npos) return fs::exists(root / path);
  const fs::path begin = root / path.substr(0, star);
  if (!fs::is_directory(begin.parent_path())) return false;
  return std::ranges::any_of(fs::directory_iterator(begin.parent_path()), [&](const fs::directory_entry& entry) {
    return entry.path().filename().string().starts_with(begin.filename().string());
  });
}

Faults missing_paths(const fs::path& root) {
  Faults faults;
  for (const std::string& page : files_to_read(root)) {
    if (!page.ends_with(".md")) continue;
    for (const std::string& path : paths_named(text_of(root / page)))
      if (!names_to_fill_in.contains(path) && !is_there(root, path))
        faults.push_back(fmt::format("{} names {}, which is not there", page, path));
  }
  return faults;
}

}  // namespace

TEST_CASE("every file and folder that a page names is there") {
  const Faults faults = missing_paths(PARPLAN_SOURCE_DIR);
  for (const std::string& fault : faults) MESSAGE(fault);
  CHECK(faults == Faults{});
}

TEST_CASE("a page that names what is not there is found") {
  const FakeTree tree({
      {"planner/graph/op_kind.h", "#pragma once\n"},
      {"docs/page.md", "`planner/graph/`, `planner/graph/op_kind.*`, `planner/graph/op_kind.h`, `parplan run`\n"},
      {"README.md", "`planner/graph/op_kind.cpp` and `planner/graph/tensor.*`, `cli/` and planner/none\n"},
  });
  CHECK(missing_paths(tree.root()) == Faults{"README.md names planner/graph/op_kind.cpp, which is not there",
                                             "README.md names planner/graph/tensor.*, which is not there",
                                             "README.md names cli/, which is not there"});
}
