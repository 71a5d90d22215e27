#pragma once

#include <functional>
#include <span>
#include <string>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "planner/base/json.h"

namespace parplan {

// Writes a file after flushing standard output, and says so if messages are wanted; writes to
// standard output if the path is "-".
void write_said(const std::string& path, const std::string& text, Terminal& terminal, bool talks);

// Writes JSON and CSV if they were asked for; CSV from the rows of plans, or from the given text.
void write_outputs(const OutputArguments& output, Terminal& terminal, const Json& json, std::span<const Json> rows);
void write_json_and_csv(const OutputArguments& output, Terminal& terminal, const Json& json,
                        const std::function<std::string()>& csv);

}  // namespace parplan
