#pragma once

#include <optional>
#include <string>

#include "planner/base/yaml.h"
#include "planner/graph/trained_graph.h"
#include "planner/graph/training_spec.h"

namespace parplan {

// What the keys `trainable` and `lora` of a training section say (docs/model.md). Adapters without
// `trainable` are trained alone; `trainable: lora` without `lora` has PEFT's defaults.
struct TrainedKeys {
  std::optional<Trainable> trainable;
  std::optional<Lora> lora;
};
TrainedKeys read_trained(const YamlNode& training);
// Both keys, where they say something else than their absence.
std::string write_trained(const TrainingSpec& training);

// Throws a ConfigError at the place of the key that is to blame.
[[noreturn]] void fail_at(const YamlNode& training, const TrainedProblem& problem);

// The numbers that `r` may be, and above which `lora_alpha` is.
inline constexpr std::int64_t largest_adapter = 65'536;

// "all", "lora: r 8, lora_alpha 16 beside attention.qkv; head": for people.
std::string describe_trained(const TrainingSpec& training);

}  // namespace parplan
