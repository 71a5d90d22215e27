#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "planner/graph/op_kind.h"
#include "runtime/checkpoint/logical_slice.h"
#include "runtime/launch/agree_on_inputs.h"

namespace parplan {

// A file of a checkpoint, whole and on the device.
struct CheckpointFile {
  std::string name;  // within the checkpoint's folder
  std::int64_t bytes = 0;
  std::uint32_t crc32 = 0;  // of all its bytes
  bool operator==(const CheckpointFile&) const = default;
};

// The part of a tensor that lies in a file, under the tensor's own name.
struct CheckpointPart {
  int file = 0;
  LogicalSlice slice;
  std::int64_t begin = 0;  // bytes from the start of the file
  bool operator==(const CheckpointPart&) const = default;
};

struct CheckpointTensor {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;  // logical
  std::vector<CheckpointPart> parts = {};
  bool operator==(const CheckpointTensor&) const = default;
};

// Everything that a checkpoint says beside the numbers: its `checkpoint.json`.
struct CheckpointIndex {
  std::int64_t step = 0;           // steps that were done: the next one has this number
  std::int64_t skipped_steps = 0;  // of them, those that do not count for bias correction
  std::int64_t next_sample = 0;    // of the data
  std::optional<LossScale> loss_scale = {};
  std::string model = {};        // model.yaml
  std::vector<Fact> facts = {};  // how it was trained
  std::vector<CheckpointFile> files = {};
  std::vector<CheckpointTensor> tensors = {};
};

inline constexpr const char* index_name = "checkpoint.json";

// The text ends with its own checksum, in its last member.
std::string write_index(const CheckpointIndex& index);
// Refuses what was altered, and parts that overlap, leave something out or name files outside of
// the folder: ConfigError with the file and the place.
CheckpointIndex read_index(const std::string& text, const std::string& file_name);

}  // namespace parplan
