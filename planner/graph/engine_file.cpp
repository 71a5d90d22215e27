#include "planner/graph/engine_file.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/base/file.h"
#include "planner/base/text.h"

namespace parplan {
namespace {

constexpr int most_multiple = 1 << 20, most_further = 64, most_elements = 1 << 30, most_zero = 3;

constexpr std::array facts = {
    EngineFact{"fused_attention", "attention is one kernel that never writes its scores", &Engine::fused_attention},
    EngineFact{"attention_up_to", "the newest compute capability that fused attention has kernels for, 90 for 9.0",
               &Engine::attention_up_to, 0, 999},
    EngineFact{"triton_attention", "fused attention is Triton's kernel of 2022", &Engine::triton_attention},
    EngineFact{"fused_norm", "a residual sum and the norm behind it are one kernel", &Engine::fused_norm},
    EngineFact{"fused_activation", "a product and the GELU behind it are one kernel", &Engine::fused_activation},
    EngineFact{"fused_scores", "attention's scores are scaled and masked in the kernel of the softmax",
               &Engine::fused_scores},
    EngineFact{"softmax_multiple", "what the softmax's kernel asks heads times samples to be a multiple of",
               &Engine::softmax_multiple, 1, most_multiple},
    EngineFact{"softmax_up_to", "the longest sequence that the softmax's kernel takes", &Engine::softmax_up_to, 0,
               most_multiple},
    EngineFact{"fused_gelu", "a GELU is one kernel", &Engine::fused_gelu},
    EngineFact{"fused_gate", "an activation and its product with the other half are one kernel", &Engine::fused_gate},
    EngineFact{"copies_keys", "keys and values are copied twice more before attention", &Engine::copies_keys},
    EngineFact{"separate_keys", "queries, keys and values are three products", &Engine::separate_keys},
    EngineFact{"repeats_keys", "keys and values are repeated for all query heads before fused attention",
               &Engine::repeats_keys},
    EngineFact{"attends_in_steps", "context parallelism attends to each rank's keys by a call, and merges in fp32",
               &Engine::attends_in_steps},
    EngineFact{"copies_rows", "rows are copied behind a gather over tensor-parallel ranks, and before a scatter",
               &Engine::copies_rows},
    EngineFact{"casts_weights_apart", "in fp8, weights are cast as their shards are gathered, not by products",
               &Engine::casts_weights_apart},
    EngineFact{"fused_rms_norm", "an RMS norm is one kernel", &Engine::fused_rms_norm},
    EngineFact{"fused_rotary", "rotary positions are one kernel", &Engine::fused_rotary},
    EngineFact{"fused_update", "the update of a parameter is one kernel", &Engine::fused_update},
    EngineFact{"fused_sums", "a norm's kernel adds its gradient to the residual sum's", &Engine::fused_sums},
    EngineFact{"fused_norm_gradient", "a norm's gradient and those of its parameters are one kernel",
               &Engine::fused_norm_gradient},
    EngineFact{"fused_bias_gradient", "a bias's gradient is summed in the kernel of the weight's",
               &Engine::fused_bias_gradient},
    EngineFact{"lists_updates", "an optimizer's launch takes tensors of several blocks", &Engine::lists_updates},
    EngineFact{"fused_dropout", "dropout and the residual sum behind it are one kernel", &Engine::fused_dropout},
    EngineFact{"fused_loss", "the loss reads logits as they are, without a copy in fp32", &Engine::fused_loss},
    EngineFact{"copies_logits", "the loss subtracts maxima into another copy of the logits", &Engine::copies_logits},
    EngineFact{"fills_loss_gradient", "the loss fills the gradient of its log-softmax in a tensor of its own",
               &Engine::fills_loss_gradient},
    EngineFact{"loss_metrics", "metrics that compute the loss once more, in fp32", &Engine::loss_metrics, 0,
               most_multiple},
    EngineFact{"early_cublas", "products are cuBLAS's of CUDA 12.0 and 12.1", &Engine::early_cublas},
    EngineFact{"fills_outputs", "what products and attention write is filled before", &Engine::fills_outputs},
    EngineFact{"dropout", "attention and residual branches drop elements", &Engine::dropout},
    EngineFact{"repeats_layers", "full recompute repeats whole layers", &Engine::repeats_layers},
    EngineFact{"overlaps_tensor", "tensor-parallel communication overlaps with computation", &Engine::overlaps_tensor},
    EngineFact{"overlaps_data", "data-parallel communication overlaps with computation", &Engine::overlaps_data},
    EngineFact{"master_computes_loss", "under DataParallel the master computes the loss of all",
               &Engine::master_computes_loss},
    EngineFact{"overlaps_pipeline", "transfers between stages overlap with computation", &Engine::overlaps_pipeline},
    EngineFact{"splits_transfers", "transfers between stages are split over the tensor axis",
               &Engine::splits_transfers},
    EngineFact{"half_gradients", "backwards leave gradients in half precision, which are added apart",
               &Engine::half_gradients},
    EngineFact{"fused_accumulation", "products add gradients of weights to their sums",
               &Engine::fused_accumulation},
    EngineFact{"sums_half", "gradients are summed in half precision", &Engine::sums_half},
    EngineFact{"scatters_gradients", "gradients are scattered to the ranks that update them",
               &Engine::scatters_gradients},
    EngineFact{"scatters_sharded", "with ZeRO-2 they are, too", &Engine::scatters_sharded},
    EngineFact{"copies_reduced", "gradients are copied, divided and copied back around their all-reduce",
               &Engine::copies_reduced},
    EngineFact{"copies_to_buckets", "gradients are copied to the buckets that are all-reduced, and back",
               &Engine::copies_to_buckets},
    EngineFact{"copies_to_update", "gradients are copied, widened and scaled before an update, and parameters copied",
               &Engine::copies_to_update},
    EngineFact{"reduces_half", "gradients are reduced in half precision", &Engine::reduces_half},
    EngineFact{"flattens_gradients", "sharded gradients are copied into one tensor, which is widened",
               &Engine::flattens_gradients},
    EngineFact{"widens_gradients", "sharded gradients are copied into one tensor in fp32 by one kernel",
               &Engine::widens_gradients},
    EngineFact{"copies_sharded", "sharded gradients are copied into a bucket, divided and copied to be reduced",
               &Engine::copies_sharded},
    EngineFact{"bucket_elements", "elements that this bucket has room for", &Engine::bucket_elements, 0,
               most_elements},
    EngineFact{"reduces_where_freed", "sharded gradients are where activations were until they are reduced",
               &Engine::reduces_where_freed},
    EngineFact{"makes_gradients_late", "gradients come to be in backwards, and are gone behind the update",
               &Engine::makes_gradients_late},
    EngineFact{"copies_gathered", "gathered parameters are copied before they are used", &Engine::copies_gathered},
    EngineFact{"copies_coalesced", "parameters are copied before and behind a gather of several",
               &Engine::copies_coalesced},
    EngineFact{"gathers_further_forward", "blocks that gathers of a forward run further ahead than the plan says",
               &Engine::gathers_further_forward, 0, most_further},
    EngineFact{"gathers_further_backward", "blocks that gathers of a backward run further ahead than the plan says",
               &Engine::gathers_further_backward, 0, most_further},
    EngineFact{"lists_shards", "parameters and gradients are gathered and scattered by lists of one tensor a rank",
               &Engine::lists_shards},
    EngineFact{"host_per_listed_shard", "the host's time to put a rank's shard into such a list",
               &Engine::host_per_listed_shard},
    EngineFact{"host_per_copied_shard", "the host's time to submit the copy of a rank's shard",
               &Engine::host_per_copied_shard},
    EngineFact{"host_per_persistent_shard", "the host's time to take a rank's shard of a parameter that persists",
               &Engine::host_per_persistent_shard},
    EngineFact{"host_per_module_forward", "the host's time around a module whose parameters are sharded, forward",
               &Engine::host_per_module_forward},
    EngineFact{"host_per_module_backward", "the same backward", &Engine::host_per_module_backward},
    EngineFact{"host_per_sharded_gradient", "the host's time behind a gradient that is sharded",
               &Engine::host_per_sharded_gradient},
    EngineFact{"persists_below", "parameters of fewer elements are gathered once a step", &Engine::persists_below, 0,
               most_elements},
    EngineFact{"gathers_again", "a recomputed block's parameters are gathered again for its backward",
               &Engine::gathers_again},
    EngineFact{"casts_shards", "shards of parameters are held in fp32 alone, and cast as they are gathered",
               &Engine::casts_shards},
    EngineFact{"vocabulary_multiple", "what a rank's rows of the vocabulary are padded to a multiple of",
               &Engine::vocabulary_multiple, 1, most_multiple},
    EngineFact{"has_tensor", "there is tensor parallelism", &Engine::has_tensor},
    EngineFact{"has_pipeline", "there are pipelines", &Engine::has_pipeline},
    EngineFact{"has_interleaved", "there are interleaved pipelines", &Engine::has_interleaved},
    EngineFact{"has_other_groups", "interleaved pipelines have groups of other numbers of micro-batches than of ranks",
               &Engine::has_other_groups},
    EngineFact{"has_gpipe", "there are pipelines with all forwards before all backwards", &Engine::has_gpipe},
    EngineFact{"has_zero_bubble", "there are zero-bubble pipelines", &Engine::has_zero_bubble},
    EngineFact{"has_sequence_parallel", "there is sequence parallelism", &Engine::has_sequence_parallel},
    EngineFact{"has_tensor_overlap", "tensor-parallel communication goes around a ring beside slices of products",
               &Engine::has_tensor_overlap},
    EngineFact{"has_context", "there is context parallelism", &Engine::has_context},
    EngineFact{"has_context_by_keys", "context parallelism brings keys and values of other ranks",
               &Engine::has_context_by_keys},
    EngineFact{"has_hierarchical_context", "context parallelism exchanges tokens for heads in groups of ranks",
               &Engine::has_hierarchical_context},
    EngineFact{"has_hierarchical_gather", "keys and values are gathered between such groups",
               &Engine::has_hierarchical_gather},
    EngineFact{"has_other_orders", "the mesh's axes have other orders than pp-dp-tp", &Engine::has_other_orders},
    EngineFact{"has_core_attn_recompute", "attention's core alone is recomputed", &Engine::has_core_attn_recompute},
    EngineFact{"has_norms_recompute", "norms alone are recomputed", &Engine::has_norms_recompute},
    EngineFact{"has_activation_recompute", "the activation alone is recomputed", &Engine::has_activation_recompute},
    EngineFact{"has_mlp_recompute", "the feed-forward's inside alone is recomputed", &Engine::has_mlp_recompute},
    EngineFact{"has_full_recompute", "whole layers are recomputed", &Engine::has_full_recompute},
    EngineFact{"has_every_other_product_recompute", "every other product is recomputed, with all that is no product",
               &Engine::has_every_other_product_recompute},
    EngineFact{"keeps_unread_products", "recompute of every other product keeps products that no backward reads",
               &Engine::keeps_unread_products},
    EngineFact{"has_recompute_per_stage", "stages differ in what they recompute", &Engine::has_recompute_per_stage},
    EngineFact{"has_recompute_of_some_layers", "the first layers of each stage alone are recomputed",
               &Engine::has_recompute_of_some_layers},
    EngineFact{"has_modules_of_some_layers", "modules of the first layers of each stage alone are recomputed",
               &Engine::has_modules_of_some_layers},
    EngineFact{"has_offload_of_some_layers", "what the first layers save may be in host memory",
               &Engine::has_offload_of_some_layers},
    EngineFact{"has_all_reduce", "data-parallel ranks are processes that each reduce gradients",
               &Engine::has_all_reduce},
    EngineFact{"has_master", "there is DataParallel, one process for all devices", &Engine::has_master},
    EngineFact{"has_zero_1", "the optimizer's state alone may be sharded", &Engine::has_zero_1},
    EngineFact{"has_hybrid_sharding", "ZeRO may shard over groups of ranks", &Engine::has_hybrid_sharding},
    EngineFact{"has_other_prefetch", "parameters are gathered other than one block ahead", &Engine::has_other_prefetch},
    EngineFact{"has_fp8", "products of layers may be in fp8", &Engine::has_fp8},
    EngineFact{"fp8_casts_once", "a tensor is cast to fp8 for all products that read it, and weights once a step",
               &Engine::fp8_casts_once},
    EngineFact{"transposes_weights", "in fp8, weights are transposed for each gradient of a product's input",
               &Engine::transposes_weights},
    EngineFact{"scale_history", "in fp8, scales follow from so many magnitudes before, which ranks reduce",
               &Engine::scale_history, 0, 1 << 20},
    EngineFact{"has_parameter_gathers", "parameters are gathered one by one", &Engine::has_parameter_gathers},
    EngineFact{"most_zero", "the highest ZeRO stage", &Engine::most_zero, 0, most_zero},
    EngineFact{"most_zero_in_pipelines", "the highest ZeRO stage in pipelines", &Engine::most_zero_in_pipelines, 0,
               most_zero},
    EngineFact{"equal_stages", "stages hold equal numbers of layers", &Engine::equal_stages},
    EngineFact{"last_stages_take_more", "where layers do not divide into equal stages, the last take one more",
               &Engine::last_stages_take_more},
    EngineFact{"stages_share_weights", "stages take blocks until the weights of their products exceed their share",
               &Engine::stages_share_weights},
    EngineFact{"allocator_reserve", "what the allocator keeps beside activations, as a share of them",
               &Engine::allocator_reserve},
    EngineFact{"copies_gradients", "the optimizer copies its gradients, flat in their type and in fp32",
               &Engine::copies_gradients},
    EngineFact{"dummy_gradients", "one more gradient of a layer in half precision, which nothing reads",
               &Engine::dummy_gradients},
    EngineFact{"libraries", "memory of the CUDA context and of the kernels that a process loads", &Engine::libraries},
    EngineFact{"host_per_op", "the host's time to submit an op", &Engine::host_per_op},
    EngineFact{"blocks_launches", "the host waits for each op before it submits the next", &Engine::blocks_launches},
};

constexpr Seconds most_per_op{1.0};
constexpr Bytes most_libraries{std::int64_t{64} << 30};

void read_fact(const EngineFact& fact, const YamlNode& node, Engine& engine) {
  if (const auto* const flag = std::get_if<bool Engine::*>(&fact.member)) {
    engine.** flag = node.as_bool();
    return;
  }
  if (const auto* const number = std::get_if<int Engine::*>(&fact.member)) {
    engine.** number = static_cast<int>(node.as_integer(fact.least, fact.most));
    return;
  }
  if (const auto* const share = std::get_if<double Engine::*>(&fact.member)) {
    const double value = node.as_number();
    if (value < 0.0 || value > 1.0)
      node.fail(fmt::format("expected a share from 0 to 1, found '{}'", node.as_string()));
    engine.** share = value;
    return;
  }
  if (const auto* const bytes = std::get_if<Bytes Engine::*>(&fact.member)) {
    engine.** bytes = node.as_bytes();
    if (engine.**bytes > most_libraries)
      node.fail(fmt::format("expected at most {}, found '{}'", write_bytes(most_libraries), node.as_string()));
    return;
  }
  const Seconds time = node.as_duration();
  if (time < Seconds(0.0) || time > most_per_op)
    node.fail(fmt::format("expected a time from 0 to {}, found '{}'", write_duration(most_per_op), node.as_string()));
  engine.*std::get<Seconds Engine::*>(fact.member) = time;
}

std::string value_of(const EngineFact& fact, const Engine& engine) {
  if (const auto* const flag = std::get_if<bool Engine::*>(&fact.member)) return engine.**flag ? "true" : "false";
  if (const auto* const number = std::get_if<int Engine::*>(&fact.member)) return fmt::format("{}", engine.**number);
  if (const auto* const share = std::get_if<double Engine::*>(&fact.member)) return fmt::format("{}", engine.**share);
  if (const auto* const bytes = std::get_if<Bytes Engine::*>(&fact.member)) return write_bytes(engine.**bytes);
  return write_duration(engine.*std::get<Seconds Engine::*>(fact.member));
}

// As YAML in single quotes, where a quote stands twice; names and titles are printable lines.
std::string quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? "''" : std::string(1, c);
  return out + "'";
}

// The engine that another is like, which is like none itself.
Engine read_base(const YamlNode& like, const std::filesystem::path& folder) {
  const std::string name = like.as_name();
  const std::vector<std::string> names = names_of_yaml_files(folder);
  if (std::ranges::find(names, name) == names.end())
    like.fail(fmt::format("unknown engine '{}'; known are {}{}", name, join(names), did_you_mean(name, names)));
  const YamlNode document = YamlNode::load((folder / (name + ".yaml")).string());
  if (document.find("like")) like.fail(fmt::format("'{}' is like another engine itself; name that one", name));
  return read_engine(document);
}

// Refuses facts of casts that are made once where an engine has none. `given`: the facts of its
// file or plan.
void refuse_without_single_casts(const YamlNode& given, const Engine& engine) {
  if (engine.fp8_casts_once) return;
  const auto refuse = [&](const char* key, const char* why) {
    const std::optional<YamlNode> own = given.find(key);
    (own ? *own : given.at("fp8_casts_once"))
        .fail(fmt::format("{} needs fp8_casts_once to be true: else {}; leave one of them out", key, why));
  };
  if (engine.transposes_weights)
    refuse("transposes_weights", "each product casts the weight as it reads it, and nothing is left to transpose");
  if (engine.scale_history > 0) refuse("scale_history", "scales are those of what each product casts");
}

std::vector<std::string> keys_of_facts() {
  std::vector<std::string> keys;
  for (const EngineFact& fact : facts) keys.emplace_back(fact.key);
  return keys;
}

}  // namespace

