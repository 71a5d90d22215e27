#include "planner/plan/placement.h"

#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "planner/base/error.h"
#include "tests/planner/base/error_of.h"

using namespace parplan;

namespace {

const std::vector<Placement> all = {replicate(),  shard(Dim::hidden), shard(Dim::sequence),
                                    flat_shard(), partial_sum(),      partial_max(),
                                    on_first()};

std::optional<Redistribution> try_redistribute(Placement from, Placement to) {
  try {
    return redistribute(from, to);
  } catch (const InternalError&) {
    return std::nullopt;
  }
}

}  // namespace

TEST_CASE("Redistribution follows DTensor's table, pair by pair") {
  using enum Redistribution;
  constexpr std::nullopt_t no = std::nullopt;
  const std::vector<std::vector<std::optional<Redistribution>>> table = {
      //          Replicate     S(hidden)       S(sequence)     FlatShard       P(sum) P(max) First
      /* Replicate  */ {none,           slice,          slice,          slice,          no,    no,    gather},
      /* S(hidden)  */ {all_gather,     none,           all_to_all,     no,             no,    no,    no},
      /* S(sequence)*/ {all_gather,     all_to_all,     none,           no,             no,    no,    no},
      /* FlatShard  */ {all_gather,     no,             no,             none,           no,    no,    no},
      /* P(sum)     */ {all_reduce_sum, reduce_scatter, reduce_scatter, reduce_scatter, none,  no,    no},
      /* P(max)     */ {all_reduce_max, no,             no,             no,             no,    none,  no},
      /* First      */ {scatter,        no,             no,             no,             no,    no,    none},
  };
  for (std::size_t from = 0; from < all.size(); ++from)
    for (std::size_t to = 0; to < all.size(); ++to) {
      INFO(write_placement(all[from]) << " to " << write_placement(all[to]));
      CHECK(try_redistribute(all[from], all[to]) == table[from][to]);
    }
}

TEST_CASE("A pair without meaning is a bug of ours and is named") {
  CHECK(error_of<InternalError>([] { redistribute(replicate(), partial_sum()); }) ==
        "no redistribution takes Replicate to Partial(sum)");
  CHECK(error_of<InternalError>([] { redistribute(flat_shard(), shard(Dim::hidden)); }) ==
        "no redistribution takes FlatShard to Shard(hidden)");
}

TEST_CASE("The gradient of Replicate is Partial and conversely, shards are their own") {
  CHECK(gradient_placement(replicate()) == partial_sum());
  CHECK(gradient_placement(partial_sum()) == replicate());
  CHECK(gradient_placement(shard(Dim::feature)) == shard(Dim::feature));
  CHECK(gradient_placement(flat_shard()) == flat_shard());
  CHECK(gradient_placement(on_first()) == on_first());
  CHECK(error_of<InternalError>([] { gradient_placement(partial_max()); }) == "a Partial(max) tensor has no gradient");
  for (Placement p : {replicate(), partial_sum(), flat_shard(), shard(Dim::batch)})
    CHECK(gradient_placement(gradient_placement(p)) == p);
}

TEST_CASE("Backwards, an all-gather is a reduce-scatter and a reduce-scatter an all-gather") {
  const auto backwards = [](Placement from, Placement to) {
    return redistribute(gradient_placement(to), gradient_placement(from));
  };
  for (Placement cut : {shard(Dim::sequence), flat_shard()}) {
    CHECK(redistribute(cut, replicate()) == Redistribution::all_gather);
    CHECK(backwards(cut, replicate()) == Redistribution::reduce_scatter);
    CHECK(redistribute(partial_sum(), cut) == Redistribution::reduce_scatter);
    CHECK(backwards(partial_sum(), cut) == Redistribution::all_gather);
  }
  CHECK(backwards(shard(Dim::hidden), shard(Dim::sequence)) == Redistribution::all_to_all);
}

