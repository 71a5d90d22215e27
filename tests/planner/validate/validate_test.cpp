#include "planner/validate/validate.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <limits>
#include <map>
#include <regex>
#include <utility>

#include "cli/published_model.h"
#include "planner/base/error.h"
#include "planner/base/file.h"
#include "planner/cluster/group_network.h"
#include "planner/cost/collective_time.h"
#include "planner/cost/cost_model.h"
#include "planner/graph/engine_file.h"
#include "planner/graph/engine_graph.h"
#include "planner/suggest.h"
#include "planner/validate/validation_report.h"
#include "tests/planner/base/error_of.h"
#include "tests/temporary_folder.h"

namespace parplan {
namespace {

const std::string source = PARPLAN_SOURCE_DIR;
const std::string published = source + "/tests/data/published/";
const ClusterCatalog catalog{source + "/configs/devices", source + "/configs/clusters"};
const std::filesystem::path engines = source + "/configs/engines";
const ValidationRequest as_stated{.catalog = catalog, .engines = engines, .engine = {}};
const ValidationRequest as_own{.catalog = catalog, .engines = engines, .engine = "parplan"};

// A GPT of 1.7 billion parameters on 32 A100, of which all is stated.
PublishedRun stated_run() {
  PublishedRun run;
  run.id = "one";
  run.source = "a paper";
  run.engine = "megatron";
  run.family = "gpt";
  run.device = "a100-sxm4-80gb";
  run.precision = "bf16";
  run.outcome = "ok";
  run.intra_node = "nvlink3-nvswitch";
  run.recompute = "none";
  run.layers = 24;
  run.hidden = 2304;
  run.heads = run.kv_heads = 24;
  run.feature = 9216;
  run.vocabulary = 51200;
  run.sequence = 2048;
  run.gated = false;
  run.sequence_parallel = false;
  run.devices = 32;
  run.devices_per_node = 8;
  run.gbit_s_per_node = 1600;
  run.dp = 4;
  run.zero_stage = 1;
  run.tp = 4;
  run.pp = 2;
  run.virtual_stages = run.cp = 1;
  run.micro_batch = 2;
  run.global_batch = 128;
  run.step_seconds = 2.0;
  run.memory_gib = 10.0;
  return run;
}

TEST_CASE("a run of which all is stated is simulated as it stands") {
  const ValidatedRun validated = validate(stated_run(), as_stated, graph_of_published);
  CHECK(validated.skipped == "");
  CHECK(validated.assumed.empty());
  const StatedRun stated = state(stated_run(), as_stated);
  CHECK(stated.training.engine == find_engine("megatron", engines));
  const OpGraph graph = as_run_by(stated.training, graph_of_published(stated.model));
  CHECK(static_cast<double>(parameter_count(graph)) == doctest::Approx(1.66e9).epsilon(0.01));
  ClusterOptions options;
  options.devices = 32;
  CHECK(stated.cluster == find_cluster("dgx-a100", catalog, options));
  SuggestRequest request;
  request.graph = &graph;
  request.cluster = find_cluster("dgx-a100", catalog, options);
  request.training.precision = DataType::bf16;
  request.training.global_batch = 128;
  request.training.sequence_length = 2048;
  request.training.engine = stated.training.engine;
  request.layout = LayoutRequest{
      {Choice::dp, 4}, {Choice::tp, 4}, {Choice::pp, 2}, {Choice::zero_stage, 1}, {Choice::micro_batch, 2}};
  const Plan plan = simulate_layout(request);
  CHECK(validated.step == plan.prediction.time.total());
  CHECK(validated.memory == plan.prediction.memory.peak());
  CHECK(validated.engine == "megatron");
  CHECK(validated.verdict == MemoryVerdict::fits);
  CHECK(validated.device_memory == plan.prediction.memory.peak());
  CHECK(*validated.step_error() == doctest::Approx(validated.step.value / 2.0 - 1.0));
  CHECK(*validated.memory_error() ==
        doctest::Approx(static_cast<double>(validated.memory.count) / 10.0 / 1073741824.0 - 1.0));
}

TEST_CASE("a figure of memory is compared with what its tool counts") {
  PublishedRun run = stated_run();
  const auto counted = [&](const std::string& measured_by) {
    run.source = measured_by;
    const ValidatedRun validated = validate(run, as_stated, graph_of_published);
    CHECK(validated.skipped == "");
    return std::pair(name(validated.scope), validated.memory);
  };
  const auto [device, all] = counted("somebody");
  const auto [allocated, tensors] = counted("SimuMax@4dcaae513b");
  const auto [reserved, kept] = counted("torchtitan@9515a140b docs/performance.md");
  CHECK(std::string(device) == "device");
  CHECK(std::string(allocated) == "allocated");
  CHECK(std::string(reserved) == "reserved");
  CHECK(tensors < kept);
  CHECK(kept < all);
}

TEST_CASE("facts that were not published are filled in and named") {
  PublishedRun run = stated_run();
  run.kv_heads.reset();  // as many as heads, in a GPT
  CHECK(state(run, as_stated).assumed.empty());
  run.vocabulary.reset();
  run.gbit_s_per_node.reset();
  run.zero_stage.reset();
  run.micro_batch.reset();
  run.sequence_parallel.reset();
  run.virtual_stages.reset();
  run.recompute = "";
  const StatedRun stated = state(run, as_stated);
  CHECK(stated.skipped == "");
  CHECK(stated.assumed.size() == 6);
  CHECK(stated.recompute_unstated);
  CHECK(stated.model.vocabulary == 51200);
  CHECK(given<std::int64_t>(stated.layout, Choice::zero_stage) == 0);
  run.engine = "fsdp";  // which shards all
  CHECK(given<std::int64_t>(state(run, as_stated).layout, Choice::zero_stage) == 3);
  // What one rank or one node has no use for is no assumption.
  run = stated_run();
  run.devices = 4;
  run.dp = run.pp = 1;
  run.zero_stage.reset();
  run.gbit_s_per_node.reset();
  run.virtual_stages.reset();
  CHECK(state(run, as_stated).assumed.empty());
}

TEST_CASE("what a run's notes or its source imply is no assumption") {
  PublishedRun run = stated_run();
  run.zero_stage.reset();
  run.sequence_parallel.reset();
  CHECK(state(run, as_stated).assumed.size() == 2);
  run.notes = "Published flags: --overlap-param-gather, --tp-comm-overlap.";
  StatedRun stated = state(run, as_stated);
  CHECK(stated.assumed.empty());
  CHECK(given<std::int64_t>(stated.layout, Choice::zero_stage) == 1);
  CHECK(given<bool>(stated.layout, Choice::sequence_parallel) == true);
  CHECK(given<TensorOverlap>(stated.layout, Choice::tp_overlap) == TensorOverlap::ring);
  // What is stated counts, and an engine without the overlap goes without.
  run.zero_stage = 0;
  run.sequence_parallel = false;
  stated = state(run, as_stated);
  CHECK(given<std::int64_t>(stated.layout, Choice::zero_stage) == 0);
  CHECK(!stated.layout[Choice::sequence_parallel]);
  CHECK(!stated.layout[Choice::tp_overlap]);
  run.notes = "";
  run.source = "dgxc-benchmarking@1b9bb6b nemo_megatron/README_175b.md";
  run.sequence_parallel = true;
  CHECK(state(run, as_stated).layout[Choice::tp_overlap]);
  ValidationRequest without = as_stated;
  without.engine = "megatron-2022";
  CHECK(!state(run, without).layout[Choice::tp_overlap]);
  // Megatron-Bridge's recipes have it wherever there is tensor parallelism, and recompute nothing.
  run.source = "Megatron-Bridge@067f987df0 docs/performance-summary-archive.md";
  run.recompute = "";
  stated = state(run, as_stated);
  CHECK(given<TensorOverlap>(stated.layout, Choice::tp_overlap) == TensorOverlap::ring);
  CHECK(given<Recompute>(stated.layout, Choice::recompute) == Recompute::none);
}

TEST_CASE("sequence parallelism that is not stated is assumed where the engine has it") {
  PublishedRun run = stated_run();
  run.sequence_parallel.reset();
  StatedRun stated = state(run, as_stated);
  CHECK(given<bool>(stated.layout, Choice::sequence_parallel) == true);
  CHECK(stated.assumed == std::vector<std::string>{"sequence parallelism: true"});
  run.engine = "megatron-deepspeed";
  stated = state(run, as_stated);
  CHECK(!stated.layout[Choice::sequence_parallel]);
  CHECK(stated.assumed.empty());
}

TEST_CASE("sequence parallelism is not assumed where the model or the sequence cannot have it") {
  PublishedRun run = stated_run();
  const auto of = [&](std::optional<bool> sequence_parallel) {
    run.sequence_parallel = sequence_parallel;
    const ValidatedRun validated = validate(run, as_stated, graph_of_published);
    CHECK(validated.skipped == "");
    return std::pair(validated.step, validated.assumed);
  };
  const std::vector<std::string> assumed{assumed_sequence_parallel};
  CHECK(of({}) == std::pair(of(true).first, assumed));
  run.sequence = 2046;  // 4 ranks do not divide it
  CHECK(of({}) == of(false));
  // Nor the halves of a T5, whose rows are taken apart.
  run = stated_run();
  run.family = "t5";
  CHECK(of({}) == of(false));
  // What is illegal without it, too, is said of the run as it is assumed.
  run.pp = 16;
  run.dp = 1;
  run.tp = 2;
  run.layers = 9;
  run.sequence_parallel.reset();
  CHECK(validate(run, as_stated, graph_of_published).skipped != "");
}

TEST_CASE("columns that tables may have say more of the nodes, the shards, recompute and the head") {
  PublishedRun run = stated_run();
  run.device = run.intra_node = "";
  run.cluster = "aws-p5";
  run.shard = 2;
  run.recompute = "full";
  run.recompute_layers = 10;
  run.tied_embeddings = false;
  StatedRun stated = state(run, as_stated);
  CHECK(stated.skipped == "");
  ClusterOptions options;
  options.devices = 32;
  CHECK(stated.cluster == find_cluster("aws-p5", catalog, options));
  CHECK(given<std::int64_t>(stated.layout, Choice::dp_shard) == 2);
  CHECK(given<std::int64_t>(stated.layout, Choice::recompute_layers) == 10 / *run.pp);
  CHECK(!stated.model.tied_embeddings);
  // None of them, whatever is recomputed.
  run.recompute_layers = 0;
  for (const char* const recompute : {"full", "none", ""}) {
    run.recompute = recompute;
    stated = state(run, as_stated);
    CHECK(given<Recompute>(stated.layout, Choice::recompute) == Recompute::none);
    CHECK(!stated.layout[Choice::recompute_layers]);
    CHECK(!stated.recompute_unstated);
    CHECK(stated.assumed.empty());
  }
  run.recompute = "none";
  run.recompute_layers = 10;
  CHECK(state(run, as_stated).skipped == "10 layers recompute, and recompute is none");
  // Whole ones, where what they recompute is not stated.
  run.recompute = "";
  stated = state(run, as_stated);
  CHECK(given<Recompute>(stated.layout, Choice::recompute) == Recompute::full);
  CHECK(given<std::int64_t>(stated.layout, Choice::recompute_layers) == 5);
  CHECK(stated.assumed == std::vector<std::string>{"recompute of whole layers"});
  CHECK(!stated.recompute_unstated);
  run.recompute = "full";
  run.recompute_layers = 11;
  CHECK(state(run, as_stated).skipped == "11 layers that recompute are no multiple of 2 stages");
  // A rank of an interleaved pipeline has several stages.
  run.virtual_stages = 3;
  run.recompute_layers = 12;
  CHECK(given<std::int64_t>(state(run, as_stated).layout, Choice::recompute_layers) == 12 / (*run.pp * 3));
  run.recompute_layers = 10;
  CHECK(state(run, as_stated).skipped == "10 layers that recompute are no multiple of 6 stages");
  run.cluster = "abacus";
  CHECK(state(run, as_stated).skipped.find("abacus") != std::string::npos);
}

// The published runs whose ids begin so.
std::vector<PublishedRun> runs_of(const std::string& ids) {
  std::vector<PublishedRun> runs = read_published_runs(published + "runs.csv");
  std::erase_if(runs, [&](const PublishedRun& run) { return !run.id.starts_with(ids); });
  REQUIRE(!runs.empty());
  return runs;
}

TEST_CASE("what a source's script sets for a run is no assumption, and holds for that run alone") {
  // MODEL_SIZE of run_table_1.sh by its devices: MBS, and stages that a rank holds.
  const std::map<std::int64_t, std::pair<std::int64_t, std::int64_t>> of_script = {
      {32, {16, 1}},   {64, {16, 1}},   {128, {16, 1}},  {256, {8, 1}},   {512, {4, 1}},
      {1024, {2, 3}},  {1536, {2, 2}},  {1920, {1, 2}},  {2520, {1, 3}},  {3072, {1, 1}}};
  const std::vector<PublishedRun> table = runs_of("sc21-t1-");
  CHECK(table.size() == of_script.size());
  for (PublishedRun run : table) {
    INFO(run.id);
    REQUIRE(!run.micro_batch);
    REQUIRE(!run.virtual_stages);
    const auto [micro_batch, stages] = of_script.at(*run.devices);
    const StatedRun stated = state(run, as_stated);
    CHECK(stated.assumed.empty());
    CHECK(given<std::int64_t>(stated.layout, Choice::micro_batch) == micro_batch);
    CHECK(given<std::int64_t>(stated.layout, Choice::virtual_stages).value_or(1) == stages);
    CHECK(stated.layout[Choice::schedule].has_value() == (stages > 1));
    CHECK(*run.global_batch % (*run.dp * micro_batch) == 0);
    CHECK(*run.layers % (*run.pp * stages) == 0);
    // What the table states counts.
    run.micro_batch = 1;
    CHECK(given<std::int64_t>(state(run, as_stated).layout, Choice::micro_batch) == 1);
    run.micro_batch.reset();
    // Other devices or another model are another run.
    PublishedRun other = run;
    other.devices = *run.devices * 2;
    other.dp = *run.dp * 2;
    CHECK(state(other, as_stated).assumed.front() == "micro-batch 1");
    other = run;
    other.layers = *run.layers * 2;
    CHECK(state(other, as_stated).assumed.front() == "micro-batch 1");
  }
  const StatedRun readme = state(runs_of("megatron-readme-175b-1024").front(), as_stated);
  CHECK(readme.assumed.empty());
  CHECK(given<std::int64_t>(readme.layout, Choice::micro_batch) == 1);
  CHECK(!readme.layout[Choice::schedule]);
  for (const PublishedRun& run : runs_of("dgxc-gpt3-175b")) {
    CHECK(run.recompute.empty());
    const StatedRun stated = state(run, as_stated);
    CHECK(stated.assumed.empty());
    CHECK(!stated.recompute_unstated);
    CHECK(given<Recompute>(stated.layout, Choice::recompute) == Recompute::none);
  }
  // NeMo 24.07: its recipes but that of 175B on 128 GPUs set transfers beside products, and that of
  // Nemotron 340B alone recomputes attention's core.
  PublishedRun nemo = runs_of("nemo2407-llama2-70b-64-gb128").front();
  const auto of_nemo = [&] { return state(nemo, as_stated).layout; };
  CHECK(of_nemo()[Choice::tp_overlap]);
  CHECK(given<Recompute>(of_nemo(), Choice::recompute) == Recompute::none);
  nemo.layers = 96;
  nemo.hidden = 12288;
  nemo.devices = 128;
  nemo.pp = 8;
  CHECK(!of_nemo()[Choice::tp_overlap]);
  nemo.devices = 512;
  nemo.dp = 16;
  CHECK(of_nemo()[Choice::tp_overlap]);
  nemo.hidden = 18432;
  nemo.devices = 128;
  nemo.tp = 8;
  nemo.dp = 2;
  CHECK(of_nemo()[Choice::tp_overlap]);
  CHECK(given<Recompute>(of_nemo(), Choice::recompute) == Recompute::core_attn);
  nemo.recompute = "full";  // what is stated counts
  CHECK(given<Recompute>(of_nemo(), Choice::recompute) == Recompute::full);
  // What a recipe's row does not say stays unstated.
  nemo.micro_batch.reset();
  nemo.virtual_stages.reset();
  CHECK(state(nemo, as_stated).assumed == std::vector<std::string>{"micro-batch 1", "virtual stages: 1"});
  // Both versions of NVIDIA's benchmarks.
  nemo.recompute = "";
  for (const char* const version : {"1b9bb6b", "35a9aec"}) {
    nemo.source = fmt::format("dgxc-benchmarking@{} nemotron", version);
    CHECK(given<Recompute>(of_nemo(), Choice::recompute) == Recompute::core_attn);
    CHECK(!of_nemo()[Choice::tp_overlap]);
    nemo.source = fmt::format("dgxc-benchmarking@{} llama3.1", version);
    CHECK(given<Recompute>(of_nemo(), Choice::recompute) == Recompute::none);
    CHECK(of_nemo()[Choice::tp_overlap]);
  }
}

TEST_CASE("an engine that interleaves no pipelines leaves no virtual stages to assume") {
  const PublishedRun run = runs_of("mtnlg-530b-2240").front();
  REQUIRE(!run.virtual_stages);
  CHECK(state(run, as_stated).assumed.empty());
  ValidationRequest interleaves = as_stated;
  interleaves.engine = "megatron";
  CHECK(state(run, interleaves).assumed == std::vector<std::string>{"virtual stages: 1"});
  // One that says so is refused.
  PublishedRun other = run;
  other.virtual_stages = 3;
  CHECK(validate(other, as_stated, graph_of_published).skipped.find("interleaved") != std::string::npos);
}

TEST_CASE("models have the parameters that their sources publish") {
  const auto billions = [](const PublishedRun& run) {
    const StatedRun stated = state(run, as_stated);
    REQUIRE(stated.skipped.empty());
    return static_cast<double>(parameter_count(graph_of_published(stated.model))) / 1e9;
  };
  // Qi et al. 2023, table 3. The vocabulary is nowhere stated: GPT-2's makes 14.7 of 14.6 billion.
  for (const double published_billions : {1.5, 6.2, 14.6, 28.3})
    for (const PublishedRun& run : runs_of("zb-"))
      if (run.id.find(fmt::format("-{}b-", published_billions)) != std::string::npos) {
        INFO(run.id);
        CHECK(std::abs(billions(run) - published_billions) < 0.05);
        CHECK(state(run, as_stated).assumed.front() == "vocabulary 32000");
      }
  PublishedRun padded = runs_of("zb-1f1b-i-14.6b").front();
  padded.vocabulary = 51200;
  CHECK(billions(padded) > 14.65);
  // nanotron's scaling_benchmarks.py ties the embeddings of the two smaller ones.
  for (const double published_billions : {1.34, 3.57, 8.86, 80.0})
    for (const PublishedRun& run : runs_of("nanotron-"))
      if (run.id.find(fmt::format("-{}b", published_billions)) != std::string::npos) {
        INFO(run.id);
        CHECK(billions(run) == doctest::Approx(published_billions).epsilon(0.005));
      }
  // Elsewhere such a model has a head of its own.
  PublishedRun elsewhere = runs_of("nanotron-tp2-3.57b").front();
  const double tied = billions(elsewhere);
  elsewhere.source = "somebody";
  CHECK(billions(elsewhere) - tied == doctest::Approx(131072 * 3072 / 1e9));
}

TEST_CASE("a run that does not say what it recomputed did so as little as it fitted with") {
  PublishedRun run = stated_run();
  run.recompute = "";
  const auto assumed = [&](const std::string& outcome) {
    run.outcome = outcome;
    const ValidatedRun validated = validate(run, as_stated, graph_of_published);
    CHECK(validated.skipped == "");
    REQUIRE(validated.assumed.size() == 1);
    return std::pair(validated.assumed.front(), validated.verdict == MemoryVerdict::does_not_fit);
  };
  CHECK(assumed("ok") == std::pair(std::string("no recompute"), false));
  run.micro_batch = 32;
  run.sequence = 8192;
  const auto [least, too_large] = assumed("ok");
  CHECK(!too_large);
  CHECK(least.ends_with(", the least that fits"));
  // A run that ran out of memory proves nothing.
  CHECK(assumed("oom") == std::pair(std::string("no recompute"), true));
  run.sequence = 32768;
  CHECK(assumed("ok") == std::pair(std::string("recompute: full, with which it does not fit either"), true));
}

TEST_CASE("a run that cannot have fitted as it is stated recomputed more") {
  PublishedRun run = stated_run();
  const auto validated = [&](const std::string& outcome) {
    run.outcome = outcome;
    return validate(run, as_stated, graph_of_published);
  };
  run.recompute = "none";
  CHECK(validated("ok").assumed.empty());
  run.micro_batch = 32;
  run.sequence = 8192;
  const ValidatedRun ran = validated("ok");
  REQUIRE(ran.assumed.size() == 1);
  CHECK(ran.assumed.front().find(", the least that fits: as stated it needs ") != std::string::npos);
  CHECK(ran.verdict != MemoryVerdict::does_not_fit);
  run.recompute = "";
  const ValidatedRun unstated = validated("ok");
  CHECK(ran.step == unstated.step);
  CHECK(ran.memory == unstated.memory);
  // How many layers recomputed, too, is not of the rule that is taken instead.
  run.recompute = "full";
  run.recompute_layers = run.pp;
  const ValidatedRun of_few_layers = validated("ok");
  CHECK(of_few_layers.skipped == "");
  CHECK(of_few_layers.step == unstated.step);
  run.recompute_layers = {};
  run.recompute = "none";
  const ValidatedRun out_of_memory = validated("oom");
  CHECK(out_of_memory.assumed.empty());
  CHECK(out_of_memory.verdict == MemoryVerdict::does_not_fit);
  CHECK(out_of_memory.memory > ran.memory);
  // Where nothing fits, what is stated is as good as anything.
  run.sequence = 32768;
  const ValidatedRun hopeless = validated("ok");
  CHECK(hopeless.assumed.empty());
  CHECK(hopeless.verdict == MemoryVerdict::does_not_fit);
}

TEST_CASE("runs of one engine are predicted as its version of that time, or as the engine that is asked for") {
  PublishedRun run = stated_run();
  const auto engine = [&](const ValidationRequest& request) { return state(run, request).training.engine.name; };
  CHECK(engine(as_stated) == "megatron");
  run.source = "Korthikanti et al. 2022 (arXiv 2205.05198)";
  CHECK(engine(as_stated) == "megatron-2022");
  CHECK(engine(as_own) == "parplan");
  run.engine = "fsdp";
  CHECK(engine(as_stated) == "fsdp");
  CHECK(state(run, as_stated).assumed.empty());
  run.engine = "an engine without a file";
  CHECK(engine(as_stated) == "parplan");
  CHECK(state(run, as_stated).assumed.size() == 1);
}

TEST_CASE("NeMo is that of its container where products are in fp8, and one in bf16") {
  PublishedRun run = stated_run();
  run.engine = "megatron";
  const auto engine = [&](const char* from, const char* precision) {
    run.source = from;
    run.precision = precision;
    return state(run, as_stated).training.engine;
  };
  const Engine late = engine("dgxc-benchmarking@1b9bb6b nemo_megatron/README_175b.md", "fp8"),
               delayed = engine("dgxc-benchmarking@741c886 llama3.1/README.md", "fp8"),
               current = engine("Megatron-Bridge@067f987df0 docs/performance-summary-archive.md", "fp8");
  CHECK(late.name == "nemo-2024");
  CHECK(late.transposes_weights);
  CHECK(late.scale_history == 1024);
  CHECK(delayed.name == "nemo-delayed");
  CHECK_FALSE(delayed.transposes_weights);
  CHECK(delayed.scale_history == 1024);
  CHECK(current.name == "nemo");
  CHECK(current.scale_history == 0);
  for (const char* const from : {"dgxc-benchmarking@1b9bb6b nemo_megatron/README_175b.md", "dgxc-benchmarking@741c886"})
    CHECK(engine(from, "bf16").name == "nemo");
  // In bf16 the three are one, but for groups of micro-batches, which came later than the first.
  for (Engine other : {late, delayed}) {
    other.name = current.name;
    other.title = current.title;
    other.sources = current.sources;
    other.transposes_weights = current.transposes_weights;
    other.scale_history = current.scale_history;
    other.has_other_groups = current.has_other_groups;
    CHECK(other == current);
  }
}

TEST_CASE("nodes that are published in part are assumed, and torchtitan is that of its time") {
  PublishedRun run = stated_run();
  run.engine = "torchtitan";
  run.source = "torchtitan@b5bcd76c66 benchmarks/llama3_h100_202412_torchtitan.md";
  run.device = "h100-96gb-hbm2e-500w";
  run.intra_node = "nvlink4-nvswitch";
  run.data_parallel = "fsdp";
  run.zero_stage = 3;
  run.tp = 2;
  run.dp = 16;
  run.pp = run.virtual_stages = 1;
  run.gbit_s_per_node = 3200;
  const auto engine = [&] { return state(run, as_stated).training.engine.name; };
  CHECK(state(run, as_stated).skipped == "");
  CHECK(state(run, as_stated).assumed ==
        std::vector<std::string>{"nodes as of a DGX H100, and what products sustain at 500 W"});
  CHECK(state(run, as_stated).cluster.groups.front().device == find_device("h100-sxm-96gb-500w", catalog));
  CHECK(engine() == "torchtitan-2024");
  run.notes = "Per-op selective AC; eager.";
  CHECK(engine() == "torchtitan-eager-2024");
  // Its table of April 2024: eager, with norms in steps where the model's own settings say so.
  run.source = "torchtitan@9515a140b docs/performance.md (2024-08)";
  run.notes = "FSDP2 1D, AC = full.";
  run.layers = 80;
  CHECK(engine() == "torchtitan-eager-2024");
  run.layers = 40;
  CHECK(engine() == "torchtitan-2024-04");
  CHECK_FALSE(state(run, as_stated).training.engine.fused_update);
  CHECK(state(run, as_stated).training.engine.fused_rms_norm);
  run.layers = 32;
  run.source = "torchtitan@b5bcd76c66 benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md";
  CHECK(engine() == "torchtitan");
  // In a pipeline its parameters and gradients are whole.
  CHECK(given<std::int64_t>(state(run, as_stated).layout, Choice::zero_stage) == 3);
  run.dp = 8;
  run.pp = 2;
  CHECK(given<std::int64_t>(state(run, as_stated).layout, Choice::zero_stage) == 1);
  // It has as many micro-batches as the pipeline has ranks.
  run.micro_batch.reset();
  CHECK(given<std::int64_t>(state(run, as_stated).layout, Choice::micro_batch) == *run.global_batch / (8 * 2));
  CHECK(state(run, as_stated).assumed.size() == 1);  // the nodes
  // Asynchronous tensor parallelism goes around rings.
  run.sequence_parallel = true;
  CHECK(!state(run, as_stated).layout[Choice::tp_overlap]);
  run.notes = "FSDP8 x TP2 x PP2 + AsyncTP";
  CHECK(std::get<TensorOverlap>(*state(run, as_stated).layout[Choice::tp_overlap]) == TensorOverlap::ring);
}

TEST_CASE("selective recompute is what the engine calls so") {
  PublishedRun run = stated_run();
  run.recompute = "selective";
  const auto recompute = [&] { return std::get<Recompute>(*state(run, as_stated).layout[Choice::recompute]); };
  CHECK(recompute() == Recompute::core_attn);
  run.engine = "torchtitan";
  run.tp = run.pp = 1;
  run.dp = 32;
  run.notes = "FSDP2 1D, AC = selective op.";
  CHECK(recompute() == Recompute::every_other_product);
  CHECK(state(run, as_stated).assumed.empty());
  CHECK(!state(run, as_stated).layout[Choice::recompute_layers]);
  run.notes = "FSDP2 1D, AC = selective layer.";
  CHECK(recompute() == Recompute::full);
  CHECK(given<std::int64_t>(state(run, as_stated).layout, Choice::recompute_layers) == *run.layers / 2);
  CHECK(state(run, as_stated).assumed ==
        std::vector<std::string>{"recompute of every second layer as of the first half of the layers"});
}

TEST_CASE("half of the network is half of the bandwidth between nodes, and changes nothing within") {
  PublishedRun run = stated_run();
  const Cluster whole = state(run, as_stated).cluster;
  run.gbit_s_per_node = 800;
  const Cluster half = state(run, as_stated).cluster;
  NetworkCache of_whole(whole), of_half(half);
  const DeviceMesh mesh{.degree = {.dp = 4, .tp = 8}, .order = {Axis::pp, Axis::dp, Axis::tp}};
  CHECK(of_half.group(mesh, Axis::tp) == of_whole.group(mesh, Axis::tp));
  CHECK(!(of_half.group(mesh, Axis::dp) == of_whole.group(mesh, Axis::dp)));
  const ValidatedRun slower = validate(run, as_stated, graph_of_published),
                     faster = validate(stated_run(), as_stated, graph_of_published);
  CHECK(slower.step > faster.step);
  CHECK(slower.memory == faster.memory);
}

TEST_CASE("a run on several racks takes as many trays of each as divide all of its trays") {
  PublishedRun run = stated_run();
  run.device = "gb200";
  run.intra_node = "nvlink5-nvl72";
  run.devices_per_node = 4;
  const auto nodes_of = [&](int devices) {
    run.devices = devices;
    run.dp = devices / 8;
    const StatedRun stated = state(run, as_stated);
    CHECK(stated.skipped == "");
    const NodeGroup& rack = stated.cluster.groups.front();
    return std::pair(rack.nodes, rack.devices_per_node());
  };
  CHECK(nodes_of(8) == std::pair(1, 8));
  CHECK(nodes_of(72) == std::pair(1, 72));
  CHECK(nodes_of(128) == std::pair(2, 64));
  CHECK(nodes_of(144) == std::pair(2, 72));
  CHECK(nodes_of(256) == std::pair(4, 64));
  CHECK(nodes_of(512) == std::pair(8, 64));
}

TEST_CASE("what cannot be simulated is skipped, with the reason") {
  const auto skipped = [](auto change) {
    PublishedRun run = stated_run();
    change(run);
    const ValidatedRun validated = validate(run, as_stated, graph_of_published);
    CHECK(!validated.step_error());
    return validated.skipped;
  };
  CHECK(skipped([](PublishedRun& run) { run.precision = "fp4"; }) == "precision fp4 is not modelled");
  CHECK(skipped([](PublishedRun& run) { run.experts = 8; }) == "mixtures of experts are not modelled");
  CHECK(skipped([](PublishedRun& run) { run.ep = 2; }) == "mixtures of experts are not modelled");
  CHECK(skipped([](PublishedRun& run) { run.family = "vit"; }) == "model family vit is not modelled");
  CHECK(skipped([](PublishedRun& run) { run.family = ""; }) ==
        "the model family is not stated; it is gpt, llama or t5");
  CHECK(skipped([](PublishedRun& run) { run.layers.reset(); }) == "the number of layers is not stated");
  CHECK(skipped([](PublishedRun& run) { run.dp = 8; }) == "dp 8 x tp 4 x pp 2 x cp 1 are not 32 devices");
  const std::string unknown = skipped([](PublishedRun& run) { run.device = "abacus"; });
  CHECK(unknown.find("8 abacus") != std::string::npos);
  CHECK(unknown.find("h100-sxm-80gb with nvlink4-nvswitch") != std::string::npos);  // which there are
  CHECK(unknown.find("a column cluster") != std::string::npos);
  CHECK(skipped([](PublishedRun& run) {
          run.cluster = "dgx-a100";
          run.device = "h100-sxm-80gb";
        }) == "device h100-sxm-80gb is not that of cluster dgx-a100, a100-sxm4-80gb; leave one of them out");
  for (const char* const device : {"a100-sxm4-80gb", ""})
    CHECK(skipped([&](PublishedRun& run) {
            run.cluster = "dgx-a100";
            run.device = device;
            run.global_batch = 7;
          }).find("batch") != std::string::npos);
  CHECK(skipped([](PublishedRun& run) { run.global_batch = 7; }).find("batch") != std::string::npos);
  CHECK(skipped([](PublishedRun& run) { run.heads = 7; }).find("no multiple of 7 heads") != std::string::npos);
  // Numbers that no run has.
  CHECK(skipped([](PublishedRun& run) { run.hidden = 0; }) == "the hidden size is 0; from 1 to 16777216 are modelled");
  CHECK(skipped([](PublishedRun& run) { run.kv_heads = 0; }).starts_with("the number of key/value heads is 0"));
  CHECK(skipped([](PublishedRun& run) { run.vocabulary = 0; }).starts_with("the vocabulary is 0"));
  CHECK(skipped([](PublishedRun& run) { run.micro_batch = 0; }).starts_with("micro-batch is 0"));
  CHECK(skipped([](PublishedRun& run) { run.layers = 1 << 20; }) == "1048576 layers are more than is modelled");
  for (const std::int64_t batch : {std::int64_t{0}, std::numeric_limits<std::int64_t>::max()})
    CHECK(skipped([&](PublishedRun& run) { run.global_batch = batch; }).starts_with("the global batch is "));
  CHECK(skipped([](PublishedRun& run) { run.dp = run.tp = run.pp = 1 << 24; }).find("are not 32 devices") !=
        std::string::npos);
  CHECK(skipped([](PublishedRun& run) { run.gbit_s_per_node = 0.0; }) == "the network of a node has 0 Gbit/s");
  CHECK(skipped([](PublishedRun& run) {
          run.cluster = "dgx-a100";
          run.device = "";
          run.devices = 12;
        }).find("error:") == std::string::npos);
}

TEST_CASE("a row says which engine predicts it once that is known, and what differs from that engine's file") {
  PublishedRun early = stated_run(), late = stated_run(), replayed = stated_run();
  early.layers.reset();  // a fact of the model, which is stated first
  late.global_batch.reset();
  late.device = "";
  late.cluster = "dgx-a100";
  replayed.notes = "full CUDA graph";
  const Json rows = validation_json(validate(std::vector{early, late, replayed}, as_stated, graph_of_published, 1, {}),
                                    "test")["rows"];
  CHECK(rows[0]["skipped"] == "the number of layers is not stated");
  CHECK(rows[0]["predicted_engine"].is_null());
  CHECK(rows[0]["device"] == "a100-sxm4-80gb");
  CHECK(rows[1]["skipped"] == "the global batch is not stated");
  CHECK(rows[1]["predicted_engine"] == "megatron");
  CHECK(rows[1]["device"].is_null());
  CHECK(rows[1]["engine_differs"].is_null());
  CHECK(rows[2]["stated"] == "exact");
  CHECK(rows[2]["predicted_engine"] == "megatron");
  CHECK(rows[2]["engine_differs"] == "host_per_op 0 s (full CUDA graph)");
  // Notes and source imply the same.
  PublishedRun by_source = stated_run(), by_notes = stated_run();
  by_source.source = "a paper (full CUDA graph)";
  CHECK(state(by_source, as_stated).engine_differs == "host_per_op 0 s (full CUDA graph)");
  by_notes.precision = "";
  by_notes.notes = "vTrain, train/tr11-176B-ml";
  CHECK(state(by_notes, as_stated).training.precision == DataType::fp16);
  CHECK(state(by_notes, as_stated).model.alibi);
  // The host launches nothing, so that the step takes less.
  PublishedRun launched = stated_run();
  CHECK(rows[2]["predicted_step_time_s"] < validate(launched, as_stated, graph_of_published).step.value);
}

TEST_CASE("a T5 has a half of its layers and a fifth of its tokens in the decoder") {
  PublishedRun run = stated_run();
  run.family = "t5";
  run.engine.clear();  // parplan's own
  const StatedRun stated = state(run, as_stated);
  CHECK(stated.skipped.empty());
  CHECK(stated.model.decoder_layers == run.layers.value() / 2);
  CHECK(stated.model.decoder_sequence == run.sequence.value() / 4);
  CHECK(stated.training.sequence_length == run.sequence.value() * 5 / 4);
  const OpGraph graph = graph_of_published(stated.model);
  CHECK(graph.joins_sequences);
  CHECK(targets_of_sample(graph) == stated.model.decoder_sequence);
  CHECK(validate(run, as_stated, graph_of_published).step_error().has_value());
}

TEST_CASE("errors are summed up by their definitions") {
  CHECK(!summarise({}));
  const ErrorSummary alone = *summarise(std::vector<std::pair<double, double>>{{3, 4}});
  CHECK(alone.count == 1);
  CHECK(alone.mean_absolute == doctest::Approx(0.25));
  CHECK(alone.median_absolute == doctest::Approx(0.25));
  CHECK(alone.bias == doctest::Approx(-0.25));
  CHECK(!alone.rank_correlation);
  // Errors of +10, -20, +50 and 0 %.
  const ErrorSummary four = *summarise(std::vector<std::pair<double, double>>{{11, 10}, {16, 20}, {45, 30}, {40, 40}});
  CHECK(four.mean_absolute == doctest::Approx(0.2));
  CHECK(four.median_absolute == doctest::Approx(0.15));
  CHECK(four.largest_absolute == doctest::Approx(0.5));
  CHECK(four.bias == doctest::Approx(0.1));
  // Ranks 1 2 4 3 beside 1 2 3 4: 1 - 6 * 2 / (4 * 15).
  CHECK(*four.rank_correlation == doctest::Approx(0.8));
  const ErrorSummary reversed = *summarise(std::vector<std::pair<double, double>>{{1, 9}, {2, 5}, {7, 1}});
  CHECK(*reversed.rank_correlation == doctest::Approx(-1.0));
}

TEST_CASE("the order of layouts is judged within one job alone, and so is what a wrong pick costs") {
  std::vector<ValidatedRun> runs(5);
  const double predicted[] = {1.0, 2.0, 3.0, 10.0, 0.5}, measured[] = {2.0, 1.0, 1.04, 5.0, 50.0};
  for (std::size_t i = 0; i < runs.size(); ++i) {
    runs[i].run = stated_run();
    runs[i].step = Seconds(predicted[i]);
    runs[i].run.step_seconds = measured[i];
  }
  runs[4].run.global_batch = 256;  // another job
  const OrderSummary all = summarise_order(runs, 0.0);
  CHECK(all.groups == 1);
  CHECK(all.pairs == 6);
  CHECK(all.pairs_right == 4);  // the first run is predicted before the second and the third
  CHECK(all.regret == doctest::Approx(1.0));
  CHECK(summarise_order(runs, 0.05).pairs == 5);
  // Nodes of a named cluster are not those of another.
  for (std::size_t i = 0; i < runs.size(); ++i) {
    runs[i].run.device = "";
    runs[i].run.cluster = i < 2 ? "aws-p5" : "dgx-h100";
  }
  CHECK(summarise_order(runs, 0.0).groups == 2);
  CHECK(summarise_order(runs, 0.0).pairs == 2);
  const Json json = validation_json(runs, "test");
  CHECK(json.at("rows")[0].at("cluster") == "aws-p5");
  std::map<std::string, int> counts;
  for (const Json& part : json.at("summary").at("exact").at("devices"))
    counts[part.at("name")] = part.at("step_time").at("runs");
  CHECK(counts == std::map<std::string, int>{{"aws-p5", 2}, {"dgx-h100", 3}});
  for (ValidatedRun& one : runs) one.run.cluster = "aws-p5";
  runs[0].skipped = "left out";
  CHECK(summarise_order(runs, 0.0).pairs_right == 3);
  CHECK(summarise_order(runs, 0.0).regret == 0.0);
}

TEST_CASE("runs that are predicted to take equally long are in no order, whichever stands first") {
  std::vector<ValidatedRun> runs(2);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    runs[i].run = stated_run();
    runs[i].step = Seconds(1.0);
    runs[i].run.step_seconds = i == 0 ? 1.0 : 1.2;
  }
  for (int turn = 0; turn < 2; ++turn) {
    const OrderSummary summary = summarise_order(runs, 0.05);
    CHECK(summary.pairs == 1);
    CHECK(summary.pairs_right == 0);
    CHECK(summary.regret == doctest::Approx(0.1));
    std::swap(runs[0], runs[1]);
  }
}

TEST_CASE("files of runs are told apart by their headers, and faults have places") {
  const std::vector<PublishedRun> runs = read_published_runs(published + "runs.csv");
  CHECK(runs.size() == 292);
  CHECK(runs.front().id == "sc21-t1-1.7b");
  CHECK(runs.front().source.find("(arXiv 2104.04473); numbers read") != std::string::npos);  // has commas
  CHECK(runs.front().layers == 24);
  CHECK(!runs.front().micro_batch);
  CHECK(*runs.front().step_seconds == doctest::Approx(3.52802));
  const std::vector<PublishedRun> of_node = read_published_runs(published + "vtrain-one-node.csv");
  CHECK(of_node.size() == 475);
  CHECK(of_node.front().feature == 4 * 2048);
  CHECK(*of_node.front().step_seconds == doctest::Approx(0.410490577));

  const std::string text = read_file(published + "runs.csv");
  const std::string header = text.substr(0, text.find('\n'));
  const std::string row = text.substr(header.size() + 1, text.find('\n', header.size() + 1) - header.size() - 1);
  const testing::TemporaryFolder folder;
  const std::string path = folder.path("runs.csv");
  const auto fault = [&](const std::string& csv) {
    folder.write("runs.csv", csv);
    return error_of<ConfigError>([&] { read_published_runs(path); });
  };
  const auto has = [](const std::string& message, const std::string& words) {
    INFO(message);
    CHECK(message.find(words) != std::string::npos);
  };
  has(fault("a,b\n1,2\n"), path + ":1: error: the header has none of step_time_s");
  has(fault(std::regex_replace(header, std::regex("layers"), "floors") + "\n"), "no column 'layers'");
  has(fault(std::regex_replace(header, std::regex("model_family"), "tribe") + "\n"), "no column 'model_family'");
  has(fault(header + "\n" + row + "\n" + std::regex_replace(row, std::regex(",24,2304,"), ",many,2304,") + "\n"),
      path + ":3: error: layers is 'many'; expected a number");
  for (const char* const number : {"inf", "nan", "1e-320", "1e300"})
    has(fault(header + "\n" + std::regex_replace(row, std::regex("3\\.52802"), number) + "\n"),
        path + ":2: error: step_time_s is '" + number + "'; expected a number");
  has(fault(header + "\n1,2,3\n"), path);
  has(fault(header + "\n" + std::regex_replace(row, std::regex(",full,"), ",yes,") + "\n"),
      path + ":2: error: recompute is 'yes'; expected none, selective, full, or nothing");
  has(fault(header + "\n" + std::regex_replace(row, std::regex(",ok,"), ",well,") + "\n"),
      path + ":2: error: outcome is 'well'; expected ok, oom, or nothing");
  // What is not stated of any run needs no column.
  folder.write("runs.csv",
               "step_time_s,model_family,layers,hidden,heads,ffn_hidden,seq_len,devices,dp,tp,pp,global_batch\n"
               "2.5,gpt,24,2304,24,9216,2048,32,32,1,1,512\n");
  const std::vector<PublishedRun> few = read_published_runs(path);
  REQUIRE(few.size() == 1);
  CHECK(few.front().hidden == 2304);
  CHECK(few.front().source == "");
  CHECK(!few.front().vocabulary);
  CHECK(!few.front().tied_embeddings);
  has(error_of<ConfigError>([] { read_published_runs("/no/such/file.csv"); }), "/no/such/file.csv");
}

TEST_CASE("the named clusters have the line rates that runs are scaled from") {
  int clusters = 0;
  for (const char* const device : {"a100-sxm4-80gb nvlink3", "a100-sxm4-40gb nvlink3", "h100-sxm-80gb nvlink4",
                                   "h200-sxm-141gb nvlink4", "b200-sxm-180gb nvlink5"}) {
    const std::string words = device;
    PublishedRun run = stated_run();
    run.device = words.substr(0, words.find(' '));
    run.intra_node = words.substr(words.find(' ') + 1) + "-nvswitch";
    run.gbit_s_per_node.reset();
    const StatedRun stated = state(run, as_stated);
    INFO(words << " " << stated.skipped);
    REQUIRE(stated.assumed.size() == 1);
    const std::string text = read_file(catalog.clusters_folder + "/" + stated.cluster.name + ".yaml");
    std::smatch found;
    REQUIRE(std::regex_search(text, found, std::regex("nics: \\{count: ([0-9]+), line_rate: ([0-9]+) Gbit/s\\}")));
    CHECK(stated.assumed.front().ends_with(fmt::format(": {}", std::stoi(found[1]) * std::stoi(found[2]))));
    ++clusters;
  }
  CHECK(clusters == 5);
}

TEST_CASE("what a table of runs says does not act on the terminal, and no file is read without end") {
  PublishedRun run = stated_run();
  run.id = "run\x1b[2J\nof";
  run.source = "a\x1bpaper";
  PublishedRun skipped = run;
  skipped.device = "aba\x1b[31mcus";
  const std::string table = validation_table(validate(std::vector{run, skipped}, as_stated, graph_of_published, 1, {}));
  CHECK(table.find('\x1b') == std::string::npos);
  CHECK(table.find("run\\u001b[2J") != std::string::npos);
  CHECK(table.find("aba\\u001b[31mcus") != std::string::npos);
  CHECK(error_of<ConfigError>([] { read_published_runs("/dev/zero"); }).find("more than 64 MiB") != std::string::npos);
}

TEST_CASE("every published run is stated or skipped with a reason, and the JSON has all of them") {
  const std::vector<PublishedRun> all = read_published_runs(published + "runs.csv");
  std::vector<PublishedRun> some;
  for (std::size_t i = 0; i < all.size(); i += 7) some.push_back(all[i]);
  const std::vector<ValidatedRun> runs = validate(some, as_stated, graph_of_published, 2, {});
  const Json json = validation_json(runs, "test");
  CHECK(json["schema"] == "parplan.validate/1");
  CHECK(json["rows"].size() == some.size());
  int exact = 0;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const Json& row = json["rows"][i];
    CHECK(row["id"] == some[i].id);
    CHECK((row["stated"] == "skipped") == row["skipped"].is_string());
    CHECK((row["stated"] == "skipped") == row["predicted_step_time_s"].is_null());
    CHECK((row["stated"] == "assumed") == row["assumed"].is_string());
    exact += row["stated"] == "exact" && row["error"].is_number();
  }
  CHECK(exact > 5);
  CHECK(json["summary"]["exact"]["all"][0]["step_time"]["runs"] == exact);
}

