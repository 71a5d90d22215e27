#pragma once

#include <string>
#include <vector>

#include "cli/declared_options.h"

namespace parplan {

// The candidates for a value.
struct Offer {
  std::vector<std::string> values;
  bool files = false;  // names of files and folders, too
  bool list = false;   // several of these, separated by commas
  bool operator==(const Offer&) const = default;
};

// From the words of the option's type: choices as they are, and names of models, clusters and
// devices from models/ and configs/.
Offer offer(const DeclaredOption& option);

enum class Shell { bash, zsh, fish };
const char* name(Shell shell);

// A script for the shell that completes what `commands` declare.
std::string completion_script(Shell shell, const std::vector<DeclaredCommand>& commands);

}  // namespace parplan
