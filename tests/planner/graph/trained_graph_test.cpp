#include "planner/graph/trained_graph.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/base/error.h"
#include "planner/graph/backward.h"
#include "planner/graph/engine_graph.h"
#include "tests/planner/base/error_of.h"

namespace parplan {
namespace {

OpGraph graph_of(const std::string& model) {
  const std::string folder = std::string(PARPLAN_SOURCE_DIR) + "/tests/data/models/";
  return build_graph(load_model(folder + model + ".yaml", "").spec, 16);
}

TrainingSpec with(std::vector<std::string> patterns, std::optional<Lora> lora = {}) {
  TrainingSpec training;
  training.trainable = {.all = false, .patterns = std::move(patterns)};
  training.lora = std::move(lora);
  return training;
}

std::vector<std::string> trained(const OpGraph& graph) {
  std::vector<std::string> names;
  for (const TensorId id : parameters(graph))
    if (!graph.tensors[id].frozen) names.push_back(graph.tensors[id].name);
  return names;
}

std::vector<std::string> backward_of(const OpGraph& graph, int block) {
  std::vector<std::string> ops;
  for (const TrainingOp& op : training_block(graph, block).backward) {
    std::string text = std::string(name(op.kind)) + " " + graph.ops[op.forward_op].name;
    for (const TrainingOperand& operand : op.operands)
      if (operand.source == OperandSource::parameter_gradient) text += " +" + graph.tensors[*operand.tensor].name;
    ops.push_back(std::move(text));
  }
  return ops;
}

const Tensor& tensor(const OpGraph& graph, const std::string& name) {
  return *std::ranges::find(graph.tensors, name, &Tensor::name);
}

}  // namespace

TEST_CASE("where everything is trained, the graph stays as it is") {
  const OpGraph plain = graph_of("tiny-llama"), same = as_trained({}, plain);
  CHECK(same.ops == plain.ops);
  CHECK(same.tensors == plain.tensors);
  CHECK(same.first_trained == 0);
  CHECK(trained_parameter_count(plain) == parameter_count(plain));
}

TEST_CASE("a graph with adapters, or as an engine runs it, learns the tokens that it did without") {
  const OpGraph plain = graph_of("tiny-bert");
  REQUIRE(plain.masked);
  CHECK(as_trained(with({}, Lora{.r = 4, .alpha = 6.0, .target_modules = {"qkv"}}), plain).masked == plain.masked);
  Engine engine;
  engine.fused_attention = engine.fused_loss = false;
  CHECK(as_run_by(engine, plain).masked == plain.masked);
}

TEST_CASE("a pattern names a run of the parts of a parameter's name") {
  const OpGraph plain = graph_of("tiny-llama");
  const auto names = [&](const char* pattern) { return trained(as_trained(with({pattern}), plain)); };
  CHECK(names("head") == std::vector<std::string>{"head.norm.weight", "head.weight"});
  CHECK(names("head.weight") == std::vector<std::string>{"head.weight"});
  CHECK(names("layers.3.attention") ==
        std::vector<std::string>{"layers.3.attention.qkv.weight", "layers.3.attention.output.weight"});
  CHECK(names("3.*.up") == std::vector<std::string>{"layers.3.feed_forward.up.weight"});
  CHECK(names("head.*norm") == std::vector<std::string>{"head.norm.weight"});
  CHECK(names("*").size() == parameters(plain).size());
}

TEST_CASE("names that no parameter and no product has are refused, with what was meant") {
  const OpGraph plain = graph_of("tiny-llama");
  const auto error = [&](const TrainingSpec& training) {
    const std::string message = error_of<ConfigError>([&] { as_trained(training, plain); });
    REQUIRE(message.starts_with("error: "));
    return message.substr(7);
  };
  CHECK(error(with({"head", "hed"})) == "no parameter has 'hed' in its name; did you mean 'head'?");
  CHECK(error(with({"layers.4"})) == "no parameter has 'layers.4' in its name; did you mean 'layers.0'?");
  CHECK(error(with({"head.norm.weights"})) ==
        "no parameter has 'head.norm.weights' in its name; did you mean 'head.norm.weight'?");
  CHECK(error(with({})) == "nothing is trained; name parameters, or add adapters (lora)");
  CHECK(error(with({}, Lora{.target_modules = {"atention.qkv"}})) ==
        "no product of the layers is called 'atention.qkv'; they have: attention.qkv, attention.output, "
        "feed_forward.gate, feed_forward.up, feed_forward.down; did you mean 'attention.qkv'?");
  const std::optional<TrainedProblem> problem = find_problem(with({}, Lora{.target_modules = {"up", "head"}}), plain);
  REQUIRE(problem);
  CHECK(problem->of == TrainedProblem::Of::target_modules);
  CHECK(problem->which == 1);
}

TEST_CASE("an adapter is a product in, a scale, a product out and a sum, beside the product that it is for") {
  const OpGraph graph =
      as_trained(with({}, Lora{.r = 4, .alpha = 6.0, .target_modules = {"qkv"}}), graph_of("tiny-llama"));
  std::vector<std::string> ops;
  for (int i = graph.blocks[2].first_op; i < graph.blocks[2].first_op + 7; ++i)
    ops.push_back(std::string(name(graph.ops[i].kind)) + " " + graph.ops[i].name);
  CHECK(ops == std::vector<std::string>{"rms_norm layers.1.attention_norm", "linear layers.1.attention.qkv",
                                        "linear layers.1.attention.qkv.lora_A",
                                        "scale layers.1.attention.qkv.lora_scale",
                                        "linear layers.1.attention.qkv.lora_B", "add layers.1.attention.qkv.lora_add",
                                        "rotary layers.1.attention.rotary"});
  CHECK(graph.ops[graph.blocks[2].first_op + 3].attributes.factor == 1.5);
  // A as wide as the input, B as high as the output, with its groups of heads.
  const Tensor& a = tensor(graph, "layers.1.attention.qkv.lora_A.weight");
  const Tensor& b = tensor(graph, "layers.1.attention.qkv.lora_B.weight");
  CHECK(a.dims == std::vector<TensorDim>{{Dim::adapter, 4}, {Dim::hidden, 32}});
  CHECK(b.dims == std::vector<TensorDim>{tensor(graph, "layers.1.attention.qkv.weight").dims[0], {Dim::adapter, 4}});
  CHECK(b.initializer == Initializer::zeros);
  CHECK(a.standard_deviation == doctest::Approx(1 / std::sqrt(96.0)));
  CHECK(trained(graph).size() == 8);
  CHECK(trained_parameter_count(graph) == 4 * (4 * 32 + 64 * 4));  // (4 + 2 x 2) heads of 8
  // Without a factor there is no scale.
  const OpGraph plain =
      as_trained(with({}, Lora{.r = 4, .alpha = 4.0, .target_modules = {"qkv"}}), graph_of("tiny-llama"));
  CHECK(std::ranges::none_of(plain.ops, [](const Op& op) { return op.kind == OpKind::scale; }));
}

TEST_CASE("the backward of a frozen layer has no gradients of weights, and ends where nothing below is trained") {
  const OpGraph graph =
      as_trained(with({}, Lora{.r = 4, .alpha = 4.0, .target_modules = {"down"}}), graph_of("tiny-llama"));
  CHECK(graph.first_trained == 1);
  CHECK(backward_of(graph, 0).empty());
  // Layer 0: the gradient goes down to the adapter of its last product, and no further.
  CHECK(backward_of(graph, 1) ==
        std::vector<std::string>{
            "linear_input_gradient layers.0.feed_forward.down.lora_B",
            "linear_weight_gradient layers.0.feed_forward.down.lora_B +layers.0.feed_forward.down.lora_B.weight",
            "linear_weight_gradient layers.0.feed_forward.down.lora_A +layers.0.feed_forward.down.lora_A.weight"});
  CHECK_FALSE(training_block(graph, 1).passes_gradient_on);
  // Layer 1 passes it on, without a gradient of any weight but its adapter's.
  int of_weights = 0;
  for (const std::string& op : backward_of(graph, 2)) {
    const bool of_parameter = op.find('+') != std::string::npos;
    of_weights += of_parameter;
    if (of_parameter) CHECK(op.find(".lora_") != std::string::npos);
  }
  CHECK(of_weights == 2);
  CHECK(training_block(graph, 2).passes_gradient_on);
  CHECK(backward_of(graph, 5).back() == "rms_norm_gradient head.norm");
  // Three kinds of layers of four that are alike otherwise: without a backward, the last to have
  // one, and those behind it.
  const OpGraph deep = as_trained(with({"layers.1"}), graph_of("tiny-llama"));
  CHECK(deep.first_trained == 2);
  std::vector<int> kinds;
  for (const Block& block : deep.blocks) kinds.push_back(block.kind);
  CHECK(kinds == std::vector<int>{0, 1, 2, 3, 3, 4});
}

TEST_CASE("of a product with a bias, either may be frozen, and so may a norm's weight or bias") {
  const OpGraph biases = as_trained(with({"layers.1.*.*.bias", "layers.1.*.bias"}), graph_of("tiny-gpt2"));
  const std::vector<std::string> ops = backward_of(biases, 2);
  const auto has = [&](const std::string& op) { return std::ranges::find(ops, op) != ops.end(); };
  CHECK(has("bias_gradient layers.1.attention.qkv +layers.1.attention.qkv.bias"));
  CHECK(has("layer_norm_gradient layers.1.attention_norm +layers.1.attention_norm.bias"));
  CHECK(has("bias_gradient layers.1.attention_add +layers.1.attention.output.bias"));
  const OpGraph weights = as_trained(with({"weight"}), graph_of("tiny-gpt2"));
  const std::vector<std::string> of_weights = backward_of(weights, 2);
  CHECK(std::ranges::find(of_weights, "linear_weight_gradient layers.1.attention.qkv +layers.1.attention.qkv.weight") !=
        of_weights.end());
  CHECK(std::ranges::none_of(of_weights, [](const std::string& op) { return op.starts_with("bias_gradient"); }));
}

TEST_CASE("model FLOPs leave out what frozen parameters make unnecessary") {
  const OpGraph plain = graph_of("tiny-llama");
  // For 16 tokens: the products of a layer (8 heads of 8, 48 features), its attention, the head.
  const auto product = [](int in, int out) { return 2.0 * 16 * in * out; };
  const double layer = product(32, 64) + product(32, 32) + 3 * product(32, 48), attention = 4.0 * 16 * 16 * 32;
  const double head = product(32, 64), forward = 4 * (layer + attention) + head;
  CHECK(model_flops_per_sample(plain).value == 3 * forward);
  // The gradient of the head's weight alone, and then that of its input as well, for the norm.
  CHECK(model_flops_per_sample(as_trained(with({"head.weight"}), plain)).value == forward + head);
  CHECK(model_flops_per_sample(as_trained(with({"head"}), plain)).value == forward + 2 * head);
  // Adapters beside the last product of each layer: the head and three layers pass the gradient on.
  const OpGraph adapted = as_trained(with({}, Lora{.r = 4, .alpha = 4.0, .target_modules = {"down"}}), plain);
  const double a = product(48, 4), b = product(4, 32);
  CHECK(model_flops_per_sample(adapted).value ==
        forward + head + 3 * (layer + 2 * attention) + 4 * (2 * a + 3 * b) + 3 * a);
}

}  // namespace parplan
