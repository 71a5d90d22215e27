#include "planner/graph/engine_graph.h"

#include <algorithm>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/graph/graph_rewriting.h"

namespace parplan {
namespace {

// A graph with the ops of an engine's kernels.
class Rewriting : GraphRewriting {
 public:
  Rewriting(const Engine& engine, DataType precision, bool quantizes, OpGraph graph)
      : GraphRewriting(std::move(graph)), engine_(engine), precision_(precision), quantizes_(quantizes) {}

  OpGraph rewrite() {
    OpGraph graph = rewritten([&](const Block&, const Op& op) { write(op); });
    finish(graph);
    return graph;
  }

 private:
  // A tensor of the same dims as another.
  TensorId like(TensorId other, std::string name, TensorRole role) {
    Tensor made = tensor(other);
    made.name = std::move(name);
    made.role = role;
    made.softmax.reset();
    return add(std::move(made));
  }

  void write(const Op& op) {
    switch (op.kind) {
      case OpKind::attention:
        if (!engine_.fused_attention) return write_attention(op);
        if (engine_.copies_keys || repeats_keys(op)) return write_fused_attention(op);
        if (engine_.dropout) return write_with(op, &OpShape::drops);
        break;
      case OpKind::packed_attention:
        if (!engine_.fused_attention)
          throw ConfigError(fmt::format(
              "engine {} computes attention in several kernels, which parplan does not state for queries and keys of "
              "two sequences or with relative positions ({}); choose an engine with fused attention, such as parplan",
              engine_.name, op.name));
        if (engine_.dropout) return write_with(op, &OpShape::drops);
        break;
      case OpKind::add:
        if (engine_.dropout && op.inputs.size() > 1) return write_sum(op);
        break;
      case OpKind::activation:
        if (!engine_.fused_gelu && op.attributes.activation == ActivationKind::gelu_tanh)
          return write_with(op, &OpShape::stepwise);
        break;
      case OpKind::layer_norm:
      case OpKind::rms_norm:
        return write_norm(op);
      case OpKind::gate:
        if (!engine_.fused_gate) return write_gate(op);
        break;
      case OpKind::rotary:
        if (!engine_.fused_rotary) return write_with(op, &OpShape::stepwise);
        break;
      case OpKind::cross_entropy_max:
      case OpKind::cross_entropy_sums:
      case OpKind::cross_entropy_loss:
        if (!engine_.fused_loss) return write_loss(op);
        copy(op);
        // quantized() rewrites what an engine's facts have rewritten.
        if (engine_.loss_metrics > 0) to_.ops.back().attributes.metrics = metrics_of(op);
        return;
      default:
        if (quantizes_ && may_be_fp8(from_, op)) return write_product(op);
        if (op.kind == OpKind::linear) return write_linear(op);
        break;
    }
    copy(op);
  }

  // An op as it is, but for how its kernel works.
  void write_with(const Op& op, bool OpShape::*attribute) {
    copy(op);
    to_.ops.back().attributes.*attribute = true;
  }

  void write_norm(const Op& op) {
    copy(op);
    OpShape& attributes = to_.ops.back().attributes;
    attributes.stepwise |= !engine_.fused_sums;
    attributes.apart |= !engine_.fused_norm_gradient;
    if (engine_.fused_rms_norm || op.kind != OpKind::rms_norm) return;
    attributes.composed = true;
    attributes.widened = is_half(in_memory(precision_));  // to(float32) of fp32 is no copy
    Op& written = to_.ops.back();
    written.outputs.push_back(like(written.inputs[0], op.name + ".normalized", TensorRole::activation));
    if (attributes.widened)
      written.outputs.push_back(like(written.inputs[0], op.name + ".wide", TensorRole::statistic));
  }

