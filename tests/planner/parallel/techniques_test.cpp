#include "planner/parallel/techniques.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/base/enum_index.h"
#include "planner/parallel/context.h"
#include "planner/parallel/cut_stages.h"
#include "planner/parallel/engine_layouts.h"
#include "planner/parallel/pipeline.h"
#include "planner/parallel/recompute.h"
#include "planner/parallel/tensor.h"

using namespace parplan;

namespace {

const std::string models_folder = PARPLAN_SOURCE_DIR "/models";
const std::string tiny_folder = PARPLAN_SOURCE_DIR "/tests/data/models";

OpGraph graph_of(const std::string& folder, const std::string& model, std::int64_t sequence) {
  return build_graph(load_model(model, folder).spec, sequence);
}
const OpGraph& tiny_gpt2() {
  static const OpGraph graph = graph_of(tiny_folder, "tiny-gpt2", 32);
  return graph;
}
const OpGraph& tiny_llama() {
  static const OpGraph graph = graph_of(tiny_folder, "tiny-llama", 32);
  return graph;
}

ParallelSpec layout(const OpGraph& graph, int dp, int tp, int pp) {
  ParallelSpec spec;
  spec.mesh.degree = {.pp = pp, .dp = dp, .tp = tp};
  if (pp >= 1 && pp <= static_cast<int>(graph.blocks.size())) spec.stage_blocks = even_stages(graph, pp);
  return spec;
}

TrainingSpec batch_of(std::int64_t global_batch) {
  TrainingSpec training;
  training.global_batch = global_batch;
  return training;
}

std::string reason(const OpGraph& graph, const ParallelSpec& spec, std::int64_t global_batch = 16) {
  return illegal(graph, batch_of(global_batch), spec).value_or("legal");
}

std::map<std::string, std::string> written(const Placements& placements) {
  std::map<std::string, std::string> texts;
  for (const auto& [parameter, layout] : placements.parameters) texts[parameter] = write_placement(layout.tp);
  return texts;
}

}  // namespace

TEST_CASE("divisors are all that divide, ascending") {
  for (std::int64_t number = 1; number <= 400; ++number) {
    std::vector<std::int64_t> all;
    for (std::int64_t d = 1; d <= number; ++d)
      if (number % d == 0) all.push_back(d);
    CHECK(divisors(number) == all);
  }
  CHECK(divisors(1'000'000'007) == std::vector<std::int64_t>{1, 1'000'000'007});
}

TEST_CASE("Every technique allows what it lists and refuses the rest") {
  // The one number of the layout that a technique decides.
  const std::map<std::string, void (*)(const OpGraph&, ParallelSpec&, int)> set = {
      {"tensor", [](const OpGraph&, ParallelSpec& spec, int degree) { spec.mesh.degree.tp = degree; }},
      {"context", [](const OpGraph&, ParallelSpec& spec, int degree) { spec.mesh.degree.cp = degree; }},
      {"data", [](const OpGraph&, ParallelSpec& spec, int degree) { spec.mesh.degree.dp = degree; }},
      {"pipeline",
       [](const OpGraph& graph, ParallelSpec& spec, int degree) {
         spec.mesh.degree.pp = degree;
         if (degree <= static_cast<int>(graph.blocks.size())) spec.stage_blocks = even_stages(graph, degree);
       }},
      {"zero", [](const OpGraph&, ParallelSpec& spec, int stage) { spec.zero_stage = stage; }},
      {"offload", [](const OpGraph&, ParallelSpec& spec, int value) { spec.offload = offload_of(value); }},
      {"recompute", [](const OpGraph&, ParallelSpec& spec, int layers) { spec.recompute_layers = layers; }},
      {"master",
       [](const OpGraph&, ParallelSpec& spec, int value) { spec.dp_method = static_cast<DataMethod>(value); }},
  };
  for (const TechniqueRow& row : technique_rows()) {
    const auto setter = set.find(std::string(row.name));
    REQUIRE_MESSAGE(setter != set.end(), "no test knows the technique " << row.name);
    for (const OpGraph* graph : {&tiny_gpt2(), &tiny_llama()})
      for (int dp : {1, 2})
        for (int setting : {0, 1, 2}) {
          const bool sequence_parallel = setting == 1;
          ParallelSpec spec = layout(*graph, dp, sequence_parallel ? 2 : 1, 1);
          spec.sequence_parallel = sequence_parallel;
          if (row.name == "recompute" && dp == 1) spec.recompute = Recompute::full;
          TrainingSpec training = batch_of(12);
          if (setting == 2)
            training.engine = {.name = "poor",
                               .fused_attention = false,
                               .has_tensor = false,
                               .has_pipeline = false,
                               .has_interleaved = false,
                               .has_context = false,
                               .most_zero = 2,
                               .most_zero_in_pipelines = 1};
          const std::vector<int> legal = row.legal_degrees(*graph, training, spec, 13);
          CHECK(std::ranges::is_sorted(legal));
          const bool of_values =
              row.name == "zero" || row.name == "offload" || row.name == "recompute" || row.name == "master";
          for (int degree = of_values ? 0 : 1; degree <= 13; ++degree) {
            setter->second(*graph, spec, degree);
            INFO(row.name << " over " << degree << " of " << graph->name << ", dp " << dp);
            const bool is_illegal =
                lacked_by_engine(training.engine, spec) || row.illegal(*graph, training, spec).has_value();
            CHECK(is_illegal == (std::ranges::find(legal, degree) == legal.end()));
            if (row.allows != nullptr)
              CHECK(row.allows(*graph, training, spec) == !row.illegal(*graph, training, spec));
          }
        }
  }
}

TEST_CASE("tensor-parallel ranks divide key/value heads, or share each out by its query heads") {
  // The zoo's grouped-query models: heads, key/value heads and feed-forward width.
  struct Widths {
    const char* model;
    int heads, kv_heads, feature;
  };
  for (const Widths& widths :
       {Widths{"llama3-8b", 32, 8, 14336}, Widths{"llama3-405b", 128, 8, 53248}, Widths{"qwen2.5-7b", 28, 4, 18944},
        Widths{"starcoder2-15b", 48, 4, 24576}, Widths{"falcon-7b", 71, 1, 18176}, Widths{"gpt2-xl", 25, 25, 6400}}) {
    const OpGraph graph = graph_of(models_folder, widths.model, 1024);
    std::vector<int> wanted;
    for (int tp = 1; tp <= widths.heads; ++tp) {
      const bool by_groups = widths.kv_heads % tp == 0;
      const bool by_queries = tp % widths.kv_heads == 0 && widths.heads % tp == 0;
      if ((by_groups || by_queries) && widths.feature % tp == 0) wanted.push_back(tp);
    }
    CAPTURE(widths.model);
    CHECK(legal_tensor_degrees(graph, batch_of(16), {}, 1000) == wanted);
  }
}

