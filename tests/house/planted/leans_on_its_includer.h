#pragma once

namespace parplan {

// Uses std::string without <string>: the header test must find this.
std::string name_without_include();

}  // namespace parplan
