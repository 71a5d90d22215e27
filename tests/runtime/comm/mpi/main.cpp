// Started by mpirun: every process runs the same test cases in the same order. Exits with 0 if no
// process failed.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <iostream>
#include <memory>
#include <numeric>

#include "runtime/launch/find_rendezvous.h"
#include "tests/runtime/comm/mpi/job.h"

namespace parplan::testing {
namespace {
std::unique_ptr<Rendezvous> joined;
}

Rendezvous& job() { return *joined; }

std::vector<int> all_ranks() {
  std::vector<int> ranks(static_cast<std::size_t>(job().processes()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

bool everywhere(bool here) {
  const std::byte own{here};
  bool all = true;
  for (const std::vector<std::byte>& other : job().all_gather({&own, 1})) all = all && other.front() == std::byte{1};
  return all;
}

}  // namespace parplan::testing

int main(int count, char** words) {
  using namespace parplan;
  try {
    testing::joined = find_rendezvous();
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  doctest::Context context(count, words);
  if (testing::job().process() != 0) context.setOption("minimal", true);
  const int failed = context.run();
  if (failed != 0) testing::joined->abort("a test failed");
  testing::joined.reset();
  return failed;
}
