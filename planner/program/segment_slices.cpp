// Products of rows that the ranks of the tensor axis share out (sequence parallelism), a slice of
// rows for each rank, beside the transfers around the ring of the ranks that bring the rows of the
// others or take their sums away: Wang et al., "Overlap Communication with Dependent Computation
// via Decomposition in Large Deep Learning Models", ASPLOS 2023, section 5.
#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/program/segment_lowering.h"

namespace parplan {
namespace {

constexpr GroupKey next_of_tensor{Axis::tp, Members::next}, previous_of_tensor{Axis::tp, Members::previous};

// A product with a weight, or the gradient of its input: each row of the result comes from one row.
bool multiplies_rows(const OpRow& row) {
  const auto has = [&](OperandSource source) {
    return std::ranges::find(row.operands, source, &OperandRow::source) != row.operands.end();
  };
  return row.cost == CostClass::product && has(OperandSource::parameter) && !has(OperandSource::parameter_gradient);
}

bool slices_products(const SegmentLowering& lowering, const TrainingOp& op) {
  const BlockLayout& layout = lowering.of.context.layout;
  return layout.tp_overlap == TensorOverlap::ring && layout.degree.tp > 1 && multiplies_rows(row_of(op.kind));
}

// Whether the one step between two layouts is this one over the tensor axis, and the ranks' parts
// of the tensor are rows one behind the other.
bool is_of_rows(const Tensor& tensor, const TensorLayout& from, const TensorLayout& to, Redistribution step) {
  const std::vector<RedistributionStep> steps = redistribute(from, to);
  const Placement cut = step == Redistribution::all_gather ? from.tp : to.tp;
  return steps == std::vector{RedistributionStep{Axis::tp, step}} && cut == shard(tensor.dims.front().dim);
}

// One of equal parts.
Value rows_of(const Value& whole, int rank, int ranks) {
  PARPLAN_ASSERT(whole.bytes % ranks == 0, fmt::format("{} bytes of rows over {} ranks", whole.bytes, ranks));
  const std::int64_t bytes = whole.bytes / ranks;
  return {whole.storage, whole.offset + rank * bytes, bytes};
}

// What the passes over one product share.
struct SlicedProduct {
  SegmentLowering& lowering;
  const TrainingOp& op;
  OpShape shape;  // of a slice
  Label label{};
  const std::function<Value(const TrainingOperand&)>& value_of;

  int ranks() const { return lowering.of.context.layout.degree.tp; }
  int at() const { return lowering.of.context.at.tp; }
  // The rank so many places before this one, around the ring.
  int before(int places) const { return (at() + ranks() - places) % ranks(); }
  DataType type() const { return in_memory(lowering.of.context.precision); }

