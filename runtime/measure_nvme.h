#pragma once

#include <string>

#include "planner/base/units.h"
#include "planner/cluster/cluster.h"

namespace parplan {

// What files in a folder do, by the runtime's own reads and writes (OffloadFile, past the page
// cache): several files at once, as the ranks of a machine use them, in pieces of 16 MiB. Rates are
// of all of them together, the median of as many rounds as take about `budget`, 3 to 50. The
// latency is that of a piece of 4 KiB, of the slower of a read and a write. The capacity is what
// the file system has free. RunError where the folder takes no file of 64 MiB for each.
Nvme measure_nvme(const std::string& folder, Seconds budget);

}  // namespace parplan
