#pragma once

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <string>

#include "tests/cli/call.h"

namespace parplan::testing {

// The exit code and the standard output of a command of the shell; -1 where there is no shell. Also
// called before tests run, by the decorators that skip: assertions are not allowed there.
inline Called shell(const std::string& command) {
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return {.code = -1, .out = "", .err = ""};
  Called called;
  std::array<char, 4096> buffer{};
  for (std::size_t count = fread(buffer.data(), 1, buffer.size(), pipe); count > 0;
       count = fread(buffer.data(), 1, buffer.size(), pipe))
    called.out.append(buffer.data(), count);
  called.code = WEXITSTATUS(pclose(pipe));
  return called;
}

}  // namespace parplan::testing
