#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/checkpoint/checkpoint_index.h"

namespace parplan {

// A folder of checkpoints: `step-00000100/` is whole; what is being written, or was when a run
// died, is `step-00000100.incomplete/`, and what is being removed `step-00000100.removed/`.

std::string path_of_checkpoint(const std::string& folder, std::int64_t step);
std::string path_of_incomplete(const std::string& folder, std::int64_t step);

// The steps of the whole checkpoints, ascending. None where there is no such folder.
std::vector<std::int64_t> complete_checkpoints(const std::string& folder);

// What one process of a job does for all.

// Makes the folder where it is missing; ConfigError where it cannot be made.
void make_folder(const std::string& folder);
// Removes what runs that died have left in it, as far as that can be done.
void remove_leftovers(const std::string& folder);
// An empty folder for the files of a checkpoint.
void begin_checkpoint(const std::string& folder, std::int64_t step);
// Once all files are whole: adds the index and gives the checkpoint its name. When this returns,
// the device holds all of it.
void complete_checkpoint(const std::string& folder, const CheckpointIndex& index);
// Removes what `begin_checkpoint` made.
void abandon_checkpoint(const std::string& folder, std::int64_t step) noexcept;
// Removes the oldest whole checkpoints but the last `most`. At no time is part of one left under
// its name.
void keep_newest(const std::string& folder, std::size_t most);

// Marks a folder as that of this job while it lives: another job's claim fails (ConfigError). The
// mark is a file with a text that no other folder has, so that the processes of a job can see
// whether they share it.
class FolderClaim {
 public:
  FolderClaim(const std::string& folder, std::string_view text);
  ~FolderClaim();
  FolderClaim(const FolderClaim&) = delete;
  FolderClaim& operator=(const FolderClaim&) = delete;

 private:
  int descriptor_ = -1;
};
// Whether this process sees the folder that was claimed with this text.
bool sees_claim(const std::string& folder, std::string_view text);

}  // namespace parplan
