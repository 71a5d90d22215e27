#include "runtime/launch/local_parent.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "runtime/launch/free_port.h"

namespace parplan {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds time_to_end_by_oneself(1);
constexpr std::chrono::seconds time_to_end_when_told(5);
// How long outputs may stay open after the last process has ended: one of its own children may hold
// them.
constexpr std::chrono::milliseconds time_for_last_lines(200);

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() { reset(); }
  int get() const { return number_; }
  void reset() {
    if (number_ >= 0) close(number_);
    number_ = -1;
  }

 private:
  int number_ = -1;
};

[[noreturn]] void fail(const char* what, int error) {
  throw RunError(fmt::format("{}: {}", what, std::strerror(error)));
}

std::pair<Descriptor, Descriptor> make_pipe() {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) fail("a pipe to a child process", errno);
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

// The signals that a parent handles; their usual effect is suspended while this lives.
class TakenSignals {
 public:
  TakenSignals() {
    sigemptyset(&taken_);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&taken_, signal);
    if (const int error = pthread_sigmask(SIG_BLOCK, &taken_, &before_); error != 0) fail("blocking signals", error);
    signals_ = Descriptor(signalfd(-1, &taken_, SFD_CLOEXEC | SFD_NONBLOCK));
    if (signals_.get() < 0) fail("signalfd", errno);
  }
  ~TakenSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  TakenSignals(const TakenSignals&) = delete;
  TakenSignals& operator=(const TakenSignals&) = delete;

  const sigset_t& before() const { return before_; }
  int descriptor() const { return signals_.get(); }
  std::optional<signalfd_siginfo> next() const {
    signalfd_siginfo signal;
    if (read(signals_.get(), &signal, sizeof signal) != static_cast<ssize_t>(sizeof signal)) return std::nullopt;
    return signal;
  }

 private:
  sigset_t taken_{}, before_{};
  Descriptor signals_;
};

struct Child {
  int process = 0;
  pid_t pid = 0;
  bool running = true;
  Descriptor output;  // of processes other than 0
  std::string line;   // the beginning of a line that has not ended yet
};

// This process's environment without the variables of another starter, and with a child's place.
std::vector<std::string> environment_of(int process, int processes, int port) {
  static constexpr std::array<std::string_view, 10> replaced = {
      "RANK=", "WORLD_SIZE=", "LOCAL_RANK=",  "LOCAL_WORLD_SIZE=", "MASTER_ADDR=", "MASTER_PORT=", "OMPI_COMM_WORLD_",
      "PMI_",  "PMIX_",       "TORCHELASTIC_"};
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text = *variable;
    if (std::none_of(replaced.begin(), replaced.end(),
                     [&](std::string_view prefix) { return text.starts_with(prefix); }))
      variables.emplace_back(text);
  }
  variables.push_back(fmt::format("RANK={}", process));
  variables.push_back(fmt::format("WORLD_SIZE={}", processes));
  variables.push_back(fmt::format("LOCAL_RANK={}", process));
  variables.push_back(fmt::format("LOCAL_WORLD_SIZE={}", processes));
  variables.emplace_back("MASTER_ADDR=127.0.0.1");
  variables.push_back(fmt::format("MASTER_PORT={}", port));
  return variables;
}

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

Child start(const std::string& program, const std::vector<std::string>& arguments, int process, int processes, int port,
            const sigset_t& signals) {
  std::error_code unreadable;
  const std::filesystem::path path = std::filesystem::read_symlink(program, unreadable);
  std::vector<std::string> words = {unreadable ? program : path.string()};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<std::string> variables = environment_of(process, processes, port);
  const std::vector<char*> argument_pointers = pointers_to(words);
  const std::vector<char*> variable_pointers = pointers_to(variables);
  Descriptor no_input(open("/dev/null", O_RDONLY | O_CLOEXEC));
  auto [output, output_end] = make_pipe();
  auto [failure, failure_end] = make_pipe();  // a successful exec closes it, otherwise it carries the error
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) fail("starting a child process", errno);
  if (pid == 0) {
    // Only calls that POSIX allows between fork and exec.
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(1);
    if (process != 0) {
      dup2(no_input.get(), STDIN_FILENO);
      dup2(output_end.get(), STDOUT_FILENO);
      dup2(output_end.get(), STDERR_FILENO);
    }
    pthread_sigmask(SIG_SETMASK, &signals, nullptr);
    execve(program.c_str(), argument_pointers.data(), variable_pointers.data());
    const int error = errno;
    [[maybe_unused]] const ssize_t written = write(failure_end.get(), &error, sizeof error);
    _exit(127);
  }
  failure_end.reset();
  int error = 0;
  ssize_t told = 0;
  while ((told = read(failure.get(), &error, sizeof error)) < 0 && errno == EINTR) {
  }
  if (told == static_cast<ssize_t>(sizeof error)) {
    waitpid(pid, nullptr, 0);
    fail(fmt::format("{} cannot be started", program).c_str(), error);
  }
  if (process == 0) output.reset();
  return {.process = process, .pid = pid, .running = true, .output = std::move(output), .line = {}};
}

