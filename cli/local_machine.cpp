#include "cli/local_machine.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <sched.h>
#include <sys/file.h>
#include <unistd.h>

#include <fmt/format.h>

#include "cli/version.h"
#include "planner/base/error.h"
#include "planner/base/file.h"
#include "planner/base/yaml.h"
#include "planner/cluster/node_layout.h"
#include "runtime/device/cpu/instruction_sets.h"
#include "runtime/probe_cpu.h"

namespace parplan {
namespace {

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Physical memory, or the limit of the control group where that is lower.
Bytes machine_memory() {
  std::int64_t bytes = std::int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  std::istringstream limit(first_line("/sys/fs/cgroup/memory.max"));
  if (std::int64_t allowed = 0; limit >> allowed && allowed > 0) bytes = std::min(bytes, allowed);
  return Bytes(bytes);
}

// FNV-1a (Fowler, Noll, Vo), for a file name.
std::uint32_t hash_of(const std::string& text) {
  std::uint32_t hash = 0x811c9dc5u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x01000193u;
  return hash;
}

// How fast a group of threads moves data, in the terms of planner/cost/shared_memory.cpp: an
// all-reduce of S bytes over n ranks takes 2 (hop + (n - 1) / n * S / bandwidth). The hop comes
// from the smallest buffer; the bandwidth is the geometric mean over buffers of the sizes that
// training uses.
struct LinkFit {
  Seconds hop;
  BytesPerSecond bandwidth;
};
LinkFit fit_link(const std::vector<MeasuredTransfer>& transfers, int ranks) {
  constexpr Bytes smallest_of_training{64 * 1024};
  const Seconds hop = transfers.front().time / 2.0;
  double logarithms = 0.0;
  int count = 0;
  for (const MeasuredTransfer& transfer : transfers) {
    if (transfer.bytes < smallest_of_training) continue;
    const Seconds moving = std::max(transfer.time / 2.0 - hop, transfer.time / 20.0);
    logarithms += std::log(static_cast<double>(transfer.bytes.count) * (ranks - 1) / ranks / moving.value);
    ++count;
  }
  return {.hop = hop, .bandwidth = BytesPerSecond(std::exp(logarithms / count))};
}

// 1, 2, 4 ... and all of them.
std::vector<int> counts_to_measure(int cores) {
  std::vector<int> counts;
  for (int count = 1; count < cores; count *= 2) counts.push_back(count);
  counts.push_back(cores);
  return counts;
}

// Three significant digits: measurements are no more accurate, and files stay readable.
template <class Unit>
Unit rounded(Unit value) {
  return Unit(std::stod(fmt::format("{:.3g}", value.value)));
}

}  // namespace

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name")) {
      const std::size_t begin = line.find_first_not_of(" \t", line.find(':') + 1);
      if (begin != std::string::npos) return line.substr(begin);
    }
  return "unknown processor";
}

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown host";
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  return fmt::format("{:04}-{:02}-{:02}", parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday);
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int cores =
      sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  std::istringstream limit(first_line("/sys/fs/cgroup/cpu.max"));  // "200000 100000" or "max 100000"
  double quota = 0.0;
  double period = 0.0;
  if (limit >> quota >> period && quota > 0.0 && period > 0.0)
    cores = std::min(cores, static_cast<int>(std::ceil(quota / period)));
  return std::max(cores, 1);
}

std::filesystem::path local_machine_file() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::filesystem::path(value == nullptr ? "" : value);
  };
  std::filesystem::path folder = variable("XDG_CACHE_HOME");
  if (folder.empty()) {
    folder = variable("HOME");
    if (folder.empty()) return {};
    folder /= ".cache";
  }
  return folder / "parplan" /
         fmt::format("machine-{:08x}.yaml",
                     hash_of(fmt::format("{}|{}|{}", processor_name(), usable_cores(), version())));
}

Cluster probe_local_machine() {
  const int cores = usable_cores();
  Cluster cluster;
  cluster.name = "this-machine";
  cluster.groups.front().nodes = 1;
  cluster.measured_on = fmt::format("{} on {}", today(), host_name());
  cluster.sources.push_back(
      fmt::format("parplan {}: probe of {} threads, kernels for {}", version(), cores, chosen_cpu_instruction_set()));

  DeviceKind& device = cluster.groups.front().device;
  device.name = "cpu-core";
  device.title = fmt::format("One core of {}", processor_name());
  device.backend = BackendKind::cpu;
  device.memory_capacity = Bytes(machine_memory().count / cores);
  device.overlaps_communication = false;
  device.kernel_launch = rounded(measure_kernel_launch());
  for (const int active : counts_to_measure(cores)) {
    const MeasuredRates rates = measure_rates(active);
    device.rates.push_back({.active = active,
                            .matrix_fp32 = rounded(rates.matrix),
                            .matrix_half = {},
                            .vector = rounded(rates.vector),
                            .memory = rounded(rates.memory)});
    for (const Rate rate : {Rate::matrix_fp32, Rate::vector, Rate::memory, Rate::kernel_launch})
      device.rates.back().origins[rate] = Origin::measured;
  }
  NodeLayout layout{.name = "this-machine",
                    .devices = cores,
                    .intra = Intra::memory,
                    .bandwidth = device.rates.front().memory,
                    .latency = Seconds(0.0),
                    .nics = {}};
  if (cores > 1) {
    const LinkFit fit = fit_link(measure_all_reduce(cores), cores);
    layout.bandwidth = rounded(fit.bandwidth);
    layout.latency = rounded(fit.hop);
  }
  cluster.groups.front().node = build_node(layout, device);
  return cluster;
}

