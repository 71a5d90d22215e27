#include "tests/cuda_emulator/symbols.h"

#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

namespace emulator {

std::string symbol_at(const void* address) {
  Dl_info info{};
  if (dladdr(address, &info) != 0 && info.dli_sname != nullptr && info.dli_saddr == address) {
    int status = 0;
    char* readable = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
    std::string name = status == 0 ? readable : info.dli_sname;
    std::free(readable);
    return name;
  }
  char text[32];
  std::snprintf(text, sizeof(text), "at %p", address);
  return text;
}

}  // namespace emulator