TEST_CASE("the table lists what was assumed of which runs, and which were skipped for what reason") {
  const auto one = [](const std::string& id, std::vector<std::string> assumed, const std::string& skipped) {
    ValidatedRun run;
    run.run.id = id;
    run.engine = "megatron";
    run.assumed = std::move(assumed);
    run.skipped = skipped;
    run.step = Seconds(2.0);
    return run;
  };
  const std::vector<ValidatedRun> runs = {
      one("first", {}, ""), one("second", {"micro-batch 1", "no recompute"}, ""),
      one("third", {"no recompute"}, ""), one("fourth", {"no recompute"}, "dp is not stated"),
      one("fifth", {"micro-batch 1", "no recompute"}, ""), one("sixth", {}, "dp is not stated")};
  const std::string lists = "assumed, and of which runs:\n"
                            "  micro-batch 1; no recompute (2 runs): second, fifth\n"
                            "  no recompute (1 run): third\n\n"
                            "skipped, and which runs:\n"
                            "  dp is not stated (2 runs): fourth, sixth\n\n";
  const std::string table = validation_table(runs);
  CHECK(table.find(lists) != std::string::npos);
  CHECK(table.find("megatron") == std::string::npos);
  // Once; pages that list no runs say so many.
  CHECK(table.find("dp is not stated") == table.rfind("dp is not stated"));
  CHECK(summary_in_words(runs).ends_with("skipped: 2 runs: dp is not stated\n"));
  CHECK(validation_table(runs, true).find("as engine\nfirst ") != std::string::npos);
  CHECK(validation_table(std::vector{runs[0]}).find("assumed") == std::string::npos);
  CHECK(validation_table(std::vector{runs[0]}).find("skipped") == std::string::npos);
}

