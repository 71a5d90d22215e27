#include "models/decoder.h"

#include <optional>
#include <utility>
#include <vector>

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
  std::vector<TensorId> parameters = {gamma};
  if (!spec.norm_without_bias) parameters.push_back(builder.zeros(name + ".bias", builder.hidden()));
  const TensorId y = builder.activation(name, builder.hidden());
  const TensorId mean = builder.statistic(name + ".mean");
  const TensorId rstd = builder.statistic(name + ".rstd");
  builder.op(OpKind::layer_norm, name, {x}, std::move(parameters), {y, mean, rstd}, attributes);
  return y;
}

// The widths of attention. Query, key and value are one product: for each key/value group all its
// query heads, then its key, then its value, so that a shard of whole groups is contiguous.
struct AttentionWidths {
  std::int64_t queries = 0;  // query heads of a group
  TensorDim fused, mixed;    // query, key and value; the result of attention
  OpShape attributes;

  explicit AttentionWidths(const ModelSpec& spec)
      : queries(spec.heads / spec.kv_heads),
        fused{Dim::kv_groups, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, (queries + 2) * spec.head_dim, queries,
              2 * spec.head_dim},
        mixed{Dim::kv_groups, spec.heads * spec.head_dim, queries * spec.head_dim, queries},
        attributes{.heads = spec.heads, .kv_heads = spec.kv_heads, .head_dim = spec.head_dim} {}
};

TensorId query_key_norm(GraphBuilder& builder, const ModelSpec& spec, const AttentionWidths& widths,
                        const std::string& name, TensorId qkv) {
  OpShape attributes = widths.attributes;
  attributes.epsilon = spec.norm_epsilon;
  attributes.centered = spec.qk_norm == QkNorm::layer_norm_per_head;
  const bool shared = spec.qk_norm == QkNorm::per_head;  // one gamma for all heads
  const TensorDim head = {Dim::hidden, spec.head_dim, 1};
  const TensorDim keys = {Dim::kv_groups, spec.kv_heads * spec.head_dim, spec.head_dim, widths.queries, spec.head_dim};
  const TensorId query_gamma = builder.ones(name + ".query_norm.weight", shared ? head : widths.mixed);
  const TensorId key_gamma = builder.ones(name + ".key_norm.weight", shared ? head : keys);
  if (shared || attributes.centered) {
    const TensorId y = builder.activation(name + ".qk_norm", widths.fused);
    const TensorId rstd = builder.statistic(
        name + ".qk_norm.rstd", {{Dim::kv_groups, spec.heads + spec.kv_heads, widths.queries + 1, widths.queries, 1}});
    builder.op(OpKind::head_norm, name + ".qk_norm", {qkv}, {query_gamma, key_gamma}, {y, rstd}, attributes);
    return y;
  }
  const TensorId squares = builder.statistic(name + ".qk_squares", {{Dim::hidden, 2, 1}});
  builder.op(OpKind::query_key_squares, name + ".qk_squares", {qkv}, {}, {squares}, attributes);
  const TensorId y = builder.activation(name + ".qk_norm", widths.fused);
  builder.op(OpKind::query_key_norm, name + ".qk_norm", {qkv, squares}, {query_gamma, key_gamma}, {y}, attributes);
  return y;
}

