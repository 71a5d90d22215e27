#include "planner/base/utf8.h"

#include <cstddef>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

// What may stand behind a first byte: how many bytes in all, and the range of the second; those behind it are 0x80 to 0xBF.
struct Form {
  std::size_t length = 0;  // 0: the byte begins nothing
  unsigned char least = 0x80;
  unsigned char most = 0xBF;
};
Form form_of(unsigned char first) {
  if (first < 0x80) return {.length = 1};
  if (first < 0xC2) return {};
  if (first < 0xE0) return {.length = 2};
  if (first == 0xE0) return {.length = 3, .least = 0xA0};  // else overlong
  if (first == 0xED) return {.length = 3, .most = 0x9F};   // else a surrogate
  if (first < 0xF0) return {.length = 3};
  if (first == 0xF0) return {.length = 4, .least = 0x90};  // else overlong
  if (first < 0xF4) return {.length = 4};
  if (first == 0xF4) return {.length = 4, .most = 0x8F};   // else beyond U+10FFFF
  return {};
}

}  // namespace

void check_utf8(const std::string& text, const std::string& file_name) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  int line = 1;
  std::size_t line_start = 0;
  for (std::size_t i = 0; i < text.size();) {
    if (byte(i) == '\n') {
      ++line;
      line_start = i + 1;
    }
    const Form form = form_of(byte(i));
    bool valid = form.length > 0 && i + form.length <= text.size();
    if (valid && form.length > 1) valid = byte(i + 1) >= form.least && byte(i + 1) <= form.most;
    for (std::size_t k = 2; valid && k < form.length; ++k) valid = (byte(i + k) & 0xC0) == 0x80;
    if (!valid)
      throw ConfigError({.file = file_name, .line = line, .column = static_cast<int>(i - line_start) + 1}, fmt::format("expected text in UTF-8, found the byte 0x{:02x}", byte(i)));
    i += form.length;
  }
}

}  // namespace parplan
