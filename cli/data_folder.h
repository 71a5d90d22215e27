#pragma once

#include <filesystem>

#include "planner/cluster/catalog.h"

namespace parplan {

// The folder that holds models/ and configs/: $PARPLAN_DATA where it is set, else the source tree
// that this binary was built from, else where it was installed. ConfigError says where was looked.
std::filesystem::path data_folder();

std::filesystem::path zoo_folder();
ClusterCatalog cluster_catalog();
// The text that `run` trains on unless told otherwise.
std::filesystem::path default_text();

}  // namespace parplan
