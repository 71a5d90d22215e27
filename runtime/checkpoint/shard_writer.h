#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <future>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/checkpoint/checkpoint_index.h"

namespace parplan {

// A file to be written: all its bytes, in host memory.
struct Shard {
  std::string name;
  std::string header;
  std::vector<std::byte> data;
};

// The most that is read at once of what is on NVMe, to be written to a checkpoint, or of a
// checkpoint: a drive of 7 GB/s takes 0.6 ms for it, many times its latency, and a layer of a large
// model is hundreds of times as much.
inline constexpr std::int64_t checkpoint_piece_bytes = std::int64_t{1} << 22;

// Writes a file in the calling thread: its header, then the pieces that `next` gives, until one is
// empty. A RunError where it cannot.
CheckpointFile write_shard(const std::string& folder, const std::string& name, const std::string& header,
                           const std::function<std::span<const std::byte>()>& next);

// Files that were written before, and why that ended early, if it did.
struct WrittenShards {
  std::vector<CheckpointFile> files = {};
  std::optional<std::string> failure = {};
};

// Writes the shards of one checkpoint in a thread of its own. Destroying it stops the writing.
class ShardWriter {
 public:
  ShardWriter(std::string folder, std::vector<Shard> shards, WrittenShards before = {});
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  // Whether it is done, at the latest after this time.
  bool is_done(std::chrono::milliseconds patience) const;
  // Bytes of host memory that it holds.
  std::int64_t held() const { return held_; }
  // Waits. Every file is on the device, or RunError says why one is not; with those from before.
  std::vector<CheckpointFile> files();

 private:
  std::atomic<bool> stop_ = false;
  std::int64_t held_ = 0;
  std::future<std::vector<CheckpointFile>> files_;
};

}  // namespace parplan
