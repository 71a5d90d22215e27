#include "runtime/launch/local_parent.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "runtime/launch/find_rendezvous.h"
#include "runtime/launch/free_port.h"
#include "runtime/launch/step_board.h"

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
  Clock::time_point begun;
  bool running = true;
  bool stopped = false;
  std::vector<int> sent;  // signals by which this process told it to end
  Descriptor output;  // of processes other than 0
  std::string line;   // the beginning of a line that has not ended yet
};

// What the children of one call have in common.
struct Family {
  int processes = 1;
  int port = 0;
  std::string token;
  int board = -1;  // the descriptor
};

// 128 random bits: whoever wants to join the job has to know them.
std::string random_token() {
  std::array<std::uint64_t, 2> bits{};
  if (getrandom(bits.data(), sizeof bits, 0) != static_cast<ssize_t>(sizeof bits)) fail("random numbers", errno);
  return fmt::format("{:016x}{:016x}", bits[0], bits[1]);
}

// This process's environment without the variables of another starter, and with a child's place.
std::vector<std::string> environment_of(int process, const Family& family) {
  static const std::vector<std::string> replaced = {
      "RANK=", "WORLD_SIZE=", "LOCAL_RANK=",  "LOCAL_WORLD_SIZE=", "MASTER_ADDR=", "MASTER_PORT=", "OMPI_COMM_WORLD_",
      "PMI_",  "PMIX_",       "TORCHELASTIC_", fmt::format("{}=", token_variable),
      fmt::format("{}=", StepBoard::variable)};
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text = *variable;
    if (std::none_of(replaced.begin(), replaced.end(),
                     [&](const std::string& prefix) { return text.starts_with(prefix); }))
      variables.emplace_back(text);
  }
  variables.push_back(fmt::format("RANK={}", process));
  variables.push_back(fmt::format("WORLD_SIZE={}", family.processes));
  variables.push_back(fmt::format("LOCAL_RANK={}", process));
  variables.push_back(fmt::format("LOCAL_WORLD_SIZE={}", family.processes));
  variables.emplace_back("MASTER_ADDR=127.0.0.1");
  variables.push_back(fmt::format("MASTER_PORT={}", family.port));
  variables.push_back(fmt::format("{}={}", token_variable, family.token));
  variables.push_back(fmt::format("{}={}", StepBoard::variable, family.board));
  return variables;
}

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

Child start(const std::string& program, const std::vector<std::string>& arguments, int process, const Family& family,
            const sigset_t& signals) {
  std::error_code unreadable;
  const std::filesystem::path path = std::filesystem::read_symlink(program, unreadable);
  std::vector<std::string> words = {unreadable ? program : path.string()};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<std::string> variables = environment_of(process, family);
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
    // SIGKILL: a child that is stopped would not get any other signal. The parent may have died
    // before.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
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
  return {.process = process, .pid = pid, .begun = Clock::now(), .sent = {}, .output = std::move(output), .line = {}};
}

// The children of one call; none is left behind in any case.
struct Children {
  std::vector<Child> all;

  ~Children() {
    pass_on(SIGKILL);
    for (const Child& child : all)
      if (child.running) waitpid(child.pid, nullptr, 0);
  }
  bool any_running() const {
    return std::any_of(all.begin(), all.end(), [](const Child& child) { return child.running; });
  }
  bool any_open() const {
    return std::any_of(all.begin(), all.end(), [](const Child& child) { return child.output.get() >= 0; });
  }
  void pass_on(int signal) const {
    for (const Child& child : all)
      if (child.running) kill(child.pid, signal);
  }
  // A stopped child hears nothing but SIGKILL.
  void end(int signal) {
    for (Child& child : all) {
      if (!child.running) continue;
      child.sent.push_back(child.stopped ? SIGKILL : signal);
      kill(child.pid, child.sent.back());
    }
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

// What has happened to a child, as waitpid says it; nothing where it goes on or has ended well.
std::optional<ChildEvent> event_of(Child& child, int status, const StepBoard& board) {
  child.stopped = WIFSTOPPED(status);
  if (WIFSTOPPED(status) || WIFCONTINUED(status)) {
    if (WIFCONTINUED(status)) return std::nullopt;
  } else {
    child.running = false;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return std::nullopt;
  }
  return ChildEvent{
      .process = child.process,
      .kind = WIFSTOPPED(status)    ? ChildEvent::Kind::stopped
              : WIFSIGNALED(status) ? ChildEvent::Kind::killed
                                    : ChildEvent::Kind::exited,
      .number = WIFSTOPPED(status) ? WSTOPSIG(status) : WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status),
      .after = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - child.begun),
      .last_step = board.last_step(child.process)};
}

// What made a job fail. The kernel closes the connections of a process that a signal ends before
// its parent can wait for it, so that another which lost it may end first: by itself, with an exit
// code. A signal that this process did not send therefore goes before any exit code.
class Failure {
 public:
  void note(const ChildEvent& event, const std::vector<int>& sent, const ChildrenOptions& options) {
    const bool killed = event.kind == ChildEvent::Kind::killed;
    const bool by_itself = killed ? std::ranges::find(sent, event.number) == sent.end() : sent.empty();
    if (by_itself && killed && !killed_) killed_ = event.number;
    if (code_ == 0) code_ = killed ? 128 + event.number : event.number;
    if (!by_itself) return;
    if (!killed) exits_.push_back(event);
    else if (options.on_event) options.on_event(event);
  }
  // Says the exit codes, which wait for a signal's end.
  void say_exits(const ChildrenOptions& options) {
    for (const ChildEvent& event : std::exchange(exits_, {}))
      if (options.on_event) options.on_event(event);
  }
  bool any() const { return code_ != 0; }
  int code() const { return killed_ ? 128 + *killed_ : code_; }

 private:
  int code_ = 0;
  std::optional<int> killed_;  // the signal
  std::vector<ChildEvent> exits_;
};

void reap(Children& children, const StepBoard& board, const ChildrenOptions& options, Failure& failure) {
  for (Child& child : children.all) {
    int status = 0;
    while (child.running && waitpid(child.pid, &status, WNOHANG | WUNTRACED | WCONTINUED) == child.pid) {
      const std::optional<ChildEvent> event = event_of(child, status, board);
      if (!event) continue;
      if (event->kind != ChildEvent::Kind::stopped) failure.note(*event, child.sent, options);
      else if (child.sent.empty() && options.on_event) options.on_event(*event);
    }
  }
}

}  // namespace

int run_children(const std::vector<std::string>& arguments, const ChildrenOptions& options) {
  PARPLAN_ASSERT(options.processes > 0, fmt::format("{} processes", options.processes));
  const TakenSignals signals;
  const LoopbackPort port;
  const StepBoard board(options.processes);
  const Family family{
      .processes = options.processes, .port = port.number(), .token = random_token(), .board = board.descriptor()};
  Children children;
  for (int process = 0; process < options.processes; ++process)
    children.all.push_back(start(options.program, arguments, process, family, signals.before()));

  Failure failure;
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
      if (signal->ssi_signo != SIGCHLD && !from_terminal) children.pass_on(static_cast<int>(signal->ssi_signo));
    }
    reap(children, board, options, failure);
    if (failure.any() && !deadline) deadline = Clock::now() + time_to_end_by_oneself;
    if (deadline && Clock::now() >= *deadline) {
      failure.say_exits(options);
      children.end(next_signal);
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
  failure.say_exits(options);
  return failure.code();
}

}  // namespace parplan
