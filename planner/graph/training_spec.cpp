#include "planner/graph/training_spec.h"

#include <cmath>
#include <numbers>

namespace parplan {

const char* name(Optimizer optimizer) {
  switch (optimizer) {
    case Optimizer::adamw: return "adamw";
    case Optimizer::adamw_8bit:
      return "adamw_8bit";
    case Optimizer::adam: return "adam";
    case Optimizer::sgd: return "sgd";
    case Optimizer::muon:
      return "muon";
  }
  return "unknown";
}

const char* name(LearningRateSchedule schedule) {
  switch (schedule) {
    case LearningRateSchedule::constant: return "constant";
    case LearningRateSchedule::cosine: return "cosine";
    case LearningRateSchedule::linear: return "linear";
  }
  return "unknown";
}

// As in Megatron-LM's optimizer_param_scheduler: warm-up steps are part of the decay steps.
double learning_rate_at(const TrainingSpec& training, std::int64_t step) {
  const double peak = training.learning_rate;
  if (step < training.warmup_steps) {
    return peak * static_cast<double>(step + 1) / static_cast<double>(training.warmup_steps);
  }
  if (training.schedule == LearningRateSchedule::constant) return peak;
  if (step >= training.decay_steps) return training.final_learning_rate;
  const double progress = static_cast<double>(step - training.warmup_steps) /
                          static_cast<double>(training.decay_steps - training.warmup_steps);
  const double share = training.schedule == LearningRateSchedule::linear
                           ? 1.0 - progress
                           : 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return training.final_learning_rate + share * (peak - training.final_learning_rate);
}

}  // namespace parplan
