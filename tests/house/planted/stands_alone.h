#pragma once

#include <string>

namespace parplan {

std::string name_with_include();

}  // namespace parplan
