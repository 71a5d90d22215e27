#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/error.h"
#include "planner/cluster/find_cluster.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/layout_choices.h"
#include "planner/plan/objective.h"

namespace CLI {
class App;
}

namespace parplan {

// The groups of options that commands share: each struct holds the values of one group, and each
// function declares the group on a command. Values are checked while they are read; ConfigError
// names the option.

// [where]
struct WhereArguments {
  std::optional<std::string> cluster;  // this machine where absent
  ClusterOptions options;
  std::vector<int> device_ids;  // of the cluster's one node, in this order; empty: all of them
  std::optional<Price> price;   // of every device
  std::optional<std::string> calibration;  // a file that simulate --save-calibration wrote
  bool measure_again = false;
};
// Whether any option that selects devices was given.
bool is_given(const WhereArguments& where);
void add_where(CLI::App& app, WhereArguments& where);
void add_network(CLI::App& app, WhereArguments& where);
void add_calibration(CLI::App& app, const std::string& group, std::optional<std::string>& file);

// [what]
struct WhatArguments {
  std::optional<std::int64_t> global_batch;
  std::optional<std::int64_t> sequence_length;
  std::optional<DataType> precision;
  std::optional<Optimizer> optimizer;
  std::string engine = "parplan";  // a name, or an engine's file
  // What is trained; whatever is absent is as in the model's file.
  std::optional<Trainable> trainable;
  std::optional<std::int64_t> lora_r;
  std::optional<double> lora_alpha;
  std::optional<std::vector<std::string>> target_modules;
  bool operator==(const WhatArguments&) const = default;
};
void add_what(CLI::App& app, WhatArguments& what);
// Adds precision, optimizer and engine alone.
void add_number_formats(CLI::App& app, WhatArguments& what);

// [layout]
void add_layout(CLI::App& app, LayoutRequest& layout);
// --balance-replicas, and whether it agrees with the rest.
void add_balance(CLI::App& app, bool& balances);
void check_balance(bool balances, const LayoutRequest& layout, const Engine& engine);

// [limits]
struct MemoryLimit {
  std::optional<Bytes> bytes;
  double share = 1.0;  // of the device's capacity, if no bytes are given
};
struct LimitArguments {
  std::optional<MemoryLimit> memory;
  std::optional<double> headroom;               // absent: memory_headroom, or none with a memory limit
  std::optional<std::int64_t> most_candidates;  // absent: the default of SearchOptions
  std::optional<Objective> objective;           // absent: time
  int threads = 0;                              // 0: as many as the machine has cores, up to 16 for a search
};
void add_limits(CLI::App& app, LimitArguments& limits);
// The option --memory-headroom alone.
void add_headroom(CLI::App& app, const std::string& group, std::optional<double>& headroom);

// [output]
struct OutputArguments {
  std::optional<std::string> json;  // a path, "-" for standard output
  std::optional<std::string> csv;
  bool quiet = false;
  bool verbose = false;
  // Whether standard output gets a table for people.
  bool shows_table() const { return json != "-" && csv != "-"; }
};
enum class CsvOutput { absent, offered };
void add_output(CLI::App& app, OutputArguments& output, CsvOutput csv);
// An output that an option names: a path, "-" for standard output, or empty if not given.
struct NamedOutput {
  std::string option;
  std::string path;
};
// An input of a command, which need not be a file: its description for messages, and its path.
struct NamedInput {
  std::string word;
  std::string path;
};
// Called before any work. Throws ConfigError where two outputs would share a file or standard
// output, under whatever names (/dev/null takes any number), or one would replace an input;
// RunError where a file could not be written.
void check_outputs(const std::vector<NamedOutput>& outputs, const std::vector<NamedInput>& inputs);
// The same for --json, --csv and the command's other outputs; also where messages are both asked
// for and forbidden.
void check_output(const OutputArguments& output, const std::vector<NamedOutput>& others,
                  const std::vector<NamedInput>& inputs);

// The command's one argument.
void add_subject(CLI::App& app, std::string& subject, const std::string& name, const std::string& description);

// The most devices, and the most of anything else, that an option may ask for.
inline constexpr std::int64_t most_devices = std::int64_t{1} << 20;
inline constexpr std::int64_t most_counted = std::int64_t{1} << 40;

// Readers of single values; `option` is its name in messages.
std::int64_t parse_whole(const std::string& option, const std::string& text, std::int64_t minimum,
                         std::int64_t maximum);
std::size_t parse_choice(const std::string& option, const std::string& text, const std::vector<std::string>& allowed);
// "15T", "300B", "1e12", "20971520": a whole number, K, M, B and T for powers of a thousand.
std::int64_t parse_count(const std::string& option, const std::string& text);
// The words between commas; an empty or repeated word is an error.
std::vector<std::string> parse_list(const std::string& option, const std::string& text);
Price parse_price_of(const std::string& option, const std::string& text);

// The message of a ConfigError without its "error: ".
std::string message_of(const ConfigError& error);

}  // namespace parplan