TEST_CASE("parameters in host memory are shards, or one rank's alone") {
  ParallelSpec spec = layout(tiny_gpt2(), 2, 1, 1);
  spec.offload = Offload{.optimizer = Home::host, .gradients = Home::host};
  CHECK(reason(tiny_gpt2(), spec) == "legal");
  spec.offload.parameters = Home::host;
  spec.zero_stage = 2;
  CHECK(reason(tiny_gpt2(), spec) ==
        "offload optimizer+gradients+parameters keeps parameters in host memory, of which each data-parallel rank has "
        "a shard with ZeRO stage 3, and zero_stage is 2 on 2 of them; legal: zero_stage 3, or offload "
        "optimizer+gradients");
  spec.zero_stage = 3;
  CHECK(reason(tiny_gpt2(), spec) == "legal");
  spec = layout(tiny_gpt2(), 1, 1, 1);
  spec.offload = Offload{.optimizer = Home::host, .parameters = Home::host};
  CHECK(reason(tiny_gpt2(), spec) == "legal");
  spec.offload = Offload{.gradients = Home::host};
  CHECK(reason(tiny_gpt2(), spec) ==
        "there is no offload gradients: gradients are where the host updates them only with the optimizer's state; "
        "legal: optimizer+gradients or optimizer:nvme+gradients, or none");
  // In files, sums are whole on each rank, or shards of any stage.
  spec = layout(tiny_gpt2(), 2, 1, 1);
  spec.offload = Offload{.optimizer = Home::host, .gradients = Home::nvme};
  for (const int zero : {0, 1, 2, 3}) {
    spec.zero_stage = zero;
    CHECK(reason(tiny_gpt2(), spec) == "legal");
  }
  spec = layout(tiny_gpt2(), 2, 1, 1);
  spec.offload = Offload{.optimizer = Home::host, .parameters = Home::nvme, .activations = Home::nvme};
  CHECK(reason(tiny_gpt2(), spec) ==
        "offload optimizer+parameters:nvme+activations:nvme keeps parameters on NVMe, of which each data-parallel rank "
        "has a shard with ZeRO stage 3, and zero_stage is 0 on 2 of them; legal: zero_stage 3, or offload "
        "optimizer+activations:nvme");
}

TEST_CASE("moments in 8 bits are in memory") {
  TrainingSpec training = batch_of(16);
  training.optimizer = Optimizer::adamw_8bit;
  ParallelSpec spec = layout(tiny_gpt2(), 2, 1, 1);
  spec.offload = Offload{.optimizer = Home::host};
  CHECK(!illegal(tiny_gpt2(), training, spec));
  spec.offload.optimizer = Home::nvme;
  CHECK(illegal(tiny_gpt2(), training, spec) ==
        "offload optimizer:nvme keeps the optimizer's state in fp32 on NVMe, and optimizer adamw_8bit has it in 8 "
        "bits; legal: offload optimizer, or another optimizer");
  training.optimizer = Optimizer::adamw;
  CHECK(!illegal(tiny_gpt2(), training, spec));
}

TEST_CASE("Muon has whole matrices, without copies, and predicts no other engine") {
  TrainingSpec training = batch_of(16);
  training.optimizer = Optimizer::muon;
  const auto reason_with = [&](int dp, int tp, int zero) {
    ParallelSpec spec = layout(tiny_llama(), dp, tp, 1);
    spec.zero_stage = zero;
    return illegal(tiny_llama(), training, spec).value_or("legal");
  };
  CHECK(reason_with(2, 2, 1) == "legal");
  CHECK(reason_with(2, 1, 3) ==
        "optimizer muon orthogonalizes whole matrices, of whose gradients ZeRO stage 3 leaves a rank a shard; legal "
        "stages: 0, 1, or another optimizer");
  CHECK(reason_with(1, 4, 0) ==
        "tensor parallelism over 4 cannot split 4 attention heads (2 key/value groups) where optimizer muon gathers "
        "matrices without copies; legal degrees: 1, 2");
  training.engine.name = "other";
  CHECK(reason_with(1, 1, 0) ==
        "optimizer muon is predicted as parplan's own runtime runs it, and engine other would divide its matrices "
        "otherwise, or has it not; leave the engine out, or take optimizer adamw");
}

TEST_CASE("a master has replicas that are whole, and all state") {
  ParallelSpec spec = layout(tiny_gpt2(), 2, 1, 1);
  spec.dp_method = DataMethod::master;
  CHECK(reason(tiny_gpt2(), spec) == "legal");
  spec.zero_stage = 1;
  CHECK(reason(tiny_gpt2(), spec) ==
        "dp_method master keeps all state on one device, and zero_stage is 1; legal stages: 0");
  spec.zero_stage = 0;
  spec.offload = Offload{.optimizer = Home::host};
  CHECK(reason(tiny_gpt2(), spec) ==
        "dp_method master updates on its device, and offload is optimizer; legal: none, activations");
  spec.offload = Offload{.activations = Home::host};
  CHECK(reason(tiny_gpt2(), spec) == "legal");
  for (const auto& [dp, tp, pp, why] :
       {std::tuple(1, 1, 1, "dp_method master hands parameters to data-parallel replicas, and there is 1 rank (dp 1)"),
        std::tuple(2, 2, 1, "dp_method master is one process of whole replicas, and tp is 2; tp must be 1"),
        std::tuple(2, 1, 2, "dp_method master is one process of whole replicas, and pp is 2; pp must be 1")}) {
    spec = layout(tiny_gpt2(), dp, tp, pp);
    spec.dp_method = DataMethod::master;
    CHECK(reason(tiny_gpt2(), spec) == why);
  }
}

TEST_CASE("replicas with unlike numbers of micro-batches train the batch, and meet once a step") {
  const auto with = [](std::vector<int> replicas, auto change) {
    ParallelSpec spec = layout(tiny_gpt2(), static_cast<int>(replicas.size()), 1, 1);
    spec.replica_micro_batches = std::move(replicas);
    change(spec);
    return spec;
  };
  const auto as_is = [](ParallelSpec&) {};
  CHECK(reason(tiny_gpt2(), with({6, 6, 2, 2}, as_is)) == "legal");
  CHECK(reason(tiny_gpt2(), with({7, 5, 4}, as_is)) == "legal");
  CHECK(reason(tiny_gpt2(), with({7, 5, 4}, [](ParallelSpec& spec) { spec.zero_stage = 1; })) == "legal");
  CHECK(reason(tiny_gpt2(), with({3, 1}, [](ParallelSpec& spec) { spec.micro_batch = 4; })) == "legal");
  CHECK(reason(tiny_gpt2(), with({6, 6, 2, 2}, [](ParallelSpec& spec) { spec.mesh.degree.dp = 3; })) ==
        "replica_micro_batches [6, 6, 2, 2] names 4 replicas, and dp is 3: name as many numbers as dp");
  CHECK(reason(tiny_gpt2(), with({16, 0}, as_is)) ==
        "replica_micro_batches [16, 0] leaves a replica without work; each has at least 1, or take a smaller dp");
  CHECK(reason(tiny_gpt2(), with({8, 8}, as_is)) ==
        "replica_micro_batches [8, 8] are all alike, as they are without it: leave it out");
  CHECK(reason(tiny_gpt2(), with({6, 6, 2, 1}, as_is)) ==
        "replica_micro_batches [6, 6, 2, 1] are 15 micro-batches of 1, and the global batch is 16: they must sum to 16 "
        "/ micro_batch");
  CHECK(reason(tiny_gpt2(), with({6, 2}, [](ParallelSpec& spec) { spec.micro_batch = 4; })) ==
        "replica_micro_batches [6, 2] are 8 micro-batches of 4, and the global batch is 16: they must sum to 16 / "
        "micro_batch");
  CHECK(reason(tiny_gpt2(), with({12, 4}, [](ParallelSpec& spec) { spec.dp_method = DataMethod::master; })) ==
        "replica_micro_batches [12, 4] needs replicas that go on alone, and dp_method is master, which gathers the "
        "logits of every micro-batch; dp_method must be all_reduce");
  CHECK(reason(tiny_gpt2(), with({12, 4}, [](ParallelSpec& spec) { spec.zero_stage = 2; })) ==
        "ZeRO stage 2 reduces gradients for every micro-batch over the ranks that shard, and replicas 0 and 1 among "
        "them have 12 and 4 micro-batches: take ZeRO stage 0 or 1, or shard over groups of replicas with equal numbers "
        "(dp_shard)");
  const auto in_groups = [](ParallelSpec& spec) {
    spec.zero_stage = 3;
    spec.mesh.dp_shard = 2;
  };
  CHECK(reason(tiny_gpt2(), with({6, 6, 2, 2}, in_groups)) == "legal");
  CHECK(reason(tiny_gpt2(), with({6, 2, 6, 2}, in_groups)) ==
        "ZeRO stage 3 gathers parameters for every micro-batch over the ranks that shard, and replicas 0 and 1 among "
        "them have 6 and 2 micro-batches: take ZeRO stage 0 or 1, or shard over groups of replicas with equal numbers "
        "(dp_shard)");
  const auto back_and_forth = [](ParallelSpec& spec) {
    spec.mesh.degree.pp = 2;
    spec.schedule = ScheduleKind::zero_bubble_v;
    spec.virtual_stages = 2;
    spec.stage_blocks = {2, 2, 1, 1};
  };
  CHECK(reason(tiny_gpt2(), with({12, 4}, back_and_forth)) ==
        "replica_micro_batches [12, 4] needs an order of actions that fewer micro-batches share, and the schedule is "
        "zero_bubble_v; legal schedules: gpipe, 1f1b, interleaved, zero_bubble_h1");
  const auto interleaved = [](ParallelSpec& spec) {
    spec.mesh.degree.pp = 2;
    spec.schedule = ScheduleKind::interleaved;
    spec.virtual_stages = 2;
    spec.stage_blocks = {2, 2, 1, 1};
  };
  CHECK(reason(tiny_gpt2(), with({12, 4}, interleaved)) == "legal");
  CHECK(reason(tiny_gpt2(), with({11, 5}, interleaved)) ==
        "an interleaved pipeline of replicas with unlike numbers of micro-batches runs whole groups of 2, and one has "
        "11: take multiples of 2");
  TrainingSpec training = batch_of(16);
  training.engine.name = "other";
  CHECK(illegal(tiny_gpt2(), training, with({12, 4}, as_is)).value_or("legal") ==
        "engine other gives all replicas equally many micro-batches: replica_micro_batches must be left out");
}

