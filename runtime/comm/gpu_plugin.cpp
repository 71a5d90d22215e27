#include "runtime/comm/gpu_plugin.h"

#include <cstdlib>
#include <map>
#include <mutex>

#include <fmt/format.h>

#include "runtime/plugin/build_identity.h"
#include "runtime/plugin/open_plugin.h"

namespace parplan {
namespace {

OpenedGpu open_now() {
  constexpr const char* library = "libparplan_cuda.so";
  const OpenedPlugin plugin = open_plugin(library, make_gpu_symbol);
  if (plugin.function == nullptr) return {.gpu = nullptr, .missing = plugin.missing};
  Gpu* gpu = reinterpret_cast<MakeGpu>(plugin.function)(write_identity(build_identity()).c_str());
  if (gpu == nullptr)
    return {.gpu = nullptr,
            .missing = fmt::format("{} is not of this program's build ({}, sources {}): install both from one build",
                                   library, build_identity().version, build_identity().sources)};
  return {.gpu = std::shared_ptr<Gpu>(gpu), .missing = ""};
}

}  // namespace

// Once for each folder that PARPLAN_PLUGINS has named, since tests change it.
OpenedGpu open_gpu() {
  static std::mutex mutex;
  static std::map<std::string, OpenedGpu> opened;
  const char* folder = std::getenv("PARPLAN_PLUGINS");
  const std::lock_guard lock(mutex);
  const auto [place, is_new] = opened.try_emplace(folder == nullptr ? "" : folder);
  if (is_new) place->second = open_now();
  return place->second;
}

}  // namespace parplan
