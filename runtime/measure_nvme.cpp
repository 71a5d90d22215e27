#include "runtime/measure_nvme.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <memory>
#include <mutex>
#include <random>
#include <system_error>
#include <thread>
#include <vector>

#include "runtime/device/offload_file.h"

namespace parplan {
namespace {

constexpr std::int64_t piece = std::int64_t{16} << 20, file_bytes = 4 * piece, small = 4096;
constexpr int fewest_rounds = 3, most_rounds = 50;

// One rank's file, and memory for a piece.
struct Measured {
  explicit Measured(const std::string& folder)
      : file(folder, Bytes(file_bytes)), memory(piece / sizeof(std::uint32_t)) {}

  OffloadFile file;
  std::vector<std::uint32_t> memory;
};

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::ranges::nth_element(values, middle);
  return *middle;
}

// The time that all files take at once for `work` on each.
template <class Work>
double together(std::vector<std::unique_ptr<Measured>>& files, Work work) {
  std::mutex mutex;
  std::exception_ptr failure;
  const auto begin = std::chrono::steady_clock::now();
  {
    std::vector<std::jthread> threads;
    for (const std::unique_ptr<Measured>& one : files)
      threads.emplace_back([&, file = one.get()] {
        try {
          work(*file);
        } catch (...) {
          const std::lock_guard lock(mutex);
          failure = std::current_exception();
        }
      });
  }
  if (failure) std::rethrow_exception(failure);
  return seconds_since(begin);
}

}  // namespace

Nvme measure_nvme(const std::string& folder, Seconds budget) {
  const auto ranks = std::clamp(std::thread::hardware_concurrency(), 1u, 8u);
  std::vector<std::unique_ptr<Measured>> files;
  std::mt19937 random(1);  // what drives cannot compress
  for (unsigned rank = 0; rank < ranks; ++rank) {
    files.push_back(std::make_unique<Measured>(folder));
    for (std::uint32_t& word : files.back()->memory) word = static_cast<std::uint32_t>(random());
  }
  std::vector<double> writes, reads, small_writes, small_reads;
  const auto begin = std::chrono::steady_clock::now();
  for (int round = 0; round < most_rounds && (round < fewest_rounds || seconds_since(begin) < budget.value); ++round) {
    const std::int64_t at = round % (file_bytes / piece) * piece;
    writes.push_back(together(files, [&](Measured& of) { of.file.write(at, of.memory.data(), piece); }));
    reads.push_back(together(files, [&](Measured& of) { of.file.read(at, of.memory.data(), piece); }));
    Measured& first = *files.front();
    auto alone = std::chrono::steady_clock::now();
    first.file.write(at, first.memory.data(), small);
    small_writes.push_back(seconds_since(alone));
    alone = std::chrono::steady_clock::now();
    first.file.read(at, first.memory.data(), small);
    small_reads.push_back(seconds_since(alone));
  }
  const double bytes = static_cast<double>(piece) * ranks;
  // What a piece takes beyond the latency; of a file system in memory that is less than nothing.
  const auto rate = [&](const std::vector<double>& pieces, const std::vector<double>& smalls) {
    const double time = median(pieces), latency = median(smalls);
    return BytesPerSecond(bytes / (time > 2.0 * latency ? time - latency : time));
  };
  Nvme nvme{.read = rate(reads, small_reads),
            .write = rate(writes, small_writes),
            .latency = Seconds(std::max(median(small_reads), median(small_writes))),
            .capacity = {}};
  std::error_code unknown;
  const std::filesystem::space_info space = std::filesystem::space(folder, unknown);
  if (!unknown) nvme.capacity = Bytes(static_cast<std::int64_t>(space.available));
  return nvme;
}

}  // namespace parplan
