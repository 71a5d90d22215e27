#include "planner/validate/published_run.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <span>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <libfccp/csv.h>

#include "planner/base/error.h"
#include "planner/base/file.h"

namespace parplan {
namespace {

template <std::size_t columns>
using Reader = io::CSVReader<columns, io::trim_chars<' ', '\t', '\r'>, io::double_quote_escape<',', '"'>>;

// A line, by the file's columns.
template <std::size_t columns>
struct Line {
  const std::array<const char*, columns>& names;
  std::string place;  // FILE:LINE
  std::array<std::string, columns> fields = {};

  const std::string& text(std::string_view name) const {
    for (std::size_t column = 0; column < columns; ++column)
      if (names[column] == name) return fields[column];
    PARPLAN_ASSERT(false, fmt::format("no column '{}' is read", name));
    return fields.front();
  }
  template <class Number>
  std::optional<Number> number(std::string_view name) const {
    const std::string& field = text(name);
    if (field.empty()) return std::nullopt;
    Number value{};
    const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
    constexpr double most = 1e15, least_fraction = 1e-9;  // of what is measured, in any unit of the columns
    const auto size = static_cast<double>(value);
    if (error != std::errc() || end != field.data() + field.size() ||
        !(value == Number{} || (size >= least_fraction && size <= most)))
      throw ConfigError(fmt::format("{}: error: {} is '{}'; expected a number, or nothing where it is not stated",
                                    place, name, field));
    return value;
  }
  std::optional<std::int64_t> whole(std::string_view name) const { return number<std::int64_t>(name); }
  // One of some words, or nothing.
  const std::string& one_of(std::string_view name, std::span<const std::string_view> words) const {
    const std::string& field = text(name);
    if (!field.empty() && std::ranges::find(words, field) == words.end())
      throw ConfigError(fmt::format("{}: error: {} is '{}'; expected {}, or nothing where it is not stated", place,
                                    name, field, fmt::join(words, ", ")));
    return field;
  }
  std::optional<bool> yes_or_no(std::string_view name) const {
    const std::string& field = text(name);
    if (field.empty()) return std::nullopt;
    if (field != "yes" && field != "no")
      throw ConfigError(fmt::format("{}: error: {} is '{}'; expected yes, no, or nothing", place, name, field));
    return field == "yes";
  }
};

constexpr std::array run_columns = {"id",
                                    "engine",
                                    "source",
                                    "model_family",
                                    "layers",
                                    "hidden",
                                    "heads",
                                    "kv_heads",
                                    "ffn_hidden",
                                    "gated_mlp",
                                    "vocab",
                                    "seq_len",
                                    "experts",
                                    "precision",
                                    "device",
                                    "data_parallel",
                                    "outcome",
                                    "devices",
                                    "devices_per_node",
                                    "intra_node",
                                    "inter_node_gbit_s_per_node",
                                    "dp",
                                    "zero_stage",
                                    "tp",
                                    "pp",
                                    "vpp",
                                    "cp",
                                    "ep",
                                    "sequence_parallel",
                                    "micro_batch",
                                    "global_batch",
                                    "recompute",
                                    "step_time_s",
                                    "peak_memory_gib",
                                    "notes",  // remarks, which say what other columns have no word for
                                    "cluster",
                                    "shard",
                                    "recompute_layers",
                                    "tied_embeddings"};
// Without these nothing is simulated, or nothing compared; what other columns say may be left out.
constexpr std::array needed_run_columns = {"model_family", "layers", "hidden", "heads", "ffn_hidden",   "seq_len",
                                           "devices",      "dp",     "tp",    "pp",     "global_batch", "step_time_s"};

constexpr std::array<std::string_view, 3> recomputes = {"none", "selective", "full"};
constexpr std::array<std::string_view, 2> outcomes = {"ok", "oom"};

PublishedRun published_run(const Line<run_columns.size()>& line) {
  return {.id = line.text("id"),
          .source = line.text("source"),
          .engine = line.text("engine"),
          .family = line.text("model_family"),
          .device = line.text("device"),
          .precision = line.text("precision"),
          .data_parallel = line.text("data_parallel"),
          .outcome = line.one_of("outcome", outcomes),
          .intra_node = line.text("intra_node"),
          .recompute = line.one_of("recompute", recomputes),
          .notes = line.text("notes"),
          .cluster = line.text("cluster"),
          .layers = line.whole("layers"),
          .hidden = line.whole("hidden"),
          .heads = line.whole("heads"),
          .kv_heads = line.whole("kv_heads"),
          .feature = line.whole("ffn_hidden"),
          .vocabulary = line.whole("vocab"),
          .sequence = line.whole("seq_len"),
          .experts = line.whole("experts"),
          .gated = line.yes_or_no("gated_mlp"),
          .devices = line.whole("devices"),
          .devices_per_node = line.whole("devices_per_node"),
          .gbit_s_per_node = line.number<double>("inter_node_gbit_s_per_node"),
          .dp = line.whole("dp"),
          .zero_stage = line.whole("zero_stage"),
          .tp = line.whole("tp"),
          .pp = line.whole("pp"),
          .virtual_stages = line.whole("vpp"),
          .cp = line.whole("cp"),
          .ep = line.whole("ep"),
          .shard = line.whole("shard"),
          .recompute_layers = line.whole("recompute_layers"),
          .micro_batch = line.whole("micro_batch"),
          .global_batch = line.whole("global_batch"),
          .sequence_parallel = line.yes_or_no("sequence_parallel"),
          .tied_embeddings = line.yes_or_no("tied_embeddings"),
          .step_seconds = line.number<double>("step_time_s"),
          .memory_gib = line.number<double>("peak_memory_gib")};
}

constexpr std::array node_columns = {"gpus",    "global_batch", "micro_batch", "hidden", "heads",       "layers",
                                     "seq_len", "tp",           "dp",          "pp",     "iteration_ms"};

// vTrain (github.com/VIA-Research/vTrain): Megatron-DeepSpeed, a GPT with the vocabulary of GPT-2
// in fp16, everything recomputed, on a node of eight A100 with 80 GB.
PublishedRun run_of_node(const Line<node_columns.size()>& line) {
  PublishedRun run;
  run.id = line.place.substr(line.place.rfind('/') + 1);
  run.source = "vTrain, one node";
  run.engine = "megatron-deepspeed";
  run.family = "gpt";
  run.device = "a100-sxm4-80gb";
  run.precision = "fp16";
  run.outcome = "ok";
  run.intra_node = "nvlink3-nvswitch";
  run.recompute = "full";
  run.layers = line.whole("layers");
  run.hidden = line.whole("hidden");
  run.heads = run.kv_heads = line.whole("heads");
  if (run.hidden) run.feature = 4 * *run.hidden;
  run.vocabulary = 50257;
  run.sequence = line.whole("seq_len");
  run.gated = run.sequence_parallel = false;
  run.devices = line.whole("gpus");
  run.devices_per_node = 8;
  run.dp = line.whole("dp");
  run.tp = line.whole("tp");
  run.pp = line.whole("pp");
  run.virtual_stages = run.cp = 1;
  run.micro_batch = line.whole("micro_batch");
  run.global_batch = line.whole("global_batch");
  if (const std::optional<double> milliseconds = line.number<double>("iteration_ms"))
    run.step_seconds = *milliseconds / 1000.0;
  return run;
}

constexpr std::array collective_columns = {"hardware", "nodes", "gpus",    "collective", "bytes",
                                           "algbw",    "busbw", "time_us", "source",     "notes"};
constexpr std::array needed_collective_columns = {"hardware", "nodes", "gpus",    "collective", "bytes",
                                                  "algbw",    "busbw", "time_us", "source"};

// Bus bandwidth is what NCCL's tests call it: the bytes that a ring sends of each rank, by time.
double bus_over_algorithm(std::string_view kind, double ranks) {
  return (kind == "all_reduce" ? 2.0 : 1.0) * (ranks - 1.0) / ranks;
}

PublishedRun run_of_collective(const Line<collective_columns.size()>& line) {
  PublishedRun run;
  run.id = line.place.substr(line.place.rfind('/') + 1);
  run.source = line.text("source");
  run.engine = "nccl";
  run.device = line.text("hardware");
  run.outcome = "ok";
  run.devices = line.whole("gpus");
  run.collective = PublishedCollective{.kind = line.text("collective"),
                                       .bytes = line.whole("bytes"),
                                       .nodes = line.whole("nodes"),
                                       .notes = line.text("notes")};
  constexpr double giga = 1e9;
  if (const auto microseconds = line.number<double>("time_us")) {
    run.step_seconds = *microseconds * 1e-6;
  } else if (const auto bytes = run.collective->bytes; bytes && run.devices.value_or(0) > 1) {
    const auto bus = line.number<double>("busbw"), algorithm = line.number<double>("algbw");
    const double share = bus_over_algorithm(run.collective->kind, static_cast<double>(*run.devices));
    const double rate = algorithm.value_or(bus.value_or(0.0) / share) * giga;
    if (rate > 0.0) run.step_seconds = static_cast<double>(*bytes) / rate;
  }
  return run;
}

// A table of runs: FILE and its text.
struct Table {
  const std::string& path;
  const std::string& text;
};

template <std::size_t columns, class Make, std::size_t... Column>
std::vector<PublishedRun> read_lines(const Table& table, const std::array<const char*, columns>& names,
                                     std::span<const char* const> needed, const Make& make,
                                     std::index_sequence<Column...> /*columns*/) {
  std::vector<PublishedRun> runs;
  try {
    Reader<columns> reader(table.path, table.text.data(), table.text.data() + table.text.size());
    reader.read_header(io::ignore_extra_column | io::ignore_missing_column, names[Column]...);
    for (const char* const name : needed)
      if (!reader.has_column(name))
        throw ConfigError(
            fmt::format("{}:1: error: no column '{}'; docs/accuracy.md lists the columns", table.path, name));
    Line<columns> line{.names = names, .place = {}};
    while (reader.read_row(line.fields[Column]...)) {
      line.place = fmt::format("{}:{}", table.path, reader.get_file_line());
      runs.push_back(make(line));
    }
  } catch (const io::error::base& error) {
    throw ConfigError(fmt::format("{}: error: {}", table.path, error.what()));
  }
  return runs;
}

bool is_header(std::string_view header, std::string_view column) {
  const std::size_t at = header.find(column);
  const auto ends = [&](std::size_t place) {
    return place >= header.size() || header[place] == ',' || header[place] == '\r';
  };
  return at != std::string_view::npos && (at == 0 || header[at - 1] == ',') && ends(at + column.size());
}

}  // namespace

std::vector<PublishedRun> read_published_runs(const std::string& path) {
  constexpr std::size_t most_bytes = std::size_t{64} << 20;  // a device such as /dev/zero has no end
  const std::string text = read_file(path, most_bytes + 1);
  if (text.size() > most_bytes)
    throw ConfigError(fmt::format("{}: error: the file has more than 64 MiB; a table of runs is smaller", path));
  const Table table{path, text};
  const std::string_view header = std::string_view(text).substr(0, text.find('\n'));
  if (is_header(header, "iteration_ms"))
    return read_lines(table, node_columns, node_columns, run_of_node,
                      std::make_index_sequence<node_columns.size()>());
  if (is_header(header, "step_time_s"))
    return read_lines(table, run_columns, needed_run_columns, published_run,
                      std::make_index_sequence<run_columns.size()>());
  if (is_header(header, "busbw"))
    return read_lines(table, collective_columns, needed_collective_columns, run_of_collective,
                      std::make_index_sequence<collective_columns.size()>());
  throw ConfigError(
      fmt::format("{}:1: error: the header has none of step_time_s (a file of runs), iteration_ms "
                  "(vTrain's table of one node) and busbw (collectives); docs/accuracy.md lists the columns",
                  path));
}

}  // namespace parplan
