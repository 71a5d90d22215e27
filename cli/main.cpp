#include <array>
#include <cerrno>
#include <iostream>
#include <string>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "cli/command_line.h"

namespace {

// A closed descriptor (`>&-`) would be reused for the next file, and messages would go into that
// file. Opening it in the wrong direction gives the same error as a closed one.
void occupy_closed_descriptors() {
  constexpr std::array ways = {O_WRONLY, O_RDONLY, O_RDONLY};  // of standard input, output and error
  for (int descriptor = 0; descriptor < static_cast<int>(ways.size()); ++descriptor)
    if (fcntl(descriptor, F_GETFD) == -1 && errno == EBADF) [[maybe_unused]]
      const int opened = open("/dev/null", ways[descriptor]);
}

}  // namespace

int main(int count, char** words) {
  occupy_closed_descriptors();
  return parplan::run_command_line(std::vector<std::string>(words + (count > 0 ? 1 : 0), words + count), std::cout,
                                   std::cerr);
}
