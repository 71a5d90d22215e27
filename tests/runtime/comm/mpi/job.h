#pragma once

#include <vector>

#include "runtime/launch/rendezvous.h"

namespace parplan::testing {

// The job that mpirun started this test program in.
Rendezvous& job();

// All processes' ranks: 0, 1, ...
std::vector<int> all_ranks();

// Whether `here` holds in every process. Everyone gets the same answer, so that a test fails, and
// goes on, everywhere alike.
bool everywhere(bool here);

}  // namespace parplan::testing
