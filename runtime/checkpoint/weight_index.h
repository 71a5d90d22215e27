#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace parplan {

// The files that an index of Hugging Face's libraries (model.safetensors.index.json) names, sorted.
// ConfigError names `file`, the place in it and what is wanted there.
std::vector<std::string> read_weight_index(std::string_view text, const std::string& file);

}  // namespace parplan
