#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace parplan {

// The candidate nearest to `word` by edit distance, where it is near enough to have been meant (at most
// a third of the word's length, at least 1); empty otherwise. Ties go to the first.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

// "; did you mean 'x'?" or "" — to append to an error's message.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

// "a, b, c".
std::string join(const std::vector<std::string>& words, std::string_view separator = ", ");

}  // namespace parplan