TEST_CASE("a run is predicted to fit, not to fit, or neither where it is tight, and the summary counts the same") {
  std::vector<ValidatedRun> runs;
  const auto add = [&](const char* outcome, MemoryVerdict verdict) {
    ValidatedRun& run = runs.emplace_back();
    run.run.outcome = outcome;
    run.verdict = verdict;
  };
  for (const char* const outcome : {"ok", "oom"})
    for (const MemoryVerdict verdict : {MemoryVerdict::fits, MemoryVerdict::tight, MemoryVerdict::does_not_fit})
      add(outcome, verdict);
  add("oom", MemoryVerdict::tight);
  const Json json = validation_json(runs, "1");
  const auto rows_with = [&](const std::string& outcome, const Json& predicted) {
    return std::ranges::count_if(json.at("rows"), [&](const Json& row) {
      return row.at("outcome") == outcome && row.at("predicted_to_fit") == predicted;
    });
  };
  const Json& memory = json.at("summary").at("out_of_memory");
  CHECK(memory.at("predicted_to_fit") == rows_with("oom", true));
  CHECK(memory.at("recorded_predicted_tight") == rows_with("oom", nullptr));
  CHECK(memory.at("predicted_not_to_fit") == rows_with("ok", false));
  CHECK(memory.at("fitted_predicted_tight") == rows_with("ok", nullptr));
  CHECK(rows_with("oom", nullptr) == 2);
}