TensorId attention(GraphBuilder& builder, const ModelSpec& spec, std::int64_t layer, std::int64_t sequence,
                   const std::string& name, TensorId x) {
  const AttentionWidths widths(spec);
  TensorId qkv =
      builder.linear(name + ".qkv", x, widths.fused, builder.hidden(), spec.initializer_range, spec.qkv_bias);
  if (spec.qk_norm != QkNorm::none) qkv = query_key_norm(builder, spec, widths, name, qkv);
  const bool slides = window_of(spec, layer).has_value();
  if (spec.position == PositionKind::rotary && (slides || !spec.sliding_rotary_only)) {
    OpShape rotary = widths.attributes;
    const bool own = slides && spec.sliding_rope_theta;
    rotary.theta = own ? *spec.sliding_rope_theta : spec.rope_theta;
    if (!own && spec.rope_factor != 1.0) rotary.factor = spec.rope_factor;
    rotary.rotary_dim = spec.rotary_dim.value_or(0);
    rotary.interleaved = spec.rotary_interleaved;
    const TensorId rotated = builder.activation(name + ".rotary", widths.fused);
    builder.op(OpKind::rotary, name + ".rotary", {qkv}, {}, {rotated}, rotary);
    qkv = rotated;
  }
  OpShape attributes = widths.attributes;
  const std::int64_t window = window_of(spec, layer).value_or(sequence);
  if (window < sequence) attributes.window = window;  // a wider one cuts nothing, and is no kind of its own
  attributes.bidirectional = spec.bidirectional;
  attributes.score_scale = spec.attention_scale.value_or(0.0);
  attributes.softcap = spec.attention_softcap.value_or(0.0);
  if (spec.position == PositionKind::alibi) attributes.alibi = spec.alibi_multiplier;
  const TensorId y = builder.activation(name + ".mixed", widths.mixed);
  const TensorId log_sum_exp = builder.tensor(
      name + ".log_sum_exp", TensorRole::statistic,
      {{Dim::batch, 1, 1}, {Dim::kv_groups, spec.heads, widths.queries, widths.queries}, {Dim::sequence, sequence, 1}});
  builder.op(OpKind::attention, name, {qkv}, {}, {y, log_sum_exp}, attributes);
  return builder.linear(name + ".output", y, builder.hidden(), widths.mixed, builder.residual_deviation(), false);
}

TensorId feed_forward(GraphBuilder& builder, const ModelSpec& spec, const std::string& name, TensorId x) {
  const auto widen = [&](const char* part) {
    return builder.linear(name + part, x, builder.feature(), builder.hidden(), spec.initializer_range, spec.mlp_bias);
  };
  const OpShape attributes = {.activation = activation_kind(spec.activation)};
  const bool gated = is_gated(spec.activation);
  std::vector<TensorId> widened;
  if (gated) widened.push_back(widen(".gate"));
  widened.push_back(widen(".up"));
  const std::string activated = name + (gated ? ".gated" : ".activation");
  const TensorId inner = builder.activation(activated, builder.feature());
  builder.op(gated ? OpKind::gate : OpKind::activation, activated, std::move(widened), {}, {inner}, attributes);
  return builder.linear(name + ".down", inner, builder.hidden(), builder.feature(), builder.residual_deviation(),
                        false);
}

// Adds a branch to the residual stream: `name` is "layers.3.attention" or the like. The branch's
// last bias is added by the sum, unless something comes between the two.
TensorId add_branch(GraphBuilder& builder, const ModelSpec& spec, const std::string& name, TensorId x, TensorId branch,
                    const std::string& bias_name, bool bias) {
  const bool normed =
      spec.norm_placement == NormPlacement::after_branch || spec.norm_placement == NormPlacement::around_branch;
  const bool scaled = spec.residual_multiplier != 1.0;
  const bool bias_first = bias && (normed || scaled);
  if (bias_first) branch = builder.add(name + "_bias", std::nullopt, branch, bias_name, true);
  if (normed) branch = norm(builder, spec, name + "_output_norm", branch);
  if (scaled) branch = builder.scale(name + "_scale", branch, spec.residual_multiplier);
  const TensorId sum = builder.add(name + "_add", x, branch, bias_name, bias && !bias_first);
  return spec.norm_placement == NormPlacement::after_add ? norm(builder, spec, name + "_norm", sum) : sum;
}

