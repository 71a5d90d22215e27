#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace parplan {

// The whole file. ConfigError names the path and the system's reason when it cannot be read.
std::string read_file(const std::filesystem::path& path);

// Writes to a temporary name in the same folder, then renames: readers see the old file or the new one,
// never half of it. RunError names the path and the system's reason.
void write_file_atomically(const std::filesystem::path& path, std::string_view text);

// The same for libraries that write files themselves: `write` is given the temporary name, whose file is there and empty.
void write_through_temporary(const std::filesystem::path& path, const std::function<void(const std::string& temporary)>& write);

}  // namespace parplan
