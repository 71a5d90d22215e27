#include "tests/numerics/reference.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/graph/local_op.h"
#include "runtime/device/cpu/cpu_backend.h"
#include "runtime/device/kernel_call.h"

namespace parplan {
namespace {

std::size_t at(TensorId tensor) { return static_cast<std::size_t>(tensor); }

std::int64_t elements(const Tensor& tensor, std::int64_t micro_batch) {
  std::int64_t count = 1;
  for (const TensorDim& dim : tensor.dims) count *= dim.dim == Dim::batch ? micro_batch : dim.size;
  return count;
}

// The tensor whose gradient storage `tensor` shares.
TensorId owner(const TrainingBlock& block, TensorId tensor) {
  while (block.alias[at(tensor)] != tensor) tensor = block.alias[at(tensor)];
  return tensor;
}

// The whole size of an op, nothing sharded.
OpShape shape_of(const OpGraph& graph, const Op& op, std::int64_t micro_batch, double loss_scale) {
  const auto width = [&](TensorId tensor) { return graph.tensors[at(tensor)].dims.back().size; };
  // Losses and their statistics have the width of the logits.
  const bool is_loss = op.kind == OpKind::cross_entropy_max || op.kind == OpKind::cross_entropy_sums ||
                       op.kind == OpKind::cross_entropy_loss;
  OpShape shape = op.attributes;
  shape.rows = micro_batch * tokens_of(first_operand(graph, op), [](const TensorDim& dim) { return dim.size; });
  shape.columns = width(is_loss ? op.inputs[0] : op.outputs[0]);
  if (is_loss) {
    shape.valid = graph.vocabulary;
    shape.scale = loss_scale;
  }
  switch (op.kind) {
    case OpKind::embedding:
      shape.valid = graph.tensors[at(op.parameters[0])].dims[0].size;
      break;
    case OpKind::linear:
      shape.inner = width(op.inputs[0]);
      shape.bias = op.parameters.size() == 2;
      break;
    case OpKind::layer_norm:
      shape.without_beta = op.parameters.size() < 2;
      break;
    case OpKind::add_position:
    case OpKind::head_norm:
    case OpKind::query_key_squares:
    case OpKind::query_key_norm:
    case OpKind::rotary:
    case OpKind::attention:
      shape.sequence = graph.sequence;
      shape.batch = micro_batch;
      shape.all_heads = shape.heads;
      break;
    case OpKind::packed_attention:
      shape.sequence = positions_of(graph, op);
      shape.batch = micro_batch;
      shape.second = op.inputs.size() == 3;
      shape.all_heads = shape.heads;
      break;
    case OpKind::append_rows:
      shape.inner = element_count(graph.tensors[at(op.parameters[0])]);
      shape.batch = micro_batch;
      break;
    case OpKind::take_rows:
    case OpKind::put_rows:
      shape.batch = micro_batch;
      break;
    case OpKind::add:
      shape.second = op.inputs.size() == 2;
      shape.bias = op.parameters.size() == 1;
      break;
    default:
      break;
  }
  return shape;
}

// Gradients of frozen parameters are no operands.
void leave_out_frozen(const OpGraph& graph, const TrainingOp& op, OpShape& shape) {
  const std::vector<TensorId>& parameters = graph.ops[op.forward_op].parameters;
  const auto is_frozen = [&](std::size_t i) {
    return i < parameters.size() && graph.tensors[at(parameters[i])].frozen;
  };
  if (op.kind == OpKind::linear_weight_gradient) shape.bias = shape.bias && !is_frozen(1);
  const bool of_norm = op.kind == OpKind::layer_norm_gradient || op.kind == OpKind::rms_norm_gradient ||
                       op.kind == OpKind::head_norm_gradient || op.kind == OpKind::query_key_norm_gradient ||
                       op.kind == OpKind::append_rows_gradient;
  if (!of_norm) return;
  shape.freezes_first = is_frozen(0);
  shape.freezes_second = is_frozen(1) || shape.without_beta;
}

// Kernels need their workspace at multiples of 64 bytes.
float* aligned(std::vector<float>& storage, Bytes bytes) {
  const std::size_t wanted = static_cast<std::size_t>(bytes.count) / sizeof(float) + 16;
  if (storage.size() < wanted) storage.resize(wanted);
  void* start = storage.data();
  std::size_t space = storage.size() * sizeof(float);
  return static_cast<float*>(std::align(64, static_cast<std::size_t>(bytes.count), start, space));
}

}  // namespace

Reference::Reference(const OpGraph& graph, const TrainingSpec& training)
    : graph_(graph), training_(training), backend_(make_cpu_backend()) {
  PARPLAN_ASSERT(training.precision == DataType::fp32, name(training.precision));
  for (std::size_t b = 0; b < graph_.blocks.size(); ++b) {
    blocks_.push_back(training_block(graph_, static_cast<int>(b)));
    std::map<TensorId, std::vector<float>>& sums = accumulators_.emplace_back();
    for (const TrainingOp& op : blocks_.back().backward)
      for (const TrainingOperand& operand : op.operands)
        if (operand.source == OperandSource::parameter_gradient)
          sums[*operand.tensor].resize(static_cast<std::size_t>(element_count(graph_.tensors[at(*operand.tensor)])));
  }
  for (const TensorId id : parplan::parameters(graph_)) {
    const Tensor& tensor = graph_.tensors[at(id)];
    const std::vector<float> zeros(static_cast<std::size_t>(element_count(tensor)), 0.0f);
    parameters_[tensor.name] = zeros;
    first_moments_[tensor.name] = zeros;
    second_moments_[tensor.name] = zeros;
  }
  values_.resize(graph_.tensors.size());
  gradients_.resize(graph_.tensors.size());
}

void* Reference::operand(const TrainingOperand& operand, std::size_t block, std::int64_t micro_batch) {
  const Tensor& tensor = graph_.tensors[at(*operand.tensor)];
  const auto sized = [&](std::vector<float>& storage) -> void* {
    storage.resize(static_cast<std::size_t>(elements(tensor, micro_batch)));
    return storage.data();
  };
  switch (operand.source) {
    case OperandSource::input:
    case OperandSource::output:
      if (tensor.role == TensorRole::tokens) return tokens_.at(*operand.tensor).data();
      return sized(values_[at(*operand.tensor)]);
    case OperandSource::output_gradient:
    case OperandSource::input_gradient:
      return sized(gradients_[at(owner(blocks_[block], *operand.tensor))]);
    case OperandSource::contribution:
      return sized(contributions_[{*operand.tensor, operand.part}]);
    case OperandSource::parameter:
      return parameters_.at(tensor.name).data();
    case OperandSource::parameter_gradient:
      return accumulators_[block].at(*operand.tensor).data();
    case OperandSource::loss_scale:
    case OperandSource::gathered:
    case OperandSource::gathered_gradient:
    case OperandSource::workspace:
      break;
  }
  PARPLAN_ASSERT(false, "a workspace or a loss scale has no tensor");
  return nullptr;
}

void Reference::run(const TrainingOp& op, std::size_t block, std::int64_t micro_batch, double loss_scale) {
  OpShape shape = shape_of(graph_, graph_.ops[op.forward_op], micro_batch, loss_scale);
  shape.accumulate = op.accumulate;
  leave_out_frozen(graph_, op, shape);
  if (op.kind == OpKind::accumulate || op.kind == OpKind::copy) {
    shape = {};
    shape.rows = elements(graph_.tensors[at(*op.operands.back().tensor)], micro_batch);
  }
  std::vector<void*> operands;
  for (const TrainingOperand& each : op.operands) {
    if (each.source == OperandSource::loss_scale) continue;  // fp32 has none
    if (each.source != OperandSource::workspace) {
      operands.push_back(operand(each, block, micro_batch));
    } else if (const auto workspace = row_of(op.kind).cpu_workspace) {
      operands.push_back(aligned(workspace_, workspace(shape)));
    }
  }
  backend_->run(0, {.kind = op.kind, .shape = shape, .operands = operands});
}

void Reference::forward(std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets,
                        std::int64_t micro_batch) {
  // Samples are stored one after the other; activations are [sequence, batch, features].
  for (const Op& op : graph_.ops) {
    for (const TensorId id : op.inputs) {
      if (graph_.tensors[at(id)].role != TensorRole::tokens) continue;
      std::vector<std::int32_t>& loaded = tokens_[id];
      loaded.clear();
      if (op.kind == OpKind::normalize_pixels) {
        const std::int64_t patches = graph_.images->patches(), colours = graph_.images->colours();
        for (std::int64_t patch = 0; patch < patches; ++patch)
          for (std::int64_t sample = 0; sample < micro_batch; ++sample)
            for (std::int64_t i = 0; i < colours; ++i)
              loaded.push_back(tokens[static_cast<std::size_t>((sample * patches + patch) * colours + i)]);
        continue;
      }
      const std::span<const std::int32_t> source = op.kind == OpKind::embedding ? tokens : targets;
      for (std::int64_t position = 0; position < graph_.tensors[at(id)].dims.front().size; ++position)
        for (std::int64_t sample = 0; sample < micro_batch; ++sample)
          loaded.push_back(source[sample * graph_.sequence + position]);
    }
  }
  for (std::size_t b = 0; b < blocks_.size(); ++b)
    for (const TrainingOp& op : blocks_[b].forward) run(op, b, micro_batch, 0.0);
}

void Reference::backward(std::int64_t micro_batch, double loss_scale) {
  for (std::size_t b = blocks_.size(); b-- > 0;) {
    for (const TrainingOp& op : blocks_[b].backward) run(op, b, micro_batch, loss_scale);
    if (!blocks_[b].passes_gradient_on) break;
    // The gradient of the activation between two blocks is stored at the end of the later block's
    // alias chain.
    const TensorId crossing = *graph_.blocks[b].input;
    const TensorId from = owner(blocks_[b], crossing), to = owner(blocks_[b - 1], crossing);
    if (from != to) gradients_[at(to)] = gradients_[at(from)];
  }
}

ReferenceStep Reference::step(std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets,
                              std::int64_t micro_batch) {
  const std::int64_t count = training_.global_batch * graph_.sequence;
  const std::int64_t read = read_by_sample();
  const std::int64_t with_target = training_.global_batch * targets_of_sample(graph_);
  PARPLAN_ASSERT(training_.global_batch % micro_batch == 0,
                 fmt::format("{} over {}", training_.global_batch, micro_batch));
  PARPLAN_ASSERT(std::ssize(tokens) == training_.global_batch * read && std::ssize(targets) == count,
                 fmt::format("{} tokens and {} targets for {}", tokens.size(), targets.size(), count));
  const TensorId loss = graph_.ops.back().outputs[0];
  values_[at(loss)].assign(1, 0.0f);
  for (auto& sums : accumulators_)
    for (auto& [id, sum] : sums) std::fill(sum.begin(), sum.end(), 0.0f);

  const auto slice_of = [&](std::span<const std::int32_t> all, std::int64_t first, std::int64_t of_sample) {
    return all.subspan(static_cast<std::size_t>(first * of_sample), static_cast<std::size_t>(micro_batch * of_sample));
  };
  for (std::int64_t first = 0; first < training_.global_batch; first += micro_batch) {
    forward(slice_of(tokens, first, read), slice_of(targets, first, graph_.sequence), micro_batch);
    backward(micro_batch, 1.0 / static_cast<double>(with_target));
  }

  ReferenceStep result;
  result.loss = static_cast<double>(values_[at(loss)][0]) / static_cast<double>(with_target);
  for (const auto& sums : accumulators_) {
    for (const auto& [id, sum] : sums) {
      const auto [found, first_use] = result.gradients.try_emplace(graph_.tensors[at(id)].name, sum);
      if (first_use) continue;
      for (std::size_t i = 0; i < sum.size(); ++i) found->second[i] += sum[i];
    }
  }
  update(result.gradients);
  return result;
}

std::vector<float> Reference::logits(std::span<const std::int32_t> tokens) {
  TensorId logits = -1;
  for (const Op& op : graph_.ops)
    if (op.kind == OpKind::cross_entropy_max) logits = op.inputs[0];
  PARPLAN_ASSERT(logits >= 0, graph_.name);
  const TensorId loss = graph_.ops.back().outputs[0];
  values_[at(loss)].assign(1, 0.0f);
  std::vector<float> all;
  const auto read = static_cast<std::size_t>(read_by_sample());
  const std::vector<std::int32_t> targets(static_cast<std::size_t>(graph_.sequence));  // their loss is of no interest
  for (std::size_t first = 0; first < tokens.size(); first += read) {
    forward(tokens.subspan(first, read), targets, 1);
    all.insert(all.end(), values_[at(logits)].begin(), values_[at(logits)].end());
  }
  return all;
}

// Jordan et al. 2024, with the factor of Moonlight (arXiv:2502.16982). Every matrix has memory of
// its own, and a tall one is transposed here.
void Reference::update_by_muon(const Tensor& tensor, std::vector<float>& gradient, float* norm) {
  const std::int64_t rows = tensor.dims[0].size, columns = tensor.dims[1].size;
  const std::int64_t m = std::min(rows, columns), n = std::max(rows, columns);
  const auto run_kernel = [&](OpKind kind, const OpShape& shape, std::vector<void*> operands) {
    if (const auto workspace = row_of(kind).cpu_workspace) operands.push_back(aligned(workspace_, workspace(shape)));
    backend_->run(0, {.kind = kind, .shape = shape, .operands = operands});
  };
  OpShape flat;
  flat.rows = rows * columns;
  OpShape with_norm = flat;
  with_norm.norm = norm != nullptr;
  std::vector<void*> operands{gradient.data(), first_moments_.at(tensor.name).data()};
  if (norm != nullptr) operands.push_back(norm);
  run_kernel(OpKind::muon_momentum, with_norm, operands);

  float sum = 0.0f;
  run_kernel(OpKind::sum_squares, flat, {gradient.data(), &sum});
  std::vector<float> x(gradient.size()), y(gradient.size());
  const auto transpose = [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t i = 0; i < from; ++i)
      for (std::int64_t j = 0; j < to; ++j)
        y[static_cast<std::size_t>(j * from + i)] = x[static_cast<std::size_t>(i * to + j)];
    std::swap(x, y);
  };
  OpShape whole, square, fourth, next;
  whole.rows = rows;
  whole.columns = columns;
  run_kernel(OpKind::normalize_matrix, whole, {gradient.data(), &sum, x.data()});
  if (rows > columns) transpose(rows, columns);
  square.rows = square.columns = fourth.rows = fourth.columns = fourth.inner = next.rows = next.columns = m;
  square.inner = next.inner = n;
  std::vector<float> a(static_cast<std::size_t>(m * m)), b(a.size());
  for (int step = 0; step < 5; ++step) {
    run_kernel(OpKind::linear, square, {x.data(), x.data(), a.data()});
    run_kernel(OpKind::linear, fourth, {a.data(), a.data(), b.data()});
    OpShape polynomial;
    polynomial.rows = polynomial.columns = m;
    run_kernel(OpKind::newton_schulz_polynomial, polynomial, {a.data(), b.data()});
    run_kernel(OpKind::linear_input_gradient, next, {b.data(), x.data(), y.data()});
    std::swap(x, y);
  }
  if (rows > columns) transpose(columns, rows);
  OpShape moved = with_norm;
  moved.weight_decay = tensor.decays;
  moved.factor = 0.2 * std::sqrt(static_cast<double>(n));
  operands = {x.data(), parameters_.at(tensor.name).data()};
  if (norm != nullptr) operands.push_back(norm);
  run_kernel(OpKind::muon, moved, operands);
}

