#pragma once

#include <filesystem>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace parplan {

// The whole file. If it cannot be read, ConfigError names the path and the system's reason.
// Reading ends after `most` bytes (a device such as /dev/zero has no end).
std::string read_file(const std::filesystem::path& path, std::size_t most = std::numeric_limits<std::size_t>::max());

// Writes to a temporary name in the same folder, then renames it: readers see the old file or the
// new one, never half of it. Links are followed. An existing file keeps its mode and, where the
// system allows it, its owner; a read-only file is refused. A target that is no regular file (a
// device, a pipe, a descriptor of this process as in /dev/stdout or /dev/fd/3) is written to
// directly. RunError names the path and the reason.
void write_file_atomically(const std::filesystem::path& path, std::string_view text);

// The same for libraries that write files themselves: `write` is given the temporary name of an
// existing, empty file.
void write_through_temporary(const std::filesystem::path& path,
                             const std::function<void(const std::string& temporary)>& write);

// Throws the RunError of write_file_atomically early, where it is already certain: before work that
// would be lost.
void check_can_write(const std::filesystem::path& path);

// The names, without their ending, of the files NAME.yaml in a folder, sorted. A missing folder has
// none.
std::vector<std::string> names_of_yaml_files(const std::filesystem::path& folder);

// The file that a name leads to: symbolic links are followed to their end, so two names of one file
// are equal. It need not exist.
std::filesystem::path file_behind(const std::filesystem::path& path);

}  // namespace parplan
