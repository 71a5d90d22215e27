#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "planner/graph/backward.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "runtime/device/backend.h"

namespace parplan {

// Values by the parameter's name, in logical coordinates, row by row.
using ByParameter = std::map<std::string, std::vector<float>>;

// The results of one step of training.
struct ReferenceStep {
  double loss = 0.0;      // mean over the tokens of the global batch that have a target, before the update
  ByParameter gradients;  // of that mean, before clipping
};

// The one-rank trainer with which every plan is compared. It shares the graph, its derived backward
// and the kernels with the runtime, but no lowering: it walks the ops of the graph one after the
// other, gives every tensor a vector of its own and never reuses storage. fp32 only.
//
// The order of sums, on which equality to the bit depends: parameter gradients add up over
// micro-batches in ascending order; a parameter that several blocks use has one accumulator per
// block, which are added once, at the end of the step, in block order; the global norm adds one
// parameter after the other, in order of first use.
class Reference {
 public:
  // Parameters are zero until the caller sets them.
  Reference(const OpGraph& graph, const TrainingSpec& training);

  // Throws std::out_of_range for a name that the graph lacks.
  std::vector<float>& parameter(const std::string& name) { return parameters_.at(name); }
  const ByParameter& parameters() const { return parameters_; }

  // One step on `tokens` and `targets`, sample after sample, global_batch * sequence numbers each
  // (of images, their colours by patch, and targets); `micro_batch` samples at a time, a divisor of
  // global_batch. Updates the parameters as the training spec says.
  ReferenceStep step(std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets,
                     std::int64_t micro_batch);

  // The forward pass alone, sample after sample: logits as [sample][position][vocabulary].
  std::vector<float> logits(std::span<const std::int32_t> tokens);

 private:
  // Ids, or colours.
  std::int64_t read_by_sample() const {
    return graph_.images ? graph_.images->patches() * graph_.images->colours() : graph_.sequence;
  }
  void forward(std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets, std::int64_t micro_batch);
  void backward(std::int64_t micro_batch, double loss_scale);
  void run(const TrainingOp& op, std::size_t block, std::int64_t micro_batch, double loss_scale);
  void* operand(const TrainingOperand& operand, std::size_t block, std::int64_t micro_batch);
  // Only reads them, though kernels take mutable pointers; but Muon leaves in the place of a
  // matrix's gradient what its momentum makes of it.
  void update(ByParameter& gradients);
  void update_by_muon(const Tensor& tensor, std::vector<float>& gradient, float* norm);

  OpGraph graph_;
  TrainingSpec training_;
  std::unique_ptr<Backend> backend_;
  std::vector<TrainingBlock> blocks_;
  ByParameter parameters_, first_moments_, second_moments_;
  // Those of 8 bits, with the scales of each parameter's blocks.
  struct Codes {
    std::vector<std::uint8_t> first, second;
    std::vector<float> first_scales, second_scales;
  };
  std::map<std::string, Codes> codes_;
  std::int64_t steps_ = 0;

  std::vector<std::vector<float>> values_;                     // by TensorId
  std::vector<std::vector<float>> gradients_;                  // by TensorId at the end of the alias chain
  std::map<std::pair<TensorId, int>, std::vector<float>> contributions_;  // by tensor and part
  std::map<TensorId, std::vector<std::int32_t>> tokens_;       // tensors of role `tokens`
  std::vector<std::map<TensorId, std::vector<float>>> accumulators_;  // parameter gradients, per block
  std::vector<float> workspace_;
};

}  // namespace parplan
