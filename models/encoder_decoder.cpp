#include "models/encoder_decoder.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include <fmt/format.h>

#include "models/graph_builder.h"
#include "planner/base/units.h"

namespace parplan {
namespace {

// Each side has a token behind its text, and a sentinel for each span.
constexpr std::int64_t least_of_a_side = 3;
// Tokens of a span on average (Raffel et al. 2020, section 3.3.4), each behind its sentinel.
constexpr std::int64_t span_and_sentinel = 3 + 1;

// The decoder's tokens of a sample come first, then the encoder's. All blocks pass on one
// activation with rows of both; behind them are those that hold the encoder's and the decoder's
// table of relative position biases (append_rows): every layer of a side adds these to its scores,
// and the gradients of their uses add up on their way back.
struct Rows {
  std::int64_t decoder = 0;  // tokens
  std::int64_t encoder = 0;
  std::int64_t table = 0;  // rows of a table
  std::int64_t encoder_table() const { return decoder + encoder; }
  std::int64_t decoder_table() const { return encoder_table() + table; }
};

class EncoderDecoder {
 public:
  EncoderDecoder(const ModelSpec& spec, std::int64_t sequence) : spec_(spec), builder_(spec, sequence) {
    rows_.decoder = decoder_sequence(spec, sequence);
    rows_.encoder = sequence - rows_.decoder;
    rows_.table = ceil_div(spec.position_buckets * spec.heads, spec.hidden);
  }

  OpGraph build() {
    GraphBuilder& b = builder_;
    b.begin_block("embedding", std::nullopt);
    TensorId x = b.embed();
    x = b.append("encoder.position", x, table("encoder.position.weight"));
    x = b.append("decoder.position", x, table("decoder.position.weight"));
    b.end_block(x);

    for (std::int64_t layer = 0; layer < spec_.layers - spec_.decoder_layers; ++layer)
      x = block(fmt::format("encoder.{}", layer), x, rows_.decoder, rows_.encoder, &EncoderDecoder::encoder_layer);
    x = block("encoder", x, rows_.decoder, rows_.encoder, &EncoderDecoder::encoder_end);
    for (std::int64_t layer = 0; layer < spec_.decoder_layers; ++layer)
      x = block(fmt::format("decoder.{}", layer), x, 0, rows_.decoder, &EncoderDecoder::decoder_layer);

    b.begin_block("head", x);
    TensorId y = norm("head.norm", b.take("head.decoder", x, 0, rows_.decoder));
    const std::int64_t spans =
        std::max<std::int64_t>((rows_.decoder - 1 + span_and_sentinel / 2) / span_and_sentinel, 1);
    b.learn_corrupted_spans({.decoder = rows_.decoder,
                             .spans = std::min({spans, (rows_.decoder - 1) / 2, (rows_.encoder - 1) / 2}),
                             .start = spec_.start_token,
                             .end = spec_.end_token});
    b.head_and_loss(y);
    b.end_block(std::nullopt);
    return b.finish_graph();
  }

 private:
  // Standard deviations are those of transformers' T5 (_init_weights), times initializer_range.
  double deviation(std::int64_t width) const { return spec_.initializer_range / std::sqrt(static_cast<double>(width)); }
  std::int64_t inner() const { return spec_.heads * spec_.head_dim; }
  TensorDim heads() const { return {Dim::kv_groups, inner(), spec_.head_dim}; }

  TensorId table(const std::string& name) {
    return builder_.weight(name, {Dim::position, spec_.position_buckets, 1}, {Dim::hidden, spec_.heads, 1},
                           deviation(spec_.hidden));
  }

  TensorId norm(const std::string& name, TensorId x) {
    const TensorId gamma = builder_.ones(name + ".weight", builder_.hidden());
    const TensorId y = builder_.activation(name, builder_.hidden());
    builder_.op(OpKind::rms_norm, name, {x}, {gamma}, {y, builder_.statistic(name + ".rstd")},
                {.epsilon = spec_.norm_epsilon});
    return y;
  }

