#include "models/model_file.h"

#include <array>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "models/families.h"
#include "planner/base/json.h"
#include "planner/base/text.h"
#include "planner/base/yaml.h"
#include "planner/graph/trained_file.h"

namespace parplan {
namespace {

// The values of an enumeration by name ------------------------------------------------------------

constexpr std::array all_positions = {PositionKind::learned, PositionKind::rotary, PositionKind::alibi};
constexpr std::array all_norms = {NormKind::layer_norm, NormKind::rms_norm};
constexpr std::array all_norm_placements = {NormPlacement::before_branch, NormPlacement::after_branch,
                                            NormPlacement::around_branch, NormPlacement::after_add};
constexpr std::array all_qk_norms = {QkNorm::none, QkNorm::per_head, QkNorm::whole_width, QkNorm::layer_norm_per_head};
constexpr std::array all_activations = {FeedForwardKind::gelu_tanh,       FeedForwardKind::gelu_erf,
                                        FeedForwardKind::relu,            FeedForwardKind::gated_silu,
                                        FeedForwardKind::gated_gelu_tanh, FeedForwardKind::gated_gelu_erf};
constexpr std::array all_spans = {LayerSpan::full, LayerSpan::sliding};
constexpr std::array all_schedules = {LearningRateSchedule::constant, LearningRateSchedule::cosine,
                                      LearningRateSchedule::linear};

template <typename Value, std::size_t count>
Value read_choice(const YamlNode& node, const std::array<Value, count>& values) {
  std::vector<std::string> names;
  for (const Value value : values) names.emplace_back(name(value));
  return values[node.as_choice(names)];
}

// Numbers -----------------------------------------------------------------------------------------

struct Range {
  double minimum = 0.0;
  bool minimum_allowed = true;
  double limit = std::numeric_limits<double>::infinity();  // itself not allowed
};
constexpr Range at_least_zero = {};
constexpr Range above_zero = {.minimum_allowed = false};
constexpr Range share = {.limit = 1.0};

double read_number(const YamlNode& node, Range range) {
  const double number = node.as_number();
  const bool large_enough = range.minimum_allowed ? number >= range.minimum : number > range.minimum;
  if (large_enough && number < range.limit) return number;
  std::string wanted = fmt::format("{} {}", range.minimum_allowed ? "of at least" : "above", range.minimum);
  if (range.limit < std::numeric_limits<double>::infinity()) wanted += fmt::format(" and below {}", range.limit);
  node.fail(fmt::format("expected a number {}, found '{}'", wanted, node.as_string()));
}

struct OptimizerNumber {
  const char* key;
  std::optional<double> TrainingOverrides::*member;
  Range range;
};
constexpr OptimizerNumber optimizer_numbers[] = {
    {"learning_rate", &TrainingOverrides::learning_rate, above_zero},
    {"final_learning_rate", &TrainingOverrides::final_learning_rate, at_least_zero},
    {"beta1", &TrainingOverrides::beta1, share},
    {"beta2", &TrainingOverrides::beta2, share},
    {"epsilon", &TrainingOverrides::epsilon, above_zero},
    {"weight_decay", &TrainingOverrides::weight_decay, at_least_zero},
    {"momentum", &TrainingOverrides::momentum, share},
    {"clip_norm", &TrainingOverrides::clip_norm, at_least_zero},
};

// Optional keys of decoders beyond their sizes; an absent one keeps the default of ModelSpec. They
// are read and written in this order.
struct Flag {
  const char* key;
  bool ModelSpec::*member;
};
constexpr Flag flags[] = {
    {"rotary_interleaved", &ModelSpec::rotary_interleaved},
    {"sliding_rotary_only", &ModelSpec::sliding_rotary_only},
    {"norm_without_bias", &ModelSpec::norm_without_bias},
    {"embedding_norm", &ModelSpec::embedding_norm},
    {"parallel_residual", &ModelSpec::parallel_residual},
    {"shared_norm", &ModelSpec::shared_norm},
    {"head_bias", &ModelSpec::head_bias},
    {"bidirectional", &ModelSpec::bidirectional},
    {"head_transform", &ModelSpec::head_transform},
};
struct OptionalNumber {
  const char* key;
  std::optional<double> ModelSpec::*member;
};
constexpr OptionalNumber optional_numbers[] = {
    {"sliding_rope_theta", &ModelSpec::sliding_rope_theta},
    {"attention_scale", &ModelSpec::attention_scale},
    {"attention_softcap", &ModelSpec::attention_softcap},
    {"logits_softcap", &ModelSpec::logits_softcap},
};
struct Multiplier {
  const char* key;
  double ModelSpec::*member;
};
constexpr Multiplier multipliers[] = {
    {"rope_factor", &ModelSpec::rope_factor},
    {"alibi_multiplier", &ModelSpec::alibi_multiplier},
    {"embedding_multiplier", &ModelSpec::embedding_multiplier},
    {"residual_multiplier", &ModelSpec::residual_multiplier},
    {"logits_multiplier", &ModelSpec::logits_multiplier},
};

// Whole numbers of encoder-decoders alone.
struct EncoderDecoderNumber {
  const char* key;
  std::int64_t ModelSpec::*member;
  std::int64_t least;
  std::int64_t most;
};
constexpr EncoderDecoderNumber encoder_decoder_numbers[] = {
    {"decoder_layers", &ModelSpec::decoder_layers, 1, largest_layers},
    {"decoder_context", &ModelSpec::decoder_context, 1, largest_vocabulary},
    {"position_buckets", &ModelSpec::position_buckets, 4, largest_width},
    {"position_distance", &ModelSpec::position_distance, 1, largest_vocabulary},
    {"start_token", &ModelSpec::start_token, 0, largest_vocabulary},
    {"end_token", &ModelSpec::end_token, 0, largest_vocabulary},
};

// Whole numbers of classifiers of images alone.
struct ImageNumber {
  const char* key;
  std::int64_t ModelSpec::*member;
  std::int64_t most;
};
constexpr ImageNumber image_numbers[] = {
    {"image_size", &ModelSpec::image_size, 65536},
    {"patch_size", &ModelSpec::patch_size, 65536},
    {"image_channels", &ModelSpec::image_channels, 1024},
};

// Keys that only one kind of positions reads.
struct PositionKey {
  const char* key;
  PositionKind position;
};
constexpr PositionKey position_keys[] = {
    {"rope_theta", PositionKind::rotary},
    {"rope_factor", PositionKind::rotary},
    {"rotary_dim", PositionKind::rotary},
    {"rotary_interleaved", PositionKind::rotary},
    {"sliding_rope_theta", PositionKind::rotary},
    {"sliding_rotary_only", PositionKind::rotary},
    {"position_offset", PositionKind::learned},
    {"alibi_multiplier", PositionKind::alibi},
};

// Sections ----------------------------------------------------------------------------------------

void read_optimizer(const YamlNode& node, TrainingOverrides& training) {
  std::vector<std::string> allowed = {"name", "schedule", "warmup_steps", "decay_steps"};
  for (const OptimizerNumber& number : optimizer_numbers) allowed.emplace_back(number.key);
  node.allow_keys(allowed);
  if (const auto value = node.find("name")) training.optimizer = read_choice(*value, all_optimizers);
  if (const auto value = node.find("schedule")) training.schedule = read_choice(*value, all_schedules);
  if (const auto value = node.find("warmup_steps")) training.warmup_steps = value->as_integer(0);
  if (const auto value = node.find("decay_steps")) training.decay_steps = value->as_integer(1);
  for (const OptimizerNumber& number : optimizer_numbers) {
    if (const auto value = node.find(number.key)) training.*number.member = read_number(*value, number.range);
  }
  const auto momentum = node.find("momentum");
  if (momentum && training.optimizer && !has_momentum(*training.optimizer)) {
    momentum->fail(fmt::format("momentum belongs to sgd and muon, and the optimizer is {}", name(*training.optimizer)));
  }
  const bool decays = training.schedule && *training.schedule != LearningRateSchedule::constant;
  if (decays && training.decay_steps.value_or(0) <= training.warmup_steps.value_or(0)) {
    node.at("schedule").fail(fmt::format("a {} schedule needs decay_steps above the {} warmup_steps, found {}",
                                         name(*training.schedule), training.warmup_steps.value_or(0),
                                         training.decay_steps.value_or(0)));
  }
}

void read_training(const YamlNode& node, ModelFile& file) {
  node.allow_keys(
      {"global_batch", "sequence_length", "precision", "optimizer", "initialization", "seed", "trainable", "lora"});
  TrainingOverrides& training = file.training;
  if (const auto value = node.find("global_batch")) training.global_batch = value->as_integer(1);
  if (const auto value = node.find("sequence_length")) {
    training.sequence_length = value->as_integer(1, largest_vocabulary);
    const bool learned = file.spec.family == Family::decoder && file.spec.position == PositionKind::learned;
    if (learned && *training.sequence_length > file.spec.context) {
      value->fail(fmt::format("sequence length {} is longer than the {} learned positions (context); allowed: 1 to {}",
                              *training.sequence_length, file.spec.context, file.spec.context));
    }
  }
  if (const auto value = node.find("precision")) training.precision = read_choice(*value, all_precisions);
  if (const auto value = node.find("seed")) training.seed = static_cast<std::uint64_t>(value->as_integer(0));
  if (const auto value = node.find("optimizer")) read_optimizer(*value, training);
  TrainedKeys trained = read_trained(node);
  training.trainable = std::move(trained.trainable);
  training.lora = std::move(trained.lora);
  if (const auto initialization = node.find("initialization")) {
    initialization->allow_keys({"standard_deviation", "scaled_residual"});
    if (const auto value = initialization->find("standard_deviation")) {
      file.spec.initializer_range = read_number(*value, at_least_zero);
    }
    if (const auto value = initialization->find("scaled_residual")) file.spec.scaled_residual = value->as_bool();
  }
}

void read_heads(const YamlNode& root, ModelSpec& spec) {
  spec.heads = root.at("heads").as_integer(1, largest_width);
  const auto kv_heads = root.find("kv_heads");
  spec.kv_heads = kv_heads ? kv_heads->as_integer(1, largest_width) : spec.heads;
  if (const auto head_dim = root.find("head_dim")) {
    spec.head_dim = head_dim->as_integer(1, largest_width);
  } else if (spec.hidden % spec.heads == 0) {
    spec.head_dim = spec.hidden / spec.heads;
  } else {
    root.at("heads").fail(fmt::format(
        "hidden {} is not a multiple of {} heads; choose a divisor of {}, or give head_dim", spec.hidden, spec.heads,
        spec.hidden));
  }
}

void read_encoder_decoder(const YamlNode& root, ModelSpec& spec) {
  spec.initializer_range = 1.0;  // of standard deviations that follow from widths
  read_heads(root, spec);
  if (const auto epsilon = root.find("norm_epsilon")) spec.norm_epsilon = read_number(*epsilon, above_zero);
  if (const auto multiplier = root.find("logits_multiplier"))
    spec.logits_multiplier = read_number(*multiplier, above_zero);
  if (spec.kv_heads != spec.heads)
    root.at("kv_heads")
        .fail(fmt::format("each of the {} heads has its own key and value; leave kv_heads out", spec.heads));
  for (const EncoderDecoderNumber& number : encoder_decoder_numbers)
    if (const auto node = root.find(number.key)) spec.*number.member = node->as_integer(number.least, number.most);
}

void read_attention_and_norm(const YamlNode& root, ModelSpec& spec) {
  read_heads(root, spec);
  spec.position = read_choice(root.at("position"), all_positions);
  for (const PositionKey& of : position_keys) {
    const auto node = root.find(of.key);
    if (node && spec.position != of.position) {
      node->fail(fmt::format("{} belongs to {} positions, and position is {}", of.key, name(of.position),
                             name(spec.position)));
    }
  }
  if (const auto theta = root.find("rope_theta")) spec.rope_theta = read_number(*theta, above_zero);
  if (const auto width = root.find("embedding_width")) spec.embedding_width = width->as_integer(1, largest_width);
  if (const auto dim = root.find("rotary_dim")) spec.rotary_dim = dim->as_integer(2, largest_width);
  if (const auto offset = root.find("position_offset"))
    spec.position_offset = offset->as_integer(0, largest_vocabulary);
  spec.norm = read_choice(root.at("norm"), all_norms);
  if (const auto placement = root.find("norm_placement"))
    spec.norm_placement = read_choice(*placement, all_norm_placements);
  if (const auto qk_norm = root.find("qk_norm")) spec.qk_norm = read_choice(*qk_norm, all_qk_norms);
  if (const auto window = root.find("sliding_window")) spec.sliding_window = window->as_integer(1, largest_vocabulary);
  if (const auto pattern = root.find("attention_pattern")) {
    for (const YamlNode& span : pattern->items()) spec.attention_pattern.push_back(read_choice(span, all_spans));
    if (spec.attention_pattern.empty()) pattern->fail("expected a list of full and sliding, found an empty one");
  }
  for (const OptionalNumber& number : optional_numbers) {
    if (const auto node = root.find(number.key)) spec.*number.member = read_number(*node, above_zero);
  }
  for (const Multiplier& multiplier : multipliers) {
    if (const auto node = root.find(multiplier.key)) spec.*multiplier.member = read_number(*node, above_zero);
  }
  if (const auto kinds = root.find("token_types")) spec.token_types = kinds->as_integer(1, largest_vocabulary);
  if (const auto token = root.find("mask_token")) spec.mask_token = token->as_integer(0, largest_vocabulary);
  for (const ImageNumber& number : image_numbers)
    if (const auto node = root.find(number.key)) {
      spec.*number.member = node->as_integer(1, number.most);
      if (!reads_images(spec)) node->fail(fmt::format("{} is of images; give their image_size, too", number.key));
    }
  if (const auto masked = root.find("masked_share"))
    spec.masked_share = read_number(*masked, {.minimum_allowed = false, .limit = 1.0});
  if (const auto epsilon = root.find("norm_epsilon")) spec.norm_epsilon = read_number(*epsilon, above_zero);
  const auto flag = [&](const char* key) {
    const auto node = root.find(key);
    return node && node->as_bool();
  };
  spec.qkv_bias = flag("qkv_bias");
  spec.attention_output_bias = flag("attention_output_bias");
  spec.mlp_bias = flag("mlp_bias");
  for (const Flag& each : flags) spec.*each.member = flag(each.key);
}

// PyYAML and other readers of YAML 1.1 take "1e-05" for text: they need a point before the
// exponent.
std::string written(double number) {
  std::string text = fmt::format("{}", number);
  const std::size_t exponent = text.find('e');
  if (exponent != std::string::npos && text.find('.') == std::string::npos) text.insert(exponent, ".0");
  return text;
}

}  // namespace

TrainingSpec with_overrides(TrainingSpec training, const TrainingOverrides& overrides) {
  const auto take = [](auto& field, const auto& override_value) {
    if (override_value) field = *override_value;
  };
  take(training.global_batch, overrides.global_batch);
  take(training.sequence_length, overrides.sequence_length);
  if (overrides.precision) state_precision(training, *overrides.precision);
  take(training.optimizer, overrides.optimizer);
  take(training.learning_rate, overrides.learning_rate);
  take(training.schedule, overrides.schedule);
  take(training.warmup_steps, overrides.warmup_steps);
  take(training.decay_steps, overrides.decay_steps);
  take(training.final_learning_rate, overrides.final_learning_rate);
  take(training.beta1, overrides.beta1);
  take(training.beta2, overrides.beta2);
  take(training.epsilon, overrides.epsilon);
  take(training.weight_decay, overrides.weight_decay);
  if (training.optimizer == Optimizer::muon) training.momentum = default_muon_momentum;
  take(training.momentum, overrides.momentum);
  take(training.clip_norm, overrides.clip_norm);
  take(training.seed, overrides.seed);
  take(training.trainable, overrides.trainable);
  if (overrides.lora) training.lora = overrides.lora;
  return training;
}

ModelFile read_model(const std::string& text, const std::string& file_name) {
  const YamlNode root = YamlNode::parse(text, file_name);
  ModelFile file;
  ModelSpec& spec = file.spec;

  std::vector<std::string> families;
  for (const FamilyRow& row : family_rows()) families.emplace_back(row.name);
  const FamilyRow& family = family_rows()[root.at("family").as_choice(families)];
  spec.family = family.family;

  std::vector<std::string> allowed = {"name",    "source",     "family",          "layers",  "hidden", "feature",
                                      "context", "vocabulary", "tied_embeddings", "activation", "training"};
  for (const auto& keys : {family.required, family.optional}) allowed.insert(allowed.end(), keys.begin(), keys.end());
  root.allow_keys(allowed);

  spec.name = root.at("name").as_name();
  if (spec.name.empty()) root.at("name").fail("expected a name, found ''");
  if (const auto source = root.find("source")) file.source = source->as_string();
  spec.layers = root.at("layers").as_integer(1, largest_layers);
  spec.hidden = root.at("hidden").as_integer(1, largest_width);
  spec.feature = root.at("feature").as_integer(1, largest_width);
  spec.vocabulary = root.at("vocabulary").as_integer(1, largest_vocabulary);
  spec.context = root.at("context").as_integer(1, largest_vocabulary);
  spec.activation = read_choice(root.at("activation"), all_activations);
  if (const auto tied = root.find("tied_embeddings")) spec.tied_embeddings = tied->as_bool();
  if (spec.family == Family::decoder) read_attention_and_norm(root, spec);
  if (spec.family == Family::encoder_decoder) read_encoder_decoder(root, spec);
  if (const auto problem = find_problem(spec)) {
    const auto blamed = root.find(problem->key);
    (blamed ? *blamed : root.at("heads")).fail(problem->message);
  }
  if (const auto training = root.find("training")) {
    read_training(*training, file);
    // Names are checked against the graph: its parameters have the same for every sequence length.
    const TrainingSpec spec_of_training = with_overrides({}, file.training);
    if (!spec_of_training.trainable.all || spec_of_training.lora)
      if (const auto problem = find_problem(spec_of_training, build_graph(spec, spec.context)))
        fail_at(*training, *problem);
  }
  return file;
}

std::string write_model(const ModelSpec& spec) {
  std::string out;
  const auto line = [&](const char* key, const auto& value) { out += fmt::format("{}: {}\n", key, value); };
  line("name", Json(spec.name).dump(-1, ' ', false, Json::error_handler_t::replace));
  line("family", name(spec.family));
  line("layers", spec.layers);
  line("hidden", spec.hidden);
  line("feature", spec.feature);
  line("vocabulary", spec.vocabulary);
  line("context", spec.context);
  line("activation", name(spec.activation));
  line("tied_embeddings", spec.tied_embeddings);
  if (spec.family == Family::encoder_decoder) {
    line("heads", spec.heads);
    line("head_dim", spec.head_dim);
    line("norm_epsilon", written(spec.norm_epsilon));
    for (const EncoderDecoderNumber& number : encoder_decoder_numbers) line(number.key, spec.*number.member);
    if (spec.logits_multiplier != 1.0) line("logits_multiplier", written(spec.logits_multiplier));
  }
  if (spec.family == Family::decoder) {
    line("heads", spec.heads);
    line("kv_heads", spec.kv_heads);
    line("head_dim", spec.head_dim);
    line("position", name(spec.position));
    if (spec.position == PositionKind::rotary) line("rope_theta", written(spec.rope_theta));
    line("norm", name(spec.norm));
    line("norm_epsilon", written(spec.norm_epsilon));
    line("qkv_bias", spec.qkv_bias);
    line("attention_output_bias", spec.attention_output_bias);
    line("mlp_bias", spec.mlp_bias);

    // A key that most models do without is left out where it has its default.
    const ModelSpec plain;
    if (spec.embedding_width) line("embedding_width", *spec.embedding_width);
    if (spec.position_offset != plain.position_offset) line("position_offset", spec.position_offset);
    if (spec.rotary_dim) line("rotary_dim", *spec.rotary_dim);
    if (spec.norm_placement != plain.norm_placement) line("norm_placement", name(spec.norm_placement));
    if (spec.qk_norm != plain.qk_norm) line("qk_norm", name(spec.qk_norm));
    if (spec.sliding_window) line("sliding_window", *spec.sliding_window);
    if (!spec.attention_pattern.empty()) {
      std::vector<std::string> spans;
      for (const LayerSpan span : spec.attention_pattern) spans.emplace_back(name(span));
      line("attention_pattern", fmt::format("[{}]", join(spans)));
    }
    for (const Flag& flag : flags) {
      if (spec.*flag.member) line(flag.key, true);
    }
    for (const OptionalNumber& number : optional_numbers) {
      if (spec.*number.member) line(number.key, written(*(spec.*number.member)));
    }
    if (spec.token_types != plain.token_types) line("token_types", spec.token_types);
    if (spec.mask_token) line("mask_token", *spec.mask_token);
    if (spec.masked_share != plain.masked_share) line("masked_share", written(spec.masked_share));
    for (const ImageNumber& number : image_numbers)
      if (reads_images(spec)) line(number.key, spec.*number.member);
    for (const Multiplier& multiplier : multipliers) {
      if (spec.*multiplier.member != 1.0) line(multiplier.key, written(spec.*multiplier.member));
    }
  }
  out += fmt::format("training:\n  initialization:\n    standard_deviation: {}\n    scaled_residual: {}\n",
                     written(spec.initializer_range), spec.scaled_residual);
  return out;
}

}  // namespace parplan
