#include "planner/validate/stated_run.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string_view>

#include <fmt/format.h>

#include "planner/base/enum_index.h"
#include "planner/base/error.h"
#include "planner/explain/sensitivity.h"
#include "planner/graph/engine_file.h"

namespace parplan {
namespace {

// The named cluster whose nodes are a run's, with other devices where `instead` names some, and the
// line rate of all NICs of a node (the cluster's file).
struct NodeRow {
  std::string_view device;
  std::string_view intra_node;
  std::int64_t devices_per_node = 8;
  std::string_view cluster;
  double gbit_s_per_node = 0.0;
  std::string_view instead = "";
  std::string_view source = "";  // of the run: contains this
  std::string_view assumed = "";  // of what is not published of them
};
constexpr std::array node_rows = {
    NodeRow{"a100-sxm4-80gb", "nvlink3-nvswitch", 8, "jean-zay-a100", 400, "", "bigscience"},
    NodeRow{"a100-sxm4-80gb", "nvlink3-nvswitch", 8, "dgx-a100", 1600},
    NodeRow{"a100-sxm4-40gb", "nvlink3-nvswitch", 8, "dgx-a100", 1600, "a100-sxm4-40gb"},
    // p5.48xlarge: its launch scripts set FI_PROVIDER="efa" (nanotron@2411b022
    // examples/train_tiny_llama.sh), and 3,200 Gbit/s of eight H100 on EFA is that instance.
    NodeRow{"h100-sxm-80gb", "nvlink4-nvswitch", 8, "aws-p5", 3200, "", "nanotron"},
    NodeRow{"h100-sxm-80gb", "nvlink4-nvswitch", 8, "dgx-h100", 3200},
    // Grand Teton: eight SXM5 modules, fully connected by NVLink, 400 Gbit/s for each
    // (torchtitan@b5bcd76c66 benchmarks/llama3_h100_202412_torchtitan.md).
    NodeRow{"h100-96gb-hbm2e-500w", "nvlink4-nvswitch", 8, "dgx-h100", 3200, "h100-sxm-96gb-500w", "",
            "nodes as of a DGX H100, and what products sustain at 500 W"},
    NodeRow{"h100-sxm-80gb", "nvlink4-nvswitch-400gb", 8, "hgx-h800", 3200},
    NodeRow{"a100-sxm4-80gb", "nvlink3-nvswitch-400gb", 8, "hgx-a800", 1600},
    NodeRow{"a100-pcie-40gb", "pcie4", 8, "rtx-3090-8", 0, "a100-pcie-40gb"},
    NodeRow{"l40s", "pcie4", 8, "l40s-8", 0},
    NodeRow{"rtx-4090", "pcie4", 4, "rtx-4090-4", 0},
    NodeRow{"rtx-5060ti-16gb", "pcie5", 1, "rtx-4090-4", 0, "rtx-5060ti-16gb"},
    NodeRow{"gaudi2-96gb", "gaudi-ethernet", 8, "gaudi2-8", 2400},
    NodeRow{"mi250x-gcd-64gb", "infinity-fabric", 8, "lumi", 800},
    NodeRow{"mi300x-192gb", "infinity-fabric", 8, "mi300x-8", 3200},
    NodeRow{"max-1550-stack-64gb", "xe-link", 12, "aurora", 1600},
    NodeRow{"v100-sxm2-16gb", "nvlink2-cube-mesh", 8, "azure-ndv2", 100, "v100-sxm2-16gb"},
    NodeRow{"h200-sxm-141gb", "nvlink4-nvswitch", 8, "hgx-h200", 3200},
    NodeRow{"b200-sxm-180gb", "nvlink5-nvswitch", 8, "dgx-b200", 3200},
    NodeRow{"b300-sxm-288gb", "nvlink5-nvswitch", 8, "dgx-b200", 3200, "b300-sxm-288gb"},
    NodeRow{"gb200", "nvlink5-nvl72", 4, "gb200-nvl72", 1600},
    NodeRow{"gb300", "nvlink5-nvl72", 4, "gb300-nvl72", 3200},
    NodeRow{"titan-rtx-24gb", "nvlink2-bridge-x2", 2, "titan-rtx-2-nvlink", 0},
    NodeRow{"titan-rtx-24gb", "pcie3", 2, "titan-rtx-2", 0},
};

// The engine's file for runs whose column `engine` has that name, whose source and notes contain a
// text, whose model has so many layers, and which are in that precision: versions and settings of
// one engine differ. The first row that matches counts.
struct EngineRow {
  std::string_view engine;
  std::string_view source;
  std::string_view file;
  std::string_view notes = "";
  std::int64_t layers = 0;  // of the model; 0: any
  std::string_view precision = "";  // empty: any
};
constexpr std::array engine_rows = {
    EngineRow{"megatron", "arXiv 2104.04473", "megatron-2021"},  // Narayanan et al. 2021
    EngineRow{"megatron", "Megatron-LM@5281919420", "megatron-2021"},
    EngineRow{"megatron", "Megatron-LM@01ad96e51b", "megatron-2021"},
    EngineRow{"megatron", "arXiv 2205.05198", "megatron-2022"},  // Korthikanti et al. 2022
    EngineRow{"megatron", "arXiv 2401.10241", "megatron-2022"},  // Qi et al. 2023
    EngineRow{"megatron", "NeMo-Megatron-Launcher", "megatron-2022"},
    EngineRow{"megatron", "Megatron-LM@d98e8a64dd tests", "megatron-tests"},
    // NeMo 24.09 and 24.12 (launch.sh), with parameters in fp8: Transformer Engine 1.10 to 1.14.
    EngineRow{"megatron", "dgxc-benchmarking@35a9aec llama3.1", "nemo-2024", "", 0, "fp8"},
    EngineRow{"megatron", "dgxc-benchmarking@35a9aec nemotron", "nemo-2024", "", 0, "fp8"},
    EngineRow{"megatron", "dgxc-benchmarking@1b9bb6b", "nemo-2024", "", 0, "fp8"},
    EngineRow{"megatron", "dgxc-benchmarking", "nemo-delayed", "", 0, "fp8"},
    EngineRow{"megatron", "dgxc-benchmarking", "nemo"},
    EngineRow{"megatron", "Megatron-Bridge", "nemo"},
    // NVIDIA/NeMo-Framework-Launcher examples/training/*/h100/*.sh: grad_sync_dtype=bf16.
    EngineRow{"megatron", "docs/source/performance/performance_summary.md", "nemo-delayed", "", 0, "fp8"},
    EngineRow{"megatron", "docs/source/performance/performance_summary.md", "nemo"},
    // kwai's runs of Megatron-LM are of 2024-01-01 (2bc6cd307a), with TransformerEngine 1.1.
    EngineRow{"megatron", "Megatron-Kwai", "megatron-2023"},
    EngineRow{"megatron", "Megatron-LLaMA", "megatron-2023"},
    EngineRow{"megatron", "", "megatron"},
    EngineRow{"megatron-deepspeed", "bigscience", "bloom"},
    // llm-foundry's runs on A100: those in amp_bf16 with MP mode DEFAULT came with b2a43a147
    // (2023-10, PyTorch 2.1), the others before it.
    EngineRow{"fsdp", "A100", "fsdp-torch1", "PURE"},
    EngineRow{"fsdp", "", "fsdp-hf", "Hugging Face"},
    // Its table of A100 came with 1ea476e9f (2024-04), whose train_configs have norm_type
    // "fused_rmsnorm" for 8B and 13B, and for both 70B "rmsnorm", in steps; all eager.
    EngineRow{"torchtitan", "docs/performance.md (2024-08)", "torchtitan-eager-2024", "", 80},
    EngineRow{"torchtitan", "docs/performance.md (2024-08)", "torchtitan-2024-04"},
    EngineRow{"torchtitan", "llama3_h100_202412", "torchtitan-eager-2024", "eager"},
    EngineRow{"torchtitan", "llama3_h100_202412", "torchtitan-2024"},
    EngineRow{"deepspeed", "arXiv 2104.04473", "deepspeed-2021"},
    EngineRow{"torch", "", "ddp"},
    EngineRow{"torch-dp", "", "data-parallel"},
    EngineRow{"llm.c", "", "llm-c"},
};

// What `selective` recompute is of the runs whose column `engine` has that name, and whose notes
// contain a text; attention's core of others, as Korthikanti et al. 2022 named it. The first row
// that matches counts.
struct SelectiveRow {
  std::string_view engine;
  std::string_view notes;
  Recompute recompute;
  std::string_view assumed = "";  // in its place
  std::int64_t every = 1;         // one of so many layers recomputes
};
constexpr std::array selective_rows = {
    // torchtitan@9515a140b torchtitan/parallelisms/parallelize_llama.py: every second layer, whole.
    SelectiveRow{"torchtitan", "selective layer", Recompute::full,
                 "recompute of every second layer as of the first half of the layers", 2},
    // InternLM/InternEvo@c628a8c874 internlm/model/modeling_internlm.py:82,210-230:
    // dropout_selective_checkpoint, of dropout, residual sums and norms.
    SelectiveRow{"internevo", "", Recompute::norms},
    SelectiveRow{"torchtitan", "", Recompute::every_other_product},  // selective_ac_option "op", the default of 8B
};

// Facts of a run that have no column, or an empty one, but follow from what its notes or its source
// say. All rows that match count.
struct ImpliedRow {
  std::string_view said;
  std::optional<std::int64_t> zero_stage = {};
  std::optional<bool> sequence_parallel = {};
  bool tp_overlap = false;  // where there is sequence parallelism
  bool fp16 = false;        // where half precision is of either kind
  bool recomputes_nothing = false;
  bool alibi = false;
  bool replays = false;     // whole steps are CUDA graphs: the host submits no ops
};
constexpr std::array implied_rows = {
    // NVIDIA/Megatron-LM@core_r0.8.0 megatron/training/arguments.py: "--overlap-param-gather only
    // supported with distributed optimizer"; "Tensor parallel communication/GEMM overlap can happen
    // only when sequence parallelism is enabled".
    ImpliedRow{.said = "--overlap-param-gather", .zero_stage = 1},
    ImpliedRow{.said = "--tp-comm-overlap", .sequence_parallel = true, .tp_overlap = true},
    // torchtitan's --experimental.enable_async_tensor_parallel.
    ImpliedRow{.said = "AsyncTP", .sequence_parallel = true, .tp_overlap = true},
    // NVIDIA/dgxc-benchmarking@1b9bb6b nemo_megatron/gpt3_175b_hydra.yaml:119,
    // llama3.1/llama3.1_405b.yaml:135 and llama3.1_70b.yaml:129: ub_tp_comm_overlap: true. Its runs
    // of 8B have no tensor parallelism.
    ImpliedRow{.said = "dgxc-benchmarking", .tp_overlap = true},
    // NeMo's table of 24.07 is of the launcher's recipes (NVIDIA/NeMo-Framework-Launcher@26e42fa9
    // launcher_scripts/conf/training/{gpt3,llama,nemotron}: distributed_fused_adam,
    // mcore_distributed_optim; with tensor parallelism sequence_parallel and ub_tp_comm_overlap are
    // true; activations_checkpoint_granularity is null), but for two below.
    ImpliedRow{.said = "docs/source/performance/performance_summary.md",
               .zero_stage = 1,
               .sequence_parallel = true,
               .tp_overlap = true,
               .recomputes_nothing = true},
    // NVIDIA-NeMo/Megatron-Bridge@067f987df0 src/megatron/bridge/perf_recipes/llama, and
    // scripts/performance/configs/llama* of v0.1.0rc4 to v0.5.0: recompute is in none of the dense
    // runs' recipes but those of 70B on B200 of 25.09, which are not here. With tensor parallelism
    // their comm_overlap.tp_comm_overlap is true, but in nvfp4 (v0.1.0rc4
    // scripts/performance/run_script.py:107, v0.2.0 .../llama3_llm_pretrain.py:78,113,148, v0.3.0
    // .../llama31_llm_pretrain.py:74,108,137).
    ImpliedRow{.said = "Megatron-Bridge", .tp_overlap = true, .recomputes_nothing = true},
    // bigscience@9e64ede train/tr11-200B-ml/tr11-200B-ml.slurm, of which the runs to choose BLOOM's
    // layout were: --position-embedding-type alibi, --embed-layernorm.
    ImpliedRow{.said = "train/tr11-176B-ml", .alibi = true},
    // spyysalo/lumi-llm-scaling@7314958 meg-ds/pretrain_*.sh: the same two options.
    ImpliedRow{.said = "lumi-llm-scaling", .alibi = true},
    // NVIDIA/dgxc-benchmarking@1b9bb6b and @35a9aec nemo_megatron/gpt3_175b_hydra.yaml:85,
    // llama3.1/llama3.1_8b.yaml:112, llama3.1_70b.yaml:112 and llama3.1_405b.yaml:118:
    // activations_checkpoint_granularity: null, which no script of those folders overrides.
    ImpliedRow{.said = "dgxc-benchmarking@1b9bb6b nemo_megatron", .recomputes_nothing = true},
    ImpliedRow{.said = "dgxc-benchmarking@35a9aec nemo_megatron", .recomputes_nothing = true},
    ImpliedRow{.said = "dgxc-benchmarking@1b9bb6b llama3.1", .recomputes_nothing = true},
    ImpliedRow{.said = "dgxc-benchmarking@35a9aec llama3.1", .recomputes_nothing = true},
    // MLPerf's config_common_cg.sh: FULL_CUDA_GRAPH=True.
    ImpliedRow{.said = "full CUDA graph", .replays = true},
    // vTrain measured in fp16 (its table of one node says so), which Megatron-DeepSpeed sums in
    // fp16.
    ImpliedRow{.said = "vTrain", .fp16 = true},
};

// Whether the notes or the source of a run say a row's words.
bool says(const PublishedRun& run, const ImpliedRow& row) {
  return run.notes.find(row.said) != std::string::npos || run.source.find(row.said) != std::string::npos;
}

// Texts, of which another has to contain one.
class OneOf {
 public:
  constexpr OneOf(const char* text) : texts_{text} {}  // NOLINT(google-explicit-constructor)
  constexpr OneOf(const char* one, const char* other) : texts_{one, other} {}
  constexpr bool is_in(std::string_view text) const {
    const auto holds = [&](std::string_view one) { return !one.empty() && text.find(one) != std::string_view::npos; };
    return std::ranges::any_of(texts_, holds);
  }

