#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "planner/graph/engine.h"
#include "planner/graph/tensor.h"

namespace parplan {

// adamw_8bit: AdamW whose moments are kept in 8 bits (planner/graph/dynamic_quantization.h), by the
// name that Hugging Face's Trainer has for it. muon: the matrices of layers
// (Tensor::of_layer_product) move along their orthogonalized momentum (Jordan et al. 2024, "Muon:
// An optimizer for hidden layers in neural networks"), all else by AdamW.
enum class Optimizer { adamw, adamw_8bit, adam, sgd, muon };
inline constexpr std::array all_optimizers = {Optimizer::adamw, Optimizer::adamw_8bit, Optimizer::adam, Optimizer::sgd,
                                              Optimizer::muon};
const char* name(Optimizer optimizer);
// Whether weight decay shrinks parameters beside the step (Loshchilov and Hutter 2019), instead of
// being added to gradients.
constexpr bool decouples_decay(Optimizer optimizer) {
  return optimizer == Optimizer::adamw || optimizer == Optimizer::adamw_8bit || optimizer == Optimizer::muon;
}
// Whether it has a momentum beside the betas of Adam.
constexpr bool has_momentum(Optimizer optimizer) {
  return optimizer == Optimizer::sgd || optimizer == Optimizer::muon;
}
// Muon's momentum where none is given: that of Jordan et al., of Moonlight (arXiv:2502.16982,
// section 2.2) and of torch.optim.Muon.
inline constexpr double default_muon_momentum = 0.95;

enum class LearningRateSchedule { constant, cosine, linear };
const char* name(LearningRateSchedule schedule);

// Low-rank adapters (Hu et al., arXiv:2106.09685): beside a product x W^T runs
// alpha / r (x A^T) B^T, with A of r rows and B of r columns. Names and defaults are those of
// Hugging Face's PEFT (LoraConfig).
struct Lora {
  std::int64_t r = 8;
  double alpha = 8.0;
  // Products of layers by the ends of their names ("attention.qkv", "up"); empty: all of them.
  std::vector<std::string> target_modules;
  bool operator==(const Lora&) const = default;
};

// Which of the model's own parameters are trained: all, or those that a pattern names. A pattern is
// a run of the dotted parts of a name ("head", "layers.31", "*norm.weight"), in which `*` stands
// for any letters. Adapters always are.
struct Trainable {
  bool all = true;
  std::vector<std::string> patterns;
  bool operator==(const Trainable&) const = default;
};

// How a model is trained, apart from how the work is spread.
struct TrainingSpec {
  std::int64_t global_batch = 0;     // sequences of one optimizer step
  std::int64_t sequence_length = 0;  // tokens of one sequence
  DataType precision = DataType::fp32;  // of numbers in memory, and of what computes with them
  bool fp8 = false;                     // but products of layers read them as fp8 (precision bf16)
  Optimizer optimizer = Optimizer::adamw;
  double learning_rate = 6e-4;
  LearningRateSchedule schedule = LearningRateSchedule::constant;
  std::int64_t warmup_steps = 0;
  std::int64_t decay_steps = 0;       // cosine, linear: steps until `final_learning_rate`
  double final_learning_rate = 0.0;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;
  double momentum = 0.0;              // has_momentum
  double clip_norm = 0.0;             // global gradient norm; 0: no clipping
  std::uint64_t seed = 1234;
  Engine engine = {};  // whose behaviour is predicted
  Trainable trainable = {};
  std::optional<Lora> lora = {};
  bool operator==(const TrainingSpec&) const = default;
};

// The precision as people state it: fp8 where products of layers are in it.
constexpr DataType stated_precision(const TrainingSpec& training) {
  return training.fp8 ? DataType::fp8 : training.precision;
}
constexpr void state_precision(TrainingSpec& training, DataType stated) {
  training.precision = stated == DataType::fp8 ? DataType::bf16 : stated;
  training.fp8 = stated == DataType::fp8;
}
// The types of precision that training can be stated in.
inline constexpr std::array all_precisions = {DataType::fp32, DataType::tf32, DataType::bf16, DataType::fp16,
                                              DataType::fp8};

// fp16 reaches down to 6e-8 only: gradients are computed times a loss scale that follows their size
// (LossScale in op_kind.h).
constexpr bool scales_loss(const TrainingSpec& training) { return training.precision == DataType::fp16; }
// Whether a step computes the global gradient norm: to clip, or to see that a scaled gradient
// overflowed.
constexpr bool computes_norm(const TrainingSpec& training) { return training.clip_norm > 0.0 || scales_loss(training); }

// The learning rate of step `step` (from 0): linear warm-up from 1/warmup, then the schedule.
double learning_rate_at(const TrainingSpec& training, std::int64_t step);

}  // namespace parplan
