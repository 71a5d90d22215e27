#pragma once

#include <cstdint>
#include <vector>

#include "planner/cluster/device.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/program/bucket_layout.h"
#include "planner/program/program.h"

// How Muon makes an update of a matrix's momentum (Jordan et al. 2024): all of its singular values
// become about 1, by a Newton-Schulz iteration (planner/graph/newton_schulz.h) whose kernels are
// those of matrix products that models have, too.
namespace parplan {

// The length of a step in each element beside AdamW's: with it, updates have the root mean square
// that those of AdamW have, and share its learning rate and decay (Moonlight, arXiv:2502.16982,
// section 2.2): 0.2 sqrt(max(rows, columns)), of the whole matrix.
double muon_factor(std::int64_t rows, std::int64_t columns);

// A matrix of a bucket: this rank's rectangle of it, or all of it.
struct BucketMatrix {
  ParameterPart part;
  std::int64_t rows = 0, columns = 0;  // of the whole matrix
  // Ranks of the tensor axis that hold rows, or columns, of it in their order; 1: each has all.
  int shards = 1;
  bool operator==(const BucketMatrix&) const = default;
};
// Those that `layout` begins with.
std::vector<BucketMatrix> matrices_of(const OpGraph& graph, const BucketLayout& layout, int tensor_ranks);

// Whether a parameter is one, whoever holds it.
bool is_orthogonalized(const Tensor& parameter, const TrainingSpec& training);
// Parameters of the whole model that lie in such matrices.
std::int64_t orthogonalized_elements(const OpGraph& graph, const TrainingSpec& training);

// Whether the rank at `place` of those that share out the optimizer's state orthogonalizes what the
// stage's `number`-th block with matrices has: blocks are dealt in turn, so that no rank has more
// than the first.
constexpr bool orthogonalizes_for_all(std::int64_t number, std::int64_t place, int ranks) {
  return number % ranks == place;
}

// Where an operand of these kernels lies: bytes of the scratch, or of the matrix's own part of the
// gradients, where the momentum has left the direction.
struct MatrixOperand {
  enum class Place { gradients, scratch };
  Place place{};
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
  Access access{};
};
struct MatrixInstruction {
  Instruction instruction;  // without operands; or an all-gather over the tensor axis
  std::vector<MatrixOperand> operands;
};
struct Orthogonalization {
  std::vector<MatrixInstruction> instructions;
  std::int64_t direction = 0;  // bytes from the start of the scratch: of the part, row by row
  std::int64_t scratch_bytes = 0;
};
// `precision`: of the plan, in which products are computed. `backend` decides their workspaces.
Orthogonalization orthogonalize(const BucketMatrix& matrix, DataType precision, BackendKind backend);

// The momentum of so many elements of matrices, and the update of so many elements of one.
Instruction update_momentum(std::int64_t elements, const TrainingSpec& training);
Instruction move_along(std::int64_t elements, double factor, bool decays, const TrainingSpec& training);

}  // namespace parplan
