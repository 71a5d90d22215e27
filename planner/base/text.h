#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace parplan {

// The candidate that was meant by `word`: itself, capitals or not; else the first that it begins
// (from three letters on: "gelu" means "gelu_tanh" rather than "relu"); else the nearest by edit
// distance, where that is at most a third of the word's length, at least 1. Ties go to the first;
// empty where none is near.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

// "; did you mean 'x'?" or "" — to append to an error's message. Where the word begins several
// candidates all are named: "'x', 'y' or 'z'?".
std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

// "a, b, c".
std::string join(const std::vector<std::string>& words, std::string_view separator = ", ");

}  // namespace parplan
