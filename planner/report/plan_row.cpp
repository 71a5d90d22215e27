#include "planner/report/plan_row.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <variant>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/base/error.h"
#include "planner/cluster/host_share.h"
#include "planner/cluster/price_and_power.h"
#include "planner/plan/layout_choices.h"
#include "planner/plan/memory_verdict.h"
#include "planner/report/error_band.h"

namespace parplan {
namespace {

using Subject = RowSubject;

Json seconds(Seconds value) { return json_number(value.value); }
Json bytes(Bytes value) { return Json(value.count); }

// A choice's value: numbers and flags as such, orders and named values as text.
Json value_of(const ChoiceRow& choice, const Subject& subject) {
  const ChoiceValue value = choice.get(subject.spec);
  if (const auto* number = std::get_if<std::int64_t>(&value)) return Json(*number);
  if (const auto* whether = std::get_if<bool>(&value)) return Json(*whether);
  return Json(write_value(value));
}
template <Choice choice>
Json chosen(const Subject& subject) {
  return value_of(row_of(choice), subject);
}
// The same for a choice that layouts may not have: `otherwise` where there is no row of that key.
Json chosen(std::string_view key, const Subject& subject, Json otherwise) {
  for (const ChoiceRow& choice : choice_rows())
    if (choice.key == key) return value_of(choice, subject);
  return otherwise;
}

// An end of the band in which published runs were.
Json step_time_in(const Subject& subject, double StepBand::*end) {
  if (!subject.predicted) return nullptr;
  const std::optional<StepBand> band = step_band(subject.training.engine, subject.cluster, subject.spec.mesh.size());
  return band ? seconds(subject.result.time.total() * ((*band).*end)) : Json(nullptr);
}

constexpr std::array column_rows = {
    Column{"rank", "", "place among the ranked plans, from 1", [](const Subject& s) { return Json(s.rank); }},
    Column{"plan_id", "", "eight hexadecimal digits that depend on model, training and layout",
           [](const Subject& s) { return Json(plan_id(s.model, s.training, s.spec)); }},
    Column{"devices", "", "devices that the plan uses", [](const Subject& s) { return Json(s.spec.mesh.size()); }},
    Column{"engine", "", "whose behaviour is predicted", [](const Subject& s) { return Json(s.training.engine.name); }},
    Column{"precision", "", "number format of computation",
           [](const Subject& s) { return Json(name(stated_precision(s.training))); }},
    Column{"global_batch", "sequences", "sequences of one optimizer step",
           [](const Subject& s) { return Json(s.training.global_batch); }},
    Column{"dp", "", "data-parallel degree", chosen<Choice::dp>},
    Column{"tp", "", "tensor-parallel degree", chosen<Choice::tp>},
    Column{"pp", "", "pipeline stages", chosen<Choice::pp>},
    Column{"cp", "", "context-parallel degree", chosen<Choice::cp>},
    Column{"ep", "", "expert-parallel degree", [](const Subject& s) { return Json(s.spec.mesh.degree.ep); }},
    Column{"mesh_order", "", "mesh axes from the outermost to the one of neighbouring devices",
           chosen<Choice::mesh_order>},
    Column{"zero_stage", "", "0: nothing, 1: optimizer state, 2: and gradients, 3: and parameters are sharded over dp",
           chosen<Choice::zero_stage>},
    Column{"micro_batch", "sequences", "sequences of one micro-batch",
           chosen<Choice::micro_batch>},
    Column{"micro_batches", "", "micro-batches that each data-parallel rank runs in a step",
           [](const Subject& s) { return Json(micro_batches(s.spec, s.training)); }},
    Column{"schedule", "", "order of the pipeline's tasks",
           chosen<Choice::schedule>},
    Column{"virtual_stages", "", "model chunks per pipeline stage",
           chosen<Choice::virtual_stages>},
    Column{"stage_layers", "", "layers of each stage, first stage first; embedding and head are not counted",
           [](const Subject& s) { return Json(stage_layers(s.spec)); }},
    Column{"sequence_parallel", "", "activations between tensor-parallel regions are sharded along the sequence",
           chosen<Choice::sequence_parallel>},
    Column{"cp_method", "", "how context parallelism exchanges keys and values",
           [](const Subject& s) { return s.spec.cp() > 1 ? chosen<Choice::cp_method>(s) : Json(nullptr); }},
    Column{"recompute", "", "activations that the backward pass computes again",
           chosen<Choice::recompute>},
    Column{"offload", "", "what is kept in host memory or on NVMe",
           [](const Subject& s) { return chosen("offload", s, "none"); }},
    Column{"step_time_s", "s", "one optimizer step",
           [](const Subject& s) { return seconds(s.result.time.total()); }},
    Column{"tokens_per_s", "1/s", "tokens trained on, all devices",
           [](const Subject& s) { return json_number(tokens_per_second(s)); }},
    Column{"tokens_per_s_per_device", "1/s", "tokens trained on, per device that the plan uses",
           [](const Subject& s) { return json_number(tokens_per_second(s) / s.spec.mesh.size()); }},
    Column{"model_tflops_per_device", "TFLOP/s",
           "model FLOPs (matrix products, causal attention counted whole, backward twice forward, nothing recomputed) "
           "per device",
           [](const Subject& s) { return json_number(model_rate_per_device(s).value * 1e-12); }},
    Column{"mfu", "", "model_tflops_per_device over the device's peak at the precision; null where no peak is known",
           [](const Subject& s) { return model_flops_utilization(s); }},
    Column{"time_compute_s", "s",
           "forward and backward computation, on the stage that computes longest, as all parts of the time",
           [](const Subject& s) { return seconds(s.result.time.compute); }},
    Column{"time_recompute_s", "s", "computation repeated in the backward pass",
           [](const Subject& s) { return seconds(s.result.time.recompute); }},
    Column{"time_tp_exposed_s", "s", "tensor-parallel communication that computation waits for",
           [](const Subject& s) { return seconds(s.result.time.exposed.tp); }},
    Column{"time_cp_exposed_s", "s", "context-parallel communication that computation waits for",
           [](const Subject& s) { return seconds(s.result.time.exposed.cp); }},
    Column{"time_ep_exposed_s", "s", "expert-parallel communication that computation waits for",
           [](const Subject& s) { return seconds(s.result.time.exposed.ep); }},
    Column{"time_dp_exposed_s", "s", "data-parallel communication that computation waits for",
           [](const Subject& s) { return seconds(s.result.time.exposed.dp); }},
    Column{"time_pp_exposed_s", "s", "transfers between stages that computation waits for",
           [](const Subject& s) { return seconds(s.result.time.exposed.pp); }},
    Column{"time_bubble_s", "s", "nothing runs: waiting for other ranks, until the last of them ends",
           [](const Subject& s) { return seconds(s.result.time.bubble); }},
    Column{"time_optimizer_s", "s", "gradient norm and parameter update",
           [](const Subject& s) { return seconds(s.result.time.optimizer); }},
    Column{"time_offload_s", "s", "copies to and from host memory and NVMe that computation waits for",
           [](const Subject& s) { return seconds(s.result.time.offload); }},
    Column{"memory_capacity_bytes", "B", "memory of one device that may be used",
           [](const Subject& s) { return bytes(memory_capacity(s.cluster, s.spec, s.result)); }},
    Column{"memory_peak_bytes", "B", "most memory in use at once, on the worst rank",
           [](const Subject& s) { return bytes(s.result.memory.peak()); }},
    Column{"memory_parameters_bytes", "B", "of the peak: parameters",
           [](const Subject& s) { return bytes(s.result.memory.parameters); }},
    Column{"memory_gradients_bytes", "B", "of the peak: gradients",
           [](const Subject& s) { return bytes(s.result.memory.gradients); }},
    Column{"memory_optimizer_bytes", "B", "of the peak: optimizer state and master copies",
           [](const Subject& s) { return bytes(s.result.memory.optimizer); }},
    Column{"memory_activations_bytes", "B", "of the peak: what the backward pass needs of the forward pass",
           [](const Subject& s) { return bytes(s.result.memory.activations); }},
    Column{"memory_buffers_bytes", "B", "of the peak: workspaces, gathered parameters, communication",
           [](const Subject& s) { return bytes(s.result.memory.buffers); }},
    Column{"memory_overhead_bytes", "B", "of the peak: what libraries take outside the arena",
           [](const Subject& s) { return bytes(s.result.memory.overhead); }},
    Column{"communication_tp_bytes", "B", "logical bytes that a device sends in a step for tensor parallelism",
           [](const Subject& s) { return bytes(s.result.communication.tp); }},
    Column{"communication_dp_bytes", "B", "logical bytes that a device sends in a step for data parallelism",
           [](const Subject& s) { return bytes(s.result.communication.dp); }},
    Column{"communication_pp_bytes", "B", "logical bytes that a device sends in a step between stages",
           [](const Subject& s) { return bytes(s.result.communication.pp); }},
    Column{"communication_cp_bytes", "B", "logical bytes that a device sends in a step for context parallelism",
           [](const Subject& s) { return bytes(s.result.communication.cp); }},
    Column{"communication_ep_bytes", "B", "logical bytes that a device sends in a step for expert parallelism",
           [](const Subject& s) { return bytes(s.result.communication.ep); }},
    Column{"cost_per_step", "currency", "price of one step of the devices that the plan uses; null without prices",
           [](const Subject& s) {
             const std::optional<double> price = hourly_price(s.cluster, s.spec.mesh.size());
             return price ? json_number(*price / 3600.0 * s.result.time.total().value) : Json(nullptr);
           }},
    Column{"currency", "", "currency of prices; null without prices",
           [](const Subject& s) {
             const std::optional<std::string> known = currency(s.cluster);
             return known && hourly_price(s.cluster, s.spec.mesh.size()) ? Json(*known) : Json(nullptr);
           }},
    Column{"stage_recompute", "", "recompute of each stage, where it is per_stage; else null",
           [](const Subject& s) {
             return s.spec.recompute == Recompute::per_stage ? Json(stage_recompute(s.spec)) : Json(nullptr);
           }},
    Column{"tied_gradients", "",
           "accumulators of a tied parameter's gradients on a rank: one (together), or one for each use (apart)",
           chosen<Choice::tied_gradients>},
    Column{"input_slots", "",
           "buffers of a stage for arriving activations: one for each micro-batch in flight, or one more",
           chosen<Choice::input_slots>},
    Column{"micro_batch_group", "",
           "micro-batches that an interleaved pipeline runs through one stage of a rank before the next; else null",
           [](const Subject& s) {
             return s.spec.schedule == ScheduleKind::interleaved ? Json(shape_of(s.spec, s.training).group)
                                                                 : Json(nullptr);
           }},
    Column{"dp_shard", "", "data-parallel ranks over which ZeRO shards: all, or groups of so many; null with ZeRO-0",
           [](const Subject& s) { return s.spec.zero_stage > 0 ? Json(s.spec.shard_ranks()) : Json(nullptr); }},
    Column{"step_time_low_s", "s",
           "step_time_s times the low end of the band of measured over predicted steps in published runs "
           "(accuracy.md); null where measured, and without accelerators",
           [](const Subject& s) { return step_time_in(s, &StepBand::low); }},
    Column{"step_time_high_s", "s", "the same with the high end: 8 of 10 runs lie between",
           [](const Subject& s) { return step_time_in(s, &StepBand::high); }},
    Column{"memory_reserve_bytes", "B", "of the peak: what an engine's allocator holds beyond tensors in use",
           [](const Subject& s) { return bytes(s.result.memory.reserve); }},
    Column{"fit", "",
           "fits; tight (less than the headroom is free, or the allocator must give back what it keeps); does_not_fit",
           [](const Subject& s) { return Json(name(verdict_of(s))); }},
    Column{"usable_bytes", "B", "the capacity less the headroom that plans leave free",
           [](const Subject& s) {
             return bytes(usable_memory(memory_capacity(s.cluster, s.spec, s.result), s.cluster.memory_headroom));
           }},
    Column{"allocated_bytes", "B", "of the peak: tensors (torch.cuda.max_memory_allocated)",
           [](const Subject& s) { return bytes(s.result.memory.arena()); }},
    Column{"reserved_bytes", "B", "of the peak: with what the allocator keeps (torch.cuda.max_memory_reserved)",
           [](const Subject& s) { return bytes(s.result.memory.arena() + s.result.memory.reserve); }},
    Column{"told_from_first", "",
           "whether the step, or by the objective cost its cost, differs from that of the plan ranked first by more "
           "than 8 of 10 pairs of published runs do from their predictions (accuracy.md); null for the first, where "
           "measured, and without accelerators",
           [](const Subject& s) {
             const std::optional<bool> told = told_from_first(s);
             return told ? Json(*told) : Json(nullptr);
           }},
    Column{"memory_host_bytes", "B", "what the worst rank keeps in its host's memory, beside the peak",
           [](const Subject& s) { return bytes(s.result.memory.host); }},
    Column{"dp_method", "", "whether gradients are reduced on all data-parallel ranks or collected by a master",
           [](const Subject& s) { return s.spec.dp() > 1 ? chosen<Choice::dp_method>(s) : Json(nullptr); }},
    Column{"tp_overlap", "", "whether tokens go around the ring of tensor-parallel ranks beside slices of products",
           [](const Subject& s) { return s.spec.sequence_parallel ? chosen<Choice::tp_overlap>(s) : Json(nullptr); }},
    Column{"recompute_layers", "",
           "layers of each stage that recompute, the first ones; null where all do, or per stage",
           [](const Subject& s) {
             return s.spec.recompute_layers > 0 ? Json(s.spec.recompute_layers) : Json(nullptr);
           }},
    Column{"replica_micro_batches", "", "micro-batches of each data-parallel replica, where these are unlike",
           [](const Subject& s) {
             const std::vector<int>& replicas = s.spec.replica_micro_batches;
             return replicas.empty() ? Json(nullptr) : Json(fmt::format("{}", fmt::join(replicas, ",")));
           }},
    Column{"cp_ulysses", "",
           "context-parallel ranks that exchange tokens for heads in groups of so many; 1: no groups; else null",
           [](const Subject& s) { return s.spec.cp() > 1 ? chosen<Choice::cp_ulysses>(s) : Json(nullptr); }},
    Column{"prefetch_depth", "",
           "blocks ahead of the one that computes whose parameters are gathered; null where none are",
           [](const Subject& s) {
             return brings_parameters(s.spec) ? chosen<Choice::prefetch_depth>(s) : Json(nullptr);
           }},
    Column{"memory_nvme_bytes", "B", "what the worst rank keeps in its file on NVMe",
           [](const Subject& s) { return bytes(s.result.memory.nvme); }},
    Column{"gather_unit", "",
           "what one collective gathers of parameters: those of a block, or one parameter; null where none does",
           [](const Subject& s) {
             return gathers_parameters(s.spec) ? chosen<Choice::gather_unit>(s) : Json(nullptr);
           }},
    Column{"offload_layers", "",
           "layers of each stage whose activations leave the device, the first ones; null where all do, or none",
           [](const Subject& s) { return s.spec.offload_layers > 0 ? Json(s.spec.offload_layers) : Json(nullptr); }},
    Column{"node_groups", "", "the nodes that the plan uses, group by group in its order",
           [](const Subject& s) { return Json(describe_groups(first_nodes(s.cluster, s.spec.mesh.size()))); }},
};

}  // namespace

std::optional<bool> told_from_first(const RowSubject& subject) {
  if (!subject.predicted || subject.first == nullptr) return std::nullopt;
  const std::vector<RankedPlan>& others = subject.first->alternatives;
  const std::optional<PairSpread> pairs = pair_spread(*subject.first, others);
  if (!pairs) return std::nullopt;
  return are_apart(*subject.first, others[static_cast<std::size_t>(subject.rank - 2)], *pairs);
}

MemoryVerdict verdict_of(const RowSubject& subject) {
  if (shortage_of(subject)) return MemoryVerdict::does_not_fit;
  const std::uint64_t groups = groups_of_fullest(subject.cluster, subject.spec, subject.result);
  return memory_verdict(subject.result.memory, memory_capacity(subject.cluster, groups),
                        subject.cluster.memory_headroom);
}

std::optional<Shortage> shortage_of(const RowSubject& subject) {
  return shortage_of(subject.cluster, subject.spec, subject.result);
}

RowSubject subject_of(const Plan& plan) { return subject_of(plan, 1); }

RowSubject subject_of(const Plan& plan, int rank) {
  PARPLAN_ASSERT(rank >= 1 && rank <= static_cast<int>(plan.alternatives.size()) + 1,
                 fmt::format("rank {} of {} plans", rank, plan.alternatives.size() + 1));
  if (rank == 1)
    return {.rank = 1,
            .model = plan.model,
            .cluster = plan.cluster,
            .training = plan.training,
            .spec = plan.spec,
            .result = plan.prediction};
  const RankedPlan& alternative = plan.alternatives[rank - 2];
  return {.rank = rank,
          .model = plan.model,
          .cluster = cluster_of(plan, alternative),
          .training = training_of(plan, alternative),
          .spec = alternative.spec,
          .result = alternative.result,
          .first = &plan};
}

RowSubject subject_of(const Plan& plan, const StepResult& measured) {
  return {.rank = 1,
          .model = plan.model,
          .cluster = plan.cluster,
          .training = plan.training,
          .spec = plan.spec,
          .result = measured,
          .predicted = false};
}

std::span<const Column> columns() { return column_rows; }

Json row(const RowSubject& subject) {
  Json object = Json::object();
  for (const Column& column : columns()) object[std::string(column.key)] = column.value(subject);
  return object;
}

double tokens_per_second(const RowSubject& subject) {
  return static_cast<double>(subject.training.global_batch) * static_cast<double>(subject.training.sequence_length) /
         subject.result.time.total().value;
}

FlopsPerSecond model_rate_per_device(const RowSubject& subject) {
  return subject.model.flops_per_sample * static_cast<double>(subject.training.global_batch) /
         subject.result.time.total() / static_cast<double>(subject.spec.mesh.size());
}

Json model_flops_utilization(const RowSubject& subject) {
  const FlopsPerSecond most = peak(subject.cluster, subject.spec.mesh.size(), stated_precision(subject.training));
  return most.value > 0.0 ? json_number(model_rate_per_device(subject) / most) : Json(nullptr);
}

}  // namespace parplan
