#include "planner/base/enum_index.h"
#include "planner/parallel/techniques.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/parallel/pipeline.h"

using namespace parplan;

namespace {

const std::string models_folder = PARPLAN_SOURCE_DIR "/models";
const std::string tiny_folder = PARPLAN_SOURCE_DIR "/tests/data/models";

OpGraph graph_of(const std::string& folder, const std::string& model, std::int64_t sequence) {
  return build_graph(load_model(model, folder).spec, sequence);
}
const OpGraph& tiny_gpt2() {
  static const OpGraph graph = graph_of(tiny_folder, "tiny-gpt2", 32);
  return graph;
}
const OpGraph& tiny_llama() {
  static const OpGraph graph = graph_of(tiny_folder, "tiny-llama", 32);
  return graph;
}

ParallelSpec layout(const OpGraph& graph, int dp, int tp, int pp) {
  ParallelSpec spec;
  spec.mesh.degree = {.pp = pp, .dp = dp, .tp = tp};
  if (pp >= 1 && pp <= static_cast<int>(graph.blocks.size())) spec.stage_blocks = even_stages(graph, pp);
  return spec;
}

TrainingSpec batch_of(std::int64_t global_batch) {
  TrainingSpec training;
  training.global_batch = global_batch;
  return training;
}

std::string reason(const OpGraph& graph, const ParallelSpec& spec, std::int64_t global_batch = 16) {
  return illegal(graph, batch_of(global_batch), spec).value_or("legal");
}

std::map<std::string, std::string> written(const Placements& placements) {
  std::map<std::string, std::string> texts;
  for (const auto& [parameter, layout] : placements.parameters) texts[parameter] = write_placement(layout.tp);
  return texts;
}

}  // namespace

TEST_CASE("divisors are all that divide, ascending") {
  for (std::int64_t number = 1; number <= 400; ++number) {
    std::vector<std::int64_t> all;
    for (std::int64_t d = 1; d <= number; ++d)
      if (number % d == 0) all.push_back(d);
    CHECK(divisors(number) == all);
  }
  CHECK(divisors(1'000'000'007) == std::vector<std::int64_t>{1, 1'000'000'007});
}

TEST_CASE("Every technique allows what it lists and refuses the rest") {
  // The one number of the layout that a technique decides.
  const std::map<std::string, void (*)(const OpGraph&, ParallelSpec&, int)> set = {
      {"tensor", [](const OpGraph&, ParallelSpec& spec, int degree) { spec.mesh.degree.tp = degree; }},
      {"data", [](const OpGraph&, ParallelSpec& spec, int degree) { spec.mesh.degree.dp = degree; }},
      {"pipeline",
       [](const OpGraph& graph, ParallelSpec& spec, int degree) {
         spec.mesh.degree.pp = degree;
         if (degree <= static_cast<int>(graph.blocks.size())) spec.stage_blocks = even_stages(graph, degree);
       }},
      {"zero", [](const OpGraph&, ParallelSpec& spec, int stage) { spec.zero_stage = stage; }},
  };
  for (const TechniqueRow& row : technique_rows()) {
    const auto setter = set.find(std::string(row.name));
    REQUIRE_MESSAGE(setter != set.end(), "no test knows the technique " << row.name);
    for (const OpGraph* graph : {&tiny_gpt2(), &tiny_llama()})
      for (int dp : {1, 2})
        for (bool sequence_parallel : {false, true}) {
          ParallelSpec spec = layout(*graph, dp, sequence_parallel ? 2 : 1, 1);
          spec.sequence_parallel = sequence_parallel;
          const TrainingSpec training = batch_of(12);
          const std::vector<int> legal = row.legal_degrees(*graph, training, spec, 13);
          CHECK(std::ranges::is_sorted(legal));
          for (int degree = row.name == "zero" ? 0 : 1; degree <= 13; ++degree) {
            setter->second(*graph, spec, degree);
            INFO(row.name << " over " << degree << " of " << graph->name << ", dp " << dp);
            CHECK(row.illegal(*graph, training, spec).has_value() == (std::ranges::find(legal, degree) == legal.end()));
          }
        }
  }
}

