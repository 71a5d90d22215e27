#pragma once

#include <string>

namespace parplan::testing {

// Pages of docs/ hold parts that are written from what the program declares, between
//     <!-- generated: options of suggest -->
//     <!-- end of generated -->
// The page with each such part written anew. Fails the test case that calls it where a part has no
// known name or no end.
std::string with_generated_parts(const std::string& page);

// What a heading is linked by: "Where" is #where.
std::string anchor(std::string heading);

}  // namespace parplan::testing
