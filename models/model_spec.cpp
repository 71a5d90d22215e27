#include "models/model_spec.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace parplan {

const char* name(Family family) {
  switch (family) {
    case Family::decoder: return "decoder";
    case Family::mlp: return "mlp";
    case Family::encoder_decoder:
      return "encoder_decoder";
  }
  return "unknown";
}

const char* name(PositionKind position) {
  switch (position) {
    case PositionKind::learned: return "learned";
    case PositionKind::rotary: return "rotary";
    case PositionKind::alibi: return "alibi";
  }
  return "unknown";
}

const char* name(NormKind norm) {
  switch (norm) {
    case NormKind::layer_norm: return "layer_norm";
    case NormKind::rms_norm: return "rms_norm";
  }
  return "unknown";
}

const char* name(NormPlacement placement) {
  switch (placement) {
    case NormPlacement::before_branch: return "before_branch";
    case NormPlacement::after_branch: return "after_branch";
    case NormPlacement::around_branch: return "around_branch";
    case NormPlacement::after_add: return "after_add";
  }
  return "unknown";
}

const char* name(QkNorm norm) {
  switch (norm) {
    case QkNorm::none: return "none";
    case QkNorm::per_head: return "per_head";
    case QkNorm::whole_width: return "whole_width";
    case QkNorm::layer_norm_per_head: return "layer_norm_per_head";
  }
  return "unknown";
}

const char* name(FeedForwardKind activation) {
  switch (activation) {
    case FeedForwardKind::gelu_tanh: return "gelu_tanh";
    case FeedForwardKind::gelu_erf: return "gelu_erf";
    case FeedForwardKind::relu: return "relu";
    case FeedForwardKind::gated_silu: return "gated_silu";
    case FeedForwardKind::gated_gelu_tanh: return "gated_gelu_tanh";
    case FeedForwardKind::gated_gelu_erf: return "gated_gelu_erf";
  }
  return "unknown";
}

const char* name(LayerSpan span) {
  switch (span) {
    case LayerSpan::full: return "full";
    case LayerSpan::sliding: return "sliding";
  }
  return "unknown";
}

std::int64_t decoder_sequence(const ModelSpec& spec, std::int64_t sequence_length) {
  return (sequence_length * spec.decoder_context + spec.context / 2) / spec.context;
}

std::optional<std::int64_t> window_of(const ModelSpec& spec, std::int64_t layer) {
  if (spec.attention_pattern.empty()) return spec.sliding_window;
  const std::size_t place = static_cast<std::size_t>(layer) % spec.attention_pattern.size();
  return spec.attention_pattern[place] == LayerSpan::sliding ? spec.sliding_window : std::nullopt;
}

