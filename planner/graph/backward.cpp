#include "planner/graph/backward.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

std::size_t index(int i) {
  return static_cast<std::size_t>(i);
}

// The forward tensor that an operand of a row stands for; nothing for an optional one that is
// absent.
std::optional<TrainingOperand> resolve(const Op& op, const OperandRow& operand) {
  if (operand.source == OperandSource::gathered || operand.source == OperandSource::gathered_gradient)
    return std::nullopt;
  if (operand.source == OperandSource::workspace || operand.source == OperandSource::loss_scale)
    return TrainingOperand{.source = operand.source, .access = operand.access};
  if (operand.omitted && op.attributes.*operand.omitted) return std::nullopt;
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
    case OperandSource::gathered:
    case OperandSource::gathered_gradient:
    case OperandSource::workspace:
    case OperandSource::contribution:
      tensors = &op.parameters;
      break;
  }
  if ((operand.optional || operand.omitted) && index(operand.index) >= tensors->size()) return std::nullopt;
  PARPLAN_ASSERT(index(operand.index) < tensors->size(),
                 fmt::format("{}: operand {} of {}", op.name, operand.index, tensors->size()));
  return TrainingOperand{
      .source = operand.source, .tensor = (*tensors)[index(operand.index)], .access = operand.access};
}

TrainingOp training_op(const Op& op, int forward_op, OpKind kind) {
  TrainingOp result{.kind = kind, .forward_op = forward_op, .operands = {}, .accumulate = false};
  for (const OperandRow& operand : row_of(kind).operands)
    if (const std::optional<TrainingOperand> resolved = resolve(op, operand)) result.operands.push_back(*resolved);
  return result;
}

// Whether a backward op computes anything that is needed: a bias gradient without a bias does not.
bool has_result(const TrainingOp& op, const std::vector<bool>& needs) {
  return std::any_of(op.operands.begin(), op.operands.end(), [&](const TrainingOperand& operand) {
    return (operand.source == OperandSource::input_gradient || operand.source == OperandSource::parameter_gradient) &&
           needs[index(*operand.tensor)];
  });
}

bool is_gradient(OperandSource source) {
  return source == OperandSource::output_gradient || source == OperandSource::input_gradient;
}

// One use of a tensor by an op that passes gradients on.
struct Pass {
  int forward_op = 0;
  TensorId input = 0;
  bool operator==(const Pass&) const = default;
};

class Derivation {
 public:
  // `copies` are the places where the gradient is passed on as a copy.
  Derivation(const OpGraph& graph, const Block& block, const std::vector<Pass>& copies)
      : graph_(graph), block_(block), copies_(copies), needs_(needs_gradient(graph, block)) {
    defined_.assign(graph.tensors.size(), false);
    result_.alias.resize(graph.tensors.size());
    std::iota(result_.alias.begin(), result_.alias.end(), TensorId{0});
  }

  TrainingBlock derive() {
    for (int i = block_.first_op; i < block_.last_op; ++i)
      result_.forward.push_back(training_op(graph_.ops[index(i)], i, graph_.ops[index(i)].kind));
    if (block_.output) defined_[index(*block_.output)] = true;  // it comes from the next block
    for (int i = block_.last_op; i-- > block_.first_op;) differentiate(i);
    result_.passes_gradient_on = block_.input && needs_[index(*block_.input)];
    if (result_.passes_gradient_on)
      PARPLAN_ASSERT(defined_[index(*block_.input)],
                     fmt::format("block {}: no gradient for {}", block_.name, tensor_name(*block_.input)));
    collect_saved();
    return std::move(result_);
  }

  // Gradients are added in place: from then on, the adding op included, nobody may need the
  // previous value of another tensor's gradient there. This finds the first pass of `block` (the
  // result of `derive`) that must become a copy for that reason.
  std::optional<Pass> overwritten(const TrainingBlock& block) const {
    for (std::size_t i = 0; i < block.backward.size(); ++i)
      for (const TrainingOperand& changed : block.backward[i].operands) {
        if (changed.source != OperandSource::input_gradient || changed.access != Access::update) continue;
        for (std::size_t later = i; later < block.backward.size(); ++later)
          for (const TrainingOperand& read : block.backward[later].operands)
            if (is_gradient(read.source) && root(block, *read.tensor) == root(block, *changed.tensor) &&
                !descends(block, *read.tensor, *changed.tensor)) {
              const auto pass = std::ranges::find(shared_, *changed.tensor, &Pass::input);
              PARPLAN_ASSERT(pass != shared_.end(), tensor_name(*changed.tensor));
              return *pass;
            }
      }
    return std::nullopt;
  }

 private:
  const std::string& tensor_name(TensorId id) const { return graph_.tensors[index(id)].name; }

  void differentiate(int forward_op) {
    const Op& op = graph_.ops[index(forward_op)];
    if (!needs_[index(op.outputs[0])]) return;
    const OpRow& row = row_of(op.kind);
    // This comes first: the op's own gradients read the gradient of its output, which its inputs
    // share from now on.
    for (const OpKind kind : row.gradients) {
      TrainingOp gradient = training_op(op, forward_op, kind);
      for (TrainingOperand& operand : gradient.operands)
        if (operand.source == OperandSource::input_gradient)
          operand.tensor = unquantized(graph_, block_, *operand.tensor);
      if (has_result(gradient, needs_)) add(op, without_frozen(op, std::move(gradient)));
    }
    if (row.passes_gradient) pass(op, forward_op);
  }

