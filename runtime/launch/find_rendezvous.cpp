#include "runtime/launch/find_rendezvous.h"

#include <array>
#include <charconv>
#include <cstdlib>
#include <string_view>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "runtime/launch/mpi_plugin_interface.h"
#include "runtime/launch/tcp_rendezvous.h"
#include "runtime/plugin/build_identity.h"
#include "runtime/plugin/open_plugin.h"

namespace parplan {
namespace {

// The variables with which a starter tells a process its place. The first row whose rank is set
// decides; the others must agree with it.
struct Starter {
  StartedBy kind{};
  const char* name;
  const char* rank;
  const char* size;  // null where only MPI knows it
};

constexpr std::array<Starter, 4> starters = {{
    {StartedBy::mpi, "mpirun of Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    {StartedBy::mpi, "PMI (mpiexec, srun --mpi=pmi2)", "PMI_RANK", "PMI_SIZE"},
    {StartedBy::mpi, "PMIx (srun --mpi=pmix)", "PMIX_RANK", nullptr},
    {StartedBy::torchrun_variables, "torchrun's variables", "RANK", "WORLD_SIZE"},
}};

constexpr int most_processes = 1 << 20;

// An unset variable and an empty one are the same.
const char* value_of(const Environment& environment, const char* name) {
  const char* value = environment(name);
  return value == nullptr || *value == '\0' ? nullptr : value;
}

// A whole number from `least` to `most`, or ConfigError.
int number_in(std::string_view text, const char* name, int least, int most) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least || value > most)
    throw ConfigError(
        fmt::format("the variable {} is '{}'; it is a whole number from {} to {}", name, text, least, most));
  return value;
}

int needed(const Environment& environment, const char* name, const char* what, int least, int most) {
  const char* value = value_of(environment, name);
  if (value == nullptr) throw ConfigError(fmt::format("RANK and WORLD_SIZE are set, {} is not: it is {}", name, what));
  return number_in(value, name, least, most);
}

struct Announced {
  const Starter* starter = nullptr;
  int rank = 0;
  std::optional<int> size;
};

std::optional<Announced> announced_by(const Starter& starter, const Environment& environment) {
  const char* rank = value_of(environment, starter.rank);
  const char* size = starter.size == nullptr ? nullptr : value_of(environment, starter.size);
  if (rank == nullptr && size == nullptr) return std::nullopt;
  if (rank == nullptr)
    throw ConfigError(fmt::format("the variable {} is set, {} is not ({})", starter.size, starter.rank, starter.name));
  if (starter.size == nullptr)
    return Announced{.starter = &starter, .rank = number_in(rank, starter.rank, 0, most_processes - 1), .size = {}};
  if (size == nullptr)
    throw ConfigError(fmt::format("the variable {} is set, {} is not ({})", starter.rank, starter.size, starter.name));
  const int processes = number_in(size, starter.size, 1, most_processes);
  return Announced{.starter = &starter, .rank = number_in(rank, starter.rank, 0, processes - 1), .size = processes};
}

std::string described(const Announced& announced) {
  const std::string size = announced.size ? fmt::format(", {} = {}", announced.starter->size, *announced.size) : "";
  return fmt::format("{} = {}{} ({})", announced.starter->rank, announced.rank, size, announced.starter->name);
}

// srun without MPI's help starts copies that do not know about each other: each would train alone.
void refuse_lonely_tasks(const Environment& environment) {
  const char* tasks = value_of(environment, "SLURM_STEP_NUM_TASKS");
  if (tasks == nullptr || value_of(environment, "SLURM_STEP_ID") == nullptr || std::string_view(tasks) == "1") return;
  throw ConfigError(fmt::format(
      "srun started {} processes and gave them no means to find each other: say srun --mpi=pmix (srun --mpi=list "
      "shows what there is), or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
      tasks));
}

std::unique_ptr<Rendezvous> join_by_mpi() {
  const OpenedPlugin plugin = open_plugin(mpi_library, make_mpi_rendezvous_symbol);
  if (plugin.function == nullptr)
    throw ConfigError(fmt::format("MPI started this process, whose MPI plugin is missing: {}", plugin.missing));
  const std::string build = write_identity(build_identity());
  const MpiHost host{.build = build.c_str(), .sum = host_sum_in_order(), .max = host_max_in_order()};
  Rendezvous* made = reinterpret_cast<MakeMpiRendezvous>(plugin.function)(host);
  if (made == nullptr)
    throw ConfigError(fmt::format("{} is not of this program's build ({}, sources {}): install both from one build",
                                  mpi_library, build_identity().version, build_identity().sources));
  return std::unique_ptr<Rendezvous>(made);
}

}  // namespace

