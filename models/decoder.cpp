#include "models/decoder.h"

#include <fmt/format.h>

#include "models/graph_builder.h"

namespace parplan {
namespace {

TensorId norm(GraphBuilder& builder, const ModelSpec& spec, const std::string& name, TensorId x) {
  const OpShape attributes = {.epsilon = spec.norm_epsilon};
  const TensorId gamma = builder.ones(name + ".weight", builder.hidden());
  if (spec.norm == NormKind::rms_norm) {
    const TensorId y = builder.activation(name, builder.hidden());
    const TensorId rstd = builder.statistic(name + ".rstd");
    builder.op(OpKind::rms_norm, name, {x}, {gamma}, {y, rstd}, attributes);
    return y;
  }
  const TensorId beta = builder.zeros(name + ".bias", builder.hidden());
  const TensorId y = builder.activation(name, builder.hidden());
  const TensorId mean = builder.statistic(name + ".mean");
  const TensorId rstd = builder.statistic(name + ".rstd");
  builder.op(OpKind::layer_norm, name, {x}, {gamma, beta}, {y, mean, rstd}, attributes);
  return y;
}

// One fused product for query, key and value: per key/value group all its query heads, then its key, then its value,
// so that a shard of whole groups is contiguous.
TensorId attention(GraphBuilder& builder, const ModelSpec& spec, std::int64_t sequence, const std::string& name,
                   TensorId x) {
  const std::int64_t queries = spec.heads / spec.kv_heads;  // query heads of a group
  const std::int64_t group = (queries + 2) * spec.head_dim;
  const TensorDim fused = {Dim::kv_groups, spec.kv_heads * group, group};
  const TensorDim mixed = {Dim::kv_groups, spec.heads * spec.head_dim, queries * spec.head_dim};
  const OpShape attributes = {.heads = spec.heads, .kv_heads = spec.kv_heads, .head_dim = spec.head_dim};

  TensorId qkv = builder.linear(name + ".qkv", x, fused, builder.hidden(), spec.initializer_range, spec.qkv_bias);
  if (spec.position == PositionKind::rotary) {
    OpShape rotary = attributes;
    rotary.theta = spec.rope_theta;
    const TensorId rotated = builder.activation(name + ".rotary", fused);
    builder.op(OpKind::rotary, name + ".rotary", {qkv}, {}, {rotated}, rotary);
    qkv = rotated;
  }
  const TensorId y = builder.activation(name + ".mixed", mixed);
  const TensorId log_sum_exp =
      builder.tensor(name + ".log_sum_exp", TensorRole::statistic,
                     {{Dim::batch, 1, 1}, {Dim::kv_groups, spec.heads, queries}, {Dim::sequence, sequence, 1}});
  builder.op(OpKind::attention, name, {qkv}, {}, {y, log_sum_exp}, attributes);
  return builder.linear(name + ".output", y, builder.hidden(), mixed, builder.residual_deviation(), false);
}

TensorId feed_forward(GraphBuilder& builder, const ModelSpec& spec, const std::string& name, TensorId x) {
  const auto widen = [&](const char* part) {
    return builder.linear(name + part, x, builder.feature(), builder.hidden(), spec.initializer_range, spec.mlp_bias);
  };
  TensorId inner = -1;
  if (spec.activation == FeedForwardKind::gated_silu) {
    const TensorId gate = widen(".gate");
    const TensorId up = widen(".up");
    inner = builder.activation(name + ".gated", builder.feature());
    builder.op(OpKind::gate, name + ".gated", {gate, up}, {}, {inner}, {.activation = ActivationKind::silu});
  } else {
    const TensorId up = widen(".up");
    inner = builder.activation(name + ".activation", builder.feature());
    builder.op(OpKind::activation, name + ".activation", {up}, {}, {inner},
               {.activation = activation_kind(spec.activation)});
  }
  return builder.linear(name + ".down", inner, builder.hidden(), builder.feature(), builder.residual_deviation(), false);
}

}  // namespace

OpGraph build_decoder(const ModelSpec& spec, std::int64_t sequence_length) {
  GraphBuilder builder(spec, sequence_length);

  builder.begin_block("embedding", -1);
  TensorId x = builder.embed();
  if (spec.position == PositionKind::learned) {
    const TensorId table = builder.weight("position.weight", {Dim::position, spec.context, 1}, builder.hidden(),
                                          spec.initializer_range);
    const TensorId placed = builder.activation("position", builder.hidden());
    builder.op(OpKind::add_position, "position", {x}, {table}, {placed});
    x = placed;
  }
  builder.end_block(x);

  for (std::int64_t layer = 0; layer < spec.layers; ++layer) {
    const std::string name = fmt::format("layers.{}", layer);
    builder.begin_block(name, x);
    const TensorId normed = norm(builder, spec, name + ".attention_norm", x);
    const TensorId attended = attention(builder, spec, sequence_length, name + ".attention", normed);
    x = builder.add(name + ".attention_add", x, attended, name + ".attention.output.bias", spec.attention_output_bias);
    const TensorId normed_again = norm(builder, spec, name + ".feed_forward_norm", x);
    const TensorId fed = feed_forward(builder, spec, name + ".feed_forward", normed_again);
    x = builder.add(name + ".feed_forward_add", x, fed, name + ".feed_forward.down.bias", spec.mlp_bias);
    builder.end_block(x);
  }

  builder.begin_block("head", x);
  builder.head_and_loss(norm(builder, spec, "head.norm", x));
  builder.end_block(-1);
  return builder.finish_graph();
}

}  // namespace parplan
