#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "planner/graph/op_graph.h"
#include "planner/program/block_context.h"
#include "planner/program/lower_block.h"

namespace parplan {

// The blocks of one model, lowered for several jobs: each once for all jobs in which it is the
// same. Threads may share it.
class KnownBlocks {
 public:
  // As lower_block. What is kept is bounded: what was lowered longer ago is lowered again.
  std::shared_ptr<const LoweredBlock> of(const OpGraph& graph, int block, const BlockContext& context);

 private:
  struct Known {
    int kind = 0;  // Block::kind
    BlockContext context;
    std::shared_ptr<const LoweredBlock> lowered;
  };
  std::mutex mutex_;
  std::unordered_multimap<std::size_t, Known> known_;  // by a hash of their contexts
};

}  // namespace parplan
