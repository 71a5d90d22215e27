#include "cli/arguments.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>
#include <variant>

#include <fmt/format.h>

#include "cli/add_option.h"
#include "planner/base/file.h"
#include "planner/base/text.h"
#include "planner/graph/trained_file.h"

namespace parplan {
namespace {

void add(CLI::App& app, const std::string& group, const std::string& name, const std::string& type,
         const std::string& description, std::function<void(const std::string&)> read) {
  add_option(app, {.names = name, .type = type, .description = description, .group = group}, std::move(read));
}

void add_flag(CLI::App& app, const std::string& group, const std::string& name, const std::string& description,
              std::function<void()> set) {
  parplan::add_flag(app, {.names = name, .type = "", .description = description, .group = group}, std::move(set));
}

// Declares an output that goes to standard output if no file is named.
void add_stream(CLI::App& app, const std::string& name, const std::string& description,
                std::optional<std::string>& path) {
  add_option(app,
             {.names = name, .type = "[FILE|-]", .description = description, .group = "Output", .value_optional = true},
             [&path](const std::string& text) { path = text == "/dev/stdout" ? "-" : text; });
}

template <class T>
void add_whole(CLI::App& app, const std::string& group, const std::string& name, const std::string& description,
               std::optional<T>& value, std::int64_t maximum) {
  add(app, group, name, "N", description, [name, &value, maximum](const std::string& text) {
    value = static_cast<T>(parse_whole(name, text, 1, maximum));
  });
}

// A choice among `rows`, each of which has a name.
template <class T, std::size_t n>
void add_choice(CLI::App& app, const std::string& group, const std::string& name_of_option,
                const std::string& description, std::optional<T>& value, const std::array<T, n>& rows) {
  std::vector<std::string> names;
  for (const T row : rows) names.push_back(name(row));
  add(app, group, name_of_option, join(names, "|"), description,
      [name_of_option, names, &value, rows](const std::string& text) {
        value = rows[parse_choice(name_of_option, text, names)];
      });
}

double parse_above_zero(const std::string& option, const std::string& text) {
  double number = 0.0;
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, number);
  if (error == std::errc() && stopped == end && std::isfinite(number) && number > 0.0) return number;
  throw ConfigError(fmt::format("{}: expected a number above 0, found '{}'", option, text));
}

template <class Read>
auto parse_quantity(const std::string& option, const std::string& text, Read read) {
  try {
    return read(text);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("{}: {}", option, message_of(error)));
  }
}

std::vector<int> parse_ids(const std::string& option, const std::string& text) {
  std::vector<int> ids;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const int id = static_cast<int>(parse_whole(option, text.substr(begin, end - begin), 0, most_devices));
    if (std::ranges::find(ids, id) != ids.end())
      throw ConfigError(fmt::format("{}: device {} is listed twice; name each once", option, id));
    ids.push_back(id);
    begin = end + 1;
  }
  return ids;
}

// In the order of the help; --pp comes before --stage-blocks, from which it follows otherwise.
constexpr std::array layout_options_first = {Choice::dp,
                                             Choice::tp,
                                             Choice::pp,
                                             Choice::cp,
                                             Choice::cp_method,
                                             Choice::cp_ulysses,
                                             Choice::zero_stage,
                                             Choice::dp_shard,
                                             Choice::micro_batch,
                                             Choice::schedule,
                                             Choice::virtual_stages,
                                             Choice::micro_batch_group,
                                             Choice::sequence_parallel,
                                             Choice::recompute,
                                             Choice::recompute_layers,
                                             Choice::mesh_order,
                                             Choice::stage_blocks};

std::vector<std::string> names_of(const std::vector<ChoiceValue>& values) {
  std::vector<std::string> names;
  for (const ChoiceValue& value : values) names.push_back(write_value(value));
  return names;
}

