// Attention where the ranks of the context axis hold chunks of the sequence. Each gathers the keys
// and values of all, and the gradients that it has of them go back; or these go around the ring of
// the ranks.
#include <array>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/program/segment_lowering.h"

namespace parplan {
namespace {

constexpr GroupKey next_rank{Axis::cp, Members::next}, previous_rank{Axis::cp, Members::previous};

// The keys and values among the columns of a fused row, which holds for each key/value head its
// queries, the key and the value.
OpShape key_value_columns(const OpShape& attention) {
  const std::int64_t queries = attention.heads / attention.kv_heads * attention.head_dim;
  return {.rows = attention.sequence * attention.batch * attention.kv_heads,
          .columns = 2 * attention.head_dim,
          .inner = queries + 2 * attention.head_dim,
          .begin = queries};
}

// What the passes over one attention share.
struct Attention {
  SegmentLowering& lowering;
  const TrainingOp& op;
  const OpShape& shape;
  Label label{};
  const std::function<Value(const TrainingOperand&)>& value_of;

  DataType type() const { return in_memory(lowering.of.context.precision); }
  std::string name(const char* what) const { return fmt::format("{}.{}", lowering.op(op).name, what); }
  int ranks() const { return static_cast<int>(shape.chunks.ranks); }
};

// This rank's keys and values, put together.
Value own_keys(const Attention& of, const Value& qkv) {
  const OpShape columns = key_value_columns(of.shape);
  const Value own = scratch(of.lowering, columns.rows * columns.columns * size_of(of.type()));
  emit_kernel(of.lowering, OpKind::take_columns, columns, of.label, of.name("keys"),
              {{qkv, Access::read}, {own, Access::write}});
  return own;
}

// The whole gradient of this rank's keys and values, to their columns.
void put_gradient(const Attention& of, const Value& own, const Value& qkv_gradient) {
  emit_kernel(of.lowering, OpKind::put_columns, key_value_columns(of.shape), of.label, of.name("keys"),
              {{own, Access::read}, {qkv_gradient, Access::update}});
}

// Gathered keys -----------------------------------------------------------------------------------

Value gather_keys(const Attention& of, const Value& qkv) {
  const Value own = own_keys(of, qkv);
  const Value all = scratch(of.lowering, own.bytes * of.ranks());
  emit_collective(of.lowering, InstructionKind::all_gather, Axis::cp, of.type(), of.name("keys.all-gather"),
                  {{own, Access::read}, {all, Access::write}});
  return all;
}

void return_key_gradients(const Attention& of, const Value& gradients, const Value& qkv_gradient) {
  emit_collective(of.lowering, InstructionKind::reduce_scatter, Axis::cp, of.type(), of.name("keys.reduce-scatter"),
                  {{gradients, Access::update}});
  Value own = gradients;
  own.bytes /= of.ranks();
  own.offset += own.bytes * of.shape.chunks.rank;
  put_gradient(of, own, qkv_gradient);
}

// Around the ring (Liu et al. 2023, arXiv:2310.01889, section 3) ----------------------------------

// In step i, a rank attends to the keys and values of the rank i places before it, while it passes
// them on. What a transfer reads and what the one behind it writes never share room: each of all
// ranks would wait for the next one.
using Turns = std::array<Value, 2>;

void pass(const Attention& of, const char* what, const Value& from, const Value& to) {
  emit_transfer(of.lowering, InstructionKind::send, next_rank, of.type(), of.name(what), {from, Access::read});
  emit_transfer(of.lowering, InstructionKind::receive, previous_rank, of.type(), of.name(what), {to, Access::write});
}

// The kernel of a step; all but the first add to what the steps before have written.
void emit_step(const Attention& of, int step, const std::vector<Use>& gathered) {
  OpShape shape = of.shape;
  shape.chunks.holder = (shape.chunks.rank + of.ranks() - step) % of.ranks();
  shape.accumulate = step > 0;
  TrainingOp op = of.op;
  for (TrainingOperand& operand : op.operands)
    if (step > 0 && operand.access == Access::write) operand.access = Access::update;
  emit_op(of.lowering, op, shape, of.label, of.value_of, gathered);
}

void check_for_ring(const Attention& of) {
  PARPLAN_ASSERT(of.shape.window == 0 && of.shape.alibi == 0.0 && of.shape.chunks.first == 0,
                 fmt::format("{} around a ring", of.lowering.op(of.op).name));
}

void attend_around_ring(const Attention& of, const Value& qkv) {
  check_for_ring(of);
  Turns keys{own_keys(of, qkv)};
  keys[1] = scratch(of.lowering, keys[0].bytes);
  for (int step = 0; step < of.ranks(); ++step) {
    const Value held = keys[step % 2];
    if (step + 1 < of.ranks()) pass(of, "keys", held, keys[(step + 1) % 2]);
    emit_step(of, step, {{held, Access::read}});
  }
}

// The gradients of a rank's keys and values follow them, one step behind: each rank adds its own
// part and passes the sum on, and after as many steps as there are ranks it is where it belongs.
// What arrives is added behind the kernel, so that the transfer has the kernel's time.
void attend_back_around_ring(const Attention& of, const Value& qkv, const Value& qkv_gradient) {
  check_for_ring(of);
  Turns keys{own_keys(of, qkv)};
  keys[1] = scratch(of.lowering, keys[0].bytes);
  const Turns sums{scratch(of.lowering, keys[0].bytes), scratch(of.lowering, keys[0].bytes)};
  const Value part = scratch(of.lowering, keys[0].bytes);
  for (int step = 0; step < of.ranks(); ++step) {
    const Value held = keys[step % 2], sum = sums[step % 2];
    if (step + 1 < of.ranks()) pass(of, "keys", held, keys[(step + 1) % 2]);
    emit_step(of, step, {{held, Access::read}, {step == 0 ? sum : part, Access::write}});
    if (step > 0)
      emit_kernel(of.lowering, OpKind::accumulate, {.rows = part.bytes / size_of(of.type())}, of.label,
                  of.name("key gradients"), {{part, Access::read}, {sum, Access::update}});
    pass(of, "key gradients", sum, sums[(step + 1) % 2]);
  }
  put_gradient(of, sums[of.ranks() % 2], qkv_gradient);
}

bool goes_around_ring(const SegmentLowering& lowering) {
  return lowering.of.context.layout.cp_method == ContextMethod::ring;
}

}  // namespace

void attend(SegmentLowering& lowering, const TrainingOp& op, const OpShape& shape, const Value& qkv, Label label,
            const std::function<Value(const TrainingOperand&)>& value_of) {
  const Attention of{lowering, op, shape, label, value_of};
  if (goes_around_ring(lowering)) return attend_around_ring(of, qkv);
  emit_op(lowering, op, shape, label, value_of, {{gather_keys(of, qkv), Access::read}});
}

void attend_back(SegmentLowering& lowering, const TrainingOp& op, const OpShape& shape, const Value& qkv,
                 const Value& qkv_gradient, const std::function<Value(const TrainingOperand&)>& value_of) {
  const Attention of{lowering, op, shape, Label::compute, value_of};
  if (goes_around_ring(lowering)) return attend_back_around_ring(of, qkv, qkv_gradient);
  const Value keys = gather_keys(of, qkv);
  const Value gradients = scratch(lowering, keys.bytes);
  emit_op(lowering, op, shape, Label::compute, value_of, {{keys, Access::read}, {gradients, Access::write}});
  return_key_gradients(of, gradients, qkv_gradient);
}

}  // namespace parplan
