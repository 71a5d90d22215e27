#pragma once

#include <filesystem>

#include "planner/report/sweep.h"

namespace parplan {

// The sweep as an .xlsx workbook, whole or not at all. Its sheets:
//   Inputs    tokens, and for each kind of device of each cluster price and power, to be changed by
//   the reader; what numbers rest on Capacity  a line a point: what was planned as numbers, and
//   days, device-hours, cost, energy and the front as formulas of these and Inputs Plans     the
//   rows of sweep_rows, with all that is known of each plan Columns   what each column means
// Formulas carry the values that sweep_rows has, for programs that show a workbook without
// calculating it. RunError where it cannot be written.
void write_workbook(const std::filesystem::path& path, const Sweep& sweep);

}  // namespace parplan
