#include "runtime/checkpoint/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/base/text.h"

namespace parplan {
namespace {

// What a handler of signals may read: no lock, nothing that moves. A mapping for which there is no
// place is read like the others; only the message is missing.
struct Mapping {
  std::atomic<bool> taken{false};
  std::atomic<std::uintptr_t> begin{0};  // 0: none here
  std::atomic<std::uintptr_t> end{0};
  std::atomic<const char*> message{nullptr};
};
constexpr std::size_t most_mappings = 4096;
std::array<Mapping, most_mappings> mappings;
struct sigaction action_before {};

void say_which_file(int signal, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  for (const Mapping& mapping : mappings) {
    const std::uintptr_t begin = mapping.begin.load();
    if (begin == 0 || address < begin || address >= mapping.end.load()) continue;
    const char* const message = mapping.message.load();
    for (const char* const part : {"error: ", message, "\n"})
      [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, part, std::strlen(part));
    _exit(1);
  }
  // The access is repeated, under the action that was there before.
  sigaction(signal, &action_before, nullptr);
}

void handle_bus_errors() {
  static const bool once = [] {
    struct sigaction action {};
    action.sa_sigaction = say_which_file;
    action.sa_flags = SA_SIGINFO;
    sigemptyset(&action.sa_mask);
    return sigaction(SIGBUS, &action, &action_before) == 0;
  }();
  (void)once;
}

std::size_t note(std::span<const std::byte> bytes, const char* message) {
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data());
  for (std::size_t place = 0; place < most_mappings; ++place) {
    Mapping& mapping = mappings[place];
    if (mapping.taken.exchange(true)) continue;
    mapping.message = message;
    mapping.end = begin + bytes.size();
    mapping.begin = begin;
    return place;
  }
  return most_mappings;
}

void forget(std::size_t place) {
  if (place == most_mappings) return;
  mappings[place].begin = 0;
  mappings[place].taken = false;
}

}  // namespace

// Without O_NONBLOCK, opening a pipe waits for its writer.
MappedFile::MappedFile(const std::string& path)
    : path_(path),
      cut_off_(printable_line(fmt::format("cannot read '{}' any more: it was cut off while it was being read", path))) {
  const auto refuse = [&](const char* reason) { throw ConfigError(fmt::format("cannot read '{}': {}", path, reason)); };
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) refuse(std::strerror(errno));
  struct stat found {};
  const bool is_known = fstat(file, &found) == 0;
  int reason = errno;
  const bool is_file = is_known && S_ISREG(found.st_mode);
  const std::size_t size = is_file ? static_cast<std::size_t>(found.st_size) : 0;
  void* const mapped = size > 0 ? mmap(nullptr, size, PROT_READ, MAP_SHARED, file, 0) : nullptr;
  if (is_known) reason = errno;
  close(file);
  if (!is_known || mapped == MAP_FAILED) refuse(std::strerror(reason));
  if (!is_file) refuse("it is no regular file");
  bytes_ = {static_cast<const std::byte*>(mapped), size};
  device_ = static_cast<unsigned long>(found.st_dev);
  node_ = static_cast<unsigned long>(found.st_ino);
  handle_bus_errors();
  place_ = note(bytes_, cut_off_.c_str());
}

MappedFile::~MappedFile() {
  forget(place_);
  if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

void MappedFile::check_is_whole() const {
  struct stat found {};
  if (stat(path_.c_str(), &found) != 0) return;  // without a name, the file stays as long as it is mapped
  const bool is_same = static_cast<unsigned long>(found.st_dev) == device_ &&
                       static_cast<unsigned long>(found.st_ino) == node_;
  if (is_same && static_cast<std::size_t>(found.st_size) < bytes_.size()) throw RunError(cut_off_);
}

}  // namespace parplan
