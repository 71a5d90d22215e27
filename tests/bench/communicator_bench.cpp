// The time of all-reduces between ranks that are threads of this process: the median as rank 0 sees
// it. The bandwidth is the bus bandwidth of nccl-tests: 2 (n - 1) / n times the buffer, over the
// time.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "runtime/comm/local/local_communicator.h"

int main() {
  using namespace parplan;
  std::printf("all_reduce, fp32, %u cores\n%6s %12s %12s %10s\n", std::thread::hardware_concurrency(), "ranks", "bytes",
              "us", "GB/s");
  for (const int ranks : {2, 4, 8}) {
    CommunicationGroup group;
    for (int rank = 0; rank < ranks; ++rank) group.ranks.push_back(rank);
    LocalWorld world(ranks, {group});
    for (const std::int64_t bytes : {1 << 10, 1 << 18, 1 << 22, 1 << 26}) {
      const std::int64_t count = bytes / 4;
      const int repeats = static_cast<int>(std::clamp<std::int64_t>((std::int64_t{1} << 28) / bytes, 10, 2000));
      std::vector<double> seconds;
      std::vector<std::thread> threads;
      for (int rank = 0; rank < ranks; ++rank)
        threads.emplace_back([&, rank] {
          std::vector<float> data(static_cast<std::size_t>(count), 0.0f);
          Communicator& communicator = world.communicator(rank);
          for (int i = 0; i < 3; ++i) communicator.all_reduce(0, 0, Reduction::sum, {data.data(), count});
          for (int i = 0; i < repeats; ++i) {
            const auto begin = std::chrono::steady_clock::now();
            communicator.all_reduce(0, 0, Reduction::sum, {data.data(), count});
            if (rank == 0)
              seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
          }
        });
      for (std::thread& thread : threads) thread.join();
      std::nth_element(seconds.begin(), seconds.begin() + repeats / 2, seconds.end());
      const double median = seconds[static_cast<std::size_t>(repeats) / 2];
      std::printf("%6d %12lld %12.2f %10.2f\n", ranks, static_cast<long long>(bytes), median * 1e6,
                  2.0 * (ranks - 1) / ranks * static_cast<double>(bytes) / median * 1e-9);
    }
  }
}
