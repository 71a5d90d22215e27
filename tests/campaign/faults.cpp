// Preloaded into one process of a job (LD_PRELOAD), makes the system refuse something once it has
// been asked for it often enough: PARPLAN_FAULT is "thread N" (the Nth thread cannot be created and
// no later one) or "memory N" (neither the Nth request of memory by `new` nor any of the next 50).
// With PARPLAN_FAULTY_RANK only the process with that RANK.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

long number_of(const char* kind) {
  const char* fault = std::getenv("PARPLAN_FAULT");
  const char* faulty = std::getenv("PARPLAN_FAULTY_RANK");
  const char* rank = std::getenv("RANK");
  if (faulty != nullptr && (rank == nullptr || std::strcmp(rank, faulty) != 0)) return 0;
  const std::size_t length = std::strlen(kind);
  if (fault == nullptr || std::strncmp(fault, kind, length) != 0) return 0;
  return std::atol(fault + length);
}

std::atomic<long> threads{0};
std::atomic<long> requests{0};

}  // namespace

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                              void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  static const long fails = number_of("thread ");
  if (fails > 0 && ++threads >= fails) return EAGAIN;
  return create(thread, attributes, start, argument);
}

void* operator new(std::size_t bytes) {
  static const long fails = number_of("memory ");
  if (fails > 0) {
    const long number = ++requests;
    if (number >= fails && number < fails + 50) throw std::bad_alloc();
  }
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
