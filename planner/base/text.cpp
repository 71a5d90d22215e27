#include "planner/base/text.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

namespace parplan {
namespace {

// Levenshtein: insertions, deletions and replacements that turn `a` into `b`. One row of the table is kept.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t above = row[j + 1];
      row[j + 1] = std::min({above + 1, row[j] + 1, diagonal + (a[i] == b[j] ? 0u : 1u)});
      diagonal = above;
    }
  }
  return row.back();
}

}  // namespace

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  if (std::find(candidates.begin(), candidates.end(), word) != candidates.end()) return std::string(word);
  for (const std::string& candidate : candidates) {
    if (word.size() >= 3 && candidate.starts_with(word)) return candidate;
  }
  std::size_t allowed = std::max<std::size_t>(1, word.size() / 3);
  std::string found;
  for (const std::string& candidate : candidates) {
    const std::size_t distance = edit_distance(word, candidate);
    // A one-letter word is one edit from every other one: that says nothing.
    if (distance >= std::max(word.size(), candidate.size())) continue;
    if (distance < allowed || (distance == allowed && found.empty())) {
      found = candidate;
      allowed = distance;
    }
  }
  return found;
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates) {
  const std::string found = nearest(word, candidates);
  return found.empty() ? "" : fmt::format("; did you mean '{}'?", found);
}

std::string join(const std::vector<std::string>& words, std::string_view separator) {
  return fmt::format("{}", fmt::join(words, separator));
}

}  // namespace parplan
