// Preloaded into a run (LD_PRELOAD): counts the calls that change files under KILL_FOLDER, and
// kills the process with SIGKILL at call number KILL_AT (from 1; 0: never), in the way KILL_HOW
// says: before the call, after it, or within it, where it writes. With KILL_RANK, only the process
// with that RANK counts and dies. KILL_RECORD is a file that gets a line for each checkpoint that
// is about to receive or lose its final name, for each that has, for the kind of call at which the
// process was killed, and for the number of calls where it was not.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

namespace {

std::atomic<long> calls = 0;

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

template <class Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

bool is_inside(std::string_view path) {
  static const std::string folder = variable("KILL_FOLDER") + '/';
  return folder.size() > 1 && path.starts_with(folder);
}

bool is_inside(int descriptor) {
  char link[64], path[4096];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  const ssize_t length = readlink(link, path, sizeof path);
  return length > 0 && is_inside(std::string_view(path, static_cast<std::size_t>(length)));
}

void record(const std::string& line) {
  static const auto open_file = next<int (*)(const char*, int, ...)>("open");
  static const int file = open_file(variable("KILL_RECORD").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  static const auto write_line = next<ssize_t (*)(int, const void*, std::size_t)>("write");
  const std::string text = line + '\n';
  if (write_line(file, text.data(), text.size()) < 0) std::abort();
}

bool counts_here() {
  static const bool counts = variable("KILL_RANK").empty() || variable("KILL_RANK") == variable("RANK");
  return counts;
}

// Whether this is the call at which the process dies in this way; if so it does not return, but for
// `within`, where the caller does part of the call first.
struct Counted {
  const char* what;
  bool dies;
  explicit Counted(const char* name) : what(name) {
    static const long at = std::atol(variable("KILL_AT").c_str());
    dies = counts_here() && ++calls == at;
  }
  static std::string how() { return variable("KILL_HOW"); }
  void die() const {
    record(std::string("killed ") + what);
    kill(getpid(), SIGKILL);
    pause();
  }
  void before() const {
    if (dies && how() == "before") die();
  }
  bool within() const { return dies && how() == "within"; }
  void after() const {
    if (dies) die();
  }
};

// "step-00000012" at the end of a path; empty for any other name.
std::string checkpoint_name(std::string_view path) {
  const std::string_view name = path.substr(path.rfind('/') + 1);
  const bool whole = name.starts_with("step-") && name.find('.') == std::string_view::npos;
  return whole ? std::string(name) : "";
}

}  // namespace

extern "C" {

ssize_t write(int descriptor, const void* data, std::size_t bytes) {
  static const auto real = next<ssize_t (*)(int, const void*, std::size_t)>("write");
  if (!is_inside(descriptor)) return real(descriptor, data, bytes);
  const Counted call("write");
  call.before();
  if (call.within()) {
    const ssize_t ignored = real(descriptor, data, bytes / 2);
    (void)ignored;
    call.die();
  }
  const ssize_t result = real(descriptor, data, bytes);
  call.after();
  return result;
}

ssize_t writev(int descriptor, const iovec* parts, int count) {
  static const auto real = next<ssize_t (*)(int, const iovec*, int)>("writev");
  if (!is_inside(descriptor)) return real(descriptor, parts, count);
  const Counted call("write");
  call.before();
  const ssize_t result = real(descriptor, parts, count);
  call.after();
  return result;
}

int fsync(int descriptor) {
  static const auto real = next<int (*)(int)>("fsync");
  if (!is_inside(descriptor)) return real(descriptor);
  const Counted call("fsync");
  call.before();
  const int result = real(descriptor);
  call.after();
  return result;
}

int open(const char* path, int flags, ...) {
  static const auto real = next<int (*)(const char*, int, ...)>("open");
  mode_t mode = 0;
  if ((flags & O_CREAT) != 0) {
    va_list arguments;
    va_start(arguments, flags);
    mode = va_arg(arguments, mode_t);
    va_end(arguments);
  }
  if ((flags & O_CREAT) == 0 || !is_inside(path)) return real(path, flags, mode);
  const Counted call("open");
  call.before();
  const int result = real(path, flags, mode);
  call.after();
  return result;
}

int mkdir(const char* path, mode_t mode) {
  static const auto real = next<int (*)(const char*, mode_t)>("mkdir");
  if (!is_inside(path)) return real(path, mode);
  const Counted call("mkdir");
  call.before();
  const int result = real(path, mode);
  call.after();
  return result;
}

int rename(const char* from, const char* to) {
  static const auto real = next<int (*)(const char*, const char*)>("rename");
  if (!is_inside(from)) return real(from, to);
  const Counted call("rename");
  call.before();
  if (!checkpoint_name(to).empty()) record("begins " + checkpoint_name(to));
  if (!checkpoint_name(from).empty()) record("begins " + checkpoint_name(from));
  const int result = real(from, to);
  if (result == 0 && !checkpoint_name(to).empty()) record("whole " + checkpoint_name(to));
  if (result == 0 && !checkpoint_name(from).empty()) record("removed " + checkpoint_name(from));
  call.after();
  return result;
}

int unlinkat(int folder, const char* path, int flags) {
  static const auto real = next<int (*)(int, const char*, int)>("unlinkat");
  if (!is_inside(folder) && !is_inside(path)) return real(folder, path, flags);
  const Counted call("unlink");
  call.before();
  const int result = real(folder, path, flags);
  call.after();
  return result;
}

}  // extern "C"

namespace {

// At the end of a life that was not cut short.
struct CountAtEnd {
  ~CountAtEnd() {
    if (counts_here()) record("calls " + std::to_string(calls));
  }
};
const CountAtEnd count_at_end;

}  // namespace
