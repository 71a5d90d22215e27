#pragma once

#include <string>

#include "models/model_file.h"

namespace parplan {

// Reads a Hugging Face config.json of model_type gpt2, llama, mistral or qwen2. Absent keys have the defaults of
// transformers' config classes (v4.46); keys that do not change the graph are passed over, those that a user would
// miss are reported in `notes`. ConfigError with file:line:column.
ModelFile read_huggingface(const std::string& text, const std::string& file_name);

}  // namespace parplan
