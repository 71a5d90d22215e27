// Jobs whose processes are killed, stopped, cut off or refused memory and threads at random
// moments, and a table of how they ended:
//
//   campaign PARPLAN MPIRUN FAULTS SOURCE FOLDER [TRIALS [LIMIT [SEED [WHAT]]]]
//
// MPIRUN may be "-": then there are no jobs over MPI. FAULTS is the library of faults.cpp. There
// are TRIALS of each kind, or of those that are called WHAT ("a process is stopped"); a job has to
// end within LIMIT seconds of what happens to it. The exit code is 1 if one does not, says nothing,
// or leaves a process behind.
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "runtime/launch/free_port.h"

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

struct Setting {
  std::string parplan, mpirun, faults, source, folder;
  int trials = 1;
  double limit = 10.0;
  std::mt19937 random;

  int upto(int most) { return std::uniform_int_distribution<int>(0, most)(random); }
};

std::string text_of_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The processes whose environment has all of these variables.
std::vector<pid_t> processes_with(const std::vector<std::string>& variables) {
  std::vector<pid_t> found;
  std::error_code gone;
  for (const fs::directory_entry& entry : fs::directory_iterator("/proc", gone)) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const std::string environment = '\0' + text_of_file(entry.path() / "environ");
    if (std::ranges::all_of(variables, [&](const std::string& variable) {
          return environment.find('\0' + variable + '\0') != std::string::npos;
        }))
      found.push_back(static_cast<pid_t>(std::stol(name)));
  }
  return found;
}

// Passes bytes on between process 1 and process 0 until it is cut: then it takes nothing any more,
// and no connection ends.
class Wire {
 public:
  explicit Wire(int to) : to_(to), listener_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    (void)bind(listener_, reinterpret_cast<const sockaddr*>(&address), size);
    listen(listener_, 8);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    thread_ = std::jthread([this](const std::stop_token& stop) { carry(stop); });
  }
  ~Wire() {
    thread_.request_stop();
    thread_.join();
    for (const int descriptor : ends_) close(descriptor);
    close(listener_);
  }
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;
  int port() const { return port_; }
  void cut() { cut_ = true; }

 private:
  void carry(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      if (cut_) {
        std::this_thread::sleep_for(10ms);
        continue;
      }
      std::vector<pollfd> ready = {{.fd = listener_, .events = POLLIN, .revents = 0}};
      for (const int descriptor : ends_) ready.push_back({.fd = descriptor, .events = POLLIN, .revents = 0});
      if (poll(ready.data(), ready.size(), 10) <= 0) continue;
      for (std::size_t i = 1; i < ready.size(); ++i) {
        if (ready[i].revents == 0) continue;
        std::array<char, 65536> bytes{};
        const ssize_t count = read(ready[i].fd, bytes.data(), bytes.size());
        const int other = ends_[(i - 1) ^ 1];
        if (count <= 0)
          shutdown(other, SHUT_WR);
        else if (send(other, bytes.data(), static_cast<std::size_t>(count), MSG_NOSIGNAL) < 0)
          cut_ = true;
        if (count <= 0) std::this_thread::sleep_for(1ms);
      }
      if (ready[0].revents != 0) accept_one(stop);
    }
  }
  // Process 0 may not be listening yet.
  void accept_one(const std::stop_token& stop) {
    const int here = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(to_));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    while (!stop.stop_requested()) {
      const int there = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (connect(there, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
        ends_.insert(ends_.end(), {here, there});
        return;
      }
      close(there);
      std::this_thread::sleep_for(5ms);
    }
    close(here);
  }

  int to_;
  int listener_;
  int port_ = 0;
  std::vector<int> ends_;  // in pairs
  std::atomic<bool> cut_ = false;
  std::jthread thread_;
};

