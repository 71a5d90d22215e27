#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "planner/graph/op_graph.h"

// Graphs small enough to check by hand, built without models/: sequence 4, hidden 8, two heads of
// 4, vocabulary 11.
namespace parplan {

struct SmallGraph {
  OpGraph graph;

  SmallGraph() {
    graph.name = "small";
    graph.sequence = 4;
    graph.vocabulary = 11;
  }

  TensorId tensor(std::string name, TensorRole role, std::vector<TensorDim> dims) {
    Tensor result;
    result.name = std::move(name);
    result.role = role;
    result.dims = std::move(dims);
    graph.tensors.push_back(std::move(result));
    return static_cast<TensorId>(graph.tensors.size()) - 1;
  }
  TensorId tokens(std::string name) {
    return tensor(std::move(name), TensorRole::tokens, {{Dim::sequence, 4}, {Dim::batch, 1}});
  }
  TensorId activation(std::string name, TensorDim width) {
    return tensor(std::move(name), TensorRole::activation, {{Dim::sequence, 4}, {Dim::batch, 1}, width});
  }
  TensorId statistic(std::string name, std::int64_t per_token = 1) {
    return tensor(std::move(name), TensorRole::statistic,
                  {{Dim::sequence, 4}, {Dim::batch, 1}, {Dim::hidden, per_token}});
  }
  TensorId parameter(std::string name, std::vector<TensorDim> dims) {
    return tensor(std::move(name), TensorRole::parameter, std::move(dims));
  }
  void op(OpKind kind, std::string name, std::vector<TensorId> inputs, std::vector<TensorId> parameters,
          std::vector<TensorId> outputs, OpShape attributes = {}) {
    graph.ops.push_back(
        {kind, std::move(name), std::move(inputs), std::move(parameters), std::move(outputs), attributes});
  }
  // Ends a block at the op added last.
  void end_block(std::string name, std::optional<TensorId> input, std::optional<TensorId> output) {
    const int first = graph.blocks.empty() ? 0 : graph.blocks.back().last_op;
    graph.blocks.push_back({std::move(name), 0, first, static_cast<int>(graph.ops.size()), input, output});
  }