// Parses the value of a choice, which has the type of the choice's default; a flag has no value.
struct ValueParser {
  const ChoiceRow& row;
  const std::string& text;
  const std::string option = std::string(row.option);

  ChoiceValue operator()(std::int64_t) const { return parse_whole(option, text, row.minimum, row.maximum); }
  ChoiceValue operator()(bool) const { return true; }
  ChoiceValue operator()(const AxisOrder&) const {
    return parse_quantity(option, text, [](const std::string& order) { return parse_order(order); });
  }
  ChoiceValue operator()(const Offload&) const {
    return parse_quantity(option, text, [](const std::string& offload) { return parse_offload(offload); });
  }
  ChoiceValue operator()(const std::vector<int>&) const {
    std::vector<int> numbers;
    for (std::size_t begin = 0; begin <= text.size();) {
      const std::size_t end = std::min(text.find(',', begin), text.size());
      numbers.push_back(
          static_cast<int>(parse_whole(option, text.substr(begin, end - begin), row.minimum, row.maximum)));
      begin = end + 1;
    }
    return numbers;
  }
  template <class Named>
  ChoiceValue operator()(Named) const {
    const std::vector<ChoiceValue> values = row.named();
    return values[parse_choice(option, text, names_of(values))];
  }
};

MemoryLimit parse_memory_limit(const std::string& option, const std::string& text) {
  if (!text.ends_with('%'))
    return {.bytes = parse_quantity(option, text, [](const std::string& t) { return parse_bytes(t); })};
  double percent = 0.0;
  const char* end = text.data() + text.size() - 1;
  const auto [stopped, error] = std::from_chars(text.data(), end, percent);
  if (error != std::errc() || stopped != end || !(percent > 0.0 && percent <= 100.0))
    throw ConfigError(fmt::format(
        "{}: expected bytes, such as '40 GiB', or a percentage above 0% and up to 100%, found '{}'", option, text));
  return {.bytes = std::nullopt, .share = percent / 100.0};
}

double parse_headroom(const std::string& option, const std::string& text) {
  double percent = 0.0;
  const char* end = text.data() + text.size() - (text.ends_with('%') ? 1 : 0);
  const auto [stopped, error] = std::from_chars(text.data(), end, percent);
  if (error != std::errc() || stopped != end || !(percent >= 0.0 && percent <= 100.0 * most_headroom))
    throw ConfigError(
        fmt::format("{}: expected a percentage from 0% to {:.0f}%, found '{}'", option, 100.0 * most_headroom, text));
  return percent / 100.0;
}

}  // namespace

std::string message_of(const ConfigError& error) {
  const std::string_view text = error.what();
  constexpr std::string_view prefix = "error: ";
  return std::string(text.starts_with(prefix) ? text.substr(prefix.size()) : text);
}

std::int64_t parse_whole(const std::string& option, const std::string& text, std::int64_t minimum,
                         std::int64_t maximum) {
  std::int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  if (error == std::errc() && stopped == end && value >= minimum && value <= maximum) return value;
  throw ConfigError(
      fmt::format("{}: expected a whole number from {} to {}, found '{}'", option, minimum, maximum, text));
}

std::size_t parse_choice(const std::string& option, const std::string& text, const std::vector<std::string>& allowed) {
  const auto found = std::ranges::find(allowed, text);
  if (found == allowed.end())
    throw ConfigError(
        fmt::format("{}: expected one of {}, found '{}'{}", option, join(allowed), text, did_you_mean(text, allowed)));
  return static_cast<std::size_t>(found - allowed.begin());
}

