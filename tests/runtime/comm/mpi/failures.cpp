// How a job over MPI ends when a process fails. Called with mpirun and a scenario, it starts itself
// as three processes in that scenario and compares what each of them caught. Where several detect
// the fault, one may hear of it from another before it detects it: such a line ends with the
// other's report.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "runtime/launch/find_rendezvous.h"
#include "tests/runtime/comm/mpi/numbers.h"

using namespace parplan;
using namespace std::chrono_literals;

namespace {

// Rank 1 fails while the others are in, or on their way to, a collective.
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

struct Scenario {
  std::string name;
  std::function<void(Rendezvous&)> run;
  std::array<std::vector<std::string>, 3> wanted;  // by process: the ways in which its line may end
};

std::array<std::vector<std::string>, 3> by_all(const std::vector<std::string>& endings) {
  return {endings, endings, endings};
}

const std::vector<Scenario> scenarios = {
    // The messages in flight are small: MPI can be finalised.
    {"small", [](Rendezvous& job) { one_fails_before_a_collective(job, 10); },
     by_all({"rank 1 stopped: out of paper"})},
    // Large ones cannot be cancelled: MPI stays open.
    {"large", [](Rendezvous& job) { one_fails_before_a_collective(job, 4000037); },
     by_all({"rank 1 stopped: out of paper"})},
    {"receive",
     [](Rendezvous& job) {
       const auto communicator = job.make_communicator({}, 1);
       std::vector<float> data(100);
       if (communicator->rank() == 1) communicator->abort("out of paper");
       communicator->receive(0, 1, 0, testing::elements(data));
     },
     by_all({"rank 1 stopped: out of paper"})},
    // Process 2 checks the rendezvous from time to time while it does something else.
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
     },
     by_all({"process 1 stopped: out of paper"})},
    {"leave",
     [](Rendezvous& job) {
       barrier(job);
       if (job.process() != 1) barrier(job);
     },
     {{{"process 1 has ended"}, {"nothing was thrown"}, {"process 1 has ended"}}}},
    {"mismatch",
     [](Rendezvous& job) {
       std::vector<int> ranks;
       for (int r = 0; r < job.processes(); ++r) ranks.push_back(r);
       const auto communicator = job.make_communicator({{.id = 4, .ranks = ranks}}, 1);
       std::vector<float> data(job.process() == 1 ? 11 : 10);
       communicator->all_reduce(0, 4, Reduction::sum, testing::elements(data));
     },
     by_all(
         {"group 4: rank 0 calls all_reduce (sum) of 10 fp32 elements, rank 1 all_reduce (sum) of 11 fp32 elements",
          "group 4: rank 1 calls all_reduce (sum) of 11 fp32 elements, rank 0 all_reduce (sum) of 10 fp32 elements",
          "group 4: rank 2 calls all_reduce (sum) of 10 fp32 elements, rank 1 all_reduce (sum) of 11 fp32 elements"})},
};

// Runs in mpirun: one line with what this process caught.
int run_scenario(const Scenario& scenario) {
  std::unique_ptr<Rendezvous> job = find_rendezvous();
  std::string line = fmt::format("process {}: ", job->process());
  try {
    scenario.run(*job);
    line += "nothing was thrown";
  } catch (const std::exception& error) {
    job->abort(error.what());
    line += error.what();
  }
  // In one piece: several processes write to one pipe.
  line += '\n';
  [[maybe_unused]] const ssize_t written = write(STDOUT_FILENO, line.data(), line.size());
  return 0;
}

std::vector<std::string> sorted_lines_of(const std::string& command) {
  std::vector<std::string> lines;
  FILE* output = popen(command.c_str(), "r");
  char line[4096];
  while (output != nullptr && std::fgets(line, sizeof line, output) != nullptr)
    if (std::string text = line; text.starts_with("process ")) lines.push_back(text.substr(0, text.size() - 1));
  if (output != nullptr) pclose(output);
  std::sort(lines.begin(), lines.end());
  return lines;
}

}  // namespace

int main(int count, char** words) {
  const bool inside = count == 2;
  const std::string name = count > 1 ? words[count - 1] : "";
  for (const Scenario& scenario : scenarios) {
    if (scenario.name != name) continue;
    try {
      if (inside) return run_scenario(scenario);
    } catch (const std::exception& error) {
      std::printf("%s\n", error.what());
      return 1;
    }
    const std::vector<std::string> lines =
        sorted_lines_of(fmt::format("'{}' -n 3 --oversubscribe '{}' {}", words[1], words[0], name));
    bool right = lines.size() == scenario.wanted.size();
    for (std::size_t p = 0; p < scenario.wanted.size(); ++p) {
      const std::vector<std::string>& endings = scenario.wanted[p];
      const std::string line = p < lines.size() ? lines[p] : "";
      fmt::print("process {} wanted\n    {}\n  got\n    {}\n", p, fmt::join(endings, "\n    "), line);
      right = right && line.starts_with(fmt::format("process {}: ", p)) &&
              std::any_of(endings.begin(), endings.end(),
                          [&](const std::string& ending) { return line.ends_with(ending); });
    }
    return right ? 0 : 1;
  }
  std::printf("%s [MPIRUN] SCENARIO\n", words[0]);
  return 2;
}
