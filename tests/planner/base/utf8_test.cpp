#include "planner/base/utf8.h"

#include <doctest/doctest.h>

#include <string>

#include "planner/base/error.h"

using namespace parplan;

namespace {

std::string utf8_of(std::uint32_t point) {
  const auto byte = [](std::uint32_t value) { return static_cast<char>(value); };
  if (point < 0x80) return {byte(point)};
  if (point < 0x800) return {byte(0xC0 | point >> 6), byte(0x80 | (point & 0x3F))};
  if (point < 0x10000) return {byte(0xE0 | point >> 12), byte(0x80 | (point >> 6 & 0x3F)), byte(0x80 | (point & 0x3F))};
  return {byte(0xF0 | point >> 18), byte(0x80 | (point >> 12 & 0x3F)), byte(0x80 | (point >> 6 & 0x3F)),
          byte(0x80 | (point & 0x3F))};
}

bool taken(const std::string& text) {
  try {
    check_utf8(text, "file");
    return true;
  } catch (const ConfigError&) {
    return false;
  }
}

}  // namespace

TEST_CASE("every code point but surrogates and what is no character is UTF-8, and nothing that is cut off") {
  for (std::uint32_t point = 1; point <= 0x10FFFF;
       point += point < 0x900 || (point > 0xD7F0 && point < 0x10100) ? 1 : 97) {
    const std::string text = utf8_of(point);
    const bool surrogate = point >= 0xD800 && point <= 0xDFFF;
    const bool no_character = (point >= 0xFDD0 && point <= 0xFDEF) || point % 0x10000 >= 0xFFFE;
    if (taken("a" + text + "b") == (surrogate || no_character)) FAIL_CHECK(point);
    if (text.size() > 1 && taken(text.substr(0, text.size() - 1))) FAIL_CHECK(point);
  }
  CHECK(!taken(utf8_of(0x110000)));
  CHECK(!taken(utf8_of(0x10FFFF)));
  CHECK(!taken(std::string("a\0b", 3)));
}

TEST_CASE("overlong forms are not UTF-8") {
  for (const char* text :
       {"\xC0\x80", "\xC1\xBF", "\xE0\x80\x80", "\xE0\x9F\xBF", "\xF0\x80\x80\x80", "\xF0\x8F\xBF\xBF"})
    CHECK(!taken(text));
  for (const char* text : {"\x80", "\xBF", "\xF5\x80\x80\x80", "\xFF"}) CHECK(!taken(text));
}

TEST_CASE("the place of a byte that is not UTF-8 is said") {
  CHECK_THROWS_WITH_AS(check_utf8("ab\ncd\xE0\x90\x91", "file"),
                       "file:2:3: error: expected text in UTF-8, found the byte 0xe0", ConfigError);
  CHECK_THROWS_WITH_AS(check_utf8("ab\xEF\xBF\xBE", "file"),
                       "file:1:3: error: expected text in UTF-8, found U+FFFE, which is no character", ConfigError);
}
