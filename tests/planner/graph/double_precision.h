#pragma once

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numbers>
#include <random>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "planner/graph/backward.h"

// A block executed in double precision, straight from the definitions of its ops, so that its
// derived backward can be compared with differences of its forward. Gradients lie where the block's
// aliases put them; storage that is about to be rewritten is poisoned first.
namespace parplan {

using Numbers = std::vector<double>;

class DoublePrecisionBlock {
 public:
  DoublePrecisionBlock(const OpGraph& graph, int block, unsigned seed)
      : graph_(graph), block_(graph.blocks[block]), training_(training_block(graph, block)) {
    values.resize(graph.tensors.size());
    gradients.resize(graph.tensors.size());
    parameter_gradients.resize(graph.tensors.size());
    std::mt19937 random(seed);
    std::uniform_real_distribution<double> uniform(-1.0, 1.0);
    for (std::size_t t = 0; t < values.size(); ++t) {
      values[t].resize(static_cast<std::size_t>(element_count(graph.tensors[t])));
      for (double& value : values[t]) value = uniform(random);
      gradients[t].assign(values[t].size(), poison);
      if (graph.tensors[t].role == TensorRole::parameter) parameter_gradients[t].assign(values[t].size(), 0.0);
    }
    weights_ = values[at(*block_.output)];
  }

  // The sum of the output's elements times random weights.
  double loss() {
    for (const TrainingOp& op : training_.forward) run(op);
    double sum = 0.0;
    for (std::size_t i = 0; i < weights_.size(); ++i) sum += weights_[i] * values[at(*block_.output)][i];
    return sum;
  }
  void backward() {
    gradients[at(root(*block_.output))] = weights_;
    for (const TrainingOp& op : training_.backward) run(op);
  }
  const Numbers& gradient(TensorId id) const { return gradients[at(root(id))]; }
  const TrainingBlock& training() const { return training_; }

  std::vector<Numbers> values;               // by tensor
  std::vector<Numbers> gradients;            // by tensor at the end of its chain of aliases
  std::vector<Numbers> parameter_gradients;  // by tensor

 private:
  static constexpr double poison = std::numeric_limits<double>::quiet_NaN();
  static std::size_t at(TensorId id) { return static_cast<std::size_t>(id); }
  TensorId root(TensorId id) const {
    while (training_.alias[at(id)] != id) id = training_.alias[at(id)];
    return id;
  }

  void run(const TrainingOp& op) {
    const Op& forward = graph_.ops[op.forward_op];
    std::vector<Numbers*> operands;
    for (const TrainingOperand& operand : op.operands) {
      if (operand.source == OperandSource::workspace) continue;
      Numbers& storage =
          operand.source == OperandSource::contribution         ? contributions_[{*operand.tensor, operand.part}]
          : operand.source == OperandSource::parameter_gradient ? parameter_gradients[at(*operand.tensor)]
          : operand.source == OperandSource::input_gradient || operand.source == OperandSource::output_gradient
              ? gradients[at(root(*operand.tensor))]
              : values[at(*operand.tensor)];
      if (operand.access == Access::write) storage.assign(values[at(*operand.tensor)].size(), poison);
      operands.push_back(&storage);
    }
    kernel(op, forward.attributes, operands, static_cast<std::size_t>(graph_.sequence));
  }

  // y[i] = f(i) for all elements, added if `adds`. All of an element is read before it is written.
  static void each(Numbers& y, bool adds, const std::function<double(std::size_t)>& f) {
    for (std::size_t i = 0; i < y.size(); ++i) y[i] = (adds ? y[i] : 0.0) + f(i);
  }
  static double gelu(double x) { return 0.5 * x * (1 + std::erf(x / std::numbers::sqrt2)); }
  static double gelu_slope(double x) {
    return 0.5 * (1 + std::erf(x / std::numbers::sqrt2)) + x * std::exp(-0.5 * x * x) / std::sqrt(2 * std::numbers::pi);
  }
  static double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

