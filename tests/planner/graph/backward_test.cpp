#include "planner/graph/backward.h"

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "models/families.h"
#include "tests/planner/graph/double_precision.h"
#include "tests/planner/graph/small_graphs.h"

namespace parplan {
namespace {

// One line per op: "kind operand, operand": gradients as d(tensor), written operands with =,
// updated ones with +=, without the block's prefix.
std::vector<std::string> lines(const OpGraph& graph, const std::vector<TrainingOp>& ops, const std::string& prefix) {
  std::vector<std::string> result;
  for (const TrainingOp& op : ops) {
    std::string line =
        std::string(name(op.kind)) + (op.accumulate && op.kind != OpKind::accumulate ? " (accumulates)" : "");
    for (const TrainingOperand& operand : op.operands) {
      line += &operand == op.operands.data() ? " " : ", ";
      if (operand.access == Access::write) line += "=";
      if (operand.access == Access::update) line += "+=";
      if (!operand.tensor) {
        line += operand.source == OperandSource::workspace ? "workspace" : "loss scale";
        continue;
      }
      std::string tensor = graph.tensors[*operand.tensor].name;
      if (tensor.starts_with(prefix)) tensor.erase(0, prefix.size());
      const bool value = operand.source == OperandSource::input || operand.source == OperandSource::output ||
                         operand.source == OperandSource::parameter;
      if (operand.source == OperandSource::contribution) line += "part of ";
      line += value ? tensor : "d(" + tensor + ")";
    }
    result.push_back(line);
  }
  return result;
}

// Tensors that share another one's gradient storage, "tensor -> other".
std::vector<std::string> aliases(const OpGraph& graph, const TrainingBlock& block) {
  std::vector<std::string> result;
  for (std::size_t t = 0; t < block.alias.size(); ++t)
    if (block.alias[t] != static_cast<TensorId>(t))
      result.push_back(graph.tensors[t].name + " -> " + graph.tensors[block.alias[t]].name);
  return result;
}

TEST_CASE("the forward of a GPT-2 layer, operand by operand") {
  const OpGraph graph = small_gpt2(2);
  CHECK(lines(graph, training_block(graph, 1).forward, "layers.0.") ==
        std::vector<std::string>{
            "layer_norm embedding.position, norm1.weight, norm1.bias, =norm1, =norm1.mean, =norm1.rstd",
            "linear norm1, qkv.weight, qkv.bias, =qkv, +=workspace",
            "attention qkv, =attention, =lse, +=workspace",
            "linear attention, projection.weight, =projection, +=workspace",
            "add embedding.position, projection, residual1.bias, =residual1",
            "layer_norm residual1, norm2.weight, norm2.bias, =norm2, =norm2.mean, =norm2.rstd",
            "linear norm2, up.weight, up.bias, =up, +=workspace",
            "activation up, =gelu",
            "linear gelu, down.weight, =down, +=workspace",
            "add residual1, down, residual2.bias, =residual2",
        });
}

TEST_CASE("the backward of a GPT-2 layer: the residual's gradient is passed on and added to by the norms") {
  const OpGraph graph = small_gpt2(2);
  const TrainingBlock block = training_block(graph, 2);
  CHECK(lines(graph, block.backward, "layers.1.") ==
        std::vector<std::string>{
            "bias_gradient d(residual2), +=d(residual2.bias), +=workspace",
            "linear_input_gradient d(down), down.weight, =d(gelu), +=workspace",
            "linear_weight_gradient d(down), gelu, +=d(down.weight), +=workspace",
            "activation_gradient d(gelu), up, =d(up)",
            "linear_input_gradient d(up), up.weight, =d(norm2), +=workspace",
            "linear_weight_gradient d(up), norm2, +=d(up.weight), +=d(up.bias), +=workspace",
            "layer_norm_gradient (accumulates) d(norm2), residual1, norm2.weight, norm2.mean, norm2.rstd, "
            "+=d(residual1), +=d(norm2.weight), +=d(norm2.bias), +=workspace",
            "bias_gradient d(residual1), +=d(residual1.bias), +=workspace",
            "linear_input_gradient d(projection), projection.weight, =d(attention), +=workspace",
            "linear_weight_gradient d(projection), attention, +=d(projection.weight), +=workspace",
            "attention_gradient d(attention), qkv, attention, lse, =d(qkv), +=workspace",
            "linear_input_gradient d(qkv), qkv.weight, =d(norm1), +=workspace",
            "linear_weight_gradient d(qkv), norm1, +=d(qkv.weight), +=d(qkv.bias), +=workspace",
            "layer_norm_gradient (accumulates) d(norm1), layers.0.residual2, norm1.weight, norm1.mean, norm1.rstd, "
            "+=d(layers.0.residual2), +=d(norm1.weight), +=d(norm1.bias), +=workspace",
        });
  CHECK(aliases(graph, block) == std::vector<std::string>{"layers.0.residual2 -> layers.1.residual1",
                                                          "layers.1.projection -> layers.1.residual1",
                                                          "layers.1.residual1 -> layers.1.residual2",
                                                          "layers.1.down -> layers.1.residual2"});
  CHECK(names_of(graph, block.saved) ==
        std::vector<std::string>{"layers.0.residual2", "layers.1.norm1", "layers.1.norm1.mean", "layers.1.norm1.rstd",
                                 "layers.1.qkv", "layers.1.attention", "layers.1.lse", "layers.1.residual1",
                                 "layers.1.norm2", "layers.1.norm2.mean", "layers.1.norm2.rstd", "layers.1.up",
                                 "layers.1.gelu"});
}

TEST_CASE("the backward of a Llama layer: gate and up add to one gradient, no bias gradients") {
  const OpGraph graph = small_llama(1);
  const TrainingBlock block = training_block(graph, 1);
  CHECK(lines(graph, block.backward, "layers.0.") ==
        std::vector<std::string>{
            "linear_input_gradient d(down), down.weight, =d(silu), +=workspace",
            "linear_weight_gradient d(down), silu, +=d(down.weight), +=workspace",
            "gate_gradient d(silu), gate, up, =d(gate), =d(up)",
            "linear_input_gradient d(up), up.weight, =d(norm2), +=workspace",
            "linear_weight_gradient d(up), norm2, +=d(up.weight), +=workspace",
            "linear_input_gradient (accumulates) d(gate), gate.weight, +=d(norm2), +=workspace",
            "linear_weight_gradient d(gate), norm2, +=d(gate.weight), +=workspace",
            "rms_norm_gradient (accumulates) d(norm2), residual1, norm2.weight, norm2.rstd, +=d(residual1), "
            "+=d(norm2.weight), +=workspace",
            "linear_input_gradient d(projection), projection.weight, =d(attention), +=workspace",
            "linear_weight_gradient d(projection), attention, +=d(projection.weight), +=workspace",
            "attention_gradient d(attention), rotary, attention, lse, =d(rotary), +=workspace",
            "rotary_gradient d(rotary), =d(qkv)",
            "linear_input_gradient d(qkv), qkv.weight, =d(norm1), +=workspace",
            "linear_weight_gradient d(qkv), norm1, +=d(qkv.weight), +=workspace",
            "rms_norm_gradient (accumulates) d(norm1), embedding, norm1.weight, norm1.rstd, +=d(embedding), "
            "+=d(norm1.weight), +=workspace",
        });
  CHECK(names_of(graph, block.saved) ==
        std::vector<std::string>{"embedding", "layers.0.norm1", "layers.0.norm1.rstd", "layers.0.rotary",
                                 "layers.0.attention", "layers.0.lse", "layers.0.residual1", "layers.0.norm2",
                                 "layers.0.norm2.rstd", "layers.0.gate", "layers.0.up", "layers.0.silu"});
}

TEST_CASE("embedding and head: tokens and targets are saved, the loss starts the gradient, a tied table gets two") {
  const OpGraph graph = small_gpt2(1);
  const TrainingBlock embedding = training_block(graph, 0);
  CHECK(lines(graph, embedding.backward, "embedding.") ==
        std::vector<std::string>{"add_position_gradient d(position), +=d(position.weight)",
                                 "embedding_gradient d(embedding), tokens, +=d(weight)"});
  CHECK(aliases(graph, embedding) == std::vector<std::string>{"embedding -> embedding.position"});
  CHECK(names_of(graph, embedding.saved) == std::vector<std::string>{"tokens"});

  const TrainingBlock head = training_block(graph, 2);
  CHECK(lines(graph, head.backward, "head.") ==
        std::vector<std::string>{
            "cross_entropy_gradient logits, targets, maximum, sums, =d(logits), loss scale, +=workspace",
            "linear_input_gradient d(logits), embedding.weight, =d(norm), +=workspace",
            "linear_weight_gradient d(logits), norm, +=d(embedding.weight), +=workspace",
            "layer_norm_gradient d(norm), layers.0.residual2, norm.weight, norm.mean, norm.rstd, "
            "=d(layers.0.residual2), +=d(norm.weight), +=d(norm.bias), +=workspace",
        });
  CHECK(aliases(graph, head).empty());
  CHECK(names_of(graph, head.saved) == std::vector<std::string>{"layers.0.residual2", "head.norm", "head.norm.mean",
                                                                "head.norm.rstd", "head.logits", "head.maximum",
                                                                "targets", "head.sums"});
}

TEST_CASE("layers of equal kind have the same backward but for the tensors' names") {
  const OpGraph graph = small_llama(3);
  const auto backward = [&](int layer) {
    std::vector<std::string> result =
        lines(graph, training_block(graph, layer + 1).backward, "layers." + std::to_string(layer) + ".");
    const std::string input =
        graph.tensors[*graph.blocks[layer + 1].input].name;
    for (std::string& line : result)
      for (std::size_t at = line.find(input); at != std::string::npos; at = line.find(input))
        line.replace(at, input.size(), "input");
    return result;
  };
  CHECK(backward(0) == backward(1));
  CHECK(backward(1) == backward(2));
}

// What holds for the backward of any block: a gradient is written before it is added to or read,
// and is written first without adding; each parameter's gradient is added to once per use; the
// block's input ends up with one.
void check_backward(const OpGraph& graph, int index) {
  const Block& block = graph.blocks[index];
  CAPTURE(graph.name);
  CAPTURE(block.name);
  const TrainingBlock training = training_block(graph, index);
  const auto name_of = [&](TensorId id) { return graph.tensors[id].name; };
  const auto root = [&](TensorId id) {
    while (training.alias[id] != id) id = training.alias[id];
    return id;
  };
  std::set<TensorId> written;
  if (block.output) written.insert(root(*block.output));
  std::vector<std::string> parameter_gradients;
  for (const TrainingOp& op : training.backward)
    for (const TrainingOperand& operand : op.operands) {
      if (operand.source == OperandSource::parameter_gradient) parameter_gradients.push_back(name_of(*operand.tensor));
      if (operand.source == OperandSource::output_gradient) CHECK(written.contains(root(*operand.tensor)));
      if (operand.source != OperandSource::input_gradient) continue;
      CHECK(op.accumulate == written.contains(root(*operand.tensor)));
      CHECK((operand.access == Access::update) == op.accumulate);
      written.insert(root(*operand.tensor));
    }
  if (block.input) CHECK(written.contains(root(*block.input)));

  std::vector<std::string> uses;
  for (int i = block.first_op; i < block.last_op; ++i)
    for (const TensorId id : graph.ops[i].parameters) uses.push_back(name_of(id));
  std::sort(uses.begin(), uses.end());
  std::sort(parameter_gradients.begin(), parameter_gradients.end());
  CHECK(parameter_gradients == uses);

  // What rows of several sequences are taken from is not kept.
  if (block.input && !graph.joins_sequences) CHECK(training.saved.front() == *block.input);
  for (const TensorId id : training.saved)
    CHECK(graph.tensors[id].role != TensorRole::parameter);
}

TEST_CASE("the backward of every block of every model family reads only what was written") {
  for (const FamilyRow& family : family_rows())
    for (const bool modern : {false, true}) {
      ModelSpec spec{.name = std::string(family.name),
                     .family = family.family,
                     .layers = 3,
                     .hidden = 16,
                     .feature = 40,
                     .vocabulary = 61,
                     .context = 32,
                     .activation = family.family == Family::decoder && modern ? FeedForwardKind::gated_silu
                                                                              : FeedForwardKind::gelu_tanh,
                     .tied_embeddings = !modern,
                     .heads = 4,
                     .kv_heads = modern ? 2 : 4,
                     .head_dim = 4,
                     .position = modern ? PositionKind::rotary : PositionKind::learned,
                     .norm = modern ? NormKind::rms_norm : NormKind::layer_norm,
                     .decoder_layers = 1,
                     .decoder_context = 12,
                     .qkv_bias = !modern,
                     .attention_output_bias = !modern,
                     .mlp_bias = !modern};
      const OpGraph graph = build_graph(spec, 8);
      const bool joins = family.family == Family::encoder_decoder;
      REQUIRE(graph.blocks.size() == (joins ? 6 : 5));
      CHECK(graph.blocks[1].kind == graph.blocks[joins ? 2 : 3].kind);
      for (int block = 0; block < static_cast<int>(graph.blocks.size()); ++block) check_backward(graph, block);
    }
}

// A block "embedding -> (what `build` makes of x) -> sum", then a head.
OpGraph with_block(TensorId (*build)(SmallGraph&, TensorId)) {
  SmallGraph b;
  const TensorId x = b.embedding(false);
  const TensorId y = build(b, x);
  b.end_block("middle", x, y);
  b.head(y, true, std::nullopt);
  finish(b.graph);
  return b.graph;
}

// The backward of the graph from `with_block`: its lines; checks that its gradients are the slopes
// of its forward.
std::vector<std::string> checked_backward(const OpGraph& graph) {
  CHECK(worst_gradient(graph, 1, 3) < 1e-8);
  return lines(graph, training_block(graph, 1).backward, "");
}

TEST_CASE("a kernel that cannot add leaves its part aside, and that is added behind it") {
  // The activation reads x before the add passes its gradient to it: the activation's has to be
  // added.
  const OpGraph graph =
      with_block([](SmallGraph& b, TensorId x) { return b.add("sum", x, b.gelu("active", x), false); });
  CHECK(checked_backward(graph) == std::vector<std::string>{
                                       "activation_gradient d(active), embedding, =part of d(embedding)",
                                       "accumulate part of d(embedding), +=d(embedding)",
                                   });
  // The same tensor twice, which the kernel itself has to write to two places.
  CHECK(checked_backward(with_block([](SmallGraph& b, TensorId x) { return b.gate("gated", x, x); })) ==
        std::vector<std::string>{
            "gate_gradient d(gated), embedding, embedding, =d(embedding), =part of d(embedding)",
            "accumulate part of d(embedding), +=d(embedding)",
        });
}

TEST_CASE("a sum whose input is used again adds the gradient that it passes on") {
  const OpGraph graph = with_block([](SmallGraph& b, TensorId x) {
    const TensorId sum = b.add("sum", x, b.linear("first", x, {Dim::hidden, 8}), false);
    return b.add("again", sum, b.linear("second", x, {Dim::hidden, 8}), false);
  });
  CHECK(checked_backward(graph) ==
        std::vector<std::string>{
            "linear_input_gradient d(second), second.weight, =d(embedding), +=workspace",
            "linear_weight_gradient d(second), embedding, +=d(second.weight), +=workspace",
            "accumulate d(sum), +=d(embedding)",
            "linear_input_gradient (accumulates) d(first), first.weight, +=d(embedding), +=workspace",
            "linear_weight_gradient d(first), embedding, +=d(first.weight), +=workspace",
        });
}

TEST_CASE("a gradient that is still wanted as it was is copied before it is added to") {
  // Both sides of the adds could share one gradient, except for the norm, which adds its part of
  // x's before the backward of "early" has read its own.
  const OpGraph crossed = with_block([](SmallGraph& b, TensorId x) {
    const TensorId early = b.linear("early", x, {Dim::hidden, 8});
    const TensorId late = b.linear("late", b.norm("norm", x, true), {Dim::hidden, 8});
    return b.add("outer", b.add("inner", x, early, false), late, false);
  });
  CHECK(checked_backward(crossed) ==
        std::vector<std::string>{
            "copy d(inner), =d(embedding)",
            "linear_input_gradient d(late), late.weight, =d(norm), +=workspace",
            "linear_weight_gradient d(late), norm, +=d(late.weight), +=workspace",
            "rms_norm_gradient (accumulates) d(norm), embedding, norm.weight, norm.rstd, +=d(embedding), "
            "+=d(norm.weight), "
            "+=workspace",
            "linear_input_gradient (accumulates) d(early), early.weight, +=d(embedding), +=workspace",
            "linear_weight_gradient d(early), embedding, +=d(early.weight), +=workspace",
        });
  // A sum of a tensor with itself is both: passed on as a copy, then added.
  CHECK(checked_backward(with_block([](SmallGraph& b, TensorId x) { return b.add("twice", x, x, false); })) ==
        std::vector<std::string>{"copy d(twice), =d(embedding)", "accumulate d(twice), +=d(embedding)"});
}

TEST_CASE("parallel branches of one norm cost no further kernel where both are computed before they are added") {
  // GPT-J: x + attention(norm(x)) + feed_forward(norm(x)).
  const OpGraph graph = with_block([](SmallGraph& b, TensorId x) {
    const TensorId normed = b.norm("norm", x, true);
    const TensorId attended = b.linear("attended", normed, {Dim::hidden, 8});
    const TensorId fed = b.linear("fed", normed, {Dim::hidden, 8});
    return b.add("outer", b.add("inner", x, attended, false), fed, false);
  });
  CHECK(checked_backward(graph) ==
        std::vector<std::string>{
            "linear_input_gradient d(fed), fed.weight, =d(norm), +=workspace",
            "linear_weight_gradient d(fed), norm, +=d(fed.weight), +=workspace",
            "linear_input_gradient (accumulates) d(attended), attended.weight, +=d(norm), +=workspace",
            "linear_weight_gradient d(attended), norm, +=d(attended.weight), +=workspace",
            "rms_norm_gradient (accumulates) d(norm), embedding, norm.weight, norm.rstd, +=d(embedding), "
            "+=d(norm.weight), "
            "+=workspace",
        });
}

TEST_CASE("the backward of random graphs is the slope of their forward, whatever uses what how often") {
  std::mt19937 random(20261121);
  for (unsigned trial = 0; trial < 300; ++trial) {
    SmallGraph b;
    const TensorId x = b.embedding(false);
    std::vector<TensorId> all{x}, unused{x};
    const auto pick = [&] {
      const TensorId id = all[random() % all.size()];
      std::erase(unused, id);
      return id;
    };
    const auto put = [&](TensorId id) {
      all.push_back(id);
      unused.push_back(id);
    };
    const int ops = 1 + static_cast<int>(random() % 8);
    for (int i = 0; i < ops; ++i) {
      const std::string at = "op" + std::to_string(i);
      const TensorId first = pick();
      switch (random() % 8) {
        case 0: put(b.linear(at, first, {Dim::hidden, 8})); break;
        case 1: put(b.norm(at, first, true)); break;
        case 2: put(b.gelu(at, first)); break;
        case 3: put(b.gate(at, first, pick())); break;
        case 4: put(b.elementwise(OpKind::scale, at, first, {.factor = 0.7})); break;
        case 5: put(b.elementwise(OpKind::softcap, at, first, {.softcap = 1.5})); break;
        default: put(b.add(at, first, pick(), random() % 2 == 0)); break;
      }
    }
    // Tensors that nothing uses yet are summed up, in any order.
    for (int i = 0; unused.size() > 1 || unused[0] == x; ++i) {
      std::ranges::shuffle(unused, random);
      const TensorId first = unused[0], second = unused.size() > 1 ? unused[1] : first;
      unused.erase(unused.begin(), unused.begin() + (unused.size() > 1 ? 2 : 1));
      put(b.add("sum" + std::to_string(i), first, second, false));
    }
    b.end_block("middle", x, unused[0]);
    b.head(unused[0], true, std::nullopt);
    finish(b.graph);
    CAPTURE(trial);
    CAPTURE(lines(b.graph, training_block(b.graph, 1).forward, ""));
    CAPTURE(lines(b.graph, training_block(b.graph, 1).backward, ""));
    CHECK(worst_gradient(b.graph, 1, trial) < 1e-7);
  }
}

}  // namespace
}  // namespace parplan
