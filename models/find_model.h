#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "models/model_file.h"

namespace parplan {

// The names of the zoo: its *.yaml files without the ending, sorted.
std::vector<std::string> zoo_names(const std::filesystem::path& zoo_folder);

// `name_or_path` is a path to a model.yaml (.yaml, .yml), to a Hugging Face config (.json) or to a
// folder that holds a config.json, or else a name of the zoo. The ConfigError for an unknown name
// lists the known ones.
ModelFile load_model(const std::string& name_or_path, const std::filesystem::path& zoo_folder);

}  // namespace parplan