  // `x` has `positions` queries, and `from` as many keys as `keys` says. Scores are not divided by
  // sqrt(head_dim).
  TensorId attention(const std::string& name, TensorId x, std::int64_t positions, TensorId from, std::int64_t keys,
                     std::optional<TensorId> biases, bool bidirectional) {
    const TensorDim packed = {Dim::kv_groups, 2 * inner(), 2 * spec_.head_dim};
    const TensorId queries = builder_.linear(name + ".query", x, heads(), builder_.hidden(),
                                             deviation(spec_.hidden * spec_.head_dim), false);
    builder_.set_positions(keys);
    const TensorId keys_and_values =
        builder_.linear(name + ".key_value", from, packed, builder_.hidden(), deviation(spec_.hidden), false);
    builder_.set_positions(positions);
    OpShape attributes = {.heads = spec_.heads,
                          .kv_heads = spec_.heads,
                          .head_dim = spec_.head_dim,
                          .keys = keys,
                          .bidirectional = bidirectional,
                          .score_scale = 1.0};
    std::vector<TensorId> inputs = {queries, keys_and_values};
    if (biases) {
      inputs.push_back(*biases);
      attributes.inner = spec_.hidden;
      attributes.buckets = spec_.position_buckets;
      attributes.most_distance = spec_.position_distance;
    }
    const TensorId y = builder_.activation(name + ".mixed", heads());
    const TensorId log_sum_exp =
        builder_.tensor(name + ".log_sum_exp", TensorRole::statistic,
                        {{Dim::batch, 1, 1}, {Dim::kv_groups, spec_.heads, 1}, {Dim::sequence, positions, 1}});
    builder_.op(OpKind::packed_attention, name, std::move(inputs), {}, {y, log_sum_exp}, attributes);
    return builder_.linear(name + ".output", y, builder_.hidden(), heads(), deviation(inner()), false);
  }

  // x + feed_forward(norm(x))
  TensorId feed_forward(const std::string& layer, TensorId x) {
    const std::string name = layer + ".feed_forward";
    const TensorId normed = norm(name + "_norm", x);
    const bool gated = is_gated(spec_.activation);
    const auto widen = [&](const char* part) {
      return builder_.linear(name + part, normed, builder_.feature(), builder_.hidden(), deviation(spec_.hidden),
                             false);
    };
    std::vector<TensorId> widened;
    if (gated) widened.push_back(widen(".gate"));
    widened.push_back(widen(".up"));
    const std::string activated = name + (gated ? ".gated" : ".activation");
    const TensorId narrow = builder_.activation(activated, builder_.feature());
    builder_.op(gated ? OpKind::gate : OpKind::activation, activated, std::move(widened), {}, {narrow},
                {.activation = activation_kind(spec_.activation)});
    const TensorId down =
        builder_.linear(name + ".down", narrow, builder_.hidden(), builder_.feature(), deviation(spec_.feature), false);
    return builder_.add(name + "_add", x, down, "", false);
  }

  TensorId encoder_layer(const std::string& name, TensorId all, TensorId x) {
    const std::int64_t positions = rows_.encoder;
    const TensorId biases = builder_.take(name + ".biases", all, rows_.encoder_table(), rows_.table);
    builder_.set_positions(positions);
    const TensorId normed = norm(name + ".attention_norm", x);
    const TensorId attended = attention(name + ".attention", normed, positions, normed, positions, biases, true);
    return feed_forward(name, builder_.add(name + ".attention_add", x, attended, "", false));
  }

  TensorId encoder_end(const std::string& name, TensorId /*all*/, TensorId x) { return norm(name + ".norm", x); }

  TensorId decoder_layer(const std::string& name, TensorId all, TensorId x) {
    const std::int64_t positions = rows_.decoder;
    const TensorId biases = builder_.take(name + ".biases", all, rows_.decoder_table(), rows_.table);
    const TensorId encoded = builder_.take(name + ".encoded", all, rows_.decoder, rows_.encoder);
    builder_.set_positions(positions);
    TensorId normed = norm(name + ".attention_norm", x);
    const TensorId own = attention(name + ".attention", normed, positions, normed, positions, biases, false);
    x = builder_.add(name + ".attention_add", x, own, "", false);
    normed = norm(name + ".cross_attention_norm", x);
    const TensorId other =
        attention(name + ".cross_attention", normed, positions, encoded, rows_.encoder, std::nullopt, true);
    return feed_forward(name, builder_.add(name + ".cross_attention_add", x, other, "", false));
  }

  // A block that changes so many rows of the activation from `begin` on.
  TensorId block(const std::string& name, TensorId all, std::int64_t begin, std::int64_t positions,
                 TensorId (EncoderDecoder::*changed)(const std::string&, TensorId, TensorId)) {
    builder_.begin_block(name, all);
    const TensorId x = builder_.take(name + ".taken", all, begin, positions);
    const TensorId y = builder_.put(name + ".put", all, (this->*changed)(name, all, x), begin, positions);
    builder_.end_block(y);
    return y;
  }

  const ModelSpec& spec_;
  GraphBuilder builder_;
  Rows rows_;
};

}  // namespace

std::int64_t shortest_encoder_decoder_sample(const ModelSpec& spec) {
  std::int64_t sequence = 2 * least_of_a_side;
  const auto is_enough = [&] {
    const std::int64_t decoder = decoder_sequence(spec, sequence);
    return decoder >= least_of_a_side && sequence - decoder >= least_of_a_side;
  };
  while (!is_enough() && sequence < largest_vocabulary) ++sequence;
  return sequence;
}

OpGraph build_encoder_decoder(const ModelSpec& spec, std::int64_t sequence_length) {
  return EncoderDecoder(spec, sequence_length).build();
}

}  // namespace parplan