TEST_CASE("Degrees that cannot be say why, and what can") {
  const OpGraph xl = graph_of(models_folder, "gpt2-xl", 1024);
  CHECK(reason(xl, layout(xl, 1, 2, 1)) ==
        "tensor parallelism over 2 cannot split 25 attention heads (25 key/value groups); legal degrees: 1, 5, 25");
  CHECK(reason(tiny_gpt2(), layout(tiny_gpt2(), 1, 3, 1)) ==
        "tensor parallelism over 3 cannot split 4 attention heads (4 key/value groups); legal degrees: 1, 2, 4");
  CHECK(reason(tiny_llama(), layout(tiny_llama(), 1, 4, 1)) == "legal");
  CHECK(reason(tiny_llama(), layout(tiny_llama(), 1, 8, 1)) ==
        "tensor parallelism over 8 cannot split 4 attention heads (2 key/value groups); legal degrees: 1, 2, 4");
  // Seven query heads to each of four key/value heads: two ranks cannot share one out.
  const OpGraph qwen = graph_of(models_folder, "qwen2.5-7b", 4096);
  CHECK(reason(qwen, layout(qwen, 1, 8, 1)) ==
        "tensor parallelism over 8 cannot split 28 attention heads (4 key/value groups); legal degrees: 1, 2, 4");
  CHECK(reason(tiny_gpt2(), layout(tiny_gpt2(), 1, 0, 1)) == "the tensor-parallel degree is 0; it must be at least 1");

  const OpGraph odd = graph_of(tiny_folder, "tiny-gpt2", 30);
  ParallelSpec spec = layout(odd, 1, 4, 1);
  CHECK(reason(odd, spec) == "legal");
  spec.sequence_parallel = true;
  CHECK(
      reason(odd, spec) ==
      "tensor parallelism over 4 cannot split a sequence of 30 tokens (sequence parallelism is on); legal degrees: 2");
  spec = layout(odd, 2, 1, 1);
  spec.sequence_parallel = true;
  CHECK(reason(odd, spec) == "sequence parallelism spreads work over tensor-parallel ranks, and there is 1 (tp 1)");
  const OpGraph uneven = graph_of(tiny_folder, "tiny-gpt2", 31);
  spec = layout(uneven, 1, 2, 1);
  spec.sequence_parallel = true;
  CHECK(reason(uneven, spec) ==
        "tensor parallelism over 2 cannot split a sequence of 31 tokens (sequence parallelism is on); legal degrees: "
        "none");

  CHECK(
      reason(tiny_gpt2(), layout(tiny_gpt2(), 3, 1, 1)) ==
      "data parallelism over 3 cannot split a global batch of 16 sequences in micro-batches of 1; legal degrees: 1, 2, "
      "4, 8, 16, or any with replica_micro_batches");
  spec = layout(tiny_gpt2(), 4, 1, 1);
  spec.micro_batch = 8;
  CHECK(
      reason(tiny_gpt2(), spec) ==
      "data parallelism over 4 cannot split a global batch of 16 sequences in micro-batches of 8; legal degrees: 1, 2");
  spec.micro_batch = 3;
  CHECK(reason(tiny_gpt2(), spec) ==
        "micro-batches of 3 cannot split a global batch of 16 sequences over 4 data-parallel ranks; legal "
        "micro-batches: 1, 2, 4");
  spec = layout(tiny_gpt2(), 1, 1, 1);
  spec.micro_batch = 3;
  CHECK(reason(tiny_gpt2(), spec) ==
        "micro-batches of 3 cannot split a global batch of 16 sequences; legal micro-batches: 1, 2, 4, 8, 16");
  CHECK(reason(tiny_gpt2(), layout(tiny_gpt2(), 0, 1, 1)) == "the data-parallel degree is 0; it must be at least 1");

  spec = layout(tiny_gpt2(), 1, 2, 1);
  spec.tp_overlap = TensorOverlap::ring;
  CHECK(reason(tiny_gpt2(), spec) ==
        "tp_overlap ring passes on the tokens that tensor-parallel ranks share out, and sequence_parallel is false; it "
        "must be true, or tp_overlap none");

  spec = layout(tiny_gpt2(), 2, 1, 1);
  spec.zero_stage = 2;
  spec.prefetch_depth = 2;
  CHECK(reason(tiny_gpt2(), spec) ==
        "prefetch_depth 2 says how many blocks ahead parameters are gathered, and none are; it goes with zero_stage 3 "
        "or an offload of parameters");
  spec.zero_stage = 3;
  CHECK(reason(tiny_gpt2(), spec) == "legal");
  spec.prefetch_depth = -1;
  CHECK(reason(tiny_gpt2(), spec) == "prefetch_depth is -1; it must be at least 0");
  spec.prefetch_depth = 1;
  spec.gather_unit = GatherUnit::parameter;
  CHECK(reason(tiny_gpt2(), spec) == "legal");
  spec.zero_stage = 2;
  CHECK(reason(tiny_gpt2(), spec) ==
        "gather_unit parameter says which parameters one collective gathers, and none does; it goes with zero_stage 3");

  spec = layout(tiny_gpt2(), 1, 1, 1);
  spec.mesh.degree.cp = 3;
  CHECK(reason(tiny_gpt2(), spec) ==
        "context parallelism over 3 cannot split a sequence of 32 tokens into two chunks for each rank; legal degrees: "
        "1, 2, 4, 8, 16");
  spec.cp_method = ContextMethod::ulysses;
  spec.mesh.degree.cp = 8;
  CHECK(reason(tiny_gpt2(), spec) ==
        "context parallelism over 8 by exchange for heads (ulysses) cannot split 4 key/value groups over tp 1; legal "
        "degrees: 1, 2, 4; gathered keys and values (all_gather) need no heads");
  spec.mesh.degree.cp = 1;
  CHECK(reason(tiny_gpt2(), spec) ==
        "cp_method ulysses exchanges tokens between context-parallel ranks, and there is 1 (cp 1)");
  spec.cp_method = ContextMethod::ring;
  CHECK(reason(tiny_gpt2(), spec) ==
        "cp_method ring passes keys and values between context-parallel ranks, and there is 1 (cp 1)");
  spec.mesh.degree.cp = 3;
  CHECK(reason(tiny_gpt2(), spec) ==
        "context parallelism over 3 cannot split a sequence of 32 tokens into two chunks for each rank; legal degrees: "
        "1, 2, 4, 8, 16");
  spec.mesh.degree.cp = 16;
  CHECK(reason(tiny_gpt2(), spec) == "legal");
  // 4 key/value heads, 32 tokens.
  spec.mesh.cp_ulysses = 4;
  CHECK(reason(tiny_gpt2(), spec) == "legal");
  CHECK(legal_context_degrees(tiny_gpt2(), {}, spec, 64) == std::vector{8, 16, 32});
  spec.mesh.cp_ulysses = 8;
  CHECK(reason(tiny_gpt2(), spec) ==
        "groups of 8 ranks that exchange tokens for heads (cp_ulysses) cannot split 4 key/value groups over tp 1; "
        "legal sizes: 1, 2, 4");
  spec.mesh.degree.tp = 2;
  CHECK(reason(tiny_gpt2(), spec) ==
        "groups of 8 ranks that exchange tokens for heads (cp_ulysses) cannot split 4 key/value groups over tp 2; "
        "legal sizes: 1, 2");
  spec.mesh.degree.tp = 1;
  spec.mesh.cp_ulysses = 3;
  CHECK(reason(tiny_gpt2(), spec) ==
        "groups of 3 ranks that exchange tokens for heads (cp_ulysses) cannot divide 16 context-parallel ranks into "
        "several groups; legal sizes: 1, 2, 4");
  spec.mesh.cp_ulysses = 16;
  CHECK(reason(tiny_gpt2(), spec) ==
        "groups of 16 ranks that exchange tokens for heads (cp_ulysses) cannot divide 16 context-parallel ranks into "
        "several groups; legal sizes: 1, 2, 4; for one group of all, take cp_method ulysses");
  spec.mesh.cp_ulysses = 2;
  spec.mesh.degree.cp = 64;
  CHECK(reason(tiny_gpt2(), spec) ==
        "context parallelism over 64 cannot split a sequence of 32 tokens into two chunks for each group of ranks; "
        "legal degrees: 4, 8, 16, 32");
  spec.mesh.degree.cp = 4;
  spec.cp_method = ContextMethod::ulysses;
  CHECK(reason(tiny_gpt2(), spec) ==
        "cp_method ulysses exchanges tokens for heads between all 4 context-parallel ranks, so there are no groups of "
        "2 (cp_ulysses) that do: leave cp_ulysses out, or let keys and values go between groups (cp_method ring, "
        "all_gather)");
  spec.cp_method = ContextMethod::all_gather;
  spec.mesh.degree.cp = 1;
  CHECK(reason(tiny_gpt2(), spec) == "cp_ulysses 2 makes groups of context-parallel ranks, and there is 1 (cp 1)");
  spec.mesh.cp_ulysses = 1;
  spec.cp_method = ContextMethod::ring;
  spec.mesh.degree.cp = 2;
  OpGraph windowed = tiny_gpt2();
  for (Op& op : windowed.ops)
    if (op.kind == OpKind::attention) op.attributes.window = 8;
  CHECK(reason(windowed, spec) ==
        "attention to a window of 8 of 32 tokens cannot go around a ring of ranks (cp_method ring); gather keys and "
        "values (all_gather)");
  for (Op& op : windowed.ops)
    if (op.kind == OpKind::attention) {
      op.attributes.window = 0;
      op.attributes.alibi = 1.0;
    }
  CHECK(reason(windowed, spec) ==
        "attention with ALiBi cannot go around a ring of ranks (cp_method ring); gather keys and values (all_gather)");
  spec = layout(odd, 1, 4, 1);
  spec.sequence_parallel = true;
  spec.mesh.degree = {.cp = 3, .tp = 2};
  CHECK(reason(odd, spec) == "legal");
  spec.mesh.degree = {.cp = 4, .tp = 2};
  CHECK(reason(odd, spec) ==
        "context parallelism over 4 cannot split a sequence of 30 tokens into two chunks for each rank and cut by 2 "
        "tensor-parallel ranks; legal degrees: 1, 3, 5, 15");

  spec = layout(tiny_gpt2(), 1, 2, 1);
  spec.zero_stage = 2;
  CHECK(reason(tiny_gpt2(), spec) ==
        "ZeRO stage 2 shards over data-parallel ranks, and there is 1 (dp 1); legal stages: 0");
  ParallelSpec hybrid;
  hybrid.mesh.degree.dp = 8;
  hybrid.zero_stage = 1;
  hybrid.mesh.dp_shard = 3;
  CHECK(reason(tiny_gpt2(), hybrid) ==
        "groups of 3 ranks that shard (dp_shard) cannot divide 8 data-parallel ranks; legal sizes: 2, 4");
  hybrid.zero_stage = 0;
  CHECK(reason(tiny_gpt2(), hybrid) ==
        "dp_shard 3 says over how many ranks ZeRO shards, and zero_stage is 0: nothing is sharded");
  spec.zero_stage = 4;
  CHECK(reason(tiny_gpt2(), spec) == "there is no ZeRO stage 4; legal stages: 0, 1, 2, 3");

  CHECK(reason(tiny_gpt2(), layout(tiny_gpt2(), 1, 1, 7)) ==
        "pipeline parallelism over 7 cannot give every stage a block: the model has 6 (embedding to head); legal "
        "degrees: "
        "1 to 6");
  CHECK(reason(tiny_gpt2(), layout(tiny_gpt2(), 1, 1, 0)) ==
        "the pipeline-parallel degree is 0; it must be at least 1");
  spec = layout(tiny_gpt2(), 1, 1, 2);
  spec.stage_blocks = {6};
  CHECK(reason(tiny_gpt2(), spec) == "the stage cut [6] has 1 stages, and pp is 2");
  spec.stage_blocks = {6, 0};
  CHECK(reason(tiny_gpt2(), spec) == "the stage cut [6, 0] leaves stage 1 without a block");
  spec.stage_blocks = {3, 2};
  CHECK(reason(tiny_gpt2(), spec) == "the stage cut [3, 2] holds 5 blocks, and the model has 6 (embedding to head)");
}

