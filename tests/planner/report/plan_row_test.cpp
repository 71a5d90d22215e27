#include "planner/report/plan_row.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "planner/report/csv.h"
#include "planner/report/error_band.h"
#include "planner/report/part_names.h"
#include "planner/report/plan_table.h"
#include "tests/planner/report/small_plan.h"

namespace parplan {
namespace {

using testing::small_plan;

// The schema's keys, in its order.
const std::vector<std::string> contract_keys = {"rank",
                                                "plan_id",
                                                "devices",
                                                "engine",
                                                "precision",
                                                "global_batch",
                                                "dp",
                                                "tp",
                                                "pp",
                                                "cp",
                                                "ep",
                                                "mesh_order",
                                                "zero_stage",
                                                "micro_batch",
                                                "micro_batches",
                                                "schedule",
                                                "virtual_stages",
                                                "stage_layers",
                                                "sequence_parallel",
                                                "cp_method",
                                                "recompute",
                                                "offload",
                                                "step_time_s",
                                                "tokens_per_s",
                                                "tokens_per_s_per_device",
                                                "model_tflops_per_device",
                                                "mfu",
                                                "time_compute_s",
                                                "time_recompute_s",
                                                "time_tp_exposed_s",
                                                "time_cp_exposed_s",
                                                "time_ep_exposed_s",
                                                "time_dp_exposed_s",
                                                "time_pp_exposed_s",
                                                "time_bubble_s",
                                                "time_optimizer_s",
                                                "time_offload_s",
                                                "memory_capacity_bytes",
                                                "memory_peak_bytes",
                                                "memory_parameters_bytes",
                                                "memory_gradients_bytes",
                                                "memory_optimizer_bytes",
                                                "memory_activations_bytes",
                                                "memory_buffers_bytes",
                                                "memory_overhead_bytes",
                                                "communication_tp_bytes",
                                                "communication_dp_bytes",
                                                "communication_pp_bytes",
                                                "communication_cp_bytes",
                                                "communication_ep_bytes",
                                                "cost_per_step",
                                                "currency",
                                                "stage_recompute",
                                                "tied_gradients",
                                                "input_slots",
                                                "micro_batch_group",
                                                "dp_shard",
                                                "step_time_low_s",
                                                "step_time_high_s",
                                                "memory_reserve_bytes",
                                                "fit",
                                                "usable_bytes",
                                                "allocated_bytes",
                                                "reserved_bytes",
                                                "told_from_first",
                                                "memory_host_bytes",
                                                "dp_method",
                                                "tp_overlap",
                                                "recompute_layers",
                                                "replica_micro_batches",
                                                "cp_ulysses",
                                                "prefetch_depth",
                                                "memory_nvme_bytes",
                                                "gather_unit",
                                                "offload_layers",
                                                "node_groups"};  // the last twenty-four are additions

TEST_CASE("columns are the contract's keys in the contract's order") {
  std::vector<std::string> keys;
  for (const Column& column : columns()) {
    keys.push_back(std::string(column.key));
    CHECK_FALSE(column.description.empty());
  }
  CHECK(keys == contract_keys);
}

TEST_CASE("units agree with what keys say") {
  for (const Column& column : columns()) {
    INFO(column.key);
    if (column.key.ends_with("_bytes")) CHECK(column.unit == "B");
    if (column.key.starts_with("time_") || column.key == "step_time_s") CHECK(column.unit == "s");
  }
}

TEST_CASE("a row holds every value of a small plan") {
  const Plan plan = small_plan();
  // 4 sequences of 5 tokens in 10 s on 4 devices; 4 x 500 FLOPs over 10 s and 4 devices is 50
  // FLOP/s, half of the peak.
  const Json expected = Json::parse(R"({
    "rank": 1, "plan_id": "", "devices": 4, "engine": "parplan", "precision": "fp32", "global_batch": 4, "dp": 2, "tp": 1, "pp": 2,
    "cp": 1, "ep": 1, "mesh_order": "pp-dp-tp", "zero_stage": 1, "micro_batch": 1, "micro_batches": 2, "schedule": "1f1b",
    "virtual_stages": 1, "stage_layers": "2,1", "sequence_parallel": false, "cp_method": null, "recompute": "none", "offload": "none",
    "step_time_s": 10.0, "tokens_per_s": 2.0, "tokens_per_s_per_device": 0.5, "model_tflops_per_device": 5e-11, "mfu": 0.5,
    "time_compute_s": 6.0, "time_recompute_s": 0.0, "time_tp_exposed_s": 0.0, "time_cp_exposed_s": 0.0, "time_ep_exposed_s": 0.0,
    "time_dp_exposed_s": 1.0, "time_pp_exposed_s": 0.5, "time_bubble_s": 2.0, "time_optimizer_s": 0.5, "time_offload_s": 0.0,
    "memory_capacity_bytes": 1000, "memory_peak_bytes": 640, "memory_parameters_bytes": 200, "memory_gradients_bytes": 200,
    "memory_optimizer_bytes": 100, "memory_activations_bytes": 80, "memory_buffers_bytes": 40, "memory_overhead_bytes": 20,
    "communication_tp_bytes": 0, "communication_dp_bytes": 300, "communication_pp_bytes": 60, "communication_cp_bytes": 0,
    "communication_ep_bytes": 0, "cost_per_step": null, "currency": null, "stage_recompute": null,
    "tied_gradients": "together", "input_slots": "in_flight", "micro_batch_group": null, "dp_shard": 2,
    "step_time_low_s": null, "step_time_high_s": null, "memory_reserve_bytes": 0, "fit": "fits",
    "usable_bytes": 1000, "allocated_bytes": 620, "reserved_bytes": 620, "told_from_first": null,
    "memory_host_bytes": 0, "dp_method": "all_reduce", "tp_overlap": null, "recompute_layers": null,
    "replica_micro_batches": null, "cp_ulysses": null, "prefetch_depth": null, "memory_nvme_bytes": 0,
    "gather_unit": null, "offload_layers": null, "node_groups": "1 node of 4 x box"})");
  Json found = row(subject_of(plan));
  CHECK(found.at("plan_id") == plan_id(plan.model, plan.training, plan.spec));
  found["plan_id"] = "";
  CHECK(found.dump(1) == expected.dump(1));
}

TEST_CASE("a predicted step on accelerators has the band of published runs, a measured one none") {
  Plan plan = small_plan();
  for (NodeGroup& group : plan.cluster.groups) {
    group.device.backend = BackendKind::cuda;
    group.device.name = "a100-sxm4-80gb";
  }
  const auto band = [&](const std::string& engine) {
    plan.training.engine.name = engine;
    const Json found = row(subject_of(plan));
    return std::pair(found.at("step_time_low_s").get<double>() / found.at("step_time_s").get<double>(),
                     found.at("step_time_high_s").get<double>() / found.at("step_time_s").get<double>());
  };
  for (const ErrorBand& one : error_bands()) {
    if (one.device != "a100-sxm4-80gb" || one.engine.empty() || one.size != run_sizes.front().name) continue;
    const auto [low, high] = band(std::string(one.engine));  // on 4 devices
    CHECK(low == doctest::Approx(one.low));
    CHECK(high == doctest::Approx(one.high));
  }
  const auto [low, high] = band("parplan");
  CHECK(low < 1.0);
  CHECK(high > 1.0);
  CHECK(write_table(plan).find("\nstep: fewer than 8 published runs of parplan on a100-sxm4-80gb: ") !=
        std::string::npos);
  const Json measured = row(subject_of(plan, plan.prediction));
  CHECK(measured.at("step_time_low_s").is_null());
  CHECK(measured.at("step_time_high_s").is_null());
}

TEST_CASE("a plan is told from the first where they differ by more than pairs of published runs do") {
  Plan plan = small_plan();
  const auto told = [&] { return row(subject_of(plan, 2)).at("told_from_first"); };
  CHECK(told().is_null());  // CPUs
  for (NodeGroup& group : plan.cluster.groups) group.device.backend = BackendKind::cuda;
  const double spread = pair_spread(plan.training.engine, plan.cluster)->spread;
  CHECK(spread == pair_spreads().back().spread);
  // The first takes 10 s, the other 11.5.
  REQUIRE(spread < 0.15);
  CHECK(told() == true);
  CHECK(write_table(plan).find("\nevery plan can be told apart from the first: 8 of 10 of the ") != std::string::npos);
  plan.alternatives[0].result.time.compute -= Seconds(1.5 - 0.99 * spread * 10.0);
  CHECK(told() == false);
  CHECK(write_table(plan).find("\nplan 2 cannot be told apart from the first: 8 of 10 of the ") != std::string::npos);
  plan.alternatives.resize(4, plan.alternatives[0]);
  CHECK(write_table(plan).find("\nplans 2 to 5 cannot be told apart from the first: ") != std::string::npos);
  CHECK(row(subject_of(plan)).at("told_from_first").is_null());
  // The step of a calibrated cluster has the band of pairs.
  plan.cluster.calibrated = "kernels 0.9 of their files' rates, by 1 measured step of parplan";
  const Json calibrated = row(subject_of(plan));
  CHECK(calibrated.at("step_time_low_s").get<double>() == doctest::Approx(10.0 / (1.0 + spread)));
  CHECK(calibrated.at("step_time_high_s").get<double>() == doctest::Approx(10.0 * (1.0 + spread)));
}

TEST_CASE("an alternative's row has its place and its own result") {
  const Plan plan = small_plan();
  const Json second = row(subject_of(plan, 2));
  CHECK(second.at("rank") == 2);
  CHECK(second.at("micro_batch") == 2);
  CHECK(second.at("step_time_s") == 11.5);  // 6 + 0.5 + 0.5 + 4 + 0.5
}

TEST_CASE("utilization is null where no peak is known") {
  Plan plan = small_plan();
  plan.cluster.groups.front().device.peak_fp32 = FlopsPerSecond(0.0);
  CHECK(row(subject_of(plan)).at("mfu").is_null());
}

TEST_CASE("no number of a row is NaN where a step takes no time") {
  Plan plan = small_plan();
  plan.prediction.time = {};
  const Json found = row(subject_of(plan));
  for (const auto& item : found.items()) {
    INFO(item.key());
    const Json& value = item.value();
    CHECK(value.dump() != "nan");
    if (value.is_number()) CHECK(value.get<double>() == value.get<double>());
  }
  CHECK(found.at("tokens_per_s").is_null());
}

TEST_CASE("parts of time, memory and communication sum to their wholes") {
  StepTime time;
  double next = 1.0;
  for (const TimePart& part : time_parts()) part_of(time, part) = Seconds(next *= 2.0);
  CHECK(time.total() == Seconds(1022.0));  // 2 + 4 + ... + 512: each part is there once
  MemoryUse memory;
  std::int64_t bytes = 1;
  for (const MemoryPart& part : memory_parts()) memory.*part.part = Bytes(bytes *= 2);
  CHECK(memory.peak() == Bytes(254));
  CommunicationVolume volume;
  for (const CommunicationPart& part : communication_parts()) volume[part.axis] = Bytes(1);
  CHECK(volume == CommunicationVolume{.pp = Bytes(1), .dp = Bytes(1), .cp = Bytes(1), .tp = Bytes(1)});
}

TEST_CASE("a layout is told in one line") {
  ParallelSpec spec;
  CHECK(layout_text(spec) == "dp1 tp1 pp1 mb1");
  spec.mesh.degree = {.pp = 2, .dp = 4, .tp = 8};
  spec.sequence_parallel = true;
  spec.zero_stage = 3;
  spec.micro_batch = 16;
  spec.schedule = ScheduleKind::gpipe;
  spec.recompute = Recompute::full;
  CHECK(layout_text(spec) == "dp4 tp8+sp pp2 zero3 mb16 gpipe recompute=full pp>dp>tp");
  spec.recompute_layers = 3;
  CHECK(layout_text(spec) == "dp4 tp8+sp pp2 zero3 mb16 gpipe recompute=full:3 pp>dp>tp");
  spec.recompute_layers = 0;
  spec.offload = Offload{.activations = Home::host};
  spec.offload_layers = 2;
  CHECK(layout_text(spec) ==
        "dp4 tp8+sp pp2 zero3 mb16 gpipe recompute=full offload=activations offload-layers=2 pp>dp>tp");
  spec.offload = {};
  spec.offload_layers = 0;
  spec.recompute = Recompute::per_stage;
  spec.stage_recompute = {Recompute::full, Recompute::none};
  CHECK(layout_text(spec) == "dp4 tp8+sp pp2 zero3 mb16 gpipe recompute=full,none pp>dp>tp");
  spec.stage_recompute = {{Recompute::full, 2}, {Recompute::norms, 1}};
  CHECK(layout_text(spec) == "dp4 tp8+sp pp2 zero3 mb16 gpipe recompute=full:2,norms:1 pp>dp>tp");
  spec.stage_recompute = {Recompute::full, Recompute::none};
  spec.tied_gradients = TiedGradients::apart;
  CHECK(layout_text(spec) == "dp4 tp8+sp pp2 zero3 mb16 gpipe recompute=full,none tied-gradients=apart pp>dp>tp");
  spec.input_slots = InputSlots::one_more;
  CHECK(layout_text(spec) ==
        "dp4 tp8+sp pp2 zero3 mb16 gpipe recompute=full,none tied-gradients=apart input-slots+1 pp>dp>tp");
  spec.schedule = ScheduleKind::interleaved;
  spec.virtual_stages = 3;
  // The stages of each rank recompute alike, or not.
  spec.stage_recompute = {Recompute::full, Recompute::none, Recompute::full,
                          Recompute::none, Recompute::full, Recompute::none};
  CHECK(layout_text(spec) ==
        "dp4 tp8+sp pp2 zero3 mb16 interleaved v3 rank-recompute=full,none tied-gradients=apart input-slots+1 "
        "pp>dp>tp");
  spec.stage_recompute.back() = Recompute::full;
  CHECK(layout_text(spec).find(" recompute=full,none,full,none,full*2 ") != std::string::npos);
  spec.micro_batch_group = 4;
  CHECK(layout_text(spec).find(" v3 group4 ") != std::string::npos);
}

TEST_CASE("what lacks room is the host or its drives where the device has enough") {
  Plan plan = small_plan();
  CHECK(!shortage_of(subject_of(plan)));
  plan.prediction.memory.host = Bytes(700);
  plan.prediction.memory.nvme = Bytes(900);
  NodeGroup& group = plan.cluster.groups.front();
  const int ranks = std::min(plan.spec.mesh.size(), group.devices_per_machine());
  group.nvme = {.read = BytesPerSecond(1), .write = BytesPerSecond(1), .latency = {}, .capacity = Bytes(900 * ranks)};
  CHECK(!shortage_of(subject_of(plan)));
  group.nvme->capacity = Bytes(899 * ranks);
  const std::optional<Shortage> drives = shortage_of(subject_of(plan));
  REQUIRE(drives);
  CHECK(drives->home == Home::nvme);
  CHECK(drives->needed == Bytes(900));
  CHECK(drives->available == Bytes(899));
  CHECK(verdict_of(subject_of(plan)) == MemoryVerdict::does_not_fit);
  plan.prediction.memory.nvme = {};
  CHECK(!shortage_of(subject_of(plan)));
  group.device.memory_capacity = Bytes(1);
  const std::optional<Shortage> device = shortage_of(subject_of(plan));
  REQUIRE(device);
  CHECK(device->home == Home::device);
}

TEST_CASE("CSV has a header, quotes what needs it and leaves null empty") {
  const Plan plan = small_plan();
  const std::vector<Json> rows{row(subject_of(plan)), row(subject_of(plan, 2))};
  const std::string text = write_csv(rows);
  const std::string id = plan_id(plan.model, plan.training, plan.spec);
  std::string header;
  for (const std::string& key : contract_keys) header += (header.empty() ? "" : ",") + key;
  CHECK(text.substr(0, text.find('\n')) == header);
  CHECK(text.find("\n1," + id +
                  ",4,parplan,fp32,4,2,1,2,1,1,pp-dp-tp,1,1,2,1f1b,1,\"2,1\",false,,none,none,10.0,2.0,0.5,5e-11,0.5,6."
                  "0,0.0,0.0,0.0,0.0,1.0,"
                  "0.5,2.0,0.5,0.0,1000,640,200,200,100,80,40,20,0,300,60,0,0,,,,together,in_flight,,2,,,0,fits,1000,"
                  "620,620,,0,all_reduce,,,,,,0,,,1 node of 4 x box\n") != std::string::npos);
  CHECK(std::count(text.begin(), text.end(), '\n') == 3);
}

TEST_CASE("a text that a spreadsheet would take for a formula is none in CSV, a negative number stays one") {
  const std::vector<Json> rows{Json{{"a", "=HYPERLINK(\"x\")"}, {"b", "@SUM"}, {"c", "\t1"}, {"d", -1.5}, {"e", "+1"}}};
  CHECK(write_csv({"a", "b", "c", "d", "e"}, rows) ==
        "a,b,c,d,e\n\"'=HYPERLINK(\"\"x\"\")\",'@SUM,'\t1,-1.5,'+1\n");
}

}  // namespace
}  // namespace parplan
