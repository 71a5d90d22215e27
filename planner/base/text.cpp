#include "planner/base/text.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

namespace parplan {
namespace {

// Optimal string alignment: insertions, deletions, replacements and swaps of neighbours ("gtp2" for
// "gpt2") that turn `a` into `b`. Three rows of the table are kept.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    before.swap(above);
    above.swap(row);
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      row[j + 1] = std::min({above[j + 1] + 1, row[j] + 1, above[j] + (a[i] == b[j] ? 0u : 1u)});
      if (i > 0 && j > 0 && a[i] == b[j - 1] && a[i - 1] == b[j]) row[j + 1] = std::min(row[j + 1], before[j - 1] + 1);
    }
  }
  return row.back();
}

std::string lower(std::string_view word) {
  std::string small(word);
  for (char& c : small)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return small;
}

// The candidate that equals the word except for capitals; else all candidates that begin with it.
std::vector<std::string> completions(std::string_view word, const std::vector<std::string>& candidates) {
  const std::string small = lower(word);
  std::vector<std::string> found;
  for (const std::string& candidate : candidates) {
    const std::string other = lower(candidate);
    if (other == small) return {candidate};
    if (word.size() >= 3 && other.starts_with(small)) found.push_back(candidate);
  }
  return found;
}

}  // namespace

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  if (std::find(candidates.begin(), candidates.end(), word) != candidates.end()) return std::string(word);
  if (const std::vector<std::string> all = completions(word, candidates); !all.empty()) return all.front();
  std::size_t allowed = std::max<std::size_t>(1, word.size() / 3);
  std::string found;
  for (const std::string& candidate : candidates) {
    const std::size_t distance = edit_distance(lower(word), lower(candidate));
    // A one-letter word is one edit away from every other one, which says nothing.
    if (distance >= std::max(word.size(), candidate.size())) continue;
    if (distance < allowed || (distance == allowed && found.empty())) {
      found = candidate;
      allowed = distance;
    }
  }
  return found;
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates) {
  std::vector<std::string> all = completions(word, candidates);
  if (all.size() > 1 && std::find(candidates.begin(), candidates.end(), word) == candidates.end()) {
    const std::string last = all.back();
    all.pop_back();
    return fmt::format("; did you mean '{}' or '{}'?", join(all, "', '"), last);
  }
  const std::string found = nearest(word, candidates);
  return found.empty() ? "" : fmt::format("; did you mean '{}'?", found);
}

std::string pluralized(std::int64_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::string printable_line(std::string_view text) {
  // In UTF-8: U+0080 to U+009F; U+061C; U+200E, U+200F, U+2028 to U+202E; U+2066 to U+2069.
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const auto escape_at = [&](std::size_t i) -> std::pair<unsigned, std::size_t> {  // code point, bytes
    if (byte(i) < 0x20 || byte(i) == 0x7F) return {byte(i), 1};
    if (byte(i) == 0xC2 && byte(i + 1) >= 0x80 && byte(i + 1) < 0xA0) return {byte(i + 1), 2};
    if (byte(i) == 0xD8 && byte(i + 1) == 0x9C) return {0x061C, 2};
    if (byte(i) != 0xE2) return {0, 0};
    const unsigned point = 0x2000u | (byte(i + 1) & 0x3Fu) << 6 | (byte(i + 2) & 0x3Fu);
    const bool turns = point == 0x200E || point == 0x200F || (point >= 0x2028 && point <= 0x202E) ||
                       (point >= 0x2066 && point <= 0x2069);
    return turns ? std::pair(point, std::size_t{3}) : std::pair(0u, std::size_t{0});
  };
  std::string shown;
  for (std::size_t i = 0; i < text.size();) {
    const auto [point, bytes] = escape_at(i);
    if (bytes == 0)
      shown += text[i++];
    else
      shown += fmt::format("\\u{:04x}", point);
    i += bytes;
  }
  return shown;
}

std::string printable(std::string_view text) {
  std::string lines;
  for (std::size_t end = 0; end != std::string_view::npos;) {
    end = text.find('\n');
    lines += printable_line(text.substr(0, end));
    if (end == std::string_view::npos) break;
    lines += '\n';
    text.remove_prefix(end + 1);
  }
  return lines;
}

std::string join(const std::vector<std::string>& words, std::string_view separator) {
  return fmt::format("{}", fmt::join(words, separator));
}

}  // namespace parplan