TEST_CASE("Degrees that cannot be say why, and what can") {
  const OpGraph xl = graph_of(models_folder, "gpt2-xl", 1024);
  CHECK(reason(xl, layout(xl, 1, 2, 1)) ==
        "tensor parallelism over 2 cannot split 25 attention heads (25 key/value groups); legal degrees: 1, 5, 25");
  CHECK(reason(tiny_gpt2(), layout(tiny_gpt2(), 1, 3, 1)) ==
        "tensor parallelism over 3 cannot split 4 attention heads (4 key/value groups); legal degrees: 1, 2, 4");
  CHECK(reason(tiny_llama(), layout(tiny_llama(), 1, 4, 1)) ==
        "tensor parallelism over 4 cannot split 4 attention heads (2 key/value groups); legal degrees: 1, 2");
  CHECK(reason(tiny_gpt2(), layout(tiny_gpt2(), 1, 0, 1)) == "the tensor-parallel degree is 0; it must be at least 1");

  const OpGraph odd = graph_of(tiny_folder, "tiny-gpt2", 30);
  ParallelSpec spec = layout(odd, 1, 4, 1);
  CHECK(reason(odd, spec) == "legal");
  spec.sequence_parallel = true;
  CHECK(
      reason(odd, spec) ==
      "tensor parallelism over 4 cannot split a sequence of 30 tokens (sequence parallelism is on); legal degrees: 2");
  spec = layout(odd, 2, 1, 1);
  spec.sequence_parallel = true;
  CHECK(reason(odd, spec) == "sequence parallelism spreads work over tensor-parallel ranks, and there is 1 (tp 1)");
  const OpGraph uneven = graph_of(tiny_folder, "tiny-gpt2", 31);
  spec = layout(uneven, 1, 2, 1);
  spec.sequence_parallel = true;
  CHECK(reason(uneven, spec) ==
        "tensor parallelism over 2 cannot split a sequence of 31 tokens (sequence parallelism is on); legal degrees: "
        "none");

  CHECK(
      reason(tiny_gpt2(), layout(tiny_gpt2(), 3, 1, 1)) ==
      "data parallelism over 3 cannot split a global batch of 16 sequences in micro-batches of 1; legal degrees: 1, 2, "
      "4, 8, 16");
  spec = layout(tiny_gpt2(), 4, 1, 1);
  spec.micro_batch = 8;
  CHECK(
      reason(tiny_gpt2(), spec) ==
      "data parallelism over 4 cannot split a global batch of 16 sequences in micro-batches of 8; legal degrees: 1, 2");
  spec.micro_batch = 3;
  CHECK(reason(tiny_gpt2(), spec) ==
        "micro-batches of 3 cannot split a global batch of 16 sequences; legal micro-batches: 1, 2, 4, 8, 16");
  CHECK(reason(tiny_gpt2(), layout(tiny_gpt2(), 0, 1, 1)) == "the data-parallel degree is 0; it must be at least 1");

  spec = layout(tiny_gpt2(), 1, 2, 1);
  spec.zero_stage = 2;
  CHECK(reason(tiny_gpt2(), spec) ==
        "ZeRO stage 2 shards over data-parallel ranks, and there is 1 (dp 1); legal stages: 0");
  spec.zero_stage = 4;
  CHECK(reason(tiny_gpt2(), spec) == "there is no ZeRO stage 4; legal stages: 0, 1, 2, 3");

  CHECK(reason(tiny_gpt2(), layout(tiny_gpt2(), 1, 1, 7)) ==
        "pipeline parallelism over 7 cannot give every stage a block: the model has 6 (embedding to head); legal "
        "degrees: "
        "1 to 6");
  CHECK(reason(tiny_gpt2(), layout(tiny_gpt2(), 1, 1, 0)) ==
        "the pipeline-parallel degree is 0; it must be at least 1");
  spec = layout(tiny_gpt2(), 1, 1, 2);
  spec.stage_blocks = {6};
  CHECK(reason(tiny_gpt2(), spec) == "the stage cut [6] has 1 stages, and pp is 2");
  spec.stage_blocks = {6, 0};
  CHECK(reason(tiny_gpt2(), spec) == "the stage cut [6, 0] leaves stage 1 without a block");
  spec.stage_blocks = {3, 2};
  CHECK(reason(tiny_gpt2(), spec) == "the stage cut [3, 2] holds 5 blocks, and the model has 6 (embedding to head)");
}

