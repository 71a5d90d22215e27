#include "cli/published_model.h"

#include "models/families.h"

namespace parplan {

OpGraph graph_of_published(const StatedModel& stated) {
  ModelSpec model;
  model.name = stated.name;
  model.layers = stated.layers;
  model.hidden = stated.hidden;
  model.heads = stated.heads;
  model.kv_heads = stated.kv_heads;
  model.head_dim = stated.hidden / stated.heads;
  model.feature = stated.feature;
  model.vocabulary = stated.vocabulary;
  model.context = stated.sequence;
  model.tied_embeddings = stated.tied_embeddings;
  if (stated.decoder_layers > 0) {
    model.family = Family::encoder_decoder;
    model.decoder_layers = stated.decoder_layers;
    model.decoder_context = stated.decoder_sequence;
    model.activation = stated.gated ? FeedForwardKind::gated_gelu_tanh : FeedForwardKind::relu;
  } else if (stated.gated) {
    model.activation = FeedForwardKind::gated_silu;
    model.position = PositionKind::rotary;
    model.norm = NormKind::rms_norm;
  } else {
    model.qkv_bias = model.attention_output_bias = model.mlp_bias = true;
    model.embedding_norm = stated.alibi;
    if (stated.alibi) model.position = PositionKind::alibi;
  }
  return build_graph(model, stated.sequence);
}

}  // namespace parplan