// Two network namespaces with a router between them, all of their own: two machines, as far as the
// network goes. Once it is cut, the router drops what it is given, and no connection ends.
class TwoMachines {
 public:
  TwoMachines() {
    const char* const commands =
        "ip netns add {0}a && ip netns add {0}b && ip netns add {0}r"
        " && ip -n {0}a link add to-r type veth peer name to-a netns {0}r"
        " && ip -n {0}b link add to-r type veth peer name to-b netns {0}r"
        " && ip -n {0}a addr add 10.77.1.2/24 dev to-r && ip -n {0}r addr add 10.77.1.1/24 dev to-a"
        " && ip -n {0}b addr add 10.77.2.2/24 dev to-r && ip -n {0}r addr add 10.77.2.1/24 dev to-b"
        " && ip -n {0}a link set lo up && ip -n {0}b link set lo up"
        " && ip -n {0}a link set to-r up && ip -n {0}b link set to-r up"
        " && ip -n {0}r link set to-a up && ip -n {0}r link set to-b up"
        " && ip -n {0}a route add default via 10.77.1.1 && ip -n {0}b route add default via 10.77.2.1"
        " && ip netns exec {0}r sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward'";
    are_there_ = shell(fmt::format(fmt::runtime(commands), name_));
  }
  ~TwoMachines() {
    for (const char* const which : {"a", "b", "r"}) shell(fmt::format("ip netns del {}{}", name_, which));
  }
  TwoMachines(const TwoMachines&) = delete;
  TwoMachines& operator=(const TwoMachines&) = delete;
  bool are_there() const { return are_there_; }
  // In front of a command of this rank.
  std::string within(int rank) const { return fmt::format("ip netns exec {}{} ", name_, rank == 0 ? "a" : "b"); }
  static constexpr const char* address = "10.77.1.2";  // of rank 0
  void cut() const {
    if (!shell(fmt::format("ip netns exec {}r sh -c 'echo 0 > /proc/sys/net/ipv4/ip_forward'", name_)))
      fmt::print("the network is not cut\n");
  }

 private:
  static bool shell(const std::string& command) {
    return std::system(fmt::format("( {} ) > /dev/null 2>&1", command).c_str()) == 0;
  }
  std::string name_ = fmt::format("parplan-{}-", getpid());
  bool are_there_ = false;
};

// A shell command with a tag in its environment, by which all its processes are found.
class Command {
 public:
  Command(const std::string& command, std::string tag, const std::string& output) : tag_(std::move(tag)) {
    pid_ = fork();
    if (pid_ != 0) return;
    setsid();
    setenv("PARPLAN_TRIAL", tag_.c_str(), 1);
    const rlimit no_core{.rlim_cur = 0, .rlim_max = 0};  // writing one takes long
    setrlimit(RLIMIT_CORE, &no_core);
    const int file = open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    dup2(file, STDOUT_FILENO);
    dup2(file, STDERR_FILENO);
    execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    _exit(127);
  }
  ~Command() {
    for (const pid_t left : processes()) kill(left, SIGKILL);
    if (!code_) waitpid(pid_, nullptr, 0);
  }
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  std::vector<pid_t> processes() const { return processes_with({"PARPLAN_TRIAL=" + tag_}); }
  // The processes that are rank `rank` of a job.
  std::vector<pid_t> of_rank(int rank) const {
    std::vector<pid_t> found = processes_with({"PARPLAN_TRIAL=" + tag_, fmt::format("RANK={}", rank)});
    for (const pid_t pid : processes_with({"PARPLAN_TRIAL=" + tag_, fmt::format("OMPI_COMM_WORLD_RANK={}", rank)}))
      found.push_back(pid);
    return found;
  }
  // The exit code, once there is one.
  std::optional<int> code() {
    int status = 0;
    if (!code_ && waitpid(pid_, &status, WNOHANG) == pid_)
      code_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    return code_;
  }

 private:
  std::string tag_;
  pid_t pid_ = 0;
  std::optional<int> code_;
};

enum class Start { threads, processes, mpi, torchrun_variables, two_machines };
constexpr std::array start_names = {"threads of one process", "`--processes`", "`mpirun`", "torchrun's variables",
                                    "two machines"};

struct Kind {
  std::string name;
  Start start{};
  int signal = 0;        // for one process
  std::string refuses;   // what the system refuses one process: "thread", "memory"
  int most_number = 0;   // of requests before that
  std::vector<std::string> must_say;  // in the output, all of them; empty: anything
  std::string or_says = "";           // this alone is enough; empty: it is not
  bool cut = false;
  std::vector<std::string> or_at_start = {};  // one of these is enough for what happens before the first step
  bool goes_on = false;  // what was stopped, once the other process has ended; both have to say why
};