  void write_linear(const Op& op) {
    copy(op);
    OpShape& attributes = to_.ops.back().attributes;
    attributes.apart |= !engine_.fused_bias_gradient;
    // The end of a group of heads is its key and its value.
    const TensorDim& made = from_.tensors[static_cast<std::size_t>(op.outputs[0])].dims.back();
    if (!engine_.separate_keys || made.dim != Dim::kv_groups || made.shared == 0) return;
    attributes.key_columns = made.shared / 2;
    attributes.stepwise = !engine_.fused_sums;
  }

  TensorId dropped(OpKind kind, const std::string& name, TensorId x, OpShape attributes) {
    const TensorId y = like(x, name + ".dropped", TensorRole::activation);
    const TensorId mask = like(x, name + ".mask", TensorRole::mask);
    to_.ops.push_back({.kind = kind,
                       .name = name + ".dropout",
                       .inputs = {x},
                       .parameters = {},
                       .outputs = {y, mask},
                       .attributes = attributes});
    return y;
  }

  TensorId with_copied_keys(const Op& op) {
    const TensorId qkv = mapped(op.inputs[0]);
    const OpShape& heads = op.attributes;
    Op copy{.kind = OpKind::copy_keys,
            .name = op.name + ".copy",
            .inputs = {qkv},
            .parameters = {},
            .outputs = {like(qkv, op.name + ".copied", TensorRole::activation)},
            .attributes = heads};
    copy.attributes.second = heads.heads == heads.kv_heads;
    if (copy.attributes.second) {
      Tensor kept = to_.tensors[static_cast<std::size_t>(qkv)];
      kept.name = op.name + ".kept";
      const std::int64_t of_group = 2 * heads.head_dim;  // a key and a value
      kept.dims.back() = {Dim::kv_groups, heads.kv_heads * of_group, of_group};
      copy.outputs.push_back(add(std::move(kept)));
    }
    to_.ops.push_back(copy);
    return copy.outputs[0];
  }

  bool repeats_keys(const Op& op) const {
    return engine_.repeats_keys && op.attributes.kv_heads != op.attributes.heads;
  }

  // The fused queries, keys and values `qkv` of attention `op`, with a key and a value for each
  // query head.
  TensorId with_repeated_keys(const Op& op, TensorId qkv) {
    const OpShape& heads = op.attributes;
    const std::int64_t queries = heads.heads / heads.kv_heads;  // of a group
    Tensor repeated = to_.tensors[static_cast<std::size_t>(qkv)];
    PARPLAN_ASSERT(repeated.dims.back().dim == Dim::kv_groups, op.name);
    repeated.name = op.name + ".repeated";
    repeated.dims.back() = {Dim::kv_groups, 3 * heads.heads * heads.head_dim, 3 * queries * heads.head_dim, queries};
    to_.ops.push_back({.kind = OpKind::repeat_keys,
                       .name = op.name + ".repeat",
                       .inputs = {qkv},
                       .parameters = {},
                       .outputs = {add(std::move(repeated))},
                       .attributes = heads});
    return to_.ops.back().outputs[0];
  }

  void write_fused_attention(const Op& op) {
    TensorId qkv = engine_.copies_keys ? with_copied_keys(op) : mapped(op.inputs[0]);
    const bool repeats = repeats_keys(op);
    if (repeats) qkv = with_repeated_keys(op, qkv);
    copy(op);
    to_.ops.back().inputs[0] = qkv;
    to_.ops.back().attributes.drops = engine_.dropout;
    if (repeats) to_.ops.back().attributes.kv_heads = op.attributes.heads;
  }

  // The activation, and its product with the other half.
  void write_gate(const Op& op) {
    const TensorId gate = mapped(op.inputs[0]);
    const TensorId activated = like(gate, op.name + ".activated", TensorRole::activation);
    const ActivationKind kind = op.attributes.activation;
    to_.ops.push_back(
        {.kind = OpKind::activation,
         .name = op.name + ".activation",
         .inputs = {gate},
         .parameters = {},
         .outputs = {activated},
         .attributes = {.activation = kind,
                        .stepwise = !engine_.fused_gelu && kind == ActivationKind::gelu_tanh}});
    to_.ops.push_back({.kind = OpKind::multiply,
                       .name = op.name,
                       .inputs = {activated, mapped(op.inputs[1])},
                       .parameters = {},
                       .outputs = {mapped(op.outputs[0])},
                       .attributes = {}});
  }

