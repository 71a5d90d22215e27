#pragma once

#include <string>
#include <vector>

#include "planner/plan/plan.h"

namespace parplan {

// Aligns columns of text: the first `left` of them to the left, the others to the right. The first
// row is the header.
std::string align_columns(const std::vector<std::vector<std::string>>& rows, int left);

// Lines of more than `width` columns continue in the next, with a deeper indentation; they are
// broken only between words.
std::string fold_lines(const std::string& text, std::size_t width);

// The cost of `devices` devices for that time: "0.0123 USD"; without prices, the device time: "6.71
// device-seconds".
std::string format_cost(const Cluster& cluster, int devices, Seconds time);

// Three significant digits, or all digits before the point: "13732", "1.74".
std::string format_count(double value);

// "87.5 %"; "-" where the whole is unknown.
std::string format_share(double part, double whole);

}  // namespace parplan
