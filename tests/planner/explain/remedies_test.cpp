// When nothing fits: each change makes the model fit, and a smaller change does not.
#include "planner/explain/remedies.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/cluster/find_cluster.h"
#include "planner/cluster/mesh.h"
#include "planner/cluster/node_layout.h"
#include "planner/graph/engine_graph.h"
#include "planner/graph/trained_graph.h"
#include "planner/plan/memory_verdict.h"
#include "planner/plan/parallel_spec_text.h"
#include "planner/report/remedy.h"
#include "planner/suggest.h"

namespace parplan {
namespace {

const std::string source = PARPLAN_SOURCE_DIR;

Cluster cluster_of(const std::string& name, std::optional<int> devices = {}) {
  return find_cluster(name, {source + "/configs/devices", source + "/configs/clusters"},
                      {.device = {}, .network = {}, .devices = devices, .nodes = {}});
}

bool fits(const SuggestRequest& request) {
  SearchOptions options = request.options;
  options.top = 1;
  options.most_simulated = 1;
  return !search(*request.graph, request.cluster, request.training, request.layout, options).plans.empty();
}

// A request of a tiny model on devices with so little memory that nothing fits.
struct Crowded {
  ModelSpec model = load_model(source + "/tests/data/models/tiny-llama.yaml", "").spec;
  OpGraph graph = build_graph(model, 256);
  SuggestRequest request;

