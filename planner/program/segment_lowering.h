#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "planner/graph/backward.h"
#include "planner/program/lower_block.h"
#include "planner/program/propagate_placements.h"

namespace parplan {

// A block and what its two Segments agree on.
struct BlockLowering {
  const OpGraph& graph;
  const Block& block;
  const BlockContext& context;
  TrainingBlock training;
  BlockPlacements placements;
  TensorLayout entering, residual;  // of the block's input and output; axes of one rank are Replicate
  struct Parameter {
    ParameterPart part;  // all of this rank's, from its first row on
    const char* values = nullptr;     // the bindings of its bucket and of the gradients
    const char* gradients = nullptr;  // null where it is frozen
  };
  std::map<TensorId, Parameter> parameters;
  std::vector<SavedTensor> saved;  // where the forward leaves tensors for the backward
  bool repeats_all = false;        // the backward begins with all of the forward again
};

// Whether an op of TrainingBlock::backward belongs to the second part of a backward: the weight
// gradient of a product.
bool is_for_weights(const TrainingOp& op);

// Where the first part of a backward leaves what the second reads, as bytes of the binding "left
// for weights".
struct LeftForWeights {
  std::vector<SavedTensor> values;  // that no forward saved for it
  struct Gradient {
    TensorId root = 0;  // TrainingBlock::alias
    TensorLayout layout;
    int changes = 0;  // of the gradient at the root, before
    std::int64_t offset = 0;
    std::int64_t bytes = 0;
    bool is_last = false;  // nothing changes it later
  };
  std::vector<Gradient> gradients;
  std::map<int, std::size_t> gradient_of;  // by position of the op in TrainingBlock::backward
  std::int64_t bytes = 0;
};
LeftForWeights left_for_weights(const BlockLowering& lowering);  // segment_backward.cpp

// Whether a saved tensor is the block's input in a buffer of its own.
inline bool is_apart(const BlockLowering& lowering, TensorId id) {
  return lowering.context.input_apart && lowering.block.input == id;
}

// A run of bytes that instructions of a Segment read and write.
struct Storage {
  std::string binding;  // one of `binding::`
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};

// A value: a storage, or the chunk of it that a reduce-scatter left on this rank.
struct Value {
  int storage = 0;  // index into SegmentLowering::storages
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};
// The values of tensors, or of their gradients, in each layout that exists.
using Values = std::map<std::pair<TensorId, TensorLayout>, Value>;

struct Use {
  Value value;
  Access access{};
};

// A Segment under construction, which the passes share. Each pass is a function over it, in the
// file that its comment names.
struct SegmentLowering {
  explicit SegmentLowering(const BlockLowering& block) : of(block) {}

  const BlockLowering& of;
  Segment segment;
  std::vector<Storage> storages;
  Values forward;
  Values gradients;  // by the tensor at the end of the chain of aliases (TrainingBlock::alias)
  // Where the Segment is a part of a backward: what the first part leaves.
  const LeftForWeights* left = nullptr;
  // By the storage of rows that have gone around a ring: this rank's own ones, which are not there
  // before somebody asks for all of them (complete).
  struct MissingRows {
    Value rows, place;
  };
  std::map<int, MissingRows> missing;

  // Until `bind`, operands name places: each binding but scratch is one place, and so is each
  // storage in scratch.
  std::vector<Storage> places;
  std::vector<bool> temporary;  // per place: whether it is scratch
  std::map<std::pair<std::string, std::optional<int>>, int> place_of;  // by binding, and by storage for scratch

