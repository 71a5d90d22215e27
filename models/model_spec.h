#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace parplan {

enum class Family { decoder, mlp, encoder_decoder };
// `alibi`: scores fall with the distance to the key, each head with its own slope (Press et al.,
// arXiv:2108.12409).
enum class PositionKind { learned, rotary, alibi };
enum class NormKind { layer_norm, rms_norm };
// The position of norms around a branch f (attention or the feed-forward layer) of the residual
// stream x.
enum class NormPlacement {
  before_branch,  // x + f(norm(x)): GPT-2 and most since
  after_branch,   // x + norm(f(x)): OLMo 2
  around_branch,  // x + norm(f(norm(x))): Gemma 2
  after_add,      // norm(x + f(x)): Vaswani et al. (arXiv:1706.03762), OPT-350m; no norm before the head
};
// Norms of queries and keys before the rotation: the RMS norm of each head, with one gamma that all
// heads share (Qwen3), or over all heads at once (OLMo 2); or the LayerNorm of each head, without a
// bias and with a gamma of its own (Command R+).
enum class QkNorm { none, per_head, whole_width, layer_norm_per_head };
// The activation between the two (or three) matrix products of a feed-forward layer. `gated_silu`
// is silu(gate x) * (up x).
enum class FeedForwardKind { gelu_tanh, gelu_erf, relu, gated_silu, gated_gelu_tanh, gated_gelu_erf };
// Whether a layer's attention sees every earlier token or only the last `sliding_window` ones.
enum class LayerSpan { full, sliding };

const char* name(Family family);
const char* name(PositionKind position);
const char* name(NormKind norm);
const char* name(NormPlacement placement);
const char* name(QkNorm norm);
const char* name(FeedForwardKind activation);
const char* name(LayerSpan span);

// Whether there is a third product, whose activation gates the second.
constexpr bool is_gated(FeedForwardKind activation) { return activation >= FeedForwardKind::gated_silu; }

// A model as plain data: the contents of a model.yaml (docs/model.md). `mlp` reads name, layers,
// hidden, feature, vocabulary, context, activation, tied_embeddings and the initialisation;
// `encoder_decoder` those, heads, head_dim, norm_epsilon, logits_multiplier and the fields of its
// own. The other fields keep their defaults there.
struct ModelSpec {
  std::string name;
  Family family = Family::decoder;
  std::int64_t layers = 0;
  std::int64_t hidden = 0;
  std::int64_t feature = 0;     // inner width of the feed-forward layers
  std::int64_t vocabulary = 0;  // unpadded
  // The longest sequence that the model is made for; learned positions have a row for each token.
  std::int64_t context = 0;
  FeedForwardKind activation = FeedForwardKind::gelu_tanh;
  bool tied_embeddings = false;  // the head's weight is the embedding's

  // Decoders only, from here on. The width of embeddings that are narrower or wider than the
  // residual stream (OPT-350m): one product follows the embedding, another precedes the head.
  std::optional<std::int64_t> embedding_width = std::nullopt;
  std::int64_t heads = 0;     // query heads
  std::int64_t kv_heads = 0;  // key/value heads: equal to heads (MHA), a divisor of it (GQA), 1 (MQA)
  std::int64_t head_dim = 0;
  PositionKind position = PositionKind::learned;
  std::int64_t position_offset = 0;  // learned only: rows of the table before the row of the first token (OPT: 2)
  double rope_theta = 10000.0;       // rotary only, as are the next two
  // How many elements of a head are rotated, from its first on; all if absent.
  std::optional<std::int64_t> rotary_dim = std::nullopt;
  bool rotary_interleaved = false;  // pairs of neighbours are rotated (GPT-J), else i and i + rotary_dim / 2
  // Divisor of positions: linear scaling. It leaves out layers with a base of their own.
  double rope_factor = 1.0;
  // Layers that slide: the base of their frequencies where it is another than that of full layers
  // (Gemma 3); whether they alone are rotated, and full ones have no positions (Command R7B).
  std::optional<double> sliding_rope_theta = std::nullopt;
  bool sliding_rotary_only = false;
  double alibi_multiplier = 1.0;    // alibi only: multiplier of the slopes; 1 / sqrt(head_dim) in Falcon

