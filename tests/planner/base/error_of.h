#pragma once

#include <string>

namespace parplan {

// The message of the `Error` that `act` throws; says so if it throws none.
template <typename Error, typename Act>
std::string error_of(Act act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace parplan
