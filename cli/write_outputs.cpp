#include "cli/write_outputs.h"

#include <optional>

#include <fmt/ostream.h>

#include "planner/base/file.h"
#include "planner/report/csv.h"

namespace parplan {

void write_said(const std::string& path, const std::string& text, Terminal& terminal, bool talks) {
  if (path == "-") {
    terminal.out << text;
    return;
  }
  terminal.out.flush();  // the file may be /dev/stdout
  write_file_atomically(path, text);
  if (talks) fmt::print(terminal.err, "wrote {}\n", path);
}

void write_outputs(const OutputArguments& output, Terminal& terminal, const Json& json, std::span<const Json> rows) {
  write_json_and_csv(output, terminal, json, [&] { return write_csv(rows); });
}

void write_json_and_csv(const OutputArguments& output, Terminal& terminal, const Json& json,
                        const std::function<std::string()>& csv) {
  const auto write = [&](const std::optional<std::string>& where, const auto& text) {
    if (where) write_said(*where, text(), terminal, !output.quiet);
  };
  write(output.json, [&] { return write_json(json); });
  write(output.csv, csv);
}

}  // namespace parplan