const std::vector<Kind>& kinds() {
  // Each of the two sides has to say it.
  static const std::vector<std::string> both_lost = {"process 0 was lost: no sign of life",
                                                     "process 1 was lost: no sign of life"};
  // Where one has not met the others yet.
  static const std::vector<std::string> absent = {"missing: ", "have not met", "did not reach process 0",
                                                  "is no process 0 of this job"};
  static const std::vector<Kind> table = {
      {"a process is killed", Start::processes, SIGKILL, "", 0, {"was ended by SIGKILL"}},
      // `mpirun` names the signal, unless the other process tells it first that its peer was lost.
      {"a process is killed", Start::mpi, SIGKILL, "", 0, {"signal 9"}, "was lost"},
      {"a process is killed", Start::torchrun_variables, SIGKILL, "", 0, {"was lost"}, "", false, absent},
      {"a process is stopped", Start::processes, SIGSTOP, "", 0, {"was lost: no sign of life"}, "", false, absent},
      {"a process is stopped", Start::mpi, SIGSTOP, "", 0, {"was lost: no sign of life"}, "", false, absent},
      // Nobody ends a stopped process there: the other has to end alone, this one when it goes on.
      {"a process is stopped", Start::torchrun_variables, SIGSTOP, "", 0, {"was lost"}, "", false, absent, true},
      {"a process is cut off", Start::torchrun_variables, 0, "", 0, both_lost, "", true},
      {"the network is cut", Start::two_machines, 0, "", 0, both_lost, "", true},
      {"no thread can be created", Start::threads, 0, "thread", 6, {}},
      {"no thread can be created", Start::processes, 0, "thread", 8, {}},
      {"no thread can be created", Start::mpi, 0, "thread", 8, {}},
      {"no memory", Start::threads, 0, "memory", 25000, {}},
      {"no memory", Start::processes, 0, "memory", 25000, {}},
      {"no memory", Start::mpi, 0, "memory", 25000, {}},
  };
  return table;
}

bool says(const Kind& kind, const std::string& text, bool at_start) {
  if (text.empty()) return false;
  const auto has = [&](const std::string& words) { return text.find(words) != std::string::npos; };
  if (kind.goes_on && text.find("error: ") == text.rfind("error: ")) return false;
  if (at_start && std::ranges::any_of(kind.or_at_start, has)) return true;
  return std::ranges::all_of(kind.must_say, has) || (!kind.or_says.empty() && has(kind.or_says));
}

struct Verdict {
  bool at_start = false;  // it happened before the first step was done
  bool had_effect = true;
  std::string fault;  // empty: as it should be
  double seconds = 0.0;
};

// The command of a job of two ranks, of which `faulty` gets `fault`.
std::string command_of(const Setting& setting, const Kind& kind, const std::string& run, int faulty,
                       const std::string& fault, const std::array<int, 2>& ports, const TwoMachines* machines) {
  const std::string with_fault =
      fault.empty() ? "" : fmt::format("LD_PRELOAD='{}' PARPLAN_FAULT='{}' ", setting.faults, fault);
  const auto of = [&](int rank) { return (rank == faulty ? with_fault : std::string()) + "exec " + run; };
  switch (kind.start) {
    case Start::threads:
      return of(faulty);
    case Start::processes:
      // The library reaches the one process that has the rank, through a shell in between.
      return run + " --processes 2";
    case Start::mpi:
      return fmt::format("exec '{}' --oversubscribe -n 1 sh -c \"{}\" : -n 1 sh -c \"{}\"", setting.mpirun, of(0),
                         of(1));
    case Start::torchrun_variables:
    case Start::two_machines: {
      const auto place = [&](int rank) {
        const bool apart = kind.start == Start::two_machines;
        return fmt::format(
            "RANK={} LOCAL_RANK={} WORLD_SIZE=2 LOCAL_WORLD_SIZE={} MASTER_ADDR={} MASTER_PORT={} {}", rank,
            apart ? 0 : rank, apart ? 1 : 2, apart ? TwoMachines::address : "127.0.0.1",
            ports[static_cast<std::size_t>(rank)], apart ? machines->within(rank) : "");
      };
      return fmt::format("{}{} & {}{}; code=$?; wait $!; other=$?; [ $code != 0 ] && exit $code; exit $other", place(1),
                         run, place(0), run);
    }
  }
  return "";
}

