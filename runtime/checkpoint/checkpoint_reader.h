#pragma once

#include <map>
#include <string>
#include <vector>

#include "runtime/checkpoint/checkpoint_index.h"

namespace parplan {

// Reads parts of tensors from a checkpoint, whatever ranks wrote it. Several threads may read at
// once.
class CheckpointReader {
 public:
  // Reads the headers of all files; ConfigError names the file that is not what the index says.
  CheckpointReader(std::string folder, CheckpointIndex index);

  const CheckpointIndex& index() const { return index_; }
  // Null where there is no such tensor.
  const CheckpointTensor* find(const std::string& tensor) const;
  // An fp32 tensor's slice, row by row. Only what is asked for is read.
  void read(const CheckpointTensor& tensor, const LogicalSlice& slice, float* to) const;

 private:
  std::string folder_;
  CheckpointIndex index_;
  std::map<std::string, const CheckpointTensor*> tensors_;
};

// Reads a whole file of a checkpoint and compares it with its checksum: ConfigError where it is not
// the file that was written.
void check_file(const std::string& folder, const CheckpointFile& file);

}  // namespace parplan