TEST_CASE("The inner width and the vocabulary bound the degree where heads do not") {
  ModelSpec spec = load_model("mlp", models_folder).spec;
  spec.feature = 6;
  spec.vocabulary = 11;
  const OpGraph graph = build_graph(spec, 8);
  CHECK(reason(graph, layout(graph, 1, 4, 1)) ==
        "tensor parallelism over 4 cannot split a feed-forward width of 6; legal degrees: 1, 2, 3, 6");
  spec.feature = 1 << 10;
  const OpGraph wide = build_graph(spec, 8);
  CHECK(reason(wide, layout(wide, 1, 8, 1)) == "legal");
  CHECK(reason(wide, layout(wide, 1, 16, 1)) ==
        "tensor parallelism over 16 cannot split a vocabulary of 11; legal degrees: 1, 2, 4, 8");
}

TEST_CASE("Megatron's placements of a GPT-2, in whole") {
  const Placements placements = place(tiny_gpt2(), layout(tiny_gpt2(), 1, 2, 1));
  CHECK(written(placements) == std::map<std::string, std::string>{
                                   {"embedding.weight", "Shard(vocabulary)"},
                                   {"position.weight", "Replicate"},
                                   {"attention_norm.weight", "Replicate"},
                                   {"attention_norm.bias", "Replicate"},
                                   {"attention.qkv.weight", "Shard(kv_groups)"},
                                   {"attention.qkv.bias", "Shard(kv_groups)"},
                                   {"attention.output.weight", "Shard(kv_groups)"},
                                   {"attention.output.bias", "Replicate"},
                                   {"feed_forward_norm.weight", "Replicate"},
                                   {"feed_forward_norm.bias", "Replicate"},
                                   {"feed_forward.up.weight", "Shard(feature)"},
                                   {"feed_forward.up.bias", "Shard(feature)"},
                                   {"feed_forward.down.weight", "Shard(feature)"},
                                   {"feed_forward.down.bias", "Replicate"},
                                   {"head.norm.weight", "Replicate"},
                                   {"head.norm.bias", "Replicate"},
                               });
  CHECK(placements.residual.tp == replicate());
  CHECK(placements.state.parameters.dp == replicate());
  CHECK(placements.state.gradients.dp == replicate());
  CHECK(placements.state.optimizer.dp == replicate());
}

TEST_CASE("Megatron's placements of a Llama with sequence parallelism and ZeRO, in whole") {
  ParallelSpec spec = layout(tiny_llama(), 2, 2, 1);
  spec.sequence_parallel = true;
  spec.zero_stage = 1;
  const Placements placements = place(tiny_llama(), spec);
  CHECK(written(placements) == std::map<std::string, std::string>{
                                   {"embedding.weight", "Shard(vocabulary)"},
                                   {"attention_norm.weight", "Replicate"},
                                   {"attention.qkv.weight", "Shard(kv_groups)"},
                                   {"attention.output.weight", "Shard(kv_groups)"},
                                   {"feed_forward_norm.weight", "Replicate"},
                                   {"feed_forward.gate.weight", "Shard(feature)"},
                                   {"feed_forward.up.weight", "Shard(feature)"},
                                   {"feed_forward.down.weight", "Shard(feature)"},
                                   {"head.norm.weight", "Replicate"},
                                   {"head.weight", "Shard(vocabulary)"},
                               });
  CHECK(placements.residual.tp == shard(Dim::sequence));
  CHECK(placements.state.parameters.dp == replicate());
  CHECK(placements.state.gradients.dp == replicate());
  CHECK(placements.state.optimizer.dp == flat_shard());
}

TEST_CASE("Without tensor parallelism nothing is cut") {
  for (const auto& [parameter, placed] : place(tiny_gpt2(), layout(tiny_gpt2(), 4, 1, 1)).parameters) {
    const Placement placement = placed.tp;
    INFO(parameter);
    CHECK(placement == replicate());
  }
}

