#include "models/model_spec.h"

#include <fmt/format.h>

namespace parplan {

const char* name(Family family) {
  switch (family) {
    case Family::decoder: return "decoder";
    case Family::mlp: return "mlp";
  }
  return "unknown";
}

const char* name(PositionKind position) {
  switch (position) {
    case PositionKind::learned: return "learned";
    case PositionKind::rotary: return "rotary";
  }
  return "unknown";
}

const char* name(NormKind norm) {
  switch (norm) {
    case NormKind::layer_norm: return "layer_norm";
    case NormKind::rms_norm: return "rms_norm";
  }
  return "unknown";
}

const char* name(FeedForwardKind activation) {
  switch (activation) {
    case FeedForwardKind::gelu_tanh: return "gelu_tanh";
    case FeedForwardKind::gelu_erf: return "gelu_erf";
    case FeedForwardKind::relu: return "relu";
    case FeedForwardKind::gated_silu: return "gated_silu";
  }
  return "unknown";
}

std::optional<SpecProblem> find_problem(const ModelSpec& spec) {
  if (spec.family == Family::mlp) {
    if (spec.activation == FeedForwardKind::gated_silu) {
      return SpecProblem{"activation", "a plain MLP has no gate; allowed: gelu_tanh, gelu_erf, relu"};
    }
    return std::nullopt;
  }
  if (spec.heads % spec.kv_heads != 0) {
    std::vector<std::int64_t> divisors;
    for (std::int64_t d = 1; d <= spec.heads; ++d) {
      if (spec.heads % d == 0) divisors.push_back(d);
    }
    return SpecProblem{"kv_heads", fmt::format("{} query heads cannot share {} key/value heads evenly; allowed: {}",
                                               spec.heads, spec.kv_heads, fmt::join(divisors, ", "))};
  }
  if (spec.heads * spec.head_dim > largest_width) {
    return SpecProblem{"heads", fmt::format("{} heads of {} are {} wide; at most {}", spec.heads, spec.head_dim,
                                            spec.heads * spec.head_dim, largest_width)};
  }
  if (spec.position == PositionKind::rotary && spec.head_dim % 2 != 0) {
    return SpecProblem{"head_dim",
                       fmt::format("rotary positions turn pairs of numbers: the width of a head must be even, found {}",
                                   spec.head_dim)};
  }
  return std::nullopt;
}

}  // namespace parplan
