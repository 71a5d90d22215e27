#include "planner/program/known_blocks.h"

#include <utility>

#include "planner/base/hash.h"

namespace parplan {
namespace {

// Each takes some ten to a hundred kilobytes.
constexpr std::size_t most_blocks = 256;

// What differs most among the layouts of a search; the rest costs collisions alone.
std::size_t hash_of(int kind, const BlockContext& context) {
  const BlockLayout& layout = context.layout;
  std::size_t seed = static_cast<std::size_t>(kind);
  add_hash(seed, static_cast<std::size_t>(layout.micro_batch));
  for (const Axis axis : all_axes) add_hash(seed, static_cast<std::size_t>(layout.degree[axis]));
  add_hash(seed, static_cast<std::size_t>(layout.recompute));
  return seed;
}

}  // namespace

std::shared_ptr<const LoweredBlock> KnownBlocks::of(const OpGraph& graph, int block, const BlockContext& context) {
  const int kind = graph.blocks[block].kind;
  BlockContext key = context;
  if (!may_recompute(graph.blocks[block])) key.layout.recompute = Recompute::none;
  const std::size_t hash = hash_of(kind, key);
  {
    const std::scoped_lock lock(mutex_);
    const auto [first, end] = known_.equal_range(hash);
    for (auto one = first; one != end; ++one)
      if (one->second.kind == kind && one->second.context == key) return one->second.lowered;
  }
  auto lowered = std::make_shared<const LoweredBlock>(lower_block(graph, block, context));
  const std::scoped_lock lock(mutex_);
  if (known_.size() >= most_blocks) known_.clear();
  known_.emplace(hash, Known{.kind = kind, .context = std::move(key), .lowered = lowered});
  return lowered;
}

}  // namespace parplan
