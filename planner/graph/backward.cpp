#include "planner/graph/backward.h"

#include <algorithm>
#include <optional>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

std::size_t index(int i) {
  return static_cast<std::size_t>(i);
}

// The forward tensor that an operand of a row means; nothing for an optional one that is absent.
std::optional<TrainingOperand> resolve(const Op& op, const OperandRow& operand) {
  if (operand.source == OperandSource::workspace || operand.source == OperandSource::loss_scale)
    return TrainingOperand{operand.source, -1, operand.access};
  const std::vector<TensorId>* tensors = nullptr;
  switch (operand.source) {
    case OperandSource::input:
    case OperandSource::input_gradient:
      tensors = &op.inputs;
      break;
    case OperandSource::output:
    case OperandSource::output_gradient:
      tensors = &op.outputs;
      break;
    case OperandSource::parameter:
    case OperandSource::parameter_gradient:
    case OperandSource::loss_scale:
    case OperandSource::workspace:
      tensors = &op.parameters;
      break;
  }
  if (operand.optional && index(operand.index) >= tensors->size()) return std::nullopt;
  PARPLAN_ASSERT(index(operand.index) < tensors->size(),
                 fmt::format("{}: operand {} of {}", op.name, operand.index, tensors->size()));
  return TrainingOperand{operand.source, (*tensors)[index(operand.index)], operand.access};
}

TrainingOp training_op(const Op& op, int forward_op, OpKind kind) {
  TrainingOp result{.kind = kind, .forward_op = forward_op, .operands = {}, .accumulate = false};
  for (const OperandRow& operand : row_of(kind).operands)
    if (const std::optional<TrainingOperand> resolved = resolve(op, operand)) result.operands.push_back(*resolved);
  return result;
}

// What a backward op is for; a bias gradient without a bias is for nothing.
bool has_result(const TrainingOp& op) {
  return std::any_of(op.operands.begin(), op.operands.end(), [](const TrainingOperand& operand) {
    return operand.source == OperandSource::input_gradient || operand.source == OperandSource::parameter_gradient;
  });
}

bool is_gradient(OperandSource source) {
  return source == OperandSource::output_gradient || source == OperandSource::input_gradient;
}

class Derivation {
 public:
  Derivation(const OpGraph& graph, const Block& block) : graph_(graph), block_(block) {
    defined_.assign(graph.tensors.size(), false);
    for (std::size_t t = 0; t < graph.tensors.size(); ++t) result_.alias.push_back(static_cast<TensorId>(t));
  }

  TrainingBlock derive() {
    for (int i = block_.first_op; i < block_.last_op; ++i)
      result_.forward.push_back(training_op(graph_.ops[index(i)], i, graph_.ops[index(i)].kind));
    if (block_.output >= 0) defined_[index(block_.output)] = true;  // it comes from the next block
    for (int i = block_.last_op; i-- > block_.first_op;) differentiate(i);
    PARPLAN_ASSERT(block_.input < 0 || defined_[index(block_.input)],
                   fmt::format("block {}: no gradient for {}", block_.name, tensor_name(block_.input)));
    check_accumulations();
    collect_saved();
    return std::move(result_);
  }

 private:
  const std::string& tensor_name(TensorId id) const { return graph_.tensors[index(id)].name; }

  void differentiate(int forward_op) {
    const Op& op = graph_.ops[index(forward_op)];
    const OpRow& row = row_of(op.kind);
    // First: the op's own gradients read the gradient of its output, which its inputs share from now on.
    for (const OpKind kind : row.gradients) {
      TrainingOp gradient = training_op(op, forward_op, kind);
      if (has_result(gradient)) add(op, std::move(gradient));
    }
    if (row.passes_gradient) pass(op);
  }

