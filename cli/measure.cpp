#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ostream.h>

#include "cli/add_option.h"
#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/data_folder.h"
#include "cli/local_machine.h"
#include "cli/progress.h"
#include "cli/resolve_inputs.h"
#include "cli/version.h"
#include "cli/write_outputs.h"
#include "planner/base/text.h"
#include "planner/cluster/communicators.h"
#include "planner/cluster/node_layout.h"
#include "planner/cost/calibration.h"
#include "runtime/comm/gpu_plugin.h"
#include "runtime/device/cpu/cpu_backend.h"
#include "runtime/measure_kernels.h"
#include "runtime/measure_nvme.h"

namespace parplan {
namespace {

// Beside that of the kernels.
constexpr double nvme_share_of_budget = 0.1;

struct MeasureArguments {
  std::string device;  // empty: a GPU if there is one, else the CPU
  std::optional<std::string> like;
  std::optional<Seconds> budget;
  std::string cluster_file;
  std::string device_file;
  std::string nvme_folder;
  bool quiet = false;
};

// The number of a GPU in CUDA's order; nothing for the CPU.
std::optional<int> gpu_of(const std::string& device) {
  if (device == "cpu") return std::nullopt;
  if (device == "cuda") return 0;
  if (device.starts_with("cuda:")) return static_cast<int>(parse_whole("--device", device.substr(5), 0, 1 << 10));
  throw ConfigError(fmt::format("--device: expected cpu, cuda or cuda:N, found '{}'", device));
}

// The card according to its datasheet: of the kind that the user names, or the one whose file has
// the driver's name for it.
DeviceKind datasheet_of(const GpuProperties& card, const std::optional<std::string>& like) {
  const ClusterCatalog catalog = cluster_catalog();
  if (like) return find_device(*like, catalog);
  for (const std::string& kind : device_names(catalog)) {
    DeviceKind device = find_device(kind, catalog);
    if (std::ranges::find(device.driver_names, card.name) != device.driver_names.end()) return device;
  }
  throw ConfigError(
      fmt::format("no file of configs/devices has '{}' among its driver_names, so its peaks and links are not known; "
                  "give --like with one of {}",
                  card.name, join(device_names(catalog))));
}

// The results, and where they were measured.
struct Measured {
  Cluster cluster;  // its device holds the fits
  Measurements measurements;
};

Measured measure_cpu(const MeasureOptions& options, const std::vector<KernelMeasurement>& kernels) {
  Measured measured{.cluster = probe_local_machine(), .measurements = {}};
  DeviceKind& device = measured.cluster.groups.front().device;
  const std::unique_ptr<Backend> backend = make_cpu_backend();
  measured.measurements = measure_kernels(*backend, kernels, options);
  device.measured = MeasuredKernels{
      .origin = fmt::format("parplan {} measure --device cpu on {}, one core at work", version(), host_name()),
      .date = today(),
      .versions = fmt::format("kernels for {}", chosen_cpu_instruction_set()),
      .clocks = "as the machine set them",
      .fits = fit_kernels(measured.measurements.kernels, device)};
  return measured;
}

Measured measure_gpu(int number, const std::optional<std::string>& like, const MeasureOptions& options,
                     const std::vector<KernelMeasurement>& kernels) {
  const OpenedGpu opened = open_gpu();
  if (opened.gpu == nullptr)
    throw RunError(fmt::format("no GPU to measure: {}; --device cpu measures a core", opened.missing));
  const std::vector<GpuProperties> cards = opened.gpu->devices();
  if (number >= static_cast<int>(cards.size()))
    throw ConfigError(fmt::format("--device cuda:{}: this machine has {} GPU{}; their numbers begin at 0", number,
                                  cards.size(), cards.size() == 1 ? "" : "s"));
  const GpuProperties& card = cards[number];
  Measured measured;
  DeviceKind& device = measured.cluster.groups.front().device;
  device = datasheet_of(card, like);
  device.measured.reset();
  device.memory_capacity = card.memory;
  device.multiprocessors = card.multiprocessors;
  const std::unique_ptr<Backend> backend = opened.gpu->make_backend(number, {});
  std::vector<KernelMeasurement> possible = kernels;
  // bf16 and tf32 need compute capability 8.0 (CUDA C++ Programming Guide, table of features), fp16
  // matrix units 7.0, and fp8 8.9. A rate above a peak of 0 is no rate of a file.
  std::erase_if(possible, [&](const KernelMeasurement& kernel) {
    return ((kernel.type == DataType::bf16 || kernel.type == DataType::tf32) && card.compute_major < 8) ||
           (kernel.type == DataType::fp16 && card.compute_major < 7) ||
           (kernel.type == DataType::fp8 &&
            (10 * card.compute_major + card.compute_minor < 89 || device.peak_fp8.value <= 0.0));
  });
  measured.measurements = measure_kernels(*backend, possible, options);
  device.kernel_launch = measured.measurements.replayed_launch;
  device.memory_overhead = measured.measurements.library_memory + assumed_communicators;
  device.measured =
      MeasuredKernels{.origin = fmt::format("parplan {} measure --device cuda:{} ({}, {}) on {}", version(), number,
                                            card.name, card.bus_id, host_name()),
                      .date = today(),
                      .versions = opened.gpu->versions(),
                      .clocks = fmt::format("at most {} MHz, memory {} MHz", card.clock_mhz, card.memory_clock_mhz),
                      .fits = fit_kernels(measured.measurements.kernels, device)};
  device.rates = {fitted_rates(*device.measured, device.rates.front())};
  device.rates.front().origins[Rate::kernel_launch] = Origin::measured;
  device.sources.push_back(
      fmt::format("rates, kernel_launch and measured: {}, {}", device.measured->origin, device.measured->date));
  device.sources.push_back(fmt::format("memory overhead: measured {} without NCCL, and {} assumed for it",
                                       format_bytes(measured.measurements.library_memory),
                                       format_bytes(assumed_communicators)));

  Cluster& cluster = measured.cluster;
  cluster.name = "this-machine";
  cluster.groups.front().nodes = 1;
  cluster.measured_on = fmt::format("{} on {}", today(), host_name());
  cluster.groups.front().node = build_node({.name = "this-machine",
                                            .devices = 1,
                                            .intra = Intra::memory,
                                            .bandwidth = device.rates.front().memory,
                                            .latency = Seconds(0.0),
                                            .nics = {}},
                                           device);
  if (cards.size() > 1)
    cluster.notes.push_back(fmt::format(
        "one of {} GPUs: links between them are not measured; give the text of nvidia-smi topo -m with --device",
        cards.size()));
  return measured;
}

std::string describe_fits(const Measured& measured) {
  const MeasuredKernels& kernels = *measured.cluster.groups.front().device.measured;
  const Measurements& found = measured.measurements;
  std::string text = fmt::format("{}\n{}, {}; {}\n\n", kernels.origin, kernels.date, kernels.versions, kernels.clocks);
  text += fmt::format("{:<28}{:<6}{:>9}{:>12}{:>15}{:>13}{:>12}{:>6}{:>8}\n", "kernel", "type", "head dim", "floor",
                      "rate", "half length", "memory", "rows", "error");
  for (const KernelFit& fit : kernels.fits)
    text += fmt::format("{:<28}{:<6}{:>9}{:>12}{:>15}{:>13}{:>12}{:>6}{:>7.1f}%\n", name(fit.kind), name(fit.type),
                        fit.head_dim > 0 ? std::to_string(fit.head_dim) : "", format_duration(fit.floor),
                        fit.rate.value > 0.0 ? format_flop_rate(fit.rate) : "",
                        fit.rate.value > 0.0 ? fmt::format("{:.3g}", fit.half_length) : "",
                        format_bandwidth(fit.memory), fit.rows, 100.0 * fit.error);
  text += fmt::format("\nlaunch {} alone, {} replayed\n", format_duration(found.launch),
                      format_duration(found.replayed_launch));
  for (const CopyMeasurement& copy : found.copies)
    text += fmt::format("copy {:<10}{:>9}  {:>9}  {}\n", name(copy.route), format_bytes(copy.bytes),
                        format_duration(copy.time), format_bandwidth(copy.bytes / copy.time));
  if (const std::optional<Nvme>& nvme = measured.cluster.groups.front().nvme)
    text += fmt::format("NVMe read {}, write {}, latency {}\n", format_bandwidth(nvme->read),
                        format_bandwidth(nvme->write), format_duration(nvme->latency));
  if (found.library_memory > Bytes(0))
    text += fmt::format("memory of context and libraries {}\n", format_bytes(found.library_memory));
  return text;
}

int carry_out(const MeasureArguments& arguments, Terminal& terminal) {
  check_outputs({{"--output", arguments.cluster_file}, {"--write-device", arguments.device_file}}, {});
  const bool anything = !arguments.device.empty();
  std::optional<int> number = anything ? gpu_of(arguments.device) : std::nullopt;
  if (!anything) {
    const OpenedGpu opened = open_gpu();
    try {
      if (opened.gpu != nullptr && !opened.gpu->devices().empty()) number = 0;
    } catch (const RunError&) {  // no driver
    }
  }
  if (arguments.like && !number)
    throw ConfigError(
        "--like names the card that is measured, and that is the CPU; leave --like out, or give --device cuda");
  const BackendKind kind = number ? BackendKind::cuda : BackendKind::cpu;
  const std::vector<DataType> types = number
                                          ? std::vector{DataType::bf16, DataType::fp16, DataType::fp8, DataType::tf32,
                                                        DataType::fp32}
                                          : std::vector{DataType::fp32};
  MeasureOptions options;
  options.budget = arguments.budget.value_or(number ? Seconds(60.0) : Seconds(30.0));
  if (!number) {
    options.memory = Bytes(std::int64_t{1} << 30);
    options.footprint = Bytes(std::int64_t{64} << 20);
    options.copies = {Bytes(1 << 20), Bytes(16 << 20), Bytes(64 << 20)};
  }
  // First, since a folder that does not do is known at once.
  std::optional<Nvme> nvme;
  if (!arguments.nvme_folder.empty())
    nvme = measure_nvme(arguments.nvme_folder, options.budget * nvme_share_of_budget);
  ProgressLine progress(terminal, arguments.quiet ? Talk::quiet : Talk::wanted);
  options.progress = [&](int done, int of) { progress.show(fmt::format("timed {} of {} kernels", done, of)); };
  if (!arguments.quiet)
    fmt::print(terminal.err, "measuring {}, about {} ...\n", number ? fmt::format("cuda:{}", *number) : "cpu",
               format_duration(options.budget));
  const std::vector<KernelMeasurement> kernels = kernels_to_measure(kind, types);
  Measured measured = number ? measure_gpu(*number, arguments.like, options, kernels) : measure_cpu(options, kernels);
  progress.clear();
  if (nvme) {
    measured.cluster.groups.front().nvme = nvme;
    measured.cluster.sources.push_back(fmt::format(
        "nvme: measured in '{}' on {}, {}, past the page cache (sync_file_range, posix_fadvise); its capacity is what "
        "was free there",
        arguments.nvme_folder, host_name(), today()));
  }
  if (!arguments.quiet && measured.measurements.kernels.size() < kernels.size())
    fmt::print(terminal.err,
               "note: {} of {} kernels were left out: the device has not their type, or they need more memory or time "
               "(--budget)\n",
               kernels.size() - measured.measurements.kernels.size(), kernels.size());

  if (arguments.cluster_file != "-" && arguments.device_file != "-")
    fmt::print(terminal.out, "{}", describe_fits(measured));
  if (!arguments.cluster_file.empty())
    write_said(arguments.cluster_file, write_cluster(measured.cluster), terminal, !arguments.quiet);
  if (!arguments.device_file.empty())
    write_said(arguments.device_file, write_device(measured.cluster.groups.front().device, measured.measurements),
               terminal, !arguments.quiet);
  return exit_done;
}

}  // namespace

CommandBody declare_measure(CLI::App& app) {
  const auto arguments = std::make_shared<MeasureArguments>();
  const auto add = [&](const char* name, const char* type, const char* description,
                       std::function<void(const std::string&)> read) {
    add_option(app, {.names = name, .type = type, .description = description}, std::move(read));
  };
  add("--device", "cpu|cuda|cuda:N", "what to measure (default: the first GPU, or the CPU where there is none)",
      [arguments](const std::string& text) {
        gpu_of(text);
        arguments->device = text;
      });
  add("--like", "KIND",
      "the file of configs/devices with the card's peaks and links (default: the one with the driver's name for it)",
      [arguments](const std::string& text) { arguments->like = text; });
  add("--budget", "DURATION", "about how long to measure (default: 60 s for a GPU, 30 s for a CPU)",
      [arguments](const std::string& text) {
        try {
          arguments->budget = parse_duration(text);
        } catch (const ConfigError& error) {
          throw ConfigError("--budget: " + message_of(error));
        }
      });
  add("--nvme-dir", "DIR",
      "also measure reads and writes of files in this folder, for plans that keep data on NVMe (default: not measured)",
      [arguments](const std::string& text) { arguments->nvme_folder = text; });
  const std::string group = "Output";
  add_option(app,
             {.names = "-o,--output",
              .type = "CLUSTER.yaml",
              .description = "write this machine as a cluster with the measured device, to a file, or to standard "
                             "output with -",
              .group = group},
             arguments->cluster_file);
  add_option(app,
             {.names = "--write-device",
              .type = "DEVICE.yaml",
              .description = "write the device with all that was timed, as in configs/devices, to a file, or to "
                             "standard output with -",
              .group = group},
             arguments->device_file);
  add_flag(app, {.names = "--quiet", .type = "", .description = "no talk on standard error but errors", .group = group},
           arguments->quiet);
  return [arguments](Terminal& terminal) { return carry_out(*arguments, terminal); };
}

}  // namespace parplan