namespace {

// A classifier of images reads no tokens, and its row of the class needs to see all others.
std::optional<SpecProblem> find_problem_of_images(const ModelSpec& spec) {
  if (spec.patch_size > spec.image_size || spec.image_size % spec.patch_size != 0)
    return SpecProblem{"patch_size", fmt::format("patches of {} x {} pixels do not divide an image of {} x {}",
                                                 spec.patch_size, spec.patch_size, spec.image_size, spec.image_size)};
  if (spec.context != tokens_of_image(spec))
    return SpecProblem{"context", fmt::format("an image of {} x {} pixels in patches of {} x {} is {} tokens, and one "
                                              "more stands for its class: expected {}, found {}",
                                              spec.image_size, spec.image_size, spec.patch_size, spec.patch_size,
                                              tokens_of_image(spec) - 1, tokens_of_image(spec), spec.context)};
  if (!spec.bidirectional) return SpecProblem{"image_size", "patches of an image see each other; add bidirectional"};
  if (spec.position != PositionKind::learned)
    return SpecProblem{"position", "patches have learned positions; choose learned"};
  if (spec.vocabulary > largest_classes)
    return SpecProblem{"vocabulary",
                       fmt::format("of {} classes; images have at most {}", spec.vocabulary, largest_classes)};
  const std::pair<const char*, bool> of_text[] = {{"tied_embeddings", spec.tied_embeddings},
                                                  {"mask_token", spec.mask_token.has_value()},
                                                  {"embedding_width", spec.embedding_width.has_value()},
                                                  {"token_types", spec.token_types > 0},
                                                  {"position_offset", spec.position_offset > 0}};
  for (const auto& [key, is_given] : of_text)
    if (is_given)
      return SpecProblem{key, "it belongs to models that read text, and image_size says that this reads images"};
  return std::nullopt;
}

std::optional<SpecProblem> find_problem_of_encoder(const ModelSpec& spec) {
  if (spec.bidirectional && spec.sliding_window)
    return SpecProblem{"bidirectional", "a sliding window ends at its own token; leave out sliding_window"};
  if (spec.bidirectional && spec.position == PositionKind::alibi)
    return SpecProblem{"bidirectional", "alibi falls towards earlier tokens; choose learned or rotary positions"};
  if (spec.bidirectional && !spec.mask_token && !reads_images(spec))
    return SpecProblem{"bidirectional",
                       "every token sees the next one, which would be its target; add a mask_token, so that the model "
                       "learns masked tokens"};
  if (spec.mask_token && !spec.bidirectional)
    return SpecProblem{"mask_token", "only what is behind a masked token and before it tells it; add bidirectional"};
  if (spec.mask_token && *spec.mask_token >= spec.vocabulary)
    return SpecProblem{"mask_token", fmt::format("the mask token {} is beyond the vocabulary, which ends at {}",
                                                 *spec.mask_token, spec.vocabulary - 1)};
  if (!spec.mask_token && spec.masked_share != ModelSpec{}.masked_share)
    return SpecProblem{"masked_share", "nothing is masked without a mask_token"};
  return std::nullopt;
}

}  // namespace

namespace {

std::optional<SpecProblem> find_problem_of_encoder_decoder(const ModelSpec& spec) {
  if (spec.decoder_layers < 1 || spec.decoder_layers >= spec.layers)
    return SpecProblem{"decoder_layers",
                       fmt::format("layers counts both sides: of {}, the decoder has {}, which leaves "
                                   "none to the encoder; allowed: 1 to {}",
                                   spec.layers, spec.decoder_layers, spec.layers - 1)};
  if (spec.decoder_context < 1 || spec.decoder_context >= spec.context)
    return SpecProblem{"decoder_context",
                       fmt::format("context counts both sides: of {} tokens, the decoder has {}, which leaves none to "
                                   "the encoder; allowed: 1 to {}",
                                   spec.context, spec.decoder_context, spec.context - 1)};
  if (spec.heads * spec.head_dim > largest_width)
    return SpecProblem{"heads", fmt::format("{} heads of {} are {} wide; at most {}", spec.heads, spec.head_dim,
                                            spec.heads * spec.head_dim, largest_width)};
  if (spec.position_buckets % 4 != 0 || spec.position_buckets > 256)
    return SpecProblem{"position_buckets",
                       fmt::format("half of the rows are of keys behind the query, and half of these of single "
                                   "distances: expected a multiple of 4 up to 256, found {}",
                                   spec.position_buckets)};
  if (spec.position_distance <= spec.position_buckets / 2)
    return SpecProblem{"position_distance",
                       fmt::format("the first {} distances have rows of their own: expected more, found {}",
                                   spec.position_buckets / 2, spec.position_distance)};
  for (const auto& [key, id] : {std::pair("start_token", spec.start_token), std::pair("end_token", spec.end_token)})
    if (id >= spec.vocabulary)
      return SpecProblem{
          key, fmt::format("the token {} is beyond the vocabulary, which ends at {}", id, spec.vocabulary - 1)};
  return std::nullopt;
}

}  // namespace

