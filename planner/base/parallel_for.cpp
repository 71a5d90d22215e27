#include "planner/base/parallel_for.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace parplan {

int threads_of_this_machine() {
  return static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 16u));
}

void parallel_for(int threads, std::size_t items, const std::function<void(int thread, std::size_t item)>& work) {
  if (threads <= 1 || items <= 1) {
    for (std::size_t item = 0; item < items; ++item) work(0, item);
    return;
  }
  std::atomic<std::size_t> next{0};
  std::mutex guard;
  std::exception_ptr failure;
  const auto run = [&](int thread) {
    try {
      for (std::size_t item = next++; item < items; item = next++) work(thread, item);
    } catch (...) {
      const std::lock_guard lock(guard);
      if (!failure) failure = std::current_exception();
      next = items;
    }
  };
  {
    std::vector<std::jthread> others;
    for (int thread = 1; thread < std::min<int>(threads, static_cast<int>(items)); ++thread)
      others.emplace_back(run, thread);
    run(0);
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace parplan
