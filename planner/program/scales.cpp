#include "planner/program/scales.h"

#include <algorithm>

#include "planner/program/bucket_work.h"

namespace parplan {

int products_in_fp8(const OpGraph& graph, BlockRange blocks) {
  int products = 0;
  for (int b = blocks.first; b < blocks.last; ++b) {
    const Block& block = graph.blocks[static_cast<std::size_t>(b)];
    products += static_cast<int>(std::count_if(graph.ops.begin() + block.first_op, graph.ops.begin() + block.last_op,
                                               [&](const Op& op) { return may_be_fp8(graph, op); }));
  }
  return products;
}

std::vector<Instruction> reduce_scales(std::int64_t magnitudes, const DeviceMesh& mesh, const Engine& engine) {
  const auto kernel = [&](OpKind kind) {
    return flat_kernel(kind, magnitudes, Stream::compute, Label::compute, DataType::fp32);
  };
  Instruction reduction;
  reduction.kind = InstructionKind::all_reduce_max;
  reduction.group = ranks_of_stage(mesh);
  reduction.stream = Stream::compute;
  reduction.label = label_of(reduction.group.axis);
  reduction.type = DataType::fp32;
  reduction.name = name(reduction.kind);
  Instruction update = kernel(OpKind::update_scales);
  update.shape.columns = engine.scale_history;
  if (mesh.size() == mesh.degree.pp) return {kernel(OpKind::join_magnitudes), update};
  return {kernel(OpKind::join_magnitudes), reduction, update};
}

}  // namespace parplan
