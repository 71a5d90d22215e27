#pragma once

namespace parplan {

// A port of 127.0.0.1 (and of ::1, where there is IPv6) on which process 0 of a job can listen. It
// is bound for as long as this lives, so that no other program gets it from the system, neither to
// listen on nor for a connection of its own. Only a socket with SO_REUSEADDR that names the number,
// like process 0's, can listen there: Linux allows it while neither of the two sockets is
// listening.
class LoopbackPort {
 public:
  LoopbackPort();  // RunError where there is none
  ~LoopbackPort();
  LoopbackPort(const LoopbackPort&) = delete;
  LoopbackPort& operator=(const LoopbackPort&) = delete;

  int number() const { return number_; }

 private:
  int number_ = 0;
  int sockets_[2] = {-1, -1};  // of IPv4 and IPv6
};

}  // namespace parplan
