// More tensor-parallel ranks than key/value heads: consecutive ranks hold copies of a head's key
// and value, and some of its query heads each.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/parallel/tensor.h"
#include "runtime/checkpoint/logical_slice.h"
#include "tests/numerics/op_graphs.h"
#include "tests/numerics/plan_runs.h"
#include "tests/numerics/trainer.h"
#include "tests/temporary_folder.h"

namespace parplan {

using namespace testing;

namespace {

// Decoders with fewer key/value heads than query heads, and all that is as wide as heads.
std::vector<OpGraph> grouped_graphs() {
  const std::string path = fmt::format("{}/tests/data/models/tiny-llama.yaml", PARPLAN_SOURCE_DIR);
  const ModelSpec llama = load_model(path, "").spec;
  std::vector<OpGraph> graphs;
  const auto add = [&](std::string name, std::int64_t heads, std::int64_t kv_heads, const auto& change) {
    ModelSpec spec = llama;
    spec.name = std::move(name);
    spec.layers = 2;
    spec.heads = heads;
    spec.kv_heads = kv_heads;
    spec.head_dim = 4;
    change(spec);
    graphs.push_back(build_graph(spec, sequence));
  };
  add("two of four, biased", 4, 2, [](ModelSpec& spec) { spec.qkv_bias = true; });
  add("one of eight", 8, 1, [](ModelSpec& spec) { spec.position = PositionKind::alibi; });
  add("two of eight, normed by head", 8, 2, [](ModelSpec& spec) { spec.qk_norm = QkNorm::per_head; });
  add("two of eight, normed by width", 8, 2, [](ModelSpec& spec) { spec.qk_norm = QkNorm::whole_width; });
  // Three query heads to a key/value head: 2 and 6 ranks, and 1 and 3.
  add("two of six", 6, 2, [](ModelSpec& spec) { spec.qkv_bias = true; });
  for (OpGraph& graph : op_graphs(sequence)) graphs.push_back(std::move(graph));
  return graphs;
}

std::int64_t kv_heads_of(const OpGraph& graph) {
  for (const Op& op : graph.ops)
    if (op.kind == OpKind::attention) return op.attributes.kv_heads;
  return std::numeric_limits<std::int64_t>::max();
}

// The degrees above the number of key/value heads, up to 8.
std::vector<int> degrees_with_copies(const OpGraph& graph) {
  std::vector<int> degrees = legal_tensor_degrees(graph, training_of(), {}, 8);
  std::erase_if(degrees, [&](int degree) { return degree <= kv_heads_of(graph); });
  const bool is_grouped = std::ranges::any_of(graph.ops, [](const Op& op) {
    return op.attributes.kv_heads > 0 && op.attributes.kv_heads < op.attributes.heads;
  });
  CHECK(degrees.empty() == !is_grouped);
  return degrees;
}

bool has_copies(const Program& program) {
  return std::ranges::any_of(program.parameters, [](const ParameterPart& part) { return part.copies > 1; });
}

// Every number that a rank keeps, by state, tensor and place in it, compared among all ranks.
void check_copies_are_equal(const Trainer& trainer) {
  std::map<std::pair<State, TensorId>, std::map<std::int64_t, std::uint32_t>> known;
  std::int64_t compared = 0;
  bool equal = true;
  for (const Program& program : trainer.job.programs())
    for (std::size_t b = 0; b < program.buckets.size(); ++b)
      for (const StateBuffer& kept : kept_state(program, program.buckets[b], trainer.plan.training.precision)) {
        std::vector<std::uint32_t> bits(static_cast<std::size_t>(kept.elements()));
        trainer.job.arena(program.rank)
            .read(kept.buffer, bits.data(), Bytes(static_cast<std::int64_t>(4 * bits.size())));
        for (const HeldSlice& held : slices_of(trainer.graph, program, static_cast<int>(b), kept.held)) {
          const std::int64_t columns = whole_of(trainer.graph.tensors[held.tensor]).columns;
          for (std::int64_t i = 0; i < held.slice.elements(); ++i) {
            const std::int64_t row = held.slice.row + i / held.slice.columns,
                               column = held.slice.column + i % held.slice.columns;
            const std::uint32_t value = bits[static_cast<std::size_t>(held.at + i)];
            const auto [entry, added] = known[{kept.state, held.tensor}].try_emplace(row * columns + column, value);
            compared += !added;
            equal = equal && entry->second == value;
          }
        }
      }
  CHECK(equal);
  CHECK(compared > 0);
}

}  // namespace

TEST_CASE("more tensor-parallel ranks than key/value heads train as the one-rank reference does") {
  std::mt19937 random(20261128);
  std::map<int, int> ran;  // plans by the ranks that hold a copy
  for (const OpGraph& graph : grouped_graphs()) {
    References references(graph, 3);
    for (const int tp : degrees_with_copies(graph))
      for (int trial = 0; trial < 8; ++trial) {
        TrainingSpec training = training_of();
        const bool clips = trial % 2 == 1;
        if (clips) training.clip_norm = 0.5;
        LayoutRequest request;
        request[Choice::tp] = tp;
        if (trial % 4 == 3) request[Choice::schedule] = ScheduleKind::zero_bubble_h1;
        if (trial == 2) request[Choice::dp] = 2;
        if (trial == 6) {
          request[Choice::cp] = 2;
          request[Choice::cp_method] = ContextMethod::all_gather;
        }
        ParallelSpec spec = random_spec(graph, training, trial % 4 < 2 ? tp : 2 * tp, request, random);
        INFO(graph.name << ": " << describe(spec) << " cp " << spec.cp() << (clips ? ", clipped" : ""));
        check_close(run_plan(graph, training, spec, 3), references.of(training, spec.micro_batch));
        ++ran[tp / static_cast<int>(kv_heads_of(graph))];
      }
  }
  for (const int copies : {2, 3, 4, 8}) {
    CAPTURE(copies);
    CHECK(ran[copies] > 0);
  }
}

TEST_CASE("what several ranks hold copies of stays equal to the bit, and goes on under any other degree") {
  std::mt19937 random(20261129);
  for (const OpGraph& graph : grouped_graphs()) {
    const std::vector<int> with_copies = degrees_with_copies(graph);
    for (std::size_t trial = 0; trial < with_copies.size() * 2; ++trial) {
      TrainingSpec training = training_of();
      if (trial % 2 == 0) training.clip_norm = 0.5;
      LayoutRequest from, to;
      const std::vector<int> all = legal_tensor_degrees(graph, training, {}, 8);
      from[Choice::tp] = with_copies[trial % with_copies.size()];
      to[Choice::tp] = all[random() % all.size()];
      from[Choice::dp] = to[Choice::dp] = 2;
      const ParallelSpec writes =
          random_spec(graph, training, 2 * with_copies[trial % with_copies.size()], from, random);
      const ParallelSpec reads =
          random_spec(graph, training, 2 * static_cast<int>(std::get<std::int64_t>(*to[Choice::tp])), to, random);
      INFO(graph.name << "\nfrom " << describe(writes) << "\nto " << describe(reads));
      Trainer writer(graph, job_of(graph, training, writes));
      CHECK(std::ranges::any_of(writer.job.programs(), has_copies));
      writer.train(0, 2);
      check_copies_are_equal(writer);
      const TemporaryFolder folder, again;
      writer.save(folder.root().string(), 2);
      Job other = job_of(graph, training, reads);
      other.training.seed += 1;
      Trainer reader(graph, other);
      reader.load(folder.root().string());
      reader.save(again.root().string(), 2);
      CHECK(content_of(folder.root().string()) == content_of(again.root().string()));
      check_copies_are_equal(reader);
      writer.train(2, 1);
      reader.train(2, 1);
      CHECK(reader.losses.back() == doctest::Approx(writer.losses.back()).epsilon(1e-5));
    }
  }
}

}  // namespace parplan
