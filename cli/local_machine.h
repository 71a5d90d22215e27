#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "planner/cluster/cluster.h"

namespace parplan {

// The number of cores that this process may use: its affinity, and the quota of its control group.
int usable_cores();

// Whether the numbers of an earlier measurement may be used.
enum class LocalNumbers { cached, measure };

// This machine as a cluster of one node whose devices are its usable cores: measured once, in a few
// seconds, then kept with its date under $XDG_CACHE_HOME/parplan (or ~/.cache/parplan), separately
// for each processor, number of cores and version of parplan. A cached file that cannot be read is
// measured again. `say` gets a line when something takes time or is written.
Cluster local_machine(LocalNumbers numbers, const std::function<void(const std::string&)>& say);

// The signature of this machine's measurements: its name, its processor, and the day (UTC) as
// "2026-11-21".
std::string host_name();
std::string processor_name();
std::string today();

// The file that keeps this machine's numbers; empty where no folder for caches is known.
std::filesystem::path local_machine_file();

// Measures now.
Cluster probe_local_machine();

}  // namespace parplan
