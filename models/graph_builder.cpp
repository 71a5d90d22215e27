#include "models/graph_builder.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {

GraphBuilder::GraphBuilder(const ModelSpec& spec, std::int64_t sequence_length)
    : spec_(spec), positions_(sequence_length) {
  graph_.name = spec.name;
  graph_.sequence = sequence_length;
  graph_.vocabulary = spec.vocabulary;
}

void GraphBuilder::begin_block(const std::string& name, std::optional<TensorId> input) {
  graph_.blocks.push_back({.name = name, .first_op = static_cast<int>(graph_.ops.size()), .input = input});
}

void GraphBuilder::end_block(std::optional<TensorId> output) {
  graph_.blocks.back().last_op = static_cast<int>(graph_.ops.size());
  graph_.blocks.back().output = output;
}

TensorId GraphBuilder::tensor(const std::string& name, TensorRole role, std::vector<TensorDim> dims) {
  graph_.tensors.push_back({.name = name, .role = role, .dims = std::move(dims)});
  return static_cast<TensorId>(graph_.tensors.size()) - 1;
}

TensorId GraphBuilder::tokens(const std::string& name) {
  return tensor(name, TensorRole::tokens, {sequence(), batch()});
}

TensorId GraphBuilder::activation(const std::string& name, TensorDim width) {
  return tensor(name, TensorRole::activation, {sequence(), batch(), width});
}

TensorId GraphBuilder::statistic(const std::string& name, std::vector<TensorDim> further) {
  std::vector<TensorDim> dims = {sequence(), batch()};
  dims.insert(dims.end(), further.begin(), further.end());
  return tensor(name, TensorRole::statistic, std::move(dims));
}

TensorId GraphBuilder::weight(const std::string& name, TensorDim out, TensorDim in, double standard_deviation) {
  const TensorId id = tensor(name, TensorRole::parameter, {out, in});
  graph_.tensors.back().standard_deviation = standard_deviation;
  graph_.tensors.back().decays = true;
  return id;
}

TensorId GraphBuilder::zeros(const std::string& name, TensorDim width) {
  const TensorId id = tensor(name, TensorRole::parameter, {width});
  graph_.tensors.back().initializer = Initializer::zeros;
  return id;
}

TensorId GraphBuilder::ones(const std::string& name, TensorDim width) {
  const TensorId id = tensor(name, TensorRole::parameter, {width});
  graph_.tensors.back().initializer = Initializer::ones;
  return id;
}

void GraphBuilder::op(OpKind kind, const std::string& name, std::vector<TensorId> inputs,
                      std::vector<TensorId> parameters, std::vector<TensorId> outputs, OpShape attributes) {
  graph_.ops.push_back({.kind = kind,
                        .name = name,
                        .inputs = std::move(inputs),
                        .parameters = std::move(parameters),
                        .outputs = std::move(outputs),
                        .attributes = attributes});
}

TensorId GraphBuilder::embed() {
  const TensorId ids = tokens("tokens");
  embedding_weight_ = weight("embedding.weight", vocabulary(), embedding_width(), spec_.initializer_range);
  const TensorId x = activation("embedding", embedding_width());
  op(OpKind::embedding, "embedding", {ids}, {*embedding_weight_}, {x});
  if (!spec_.embedding_width) return x;
  return linear("embedding.projection", x, hidden(), embedding_width(), spec_.initializer_range, false);
}

TensorId GraphBuilder::embed_patches() {
  const LabelledImages images{.size = spec_.image_size, .patch = spec_.patch_size, .channels = spec_.image_channels};
  graph_.images = images;
  set_positions(images.patches());
  const TensorDim width = {Dim::hidden, images.colours(), 1};
  const TensorId colours = tensor("colours", TensorRole::tokens, {sequence(), batch(), width});
  const TensorId pixels = activation("pixels", width);
  op(OpKind::normalize_pixels, "pixels", {colours}, {}, {pixels});
  const TensorId x = linear("embedding", pixels, hidden(), width, spec_.initializer_range, true);
  return append("class", x, weight("class.weight", {Dim::position, 1, 1}, hidden(), spec_.initializer_range));
}

TensorId GraphBuilder::linear(const std::string& name, TensorId x, TensorDim out, TensorDim in,
                              double standard_deviation, bool bias) {
  std::vector<TensorId> parameters = {weight(name + ".weight", out, in, standard_deviation)};
  if (bias) parameters.push_back(zeros(name + ".bias", out));
  const TensorId y = activation(name, out);
  op(OpKind::linear, name, {x}, std::move(parameters), {y});
  return y;
}

