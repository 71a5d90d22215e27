#pragma once

#include <cstddef>
#include <functional>

namespace parplan {

// Calls `work(thread, item)` for every item, each once, on several threads. What one of them throws
// is thrown here.
void in_parallel(int threads, std::size_t items, const std::function<void(int thread, std::size_t item)>& work);

}  // namespace parplan
