#pragma once

#include <memory>

#include "runtime/device/cpu/host_reduction.h"
#include "runtime/launch/rendezvous.h"

namespace parplan {

// What the main program provides to the MPI plugin, which has no kernels.
struct MpiHost {
  // The main program's (write_identity), which must be the plugin's own; valid during the call.
  const char* build = nullptr;
  InOrder sum = nullptr;
  InOrder max = nullptr;
};

// The export of libparplan_mpi.so: initialises MPI and returns the job to which the process
// belongs, or null when the plugin is of another build. Once per process: MPI cannot be initialised
// again after its rendezvous is gone (RunError).
using MakeMpiRendezvous = Rendezvous* (*)(const MpiHost& host);
inline constexpr const char* make_mpi_rendezvous_symbol = "parplan_make_mpi_rendezvous";
inline constexpr const char* mpi_library = "libparplan_mpi.so";

}  // namespace parplan