  void write_attention(const Op& op) {
    const OpShape& heads = op.attributes;
    const TensorId qkv = engine_.copies_keys ? with_copied_keys(op) : mapped(op.inputs[0]);
    Tensor scores = to_.tensors[static_cast<std::size_t>(qkv)];
    PARPLAN_ASSERT(heads.kv_heads > 0 && scores.dims.back().dim == Dim::kv_groups, op.name);
    scores.name = op.name + ".scores";
    const std::int64_t queries = heads.heads / heads.kv_heads;  // of a group
    scores.dims.back() = {Dim::kv_groups, heads.heads * from_.sequence, queries * from_.sequence, queries};
    const TensorId before = add(std::move(scores));
    to_.ops.push_back({.kind = OpKind::attention_scores,
                       .name = op.name + ".scores",
                       .inputs = {qkv},
                       .parameters = {},
                       .outputs = {before},
                       .attributes = heads});
    TensorId probabilities = like(before, op.name + ".probabilities", TensorRole::activation);
    if (engine_.fused_scores && (engine_.softmax_multiple > 1 || engine_.softmax_up_to > 0))
      to_.tensors[static_cast<std::size_t>(probabilities)].softmax =
          SoftmaxKernel{.multiple = engine_.softmax_multiple,
                        .longest = engine_.softmax_up_to,
                        .narrowed = engine_.dropout ? 0 : 2};
    to_.ops.push_back({.kind = OpKind::attention_softmax,
                       .name = op.name + ".softmax",
                       .inputs = {before},
                       .parameters = {},
                       .outputs = {probabilities},
                       .attributes = {.stepwise = !engine_.fused_scores}});
    if (engine_.dropout) probabilities = dropped(OpKind::attention_dropout, op.name, probabilities, {});
    to_.ops.push_back({.kind = OpKind::attention_values,
                       .name = op.name + ".values",
                       .inputs = {probabilities, qkv},
                       .parameters = {},
                       .outputs = {mapped(op.outputs[0])},
                       .attributes = heads});
  }

  // The branch of a residual sum drops elements.
  void write_sum(const Op& op) {
    Op written = op;
    written.inputs = mapped(op.inputs);
    written.inputs[1] = dropped(OpKind::dropout, op.name, written.inputs[1], {.in_sum = engine_.fused_dropout});
    written.parameters = mapped(op.parameters);
    written.outputs = mapped(op.outputs);
    to_.ops.push_back(std::move(written));
  }

  int metrics_of(const Op& op) const { return op.kind == OpKind::cross_entropy_loss ? engine_.loss_metrics : 0; }

  void write_loss(const Op& op) {
    Op written = op;
    written.inputs = mapped(op.inputs);
    const auto [wide, is_first] = wide_.try_emplace(written.inputs[0], 0);
    if (is_first) {
      wide->second = like(written.inputs[0], "logits.wide", TensorRole::statistic);
      to_.ops.push_back({.kind = OpKind::widen,
                         .name = "logits.widen",
                         .inputs = {written.inputs[0]},
                         .parameters = {},
                         .outputs = {wide->second},
                         .attributes = {}});
    }
    written.inputs[0] = wide->second;
    written.attributes.stepwise = true;
    written.attributes.metrics = metrics_of(op);
    written.attributes.second = op.kind == OpKind::cross_entropy_sums   ? engine_.copies_logits
                                : op.kind == OpKind::cross_entropy_loss ? engine_.fills_loss_gradient
                                                                        : false;
    written.parameters = mapped(op.parameters);
    written.outputs = mapped(op.outputs);
    to_.ops.push_back(std::move(written));
  }