  NormKind norm = NormKind::layer_norm;
  bool norm_without_bias = false;  // layer_norm only (Command R)
  double norm_epsilon = 1e-5;
  NormPlacement norm_placement = NormPlacement::before_branch;
  QkNorm qk_norm = QkNorm::none;
  bool embedding_norm = false;     // one more norm after the embedding and its positions (BLOOM, BERT)
  bool parallel_residual = false;  // x + attention(norm(x)) + feed_forward(norm(x)), else one after the other
  bool shared_norm = false;        // parallel_residual only: one norm for both branches (GPT-J, Falcon-7B)

  std::optional<std::int64_t> sliding_window = std::nullopt;  // number of keys that a query sees, its own included
  // Spans of the layers in order, repeated; if empty, all slide where there is a window.
  std::vector<LayerSpan> attention_pattern = {};
  std::optional<double> attention_scale = std::nullopt;    // multiplier of the scores; 1 / sqrt(head_dim) if absent
  std::optional<double> attention_softcap = std::nullopt;  // c: scores become c tanh(score / c)
  std::optional<double> logits_softcap = std::nullopt;
  double embedding_multiplier = 1.0;
  double residual_multiplier = 1.0;  // multiplier of every branch, applied where it is added to the residual stream
  double logits_multiplier = 1.0;

  // Encoders. Every token sees all others; otherwise those before it.
  bool bidirectional = false;
  // Rows of a table of kinds of segments, of which the first is added to every token: samples have
  // one segment.
  std::int64_t token_types = 0;
  bool head_transform = false;  // product with bias, activation and norm before the head (BERT)
  // The id that stands for tokens to be told. Where there is one, a sample's targets are
  // `masked_share` of its own tokens; otherwise every token's target is the next one.
  std::optional<std::int64_t> mask_token = std::nullopt;
  double masked_share = 0.15;

  // Classifiers of images (ViT): pixels on each side of an image, on each side of the patches that
  // stand for tokens, and colours of a pixel. The vocabulary is the classes; the context is the
  // patches and one token more, whose row the head reads.
  std::int64_t image_size = 0;  // 0: the model reads text
  std::int64_t patch_size = 16;
  std::int64_t image_channels = 3;

  // Encoder-decoders. `layers` and `context` are of both together; of these, the decoder has
  std::int64_t decoder_layers = 0;
  std::int64_t decoder_context = 0;
  // Rows of the tables of relative position biases, and the distance from which on the last serves.
  std::int64_t position_buckets = 32;
  std::int64_t position_distance = 128;
  std::int64_t start_token = 0;  // the first id that the decoder reads
  std::int64_t end_token = 1;    // the last id of a text

  bool qkv_bias = false;
  bool attention_output_bias = false;
  bool mlp_bias = false;
  bool head_bias = false;

  // Weights are normal with this standard deviation (those of an encoder-decoder: with T5's, which
  // follow from their widths, times this); with `scaled_residual`, those that write into
  // the residual stream divide it by sqrt(2 * layers) (GPT-2: "Language Models are Unsupervised
  // Multitask Learners", section 2.3).
  double initializer_range = 0.02;
  bool scaled_residual = false;
  bool operator==(const ModelSpec&) const = default;
};

// An encoder-decoder's tokens of a sample that the decoder has: as large a share as of `context`.
std::int64_t decoder_sequence(const ModelSpec& spec, std::int64_t sequence_length);

// Whether a model reads images, and the tokens of one.
constexpr bool reads_images(const ModelSpec& spec) { return spec.image_size > 0; }
constexpr std::int64_t tokens_of_image(const ModelSpec& spec) {
  return (spec.image_size / spec.patch_size) * (spec.image_size / spec.patch_size) + 1;
}

// The window of a layer's attention, where it has one.
std::optional<std::int64_t> window_of(const ModelSpec& spec, std::int64_t layer);

// The largest sizes that are read: parameter and activation counts of such a model fit 63 bits, and
// so do its bytes of optimizer state.
inline constexpr std::int64_t largest_layers = 10'000;
inline constexpr std::int64_t largest_width = 1'048'576;        // hidden, feature, heads x head_dim
inline constexpr std::int64_t largest_vocabulary = 16'777'216;  // context too
inline constexpr std::int64_t largest_classes = 65'536;           // of images: two bytes in files

// A contradiction in a spec whose single fields are in range. `key` is the model.yaml key to blame.
struct SpecProblem {
  std::string key;
  std::string message;
  bool operator==(const SpecProblem&) const = default;
};
std::optional<SpecProblem> find_problem(const ModelSpec& spec);

}  // namespace parplan
