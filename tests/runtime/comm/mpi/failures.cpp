// Run by mpirun with the name of a scenario: how a job over MPI ends when a process fails. Each process prints, in one line, what it
// caught.
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>

#include <fmt/format.h>

#include "runtime/launch/launch.h"
#include "tests/runtime/comm/mpi/numbers.h"

using namespace parplan;
using namespace std::chrono_literals;

namespace {

// Rank 1 fails while the others are in, or come to, a collective.
void one_fails_before_a_collective(Rendezvous& job, std::int64_t count) {
  std::vector<int> ranks;
  for (int r = 0; r < job.processes(); ++r) ranks.push_back(r);
  const auto communicator = job.make_communicator({{.id = 0, .ranks = ranks}}, 1);
  std::vector<float> data = testing::contribution(count, communicator->rank());
  communicator->all_reduce(0, 0, Reduction::sum, testing::elements(data));
  try {
    if (communicator->rank() == 1) {
      std::this_thread::sleep_for(50ms);
      throw std::runtime_error("out of paper");
    }
    if (communicator->rank() == 2) std::this_thread::sleep_for(100ms);
    communicator->all_reduce(0, 0, Reduction::sum, testing::elements(data));
  } catch (const std::exception& error) {
    communicator->abort(error.what());
    communicator->abort("out of ink");
    communicator->check();
  }
}

const std::map<std::string, std::function<void(Rendezvous&)>> scenarios = {
    {"small", [](Rendezvous& job) { one_fails_before_a_collective(job, 10); }},
    {"large", [](Rendezvous& job) { one_fails_before_a_collective(job, 4000037); }},
    {"receive",
     [](Rendezvous& job) {
       const auto communicator = job.make_communicator({}, 1);
       std::vector<float> data(100);
       if (communicator->rank() == 1) communicator->abort("out of paper");
       communicator->receive(0, 1, 0, testing::elements(data));
     }},
    {"rendezvous",
     [](Rendezvous& job) {
       barrier(job);
       if (job.process() == 1) {
         std::this_thread::sleep_for(50ms);
         job.abort("out of paper");
       }
       while (job.process() == 2) {
         job.check();
         std::this_thread::sleep_for(1ms);
       }
       barrier(job);
     }},
    {"leave",
     [](Rendezvous& job) {
       barrier(job);
       if (job.process() != 1) barrier(job);
     }},
    {"mismatch",
     [](Rendezvous& job) {
       std::vector<int> ranks;
       for (int r = 0; r < job.processes(); ++r) ranks.push_back(r);
       const auto communicator = job.make_communicator({{.id = 4, .ranks = ranks}}, 1);
       std::vector<float> data(job.process() == 1 ? 11 : 10);
       communicator->all_reduce(0, 4, Reduction::sum, testing::elements(data));
     }},
};

}  // namespace

int main(int count, char** words) {
  const auto scenario = scenarios.find(count > 1 ? words[1] : "");
  if (scenario == scenarios.end()) return 2;
  try {
    const std::unique_ptr<Rendezvous> job = find_rendezvous();
    std::string line = fmt::format("process {}: ", job->process());
    try {
      scenario->second(*job);
      line += "nothing was thrown";
    } catch (const std::exception& error) {
      job->abort(error.what());
      line += error.what();
    }
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
  return 0;
}
