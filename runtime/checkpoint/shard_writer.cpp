#include "runtime/checkpoint/shard_writer.h"

#include <algorithm>
#include <span>
#include <utility>

#include "planner/base/error.h"
#include "runtime/checkpoint/crc32.h"
#include "runtime/checkpoint/open_file.h"

namespace parplan {
namespace {

CheckpointFile write_shard(const std::string& folder, const Shard& shard, const std::atomic<bool>& stop) {
  constexpr std::size_t chunk = std::size_t{1} << 22;
  NewFile file(folder + '/' + shard.name);
  Crc32 crc;
  const auto put = [&](std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      if (stop) throw RunError("the run ends");
      const auto piece = bytes.first(std::min(chunk, bytes.size()));
      crc.add(piece);
      file.write(piece);
      bytes = bytes.subspan(piece.size());
    }
  };
  put(std::as_bytes(std::span(shard.header)));
  put(shard.data);
  file.close();
  return {.name = shard.name,
          .bytes = static_cast<std::int64_t>(shard.header.size() + shard.data.size()),
          .crc32 = crc.value()};
}

}  // namespace

ShardWriter::ShardWriter(std::string folder, std::vector<Shard> shards)
    : files_(std::async(std::launch::async, [this, folder = std::move(folder), shards = std::move(shards)] {
        std::vector<CheckpointFile> files;
        for (const Shard& shard : shards) files.push_back(write_shard(folder, shard, stop_));
        return files;
      })) {}

ShardWriter::~ShardWriter() {
  stop_ = true;
}

bool ShardWriter::is_done(std::chrono::milliseconds patience) const {
  return files_.wait_for(patience) == std::future_status::ready;
}

std::vector<CheckpointFile> ShardWriter::files() {
  return files_.get();
}

}  // namespace parplan
