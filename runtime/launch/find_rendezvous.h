#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "runtime/launch/rendezvous.h"

namespace parplan {

// The value of an environment variable, or null.
using Environment = std::function<const char*(const char* name)>;
Environment process_environment();

enum class StartedBy { itself, mpi, torchrun_variables };

// This process's place in a job according to the environment.
struct ProcessPlace {
  StartedBy started_by = StartedBy::itself;
  int process = 0;
  std::optional<int> processes;  // absent with PMIx alone: MPI knows it
  bool one_machine = false;      // all processes are known to be on this one
  // From torchrun's variables; MPI finds its own.
  int local_process = 0;
  int local_processes = 1;
  std::string address;  // the address where process 0 listens
  int port = 0;
  std::string token = {};  // of the job; may be empty
  bool operator==(const ProcessPlace&) const = default;
};

// The variable that keeps processes of different jobs apart: run_children sets it.
inline constexpr const char* token_variable = "PARPLAN_JOB_TOKEN";

// Looks for the variables of MPI's starters (mpirun, mpiexec, srun --mpi=pmix), then for torchrun's
// (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Throws ConfigError
// where values make no sense, where variables of two starters disagree, and where srun started
// several processes that could not find each other.
ProcessPlace read_process_place(const Environment& environment);

// How long processes on several machines wait for each other to start.
inline constexpr std::chrono::seconds default_patience(60);
// How long those of this job do. On one machine they start together: they are lost as soon as a
// running one would be.
std::chrono::milliseconds patience_to_meet(const ProcessPlace& place, std::chrono::milliseconds silence);

// Which processes of a job that PMIx started on this machine (mpirun of Open MPI) are stopped or
// not there, as the system shows them: "; rank 1 (process 4711) is stopped; rank 3 is not there".
// Empty where nothing is known.
std::string stragglers(const ProcessPlace& place, const Environment& environment = process_environment());

// Joins the job that the environment describes, or `alone`. Throws ConfigError as above and where
// MPI is asked for and libparplan_mpi.so is missing; RunError where processes are missing.
// `silence`: as in TcpPlace.
std::unique_ptr<Rendezvous> find_rendezvous(const Environment& environment = process_environment(),
                                            std::chrono::milliseconds patience = default_patience,
                                            std::chrono::milliseconds silence = std::chrono::seconds(6));

}  // namespace parplan
