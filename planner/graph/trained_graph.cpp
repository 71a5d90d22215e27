#include "planner/graph/trained_graph.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/base/text.h"
#include "planner/graph/graph_rewriting.h"

namespace parplan {
namespace {

constexpr std::string_view adapter_in = ".lora_A.weight", adapter_out = ".lora_B.weight";  // PEFT's names

std::vector<std::string_view> parts_of(std::string_view name) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t dot = name.find('.');
    parts.push_back(name.substr(0, dot));
    if (dot == std::string_view::npos) return parts;
    name.remove_prefix(dot + 1);
  }
}

// Whether a part of a name is what the part of a pattern says.
bool matches(std::string_view pattern, std::string_view part) {
  if (pattern.empty()) return part.empty();
  if (pattern.front() == '*')
    return matches(pattern.substr(1), part) || (!part.empty() && matches(pattern, part.substr(1)));
  return !part.empty() && pattern.front() == part.front() && matches(pattern.substr(1), part.substr(1));
}

bool names(std::string_view pattern, std::string_view name) {
  const std::vector<std::string_view> wanted = parts_of(pattern), parts = parts_of(name);
  for (std::size_t first = 0; first + wanted.size() <= parts.size(); ++first)
    if (std::equal(wanted.begin(), wanted.end(), parts.begin() + static_cast<std::ptrdiff_t>(first), matches))
      return true;
  return false;
}

bool is_trained(const Trainable& trainable, const Tensor& parameter) {
  return trainable.all || is_of_adapter(parameter) ||
         std::ranges::any_of(trainable.patterns,
                             [&](const std::string& pattern) { return names(pattern, parameter.name); });
}

// "attention.qkv" of "layers.3.attention.qkv"; nothing outside of layers.
std::optional<std::string> name_in_layer(const OpGraph& graph, const Block& block, const Op& op) {
  if (!block.input || !block.output || row_of(op.kind).sharding != ShardingRule::contraction) return std::nullopt;
  const std::string prefix = block.name + ".";
  PARPLAN_ASSERT(op.name.starts_with(prefix), fmt::format("{}: op {} of block {}", graph.name, op.name, block.name));
  return op.name.substr(prefix.size());
}

bool is_target(const Lora& lora, const std::string& name) {
  return lora.target_modules.empty() || std::ranges::any_of(lora.target_modules, [&](const std::string& target) {
           return name == target || name.ends_with("." + target);
         });
}

// The names that targets may have.
std::vector<std::string> products_of_layers(const OpGraph& graph) {
  std::vector<std::string> products;
  for (const int first : graph.kinds)
    for (int i = graph.blocks[first].first_op; i < graph.blocks[first].last_op; ++i)
      if (const auto name = name_in_layer(graph, graph.blocks[first], graph.ops[i]))
        if (std::ranges::find(products, *name) == products.end()) products.push_back(*name);
  return products;
}

// Names that one may have meant: those of blocks, of modules in them, and of parameters.
std::vector<std::string> nameable(const OpGraph& graph) {
  std::set<std::string> all;
  for (const TensorId id : parameters(graph)) {
    const std::string& name = graph.tensors[id].name;
    all.insert(name);
    const std::vector<std::string_view> parts = parts_of(name);
    for (const std::string_view part : parts) all.insert(std::string(part));
    for (std::size_t end = name.find('.'); end != std::string::npos; end = name.find('.', end + 1))
      all.insert(name.substr(0, end));
  }
  return {all.begin(), all.end()};
}

// A graph with adapters.
class Adaption : GraphRewriting {
 public:
  Adaption(const Lora& lora, OpGraph graph) : GraphRewriting(std::move(graph)), lora_(lora) {}

  OpGraph rewrite() {
    return rewritten([&](const Block& block, const Op& op) {
      const std::optional<std::string> name = name_in_layer(from_, block, op);
      name&& is_target(lora_, *name) ? adapt(block, op) : copy(op);
    });
  }

 private:
  // An activation of the tokens of another.
  TensorId activation(TensorId like, std::string name, const TensorDim& width) {
    Tensor copy = tensor(like);
    copy.role = TensorRole::activation;
    copy.name = std::move(name);
    copy.dims.back() = width;
    return add(std::move(copy));
  }
  TensorId weight(std::string name, const TensorDim& out, const TensorDim& in) {
    return add({.name = std::move(name), .role = TensorRole::parameter, .dims = {out, in}, .decays = true});
  }
  void op(OpKind kind, std::string name, std::vector<TensorId> inputs, std::vector<TensorId> parameters,
          TensorId output, OpShape attributes = {}) {
    to_.ops.push_back({.kind = kind,
                       .name = std::move(name),
                       .inputs = std::move(inputs),
                       .parameters = std::move(parameters),
                       .outputs = {output},
                       .attributes = attributes});
  }

