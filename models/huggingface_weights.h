#pragma once

#include <string>
#include <string_view>

#include "models/model_spec.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/stored_weights.h"

namespace parplan {

// Where transformers' class of a model_type keeps each parameter of a model. ConfigError where the
// class has no place for one of them, which it names.
StoredWeights huggingface_weights(std::string_view model_type, const ModelSpec& spec, const OpGraph& graph);

// A config.json with which transformers builds this model.
struct HuggingFaceExport {
  std::string model_type;
  std::string config;
};
// The model's own config, with fp32 as its dtype.
HuggingFaceExport huggingface_export(const std::string& config, const std::string& file_name);
// For a model that came from elsewhere: a model_type that builds the same. ConfigError where
// parplan knows none.
HuggingFaceExport huggingface_export(const ModelSpec& spec);

// What a model computes otherwise than the plan's, for a message: "'layers: 2' there; 'layers: 4'
// in the plan"; empty where it computes the same. Names and initial values do not count.
std::string differences(const ModelSpec& there, const ModelSpec& in_plan);

}  // namespace parplan