std::span<const EngineFact> engine_facts() {
  return facts;
}

Engine read_engine(const YamlNode& document, const std::filesystem::path& folder) {
  document.allow_keys({"name", "title", "like", "facts"});
  Engine engine;
  if (const auto like = document.find("like")) engine = read_base(*like, folder);
  engine.name = document.at("name").as_name();
  if (is_own(engine))
    document.at("name").fail("'parplan' is parplan's own runtime, which no file describes; choose another name");
  engine.title = printable_line(document.at("title").as_string());
  const YamlNode given = document.at("facts");
  given.allow_keys(keys_of_facts());
  for (const EngineFact& fact : facts) {
    const auto node = given.find(fact.key);
    if (!node) continue;
    node->allow_keys({"value", "source"});
    read_fact(fact, node->at("value"), engine);
    const std::string key = fmt::format("{}: ", fact.key);
    std::erase_if(engine.sources, [&](const std::string& source) { return source.starts_with(key); });
    engine.sources.push_back(key + printable_line(node->at("source").as_string()));
  }
  refuse_without_single_casts(given, engine);
  return engine;
}

Engine read_engine_of_plan(const YamlNode& node) {
  std::vector<std::string> keys = keys_of_facts();
  keys.insert(keys.begin(), {"name", "title"});
  node.allow_keys(keys);
  Engine engine;
  engine.name = node.at("name").as_name();
  engine.title = printable_line(node.at("title").as_string());
  for (const EngineFact& fact : facts)
    if (const auto given = node.find(fact.key)) read_fact(fact, *given, engine);
  refuse_without_single_casts(node, engine);
  Engine own;
  own.name = engine.name;
  own.title = engine.title;
  if (is_own(engine) && engine != own)
    node.fail("this describes another engine than parplan's own runtime; give it another name");
  return engine;
}