void Reference::update(ByParameter& gradients) {
  StepScalars scalars;
  scalars.step = steps_ + 1;
  scalars.learning_rate = learning_rate_at(training_, steps_);
  scalars.beta1 = training_.beta1;
  scalars.beta2 = training_.beta2;
  scalars.epsilon = training_.epsilon;
  scalars.weight_decay = training_.weight_decay;
  scalars.decoupled_decay = decouples_decay(training_.optimizer);
  scalars.momentum = has_momentum(training_.optimizer) ? training_.momentum : 0.0;
  scalars.clip_norm = training_.clip_norm;
  const bool clips = training_.clip_norm > 0.0;
  backend_->set_scalars(scalars);
  ++steps_;

  const auto flat = [](const std::vector<float>& values) {
    OpShape shape;
    shape.rows = static_cast<std::int64_t>(values.size());
    return shape;
  };

  float norm = 0.0f;  // the sum of squares
  const std::vector<TensorId> order = parplan::parameters(graph_);
  if (clips) {
    for (const TensorId id : order) {
      if (graph_.tensors[at(id)].frozen) continue;
      std::vector<float>& gradient = gradients.at(graph_.tensors[at(id)].name);
      const std::vector<void*> operands = {gradient.data(), &norm};
      backend_->run(0, {.kind = OpKind::sum_squares, .shape = flat(gradient), .operands = operands});
    }
  }
  for (const TensorId id : order) {
    const Tensor& tensor = graph_.tensors[at(id)];
    if (tensor.frozen) continue;
    std::vector<float>& gradient = gradients.at(tensor.name);
    if (training_.optimizer == Optimizer::muon && tensor.of_layer_product) {
      update_by_muon(tensor, gradient, clips ? &norm : nullptr);
      continue;
    }
    OpShape shape = flat(gradient);
    shape.weight_decay = tensor.decays;
    shape.norm = clips;
    std::vector<void*> operands = {gradient.data(), parameters_.at(tensor.name).data()};
    const bool sgd = training_.optimizer == Optimizer::sgd;
    shape.second = sgd && scalars.momentum != 0.0;
    const bool quantized = training_.optimizer == Optimizer::adamw_8bit;
    if (quantized) {
      Codes& codes = codes_[tensor.name];
      const std::size_t blocks = (gradient.size() + 255) / 256;
      codes.first.resize(gradient.size());
      codes.second.resize(gradient.size());
      codes.first_scales.resize(blocks);
      codes.second_scales.resize(blocks);
      operands.insert(operands.end(),
                      {codes.first.data(), codes.second.data(), codes.first_scales.data(), codes.second_scales.data()});
      if (clips) operands.push_back(&norm);
      backend_->run(0, {.kind = OpKind::adamw_8bit, .shape = shape, .operands = operands});
      continue;
    }
    if (!sgd || scalars.momentum != 0.0) operands.push_back(first_moments_.at(tensor.name).data());
    if (!sgd) operands.push_back(second_moments_.at(tensor.name).data());
    if (clips) operands.push_back(&norm);
    backend_->run(0, {.kind = sgd ? OpKind::sgd : OpKind::adamw, .shape = shape, .operands = operands});
  }
}

}  // namespace parplan
