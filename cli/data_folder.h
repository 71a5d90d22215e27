#pragma once

#include <filesystem>

#include "planner/cluster/find_cluster.h"

namespace parplan {

// The folder that holds models/ and configs/: $PARPLAN_DATA if it is set, else the source tree from
// which this binary was built, else its place of installation. ConfigError lists the places that
// were searched.
std::filesystem::path data_folder();

std::filesystem::path zoo_folder();
ClusterCatalog cluster_catalog();
std::filesystem::path engines_folder();
// The text that `run` trains on unless told otherwise.
std::filesystem::path default_text();

}  // namespace parplan
