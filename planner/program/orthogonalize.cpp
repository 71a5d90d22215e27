#include "planner/program/orthogonalize.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/graph/newton_schulz.h"
#include "planner/program/bucket_work.h"
#include "planner/program/lowering_state.h"
#include "planner/program/memory.h"
#include "planner/program/workspace.h"

namespace parplan {
namespace {

using Place = MatrixOperand::Place;

// The scratch, given out from its start.
class Scratch {
 public:
  MatrixOperand take(std::int64_t bytes) {
    const MatrixOperand taken{.place = Place::scratch, .offset = end_, .bytes = bytes, .access = Access::write};
    end_ += align_up(Bytes(bytes), buffer_alignment).count;
    return taken;
  }
  std::int64_t end() const { return end_; }

 private:
  std::int64_t end_ = 0;
};

MatrixOperand with(MatrixOperand operand, Access access) {
  operand.access = access;
  return operand;
}

Instruction matrix_kernel(OpKind op, OpShape shape, DataType type) {
  Instruction instruction = flat_kernel(op, shape.rows, Stream::compute, Label::optimizer, type);
  instruction.shape = shape;
  return instruction;
}

}  // namespace

double muon_factor(std::int64_t rows, std::int64_t columns) {
  constexpr double root_mean_square_of_adamw = 0.2;
  return root_mean_square_of_adamw * std::sqrt(static_cast<double>(std::max(rows, columns)));
}

std::vector<BucketMatrix> matrices_of(const OpGraph& graph, const BucketLayout& layout, int tensor_ranks) {
  std::vector<BucketMatrix> matrices;
  for (const ParameterPart& part : layout.parts) {
    if (part.bucket_offset >= layout.matrix_elements) break;
    const Tensor& tensor = graph.tensors[part.tensor];
    BucketMatrix matrix{.part = part, .rows = tensor.dims[0].size, .columns = tensor.dims[1].size, .shards = 1};
    if (part.rows != matrix.rows || part.columns != matrix.columns) matrix.shards = tensor_ranks;
    PARPLAN_ASSERT(part.copies == 1 && part.rows * part.columns * matrix.shards == matrix.rows * matrix.columns,
                   fmt::format("{} is cut into {} shards without copies", tensor.name, matrix.shards));
    matrices.push_back(matrix);
  }
  return matrices;
}

bool is_orthogonalized(const Tensor& parameter, const TrainingSpec& training) {
  return training.optimizer == Optimizer::muon && parameter.of_layer_product && !parameter.frozen;
}

std::int64_t orthogonalized_elements(const OpGraph& graph, const TrainingSpec& training) {
  std::int64_t elements = 0;
  for (const Tensor& tensor : graph.tensors)
    if (is_orthogonalized(tensor, training)) elements += element_count(tensor);
  return elements;
}

Orthogonalization orthogonalize(const BucketMatrix& matrix, DataType precision, BackendKind backend) {
  Orthogonalization result;
  Scratch scratch;
  const std::int64_t element = size_of(precision);
  const std::int64_t rows = matrix.rows, columns = matrix.columns;
  const bool cuts_rows = matrix.part.rows < rows, cuts_columns = matrix.part.columns < columns;
  const auto emit = [&](Instruction instruction, std::vector<MatrixOperand> operands) {
    if (instruction.kind == InstructionKind::kernel)
      if (const Bytes workspace = workspace_bytes(instruction.op, instruction.shape, backend); workspace > Bytes(0))
        operands.push_back(with(scratch.take(workspace.count), Access::update));
    result.instructions.push_back({std::move(instruction), std::move(operands)});
  };

  // The whole matrix in fp32: its own part of the gradients, or gathered over the tensor axis,
  // whose ranks are one behind the other then.
  constexpr std::int64_t number = size_of(DataType::fp32);
  MatrixOperand whole{.place = Place::gradients,
                      .offset = 0,
                      .bytes = matrix.part.rows * matrix.part.columns * number,
                      .access = Access::read};
  if (matrix.shards > 1) {
    const MatrixOperand gathered = scratch.take(rows * columns * number);
    const GroupKey group = all_along(Axis::tp);
    emit(communication(InstructionKind::all_gather, group, stream_of(InstructionKind::all_gather, group)),
         {whole, gathered});
    whole = with(gathered, Access::read);
  }
  if (cuts_columns) {
    const MatrixOperand side_by_side = scratch.take(whole.bytes);
    OpShape shape;
    shape.rows = matrix.shards;
    shape.inner = rows;
    shape.columns = matrix.part.columns;
    emit(matrix_kernel(OpKind::transpose_blocks, shape, DataType::fp32), {whole, side_by_side});
    whole = with(side_by_side, Access::read);
  }

  const MatrixOperand sum = scratch.take(number);
  emit(clear_gradients(1, Label::optimizer), {sum});
  emit(sum_of_squares(rows * columns), {whole, with(sum, Access::update)});
  MatrixOperand x = scratch.take(rows * columns * element), y = scratch.take(x.bytes);
  const auto read = [](MatrixOperand operand) { return with(operand, Access::read); };
  OpShape shape;
  shape.rows = rows;
  shape.columns = columns;
  emit(matrix_kernel(OpKind::normalize_matrix, shape, in_memory(precision)), {whole, read(sum), x});
  const auto transpose = [&](std::int64_t from, std::int64_t to) {
    OpShape blocks;
    blocks.rows = from;
    blocks.inner = to;
    blocks.columns = 1;
    emit(matrix_kernel(OpKind::transpose_blocks, blocks, in_memory(precision)), {read(x), y});
    std::swap(x, y);
  };
  const bool is_tall = rows > columns;
  if (is_tall) transpose(rows, columns);

  const std::int64_t m = std::min(rows, columns), n = std::max(rows, columns);
  const MatrixOperand square = scratch.take(m * m * element), factor = scratch.take(m * m * element);
  // One workspace for all products, the largest.
  OpShape of_square, of_fourth, of_next;
  of_square.rows = of_square.columns = m;
  of_square.inner = n;
  of_fourth.rows = of_fourth.columns = of_fourth.inner = m;
  of_next.rows = of_next.columns = m;  // `linear_input_gradient` multiplies with the weight [columns, inner]
  of_next.inner = n;
  const std::int64_t workspace = std::max({workspace_bytes(OpKind::linear, of_square, backend),
                                           workspace_bytes(OpKind::linear, of_fourth, backend),
                                           workspace_bytes(OpKind::linear_input_gradient, of_next, backend)})
                                     .count;
  const MatrixOperand room = scratch.take(workspace);
  const auto multiply = [&](OpKind op, const OpShape& sizes, MatrixOperand left, MatrixOperand right,
                            MatrixOperand product) {
    std::vector<MatrixOperand> operands{read(left), read(right), product};
    if (const std::int64_t bytes = workspace_bytes(op, sizes, backend).count; bytes > 0) {
      operands.push_back(with(room, Access::update));
      operands.back().bytes = bytes;
    }
    result.instructions.push_back({matrix_kernel(op, sizes, precision), std::move(operands)});
  };
  OpShape polynomial;
  polynomial.rows = polynomial.columns = m;
  for (int step = 0; step < newton_schulz_steps; ++step) {
    multiply(OpKind::linear, of_square, x, x, square);            // X X^T
    multiply(OpKind::linear, of_fourth, square, square, factor);  // A A^T, which is A A
    emit(matrix_kernel(OpKind::newton_schulz_polynomial, polynomial, in_memory(precision)),
         {read(square), with(factor, Access::update)});
    multiply(OpKind::linear_input_gradient, of_next, factor, x, y);  // B X
    std::swap(x, y);
  }
  if (is_tall) transpose(columns, rows);

  // This rank's part, row by row.
  result.direction = x.offset;
  if (cuts_rows) result.direction += matrix.part.row_begin * columns * element;
  if (cuts_columns) {
    OpShape part;
    part.rows = rows;
    part.inner = columns;
    part.columns = matrix.part.columns;
    part.begin = matrix.part.column_begin;
    MatrixOperand own = y;
    own.bytes = rows * part.columns * element;
    emit(matrix_kernel(OpKind::take_columns, part, in_memory(precision)), {read(x), own});
    result.direction = own.offset;
  }
  result.scratch_bytes = scratch.end();
  return result;
}

Instruction update_momentum(std::int64_t elements, const TrainingSpec& training) {
  Instruction instruction = flat_kernel(OpKind::muon_momentum, elements, Stream::compute, Label::optimizer);
  instruction.shape.norm = computes_norm(training);
  instruction.shape.scaled = scales_loss(training);
  return instruction;
}

Instruction move_along(std::int64_t elements, double factor, bool decays, const TrainingSpec& training) {
  Instruction instruction =
      flat_kernel(OpKind::muon, elements, Stream::compute, Label::optimizer, in_memory(training.precision));
  instruction.shape.factor = factor;
  instruction.shape.weight_decay = decays;
  instruction.shape.norm = computes_norm(training);
  instruction.shape.master = optimizer_state(training).master;
  instruction.shape.scaled = scales_loss(training);
  return instruction;
}

namespace {

// The elements of a bucket's matrices that this rank updates, from the start of its shard.
std::vector<BucketRange> matrices_in_shard(const Lowering& lowering, std::size_t index) {
  return ranges_where(lowering.rank_buckets[index].layout, lowering.program.buckets[index].units,
                      [](const BucketLayout::Run& run) { return run.is_matrix; });
}

bool has_matrices(const Lowering& lowering, std::size_t index) {
  const Bucket& bucket = lowering.program.buckets[index];
  return bucket.without_second > 0 && bucket.shard_elements > 0 && bucket.gradients;
}

// Elements of a bucket in its gradients, which no rank has a shard of.
Piece whole_gradients(const Lowering& lowering, std::size_t index, BucketRange range, Access access) {
  const std::int64_t element = gradient_bytes(lowering.job.training);
  return {*lowering.program.buckets[index].gradients, range.begin * element, range.size() * element, access};
}

void add_norm_and_scale(const Program& program, const std::optional<Piece>& master, std::vector<Piece>& pieces) {
  if (program.norm_buffer) pieces.push_back({*program.norm_buffer, 0, size_of(DataType::fp32), Access::read});
  if (master) pieces.push_back(*master);
  if (program.loss_scale_buffer) pieces.push_back({*program.loss_scale_buffer, 0, sizeof(LossScale), Access::read});
}

}  // namespace

void update_momentum(Lowering& lowering, std::size_t index) {
  if (!has_matrices(lowering, index)) return;
  const Program& program = lowering.program;
  const Bucket& bucket = program.buckets[index];
  std::vector<Instruction> instructions;
  std::vector<std::vector<Piece>> pieces;
  for (const BucketRange& range : matrices_in_shard(lowering, index)) {
    instructions.push_back(update_momentum(range.end - range.begin, lowering.job.training));
    pieces.push_back({gradient_piece(lowering, index, *bucket.gradients, range, Access::update),
                      *state_pieces(lowering, index, range).first_moment});
    add_norm_and_scale(program, std::nullopt, pieces.back());
  }
  if (!instructions.empty()) call_on_pieces(lowering, "momentum", Stream::compute, std::move(instructions), pieces);
  if (!lowering.rank_buckets[index].shards.optimizer) return;
  call_on_pieces(lowering, "data.all_gather.momentum", Stream::dp,
                 {communication(InstructionKind::all_gather, shard_group(lowering.job.layout.mesh), Stream::dp)},
                 {{gradient_piece(lowering, index, *bucket.gradients, shard_of(bucket), Access::read),
                   whole_gradients(lowering, index, {0, bucket.elements}, Access::write)}});
}

namespace {

// The elements of a matrix that this rank holds, and of these, what it updates.
BucketRange elements_of(const BucketMatrix& matrix) {
  const ParameterPart& part = matrix.part;
  return {part.bucket_offset, part.bucket_offset + part.rows * part.columns};
}
BucketRange updated_of(const BucketMatrix& matrix, const Bucket& bucket) {
  const BucketRange all = elements_of(matrix);
  const std::int64_t begin = begin_in_whole(bucket);
  return {std::max(all.begin, begin), std::min(all.end, begin + bucket.shard_elements)};
}

// Directions of elements [begin, end) of a bucket in the type of its parameters, from the start of
// its gradients on.
Piece direction_piece(const Lowering& lowering, std::size_t index, BucketRange range, Access access) {
  const std::int64_t element = size_of(lowering.job.training.precision);
  return {*lowering.program.buckets[index].gradients, range.begin * element, (range.end - range.begin) * element,
          access};
}

// The instructions of one call.
struct MatrixCall {
  std::vector<Instruction> instructions;
  std::vector<std::vector<Piece>> pieces;
  void add(Instruction instruction, std::vector<Piece> operands) {
    instructions.push_back(std::move(instruction));
    pieces.push_back(std::move(operands));
  }
};

// Where in the scratch the direction lies.
std::int64_t add_orthogonalization(const Lowering& lowering, std::size_t index, const BucketMatrix& matrix,
                                   MatrixCall& call) {
  const Orthogonalization work = orthogonalize(matrix, lowering.job.training.precision, lowering.job.backend);
  for (const MatrixInstruction& one : work.instructions) {
    std::vector<Piece> operands;
    for (const MatrixOperand& operand : one.operands)
      operands.push_back(operand.place == Place::scratch
                             ? Piece{lowering.scratch, operand.offset, operand.bytes, operand.access}
                             : whole_gradients(lowering, index, elements_of(matrix), operand.access));
    call.add(one.instruction, std::move(operands));
  }
  return work.direction;
}

void add_move(const Lowering& lowering, std::size_t index, const BucketMatrix& matrix, const Piece& direction,
              MatrixCall& call) {
  const Bucket& bucket = lowering.program.buckets[index];
  BucketRange own = updated_of(matrix, bucket);
  own.begin -= begin_in_whole(bucket);
  own.end -= begin_in_whole(bucket);
  const bool decays = lowering.graph.tensors[matrix.part.tensor].decays;
  std::vector<Piece> operands{direction, parameter_piece(lowering, index, own, Access::update)};
  add_norm_and_scale(lowering.program, state_pieces(lowering, index, own).master, operands);
  call.add(move_along(own.end - own.begin, muon_factor(matrix.rows, matrix.columns), decays, lowering.job.training),
           std::move(operands));
}

std::vector<BucketMatrix> matrices_of(const Lowering& lowering, std::size_t index) {
  return matrices_of(lowering.graph, lowering.rank_buckets[index].layout, lowering.job.layout.mesh.degree_of(Axis::tp));
}

// Whether this rank orthogonalizes the bucket's matrices for all that share out its state.
bool is_dealt(const Lowering& lowering, std::size_t index) {
  const RankBucket& bucket = lowering.rank_buckets[index];
  const int block = bucket.blocks.front();
  std::int64_t before = 0;  // of the stage, with matrices
  for (std::size_t other = 0; other < index; ++other)
    before += has_matrices(lowering, other) &&
              lowering.job.layout.stage_of_block(block) ==
                  lowering.job.layout.stage_of_block(lowering.rank_buckets[other].blocks.front());
  return orthogonalizes_for_all(before, bucket.units.front().own.range.begin / bucket.shard_elements,
                                bucket.shard_ranks);
}

}  // namespace

void orthogonalize_matrices(Lowering& lowering, std::size_t index) {
  if (!has_matrices(lowering, index)) return;
  const TrainingSpec& training = lowering.job.training;
  const Bucket& bucket = lowering.program.buckets[index];
  const DataType type = in_memory(training.precision);
  const std::int64_t element = size_of(type);
  const bool are_shared_out = lowering.rank_buckets[index].shards.optimizer;
  MatrixCall call;
  const auto clear = [&](BucketRange range) {
    if (range.begin < range.end)
      call.add(clear_gradients(range.end - range.begin, Label::optimizer, type),
               {direction_piece(lowering, index, range, Access::write)});
  };
  BufferIds frees;
  if (!are_shared_out || is_dealt(lowering, index)) {
    frees.push_back(lowering.scratch);
    std::int64_t end = 0;  // of what is written of the directions
    for (const BucketMatrix& matrix : matrices_of(lowering, index)) {
      const BucketRange all = elements_of(matrix);
      const std::int64_t direction = add_orthogonalization(lowering, index, matrix, call);
      const Piece found{lowering.scratch, direction, (all.end - all.begin) * element, Access::read};
      if (!are_shared_out) {
        add_move(lowering, index, matrix, found, call);
        continue;
      }
      // No direction is wider than a gradient: those of later matrices stay as they are.
      clear({end, all.begin});
      call.add(flat_kernel(OpKind::copy, all.end - all.begin, Stream::compute, Label::optimizer, type),
               {found, direction_piece(lowering, index, all, Access::write)});
      end = all.end;
    }
    if (are_shared_out) clear({end, bucket.elements});
  } else {
    clear({0, bucket.elements});
  }
  call_on_pieces(lowering, "orthogonalize", Stream::compute, std::move(call.instructions), call.pieces,
                 std::move(frees));
  // What one rank has found, and zeros of all others.
  if (are_shared_out)
    call_on_pieces(
        lowering, "data.reduce_scatter.directions", Stream::dp,
        {communication(InstructionKind::reduce_scatter, shard_group(lowering.job.layout.mesh), Stream::dp, type)},
        {{direction_piece(lowering, index, {0, bucket.elements}, Access::update)}});
}

void move_matrices(Lowering& lowering, std::size_t index) {
  if (!has_matrices(lowering, index) || !lowering.rank_buckets[index].shards.optimizer) return;
  MatrixCall call;
  for (const BucketMatrix& matrix : matrices_of(lowering, index)) {
    const BucketRange own = updated_of(matrix, lowering.program.buckets[index]);
    if (own.begin < own.end)
      add_move(lowering, index, matrix, direction_piece(lowering, index, own, Access::read), call);
  }
  if (!call.instructions.empty())
    call_on_pieces(lowering, "move_matrices", Stream::compute, std::move(call.instructions), call.pieces);
}

std::int64_t orthogonalization_scratch(const Lowering& lowering, const RankBucket& bucket) {
  std::int64_t bytes = 0;
  if (bucket.frozen) return bytes;
  for (const BucketMatrix& matrix :
       matrices_of(lowering.graph, bucket.layout, lowering.job.layout.mesh.degree_of(Axis::tp)))
    bytes = std::max(bytes, orthogonalize(matrix, lowering.job.training.precision, lowering.job.backend).scratch_bytes);
  return bytes;
}

}  // namespace parplan
