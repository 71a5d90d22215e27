#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "models/model_spec.h"
#include "planner/graph/op_graph.h"

namespace parplan {

// One kind of model: how its graph is built, and which keys of model.yaml it reads beside those of
// every model.
struct FamilyRow {
  Family family{};
  std::string_view name;
  OpGraph (*build)(const ModelSpec&, std::int64_t sequence_length) = nullptr;
  std::span<const std::string_view> required;
  std::span<const std::string_view> optional;
};
std::span<const FamilyRow> family_rows();
const FamilyRow& row_of(Family family);

// The forward graph of one sample of `sequence_length` tokens. ConfigError (without a place) where
// the spec contradicts itself or the sequence does not fit the model's learned positions.
OpGraph build_graph(const ModelSpec& spec, std::int64_t sequence_length);
// The least sequence length that it takes.
std::int64_t shortest_sample(const ModelSpec& spec);

}  // namespace parplan
