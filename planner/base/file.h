#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace parplan {

// The whole file. ConfigError names the path and the system's reason when it cannot be read.
std::string read_file(const std::filesystem::path& path);

// Writes to a temporary name in the same folder, then renames: readers see the old file or the new
// one, never half of it. Links are followed, and a file that is there keeps its mode and, where the
// system allows it, its owner; one that nobody may write is refused. What is no regular file (a
// device, a pipe, a descriptor of this process as in /dev/stdout or /dev/fd/3) stays what it is and
// is written to as it stands. RunError names the path and the reason.
void write_file_atomically(const std::filesystem::path& path, std::string_view text);

// The same for libraries that write files themselves: `write` is given the temporary name, whose
// file is there and empty.
void write_through_temporary(const std::filesystem::path& path,
                             const std::function<void(const std::string& temporary)>& write);

// RunError as write_file_atomically's, where it already shows that it would be thrown: before work
// that would be lost.
void check_can_write(const std::filesystem::path& path);

// What a name leads to: symbolic links followed as far as they lead, so that two names of one file
// are equal. It need not be there.
std::filesystem::path file_behind(const std::filesystem::path& path);

}  // namespace parplan
