#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace parplan {

// The candidate that `word` probably means: the same word regardless of capitals; else the first
// candidate that begins with it (from three letters on: "gelu" means "gelu_tanh" rather than
// "relu"); else the nearest by edit distance, if that is at most a third of the word's length and
// at least 1. Ties go to the first; the result is empty where no candidate is near.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

// "; did you mean 'x'?" or "", to append to an error's message. Where several candidates begin with
// the word, all are named: "'x', 'y' or 'z'?".
std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

// "1 node", "2 nodes".
std::string pluralized(std::int64_t count, std::string_view what);

// A text from elsewhere, to be printed: what would act on a terminal, or turn the order of reading,
// is escaped: control characters (ESC, CR ...) and Unicode's marks of direction, as "\u001b" and
// "\u202e".
std::string printable(std::string_view text);       // newlines stay
std::string printable_line(std::string_view text);  // newlines are escaped, too

// "a, b, c".
std::string join(const std::vector<std::string>& words, std::string_view separator = ", ");

}  // namespace parplan
