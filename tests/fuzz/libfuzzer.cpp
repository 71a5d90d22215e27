// One program per target: the function that libFuzzer calls with every input that it generates
// (docs/contributing.md).
#include <cstddef>
#include <cstdint>
#include <string>

#include "tests/fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t count) {
  static const parplan::fuzz::Target& target = parplan::fuzz::find_target(PARPLAN_FUZZ_TARGET);
  take_input(target, std::string(reinterpret_cast<const char*>(bytes), count));
  return 0;
}