std::int64_t parse_count(const std::string& option, const std::string& text) {
  constexpr std::array<std::pair<char, double>, 4> powers = {{{'K', 1e3}, {'M', 1e6}, {'B', 1e9}, {'T', 1e12}}};
  constexpr double largest = 1e15;
  double factor = 1.0;
  const char* end = text.data() + text.size();
  for (const auto& [letter, power] : powers)
    if (!text.empty() && text.back() == letter) {
      factor = power;
      --end;
    }
  double number = 0.0;
  const auto [stopped, error] = std::from_chars(text.data(), end, number);
  const double value = std::round(number * factor);
  // 1.1T is 1.1e12 in all digits that were written, though not in all that a double has.
  const bool whole = std::abs(number * factor - value) <= 1e-12 * value;
  if (error == std::errc() && stopped == end && whole && value >= 1.0 && value <= largest)
    return static_cast<std::int64_t>(value);
  throw ConfigError(
      fmt::format("{}: expected a whole number from 1 to 1000T, such as '300B' (K, M, B and T are powers of a "
                  "thousand) or '1e12', found '{}'",
                  option, text));
}

std::vector<std::string> parse_list(const std::string& option, const std::string& text) {
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    if (word.empty())
      throw ConfigError(fmt::format("{}: expected values with commas between them, found '{}'", option, text));
    if (std::ranges::find(words, word) != words.end())
      throw ConfigError(fmt::format("{}: {} is listed twice; name each once", option, word));
    words.push_back(word);
    begin = end + 1;
  }
  return words;
}

Price parse_price_of(const std::string& option, const std::string& text) {
  return parse_quantity(option, text, [](const std::string& t) { return parse_price(t); });
}

void add_subject(CLI::App& app, std::string& subject, const std::string& name, const std::string& description) {
  add_option(app, {.names = name, .type = "", .description = description, .required = true}, subject);
}

bool is_given(const WhereArguments& where) {
  const ClusterOptions& options = where.options;
  return where.cluster || options.device || options.network || options.devices || options.nodes ||
         !where.device_ids.empty() || where.measure_again;
}

void add_where(CLI::App& app, WhereArguments& where) {
  const std::string group = "Where";
  add(app, group, "--cluster", "FILE|NAME",
      "cluster.yaml, a topology (text of nvidia-smi topo -m, XML of NCCL) or a named cluster (default: this machine, "
      "measured once and cached)",
      [&](const std::string& text) { where.cluster = text; });
  add_whole(app, group, "--devices", "how many devices (default: all of the cluster)", where.options.devices,
            most_devices);
  add_whole(app, group, "--nodes", "how many nodes", where.options.nodes, most_devices);
  add(app, group, "--device-ids", "N,N,...", "which devices of the one node, in this order",
      [&](const std::string& text) { where.device_ids = parse_ids("--device-ids", text); });
  add(app, group, "--device", "KIND", "kind of device, for a topology, which seldom names it",
      [&](const std::string& text) { where.options.device = text; });
  add_network(app, where);
  add(app, group, "--price", "PRICE",
      "what an hour of one device costs, such as '2.50 USD' (default: the cluster's file)",
      [&](const std::string& text) { where.price = parse_price_of("--price", text); });
  add_calibration(app, group, where.calibration);
  add_flag(app, group, "--measure-again", "measure this machine again instead of taking the cached numbers",
           [&] { where.measure_again = true; });
}

void add_calibration(CLI::App& app, const std::string& group, std::optional<std::string>& file) {
  add(app, group, "--calibration", "FILE",
      "what measured steps told of the cluster, as simulate --save-calibration wrote it (docs/calibration.md)",
      [&](const std::string& text) { file = text; });
}

void add_network(CLI::App& app, WhereArguments& where) {
  add(app, "Where", "--network", "RATE", "line rate of each NIC, such as '400 Gbit/s'", [&](const std::string& text) {
    where.options.network = parse_quantity("--network", text, [](const std::string& t) { return parse_line_rate(t); });
    if (where.options.network->value == 0.0)
      throw ConfigError(
          fmt::format("--network: expected a rate above 0, found '{}'; leave --network out for none", text));
  });
}

