#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace parplan {

// A regular file that is open for reading. Several threads may read at once.
class OpenFile {
 public:
  // ConfigError names the path and the system's reason, or says that it is no regular file.
  explicit OpenFile(const std::string& path);
  ~OpenFile();
  OpenFile(OpenFile&& other) noexcept;
  OpenFile& operator=(OpenFile&& other) = delete;

  std::int64_t size() const { return size_; }
  // Reads `bytes` bytes from `offset` on; ConfigError where the file has not that many.
  void read(std::int64_t offset, void* to, std::int64_t bytes) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  std::int64_t size_ = 0;
};

// A new file that is written from its beginning to its end. RunError names the path and the reason.
class NewFile {
 public:
  explicit NewFile(const std::string& path);  // which must not exist yet
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void close();  // once the device holds every byte (fsync)

 private:
  std::string path_;
  int descriptor_ = -1;
};

// The device holds the names in a folder as they are now. RunError names the path and the reason.
void synchronize_folder(const std::string& path);

}  // namespace parplan
