#include "models/mlp.h"

#include <optional>

#include <fmt/format.h>

#include "models/graph_builder.h"

namespace parplan {

OpGraph build_mlp(const ModelSpec& spec, std::int64_t sequence_length) {
  GraphBuilder builder(spec, sequence_length);

  builder.begin_block("embedding", std::nullopt);
  TensorId x = builder.embed();
  builder.end_block(x);

  for (std::int64_t layer = 0; layer < spec.layers; ++layer) {
    const std::string name = fmt::format("layers.{}", layer);
    builder.begin_block(name, x);
    const TensorId up =
        builder.linear(name + ".up", x, builder.feature(), builder.hidden(), spec.initializer_range, true);
    const TensorId inner = builder.activation(name + ".activation", builder.feature());
    builder.op(OpKind::activation, name + ".activation", {up}, {}, {inner},
               {.activation = activation_kind(spec.activation)});
    const TensorId down =
        builder.linear(name + ".down", inner, builder.hidden(), builder.feature(), builder.residual_deviation(), false);
    x = builder.add(name + ".add", std::nullopt, down, name + ".down.bias", true);
    builder.end_block(x);
  }

  builder.begin_block("head", x);
  builder.head_and_loss(x);
  builder.end_block(std::nullopt);
  return builder.finish_graph();
}

}  // namespace parplan
