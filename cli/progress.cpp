#include "cli/progress.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ostream.h>

namespace parplan {

ProgressLine::ProgressLine(Terminal& terminal, Talk talk, std::chrono::milliseconds patience)
    : terminal_(terminal),
      shown_at_all_(terminal.watched && talk == Talk::wanted),
      next_(std::chrono::steady_clock::now() + patience) {}

void ProgressLine::show(const std::string& text) {
  if (!shown_at_all_) return;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) return;
  next_ = now + std::chrono::milliseconds(100);
  fmt::print(terminal_.err, "\r{:{}}", text, width_);
  terminal_.err.flush();
  width_ = std::max(width_, text.size());
}

void ProgressLine::clear() {
  if (width_ == 0) return;
  // The destructor calls this: nothing here throws.
  terminal_.err.put('\r');
  for (std::size_t i = 0; i < width_; ++i) terminal_.err.put(' ');
  terminal_.err.put('\r');
  terminal_.err.flush();
  width_ = 0;
}

}  // namespace parplan