TEST_CASE("An axis cannot cut activations with the rows of two sequences, and all others can be laid out") {
  const OpGraph graph = graph_of(tiny_folder, "tiny-t5", 32);
  ParallelSpec spec = layout(graph, 2, 2, 3);
  CHECK(reason(graph, spec) == "legal");
  spec.sequence_parallel = true;
  CHECK(reason(graph, spec) ==
        "sequence parallelism cannot cut activations whose rows are taken apart, such as those of an encoder and a "
        "decoder, or of an image and its class: leave --sequence-parallel out");
  CHECK(legal_tensor_degrees(graph, {}, spec, 8).empty());
  spec = layout(graph, 2, 1, 1);
  spec.mesh.degree.cp = 2;
  for (const ContextMethod method : {ContextMethod::all_gather, ContextMethod::ring, ContextMethod::ulysses}) {
    spec.cp_method = method;
    CHECK(reason(graph, spec) ==
          "context parallelism cannot cut activations whose rows are taken apart, such as those of an encoder and a "
          "decoder, or of an image and its class: cp must be 1");
    CHECK(legal_context_degrees(graph, {}, spec, 8) == std::vector<int>{1});
  }
}

TEST_CASE("Layouts that an engine lacks are refused in its name") {
  const auto reason_of = [](const Engine& engine, const ParallelSpec& spec) {
    TrainingSpec training = batch_of(16);
    training.engine = engine;
    return illegal(tiny_gpt2(), training, spec).value_or("legal");
  };
  const Engine own, ddp{.name = "ddp", .has_tensor = false, .has_pipeline = false, .most_zero = 0},
      plain{.name = "plain", .fused_attention = false, .has_interleaved = false, .most_zero = 1};
  CHECK(reason_of(ddp, layout(tiny_gpt2(), 2, 1, 1)) == "legal");
  CHECK(reason_of(ddp, layout(tiny_gpt2(), 1, 2, 1)) == "engine ddp has no tensor parallelism: tp must be 1");
  CHECK(reason_of(ddp, layout(tiny_gpt2(), 1, 1, 2)) == "engine ddp has no pipelines: pp must be 1");
  ParallelSpec spec = layout(tiny_gpt2(), 2, 1, 1);
  spec.zero_stage = 2;
  CHECK(reason_of(own, spec) == "legal");
  CHECK(reason_of(plain, spec) == "engine plain has no ZeRO stage 2; its highest is 1");
  spec = layout(tiny_gpt2(), 1, 1, 2);
  spec.schedule = ScheduleKind::interleaved;
  spec.virtual_stages = 2;
  spec.stage_blocks = {2, 2, 1, 1};
  CHECK(reason_of(own, spec) == "legal");
  CHECK(reason_of(plain, spec) ==
        "engine plain has no interleaved pipelines: virtual_stages must be 1 and schedule another, such as 1f1b");
  spec = layout(tiny_gpt2(), 1, 1, 1);
  spec.mesh.degree.cp = 2;
  CHECK(reason_of(own, spec) == "legal");
  CHECK(reason_of({.name = "plain", .has_context = false}, spec) ==
        "engine plain has no context parallelism: cp must be 1");
  CHECK(reason_of(plain, spec) ==
        "engine plain has no attention over keys and values gathered from other ranks: cp must be 1");
}