TensorId layer_of(GraphBuilder& builder, const ModelSpec& spec, std::int64_t layer, std::int64_t sequence, TensorId x) {
  const std::string name = fmt::format("layers.{}", layer);
  const bool normed =
      spec.norm_placement == NormPlacement::before_branch || spec.norm_placement == NormPlacement::around_branch;
  const auto before = [&](const char* part, TensorId stream) {
    return normed ? norm(builder, spec, name + part, stream) : stream;
  };
  const auto attend = [&](TensorId from) {
    return attention(builder, spec, layer, sequence, name + ".attention", from);
  };
  const auto feed = [&](TensorId from) { return feed_forward(builder, spec, name + ".feed_forward", from); };
  const auto join_attention = [&](TensorId stream, TensorId branch) {
    return add_branch(builder, spec, name + ".attention", stream, branch, name + ".attention.output.bias",
                      spec.attention_output_bias);
  };
  const auto join_feed_forward = [&](TensorId stream, TensorId branch) {
    return add_branch(builder, spec, name + ".feed_forward", stream, branch, name + ".feed_forward.down.bias",
                      spec.mlp_bias);
  };

  if (spec.parallel_residual) {
    const TensorId for_attention = before(spec.shared_norm ? ".norm" : ".attention_norm", x);
    const TensorId for_feed_forward = spec.shared_norm ? for_attention : before(".feed_forward_norm", x);
    const TensorId attended = attend(for_attention);
    const TensorId fed = feed(for_feed_forward);
    return join_feed_forward(join_attention(x, attended), fed);
  }
  x = join_attention(x, attend(before(".attention_norm", x)));
  return join_feed_forward(x, feed(before(".feed_forward_norm", x)));
}

TensorId head_transform(GraphBuilder& builder, const ModelSpec& spec, TensorId x) {
  x = builder.linear("head.transform", x, builder.hidden(), builder.hidden(), spec.initializer_range, true);
  const TensorId activated = builder.activation("head.transform.activation", builder.hidden());
  builder.op(OpKind::activation, "head.transform.activation", {x}, {}, {activated},
             {.activation = activation_kind(spec.activation)});
  return norm(builder, spec, "head.transform.norm", activated);
}

}  // namespace

OpGraph build_decoder(const ModelSpec& spec, std::int64_t sequence_length) {
  GraphBuilder builder(spec, sequence_length);

  builder.begin_block("embedding", std::nullopt);
  TensorId x = reads_images(spec) ? builder.embed_patches() : builder.embed();
  if (spec.embedding_multiplier != 1.0) x = builder.scale("embedding.scale", x, spec.embedding_multiplier);
  if (spec.position == PositionKind::learned) {
    const TensorDim rows = {Dim::position, spec.context + spec.position_offset, 1};
    const TensorId table = builder.weight("position.weight", rows, builder.hidden(), spec.initializer_range);
    const TensorId placed = builder.activation("position", builder.hidden());
    builder.op(OpKind::add_position, "position", {x}, {table}, {placed}, {.begin = spec.position_offset});
    x = placed;
  }
  if (spec.token_types > 0) {
    const TensorDim rows = {Dim::position, spec.token_types, 1};
    const TensorId table = builder.weight("token_type.weight", rows, builder.hidden(), spec.initializer_range);
    const TensorId typed = builder.activation("token_type", builder.hidden());
    builder.op(OpKind::add, "token_type", {x}, {table}, {typed});
    x = typed;
  }
  if (spec.embedding_norm) x = norm(builder, spec, "embedding.norm", x);
  builder.end_block(x);

  for (std::int64_t layer = 0; layer < spec.layers; ++layer) {
    builder.begin_block(fmt::format("layers.{}", layer), x);
    x = layer_of(builder, spec, layer, sequence_length, x);
    builder.end_block(x);
  }

  builder.begin_block("head", x);
  if (reads_images(spec)) x = builder.take("head.class", x, sequence_length - 1, 1);
  if (spec.norm_placement != NormPlacement::after_add) x = norm(builder, spec, "head.norm", x);
  if (spec.head_transform) x = head_transform(builder, spec, x);
  if (spec.mask_token) builder.learn_masked_tokens(*spec.mask_token, spec.masked_share);
  builder.head_and_loss(x);
  builder.end_block(std::nullopt);
  return builder.finish_graph();
}

}  // namespace parplan
