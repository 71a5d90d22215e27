#include "runtime/checkpoint/checkpoint_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/base/file.h"
#include "runtime/checkpoint/open_file.h"

namespace parplan {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view prefix = "step-";
constexpr std::string_view incomplete = ".incomplete";
constexpr std::string_view removed = ".removed";
constexpr const char* claim_name = ".in-use";

// The step of "step-00000100", or of the same with an ending.
std::optional<std::int64_t> step_of(std::string_view name, std::string_view ending) {
  if (!name.starts_with(prefix) || !name.ends_with(ending)) return std::nullopt;
  name.remove_prefix(prefix.size());
  name.remove_suffix(ending.size());
  std::int64_t step = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  const bool whole = error == std::errc() && end == name.data() + name.size() && step >= 0;
  return whole ? std::optional(step) : std::nullopt;
}

[[noreturn]] void fail(const char* what, const std::string& path, const std::string& reason) {
  throw RunError(fmt::format("cannot {} '{}': {}", what, path, reason));
}

void rename_folder(const std::string& from, const std::string& to) {
  if (rename(from.c_str(), to.c_str()) != 0) fail("rename", from, std::strerror(errno));
}

void remove_folder(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) fail("remove", path, error.message());
}

}  // namespace

std::string path_of_checkpoint(const std::string& folder, std::int64_t step) {
  return fmt::format("{}/{}{:08}", folder, prefix, step);
}
std::string path_of_incomplete(const std::string& folder, std::int64_t step) {
  return fmt::format("{}{}", path_of_checkpoint(folder, step), incomplete);
}

std::vector<std::int64_t> complete_checkpoints(const std::string& folder) {
  std::vector<std::int64_t> steps;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error))
    if (const auto step = step_of(entry->path().filename().string(), ""))
      if (entry->path() == fs::path(path_of_checkpoint(folder, *step))) steps.push_back(*step);
  if (error && error != std::errc::no_such_file_or_directory)
    throw ConfigError(fmt::format("cannot read the folder '{}': {}", folder, error.message()));
  std::ranges::sort(steps);
  return steps;
}

void make_folder(const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw ConfigError(fmt::format("cannot make the folder '{}': {}", folder, error.message()));
}

void remove_leftovers(const std::string& folder) {
  std::error_code error;
  std::vector<fs::path> left;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (step_of(name, incomplete) || step_of(name, removed)) left.push_back(entry->path());
  }
  for (const fs::path& path : left) fs::remove_all(path, error);
}

void begin_checkpoint(const std::string& folder, std::int64_t step) {
  const std::string path = path_of_incomplete(folder, step);
  remove_folder(path);
  std::error_code error;
  fs::create_directory(path, error);
  if (error) fail("make", path, error.message());
}

void complete_checkpoint(const std::string& folder, const CheckpointIndex& index) {
  const std::string path = path_of_incomplete(folder, index.step);
  NewFile file(path + '/' + index_name);
  const std::string text = write_index(index);
  file.write(std::as_bytes(std::span(text)));
  file.close();
  synchronize_folder(path);
  rename_folder(path, path_of_checkpoint(folder, index.step));
  synchronize_folder(folder);
}

void abandon_checkpoint(const std::string& folder, std::int64_t step) noexcept {
  std::error_code ignored;
  fs::remove_all(path_of_incomplete(folder, step), ignored);
}

void keep_newest(const std::string& folder, std::size_t most) {
  std::vector<std::int64_t> steps = complete_checkpoints(folder);
  for (std::size_t i = 0; i + most < steps.size(); ++i) {
    const std::string path = path_of_checkpoint(folder, steps[i]);
    const std::string leaving = fmt::format("{}{}", path, removed);
    rename_folder(path, leaving);
    remove_folder(leaving);
  }
}

FolderClaim::FolderClaim(const std::string& folder, std::string_view text) {
  const std::string path = folder + '/' + claim_name;
  descriptor_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (descriptor_ < 0)
    throw ConfigError(fmt::format("cannot write into the folder '{}': {}", folder, std::strerror(errno)));
  const auto refuse = [&](const std::string& message) {
    close(descriptor_);
    throw ConfigError(message);
  };
  if (flock(descriptor_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
    refuse(fmt::format("another run writes its checkpoints to '{}'; give this one a folder of its own", folder));
  if (ftruncate(descriptor_, 0) != 0 ||
      pwrite(descriptor_, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()) || fsync(descriptor_) != 0)
    refuse(fmt::format("cannot write '{}': {}", path, std::strerror(errno)));
}

FolderClaim::~FolderClaim() {
  close(descriptor_);
}

bool sees_claim(const std::string& folder, std::string_view text) {
  try {
    return read_file(folder + '/' + claim_name) == text;
  } catch (const ConfigError&) {
    return false;
  }
}

}  // namespace parplan