TEST_CASE("An engine that lacks one technique refuses the layouts that use it, alone") {
  ParallelSpec rich = layout(tiny_gpt2(), 2, 2, 2);
  rich.sequence_parallel = true;
  const auto with = [&](const auto& change) {
    ParallelSpec spec = rich;
    change(spec);
    return spec;
  };
  const std::array specs = {
      rich,
      layout(tiny_gpt2(), 1, 1, 1),
      with([](ParallelSpec& spec) { spec.mesh.degree.cp = 2; }),
      with([](ParallelSpec& spec) { spec.schedule = ScheduleKind::gpipe; }),
      with([](ParallelSpec& spec) { spec.schedule = ScheduleKind::zero_bubble_h1; }),
      with([](ParallelSpec& spec) {
        spec.schedule = ScheduleKind::zero_bubble_v;
        spec.virtual_stages = 2;
        spec.stage_blocks = {2, 2, 1, 1};
      }),
      with([](ParallelSpec& spec) {
        spec.schedule = ScheduleKind::interleaved;
        spec.virtual_stages = 2;
        spec.stage_blocks = {2, 2, 1, 1};
      }),
      with([](ParallelSpec& spec) {
        spec.schedule = ScheduleKind::interleaved;
        spec.virtual_stages = 2;
        spec.micro_batch_group = 4;
        spec.stage_blocks = {2, 2, 1, 1};
      }),
      with([](ParallelSpec& spec) {
        spec.mesh.order = {Axis::dp, Axis::pp, Axis::tp};
      }),
      with([](ParallelSpec& spec) { spec.recompute = Recompute::core_attn | Recompute::norms | Recompute::mlp; }),
      with([](ParallelSpec& spec) { spec.recompute = Recompute::activation; }),
      with([](ParallelSpec& spec) { spec.recompute = Recompute::full; }),
      with([](ParallelSpec& spec) {
        spec.recompute = Recompute::full;
        spec.recompute_layers = 1;
      }),
      with([](ParallelSpec& spec) {
        spec.recompute = Recompute::per_stage;
        spec.stage_recompute = {{Recompute::mlp, 1}, Recompute::none};
      }),
      with([](ParallelSpec& spec) {
        spec.recompute = Recompute::per_stage;
        spec.stage_recompute = {Recompute::full, Recompute::none};
      }),
      with([](ParallelSpec& spec) {
        spec = layout(tiny_gpt2(), 2, 1, 1);
        spec.dp_method = DataMethod::master;
      }),
      with([](ParallelSpec& spec) {
        spec.sequence_parallel = true;
        spec.tp_overlap = TensorOverlap::ring;
      }),
      with([](ParallelSpec& spec) {
        spec = layout(tiny_gpt2(), 4, 1, 1);
        spec.zero_stage = 3;
        spec.mesh.dp_shard = 2;
      }),
      with([](ParallelSpec& spec) {
        spec = layout(tiny_gpt2(), 2, 1, 1);
        spec.zero_stage = 3;
        spec.prefetch_depth = 0;
      }),
      with([](ParallelSpec& spec) {
        spec = layout(tiny_gpt2(), 2, 1, 1);
        spec.zero_stage = 3;
        spec.gather_unit = GatherUnit::parameter;
      }),
      with([](ParallelSpec& spec) { spec.recompute = Recompute::every_other_product; }),
      with([](ParallelSpec& spec) {
        spec = layout(tiny_gpt2(), 1, 1, 1);
        spec.offload = Offload{.activations = Home::host};
        spec.offload_layers = 3;
      }),
      with([](ParallelSpec& spec) {
        spec = layout(tiny_gpt2(), 1, 1, 1);
        spec.mesh.degree.cp = 4;
        spec.mesh.cp_ulysses = 2;
      }),
      with([](ParallelSpec& spec) {
        spec = layout(tiny_gpt2(), 2, 1, 1);
        spec.zero_stage = 1;
      }),
  };
  TrainingSpec training = batch_of(16);
  for (const EngineLayoutRow& row : engine_layout_rows()) {
    INFO(row.name);
    int used = 0;
    for (const ParallelSpec& spec : specs) {
      training.engine = {};
      REQUIRE(illegal(tiny_gpt2(), training, spec).value_or("legal") == "legal");
      training.engine.name = "poor";
      training.engine.*row.has = false;
      const std::string wanted = fmt::format("engine poor has no {}: {}", row.name, row.must);
      used += row.uses(spec);
      CHECK(illegal(tiny_gpt2(), training, spec).value_or("legal") == (row.uses(spec) ? wanted : "legal"));
    }
    CHECK(used > 0);
    CHECK(used < static_cast<int>(specs.size()));
    const bool is_said = lacking_in_words(training.engine) == row.name;
    CHECK(is_said == (row.choice != Choice::recompute && row.choice != Choice::recompute_layers &&
                      row.choice != Choice::offload_layers));
  }
  // What does not apply to a layout without a pipeline, or without tensor parallelism, is refused
  // all the same where it is asked for.
  const Engine poor{.name = "poor", .has_interleaved = false, .has_sequence_parallel = false};
  CHECK(lacked_by_engine(poor, LayoutRequest{{Choice::schedule, ScheduleKind::interleaved}}) ==
        "engine poor has no interleaved pipelines: virtual_stages must be 1 and schedule another, such as 1f1b");
  CHECK(lacked_by_engine(poor, LayoutRequest{{Choice::sequence_parallel, true}}) ==
        "engine poor has no sequence parallelism: sequence_parallel must be false");
  CHECK(!lacked_by_engine(poor, LayoutRequest{{Choice::sequence_parallel, false}}));
  // An engine that always gathers each parameter by itself takes it for the choice that it is.
  Engine lists{.name = "poor", .lists_shards = true, .has_parameter_gathers = false};
  CHECK(!lacked_by_engine(lists, LayoutRequest{{Choice::gather_unit, GatherUnit::parameter}}));
  CHECK(!lacked_by_engine(lists, LayoutRequest{{Choice::gather_unit, GatherUnit::block}}));
  CHECK(lacking_in_words(lists).empty());
  lists.lists_shards = false;
  CHECK(lacked_by_engine(lists, LayoutRequest{{Choice::gather_unit, GatherUnit::parameter}}) ==
        "engine poor has no gathers of each parameter by itself: gather_unit must be block");
  // Context parallelism that is asked for is by the one way that is left.
  const auto method = [](const Engine& engine, const LayoutRequest& request) {
    CHECK(!lacked_by_engine(engine, request));
    return given<ContextMethod>(with_implied(engine, request), Choice::cp_method);
  };
  const Engine exchanges{.name = "poor", .has_context_by_keys = false, .has_hierarchical_context = false},
      rings{.name = "poor", .has_hierarchical_gather = false};
  CHECK(method(exchanges, {{Choice::cp, std::int64_t{2}}}) == ContextMethod::ulysses);
  CHECK(!method(exchanges, {{Choice::cp, std::int64_t{1}}}));
  CHECK(!method(exchanges, {}));
  CHECK(method(rings, {{Choice::cp_ulysses, std::int64_t{2}}}) == ContextMethod::ring);
  CHECK(!method(rings, {{Choice::cp, std::int64_t{4}}}));
  CHECK(!method({.name = "rich"}, {{Choice::cp, std::int64_t{4}}, {Choice::cp_ulysses, std::int64_t{2}}}));
  const LayoutRequest gathers{{Choice::cp, std::int64_t{4}},
                              {Choice::cp_ulysses, std::int64_t{2}},
                              {Choice::cp_method, ContextMethod::all_gather}};
  CHECK(lacked_by_engine(rings, gathers) ==
        "engine poor has no keys and values gathered between groups that exchange tokens for heads: cp_method must be "
        "ring, or cp_ulysses 1");
  const Engine sharding{.name = "poor", .most_zero_in_pipelines = 1};
  ParallelSpec spec = rich;
  spec.zero_stage = 2;
  CHECK(lacked_by_engine(sharding, spec) ==
        "engine poor has no ZeRO stage 2 in pipelines; its highest where pp is above 1 is 1");
  spec.mesh.degree.pp = 1;
  CHECK(!lacked_by_engine(sharding, spec));
}

