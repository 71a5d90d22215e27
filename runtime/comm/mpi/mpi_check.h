#pragma once

namespace parplan {

// RunError with MPI's text for `code`, unless it is MPI_SUCCESS.
void check_mpi(int code, const char* call);

}  // namespace parplan

#define PARPLAN_MPI(call) ::parplan::check_mpi((call), #call)