void add_what(CLI::App& app, WhatArguments& what) {
  const std::string group = "What";
  add_whole(app, group, "--global-batch", "sequences of one optimizer step (default: 512 on GPUs, 4 a device on CPUs)",
            what.global_batch, most_counted);
  add_whole(app, group, "--seq-len",
            "tokens of a sequence (default: the model's context, at most 8192; on CPUs at most 256)",
            what.sequence_length, most_counted);
  add_number_formats(app, what);
}

void add_number_formats(CLI::App& app, WhatArguments& what) {
  const std::string group = "What";
  add_choice(
      app, group, "--precision",
      "number format of computation (default: bf16 where all devices that are used have units for it, else fp16; fp32 "
      "on CPUs)",
      what.precision, std::array{DataType::bf16, DataType::fp16, DataType::fp8, DataType::tf32, DataType::fp32});
  add_choice(app, group, "--optimizer", "optimizer (default: adamw)", what.optimizer, all_optimizers);
  add(app, group, "--trainable", "all|lora|PART,...",
      "what is trained: all parameters, LoRA adapters alone, or what has such parts in its name, such as 'head' or "
      "'layers.31' (default: all, or as the model says)",
      [&](const std::string& text) {
        what.trainable = Trainable{.all = text == "all", .patterns = {}};
        if (text != "all" && text != "lora") what.trainable->patterns = parse_list("--trainable", text);
      });
  add_whole(app, group, "--lora-r", "inner width of LoRA adapters (default: 8)", what.lora_r, largest_adapter);
  add(app, group, "--lora-alpha", "X", "adapters are multiplied by this over their inner width (default: 8)",
      [&](const std::string& text) { what.lora_alpha = parse_above_zero("--lora-alpha", text); });
  add(app, group, "--target-modules", "MODULE,...",
      "products of layers that get adapters, such as 'attention.qkv' (default: all-linear, which are all of them)",
      [&](const std::string& text) {
        what.target_modules.emplace();
        if (text != "all-linear") what.target_modules = parse_list("--target-modules", text);
      });
  add(app, group, "--engine", "NAME",
      "whose behaviour is predicted: one of configs/engines, or such a file (default: parplan, its own runtime)",
      [&](const std::string& text) { what.engine = text; });
}

void add_layout(CLI::App& app, LayoutRequest& layout) {
  for (const ChoiceRow* choice : choice_rows(layout_options_first)) {
    const ChoiceRow& row = *choice;
    const std::string name(row.option), description(row.description);
    if (std::holds_alternative<bool>(row.get(ParallelSpec{}))) {
      add_flag(app, "Layout", name, description, [&layout, &row] { layout[row.choice] = true; });
      continue;
    }
    const std::string operand =
        row.named && row.operand.empty() ? join(names_of(row.named()), "|") : std::string(row.operand);
    add(app, "Layout", name, operand, description, [&layout, &row](const std::string& text) {
      const ChoiceValue value = std::visit(ValueParser{row, text}, row.get(ParallelSpec{}));
      layout[row.choice] = value;
      if (!row.implies) return;
      for (const auto& [other, implied] : row.implies(value, layout))
        if (!layout[other]) layout[other] = implied;
    });
  }
}

void add_balance(CLI::App& app, bool& balances) {
  add_flag(app, "Layout", "--balance-replicas",
           "give each data-parallel replica as many micro-batches as its devices sustain, where devices are unlike",
           [&] { balances = true; });
}

void check_balance(bool balances, const LayoutRequest& layout, const Engine& engine) {
  if (!balances) return;
  if (layout[Choice::replica_micro_batches])
    throw ConfigError("--balance-replicas chooses what --replica-micro-batches gives; leave one of them out");
  if (!is_own(engine))
    throw ConfigError(
        fmt::format("--balance-replicas: engine {} gives all replicas equally many micro-batches; leave the option out",
                    engine.name));
}

