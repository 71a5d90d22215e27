#include "runtime/launch/tcp_rendezvous.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <latch>
#include <thread>

#include "planner/base/error.h"
#include "runtime/launch/fingerprint.h"
#include "runtime/launch/free_port.h"
#include "runtime/launch/tcp_socket.h"

using namespace parplan;
using namespace std::chrono_literals;

namespace {

// A long time, since no condition may depend on how fast a loaded machine is; CTest ends tests that
// hang.
constexpr auto patience = 300s;

TcpPlace place(int process, int processes, int port) {
  return {.process = process,
          .processes = processes,
          .local_process = process,
          .local_processes = processes,
          .address = "127.0.0.1",
          .port = port};
}

std::vector<std::byte> bytes(const std::string& text) {
  const auto view = std::as_bytes(std::span<const char>(text));
  return {view.begin(), view.end()};
}
std::string text(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const RunError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

void in_threads(int count, const std::function<void(int)>& body) {
  std::vector<std::jthread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
}

// For conditions that need a deadline to pass: tries with more and more patience until a machine
// was fast enough for what has to happen before.
void with_growing_patience(const std::function<bool(std::chrono::milliseconds)>& happens) {
  for (auto tried = 500ms; tried < 200s; tried *= 4)
    if (happens(tried)) return;
  FAIL_CHECK("not even within 128 s");
}

// What each of `processes` threads throws, whose body gets its own rendezvous.
std::vector<std::string> outcomes(int processes, const std::function<void(int, Rendezvous&)>& body) {
  const LoopbackPort port;
  std::vector<std::string> messages(static_cast<std::size_t>(processes));
  in_threads(processes, [&](int process) {
    messages[process] = message_of([&] {
      const auto rendezvous = tcp_rendezvous(place(process, processes, port.number()), patience);
      body(process, *rendezvous);
    });
  });
  return messages;
}

int connected_to(int port) {
  const int client = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  while (connect(client, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    std::this_thread::sleep_for(10ms);
  return client;
}

// The first message of a process: magic, kind 1 with the length 24, its place, token and build.
void greet(int client, std::uint64_t process, std::uint64_t processes, const std::string& token = "") {
  const std::uint64_t greeting[] = {0x706172706c616e02, std::uint64_t{1} << 56 | 24, processes << 32 | process,
                                    fingerprint(token), fingerprint("")};
  static_assert(sizeof greeting == 40);
  CHECK(write(client, greeting, sizeof greeting) == sizeof greeting);
}

const std::string nothing = "nothing was thrown";

}  // namespace

TEST_CASE("four processes gather contributions of any size, by process, many times over") {
  const auto contribution = [](int process, int round) {
    return std::string(static_cast<std::size_t>(process * 70001 * (round % 3)), static_cast<char>('a' + process));
  };
  const auto messages = outcomes(4, [&](int process, Rendezvous& rendezvous) {
    if (rendezvous.process() != process || rendezvous.processes() != 4 || rendezvous.local_process() != process ||
        rendezvous.local_processes() != 4)
      throw RunError("another place");
    for (int round = 0; round < 30; ++round) {
      const auto all = rendezvous.all_gather(bytes(contribution(process, round)));
      if (all.size() != 4) throw RunError("another number of contributions");
      for (int other = 0; other < 4; ++other)
        if (text(all[other]) != contribution(other, round))
          throw RunError(fmt::format("round {}, process {}", round, other));
      barrier(rendezvous);
      if (text(broadcast(rendezvous, bytes(fmt::format("from {}", process)), round % 4)) !=
          fmt::format("from {}", round % 4))
        throw RunError("another broadcast");
    }
    rendezvous.check();
  });
  CHECK(messages == std::vector<std::string>(4, nothing));
}

TEST_CASE("processes that do not come are named, to everyone who came") {
  with_growing_patience([](std::chrono::milliseconds waited) {
    const LoopbackPort port;
    std::vector<std::string> messages(5);
    in_threads(5, [&](int process) {
      if (process == 2 || process == 4) return;
      // (A process that comes too late for process 0 finds nobody: this is not waited for.)
      messages[process] =
          message_of([&] { tcp_rendezvous(place(process, 5, port.number()), process == 0 ? waited : 4 * waited); });
    });
    const std::string wanted = fmt::format("waited {:g} s at 127.0.0.1:{} for 5 processes; missing: 2, 4",
                                           std::chrono::duration<double>(waited).count(), port.number());
    return messages == std::vector<std::string>{wanted, wanted, "", wanted, ""};
  });
}

TEST_CASE("a process 0 that does not come is named with its address and port") {
  const LoopbackPort held;  // nobody listens there
  const int port = held.number();
  CHECK(message_of([&] { tcp_rendezvous(place(2, 3, port), 300ms); }) ==
        fmt::format("process 2 did not reach process 0 at 127.0.0.1:{} within 0.3 s: Connection refused", port));
  TcpPlace nowhere = place(1, 3, port);
  nowhere.address = "no-such-machine.invalid";
  const std::string message = message_of([&] { tcp_rendezvous(nowhere, 100ms); });
  CHECK(message.starts_with(
      fmt::format("process 1 did not reach process 0 at no-such-machine.invalid:{} within 0.1 s: ", port)));
}

TEST_CASE("an abort wakes those that wait and those that come later, with the reason, and the first reason wins") {
  for (const int culprit : {0, 2}) {
    std::atomic<int> aborted = 0;
    const auto messages = outcomes(4, [&](int process, Rendezvous& rendezvous) {
      barrier(rendezvous);
      if (process == culprit) {
        std::this_thread::sleep_for(30ms);
        rendezvous.abort("out of paper");
        rendezvous.abort("out of ink");
        ++aborted;
        barrier(rendezvous);
      } else if (process == 3) {
        // It does not wait in the rendezvous, but checks it from time to time.
        while (true) {
          rendezvous.check();
          std::this_thread::sleep_for(1ms);
        }
      } else {
        barrier(rendezvous);
      }
    });
    CHECK(messages == std::vector<std::string>(4, fmt::format("process {} stopped: out of paper", culprit)));
  }
}

TEST_CASE("one that leaves without contributing ends the waiting of all others") {
  for (const int leaver : {0, 1, 3}) {
    const auto messages = outcomes(4, [&](int process, Rendezvous& rendezvous) {
      barrier(rendezvous);
      if (process != leaver) barrier(rendezvous);
    });
    for (int process = 0; process < 4; ++process) {
      const std::string& message = messages[process];
      INFO("process " << process << ": " << message);
      // Those that hear of it first leave too, and a slow one may find one of them gone before it
      // hears the reason.
      CHECK((process == leaver ? message == nothing
                               : message == fmt::format("process {} has ended", leaver) ||
                                     message.ends_with(" was lost: its connection closed")));
    }
  }
}

TEST_CASE("leaving after the last meeting disturbs nobody") {
  const auto messages = outcomes(3, [&](int process, Rendezvous& rendezvous) {
    barrier(rendezvous);
    if (process == 2) std::this_thread::sleep_for(100ms);
    rendezvous.check();
  });
  CHECK(messages == std::vector<std::string>(3, nothing));
}

TEST_CASE("a process of a job of another size is refused and told, and the job goes on") {
  const LoopbackPort held;
  const int port = held.number();
  std::vector<std::string> messages(3);
  std::latch refused(1);  // process 1, with which the job is complete, waits for this
  in_threads(3, [&](int i) {
    messages[i] = message_of([&] {
      if (i == 2) {  // of another job, with one process more
        tcp_rendezvous(place(1, 3, port), patience);
        return;
      }
      if (i == 1) refused.wait();
      const auto rendezvous = tcp_rendezvous(place(i, 2, port), patience);
      barrier(*rendezvous);
    });
    if (i == 2) refused.count_down();
  });
  CHECK(messages[0] == nothing);
  CHECK(messages[1] == nothing);
  CHECK(messages[2] ==
        fmt::format("process 0 at 127.0.0.1:{} refuses process 1: it is one of 3 processes, this job has 2", port));
}

TEST_CASE("a place that is taken is refused") {
  with_growing_patience([](std::chrono::milliseconds waited) {
    const LoopbackPort port;
    std::vector<std::string> messages(3);
    in_threads(3, [&](int i) {
      messages[i] =
          message_of([&] { tcp_rendezvous(place(i == 0 ? 0 : 1, 3, port.number()), i == 0 ? waited : 4 * waited); });
    });
    const std::string wanted = fmt::format(
        "waited {:g} s at 127.0.0.1:{} for 3 processes; missing: 2 (a connection was refused: there is a process 1 "
        "already)",
        std::chrono::duration<double>(waited).count(), port.number());
    const std::string refusal =
        fmt::format("process 0 at 127.0.0.1:{} refuses process 1: there is a process 1 already", port.number());
    return messages == std::vector<std::string>{wanted, wanted, refusal} ||
           messages == std::vector<std::string>{wanted, refusal, wanted};
  });
}

TEST_CASE("what does not speak the protocol is refused and does not disturb the job") {
  const LoopbackPort held;
  const int port = held.number();
  std::vector<std::string> messages(2);
  std::latch refused(1);  // process 1, with which the job is complete, waits for this
  in_threads(3, [&](int i) {
    if (i < 2) {
      if (i == 1) refused.wait();
      messages[i] = message_of([&] { barrier(*tcp_rendezvous(place(i, 2, port), patience)); });
      return;
    }
    const int silent = connected_to(port);  // it sends nothing at all
    const int client = connected_to(port);
    const std::string request = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    CHECK(write(client, request.data(), request.size()) == static_cast<ssize_t>(request.size()));
    char answer[512];
    CHECK(read(client, answer, sizeof answer) > 0);
    CHECK(read(client, answer, sizeof answer) <= 0);  // and closed
    refused.count_down();
    close(client);
    close(silent);
  });
  CHECK(messages == std::vector<std::string>(2, nothing));
}

TEST_CASE("a process 0 that is another program is told apart") {
  const LoopbackPort held;
  const int port = held.number();
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  const int on = 1;
  REQUIRE(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  REQUIRE(bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  REQUIRE(listen(listener, 1) == 0);
  std::jthread server([&] {
    const int accepted = accept(listener, nullptr, nullptr);
    const std::string answer = "220 mail.example.com ESMTP";
    CHECK(write(accepted, answer.data(), answer.size()) == static_cast<ssize_t>(answer.size()));
    char request[512];
    while (read(accepted, request, sizeof request) > 0) {
    }
    close(accepted);
  });
  CHECK(message_of([&] { tcp_rendezvous(place(1, 2, port), patience); }) ==
        fmt::format("process 1: what listens at 127.0.0.1:{} is no process 0 of this job: it does not speak this "
                    "version of parplan's protocol "
                    "(MASTER_PORT may name another port)",
                    port));
  CHECK(
      message_of([&] { tcp_rendezvous(place(0, 2, port), patience); }) ==
      fmt::format("process 0 cannot listen at 127.0.0.1:{}: Address already in use (MASTER_PORT may name another port)",
                  port));
  close(listener);
}

TEST_CASE("a process that dies is told from one that leaves") {
  const LoopbackPort held;
  const int port = held.number();
  std::vector<std::string> messages(2);
  in_threads(3, [&](int i) {
    if (i < 2) {
      messages[i] = message_of([&] { barrier(*tcp_rendezvous(place(i, 3, port), patience)); });
      return;
    }
    // Process 2, by hand, ends silently.
    const int client = connected_to(port);
    greet(client, 2, 3);
    char welcome[16];
    CHECK(recv(client, welcome, sizeof welcome, MSG_WAITALL) == sizeof welcome);
    close(client);
  });
  CHECK(messages == std::vector<std::string>(2, "process 2 was lost: its connection closed"));
}

TEST_CASE("of a process that dies it is said what it did last") {
  const LoopbackPort held;
  const int port = held.number();
  std::string message;
  std::latch heard(1);
  in_threads(2, [&](int i) {
    if (i == 0) {
      const auto rendezvous = tcp_rendezvous(place(0, 2, port), patience);
      rendezvous->describe_positions(
          [](int rank, const Position& at) { return fmt::format("step {} of rank {}", at.step, rank); });
      while (rendezvous->beat({}).front().position.step != 7) std::this_thread::sleep_for(1ms);
      heard.count_down();
      message = message_of([&] { barrier(*rendezvous); });
      return;
    }
    const int client = connected_to(port);
    greet(client, 1, 2);
    char welcome[16];
    CHECK(recv(client, welcome, sizeof welcome, MSG_WAITALL) == sizeof welcome);
    const std::uint64_t beat[] = {0x706172706c616e02, std::uint64_t{8} << 56 | 40, 7, 0, 0, 1, 9};
    CHECK(write(client, beat, sizeof beat) == sizeof beat);
    heard.wait();
    shutdown(client, SHUT_WR);  // closing it would drop what process 0 has sent
    char unread[512];
    while (read(client, unread, sizeof unread) > 0) {
    }
    close(client);
  });
  CHECK(message == "process 1 was lost: its connection closed; it was last in step 7 of rank 1");
}

TEST_CASE("names and IPv6 addresses serve as well as IPv4 ones") {
  for (const char* address : {"localhost", "::1"}) {
    const LoopbackPort held;
    const int port = held.number();
    std::vector<std::string> messages(2);
    in_threads(2, [&](int process) {
      messages[process] = message_of([&] {
        TcpPlace own = place(process, 2, port);
        own.address = address;
        barrier(*tcp_rendezvous(own, patience));
      });
    });
    if (messages[0].find("Cannot assign requested address") != std::string::npos) continue;  // a machine without IPv6
    CHECK(messages == std::vector<std::string>(2, nothing));
  }
}

TEST_CASE("a process with another token or of another build is refused and told, and the job goes on") {
  for (const bool other_token : {true, false}) {
    const LoopbackPort held;
    const int port = held.number();
    std::vector<std::string> messages(3);
    std::latch refused(1);  // process 1, with which the job is complete, waits for this
    in_threads(3, [&](int i) {
      messages[i] = message_of([&] {
        TcpPlace own = place(i == 0 ? 0 : 1, 2, port);
        own.token = i == 2 && other_token ? "that of another job" : "this job's";
        own.build = i == 2 && !other_token ? "1.2" : "1.1";
        if (i == 1) refused.wait();
        const auto run = [&] { barrier(*tcp_rendezvous(own, patience)); };
        run();
      });
      if (i == 2) refused.count_down();
    });
    CHECK(messages[0] == nothing);
    CHECK(messages[1] == nothing);
    CHECK(messages[2] ==
          fmt::format("process 0 at 127.0.0.1:{} refuses process 1: {}", port,
                      other_token ? "it has another token: it belongs to another job (PARPLAN_JOB_TOKEN is the same in "
                                    "all processes of a job)"
                                  : "process 1 is another build of parplan than process 0"));
  }
}

TEST_CASE("a stranger that says a lot is not listened to beyond a greeting's 40 bytes") {
  const LoopbackPort held;
  const int port = held.number();
  std::vector<std::string> messages(2);
  std::latch refused(1);
  in_threads(3, [&](int i) {
    if (i < 2) {
      if (i == 1) refused.wait();
      messages[i] = message_of([&] { barrier(*tcp_rendezvous(place(i, 2, port), patience)); });
      return;
    }
    // The head of a contribution of 4 GiB, and as many bytes as process 0 takes.
    const int client = connected_to(port);
    const std::uint64_t head[] = {0x706172706c616e02, std::uint64_t{4} << 56 | std::uint64_t{1} << 32};
    CHECK(write(client, head, sizeof head) == sizeof head);
    const std::string much(65536, 'x');
    while (send(client, much.data(), much.size(), MSG_NOSIGNAL) > 0) {
    }
    close(client);  // the other end has closed it
    refused.count_down();
  });
  CHECK(messages == std::vector<std::string>(2, nothing));
}

TEST_CASE("what calls itself process 0 and says a lot before its welcome is not listened to") {
  const Socket listener = listen_at("127.0.0.1", 0);
  const int port = own_port(listener);
  std::string message;
  std::jthread process_1([&] { message = message_of([&] { tcp_rendezvous(place(1, 2, port), patience); }); });
  const int client = accept(listener.get(), nullptr, nullptr);
  char greeting[40];
  CHECK(recv(client, greeting, sizeof greeting, MSG_WAITALL) == sizeof greeting);
  // The head of a failure with a text of 4 GiB, and as many bytes of it as are taken.
  const std::uint64_t head[] = {0x706172706c616e02, std::uint64_t{6} << 56 | std::uint64_t{1} << 32};
  CHECK(write(client, head, sizeof head) == sizeof head);
  const std::string much(65536, 'x');
  std::size_t taken = 0;
  while (taken < (std::size_t{1} << 30) && send(client, much.data(), much.size(), MSG_NOSIGNAL) > 0)
    taken += much.size();
  CHECK(taken < std::size_t{1} << 30);
  close(client);
  process_1.join();
  CHECK(message == fmt::format("process 1: what listens at 127.0.0.1:{} is no process 0 of this job: it does not speak "
                               "this version of parplan's protocol (MASTER_PORT may name another port)",
                               port));
}

TEST_CASE("strangers beyond 256 wait until one of them leaves, and the job comes together") {
  const LoopbackPort held;
  const int port = held.number();
  std::vector<std::string> messages(2);
  std::latch served(1);
  in_threads(3, [&](int i) {
    if (i < 2) {
      if (i == 1) served.wait();
      messages[i] = message_of([&] { barrier(*tcp_rendezvous(place(i, 2, port), patience)); });
      return;
    }
    // More than may be heard at once, all silent; the last one is heard although none leaves.
    std::vector<int> strangers;
    for (int stranger = 0; stranger < 300; ++stranger) strangers.push_back(connected_to(port));
    const std::string nonsense(40, 'x');
    CHECK(write(strangers.back(), nonsense.data(), nonsense.size()) == static_cast<ssize_t>(nonsense.size()));
    char answer[512];
    CHECK(read(strangers.back(), answer, sizeof answer) > 0);
    // Both ends of all 300, but for those that process 0 has not taken or has closed.
    const auto descriptors = std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
    CHECK(descriptors < 300 + 256 + 30);
    served.count_down();
    for (const int stranger : strangers) close(stranger);
  });
  CHECK(messages == std::vector<std::string>(2, nothing));
}

TEST_CASE("a process without descriptors for connections waits without working, and goes on when there are some") {
  const LoopbackPort held;
  const int port = held.number();
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  // Limits are those of a process: process 0 is one of its own.
  const pid_t child = fork();
  if (child == 0) {
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    const int free = dup(0);  // the lowest one
    close(free);
    const rlimit few{.rlim_cur = static_cast<rlim_t>(free + 2), .rlim_max = limit.rlim_max};  // eventfd and listener
    setrlimit(RLIMIT_NOFILE, &few);
    std::jthread more([&] {
      char byte = 0;
      [[maybe_unused]] const ssize_t told = read(ends[0], &byte, 1);  // enough time has passed
      setrlimit(RLIMIT_NOFILE, &limit);
    });
    int code = 1;
    try {
      barrier(*tcp_rendezvous(place(0, 2, port), patience));
      rusage used{};
      getrusage(RUSAGE_SELF, &used);
      // A loop that spins makes some 100,000 attempts a second, each a system call.
      code = used.ru_utime.tv_sec + used.ru_stime.tv_sec < 1 ? 0 : 2;
    } catch (const std::exception&) {
      code = 3;
    }
    more.join();
    _exit(code);
  }
  std::string message;
  std::jthread other([&] { message = message_of([&] { barrier(*tcp_rendezvous(place(1, 2, port), patience)); }); });
  // Long enough for a loop that spins to use a second of a core; one that waits may take any time.
  const auto begin = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - begin < 3s) std::this_thread::sleep_for(50ms);
  CHECK(write(ends[1], "x", 1) == 1);
  other.join();
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(message == nothing);
  close(ends[0]);
  close(ends[1]);
}

TEST_CASE("a prepared connection is probed by the system, and given up after the silence") {
  const LoopbackPort held;
  const Socket listener = listen_at("127.0.0.1", 0);
  std::string failure;
  const Socket client =
      connect_once("127.0.0.1", own_port(listener), std::chrono::steady_clock::now() + patience, failure);
  REQUIRE(static_cast<bool>(client));
  prepare_connection(client, 5000ms);
  const auto option = [&](int level, int name) {
    int value = -1;
    socklen_t size = sizeof value;
    CHECK(getsockopt(client.get(), level, name, &value, &size) == 0);
    return value;
  };
  CHECK(option(SOL_SOCKET, SO_KEEPALIVE) == 1);
  CHECK(option(IPPROTO_TCP, TCP_NODELAY) == 1);
  CHECK(option(IPPROTO_TCP, TCP_USER_TIMEOUT) == 5000);
  // The probes begin, and all of them have failed, within about the silence.
  const int idle = option(IPPROTO_TCP, TCP_KEEPIDLE);
  const int all = option(IPPROTO_TCP, TCP_KEEPINTVL) * option(IPPROTO_TCP, TCP_KEEPCNT);
  CHECK(idle + all <= 10);
}

TEST_CASE("a process that dies before all have come may come again") {
  const LoopbackPort held;
  const int port = held.number();
  std::vector<std::string> messages(3);
  std::latch came(1);
  in_threads(4, [&](int i) {
    if (i < 3) {
      if (i != 0) came.wait();
      // The first attempts of process 1 may find its predecessor not yet missed.
      do {
        messages[i] = message_of([&] { barrier(*tcp_rendezvous(place(i, 3, port), patience)); });
      } while (messages[i].ends_with("there is a process 1 already"));
      return;
    }
    const int first = connected_to(port);
    greet(first, 1, 3);
    // A second one under the same number learns that the first has been accepted.
    char answer[256];
    ssize_t size = 0;
    do {
      const int second = connected_to(port);
      greet(second, 1, 3);
      size = recv(second, answer, sizeof answer, 0);
      close(second);
    } while (size <= 16 ||
             std::string(answer + 16, static_cast<std::size_t>(size) - 16) != "there is a process 1 already");
    close(first);
    came.count_down();
  });
  CHECK(messages == std::vector<std::string>(3, nothing));
}

TEST_CASE("what another process says is printed without control characters") {
  const auto messages = outcomes(2, [&](int process, Rendezvous& rendezvous) {
    barrier(rendezvous);
    if (process == 1) rendezvous.abort("out of\x1b[2J \xe2\x80\xae paper\r\x01");
    barrier(rendezvous);
  });
  CHECK(messages[0] == "process 1 stopped: out of\\u001b[2J \\u202e paper\\u000d\\u0001");
}

TEST_CASE("beats tell process 0 what all others do, and the others what it does, until they leave") {
  const auto messages = outcomes(3, [&](int process, Rendezvous& rendezvous) {
    barrier(rendezvous);
    const Position own{.step = 10 + process, .call = 3, .instruction = 4, .waits = true, .moves = 5};
    const auto knows = [&](const std::vector<Heard>& heard) {
      for (const Heard& other : heard)
        if (other.position.step != 10 + other.process || other.signs == 0 || other.position.call != 3 ||
            other.position.instruction != 4 || !other.position.waits || other.position.moves != 5)
          return false;
      return heard.size() == (process == 0 ? 2 : 1);
    };
    while (!knows(rendezvous.beat(own))) std::this_thread::sleep_for(1ms);
    barrier(rendezvous);
    if (process == 0)
      while (!rendezvous.beat(own).empty()) std::this_thread::sleep_for(1ms);
  });
  CHECK(messages == std::vector<std::string>(3, nothing));
}
