#include "runtime/launch/tcp_socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <vector>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

using Clock = std::chrono::steady_clock;

struct AddressList {
  addrinfo* first = nullptr;
  std::string failure;  // where `first` is null
  ~AddressList() {
    if (first != nullptr) freeaddrinfo(first);
  }
  AddressList() = default;
  AddressList(const AddressList&) = delete;
  AddressList& operator=(const AddressList&) = delete;
};

void resolve(const char* address, int port, int flags, AddressList& list) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  const int failure = getaddrinfo(address, std::to_string(port).c_str(), &hints, &list.first);
  if (failure != 0) {
    list.first = nullptr;
    list.failure = failure == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(failure);
  }
}

// Whether both ends of a connection are the same: a port of the range from which the system serves
// connecting sockets was connected to itself.
bool is_connected_to_itself(const Socket& socket) {
  sockaddr_storage own{}, other{};
  socklen_t own_size = sizeof own, other_size = sizeof other;
  return getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &own_size) == 0 &&
         getpeername(socket.get(), reinterpret_cast<sockaddr*>(&other), &other_size) == 0 && own_size == other_size &&
         std::memcmp(&own, &other, own_size) == 0;
}

}  // namespace

void switch_on(const Socket& socket, int level, int option) {
  const int on = 1;
  setsockopt(socket.get(), level, option, &on, sizeof on);
}

// Finds machines that vanished: with nothing to send by keepalive probes, otherwise by the lack of
// acknowledgements.
void prepare_connection(const Socket& socket, std::chrono::milliseconds silence) {
  switch_on(socket, IPPROTO_TCP, TCP_NODELAY);
  switch_on(socket, SOL_SOCKET, SO_KEEPALIVE);
  constexpr int probes = 3;
  const auto seconds = std::max<std::int64_t>(1, std::chrono::ceil<std::chrono::seconds>(silence).count());
  const auto limit = static_cast<unsigned>(silence.count());
  const int idle = static_cast<int>(std::clamp<std::int64_t>(seconds / 2, 1, 7200));
  const int interval = static_cast<int>(std::clamp<std::int64_t>((seconds - idle) / probes, 1, 7200));
  setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  setsockopt(socket.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &limit, sizeof limit);
}

std::string address_text(const std::string& address, int port) {
  return address.find(':') == std::string::npos ? fmt::format("{}:{}", address, port)
                                                : fmt::format("[{}]:{}", address, port);
}
int milliseconds_until(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<decltype(left)>(left, 0, 60000));
}

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.starts_with("127.");
}

Socket listen_at(const std::string& address, int port) {
  // A machine's own name may mean 127.0.1.1 in its /etc/hosts, so only literal loopback addresses
  // are bound as given.
  AddressList list;
  resolve(is_loopback(address) ? address.c_str() : nullptr, port, AI_PASSIVE, list);
  std::string failure = list.failure;
  std::vector<const addrinfo*> candidates;
  for (const addrinfo* a = list.first; a != nullptr; a = a->ai_next) candidates.push_back(a);
  // IPv6 first: a socket for all of its addresses takes IPv4 too.
  if (!is_loopback(address))
    std::stable_partition(candidates.begin(), candidates.end(),
                          [](const addrinfo* a) { return a->ai_family == AF_INET6; });
  for (const addrinfo* a : candidates) {
    Socket socket(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol));
    if (!socket) {
      failure = std::strerror(errno);
      continue;
    }
    switch_on(socket, SOL_SOCKET, SO_REUSEADDR);
    const int off = 0;
    if (a->ai_family == AF_INET6 && !is_loopback(address))
      setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (bind(socket.get(), a->ai_addr, a->ai_addrlen) == 0 && listen(socket.get(), 1024) == 0) return socket;
    failure = std::strerror(errno);
  }
  throw RunError(fmt::format("process 0 cannot listen at {}: {} (MASTER_PORT may name another port)",
                             address_text(address, port), failure));
}

int own_port(const Socket& socket) {
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0)
    throw RunError(fmt::format("the port of a socket: {}", std::strerror(errno)));
  const auto* v4 = reinterpret_cast<const sockaddr_in*>(&own);
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&own);
  return ntohs(own.ss_family == AF_INET6 ? v6->sin6_port : v4->sin_port);
}

std::string own_address(const Socket& socket) {
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  std::array<char, NI_MAXHOST> name{};
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0 ||
      getnameinfo(reinterpret_cast<const sockaddr*>(&own), size, name.data(), name.size(), nullptr, 0,
                  NI_NUMERICHOST) != 0)
    throw RunError("this process's own address cannot be found");
  return name.data();
}

// A connected socket, or none and why.
Socket connect_once(const std::string& address, int port, Clock::time_point deadline, std::string& failure) {
  AddressList list;
  resolve(address.c_str(), port, 0, list);
  if (list.first == nullptr) failure = list.failure;
  for (const addrinfo* a = list.first; a != nullptr; a = a->ai_next) {
    Socket socket(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol));
    int error = socket ? 0 : errno;
    if (socket && ::connect(socket.get(), a->ai_addr, a->ai_addrlen) != 0) {
      error = errno;
      pollfd ready{.fd = socket.get(), .events = POLLOUT, .revents = 0};
      if (error == EINPROGRESS) {
        error = ETIMEDOUT;
        if (poll(&ready, 1, milliseconds_until(deadline)) > 0) {
          socklen_t size = sizeof error;
          getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
        }
      }
    }
    if (error == 0 && is_connected_to_itself(socket)) error = ECONNREFUSED;
    if (error != 0) {
      failure = std::strerror(error);
      continue;
    }
    fcntl(socket.get(), F_SETFL, 0);  // blocking again
    return socket;
  }
  return {};
}

}  // namespace parplan
