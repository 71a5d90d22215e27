#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <future>
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

// Writes the shards of one checkpoint in a thread of its own. Destroying it stops the writing.
class ShardWriter {
 public:
  ShardWriter(std::string folder, std::vector<Shard> shards);
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  // Whether it is done, at the latest after this time.
  bool is_done(std::chrono::milliseconds patience) const;
  // Waits. Every file is on the device, or RunError says why one is not.
  std::vector<CheckpointFile> files();

 private:
  std::atomic<bool> stop_ = false;
  std::future<std::vector<CheckpointFile>> files_;
};

}  // namespace parplan
