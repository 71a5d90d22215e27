#include "cli/version.h"

namespace parplan {

const char* version() { return PARPLAN_VERSION; }

}  // namespace parplan