  // The product of an activation that an op before it casts, for all products that read it.
  void write_product(const Op& op) {
    const TensorId x = mapped(op.inputs[0]);
    const auto [bytes, is_first] = bytes_.try_emplace(x, 0);
    if (is_first) {
      const std::string name = to_.tensors[static_cast<std::size_t>(x)].name + ".fp8";
      bytes->second = like(x, name, TensorRole::quantized);
      to_.ops.push_back({.kind = OpKind::quantize,
                         .name = name,
                         .inputs = {x},
                         .parameters = {},
                         .outputs = {bytes->second},
                         .attributes = {}});
    }
    copy(op);
    to_.ops.back().inputs[0] = bytes->second;
  }

  const Engine& engine_;
  DataType precision_;
  bool quantizes_;
  std::map<TensorId, TensorId> wide_;    // copies of logits in fp32
  std::map<TensorId, TensorId> bytes_;   // of activations in fp8
};

}  // namespace

OpGraph as_run_by(const Engine& engine, OpGraph graph, DataType precision) {
  for (Tensor& tensor : graph.tensors)
    for (TensorDim& dim : tensor.dims)
      if (dim.dim == Dim::vocabulary) dim.multiple = engine.vocabulary_multiple;
  Engine facts = engine;
  facts.dropout =
      engine.dropout && std::ranges::none_of(graph.ops, [](const Op& op) { return op.kind == OpKind::rms_norm; });
  const bool as_it_is = facts.fused_attention && facts.fused_loss && facts.fused_gelu && facts.fused_gate &&
                        facts.fused_rotary && facts.fused_rms_norm && facts.fused_sums && facts.fused_norm_gradient &&
                        facts.fused_bias_gradient && !facts.copies_keys && !facts.repeats_keys &&
                        !facts.separate_keys && !facts.dropout && facts.loss_metrics == 0;
  if (!as_it_is) graph = Rewriting(facts, precision, false, std::move(graph)).rewrite();
  return precision == DataType::fp8 && engine.fp8_casts_once ? quantized(std::move(graph)) : graph;
}

OpGraph as_run_by(const TrainingSpec& training, OpGraph graph) {
  Engine engine = training.engine;
  if (is_own(engine)) engine.vocabulary_multiple = own_vocabulary_multiple(training.precision);
  return as_run_by(engine, std::move(graph), stated_precision(training));
}

BlockModules modules_of(const OpGraph& graph, const Block& block) {
  BlockModules all;
  bool is_layer = false;
  for (int i = block.first_op; i < block.last_op; ++i) {
    const Op& op = graph.ops[static_cast<std::size_t>(i)];
    // Three products where keys and values are apart from queries.
    const std::int64_t alike = op.kind == OpKind::linear && op.attributes.key_columns > 0 ? 3 : 1;
    all.trained += alike * std::ranges::count_if(op.parameters, [&](TensorId id) {
      return !graph.tensors[static_cast<std::size_t>(id)].frozen;
    });
    switch (op.kind) {
      case OpKind::attention:
      case OpKind::packed_attention:
      case OpKind::attention_scores:
        is_layer = true;
        [[fallthrough]];
      case OpKind::embedding:
      case OpKind::add_position:
      case OpKind::layer_norm:
      case OpKind::rms_norm:
      case OpKind::linear:
      case OpKind::rotary:
      case OpKind::activation:
      case OpKind::gate:
      case OpKind::dropout:
        all.modules += alike;
        break;
      case OpKind::head_norm:  // of queries, of keys
      case OpKind::query_key_norm:
        all.modules += 2;
        break;
      default:
        break;
    }
  }
  if (is_layer) all.modules += 2;
  return all;
}

OpGraph quantized(OpGraph graph) {
  const Engine own;
  return Rewriting(own, DataType::fp8, true, std::move(graph)).rewrite();
}

}  // namespace parplan
