#pragma once

#include <ostream>

namespace parplan {

// To be called where an exception was caught: prints it and returns the exit code for it.
int report_error(std::ostream& err);

}  // namespace parplan
