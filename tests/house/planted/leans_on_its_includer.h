#pragma once

namespace parplan {

// Uses std::string without <string>: what the header test must find.
std::string name_without_include();

}  // namespace parplan