TEST_CASE("The activations of no more layers leave the device than a stage has") {
  TrainingSpec training = batch_of(16);
  const auto reason_of = [&](const ParallelSpec& spec) {
    return illegal(tiny_gpt2(), training, spec).value_or("legal");
  };
  ParallelSpec spec = layout(tiny_gpt2(), 1, 1, 2);
  spec.offload = Offload{.optimizer = Home::host, .activations = Home::nvme};
  for (const auto& [cut, most] :
       {std::pair(std::vector<int>{}, 2), std::pair(std::vector<int>{5, 1}, 4), std::pair(std::vector<int>{2, 4}, 3)}) {
    spec.stage_blocks = cut;
    spec.offload_layers = most;
    CHECK(reason_of(spec) == "legal");
    spec.offload_layers = most + 1;
    CHECK(reason_of(spec) == fmt::format("offload_layers is {}, and no stage has more than {} layers; take 1 to {}, or "
                                         "leave it out: all layers",
                                         most + 1, most, most));
  }
  spec.offload_layers = 1;
  spec.offload.activations = Home::device;
  CHECK(reason_of(spec) ==
        "offload_layers says of how many layers of each stage activations leave the device, and offload is optimizer; "
        "leave offload_layers out, or add activations to offload");
  // Megatron Core has it without a pipeline and without recompute, of fewer layers than there are.
  training.engine.name = "megatron";
  spec = layout(tiny_gpt2(), 1, 2, 1);
  spec.offload = Offload{.activations = Home::host};
  const std::string fewer =
      "engine megatron takes the activations of fewer layers off the device than there are; legal: offload_layers from "
      "1 to 3, or offload none";
  CHECK(reason_of(spec) == fewer);
  spec.offload_layers = 4;
  CHECK(reason_of(spec) == fewer);
  spec.offload_layers = 3;
  CHECK(reason_of(spec) == "legal");
  spec.recompute = Recompute::full;
  CHECK(reason_of(spec) ==
        "engine megatron takes activations off the device without recompute, and recompute is full; legal: recompute "
        "none, or offload none");
  spec.recompute = Recompute::none;
  spec.offload.activations = Home::nvme;
  CHECK(reason_of(spec) ==
        "offload activations:nvme is known of parplan's own runtime alone, and the engine is megatron; leave offload "
        "or the engine "
        "out");
  spec = layout(tiny_gpt2(), 1, 1, 2);
  spec.offload = Offload{.activations = Home::host};
  spec.offload_layers = 1;
  CHECK(
      reason_of(spec) ==
      "engine megatron takes activations off the device without a pipeline, and pp is 2; legal: pp 1, or offload none");
}

TEST_CASE("A stage recomputes no more layers than it has") {
  const TrainingSpec training = batch_of(16);
  const auto reason_of = [&](const ParallelSpec& spec) {
    return illegal(tiny_gpt2(), training, spec).value_or("legal");
  };
  // Four layers, on stages that are not cut yet, cut evenly or not.
  ParallelSpec spec = layout(tiny_gpt2(), 1, 1, 2);
  spec.recompute = Recompute::full;
  for (const auto& [cut, most] : {std::pair(std::vector<int>{}, 2), std::pair(std::vector<int>{3, 3}, 2),
                                  std::pair(std::vector<int>{5, 1}, 4), std::pair(std::vector<int>{2, 4}, 3)}) {
    spec.stage_blocks = cut;
    CHECK(most_layers_of_a_stage(tiny_gpt2(), spec) == most);
    CHECK(legal_recompute_layers(tiny_gpt2(), training, spec, 9).size() == static_cast<std::size_t>(most) + 1);
    spec.recompute_layers = most;
    CHECK(reason_of(spec) == "legal");
    spec.recompute_layers = most + 1;
    CHECK(reason_of(spec) == fmt::format("recompute_layers is {}, and no stage has more than {} layers; take 1 to {}, "
                                         "or leave it out: all layers recompute",
                                         most + 1, most, most));
  }
  spec = layout(tiny_gpt2(), 1, 1, 1);
  spec.recompute = Recompute::norms;
  spec.recompute_layers = 5;
  CHECK(reason_of(spec) ==
        "recompute_layers is 5, and the model has 4 layers; take 1 to 4, or leave it out: all "
        "layers recompute");
  spec.recompute = Recompute::none;
  CHECK(reason_of(spec) == "recompute_layers says how many layers of each stage recompute, and recompute is none");
  spec = layout(tiny_gpt2(), 1, 1, 2);
  spec.stage_blocks = {4, 2};
  spec.recompute = Recompute::per_stage;
  spec.stage_recompute = {{Recompute::full, 3}, {Recompute::norms, 1}};
  CHECK(reason_of(spec) == "legal");
  spec.stage_recompute.back().layers = 2;
  CHECK(reason_of(spec) ==
        "stage 1 recomputes 2 of its layers (norms:2), and it has 1; take at most 1, or norms for "
        "all of them");
  spec.stage_recompute.back() = {Recompute::none, 1};
  CHECK(reason_of(spec) == "stage 1 recomputes nothing of 1 layers; say what they recompute, or leave the number out");
}

