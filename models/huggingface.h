#pragma once

#include <string>

#include "models/model_file.h"

namespace parplan {

// Reads a Hugging Face config.json of a model_type in models/huggingface_types.cpp. Absent keys
// have the defaults of transformers' config classes; keys that change neither time nor memory are
// passed over, those that a user would miss are reported in `notes`, and what the type may say but
// parplan does not build is refused. For other types the error says which keys mean a structure
// that parplan cannot map. ConfigError with file:line:column.
ModelFile read_huggingface(const std::string& text, const std::string& file_name);

}  // namespace parplan
