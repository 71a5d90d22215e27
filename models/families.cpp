#include "models/families.h"

#include <fmt/format.h>

#include "models/decoder.h"
#include "models/encoder_decoder.h"
#include "models/mlp.h"
#include "planner/base/enum_index.h"
#include "planner/base/error.h"

namespace parplan {
namespace {

constexpr std::string_view decoder_required[] = {"heads", "position", "norm"};
constexpr std::string_view decoder_optional[] = {
    "embedding_width",
    "kv_heads",
    "head_dim",
    "position_offset",
    "rope_theta",
    "rope_factor",
    "rotary_dim",
    "rotary_interleaved",
    "sliding_rope_theta",
    "sliding_rotary_only",
    "alibi_multiplier",
    "norm_epsilon",
    "norm_without_bias",
    "norm_placement",
    "qk_norm",
    "embedding_norm",
    "parallel_residual",
    "shared_norm",
    "sliding_window",
    "attention_pattern",
    "attention_scale",
    "attention_softcap",
    "logits_softcap",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_multiplier",
    "qkv_bias",
    "attention_output_bias",
    "mlp_bias",
    "head_bias",
    "bidirectional",
    "token_types",
    "head_transform",
    "mask_token",
    "masked_share",
    "image_size",
    "patch_size",
    "image_channels",
};

constexpr std::string_view encoder_decoder_required[] = {"heads", "decoder_layers", "decoder_context"};
constexpr std::string_view encoder_decoder_optional[] = {"kv_heads",          "head_dim",         "norm_epsilon",
                                                         "logits_multiplier", "position_buckets", "position_distance",
                                                         "start_token",       "end_token"};

// In the order of Family.
constexpr FamilyRow rows[] = {
    {Family::decoder, "decoder", build_decoder, decoder_required, decoder_optional},
    {Family::mlp, "mlp", build_mlp, {}, {}},
    {Family::encoder_decoder, "encoder_decoder", build_encoder_decoder, encoder_decoder_required,
     encoder_decoder_optional},
};

}  // namespace

std::span<const FamilyRow> family_rows() {
  return rows;
}
const FamilyRow& row_of(Family family) {
  return rows[index_of(family)];
}

OpGraph build_graph(const ModelSpec& spec, std::int64_t sequence_length) {
  if (const auto problem = find_problem(spec)) {
    throw ConfigError(fmt::format("model '{}': {}: {}", spec.name, problem->key, problem->message));
  }
  if (sequence_length < 1 || sequence_length > largest_vocabulary) {
    throw ConfigError(
        fmt::format("expected a sequence length from 1 to {}, found {}", largest_vocabulary, sequence_length));
  }
  if (reads_images(spec) && sequence_length != tokens_of_image(spec)) {
    throw ConfigError(fmt::format(
        "sequence length {} is not that of the images of model '{}', which are {} tokens: {} x {} pixels in patches of "
        "{} x {}, and one for the class",
        sequence_length, spec.name, tokens_of_image(spec), spec.image_size, spec.image_size, spec.patch_size,
        spec.patch_size));
  }
  const bool learned = spec.family == Family::decoder && spec.position == PositionKind::learned;
  if (learned && sequence_length > spec.context) {
    throw ConfigError(
        fmt::format("sequence length {} is longer than the {} learned positions of model '{}'; allowed: 1 to {}",
                    sequence_length, spec.context, spec.name, spec.context));
  }
  if (spec.family == Family::encoder_decoder && sequence_length < shortest_encoder_decoder_sample(spec)) {
    throw ConfigError(fmt::format(
        "sequence length {} leaves {} tokens to the decoder of model '{}' and {} to its encoder; cutting a span out of "
        "a text and telling it takes 3 and 3: give at least {}",
        sequence_length, decoder_sequence(spec, sequence_length), spec.name,
        sequence_length - decoder_sequence(spec, sequence_length), shortest_encoder_decoder_sample(spec)));
  }
  return row_of(spec.family).build(spec, sequence_length);
}

std::int64_t shortest_sample(const ModelSpec& spec) {
  if (reads_images(spec)) return tokens_of_image(spec);
  return spec.family == Family::encoder_decoder ? shortest_encoder_decoder_sample(spec) : 1;
}

}  // namespace parplan