Verdict try_once(Setting& setting, const Kind& kind, int number) {
  const std::array<std::string, 3> plans = {"dp", "pp", "tp"};
  const std::string& plan = plans[static_cast<std::size_t>(setting.upto(2))];
  const std::string log = setting.folder + "/log.jsonl", output = setting.folder + "/output";
  fs::remove(log);
  const int rank = setting.upto(1);
  const bool injected = !kind.refuses.empty();
  const std::string fault = injected ? fmt::format("{} {}", kind.refuses, 1 + setting.upto(kind.most_number - 1)) : "";
  const std::string run =
      fmt::format("'{0}' run '{1}/{2}.yaml' --steps {3} --quiet --log '{4}' --failure-records '{1}'", setting.parplan,
                  setting.folder, plan, injected ? 20 : 1000000000, log);
  const parplan::LoopbackPort port;
  std::unique_ptr<Wire> wire;
  std::unique_ptr<TwoMachines> machines;
  if (kind.start == Start::two_machines) machines = std::make_unique<TwoMachines>();
  else if (kind.cut) wire = std::make_unique<Wire>(port.number());
  const std::array<int, 2> ports = {port.number(), wire ? wire->port() : port.number()};
  std::string command = command_of(setting, kind, run, rank, fault, ports, machines.get());
  if (kind.start == Start::processes && injected)
    // All processes of the job have the library, and only the chosen one heeds it.
    command = fmt::format("LD_PRELOAD='{}' PARPLAN_FAULT='{}' PARPLAN_FAULTY_RANK={} {}", setting.faults, fault, rank,
                          command);
  Verdict verdict;
  auto began = Clock::now();
  Command job(command, fmt::format("{}.{}", getpid(), number), output);
  if (!injected) {
    // At a random moment after the first step, or in half of the trials with a signal as soon as
    // there is such a process; over MPI it takes longer to meet the others.
    const bool early = kind.signal != 0 && setting.upto(1) == 0;
    const auto has_stepped = [&] { return fs::exists(log) && fs::file_size(log) > 0; };
    while (!job.code() && (early ? job.of_rank(rank).empty() : !has_stepped())) std::this_thread::sleep_for(2ms);
    const int most_ms = !early ? 300 : kind.start == Start::mpi ? 400 : 40;
    std::this_thread::sleep_for(std::chrono::milliseconds(setting.upto(most_ms)));
    verdict.at_start = !has_stepped();
    began = Clock::now();
    if (machines) machines->cut();
    else if (wire) wire->cut();
    else
      for (const pid_t pid : job.of_rank(rank)) kill(pid, kind.signal);
  }
  // Twelve limits, to say how long it took rather than that it took longer.
  const auto wait_until = [&](const auto& is_so) {
    while (!is_so() && Clock::now() - began < std::chrono::duration<double>(12 * setting.limit))
      std::this_thread::sleep_for(5ms);
    verdict.seconds = std::max(verdict.seconds, std::chrono::duration<double>(Clock::now() - began).count());
  };
  if (kind.goes_on) {
    // The other may not have been started yet.
    wait_until([&] { return job.code() || !job.of_rank(1 - rank).empty(); });
    wait_until([&] { return job.code() || job.of_rank(1 - rank).empty(); });
    began = Clock::now();
    for (const pid_t pid : job.of_rank(rank)) kill(pid, SIGCONT);
  }
  wait_until([&] { return job.code().has_value(); });
  const std::string said = text_of_file(output);
  if (!job.code()) {
    verdict.fault = "it does not end";
  } else if (*job.code() == 0) {
    verdict.had_effect = false;
    if (!injected) verdict.fault = "it ends with 0";
  } else if (verdict.seconds > setting.limit) {
    verdict.fault = "it ends late";
  } else if (!says(kind, said, verdict.at_start)) {
    verdict.fault = "it does not say why";
  }
  // What the job has told to end may take a moment to, on a busy machine a long one.
  const auto ended = Clock::now();
  while (!job.processes().empty() && Clock::now() - ended < std::chrono::duration<double>(setting.limit))
    std::this_thread::sleep_for(5ms);
  if (verdict.fault.empty() && !job.processes().empty()) verdict.fault = "it leaves a process behind";
  if (!verdict.fault.empty())
    fmt::print("{}, {}, trial {}, plan {}, rank {}, {}: {} after {:.1f} s, code {}\n{}\n", kind.name,
               start_names[static_cast<std::size_t>(kind.start)], number, plan, rank, fault, verdict.fault,
               verdict.seconds, job.code().value_or(-1), said);
  return verdict;
}

