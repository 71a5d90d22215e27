#include <doctest/doctest.h>

#include <spawn.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <fmt/core.h>
#include <fmt/ranges.h>

#include "planner/base/error.h"
#include "runtime/comm/gpu_plugin.h"
#include "tests/gpu/device.h"
#include "tests/temporary_folder.h"

extern char** environ;

using namespace parplan;

namespace {

// NCCL refuses ranks whose hosts and GPUs are equal. A process may give its host another name
// (NCCL_HOSTID); NCCL then takes the ranks for ranks of several machines and joins them by sockets,
// here over the loopback device. It is reported to work with 2.29.7.
constexpr const char* recipe[] = {"NCCL_NET=Socket",     "NCCL_NET_PLUGIN=none", "NCCL_SOCKET_IFNAME=lo",
                                  "NCCL_IB_DISABLE=1",   "NCCL_P2P_DISABLE=1",   "NCCL_SHM_DISABLE=1",
                                  "NCCL_MNNVL_ENABLE=0", "NCCL_NVLS_ENABLE=0",   "NCCL_RAS_ENABLE=0",
                                  "NCCL_PROTO=Simple",   "NCCL_MAX_NCHANNELS=2"};
constexpr const char* test_name = "several processes are ranks of NCCL on one GPU";
constexpr int ranks = 3;
constexpr std::int64_t count = 10'000;  // not divisible by 3
constexpr auto patience = std::chrono::seconds(240);

std::optional<std::string> environment(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

// Rank 0 writes the id beside its final name and renames it, so that nobody reads half of it.
std::vector<std::byte> exchange_id(Gpu& gpu, int rank, const std::filesystem::path& file) {
  if (rank == 0) {
    const std::vector<std::byte> id = gpu.make_nccl_id();
    const std::filesystem::path part = file.string() + ".part";
    std::ofstream(part, std::ios::binary)
        .write(reinterpret_cast<const char*>(id.data()), static_cast<std::streamsize>(id.size()));
    std::filesystem::rename(part, file);
    return id;
  }
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (!std::filesystem::exists(file)) {
    if (std::chrono::steady_clock::now() > deadline) throw RunError("rank 0 makes no id");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  std::ifstream in(file, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  std::vector<std::byte> id(text.size());
  std::memcpy(id.data(), text.data(), text.size());
  return id;
}

// The work of one process. Whole numbers: every order of adding is exact.
void be_rank(Gpu& gpu, int rank, const std::filesystem::path& file) {
  const std::unique_ptr<Backend> backend = gpu.make_backend(0, {});
  backend->attach_thread();
  const std::unique_ptr<Communicator> communicator = gpu.make_nccl_communicator(
      exchange_id(gpu, rank, file), rank, ranks, {{.id = 0, .ranks = {0, 1, 2}}, {.id = 1, .ranks = {0, 2}}},
      {{0, 1, 0}, {1, 2, 0}, {2, 0, 0}}, *backend);
  auto* device = static_cast<float*>(backend->allocate(Bytes(4 * count)));
  auto* received = static_cast<float*>(backend->allocate(Bytes(4 * count)));
  communicator->register_memory(device, Bytes(4 * count));
  std::vector<float> host(count);
  const Elements data = {.data = device, .count = count};
  const auto bring = [&](float value) {
    std::fill(host.begin(), host.end(), value);
    backend->copy(0, device, host.data(), Bytes(4 * count));
    backend->synchronize();
  };
  const auto expect = [&](const char* what, const float* where, Chunk part, float wanted) {
    backend->copy(0, host.data(), where, Bytes(4 * count));
    backend->synchronize();
    communicator->check();
    for (std::int64_t i = part.begin; i < part.end; ++i)
      if (host[i] != wanted)
        throw RunError(fmt::format("rank {}: {}: element {} is {}, not {}", rank, what, i, host[i], wanted));
  };
  const float mine = static_cast<float>(rank + 1);
  const Chunk everything = {.begin = 0, .end = count};
  bring(mine);
  communicator->all_reduce(0, 0, Reduction::sum, data);
  expect("all_reduce", device, everything, 6.0f);
  bring(mine);
  communicator->all_reduce(0, 0, Reduction::max, data);
  expect("maximum", device, everything, 3.0f);
  bring(mine);
  communicator->reduce_scatter(0, 0, data);
  expect("reduce_scatter", device, chunk_of(count, ranks, rank), 6.0f);
  bring(mine);
  communicator->all_gather(0, 0, data);
  for (int member = 0; member < ranks; ++member)
    expect("all_gather", device, chunk_of(count, ranks, member), static_cast<float>(member + 1));
  if (rank != 1) {  // two members divide the count
    const int member = rank / 2;
    bring(mine);
    communicator->reduce_scatter(0, 1, data);
    expect("reduce_scatter of two", device, chunk_of(count, 2, member), 4.0f);
    communicator->all_gather(0, 1, data);
    expect("all_gather of two", device, everything, 4.0f);
  }
  bring(mine);
  const std::int64_t divisible = count / ranks * ranks;
  communicator->all_to_all(0, 0, {.data = device, .count = divisible}, {.data = received, .count = divisible});
  for (int member = 0; member < ranks; ++member)
    expect("all_to_all", received, chunk_of(divisible, ranks, member), static_cast<float>(member + 1));
  bring(mine);
  const SendTicket ticket = communicator->send(1, (rank + 1) % ranks, 0, data);
  communicator->receive(2, (rank + 2) % ranks, 0, {.data = received, .count = count});
  communicator->wait_sent(1, ticket);
  backend->synchronize();
  expect("receive", received, everything, static_cast<float>((rank + 2) % ranks + 1));
  backend->release(received);
  backend->release(device);
}

pid_t start_rank(int rank, const std::filesystem::path& file) {
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable)
    if (std::strncmp(*variable, "NCCL_", 5) != 0) variables.emplace_back(*variable);
  for (const char* variable : recipe) variables.emplace_back(variable);
  variables.push_back(fmt::format("NCCL_HOSTID=parplan-test-{}", rank));
  variables.push_back(fmt::format("PARPLAN_TEST_RANK={}", rank));
  variables.push_back("PARPLAN_TEST_NCCL_ID=" + file.string());
  std::vector<char*> environment_of_rank;
  for (std::string& variable : variables) environment_of_rank.push_back(variable.data());
  environment_of_rank.push_back(nullptr);
  std::string program = "/proc/self/exe", filter = fmt::format("--test-case={}", test_name);
  char* arguments[] = {program.data(), filter.data(), nullptr};
  pid_t process = 0;
  const int error = posix_spawn(&process, program.c_str(), nullptr, nullptr, arguments, environment_of_rank.data());
  if (error != 0) throw RunError(fmt::format("cannot start rank {}: {}", rank, std::strerror(error)));
  return process;
}

}  // namespace

TEST_CASE("several processes are ranks of NCCL on one GPU") {
  if (const auto rank = environment("PARPLAN_TEST_RANK")) {
    const OpenedGpu opened = open_gpu();
    REQUIRE_MESSAGE(opened.gpu != nullptr, opened.missing);
    be_rank(*opened.gpu, std::stoi(*rank), *environment("PARPLAN_TEST_NCCL_ID"));
    return;
  }
  const auto gpu = testing::gpu_or_skip();
  if (gpu == nullptr) return;
  if (testing::is_emulated(*gpu)) {
    MESSAGE("for a GPU only: ranks of the emulated NCCL are threads of one process");
    return;
  }
  const testing::TemporaryFolder folder;
  std::vector<pid_t> processes;
  for (int rank = 0; rank < ranks; ++rank) processes.push_back(start_rank(rank, folder / "id"));
  // Once a rank has failed, the others wait for it in vain.
  const auto deadline = std::chrono::steady_clock::now() + patience;
  std::vector<std::string> failures;
  std::size_t running = processes.size();
  while (running > 0) {
    const bool late = std::chrono::steady_clock::now() > deadline;
    if (late) failures.push_back("the ranks do not end");
    for (std::size_t rank = 0; rank < processes.size(); ++rank) {
      if (processes[rank] == 0) continue;
      if (!failures.empty()) kill(processes[rank], SIGKILL);
      int status = 0;
      if (waitpid(processes[rank], &status, failures.empty() ? WNOHANG : 0) == 0) continue;
      processes[rank] = 0;
      --running;
      if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        failures.push_back(fmt::format("rank {} failed (status {})", rank, status));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  CHECK_MESSAGE(failures.empty(), fmt::format("{}", fmt::join(failures, "; ")));
}
