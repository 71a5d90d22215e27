#include "planner/search/needless_recompute.h"

namespace parplan {
namespace {

bool covers(const StageRecompute& more, const StageRecompute& less) {
  if (less.rule == Recompute::none) return true;
  const bool in_as_many = more.layers == 0 || (less.layers > 0 && less.layers <= more.layers);
  return in_as_many && recomputes_all_of(more.rule, less.rule);
}

}  // namespace

bool recomputes_more(const ParallelSpec& spec, const ParallelSpec& other) {
  ParallelSpec alike = spec;
  alike.recompute = other.recompute;
  alike.recompute_layers = other.recompute_layers;
  alike.stage_recompute = other.stage_recompute;
  if (alike != other) return false;
  bool is_more = false;
  for (int stage = 0; stage < spec.stages(); ++stage) {
    if (!covers(spec.recompute_of(stage), other.recompute_of(stage))) return false;
    is_more = is_more || spec.recompute_of(stage) != other.recompute_of(stage);
  }
  return is_more;
}

}  // namespace parplan
