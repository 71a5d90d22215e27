#include "runtime/comm/mpi/mpi_check.h"

#include <mpi.h>

#include <string>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  std::string words(MPI_MAX_ERROR_STRING, '\0');
  int length = 0;
  if (MPI_Error_string(code, words.data(), &length) != MPI_SUCCESS) length = 0;
  words.resize(static_cast<std::size_t>(length));
  throw RunError(fmt::format("MPI: {} ({})", words, call));
}

}  // namespace parplan