// The children of one call; none is left behind in any case.
struct Children {
  std::vector<Child> all;

  ~Children() {
    tell(SIGKILL);
    for (const Child& child : all)
      if (child.running) waitpid(child.pid, nullptr, 0);
  }
  bool any_running() const {
    return std::any_of(all.begin(), all.end(), [](const Child& child) { return child.running; });
  }
  bool any_open() const {
    return std::any_of(all.begin(), all.end(), [](const Child& child) { return child.output.get() >= 0; });
  }
  void tell(int signal) const {
    for (const Child& child : all)
      if (child.running) kill(child.pid, signal);
  }
};

void read_lines(Child& child, const ChildrenOptions& options) {
  std::array<char, 65536> piece;
  const ssize_t count = read(child.output.get(), piece.data(), piece.size());
  if (count < 0 && errno == EINTR) return;
  if (count > 0) child.line.append(piece.data(), static_cast<std::size_t>(count));
  std::size_t begin = 0;
  for (std::size_t end; (end = child.line.find('\n', begin)) != std::string::npos; begin = end + 1)
    if (options.on_line) options.on_line(child.process, std::string_view(child.line).substr(begin, end - begin));
  child.line.erase(0, begin);
  if (count > 0) return;
  if (!child.line.empty() && options.on_line) options.on_line(child.process, child.line);
  child.output.reset();
}

// The exit code of the first child that has failed since the last call.
std::optional<int> reap(Children& children) {
  std::optional<int> failed;
  for (Child& child : children.all) {
    int status = 0;
    if (!child.running || waitpid(child.pid, &status, WNOHANG) != child.pid) continue;
    child.running = false;
    const int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    if (code != 0 && !failed) failed = code;
  }
  return failed;
}

}  // namespace

int run_children(const std::vector<std::string>& arguments, const ChildrenOptions& options) {
  PARPLAN_ASSERT(options.processes > 0, fmt::format("{} processes", options.processes));
  const TakenSignals signals;
  const LoopbackPort port;
  Children children;
  for (int process = 0; process < options.processes; ++process)
    children.all.push_back(
        start(options.program, arguments, process, options.processes, port.number(), signals.before()));

  int result = 0;
  std::optional<Clock::time_point> deadline;  // for the next action
  int next_signal = SIGTERM;
  std::optional<Clock::time_point> last_lines;
  while (children.any_running() || (children.any_open() && (!last_lines || Clock::now() < *last_lines))) {
    std::vector<pollfd> ready = {{.fd = signals.descriptor(), .events = POLLIN, .revents = 0}};
    std::vector<Child*> open;
    for (Child& child : children.all)
      if (child.output.get() >= 0) {
        open.push_back(&child);
        ready.push_back({.fd = child.output.get(), .events = POLLIN, .revents = 0});
      }
    const bool timed = deadline || last_lines;
    if (poll(ready.data(), ready.size(), timed ? 20 : -1) > 0)
      for (std::size_t c = 0; c < open.size(); ++c)
        if (ready[c + 1].revents != 0) read_lines(*open[c], options);
    while (const std::optional<signalfd_siginfo> signal = signals.next()) {
      const bool from_terminal = signal->ssi_code == SI_KERNEL;
      if (signal->ssi_signo != SIGCHLD && !from_terminal) children.tell(static_cast<int>(signal->ssi_signo));
    }
    const std::optional<int> failed = reap(children);
    if (failed && result == 0) {
      result = *failed;
      deadline = Clock::now() + time_to_end_by_oneself;
    }
    if (deadline && Clock::now() >= *deadline) {
      children.tell(next_signal);
      next_signal = SIGKILL;
      deadline = Clock::now() + time_to_end_when_told;
    }
    if (!children.any_running() && !last_lines) last_lines = Clock::now() + time_for_last_lines;
  }
  // However late this process reads: the rest of each pipe, and then its end.
  for (Child& child : children.all)
    for (int read = 0; read < 2 && child.output.get() >= 0; ++read)
      if (pollfd ready{.fd = child.output.get(), .events = POLLIN, .revents = 0}; poll(&ready, 1, 0) > 0)
        read_lines(child, options);
  return result;
}

}  // namespace parplan
