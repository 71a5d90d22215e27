#pragma once

#include "planner/cluster/device.h"
#include "planner/cluster/mesh.h"
#include "planner/graph/op_kind.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/layout.h"

namespace parplan {

// Which pairs of kernels are replaced by one (fusion.h).
struct Fusions {
  bool norms = true;        // sums with the norms behind them
  bool activations = true;  // products with activations, forward and backward
  bool any() const { return norms || activations; }
  bool operator==(const Fusions&) const = default;
};

// What a block's Segments depend on besides the block itself.
struct BlockContext {
  BlockLayout layout;
  TensorLayout entering;  // the placement of the activation that the block before passes on
  // Of the rank, along the axes that blocks are sharded over; with a master, along the data axis 0
  // for it and 1 for every replica.
  Coordinates at;
  DataType precision = DataType::fp32;
  Fp8Casts fp8 = Fp8Casts::none;  // products of layers (multiplies_in_fp8)
  bool slices_share_casts = false;  // slices of one product cast its weight once, where each product casts
  BackendKind backend = BackendKind::cpu;
  double loss_weight = 1.0;  // of a token: 1 / tokens of the global batch that have a target
  Fusions fusions;
  std::int64_t bucket_alignment = 16;  // bucket_work.h, times the ranks that share out each parameter
  bool orthogonalizes = false;         // the optimizer takes the matrices of layers apart (Optimizer::muon)
  bool leaves_half = false;  // products leave the gradients of weights in half precision (OpShape::in_half)
  bool sums_half = false;    // where products add them, they do so in half precision
  bool repeats_all = false;  // full recompute repeats all forward ops, not only what the backward reads
  bool keeps_unread = false;  // recompute of every other product keeps what it names, whoever reads it
  bool master_computes_loss = true;  // Engine; else replicas do, where there is a master
  // Engine: attention over gathered keys in steps, and whether its transfers wait their turn among
  // kernels.
  bool attends_in_steps = false;
  bool steps_wait = false;
  bool copies_rows = false;  // Engine
  bool input_apart = false;  // the block's input lies in a buffer of its own, not with what it saves
  bool splits_backward = false;  // its stage runs backwards in two parts (Phase)
  // Temporaries do not share scratch, and kernels are fused however much of it that takes: no
  // instruction waits for another but for its data. For floors (LoweredFor).
  bool scratch_apart = false;
  bool operator==(const BlockContext&) const = default;
};

BlockContext block_context(const BlockLayout& layout, const TensorLayout& entering, const Coordinates& at,
                           const TrainingSpec& training, BackendKind backend, bool fuse);

}  // namespace parplan
