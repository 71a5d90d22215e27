#include "cli/progress.h"

#include <doctest/doctest.h>

#include <sstream>
#include <stdexcept>
#include <thread>

namespace parplan {
namespace {

using namespace std::chrono_literals;

struct Watched {
  std::ostringstream out;
  std::ostringstream err;
  Terminal terminal{.out = out, .err = err, .watched = true};
};

TEST_CASE("progress is one line that is written over and gone at the end") {
  Watched screen;
  {
    ProgressLine progress(screen.terminal, Talk::wanted, 0ms);
    progress.show("simulated 10 of 64");
    std::this_thread::sleep_for(110ms);
    progress.show("done");
  }
  CHECK(screen.err.str() == "\rsimulated 10 of 64\rdone              \r                  \r");
  CHECK(screen.out.str() == "");
}

TEST_CASE("progress is shown at most ten times a second") {
  Watched screen;
  ProgressLine progress(screen.terminal, Talk::wanted, 0ms);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 1000; ++i) progress.show("x");
  CHECK(screen.err.str().starts_with("\rx"));
  const auto tenths = (std::chrono::steady_clock::now() - begin) / 100ms;
  CHECK(static_cast<std::int64_t>(screen.err.str().size()) <= 2 * (tenths + 1));  // two characters each
}

TEST_CASE("work that is done within its patience shows nothing, not even a cleared line") {
  Watched screen;
  {
    ProgressLine progress(screen.terminal, Talk::wanted, 1h);
    progress.show("simulated 10 of 64");
  }
  CHECK(screen.err.str() == "");
}

TEST_CASE("progress is not shown where nobody watches or talk is not wanted") {
  Watched screen;
  ProgressLine(screen.terminal, Talk::quiet, 0ms).show("x");
  screen.terminal.watched = false;
  ProgressLine(screen.terminal, Talk::wanted, 0ms).show("x");
  CHECK(screen.err.str() == "");
}

TEST_CASE("an error that ends the work leaves a clear line for its message") {
  Watched screen;
  try {
    ProgressLine progress(screen.terminal, Talk::wanted, 0ms);
    progress.show("abc");
    throw std::runtime_error("stopped");
  } catch (const std::runtime_error&) {
  }
  CHECK(screen.err.str() == "\rabc\r   \r");
}

}  // namespace
}  // namespace parplan
