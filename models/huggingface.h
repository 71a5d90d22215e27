#pragma once

#include <string>

#include "models/model_file.h"

namespace parplan {

// Reads a Hugging Face config.json of a model_type in models/huggingface_types.cpp. Absent keys
// have the defaults of transformers' config classes. Keys that change neither time nor memory are
// ignored, keys whose effect a user would miss are reported in `notes`, and structure that parplan
// does not build is refused. For other types the error lists the keys that mean a structure which
// parplan cannot map. Throws ConfigError with file:line:column.
ModelFile read_huggingface(const std::string& text, const std::string& file_name);

}  // namespace parplan
