#pragma once

#include <optional>
#include <string>
#include <vector>

#include "models/model_spec.h"
#include "planner/graph/op_graph.h"

namespace parplan {

// What families share when they write a graph: tensors and ops are appended in the order of the
// calls.
class GraphBuilder {
 public:
  GraphBuilder(const ModelSpec& spec, std::int64_t sequence_length);

  // Ops from here on belong to the block `name`, which reads `input`, the output of the block
  // before; the first block reads none.
  void begin_block(const std::string& name, std::optional<TensorId> input);
  // `output` is what the next block reads; the last block has none.
  void end_block(std::optional<TensorId> output);

  TensorId tokens(const std::string& name);
  // Activations, statistics and tokens have so many positions from here on: at first a sample's.
  void set_positions(std::int64_t positions) { positions_ = positions; }
  // [sequence, batch, width]
  TensorId activation(const std::string& name, TensorDim width);
  // fp32 [sequence, batch, further...]
  TensorId statistic(const std::string& name, std::vector<TensorDim> further = {});
  TensorId tensor(const std::string& name, TensorRole role, std::vector<TensorDim> dims);

  // [out, in], normal, with weight decay.
  TensorId weight(const std::string& name, TensorDim out, TensorDim in, double standard_deviation);
  TensorId zeros(const std::string& name, TensorDim width);  // a bias
  TensorId ones(const std::string& name, TensorDim width);   // a norm's gamma

  void op(OpKind kind, const std::string& name, std::vector<TensorId> inputs, std::vector<TensorId> parameters,
          std::vector<TensorId> outputs, OpShape attributes = {});

  // tokens -> rows of the table "embedding.weight", which is kept for a tied head, widened or
  // narrowed to the residual stream.
  TensorId embed();
  // Images: the patches' colours -> a product with bias, and one row behind them, "class.weight",
  // which stands for a class token.
  TensorId embed_patches();
  // x -> x weight^T (+ bias); the parameters are `name`.weight and, where `bias`, `name`.bias.
  TensorId linear(const std::string& name, TensorId x, TensorDim out, TensorDim in, double standard_deviation,
                  bool bias);
  // residual + branch + bias, or branch + bias. The bias of a row-parallel product is added here,
  // once, after the reduction.
  TensorId add(const std::string& name, std::optional<TensorId> residual, TensorId branch, const std::string& bias_name,
               bool bias);
  // x times a number
  TensorId scale(const std::string& name, TensorId x, double factor);
  // x -> logits -> loss; a multiplier of the logits is applied to x, which is narrower. The weight
  // is "head.weight", or the embedding's where the spec ties them.
  void head_and_loss(TensorId x);

  // Standard deviation of weights that write into the residual stream.
  double residual_deviation() const;

  // So many positions of x from `begin` on; x with y in their place.
  TensorId take(const std::string& name, TensorId x, std::int64_t begin, std::int64_t positions);
  TensorId put(const std::string& name, TensorId x, TensorId y, std::int64_t begin, std::int64_t positions);
  // Those of a table of parameters are appended to x, as new rows.
  TensorId append(const std::string& name, TensorId x, TensorId table);

  // From here on, targets are what the decoder is to tell.
  void learn_corrupted_spans(const CorruptedSpans& spans) { graph_.corrupted = spans; }
  // From here on, targets are masked tokens: this share of a sample's, at least one.
  void learn_masked_tokens(std::int64_t mask_token, double share);

  // Checks and hands over the graph.
  OpGraph finish_graph();

  TensorDim embedding_width() const { return {Dim::hidden, spec_.embedding_width.value_or(spec_.hidden), 1}; }
  TensorDim hidden() const { return {Dim::hidden, spec_.hidden, 1}; }
  TensorDim feature() const { return {Dim::feature, spec_.feature, 1}; }
  TensorDim vocabulary() const { return {Dim::vocabulary, spec_.vocabulary, 1}; }

 private:
  TensorDim sequence() const { return {Dim::sequence, positions_, 1}; }
  TensorDim batch() const { return {Dim::batch, 1, 1}; }

  ModelSpec spec_;
  OpGraph graph_;
  std::int64_t positions_ = 0;
  std::optional<TensorId> embedding_weight_;  // since `embed`
};

// The activation itself; for gated ones, the gate's.
ActivationKind activation_kind(FeedForwardKind activation);

}  // namespace parplan
