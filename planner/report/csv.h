#pragma once

#include <span>
#include <string>

#include "planner/base/json.h"

namespace parplan {

// A header and one line a row (RFC 4180: fields with commas, quotes or line ends stand in quotes); null is an
// empty field. Rows are those of row.h, equal keys in equal order.
std::string write_csv(std::span<const Json> rows);

}  // namespace parplan
