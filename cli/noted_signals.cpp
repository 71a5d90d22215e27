#include "cli/noted_signals.h"

#include <fmt/format.h>

namespace parplan {
namespace {

volatile std::sig_atomic_t noted = 0;  // 0: no signal has this number

extern "C" void note_signal(int signal) { noted = signal; }

}  // namespace

NotedSignals::NotedSignals() {
  noted = 0;
  struct sigaction action {};
  action.sa_handler = note_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, &interrupt_before_);
  sigaction(SIGTERM, &action, &terminate_before_);
}

NotedSignals::~NotedSignals() {
  sigaction(SIGINT, &interrupt_before_, nullptr);
  sigaction(SIGTERM, &terminate_before_, nullptr);
}

std::optional<int> NotedSignals::received() {
  const int signal = noted;
  return signal == 0 ? std::nullopt : std::optional(signal);
}

std::string signal_name(int signal) {
  if (signal == SIGINT) return "SIGINT";
  if (signal == SIGTERM) return "SIGTERM";
  return fmt::format("signal {}", signal);
}

}  // namespace parplan