  void kernel(const TrainingOp& op, const OpShape& shape, const std::vector<Numbers*>& o, std::size_t rows) {
    const auto x = [&](std::size_t i) -> Numbers& { return *o[i]; };
    const std::size_t inner = x(0).size() / rows;
    switch (op.kind) {
      case OpKind::linear: {
        const std::size_t out = o.back()->size() / rows;
        each(*o.back(), false, [&](std::size_t i) {
          double sum = o.size() > 3 ? x(2)[i % out] : 0.0;
          for (std::size_t k = 0; k < inner; ++k) sum += x(0)[i / out * inner + k] * x(1)[i % out * inner + k];
          return sum;
        });
        break;
      }
      case OpKind::linear_input_gradient: {
        const std::size_t in = x(1).size() / inner;
        each(x(2), op.accumulate, [&](std::size_t i) {
          double sum = 0.0;
          for (std::size_t c = 0; c < inner; ++c) sum += x(0)[i / in * inner + c] * x(1)[c * in + i % in];
          return sum;
        });
        break;
      }
      case OpKind::linear_weight_gradient: {
        const std::size_t in = x(1).size() / rows;
        each(x(2), true, [&](std::size_t i) {
          double sum = 0.0;
          for (std::size_t r = 0; r < rows; ++r) sum += x(0)[r * inner + i / in] * x(1)[r * in + i % in];
          return sum;
        });
        break;
      }
      case OpKind::rms_norm:
        for (std::size_t r = 0; r < rows; ++r) {
          double square = shape.epsilon;
          for (std::size_t i = 0; i < inner; ++i)
            square += x(0)[r * inner + i] * x(0)[r * inner + i] / static_cast<double>(inner);
          x(3)[r] = 1 / std::sqrt(square);
          for (std::size_t i = 0; i < inner; ++i) x(2)[r * inner + i] = x(0)[r * inner + i] * x(3)[r] * x(1)[i];
        }
        break;
      case OpKind::rms_norm_gradient: {
        Numbers dx(x(4).size());
        for (std::size_t r = 0; r < rows; ++r) {
          double mean = 0.0;
          for (std::size_t i = r * inner; i < (r + 1) * inner; ++i) {
            mean += x(0)[i] * x(2)[i % inner] * x(1)[i] * x(3)[r] / static_cast<double>(inner);
            x(5)[i % inner] += x(0)[i] * x(1)[i] * x(3)[r];
          }
          for (std::size_t i = r * inner; i < (r + 1) * inner; ++i)
            dx[i] = x(3)[r] * (x(0)[i] * x(2)[i % inner] - x(1)[i] * x(3)[r] * mean);
        }
        each(x(4), op.accumulate, [&](std::size_t i) { return dx[i]; });
        break;
      }
      case OpKind::activation: each(x(1), false, [&](std::size_t i) { return gelu(x(0)[i]); }); break;
      case OpKind::activation_gradient:
        each(x(2), false, [&](std::size_t i) { return x(0)[i] * gelu_slope(x(1)[i]); });
        break;
      case OpKind::gate: each(x(2), false, [&](std::size_t i) { return x(0)[i] * sigmoid(x(0)[i]) * x(1)[i]; }); break;
      case OpKind::gate_gradient: {
        const Numbers dy = x(0);
        each(x(3), false, [&](std::size_t i) {
          const double s = sigmoid(x(1)[i]);
          return dy[i] * x(2)[i] * (s + x(1)[i] * s * (1 - s));
        });
        each(x(4), false, [&](std::size_t i) { return dy[i] * x(1)[i] * sigmoid(x(1)[i]); });
        break;
      }
      case OpKind::scale:
      case OpKind::scale_gradient: each(x(1), false, [&](std::size_t i) { return x(0)[i] * shape.factor; }); break;
      case OpKind::softcap:
        each(x(1), false, [&](std::size_t i) { return shape.softcap * std::tanh(x(0)[i] / shape.softcap); });
        break;
      case OpKind::softcap_gradient:
        each(x(2), false, [&](std::size_t i) { return x(0)[i] * (1 - std::pow(x(1)[i] / shape.softcap, 2)); });
        break;
      case OpKind::add: {
        const bool bias = x(o.size() - 2).size() != x(0).size();
        each(*o.back(), false, [&](std::size_t i) { return x(0)[i] + x(1)[i] + (bias ? x(2)[i % x(2).size()] : 0.0); });
        break;
      }
      case OpKind::bias_gradient:
        for (std::size_t i = 0; i < x(0).size(); ++i) x(1)[i % x(1).size()] += x(0)[i];
        break;
      case OpKind::copy: each(x(1), false, [&](std::size_t i) { return x(0)[i]; }); break;
      case OpKind::accumulate: each(x(1), true, [&](std::size_t i) { return x(0)[i]; }); break;
      default: FAIL("no definition of " << name(op.kind));
    }
  }

  const OpGraph& graph_;
  const Block& block_;
  TrainingBlock training_;
  Numbers weights_;
  std::map<std::pair<TensorId, int>, Numbers> contributions_;
};

// The largest difference, over the block's input and each of its parameters, between the derived
// gradient and the slope of the loss by central differences, relative to the largest slope of all.
inline double worst_gradient(const OpGraph& graph, int block, unsigned seed) {
  DoublePrecisionBlock runner(graph, block, seed);
  runner.loss();
  runner.backward();
  constexpr double step = 1e-5;
  double worst = 0.0, largest = 1.0;
  const auto compare = [&](TensorId id, const Numbers& found) {
    Numbers& value = runner.values[id];
    for (std::size_t i = 0; i < value.size(); ++i) {
      const double kept = value[i];
      value[i] = kept + step;
      const double above = runner.loss();
      value[i] = kept - step;
      const double below = runner.loss();
      value[i] = kept;
      const double slope = (above - below) / (2 * step);
      largest = std::max(largest, std::abs(slope));
      const double error = std::abs(found[i] - slope);
      worst = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(worst, error);
    }
  };
  const Block& of = graph.blocks[block];
  compare(*of.input, runner.gradient(*of.input));
  for (int i = of.first_op; i < of.last_op; ++i)
    for (const TensorId id : graph.ops[i].parameters)
      compare(id, runner.parameter_gradients[id]);
  return worst / largest;
}

}  // namespace parplan