void add_headroom(CLI::App& app, const std::string& group, std::optional<double>& headroom) {
  add(app, group, "--memory-headroom", "PERCENT",
      "share of a device's memory that plans leave free, such as 5%; 0% for none (default: what published runs took "
      "beyond their predicted memory, docs/accuracy.md; none on CPUs and with --memory-limit)",
      [&](const std::string& text) { headroom = parse_headroom("--memory-headroom", text); });
}

void add_limits(CLI::App& app, LimitArguments& limits) {
  const std::string group = "Limits";
  add(app, group, "--memory-limit", "BYTES|PERCENT", "memory of a device that may be used, such as '40 GiB' or 80%",
      [&](const std::string& text) { limits.memory = parse_memory_limit("--memory-limit", text); });
  add_headroom(app, group, limits.headroom);
  add(app, group, "--max-candidates", "N",
      "simulate at most so many candidates (default: 64, and more as long as that is little work)",
      [&](const std::string& text) {
        limits.most_candidates = parse_whole("--max-candidates", text, 1, most_counted);
      });
  add(app, group, "--threads", "N",
      "plan with so many threads (default: as many as the machine has cores, up to 16 for a search); the plan is "
      "the same with any number",
      [&](const std::string& text) { limits.threads = static_cast<int>(parse_whole("--threads", text, 1, 1024)); });
  add_choice(app, group, "--objective",
             "what the best plan has least of: time of a step, its cost (without prices: device-seconds), or memory "
             "(default: time)",
             limits.objective, std::array{Objective::time, Objective::cost, Objective::memory});
}

void add_output(CLI::App& app, OutputArguments& output, CsvOutput csv) {
  const std::string group = "Output";
  add_stream(app, "--json", "JSON to a file, or to standard output instead of the table", output.json);
  if (csv == CsvOutput::offered)
    add_stream(app, "--csv", "CSV to a file, or to standard output instead of the table", output.csv);
  add_flag(app, group, "--quiet", "no talk on standard error but errors", [&] { output.quiet = true; });
  add_flag(app, group, "--verbose", "say more", [&] { output.verbose = true; });
}

void check_outputs(const std::vector<NamedOutput>& outputs, const std::vector<NamedInput>& inputs) {
  const auto file_of = [](const NamedOutput& output) {
    return file_behind(output.path == "-" ? "/dev/stdout" : output.path);
  };
  for (auto one = outputs.begin(); one != outputs.end(); ++one) {
    if (one->path.empty()) continue;
    const std::filesystem::path file = file_of(*one);
    if (file == "/dev/null") continue;
    for (auto other = outputs.begin(); other != one; ++other) {
      if (other->path.empty() || file_of(*other) != file) continue;
      if (one->path == "-" && other->path == "-")
        throw ConfigError(fmt::format("{} and {} cannot both go to standard output; give one of them a file",
                                      other->option, one->option));
      throw ConfigError(one->path == other->path
                            ? fmt::format("{} and {} both write to '{}'; give one of them another file", other->option,
                                          one->option, one->path)
                            : fmt::format("{} and {} write to one file, '{}' and '{}'; give one of them another",
                                          other->option, one->option, other->path, one->path));
    }
    for (const NamedInput& input : inputs)
      if (std::filesystem::is_regular_file(input.path) && file_behind(input.path) == file)
        throw ConfigError(fmt::format("{} would replace '{}', which is read as {}; give another name", one->option,
                                      one->path, input.word));
  }
  for (const NamedOutput& output : outputs)
    if (!output.path.empty() && output.path != "-") check_can_write(output.path);
}

void check_output(const OutputArguments& output, const std::vector<NamedOutput>& others,
                  const std::vector<NamedInput>& inputs) {
  if (output.quiet && output.verbose)
    throw ConfigError("--quiet and --verbose exclude one another; leave one of them out");
  std::vector<NamedOutput> all{{"--json", output.json.value_or("")}, {"--csv", output.csv.value_or("")}};
  all.insert(all.end(), others.begin(), others.end());
  check_outputs(all, inputs);
}

}  // namespace parplan
