#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include "cli/command_line.h"
#include "planner/base/allocated.h"

namespace {

// A closed descriptor (`>&-`) would be reused for the next file, and messages would go into that
// file. Opening it in the wrong direction gives the same error as a closed one.
void occupy_closed_descriptors() {
  constexpr std::array ways = {O_WRONLY, O_RDONLY, O_RDONLY};  // of standard input, output and error
  for (int descriptor = 0; descriptor < static_cast<int>(ways.size()); ++descriptor)
    if (fcntl(descriptor, F_GETFD) == -1 && errno == EBADF) [[maybe_unused]]
      const int opened = open("/dev/null", ways[descriptor]);
}

bool main_has_begun = false;
std::terminate_handler others_end = nullptr;

[[noreturn]] void end_without_memory() {
  constexpr std::string_view text = "error: out of memory\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
  std::_Exit(1);
}

// Where not even an exception has memory, none is thrown that could be caught.
[[noreturn]] void end() {
  constexpr std::size_t bytes_of_an_exception = 4096;
  if (std::current_exception() == nullptr) {
    void* const some = std::malloc(bytes_of_an_exception);
    if (some == nullptr) end_without_memory();
    std::free(some);
  }
  others_end();
  std::abort();
}

}  // namespace

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define PARPLAN_SANITIZED
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define PARPLAN_SANITIZED
#endif

// Sanitizers have their own, which belongs to their delete.
#ifndef PARPLAN_SANITIZED
// That of the system's library, or of one that was loaded before it, with the size in what it
// throws. The other forms of new end here, too.
void* operator new(std::size_t bytes) {
  using New = void* (*)(std::size_t);
  static const auto next = reinterpret_cast<New>(dlsym(RTLD_NEXT, "_Znwm"));
  if (next == nullptr || !main_has_begun) {  // the library is a part of the program, or sets itself up
    if (void* const memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
    if (!main_has_begun) end_without_memory();
    throw parplan::RefusedAllocation(bytes);
  }
  try {
    return next(bytes);
  } catch (const std::bad_alloc&) {
    throw parplan::RefusedAllocation(bytes);
  }
}
#endif

int main(int count, char** words) {
  main_has_begun = true;
  others_end = std::set_terminate(end);
  occupy_closed_descriptors();
  std::signal(SIGXFSZ, SIG_IGN);  // so that a write beyond `ulimit -f` fails, and says so
  return parplan::run_command_line(std::vector<std::string>(words + (count > 0 ? 1 : 0), words + count), std::cout,
                                   std::cerr);
}
