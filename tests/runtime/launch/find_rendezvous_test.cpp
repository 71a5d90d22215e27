#include "runtime/launch/find_rendezvous.h"

#include <doctest/doctest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <map>

#include <fmt/format.h>

#include "planner/base/error.h"

using namespace parplan;

namespace {

using Variables = std::map<std::string, std::string>;

Environment environment(const Variables& variables) {
  return [&variables](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
}

// torchrun's variables of process 2 of 4, on the second of two machines, with changes; an empty
// value unsets a variable.
Variables torchrun(const Variables& changes = {}) {
  Variables variables = {{"RANK", "2"},       {"WORLD_SIZE", "4"},     {"LOCAL_RANK", "0"},
                         {"LOCAL_WORLD_SIZE", "2"}, {"MASTER_ADDR", "node1"}, {"MASTER_PORT", "29500"}};
  for (const auto& [name, value] : changes) variables[name] = value;
  return variables;
}

ProcessPlace by_mpi(int process, std::optional<int> processes) {
  ProcessPlace place;
  place.started_by = StartedBy::mpi;
  place.process = process;
  place.processes = processes;
  return place;
}

}  // namespace

TEST_CASE("a process finds its place in the variables of whoever started it") {
  const ProcessPlace third = {.started_by = StartedBy::torchrun_variables,
                              .process = 2,
                              .processes = 4,
                              .local_process = 0,
                              .local_processes = 2,
                              .address = "node1",
                              .port = 29500};
  ProcessPlace beside_the_agents_store = third;
  beside_the_agents_store.port = 29501;
  ProcessPlace with_token = third;
  with_token.token = "this job's";
  ProcessPlace only_one;
  only_one.one_machine = true;
  only_one.started_by = StartedBy::torchrun_variables;
  only_one.processes = 1;
  struct Row {
    Variables variables;
    ProcessPlace wanted;
  };
  const Row rows[] = {
      {{}, {}},
      {torchrun(), third},
      {torchrun({{"TORCHELASTIC_USE_AGENT_STORE", "False"}}), third},
      {torchrun({{"TORCHELASTIC_USE_AGENT_STORE", "True"}}), beside_the_agents_store},
      {torchrun({{"PARPLAN_JOB_TOKEN", "this job's"}}), with_token},
      // One process needs no address.
      {{{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}}, only_one},
      {{{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "3"}, {"PMIX_RANK", "1"}}, by_mpi(1, 3)},
      {{{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}, by_mpi(0, 2)},
      {{{"PMIX_RANK", "4"}}, by_mpi(4, std::nullopt)},
      // Where both are set and agree, MPI carries the messages.
      {torchrun({{"OMPI_COMM_WORLD_RANK", "2"}, {"OMPI_COMM_WORLD_SIZE", "4"}}), by_mpi(2, 4)},
      {torchrun({{"PMIX_RANK", "2"}}), by_mpi(2, 4)},
      // Inside a job of Slurm, but not started by srun, or started alone.
      {{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}}, {}},
      {{{"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}}, {}},
  };
  for (const Row& row : rows) {
    CAPTURE(row.variables.size());
    CHECK(read_process_place(environment(row.variables)) == row.wanted);
  }
}

TEST_CASE("processes of one machine wait for each other no longer than for one that is lost") {
  const auto patience = [](const Variables& variables) {
    return patience_to_meet(read_process_place(environment(variables)), std::chrono::seconds(5));
  };
  const Variables mpirun = {{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "4"}};
  const auto with = [](Variables variables, const std::string& name, const std::string& value) {
    variables[name] = value;
    return variables;
  };
  CHECK(patience(torchrun()) == default_patience);  // two of four
  CHECK(patience(torchrun({{"LOCAL_WORLD_SIZE", "4"}})) == std::chrono::seconds(5));
  CHECK(patience(mpirun) == default_patience);
  CHECK(patience(with(mpirun, "OMPI_COMM_WORLD_LOCAL_SIZE", "2")) == default_patience);
  CHECK(patience(with(mpirun, "OMPI_COMM_WORLD_LOCAL_SIZE", "4")) == std::chrono::seconds(5));
  CHECK(patience(with({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}, "MPI_LOCALNRANKS", "2")) == std::chrono::seconds(5));
  CHECK(patience({{"PMIX_RANK", "4"}}) == default_patience);
}

TEST_CASE("processes of a job that are stopped or not there are found") {
  const std::string job = fmt::format("parplan-test-{}", getpid());
  const auto start = [&](int rank, const char* script) {
    const pid_t child = fork();
    if (child == 0) {
      setenv("PMIX_NAMESPACE", job.c_str(), 1);
      setenv("PMIX_RANK", std::to_string(rank).c_str(), 1);
      execl("/bin/sh", "sh", "-c", script, nullptr);
      _exit(127);
    }
    return child;
  };
  const pid_t stopped = start(1, "kill -STOP $$");
  int status = 0;
  REQUIRE(waitpid(stopped, &status, WUNTRACED) == stopped);
  REQUIRE(WIFSTOPPED(status));
  const auto stragglers_among = [&](const std::string& local) {
    const Variables variables = {{"OMPI_COMM_WORLD_RANK", "2"},       {"OMPI_COMM_WORLD_SIZE", "3"},
                                 {"OMPI_COMM_WORLD_LOCAL_SIZE", local}, {"PMIX_NAMESPACE", job}};
    return stragglers(read_process_place(environment(variables)), environment(variables));
  };
  CHECK(stragglers_among("3") ==
        fmt::format("; rank 0 is not there; rank 1 (process {}) is stopped; rank 2 is not there", stopped));
  CHECK(stragglers_among("2") == "");  // the others may be on another machine
  kill(stopped, SIGKILL);
  waitpid(stopped, &status, 0);
}

TEST_CASE("variables that make no sense are refused with their names and values") {
  struct Row {
    Variables variables;
    std::string message;
  };
  const Row rows[] = {
      {torchrun({{"WORLD_SIZE", ""}}), "the variable RANK is set, WORLD_SIZE is not (torchrun's variables)"},
      {torchrun({{"RANK", ""}}), "the variable WORLD_SIZE is set, RANK is not (torchrun's variables)"},
      {torchrun({{"RANK", "4"}}), "the variable RANK is '4'; it is a whole number from 0 to 3"},
      {torchrun({{"RANK", "-1"}}), "the variable RANK is '-1'; it is a whole number from 0 to 3"},
      {torchrun({{"RANK", "two"}}), "the variable RANK is 'two'; it is a whole number from 0 to 3"},
      {torchrun({{"WORLD_SIZE", "0"}}), "the variable WORLD_SIZE is '0'; it is a whole number from 1 to 1048576"},
      {torchrun({{"WORLD_SIZE", "4 "}}), "the variable WORLD_SIZE is '4 '; it is a whole number from 1 to 1048576"},
      {torchrun({{"WORLD_SIZE", "99999999999"}}),
       "the variable WORLD_SIZE is '99999999999'; it is a whole number from 1 to 1048576"},
      {torchrun({{"LOCAL_RANK", ""}}),
       "RANK and WORLD_SIZE are set, LOCAL_RANK is not: it is the number of this process on its machine, from 0"},
      {torchrun({{"LOCAL_RANK", "2"}}), "the variable LOCAL_RANK is '2'; it is a whole number from 0 to 1"},
      {torchrun({{"LOCAL_WORLD_SIZE", ""}}),
       "RANK and WORLD_SIZE are set, LOCAL_WORLD_SIZE is not: it is the number of processes on this machine"},
      {torchrun({{"LOCAL_WORLD_SIZE", "5"}}), "the variable LOCAL_WORLD_SIZE is '5'; it is a whole number from 1 to 4"},
      {torchrun({{"MASTER_ADDR", ""}}),
       "RANK and WORLD_SIZE are set, MASTER_ADDR is not: it is the name or address of the machine of process 0"},
      {torchrun({{"MASTER_PORT", ""}}),
       "RANK and WORLD_SIZE are set, MASTER_PORT is not: it is a free port of the machine of process 0"},
      {torchrun({{"MASTER_PORT", "65536"}}),
       "the variable MASTER_PORT is '65536'; it is a whole number from 1 to 65535"},
      {{{"OMPI_COMM_WORLD_SIZE", "2"}},
       "the variable OMPI_COMM_WORLD_SIZE is set, OMPI_COMM_WORLD_RANK is not (mpirun of Open MPI)"},
      {torchrun({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}}),
       "the variables of two starters disagree: OMPI_COMM_WORLD_RANK = 0, OMPI_COMM_WORLD_SIZE = 2 (mpirun of Open "
       "MPI) and RANK = 2, WORLD_SIZE = 4 "
       "(torchrun's variables); unset those that do not belong to this job"},
      {torchrun({{"PMIX_RANK", "1"}}),
       "the variables of two starters disagree: PMIX_RANK = 1 (PMIx (srun --mpi=pmix)) and RANK = 2, WORLD_SIZE = 4 "
       "(torchrun's variables); unset "
       "those that do not belong to this job"},
      {{{"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "8"}},
       "srun started 8 processes and gave them no means to find each other: say srun --mpi=pmix (srun --mpi=list shows "
       "what there is), or set RANK, "
       "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"},
  };
  for (const Row& row : rows) {
    std::string message = "nothing was thrown";
    try {
      read_process_place(environment(row.variables));
    } catch (const ConfigError& error) {
      message = error.what();
    }
    CHECK(message == "error: " + row.message);
  }
}

TEST_CASE("a process that nobody started with others is alone") {
  for (const Variables& variables :
       {Variables{}, Variables{{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}}) {
    const auto rendezvous = find_rendezvous(environment(variables));
    CHECK(rendezvous->process() == 0);
    CHECK(rendezvous->processes() == 1);
    CHECK(rendezvous->local_process() == 0);
    CHECK(rendezvous->local_processes() == 1);
    const std::vector<std::byte> own = {std::byte{1}, std::byte{2}};
    CHECK(rendezvous->all_gather(own) == std::vector<std::vector<std::byte>>{own});
    CHECK(broadcast(*rendezvous, own, 0) == own);
    barrier(*rendezvous);
    CHECK(rendezvous->make_communicator({}, 1) == nullptr);
    rendezvous->abort("out of paper");
    CHECK_THROWS_WITH_AS(barrier(*rendezvous), "process 0 stopped: out of paper", RunError);
  }
}

TEST_CASE("MPI without its plugin says where that was looked for") {
  const Variables variables = {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}};
  setenv("PARPLAN_PLUGINS", "/no/such/folder", 1);
  std::string message = "nothing was thrown";
  try {
    find_rendezvous(environment(variables));
  } catch (const ConfigError& error) {
    message = error.what();
  }
  unsetenv("PARPLAN_PLUGINS");
  CHECK(message ==
        "error: MPI started this process, whose MPI plugin is missing: no libparplan_mpi.so in /no/such/folder (the "
        "folder that PARPLAN_PLUGINS names)");
}
