#pragma once

#include <string>

namespace parplan {

// A function that a plugin exports, or why there is none.
struct OpenedPlugin {
  void* function = nullptr;  // null when `missing` says why
  std::string missing;
};

// Finds `library` ("libparplan_cuda.so") in the folder that PARPLAN_PLUGINS names if it is set,
// otherwise beside the program and in ../lib/parplan from there, and in it the function `symbol`.
// An opened library stays open until the process ends: objects made by a plugin may outlive every
// caller. A library that exists but does not open (its own libraries are missing) is not an error
// here: `missing` holds the loader's text.
OpenedPlugin open_plugin(const std::string& library, const char* symbol);

}  // namespace parplan
