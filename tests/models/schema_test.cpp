#include <algorithm>

#include <doctest/doctest.h>

#include "models/model_file.h"
#include "planner/base/error.h"
#include "planner/base/file.h"
#include "planner/base/json.h"
#include "tests/planner/base/error_of.h"

using namespace parplan;

namespace {

const std::string folder = std::string(PARPLAN_SOURCE_DIR) + "/docs/";

std::string model_with(const std::string& family, const std::string& last) {
  return "name: m\nfamily: " + family +
         "\nlayers: 1\nhidden: 4\nfeature: 4\nvocabulary: 5\ncontext: 4\nactivation: relu\n" +
         (family == "decoder"           ? "heads: 1\nposition: rotary\nnorm: rms_norm\n"
          : family == "encoder_decoder" ? "heads: 1\ndecoder_layers: 1\ndecoder_context: 1\n"
                                        : "") +
         last + "\n";
}

// The keys that the reader allows besides the unknown one in `last`, sorted: its error lists them.
std::vector<std::string> allowed(const std::string& family, const std::string& last) {
  const std::string message = error_of<ConfigError>([&] { read_model(model_with(family, last), "m.yaml"); });
  const std::string mark = "unknown key 'xxxxxxxx'; allowed: ";
  REQUIRE_MESSAGE(message.find(mark) != std::string::npos, message);
  std::string list = message.substr(message.find(mark) + mark.size()) + ", ";
  std::vector<std::string> keys;
  for (std::size_t end = list.find(", "); end != std::string::npos; end = list.find(", ")) {
    keys.push_back(list.substr(0, end));
    list.erase(0, end + 2);
  }
  std::sort(keys.begin(), keys.end());
  return keys;
}

std::vector<std::string> sorted_keys(const Json& properties) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : properties.items()) keys.push_back(key);
  std::sort(keys.begin(), keys.end());
  return keys;
}

}  // namespace

TEST_CASE("The JSON Schema has exactly the keys that the reader allows") {
  const Json schema = Json::parse(read_file(folder + "schemas/model.schema.json"));
  const Json& parts = schema["$defs"];
  CHECK(sorted_keys(parts["training"]["properties"]) == allowed("decoder", "training: {xxxxxxxx: 1}"));
  CHECK(sorted_keys(parts["optimizer"]["properties"]) == allowed("decoder", "training: {optimizer: {xxxxxxxx: 1}}"));
  CHECK(sorted_keys(parts["initialization"]["properties"]) ==
        allowed("decoder", "training: {initialization: {xxxxxxxx: 1}}"));

  // The schema removes the same keys from each family as the reader.
  const char* const families[] = {"decoder", "mlp", "encoder_decoder"};
  for (std::size_t i = 0; i < std::size(families); ++i) {
    const Json& row = schema["allOf"][i];
    CAPTURE(families[i]);
    CHECK(row["if"]["properties"]["family"]["const"] == families[i]);
    std::vector<std::string> keys = sorted_keys(schema["properties"]);
    for (const auto& [key, value] : row["then"]["properties"].items())
      if (value == false) std::erase(keys, key);
    CHECK(keys == allowed(families[i], "xxxxxxxx: 1"));
  }
}

TEST_CASE("The page names every key, and its example loads") {
  const std::string page = read_file(folder + "model.md");
  for (const char* family : {"decoder", "encoder_decoder"})
    for (const std::string& key : allowed(family, "xxxxxxxx: 1"))
      CHECK_MESSAGE(page.find("`" + key + "`") != std::string::npos, key);
  for (const std::string& key : allowed("decoder", "training: {optimizer: {xxxxxxxx: 1}}")) {
    CHECK_MESSAGE(page.find("`optimizer." + key + "`") != std::string::npos, key);
  }
  const std::size_t begin = page.find("```yaml\n") + 8;
  const ModelFile example = read_model(page.substr(begin, page.find("```", begin) - begin), "model.md");
  CHECK(example.spec ==
        read_model(read_file(std::string(PARPLAN_SOURCE_DIR) + "/models/llama3-8b.yaml"), "m.yaml").spec);
}
