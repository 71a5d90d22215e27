#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "planner/program/local_size.h"
#include "planner/program/program.h"

namespace parplan {

// The flat bucket of a set of parameters. Each starts at a multiple of 16 elements; those whose
// gradient is Partial over the tensor axis come last, and within each part those with weight decay
// come first.
struct BucketLayout {
  std::vector<ParameterPart> parts;
  std::int64_t elements = 0;  // without the padding to the data-parallel degree

  struct Range {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    bool operator==(const Range&) const = default;
  };
  std::vector<Range> decaying;        // with weight decay
  std::vector<Range> tensor_partial;  // gradients are still to be summed over the tensor axis
  std::vector<Range> replicated;      // equal on every rank of the tensor axis: counted once in a global norm
};
BucketLayout bucket_layout(const OpGraph& graph, const std::vector<TensorId>& parameters, const BlockChoice& choice);

// The block's own parameters and the tied one that it uses, if any.
struct BlockParameters {
  std::vector<TensorId> own;
  std::optional<TensorId> tied;
};
BlockParameters block_parameters(const OpGraph& graph, const Block& block);

}  // namespace parplan
