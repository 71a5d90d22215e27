#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "planner/graph/op_kind.h"
#include "planner/graph/tensor.h"

namespace parplan {

using TensorId = int;

// One operation of the forward graph. Sizes that do not depend on placement are in `attributes`
// (heads, kv_heads, head_dim, rotary_dim, window, activation, epsilon, theta, factor, softcap,
// alibi and the like); lowering fills in the local ones.
struct Op {
  OpKind kind{};
  std::string name;
  std::vector<TensorId> inputs;      // activations, statistics and tokens, in the order of the op's row
  std::vector<TensorId> parameters;  // weight, bias
  std::vector<TensorId> outputs;
  OpShape attributes;
  bool operator==(const Op&) const = default;
};

// A run of ops between two points where a single activation passes: pipeline stages may be cut
// there, recompute repeats a block, and one FlatShard bucket holds its parameters. Blocks of equal
// `kind` do the same work.
struct Block {
  std::string name;  // "embedding", "layers.0", "head"
  int kind = 0;
  int first_op = 0;
  int last_op = 0;       // one past
  std::optional<TensorId> input = {};   // crossing activation; the first block has none
  std::optional<TensorId> output = {};  // crossing activation; the last block has none: it ends in the loss
  bool operator==(const Block&) const = default;
};

// What a model learns from tokens around those that it has to tell (Devlin et al. 2019,
// arXiv:1810.04805, section 3.1): `count` positions of a sample have a target, its own token, and
// most of their tokens are replaced by `token`.
struct MaskedTokens {
  std::int64_t count = 0;
  std::int64_t token = 0;
  bool operator==(const MaskedTokens&) const = default;
};

// What an encoder-decoder learns (Raffel et al. 2020, T5, arXiv:1910.10683, section 3.1.4; their
// `random_spans_noise_mask`): `spans` runs of a text are cut out, the encoder reads the rest with a
// sentinel in the place of each, and the decoder tells what was cut out, each run behind its
// sentinel. A sample's tokens are the decoder's and then the encoder's. Sentinels are the last ids
// of the vocabulary, downwards.
struct CorruptedSpans {
  std::int64_t decoder = 0;  // tokens of a sample that the decoder reads, and tells
  std::int64_t spans = 0;
  std::int64_t start = 0;  // the id that the decoder reads first
  std::int64_t end = 0;    // the id behind what either reads
  bool operator==(const CorruptedSpans&) const = default;
};

// What a classifier of images learns (Dosovitskiy et al. 2021, ViT, arXiv:2010.11929): a sample is
// a square image in patches, and its only target is its class, one of the vocabulary.
struct LabelledImages {
  std::int64_t size = 0;      // pixels on each side
  std::int64_t patch = 0;     // of these, the pixels on each side of a patch
  std::int64_t channels = 0;  // colours of a pixel
  std::int64_t patches() const { return (size / patch) * (size / patch); }
  std::int64_t colours() const { return patch * patch * channels; }  // of a patch
  bool operator==(const LabelledImages&) const = default;
};

// The forward graph of one sample. Tensors and ops are in topological order; the last op writes the
// loss.
struct OpGraph {
  std::string name;
  std::int64_t sequence = 0;    // tokens of a sample
  std::int64_t vocabulary = 0;  // unpadded
  std::optional<MaskedTokens> masked = {};       // else each token's target is the next one,
  std::optional<CorruptedSpans> corrupted = {};  // or the next one of the decoder,
  std::optional<LabelledImages> images = {};     // or the first position's is the class of an image
  std::vector<Tensor> tensors;
  std::vector<Op> ops;
  std::vector<Block> blocks;
  std::vector<int> kinds;       // the first block of each Block::kind
  std::vector<TensorId> tied;   // parameters that several blocks use (tied embeddings), in order of first use
  // The first block with a parameter that is trained. Blocks before it have no backward, and nobody
  // needs the gradient of its input.
  int first_trained = 0;
  // Whether activations hold rows of several sequences, which ops take apart: no axis may cut them.
  bool joins_sequences = false;
};

// Tokens of a sample that have a target; the loss is their mean.
inline std::int64_t targets_of_sample(const OpGraph& graph) {
  return graph.masked      ? graph.masked->count
         : graph.corrupted ? graph.corrupted->decoder
         : graph.images    ? 1
                           : graph.sequence;
}

// Parameters in order of first use, each once.
std::vector<TensorId> parameters(const OpGraph& graph);
std::int64_t parameter_count(const OpGraph& graph);
std::int64_t trained_parameter_count(const OpGraph& graph);

// Whether the backward reaches a block, and whether it goes on to the block before.
inline bool has_backward(const OpGraph& graph, int block) {
  return block >= graph.first_trained;
}
inline bool passes_gradient_on(const OpGraph& graph, int block) {
  return block > graph.first_trained;
}
// By tensor: whether the block computes the gradient of an activation, or of a parameter.
std::vector<bool> needs_gradient(const OpGraph& graph, const Block& block);

// Whether it is a product of a layer that may be in fp8: not those of the vocabulary, whose losses
// engines keep in bf16, nor those of adapters.
bool may_be_fp8(const OpGraph& graph, const Op& op);
// What a quantized activation was made of; other tensors themselves. Their gradients are one.
TensorId unquantized(const OpGraph& graph, const Block& block, TensorId id);

// The op's products that count in model FLOPs, for one sample; nothing where it has none.
ModelProducts model_products(const OpGraph& graph, const Op& op);

// How often a training step computes products of the op's size: forward, for the gradient of its
// input, and for that of its weight or of attention's second operand. 3 where all is trained.
// `needs`: needs_gradient of the op's block.
int product_passes(const std::vector<bool>& needs, const Op& op);

// Model FLOPs of forward and backward for one sample by the convention of PaLM and Megatron-LM:
// matrix products only (ModelProducts), backward at twice the forward, attention as if it were not
// causal, nothing recomputed. Gradients that nobody needs, since parameters are frozen, do not
// count.
Flops model_flops_per_sample(const OpGraph& graph);

// Fills in `tied`, `first_trained`, `kinds` and the `kind` of every block (equal work gets an equal
// kind) and checks what the declarations above promise: topological order (Boost.Graph), one
// activation across each block boundary, operands that fit their op's row. Throws InternalError
// with the op's name. Families call it last.
void finish(OpGraph& graph);

}  // namespace parplan
