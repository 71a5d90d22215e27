#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/cluster/find_cluster.h"
#include "planner/cluster/node_layout.h"
#include "planner/graph/engine_graph.h"
#include "planner/graph/trained_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/parallel/recompute.h"
#include "planner/parallel/techniques.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/parallel_spec_text.h"

// Models, clusters, trainings and stage cuts to search over: small ones, and random ones.
namespace parplan::testing {

inline const std::string source = PARPLAN_SOURCE_DIR;

inline OpGraph graph_of(const std::string& model, std::int64_t sequence) {
  return build_graph(load_model(source + "/tests/data/models/" + model + ".yaml", "").spec, sequence);
}

inline Cluster cluster_of(const std::string& name, std::optional<int> devices = {}) {
  return find_cluster(name, {source + "/configs/devices", source + "/configs/clusters"},
                      {.device = {}, .network = {}, .devices = devices, .nodes = {}});
}
// Every cut of `blocks` into `stages` runs.
inline std::vector<std::vector<int>> all_cuts(int blocks, int stages) {
  if (stages == 1) return {{blocks}};
  std::vector<std::vector<int>> cuts;
  for (int first = 1; first <= blocks - stages + 1; ++first)
    for (std::vector<int> rest : all_cuts(blocks - first, stages - 1)) {
      rest.insert(rest.begin(), first);
      cuts.push_back(std::move(rest));
    }
  return cuts;
}

inline Cluster eight_cores() { return cluster_of(source + "/tests/data/clusters/cpu-8.yaml"); }

inline TrainingSpec training_of(std::int64_t batch, DataType precision) {
  TrainingSpec training;
  training.global_batch = batch;
  training.sequence_length = 16;
  training.precision = precision;
  return training;
}

// Numbers from the seed of a test, or from another one where PARPLAN_RANDOM_SEED says so: to look
// at other cases than those of every day.
inline std::mt19937 random_from(unsigned seed) {
  const char* const other = std::getenv("PARPLAN_RANDOM_SEED");
  return std::mt19937(other == nullptr ? seed : seed + 1000u * static_cast<unsigned>(std::stoul(other)));
}

inline std::vector<int> random_cut(int blocks, int stages, std::mt19937& random) {
  std::vector<int> cut(static_cast<std::size_t>(stages), 1);
  for (int left = blocks - stages; left > 0; --left) ++cut[random() % cut.size()];
  return cut;
}

// The same with rows around the ring of the tensor axis half of the time where its ranks share them
// out, and with parameters gathered another number of blocks ahead, and one by one, where they are.
inline ParallelSpec or_overlapped(ParallelSpec spec, const Engine& engine, const std::mt19937& random) {
  std::mt19937 apart = random;  // so that the draw changes no others
  if (spec.sequence_parallel && engine.has_tensor_overlap && apart() % 2 == 0) spec.tp_overlap = TensorOverlap::ring;
  constexpr int depths[] = {0, 2, 3, 5};
  if (brings_parameters(spec) && engine.has_other_prefetch && apart() % 2 == 0)
    spec.prefetch_depth = depths[apart() % std::size(depths)];
  if (gathers_parameters(spec) && engine.has_parameter_gathers && apart() % 2 == 0)
    spec.gather_unit = GatherUnit::parameter;
  return spec;
}

// The same with groups that exchange tokens for heads half of the time where the context axis has
// several.
inline ParallelSpec or_hierarchical(ParallelSpec spec, const OpGraph& graph, const TrainingSpec& training,
                                    const std::mt19937& random) {
  std::mt19937 apart = random;  // so that the draw changes no others
  if (apart() % 2 != 0) return spec;
  ParallelSpec with = spec;
  with.mesh.cp_ulysses = apart() % 2 == 0 && spec.cp() % 4 == 0 && spec.cp() > 4 ? 4 : 2;
  return illegal(graph, training, with) ? spec : with;
}

inline std::string describe(const ParallelSpec& spec) {
  return fmt::format(
      "dp {} tp {} pp {} {} sp {} overlap {} zero {} in groups of {} ahead {} by {} mb {} {} {} [{}] "
      "offload {} of {} layers",
      spec.dp(), spec.tp(), spec.pp(), write_order(spec.mesh.order), spec.sequence_parallel, name(spec.tp_overlap),
      spec.zero_stage, spec.mesh.dp_shard, spec.prefetch_depth, name(spec.gather_unit), spec.micro_batch,
      name(spec.schedule), write_stage_recompute({spec.recompute, spec.recompute_layers}), stage_recompute(spec),
      name(spec.offload), spec.offload_layers);
}

// A decoder with random sizes.
inline OpGraph random_graph(std::mt19937& random, std::int64_t sequence) {
  const auto pick = [&](std::initializer_list<int> from) { return from.begin()[random() % from.size()]; };
  ModelSpec spec =
      load_model(source + "/tests/data/models/" + (random() % 2 ? "tiny-gpt2" : "tiny-llama") + ".yaml", "").spec;
  spec.layers = pick({1, 2, 3, 4, 5, 8});
  spec.kv_heads = spec.kv_heads == spec.heads ? 4 : 2;
  spec.heads = 4;
  spec.head_dim = pick({8, 64});
  spec.hidden = pick({32, 512, 4096});
  spec.feature = spec.hidden * pick({1, 4});
  spec.vocabulary = pick({61, 5000, 50257});
  spec.tied_embeddings = random() % 2;
  std::mt19937 apart = random;  // so that these draws change no others
  if (apart() % 3 == 0) {
    spec.bidirectional = spec.head_transform = spec.embedding_norm = true;
    spec.mask_token = 1;
    spec.token_types = 2;
  }
  spec.norm_without_bias = spec.norm == NormKind::layer_norm && apart() % 2 == 0;
  if (apart() % 3 == 0) spec.qk_norm = QkNorm::layer_norm_per_head;
  return build_graph(spec, sequence);
}

// parplan's own runtime in half of the cases; else any engine. `graph`: becomes what it runs.
inline Engine random_engine(unsigned seed, OpGraph& graph) {
  std::mt19937 random(seed);
  const auto flip = [&] { return random() % 2 == 0; };
  Engine engine;
  if (flip()) return engine;
  engine.name = "random";
  for (bool Engine::*const fact :
       {&Engine::fused_attention, &Engine::fused_norm, &Engine::fused_activation, &Engine::fused_dropout,
        &Engine::fused_loss, &Engine::dropout, &Engine::repeats_layers, &Engine::overlaps_tensor,
        &Engine::overlaps_data, &Engine::overlaps_pipeline, &Engine::half_gradients, &Engine::splits_transfers,
        &Engine::scatters_gradients, &Engine::reduces_half, &Engine::equal_stages,
        &Engine::stages_share_weights, &Engine::blocks_launches})
    engine.*fact = flip();
  engine.copies_gradients = flip();
  engine.dummy_gradients = flip();
  if (flip()) engine.allocator_reserve = 0.01 * static_cast<double>(random() % 60);
  if (flip()) engine.host_per_op = Seconds(1e-6 * static_cast<double>(random() % 100));
  std::mt19937 apart = random;  // so that these draws change no others
  for (bool Engine::*const has :
       {&Engine::has_gpipe, &Engine::has_sequence_parallel, &Engine::has_other_orders,
        &Engine::has_core_attn_recompute, &Engine::has_norms_recompute, &Engine::has_activation_recompute,
        &Engine::has_mlp_recompute, &Engine::has_full_recompute, &Engine::has_recompute_per_stage})
    engine.*has = apart() % 4 != 0;
  engine.most_zero_in_pipelines = static_cast<int>(apart() % 4);
  engine.attention_up_to = apart() % 2 == 0 ? 0 : apart() % 2 == 0 ? 80 : 90;
  for (bool Engine::*const fact :
       {&Engine::fused_scores, &Engine::fused_gelu, &Engine::fused_update, &Engine::master_computes_loss,
        &Engine::flattens_gradients, &Engine::copies_gathered, &Engine::triton_attention, &Engine::casts_shards,
        &Engine::fused_gate, &Engine::fused_rotary, &Engine::early_cublas, &Engine::fills_outputs,
        &Engine::fused_accumulation, &Engine::widens_gradients, &Engine::fp8_casts_once,
        &Engine::sums_half})
    engine.*fact = apart() % 2 == 0;
  engine.has_other_prefetch = apart() % 2 == 0;
  engine.gathers_further_forward = static_cast<int>(apart() % 2);
  engine.gathers_further_backward = static_cast<int>(apart() % 2);
  engine.has_parameter_gathers = apart() % 4 != 0;
  engine.copies_reduced = apart() % 2 == 0;
  constexpr int multiples[] = {1, 4, 8};
  engine.softmax_multiple = multiples[apart() % std::size(multiples)];
  if (apart() % 4 == 0) engine.softmax_up_to = 8;
  for (bool Engine::*const fact :
       {&Engine::copies_keys, &Engine::copies_logits, &Engine::copies_to_buckets, &Engine::lists_updates,
        &Engine::fused_sums, &Engine::fused_norm_gradient, &Engine::fused_bias_gradient, &Engine::fused_rms_norm,
        &Engine::fills_loss_gradient, &Engine::keeps_unread_products, &Engine::reduces_where_freed,
        &Engine::makes_gradients_late, &Engine::repeats_keys, &Engine::attends_in_steps,
        &Engine::copies_rows, &Engine::casts_weights_apart,
        &Engine::separate_keys})
    engine.*fact = apart() % 2 == 0;
  if (apart() % 4 == 0) {
    engine.lists_shards = true;
    engine.gathers_again = apart() % 2 == 0;
    engine.persists_below = apart() % 2 == 0 ? 0 : 5000;
    for (Seconds Engine::*const host :
         {&Engine::host_per_listed_shard, &Engine::host_per_copied_shard, &Engine::host_per_persistent_shard})
      engine.*host = Seconds(1e-6 * static_cast<double>(apart() % 10));
  }
  if (apart() % 4 == 0) engine.loss_metrics = 2;
  engine.transposes_weights = apart() % 2 == 0 && engine.fp8_casts_once;
  if (apart() % 2 == 0 && engine.fp8_casts_once) engine.scale_history = 16;
  for (bool Engine::*const fact : {&Engine::scatters_sharded, &Engine::copies_sharded, &Engine::copies_coalesced,
                                   &Engine::copies_to_update, &Engine::last_stages_take_more})
    engine.*fact = apart() % 2 == 0;
  if (apart() % 2 == 0) engine.bucket_elements = 3000;
  for (Seconds Engine::*const host :
       {&Engine::host_per_module_forward, &Engine::host_per_module_backward, &Engine::host_per_sharded_gradient})
    if (apart() % 4 == 0) engine.*host = Seconds(1e-6 * static_cast<double>(apart() % 50));
  graph = as_run_by(engine, std::move(graph));
  return engine;
}

// Half of the stages that recompute do so in some of their layers alone. `spec` is cut.
inline void recompute_some_layers(ParallelSpec& spec, const std::mt19937& random) {
  std::mt19937 apart = random;  // so that these draws change no others
  const std::vector<int> layers = layers_of_stages(spec);
  const auto some_of = [&](int most) {
    return most > 0 && apart() % 2 == 0 ? 1 + static_cast<int>(apart() % static_cast<unsigned>(most)) : 0;
  };
  if (spec.recompute != Recompute::none && spec.recompute != Recompute::per_stage)
    spec.recompute_layers = some_of(std::ranges::max(layers));
  for (std::size_t stage = 0; stage < spec.stage_recompute.size(); ++stage)
    if (StageRecompute& own = spec.stage_recompute[stage]; own.rule != Recompute::none)
      own.layers = some_of(layers[stage]);
}

// Half of the time the activations of some layers of each stage alone leave the device, where any
// do. `spec` is cut.
inline void offload_some_layers(ParallelSpec& spec, const std::mt19937& random) {
  std::mt19937 apart = random;  // so that the draw changes no others
  const int most = std::ranges::max(layers_of_stages(spec));
  if (spec.offload.activations != Home::device && most > 0 && apart() % 2 == 0)
    spec.offload_layers = 1 + static_cast<int>(apart() % static_cast<unsigned>(most));
}

// Everything is trained in half of the cases; else adapters, a block, or both. `graph`: becomes how
// it is trained.
inline void train_random_parts(unsigned seed, TrainingSpec& training, OpGraph& graph) {
  std::mt19937 random(seed + 1000);
  // Some of those in bf16 with products in fp8, whether or not devices have units for it.
  training.fp8 = training.precision == DataType::bf16 && seed % 3 == 1;
  if (training.fp8 && training.engine.fp8_casts_once) graph = quantized(std::move(graph));
  if (random() % 2 == 0) return;
  const bool adapts = random() % 2 == 0;
  if (adapts)
    training.lora = Lora{.r = 1 + static_cast<std::int64_t>(random() % 64), .alpha = 16.0, .target_modules = {}};
  training.trainable.all = false;
  if (!adapts || random() % 3 == 0) training.trainable.patterns = {graph.blocks[random() % graph.blocks.size()].name};
  if (find_problem(training, graph)) training.trainable.patterns = {"embedding"};  // the head may own nothing
  graph = as_trained(training, std::move(graph));
}

// Nodes and devices with random speeds, with and without levels above the nodes and rails; two
// kinds of device if `heterogeneous`.
inline Cluster random_cluster(std::mt19937& random, bool gpu, bool heterogeneous) {
  const auto upto = [&](int most) { return static_cast<int>(random() % static_cast<unsigned>(most)); };
  Cluster cluster = gpu ? cluster_of("dgx-a100", 8 * (2 + upto(2))) : eight_cores();
  if (gpu && upto(3) == 0) {
    NodeGroup& group = cluster.groups.front();
    group.node = first_devices(group.node, 1 + upto(2));
    group.nodes = 6;
  }
  if (gpu && upto(2) == 0) {
    cluster.network.levels = {
        {.name = "leaf", .nodes = 2 + upto(2), .oversubscription = 1.0 + upto(2), .latency = Seconds(1e-6)},
        {.name = "spine", .nodes = {}, .oversubscription = std::exp2(upto(7)), .latency = Seconds(5e-6)}};
    cluster.network.rails = upto(2) == 0;
  }
  if (heterogeneous) {
    cluster.groups.push_back(cluster.groups.front());
    for (NodeGroup& group : cluster.groups) group.nodes = 1;
    cluster.groups[1].device.name = "other";
    cluster.groups[1].device.memory_capacity = Bytes(20'000'000'000);
  }
  const auto factor = [&] { return std::exp2(std::uniform_real_distribution<double>(-6.0, 3.0)(random)); };
  std::mt19937 apart = random;  // so that these draws change no others
  const auto share = [&] { return std::exp2(std::uniform_real_distribution<double>(-2.0, 0.0)(apart)); };
  // Half of the time GPUs whose switches add (nvls.h).
  if (gpu && !heterogeneous && apart() % 2 == 0) cluster.groups.front().device.name = "h100-sxm-80gb";
  for (NodeGroup& group : cluster.groups) {
    group.device.kernel_launch *= factor();
    for (DeviceRates& rates : group.device.rates) {
      rates.matrix_half *= factor();
      rates.matrix_fp32 *= factor();
      rates.vector *= factor();
      rates.memory *= factor();
      rates.sustained_half = rates.matrix_half * share();
      rates.sustained_weights = rates.matrix_half * share();
      rates.sustained_memory = rates.memory * share();
      for (FlopsPerSecond* attention : {&rates.attention, &rates.attention_gradient, &rates.ampere_attention,
                                        &rates.ampere_attention_gradient})
        *attention = rates.matrix_half * share();
      rates.early_half = rates.sustained_weights;
      rates.early_weights = rates.sustained_half;
      rates.triton_attention = rates.ampere_attention_gradient;  // so that it draws nothing
      rates.triton_attention_gradient = rates.ampere_attention;
      rates.unaligned_two_bytes = rates.sustained_half * 0.2;
      rates.unaligned_four_bytes = rates.sustained_half * 0.4;
      if (!gpu || apart() % 2 == 0) continue;
      rates.matrix_fp8 = rates.matrix_half * (4.0 * share());
      rates.sustained_fp8 = rates.matrix_fp8 * share();
      rates.sustained_fp8_weights = rates.matrix_fp8 * share();
    }
    const double inside = factor(), outside = factor();
    for (Link& link : group.node.links) {
      link.bandwidth *= link.kind == "network" ? outside : inside;
      link.latency *= inside;
    }
  }
  return cluster;
}

}  // namespace parplan::testing
