#include "planner/explain/remedies.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/cluster/host_share.h"
#include "planner/explain/larger_cluster.h"
#include "planner/explain/request_fits.h"
#include "planner/graph/engine_graph.h"
#include "planner/parallel/recompute.h"
#include "planner/program/bucket_work.h"
#include "planner/search/space.h"
#include "planner/search/space_rows.h"

namespace parplan {
namespace {

// Those of a block of parameters.
std::int64_t bytes_of_moments(const TrainingSpec& training) {
  const OptimizerState state = optimizer_state(training);
  return (int{state.first_moment} + int{state.second_moment}) *
         (state.moment_bytes(quantization_block) + state.scale_bytes(quantization_block));
}

RemedyValue remedy_value(const ChoiceValue& value) {
  if (const auto* number = std::get_if<std::int64_t>(&value)) return *number;
  if (const auto* whether = std::get_if<bool>(&value)) return *whether;
  if (const auto* list = std::get_if<std::vector<int>>(&value)) return fmt::format("{}", fmt::join(*list, ","));
  return write_value(value);
}

// The order in which the given parts of a layout are tried.
constexpr std::array remedy_choices = {
    Choice::zero_stage,   Choice::micro_batch, Choice::recompute,      Choice::tp,
    Choice::pp,           Choice::dp,          Choice::schedule,       Choice::sequence_parallel,
    Choice::stage_blocks, Choice::offload,     Choice::offload_layers,
};

// Each given part of the layout, either left to the search or, where its values have an order, as
// close as possible to the given value.
void add_layouts(const SuggestRequest& request, const std::function<void(std::optional<Remedy>)>& add) {
  for (const ChoiceRow* choice : choice_rows(remedy_choices)) {
    const SpaceRow& space = space_row_of(choice->choice);
    const std::optional<ChoiceValue>& given = request.layout[choice->choice];
    if (!given || !space.takes_memory) continue;
    std::vector<std::optional<ChoiceValue>> others{std::nullopt};
    if (space.frugaler) {
      const std::vector<ChoiceValue> frugaler = space.frugaler(request.training, *given);
      others.assign(frugaler.begin(), frugaler.end());
      // The host or its drives may be what lacks room.
      if (choice->choice == Choice::offload) others.emplace_back(std::nullopt);
    }
    for (const std::optional<ChoiceValue>& other : others) {
      const Offload* const offload = other ? std::get_if<Offload>(&*other) : nullptr;
      if (offload != nullptr && lacks_homes(request.cluster, *offload)) continue;
      SuggestRequest changed = request;
      changed.layout[choice->choice] = other;
      if (!fits(changed)) continue;
      if (std::optional<Remedy> found = remedy(changed, choice->key, "", {})) {
        const ParallelSpec& spec = found->plan.spec;
        found->instead = instead(*choice, spec, *given);
        found->value = remedy_value(choice->get(spec));
        add(std::move(found));
      }
      break;
    }
  }
}

// With as few layers of each stage as make a plan fit, where the activations of all in host memory
// do, as in `all`.
std::optional<Remedy> offloaded_layers(const SuggestRequest& request, const Remedy& all) {
  const ChoiceRow& row = row_of(Choice::offload_layers);
  const auto with = [&](std::int64_t layers) {
    SuggestRequest changed = request;
    changed.layout[Choice::offload] = Offload{.activations = Home::host};
    changed.layout[Choice::offload_layers] = layers;
    return changed;
  };
  // A number must not be more than a stage of that plan has.
  const std::int64_t most = most_layers_of_a_stage(*request.graph, all.plan.spec);
  if (most < 2 || !fits(with(most - 1))) return std::nullopt;
  const std::int64_t fewest = nearest_that_helps(0, most - 1, [&](std::int64_t layers) { return fits(with(layers)); });
  return remedy(with(fewest), row.key, phrase(row, fewest), fewest);
}

// What the search leaves out unless it is asked for. Cores have no memory but their host's.
std::optional<Remedy> offloaded(const SuggestRequest& request) {
  if (request.layout[Choice::offload] || !is_accelerator(request.cluster.backend())) return std::nullopt;
  const ChoiceRow& row = row_of(Choice::offload);
  for (const Offload& one : all_offloads()) {
    if (one == Offload{} || lacks_homes(request.cluster, one)) continue;
    SuggestRequest changed = request;
    changed.layout[Choice::offload] = one;
    if (!fits(changed)) continue;
    std::optional<Remedy> found = remedy(changed, row.key, phrase(row, one), {});
    if (found) found->value = remedy_value(one);
    // The layers behind the first keep what they save where it takes no time.
    if (found && one == Offload{.activations = Home::host})
      if (std::optional<Remedy> some = offloaded_layers(request, *found)) return some;
    return found;
  }
  return std::nullopt;
}

std::optional<Remedy> with_choice(const SuggestRequest& request, Choice choice, std::int64_t value) {
  SuggestRequest changed = request;
  changed.layout[choice] = value;
  if (!fits(changed)) return std::nullopt;
  const ChoiceRow& row = row_of(choice);
  return remedy(changed, row.key, phrase(row, value), value);
}

// Parameters that come when a block needs them take one buffer less.
std::optional<Remedy> fetched_late(const SuggestRequest& request) {
  if (!request.training.engine.has_other_prefetch || request.layout[Choice::prefetch_depth]) return std::nullopt;
  return with_choice(request, Choice::prefetch_depth, 0);
}

// Over as few ranks as make a plan fit, where the search leaves context parallelism out.
std::optional<Remedy> shared_sequences(const SuggestRequest& request) {
  const Engine& engine = request.training.engine;
  const int searched = usual_width(*request.graph, engine, request.layout).most_context_ranks;
  if (!engine.has_context || request.layout[Choice::cp] || gives_every_degree(request.layout)) return std::nullopt;
  constexpr std::int64_t most = 16;  // each takes a search
  for (std::int64_t ranks = 2; ranks <= std::min<std::int64_t>(request.cluster.devices(), most); ranks *= 2)
    if (ranks > searched)
      if (std::optional<Remedy> found = with_choice(request, Choice::cp, ranks)) return found;
  return std::nullopt;
}

std::optional<Remedy> smaller_batch(const SuggestRequest& request) {
  // In multiples of what the given parts of the layout allow.
  const ParallelSpec least = with_given(request.layout);
  const std::int64_t unit = least.mesh.batch_ranks() * least.micro_batch;
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

// Nothing is known of the shapes of its blocks, and what is learned of them serves nothing else.
SuggestRequest with_training(const SuggestRequest& request, const OpGraph& graph, TrainingSpec training) {
  SuggestRequest changed = request;
  changed.graph = &graph;
  changed.training = std::move(training);
  changed.options.shapes = nullptr;
  return changed;
}

std::optional<Remedy> shorter_sequence(const SuggestRequest& request, OpGraph& graph) {
  if (!request.graph_of_length) return std::nullopt;
  // Sequences in steps that suit kernels, and not too short to be of use.
  const std::int64_t now = request.training.sequence_length;
  const std::int64_t unit = now > 128 ? 128 : 1;
  const std::int64_t count = (now - 1) / unit;  // the longest that is shorter
  const auto with = [&](std::int64_t units) {
    graph = request.graph_of_length(units * unit);
    TrainingSpec training = request.training;
    training.sequence_length = units * unit;
    return with_training(request, graph, std::move(training));
  };
  if (count < 1 || !fits(with(1))) return std::nullopt;
  const std::int64_t fewer =
      nearest_that_helps(-1, count - 1, [&](std::int64_t less) { return fits(with(count - less)); });
  const std::int64_t tokens = (count - fewer) * unit;
  return remedy(with(count - fewer), "sequence_length",
                fmt::format("sequences of {} tokens instead of {}", tokens, now), tokens);
}

// Adapters beside the model's own parameters, which are then kept as they are: for models that have
// been trained before.
std::optional<Remedy> adapters_alone(const SuggestRequest& request) {
  if (!request.graph_of_training || request.training.lora || !request.training.trainable.all) return std::nullopt;
  TrainingSpec training = request.training;
  training.lora.emplace();
  training.trainable = {.all = false, .patterns = {}};
  const std::optional<OpGraph> graph = request.graph_of_training(training);
  if (!graph) return std::nullopt;
  const SuggestRequest changed = with_training(request, *graph, std::move(training));
  if (!fits(changed)) return std::nullopt;
  return remedy(changed, "trainable",
                fmt::format("LoRA (--trainable lora) instead of training all parameters, for fine-tuning: adapters of "
                            "width {} are trained, and nothing else of the model",
                            changed.training.lora->r),
                "lora");
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
  add(fetched_late(request));
  add(shared_sequences(request));
  add(offloaded(request));
  add(smaller_batch(request));
  OpGraph shorter;
  add(shorter_sequence(request, shorter));
  OpGraph padded;  // as parplan's own runtime pads it in half precision
  for (const DataType half : {DataType::bf16, DataType::fp16}) {
    TrainingSpec training = request.training;
    training.precision = half;
    padded = is_own(training.engine) ? as_run_by(training, *request.graph) : *request.graph;
    SuggestRequest changed = with_training(request, padded, std::move(training));
    changed.precision_of = nullptr;
    if (is_half(request.training.precision) || !has_units(request.cluster, half) || !fits(changed)) continue;
    add(remedy(changed, "precision",
               fmt::format("precision {} instead of {}", name(half), name(request.training.precision)), name(half)));
    break;
  }
  for (const Optimizer other : {Optimizer::adamw_8bit, Optimizer::sgd}) {
    TrainingSpec training = request.training;
    training.optimizer = other;
    const SuggestRequest changed = with_training(request, *request.graph, std::move(training));
    if (bytes_of_moments(changed.training) >= bytes_of_moments(request.training) || !fits(changed)) continue;
    add(remedy(changed, "optimizer",
               fmt::format("optimizer {} instead of {}, which keeps less state", name(other),
                           name(request.training.optimizer)),
               name(other)));
    break;
  }
  add(adapters_alone(request));
  return remedies;
}

}  // namespace parplan
