#include "planner/graph/op_graph.h"

#include <functional>

#include <doctest/doctest.h>

#include "planner/base/error.h"
#include "tests/planner/base/error_of.h"
#include "tests/planner/graph/small_graphs.h"

namespace parplan {
namespace {

std::string error_of_changed(const std::function<void(OpGraph&)>& change) {
  OpGraph graph = small_gpt2(2);
  change(graph);
  return error_of<InternalError>([&] { finish(graph); });
}

Op& op_named(OpGraph& graph, const std::string& name) {
  for (Op& op : graph.ops)
    if (op.name == name) return op;
  throw InternalError("no op " + name);
}

TEST_CASE("parameters stand in order of first use, each once") {
  const OpGraph graph = small_gpt2(1);
  CHECK(names_of(graph, parameters(graph)) ==
        std::vector<std::string>{
            "embedding.weight", "embedding.position.weight", "layers.0.norm1.weight", "layers.0.norm1.bias",
            "layers.0.qkv.weight", "layers.0.qkv.bias", "layers.0.projection.weight", "layers.0.residual1.bias",
            "layers.0.norm2.weight", "layers.0.norm2.bias", "layers.0.up.weight", "layers.0.up.bias",
            "layers.0.down.weight", "layers.0.residual2.bias", "head.norm.weight", "head.norm.bias"});
}

TEST_CASE("a tied table counts once and is the only tied parameter") {
  const OpGraph tied = small_gpt2(3);
  const std::int64_t layer = 4 * 8 + (24 * 8 + 24) + (8 * 8 + 8) + (32 * 8 + 32) + (8 * 32 + 8);
  CHECK(parameter_count(tied) == 11 * 8 + 4 * 8 + 3 * layer + 16);
  CHECK(names_of(tied, tied.tied) == std::vector<std::string>{"embedding.weight"});
  const OpGraph untied = small_llama(2);
  CHECK(parameter_count(untied) == 2 * 11 * 8 + 2 * (2 * 8 + 16 * 8 + 8 * 8 + 3 * 24 * 8) + 8);
  CHECK(untied.tied.empty());
}

TEST_CASE("model FLOPs are six per matrix weight and token, and twelve per layer, hidden and pair of tokens") {
  const double weights = 2 * (24 * 8 + 8 * 8 + 2 * 32 * 8) + 11 * 8;
  CHECK(model_flops_per_sample(small_gpt2(2)) == Flops(6 * weights * 4 + 12.0 * 2 * 8 * 4 * 4));
}

TEST_CASE("model FLOPs count the pairs of a layer's window on both sides, and of layers without one all pairs") {
  const auto attention = [](OpGraph& graph, std::int64_t layer) -> Op& {
    return op_named(graph, "layers." + std::to_string(layer) + ".attention");
  };
  for (const std::int64_t sequence : {1, 4, 9})
    for (const std::int64_t window : {0, 1, 2, 4, 8, 9, 100}) {
      std::int64_t pairs = 0;
      for (std::int64_t query = 0; query < sequence; ++query)
        for (std::int64_t key = 0; key < sequence; ++key)
          pairs += window == 0 || (query - key < window && key - query < window) ? 1 : 0;
      INFO("sequence " << sequence << ", window " << window);
      OpGraph graph = small_gpt2(2);
      graph.sequence = sequence;
      for (Tensor& tensor : graph.tensors)
        for (TensorDim& dim : tensor.dims)
          if (dim.dim == Dim::sequence) dim.size = sequence;
      const Flops full = model_flops_per_sample(graph);
      attention(graph, 1).attributes.window = window;
      CHECK(model_products(graph, attention(graph, 0)).pairs == static_cast<double>(sequence * sequence));
      CHECK(model_products(graph, attention(graph, 1)).pairs == static_cast<double>(pairs));
      // 2 products of 2 FLOPs, forward and twice that backward, for 2 heads of 4.
      CHECK(full - model_flops_per_sample(graph) == Flops(12.0 * 8 * static_cast<double>(sequence * sequence - pairs)));
    }
}

TEST_CASE("layers are of one kind, embedding and head of their own") {
  const auto kinds = [](const OpGraph& graph) {
    std::vector<int> result;
    for (const Block& block : graph.blocks) result.push_back(block.kind);
    return result;
  };
  CHECK(kinds(small_gpt2(3)) == std::vector<int>{0, 1, 1, 1, 2});
  CHECK(kinds(small_llama(2)) == std::vector<int>{0, 1, 1, 2});

  // Any difference in a layer's work makes it another kind.
  OpGraph epsilon = small_gpt2(3);
  op_named(epsilon, "layers.1.norm1").attributes.epsilon = 1e-6;
  finish(epsilon);
  CHECK(kinds(epsilon) == std::vector<int>{0, 1, 2, 1, 3});
  OpGraph initialised = small_gpt2(3);
  initialised.tensors[tensor_named(initialised, "layers.2.down.weight")].standard_deviation =
      0.1;
  finish(initialised);
  CHECK(kinds(initialised) == std::vector<int>{0, 1, 1, 2, 3});
  OpGraph renamed = small_gpt2(2);
  renamed.tensors[tensor_named(renamed, "layers.1.down.weight")].name = "layers.1.out.weight";
  finish(renamed);
  CHECK(kinds(renamed) == std::vector<int>{0, 1, 2, 3});
}

TEST_CASE("an op must have the operands of its row") {
  CHECK(error_of_changed([](OpGraph& graph) { graph.ops.clear(); }) == "graph 'small': no ops");
  CHECK(error_of_changed([](OpGraph& graph) { op_named(graph, "layers.1.qkv").parameters.clear(); }) ==
        "graph 'small': op 'layers.1.qkv' (linear): 0 parameters, its row has 1 to 2");
  CHECK(error_of_changed([](OpGraph& graph) { op_named(graph, "layers.0.norm1").outputs.pop_back(); }) ==
        "graph 'small': op 'layers.0.norm1' (layer_norm): 2 outputs, its row has 3");
  CHECK(error_of_changed([](OpGraph& graph) { op_named(graph, "layers.0.gelu").inputs[0] = 4000; }) ==
        "graph 'small': op 'layers.0.gelu' (activation): input 4000 of 69 tensors");
  CHECK(error_of_changed([](OpGraph& graph) {
          op_named(graph, "layers.0.gelu").inputs[0] = tensor_named(graph, "layers.0.up.weight");
        }) == "graph 'small': op 'layers.0.gelu' (activation): 'layers.0.up.weight' cannot be its input");
  CHECK(error_of_changed([](OpGraph& graph) { op_named(graph, "layers.0.gelu").kind = OpKind::activation_gradient; }) ==
        "graph 'small': op 'layers.0.gelu' (activation_gradient): not an op of a forward graph");
}

TEST_CASE("the sizes of an op's operands must fit each other") {
  const auto resized = [](const char* tensor, std::size_t dim, std::int64_t size) {
    return error_of_changed([=](OpGraph& graph) {
      graph.tensors[tensor_named(graph, tensor)].dims[dim].size = size;
    });
  };
  CHECK(resized("layers.0.qkv.weight", 1, 9) ==
        "graph 'small': op 'layers.0.qkv' (linear): the width of 'layers.0.qkv.weight' is 9, not 8");
  CHECK(resized("layers.0.up.weight", 0, 30) ==
        "graph 'small': op 'layers.0.up' (linear): the width of 'layers.0.up' is 32, not 30");
  CHECK(resized("layers.0.up.bias", 0, 30) ==
        "graph 'small': op 'layers.0.up' (linear): the width of 'layers.0.up.bias' is 30, not 32");
  CHECK(resized("layers.1.norm2.bias", 0, 4) ==
        "graph 'small': op 'layers.1.norm2' (layer_norm): the width of 'layers.1.norm2.bias' is 4, not 8");
  CHECK(resized("embedding.weight", 1, 16) ==
        "graph 'small': op 'embedding' (embedding): the width of 'embedding.weight' is 16, not 8");
  CHECK(error_of_changed([](OpGraph& graph) { op_named(graph, "layers.0.attention").attributes.kv_heads = 1; }) ==
        "graph 'small': op 'layers.0.attention' (attention): the width of 'layers.0.qkv' is 24, not 16");
  CHECK(error_of_changed([](OpGraph& graph) { graph.vocabulary = 12; }) ==
        "graph 'small': op 'head.maximum' (cross_entropy_max): the width of 'head.logits' is 11, not 12");
}

TEST_CASE("ops must stand in topological order and end in the loss") {
  CHECK(error_of_changed(
            [](OpGraph& graph) { std::swap(op_named(graph, "layers.0.up"), op_named(graph, "layers.0.gelu")); }) ==
        "graph 'small': op 'layers.0.gelu' (activation): stands before 'layers.0.up', which writes 'layers.0.up'");
  CHECK(error_of_changed([](OpGraph& graph) {
          op_named(graph, "layers.0.residual1").inputs[0] = tensor_named(graph, "layers.1.residual1");
        }) == "graph 'small': its ops depend on each other in a circle");
  CHECK(error_of_changed([](OpGraph& graph) {
          op_named(graph, "layers.0.norm2").outputs[0] = tensor_named(graph, "layers.0.norm1");
        }) ==
        "graph 'small': op 'layers.0.norm2' (layer_norm): 'layers.0.norm1' is written by 'layers.0.norm1' already");
  CHECK(error_of_changed([](OpGraph& graph) {
          graph.tensors.push_back(graph.tensors[tensor_named(graph, "embedding")]);
          graph.tensors.back().name = "orphan";
          op_named(graph, "layers.0.residual1").inputs[0] = static_cast<TensorId>(graph.tensors.size()) - 1;
        }) == "graph 'small': op 'layers.0.residual1' (add): nothing writes 'orphan'");
  CHECK(error_of_changed([](OpGraph& graph) {
          op_named(graph, "embedding").outputs[0] = tensor_named(graph, "tokens");
          graph.tensors[tensor_named(graph, "tokens")].dims.push_back({Dim::hidden, 8});
        }) == "graph 'small': op 'embedding' (embedding): 'tokens' comes from the data loader");
  CHECK(error_of_changed([](OpGraph& graph) {
          graph.ops.pop_back();
          --graph.blocks.back().last_op;
        }) == "graph 'small': op 'head.sums' (cross_entropy_sums): the last op does not write the loss");
}

TEST_CASE("blocks must tile the ops with one activation between them") {
  CHECK(error_of_changed([](OpGraph& graph) { graph.blocks.clear(); }) == "graph 'small': no blocks");
  CHECK(error_of_changed([](OpGraph& graph) { graph.blocks[1].first_op = 3; }) ==
        "graph 'small': block 'layers.0' holds ops 3 to 12, expected to begin at 2 of 27");
  CHECK(error_of_changed([](OpGraph& graph) { graph.blocks.pop_back(); }) ==
        "graph 'small': ops from 22 of 27 stand in no block");
  CHECK(error_of_changed([](OpGraph& graph) { --graph.blocks[1].last_op, --graph.blocks[2].first_op; }) ==
        "graph 'small': between blocks 'layers.0' and 'layers.1' cross 'layers.0.residual1', 'layers.0.down'; expected "
        "one activation");
  CHECK(error_of_changed([](OpGraph& graph) { graph.blocks[2].input.reset(); }) ==
        "graph 'small': block 'layers.1' declares input none and output 'layers.1.residual2', but 'layers.0.residual2' "
        "and 'layers.1.residual2' cross");
  // The second layer bypasses the first one.
  CHECK(error_of_changed([](OpGraph& graph) {
          op_named(graph, "layers.1.residual1").inputs[0] = tensor_named(graph, "embedding.position");
        }) ==
        "graph 'small': between blocks 'layers.0' and 'layers.1' cross 'layers.0.residual2', 'embedding.position'; "
        "expected one activation");
}

}  // namespace
}  // namespace parplan
