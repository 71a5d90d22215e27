#include "cli/data_folder.h"

#include <cstdlib>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

bool holds_data(const std::filesystem::path& folder) {
  std::error_code ignored;
  return std::filesystem::is_directory(folder / "models", ignored) &&
         std::filesystem::is_directory(folder / "configs", ignored);
}

// Where an installed program has its data: <prefix>/share/parplan for <prefix>/bin/parplan,
// wherever the prefix was moved.
std::filesystem::path beside_the_program() {
  std::error_code ignored;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  return program.parent_path().parent_path() / "share" / "parplan";
}

}  // namespace

std::filesystem::path data_folder() {
  if (const char* given = std::getenv("PARPLAN_DATA"); given != nullptr && *given != '\0') {
    if (!holds_data(given))
      throw ConfigError(
          fmt::format("PARPLAN_DATA is '{}', and that folder does not hold models/ and configs/; name the folder that "
                      "does, or unset PARPLAN_DATA",
                      given));
    return given;
  }
  const std::filesystem::path installed = beside_the_program();
  for (const std::filesystem::path& folder : {installed, std::filesystem::path(PARPLAN_SOURCE_DATA)})
    if (holds_data(folder)) return folder;
  throw ConfigError(
      fmt::format("found no models/ and configs/ in '{}' and '{}'; set PARPLAN_DATA to the folder that holds them",
                  installed.string(), PARPLAN_SOURCE_DATA));
}

std::filesystem::path zoo_folder() { return data_folder() / "models"; }

ClusterCatalog cluster_catalog() {
  const std::filesystem::path configs = data_folder() / "configs";
  return {.devices_folder = (configs / "devices").string(), .clusters_folder = (configs / "clusters").string()};
}

std::filesystem::path engines_folder() {
  return data_folder() / "configs" / "engines";
}

std::filesystem::path default_text() { return data_folder() / "configs" / "data" / "public-domain.txt"; }

}  // namespace parplan
