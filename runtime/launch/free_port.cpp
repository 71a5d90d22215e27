#include "runtime/launch/free_port.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {

int free_loopback_port() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  const bool found = listener >= 0 && bind(listener, reinterpret_cast<const sockaddr*>(&address), size) == 0 &&
                     getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  const int error = errno;
  if (listener >= 0) close(listener);
  if (!found) throw RunError(fmt::format("no free port at 127.0.0.1: {}", std::strerror(error)));
  return ntohs(address.sin_port);
}

}  // namespace parplan
