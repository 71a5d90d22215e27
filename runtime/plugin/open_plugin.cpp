#include "runtime/plugin/open_plugin.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace parplan {
namespace {

namespace fs = std::filesystem;

struct Folders {
  std::vector<std::string> paths;
  const char* advice;  // what to add when none of them has the library
};

Folders plugin_folders() {
  if (const char* chosen = std::getenv("PARPLAN_PLUGINS"); chosen != nullptr && *chosen != '\0')
    return {.paths = {chosen}, .advice = " (the folder that PARPLAN_PLUGINS names)"};
  std::error_code unreadable;
  const fs::path program = fs::read_symlink("/proc/self/exe", unreadable);
  if (unreadable) return {.paths = {}, .advice = "; PARPLAN_PLUGINS may name its folder"};
  const fs::path beside = program.parent_path();
  return {.paths = {beside.string(), (beside.parent_path() / "lib/parplan").string()},
          .advice = "; PARPLAN_PLUGINS may name its folder"};
}

}  // namespace

OpenedPlugin open_plugin(const std::string& library, const char* symbol) {
  const Folders folders = plugin_folders();
  for (const std::string& folder : folders.paths) {
    const std::string path = (fs::path(folder) / library).string();
    std::error_code ignored;
    if (!fs::exists(path, ignored)) continue;
    void* opened = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (opened == nullptr)
      return {.function = nullptr, .missing = fmt::format("{} does not open: {}", path, dlerror())};
    void* function = dlsym(opened, symbol);
    if (function == nullptr)
      return {.function = nullptr, .missing = fmt::format("{} has no function {}", path, symbol)};
    return {.function = function, .missing = ""};
  }
  return {.function = nullptr,
          .missing = fmt::format("no {} in {}{}", library, fmt::join(folders.paths, " or "), folders.advice)};
}

}  // namespace parplan