  // y = x W^T (+ bias) becomes y = (x W^T (+ bias)) + (alpha / r x A^T) B^T. Numbers are multiplied
  // by alpha / r where they are fewest. Adapters read x as it was before an engine quantized it.
  void adapt(const Block& block, const Op& base) {
    const TensorId x = mapped(unquantized(from_, block, base.inputs[0]));
    const std::vector<TensorId> parameters = mapped(base.parameters);
    const TensorDim out = tensor(parameters[0]).dims[0], in = tensor(parameters[0]).dims[1];
    const TensorDim inner{Dim::adapter, lora_.r, 1};
    const TensorId product = activation(x, base.name + ".base", out);
    op(base.kind, base.name, mapped(base.inputs), parameters, product, base.attributes);

    const std::optional<AdapterNames> adapter = adapter_of(tensor(parameters[0]).name);
    PARPLAN_ASSERT(adapter.has_value(), base.name);
    const TensorId a = weight(adapter->in, inner, in);
    // PEFT draws A from a uniform distribution in +-1 / sqrt(in); this one has its deviation.
    tensor(a).standard_deviation = 1.0 / std::sqrt(3.0 * static_cast<double>(in.size));
    TensorId narrow = activation(x, base.name + ".lora_A", inner);
    op(base.kind, base.name + ".lora_A", {x}, {a}, narrow);
    if (const double factor = lora_.alpha / static_cast<double>(lora_.r); factor != 1.0) {
      const TensorId scaled = activation(x, base.name + ".lora_scale", inner);
      op(OpKind::scale, base.name + ".lora_scale", {narrow}, {}, scaled, {.factor = factor});
      narrow = scaled;
    }
    const TensorId b = weight(adapter->out, out, inner);
    tensor(b).initializer = Initializer::zeros;
    const TensorId wide = activation(x, base.name + ".lora_B", out);
    op(base.kind, base.name + ".lora_B", {narrow}, {b}, wide);
    op(OpKind::add, base.name + ".lora_add", {product, wide}, {}, mapped(base.outputs[0]));
  }

  const Lora& lora_;
};

}  // namespace

bool is_of_adapter(const Tensor& parameter) {
  return parameter.name.ends_with(adapter_in) || parameter.name.ends_with(adapter_out);
}

std::optional<AdapterNames> adapter_of(const std::string& weight) {
  constexpr std::string_view ending = ".weight";
  if (!weight.ends_with(ending)) return std::nullopt;
  const std::string product = weight.substr(0, weight.size() - ending.size());
  return AdapterNames{.in = fmt::format("{}{}", product, adapter_in), .out = fmt::format("{}{}", product, adapter_out)};
}

std::optional<TrainedProblem> find_problem(const TrainingSpec& training, const OpGraph& graph) {
  using enum TrainedProblem::Of;
  if (training.lora) {
    const std::vector<std::string> products = products_of_layers(graph);
    const std::vector<std::string>& targets = training.lora->target_modules;
    for (std::size_t i = 0; i < targets.size(); ++i) {
      const Lora one{.target_modules = {targets[i]}};
      if (std::ranges::any_of(products, [&](const std::string& name) { return is_target(one, name); })) continue;
      std::string message = fmt::format("no product of the layers is called '{}'; they have: {}{}", targets[i],
                                        join(products), did_you_mean(targets[i], products));
      constexpr std::string_view parts_of_qkv[] = {"q_proj", "k_proj", "v_proj", "query", "key", "value"};
      if (std::ranges::find(parts_of_qkv, targets[i]) != std::end(parts_of_qkv))
        message += "; queries, keys and values are one product here, attention.qkv";
      return TrainedProblem{target_modules, i, std::move(message)};
    }
  }
  const std::vector<std::string>& patterns = training.trainable.patterns;
  const std::vector<TensorId> all = parameters(graph);
  for (std::size_t i = 0; i < patterns.size(); ++i) {
    if (std::ranges::any_of(all, [&](TensorId id) { return names(patterns[i], graph.tensors[id].name); })) continue;
    const std::vector<std::string> known = nameable(graph);
    return TrainedProblem{
        trainable, i,
        fmt::format("no parameter has '{}' in its name{}", patterns[i], did_you_mean(patterns[i], known))};
  }
  if (!training.lora && !training.trainable.all && patterns.empty())
    return TrainedProblem{trainable, std::nullopt, "nothing is trained; name parameters, or add adapters (lora)"};
  return std::nullopt;
}

OpGraph as_trained(const TrainingSpec& training, OpGraph graph) {
  if (!training.lora && training.trainable.all) return graph;
  if (const std::optional<TrainedProblem> problem = find_problem(training, graph)) throw ConfigError(problem->message);
  if (training.lora) graph = Adaption(*training.lora, std::move(graph)).rewrite();
  for (Tensor& tensor : graph.tensors)
    if (tensor.role == TensorRole::parameter) tensor.frozen = !is_trained(training.trainable, tensor);
  finish(graph);
  return graph;
}

}  // namespace parplan
