#include "runtime/launch/find_rendezvous.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string_view>
#include <system_error>

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
  if (place.started_by == StartedBy::mpi) {
    for (const char* name : {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"})
      if (const char* local = value_of(environment, name); local != nullptr && place.processes)
        place.one_machine = number_in(local, name, 1, most_processes) == *place.processes;
    return place;
  }

  place.local_processes =
      needed(environment, "LOCAL_WORLD_SIZE", "the number of processes on this machine", 1, *place.processes);
  place.local_process = needed(environment, "LOCAL_RANK", "the number of this process on its machine, from 0", 0,
                               place.local_processes - 1);
  place.one_machine = place.local_processes == *place.processes;
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

std::chrono::milliseconds patience_to_meet(const ProcessPlace& place, std::chrono::milliseconds silence) {
  return place.one_machine ? std::min<std::chrono::milliseconds>(silence, default_patience) : default_patience;
}

std::string stragglers(const ProcessPlace& place, const Environment& environment) {
  const char* const job = value_of(environment, "PMIX_NAMESPACE");
  if (job == nullptr || !place.processes || !place.one_machine) return "";
  struct Found {
    std::string process;
    bool stopped = false;
  };
  std::map<int, Found> found;
  const std::string own = fmt::format("PMIX_NAMESPACE={}", job);
  constexpr std::string_view rank = "PMIX_RANK=";
  std::error_code gone;
  for (std::filesystem::directory_iterator entry("/proc", gone), end; !gone && entry != end; entry.increment(gone)) {
    const std::string process = entry->path().filename();
    if (process.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream variables(entry->path() / "environ");
    bool is_of_job = false;
    int number = -1;
    for (std::string variable; std::getline(variables, variable, '\0');) {
      if (variable == own) is_of_job = true;
      if (variable.starts_with(rank)) number = std::atoi(variable.c_str() + rank.size());
    }
    if (!is_of_job || number < 0) continue;
    // "4711 (name) T ...": the name may hold anything.
    std::ifstream file(entry->path() / "stat");
    std::string stat;
    std::getline(file, stat);
    const std::size_t state = stat.rfind(") ");
    const bool stopped = state != std::string::npos && stat.compare(state + 2, 1, "T") == 0;
    Found& known = found[number];
    if (known.process.empty() || stopped) known = {.process = process, .stopped = stopped};
  }
  std::string text;
  for (int number = 0; number < *place.processes; ++number) {
    const auto known = found.find(number);
    if (known == found.end()) text += fmt::format("; rank {} is not there", number);
    else if (known->second.stopped)
      text += fmt::format("; rank {} (process {}) is stopped", number, known->second.process);
  }
  return text;
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
