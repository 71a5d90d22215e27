#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace parplan {

enum class Family { decoder, mlp };
enum class PositionKind { learned, rotary };
enum class NormKind { layer_norm, rms_norm };
// What stands between the two (or three) matrix products of a feed-forward layer. `gated_silu`: silu(gate x) * (up x).
enum class FeedForwardKind { gelu_tanh, gelu_erf, relu, gated_silu };

const char* name(Family family);
const char* name(PositionKind position);
const char* name(NormKind norm);
const char* name(FeedForwardKind activation);

// A model as plain data: what a model.yaml says (docs/model.md). `mlp` reads name, layers, hidden, feature, vocabulary,
// context, activation, tied_embeddings and the initialisation; the other fields keep their defaults there.
struct ModelSpec {
  std::string name;
  Family family = Family::decoder;
  std::int64_t layers = 0;
  std::int64_t hidden = 0;
  std::int64_t feature = 0;     // inner width of the feed-forward layers
  std::int64_t vocabulary = 0;  // unpadded
  std::int64_t context = 0;     // longest sequence that the model is made for; rows of the learned positions
  FeedForwardKind activation = FeedForwardKind::gelu_tanh;
  bool tied_embeddings = false;  // the head's weight is the embedding's

  std::int64_t heads = 0;     // query heads
  std::int64_t kv_heads = 0;  // key/value heads: equal to heads (MHA), a divisor of it (GQA), 1 (MQA)
  std::int64_t head_dim = 0;
  PositionKind position = PositionKind::learned;
  double rope_theta = 10000.0;  // rotary only
  NormKind norm = NormKind::layer_norm;
  double norm_epsilon = 1e-5;
  bool qkv_bias = false;
  bool attention_output_bias = false;
  bool mlp_bias = false;

  // Weights are normal with this standard deviation; with `scaled_residual` those that write into the residual stream
  // divide it by sqrt(2 * layers) (GPT-2: "Language Models are Unsupervised Multitask Learners", section 2.3).
  double initializer_range = 0.02;
  bool scaled_residual = false;
  bool operator==(const ModelSpec&) const = default;
};

// Largest sizes read: parameter and activation counts of such a model fit 63 bits, in bytes of optimizer state too.
inline constexpr std::int64_t largest_layers = 10'000;
inline constexpr std::int64_t largest_width = 1'048'576;        // hidden, feature, heads x head_dim
inline constexpr std::int64_t largest_vocabulary = 16'777'216;  // context too

// What contradicts itself in a spec whose single fields are in range. `key`: the model.yaml key to blame.
struct SpecProblem {
  std::string key;
  std::string message;
  bool operator==(const SpecProblem&) const = default;
};
std::optional<SpecProblem> find_problem(const ModelSpec& spec);

}  // namespace parplan
