#pragma once

#include <span>
#include <string>
#include <vector>

#include "planner/base/json.h"

namespace parplan {

// A header and one line a row (RFC 4180: fields with commas, quotes or line ends stand in quotes);
// null is an empty field. Rows are those of row.h, equal keys in equal order.
std::string write_csv(std::span<const Json> rows);

// The same of rows with other keys, each of which every row has.
std::string write_csv(const std::vector<std::string>& keys, std::span<const Json> rows);

}  // namespace parplan