TEST_CASE("Each ZeRO stage shards one thing more") {
  ParallelSpec spec = layout(tiny_gpt2(), 2, 1, 1);
  for (int stage = 0; stage <= 3; ++stage) {
    spec.zero_stage = stage;
    const Placements placements = place(tiny_gpt2(), spec);
    CHECK(placements.state.optimizer.dp == (stage >= 1 ? flat_shard() : replicate()));
    CHECK(placements.state.gradients.dp == (stage >= 2 ? flat_shard() : replicate()));
    CHECK(placements.state.parameters.dp == (stage >= 3 ? flat_shard() : replicate()));
  }
}

TEST_CASE("Stages are cut such that the costliest is as cheap as can be") {
  const auto cut_stages_of = [](const std::vector<double>& blocks, int stages) {
    return cut_stages(std::vector<Seconds>(blocks.begin(), blocks.end()), stages);
  };
  CHECK(cut_stages_of({1, 1, 1, 1, 1, 1}, 3) == std::vector<int>{2, 2, 2});
  CHECK(cut_stages_of({1, 1, 1, 1, 1}, 1) == std::vector<int>{5});
  CHECK(cut_stages_of({3, 1, 2}, 3) == std::vector<int>{1, 1, 1});
  CHECK(cut_stages_of({1, 1, 1, 1, 4}, 2) == std::vector<int>{4, 1});
  // An embedding costs nothing and does not take a layer's place; a head as expensive as two layers
  // does.
  CHECK(cut_stages_of({0, 1, 1, 1, 1, 0}, 2) == std::vector<int>{3, 3});
  CHECK(cut_stages_of({0, 1, 1, 1, 1, 1, 1, 2}, 2) == std::vector<int>{5, 3});
  // The last stage needs 8 whatever comes before; the rest is spread, not piled up to 8.
  CHECK(cut_stages_of({1, 1, 1, 1, 1, 1, 8}, 3) == std::vector<int>{3, 3, 1});
  CHECK(cut_stages_of({0, 0, 0}, 2).size() == 2);
}

TEST_CASE("The stage cut equals the best of all cuts") {
  // All cuts of eight blocks, by where the stages end.
  std::vector<Seconds> cost;
  for (const double seconds : {0.5, 3.0, 3.0, 2.5, 3.0, 1.0, 3.0, 7.0}) cost.push_back(Seconds(seconds));
  const int blocks = static_cast<int>(cost.size());
  for (int stages = 1; stages <= blocks; ++stages) {
    const auto worst_of = [&](const std::vector<int>& cut) {
      Seconds worst;
      auto at = cost.begin();
      for (int n : cut) {
        Seconds sum;
        for (int i = 0; i < n; ++i) sum += *at++;
        worst = std::max(worst, sum);
      }
      return worst;
    };
    Seconds best(1e9);
    for (unsigned ends = 0; ends < (1u << (blocks - 1)); ++ends) {
      std::vector<int> cut = {1};
      for (int i = 0; i + 1 < blocks; ++i) {
        if (ends >> i & 1u) cut.push_back(1);
        else ++cut.back();
      }
      if (static_cast<int>(cut.size()) == stages) best = std::min(best, worst_of(cut));
    }
    CHECK(worst_of(cut_stages(cost, stages)) == best);
  }
}

