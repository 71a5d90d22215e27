#include "planner/plan/parallel_spec.h"

#include <string>

#include <doctest/doctest.h>

#include "planner/plan/layout.h"

using namespace parplan;

namespace {

ParallelSpec some_spec() {
  ParallelSpec spec;
  spec.mesh.degree = {.pp = 2, .dp = 4, .tp = 2};
  spec.sequence_parallel = true;
  spec.zero_stage = 1;
  spec.micro_batch = 2;
  spec.stage_blocks = {3, 3};
  return spec;
}

}  // namespace

TEST_CASE("the key of a block's Segments tells apart what they do, and nothing around them") {
  const ParallelSpec spec = some_spec();
  const ParallelSpec key = block_key(spec, Recompute::none, {});
  ParallelSpec around = spec;
  around.mesh.degree = {.pp = 3, .dp = 8, .tp = 2};
  around.mesh.order = {Axis::tp, Axis::dp, Axis::pp};
  around.zero_stage = 3;
  around.schedule = ScheduleKind::gpipe;
  around.stage_blocks = {2, 2, 2};
  around.tied_gradients = TiedGradients::apart;
  around.input_slots = InputSlots::one_more;
  around.recompute_layers = 1;
  around.offload_layers = 1;
  CHECK(block_key(around, Recompute::none, {}) == key);

  CHECK(block_key(spec, Recompute::full, {}) != key);
  ParallelSpec inside = spec;
  inside.mesh.degree.tp = 4;
  CHECK(block_key(inside, Recompute::none, {}) != key);
  inside = spec;
  inside.micro_batch = 4;
  CHECK(block_key(inside, Recompute::none, {}) != key);
  inside = spec;
  inside.sequence_parallel = false;
  CHECK(block_key(inside, Recompute::none, {}) != key);
  inside = spec;
  inside.mesh.degree.cp = 2;  // an axis that nobody has taken out
  CHECK(block_key(inside, Recompute::none, {}) != key);
  // Who casts weights to fp8, where engines cast what they gather.
  TrainingSpec training;
  const auto are_told_apart = [&] {
    return block_key(around, Recompute::none, training) != block_key(spec, Recompute::none, training);
  };
  training.fp8 = true;
  CHECK(!are_told_apart());
  training.engine.casts_weights_apart = true;
  CHECK(are_told_apart());
  training.fp8 = false;
  CHECK(!are_told_apart());
}

TEST_CASE("the key of the work around a bucket tells data-parallel degrees and ZeRO stages apart") {
  const ParallelSpec spec = some_spec();
  ParallelSpec other = spec;
  other.micro_batch = 4;
  other.recompute = Recompute::full;
  other.input_slots = InputSlots::one_more;
  CHECK(bucket_key(other) == bucket_key(spec));
  other = spec;
  other.mesh.degree.dp = 2;
  CHECK(bucket_key(other) != bucket_key(spec));
  other = spec;
  other.zero_stage = 2;
  CHECK(bucket_key(other) != bucket_key(spec));
  other = spec;
  other.tied_gradients = TiedGradients::apart;  // how many accumulators a rank has
  CHECK(bucket_key(other) != bucket_key(spec));
}

TEST_CASE("the key of a cut that fits tells apart all but the cut itself and the order of axes") {
  const ParallelSpec spec = some_spec();
  ParallelSpec other = spec;
  other.stage_blocks = {2, 4};
  other.mesh.order = {Axis::tp, Axis::dp, Axis::pp};
  CHECK(fitting_cut_key(other) == fitting_cut_key(spec));
  other = spec;
  other.schedule = ScheduleKind::gpipe;
  CHECK(fitting_cut_key(other) != fitting_cut_key(spec));
  other = spec;
  other.input_slots = InputSlots::one_more;
  CHECK(fitting_cut_key(other) != fitting_cut_key(spec));
}

TEST_CASE("the first layers of a stage recompute, neither the embedding nor the head among them") {
  const auto recomputing = [](const ParallelSpec& spec) {
    std::string blocks;
    const Layout layout = lay_out(spec, {});
    for (int block = 0; block < layout.stages.back().last; ++block)
      blocks += layout.of_block(block).recompute == Recompute::none ? '.' : 'R';
    return blocks;
  };
  ParallelSpec spec;
  spec.recompute = Recompute::full;
  spec.mesh.degree.pp = 3;
  spec.stage_blocks = {4, 3, 2};
  CHECK(recomputing(spec) == "RRRRRRRRR");
  spec.recompute_layers = 1;
  CHECK(recomputing(spec) == "RR..R..RR");
  // A stage with fewer layers recomputes all of its own; the head has no choice, and goes along.
  spec.recompute_layers = 2;
  CHECK(recomputing(spec) == "RRR.RR.RR");
  spec.recompute_layers = 3;
  CHECK(recomputing(spec) == "RRRRRRRRR");
  spec.recompute = Recompute::per_stage;
  spec.recompute_layers = 0;
  spec.stage_recompute = {{Recompute::full, 2}, Recompute::none, Recompute::norms};
  CHECK(recomputing(spec) == "RRR....RR");
  // One stage that begins and ends the model.
  spec = ParallelSpec();
  spec.stage_blocks = {5};
  spec.recompute = Recompute::norms;
  spec.recompute_layers = 2;
  CHECK(recomputing(spec) == "RRR..");
}

TEST_CASE("what the first layers of a stage save leaves the device, whether or not they recompute") {
  const auto written = [](const ParallelSpec& spec) {
    std::string blocks;
    const Layout layout = lay_out(spec, {});
    for (int block = 1; block + 1 < layout.stages.back().last; ++block) {
      const BlockLayout& own = layout.of_block(block);
      blocks += own.saved == Home::host ? (own.recompute == Recompute::none ? 'H' : 'h')
                                        : (own.recompute == Recompute::none ? 'D' : 'd');
    }
    return blocks;
  };
  ParallelSpec spec;
  spec.mesh.degree.pp = 2;
  spec.stage_blocks = {5, 4};  // four layers, and three
  CHECK(written(spec) == "DDDDDDD");
  spec.offload.activations = Home::host;
  CHECK(written(spec) == "HHHHHHH");
  spec.offload_layers = 2;
  CHECK(written(spec) == "HHDDHHD");
  spec.offload_layers = 3;
  CHECK(written(spec) == "HHHDHHH");
  spec.recompute = Recompute::full;
  CHECK(written(spec) == "hhhdhhh");
  spec.recompute_layers = 1;
  CHECK(written(spec) == "hHHDhHH");
  spec.recompute_layers = 3;
  spec.offload_layers = 1;
  CHECK(written(spec) == "hddDhdd");
}
