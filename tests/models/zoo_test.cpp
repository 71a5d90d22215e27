#include <filesystem>
#include <map>

#include <doctest/doctest.h>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/base/error.h"
#include "planner/graph/op_graph.h"
#include "tests/planner/base/error_of.h"

using namespace parplan;

namespace {
const std::filesystem::path source = PARPLAN_SOURCE_DIR;
const std::filesystem::path zoo = source / "models";
}  // namespace

TEST_CASE("Every model of the zoo loads, carries its file's name and has exactly its published number of parameters") {
  const std::map<std::string, std::int64_t> published = {
      {"gpt2", 124'439'808},
      {"gpt2-medium", 354'823'168},
      {"gpt2-large", 774'030'080},
      {"gpt2-xl", 1'557'611'200},
      // Published only as 175.0 billion: 12288 (50257 + 2048) + 96 (12 * 12288^2 + 13 * 12288) + 2
      // * 12288.
      {"gpt3-175b", 174'604'259'328},
      {"llama2-7b", 6'738'415'616},
      {"llama2-70b", 68'976'648'192},
      {"llama3-8b", 8'030'261'248},
      {"llama3-70b", 70'553'706'496},
      {"llama3-405b", 405'853'388'800},
      {"llama3.2-1b", 1'235'814'400},
      {"mistral-7b", 7'241'732'096},
      {"qwen2.5-7b", 7'615'616'512},
      {"bert-base", 109'514'298},
      {"bert-large", 335'174'458},
      {"bloom-176b", 176'247'271'424},
      {"bloom-7b1", 7'069'016'064},
      {"command-a", 111'057'580'032},
      {"command-r", 34'980'831'232},
      {"command-r7b", 8'028'033'024},
      {"falcon-40b", 41'303'293'952},
      {"falcon-7b", 6'921'720'704},
      {"gemma-7b", 8'537'680'896},
      {"gemma2-27b", 27'227'128'320},
      {"gemma2-9b", 9'241'705'984},
      {"gemma3-12b", 11'766'034'176},
      {"gemma3-1b", 999'885'952},
      {"glm4-9b", 9'400'279'040},
      {"gpt-neox-20b", 20'554'567'680},
      {"gptj-6b", 6'050'882'784},
      {"granite-3.1-8b", 8'170'835'968},
      {"olmo2-13b", 13'716'198'400},
      {"olmo2-7b", 7'298'617'344},
      {"opt-6.7b", 6'658'473'984},
      {"phi3-mini", 3'821'079'552},
      {"pythia-6.9b", 6'857'302'016},
      {"qwen3-32b", 32'762'123'264},
      {"qwen3-8b", 8'190'735'360},
      {"starcoder2-15b", 15'957'889'024},
      // transformers' ViTForImageClassification with 1,000 classes; torchvision has the same
      // numbers.
      {"vit-base", 86'567'656},
      {"vit-huge", 632'045'800},
      {"vit-large", 304'326'632},
      // Counted in what transformers builds (5.24); that of Flan with a head of its own.
      {"t5-small", 60'506'624},
      {"t5-base", 222'903'552},
      {"t5-large", 737'668'096},
      {"t5-3b", 2'851'598'336},
      {"t5-11b", 11'307'321'344},
      {"flan-t5-xxl", 11'135'332'352},
      // 2 * 256 * 256 + 8 (256 * 1024 + 1024 + 1024 * 256 + 256)
      {"mlp", 4'335'616},
  };
  const std::vector<std::string> names = zoo_names(zoo);
  CHECK(names.size() == published.size());
  for (const std::string& name : names) {
    CAPTURE(name);
    const ModelFile model = load_model(name, zoo);
    CHECK(model.spec.name == name);
    CHECK(model.source != "");
    CHECK(model.notes.empty());
    CHECK(parameter_count(build_graph(model.spec, model.spec.context)) == published.at(name));
  }
}

TEST_CASE("Every model of the zoo and of the tests reads back as it is written") {
  std::vector<std::filesystem::path> files;
  for (const auto& folder : {zoo, source / "tests/data/models"}) {
    for (const auto& file : std::filesystem::directory_iterator(folder)) {
      if (file.path().extension() == ".yaml") files.push_back(file.path());
    }
  }
  CHECK(files.size() >= 15);
  for (const auto& file : files) {
    CAPTURE(file.string());
    const ModelSpec spec = load_model(file.string(), zoo).spec;
    CHECK(read_model(write_model(spec), "written.yaml").spec == spec);
  }
}

TEST_CASE("The models of the tests are what the tests take them for") {
  const ModelSpec gpt2 = load_model((source / "tests/data/models/tiny-gpt2.yaml").string(), zoo).spec;
  // 32 (61 + 32) + 4 (12 * 32^2 + 13 * 32) + 2 * 32
  CHECK(parameter_count(build_graph(gpt2, 16)) == 53'856);
  const ModelSpec llama = load_model((source / "tests/data/models/tiny-llama.yaml").string(), zoo).spec;
  // 2 * 64 * 32 + 4 (32 * 64 + 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32
  CHECK(parameter_count(build_graph(llama, 16)) == 35'104);
}

TEST_CASE("A model is found by name, by path and by the folder of its config.json") {
  CHECK(load_model("gpt2", zoo).spec.name == "gpt2");
  CHECK(load_model((zoo / "gpt2.yaml").string(), zoo).spec.name == "gpt2");
  const std::filesystem::path folder = source / "tests/data/huggingface/Qwen2.5-7B";
  CHECK(load_model(folder.string(), zoo).spec.name == "Qwen2.5-7B");
  CHECK(load_model(folder.string() + "/", zoo) == load_model((folder / "config.json").string(), zoo));
}

TEST_CASE("A model that is not there is told apart from those that are") {
  const std::string names =
      "bert-base, bert-large, bloom-176b, bloom-7b1, command-a, command-r, command-r7b, falcon-40b, falcon-7b, "
      "flan-t5-xxl, gemma-7b, gemma2-27b, gemma2-9b, gemma3-12b, gemma3-1b, glm4-9b, gpt-neox-20b, gpt2, gpt2-large, "
      "gpt2-medium, "
      "gpt2-xl, gpt3-175b, gptj-6b, granite-3.1-8b, llama2-70b, llama2-7b, llama3-405b, llama3-70b, llama3-8b, "
      "llama3.2-1b, "
      "mistral-7b, mlp, olmo2-13b, olmo2-7b, opt-6.7b, phi3-mini, pythia-6.9b, qwen2.5-7b, qwen3-32b, qwen3-8b, "
      "starcoder2-15b, t5-11b, t5-3b, t5-base, t5-large, t5-small, vit-base, vit-huge, vit-large";
  CHECK(error_of<ConfigError>([] { load_model("lama3-8b", zoo); }) ==
        "error: unknown model 'lama3-8b'; allowed: a path to a .yaml or .json file, a folder that holds a config.json, "
        "or one of " +
            names + "; did you mean 'llama3-8b'?");
  CHECK(error_of<ConfigError>([] { load_model("resnet50", zoo); }) ==
        "error: unknown model 'resnet50'; allowed: a path to a .yaml or .json file, a folder that holds a "
        "config.json, or one of " +
            names);
  CHECK(error_of<ConfigError>([] { load_model("/nowhere/model.yaml", zoo); }) ==
        "error: cannot read '/nowhere/model.yaml': No such file or directory");
  CHECK(error_of<ConfigError>([] { load_model("/nowhere/config.json", zoo); }) ==
        "error: cannot read '/nowhere/config.json': No such file or directory");
  CHECK(error_of<ConfigError>([] { load_model("gpt2", "/nowhere"); }) ==
        "error: cannot read the zoo '/nowhere': No such file or directory");
}
