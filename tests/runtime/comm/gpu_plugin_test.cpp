// The program's reports on the CUDA plugin that it finds or does not find. (PARPLAN_TEST_PLUGINS:
// the folders of planted plugins, tests/runtime/comm/plugins.)
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "planner/base/error.h"
#include "runtime/comm/gpu_plugin.h"
#include "runtime/plugin/build_identity.h"
#include "tests/temporary_folder.h"

namespace parplan {
namespace {

namespace fs = std::filesystem;

// Opens with PARPLAN_PLUGINS set to `folder`, or unset.
OpenedGpu open_from(const char* folder) {
  const char* before = std::getenv("PARPLAN_PLUGINS");
  const std::string kept = before == nullptr ? "" : before;
  if (folder == nullptr) {
    unsetenv("PARPLAN_PLUGINS");
  } else {
    setenv("PARPLAN_PLUGINS", folder, 1);
  }
  OpenedGpu opened = open_gpu();
  if (before == nullptr) {
    unsetenv("PARPLAN_PLUGINS");
  } else {
    setenv("PARPLAN_PLUGINS", kept.c_str(), 1);
  }
  return opened;
}

const std::string planted = PARPLAN_TEST_PLUGINS;

}  // namespace

TEST_CASE("a folder without the CUDA plugin is named") {
  const testing::TemporaryFolder folder;
  const OpenedGpu opened = open_from(folder.root().c_str());
  CHECK(opened.gpu == nullptr);
  CHECK(opened.missing ==
        "no libparplan_cuda.so in " + folder.root().string() + " (the folder that PARPLAN_PLUGINS names)");
}

TEST_CASE("without PARPLAN_PLUGINS the folders beside the program are searched") {
  const OpenedGpu opened = open_from(nullptr);
  const fs::path beside = fs::read_symlink("/proc/self/exe").parent_path();
  CHECK(opened.gpu == nullptr);
  CHECK(opened.missing == "no libparplan_cuda.so in " + beside.string() + " or " +
                              (beside.parent_path() / "lib/parplan").string() +
                              "; PARPLAN_PLUGINS may name its folder");
}

TEST_CASE("a CUDA plugin that does not open is reported with the loader's words") {
  const testing::TemporaryFolder folder;
  const std::string path =
      folder.write("libparplan_cuda.so",
                   "no library, but a text of more than the sixty-four bytes that a header of a library has\n");
  const OpenedGpu opened = open_from(folder.root().c_str());
  CHECK(opened.gpu == nullptr);
  CHECK(opened.missing == path + " does not open: " + path + ": invalid ELF header");
}

TEST_CASE("a CUDA plugin of another build is not used") {
  const OpenedGpu opened = open_from((planted + "/refusing").c_str());
  CHECK(opened.gpu == nullptr);
  CHECK(opened.missing == "libparplan_cuda.so is not of this program's build (" PARPLAN_VERSION ", sources " +
                              std::string(build_identity().sources) + "): install both from one build");
}

TEST_CASE("the CUDA plugin is opened once, by whichever thread comes first, and its errors are caught") {
  std::vector<OpenedGpu> opened(8);
  opened[0] = open_from((planted + "/empty").c_str());
  REQUIRE(opened[0].gpu != nullptr);
  CHECK(opened[0].missing.empty());
  setenv("PARPLAN_PLUGINS", (planted + "/empty").c_str(), 1);
  std::vector<std::thread> threads;
  for (std::size_t i = 1; i < opened.size(); ++i) threads.emplace_back([&opened, i] { opened[i] = open_gpu(); });
  for (std::thread& thread : threads) thread.join();
  unsetenv("PARPLAN_PLUGINS");
  for (const OpenedGpu& other : opened) CHECK(other.gpu == opened[0].gpu);
  CHECK(opened[0].gpu->versions() == "CUDA of nobody");
  CHECK_THROWS_WITH_AS(static_cast<void>(opened[0].gpu->devices()), "no GPU but in tales", RunError);
}

}  // namespace parplan
