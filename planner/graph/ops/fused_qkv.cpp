#include "planner/graph/ops/fused_qkv.h"

#include "planner/graph/local_op.h"

namespace parplan {

void localize_heads(const LocalOp& local, OpShape& shape) {
  const OpShape& of = local.op.attributes;
  const std::int64_t groups = local.input.whole / local.input.granule;
  const std::int64_t sharers = local.input.sharers;
  const std::int64_t local_groups = sharers > 1 ? 1 : local.input.size / local.input.granule;
  shape.columns = local.output.size;
  shape.sequence = local.sequence.size;
  shape.batch = local.batch;
  shape.chunks = local.chunks;
  shape.heads = of.heads / groups * local_groups / sharers;
  // Where each query head has a key and a value of its own, no rank holds a copy of one.
  shape.kv_heads = of.kv_heads == of.heads ? shape.heads : of.kv_heads / groups * local_groups;
  if (of.alibi != 0.0) {
    shape.all_heads = of.heads;
    shape.first_head =
        of.heads / groups * (local.input.begin / local.input.granule) + of.heads / groups / sharers * local.input.share;
  }
  // The same work as without.
  if (shape.window >= (shape.chunks.any() ? shape.chunks.positions() : shape.sequence)) shape.window = 0;
}

}  // namespace parplan