  // Without the gradients of frozen parameters. Where of a product's weight and bias only the bias
  // is trained, its gradient alone.
  TrainingOp without_frozen(const Op& op, TrainingOp gradient) const {
    const auto is_frozen = [&](const TrainingOperand& operand) {
      return operand.source == OperandSource::parameter_gradient && !needs_[index(*operand.tensor)];
    };
    if (const std::optional<OpKind> of_bias = row_of(gradient.kind).of_bias_alone;
        of_bias && !needs_[index(op.parameters[0])])
      return {.kind = *of_bias,
              .forward_op = gradient.forward_op,
              .operands = {{.source = OperandSource::output_gradient, .tensor = op.outputs[0], .access = Access::read},
                           {.source = OperandSource::parameter_gradient,
                            .tensor = op.parameters[1],
                            .access = Access::update},
                           {.source = OperandSource::workspace, .access = Access::update}},
              .accumulate = false};
    std::erase_if(gradient.operands, is_frozen);
    return gradient;
  }

  // An op that computes several gradients at once also writes those that nobody needs.
  void add(const Op& op, TrainingOp gradient) {
    const OpRow& row = row_of(gradient.kind);
    int unneeded = 0;
    std::vector<TrainingOperand> contributions;
    bool first = true;
    for (TrainingOperand& operand : gradient.operands) {
      if (operand.source == OperandSource::output_gradient) check_defined(op, *operand.tensor);
      if (operand.source != OperandSource::input_gradient) continue;
      if (!needs_[index(*operand.tensor)]) {
        operand.source = OperandSource::contribution;
        operand.part = --unneeded;
        continue;
      }
      if (defined_[index(*operand.tensor)] && row.accumulates && first) {
        gradient.accumulate = true;
        operand.access = Access::update;
      } else if (defined_[index(*operand.tensor)]) {
        operand.source = OperandSource::contribution;
        operand.part = static_cast<int>(contributions.size());
        contributions.push_back(operand);
      }
      defined_[index(*operand.tensor)] = true;
      first = false;
    }
    const int forward_op = gradient.forward_op;
    result_.backward.push_back(std::move(gradient));
    for (TrainingOperand& part : contributions) {
      part.access = Access::read;
      emit(OpKind::accumulate, forward_op, part, *part.tensor);
    }
  }

  // The inputs' gradients are the output's, or the output's is added to what an input already has.
  void pass(const Op& op, int forward_op) {
    const TensorId output = op.outputs[0];
    check_defined(op, output);
    for (const TensorId input : op.inputs) {
      if (!needs_[index(input)]) continue;
      const TrainingOperand passed{.source = OperandSource::output_gradient, .tensor = output, .access = Access::read};
      if (defined_[index(input)]) {
        emit(OpKind::accumulate, forward_op, passed, input);
      } else if (std::ranges::find(copies_, Pass{forward_op, input}) != copies_.end()) {
        emit(OpKind::copy, forward_op, passed, input);
      } else {
        result_.alias[index(input)] = output;
        shared_.push_back({forward_op, input});
      }
      defined_[index(input)] = true;
    }
  }

  void emit(OpKind kind, int forward_op, const TrainingOperand& from, TensorId to) {
    const bool adds = kind == OpKind::accumulate;
    result_.backward.push_back({.kind = kind,
                                .forward_op = forward_op,
                                .operands = {from,
                                             {.source = OperandSource::input_gradient,
                                              .tensor = to,
                                              .access = adds ? Access::update : Access::write}},
                                .accumulate = adds});
  }

  void check_defined(const Op& op, TensorId id) const {
    PARPLAN_ASSERT(defined_[index(id)], fmt::format("{}: no gradient for {}", op.name, tensor_name(id)));
  }

  // Whether the gradient of `id` is that of `of` with later additions, rather than one that shares
  // its storage by chance.
  static bool descends(const TrainingBlock& block, TensorId id, TensorId of) {
    while (id != of && block.alias[index(id)] != id) id = block.alias[index(id)];
    return id == of;
  }
  static TensorId root(const TrainingBlock& block, TensorId id) {
    while (block.alias[index(id)] != id) id = block.alias[index(id)];
    return id;
  }

  // In the order in which the forward reads or writes them, beginning with the block's input.
  void collect_saved() {
    std::vector<bool> wanted(graph_.tensors.size(), false);
    for (const TrainingOp& op : result_.backward)
      for (const TrainingOperand& operand : op.operands)
        if (operand.source == OperandSource::input || operand.source == OperandSource::output)
          wanted[index(*operand.tensor)] = true;
    const auto save = [&](TensorId id) {
      if (!wanted[index(id)]) return;
      wanted[index(id)] = false;
      result_.saved.push_back(id);
    };
    if (block_.input) save(*block_.input);
    for (const TrainingOp& op : result_.forward)
      for (const TrainingOperand& operand : op.operands)
        if (operand.source == OperandSource::input || operand.source == OperandSource::output) save(*operand.tensor);
  }

  const OpGraph& graph_;
  const Block& block_;
  const std::vector<Pass>& copies_;
  std::vector<bool> needs_;  // indexed by TensorId: needs_gradient
  TrainingBlock result_;
  std::vector<bool> defined_;  // indexed by TensorId: its gradient has been written
  std::vector<Pass> shared_;   // whose input shares the gradient of the op's output
};

}  // namespace

TrainingBlock training_block(const OpGraph& graph, int block) {
  // Sharing storage is tried first. Each copy removes one tensor from the sharing, so this ends.
  std::vector<Pass> copies;
  while (true) {
    Derivation derivation(graph, graph.blocks.at(index(block)), copies);
    TrainingBlock result = derivation.derive();
    const std::optional<Pass> overwritten = derivation.overwritten(result);
    if (!overwritten) return result;
    copies.push_back(*overwritten);
  }
}

}  // namespace parplan
