#pragma once

namespace parplan {

// "0.1.0": the version of CMakeLists.txt.
const char* version();

}  // namespace parplan
