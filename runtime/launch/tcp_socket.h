#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <utility>

#include <unistd.h>

namespace parplan {

// Connections that have not said whose they are: how many there may be, and for how long each.
inline constexpr std::size_t most_strangers = 256;
inline constexpr std::chrono::seconds stranger_patience(10);

// The descriptor of a socket, or none.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~Socket() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  int get() const { return descriptor_; }
  explicit operator bool() const { return descriptor_ >= 0; }

 private:
  int descriptor_ = -1;
};

void switch_on(const Socket& socket, int level, int option);

// For a connection between processes of a job: small messages leave at once, and the system gives
// it up when the other machine has acknowledged nothing for `silence`.
void prepare_connection(const Socket& socket, std::chrono::milliseconds silence);

// "node1:29500", "[::1]:29500".
std::string address_text(const std::string& address, int port);

bool is_loopback(const std::string& address);

// Listens on that address alone if it is a loopback address, otherwise on all addresses of the
// machine. Port 0: one that the system chooses. RunError where it cannot.
Socket listen_at(const std::string& address, int port);

// The port of a socket that listens, and the address of this end of a connection.
int own_port(const Socket& socket);
std::string own_address(const Socket& socket);

// A connected socket, or none and why.
Socket connect_once(const std::string& address, int port, std::chrono::steady_clock::time_point deadline,
                    std::string& failure);

// For poll: at most a minute.
int milliseconds_until(std::chrono::steady_clock::time_point deadline);

}  // namespace parplan
