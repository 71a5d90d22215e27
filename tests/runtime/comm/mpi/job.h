#pragma once

#include <vector>

#include "runtime/launch/rendezvous.h"

namespace parplan::testing {

// The job in which mpirun started this test program.
Rendezvous& job();

// All processes' ranks: 0, 1, ...
std::vector<int> all_ranks();

// Whether `here` holds in every process. Everyone gets the same answer, so a test fails, and
// continues, everywhere alike.
bool everywhere(bool here);

}  // namespace parplan::testing
