#include "planner/base/json.h"

#include <limits>

#include <doctest/doctest.h>

#include "tests/planner/base/error_of.h"

using namespace parplan;

TEST_CASE("JSON keeps the order of its keys and prints null for what is not a number") {
  Json json;
  json["z"] = json_number(1.5);
  json["a"] = json_number(std::numeric_limits<double>::quiet_NaN());
  json["i"] = json_number(std::numeric_limits<double>::infinity());
  CHECK(write_json(json) == "{\n  \"z\": 1.5,\n  \"a\": null,\n  \"i\": null\n}\n");
  CHECK(optional_number(2.5) == json_number(2.5));
  CHECK(optional_number(std::nullopt) == nullptr);
}

TEST_CASE("A JSON file is read with places") {
  const YamlNode root = parse_json("{\n  \"a\": 12,\n\t\"b\": null\n}", "config.json");
  CHECK(root.at("a").as_integer() == 12);
  CHECK(root.at("a").location() == Location{.file = "config.json", .line = 2, .column = 8});
  CHECK_FALSE(root.find("b").has_value());
}

TEST_CASE("Broken JSON and duplicate keys have their place") {
  const auto error = [](const std::string& text) {
    return error_of<ConfigError>([&] { parse_json(text, "config.json"); });
  };
  CHECK(error("{\n  \"a\": 1,\n}") ==
        "config.json:3:1: error: invalid JSON: syntax error while parsing object key - unexpected '}'; expected string "
        "literal");
  CHECK(error("a: 1\n") ==
        "config.json:1:1: error: invalid JSON: syntax error while parsing value - invalid literal; last read: 'a'");
  CHECK(error("{\"a\": 1") ==
        "config.json:1:8: error: invalid JSON: syntax error while parsing object - unexpected end of input; expected "
        "'}'");
  CHECK(error(std::string(200, '[') + "x") ==
        "config.json:1:201: error: invalid JSON: syntax error while parsing value - invalid literal");
  CHECK(error("{\"a\": 1,\n \"b\": 1e400}") ==
        "config.json:2:7: error: invalid JSON: the number 1e400 is beyond what a double holds");
  CHECK(error("") ==
        "config.json:1:1: error: invalid JSON: syntax error while parsing value - unexpected end of input; expected "
        "'[', '{', or a literal");
  CHECK(error("{\"a\": 1, \"a\": 2}") == "config.json:1:10: error: duplicate key 'a', first given on line 1");
}
