#pragma once

#include <string_view>

namespace parplan {

// What this program was built from and how: programs of equal identities compute the same bits.
struct BuildIdentity {
  std::string_view version;   // "0.1.0": that of CMakeLists.txt
  std::string_view sources;   // fingerprint of all sources of the program
  std::string_view compiler;  // "GNU 12.2.0"
  std::string_view options;   // "Release -O3 -DNDEBUG"
};

// The build generates its source (hash_sources.cmake).
BuildIdentity build_identity();

}  // namespace parplan
