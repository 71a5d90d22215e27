#include "planner/report/explain_rules.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include "planner/cluster/cluster.h"
#include "planner/plan/parallel_spec_text.h"
#include "planner/report/explain_words.h"

namespace parplan {
namespace {

bool has_several_kinds(const Cluster& cluster) {
  return std::ranges::any_of(
      cluster.groups, [&](const NodeGroup& group) { return group.device.name != cluster.groups.front().device.name; });
}

std::string bubble_rule(const Guide::Bubble& bubble, const ParallelSpec& spec) {
  const int virtual_stages = spec.virtual_stages;
  const std::string pipeline =
      is_v_shaped(spec.schedule)
          ? fmt::format("p = {} ranks with two stages each and m = {} micro-batches, in three equal parts each, is "
                        "idle for (p - 1) / (6 m + p - 1)",
                        bubble.stages, bubble.micro_batches)
      : runs_backward_in_parts(spec.schedule)
          ? fmt::format(
                "p = {} stages and m = {} micro-batches, in three equal parts each, is idle for (p - 1) / "
                "(3 m + p - 1)",
                bubble.stages, bubble.micro_batches)
      : virtual_stages == 1 ? fmt::format("p = {} stages and m = {} micro-batches is idle for (p - 1) / (m + p - 1)",
                                          bubble.stages, bubble.micro_batches)
                            : fmt::format(
                                  "p = {} ranks with v = {} stages each and m = {} micro-batches is idle for "
                                  "(p - 1) / (v m + p - 1)",
                                  bubble.stages, virtual_stages, bubble.micro_batches);
  std::string text = fmt::format("a pipeline of {} = {:.1f} % of its time; simulated, {:.1f} % of the step waits: ",
                                 pipeline, 100.0 * bubble.closed_form, 100.0 * bubble.simulated);
  if (bubble.micro_batches == 1)
    return text + fmt::format("with one micro-batch this is naive model parallelism, in which one stage works at a "
                              "time; 4 p = {} would leave {:.1f} %",
                              bubble.enough, 100.0 * bubble.closed_form_then);
  // Waiting beyond the closed form, which no stage exceeds by computing alone.
  const char* const others =
      bubble.simulated - bubble.closed_form > worth_a_word ? ", the rest for other stages' communication" : "";
  if (bubble.micro_batches >= bubble.enough)
    return text + fmt::format("enough, at least 4 p = {} micro-batches{}", bubble.enough, others);
  return text + fmt::format(
                    "too few; 4 p = {} micro-batches (a larger batch, smaller micro-batches or fewer data-parallel "
                    "ranks) would leave {:.1f} %",
                    bubble.enough, 100.0 * bubble.closed_form_then);
}

}  // namespace

std::string rules_of_thumb(const Plan& plan, const Reasons& reasons) {
  const Guide& found = reasons.guide;
  std::vector<std::string> lines;
  if (found.one_device) {
    const Rival& least = found.one_device->least;
    const Bytes needed = least.plan.result.memory.peak();
    const std::string kind = has_several_kinds(plan.cluster) ? device_name(found.one_device->cluster) : "";
    if (least.fits())
      lines.push_back(fmt::format(
          "one device{} is enough: {} needs {} of {} and {} a step; no more are needed to fit it",
          kind.empty() ? kind : fmt::format(" ({})", kind), layout_text(least.plan.spec), format_bytes(needed),
          format_bytes(least.capacity), format_duration(least.plan.result.time.total())));
    const double times = static_cast<double>(needed.count) / static_cast<double>(least.capacity.count);
    if (!least.fits() && least.shortage->home != Home::device)
      lines.push_back(fmt::format("one device is not enough{}: {}", kind.empty() ? kind : ", not even " + kind,
                                  words_of(*least.shortage)));
    else if (!least.fits())
      lines.push_back(fmt::format(
          "one device is not enough{}: at least {} are needed ({}), {:.{}f} times its {}; something has to be divided",
          kind.empty() ? kind : ", not even " + kind, format_bytes(needed), layout_text(least.plan.spec), times,
          times < 1.1 ? 2 : 1, format_bytes(least.capacity)));
  }
  if (found.largest_block)
    lines.push_back(
        fmt::format("parameters, gradients and optimizer state of '{}' alone take {} of {} {}: only tensor parallelism "
                    "or ZeRO divides them",
                    found.largest_block->block, format_bytes(found.largest_block->state),
                    has_several_kinds(plan.cluster) ? "the largest device's" : "a device's",
                    format_bytes(found.largest_block->capacity)));
  if (found.beyond_node) {
    const Guide::BeyondNode& beyond = *found.beyond_node;
    lines.push_back(fmt::format(
        "tensor parallelism beyond a node: rings over {} devices reach {} a device, {:.1f} times less than the {} "
        "inside a node; the best such layout{}, {}, {}",
        beyond.across_ranks, format_bandwidth(beyond.across), beyond.inside / beyond.across,
        format_bandwidth(beyond.inside), beyond.certified ? "" : " found", layout_text(beyond.best.plan.spec),
        beyond.best.fits() ? fmt::format("takes {} ({})", format_duration(beyond.best.plan.result.time.total()),
                                         signed_share(slower(beyond.best.plan.result, plan.prediction)))
                           : loss(plan, beyond.best)));
  }
  for (const Guide::ShardedPipeline& sharded : found.sharded_pipeline) {
    const StepResult& other = sharded.rival.plan.result;
    lines.push_back(fmt::format(
        "ZeRO-{} in this pipeline {} in each of {} micro-batches: a device sends {} a step for it instead of {}, "
        "{:.1f} times as much; the step takes {} ({})",
        sharded.rival.plan.spec.zero_stage,
        sharded.rival.plan.spec.zero_stage == 2 ? "reduces gradients" : "gathers parameters and reduces gradients",
        sharded.micro_batches, format_bytes(other.communication.dp), format_bytes(sharded.sent),
        static_cast<double>(other.communication.dp.count) / static_cast<double>(sharded.sent.count),
        format_duration(other.time.total()),
        sharded.rival.fits() ? signed_share(slower(other, plan.prediction)) : "and it does not fit"));
  }
  if (found.gathered)
    lines.push_back(fmt::format(
        "ZeRO-3 gathers parameters in each of {} micro-batches, forward and backward: a device sends {} a step for "
        "data parallelism; the step waits {} for it, the rest hides behind computation",
        found.gathered->micro_batches, format_bytes(found.gathered->sent), format_duration(found.gathered->exposed)));
  if (found.bubble) {
    lines.push_back(bubble_rule(*found.bubble, plan.spec));
    if (plan.search.candidates > 0)
      lines.push_back(
          "schedules were compared by simulating them, as Varuna does (arXiv:2111.04007), not by that formula");
  }
  std::string text = lines.empty() ? "" : "\nwhat the rules of the guides come to here:\n";
  for (const std::string& line : lines) text += "  - " + line + '\n';
  return text;
}

}  // namespace parplan