std::optional<SpecProblem> find_problem(const ModelSpec& spec) {
  if (spec.family == Family::encoder_decoder) return find_problem_of_encoder_decoder(spec);
  if (spec.family == Family::mlp) {
    if (is_gated(spec.activation)) {
      return SpecProblem{"activation", "a plain MLP has no gate; allowed: gelu_tanh, gelu_erf, relu"};
    }
    return std::nullopt;
  }
  if (spec.heads % spec.kv_heads != 0) {
    std::vector<std::int64_t> divisors;
    for (std::int64_t d = 1; d <= spec.heads; ++d) {
      if (spec.heads % d == 0) divisors.push_back(d);
    }
    return SpecProblem{"kv_heads", fmt::format("{} query heads cannot share {} key/value heads evenly; allowed: {}",
                                               spec.heads, spec.kv_heads, fmt::join(divisors, ", "))};
  }
  if (spec.heads * spec.head_dim > largest_width) {
    return SpecProblem{"heads", fmt::format("{} heads of {} are {} wide; at most {}", spec.heads, spec.head_dim,
                                            spec.heads * spec.head_dim, largest_width)};
  }
  if (spec.position == PositionKind::rotary) {
    if (spec.rotary_dim && (*spec.rotary_dim % 2 != 0 || *spec.rotary_dim < 2 || *spec.rotary_dim > spec.head_dim)) {
      return SpecProblem{
          "rotary_dim",
          fmt::format("rotary positions turn pairs of a head's {} numbers: expected an even rotary_dim from 2 to "
                      "{}, found {}",
                      spec.head_dim, spec.head_dim, *spec.rotary_dim)};
    }
    if (!spec.rotary_dim && spec.head_dim % 2 != 0) {
      return SpecProblem{
          "head_dim", fmt::format("rotary positions turn pairs of numbers: the width of a head must be even, found {}",
                                  spec.head_dim)};
    }
  }
  if (spec.position == PositionKind::learned && spec.context + spec.position_offset > largest_vocabulary) {
    return SpecProblem{"position_offset", fmt::format("a table of {} + {} positions is too long; at most {} rows",
                                                      spec.position_offset, spec.context, largest_vocabulary)};
  }
  if (spec.parallel_residual && spec.norm_placement != NormPlacement::before_branch) {
    return SpecProblem{
        "parallel_residual",
        fmt::format("branches that run side by side have their norms before them, and norm_placement is {}; "
                    "leave out norm_placement, or set parallel_residual to false",
                    name(spec.norm_placement))};
  }
  if (spec.shared_norm && !spec.parallel_residual) {
    return SpecProblem{"shared_norm",
                       "branches that run one after the other cannot share a norm; leave out shared_norm, or set "
                       "parallel_residual to true"};
  }
  if (static_cast<std::int64_t>(spec.attention_pattern.size()) > spec.layers) {
    return SpecProblem{"attention_pattern", fmt::format("the pattern names {} layers of {}; shorten it to what repeats",
                                                        spec.attention_pattern.size(), spec.layers)};
  }
  const bool slides = std::ranges::find(spec.attention_pattern, LayerSpan::sliding) != spec.attention_pattern.end();
  if (slides && !spec.sliding_window) {
    return SpecProblem{"attention_pattern", "layers that slide need a sliding_window; add one, or make them full"};
  }
  if (spec.sliding_window && !spec.attention_pattern.empty() && !slides) {
    return SpecProblem{"attention_pattern", "there is a sliding_window, but every layer is full; leave out either"};
  }
  if (spec.norm_without_bias && spec.norm == NormKind::rms_norm) {
    return SpecProblem{"norm_without_bias", "an RMS norm has no bias; leave norm_without_bias out"};
  }
  const bool alike = !spec.sliding_window || (!spec.attention_pattern.empty() && !slides);
  for (const auto& [is_set, key] : {std::pair(spec.sliding_rope_theta.has_value(), "sliding_rope_theta"),
                                    std::pair(spec.sliding_rotary_only, "sliding_rotary_only")}) {
    if (is_set && alike)
      return SpecProblem{key, fmt::format("{} is for layers that slide, and none does; leave it out, or add a "
                                          "sliding_window",
                                          key)};
  }
  if (reads_images(spec))
    if (std::optional<SpecProblem> problem = find_problem_of_images(spec)) return problem;
  return find_problem_of_encoder(spec);
}

}  // namespace parplan
