// Attention where the ranks of the context axis hold chunks of the sequence. Each gathers the keys
// and values of all, and the gradients that it has of them go back; or these go around the ring of
// the ranks. Another engine may attend to gathered keys rank by rank. Groups of neighbours may
// exchange tokens for heads before, and back after it: what is gathered, or goes around, is then of
// one rank of each group.
#include <algorithm>
#include <array>
#include <map>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/program/segment_lowering.h"

namespace parplan {
namespace {

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
  int exchanging() const { return lowering.of.context.layout.cp_ulysses; }
  GroupKey keys() const { return keys_group(exchanging()); }
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
  emit_collective(of.lowering, InstructionKind::all_gather, of.keys(), of.type(), of.name("keys.all-gather"),
                  {{own, Access::read}, {all, Access::write}});
  return all;
}

void return_key_gradients(const Attention& of, const Value& gradients, const Value& qkv_gradient) {
  emit_collective(of.lowering, InstructionKind::reduce_scatter, of.keys(), of.type(), of.name("keys.reduce-scatter"),
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
  emit_transfer(of.lowering, InstructionKind::send, next_keys, of.type(), of.name(what), {from, Access::read});
  emit_transfer(of.lowering, InstructionKind::receive, previous_keys, of.type(), of.name(what), {to, Access::write});
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

// Gathered, in steps (torch/distributed/tensor/experimental/_attention.py of the end of 2024:
// _templated_ring_attention with _AllGatherRotater, and its backward) -----------------------------

// A ring's steps know rows and not positions: neither a window nor ALiBi.
bool attends_in_steps(const Attention& of) {
  return of.lowering.of.context.attends_in_steps && of.shape.window == 0 && of.shape.alibi == 0.0 &&
         of.shape.chunks.first == 0;
}

std::int64_t query_elements(const Attention& of) {
  return of.shape.sequence * of.shape.batch * of.shape.heads * of.shape.head_dim;
}
// The first `elements` numbers of a value, in a type.
Value first_of(const Value& value, std::int64_t elements, DataType type) {
  return {value.storage, value.offset, elements * size_of(type)};
}

// The keys and values of this rank, and with them those of all.
struct GatheredKeys {
  Value own, all;
};
GatheredKeys gather_for_steps(const Attention& of, const Value& qkv) {
  const Value own = own_keys(of, qkv);
  const GatheredKeys keys{own, scratch(of.lowering, own.bytes * of.ranks())};
  emit_collective(of.lowering, InstructionKind::all_gather, of.keys(), of.type(), of.name("keys.all-gather"),
                  {{own, Access::read}, {keys.all, Access::write}});
  return keys;
}

// The kernel of a step, whose results are its own: with the keys and values of one of the ranks.
void emit_step_apart(const Attention& of, int step, const GatheredKeys& keys,
                     const std::function<Value(const TrainingOperand&)>& value_of, const std::vector<Use>& further) {
  OpShape shape = of.shape;
  const std::int64_t holder = (shape.chunks.rank + of.ranks() - step) % of.ranks();
  shape.chunks.holder = holder;
  Value held = keys.own;
  if (step > 0) held = {keys.all.storage, keys.all.offset + holder * keys.own.bytes, keys.own.bytes};
  std::vector<Use> gathered{{held, Access::read}};
  gathered.insert(gathered.end(), further.begin(), further.end());
  emit_op(of.lowering, of.op, shape, of.label, value_of, gathered);
}

void attend_in_steps(const Attention& of, const Value& qkv) {
  const GatheredKeys keys = gather_for_steps(of, qkv);
  // An output and its log-sum-exp.
  struct Results {
    Value output, statistics;
  };
  const auto is_first = [&](const TrainingOperand& operand) {
    return operand.tensor == of.lowering.op(of.op).outputs[0];
  };
  Results last, before;
  for (const TrainingOperand& operand : of.op.operands)
    if (operand.source == OperandSource::output)
      (is_first(operand) ? last.output : last.statistics) = of.value_of(operand);
  const auto results = [&](std::int64_t bytes) {
    return Results{scratch(of.lowering, bytes), scratch(of.lowering, last.statistics.bytes)};
  };
  for (int step = 0; step < of.ranks(); ++step) {
    const Results own = results(last.output.bytes);
    const auto value_of = [&](const TrainingOperand& operand) {
      if (operand.source != OperandSource::output) return of.value_of(operand);
      return is_first(operand) ? own.output : own.statistics;
    };
    emit_step_apart(of, step, keys, value_of, {});
    if (step == 0) {
      before = own;
      continue;
    }
    OpShape shape = of.shape;
    shape.accumulate = step > 1;
    shape.second = step + 1 < of.ranks();
    const Results merged = shape.second ? results(query_elements(of) * size_of(DataType::fp32)) : last;
    emit_kernel(of.lowering, OpKind::merge_attention, shape, of.label, of.name("merge"),
                {{before.output, Access::read},
                 {before.statistics, Access::read},
                 {own.output, Access::read},
                 {own.statistics, Access::read},
                 {merged.output, Access::write},
                 {merged.statistics, Access::write}});
    before = merged;
  }
}

// Sums in fp32 to the next rank, and those of the rank before to this one.
void pass_sum(const Attention& of, const Value& from, const Value& to) {
  emit_transfer(of.lowering, InstructionKind::send, next_keys, DataType::fp32, of.name("key gradients"),
                {from, Access::read});
  emit_transfer(of.lowering, InstructionKind::receive, previous_keys, DataType::fp32, of.name("key gradients"),
                {to, Access::write});
  if (!of.lowering.of.context.steps_wait) return;
  for (Instruction& transfer : std::span(of.lowering.segment.instructions).last(2))
    transfer.stream = streams_of(Axis::cp).collectives;
}

// Adds what a step leaves to a sum in fp32, or begins it.
void add_widened(const Attention& of, const char* what, std::int64_t elements, bool begins, const Value& part,
                 const Value& sum) {
  const OpShape shape{.rows = elements, .columns = begins ? 1 : 0, .in_half = !begins && is_half(of.type())};
  emit_kernel(of.lowering, begins ? OpKind::widen : OpKind::accumulate, shape, of.label, of.name(what),
              {{part, Access::read}, {sum, begins ? Access::write : Access::update}});
  if (!begins) of.lowering.segment.instructions.back().type = DataType::fp32;
}

void narrow(const Attention& of, const char* what, std::int64_t elements, const Value& sum, const Value& to) {
  emit_kernel(of.lowering, OpKind::widen_gradient, {.rows = elements, .columns = 1}, of.label, of.name(what),
              {{sum, Access::read}, {to, Access::write}});
}

// Gradients of keys and values take as many transfers as there are ranks; each adds its part.
void attend_back_in_steps(const Attention& of, const Value& qkv, const Value& qkv_gradient) {
  const GatheredKeys keys = gather_for_steps(of, qkv);
  const std::int64_t queries = query_elements(of), elements = keys.own.bytes / size_of(of.type());
  constexpr std::int64_t wide = size_of(DataType::fp32);
  const Value query_sum = scratch(of.lowering, queries * wide);
  const Turns key_sums{scratch(of.lowering, elements * wide), scratch(of.lowering, elements * wide)};
  for (int step = 0; step < of.ranks(); ++step) {
    const Value query_part = scratch(of.lowering, qkv_gradient.bytes);
    const Value key_part = scratch(of.lowering, keys.own.bytes);
    const auto value_of = [&](const TrainingOperand& operand) {
      return operand.source == OperandSource::input_gradient ? query_part : of.value_of(operand);
    };
    emit_step_apart(of, step, keys, value_of, {{key_part, Access::write}});
    add_widened(of, "query gradients", queries, step == 0, first_of(query_part, queries, of.type()), query_sum);
    add_widened(of, "key gradients", elements, step == 0, key_part, key_sums[step % 2]);
    pass_sum(of, key_sums[step % 2], key_sums[(step + 1) % 2]);
  }
  narrow(of, "query gradients", queries, query_sum, first_of(qkv_gradient, queries, of.type()));
  const Value whole = scratch(of.lowering, keys.own.bytes);
  narrow(of, "key gradients", elements, key_sums[of.ranks() % 2], whole);
  put_gradient(of, whole, qkv_gradient);
}

bool goes_around_ring(const SegmentLowering& lowering) {
  return lowering.of.context.layout.cp_method == ContextMethod::ring;
}

void meet_keys(const Attention& of, const Value& qkv) {
  if (goes_around_ring(of.lowering)) return attend_around_ring(of, qkv);
  if (attends_in_steps(of)) return attend_in_steps(of, qkv);
  emit_op(of.lowering, of.op, of.shape, of.label, of.value_of, {{gather_keys(of, qkv), Access::read}});
}

void meet_keys_back(const Attention& of, const Value& qkv, const Value& qkv_gradient) {
  if (goes_around_ring(of.lowering)) return attend_back_around_ring(of, qkv, qkv_gradient);
  if (attends_in_steps(of)) return attend_back_in_steps(of, qkv, qkv_gradient);
  const Value keys = gather_keys(of, qkv);
  const Value gradients = scratch(of.lowering, keys.bytes);
  emit_op(of.lowering, of.op, of.shape, of.label, of.value_of, {{keys, Access::read}, {gradients, Access::write}});
  return_key_gradients(of, gradients, qkv_gradient);
}

// Tokens for heads (Jacobs et al. 2023, arXiv:2309.14509), inside groups of neighbours (Fang and
// Zhao 2024, USP, arXiv:2405.07719; Gu et al. 2024, LoongTrain, arXiv:2406.18485) ----------------

// What a rank computes of the rows of its group: its share of the heads.
OpShape with_share_of_heads(const Attention& of) {
  const int ranks = of.exchanging();
  OpShape shape = of.shape;
  shape.rows *= ranks;
  shape.sequence *= ranks;
  shape.columns /= ranks;
  shape.heads /= ranks;
  shape.kv_heads /= ranks;
  shape.chunks.first = 0;
  if (shape.alibi != 0.0) shape.first_head += shape.heads * (of.lowering.of.context.at.cp % ranks);
  PARPLAN_ASSERT(
      of.shape.kv_heads % ranks == 0 && shape.sequence == 2 * shape.chunks.size,
      fmt::format("{} rows and {} key/value heads over {} ranks", of.shape.sequence, of.shape.kv_heads, ranks));
  return shape;
}

// [rows, ranks, columns] -> [ranks, rows, columns], or back: what lies together goes to one rank.
OpShape by_rank(const Attention& of, const Value& value) {
  const std::int64_t tokens = of.shape.sequence * of.shape.batch, ranks = of.exchanging();
  return {.rows = tokens, .columns = value.bytes / size_of(of.type()) / tokens / ranks, .inner = ranks};
}

Value all_to_all(const Attention& of, const char* what, const Value& value) {
  const Value arrived = scratch(of.lowering, value.bytes);
  emit_collective(of.lowering, InstructionKind::all_to_all, exchange_group, of.type(), of.name(what),
                  {{value, Access::read}, {arrived, Access::write}});
  return arrived;
}

// Own rows of all heads become the group's rows of some heads: rank after rank, as the sequence
// has them.
Value to_heads(const Attention& of, const char* what, const Value& rows) {
  const Value packed = scratch(of.lowering, rows.bytes);
  emit_kernel(of.lowering, OpKind::transpose_blocks, by_rank(of, rows), of.label, of.name(what),
              {{rows, Access::read}, {packed, Access::write}});
  return all_to_all(of, what, packed);
}

void to_rows(const Attention& of, const char* what, const Value& heads, const Value& rows) {
  PARPLAN_ASSERT(heads.bytes == rows.bytes, fmt::format("{}: {} B, {} B", of.name(what), heads.bytes, rows.bytes));
  OpShape shape = by_rank(of, rows);
  std::swap(shape.rows, shape.inner);
  const Value arrived = all_to_all(of, what, heads);
  emit_kernel(of.lowering, OpKind::transpose_blocks, shape, of.label, of.name(what),
              {{arrived, Access::read}, {rows, Access::write}});
}

// The tensors of attention: fused queries, keys and values, and the output. Statistics are left as
// the kernel writes them, and read by its gradient alone.
bool is_output(const Attention& of, const TrainingOperand& operand) {
  return operand.tensor == of.lowering.op(of.op).outputs[0];
}

}  // namespace

void attend(SegmentLowering& lowering, const TrainingOp& op, const OpShape& shape, const Value& qkv, Label label,
            const std::function<Value(const TrainingOperand&)>& value_of) {
  const Attention of{lowering, op, shape, label, value_of};
  if (of.exchanging() == 1) return meet_keys(of, qkv);
  const OpShape share = with_share_of_heads(of);
  const Value heads = to_heads(of, "qkv.all-to-all", qkv);
  const Value output = value_of(
      *std::ranges::find_if(op.operands, [&](const TrainingOperand& operand) { return is_output(of, operand); }));
  const Value output_heads = scratch(lowering, output.bytes);
  const std::function<Value(const TrainingOperand&)> value_of_heads = [&](const TrainingOperand& operand) {
    if (operand.source == OperandSource::input) return heads;
    return is_output(of, operand) ? output_heads : value_of(operand);
  };
  meet_keys({lowering, op, share, label, value_of_heads}, heads);
  to_rows(of, "output.all-to-all", output_heads, output);
}

void attend_back(SegmentLowering& lowering, const TrainingOp& op, const OpShape& shape, const Value& qkv,
                 const Value& qkv_gradient, const std::function<Value(const TrainingOperand&)>& value_of) {
  const Attention of{lowering, op, shape, Label::compute, value_of};
  if (of.exchanging() == 1) return meet_keys_back(of, qkv, qkv_gradient);
  const OpShape share = with_share_of_heads(of);
  const Value heads = to_heads(of, "qkv.all-to-all", qkv);
  const Value gradient_heads = scratch(lowering, qkv_gradient.bytes);
  std::map<OperandSource, Value> of_output;  // its gradient, and itself
  for (const TrainingOperand& operand : op.operands)
    if (is_output(of, operand))
      of_output[operand.source] =
          to_heads(of, operand.source == OperandSource::output ? "output.all-to-all" : "output gradient.all-to-all",
                   value_of(operand));
  const std::function<Value(const TrainingOperand&)> value_of_heads = [&](const TrainingOperand& operand) {
    if (operand.source == OperandSource::input) return heads;
    if (operand.source == OperandSource::input_gradient) return gradient_heads;
    return is_output(of, operand) ? of_output.at(operand.source) : value_of(operand);
  };
  meet_keys_back({lowering, op, share, Label::compute, value_of_heads}, heads, gradient_heads);
  to_rows(of, "qkv gradient.all-to-all", gradient_heads, qkv_gradient);
}

}  // namespace parplan
