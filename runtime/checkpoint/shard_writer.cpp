#include "runtime/checkpoint/shard_writer.h"

#include <algorithm>
#include <span>
#include <utility>

#include "planner/base/error.h"
#include "runtime/checkpoint/crc32.h"
#include "runtime/checkpoint/open_file.h"

namespace parplan {
namespace {

CheckpointFile write_held(const std::string& folder, const Shard& shard, const std::atomic<bool>& stop) {
  std::span<const std::byte> rest = shard.data;
  return write_shard(folder, shard.name, shard.header, [&] {
    if (stop) throw RunError("the run ends");
    const auto piece = rest.first(std::min(static_cast<std::size_t>(checkpoint_piece_bytes), rest.size()));
    rest = rest.subspan(piece.size());
    return piece;
  });
}

}  // namespace

CheckpointFile write_shard(const std::string& folder, const std::string& name, const std::string& header,
                           const std::function<std::span<const std::byte>()>& next) {
  NewFile file(folder + '/' + name);
  Crc32 crc;
  CheckpointFile written{.name = name};
  const auto put = [&](std::span<const std::byte> bytes) {
    crc.add(bytes);
    file.write(bytes);
    written.bytes += std::ssize(bytes);
  };
  put(std::as_bytes(std::span(header)));
  for (std::span<const std::byte> piece = next(); !piece.empty(); piece = next()) put(piece);
  file.close();
  written.crc32 = crc.value();
  return written;
}

ShardWriter::ShardWriter(std::string folder, std::vector<Shard> shards, WrittenShards before) {
  for (const Shard& shard : shards) held_ += std::ssize(shard.data);
  files_ = std::async(std::launch::async,
                      [this, folder = std::move(folder), shards = std::move(shards), before = std::move(before)] {
                        if (before.failure) throw RunError(*before.failure);
                        std::vector<CheckpointFile> files = before.files;
                        for (const Shard& shard : shards) files.push_back(write_held(folder, shard, stop_));
                        return files;
                      });
}

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