TEST_CASE("Stages of unlike devices that choose what to recompute are cut as the best of all cuts and choices") {
  std::mt19937 random(7);
  const auto draw = [&](int from, int to) { return std::uniform_int_distribution<int>(from, to)(random); };
  int feasible = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    const std::size_t blocks = static_cast<std::size_t>(draw(2, 7)),
                      stages = static_cast<std::size_t>(draw(1, static_cast<int>(std::min<std::size_t>(blocks, 4))));
    // Option 0 is fast and saves much, option 1 is slower and saves less; each stage has its own
    // speed, memory and micro-batches in flight.
    std::vector<std::int64_t> state(blocks + 1), much(blocks + 1), little(blocks + 1);
    std::vector<double> work(blocks + 1);
    for (std::size_t b = 0; b < blocks; ++b) {
      state[b + 1] = state[b] + draw(0, 5);
      const int saved = draw(1, 6);
      much[b + 1] = much[b] + saved;
      little[b + 1] = little[b] + (saved + 3) / 4;
      work[b + 1] = work[b] + draw(1, 6);
    }
    std::vector<std::array<std::vector<Seconds>, 2>> seconds(stages);
    std::vector<std::vector<StageOption>> options(stages);
    std::vector<std::vector<std::function<bool(std::size_t, std::size_t)>>> rooms(stages);
    for (std::size_t s = 0; s < stages; ++s) {
      const double slow = draw(1, 3);
      for (const double w : work) {
        seconds[s][0].push_back(Seconds(w * slow));
        seconds[s][1].push_back(Seconds(w * slow * 1.25));
      }
      // The last block needs some memory beyond what adds up.
      const int capacity = draw(8, 60), extra = draw(0, 12), in_flight = static_cast<int>(stages - s);
      for (const std::size_t choice : {0u, 1u}) {
        const std::vector<std::int64_t>& saved = choice == 0 ? much : little;
        rooms[s].push_back([&state, &saved, in_flight, capacity, extra, blocks](std::size_t begin, std::size_t end) {
          return state[end] - state[begin] + in_flight * (saved[end] - saved[begin]) + (end == blocks ? extra : 0) <=
                 capacity;
        });
        options[s].push_back({.seconds = seconds[s][choice],
                              .state = state,
                              .saved = saved,
                              .in_flight = in_flight,
                              .surely_fits = capacity - extra,
                              .may_fit = capacity,
                              .fits = rooms[s].back()});
      }
    }
    // The least maximum, then the least sum of squares, over all cuts and all choices.
    std::pair<double, double> best{1e300, 1e300};
    const auto visit = [&](auto&& self, std::size_t s, std::size_t begin, double worst, double squares) -> void {
      if (s == stages) {
        if (begin == blocks) best = std::min(best, {worst, squares});
        return;
      }
      for (std::size_t end = begin + 1; end <= blocks; ++end)
        for (std::size_t choice = 0; choice < options[s].size(); ++choice) {
          const StageOption& option = options[s][choice];
          if (!rooms[s][choice](begin, end)) continue;
          const double t = (option.seconds[end] - option.seconds[begin]).value;
          self(self, s + 1, end, std::max(worst, t), squares + t * t);
        }
    };
    visit(visit, 0, 0, 0.0, 0.0);
    const std::optional<StageCut> cut = cut_stages(options);
    REQUIRE(cut.has_value() == (best.first < 1e300));
    if (!cut) continue;
    ++feasible;
    std::pair<double, double> found{0.0, 0.0};
    std::size_t begin = 0;
    for (std::size_t s = 0; s < stages; ++s) {
      const std::size_t end = begin + static_cast<std::size_t>(cut->blocks[s]);
      const StageOption& option = options[s][cut->options[s]];
      CHECK(rooms[s][cut->options[s]](begin, end));
      const double t = (option.seconds[end] - option.seconds[begin]).value;
      found = {std::max(found.first, t), found.second + t * t};
      begin = end;
    }
    CHECK(begin == blocks);
    CHECK(found.first == doctest::Approx(best.first).epsilon(1e-12));
    CHECK(found.second == doctest::Approx(best.second).epsilon(1e-9));
  }
  CHECK(feasible > 1000);
}

TEST_CASE("The default cut counts the head and not the look-up") {
  // tiny GPT-2, multiply-adds per token: a layer 4 * 32^2 + 2 * 32 * 128 + 2 * 32 * 32 = 14336, the
  // head 61 * 32 = 1952.
  CHECK(even_stages(tiny_gpt2(), 2) == std::vector<int>{3, 3});
  CHECK(even_stages(tiny_gpt2(), 4) == std::vector<int>{2, 1, 1, 2});
  CHECK(even_stages(tiny_gpt2(), 6) == std::vector<int>{1, 1, 1, 1, 1, 1});
  // GPT-2: a layer 7.08M + 1.57M for attention over 1024 tokens, the head 38.6M: more than four
  // layers.
  const OpGraph gpt2 = graph_of(models_folder, "gpt2", 1024);
  CHECK(even_stages(gpt2, 2) == std::vector<int>{9, 5});
  // If each token sees only itself, a layer is 7.08M, and the head more than five of them.
  OpGraph windowed = gpt2;
  for (Op& op : windowed.ops)
    if (op.kind == OpKind::attention) op.attributes.window = 1;
  CHECK(even_stages(windowed, 2) == std::vector<int>{10, 4});
}
