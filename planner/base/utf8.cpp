#include "planner/base/utf8.h"

#include <cstddef>
#include <cstdint>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

// What may follow a first byte: the number of bytes in all, and the range of the second byte; those
// after it are 0x80 to 0xBF.
struct Form {
  std::size_t length = 0;  // 0: no character begins with this byte
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

// U+0000, which no text holds; U+FDD0 to U+FDEF, and the last two code points of every plane, which
// Unicode reserves as non-characters. YAML's reader and writer replace them.
bool is_no_character(std::uint32_t point) {
  return point == 0 || (point & 0xFFFE) == 0xFFFE || (point >= 0xFDD0 && point <= 0xFDEF);
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
    const auto refuse = [&](const std::string& found) {
      throw ConfigError({.file = file_name, .line = line, .column = static_cast<int>(i - line_start) + 1},
                        "expected text in UTF-8, found " + found);
    };
    if (!valid) refuse(fmt::format("the byte 0x{:02x}", byte(i)));
    std::uint32_t point = form.length == 1 ? byte(i) : byte(i) & (0x7Fu >> form.length);
    for (std::size_t k = 1; k < form.length; ++k) point = point << 6 | (byte(i + k) & 0x3Fu);
    if (is_no_character(point)) refuse(fmt::format("U+{:04X}, which is no character", point));
    i += form.length;
  }
}

}  // namespace parplan
