// Weights in the files of Hugging Face's libraries, read and written by runs.
#include <filesystem>
#include <fstream>

#include <fmt/format.h>

#include "planner/base/json.h"
#include "tests/cli/call.h"

namespace parplan {
namespace {

using namespace testing;

// A training that changes nothing, so that what is written is what was read.
std::string still_plan(const Folder& folder, const std::string& name, const std::vector<std::string>& layout) {
  std::vector<std::string> words = {
      "simulate", tiny_llama,          "--cluster",      cpu_8, "--seq-len", "8", "--quiet", "-o", folder.path(name),
      "--json",   folder.path("json"), "--global-batch", "8"};
  words.insert(words.end(), layout.begin(), layout.end());
  REQUIRE(call(words).code == 0);
  std::string text = folder.read(name);
  const std::size_t begin = text.find("\n  learning_rate: ");
  text.replace(begin, text.find('\n', begin + 1) - begin, "\n  learning_rate: 0");
  return folder.write(name, text);
}

std::string tokens_of(const Folder& folder) {
  std::string text;
  for (int i = 0; i < 400; ++i) text += static_cast<char>(i * 7 % 31);
  return folder.write("tokens", text);
}

TEST_CASE("weights that one layout wrote are read by another, and written again byte by byte") {
  const Folder folder;
  const std::string data = tokens_of(folder);
  const std::string one = still_plan(folder, "one.yaml", {"--dp", "2", "--tp", "1", "--pp", "1", "--zero", "3"});
  const std::string other = still_plan(folder, "other.yaml", {"--dp", "1", "--tp", "2", "--pp", "2"});
  const std::string first = folder.path("first"), second = folder.path("second") + "/";
  const Called written = call({"run", one, "--steps", "2", "--data", data, "--export-weights", first});
  CHECK(written.code == 0);
  CHECK(written.err.find(fmt::format("note: wrote the weights to {}\n", first)) != std::string::npos);
  const Called again =
      call({"run", other, "--steps", "1", "--data", data, "--weights", first, "--export-weights", second});
  CHECK(again.code == 0);
  CHECK(again.err.find(fmt::format("note: the parameters are those of {}\n", first)) != std::string::npos);
  CHECK(folder.read("first/model.safetensors") == folder.read("second/model.safetensors"));
  CHECK(folder.read("first/config.json") == folder.read("second/config.json"));
  CHECK(Json::parse(folder.read("first/config.json")).at("architectures")[0] == "LlamaForCausalLM");
  for (const char* left : {"first.parts", "first.incomplete", "second.parts", "second.incomplete"})
    CHECK(!std::filesystem::exists(folder.path(left)));
  // With a checkpoint, it is the checkpoint that counts.
  const std::string checkpoints = folder.path("checkpoints");
  REQUIRE(call({"run", one, "--steps", "1", "--data", data, "--checkpoint", checkpoints, "--quiet", "--json",
                folder.path("json")})
              .code == 0);
  const Called resumed =
      call({"run", one, "--steps", "2", "--data", data, "--checkpoint", checkpoints, "--resume", "--weights", first});
  CHECK(resumed.code == 0);
  CHECK(resumed.err.find("note: the run goes on with step 1 from ") != std::string::npos);
  CHECK(resumed.err.find("the parameters are those of") == std::string::npos);
  // An export replaces nothing.
  const Called taken = call({"run", one, "--data", data, "--export-weights", first});
  CHECK(taken.code == 2);
  CHECK(taken.err ==
        fmt::format("error: '{}' is there already; give --export-weights the name of a new folder\n", first));
}

TEST_CASE("an export removes what another one left, and nothing else") {
  const Folder folder;
  const std::string data = tokens_of(folder);
  const std::string plan = still_plan(folder, "one.yaml", {"--devices", "1"});
  const std::string to = folder.path("weights");
  const auto exported = [&] { return call({"run", plan, "--steps", "1", "--data", data, "--export-weights", to}); };
  for (const char* const ending : {".parts", ".incomplete"}) {
    const std::string beside = to + ending;
    std::filesystem::create_directory(beside);
    std::ofstream(beside + "/thesis.txt") << "mine";
    const Called refused = exported();
    CHECK(refused.code == 2);
    CHECK(refused.err.find(fmt::format("'{}' is needed to write '{}', and was not left there by parplan; move it away, "
                                       "or give --export-weights another name\n",
                                       beside, to)) != std::string::npos);
    CHECK(std::filesystem::exists(beside + "/thesis.txt"));
    std::ofstream(beside + "/.parplan-export") << "";  // now it is what an export that died leaves
  }
  CHECK(exported().code == 0);
  for (const char* const ending : {".parts", ".incomplete", "/.parplan-export"})
    CHECK(!std::filesystem::exists(to + ending));
  std::filesystem::remove_all(to);
  std::ofstream(to + ".parts") << "a file";
  CHECK(exported().code == 2);
}

TEST_CASE("weights that are not the model's, or not there, are refused with the place") {
  const Folder folder;
  const std::string data = tokens_of(folder);
  const std::string plan = still_plan(folder, "one.yaml", {"--devices", "1"});
  const std::string weights = folder.path("weights");
  REQUIRE(call({"run", plan, "--steps", "1", "--data", data, "--export-weights", weights}).code == 0);
  const auto refusal = [&] { return call({"run", plan, "--data", data, "--weights", weights, "--quiet"}).err; };
  const std::string config = folder.read("weights/config.json");
  const std::string file = folder.read("weights/model.safetensors");
  folder.write("weights/model.safetensors", file.substr(0, file.size() - 1));
  CHECK(refusal().starts_with(weights + "/model.safetensors: error: tensor \""));
  std::string renamed = file;
  renamed.replace(renamed.find("model.norm.weight"), 17, "model.mist.weight");
  folder.write("weights/model.safetensors", renamed);
  CHECK(refusal() == weights + ": error: the weights have no tensor model.norm.weight of shape [32]\n");
  std::string integers = file;
  const std::size_t at = integers.find("F32", integers.find("\"model.norm.weight\""));
  integers.replace(at, 3, "I32");
  folder.write("weights/model.safetensors", integers);
  CHECK(refusal() == weights +
                         "/model.safetensors: error: model.norm.weight is I32; weights are read from F32, F16 "
                         "and BF16\n");
  std::filesystem::remove(folder.path("weights/model.safetensors"));
  CHECK(refusal() == fmt::format("error: cannot read '{}/model.safetensors': No such file or directory\n", weights));
  folder.write("weights/model.safetensors.index.json", R"({"weight_map": {"a": "../x"}})");
  CHECK(refusal() == weights +
                         "/model.safetensors.index.json: error: weight_map: a file of this folder is wanted, "
                         "found \"../x\"\n");
  Json deeper = Json::parse(config);
  deeper["num_hidden_layers"] = 9;
  folder.write("weights/config.json", deeper.dump());
  CHECK(refusal().starts_with(weights + "/config.json: error: these weights are not of the plan's model: 'layers: 9' "
                                        "there; 'layers: "));
  std::filesystem::remove(folder.path("weights/config.json"));
  CHECK(refusal() == fmt::format("error: cannot read '{}/config.json': No such file or directory\n", weights));
}

}  // namespace
}  // namespace parplan
