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
// measured again; so are numbers that were measured while other programs were at work, as soon as
// none is. One of several processes measures, and the others wait for its numbers. `say` gets a
// line when something takes time, is written or is doubtful.
Cluster local_machine(LocalNumbers numbers, const std::function<void(const std::string&)>& say);

// The signature of this machine's measurements: its name, its processor, and the day (UTC) as
// "2026-11-21".
std::string host_name();
std::string processor_name();
std::string today();

// The file that keeps this machine's numbers; empty where no folder for caches is known.
std::filesystem::path local_machine_file();
// The one that keeps them where they were measured beside other programs.
std::filesystem::path busy_machine_file();

// Measures now.
Cluster probe_local_machine();

}  // namespace parplan
