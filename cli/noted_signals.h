#pragma once

#include <csignal>
#include <optional>
#include <string>

namespace parplan {

// While this lives, the first SIGINT and the first SIGTERM are noted, so that work can end in good
// order; a second one of the same kind ends the process as usual. There is one at a time.
class NotedSignals {
 public:
  NotedSignals();
  ~NotedSignals();
  NotedSignals(const NotedSignals&) = delete;
  NotedSignals& operator=(const NotedSignals&) = delete;

  static std::optional<int> received();

 private:
  struct sigaction interrupt_before_ {};
  struct sigaction terminate_before_ {};
};

// "SIGTERM".
std::string signal_name(int signal);

}  // namespace parplan