TensorId GraphBuilder::add(const std::string& name, std::optional<TensorId> residual, TensorId branch,
                           const std::string& bias_name, bool bias) {
  std::vector<TensorId> parameters;
  if (bias) parameters.push_back(zeros(bias_name, hidden()));
  const TensorId y = activation(name, hidden());
  op(OpKind::add, name, residual ? std::vector{*residual, branch} : std::vector{branch}, std::move(parameters), {y});
  return y;
}

TensorId GraphBuilder::scale(const std::string& name, TensorId x, double factor) {
  const TensorId y = activation(name, graph_.tensors[x].dims.back());
  op(OpKind::scale, name, {x}, {}, {y}, {.factor = factor});
  return y;
}

TensorId GraphBuilder::take(const std::string& name, TensorId x, std::int64_t begin, std::int64_t positions) {
  positions_ = positions;
  const TensorId y = activation(name, graph_.tensors[x].dims.back());
  op(OpKind::take_rows, name, {x}, {}, {y}, {.sequence = positions, .begin = begin});
  return y;
}

TensorId GraphBuilder::put(const std::string& name, TensorId x, TensorId y, std::int64_t begin,
                           std::int64_t positions) {
  positions_ = graph_.tensors[x].dims.front().size;
  const TensorId z = activation(name, graph_.tensors[x].dims.back());
  op(OpKind::put_rows, name, {x, y}, {}, {z}, {.sequence = positions, .begin = begin});
  return z;
}

TensorId GraphBuilder::append(const std::string& name, TensorId x, TensorId table) {
  const std::int64_t before = graph_.tensors[x].dims.front().size;
  const std::int64_t rows = ceil_div(element_count(graph_.tensors[table]), graph_.tensors[x].dims.back().size);
  positions_ = before + rows;
  const TensorId y = activation(name, graph_.tensors[x].dims.back());
  op(OpKind::append_rows, name, {x}, {table}, {y}, {.sequence = rows, .begin = before});
  return y;
}

void GraphBuilder::head_and_loss(TensorId x) {
  if (spec_.logits_multiplier != 1.0) x = scale("head.scale", x, spec_.logits_multiplier);
  if (spec_.embedding_width)
    x = linear("head.projection", x, embedding_width(), hidden(), spec_.initializer_range, false);
  std::vector<TensorId> parameters = {
      spec_.tied_embeddings ? embedding_weight_.value()
                            : weight("head.weight", vocabulary(), embedding_width(), spec_.initializer_range)};
  if (spec_.head_bias) parameters.push_back(zeros("head.bias", vocabulary()));
  TensorId logits = activation("head.logits", vocabulary());
  op(OpKind::linear, "head", {x}, std::move(parameters), {logits});
  if (spec_.logits_softcap) {
    const TensorId capped = activation("head.softcap", vocabulary());
    op(OpKind::softcap, "head.softcap", {logits}, {}, {capped}, {.softcap = *spec_.logits_softcap});
    logits = capped;
  }
  const TensorId targets = tokens("targets");
  const TensorId maximum = statistic("head.maximum");
  op(OpKind::cross_entropy_max, "head.maximum", {logits}, {}, {maximum});
  const TensorId sums = statistic("head.sums", {{Dim::hidden, 2, 1}});
  op(OpKind::cross_entropy_sums, "head.sums", {logits, targets, maximum}, {}, {sums});
  const TensorId loss = tensor("loss", TensorRole::loss, {});
  op(OpKind::cross_entropy_loss, "head.loss", {logits, targets, maximum, sums}, {}, {loss});
}

double GraphBuilder::residual_deviation() const {
  return spec_.scaled_residual ? spec_.initializer_range / std::sqrt(2.0 * static_cast<double>(spec_.layers))
                               : spec_.initializer_range;
}

void GraphBuilder::learn_masked_tokens(std::int64_t mask_token, double share) {
  const auto count = static_cast<std::int64_t>(std::llround(share * static_cast<double>(graph_.sequence)));
  graph_.masked = {.count = std::max<std::int64_t>(count, 1), .token = mask_token};
}

OpGraph GraphBuilder::finish_graph() {
  finish(graph_);
  return std::move(graph_);
}

ActivationKind activation_kind(FeedForwardKind activation) {
  switch (activation) {
    case FeedForwardKind::gelu_tanh:
    case FeedForwardKind::gated_gelu_tanh: return ActivationKind::gelu_tanh;
    case FeedForwardKind::gelu_erf:
    case FeedForwardKind::gated_gelu_erf: return ActivationKind::gelu_erf;
    case FeedForwardKind::relu: return ActivationKind::relu;
    case FeedForwardKind::gated_silu: return ActivationKind::silu;
  }
  PARPLAN_ASSERT(false, fmt::format("activation {}", static_cast<int>(activation)));
  return ActivationKind::relu;
}

}  // namespace parplan
