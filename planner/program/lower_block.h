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
inline constexpr const char* gradients = "gradients";              // whole bucket, fp32
inline constexpr const char* tied_parameters = "tied parameters";  // whole bucket of the tied parameter
inline constexpr const char* tied_gradients = "tied gradients";
inline constexpr const char* saved = "saved";                      // this micro-batch's, this block's
inline constexpr const char* input = "input";                      // the block's, where it lies apart
inline constexpr const char* output = "output";                    // starts with the block's output
inline constexpr const char* gradient = "gradient";                // of the block's output; afterwards of its input
inline constexpr const char* loss = "loss";
inline constexpr const char* loss_scale = "loss scale";            // fp16 only
inline constexpr const char* scratch = "scratch";
}  // namespace binding

// A tensor kept from forward to backward, at an offset of the binding "saved", or "input".
struct SavedTensor {
  TensorId tensor = 0;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};

// One block as two Segments. Blocks of equal kind lower to equal Segments.
struct LoweredBlock {
  Segment forward;
  Segment backward;
  std::vector<SavedTensor> saved;  // the block's input first
  std::int64_t saved_bytes = 0;    // without an input that lies apart
  // The activations that enter and leave the block, on this rank; 0 where none does. Their
  // gradients have the same sizes.
  std::int64_t input_bytes = 0;
  std::int64_t output_bytes = 0;
};
LoweredBlock lower_block(const OpGraph& graph, int block, const BlockContext& context);
// What a block whose input does not lie apart would save if it did.
std::int64_t saved_bytes_without_input(const LoweredBlock& block);
// The same with what is kept as `recompute` says, instead of the context's row.
LoweredBlock lower_block(const OpGraph& graph, int block, const BlockContext& context, const RecomputeRow& recompute);

}  // namespace parplan
