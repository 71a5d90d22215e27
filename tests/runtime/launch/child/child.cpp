// The program that local_parent_test.cpp starts. The first argument selects a task; process 1
// carries it out, the others wait to be ended, and report when they are told to end.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <thread>

#include "runtime/launch/find_rendezvous.h"
#include "runtime/launch/step_board.h"

using namespace std::chrono_literals;

namespace {

int wait_to_be_ended() {
  std::this_thread::sleep_for(300s);
  return 99;
}

void say_that_it_was_told() {
  constexpr char line[] = "told to end\n";
  // The output of process 0 is the test's own.
  if (std::string_view(std::getenv("RANK")) != "0") [[maybe_unused]]
    const ssize_t written = write(STDOUT_FILENO, line, sizeof line - 1);
}
void end_when_told(int) {
  say_that_it_was_told();
  _exit(98);
}
void stay_when_told(int) { say_that_it_was_told(); }

}  // namespace

int main(int count, char** words) {
  const std::string task = count > 1 ? words[1] : "";
  const std::string file = count > 2 ? words[2] : "";
  const int rank = std::atoi(std::getenv("RANK"));
  if (task == "meet") {
    // All gather their ranks; process 0 records the number of bytes.
    const auto rendezvous = parplan::find_rendezvous();
    const std::string own(static_cast<std::size_t>(rendezvous->process() + 1), 'x');
    std::size_t bytes = 0;
    for (const auto& other : rendezvous->all_gather(std::as_bytes(std::span<const char>(own)))) bytes += other.size();
    if (rank == 0) std::ofstream(file) << bytes << " bytes, " << rendezvous->local_processes() << " here";
    return 0;
  }
  if (task == "token") {
    const char* token = std::getenv(parplan::token_variable);
    std::ofstream(file + "/" + std::to_string(rank)) << (token == nullptr ? "none" : token);
    return 0;
  }
  if (task == "write") {
    if (rank == 0) return 0;
    std::printf("out of %d\n", rank);
    std::fflush(stdout);
    std::fprintf(stderr, "error of %d\nwithout an end", rank);
    return 0;
  }
  if (task == "stubborn" || task == "fail") {
    // Process 1 fails once all others handle the signal.
    std::signal(SIGTERM, task == "fail" ? end_when_told : stay_when_told);
    parplan::barrier(*parplan::find_rendezvous());
    if (rank == 1) return task == "fail" ? 7 : 3;
    for (;;) wait_to_be_ended();  // a test of a parent that does not end them must not pass
  }
  if (task == "steps") {
    if (rank != 1) return wait_to_be_ended();
    auto board = parplan::StepBoard::inherited(std::getenv(parplan::StepBoard::variable));
    board->note(rank, 40);
    board->note(rank, 41);
    return 5;
  }
  if (task == "stopped" || task == "orphan") {
    // Process 1 ends once process 2 is stopped.
    const auto rendezvous = parplan::find_rendezvous();
    if (rank == 2 && task == "orphan") {
      std::printf("%d\n", getpid());
      std::fflush(stdout);
    }
    const pid_t own = getpid();
    const auto ids = rendezvous->all_gather(std::as_bytes(std::span(&own, 1)));
    if (rank == 2) std::raise(SIGSTOP);
    if (rank != 1 || task == "orphan") return wait_to_be_ended();
    pid_t stopped = 0;
    std::memcpy(&stopped, ids[2].data(), sizeof stopped);
    for (std::string state; state != "T"; std::this_thread::sleep_for(1ms)) {
      std::ifstream stat("/proc/" + std::to_string(stopped) + "/stat");
      std::string pid, name;
      stat >> pid >> name >> state;
    }
    _exit(4);
  }
  if (task == "lost") {
    // Once the file is there, process 0 exits and a signal ends process 1; process 2 says which
    // they are.
    const auto rendezvous = parplan::find_rendezvous();
    const pid_t own = getpid();
    const auto ids = rendezvous->all_gather(std::as_bytes(std::span(&own, 1)));
    if (rank == 2) {
      pid_t first = 0, second = 0;
      std::memcpy(&first, ids[0].data(), sizeof first);
      std::memcpy(&second, ids[1].data(), sizeof second);
      std::printf("%d %d\n", first, second);
      std::fflush(stdout);
      return wait_to_be_ended();
    }
    while (!std::ifstream(file)) std::this_thread::sleep_for(1ms);
    if (rank == 1) std::raise(SIGKILL);
    _exit(6);
  }
  if (task == "signalled") {
    if (rank == 1) kill(getppid(), SIGTERM);
    return wait_to_be_ended();
  }
  if (rank != 1) return wait_to_be_ended();
  if (task == "crash") std::raise(SIGKILL);
  return 98;
}
