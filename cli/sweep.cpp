#include <algorithm>
#include <atomic>
#include <charconv>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include <fmt/format.h>
#include <fmt/ostream.h>

#include "cli/add_option.h"
#include "cli/commands.h"
#include "cli/data_folder.h"
#include "cli/model_graph.h"
#include "cli/progress.h"
#include "cli/resolve_inputs.h"
#include "cli/version.h"
#include "cli/write_outputs.h"
#include "models/find_model.h"
#include "planner/base/text.h"
#include "planner/cluster/price_and_power.h"
#include "planner/plan/memory_verdict.h"
#include "planner/report/remedy.h"
#include "planner/report/sweep.h"
#include "planner/report/workbook.h"
#include "planner/search/node_group_arrangements.h"
#include "planner/search/search_with_headroom.h"

namespace parplan {
namespace {

constexpr double least_goodput = 0.01;

struct GivenPrice {
  std::optional<std::string> cluster;  // all of them where absent
  Price price;
};

struct SweepArguments {
  std::string model;
  std::vector<std::string> clusters;  // this machine where empty
  std::vector<std::string> device_kinds;
  std::vector<std::int64_t> sizes;
  std::vector<GivenPrice> prices;
  std::vector<std::int64_t> batches;
  std::vector<std::int64_t> sequences;
  std::optional<std::int64_t> tokens;
  double goodput = 1.0;
  WhereArguments where;  // the values that all points share
  WhatArguments what;
  LayoutRequest layout;
  LimitArguments limits;
  OutputArguments output;
  std::string workbook;
};

// All devices of one kind in the sweep: a cluster of each size.
struct SweptCluster {
  std::vector<Cluster> sizes;
};

std::string words_of(const SweepPoint& point) {
  return fmt::format("{} device{} of {}, batch {}, sequence length {}", point.cluster.devices(),
                     point.cluster.devices() == 1 ? "" : "s", point.cluster.name, point.training.global_batch,
                     point.training.sequence_length);
}

std::vector<std::int64_t> parse_numbers(const std::string& option, const std::string& text, std::int64_t largest) {
  std::vector<std::int64_t> numbers;
  for (const std::string& word : parse_list(option, text)) {
    const std::int64_t number = parse_whole(option, word, 1, largest);
    if (std::ranges::find(numbers, number) != numbers.end())
      throw ConfigError(fmt::format("{}: {} is listed twice; name each once", option, number));
    numbers.push_back(number);
  }
  return numbers;
}

// Notes are added once each.
void calibrate_all(std::vector<SweepPoint>& points, const std::string& file, std::vector<std::string>& notes) {
  const auto add = [&](std::string note) {
    if (std::ranges::find(notes, note) == notes.end()) notes.push_back(std::move(note));
  };
  for (SweepPoint& point : points) {
    const std::size_t known = point.cluster.notes.size();
    if (const std::string note = calibrate(point.cluster, point.training.engine, file); !note.empty())
      add(fmt::format("{}: {}", file, note));
    for (std::size_t n = known; n < point.cluster.notes.size(); ++n)
      add(fmt::format("{}: {}", point.cluster.name, point.cluster.notes[n]));
  }
}

double parse_goodput(const std::string& option, const std::string& text) {
  double share = 0.0;
  const bool in_percent = text.ends_with('%');
  const char* end = text.data() + text.size() - (in_percent ? 1 : 0);
  const auto [stopped, error] = std::from_chars(text.data(), end, share);
  if (in_percent) share /= 100.0;
  if (error != std::errc() || stopped != end || !(share >= least_goodput && share <= 1.0))
    throw ConfigError(fmt::format("{}: expected the share of the time in which steps are made, from {} to 1, such as "
                                  "0.9 or 90%, found '{}'",
                                  option, least_goodput, text));
  return share;
}

std::vector<GivenPrice> parse_prices(const std::string& option, const std::string& text) {
  std::vector<GivenPrice> prices;
  const std::string first = text.substr(0, text.find(','));
  if (first.size() < text.size() && first.find_first_not_of("0123456789. ") == std::string::npos)
    parse_price_of(option, text);  // a decimal comma: the error says so
  for (const std::string& word : parse_list(option, text)) {
    const std::size_t sign = word.rfind('=');
    GivenPrice& given = prices.emplace_back();
    if (sign != std::string::npos) given.cluster = word.substr(0, sign);
    given.price = parse_price_of(option, sign == std::string::npos ? word : word.substr(sign + 1));
    for (std::size_t other = 0; other + 1 < prices.size(); ++other)
      if (prices[other].cluster == given.cluster)
        throw ConfigError(fmt::format("{}: {} has two prices; give one", option,
                                      given.cluster ? fmt::format("cluster '{}'", *given.cluster) : "every cluster"));
  }
  return prices;
}

// A price for the cluster's name takes precedence over one for all.
std::optional<Price> price_of(const SweepArguments& arguments, const std::optional<std::string>& cluster) {
  std::optional<Price> of_all;
  for (const GivenPrice& given : arguments.prices) {
    if (!given.cluster) of_all = given.price;
    else if (given.cluster == cluster) return given.price;
  }
  return of_all;
}

std::vector<SweptCluster> resolve_clusters(const SweepArguments& arguments, Terminal& terminal) {
  for (const GivenPrice& given : arguments.prices)
    if (given.cluster && std::ranges::find(arguments.clusters, *given.cluster) == arguments.clusters.end())
      throw ConfigError(
          arguments.clusters.empty()
              ? fmt::format("--price: '{}' is not swept over, for no --cluster is given; leave the name out",
                            *given.cluster)
              : fmt::format("--price: '{}' is not among --cluster {}{}", *given.cluster, join(arguments.clusters, ","),
                            did_you_mean(*given.cluster, arguments.clusters)));
  // One pass where no list is given.
  std::vector<std::optional<std::string>> clusters(arguments.clusters.begin(), arguments.clusters.end());
  std::vector<std::optional<std::string>> kinds(arguments.device_kinds.begin(), arguments.device_kinds.end());
  std::vector<std::optional<int>> sizes(arguments.sizes.begin(), arguments.sizes.end());
  if (clusters.empty()) clusters.emplace_back();
  if (kinds.empty()) kinds.emplace_back();
  if (sizes.empty()) sizes.emplace_back();
  std::vector<SweptCluster> swept;
  for (const auto& cluster : clusters) {
    for (const auto& kind : kinds) {
      SweptCluster& all = swept.emplace_back();
      for (const auto& size : sizes) {
        WhereArguments where = arguments.where;
        where.cluster = cluster;
        where.options.device = kind;
        where.options.devices = size;
        where.price = price_of(arguments, cluster);
        all.sizes.push_back(resolve_cluster(where, terminal, arguments.output));
      }
      // Rows identify clusters by name and device.
      const Cluster& here = all.sizes.front();
      for (std::size_t other = 0; other + 1 < swept.size(); ++other)
        if (const Cluster& there = swept[other].sizes.front();
            there.name == here.name && device_name(there) == device_name(here))
          throw ConfigError(fmt::format(
              "--cluster: two clusters are named '{}' and have the same devices; give one of them another 'name'",
              here.name));
    }
  }
  return swept;
}

// The front compares clusters, so their prices must be comparable.
void check_currencies(const std::vector<SweptCluster>& swept) {
  const Cluster* first = nullptr;
  for (const SweptCluster& all : swept)
    for (const Cluster& cluster : all.sizes) {
      if (!currency(cluster)) continue;
      if (first == nullptr) first = &cluster;
      else if (currency(*first) != currency(cluster))
        throw ConfigError(
            fmt::format("cluster '{}' is priced in {} and '{}' in {}, and currencies cannot be compared; give prices "
                        "in one with --price NAME=PRICE,...",
                        first->name, *currency(*first), cluster.name, *currency(cluster)));
    }
}

// The points of the sweep, with the sizes of a cluster adjacent; nothing is planned yet.
std::vector<SweepPoint> points_of(const SweepArguments& arguments, const std::vector<SweptCluster>& swept,
                                  const ModelFile& model, std::vector<std::string>& defaults) {
  std::vector<std::optional<std::int64_t>> batches(arguments.batches.begin(), arguments.batches.end());
  std::vector<std::optional<std::int64_t>> sequences(arguments.sequences.begin(), arguments.sequences.end());
  if (batches.empty()) batches.emplace_back();
  if (sequences.empty()) sequences.emplace_back();
  std::vector<SweepPoint> points;
  for (const SweptCluster& all : swept) {
    for (const auto& batch : batches) {
      for (const auto& sequence : sequences) {
        WhatArguments what = arguments.what;
        what.global_batch = batch;
        what.sequence_length = sequence;
        // All sizes train the same way: where the default batch depends on the number of devices,
        // that of the largest number is used.
        const Cluster& largest =
            *std::ranges::max_element(all.sizes, {}, [](const Cluster& cluster) { return cluster.devices(); });
        defaults.clear();
        const TrainingSpec training = choose_training(largest, model, what, defaults);
        for (const Cluster& cluster : all.sizes) {
          SweepPoint& point = points.emplace_back();
          point.cluster = cluster;
          point.training = training;
          keep_kernels_of(training.engine, point.cluster);
        }
      }
    }
  }
  return points;
}

std::string why_there_is_none(const SearchResult& found, const Cluster& cluster, const LayoutRequest& layout) {
  if (found.counts.candidates == 0)
    return fmt::format("the batch, the model and the devices allow no layout{}",
                       layout == LayoutRequest{} ? "" : " with the parts that are given");
  if (!found.smallest) return why_none_fits(found.counts.candidates, cluster, std::nullopt);
  const std::optional<Shortage> shortage = shortage_of(cluster, found.smallest->spec, found.smallest->result);
  const std::string text = why_none_fits(found.counts.candidates, cluster, shortage);
  return shortage && shortage->home == Home::device
             ? text + fmt::format("; the smallest needs {}", format_bytes(shortage->needed))
             : text;
}

// What the points of a sweep may differ in of what their graphs depend on.
using GraphKey = std::pair<std::int64_t, DataType>;
using Graphs = std::map<GraphKey, OpGraph>;
GraphKey graph_key(const TrainingSpec& training) {
  return {training.sequence_length, stated_precision(training)};
}

// Points are independent of each other: each is planned by whichever thread is free.
void plan_all(Sweep& sweep, const Graphs& graphs, const SweepArguments& arguments,
              Terminal& terminal) {
  ProgressLine progress(terminal, arguments.output.quiet ? Talk::quiet : Talk::wanted);
  std::mutex talking;
  std::size_t done = 0;
  const auto show = [&](std::size_t more) {
    const std::lock_guard lock(talking);
    done += more;
    progress.show(fmt::format("planned {} of {} points", done, sweep.points.size()));
  };
  SearchOptions options;
  options.top = 1;
  options.objective = arguments.limits.objective.value_or(Objective::time);
  options.most_simulated = arguments.limits.most_candidates;
  options = as_suggested(options, arguments.layout);
  const int cores = arguments.limits.threads > 0 ? arguments.limits.threads
                                                 : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const int threads = std::min(cores, static_cast<int>(sweep.points.size()));
  options.threads = cores / threads;  // of each search, whose result does not depend on them
  options.progress = [&](std::int64_t, std::int64_t) { show(0); };

  std::vector<std::exception_ptr> failures(sweep.points.size()), refusals(sweep.points.size());
  std::atomic<std::size_t> next = 0;
  const auto work = [&] {
    for (std::size_t i = next++; i < sweep.points.size(); i = next++) {
      SweepPoint& point = sweep.points[i];
      try {
        ArrangedResult arranged =
            search_with_headroom(graphs.at(graph_key(point.training)), point.cluster, point.training,
                                 arguments.layout, options, precision_of(sweep.defaults));
        SearchResult& found = arranged.found;
        if (arranged.cluster != point.cluster) point.arranged = std::move(arranged.cluster);
        point.training.precision = arranged.precision;
        point.search = found.counts;
        if (found.plans.empty()) point.reason = why_there_is_none(found, point.cluster, arguments.layout);
        else point.best = std::move(found.plans.front());
      } catch (const ConfigError& error) {
        point.reason = error.message();  // the other points are planned all the same
        refusals[i] = std::current_exception();
      } catch (...) {
        failures[i] = std::current_exception();
      }
      show(1);
    }
  };
  std::vector<std::jthread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(work);
  work();
  others.clear();
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
  if (std::ranges::all_of(refusals, [](const std::exception_ptr& refusal) { return refusal != nullptr; }))
    std::rethrow_exception(refusals.front());
}

std::string describe(const Sweep& sweep) {
  std::string text = fmt::format("model     {}: {} parameters\n", sweep.points.front().model.name,
                                 sweep.points.front().model.parameters);
  const auto marked = [&](const std::string& value, const char* field) {
    return value + (std::ranges::find(sweep.defaults, field) != sweep.defaults.end() ? " (default)" : "");
  };
  // Each value once: "8", "8 and 16", "8, 16 and 32".
  const auto all = [&](const auto& of_point, const char* field) {
    std::vector<std::string> values;
    for (const SweepPoint& point : sweep.points)
      if (std::string value = of_point(point); std::ranges::find(values, value) == values.end())
        values.push_back(std::move(value));
    const std::string last = values.back();
    values.pop_back();
    return marked(values.empty() ? last : join(values) + " and " + last, field);
  };
  text += fmt::format(
      "cluster   {}: {} point{}\n",
      all([](const SweepPoint& p) { return fmt::format("{} of {}", p.cluster.name, device_name(p.cluster)); },
          "cluster"),
      sweep.points.size(), sweep.points.size() == 1 ? "" : "s");
  text += fmt::format(
      "training  global batch {}, sequence length {}, precision {}, optimizer {}\n",
      all([](const SweepPoint& p) { return fmt::format("{}", p.training.global_batch); }, "global_batch"),
      all([](const SweepPoint& p) { return fmt::format("{}", p.training.sequence_length); }, "sequence_length"),
      all([](const SweepPoint& p) { return std::string(name(stated_precision(p.training))); }, "precision"),
      all([](const SweepPoint& p) { return std::string(name(p.training.optimizer)); }, "optimizer"));
  if (const Engine& engine = sweep.points.front().training.engine; !is_own(engine))
    text += fmt::format("engine    {}: {}\n", engine.name, engine.title);
  if (sweep.tokens) text += fmt::format("tokens    {}\n", *sweep.tokens);
  if (sweep.goodput < 1.0) text += fmt::format("goodput   {:.4g} % of the time\n", 100.0 * sweep.goodput);
  return text;
}

int carry_out(const SweepArguments& arguments, Terminal& terminal) {
  std::vector<NamedInput> inputs{{"MODEL", arguments.model}};
  for (const std::string& cluster : arguments.clusters) inputs.push_back({"--cluster", cluster});
  check_output(arguments.output, {{"--output", arguments.workbook}}, inputs);
  const bool talks = !arguments.output.quiet;
  const ModelFile model = load_model(arguments.model, zoo_folder());
  std::vector<std::string> notes;
  for (const std::string& note : model.notes) notes.push_back(fmt::format("{}: {}", arguments.model, note));

  std::vector<SweptCluster> swept = resolve_clusters(arguments, terminal);
  check_currencies(swept);
  OutputArguments silent = arguments.output;
  silent.quiet = true;
  for (SweptCluster& all : swept)
    for (Cluster& cluster : all.sizes) {
      if (arguments.limits.memory) limit_memory(cluster, *arguments.limits.memory, terminal, silent);
      for (const std::string& note : cluster.notes)
        if (const std::string said = fmt::format("{}: {}", cluster.name, note);
            std::ranges::find(notes, said) == notes.end())
          notes.push_back(said);
    }

  Sweep sweep{.version = version(),
              .objective = name(arguments.limits.objective.value_or(Objective::time)),
              .defaults = {},
              .tokens = arguments.tokens,
              .goodput = arguments.goodput,
              .points = {}};
  sweep.points = points_of(arguments, swept, model, sweep.defaults);
  if (arguments.where.calibration) calibrate_all(sweep.points, *arguments.where.calibration, notes);
  for (const SweepPoint& point : sweep.points)
    if (const std::string note = note_on_length(model.spec, point.training, sweep.defaults); !note.empty()) {
      notes.push_back(fmt::format("{}: {}", arguments.model, note));
      break;
    }
  if (talks)
    for (const std::string& note : notes) fmt::print(terminal.err, "note: {}\n", note);
  Graphs graphs;
  for (SweepPoint& point : sweep.points) {
    const auto [place, is_new] = graphs.try_emplace(graph_key(point.training));
    if (is_new) place->second = graph_of(model.spec, point.training);
    const OpGraph& graph = place->second;
    point.model = {.name = model.spec.name,
                   .parameters = parameter_count(graph),
                   .flops_per_sample = model_flops_per_sample(graph)};
  }
  for (const SweepPoint& point : sweep.points) {
    WhereArguments where;
    if (!arguments.sizes.empty()) where.options.devices = point.cluster.devices();
    try {
      check_layout(graphs.at(graph_key(point.training)), point.training, point.cluster, arguments.layout, where);
    } catch (const ConfigError& error) {
      throw ConfigError(fmt::format("{}: {}", words_of(point), message_of(error)));
    }
  }

  for (SweepPoint& point : sweep.points)
    leave_headroom(point.cluster, point.training.engine, arguments.limits.headroom,
                   arguments.limits.memory.has_value());

  plan_all(sweep, graphs, arguments, terminal);

  if (arguments.output.shows_table()) {
    fmt::print(terminal.out, "{}\n{}\n", describe(sweep), sweep_table(sweep));
    for (const std::string& note : sweep_notes(sweep)) fmt::print(terminal.out, "note: {}\n", note);
  } else if (talks) {
    fmt::print(terminal.err, "{}", describe(sweep));
  }
  write_json_and_csv(arguments.output, terminal, sweep_json(sweep), [&] { return sweep_csv(sweep); });
  if (!arguments.workbook.empty()) {
    terminal.out.flush();
    write_workbook(arguments.workbook, sweep);
    if (talks) fmt::print(terminal.err, "wrote {}\n", arguments.workbook);
  }
  if (std::ranges::any_of(sweep.points, [](const SweepPoint& point) { return point.best.has_value(); }))
    return exit_done;
  fmt::print(terminal.err, "no feasible plan at any point\n");
  return exit_failed;
}

}  // namespace

CommandBody declare_sweep(CLI::App& app) {
  const auto arguments = std::make_shared<SweepArguments>();
  SweepArguments& all = *arguments;
  const auto add = [&](const char* group, const char* name, const char* type, const char* description,
                       std::function<void(const std::string&)> read) {
    add_option(app, {.names = name, .type = type, .description = description, .group = group}, std::move(read));
  };
  add_subject(app, all.model, "MODEL", "a model.yaml, a Hugging Face config.json or a name of the zoo");
  add("Where", "--cluster", "FILE|NAME,...",
      "clusters to compare, each a cluster.yaml, a topology (text of nvidia-smi topo -m, XML of NCCL) or a named "
      "cluster (default: this machine)",
      [&all](const std::string& text) { all.clusters = parse_list("--cluster", text); });
  add("Where", "--devices", "N,N,...", "numbers of devices to compare (default: all of the cluster)",
      [&all](const std::string& text) { all.sizes = parse_numbers("--devices", text, most_devices); });
  add("Where", "--device", "KIND,...", "kinds of device to compare, for topologies, which seldom name theirs",
      [&all](const std::string& text) { all.device_kinds = parse_list("--device", text); });
  add_network(app, all.where);
  add("Where", "--price", "PRICE|NAME=PRICE,...",
      "what an hour of one device costs, such as '2.50 USD', for all clusters or by the name of each (default: the "
      "cluster's file)",
      [&all](const std::string& text) { all.prices = parse_prices("--price", text); });
  add_calibration(app, "Where", all.where.calibration);
  add("What", "--global-batch", "N,N,...",
      "sequences of one optimizer step, each to compare (default: 512 on GPUs, 4 for each of the most devices on CPUs)",
      [&all](const std::string& text) { all.batches = parse_numbers("--global-batch", text, most_counted); });
  add("What", "--seq-len", "N,N,...",
      "tokens of a sequence, each to compare (default: the model's context, at most 8192; on CPUs at most 256)",
      [&all](const std::string& text) { all.sequences = parse_numbers("--seq-len", text, most_counted); });
  add_number_formats(app, all.what);
  add("What", "--tokens", "N",
      "tokens to train on, such as 15T, 300B or 1e12: gives days, device-hours, cost and energy",
      [&all](const std::string& text) { all.tokens = parse_count("--tokens", text); });
  add("What", "--goodput", "SHARE",
      "share of the time in which steps are made, such as 0.9: what fails, restarts, checkpoints and evaluation take "
      "the rest; days, cost and energy count it (default: 1)",
      [&all](const std::string& text) { all.goodput = parse_goodput("--goodput", text); });
  add_limits(app, all.limits);
  add_layout(app, all.layout);
  add("Output", "-o,--output,--xlsx", "FILE.xlsx",
      "a workbook whose days, costs and energy are formulas (docs/capacity.md)", [&all](const std::string& text) {
        if (!text.ends_with(".xlsx"))
          throw ConfigError(fmt::format(
              "--output: a workbook's name ends in .xlsx, found '{}'; for other formats there are --json and --csv",
              text));
        all.workbook = text;
      });
  add_output(app, all.output, CsvOutput::offered);
  return [arguments](Terminal& terminal) { return carry_out(*arguments, terminal); };
}

}  // namespace parplan