Environment process_environment() {
  return [](const char* name) -> const char* { return std::getenv(name); };
}

ProcessPlace read_process_place(const Environment& environment) {
  std::optional<Announced> first;
  for (const Starter& starter : starters) {
    const std::optional<Announced> announced = announced_by(starter, environment);
    if (!announced) continue;
    if (!first) first = announced;
    if (announced->rank != first->rank || (announced->size && first->size && *announced->size != *first->size))
      throw ConfigError(
          fmt::format("the variables of two starters disagree: {} and {}; unset those that do not belong to this job",
                      described(*first), described(*announced)));
    if (!first->size) first->size = announced->size;
  }
  if (!first) {
    refuse_lonely_tasks(environment);
    return {};
  }
  ProcessPlace place;
  place.started_by = first->starter->kind;
  place.process = first->rank;
  place.processes = first->size;
  if (place.started_by == StartedBy::mpi) return place;

  place.local_processes =
      needed(environment, "LOCAL_WORLD_SIZE", "the number of processes on this machine", 1, *place.processes);
  place.local_process = needed(environment, "LOCAL_RANK", "the number of this process on its machine, from 0", 0,
                               place.local_processes - 1);
  if (*place.processes == 1) return place;
  const char* address = value_of(environment, "MASTER_ADDR");
  if (address == nullptr)
    throw ConfigError(
        "RANK and WORLD_SIZE are set, MASTER_ADDR is not: it is the name or address of the machine of process 0");
  place.address = address;
  place.port = needed(environment, "MASTER_PORT", "a free port of the machine of process 0", 1, 65535);
  const char* token = value_of(environment, token_variable);
  place.token = token == nullptr ? "" : token;
  // In that case torchrun's own store listens at MASTER_PORT (PyTorch 2.4 and later,
  // torch/distributed/elastic; pytorch/pytorch#125743).
  const char* taken = value_of(environment, "TORCHELASTIC_USE_AGENT_STORE");
  if (taken != nullptr && std::string_view(taken) == "True") place.port = place.port == 65535 ? 65534 : place.port + 1;
  return place;
}

std::unique_ptr<Rendezvous> find_rendezvous(const Environment& environment, std::chrono::milliseconds patience,
                                            std::chrono::milliseconds silence) {
  const ProcessPlace place = read_process_place(environment);
  if (place.started_by == StartedBy::itself || place.processes == 1) return alone();
  if (place.started_by == StartedBy::mpi) {
    std::unique_ptr<Rendezvous> rendezvous = join_by_mpi();
    if (rendezvous->process() != place.process || (place.processes && rendezvous->processes() != *place.processes))
      throw ConfigError(fmt::format(
          "MPI says process {} of {}, the environment process {}{}: libparplan_mpi.so was built for another MPI "
          "than the one that started this process",
          rendezvous->process(), rendezvous->processes(), place.process,
          place.processes ? fmt::format(" of {}", *place.processes) : ""));
    return rendezvous;
  }
  return tcp_rendezvous({.process = place.process,
                         .processes = *place.processes,
                         .local_process = place.local_process,
                         .local_processes = place.local_processes,
                         .address = place.address,
                         .port = place.port,
                         .token = place.token,
                         .build = write_identity(build_identity()),
                         .silence = silence},
                        patience);
}

}  // namespace parplan
