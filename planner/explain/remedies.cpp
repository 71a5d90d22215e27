#include "planner/explain/remedies.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/explain/larger_cluster.h"
#include "planner/explain/request_fits.h"
#include "planner/plan/layout_text.h"

namespace parplan {
namespace {

// Each given part of the layout, left to the search or, where parts have an order, as near as can
// be to what was given.
void add_layouts(const SuggestRequest& request, const std::function<void(std::optional<Remedy>)>& add) {
  const LayoutRequest& given = request.layout;
  if (given.zero_stage)
    for (int zero = *given.zero_stage + 1; zero <= 3; ++zero) {
      SuggestRequest changed = request;
      changed.layout.zero_stage = zero;
      if (!fits(changed)) continue;
      add(remedy(changed, "zero_stage", fmt::format("ZeRO stage {} instead of {}", zero, *given.zero_stage),
                 std::int64_t{zero}));
      break;
    }
  if (given.micro_batch)
    for (std::int64_t micro_batch = *given.micro_batch - 1; micro_batch >= 1; --micro_batch) {
      if (request.training.global_batch % micro_batch != 0) continue;
      SuggestRequest changed = request;
      changed.layout.micro_batch = micro_batch;
      if (!fits(changed)) continue;
      add(remedy(changed, "micro_batch",
                 fmt::format("micro-batches of {} instead of {}", micro_batch, *given.micro_batch), micro_batch));
      break;
    }
  const auto leave_free = [&](auto part, std::string_view of, const auto& say) {
    if (!(given.*part)) return;
    SuggestRequest changed = request;
    (changed.layout.*part).reset();
    if (!fits(changed)) return;
    std::optional<Remedy> found = remedy(changed, of, "", {});
    if (!found) return;
    std::tie(found->instead, found->value) = say(found->plan.spec);
    add(std::move(found));
  };
  using Said = std::pair<std::string, RemedyValue>;
  leave_free(&LayoutRequest::recompute, "recompute", [&](const ParallelSpec& spec) {
    return Said(fmt::format("recompute {} instead of {}", name(spec.recompute), name(*given.recompute)),
                name(spec.recompute));
  });
  leave_free(&LayoutRequest::tp, "tp", [&](const ParallelSpec& spec) {
    return Said(fmt::format("tp {} instead of {}", spec.tp(), *given.tp), std::int64_t{spec.tp()});
  });
  leave_free(&LayoutRequest::pp, "pp", [&](const ParallelSpec& spec) {
    return Said(fmt::format("pp {} instead of {}", spec.pp(), *given.pp), std::int64_t{spec.pp()});
  });
  leave_free(&LayoutRequest::dp, "dp", [&](const ParallelSpec& spec) {
    return Said(fmt::format("dp {} instead of {}", spec.dp(), *given.dp), std::int64_t{spec.dp()});
  });
  leave_free(&LayoutRequest::schedule, "schedule", [&](const ParallelSpec& spec) {
    return Said(fmt::format("schedule {} instead of {}", name(spec.schedule), name(*given.schedule)),
                name(spec.schedule));
  });
  leave_free(&LayoutRequest::sequence_parallel, "sequence_parallel", [&](const ParallelSpec& spec) {
    return Said(spec.sequence_parallel ? "with sequence parallelism" : "without sequence parallelism",
                spec.sequence_parallel);
  });
  leave_free(&LayoutRequest::stage_blocks, "stage_blocks", [&](const ParallelSpec& spec) {
    return Said(fmt::format("layers per stage {} instead of what was given", stage_layers(spec)),
                fmt::format("{}", fmt::join(spec.stage_blocks, ",")));
  });
}

std::optional<Remedy> smaller_batch(const SuggestRequest& request) {
  // In multiples of what the given parts of the layout allow.
  const std::int64_t unit = request.layout.dp.value_or(1) * request.layout.micro_batch.value_or(1);
  const std::int64_t now = request.training.global_batch / unit;
  const auto with = [&](std::int64_t count) {
    SuggestRequest changed = request;
    changed.training.global_batch = count * unit;
    return changed;
  };
  if (now < 2 || !fits(with(1))) return std::nullopt;
  const auto helps = [&](std::int64_t less) { return fits(with(now - less)); };
  std::int64_t fewer = nearest_that_helps(0, now - 1, helps);
  // A batch with fewer divisors may fit worse than a larger one.
  constexpr std::int64_t looked_at = 8;
  for (std::int64_t less = std::max<std::int64_t>(fewer - looked_at, 1); less < fewer - 1; ++less)
    if (helps(less)) fewer = less;
  return remedy(with(now - fewer), "global_batch",
                fmt::format("a global batch of {} instead of {}", (now - fewer) * unit, request.training.global_batch),
                (now - fewer) * unit);
}

std::optional<Remedy> shorter_sequence(const SuggestRequest& request, OpGraph& graph) {
  if (!request.graph_of_length) return std::nullopt;
  // Whole steps that kernels like, of a sequence of any use.
  const std::int64_t now = request.training.sequence_length;
  const std::int64_t unit = now > 128 ? 128 : 1;
  const std::int64_t count = (now - 1) / unit;  // the longest that is shorter
  const auto with = [&](std::int64_t units) {
    SuggestRequest changed = request;
    graph = request.graph_of_length(units * unit);
    changed.graph = &graph;
    changed.training.sequence_length = units * unit;
    return changed;
  };
  if (count < 1 || !fits(with(1))) return std::nullopt;
  const std::int64_t fewer =
      nearest_that_helps(-1, count - 1, [&](std::int64_t less) { return fits(with(count - less)); });
  const std::int64_t tokens = (count - fewer) * unit;
  return remedy(with(count - fewer), "sequence_length",
                fmt::format("sequences of {} tokens instead of {}", tokens, now), tokens);
}

}  // namespace

std::vector<Remedy> find_remedies(const SuggestRequest& request, const SearchResult& failed) {
  std::vector<Remedy> remedies;
  const auto add = [&](std::optional<Remedy> found) {
    if (found) remedies.push_back(std::move(*found));
  };
  add(more_memory(request, failed));
  add(more_devices(request));
  add_layouts(request, add);
  add(smaller_batch(request));
  OpGraph shorter;
  add(shorter_sequence(request, shorter));
  for (const DataType half : {DataType::bf16, DataType::fp16}) {
    SuggestRequest changed = request;
    changed.training.precision = half;
    if (is_half(request.training.precision) || !has_units(request.cluster, half) || !fits(changed)) continue;
    add(remedy(changed, "precision",
               fmt::format("precision {} instead of {}", name(half), name(request.training.precision)), name(half)));
    break;
  }
  if (request.training.optimizer != Optimizer::sgd) {
    SuggestRequest changed = request;
    changed.training.optimizer = Optimizer::sgd;
    if (fits(changed))
      add(remedy(changed, "optimizer",
                 fmt::format("optimizer sgd instead of {}, which keeps less state", name(request.training.optimizer)),
                 name(Optimizer::sgd)));
  }
  return remedies;
}

}  // namespace parplan
