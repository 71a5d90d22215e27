#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace parplan {

// A regular file in memory, for reading alone. Another program may cut it off meanwhile: whoever
// then reads beyond its end gets SIGBUS from the system, at which this process says which file it
// was and ends with exit code 1.
class MappedFile {
 public:
  // ConfigError names the path and the system's reason, or says that it is no regular file. A file
  // without a byte has none here, either.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }
  // RunError where the file has been cut off since: the rest of its last page reads as zeros.
  void check_is_whole() const;

 private:
  std::string path_;
  std::string cut_off_;  // what is said then
  std::span<const std::byte> bytes_;
  unsigned long device_ = 0, node_ = 0;  // of the file: another one may get its name
  std::size_t place_ = 0;                // in the table of all mappings
};

}  // namespace parplan
