#pragma once

#include <string>
#include <vector>

#include "planner/plan/recompute.h"
#include "planner/program/local_size.h"
#include "planner/program/program.h"

namespace parplan {

// The names of what the Segments of a block may bind; a Segment lists those that it uses.
namespace binding {
inline constexpr const char* parameters = "parameters";            // whole bucket of the block
inline constexpr const char* frozen = "frozen parameters";         // likewise of those that are not trained
inline constexpr const char* gradients = "gradients";              // whole bucket, fp32
inline constexpr const char* tied_parameters = "tied parameters";  // whole bucket of the tied parameter
inline constexpr const char* tied_gradients = "tied gradients";
inline constexpr const char* saved = "saved";                      // this micro-batch's, this block's
inline constexpr const char* for_weights = "saved for weights";    // likewise, for the weight gradients
inline constexpr const char* left = "left for weights";            // likewise, by the first part of the backward
inline constexpr const char* input = "input";                      // the block's, where it lies apart
inline constexpr const char* output = "output";                    // starts with the block's output
inline constexpr const char* gradient = "gradient";                // of the block's output; afterwards of its input
inline constexpr const char* loss = "loss";
inline constexpr const char* loss_scale = "loss scale";            // fp16 only
inline constexpr const char* scratch = "scratch";
}  // namespace binding

// Bytes [begin, end) of a binding.
struct ByteRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool operator==(const ByteRange&) const = default;
};

// A tensor kept from forward to backward, at an offset of the binding "saved", "saved for weights"
// or "input".
struct SavedTensor {
  TensorId tensor = 0;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
  bool for_weights = false;
};

// One block as two Segments, or as more where its stage runs backwards in two parts. Blocks of
// equal kind lower to equal Segments.
struct LoweredBlock {
  Segment forward;
  Segment backward;
  // Where backwards have two parts: `backward` without the weight gradients of products, and these.
  // What the weight gradients read stays where they find it: what the forward saved in a buffer of
  // its own, and all else in one that the first part fills. The sums over tokens that other
  // gradients of parameters are (of norms, embeddings) stay in the first part, where their kernels
  // read what is there. The first and the last block are not divided, since the one has no product
  // and the gradient of the logits would take too much room: their second part is empty.
  Segment backward_inputs, backward_weights;
  std::vector<SavedTensor> saved;  // the block's input first
  bool input_apart = false;        // that lies in the binding "input"
  std::int64_t saved_bytes = 0;    // without an input that lies apart
  std::int64_t for_weights_bytes = 0, left_bytes = 0;
  // The activations that enter and leave the block, on this rank; 0 where none does. Their
  // gradients have the same sizes: the larger of those that the backward reads and leaves.
  std::int64_t input_bytes = 0;
  std::int64_t output_bytes = 0;
  std::int64_t gradient_bytes = 0;
};
LoweredBlock lower_block(const OpGraph& graph, int block, const BlockContext& context);
// Whether what is recomputed bears on a block. The first and the last keep all that their backward
// reads: of the one that is little but tokens, and the backward of the other follows its forward.
bool may_recompute(const Block& block);
// The parts into which an activation or its gradient is split when it goes to another stage: one
// for each rank of the tensor axis, where the engine splits what they all hold
// (Engine::splits_transfers), else 1.
int transfer_parts(const TensorLayout& residual, const DeviceMesh& mesh, const Engine& engine);
// What is copied where a block keeps what it saves on the host: tensors without the padding between
// them. In the binding "saved", with the block's input or without it, and in "saved for weights",
// of which the first part of a backward may need less.
std::vector<ByteRange> saved_ranges(const LoweredBlock& block, bool with_input);
std::vector<ByteRange> for_weights_ranges(const LoweredBlock& block);
std::vector<ByteRange> ranges_read(const Segment& segment, const char* bound);
// What a block whose input does not lie apart would save if it did.
std::int64_t saved_bytes_without_input(const LoweredBlock& block);
// The same with what is kept as `recompute` says, instead of the context's row.
LoweredBlock lower_block(const OpGraph& graph, int block, const BlockContext& context, const RecomputeRow& recompute);

}  // namespace parplan