  TensorId norm(const std::string& at, TensorId x, bool rms) {
    const TensorDim hidden{Dim::hidden, 8};
    const TensorId y = activation(at, hidden);
    if (rms) {
      op(OpKind::rms_norm, at, {x}, {parameter(at + ".weight", {hidden})}, {y, statistic(at + ".rstd")});
    } else {
      const TensorId weight = parameter(at + ".weight", {hidden});
      const TensorId bias = parameter(at + ".bias", {hidden});
      const TensorId mean = statistic(at + ".mean");
      op(OpKind::layer_norm, at, {x}, {weight, bias}, {y, mean, statistic(at + ".rstd")});
    }
    return y;
  }
  TensorId linear(const std::string& at, TensorId x, TensorDim out, bool bias = false) {
    const TensorDim in = graph.tensors[x].dims.back();
    std::vector<TensorId> parameters{parameter(at + ".weight", {out, in})};
    if (bias) parameters.push_back(parameter(at + ".bias", {out}));
    const TensorId y = activation(at, out);
    op(OpKind::linear, at, {x}, parameters, {y});
    return y;
  }
  TensorId add(const std::string& at, TensorId a, TensorId b, bool bias) {
    const TensorDim width = graph.tensors[a].dims.back();
    std::vector<TensorId> parameters;
    if (bias) parameters.push_back(parameter(at + ".bias", {width}));
    const TensorId y = activation(at, width);
    op(OpKind::add, at, {a, b}, parameters, {y});
    return y;
  }
  TensorId elementwise(OpKind kind, const std::string& at, TensorId x, OpShape attributes) {
    const TensorId y = activation(at, graph.tensors[x].dims.back());
    op(kind, at, {x}, {}, {y}, attributes);
    return y;
  }
  TensorId gelu(const std::string& at, TensorId x) {
    return elementwise(OpKind::activation, at, x, {.activation = ActivationKind::gelu_erf});
  }
  TensorId gate(const std::string& at, TensorId opening, TensorId up) {
    const TensorId y = activation(at, graph.tensors[up].dims.back());
    op(OpKind::gate, at, {opening, up}, {}, {y}, {.activation = ActivationKind::silu});
    return y;
  }
  TensorId embedding(bool positions) {
    const TensorDim hidden{Dim::hidden, 8};
    const TensorId ids = tokens("tokens");
    const TensorId table = parameter("embedding.weight", {{Dim::vocabulary, 11}, hidden});
    TensorId x = activation("embedding", hidden);
    op(OpKind::embedding, "embedding", {ids}, {table}, {x});
    if (positions) {
      const TensorId position = parameter("embedding.position.weight", {{Dim::position, 4}, hidden});
      const TensorId sum = activation("embedding.position", hidden);
      op(OpKind::add_position, "embedding.position", {x}, {position}, {sum});
      x = sum;
    }
    end_block("embedding", std::nullopt, x);
    return x;
  }
  void head(TensorId x, bool rms, std::optional<TensorId> tied_table) {
    const TensorId normal = norm("head.norm", x, rms);
    const auto tied_logits = [&] {
      const TensorId y = activation("head.logits", {Dim::vocabulary, 11});
      op(OpKind::linear, "head.logits", {normal}, {*tied_table}, {y});
      return y;
    };
    const TensorId logits = tied_table ? tied_logits() : linear("head.logits", normal, {Dim::vocabulary, 11});
    const TensorId targets = tokens("targets");
    const TensorId maximum = statistic("head.maximum");
    const TensorId sums = statistic("head.sums", 2);
    const TensorId loss = tensor("loss", TensorRole::loss, {});
    op(OpKind::cross_entropy_max, "head.maximum", {logits}, {}, {maximum});
    op(OpKind::cross_entropy_sums, "head.sums", {logits, targets, maximum}, {}, {sums});
    op(OpKind::cross_entropy_loss, "head.loss", {logits, targets, maximum, sums}, {}, {loss});
    end_block("head", x, std::nullopt);
  }
};

// As GPT-2: learned positions, LayerNorm, GELU, biases, tied embeddings. The two projections that a
// tensor-parallel plan sums have their bias in the residual add.
inline OpGraph small_gpt2(int layers) {
  SmallGraph b;
  TensorId x = b.embedding(true);
  const TensorId table = b.graph.ops[0].parameters[0];
  for (int n = 0; n < layers; ++n) {
    const std::string at = "layers." + std::to_string(n);
    const TensorId first = b.norm(at + ".norm1", x, false);
    const TensorId qkv = b.linear(at + ".qkv", first, {Dim::kv_groups, 24, 12}, true);
    const TensorId y = b.activation(at + ".attention", {Dim::kv_groups, 8, 4});
    b.op(OpKind::attention, at + ".attention", {qkv}, {}, {y, b.statistic(at + ".lse", 2)},
         {.heads = 2, .kv_heads = 2, .head_dim = 4});
    const TensorId middle = b.add(at + ".residual1", x, b.linear(at + ".projection", y, {Dim::hidden, 8}), true);
    const TensorId second = b.norm(at + ".norm2", middle, false);
    const TensorId up = b.linear(at + ".up", second, {Dim::feature, 32}, true);
    const TensorId active = b.activation(at + ".gelu", {Dim::feature, 32});
    b.op(OpKind::activation, at + ".gelu", {up}, {}, {active});
    const TensorId out = b.add(at + ".residual2", middle, b.linear(at + ".down", active, {Dim::hidden, 8}), true);
    b.end_block(at, x, out);
    x = out;
  }
  b.head(x, false, table);
  finish(b.graph);
  return b.graph;
}

// As Llama: rotary positions, RMSNorm, gated SiLU, no biases, one key/value head for two query
// heads, untied.
inline OpGraph small_llama(int layers) {
  SmallGraph b;
  TensorId x = b.embedding(false);
  for (int n = 0; n < layers; ++n) {
    const std::string at = "layers." + std::to_string(n);
    const OpShape heads{.heads = 2, .kv_heads = 1, .head_dim = 4, .theta = 10000.0};
    const TensorId first = b.norm(at + ".norm1", x, true);
    const TensorId qkv = b.linear(at + ".qkv", first, {Dim::kv_groups, 16, 16});
    const TensorId rotated = b.activation(at + ".rotary", {Dim::kv_groups, 16, 16});
    b.op(OpKind::rotary, at + ".rotary", {qkv}, {}, {rotated}, heads);
    const TensorId y = b.activation(at + ".attention", {Dim::kv_groups, 8, 8});
    b.op(OpKind::attention, at + ".attention", {rotated}, {}, {y, b.statistic(at + ".lse", 2)}, heads);
    const TensorId middle = b.add(at + ".residual1", x, b.linear(at + ".projection", y, {Dim::hidden, 8}), false);
    const TensorId second = b.norm(at + ".norm2", middle, true);
    const TensorId gate = b.linear(at + ".gate", second, {Dim::feature, 24});
    const TensorId up = b.linear(at + ".up", second, {Dim::feature, 24});
    const TensorId gated = b.gate(at + ".silu", gate, up);
    const TensorId out = b.add(at + ".residual2", middle, b.linear(at + ".down", gated, {Dim::hidden, 8}), false);
    b.end_block(at, x, out);
    x = out;
  }
  b.head(x, true, std::nullopt);
  finish(b.graph);
  return b.graph;
}

inline TensorId tensor_named(const OpGraph& graph, const std::string& name) {
  for (std::size_t t = 0; t < graph.tensors.size(); ++t)
    if (graph.tensors[t].name == name) return static_cast<TensorId>(t);
  return -1;
}
inline std::vector<std::string> names_of(const OpGraph& graph, const std::vector<TensorId>& ids) {
  std::vector<std::string> result;
  for (const TensorId id : ids) result.push_back(graph.tensors[id].name);
  return result;
}

}  // namespace parplan

// Prints one line per element when a comparison fails.
template <>
struct doctest::StringMaker<std::vector<std::string>> {
  static doctest::String convert(const std::vector<std::string>& lines) {
    std::string text = "{\n";
    for (const std::string& line : lines) text += "  \"" + line + "\"\n";
    return (text + "}").c_str();
  }
};
