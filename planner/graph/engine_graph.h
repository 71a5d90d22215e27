#pragma once

#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"

namespace parplan {

// The graph with the ops that the engine runs: where it does not fuse attention, the ops on scores
// that attention stands for; where it drops elements, dropout, but in models with RMS norms, which
// are trained without (Touvron et al. 2023, and those after); where its loss is not fused, a copy
// of the logits in fp32; where it makes RMS norms of several kernels, what these keep; where
// products of layers are in fp8 and it casts their inputs once, the casts; and with the vocabulary
// padded as its facts say. parplan's own runtime runs the ops of the graph as they are.
// `precision`: as it is stated (stated_precision).
OpGraph as_run_by(const Engine& engine, OpGraph graph, DataType precision = DataType::bf16);
// The graph that plans are made of: parplan's own runtime, whose facts know no precision, pads the
// vocabulary where matrix units compute (own_vocabulary_multiple).
OpGraph as_run_by(const TrainingSpec& training, OpGraph graph);
// What a rank's rows of the vocabulary are padded to a multiple of by parplan's own runtime. Matrix
// units read 16 bytes at a time, so that rows of logits of an odd length take cuBLASLt 4 to 36
// times as long (docs/gpu.md); 128 is what Megatron-LM and llm.c pad to. In fp32 they do not.
constexpr int own_vocabulary_multiple(DataType precision) { return precision == DataType::fp32 ? 1 : 128; }
// What a block of such a graph is made of where each part is a module of its own, as in Hugging
// Face's Transformers: products, norms, activations, rotary positions, attentions and tables, and
// around them a layer and its feed-forward; and the parameters that are trained in these. Queries,
// keys and values are three products where the engine's are (Engine::separate_keys), also of models
// whose modules have one for all, as GPT-2's c_attn: the graph does not tell these apart.
struct BlockModules {
  std::int64_t modules = 0, trained = 0;
  bool operator==(const BlockModules&) const = default;
};
BlockModules modules_of(const OpGraph& graph, const Block& block);
// The graph with a cast of each activation that products of layers read.
OpGraph quantized(OpGraph graph);

}  // namespace parplan
