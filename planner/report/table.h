#pragma once

#include <string>
#include <vector>

#include "planner/plan/plan.h"

namespace parplan {

// How columns of text stand: the first `left` of them flush left, the others flush right. The first
// row is the header.
std::string align_columns(const std::vector<std::vector<std::string>>& rows, int left);

// Lines of more than `width` columns go on in the next, further in than they begin; broken between
// words alone.
std::string fold_lines(const std::string& text, std::size_t width);

// What `devices` devices cost for so long: "0.0123 USD"; without prices what they would be paid
// for: "6.71 device-seconds".
std::string format_cost(const Cluster& cluster, int devices, Seconds time);

// The ranked plans, best first, for people; with the cost of a step where there are prices, or
// where it is the objective.
std::string write_table(const Plan& plan);

// Three significant digits, or all before the point: "13732", "1.74".
std::string format_count(double value);

// "87.5 %"; "-" where there is no whole to take a part of.
std::string format_share(double part, double whole);

}  // namespace parplan