 private:
  std::array<std::string_view, 2> texts_;
};

// What a source's scripts set for one of its runs, where the table of runs leaves it empty, other
// than what its source implies: for a model of so many layers and such a hidden size, over so many
// devices (0: any number) and in that layout. What a row leaves out, it does not say. The first row
// that matches counts.
struct RecipeRow {
  OneOf source;
  std::int64_t layers = 0, hidden = 0;
  std::int64_t devices = 0, tp = 1, pp = 1;
  std::optional<std::int64_t> micro_batch = {}, virtual_stages = {};
  std::optional<bool> tp_overlap = {};
  std::string_view recompute = "";
};
constexpr std::array recipe_rows = {
    // NVIDIA/Megatron-LM@v2.5 examples/sc21/run_table_1.sh: MBS, and pipeline stages of
    // --num-layers-per-virtual-pipeline-stage 5, 5, 3 and 1 layers from 76B to 530B.
    RecipeRow{"arXiv 2104.04473", 24, 2304, 32, 1, 1, 16, 1},
    RecipeRow{"arXiv 2104.04473", 30, 3072, 64, 2, 1, 16, 1},
    RecipeRow{"arXiv 2104.04473", 36, 4096, 128, 4, 1, 16, 1},
    RecipeRow{"arXiv 2104.04473", 40, 6144, 256, 8, 1, 8, 1},
    RecipeRow{"arXiv 2104.04473", 48, 8192, 512, 8, 2, 4, 1},
    RecipeRow{"arXiv 2104.04473", 60, 10240, 1024, 8, 4, 2, 60 / 4 / 5},
    RecipeRow{"arXiv 2104.04473", 80, 12288, 1536, 8, 8, 2, 80 / 8 / 5},
    RecipeRow{"arXiv 2104.04473", 96, 16384, 1920, 8, 16, 1, 96 / 16 / 3},
    RecipeRow{"arXiv 2104.04473", 105, 20480, 2520, 8, 35, 1, 105 / 35 / 1},
    RecipeRow{"arXiv 2104.04473", 128, 25600, 3072, 8, 64, 1, 1},
    // NVIDIA/Megatron-LM@v2.5 examples/pretrain_gpt3_175B.sh:19-28, which the README describes.
    RecipeRow{"Megatron-LM@01ad96e51b README.md", 96, 12288, 1024, 8, 16, 1, 1},
    // NVIDIA/NeMo-Framework-Launcher@26e42fa9 launcher_scripts/conf/training/gpt3/175b.yaml:149
    // (ub_tp_comm_overlap: False; 175b_mlperf.yaml, on 512, has True) and
    // nemotron/nemotron_340b.yaml (activations_checkpoint_granularity: selective).
    RecipeRow{.source = "docs/source/performance/performance_summary.md",
              .layers = 96,
              .hidden = 12288,
              .devices = 128,
              .tp = 4,
              .pp = 8,
              .tp_overlap = false},
    RecipeRow{.source = "docs/source/performance/performance_summary.md",
              .layers = 96,
              .hidden = 18432,
              .devices = 128,
              .tp = 8,
              .pp = 8,
              .recompute = "selective"},
    // NVIDIA/dgxc-benchmarking@35a9aec and @1b9bb6b nemotron/nemotron4-340b-synth.yaml:138,172.
    RecipeRow{.source = {"dgxc-benchmarking@35a9aec nemotron", "dgxc-benchmarking@1b9bb6b nemotron"},
              .layers = 96,
              .hidden = 18432,
              .tp = 8,
              .pp = 8,
              .tp_overlap = false,
              .recompute = "selective"},
};

// A vocabulary that a source does not state, nearer than GPT-2's; it stays assumed.
struct VocabularyRow {
  std::string_view source;
  std::int64_t vocabulary = 0;
};
constexpr std::array vocabulary_rows = {
    // Qi et al. 2023: with tied embeddings 28.3, 14.6 and 6.2 billion parameters, as they are
    // rounded, are of 25,500 to 33,500 rows (GPT-2's 51,200 make 14.7 of the 14.6), and
    // sail-sg/zero-bubble-pipeline-parallelism@39f2c186 examples/pretrain_zero_bubble.sh has a
    // SentencePiece tokenizer, whose models commonly have 32,000.
    VocabularyRow{"arXiv 2401.10241", 32000},
};

// Models with gates whose head is the embedding's table: those of a source with a feed-forward
// narrower than this. Others have a head of their own.
struct TiedRow {
  std::string_view source;
  std::int64_t feature_below = 0;
};
constexpr std::array tied_rows = {
    // nanotron@c252843039 scripts/scaling_benchmarks.py:78: tie_word_embeddings where
    // intermediate_size < 10_000
    TiedRow{"nanotron", 10000},
};

// The first layers, so many, whose activations runs of Megatron-FSDP have on the host:
// cpu_offloading_num_layers of the recipes of Megatron-Bridge. The first row that matches counts.
struct OffloadRow {
  std::string_view source;
  std::string_view device;
  std::string_view precision;
  std::int64_t layers = 0;
  std::int64_t offloaded = 0;
};
constexpr std::array offload_rows = {
    // @v0.1.0rc4 scripts/performance/configs/llama31/llama31_405b_llm_pretrain.yaml:123
    OffloadRow{"NeMo container 25.09", "gb200", "fp8", 126, 95},
    // @v0.2.0 scripts/performance/configs/llama31/workload_base_configs.py:33,43,87
    OffloadRow{"Megatron-Bridge", "gb200", "fp8", 126, 92},
    OffloadRow{"Megatron-Bridge", "gb300", "fp8", 126, 10},
    OffloadRow{"Megatron-Bridge", "gb300", "bf16", 126, 40},
    // @v0.2.0 scripts/performance/configs/llama3/workload_base_configs.py:39,47,69,77,112
    OffloadRow{"Megatron-Bridge", "gb200", "fp8", 80, 40},
    OffloadRow{"Megatron-Bridge", "gb200", "bf16", 80, 20},
    OffloadRow{"Megatron-Bridge", "gb300", "fp8", 80, 20},
    OffloadRow{"Megatron-Bridge", "gb300", "bf16", 80, 30},
    OffloadRow{"Megatron-Bridge", "b200-sxm-180gb", "fp8", 80, 5},
};

// What the tool of a source calls peak memory; sources that are not listed count all of a device.
struct ScopeRow {
  std::string_view source;
  MemoryScope scope;
};
constexpr std::array scope_rows = {
    ScopeRow{"SimuMax", MemoryScope::allocated},                 // docs/b200: max_memory_allocated
    ScopeRow{"arXiv 2401.10241", MemoryScope::allocated},        // Zero Bubble, schedules.py: max_memory_allocated
    ScopeRow{"Megatron-LM@d98e8a64dd", MemoryScope::allocated},  // mem-max-allocated-bytes of its tests
    ScopeRow{"gist.github.com/chenyaofo", MemoryScope::allocated},  // its notes: max_memory_allocated
    ScopeRow{"nanotron", MemoryScope::reserved},                 // helpers.py logs both; the figure doesn't say which
    ScopeRow{"torchtitan", MemoryScope::reserved},               // components/metrics.py: max_reserved
};

// Why a run is skipped.
struct Skip {
  std::string why;
};

// A fact of the run, filled in where it was not published.
template <class Value>
Value stated(const std::optional<Value>& value, Value otherwise, std::string_view what,
             std::vector<std::string>& assumed) {
  if (!value) assumed.push_back(fmt::format("{} {}", what, otherwise));
  return value.value_or(otherwise);
}

// A size or a number of a run, which is at least 1; no run has more.
std::int64_t counted(std::int64_t value, std::string_view what) {
  constexpr std::int64_t most = std::int64_t{1} << 24;
  if (value < 1 || value > most) throw Skip{fmt::format("{} is {}; from 1 to {} are modelled", what, value, most)};
  return value;
}
std::int64_t required(const std::optional<std::int64_t>& value, std::string_view what) {
  if (!value) throw Skip{fmt::format("{} is not stated", what)};
  return counted(*value, what);
}

StatedModel model_of(const PublishedRun& run, std::vector<std::string>& assumed) {
  if (run.experts.value_or(0) > 0 || run.ep.value_or(1) > 1 || run.family == "moe")
    throw Skip{"mixtures of experts are not modelled"};
  const bool is_t5 = run.family == "t5";
  if (run.family.empty()) throw Skip{"the model family is not stated; it is gpt, llama or t5"};
  if (run.family != "gpt" && run.family != "llama" && !is_t5)
    throw Skip{fmt::format("model family {} is not modelled", run.family)};
  StatedModel model;
  model.name = run.id;
  model.layers = required(run.layers, "the number of layers");
  model.hidden = required(run.hidden, "the hidden size");
  model.heads = required(run.heads, "the number of heads");
  model.kv_heads = run.family != "llama" && !run.kv_heads
                       ? model.heads
                       : stated(run.kv_heads, model.heads, "key/value heads:", assumed);
  counted(model.kv_heads, "the number of key/value heads");
  constexpr std::int64_t most_layers = 10'000;
  if (model.layers > most_layers) throw Skip{fmt::format("{} layers are more than is modelled", model.layers)};
  if (model.hidden % model.heads != 0)
    throw Skip{fmt::format("a hidden size of {} is no multiple of {} heads", model.hidden, model.heads)};
  model.feature = required(run.feature, "the feed-forward width");
  constexpr std::int64_t gpt2_padded = 51200;  // GPT-2's, padded as Megatron-LM does
  constexpr std::int64_t t5_vocabulary = 32128;
  const auto* const of_source = std::ranges::find_if(
      vocabulary_rows, [&](const VocabularyRow& row) { return run.source.find(row.source) != std::string::npos; });
  const std::int64_t vocabulary = of_source != vocabulary_rows.end() ? of_source->vocabulary
                                  : is_t5                            ? t5_vocabulary
                                                                     : gpt2_padded;
  model.vocabulary = counted(stated(run.vocabulary, vocabulary, "vocabulary", assumed), "the vocabulary");
  model.sequence = required(run.sequence, "the sequence length");
  model.gated = run.gated.value_or(false);
  model.tied_embeddings =
      run.tied_embeddings.value_or(!model.gated || std::ranges::any_of(tied_rows, [&](const TiedRow& row) {
        return run.source.find(row.source) != std::string::npos && model.feature < row.feature_below;
      }));
  model.alibi = std::ranges::any_of(implied_rows, [&](const ImpliedRow& row) { return row.alibi && says(run, row); });
  if (is_t5) {
    // Megatron-LM's examples/t5: --encoder-seq-length 512, --decoder-seq-length 128.
    constexpr std::int64_t encoder_to_decoder = 4;
    model.decoder_layers = model.layers / 2;
    model.decoder_sequence = model.sequence / encoder_to_decoder;
    model.sequence += model.decoder_sequence;
    assumed.push_back(fmt::format("{} of the layers are the decoder's, and {} tokens beside the encoder's",
                                  model.decoder_layers, model.decoder_sequence));
    assumed.emplace_back("norms, positions and the lack of biases are T5's");
  }
  return model;
}

DataType precision_of(const PublishedRun& run) {
  if (run.precision == "fp32") return DataType::fp32;
  if (run.precision == "fp16") return DataType::fp16;
  if (run.precision.empty())
    for (const ImpliedRow& row : implied_rows)
      if (row.fp16 && says(run, row)) return DataType::fp16;
  // Half precision of either kind, which take as long but where gradients are summed in it.
  if (run.precision == "bf16" || run.precision.empty()) return DataType::bf16;
  if (run.precision == "fp8") return DataType::fp8;
  throw Skip{fmt::format("precision {} is not modelled", run.precision)};
}

// The devices that a run on several racks takes of each: as many machines as divide all of them, as
// NVIDIA's launcher asks of the queue (NVIDIA/dgxc-benchmarking@841f546
// cli/llmb-run/src/llmb_run/job_launcher.py, _compute_segment_size): 32 are 16 of 18, twice.
std::int64_t of_a_rack(std::int64_t devices, const NodeGroup& rack) {
  const std::int64_t of_machine = rack.devices_per_node() / rack.machines();
  const bool is_count = devices <= std::numeric_limits<int>::max();  // else no cluster has so many
  if (rack.machines() == 1 || devices <= rack.devices_per_node() || devices % of_machine != 0 || !is_count)
    return devices;
  std::int64_t machines = rack.machines();
  while (devices / of_machine % machines != 0) --machines;
  return machines * of_machine;
}

// As many devices of nodes such as those of a named cluster.
Cluster cluster_of(const std::string& name, std::int64_t devices, const ClusterCatalog& catalog) {
  ClusterOptions options;
  const std::int64_t together = of_a_rack(devices, find_cluster(name, catalog).groups.front());
  options.devices = static_cast<int>(std::min<std::int64_t>(together, std::numeric_limits<int>::max()));
  Cluster cluster = find_cluster(name, catalog, options);
  if (together < devices) cluster.groups.front().nodes *= static_cast<int>(devices / together);
  return cluster;
}

Cluster cluster_of(const PublishedRun& run, const ClusterCatalog& catalog, std::vector<std::string>& assumed) {
  const std::int64_t devices = required(run.devices, "the number of devices");
  if (!run.cluster.empty()) {
    Cluster cluster = cluster_of(run.cluster, devices, catalog);
    const auto is_stated = [&](const NodeGroup& group) { return group.device.name == run.device; };
    if (!run.device.empty() && !std::ranges::all_of(cluster.groups, is_stated))
      throw Skip{fmt::format("device {} is not that of cluster {}, {}; leave one of them out", run.device, run.cluster,
                             device_name(cluster))};
    return cluster;
  }
  const auto row = std::ranges::find_if(node_rows, [&](const NodeRow& one) {
    return run.device == one.device && run.intra_node == one.intra_node &&
           run.source.find(one.source) != std::string::npos &&
           run.devices_per_node.value_or(one.devices_per_node) == one.devices_per_node;
  });
  if (row == node_rows.end()) {
    const auto or_nothing = [](const std::string& text) { return text.empty() ? std::string("nothing") : text; };
    std::vector<std::string> known;
    for (const NodeRow& one : node_rows)
      if (one.source.empty()) known.push_back(fmt::format("{} with {}", one.device, one.intra_node));
    throw Skip{fmt::format(
        "nodes of {} {} with {} are none of those that device and intra_node may name ({}); a column cluster may name "
        "a file of configs/clusters instead",
        run.devices_per_node ? std::to_string(*run.devices_per_node) : "unstated numbers of", or_nothing(run.device),
        or_nothing(run.intra_node), fmt::join(known, ", "))};
  }
  Cluster cluster = cluster_of(std::string(row->cluster), devices, catalog);
  if (!row->instead.empty())
    for (NodeGroup& group : cluster.groups) group.device = find_device(std::string(row->instead), catalog);
  if (!row->assumed.empty()) assumed.emplace_back(row->assumed);
  if (cluster.nodes() == 1) return cluster;
  const double network = stated(run.gbit_s_per_node, row->gbit_s_per_node, "Gbit/s of a node's network:", assumed);
  if (network <= 0.0) throw Skip{"the network of a node has 0 Gbit/s"};
  return varied(cluster, Resource::network, network / row->gbit_s_per_node);
}

Engine engine_of(const PublishedRun& run, const ValidationRequest& request, std::vector<std::string>& assumed) {
  if (request.engine) return find_engine(*request.engine, request.engines);
  const std::string engine = run.engine == "torch" && run.data_parallel == "dp"        ? "torch-dp"
                             : run.engine == "megatron" && run.data_parallel == "fsdp" ? "megatron-fsdp"
                                                                                       : run.engine;
  const auto* const row = std::ranges::find_if(engine_rows, [&](const EngineRow& one) {
    return engine == one.engine && run.source.find(one.source) != std::string::npos &&
           run.notes.find(one.notes) != std::string::npos && (one.layers == 0 || one.layers == run.layers) &&
           (one.precision.empty() || one.precision == run.precision);
  });
  const std::string file(row == engine_rows.end() ? std::string_view(engine) : row->file);
  const std::vector<std::string> names = engine_names(request.engines);
  if (std::ranges::find(names, file) != names.end()) return find_engine(file, request.engines);
  assumed.push_back(fmt::format("{} behaves as parplan's own runtime", run.engine.empty() ? "the engine" : run.engine));
  return {};
}

// So many layers of the whole model recompute, of each stage as many.
void state_recompute_layers(const PublishedRun& run, LayoutRequest& layout, std::vector<std::string>& assumed) {
  const std::int64_t layers = *run.recompute_layers;
  if (layers == 0) {
    layout[Choice::recompute] = Recompute::none;
    return;
  }
  if (given<Recompute>(layout, Choice::recompute) == Recompute::none)
    throw Skip{fmt::format("{} layers recompute, and recompute is none", layers)};
  if (!layout[Choice::recompute]) {
    layout[Choice::recompute] = Recompute::full;
    assumed.emplace_back("recompute of whole layers");
  }
  const std::int64_t stages = *given<std::int64_t>(layout, Choice::pp) *
                              given<std::int64_t>(layout, Choice::virtual_stages).value_or(1);
  if (stages < 1 || layers % stages != 0)
    throw Skip{fmt::format("{} layers that recompute are no multiple of {} stages", layers, stages)};
  layout[Choice::recompute_layers] = layers / stages;
}

LayoutRequest layout_of(PublishedRun run, const Engine& engine, std::vector<std::string>& assumed) {
  bool tp_overlap = false;
  const bool recompute_stated = !run.recompute.empty();
  for (const ImpliedRow& row : implied_rows) {
    if (!says(run, row)) continue;
    if (!run.zero_stage) run.zero_stage = row.zero_stage;
    if (!run.sequence_parallel) run.sequence_parallel = row.sequence_parallel;
    tp_overlap = tp_overlap || row.tp_overlap;
    if (run.recompute.empty() && row.recomputes_nothing) run.recompute = "none";
  }
  for (const RecipeRow& row : recipe_rows) {
    if (!row.source.is_in(run.source) || run.layers != row.layers || run.hidden != row.hidden ||
        (row.devices > 0 && run.devices != row.devices) || run.tp != row.tp || run.pp != row.pp)
      continue;
    tp_overlap = row.tp_overlap.value_or(tp_overlap);
    if (!row.recompute.empty() && !recompute_stated) run.recompute = row.recompute;
    if (!run.micro_batch) run.micro_batch = row.micro_batch;
    if (!run.virtual_stages) run.virtual_stages = row.virtual_stages;
    break;
  }
  // An engine that has no other leaves nothing to assume.
  if (!engine.has_interleaved && !run.virtual_stages) run.virtual_stages = 1;
  if (!engine.has_sequence_parallel && !run.sequence_parallel) run.sequence_parallel = false;
  const std::int64_t dp = required(run.dp, "dp"), tp = required(run.tp, "tp"), pp = required(run.pp, "pp");
  const std::int64_t cp = run.cp.value_or(1);
  // The product of such numbers may be none of 64 bits.
  const double ranks = static_cast<double>(dp) * static_cast<double>(tp) * static_cast<double>(pp) *
                       static_cast<double>(cp);
  if (ranks != static_cast<double>(*run.devices))
    throw Skip{fmt::format("dp {} x tp {} x pp {} x cp {} are not {} devices", dp, tp, pp, cp, *run.devices)};
  LayoutRequest layout{{Choice::dp, dp}, {Choice::tp, tp}, {Choice::pp, pp}};
  if (cp > 1) {
    layout[Choice::cp] = cp;
    if (engine.has_context_by_keys) {
      layout[Choice::cp_method] = ContextMethod::all_gather;
      assumed.emplace_back("context parallelism by gathering keys and values");
    }
  }
  if (run.data_parallel == "dp" && dp > 1) layout[Choice::dp_method] = DataMethod::master;
  if (dp * cp > 1) {
    const bool shards_all = run.data_parallel == "fsdp" || run.engine.starts_with("fsdp");
    std::int64_t stage = stated(run.zero_stage, std::int64_t{shards_all ? 3 : 0}, "ZeRO stage", assumed);
    // FSDP whose parameters and gradients are whole while a pipeline has micro-batches to run.
    if (run.data_parallel == "fsdp" && pp > 1) stage = std::min<std::int64_t>(stage, engine.most_zero_in_pipelines);
    layout[Choice::zero_stage] = stage;
    if (run.shard) layout[Choice::dp_shard] = *run.shard;
  }
  // torchtitan@9dec370 torchtitan/parallelisms/pipelining_utils.py:79-81: unless it is told
  // otherwise, a pipeline has as many micro-batches as ranks.
  if (run.engine == "torchtitan" && pp > 1 && run.global_batch && *run.global_batch % (dp * pp) == 0 &&
      !run.micro_batch)
    run.micro_batch = *run.global_batch / (dp * pp);
  const std::int64_t micro_batch = stated(run.micro_batch, std::int64_t{1}, "micro-batch", assumed);
  layout[Choice::micro_batch] = counted(micro_batch, "micro-batch");
  // It costs nothing where an engine has it; Korthikanti et al. 2022 and all recipes above set it.
  if (tp > 1 && !run.sequence_parallel) assumed.emplace_back(assumed_sequence_parallel);
  if (tp > 1 && run.sequence_parallel.value_or(true)) {
    layout[Choice::sequence_parallel] = true;
    if (tp_overlap && engine.has_tensor_overlap) layout[Choice::tp_overlap] = TensorOverlap::ring;
  }
  if (run.recompute == "none") {
    layout[Choice::recompute] = Recompute::none;
  } else if (run.recompute == "full") {
    layout[Choice::recompute] = Recompute::full;
  } else if (run.recompute == "selective") {
    const auto* const row = std::ranges::find_if(selective_rows, [&](const SelectiveRow& one) {
      return run.engine == one.engine && run.notes.find(one.notes) != std::string::npos;
    });
    layout[Choice::recompute] = row == selective_rows.end() ? Recompute::core_attn : row->recompute;
    if (row != selective_rows.end() && row->every > 1)
      run.recompute_layers = required(run.layers, "the number of layers") / row->every;
    if (row != selective_rows.end() && !row->assumed.empty()) assumed.emplace_back(row->assumed);
  }
  const auto* const offload = std::ranges::find_if(offload_rows, [&](const OffloadRow& one) {
    return run.data_parallel == "fsdp" && run.source.find(one.source) != std::string::npos &&
           run.device == one.device && run.precision == one.precision && run.layers == one.layers;
  });
  if (offload != offload_rows.end() && engine.has_offload_of_some_layers) {
    layout[Choice::offload] = Offload{.activations = Home::host};
    layout[Choice::offload_layers] = offload->offloaded;
  }
  if (pp > 1 && stated(run.virtual_stages, std::int64_t{1}, "virtual stages:", assumed) > 1) {
    layout[Choice::schedule] = ScheduleKind::interleaved;
    layout[Choice::virtual_stages] = *run.virtual_stages;
  }
  if (run.recompute_layers) state_recompute_layers(run, layout, assumed);
  return layout;
}

}  // namespace

const char* name(MemoryScope scope) {
  constexpr std::array names = {"allocated", "reserved", "device"};
  return names[index_of(scope)];
}

StatedRun state(const PublishedRun& run, const ValidationRequest& request) {
  StatedRun result;
  for (const ScopeRow& row : scope_rows)
    if (run.source.find(row.source) != std::string::npos) result.memory_scope = row.scope;
  try {
    state_precision(result.training, precision_of(run));
    result.model = model_of(run, result.assumed);
    result.cluster = cluster_of(run, request.catalog, result.assumed);
    result.training.engine = engine_of(run, request, result.assumed);
    result.has_engine = true;
    const auto* const replayed =
        std::ranges::find_if(implied_rows, [&](const ImpliedRow& row) { return row.replays && says(run, row); });
    if (replayed != implied_rows.end() && result.training.engine.host_per_op > Seconds(0.0)) {
      result.training.engine.host_per_op = Seconds(0.0);
      result.engine_differs = fmt::format("host_per_op 0 s ({})", replayed->said);
    }
    keep_kernels_of(result.training.engine, result.cluster);
    if (result.training.fp8)
      if (const auto reason = lacks_fp8(result.cluster, result.training.engine)) throw Skip{*reason};
    result.layout = layout_of(run, result.training.engine, result.assumed);
    result.sequence_parallel_unstated =
        std::ranges::find(result.assumed, assumed_sequence_parallel) != result.assumed.end();
    result.recompute_unstated = run.recompute.empty() && !result.layout[Choice::recompute];
    if (result.model.decoder_layers > 0 && !result.training.engine.fused_attention)
      throw Skip{
          fmt::format("a T5 with attention in several kernels ({}) is not modelled", result.training.engine.name)};
    result.training.global_batch = required(run.global_batch, "the global batch");
    result.training.sequence_length = result.model.sequence;
  } catch (const Skip& skip) {
    result.skipped = skip.why;
  } catch (const ConfigError& error) {
    result.skipped = error.message();
  }
  return result;
}

}  // namespace parplan
