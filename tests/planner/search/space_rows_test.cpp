#include <doctest/doctest.h>

#include <algorithm>
#include <iterator>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/cluster/find_cluster.h"
#include "planner/parallel/techniques.h"
#include "planner/plan/parallel_spec_text.h"
#include "planner/plan/plan.h"
#include "planner/schedule/schedules.h"
#include "planner/search/space.h"
#include "planner/search/space_rows.h"

namespace parplan {
namespace {

const std::string source = PARPLAN_SOURCE_DIR;
constexpr int devices = 8;

// The space of a tiny model on eight cores, with sequences so long that it has context parallelism.
struct Space {
  OpGraph graph = build_graph(load_model(source + "/tests/data/models/tiny-llama.yaml", "").spec, long_sequence);
  Cluster cluster = find_cluster(source + "/tests/data/clusters/cpu-8.yaml",
                                 {source + "/configs/devices", source + "/configs/clusters"},
                                 {.device = {}, .network = {}, .devices = devices, .nodes = {}});
  TrainingSpec training;
  std::vector<ParallelSpec> specs;

  Space() {
    training.global_batch = 8;
    training.sequence_length = long_sequence;
    training.precision = DataType::fp32;
    for (NodeGroup& group : cluster.groups)  // a plan on NVMe is read back where there is some
      group.nvme = {.read = BytesPerSecond(6e9), .write = BytesPerSecond(3e9), .latency = {}, .capacity = {}};
    specs = enumerate_specs(graph, training, devices, {});
  }
  // Those of the space, and values with names that are there on request only.
  std::set<ChoiceValue> values_of(const ChoiceRow& row) const {
    std::set<ChoiceValue> values;
    for (const ParallelSpec& spec : specs) values.insert(row.get(spec));
    if (row.named) std::ranges::copy(row.named(), std::inserter(values, values.end()));
    return values;
  }
  bool has(const ChoiceRow& row, const ChoiceValue& value) const {
    return std::ranges::any_of(specs, [&](const ParallelSpec& spec) { return row.get(spec) == value; });
  }
  std::vector<int> cut(int stages) const {
    std::vector<int> blocks(static_cast<std::size_t>(stages), 1);
    blocks.front() += static_cast<int>(graph.blocks.size()) - stages;
    return blocks;
  }
};

// What only interleaved layouts have: on request, there are more of them.
bool is_interleaved(const ChoiceRow& row, const ChoiceValue& value) {
  return row.choice == Choice::virtual_stages || row.choice == Choice::micro_batch_group ||
         value == ChoiceValue(ScheduleKind::interleaved);
}

// Choices that no search makes by itself, among values without names.
bool is_on_request(const ChoiceRow& row) {
  return row.choice == Choice::micro_batch_group || row.choice == Choice::cp_ulysses ||
         row.choice == Choice::recompute_layers || row.choice == Choice::offload_layers ||
         row.choice == Choice::replica_micro_batches || row.choice == Choice::prefetch_depth;
}

// Orders that differ only on axes of one rank are one order.
ParallelSpec in_order_of(const ParallelSpec& spec, const ParallelSpec& other) {
  ParallelSpec changed = spec;
  changed.mesh.order = other.mesh.order;
  return layout_text(changed) == layout_text(spec) ? changed : spec;
}

TEST_CASE("with a choice fixed the space is the part of the free one that has its value") {
  const Space space;
  for (const ChoiceRow& row : choice_rows()) {
    if (row.choice == Choice::stage_blocks) continue;  // cut once a layout is chosen
    const std::set<ChoiceValue> values = space.values_of(row);
    CHECK_MESSAGE((values.size() > 1 || is_on_request(row)), "there is no choice of " << row.key);
    for (const ChoiceValue& value : values) {
      if (is_interleaved(row, value)) continue;
      CAPTURE(row.key);
      CAPTURE(write_value(value));
      std::vector<ParallelSpec> wanted;
      const bool is_tried = space.has(row, value);
      for (const ParallelSpec& spec : space.specs) {
        ParallelSpec with = spec;
        row.set(with, value);
        const bool applies = !row.applies || row.applies(spec);
        if (applies && runs_backward_in_parts(with.schedule) && with.zero_stage > 1) continue;  // not legal
        if (applies && is_v_shaped(with.schedule) && illegal(space.graph, space.training, with)) continue;
        if (applies && with.dp_method == DataMethod::master && illegal(space.graph, space.training, with)) continue;
        if (applies && with.offload.parameters != Home::device && illegal(space.graph, space.training, with)) continue;
        // A value that no search tries by itself takes the place of the usual one.
        const bool replaces = !is_tried && row.get(spec) == row.get(ParallelSpec{});
        if (!applies || replaces || in_order_of(spec, with) == with)
          wanted.push_back(applies ? with : spec);
      }
      const LayoutRequest request{{row.choice, value}};
      CHECK(enumerate_specs(space.graph, space.training, devices, request) == wanted);
      CHECK(count_specs(space.graph, space.training, devices, request) == static_cast<std::int64_t>(wanted.size()));
    }
  }
}

TEST_CASE("groups that exchange tokens for heads have the next ones for neighbours, and none") {
  const Space space;
  const SpaceRow& row = space_row_of(Choice::cp_ulysses);
  const auto neighbours = [&](int cp, ContextMethod method, int groups) {
    ParallelSpec spec;
    spec.mesh.degree.cp = cp;
    spec.cp_method = method;
    spec.mesh.cp_ulysses = groups;
    std::vector<std::int64_t> found;
    for (const ChoiceValue& value : row.neighbours(row, {space.graph, space.training, cp}, spec))
      found.push_back(std::get<std::int64_t>(value));
    return found;
  };
  using Groups = std::vector<std::int64_t>;
  CHECK(neighbours(12, ContextMethod::ring, 3) == Groups{1, 2, 4});
  CHECK(neighbours(12, ContextMethod::ring, 2) == Groups{1, 3});
  CHECK(neighbours(12, ContextMethod::all_gather, 6) == Groups{1, 4});
  CHECK(neighbours(12, ContextMethod::ring, 1) == Groups{2});
  CHECK(neighbours(3, ContextMethod::ring, 1) == Groups{});
  CHECK(neighbours(12, ContextMethod::ulysses, 1) == Groups{});
  CHECK(neighbours(1, ContextMethod::ring, 1) == Groups{});
}

TEST_CASE("of how many layers activations leave has one less and one more for neighbours, up to all") {
  const Space space;
  const SpaceRow& row = space_row_of(Choice::offload_layers);
  const auto neighbours = [&](int pp, int layers, Home home) {
    ParallelSpec spec;
    spec.mesh.degree.pp = pp;
    spec.offload.activations = home;
    spec.offload_layers = layers;
    std::vector<std::int64_t> found;
    for (const ChoiceValue& value : row.neighbours(row, {space.graph, space.training, pp}, spec))
      found.push_back(std::get<std::int64_t>(value));
    return found;
  };
  using Numbers = std::vector<std::int64_t>;
  const int layers = static_cast<int>(space.graph.blocks.size()) - 2;
  REQUIRE(layers == 4);
  CHECK(neighbours(1, 1, Home::host) == Numbers{2});
  CHECK(neighbours(1, 3, Home::nvme) == Numbers{2, 0});
  CHECK(neighbours(1, 0, Home::host) == Numbers{3});
  CHECK(neighbours(2, 1, Home::host) == Numbers{0});
  CHECK(neighbours(1, 0, Home::device) == Numbers{});
}

TEST_CASE("with an interleaved schedule fixed the space has every legal number of virtual stages") {
  const Space space;
  for (const std::int64_t group : {0, 3, 4}) {
    LayoutRequest request{{Choice::schedule, ScheduleKind::interleaved}};
    if (group > 0) request[Choice::micro_batch_group] = group;
    // Those with the plain schedule in their place.
    std::vector<ParallelSpec> wanted;
    for (const ParallelSpec& spec : space.specs) {
      if (spec.pp() == 1) wanted.push_back(spec);
      if (spec.pp() == 1 || spec.schedule != ScheduleKind::one_f_one_b) continue;
      for (int number = 2; number <= static_cast<int>(space.graph.blocks.size()); ++number) {
        ParallelSpec with = spec;
        with.schedule = ScheduleKind::interleaved;
        with.virtual_stages = number;
        with.micro_batch_group = static_cast<int>(group);
        if (!illegal(space.graph, space.training, with)) wanted.push_back(with);
      }
    }
    CAPTURE(group);
    const auto sorted = [](std::vector<ParallelSpec> specs) {
      std::ranges::sort(specs);
      return specs;
    };
    CHECK(std::ranges::any_of(wanted, [](const ParallelSpec& spec) { return spec.virtual_stages == 3; }));
    CHECK(sorted(enumerate_specs(space.graph, space.training, devices, request)) == sorted(wanted));
    CHECK(count_specs(space.graph, space.training, devices, request) == static_cast<std::int64_t>(wanted.size()));
    for (const int number : {2, 3}) {
      request[Choice::virtual_stages] = number;
      const auto has_another = [&](const ParallelSpec& spec) { return spec.pp() > 1 && spec.virtual_stages != number; };
      std::vector<ParallelSpec> with_number = wanted;
      std::erase_if(with_number, has_another);
      CHECK(sorted(enumerate_specs(space.graph, space.training, devices, request)) == sorted(with_number));
    }
  }
}

TEST_CASE("with a cut fixed the space is the part of the free one that has as many stages") {
  const Space space;
  for (const int stages : {1, 2, 3}) {
    std::vector<ParallelSpec> wanted;
    for (ParallelSpec spec : space.specs) {
      if (spec.pp() != stages || spec.virtual_stages > 1) continue;
      spec.stage_blocks = space.cut(stages);
      wanted.push_back(spec);
    }
    CHECK(enumerate_specs(space.graph, space.training, devices, {{Choice::stage_blocks, space.cut(stages)}}) == wanted);
  }
}

TEST_CASE("two choices fixed are the part that has both values") {
  const Space space;
  std::mt19937 random(7);
  for (int trial = 0; trial < 200; ++trial) {
    const ParallelSpec& model = space.specs[random() % space.specs.size()];
    LayoutRequest request;
    for (int i = 0; i < 2; ++i) {
      const ChoiceRow& row = choice_rows()[random() % choice_rows().size()];
      if (row.choice == Choice::stage_blocks || row.choice == Choice::mesh_order) continue;
      if (!is_interleaved(row, row.get(model))) request[row.choice] = row.get(model);
    }
    const auto has_both = [&](const ParallelSpec& spec) {
      return std::ranges::all_of(choice_rows(), [&](const ChoiceRow& row) {
        if (!request[row.choice] || (row.applies && !row.applies(spec))) return true;
        ParallelSpec with = spec;  // a group of all ranks is none
        row.set(with, *request[row.choice]);
        return row.get(with) == row.get(spec);
      });
    };
    std::vector<ParallelSpec> wanted;
    std::ranges::copy_if(space.specs, std::back_inserter(wanted), has_both);
    std::string words;
    for (const ChoiceRow& row : choice_rows())
      if (request[row.choice]) words += fmt::format("{} {} ", row.key, write_value(*request[row.choice]));
    CAPTURE(words);
    CHECK(enumerate_specs(space.graph, space.training, devices, request) == wanted);
    CHECK(count_specs(space.graph, space.training, devices, request) == static_cast<std::int64_t>(wanted.size()));
  }
}

TEST_CASE("what a choice can be follows from the choices that its row names alone") {
  const Space space;
  const SpaceContext context{space.graph, space.training, devices};
  std::mt19937 random(11);
  for (int trial = 0; trial < 500; ++trial) {
    const ParallelSpec& one = space.specs[random() % space.specs.size()];
    const ParallelSpec& other = space.specs[random() % space.specs.size()];
    for (const SpaceRow& row : space_rows()) {
      ParallelSpec mixed = other;
      for (const ChoiceRow& choice : choice_rows())
        if (row.follows_from.contains(choice.choice)) choice.set(mixed, choice.get(one));
      std::vector<ChoiceValue> of_one, of_mixed;
      row.values(context, one, of_one);
      row.values(context, mixed, of_mixed);
      CAPTURE(row_of(row.choice).key);
      CHECK(of_one == of_mixed);
      // Whether it applies follows from the same choices.
      const ChoiceRow& choice = row_of(row.choice);
      if (choice.applies) CHECK(choice.applies(one) == choice.applies(mixed));
    }
  }
}

TEST_CASE("a choice with one value has the same one in every layout") {
  const Space space;
  const SpaceContext context{space.graph, space.training, devices};
  for (const SpaceRow& row : space_rows()) {
    if (!row.has_one_value) continue;
    CAPTURE(row_of(row.choice).key);
    std::vector<ChoiceValue> first;
    row.values(context, space.specs.front(), first);
    CHECK(first.size() == 1);
    for (const ParallelSpec& spec : space.specs) {
      std::vector<ChoiceValue> values;
      row.values(context, spec, values);
      CHECK(values == first);
    }
  }
}

TEST_CASE("what is legal with one value of a choice that decides nothing is legal with every one") {
  const Space space;
  const SpaceContext context{space.graph, space.training, devices};
  for (const ParallelSpec& spec : space.specs)
    for (const SpaceRow& row : space_rows()) {
      if (row.decides_legality) continue;
      std::vector<ChoiceValue> values;
      row.values(context, spec, values);
      for (const ChoiceValue& value : values) {
        ParallelSpec with = spec;
        row_of(row.choice).set(with, value);
        bool exists = true;
        for (const SpaceRow& later : space_rows()) {
          if (!later.follows_from.contains(row.choice)) continue;
          std::vector<ChoiceValue> any;
          later.values(context, with, any);
          exists = exists && !any.empty();
          if (exists) row_of(later.choice).set(with, any.front());
        }
        if (exists) CHECK_FALSE(illegal(space.graph, space.training, with));
      }
    }
}

TEST_CASE("every choice is read back from plan.yaml, whatever it is") {
  const Space space;
  Plan plan;
  plan.model_text = "name: tiny\n";
  plan.model = {.name = "tiny", .parameters = 1, .flops_per_sample = Flops(1.0)};
  plan.cluster = space.cluster;
  plan.training = space.training;
  for (const ChoiceRow& row : choice_rows()) {
    std::set<ChoiceValue> written;
    std::vector<ParallelSpec> specs = space.specs;
    if (row.only_in_plans)
      for (const ChoiceValue& value : row.only_in_plans())
        if (value == ChoiceValue(Recompute::per_stage)) {
          ParallelSpec& spec = specs.emplace_back(*std::ranges::find(specs, 2, &ParallelSpec::pp));
          row.set(spec, value);
          spec.stage_recompute = {{Recompute::full, 1}, Recompute::none};
        }
    if (row.named)
      for (const ChoiceValue& value : row.named())
        if (!space.has(row, value)) {
          const bool goes_back = row.choice == Choice::schedule && is_v_shaped(std::get<ScheduleKind>(value));
          const auto with_enough = std::ranges::find_if(space.specs, [&](const ParallelSpec& spec) {
            return spec.pp() == 2 && spec.zero_stage == 0 && micro_batches(spec, space.training) >= 4;
          });
          row.set(specs.emplace_back(goes_back ? *with_enough : space.specs.front()), value);
        }
    if (is_interleaved(row, {})) {
      const auto plain = std::ranges::find_if(space.specs, [](const ParallelSpec& spec) {
        return spec.pp() == 2 && spec.dp() == 1 && spec.micro_batch == 1;
      });
      ParallelSpec& spec = specs.emplace_back(*plain);
      spec.schedule = ScheduleKind::interleaved;
      spec.virtual_stages = 3;
      spec.micro_batch_group = 4;
    }
    if (row.choice == Choice::dp_shard) {
      const auto sharded = std::ranges::find_if(
          space.specs, [](const ParallelSpec& spec) { return spec.replicas() == 4 && spec.zero_stage == 2; });
      row.set(specs.emplace_back(*sharded), std::int64_t{2});
    }
    if (row.choice == Choice::prefetch_depth) {
      const auto gathers = std::ranges::find_if(space.specs, brings_parameters);
      for (const std::int64_t depth : {0, 2}) row.set(specs.emplace_back(*gathers), depth);
    }
    if (row.choice == Choice::gather_unit) {
      const auto gathers = std::ranges::find_if(space.specs, gathers_parameters);
      row.set(specs.emplace_back(*gathers), GatherUnit::parameter);
    }
    if (row.choice == Choice::cp_ulysses) {
      ParallelSpec& spec = specs.emplace_back(space.specs.front());
      spec = ParallelSpec{};
      spec.mesh.degree.cp = 4;
      row.set(spec, std::int64_t{2});
    }
    if (row.choice == Choice::replica_micro_batches) {
      const auto several = std::ranges::find_if(space.specs, [&](const ParallelSpec& spec) {
        return spec.dp() == 2 && spec.cp() == 1 && spec.pp() == 1 && spec.zero_stage == 0 &&
               micro_batches(spec, space.training) >= 2;
      });
      const int each = static_cast<int>(micro_batches(*several, space.training));
      row.set(specs.emplace_back(*several), std::vector<int>{each + 1, each - 1});
    }
    if (row.choice == Choice::recompute_layers) {
      ParallelSpec& spec = specs.emplace_back(space.specs.front());
      spec.recompute = Recompute::full;
      row.set(spec, std::int64_t{1});
    }
    if (row.choice == Choice::offload_layers) {
      ParallelSpec& spec = specs.emplace_back(space.specs.front());
      spec.offload = Offload{.activations = Home::host};
      row.set(spec, std::int64_t{1});
    }
    for (ParallelSpec& spec : specs) {
      if (spec.stage_blocks.empty()) spec.stage_blocks = space.cut(spec.stages());
      if (!written.insert(row.get(spec)).second) continue;
      plan.spec = spec;
      plan.placements = place(space.graph, spec);
      plan.schedule = schedule_of(spec, space.training);
      const std::string text = write_plan(plan);
      const bool is_written = text.find(fmt::format("\n  {}: {}\n", row.key, write_value(row.get(spec)))) !=
                              std::string::npos;
      CHECK(is_written == !(row.may_be_absent && row.get(spec) == row.get(ParallelSpec{})));
      CHECK(read_plan(text, "plan.yaml").spec == spec);
    }
    CHECK_MESSAGE(written.size() > 1, "plans have one " << row.key);
  }
}

TEST_CASE("layouts that differ in a choice differ in words, by their cut in layers") {
  const Space space;
  for (const ChoiceRow& row : choice_rows()) {
    CAPTURE(row.key);
    const std::set<ChoiceValue> values = space.values_of(row);
    const bool in_words = std::ranges::any_of(space.specs, [&](const ParallelSpec& spec) {
      return std::ranges::any_of(values, [&](const ChoiceValue& value) {
        ParallelSpec other = spec;
        row.set(other, value);
        return layout_text(other) != layout_text(spec);
      });
    });
    const bool has_several = row.choice != Choice::stage_blocks && !is_on_request(row);
    CHECK(in_words == has_several);
    for (const ChoiceValue& value : values) {
      CHECK_FALSE(phrase(row, value).empty());
      CHECK_FALSE(instead(row, space.specs.front(), value).empty());
    }
  }
  ParallelSpec hybrid;
  hybrid.mesh.degree.dp = 4;
  hybrid.zero_stage = 3;
  hybrid.mesh.dp_shard = 2;
  CHECK(layout_text(hybrid).find(" zero3 dp-shard2 ") != std::string::npos);
  CHECK(phrase(row_of(Choice::dp_shard), std::int64_t{2}) == "sharding over groups of 2");
  hybrid.prefetch_depth = 2;
  CHECK(layout_text(hybrid).find(" prefetch2") != std::string::npos);
  CHECK(phrase(row_of(Choice::prefetch_depth), std::int64_t{2}) == "parameters gathered 2 blocks ahead");
  CHECK(phrase(row_of(Choice::prefetch_depth), std::int64_t{1}) == "parameters gathered 1 block ahead");
  CHECK(phrase(row_of(Choice::prefetch_depth), std::int64_t{0}) == "parameters gathered when a block needs them");
  hybrid.gather_unit = GatherUnit::parameter;
  CHECK(layout_text(hybrid).find(" gather-parameters") != std::string::npos);
  CHECK(phrase(row_of(Choice::gather_unit), GatherUnit::parameter) == "parameters gathered one by one");
  CHECK(phrase(row_of(Choice::gather_unit), GatherUnit::block) == "parameters gathered block by block");
  ParallelSpec offloaded;
  offloaded.offload = Offload{.activations = Home::host};
  offloaded.offload_layers = 3;
  CHECK(layout_text(offloaded).ends_with(" offload=activations offload-layers=3"));
  CHECK(phrase(row_of(Choice::offload_layers), std::int64_t{1}) ==
        "with the activations of 1 layer a stage off the device");
  CHECK(instead(row_of(Choice::offload_layers), offloaded, std::int64_t{2}) ==
        "the activations of 3 layers a stage off the device instead of 2");
  ParallelSpec hierarchical;
  hierarchical.mesh.degree.cp = 8;
  hierarchical.cp_method = ContextMethod::ring;
  hierarchical.mesh.cp_ulysses = 4;
  CHECK(layout_text(hierarchical).find(" ring ulysses4 ") != std::string::npos);
  CHECK(phrase(row_of(Choice::cp_ulysses), std::int64_t{4}) == "tokens exchanged for heads in groups of 4");
  ParallelSpec cut;
  cut.stage_blocks = {3, 2};
  CHECK(stage_layers(cut) == "2,1");
}

TEST_CASE("every choice has values of one type, by its own names and keys") {
  std::set<std::string_view> keys, options;
  const Space space;
  for (const ChoiceRow& row : choice_rows()) {
    CAPTURE(row.key);
    CHECK(keys.insert(row.key).second);
    CHECK(options.insert(row.option).second);
    const ChoiceValue by_default = row.get(ParallelSpec{});
    for (const ParallelSpec& spec : space.specs) {
      const ChoiceValue value = row.get(spec);
      CHECK(value.index() == by_default.index());
      ParallelSpec with;
      row.set(with, value);
      CHECK(row.get(with) == value);
    }
    // Numbers have bounds, names are listed.
    const bool numbers =
        std::holds_alternative<std::int64_t>(by_default) || std::holds_alternative<std::vector<int>>(by_default);
    CHECK(numbers == (row.minimum <= row.maximum));
    const bool has_names =
        std::holds_alternative<ScheduleKind>(by_default) || std::holds_alternative<Recompute>(by_default) ||
        std::holds_alternative<TiedGradients>(by_default) || std::holds_alternative<InputSlots>(by_default) ||
        std::holds_alternative<ContextMethod>(by_default) || std::holds_alternative<Offload>(by_default) ||
        std::holds_alternative<DataMethod>(by_default) || std::holds_alternative<TensorOverlap>(by_default) ||
        std::holds_alternative<GatherUnit>(by_default);
    CHECK(has_names == (row.named != nullptr));
  }
}

}  // namespace
TEST_CASE("layers of a decoder behind an encoder divide evenly among the stages of an interleaved pipeline") {
  struct Case {
    std::string model;
    int ranks;
    std::vector<std::int64_t> evenly;
  };
  for (const Case& one : {Case{"t5-small", 3, {2, 4}}, Case{"gpt2", 4, {3}}, Case{"gpt2", 6, {2}}}) {
    CAPTURE(one.model);
    const OpGraph graph = build_graph(load_model(source + "/models/" + one.model + ".yaml", "").spec, 512);
    const TrainingSpec training;
    const SpaceContext context{graph, training, one.ranks, true, usual_width(graph, training.engine, {})};
    ParallelSpec spec;
    spec.mesh.degree.pp = one.ranks;
    spec.schedule = ScheduleKind::interleaved;
    std::vector<ChoiceValue> numbers;
    space_row_of(Choice::virtual_stages).values(context, spec, numbers);
    for (const std::int64_t number : one.evenly)
      CHECK(std::ranges::find(numbers, ChoiceValue(number)) != numbers.end());
  }
}

}  // namespace parplan
