#include "planner/graph/counting_limit.h"

#include <doctest/doctest.h>

#include "models/families.h"
#include "models/model_spec.h"

namespace parplan {
namespace {

// Two activations of 8 numbers and one of 16, and a parameter that does not count: 32 numbers and
// their gradients are 256 bytes per sample, so 2^62 bytes are 2^54 samples.
OpGraph graph_of_256_bytes() {
  OpGraph graph;
  const auto add = [&](TensorRole role, std::int64_t rows, std::int64_t columns) {
    graph.tensors.push_back(
        {.name = "t", .role = role, .dims = {{Dim::sequence, rows}, {Dim::batch, 1}, {Dim::hidden, columns}}});
  };
  add(TensorRole::activation, 2, 4);
  add(TensorRole::statistic, 4, 2);
  add(TensorRole::activation, 4, 4);
  add(TensorRole::parameter, 1024, 1024);
  return graph;
}

TEST_CASE("batches are counted up to two to the power of 62 bytes, and refused beyond with what is allowed") {
  const OpGraph graph = graph_of_256_bytes();
  TrainingSpec training{.global_batch = std::int64_t{1} << 54, .sequence_length = 4};
  CHECK(beyond_counting(graph, training) == std::nullopt);
  training.global_batch += 256;  // doubles have 53 bits
  CHECK(beyond_counting(graph, training) ==
        "a global batch of 18014398509482240 sequences of 4 tokens has 4.6e+18 bytes of activations and their "
        "gradients, more than can be counted; give at most "
        "18014398509481984 sequences");
}

TEST_CASE("what anybody trains is counted: 405 billion parameters, 131072 tokens, 16384 sequences a step") {
  ModelSpec spec{.name = "llama3-405b"};
  spec.layers = 126;
  spec.hidden = 16384;
  spec.heads = 128;
  spec.kv_heads = 8;
  spec.head_dim = 128;
  spec.feature = 53248;
  spec.vocabulary = 128256;
  spec.context = 131072;
  spec.position = PositionKind::rotary;
  spec.norm = NormKind::rms_norm;
  spec.activation = FeedForwardKind::gated_silu;
  const OpGraph graph = build_graph(spec, 131072);
  CHECK(beyond_counting(graph, {.global_batch = 16384, .sequence_length = 131072}) == std::nullopt);
}

}  // namespace
}  // namespace parplan
