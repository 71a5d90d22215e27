#include "planner/simulator/model_blocks.h"

#include <algorithm>

#include "planner/program/bucket_layout.h"
#include "planner/program/rank_buckets.h"

namespace parplan {

ModelBlocks::ModelBlocks(const OpGraph& graph) {
  const int blocks = static_cast<int>(graph.blocks.size());
  for (const Block& block : graph.blocks) {
    if (block_parameters(graph, block).tied) tied_blocks_.push_back(count());
    uses_tied_.push_back(block_parameters(graph, block).tied.has_value());
    kinds_.push_back(static_cast<std::size_t>(block.kind));
    if (kinds_.back() >= of_kind_.size()) of_kind_.resize(kinds_.back() + 1);
  }
  has_fixed_state_ = tied_blocks_.size() < 2 || (tied_blocks_.size() == 2 && tied_blocks_.front() == 0 &&
                                                 tied_blocks_.back() + 1 == blocks);
  is_layer_kind_.assign(of_kind_.size(), false);
  for (int b = 0; b < blocks; ++b)
    if (is_layer(graph, b)) is_layer_kind_[kind_of(b)] = true;
  run_ends_.assign(kinds_.size(), blocks);
  for (int b = blocks - 1; b-- > 0;) {
    const bool alike = kind_of(b) == kind_of(b + 1) && uses_tied(b) == uses_tied(b + 1);
    run_ends_[static_cast<std::size_t>(b)] = alike ? run_end(b + 1) : b + 1;
  }
  for (std::size_t kind = 0; kind < of_kind_.size(); ++kind) {
    std::vector<int>& before = of_kind_[kind];
    before.push_back(0);
    for (const std::size_t of_block : kinds_) before.push_back(before.back() + (of_block == kind));
  }
}

std::uint64_t ModelBlocks::kinds_in(BlockRange range) const {
  // With too many kinds, each range is taken as different from the others.
  if (kinds() > 31)
    return std::uint64_t{1} << 63 | static_cast<std::uint64_t>(range.first) << 31 |
           static_cast<std::uint64_t>(range.last);
  std::uint64_t numbers = 0;
  for (std::size_t kind = 0; kind < kinds(); ++kind)
    numbers = numbers << 2 | static_cast<std::uint64_t>(std::min(of_kind(kind, range), 2));
  return numbers;
}

int ModelBlocks::tied_uses(BlockRange range) const {
  return static_cast<int>(std::ranges::count_if(
      tied_blocks_, [&](int block) { return block >= range.first && block < range.last; }));
}

BlockRange ModelBlocks::tied_in(BlockRange range) const {
  BlockRange uses;
  for (const int block : tied_blocks_)
    if (block >= range.first && block < range.last) uses = {uses.size() > 0 ? uses.first : block, block + 1};
  return uses;
}

}  // namespace parplan
