#include "models/find_model.h"

#include <algorithm>
#include <new>
#include <system_error>

#include <fmt/format.h>

#include "models/huggingface.h"
#include "planner/base/error.h"
#include "planner/base/file.h"
#include "planner/base/text.h"
#include "planner/base/yaml.h"

namespace parplan {

std::vector<std::string> zoo_names(const std::filesystem::path& zoo_folder) {
  std::error_code error;
  std::vector<std::string> names;
  for (const auto& file : std::filesystem::directory_iterator(zoo_folder, error)) {
    if (file.path().extension() == ".yaml") names.push_back(file.path().stem().string());
  }
  if (error == std::errc::not_enough_memory) throw std::bad_alloc();
  if (error) throw ConfigError(fmt::format("cannot read the zoo '{}': {}", zoo_folder.string(), error.message()));
  std::sort(names.begin(), names.end());
  return names;
}

namespace {

void refuse_plan(const std::string& text, const std::string& path) {
  if (text.find("parplan.plan/") == std::string::npos) return;
  const YamlNode root = YamlNode::parse(text, path);
  const auto schema = root.is_map() ? root.find("schema") : std::nullopt;
  if (schema && schema->is_scalar() && schema->as_string().starts_with("parplan.plan/"))
    schema->fail(
        "this is a plan, and a model is wanted; give the model that it was made of, or give the plan to parplan "
        "simulate, explain or run");
}

}  // namespace

ModelFile load_model(const std::string& name_or_path, const std::filesystem::path& zoo_folder) {
  const std::filesystem::path path(name_or_path);
  const std::string ending = path.extension().string();
  if (ending == ".yaml" || ending == ".yml") {
    const std::string text = read_document(path);
    refuse_plan(text, name_or_path);
    return read_model(text, name_or_path);
  }
  if (ending == ".json") return read_huggingface(read_document(path), name_or_path);
  if (std::filesystem::is_regular_file(path / "config.json")) {
    const std::filesystem::path config = path / "config.json";
    return read_huggingface(read_document(config), config.string());
  }
  const std::vector<std::string> names = zoo_names(zoo_folder);
  if (std::find(names.begin(), names.end(), name_or_path) == names.end()) {
    if (std::filesystem::is_directory(path))
      throw ConfigError(fmt::format(
          "the folder '{}' holds no config.json; name a folder that does, a .yaml or .json file, or one of {}",
          name_or_path, join(names)));
    throw ConfigError(
        fmt::format("unknown model '{}'; allowed: a path to a .yaml or .json file, a folder that holds a config.json, "
                    "or one of {}{}",
                    name_or_path, join(names), did_you_mean(name_or_path, names)));
  }
  const std::filesystem::path file = zoo_folder / (name_or_path + ".yaml");
  return read_model(read_document(file), file.string());
}

}  // namespace parplan