namespace {

// Threads of other programs that run or wait for a core during a tenth of a second; the load
// average would still count a finished build. 0 where the system does not tell.
int others_at_work() {
  int least = std::numeric_limits<int>::max();
  for (int sample = 0; sample < 5; ++sample) {
    if (sample > 0) std::this_thread::sleep_for(std::chrono::milliseconds(25));
    std::istringstream words(first_line("/proc/loadavg"));  // "0.50 0.40 0.30 2/345 6789": running/all
    double average = 0.0;
    int running = 1;
    words >> average >> average >> average >> running;
    least = std::min(least, running - 1);  // this thread
  }
  return std::max(least, 0);
}

std::optional<Cluster> read_machine(const std::filesystem::path& file,
                                    const std::function<void(const std::string&)>& say) {
  std::error_code ignored;
  if (file.empty() || !std::filesystem::exists(file, ignored)) return std::nullopt;
  try {
    Cluster cluster = read_cluster(YamlNode::load(file.string()));
    if (const auto problem = problem_with(cluster)) throw ConfigError({.file = file.string()}, *problem);
    return cluster;
  } catch (const ConfigError& error) {
    say(fmt::format("the cached numbers of this machine cannot be used ({})", error.what()));
    return std::nullopt;
  }
}

// Numbers that were measured beside other programs serve as long as the machine is busy.
std::optional<Cluster> cached_machine(const std::function<void(const std::string&)>& say) {
  if (std::optional<Cluster> quiet = read_machine(local_machine_file(), say)) return quiet;
  std::optional<Cluster> busy = read_machine(busy_machine_file(), say);
  if (!busy) return std::nullopt;
  if (others_at_work() == 0) {
    say("the cached numbers of this machine were measured while other programs were at work; it is quiet now");
    return std::nullopt;
  }
  say("note: the numbers of this machine are low: they were measured while other programs were at work, and some still "
      "are; --measure-again measures now");
  return busy;
}

// Held while one process measures: the lock of a file beside the numbers, which ends with the
// process. Where no such file can be made, nobody waits.
class Measuring {
 public:
  explicit Measuring(const std::function<void(const std::string&)>& say) {
    std::filesystem::path file = local_machine_file();
    if (file.empty()) return;
    std::error_code ignored;
    std::filesystem::create_directories(file.parent_path(), ignored);
    file.replace_extension(".lock");
    file_ = open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file_ < 0 || flock(file_, LOCK_EX | LOCK_NB) == 0) return;
    waited_ = true;
    say("another parplan measures this machine: waiting for its numbers");
    while (flock(file_, LOCK_EX) != 0 && errno == EINTR) {
    }
  }
  ~Measuring() {
    if (file_ >= 0) close(file_);
  }
  Measuring(const Measuring&) = delete;
  Measuring& operator=(const Measuring&) = delete;

  bool has_waited() const { return waited_; }

 private:
  int file_ = -1;
  bool waited_ = false;
};

}  // namespace

std::filesystem::path busy_machine_file() {
  std::filesystem::path file = local_machine_file();
  if (!file.empty()) file.replace_filename(fmt::format("{}-busy.yaml", file.stem().string()));
  return file;
}

Cluster local_machine(LocalNumbers numbers, const std::function<void(const std::string&)>& say) {
  const auto first = [&] { return numbers == LocalNumbers::cached ? cached_machine(say) : std::nullopt; };
  if (const std::optional<Cluster> cached = first()) return *cached;
  std::error_code ignored;
  const auto is_measured = [&] { return std::filesystem::exists(local_machine_file(), ignored); };
  const bool was_measured = is_measured();
  // Whoever measures keeps the others waiting, who would spoil its numbers and theirs.
  const Measuring measuring(say);
  if (measuring.has_waited() || (!was_measured && is_measured()))
    if (const std::optional<Cluster> cached = first()) return *cached;
  say(fmt::format("measuring this machine ({} cores), a few seconds ...", usable_cores()));
  const int before = others_at_work();
  Cluster cluster = probe_local_machine();
  const int busy = std::max(before, others_at_work());
  if (busy > 0)
    say(fmt::format("note: other programs were at work ({} running), so the numbers are low; they are measured again "
                    "by the first command that finds the machine quiet, or with --measure-again",
                    busy));
  // Cached or not, the next command sees exactly these numbers.
  cluster = read_cluster(YamlNode::parse(write_cluster(cluster), "this machine"));
  if (busy > 0 && read_machine(local_machine_file(), [](const std::string&) {})) {
    say(fmt::format("{} keeps the numbers of the quiet machine; these serve this command alone",
                    local_machine_file().string()));
    return cluster;
  }
  const std::filesystem::path file = busy > 0 ? busy_machine_file() : local_machine_file();
  const std::filesystem::path other = busy > 0 ? local_machine_file() : busy_machine_file();
  if (file.empty()) {
    say("not cached: neither XDG_CACHE_HOME nor HOME is set");
    return cluster;
  }
  try {
    std::filesystem::create_directories(file.parent_path());
    write_file_atomically(file, write_cluster(cluster));
    std::filesystem::remove(other);
    say(fmt::format("cached in {}", file.string()));
  } catch (const std::exception& error) {
    say(fmt::format("not cached: {}", error.what()));
  }
  return cluster;
}

}  // namespace parplan