  void add(const Op& op, TrainingOp gradient) {
    const OpRow& row = row_of(gradient.kind);
    for (TrainingOperand& operand : gradient.operands) {
      if (operand.source == OperandSource::output_gradient)
        PARPLAN_ASSERT(defined_[index(operand.tensor)],
                       fmt::format("{}: no gradient for {}", op.name, tensor_name(operand.tensor)));
      if (operand.source != OperandSource::input_gradient) continue;
      if (defined_[index(operand.tensor)]) {
        PARPLAN_ASSERT(row.accumulates, fmt::format("{}: {} cannot add to the gradient of {}", op.name, row.name,
                                                    tensor_name(operand.tensor)));
        gradient.accumulate = true;
        operand.access = Access::update;
      }
      defined_[index(operand.tensor)] = true;
    }
    result_.backward.push_back(std::move(gradient));
  }

  // The inputs' gradients are the output's. Only the last use of an input can pass it on so: an earlier one would
  // have to add.
  void pass(const Op& op) {
    const TensorId output = op.outputs[0];
    PARPLAN_ASSERT(defined_[index(output)], fmt::format("{}: no gradient for {}", op.name, tensor_name(output)));
    for (const TensorId input : op.inputs) {
      PARPLAN_ASSERT(!defined_[index(input)], fmt::format("{}: {} cannot add to the gradient of {}", op.name,
                                                          name(op.kind), tensor_name(input)));
      defined_[index(input)] = true;
      result_.alias[index(input)] = output;
    }
  }

  // Whether the gradient of `id` is the one of `of` with what has been added since, or shares its storage by chance.
  bool descends(TensorId id, TensorId of) const {
    while (id != of && result_.alias[index(id)] != id) id = result_.alias[index(id)];
    return id == of;
  }
  TensorId root(TensorId id) const {
    while (result_.alias[index(id)] != id) id = result_.alias[index(id)];
    return id;
  }

  // A gradient is added to where it lies: from then on, the adding op included, nobody may want what another tensor's
  // gradient was there before.
  void check_accumulations() const {
    for (std::size_t i = 0; i < result_.backward.size(); ++i) {
      const TrainingOp& adding = result_.backward[i];
      if (!adding.accumulate) continue;
      for (const TrainingOperand& changed : adding.operands)
        if (changed.source == OperandSource::input_gradient)
          for (std::size_t later = i; later < result_.backward.size(); ++later)
            check_readers(adding, changed, result_.backward[later]);
    }
  }
  void check_readers(const TrainingOp& adding, const TrainingOperand& changed, const TrainingOp& reading) const {
    for (const TrainingOperand& operand : reading.operands)
      PARPLAN_ASSERT(
          !is_gradient(operand.source) || root(operand.tensor) != root(changed.tensor) ||
              descends(operand.tensor, changed.tensor),
          fmt::format("{} adds to the gradient of {}, in whose storage {} still needs that of {}", forward_name(adding),
                      tensor_name(changed.tensor), forward_name(reading), tensor_name(operand.tensor)));
  }
  const std::string& forward_name(const TrainingOp& op) const { return graph_.ops[index(op.forward_op)].name; }

  // In the order in which the forward reads or writes them, which begins with the block's input.
  void collect_saved() {
    std::vector<bool> wanted(graph_.tensors.size(), false);
    for (const TrainingOp& op : result_.backward)
      for (const TrainingOperand& operand : op.operands)
        if (operand.source == OperandSource::input || operand.source == OperandSource::output)
          wanted[index(operand.tensor)] = true;
    const auto save = [&](TensorId id) {
      if (id < 0 || !wanted[index(id)]) return;
      wanted[index(id)] = false;
      result_.saved.push_back(id);
    };
    save(block_.input);
    for (const TrainingOp& op : result_.forward)
      for (const TrainingOperand& operand : op.operands)
        if (operand.source == OperandSource::input || operand.source == OperandSource::output) save(operand.tensor);
  }

  const OpGraph& graph_;
  const Block& block_;
  TrainingBlock result_;
  std::vector<bool> defined_;  // indexed by TensorId: its gradient has been written
};

}  // namespace

TrainingBlock training_block(const OpGraph& graph, int block) {
  return Derivation(graph, graph.blocks.at(index(block))).derive();
}

}  // namespace parplan