TEST_CASE("collectives over 2 to 32 nodes of p5 are predicted within an eighth on average, each kind of them") {
  const std::string table = std::string(PARPLAN_SOURCE_DIR) + "/tests/golden/other_collectives.csv";
  const std::vector<PublishedRun> lines = read_published_runs(table);
  REQUIRE(lines.size() == 115);
  const std::vector<ValidatedRun> runs = validate(lines, as_stated, graph_of_published, 1, {});
  struct Bounds {
    const char* kind;
    double within, largest;
  };
  for (const Bounds& bounds :
       {Bounds{"all_gather", 0.07, 0.13}, {"all_reduce", 0.1, 0.3}, {"alltoall", 0.12, 0.33}}) {
    const std::string kind = bounds.kind;
    const double within = bounds.within, largest = bounds.largest;
    CAPTURE(kind);
    double sum = 0.0;
    int count = 0;
    for (std::size_t i = 0; i < lines.size(); ++i) {
      if (lines[i].collective->kind != kind) continue;
      REQUIRE(runs[i].step_error());
      CHECK(std::abs(*runs[i].step_error()) < largest);
      sum += std::abs(*runs[i].step_error());
      ++count;
    }
    CHECK(sum / count < within);
  }
}

TEST_CASE("a published collective is predicted as a group that communicates alone") {
  const testing::TemporaryFolder folder;
  const std::string path = folder.write("nccl.csv",
                                        "hardware,nodes,gpus,collective,bytes,algbw,busbw,time_us,source\n"
                                        "DGX H100,1,8,all_reduce,268435456,,350,,NCCL\n"
                                        "DGX H100,2,16,all_gather,1024,1,,,NCCL\n"
                                        "DGX H100,1,4,all_reduce,4096,,,20,NCCL\n"
                                        "DGX H100,3,16,all_reduce,4096,,,20,NCCL\n"
                                        "an abacus,1,2,all_reduce,4096,,,20,NCCL\n"
                                        "DGX H100,1,8,all_reduce,,,350,,NCCL\n"
                                        "DGX H100,1,2,p2p_write,4096,,350,,NCCL\n");
  const std::vector<PublishedRun> lines = read_published_runs(path);
  REQUIRE(lines.size() == 7);
  // Bus bandwidth of an all-reduce is 2 (n - 1) / n of bytes over time.
  CHECK(*lines[0].step_seconds == doctest::Approx(268435456.0 * 1.75 / 350e9));
  CHECK(*lines[1].step_seconds == doctest::Approx(1024 / 1e9));
  CHECK(*lines[2].step_seconds == doctest::Approx(20e-6));
  const std::vector<ValidatedRun> runs = validate(lines, as_stated, graph_of_published, 1, {});
  ClusterOptions options;
  options.devices = 16;
  const Cluster two_nodes = find_cluster("dgx-h100", catalog, options);
  const DeviceMesh mesh{.degree = {.dp = 16}, .order = {}};
  CHECK(runs[1].step == collective_time(InstructionKind::all_gather, Bytes(1024),
                                        group_network(two_nodes, mesh, Axis::dp), BackendKind::cuda));
  for (int i = 0; i < 3; ++i) CHECK(runs[i].step_error());
  CHECK(runs[3].skipped == "16 GPUs of dgx-h100 are 2 nodes, not 3");
  CHECK(runs[4].skipped == "an abacus is in no file of configs/clusters");
  CHECK(runs[5].skipped == "the size of the message is not stated");
  CHECK(runs[6].skipped == "collective 'p2p_write' is not modelled");
  // What NCCL was told to leave out is left out; what it cannot do anyway is not.
  const std::string settings = folder.write("settings.csv",
                                            "hardware,nodes,gpus,collective,bytes,algbw,busbw,time_us,source,notes\n"
                                            "DGX H100,1,8,all_reduce,4294967296,,480,,NCCL,\n"
                                            "DGX H100,1,8,all_reduce,4294967296,,370,,NCCL,NCCL_NVLS_ENABLE=0 (ring)\n"
                                            "DGX H100,1,8,all_reduce,4294967296,,370,,NCCL,NCCL_ALGO=RING\n"
                                            "DGX A100,1,8,all_reduce,4294967296,,230,,NCCL,NCCL_ALGO=NVLS\n"
                                            "DGX A100,1,8,all_reduce,4294967296,,230,,NCCL,\n");
  const std::vector<ValidatedRun> set = validate(read_published_runs(settings), as_stated, graph_of_published, 1, {});
  for (const ValidatedRun& run : set) CHECK(std::abs(*run.step_error()) < 0.06);
  CHECK(set[1].step == set[2].step);
  CHECK(set[0].step < set[1].step);
  CHECK(set[3].step == set[4].step);
  // They are no layouts of one model, and say nothing about memory.
  CHECK(summarise_order(runs, 0.0).pairs == 0);
  const Json json = validation_json(runs, "1");
  CHECK(json.at("summary").at("out_of_memory").at("fitted") == 0);
  CHECK(json.at("rows").at(0).at("predicted_memory_peak_bytes").is_null());
  const Json& sizes = json.at("summary").at("exact").at("message_sizes");
  REQUIRE(sizes.size() == 2);
  CHECK(sizes.at(0).at("name") == "messages of 1 MiB and more");
  CHECK(sizes.at(0).at("step_time").at("runs") == 1);
  CHECK(sizes.at(1).at("step_time").at("runs") == 2);
  CHECK(validation_table(runs).find("ran out of memory") == std::string::npos);
}

}  // namespace
}  // namespace parplan
