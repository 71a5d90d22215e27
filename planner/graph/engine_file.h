#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "planner/base/yaml.h"
#include "planner/graph/engine.h"

namespace parplan {

// A fact of an engine's file. All facts are optional there.
struct EngineFact {
  const char* key;
  const char* words;  // what it says
  std::variant<bool Engine::*, int Engine::*, double Engine::*, Bytes Engine::*, Seconds Engine::*> member;
  int least = 0, most = 0;  // of whole numbers
};
std::span<const EngineFact> engine_facts();

// An engine's file (configs/engines/NAME.yaml): name, title and facts, each with its source. What
// it does not state is as in the engine that it says it is `like` (of `folder`), else as in
// parplan's own runtime.
Engine read_engine(const YamlNode& document, const std::filesystem::path& folder = {});
// The `engine` of a plan, without sources: facts that differ from parplan's own runtime.
Engine read_engine_of_plan(const YamlNode& node);
std::string write_engine_of_plan(const Engine& engine);

std::vector<std::string> engine_names(const std::filesystem::path& folder);  // sorted; "parplan" among them
// ConfigError lists the known names.
Engine find_engine(const std::string& name, const std::filesystem::path& folder);

}  // namespace parplan
