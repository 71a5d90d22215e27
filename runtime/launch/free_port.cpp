#include "runtime/launch/free_port.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

int new_socket(int family) {
  const int made = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  if (made >= 0 && family == AF_INET6) setsockopt(made, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
  return made;
}

// Called after binding: a port that the system chooses must not be shared, even with a process that
// allows it.
void allow_a_listener(int socket) {
  const int on = 1;
  setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
}

// The socket, or -1 with errno after closing it.
template <class Address>
int bound(int made, const Address& address) {
  if (made >= 0 && bind(made, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
    allow_a_listener(made);
    return made;
  }
  const int error = errno;
  if (made >= 0) close(made);
  errno = error;
  return -1;
}

// A socket on a port number chosen by the system, or -1 with errno.
int bind_any(int& number) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int made = bound(new_socket(AF_INET), address);
  socklen_t size = sizeof address;
  if (made >= 0) getsockname(made, reinterpret_cast<sockaddr*>(&address), &size);  // it cannot fail for an own socket
  number = ntohs(address.sin_port);
  return made;
}

// A socket on the same number of ::1, or -1 with errno.
int bind_same(int number) {
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_loopback;
  address.sin6_port = htons(static_cast<std::uint16_t>(number));
  return bound(new_socket(AF_INET6), address);
}

}  // namespace

LoopbackPort::LoopbackPort() {
  constexpr int most_attempts = 100;
  for (int attempt = 0; attempt < most_attempts; ++attempt) {
    sockets_[0] = bind_any(number_);
    if (sockets_[0] < 0) break;
    sockets_[1] = bind_same(number_);
    if (sockets_[1] >= 0 || errno != EADDRINUSE) return;  // or there is no IPv6
    close(sockets_[0]);
  }
  throw RunError(fmt::format("no free port at 127.0.0.1: {}", std::strerror(errno)));
}

LoopbackPort::~LoopbackPort() {
  for (const int socket : sockets_)
    if (socket >= 0) close(socket);
}

}  // namespace parplan
