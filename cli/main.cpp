#include <iostream>
#include <string>
#include <vector>

#include "cli/command_line.h"

int main(int count, char** words) {
  return parplan::run_command_line(std::vector<std::string>(words + (count > 0 ? 1 : 0), words + count), std::cout, std::cerr);
}
