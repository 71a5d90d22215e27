#include "cli/report_error.h"

#include <exception>
#include <new>

#include "cli/commands.h"
#include "planner/base/error.h"
#include "runtime/launch/agree_on_inputs.h"

namespace parplan {

int report_error(std::ostream& err) {
  try {
    throw;
  } catch (const SaidElsewhere&) {
    return exit_bad_input;
  } catch (const ConfigError& error) {
    err << error.what() << '\n';
    return exit_bad_input;
  } catch (const RunError& error) {
    err << "error: " << error.what() << '\n';
    return exit_failed;
  } catch (const std::bad_alloc&) {
    err << "error: out of memory\n";
    return exit_failed;
  } catch (const std::exception& error) {
    err << "internal error (a bug of parplan: please report it with the command and its files): " << error.what()
        << '\n';
    return exit_bug;
  }
}

}  // namespace parplan
