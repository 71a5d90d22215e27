#include "tests/cuda_emulator/symbols.h"

#include <cxxabi.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>

namespace emulator {
namespace {

// The symbols of a program or a shared library, read from its file (System V ABI, "Symbol Table").
struct ProgramFile {
  std::map<std::uintptr_t, std::string> functions;                          // by offset from where it is loaded
  std::vector<std::pair<std::string, Kernel::Variable>> thread_variables;
};

void read_symbols(const char* path, ProgramFile& file) {
  const int descriptor = open(path, O_RDONLY);
  struct stat status {};
  if (descriptor < 0 || fstat(descriptor, &status) != 0) return;
  const auto bytes = static_cast<std::size_t>(status.st_size);
  void* mapped = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, descriptor, 0);
  close(descriptor);
  if (mapped == MAP_FAILED) return;
  const char* begin = static_cast<const char*>(mapped);
  const auto* header = reinterpret_cast<const ElfW(Ehdr)*>(begin);
  const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(begin + header->e_shoff);
  for (int s = 0; s < header->e_shnum; ++s) {
    if (sections[s].sh_type != SHT_SYMTAB) continue;
    const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(begin + sections[s].sh_offset);
    const char* names = begin + sections[sections[s].sh_link].sh_offset;
    for (std::size_t i = 0; i < sections[s].sh_size / sizeof(ElfW(Sym)); ++i) {
      const char* name = names + symbols[i].st_name;
      const int type = symbols[i].st_info & 0xf;
      if (symbols[i].st_shndx == SHN_UNDEF) continue;
      if (type == STT_FUNC) file.functions.emplace(symbols[i].st_value, name);
      if (type == STT_TLS) file.thread_variables.push_back({name, {symbols[i].st_value, symbols[i].st_size}});
    }
  }
  munmap(mapped, bytes);
}

struct Search {
  std::uintptr_t address;
  std::uintptr_t base = 0;
  std::string path;
  void* thread_variables = nullptr;
  bool found = false;
};

int look(dl_phdr_info* info, std::size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& part = info->dlpi_phdr[i];
    const std::uintptr_t begin = info->dlpi_addr + part.p_vaddr;
    if (part.p_type != PT_LOAD || search.address < begin || search.address >= begin + part.p_memsz) continue;
    search.base = info->dlpi_addr;
    search.path = info->dlpi_name == nullptr || *info->dlpi_name == '\0' ? "/proc/self/exe" : info->dlpi_name;
    search.thread_variables = info->dlpi_tls_data;
    search.found = true;
    return 1;
  }
  return 0;
}

Search program_of(const void* address) {
  Search search{.address = reinterpret_cast<std::uintptr_t>(address), .path = {}};
  dl_iterate_phdr(look, &search);
  return search;
}

std::string readable(const std::string& mangled) {
  int status = 0;
  char* text = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  std::string name = status == 0 ? text : mangled;
  std::free(text);
  return name;
}

}  // namespace

const Kernel& kernel_at(const void* address) {
  static std::mutex mutex;
  static std::map<std::uintptr_t, ProgramFile> files;  // by where they are loaded
  static std::map<const void*, std::unique_ptr<Kernel>> kernels;
  const std::lock_guard lock(mutex);
  std::unique_ptr<Kernel>& kernel = kernels[address];
  if (kernel != nullptr) return *kernel;
  kernel = std::make_unique<Kernel>();
  char text[32];
  std::snprintf(text, sizeof(text), "at %p", address);
  kernel->name = text;
  const Search search = program_of(address);
  if (!search.found) return *kernel;
  kernel->program = address;
  const auto [place, is_new] = files.try_emplace(search.base);
  if (is_new) read_symbols(search.path.c_str(), place->second);
  const auto function = place->second.functions.find(search.address - search.base);
  if (function == place->second.functions.end()) return *kernel;
  kernel->name = readable(function->second);
  // Variables within a function are named after it (Itanium C++ ABI, "Scope Encoding"): _ZZ
  // <function without _Z> E <variable>.
  if (!function->second.starts_with("_Z")) return *kernel;
  const std::string prefix = "_ZZ" + function->second.substr(2) + "E";
  for (const auto& [name, variable] : place->second.thread_variables) {
    if (!name.starts_with(prefix)) continue;
    kernel->shared.push_back(variable);
    kernel->shared_bytes += variable.bytes;
  }
  return *kernel;
}

std::byte* thread_variables(const Kernel& kernel) {
  return kernel.program == nullptr ? nullptr : static_cast<std::byte*>(program_of(kernel.program).thread_variables);
}

}  // namespace emulator
