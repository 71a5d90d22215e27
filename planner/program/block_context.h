#pragma once

#include "planner/cluster/device.h"
#include "planner/cluster/mesh.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/layout.h"

namespace parplan {

// What a block's Segments depend on besides the block itself.
struct BlockContext {
  BlockLayout layout;
  TensorLayout entering;  // the placement of the activation that the block before passes on
  Coordinates at;         // of the rank, along the axes that blocks are sharded over
  DataType precision = DataType::fp32;
  BackendKind backend = BackendKind::cpu;
  double loss_weight = 1.0;  // of a token: 1 / tokens of the global batch
  bool fuse = true;          // replaces pairs of kernels by one (fusion.h)
  bool input_apart = false;  // the block's input lies in a buffer of its own, not with what it saves
  bool splits_backward = false;  // its stage runs backwards in two parts (Phase)
  bool operator==(const BlockContext&) const = default;
};

BlockContext block_context(const BlockLayout& layout, const TensorLayout& entering, const Coordinates& at,
                           const TrainingSpec& training, BackendKind backend, bool fuse);

}  // namespace parplan