TEST_CASE("Megatron's f and g: an all-reduce on one way and nothing on the other") {
  // f, into a sharded layer: the input is whole already; its gradient arrives as parts of a sum and
  // must become whole again.
  CHECK(redistribute(replicate(), replicate()) == Redistribution::none);
  CHECK(redistribute(gradient_placement(replicate()), replicate()) == Redistribution::all_reduce_sum);
  // g, out of it: the output is parts of a sum; all ranks compute its gradient alike, which is what
  // the parts need.
  CHECK(redistribute(partial_sum(), replicate()) == Redistribution::all_reduce_sum);
  CHECK(redistribute(replicate(), gradient_placement(partial_sum())) == Redistribution::none);
}

TEST_CASE("Placements are written and read back") {
  const std::vector<std::string> texts = {"Replicate", "Shard(hidden)", "Shard(sequence)",
                                          "FlatShard", "Partial(sum)",  "Partial(max)",
                                          "First"};
  for (std::size_t i = 0; i < all.size(); ++i) {
    CHECK(write_placement(all[i]) == texts[i]);
    CHECK(parse_placement(texts[i]) == all[i]);
  }
  for (Dim dim : {Dim::sequence, Dim::batch, Dim::hidden, Dim::kv_groups, Dim::feature, Dim::vocabulary, Dim::position})
    CHECK(parse_placement(write_placement(shard(dim))) == shard(dim));
}

TEST_CASE("An unknown placement lists the known ones") {
  const std::string known =
      "Replicate, Shard(sequence), Shard(batch), Shard(hidden), Shard(kv_groups), Shard(feature), Shard(vocabulary), "
      "Shard(position), Shard(adapter), FlatShard, Partial(sum), Partial(max), First";
  CHECK(error_of<ConfigError>([] { parse_placement("Shard(heads)"); }) ==
        "error: expected a placement, one of " + known + ", found 'Shard(heads)'; did you mean 'Shard(hidden)'?");
  CHECK(error_of<ConfigError>([] { parse_placement("everywhere"); }) ==
        "error: expected a placement, one of " + known + ", found 'everywhere'");
}

TEST_CASE("Every redistribution has its name") {
  using enum Redistribution;
  std::vector<std::string> names;
  for (Redistribution r : {none, all_reduce_sum, all_reduce_max, reduce_scatter, all_gather, slice, all_to_all, gather,
                           scatter})
    names.push_back(name(r));
  CHECK(names == std::vector<std::string>{"none", "all-reduce (sum)", "all-reduce (max)", "reduce-scatter",
                                          "all-gather", "slice", "all-to-all", "gather", "scatter"});
}

TEST_CASE("A parameter's name in its block leaves out the layer's number") {
  CHECK(name_in_block("layers.3.mlp.up.weight") == "mlp.up.weight");
  CHECK(name_in_block("layers.117.attention.qkv.bias") == "attention.qkv.bias");
  CHECK(name_in_block("embedding.weight") == "embedding.weight");
  CHECK(name_in_block("final_norm.weight") == "final_norm.weight");
  CHECK(name_in_block("head") == "head");
  CHECK(name_in_block("layers.3") == "layers.3");
  CHECK(name_in_block("layers..weight") == "layers..weight");
  CHECK(name_in_block("layers.3x.weight") == "layers.3x.weight");
}

TEST_CASE("A layout is redistributed axis by axis, the innermost first") {
  const TensorLayout from{.dp = partial_sum(), .tp = shard(Dim::feature)};
  const std::vector<RedistributionStep> steps = redistribute(from, TensorLayout{});
  REQUIRE(steps.size() == 2);
  CHECK((steps[0] == RedistributionStep{Axis::tp, Redistribution::all_gather}));
  CHECK((steps[1] == RedistributionStep{Axis::dp, Redistribution::all_reduce_sum}));
  CHECK(redistribute(from, from).empty());
  CHECK(is_partial(from));
  CHECK_FALSE(is_partial(TensorLayout{.tp = shard(Dim::feature)}));
}
