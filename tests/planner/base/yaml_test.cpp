#include "planner/base/yaml.h"

#include <doctest/doctest.h>

#include "tests/planner/base/error_of.h"

using namespace parplan;

namespace {

YamlNode yaml(const std::string& text) { return YamlNode::parse(text, "a.yaml"); }

std::string parse_error(const std::string& text) {
  return error_of<ConfigError>([&] { yaml(text); });
}

}  // namespace

TEST_CASE("Maps, lists and scalars are read with their places") {
  const YamlNode root = yaml("name: gpt2\nsizes:\n  - 1\n  - 2\nnothing: ~\nrate: 1.5e-3\ntied: true\n");
  CHECK(root.is_map());
  CHECK(root.keys() == std::vector<std::string>{"name", "sizes", "nothing", "rate", "tied"});
  CHECK(root.at("name").as_string() == "gpt2");
  CHECK(root.at("sizes").is_list());
  CHECK(root.at("sizes").size() == 2);
  CHECK(root.at("sizes").items()[1].as_integer() == 2);
  CHECK(root.at("sizes")[1].location() == Location{.file = "a.yaml", .line = 4, .column = 5});
  CHECK(root.at("nothing").is_null());
  CHECK_FALSE(root.find("nothing").has_value());
  CHECK_FALSE(root.find("absent").has_value());
  CHECK(root.find("rate")->as_number() == 1.5e-3);
  CHECK(root.at("tied").as_bool());
}

TEST_CASE("Quantities are read with their units") {
  const YamlNode root = yaml("{m: 80 GiB, b: 450 GB/s, t: 2 us, f: 989 TFLOP/s, p: 700 W}");
  CHECK(root.at("m").as_bytes() == Bytes(85899345920));
  CHECK(root.at("b").as_bandwidth().value == 450e9);
  CHECK(root.at("t").as_duration().value == 2e-6);
  CHECK(root.at("f").as_flop_rate().value == 989e12);
  CHECK(root.at("p").as_power().value == 700.0);
}

TEST_CASE("A long line of plain text is the same text wherever it stands, and what follows keeps its place") {
  std::string text;
  for (int i = 0; i < 2000; ++i) text += (i > 0 ? " " : "") + std::to_string(i) + (i % 3 == 0 ? "F" : "B") + "0";
  REQUIRE(text.size() > 8192);
  const std::string item = "- \"" + text + "\"\n";
  const YamlNode root = yaml("a:\n  " + item + "  - \"short\"\n  " + item + "b: |\n  x\n  " + item +
                             "  y\nc: begins\n  " + item + "  ends\nd: 'quoted\n  " + item + "  text'\nlast: 1\n");
  CHECK(root.at("a").size() == 3);
  CHECK(root.at("a")[0].as_string() == text);
  CHECK(root.at("a")[0].is_quoted());
  CHECK(root.at("a")[1].as_string() == "short");
  CHECK(root.at("a")[2].as_string() == text);
  CHECK(root.at("a")[2].location() == Location{.file = "a.yaml", .line = 4, .column = 5});
  CHECK(root.at("b").as_string() == "x\n- \"" + text + "\"\ny\n");
  CHECK(root.at("c").as_string() == "begins - \"" + text + "\" ends");
  CHECK(root.at("d").as_string() == "quoted - \"" + text + "\" text");
  CHECK(root.at("last").location() == Location{.file = "a.yaml", .line = 15, .column = 7});
  // What is no plain text is read as ever.
  const YamlNode escaped = yaml("- \"" + text + "\\n\"\n- \"" + text + " \"\n");
  CHECK(escaped[0].as_string() == text + "\n");
  CHECK(escaped[1].as_string() == text + " ");
}

TEST_CASE("A duplicate key is an error with both places") {
  CHECK(parse_error("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n") ==
        "a.yaml:5:3: error: duplicate key 'c', first given on line 3");
  CHECK(parse_error("{a: 1, a: 2}") == "a.yaml:1:8: error: duplicate key 'a', first given on line 1");
  CHECK(parse_error("- {a: 1}\n- {a: 1}\n") == "no error");
}

