#include "planner/plan/offload.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>
#include <string>

#include "planner/base/enum_index.h"
#include "planner/base/error.h"

namespace parplan {
namespace {

std::string why_not(const std::string& text) {
  try {
    parse_offload(text);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("every offload has a word of its own, a number, and the parts that the word names") {
  std::set<std::string> words;
  std::set<int> numbers;
  for (const Offload& offload : all_offloads()) {
    CAPTURE(name(offload));
    CHECK(parse_offload(name(offload)) == offload);
    CHECK(offload_of(number_of(offload)) == offload);
    CHECK(words.insert(name(offload)).second);
    CHECK(numbers.insert(number_of(offload)).second);
    CHECK(!wrong_with(offload));
    CHECK(!uses(on_host_instead(offload), Home::nvme));
    CHECK(includes(offload, on_host_instead(offload)));
  }
  // Without the optimizer's state, activations alone in three homes; with it in two homes,
  // gradients, parameters and activations in three each.
  CHECK(all_offloads().size() == 3 + 2 * 3 * 3 * 3);
  CHECK(all_offloads().front() == Offload{});
  CHECK(name(all_offloads().back()) == "optimizer:nvme+gradients:nvme+parameters:nvme+activations:nvme");
  // All others are refused, in words.
  int refused = 0;
  for (int number = 0; number < 3 * 3 * 3 * 3; ++number)
    if (std::ranges::find(all_offloads(), offload_of(number)) == all_offloads().end()) {
      CHECK(wrong_with(offload_of(number)));
      CHECK(why_not(name(offload_of(number))).find("there is no offload") != std::string::npos);
      ++refused;
    }
  CHECK(refused == 81 - 57);
}

TEST_CASE("an offload is written in one way, and read with its parts in any order") {
  CHECK(name(Offload{}) == "none");
  CHECK(parse_offload("activations+parameters:nvme+optimizer:nvme") ==
        Offload{.optimizer = Home::nvme, .parameters = Home::nvme, .activations = Home::host});
  CHECK(name(parse_offload("activations+parameters:nvme+optimizer:nvme")) ==
        "optimizer:nvme+parameters:nvme+activations");
  CHECK(phrase(Offload{}) == "without anything in host memory");
  CHECK(phrase({.activations = Home::host}) == "with what layers keep for their backward in host memory");
  CHECK(phrase({.optimizer = Home::host, .gradients = Home::host, .parameters = Home::host}) ==
        "with the optimizer's state, gradients and parameters in host memory");
  CHECK(phrase({.optimizer = Home::nvme, .gradients = Home::host, .parameters = Home::nvme}) ==
        "with the optimizer's state and parameters on NVMe, and gradients in host memory");
  CHECK(phrase({.optimizer = Home::host, .gradients = Home::nvme}) ==
        "with gradients on NVMe, and the optimizer's state in host memory");
}

TEST_CASE("a word that is no offload says what is wrong with it, and what to write") {
  const std::string parts =
      "optimizer, optimizer:nvme, gradients, gradients:nvme, parameters, parameters:nvme, activations, "
      "activations:nvme";
  CHECK(why_not("optimiser") ==
        "error: expected none, or parts joined by +: " + parts + "; found 'optimiser'; did you mean 'optimizer'?");
  CHECK(why_not("optimizer+") == "error: expected none, or parts joined by +: " + parts + "; found 'optimizer+'");
  CHECK(why_not("none+activations").starts_with("error: expected none, or parts joined by +: "));
  CHECK(why_not("optimizer:nvme+optimizer") ==
        "error: 'optimizer:nvme+optimizer' names optimizer twice; name each part once");
  CHECK(why_not("parameters:nvme") ==
        "error: there is no offload parameters:nvme: parameters are where the host updates them only with the "
        "optimizer's state; legal: optimizer+parameters:nvme or optimizer:nvme+parameters:nvme, or none");
  CHECK(why_not("gradients:nvme+activations") ==
        "error: there is no offload gradients:nvme+activations: gradients are where the host updates them only with "
        "the optimizer's state; legal: optimizer+gradients:nvme or optimizer:nvme+gradients:nvme, or none");
}

}  // namespace parplan