std::string write_engine_of_plan(const Engine& engine) {
  std::string text = fmt::format("name: {}\ntitle: {}\n", quoted(engine.name), quoted(engine.title));
  for (const EngineFact& fact : facts)
    if (const std::string value = value_of(fact, engine); value != value_of(fact, Engine{}))
      text += fmt::format("{}: {}\n", fact.key, value);
  return text;
}

std::vector<std::string> engine_names(const std::filesystem::path& folder) {
  std::vector<std::string> names = names_of_yaml_files(folder);
  names.push_back(Engine{}.name);
  std::ranges::sort(names);
  return names;
}

Engine find_engine(const std::string& name, const std::filesystem::path& folder) {
  if (name == Engine{}.name) return {};
  // A known name is the engine's, whatever lies in the working directory.
  const std::vector<std::string> names = engine_names(folder);
  if (std::ranges::find(names, name) != names.end())
    return read_engine(YamlNode::load((folder / (name + ".yaml")).string()), folder);
  // Another name may have a dot, as of llm.c: it is a file's where it ends as one, or there is one.
  const std::filesystem::path path(name);
  std::error_code unreadable;
  const bool is_file = path.extension() == ".yaml" || path.extension() == ".yml" ||
                       name.find('/') != std::string::npos || std::filesystem::is_regular_file(path, unreadable);
  if (is_file) return read_engine(YamlNode::load(name), folder);
  throw ConfigError(
      fmt::format("--engine: unknown engine '{}'; known are {}{}", name, join(names), did_you_mean(name, names)));
}

}  // namespace parplan