TEST_CASE("Many keys are read in a time that grows with their number, and too many are refused") {
  std::string text;
  for (int i = 0; i < 200'000; ++i) text += "k" + std::to_string(i) + ": 1\n";
  CHECK(yaml(text).keys().size() == 200'000);
  CHECK(parse_error(text + "k7: 2\n") == "a.yaml:200001:1: error: duplicate key 'k7', first given on line 8");
  CHECK(parse_error(std::string(std::size_t{65} << 20, '#')) ==
        "a.yaml: error: 65.0 MiB; a file of parplan's has at most 64.0 MiB");
}

TEST_CASE("What acts on a terminal is escaped in names and errors") {
  CHECK(yaml("name: \"a\\e[31mb\\r\\nc\\u202Ed\"").at("name").as_name() == "a\\u001b[31mb\\u000d\\u000ac\\u202ed");
  CHECK(error_of<ConfigError>([] { yaml("n: \"\\e[2J\"").at("n").as_integer(); }) ==
        "a.yaml:1:4: error: expected a whole number, found '\\u001b[2J'");
  CHECK(parse_error("\"\\e\": 1\n\"\\e\": 2") == "a.yaml:2:1: error: duplicate key '\\u001b', first given on line 1");
}

TEST_CASE("What YAML allows and nobody means is refused") {
  CHECK(parse_error("a: &x 1\nb: *x\n") ==
        "a.yaml:2:4: error: aliases ('*name') are not supported; write the value out");
  CHECK(parse_error("[1, 2]: 3\n") == "a.yaml:1:1: error: expected a key of plain text");
  CHECK(parse_error("a: 1\n---\nb: 2\n") == "a.yaml:2:1: error: expected one document, found a second one");
}

TEST_CASE("A syntax error has its place") {
  CHECK(parse_error("a: [1, 2\nb: 3\n") == "a.yaml:2:2: error: invalid YAML: end of sequence flow not found");
  CHECK(parse_error("a: 1\n b: 2\n") == "a.yaml:2:3: error: invalid YAML: illegal map value");
  CHECK(parse_error("a: 1\nb: \xff\n") == "a.yaml:2:4: error: expected text in UTF-8, found the byte 0xff");
  CHECK(parse_error("a: \xc3") == "a.yaml:1:4: error: expected text in UTF-8, found the byte 0xc3");
  CHECK(parse_error("a: \xc3\xa9") == "no error");
  std::string deep = "a: 1";
  for (int i = 0; i < 600; ++i) deep = "- " + deep;
  // The column is that of yaml-cpp's own limit.
  CHECK(parse_error(deep).ends_with(": error: invalid YAML: nested too deeply"));
}

TEST_CASE("A missing key names the part of the file that it is missing from") {
  CHECK(error_of<ConfigError>([] { yaml("a: 1\n").at("b"); }) == "a.yaml:1:1: error: missing key 'b' at the top level");
  CHECK(error_of<ConfigError>([] { yaml("x:\n  y:\n    a: 1\n").at("x").at("y").at("b"); }) ==
        "a.yaml:3:5: error: missing key 'b' in 'x.y'");
  CHECK(error_of<ConfigError>([] { yaml("x:\n  - a: 1\n").at("x")[0].at("b"); }) ==
        "a.yaml:2:5: error: missing key 'b' in 'x[0]'");
  CHECK(error_of<ConfigError>([] { yaml("x: 5\n").at("x").at("b"); }) ==
        "a.yaml:1:4: error: expected a map with key 'b', found '5'");
  CHECK(error_of<ConfigError>([] { yaml("# nothing\n").keys(); }) ==
        "a.yaml: error: the file is empty; expected a map");
  CHECK(error_of<ConfigError>([] {
          yaml("x:\n").at("x").at("b");
        }).ends_with("error: expected a map with key 'b', found nothing"));
  CHECK(error_of<ConfigError>([] { yaml("").at("b"); }) ==
        "a.yaml: error: the file is empty; expected a map with key 'b'");
}

TEST_CASE("An unknown key is an error that lists the allowed ones") {
  const YamlNode root = yaml("hidden: 1\nhiden: 2\n");
  CHECK(error_of<ConfigError>([&] { root.allow_keys({"layers", "hidden"}); }) ==
        "a.yaml:2:1: error: unknown key 'hiden'; allowed: layers, hidden; did you mean 'hidden'?");
  CHECK(error_of<ConfigError>([&] { root.allow_keys({"hidden", "hiden"}); }) == "no error");
}

TEST_CASE("A value of the wrong kind says what is wanted and what was found") {
  const YamlNode root =
      yaml("word: abc\nlist: [1]\nmap: {a: 1}\nnothing:\nyes: yes\nnine: 9\nnan: .nan\nsize: 80 Gib\n");
  const auto error = [&](auto read) { return error_of<ConfigError>([&] { read(root); }); };
  CHECK(error([](const YamlNode& n) { n.at("word").as_integer(); }) ==
        "a.yaml:1:7: error: expected a whole number, found 'abc'");
  CHECK(error([](const YamlNode& n) { n.at("word").as_integer(1); }) ==
        "a.yaml:1:7: error: expected a whole number of at least 1, found 'abc'");
  CHECK(error([](const YamlNode& n) { n.at("nine").as_integer(1, 8); }) ==
        "a.yaml:6:7: error: expected a whole number from 1 to 8, found '9'");
  CHECK(error([](const YamlNode& n) { n.at("nine").as_integer(INT64_MIN, 8); }) ==
        "a.yaml:6:7: error: expected a whole number of at most 8, found '9'");
  CHECK(error([](const YamlNode& n) { n.at("list").as_integer(1); }) ==
        "a.yaml:2:7: error: expected a whole number of at least 1, found a list");
  CHECK(error([](const YamlNode& n) { n.at("nan").as_number(); }) ==
        "a.yaml:7:6: error: expected a number, found '.nan'");
  CHECK(error([](const YamlNode& n) { n.at("map").as_string(); }) == "a.yaml:3:6: error: expected text, found a map");
  CHECK(error([](const YamlNode& n) { n.at("yes").as_bool(); }) ==
        "a.yaml:5:6: error: expected true or false, found 'yes'");
  CHECK(error([](const YamlNode& n) { n.at("word").items(); }) == "a.yaml:1:7: error: expected a list, found 'abc'");
  CHECK(error([](const YamlNode& n) { n.at("list").keys(); }) == "a.yaml:2:7: error: expected a map, found a list");
  CHECK(error([](const YamlNode& n) { n.at("list").find("a"); }) == "a.yaml:2:7: error: expected a map, found a list");
  CHECK(error([](const YamlNode& n) { n.at("list").allow_keys({}); }) ==
        "a.yaml:2:7: error: expected a map, found a list");
  CHECK(error([](const YamlNode& n) { n.at("size").as_bytes(); }) ==
        "a.yaml:8:7: error: unknown unit 'Gib' of a size in '80 Gib'; allowed units: B, kB, MB, GB, TB, KiB, MiB, "
        "GiB, TiB; did you mean 'GiB'?");
  CHECK(error([](const YamlNode& n) { n.at("list").as_bytes(); }) == "a.yaml:2:7: error: expected text, found a list");
  CHECK(error([](const YamlNode& n) { n.at("word").as_choice({"abd", "xyz"}); }) ==
        "a.yaml:1:7: error: expected one of abd, xyz, found 'abc'; did you mean 'abd'?");
  CHECK(error([](const YamlNode& n) { n.at("list").as_choice({"abd", "xyz"}); }) ==
        "a.yaml:2:7: error: expected one of abd, xyz, found a list");
  CHECK(root.at("word").as_choice({"xyz", "abc"}) == 1);
}

TEST_CASE("A file that cannot be read is named") {
  CHECK(error_of<ConfigError>([] { YamlNode::load("/nowhere/a.yaml"); }) ==
        "error: cannot read '/nowhere/a.yaml': No such file or directory");
}
