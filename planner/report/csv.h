#pragma once

#include <span>
#include <string>
#include <vector>

#include "planner/base/json.h"

namespace parplan {

// A header and one line per row (RFC 4180: fields with commas, quotes or line ends are quoted);
// null is an empty field. Rows are those of plan_row.h, with equal keys in equal order.
std::string write_csv(std::span<const Json> rows);

// The same for rows with other keys; every row has each of them.
std::string write_csv(const std::vector<std::string>& keys, std::span<const Json> rows);

}  // namespace parplan