TEST_CASE("Engines that count layers hold as many on each stage, or count embedding and head as layers") {
  const auto cut_of = [](int layers, int stages) {
    OpGraph graph;
    graph.blocks.resize(static_cast<std::size_t>(layers) + 2);
    return equal_stages(graph, Engine{}, stages);
  };
  CHECK(cut_of(8, 1) == std::vector{10});
  // Two layers a stage; the embedding is with the first, the head with the last.
  CHECK(cut_of(8, 4) == std::vector{3, 2, 2, 3});
  // Zero Bubble's 1.5B (22 layers on 8 stages, one less on the first and the last) and BLOOM's 106
  // layers on 12 stages.
  CHECK(cut_of(22, 8) == std::vector{3, 3, 3, 3, 3, 3, 3, 3});
  CHECK(cut_of(106, 12) == std::vector<int>(12, 9));
  // Neither divides.
  CHECK(cut_of(7, 4) == std::vector{3, 2, 2, 2});
  CHECK(cut_of(2, 3) == std::vector{2, 1, 1});
  for (int layers = 1; layers < 12; ++layers)
    for (int stages = 1; stages <= layers + 2; ++stages) {
      const std::vector<int> cut = cut_of(layers, stages);
      CAPTURE(layers);
      CAPTURE(stages);
      CHECK(static_cast<int>(cut.size()) == stages);
      CHECK(std::accumulate(cut.begin(), cut.end(), 0) == layers + 2);
      CHECK(std::ranges::min(cut) >= 1);
    }
}

TEST_CASE("Engines whose last stages take more count layers alone, as InternEvo's partition_uniform does") {
  Engine engine;
  engine.equal_stages = engine.last_stages_take_more = true;
  const auto cut_of = [&](int layers, int stages) {
    OpGraph graph;
    graph.blocks.resize(static_cast<std::size_t>(layers) + 2);
    return stages_of_engine(graph, engine, stages).value();
  };
  // The embedding is with the first, the head with the last: 10, 11, 11 and 6, 6, 6, 7, 7 layers.
  CHECK(cut_of(32, 3) == std::vector{11, 11, 12});
  CHECK(cut_of(32, 5) == std::vector{7, 6, 6, 7, 8});
  CHECK(cut_of(8, 4) == std::vector{3, 2, 2, 3});
  // Embedding and head would make eight of three each.
  CHECK(cut_of(22, 8) == std::vector{3, 2, 3, 3, 3, 3, 3, 4});
}

TEST_CASE("Engines that share out the weights of products end a stage where they exceed its share") {
  // GPT-2's head multiplies with 50,257 x 768 weights, a layer with 12 x 768^2: 5.45 layers, and
  // all are 17.45. The embedding multiplies with nothing.
  const OpGraph graph = graph_of(models_folder, "gpt2", 1024);
  CHECK(stages_by_weights(graph, 2) == std::vector{10, 4});
  CHECK(stages_by_weights(graph, 3) == std::vector{7, 6, 1});
  // Behind layers 5 and 9, and the head: nothing is left for the fourth.
  CHECK(stages_by_weights(graph, 4) == std::vector{6, 4, 4, 0});
  // Behind layers 3, 5, 8 and 10; the last two have 8.45 of 17.45, of which each may take 2.91.
  CHECK(stages_by_weights(graph, 6) == std::vector{4, 3, 3, 3, 1, 0});

  // Llama-3 8B: 4 x 4096^2 + 3 x 4096 x 14336 a layer, though four query heads share a key and a
  // value; its head, 128,256 x 4096, is 2.16 layers, and all are 34.16.
  const OpGraph grouped = graph_of(models_folder, "llama3-8b", 1024);
  const std::int64_t layer = 4 * 4096 * 4096 + 3 * 4096 * 14336, head = 128256 * 4096;
  CHECK(stages_by_weights(grouped, 8) == std::vector{6, 4, 4, 5, 4, 4, 4, 3});
  for (const int stages : {2, 3, 4, 8, 11, 15}) {  // by the formula, with NumPy's fractions
    std::vector<int> cut(static_cast<std::size_t>(stages), 0);
    std::size_t stage = 0;
    for (int block = 0; block < 34; ++block) {
      ++cut[stage];
      const std::int64_t so_far = std::min(block, 32) * layer + (block == 33 ? head : 0);
      const double share = static_cast<double>(stage + 1) / stages;
      if (static_cast<double>(so_far) > static_cast<double>(32 * layer + head) * share) ++stage;
    }
    CAPTURE(stages);
    CHECK(stages_by_weights(grouped, stages) == cut);
    CHECK(cut.back() > 0);
  }

  TrainingSpec training;
  training.engine.name = "weighs";
  training.engine.stages_share_weights = true;
  training.global_batch = 8;
  ParallelSpec spec;
  CHECK(legal_pipeline_degrees(graph, training, spec, 14) == std::vector{1, 2, 3});
  spec.mesh.degree.pp = 3;
  CHECK(illegal_pipeline(graph, training, spec) == std::nullopt);
  spec.mesh.degree.pp = 4;
  CHECK(illegal_pipeline(graph, training, spec) ==
        "engine weighs fills 4 stages by the weights of products, which leaves the last without a block; legal "
        "degrees: 1 to 3");
  spec.mesh.degree.pp = 15;
  CHECK(illegal_pipeline(graph, training, spec) ==
        "pipeline parallelism over 15 cannot give every stage a block: the model has 14 (embedding to head); legal "
        "degrees: 1 to 3");
  CHECK(stages_of_engine(graph, training.engine, 2) == std::vector{10, 4});
  training.engine.stages_share_weights = false;
  CHECK(stages_of_engine(graph, training.engine, 2) == std::nullopt);
}

TEST_CASE("Zero-bubble pipelines need whole gradients") {
  ParallelSpec spec = layout(tiny_gpt2(), 2, 1, 2);
  spec.schedule = ScheduleKind::zero_bubble_h1;
  for (const int zero : {0, 1}) {
    spec.zero_stage = zero;
    CHECK(reason(tiny_gpt2(), spec) == "legal");
  }
  spec.zero_stage = 3;
  CHECK(reason(tiny_gpt2(), spec) ==
        "the schedule zero_bubble_h1 runs backwards in two parts, which needs whole gradients until the second, and "
        "zero_stage is 3; legal stages: 0, 1");
}

TEST_CASE("Pipelines down the ranks and back have two stages on each rank") {
  ParallelSpec spec = layout(tiny_gpt2(), 2, 1, 2);
  spec.stage_blocks.clear();
  spec.schedule = ScheduleKind::zero_bubble_v;
  CHECK(reason(tiny_gpt2(), spec) ==
        "the schedule zero_bubble_v has 2 stages on each rank, one on the way down the ranks and one on the way back, "
        "and virtual_stages is 1");
  spec.virtual_stages = 2;
  CHECK(reason(tiny_gpt2(), spec) == "legal");
  spec.micro_batch_group = 4;
  CHECK(reason(tiny_gpt2(), spec) ==
        "micro_batch_group is for the schedule interleaved, and the schedule is zero_bubble_v");
  spec.micro_batch_group = 0;
  spec.zero_stage = 2;
  CHECK(reason(tiny_gpt2(), spec) ==
        "the schedule zero_bubble_v runs backwards in two parts, which needs whole gradients until the second, and "
        "zero_stage is 2; legal stages: 0, 1");
  spec.zero_stage = 0;
  spec.mesh.degree.pp = 1;
  CHECK(reason(tiny_gpt2(), spec) ==
        "the schedule zero_bubble_v goes down 2 or more ranks and back, and pp is 1; take 1f1b");
  spec.mesh.degree = {.pp = 4};
  CHECK(reason(tiny_gpt2(), spec) ==
        "the schedule zero_bubble_v has 2 stages on each of 4 ranks, which cannot all have a block: the model has 6 "
        "(embedding to head); legal degrees: 2 to 3");
  spec.mesh.degree = {.pp = 2};
  spec.schedule = ScheduleKind::dualpipe_v;
  spec.micro_batch = 8;
  CHECK(reason(tiny_gpt2(), spec) ==
        "the schedule dualpipe_v of 2 ranks runs at least 4 micro-batches, two for each rank, and there are 2: take "
        "smaller micro-batches, less data parallelism, a larger batch, or zero_bubble_v");
  spec.micro_batch = 4;
  CHECK(reason(tiny_gpt2(), spec) == "legal");
}

