#pragma once

#include <filesystem>

#include "planner/report/sweep.h"

namespace parplan {

// The sweep as an .xlsx workbook, written whole or not at all. Its sheets:
//   Inputs    tokens, and for each kind of device of each cluster its price and power, which the
//             reader may change; the assumptions behind the numbers
//   Capacity  a line per point: the plan as numbers, and days, device-hours, cost, energy and the
//             front as formulas of these and Inputs
//   Plans     the rows of sweep_rows, with everything that is known about each plan
//   Columns   the meaning of each column
// Formulas carry the values of sweep_rows, for programs that show a workbook without calculating
// it. RunError where it cannot be written.
void write_workbook(const std::filesystem::path& path, const Sweep& sweep);

}  // namespace parplan
