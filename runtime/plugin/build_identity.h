#pragma once

#include <string>
#include <string_view>

namespace parplan {

// What this program was built from and how: programs of equal identities compute the same bits.
struct BuildIdentity {
  std::string_view version;   // "0.1.0": that of CMakeLists.txt
  std::string_view sources;   // fingerprint of all sources of the program
  std::string_view compiler;  // "GNU 12.2.0"
  std::string_view options;   // "Release -O3 -DNDEBUG"
};

// The build generates its source (hash_sources.cmake). Plugins have their own.
BuildIdentity build_identity();

// "0.1.0, sources 0123456789abcdef, GNU 12.2.0, Release -O3 -DNDEBUG".
inline std::string write_identity(const BuildIdentity& build) {
  return std::string(build.version) + ", sources " + std::string(build.sources) + ", " + std::string(build.compiler) +
         ", " + std::string(build.options);
}

}  // namespace parplan
