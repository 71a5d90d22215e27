#pragma once

#include <doctest/doctest.h>

#include <memory>
#include <string>

#include "runtime/comm/gpu_plugin.h"

// The device for the tests of this folder. They are built once and registered twice: with the
// plugin of this build (a GPU, or skipped with the reason), and with PARPLAN_PLUGINS naming the
// plugin that is built against tests/cuda_emulator.
namespace parplan::testing {

// The plugin if it has at least one device; otherwise null after printing "skipped: <reason>",
// which CTest reports.
inline std::shared_ptr<Gpu> gpu_or_skip() {
  const OpenedGpu opened = open_gpu();
  std::string reason = opened.missing;
  if (opened.gpu != nullptr) {
    try {
      if (!opened.gpu->devices().empty()) return opened.gpu;
      reason = "no GPU";
    } catch (const std::exception& error) {
      reason = error.what();
    }
  }
  MESSAGE("skipped: " << reason);
  return nullptr;
}

// Whether the device is the emulator of tests/cuda_emulator: a few sizes are then too large to wait
// for.
inline bool is_emulated(Gpu& gpu) { return gpu.devices().front().name.find("emulated") != std::string::npos; }

}  // namespace parplan::testing
