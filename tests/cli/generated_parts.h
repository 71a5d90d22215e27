#pragma once

#include <string>

namespace parplan::testing {

// Pages of docs/ have parts that are generated from what the program declares, between
//     <!-- generated: options of suggest -->
//     <!-- end of generated -->
// This is the page with each such part regenerated. It fails the calling test case where a part has
// no known name or no end.
std::string with_generated_parts(const std::string& page);

// The link of a heading: "Where" is #where.
std::string anchor(std::string heading);

}  // namespace parplan::testing