  Crowded(const std::string& cluster, int devices) {
    request.graph = &graph;
    request.cluster = cluster_of(cluster, devices);
    request.training.global_batch = 16;
    request.training.sequence_length = 256;
    request.training.precision = request.cluster.backend() == BackendKind::cpu ? DataType::fp32 : DataType::bf16;
    request.options.fewer_devices = false;
    request.graph_of_length = [this](std::int64_t length) { return build_graph(model, length); };
  }
  void leave(Bytes bytes) {
    for (NodeGroup& group : request.cluster.groups) group.device.memory_capacity = bytes;
  }
  std::vector<Remedy> remedies() const {
    const SuggestResult result = suggest(request);
    REQUIRE(!result.plan);
    return result.remedies;
  }
};

const Remedy* find(const std::vector<Remedy>& remedies, std::string_view of) {
  const auto found = std::ranges::find(remedies, of, &Remedy::of);
  return found == remedies.end() ? nullptr : &*found;
}

std::int64_t number(const Remedy& remedy) { return std::get<std::int64_t>(remedy.value); }

// The remedy's plan equals the plan of the changed request.
void check_plan(const SuggestRequest& changed, const Remedy& remedy) {
  INFO(remedy.instead);
  CHECK(remedy.plan.result.memory.peak() <=
        memory_capacity(changed.cluster, remedy.plan.spec.mesh, remedy.plan.result.memory_stage));
  const SuggestResult again = suggest(changed);
  REQUIRE(again.plan);
  CHECK(again.plan->prediction.time.total() <= remedy.plan.result.time.total());
}

}  // namespace

TEST_CASE("the optimizer's state in host memory is a change that makes a plan fit, where the hosts are known") {
  Crowded crowded("dgx-a100", 2);
  SearchOptions options;
  options.objective = Objective::memory;
  const SearchResult smallest = search(*crowded.request.graph, crowded.request.cluster, crowded.request.training,
                                       {{Choice::offload, Offload{.optimizer = Home::host}}}, options);
  crowded.leave(smallest.plans.front().result.memory.peak());
  const std::vector<Remedy> remedies = crowded.remedies();
  const Remedy* remedy = find(remedies, "offload");
  REQUIRE(remedy != nullptr);
  CHECK(remedy->instead == "with the optimizer's state in host memory");
  CHECK(std::get<std::string>(remedy->value) == "optimizer");
  SuggestRequest changed = crowded.request;
  changed.layout[Choice::offload] = Offload{.optimizer = Home::host};
  check_plan(changed, *remedy);
  for (NodeGroup& group : crowded.request.cluster.groups) group.host.reset();
  CHECK(find(crowded.remedies(), "offload") == nullptr);
}

TEST_CASE("a plan must fit its share of the host's memory, too") {
  Crowded crowded("dgx-a100", 2);
  crowded.request.layout[Choice::offload] = Offload{.optimizer = Home::host};
  const SuggestResult result = suggest(crowded.request);
  REQUIRE(result.plan);
  const Bytes host = result.plan->prediction.memory.host;
  CHECK(host > Bytes(0));
  // Two ranks share a machine.
  crowded.request.cluster.groups.front().host->memory = 2 * host;
  CHECK(suggest(crowded.request).plan);
  crowded.request.cluster.groups.front().host->memory = Bytes(1000);
  const SuggestResult none = suggest(crowded.request);
  CHECK(!none.plan);
  // The host is what lacks room, and nothing on it a change that makes a plan fit.
  REQUIRE(none.shortage);
  CHECK(none.shortage->home == Home::host);
  CHECK(none.shortage->available == Bytes(500));
  CHECK(none.shortage->needed > none.shortage->available);
  const Remedy* remedy = find(none.remedies, "offload");
  REQUIRE(remedy != nullptr);
  CHECK(std::get<std::string>(remedy->value) == "none");
}

TEST_CASE("the activations of as few layers in host memory as make a plan fit are a change that does") {
  Crowded crowded("dgx-a100", 1);
  crowded.model.layers = 8;
  constexpr std::int64_t length = 1024;
  crowded.graph = build_graph(crowded.model, length);
  crowded.request.training.sequence_length = length;
  crowded.request.layout[Choice::recompute] = Recompute::none;
  SearchOptions options;
  options.objective = Objective::memory;
  const auto with = [&](std::int64_t layers) {
    SuggestRequest changed = crowded.request;
    changed.layout[Choice::offload] = Offload{.activations = Home::host};
    changed.layout[Choice::offload_layers] = layers;
    return changed;
  };
  for (const std::int64_t layers : {2, 3}) {
    crowded.request.cluster = cluster_of("dgx-a100", 1);
    crowded.leave(search(crowded.graph, crowded.request.cluster, crowded.request.training, with(layers).layout, options)
                      .plans.front()
                      .result.memory.peak());
    const std::vector<Remedy> remedies = crowded.remedies();
    CHECK(find(remedies, "offload") == nullptr);
    const Remedy* remedy = find(remedies, "offload_layers");
    REQUIRE(remedy != nullptr);
    CHECK(remedy->instead == fmt::format("with the activations of {} layers a stage off the device", layers));
    CHECK(number(*remedy) == layers);
    check_plan(with(layers), *remedy);
    CHECK(!fits(with(layers - 1)));
  }
}

TEST_CASE("where the host's memory is short, the optimizer's state on NVMe is what makes a plan fit") {
  Crowded crowded("dgx-a100", 2);
  SearchOptions options;
  options.objective = Objective::memory;
  const auto smallest = [&](Offload offload) {
    return search(*crowded.request.graph, crowded.request.cluster, crowded.request.training,
                  {{Choice::offload, offload}}, options)
        .plans.front()
        .result.memory;
  };
  const MemoryUse on_host = smallest(Offload{.optimizer = Home::host}),
                  on_nvme = smallest(Offload{.optimizer = Home::nvme});
  REQUIRE(on_nvme.host < on_host.host);
  REQUIRE(on_nvme.peak() == on_host.peak());
  crowded.leave(on_host.peak());
  NodeGroup& nodes = crowded.request.cluster.groups.front();
  nodes.host->memory = 2 * on_nvme.host;  // of two ranks
  const std::vector<Remedy> remedies = crowded.remedies();
  const Remedy* remedy = find(remedies, "offload");
  REQUIRE(remedy != nullptr);
  CHECK(remedy->instead == "with the optimizer's state on NVMe");
  CHECK(std::get<std::string>(remedy->value) == "optimizer:nvme");
  SuggestRequest changed = crowded.request;
  changed.layout[Choice::offload] = Offload{.optimizer = Home::nvme};
  check_plan(changed, *remedy);
  nodes.nvme.reset();
  for (const Remedy& other : crowded.remedies())
    if (other.of == "offload") CHECK(std::get<std::string>(other.value).find("nvme") == std::string::npos);
}

TEST_CASE("more memory: the bytes that the changes name are enough, and one less is not") {
  for (const auto& [name, devices] :
       {std::pair{source + "/tests/data/clusters/cpu-8.yaml", 2}, std::pair{std::string("dgx-a100"), 16}}) {
    Crowded crowded(name, devices);
    const Bytes overhead = crowded.request.cluster.groups.front().device.memory_overhead;
    crowded.leave(overhead + Bytes(10'000));
    const std::vector<Remedy> remedies = crowded.remedies();
    const Remedy* memory = find(remedies, "memory");
    REQUIRE(memory);
    const Bytes enough(number(*memory));
    CHECK(memory->instead == fmt::format("{} of memory a device instead of {}", format_bytes_up(enough),
                                         format_bytes(overhead + Bytes(10'000))));
    SuggestRequest changed = crowded.request;
    changed.cluster = memory->cluster;
    check_plan(changed, *memory);
    crowded.leave(enough);
    CHECK(fits(crowded.request));
    crowded.leave(enough - Bytes(1));
    CHECK(!fits(crowded.request));
  }
}

TEST_CASE("memory that an engine's allocator would give back is not asked for, and such a plan is tight") {
  Crowded crowded("dgx-a100", 2);
  crowded.request.training.engine.name = "caching";
  crowded.request.training.engine.allocator_reserve = 0.5;
  crowded.leave(crowded.request.cluster.groups.front().device.memory_overhead + Bytes(10'000));
  const std::vector<Remedy> remedies = crowded.remedies();
  const Remedy* memory = find(remedies, "memory");
  REQUIRE(memory);
  const Bytes enough(number(*memory));
  const MemoryUse& use = memory->plan.result.memory;
  CHECK(use.reserve > Bytes(0));
  CHECK(use.peak() > enough);
  CHECK(memory_verdict(use, enough, 0.0) == MemoryVerdict::tight);
  CHECK(describe(*memory).ends_with(format_bytes(use.peak() - use.reserve) +
                                    " a device without what its allocator keeps)"));
  crowded.leave(enough);
  const SuggestResult fitting = suggest(crowded.request);
  REQUIRE(fitting.plan);
  CHECK(fitting.plan->prediction.memory.peak() == use.peak());
  crowded.leave(enough - Bytes(1));
  CHECK(!suggest(crowded.request).plan);
}

TEST_CASE("plans of remedies leave the headroom where they can, and are judged with it") {
  Crowded crowded("dgx-a100", 2);
  crowded.request.cluster.memory_headroom = 0.25;
  crowded.leave(crowded.request.cluster.groups.front().device.memory_overhead + Bytes(10'000));
  const std::vector<Remedy> remedies = crowded.remedies();
  std::set<std::string> verdicts;
  for (const Remedy& remedy : remedies) {
    CHECK(remedy.cluster.memory_headroom == 0.25);
    const Json row = remedy_json(remedy).at("plan");
    const Bytes capacity = memory_capacity(remedy.cluster, remedy.plan.spec, remedy.plan.result);
    CHECK(row.at("usable_bytes") == usable_memory(capacity, 0.25).count);
    CHECK(row.at("fit") == name(memory_verdict(remedy.plan.result.memory, capacity, 0.25)));
    verdicts.insert(row.at("fit").get<std::string>());
    // No more memory is asked for than makes a plan fit without the headroom.
    if (remedy.of == "memory") CHECK(row.at("fit") == "tight");
  }
  CHECK(verdicts.contains("tight"));
}

TEST_CASE("changes that let a plan fit on some of the devices, or with given shares of replicas, are found") {
  for (const bool with_shares : {false, true}) {
    CAPTURE(with_shares);
    Crowded crowded("dgx-a100", with_shares ? 2 : 3);
    crowded.graph = build_graph(crowded.model, 1024);
    SuggestRequest& request = crowded.request;
    request.training.sequence_length = 1024;
    request.options.fewer_devices = true;
    request.layout = {{Choice::recompute, Recompute::none}};
    // Two stages leave one of three devices idle; shares of 5 and 3 of 16 are micro-batches of 2.
    request.layout[Choice::pp] = std::int64_t{with_shares ? 1 : 2};
    if (with_shares) {
      request.layout[Choice::dp] = std::int64_t{2};
      request.layout[Choice::tp] = std::int64_t{1};
      request.layout[Choice::replica_micro_batches] = std::vector<int>{5, 3};
    } else {
      request.layout[Choice::dp] = std::int64_t{1};
    }
    SuggestRequest shorter = request;
    const OpGraph half = build_graph(crowded.model, 512);
    shorter.graph = &half;
    shorter.training.sequence_length = 512;
    shorter.options.objective = Objective::memory;
    const SuggestResult least = suggest(shorter);
    REQUIRE(least.plan);
    CHECK(least.plan->spec.mesh.size() == 2);
    crowded.leave(least.plan->prediction.memory.peak());
    const std::vector<Remedy> remedies = crowded.remedies();
    const Remedy* sequence = find(remedies, "sequence_length");
    REQUIRE(sequence);
    CHECK(sequence->training.sequence_length == 512);
  }
}

TEST_CASE("on unlike nodes, changes are looked for on some groups of them alone, too") {
  // Two kinds of nodes, of which one lacks memory whatever is changed: a GPU's libraries fill it.
  Crowded crowded("dgx-a100", 2);
  SuggestRequest& request = crowded.request;
  request.options.fewer_devices = true;
  NodeGroup small = request.cluster.groups.front();
  request.cluster.groups.front().nodes = 1;
  small.device.memory_capacity = small.device.memory_overhead;
  request.cluster.groups.insert(request.cluster.groups.begin(), small);
  NodeGroup& large = request.cluster.groups.back();
  large.device.memory_capacity = Bytes(0);
  SuggestRequest alone = request;
  alone.cluster = cluster_of("dgx-a100", 2);
  alone.options.objective = Objective::memory;
  alone.training.optimizer = Optimizer::sgd;
  const SuggestResult least = suggest(alone);
  REQUIRE(least.plan);
  large.device.memory_capacity = least.plan->prediction.memory.peak();
  const std::vector<Remedy> remedies = crowded.remedies();
  const Remedy* optimizer = find(remedies, "optimizer");
  REQUIRE(optimizer);
  CHECK(optimizer->cluster.groups.size() == 1);
  CHECK(optimizer->cluster.groups.front().device.memory_capacity == large.device.memory_capacity);
}

TEST_CASE("the memory that is named in words is enough when it is typed, and is not what there is now") {
  for (const auto& [name, devices] :
       {std::pair{source + "/tests/data/clusters/cpu-8.yaml", 2}, std::pair{std::string("dgx-a100"), 16}}) {
    Crowded crowded(name, devices);
    const Bytes overhead = crowded.request.cluster.groups.front().device.memory_overhead;
    crowded.leave(overhead + Bytes(10'000));
    const Bytes enough(number(*find(crowded.remedies(), "memory")));
    // A device with exactly that memory, under a limit: no more may be named.
    Cluster whole = crowded.request.cluster;
    for (NodeGroup& group : whole.groups) group.device.memory_capacity = enough;
    for (const bool exact : {false, true})
      for (const std::int64_t missing : {1, 100, 10'000, 1'000'000}) {
        crowded.request.cluster_of = nullptr;
        if (exact)
          crowded.request.cluster_of = [&](int count) {
            return count == devices ? std::optional(whole) : std::nullopt;
          };
        crowded.leave(enough - Bytes(missing));
        const std::vector<Remedy> remedies = crowded.remedies();
        const Remedy* memory = find(remedies, "memory");
        REQUIRE(memory);
        INFO(memory->instead);
        const std::string_view all = memory->instead, between = " of memory a device instead of ";
        const std::size_t at = all.find(between);
        REQUIRE(at != std::string_view::npos);
        const std::string text(all.substr(0, at));
        CHECK(text != all.substr(at + between.size()));
        const Bytes typed = parse_bytes(text);
        CHECK(typed >= enough);
        if (exact) CHECK(typed == enough);
        crowded.leave(typed);
        CHECK(fits(crowded.request));
      }
  }
}

TEST_CASE("more devices: the number that the changes name is enough, and no smaller one is") {
  // 16 GPUs in two nodes need less memory each than 8 do; the search tells how much.
  Crowded eight("dgx-a100", 8);
  eight.leave(eight.request.cluster.groups.front().device.memory_overhead + Bytes(10'000));
  const Remedy of_eight = *find(eight.remedies(), "memory");
  eight.leave(Bytes(number(of_eight) - 1));
  const std::vector<Remedy> remedies = eight.remedies();
  const Remedy* more = find(remedies, "devices");
  REQUIRE(more);
  const auto devices = static_cast<int>(number(*more));
  CHECK(more->instead == fmt::format("{} devices instead of 8", devices));
  CHECK(more->cluster.devices() == devices);
  CHECK(devices % 8 == 0);
  SuggestRequest changed = eight.request;
  changed.cluster = more->cluster;
  check_plan(changed, *more);
  for (int nodes = 1; nodes < devices / 8; ++nodes) {
    changed.cluster.groups.front().nodes = nodes;
    CHECK(!fits(changed));
  }
}

TEST_CASE("devices of a node are counted one by one, where the caller can give them") {
  Crowded two(source + "/tests/data/clusters/cpu-8.yaml", 2);
  two.leave(two.request.cluster.groups.front().device.memory_overhead + Bytes(10'000));
  const Bytes of_two(number(*find(two.remedies(), "memory")));
  two.leave(of_two - Bytes(1));
  CHECK(find(two.remedies(), "devices") == nullptr);  // no network to more nodes
  two.request.cluster_of = [](int devices) -> std::optional<Cluster> {
    if (devices > 8) return std::nullopt;
    return cluster_of(source + "/tests/data/clusters/cpu-8.yaml", devices);
  };
  const std::vector<Remedy> remedies = two.remedies();
  // The request knows only its node of two cores; the caller's machine has eight.
  const Remedy* more = find(remedies, "devices");
  REQUIRE(more);
  CHECK(number(*more) > 2);
  CHECK(number(*more) <= 8);
  CHECK(more->cluster.groups.front().device.memory_capacity == of_two - Bytes(1));
  SuggestRequest changed = two.request;
  for (int devices = 3; devices <= static_cast<int>(number(*more)); ++devices) {
    changed.cluster = cluster_of(source + "/tests/data/clusters/cpu-8.yaml", devices);
    changed.cluster.groups.front().device.memory_capacity = of_two - Bytes(1);
    CHECK(fits(changed) == (devices == static_cast<int>(number(*more))));
  }
}

TEST_CASE("of unlike devices so much memory is named that the fullest of any kind has enough") {
  Crowded crowded("dgx-a100", 4);
  SuggestRequest& request = crowded.request;
  request.layout[Choice::tp] = 1;
  request.layout[Choice::dp] = 1;
  request.cluster.groups.push_back(request.cluster.groups.front());
  for (NodeGroup& group : request.cluster.groups) {
    group.node = first_devices(group.node, 2);
    group.nodes = 1;
    group.device.memory_overhead = Bytes(0);
  }
  request.cluster.groups[0].device.name = "small";
  request.cluster.groups[0].device.memory_capacity = Bytes(2'000);
  request.cluster.groups[1].device.memory_capacity = Bytes(100'000);
  const std::vector<Remedy> remedies = crowded.remedies();
  const Remedy* memory = find(remedies, "memory");
  REQUIRE(memory);
  for (const NodeGroup& group : memory->cluster.groups) CHECK(group.device.memory_capacity >= Bytes(number(*memory)));
  SuggestRequest changed = request;
  changed.cluster = memory->cluster;
  CHECK(fits(changed));
}

TEST_CASE("parts of the layout that were given are changed as little as helps") {
  Crowded crowded(source + "/tests/data/clusters/cpu-8.yaml", 4);
  SuggestRequest& request = crowded.request;
  request.layout[Choice::dp] = 4;
  request.layout[Choice::tp] = 1;
  request.layout[Choice::pp] = 1;
  request.layout[Choice::zero_stage] = 0;
  request.layout[Choice::micro_batch] = 4;
  request.layout[Choice::recompute] = Recompute::none;
  const Bytes needed = simulate_layout(request).prediction.memory.peak();
  crowded.leave(needed - Bytes(1));
  const std::vector<Remedy> remedies = crowded.remedies();
  const Remedy* zero = find(remedies, "zero_stage");
  REQUIRE(zero);
  CHECK(zero->instead == "ZeRO stage 1 instead of 0");
  CHECK(zero->plan.spec.zero_stage == 1);
  const Remedy* micro_batch = find(remedies, "micro_batch");
  REQUIRE(micro_batch);
  CHECK(micro_batch->instead == "micro-batches of 2 instead of 4");  // 3 does not divide the batch
  CHECK(micro_batch->plan.spec.micro_batch == 2);
  const Remedy* recompute = find(remedies, "recompute");
  REQUIRE(recompute);
  CHECK(recompute->instead == "recompute norms+activation instead of none");
  CHECK(find(remedies, "devices") == nullptr);       // dp, tp and pp are given
  CHECK(find(remedies, "global_batch") == nullptr);  // 4 x 4 is the whole batch
  for (const Remedy& remedy : remedies) {
    SuggestRequest changed = request;
    changed.cluster = remedy.cluster;
    changed.training = remedy.training;
    OpGraph graph = as_run_by(remedy.training, build_graph(crowded.model, remedy.training.sequence_length));
    changed.graph = &graph;
    // The remedy's own part is changed, the others stay.
    if (remedy.of == "zero_stage") changed.layout[Choice::zero_stage] = remedy.plan.spec.zero_stage;
    if (remedy.of == "micro_batch") changed.layout[Choice::micro_batch] = remedy.plan.spec.micro_batch;
    if (remedy.of == "recompute") changed.layout[Choice::recompute] = remedy.plan.spec.recompute;
    if (remedy.of == "tp") changed.layout[Choice::tp].reset();
    if (remedy.of == "pp") changed.layout[Choice::pp].reset();
    if (remedy.of == "dp") changed.layout[Choice::dp].reset();
    INFO(remedy.instead);
    CHECK(fits(changed));
  }
}

TEST_CASE("LoRA is a change that makes a plan fit, where all of the model is trained and adapters alone fit") {
  Crowded crowded("dgx-a100", 1);
  crowded.model.hidden = 512;
  crowded.model.feature = 2048;
  crowded.graph = build_graph(crowded.model, 256);
  int asked = 0;
  crowded.request.graph_of_training = [&](const TrainingSpec& training) -> std::optional<OpGraph> {
    ++asked;
    if (find_problem(training, build_graph(crowded.model, 256))) return std::nullopt;
    return as_trained(training, build_graph(crowded.model, 256));
  };
  TrainingSpec adapters = crowded.request.training;
  adapters.lora.emplace();
  adapters.trainable = {.all = false, .patterns = {}};
  const OpGraph adapted = as_trained(adapters, build_graph(crowded.model, 256));
  SuggestRequest changed = crowded.request;
  changed.graph = &adapted;
  changed.training = adapters;
  SearchOptions options;
  options.objective = Objective::memory;
  const Bytes least =
      search(adapted, changed.cluster, changed.training, {}, options).plans.front().result.memory.peak();
  crowded.leave(least);
  const std::vector<Remedy> remedies = crowded.remedies();
  const Remedy* remedy = find(remedies, "trainable");
  REQUIRE(remedy != nullptr);
  CHECK(remedy == &remedies.back());
  CHECK(remedy->instead ==
        "LoRA (--trainable lora) instead of training all parameters, for fine-tuning: adapters of width 8 are trained, "
        "and nothing else of the model");
  CHECK(std::get<std::string>(remedy->value) == "lora");
  CHECK(remedy->training == adapters);
  CHECK(remedy->model.parameters == parameter_count(adapted));
  for (NodeGroup& group : changed.cluster.groups) group.device.memory_capacity = least;
  check_plan(changed, *remedy);
  // A byte less is not enough, and who trains adapters or parts already is not told to.
  crowded.leave(least - Bytes(1));
  CHECK(find(crowded.remedies(), "trainable") == nullptr);
  crowded.leave(least);
  asked = 0;
  crowded.request.training.trainable = {.all = false, .patterns = {"head", "layers", "embedding"}};
  CHECK(find(crowded.remedies(), "trainable") == nullptr);
  CHECK(asked == 0);
}

TEST_CASE("a shorter sequence and a smaller batch are the largest that fit") {
  Crowded crowded(source + "/tests/data/clusters/cpu-8.yaml", 1);
  SuggestRequest& request = crowded.request;
  request.layout[Choice::micro_batch] = 2;
  crowded.leave(request.cluster.groups.front().device.memory_overhead + Bytes(10'000));
  const Bytes least(number(*find(crowded.remedies(), "memory")));
  crowded.leave(least - Bytes(1));
  const std::vector<Remedy> remedies = crowded.remedies();
  const Remedy* sequence = find(remedies, "sequence_length");
  REQUIRE(sequence);
  CHECK(sequence->instead == "sequences of 128 tokens instead of 256");
  CHECK(sequence->training.sequence_length == 128);
  const Remedy* optimizer = find(remedies, "optimizer");
  REQUIRE(optimizer);
  CHECK(optimizer->training.optimizer == Optimizer::adamw_8bit);
  // On one device a smaller batch runs fewer micro-batches one after the other: each needs the same
  // memory as before.
  CHECK(find(remedies, "global_batch") == nullptr);

  // GPipe holds all micro-batches at once, so it helps there.
  Crowded pipeline(source + "/tests/data/clusters/cpu-8.yaml", 2);
  pipeline.request.layout = {{Choice::dp, 1},
                             {Choice::tp, 1},
                             {Choice::pp, 2},
                             {Choice::zero_stage, 0},
                             {Choice::micro_batch, 1},
                             {Choice::schedule, ScheduleKind::gpipe},
                             {Choice::recompute, Recompute::none}};
  const auto needs = [&](std::int64_t batch) {
    SuggestRequest changed = pipeline.request;
    changed.training.global_batch = batch;
    return simulate_layout(changed).prediction.memory.peak();
  };
  REQUIRE(needs(10) < needs(16));
  pipeline.leave(needs(10));
  const std::vector<Remedy> of_pipeline = pipeline.remedies();
  const Remedy* batch = find(of_pipeline, "global_batch");
  REQUIRE(batch);
  const auto fewer = number(*batch);
  CHECK(fewer >= 10);
  SuggestRequest changed = pipeline.request;
  changed.training.global_batch = fewer;
  CHECK(fits(changed));
  changed.training.global_batch = fewer + 1;
  CHECK(!fits(changed));
  const Remedy* schedule = find(of_pipeline, "schedule");
  REQUIRE(schedule);
  CHECK(schedule->instead == "schedule 1f1b instead of gpipe");
}

}  // namespace parplan
