#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "models/model_spec.h"
#include "planner/graph/training_spec.h"

namespace parplan {

// The training part of a model's file; what it leaves out has the caller's default.
struct TrainingOverrides {
  std::optional<std::int64_t> global_batch;
  std::optional<std::int64_t> sequence_length;
  std::optional<DataType> precision;
  std::optional<Optimizer> optimizer;
  std::optional<double> learning_rate;
  std::optional<LearningRateSchedule> schedule;
  std::optional<std::int64_t> warmup_steps;
  std::optional<std::int64_t> decay_steps;
  std::optional<double> final_learning_rate;
  std::optional<double> beta1;
  std::optional<double> beta2;
  std::optional<double> epsilon;
  std::optional<double> weight_decay;
  std::optional<double> momentum;
  std::optional<double> clip_norm;
  std::optional<std::uint64_t> seed;
  std::optional<Trainable> trainable;
  std::optional<Lora> lora;
  bool operator==(const TrainingOverrides&) const = default;
};

TrainingSpec with_overrides(TrainingSpec training, const TrainingOverrides& overrides);

struct ModelFile {
  ModelSpec spec;
  TrainingOverrides training;
  std::string source;              // where the numbers come from, as the file says; empty if it does not
  std::vector<std::string> notes;  // what was read and ignored, for the user: "dropout 0.1 (attn_pdrop) is ignored"
  bool operator==(const ModelFile&) const = default;
};

// model.yaml (docs/model.md, docs/schemas/model.schema.json). ConfigError with file:line:column.
ModelFile read_model(const std::string& text, const std::string& file_name);

// The model.yaml of a spec: every size, and of the rarer keys only those that the spec sets.
// read_model(write_model(spec)).spec equals spec.
std::string write_model(const ModelSpec& spec);

}  // namespace parplan
