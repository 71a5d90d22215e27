#include "models/huggingface_weights.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <vector>

#include "models/families.h"
#include "models/find_model.h"
#include "models/huggingface.h"
#include "planner/base/error.h"
#include "planner/base/file.h"
#include "planner/base/json.h"
#include "tests/planner/base/error_of.h"

namespace parplan {
namespace {

const std::filesystem::path source = PARPLAN_SOURCE_DIR;

// Every element of every parameter, and of every stored tensor, once.
void check_once(const StoredWeights& stored, const OpGraph& graph) {
  std::map<std::string, std::vector<int>> rows_of;
  std::vector<std::vector<int>> stored_rows(stored.tensors.size());
  for (const StoredRows& rows : stored.rows) {
    const auto id = std::ranges::find(graph.tensors, rows.parameter, &Tensor::name);
    REQUIRE(id != graph.tensors.end());
    std::vector<int>& own = rows_of[rows.parameter];
    own.resize(static_cast<std::size_t>(id->dims[0].size));
    const StoredTensor& tensor = stored.tensors[rows.tensor];
    std::vector<int>& theirs = stored_rows[rows.tensor];
    theirs.resize(static_cast<std::size_t>(rows.by_element   ? tensor.shape[0] * tensor.shape[1]
                                           : rows.transposed ? tensor.shape[1]
                                                             : tensor.shape[0]));
    REQUIRE(tensor.shape.size() == id->dims.size() + (rows.by_element ? 1 : 0));
    if (id->dims.size() == 2) CHECK(tensor.shape[rows.transposed ? 0 : 1] == id->dims[1].size);
    for (std::int64_t row = 0; row < rows.rows; ++row) {
      ++own.at(static_cast<std::size_t>(rows.row + row));
      ++theirs.at(static_cast<std::size_t>(rows.stored_row + row));
    }
  }
  const auto once = [](const std::vector<int>& counts) {
    return std::ranges::all_of(counts, [](int count) { return count == 1; });
  };
  CHECK(rows_of.size() == parameters(graph).size());
  for (const auto& [name, counts] : rows_of) {
    INFO(name);
    CHECK(once(counts));
  }
  for (std::size_t i = 0; i < stored_rows.size(); ++i) {
    INFO(stored.tensors[i].name);
    CHECK(once(stored_rows[i]));
  }
}

TEST_CASE("every parameter of every imported model lies in one place of transformers' tensors") {
  int configs = 0;
  for (const auto& entry : std::filesystem::directory_iterator(source / "tests/data/golden/families")) {
    if (entry.path().extension() != ".json") continue;
    ++configs;
    INFO(entry.path().stem().string());
    const std::string config = read_file(entry.path());
    const ModelSpec spec = read_huggingface(config, "config.json").spec;
    if (reads_images(spec)) {
      CHECK(error_of<ConfigError>([&] {
              huggingface_weights("vit", spec, build_graph(spec, tokens_of_image(spec)));
            }) == "error: weights of model_type 'vit' are not read: parplan keeps them in another order; leave "
                  "--weights out");
      continue;
    }
    const OpGraph graph = build_graph(spec, 16);
    const HuggingFaceExport own = huggingface_export(config, "config.json");
    check_once(huggingface_weights(own.model_type, spec, graph), graph);
    // Without its config, another type may build the same.
    const HuggingFaceExport found = huggingface_export(spec);
    CHECK(differences(read_huggingface(found.config, "config.json").spec, spec).empty());
    check_once(huggingface_weights(found.model_type, spec, graph), graph);
  }
  CHECK(configs == 39);
}

TEST_CASE("models of the zoo are of the types that they came from") {
  std::map<std::string, std::set<std::string>> models_of;
  for (const std::string& name : zoo_names(source / "models")) {
    const ModelSpec spec = load_model(name, source / "models").spec;
    if (spec.family == Family::mlp || reads_images(spec)) {
      CHECK_THROWS_AS(huggingface_export(spec), ConfigError);
      continue;
    }
    INFO(name);
    models_of[huggingface_export(spec).model_type].insert(name);
  }
  using Names = std::set<std::string>;
  CHECK(models_of["gpt2"] == Names{"gpt2", "gpt2-large", "gpt2-medium", "gpt2-xl", "gpt3-175b"});
  CHECK(models_of["gptj"] == Names{"gptj-6b"});
  CHECK(models_of["gpt_neox"] == Names{"gpt-neox-20b", "pythia-6.9b"});
  CHECK(models_of["bloom"] == Names{"bloom-176b", "bloom-7b1"});
  CHECK(models_of["gemma2"] == Names{"gemma2-27b", "gemma2-9b"});
  CHECK(models_of["olmo2"] == Names{"olmo2-13b", "olmo2-7b"});
  CHECK(models_of["qwen3"] == Names{"qwen3-32b", "qwen3-8b"});
  CHECK(models_of["opt"] == Names{"opt-6.7b"});
  CHECK(models_of["t5"] == Names{"flan-t5-xxl", "t5-11b", "t5-3b", "t5-base", "t5-large", "t5-small"});
}

TEST_CASE("names are those of transformers' classes") {
  const ModelSpec spec = load_model("gpt2", source / "models").spec;
  const OpGraph graph = build_graph(spec, 16);
  const StoredWeights stored = huggingface_weights("gpt2", spec, graph);
  const auto tensor = std::ranges::find(stored.tensors, "transformer.h.3.attn.c_attn.weight", &StoredTensor::name);
  REQUIRE(tensor != stored.tensors.end());
  CHECK(*tensor == StoredTensor{.name = "transformer.h.3.attn.c_attn.weight",
                                .shape = {768, 2304},
                                .alias = "h.3.attn.c_attn.weight"});
  // The key of head 1: the second of twelve groups of three times 64 rows.
  const StoredRows key{.parameter = "layers.3.attention.qkv.weight",
                       .row = 256,
                       .rows = 64,
                       .tensor = static_cast<int>(tensor - stored.tensors.begin()),
                       .stored_row = 832,
                       .transposed = true,
                       .added = 0.0f};
  CHECK(std::ranges::find(stored.rows, key) != stored.rows.end());
}

TEST_CASE("what a class has no place for is named, and models that differ are told apart") {
  ModelSpec spec = load_model("llama3-8b", source / "models").spec;
  ModelSpec other = spec;
  other.name = "other";
  other.initializer_range = 0.5;
  CHECK(differences(other, spec).empty());
  other.rope_theta = 1.5;
  CHECK(differences(other, spec) == "'rope_theta: 1.5' there; 'rope_theta: 500000' in the plan");
  spec.embedding_norm = true;
  CHECK_THROWS_WITH_AS(huggingface_weights("llama", spec, build_graph(spec, 16)),
                       "error: model_type 'llama' of transformers has no place for the parameter embedding.norm.weight",
                       ConfigError);
}

}  // namespace
}  // namespace parplan
