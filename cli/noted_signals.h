#pragma once

#include <csignal>
#include <optional>
#include <string>

namespace parplan {

// While this lives, the first SIGINT or SIGTERM is noted, so that work can end in good order; a
// second one, of either kind, ends the process as usual. A signal that was ignored before stays
// ignored. There is one at a time.
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
