#pragma once

#include <string>
#include <vector>

#include "planner/plan/plan.h"

namespace parplan {

// How columns of text stand: the first `left` of them flush left, the others flush right. The first row is the header.
std::string align_columns(const std::vector<std::vector<std::string>>& rows, int left);

// The ranked plans, best first, for people.
std::string write_table(const Plan& plan);

// Three significant digits, or all before the point: "13732", "1.74".
std::string format_count(double value);

// "87.5 %"; "-" where there is no whole to take a part of.
std::string format_share(double part, double whole);

}  // namespace parplan
