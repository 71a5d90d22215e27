#pragma once

#include <ostream>
#include <string>
#include <vector>

namespace parplan {

// One call of parplan: `arguments` without the program's name. Data goes to `out`, messages and
// errors to `err`. Returns the exit code: 0 done; 1 no feasible plan, or the run failed; 2 bad
// usage or bad input; 70 a bug of parplan. Throws nothing.
int run_command_line(std::vector<std::string> arguments, std::ostream& out, std::ostream& err);

}  // namespace parplan
