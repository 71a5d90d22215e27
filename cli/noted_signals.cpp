#include "cli/noted_signals.h"

#include <cstring>

#include <fmt/format.h>

namespace parplan {
namespace {

volatile std::sig_atomic_t noted = 0;  // 0: no signal has this number

// The second one, of whichever kind, has its usual effect as soon as this returns: until then it is
// blocked.
extern "C" void note_signal(int signal) {
  if (noted == 0) {
    noted = signal;
    return;
  }
  struct sigaction usual {};
  usual.sa_handler = SIG_DFL;
  sigaction(signal, &usual, nullptr);
  raise(signal);
}

// Whoever started this process with the signal ignored (nohup, a shell's background job) wants it
// to stay so.
void note(int signal, struct sigaction& before) {
  sigaction(signal, nullptr, &before);
  if (before.sa_handler == SIG_IGN) return;
  struct sigaction action {};
  action.sa_handler = note_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigaction(signal, &action, nullptr);
}

}  // namespace

NotedSignals::NotedSignals() {
  noted = 0;
  note(SIGINT, interrupt_before_);
  note(SIGTERM, terminate_before_);
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
  const char* name = sigabbrev_np(signal);
  return name == nullptr ? fmt::format("signal {}", signal) : fmt::format("SIG{}", name);
}

}  // namespace parplan