  const Tensor& tensor(TensorId id) const { return of.graph.tensors[static_cast<std::size_t>(id)]; }
  const Op& op(const TrainingOp& training) const { return of.graph.ops[training.forward_op]; }
  const TensorLayout& produced(TensorId id) const { return of.placements.produced[id]; }
  const TensorLayout& canonical(TensorId id) const { return of.placements.canonical[id]; }
  // The layouts that the op's inputs need.
  const std::vector<TensorLayout>& wanted(const TrainingOp& training) const {
    return of.placements.inputs[training.forward_op - of.block.first_op];
  }
};

// The passes, in the order in which `lower_block` calls them.

// What a run of the forward executes, and where it leaves results.
struct ForwardRun {
  std::vector<bool> needed;  // by op of TrainingBlock::forward
  // Tensors that something else reads later: no op writes over them.
  std::vector<TensorId> preserved;
  // Whether saved tensors and the block's output go to their bindings; otherwise everything is
  // scratch.
  bool delivers = true;
  Label label = Label::compute;
};
void run_forward(SegmentLowering& lowering, const ForwardRun& run);  // segment_forward.cpp
// Reads what is saved, and what `run_forward` has computed again.
enum class BackwardPart { whole, inputs, weights };
void run_backward(SegmentLowering& lowering, BackwardPart part);  // segment_backward.cpp
// Fuses kernels, packs scratch, binds operands and orders streams.
Segment finish(SegmentLowering lowering, std::string name);          // segment_bindings.cpp

// Values ----------------------------------------------------------------------- segment_values.cpp

// A value of its own: `bytes` at `offset` of a binding.
Value add_value(SegmentLowering& lowering, const char* to, std::int64_t offset, std::int64_t bytes);
Value scratch(SegmentLowering& lowering, std::int64_t bytes);
// Where the forward left a tensor; none if it is not saved.
std::optional<Value> saved_value(SegmentLowering& lowering, TensorId id);
// Where the first part of a backward leaves a forward tensor; none if it does not.
std::optional<Value> left_value(SegmentLowering& lowering, TensorId id);
Value parameter(SegmentLowering& lowering, TensorId id);
Value parameter_gradient(SegmentLowering& lowering, TensorId id);
// The part of a parameter (or of its gradient) that an op computes with: its own heads' where heads
// are cut and the parameter is not.
Value own_part(const SegmentLowering& lowering, const TrainingOp& op, TensorId id, const Value& whole);

// A send to a neighbour around an axis, or a receive from it, on the axis's streams.
void emit_transfer(SegmentLowering& lowering, InstructionKind kind, GroupKey neighbour, DataType type,
                   std::string name, const Use& use);
// A collective over a group, or all ranks along an axis, on the axis's stream.
void emit_collective(SegmentLowering& lowering, InstructionKind kind, GroupKey group, DataType type, std::string name,
                     const std::vector<Use>& uses);
void emit_collective(SegmentLowering& lowering, InstructionKind kind, Axis axis, DataType type, std::string name,
                     const std::vector<Use>& uses);
// Puts what the ranks of the data axis have of a tensor one behind the other on the first of them,
// in `whole`, which is empty on the others.
Value gather_on_first(SegmentLowering& lowering, TensorId id, const Value& own, const Value& whole);
// The value of a tensor in `wanted`, redistributed axis by axis if it exists only in another
// layout. `values` is one of the lowering's, or holds parts of sums.
Value materialise(SegmentLowering& lowering, Values& values, TensorId id, const TensorLayout& wanted);
// Brings a value to offset 0 of a binding; copies it where it is somewhere else.
void deliver(SegmentLowering& lowering, Values& values, TensorId id, const TensorLayout& wanted, const char* to,
             Label label);

void emit_kernel(SegmentLowering& lowering, OpKind op, const OpShape& shape, Label label, std::string name,
                 const std::vector<Use>& uses);
// `type`: by which `from` is counted in elements.
void emit_copy(SegmentLowering& lowering, DataType type, Label label, std::string name, const Value& from,
               const Value& to);
// The kernel of a training op. `value_of` is asked for every operand but workspace and loss scale;
// `gathered`: the operands of its row that no tensor stands for.
void emit_op(SegmentLowering& lowering, const TrainingOp& op, const OpShape& shape, Label label,
             const std::function<Value(const TrainingOperand&)>& value_of, const std::vector<Use>& gathered = {});

// Slices of products ---------------------------------------------------------- segment_slices.cpp

// The rows of all ranks of the tensor axis that an op reads and that go around their ring beside
// its product.
struct ArrivingRows {
  Value own;    // this rank's
  Value whole;  // where the others' arrive, with room for the own ones
  std::string what;
};
// Those of the value that `materialise` would gather; nothing where it is there, or where the op's
// rows do not go around.
std::optional<ArrivingRows> arriving_rows(SegmentLowering& lowering, const TrainingOp& op, Values& values, TensorId id,
                                          const TensorLayout& wanted);
// Brings this rank's own rows to the others that have arrived, if `value` is such and lacks them.
void complete(SegmentLowering& lowering, TensorId id, const Value& value);
// The product by slices of these rows; `value_of` as for emit_op.
void multiply_arriving(SegmentLowering& lowering, const TrainingOp& op, const OpShape& shape, Label label,
                       const ArrivingRows& rows, const std::function<Value(const TrainingOperand&)>& value_of);
// Whether slices of a product are summed around the ring, and their product: the value of its
// output, with the ranks' parts summed, where this rank keeps it.
bool sums_around_ring(const SegmentLowering& lowering, const TrainingOp& op, TensorId output);
Value multiply_and_sum(SegmentLowering& lowering, const TrainingOp& op, const OpShape& shape, Label label,
                       TensorId output, const std::function<Value(const TrainingOperand&)>& value_of);

// Context parallelism -------------------------------------------------------- segment_context.cpp

// The kernels of attention, or of its gradient, where the ranks of the context axis hold chunks of
// the sequence, with what brings them the keys and values of all ranks. `qkv`: the fused value;
// `value_of` as for emit_op.
void attend(SegmentLowering& lowering, const TrainingOp& op, const OpShape& shape, const Value& qkv, Label label,
            const std::function<Value(const TrainingOperand&)>& value_of);
// With the gradients of keys and values on their way back, added up, to the parts of `qkv_gradient`
// that stand for this rank's.
void attend_back(SegmentLowering& lowering, const TrainingOp& op, const OpShape& shape, const Value& qkv,
                 const Value& qkv_gradient, const std::function<Value(const TrainingOperand&)>& value_of);

}  // namespace parplan