TEST_CASE("Interleaved pipelines obey Megatron-LM's rules") {
  ParallelSpec spec = layout(tiny_gpt2(), 1, 1, 2);
  spec.stage_blocks.clear();
  spec.virtual_stages = 2;
  CHECK(reason(tiny_gpt2(), spec) ==
        "virtual_stages and micro_batch_group are for the schedule interleaved, and the schedule is 1f1b");
  spec.schedule = ScheduleKind::interleaved;
  CHECK(reason(tiny_gpt2(), spec) == "legal");
  CHECK(reason(tiny_gpt2(), spec, 2) == "legal");
  CHECK(reason(tiny_gpt2(), spec, 1) ==
        "an interleaved pipeline runs micro-batches in groups of 2, and there is 1: take smaller micro-batches, less "
        "data parallelism, or a larger batch");
  CHECK(reason(tiny_gpt2(), spec, 3) ==
        "an interleaved pipeline of 2 ranks runs micro-batches in groups of 2, and 3 leave a last group of 1: it must "
        "have at least 2, as with micro_batch_group 3, or the number must be a multiple of 2");
  spec.micro_batch_group = 3;
  CHECK(reason(tiny_gpt2(), spec, 5) == "legal");
  CHECK(reason(tiny_gpt2(), spec, 6) == "legal");
  CHECK(reason(tiny_gpt2(), spec, 7).find("7 leave a last group of 1") != std::string::npos);
  spec.micro_batch_group = 1;
  CHECK(reason(tiny_gpt2(), spec) ==
        "an interleaved pipeline of 2 ranks runs micro-batches in groups of at least 2, and micro_batch_group is 1");
  spec.micro_batch_group = 0;
  spec.virtual_stages = 4;
  CHECK(reason(tiny_gpt2(), spec) ==
        "4 virtual stages on each of 2 ranks cannot all have a block: the model has 6 (embedding to head); legal "
        "numbers of virtual stages: 1 to 3");
  spec.virtual_stages = 3;
  spec.stage_blocks = {3, 3};
  CHECK(reason(tiny_gpt2(), spec) == "the stage cut [3, 3] has 2 stages, and pp 2 x virtual_stages 3 is 6");
  spec.stage_blocks = {};
  spec.virtual_stages = 1;
  CHECK(reason(tiny_gpt2(), spec) ==
        "an interleaved pipeline has 2 or more stages on each rank (virtual_stages), and there is 1; 1f1b has one");
  spec.mesh.degree.pp = 1;
  spec.virtual_stages = 2;
  CHECK(reason(tiny_gpt2(), spec) == "an interleaved pipeline goes around 2 or more ranks, and pp is 1; take 1f1b");
}

TEST_CASE("The inner width and the vocabulary bound the degree where heads do not") {
  ModelSpec spec = load_model("mlp", models_folder).spec;
  spec.feature = 6;
  spec.vocabulary = 11;
  const OpGraph graph = build_graph(spec, 8);
  CHECK(reason(graph, layout(graph, 1, 4, 1)) ==
        "tensor parallelism over 4 cannot split a feed-forward width of 6; legal degrees: 1, 2, 3, 6");
  spec.feature = 1 << 10;
  const OpGraph wide = build_graph(spec, 8);
  CHECK(reason(wide, layout(wide, 1, 8, 1)) == "legal");
  CHECK(reason(wide, layout(wide, 1, 16, 1)) ==
        "tensor parallelism over 16 cannot split a vocabulary of 11; legal degrees: 1, 2, 4, 8");
}

TEST_CASE("Megatron's placements of a GPT-2, in whole") {
  const Placements placements = place(tiny_gpt2(), layout(tiny_gpt2(), 1, 2, 1));
  CHECK(written(placements) == std::map<std::string, std::string>{
                                   {"embedding.weight", "Shard(vocabulary)"},
                                   {"position.weight", "Replicate"},
                                   {"attention_norm.weight", "Replicate"},
                                   {"attention_norm.bias", "Replicate"},
                                   {"attention.qkv.weight", "Shard(kv_groups)"},
                                   {"attention.qkv.bias", "Shard(kv_groups)"},
                                   {"attention.output.weight", "Shard(kv_groups)"},
                                   {"attention.output.bias", "Replicate"},
                                   {"feed_forward_norm.weight", "Replicate"},
                                   {"feed_forward_norm.bias", "Replicate"},
                                   {"feed_forward.up.weight", "Shard(feature)"},
                                   {"feed_forward.up.bias", "Shard(feature)"},
                                   {"feed_forward.down.weight", "Shard(feature)"},
                                   {"feed_forward.down.bias", "Replicate"},
                                   {"head.norm.weight", "Replicate"},
                                   {"head.norm.bias", "Replicate"},
                               });
  CHECK(placements.residual.tp == replicate());
  CHECK(placements.state.parameters.dp == replicate());
  CHECK(placements.state.gradients.dp == replicate());
  CHECK(placements.state.optimizer.dp == replicate());
}

TEST_CASE("Megatron's placements of a Llama with sequence parallelism and ZeRO, in whole") {
  ParallelSpec spec = layout(tiny_llama(), 2, 2, 1);
  spec.sequence_parallel = true;
  spec.zero_stage = 1;
  const Placements placements = place(tiny_llama(), spec);
  CHECK(written(placements) == std::map<std::string, std::string>{
                                   {"embedding.weight", "Shard(vocabulary)"},
                                   {"attention_norm.weight", "Replicate"},
                                   {"attention.qkv.weight", "Shard(kv_groups)"},
                                   {"attention.output.weight", "Shard(kv_groups)"},
                                   {"feed_forward_norm.weight", "Replicate"},
                                   {"feed_forward.gate.weight", "Shard(feature)"},
                                   {"feed_forward.up.weight", "Shard(feature)"},
                                   {"feed_forward.down.weight", "Shard(feature)"},
                                   {"head.norm.weight", "Replicate"},
                                   {"head.weight", "Shard(vocabulary)"},
                               });
  CHECK(placements.residual.tp == shard(Dim::sequence));
  CHECK(placements.state.parameters.dp == replicate());
  CHECK(placements.state.gradients.dp == replicate());
  CHECK(placements.state.optimizer.dp == flat_shard());
}

TEST_CASE("Without tensor parallelism nothing is cut") {
  for (const auto& placed : place(tiny_gpt2(), layout(tiny_gpt2(), 4, 1, 1)).parameters) {
    const Placement placement = placed.second.tp;
    INFO(placed.first);
    CHECK(placement == replicate());
  }
}

TEST_CASE("Each ZeRO stage shards one thing more") {
  ParallelSpec spec = layout(tiny_gpt2(), 2, 1, 1);
  for (int stage = 0; stage <= 3; ++stage) {
    spec.zero_stage = stage;
    const Placements placements = place(tiny_gpt2(), spec);
    CHECK(placements.state.optimizer.dp == (stage >= 1 ? flat_shard() : replicate()));
    CHECK(placements.state.gradients.dp == (stage >= 2 ? flat_shard() : replicate()));
    CHECK(placements.state.parameters.dp == (stage >= 3 ? flat_shard() : replicate()));
  }
}