  void pass(const std::string& what, const Value& from, const Value& to) const {
    emit_transfer(lowering, InstructionKind::send, next_of_tensor, type(), what, {from, Access::read});
    emit_transfer(lowering, InstructionKind::receive, previous_of_tensor, type(), what, {to, Access::write});
  }
  // The slice of a rank's rows; `in_place_of`: what it reads or writes instead of its part of one
  // operand's value.
  void multiply(int step, int rank, OperandSource source, const Value& in_place_of) const {
    OpShape of_step = shape;
    if (step > 0 && of_step.fp8 == Fp8Casts::each_product && lowering.of.context.slices_share_casts)
      of_step.fp8 = Fp8Casts::but_weights;
    if (step > 0 && of_step.fp8 == Fp8Casts::once_transposed) of_step.fp8 = Fp8Casts::once;
    emit_op(lowering, op, of_step, label, [&](const TrainingOperand& operand) {
      if (operand.source == source) return in_place_of;
      const Value whole = value_of(operand);
      return operand.source == OperandSource::parameter ? whole : rows_of(whole, rank, ranks());
    });
  }
};

SlicedProduct sliced(SegmentLowering& lowering, const TrainingOp& op, const OpShape& shape, Label label,
                     const std::function<Value(const TrainingOperand&)>& value_of) {
  SlicedProduct product{lowering, op, shape, label, value_of};
  PARPLAN_ASSERT(shape.rows % product.ranks() == 0, fmt::format("{} rows over {} ranks", shape.rows, product.ranks()));
  product.shape.rows /= product.ranks();
  return product;
}

}  // namespace

std::optional<ArrivingRows> arriving_rows(SegmentLowering& lowering, const TrainingOp& op, Values& values, TensorId id,
                                          const TensorLayout& wanted) {
  if (!slices_products(lowering, op) || values.contains({id, wanted})) return std::nullopt;
  const Tensor& tensor = lowering.tensor(id);
  const auto own = std::ranges::find_if(values, [&](const auto& entry) {
    return entry.first.first == id && is_of_rows(tensor, entry.first.second, wanted, Redistribution::all_gather);
  });
  if (own == values.end()) return std::nullopt;
  const ArrivingRows rows{.own = own->second,
                          .whole = scratch(lowering, local_bytes(tensor, wanted, lowering.of.context)),
                          .what = tensor.name + ".rows"};
  values[{id, wanted}] = rows.whole;
  lowering.missing[rows.whole.storage] = {
      .rows = rows.own, .place = rows_of(rows.whole, lowering.of.context.at.tp, lowering.of.context.layout.degree.tp)};
  return rows;
}

void complete(SegmentLowering& lowering, TensorId id, const Value& value) {
  const auto found = lowering.missing.find(value.storage);
  if (found == lowering.missing.end()) return;
  const SegmentLowering::MissingRows missing = found->second;
  lowering.missing.erase(found);
  emit_copy(lowering, type_of(lowering.tensor(id), lowering.of.context.precision), Label::compute,
            lowering.tensor(id).name, missing.rows, missing.place);
}

// In step i, a rank multiplies the rows of the rank i places before it, while it passes them on and
// receives those of the step after: its own ones need not arrive.
void multiply_arriving(SegmentLowering& lowering, const TrainingOp& op, const OpShape& shape, Label label,
                       const ArrivingRows& rows, const std::function<Value(const TrainingOperand&)>& value_of) {
  const SlicedProduct product = sliced(lowering, op, shape, label, value_of);
  const OperandSource arriving = row_of(op.kind).operands.front().source;
  for (int step = 0; step < product.ranks(); ++step) {
    const int rank = product.before(step);
    const Value held = step == 0 ? rows.own : rows_of(rows.whole, rank, product.ranks());
    if (step + 1 < product.ranks())
      product.pass(rows.what, held, rows_of(rows.whole, product.before(step + 1), product.ranks()));
    product.multiply(step, rank, arriving, held);
  }
}

bool sums_around_ring(const SegmentLowering& lowering, const TrainingOp& op, TensorId output) {
  return slices_products(lowering, op) && is_of_rows(lowering.tensor(output), lowering.produced(output),
                                                     lowering.canonical(output), Redistribution::reduce_scatter);
}

// The sum of a rank's rows begins at the rank behind it and goes around: each adds its own product
// to what arrives and passes the sum on, until it is where it belongs. The product comes before the
// sum of the step before arrives, so that the transfer has the product's time. Two sums take turns,
// and what arrives has room of its own, in one piece with theirs: if a receive could write what the
// send before it reads, each of all ranks would wait for the next one.
Value multiply_and_sum(SegmentLowering& lowering, const TrainingOp& op, const OpShape& shape, Label label,
                       TensorId output, const std::function<Value(const TrainingOperand&)>& value_of) {
  const SlicedProduct product = sliced(lowering, op, shape, label, value_of);
  const std::int64_t bytes = local_bytes(lowering.tensor(output), lowering.canonical(output), lowering.of.context);
  const Value room = scratch(lowering, 3 * bytes);
  const std::array<Value, 2> sums{rows_of(room, 0, 3), rows_of(room, 1, 3)};
  const Value arrived = rows_of(room, 2, 3);
  const std::string what = lowering.tensor(output).name + ".sums";
  for (int step = 0; step < product.ranks(); ++step) {
    const Value& sum = sums[step % 2];
    product.multiply(step, product.before(step + 1), OperandSource::output, sum);
    if (step > 0)
      emit_kernel(lowering, OpKind::accumulate, {.rows = bytes / size_of(product.type())}, label, what,
                  {{arrived, Access::read}, {sum, Access::update}});
    if (step + 1 < product.ranks()) product.pass(what, sum, arrived);
  }
  return sums[(product.ranks() + 1) % 2];
}

}  // namespace parplan
