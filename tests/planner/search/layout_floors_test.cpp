#include "planner/search/layout_floors.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <random>
#include <span>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/cost/kernel_time.h"
#include "planner/graph/engine_file.h"
#include "planner/parallel/techniques.h"
#include "planner/search/simulate_spec.h"
#include "planner/search/space.h"
#include "planner/simulator/segment_cost.h"
#include "tests/planner/search/random_settings.h"

namespace parplan {

using testing::describe;
using testing::graph_of;
using testing::random_cluster;
using testing::random_cut;
using testing::random_graph;
using testing::training_of;

// Each group of a part, with its micro-batch.
std::vector<SpacePart> groups_of(Space& space, const SpacePart& part) {
  std::vector<SpacePart> all;
  for (const SpaceGroups& groups : space.groups(part))
    for (const SpaceGroups::Size& size : groups.sizes) {
      all.push_back({.spec = groups.spec, .layouts = size.layouts});
      all.back().spec.micro_batch = size.micro_batch;
    }
  return all;
}

TEST_CASE("a layout whose layers that recompute are frozen can be held in the memory that it takes") {
  int with_all_more = 0;
  for (const char* const model : {"tiny-llama", "tiny-gpt2"})
    for (const std::int64_t sequence : {4, 16, 32})
      for (const std::int64_t micro_batch : {1, 12}) {
        TrainingSpec training = training_of(12, DataType::fp16);
        training.sequence_length = sequence;
        OpGraph graph = graph_of(model, sequence);
        training.trainable.all = false;
        training.trainable.patterns = {graph.blocks[graph.blocks.size() - 2].name};  // the last layer
        graph = as_trained(training, std::move(graph));
        const Cluster cluster = testing::cluster_of("dgx-a100", 4);
        NetworkCache networks(cluster, training.engine);
        const LayoutRequest request{{Choice::recompute, Recompute::full}, {Choice::recompute_layers, std::int64_t{1}}};
        ParallelSpec layout = with_given(request);
        layout.mesh.degree.tp = 2;
        layout.sequence_parallel = true;
        layout.micro_batch = micro_batch;
        REQUIRE(is_legal(graph, training, layout));
        const auto memory_of = [&](ParallelSpec spec) {
          spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
          const Schedule schedule = schedule_of(spec, training);
          return simulate_spec(graph, networks, training, spec, place(graph, spec), schedule, nullptr).memory.peak();
        };
        Cluster tight = cluster;
        tight.groups.front().device.memory_capacity = memory_of(layout);
        CandidateMaker maker(graph, tight, training);
        LayoutFloors floors(graph, tight, training, request, usual_width(graph, training.engine, request), maker);
        const std::vector<Recompute> choices{Recompute::full};
        CHECK(floors.can_hold(layout, choices));
        // Where all layers recompute, the last one does, for which there is more scratch.
        ParallelSpec every = layout;
        every.recompute_layers = 0;
        with_all_more += memory_of(every) > memory_of(layout) ? 1 : 0;
      }
  MESSAGE(with_all_more << " layouts take more where all layers recompute");
  CHECK(with_all_more > 0);
}

TEST_CASE("no floor of a part of the space is above a layout in it, whatever the rest of the layout is") {
  std::mt19937 random = testing::random_from(11);
  double share = 0.0;
  int count = 0, interleaved = 0, in_larger_groups = 0, in_parts = 0, bound_by_data = 0, bound_by_share = 0,
      smaller_known = 0, some_layers = 0, as_given = 0, lacking = 0, lacking_in_groups = 0;
  for (int setting = 0; setting < 120; ++setting) {
    const bool gpu = setting % 4 != 0;
    OpGraph graph = setting % 10 == 0   ? graph_of("tiny-mlp", 16)
                    : setting % 10 == 5 ? graph_of("tiny-t5", 16)
                                        : random_graph(random, 16);
    Cluster cluster = random_cluster(random, gpu, gpu && setting % 4 == 1);
    const DataType half = setting % 2 ? DataType::bf16 : DataType::fp16;
    TrainingSpec training = training_of(setting % 3 == 0 ? 48 : 36, gpu ? half : DataType::fp32);
    if (!graph.joins_sequences) training.engine = testing::random_engine(static_cast<unsigned>(setting), graph);
    testing::train_random_parts(static_cast<unsigned>(setting), training, graph);
    training.clip_norm = setting % 2;
    LayoutRequest request;
    constexpr std::array in_two_parts{ScheduleKind::zero_bubble_h1, ScheduleKind::zero_bubble_v,
                                      ScheduleKind::dualpipe_v};
    if (setting % 5 == 3) request[Choice::schedule] = in_two_parts[static_cast<std::size_t>(setting) % 3];
    if (setting % 5 == 4) request[Choice::schedule] = ScheduleKind::interleaved;
    if (setting % 3 == 1) request[Choice::tp_overlap] = TensorOverlap::ring;
    if (setting % 6 == 2) request[Choice::recompute_layers] = std::int64_t{1};
    Space space(graph, training, request, usual_width(graph, training.engine, request));
    const std::vector<SpacePart> parts = space.parts(cluster.devices(), Devices::at_most);
    NetworkCache networks(cluster, training.engine);
    for (int trial = 0; trial < 15; ++trial) {
      const SpacePart& part = parts[random() % parts.size()];
      const std::vector<SpacePart> groups = groups_of(space, part);
      const SpacePart& group = groups[random() % groups.size()];
      const std::vector<PlacedSpec> specs = space.specs(group);
      if (specs.empty()) continue;  // too few micro-batches
      const std::vector<PlacedSpec> orders = space.orders(specs[random() % specs.size()]);
      const ParallelSpec layout = orders[random() % orders.size()].spec;
      ParallelSpec spec = layout;
      spec.stage_blocks = random_cut(static_cast<int>(graph.blocks.size()), spec.stages(), random);
      std::vector<Recompute> choices{spec.recompute};
      as_given += spec.recompute_layers > 0;
      const bool is_given = request[Choice::recompute_layers].has_value();
      if (spec.pp() > 1 && spec.recompute == Recompute::none && trial % 2 == 0 && !is_given) {
        const std::span<const Recompute> searched = searched_recomputes(training.engine);
        choices.assign(searched.begin(), searched.end());
        spec.recompute = Recompute::per_stage;
        for (int s = 0; s < spec.stages(); ++s)
          spec.stage_recompute.push_back(s < spec.pp() ? choices[random() % choices.size()]
                                                       : spec.stage_recompute[rank_of_stage(spec, s)]);
        if (trial % 4 == 0) testing::recompute_some_layers(spec, random);
      }
      SpaceWidth width = usual_width(graph, training.engine, request);
      width.recomputes_fewest_layers = recomputes_some_layers(spec);
      some_layers += width.recomputes_fewest_layers;
      interleaved += spec.virtual_stages > 1;
      in_larger_groups += spec.micro_batch_group > 0;
      in_parts += runs_backward_in_parts(spec.schedule) && spec.pp() > 1;
      const StepResult simulated = simulate_spec(graph, networks, training, spec, place(graph, spec),
                                                 schedule_of(spec, training), nullptr);
      INFO("setting " << setting << " on " << cluster.name << ": " << describe(spec) << " cut "
                      << fmt::format("{}", fmt::join(spec.stage_blocks, ",")));
      // With just the memory that the layout needs, where all devices have the same.
      Cluster tight = cluster;
      if (cluster.groups.size() == 1) tight.groups.front().device.memory_capacity = simulated.memory.peak();
      CandidateMaker maker(graph, tight, training);
      LayoutFloors floors(graph, tight, training, request, width, maker);
      const Seconds time = simulated.time.total() * (1 + 1e-12);
      const Floor of_degrees = floors.of_degrees(part.spec), at_peak = floors.of_micro_batch_at_peak(group.spec),
                  of_micro_batch = floors.of_micro_batch(group.spec);
      INFO("floors " << of_degrees.time.value << " s, " << at_peak.time.value << " s, " << of_micro_batch.time.value
                     << " s, simulated " << time.value << " s, by engine " << write_engine_of_plan(training.engine));
      for (const Floor& floor : {of_degrees, at_peak, of_micro_batch}) {
        CHECK(floor.time <= time);
        CHECK(floor.memory <= simulated.memory.peak());
      }
      CHECK(of_degrees.time <= at_peak.time);
      CHECK(at_peak.time <= of_micro_batch.time);
      CHECK(floors.time_of(layout, choices) <= time);
      const Seconds on_links = floors.time_on_links(group.spec);
      CHECK(on_links <= time);
      if (cluster.groups.size() > 1) continue;
      if (!request[Choice::schedule]) CHECK(of_micro_batch.time <= std::max(on_links, at_peak.time) * (1 + 1e-8));
      const Seconds of_any_shards = floors.time_of_any_shards(layout),
                    data = floors.data_time_of_any_order(layout);
      CHECK(of_micro_batch.time <= of_any_shards * (1 + 1e-8));
      CHECK(of_any_shards <= floors.time_of(layout, choices) * (1 + 1e-8));
      CHECK(data <= floors.time_of(layout, choices) * (1 + 1e-8));
      // What the data axis sends for every micro-batch tells ZeRO stages apart.
      bound_by_data += data > of_any_shards;
      // What is known of smaller micro-batches says no less, unless their softmax may take more.
      for (const SpacePart& other : groups) {
        if (training.engine.softmax_multiple > 1) break;
        ParallelSpec as_large = other.spec;
        as_large.micro_batch = group.spec.micro_batch;
        if (as_large != group.spec || other.spec.micro_batch >= group.spec.micro_batch) continue;
        ++smaller_known;
        CHECK(!floors.lacks_room(other.spec));
      }
      CHECK(!floors.lacks_room(group.spec));
      CHECK(!floors.lacks_room_in_any_shards(layout, choices));
      CHECK(floors.can_hold(layout, choices));
      // What lacks room whatever the groups of shards lacks it in the layout's own.
      if (cluster.devices() > 1) {
        Cluster half_of_it = tight;
        half_of_it.groups.front().device.memory_capacity = Bytes(simulated.memory.peak().count / 2);
        CandidateMaker of_less(graph, half_of_it, training);
        LayoutFloors with_less(graph, half_of_it, training, request, width, of_less);
        if (with_less.lacks_room_in_any_shards(layout, choices)) {
          CHECK(!with_less.can_hold(layout, choices));
          ++lacking;
          lacking_in_groups += layout.mesh.dp_shard > 0;
        }
      }
      CHECK(floors.time_within_memory(layout, choices) <= time);
      CHECK(floors.memory_of(layout, choices, of_micro_batch.memory) <= simulated.memory.peak());
      const Bytes by_share = floors.memory_by_share(layout, choices);
      CHECK(by_share <= simulated.memory.peak());
      bound_by_share += by_share > of_micro_batch.memory;
      share += floors.time_of(layout, choices) / simulated.time.total();
      ++count;
    }
  }
  MESSAGE("the floor of a layout is " << 100.0 * share / count << "% of its simulated step on average");
  CHECK(share / count > 0.3);
  CHECK(interleaved > 50);
  CHECK(in_larger_groups > 10);
  CHECK(in_parts > 50);
  CHECK(bound_by_data > 50);
  CHECK(bound_by_share > 50);
  CHECK(smaller_known > 50);
  CHECK(some_layers > 20);
  CHECK(as_given > 20);
  CHECK(lacking > 20);
  CHECK(lacking_in_groups > 0);
}

TEST_CASE("floors of groups that exchange tokens for heads are below their layouts, as given and by share") {
  std::mt19937 random = testing::random_from(29);
  int count = 0;
  for (int setting = 0; setting < 40; ++setting) {
    const bool gpu = setting % 4 != 0;
    const OpGraph graph = random_graph(random, 32);
    const Cluster cluster = random_cluster(random, gpu, false);
    const TrainingSpec training = training_of(8, gpu ? DataType::bf16 : DataType::fp32);
    LayoutRequest request;
    request[Choice::cp_ulysses] = 2;
    if (setting % 3 > 0)
      request[Choice::cp_method] = setting % 3 == 1 ? ContextMethod::ring : ContextMethod::all_gather;
    SpaceWidth width = usual_width(graph, training.engine, request);
    Space space(graph, training, request, width);
    std::vector<SpacePart> parts = space.parts(cluster.devices(), Devices::at_most);
    std::erase_if(parts, [](const SpacePart& part) { return part.spec.cp() == 1; });
    NetworkCache networks(cluster);
    CandidateMaker maker(graph, cluster, training);
    LayoutFloors floors(graph, cluster, training, request, width, maker),
        by_share(graph, cluster, training, {}, width, maker, SampleFloors::shared_over_context);
    for (int trial = 0; trial < 10 && !parts.empty(); ++trial) {
      const SpacePart& part = parts[random() % parts.size()];
      const std::vector<SpacePart> groups = groups_of(space, part);
      const SpacePart& group = groups[random() % groups.size()];
      CHECK(group.spec.mesh.cp_ulysses == 2);
      const std::vector<PlacedSpec> specs = space.specs(group);
      if (specs.empty()) continue;
      const ParallelSpec layout = specs[random() % specs.size()].spec;
      ParallelSpec spec = layout;
      spec.stage_blocks = random_cut(static_cast<int>(graph.blocks.size()), spec.stages(), random);
      const StepResult simulated =
          simulate_spec(graph, networks, training, spec, place(graph, spec), schedule_of(spec, training), nullptr);
      INFO("setting " << setting << " on " << cluster.name << ": cp " << spec.cp() << " by " << name(spec.cp_method)
                      << " " << describe(spec));
      const Seconds time = simulated.time.total() * (1 + 1e-12);
      const std::vector<Recompute> choices{spec.recompute};
      for (const Floor& floor :
           {floors.of_degrees(part.spec), floors.of_micro_batch_at_peak(group.spec), floors.of_micro_batch(group.spec),
            by_share.of_degrees(part.spec), by_share.of_micro_batch_at_peak(group.spec)}) {
        CHECK(floor.time <= time);
        CHECK(floor.memory <= simulated.memory.peak());
      }
      CHECK(floors.time_on_links(group.spec) <= time);
      CHECK(floors.time_of(layout, choices) <= time);
      CHECK(floors.memory_of(layout, choices, {}) <= simulated.memory.peak());
      ++count;
    }
  }
  CHECK(count > 100);
}

TEST_CASE("a rank of a context axis takes at least its share of what samples take without one") {
  std::mt19937 random = testing::random_from(17);
  int count = 0, bound_by_kernels = 0;
  for (int setting = 0; setting < 120; ++setting) {
    const bool gpu = setting % 4 != 0;
    const OpGraph graph = setting % 3 == 0 ? graph_of("tiny-llama", 1024) : random_graph(random, 32);
    const Cluster cluster = random_cluster(random, gpu, false);
    TrainingSpec training = training_of(8, gpu ? DataType::bf16 : DataType::fp32);
    training.sequence_length = graph.sequence;
    NetworkCache networks(cluster);
    CandidateMaker maker(graph, cluster, training);
    for (const ContextMethod method : context_methods) {
      LayoutRequest request;
      request[Choice::cp_method] = method;
      const SpaceWidth width = usual_width(graph, training.engine, request);
      LayoutFloors floors(graph, cluster, training, request, width, maker, SampleFloors::shared_over_context);
      Space space(graph, training, request, width);
      std::vector<SpacePart> parts = space.parts(cluster.devices(), Devices::at_most);
      std::erase_if(parts, [](const SpacePart& part) { return part.spec.cp() == 1; });
      for (int trial = 0; trial < 6 && !parts.empty(); ++trial) {
        const SpacePart& part = parts[random() % parts.size()];
        const std::vector<SpacePart> groups = groups_of(space, part);
        const SpacePart& group = groups[random() % groups.size()];
        const std::vector<PlacedSpec> specs = space.specs(group);
        ParallelSpec spec = specs[random() % specs.size()].spec;
        spec.stage_blocks = random_cut(static_cast<int>(graph.blocks.size()), spec.stages(), random);
        const Seconds simulated = simulate_spec(graph, networks, training, spec, place(graph, spec),
                                                schedule_of(spec, training), nullptr).time.total();
        INFO("setting " << setting << " on " << cluster.name << ": " << describe(spec));
        const Seconds of_degrees = floors.of_degrees(part.spec).time,
                      at_peak = floors.of_micro_batch_at_peak(group.spec).time;
        CHECK(of_degrees <= at_peak);
        CHECK(at_peak <= simulated * (1 + 1e-12));
        bound_by_kernels += at_peak > floors.of_devices(spec.mesh.size()).time * 1.01;
        ++count;
      }
    }
  }
  CHECK(count > 500);
  CHECK(bound_by_kernels > count / 2);
}

TEST_CASE("a sample takes the least in the largest micro-batch, where blocks wait for their data alone") {
  std::mt19937 random = testing::random_from(5);
  int less_by_data = 0, segments = 0;
  for (int setting = 0; setting < 1000; ++setting) {
    const bool gpu = setting % 3 != 0;
    OpGraph graph = random_graph(random, 16);
    const Cluster cluster = random_cluster(random, gpu, false);
    TrainingSpec training = training_of(36, gpu ? DataType::bf16 : DataType::fp32);
    training.engine = testing::random_engine(static_cast<unsigned>(setting), graph);
    testing::train_random_parts(static_cast<unsigned>(setting), training, graph);
    Estimator estimator(graph, cluster, training);
    ParallelSpec spec;
    spec.mesh.degree.tp = random() % 2 ? 2 : 1;
    spec.sequence_parallel = spec.tp() > 1 && random() % 2;
    spec = testing::or_overlapped(spec, training.engine, random);
    if (setting % 5 == 0) spec.schedule = ScheduleKind::zero_bubble_h1;
    const std::span<const Recompute> recomputes = searched_recomputes(training.engine);
    const Recompute recompute = recomputes[random() % recomputes.size()];
    const Placements placements = place(graph, spec);
    const CostModel model = cost_model(cluster, spec.mesh, 0);
    const auto seconds_of = [&](const LoweredBlock& block) {
      std::array<Seconds, 4> seconds;
      const std::array all{&block.forward, &block.backward, &block.backward_inputs, &block.backward_weights};
      std::ranges::transform(all, seconds.begin(), [&](const Segment* segment) {
        return cost_segment(*segment, model.execution, model.host_per_op, [&](const Instruction& instruction) {
                 if (instruction.kind == InstructionKind::kernel)
                   return kernel_time(instruction.op, instruction.shape, instruction.type, *model.device, model.rates);
                 return communicated_bytes(instruction) / BytesPerSecond(1e10);
               })
            .duration;
      });
      return seconds;
    };
    spec.micro_batch = 36;
    const auto fused = estimator.blocks_for(LoweredFor::floors_fused, spec, placements, recompute),
               unfused = estimator.blocks_for(LoweredFor::floors_unfused, spec, placements, recompute);
    for (const std::int64_t size : {1, 2, 3, 4, 6, 9, 12, 18, 36}) {
      spec.micro_batch = size;
      const std::span<const LoweredBlock> lowered = estimator.lowered_blocks(spec, placements, recompute, 1);
      for (std::size_t kind = 0; kind < lowered.size(); ++kind) {
        const auto run = seconds_of(lowered[kind]), one = seconds_of(fused->kinds[kind]),
                   other = seconds_of(unfused->kinds[kind]);
        for (std::size_t segment = 0; segment < run.size(); ++segment) {
          INFO("setting " << setting << " on " << cluster.name << ": " << describe(spec) << ", kind " << kind
                          << ", Segment " << segment);
          const Seconds share = (static_cast<double>(size) / 36.0) * std::min(one[segment], other[segment]);
          CHECK(share <= run[segment] * (1 + 1e-9));
          less_by_data += size == 36 && share < run[segment] * (1 - 1e-9);
          ++segments;
        }
      }
    }
  }
  CHECK(segments > 1000);
  CHECK(less_by_data > 0);  // some do wait for what shares their scratch, or are not fused for it
}

TEST_CASE("parts hold every layout of every number of devices once, the most devices first") {
  const OpGraph graph = graph_of("tiny-llama", 16);
  const TrainingSpec training = training_of(12, DataType::bf16);
  for (const LayoutRequest& request :
       {LayoutRequest{}, LayoutRequest{{Choice::tp, 2}}, LayoutRequest{{Choice::dp, 3}, {Choice::micro_batch, 2}},
        LayoutRequest{{Choice::stage_blocks, std::vector{1, static_cast<int>(graph.blocks.size()) - 1}}}}) {
    constexpr int devices = 45;
    std::vector<ParallelSpec> all, listed;
    for (int n = devices; n >= 1; --n)
      std::ranges::move(enumerate_specs(graph, training, n, request), std::back_inserter(all));
    Space space(graph, training, request, usual_width(graph, training.engine, request));
    for (const SpacePart& part : space.parts(devices, Devices::at_most)) {
      std::vector<PlacedSpec> of_part;
      std::int64_t layouts = 0;
      for (const SpacePart& group : groups_of(space, part)) {
        layouts += group.layouts;
        std::vector<PlacedSpec> of_group;
        for (const PlacedSpec& placed : space.specs(group)) {
          const std::vector<PlacedSpec> orders = space.orders(placed);
          CHECK(placed.orders == static_cast<std::int64_t>(orders.size()));
          of_group.insert(of_group.end(), orders.begin(), orders.end());
        }
        CHECK(group.layouts == static_cast<std::int64_t>(of_group.size()));
        of_part.insert(of_part.end(), of_group.begin(), of_group.end());
      }
      CHECK(part.layouts == layouts);
      std::ranges::sort(of_part, {}, &PlacedSpec::place);
      for (std::size_t place = 0; place < of_part.size(); ++place)
        CHECK(of_part[place].place == static_cast<std::int64_t>(place));
      for (const PlacedSpec& one : of_part) listed.push_back(one.spec);
    }
    CHECK(!all.empty());
    CHECK(listed == all);
    CHECK(space.parts(24, Devices::exactly).size() <= space.parts(24, Devices::at_most).size());
  }
}

}  // namespace parplan
