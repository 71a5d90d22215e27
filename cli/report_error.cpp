#include "cli/report_error.h"

#include <exception>
#include <new>
#include <ostream>
#include <string>
#include <system_error>

#include <fmt/format.h>
#include <sys/resource.h>

#include "cli/commands.h"
#include "planner/base/allocated.h"
#include "planner/base/error.h"
#include "planner/base/text.h"
#include "planner/base/units.h"
#include "runtime/launch/agree_on_inputs.h"

namespace parplan {
namespace {

std::string memory_taken() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  const Bytes most(std::int64_t{used.ru_maxrss} * 1024);
  std::string text = fmt::format("this process held {} at most", format_bytes(most));
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    text += fmt::format(", and may address {} (ulimit -v)",
                        format_bytes(Bytes(static_cast<std::int64_t>(limit.rlim_cur))));
  return text;
}

// What is written of the exception that is being handled, and the exit code.
struct Said {
  std::string text;
  int code;
};

Said said_of_current_exception() {
  try {
    throw;
  } catch (const SaidElsewhere&) {
    return {"", exit_bad_input};
  } catch (const ConfigError& error) {
    return {printable(error.what()) + '\n', exit_bad_input};
  } catch (const RunError& error) {
    return {fmt::format("error: {}\n", printable(error.what())), exit_failed};
  } catch (const std::bad_alloc& error) {
    return {fmt::format("error: {}; {}\n", out_of_memory_text(error), memory_taken()), exit_failed};
  } catch (const std::exception& error) {
    const auto* of_system = dynamic_cast<const std::system_error*>(&error);
    if (of_system != nullptr && of_system->code() == std::errc::resource_unavailable_try_again)
      return {fmt::format("error: the system starts no more threads for this process: {}; ulimit -u and the limits of "
                          "its control group count them, their stacks count in ulimit -v, and --threads asks for "
                          "fewer\n",
                          error.what()),
              exit_failed};
    return {fmt::format("internal error (a bug of parplan: please report it with the command and its files): {}\n",
                        printable(error.what())),
            exit_bug};
  }
}

}  // namespace

// In one piece: several processes may write to the same terminal.
int report_error(std::ostream& err) {
  try {
    const Said said = said_of_current_exception();
    err << said.text << std::flush;
    return said.code;
  } catch (const std::bad_alloc&) {
    err << "error: out of memory\n" << std::flush;  // not even for more words
    return exit_failed;
  }
}

}  // namespace parplan
