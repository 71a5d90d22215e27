#pragma once

#include <cstddef>
#include <functional>

namespace parplan {

// One for each core, 16 at most.
int threads_of_this_machine();

// Calls `work(thread, item)` once for every item, on several threads. Rethrows here what one of
// them throws.
void parallel_for(int threads, std::size_t items, const std::function<void(int thread, std::size_t item)>& work);

}  // namespace parplan