void make_plans(const Setting& setting) {
  std::string model = text_of_file(setting.source + "/tests/data/models/tiny-gpt2.yaml");
  const std::size_t begin = model.find("vocabulary: ");
  model.replace(begin, model.find('\n', begin) - begin, "vocabulary: 256");
  std::ofstream(setting.folder + "/model.yaml") << model;
  for (const std::string axis : {"dp", "pp", "tp"}) {
    const std::string degrees = axis == "dp" ? "--dp 2" : fmt::format("--dp 1 --{} 2", axis);
    const std::string command = fmt::format(
        "'{0}' simulate '{1}/model.yaml' --cluster '{2}/tests/data/clusters/cpu-8.yaml' --devices 2 --seq-len 16 "
        "--global-batch 8 {3} --quiet -o '{1}/{4}.yaml' --json '{1}/json'",
        setting.parplan, setting.folder, setting.source, degrees, axis);
    if (std::system(command.c_str()) != 0) fmt::print("this fails: {}\n", command);
  }
}

}  // namespace

int main(int count, char** words) {
  if (count < 6) {
    fmt::print("{} PARPLAN MPIRUN FAULTS SOURCE FOLDER [TRIALS [LIMIT [SEED [WHAT]]]]\n", words[0]);
    return 2;
  }
  Setting setting{.parplan = words[1],
                  .mpirun = words[2],
                  .faults = words[3],
                  .source = words[4],
                  .folder = words[5],
                  .random = {}};
  if (count > 6) setting.trials = std::atoi(words[6]);
  if (count > 7) setting.limit = std::atof(words[7]);
  const unsigned seed = count > 8 ? static_cast<unsigned>(std::atol(words[8])) : std::random_device()();
  setting.random.seed(seed);
  fs::create_directories(setting.folder);
  setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
  setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
  make_plans(setting);

  std::string faults;
  std::string table =
      "| what happens | to a job of | trials | before the first step | without effect | failures | longest |\n"
      "|---|---|---|---|---|---|---|\n";
  int number = 0;
  for (const Kind& kind : kinds()) {
    if (count > 9 && kind.name != words[9]) continue;
    if (kind.start == Start::mpi && setting.mpirun == "-") continue;
    if (kind.start == Start::two_machines && !TwoMachines().are_there()) {
      fmt::print("cut networks are not tried: no network namespaces can be made here\n");
      continue;
    }
    int at_start = 0, idle = 0, failures = 0;
    double longest = 0.0;
    for (int trial = 0; trial < setting.trials; ++trial) {
      const Verdict verdict = try_once(setting, kind, ++number);
      at_start += verdict.at_start ? 1 : 0;
      if (!verdict.had_effect)
        ++idle;
      else
        longest = std::max(longest, verdict.seconds);
      if (verdict.fault.empty()) continue;
      ++failures;
      faults += fmt::format("{}, {}, trial {}: {}\n", kind.name, start_names[static_cast<std::size_t>(kind.start)],
                            number, verdict.fault);
    }
    // Refusals are counted in requests, not placed in time.
    const std::string starts = kind.refuses.empty() ? fmt::format("{}", at_start) : "";
    table +=
        fmt::format("| {} | {} | {} | {} | {} | {} | {:.1f} s |\n", kind.name,
                    start_names[static_cast<std::size_t>(kind.start)], setting.trials, starts, idle, failures, longest);
  }
  fmt::print("{}seed {}\n{}", table, seed, faults);
  return faults.empty() ? 0 : 1;
}
