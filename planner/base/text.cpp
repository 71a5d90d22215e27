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

std::string pluralized(int count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::string join(const std::vector<std::string>& words, std::string_view separator) {
  return fmt::format("{}", fmt::join(words, separator));
}

// U+0080 to U+009F are controls, too, and U+202A to U+202E and U+2066 to U+2069 turn text around.
std::string printable(std::string_view text) {
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = [&](std::size_t at) {
      return at < text.size() ? static_cast<unsigned char>(text[at]) : static_cast<unsigned char>(0);
    };
    const unsigned char first = byte(i), second = byte(i + 1), third = byte(i + 2);
    const bool turns = first == 0xe2 && ((second == 0x80 && third >= 0xaa && third <= 0xae) ||
                                         (second == 0x81 && third >= 0xa6 && third <= 0xa9));
    const bool c1 = first == 0xc2 && second >= 0x80 && second <= 0x9f;
    if (turns || c1 || (first < 0x20 && first != '\n') || first == 0x7f) {
      result += '?';
      i += turns ? 2 : c1 ? 1 : 0;
    } else {
      result += text[i];
    }
  }
  return result;
}

}  // namespace parplan
