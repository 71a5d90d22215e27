#include "planner/graph/op_graph.h"

#include <algorithm>
#include <array>
#include <map>

#include <fmt/format.h>
#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/topological_sort.hpp>

#include "planner/base/error.h"
#include "planner/graph/local_op.h"

namespace parplan {
namespace {

std::size_t index(TensorId id) {
  return static_cast<std::size_t>(id);
}
const Tensor& tensor(const OpGraph& graph, TensorId id) {
  return graph.tensors[index(id)];
}
bool contains(const std::vector<TensorId>& ids, TensorId id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

[[noreturn]] void wrong(const OpGraph& graph, const std::string& what) {
  throw InternalError(fmt::format("graph '{}': {}", graph.name, what));
}
[[noreturn]] void wrong(const OpGraph& graph, const Op& op, const std::string& what) {
  wrong(graph, fmt::format("op '{}' ({}): {}", op.name, name(op.kind), what));
}

// Operands against the op's row -------------------------------------------------------------------

// The least and most operands of one source that a row wants.
struct Count {
  std::size_t least = 0;
  std::size_t most = 0;
};
Count count(const OpRow& row, OperandSource source) {
  Count result;
  for (const OperandRow& operand : row.operands) {
    if (operand.source != source) continue;
    ++result.most;
    if (!operand.optional && !operand.omitted) ++result.least;
  }
  return result;
}

void check_operands(const OpGraph& graph, const Op& op) {
  const OpRow& row = row_of(op.kind);
  if (row.sharding == ShardingRule::none) wrong(graph, op, "not an op of a forward graph");
  const auto check = [&](const std::vector<TensorId>& ids, OperandSource source, const char* what) {
    for (const TensorId id : ids) {
      if (id < 0 || index(id) >= graph.tensors.size())
        wrong(graph, op, fmt::format("{} {} of {} tensors", what, id, graph.tensors.size()));
      if ((tensor(graph, id).role == TensorRole::parameter) != (source == OperandSource::parameter))
        wrong(graph, op, fmt::format("'{}' cannot be its {}", tensor(graph, id).name, what));
    }
    const Count wanted = count(row, source);
    if (ids.size() >= wanted.least && ids.size() <= wanted.most) return;
    const std::string range = wanted.least == wanted.most ? fmt::format("{}", wanted.least)
                                                          : fmt::format("{} to {}", wanted.least, wanted.most);
    wrong(graph, op, fmt::format("{} {}s, its row has {}", ids.size(), what, range));
  };
  check(op.inputs, OperandSource::input, "input");
  check(op.parameters, OperandSource::parameter, "parameter");
  check(op.outputs, OperandSource::output, "output");
}

void check_size(const OpGraph& graph, const Op& op, const std::string& what, std::int64_t found, std::int64_t wanted) {
  if (found != wanted) wrong(graph, op, fmt::format("{} is {}, not {}", what, found, wanted));
}

const std::vector<TensorId>& operands_of(const Op& op, OperandSource source) {
  return source == OperandSource::input       ? op.inputs
         : source == OperandSource::parameter ? op.parameters
                                              : op.outputs;
}

// Positions of the sequence that a tensor has.
std::int64_t positions(const OpGraph& graph, TensorId id) {
  for (const TensorDim& dim : tensor(graph, id).dims)
    if (dim.dim == Dim::sequence) return dim.size;
  return 1;
}

// The widths that the op's sharding rule ties together; `check_operands` has passed.
void check_sizes(const OpGraph& graph, const Op& op) {
  const auto width = [&](TensorId id) {
    const Tensor& of = tensor(graph, id);
    if (of.dims.empty()) wrong(graph, op, fmt::format("'{}' has no dims", of.name));
    return of.dims.back().size;
  };
  const auto called = [&](TensorId id) { return fmt::format("the width of '{}'", tensor(graph, id).name); };
  const OpRow& row = row_of(op.kind);
  switch (row.sharding) {
    case ShardingRule::rows: {
      check_size(graph, op, called(op.inputs[0]), width(op.inputs[0]), width(op.outputs[0]));
      const std::int64_t rows = std::max(positions(graph, op.inputs[0]), positions(graph, op.outputs[0]));
      const OpShape& s = op.attributes;
      if (s.begin < 0 || s.sequence < 1 || s.begin + s.sequence > rows)
        wrong(graph, op, fmt::format("moves positions {} to {} of {}", s.begin, s.begin + s.sequence, rows));
      break;
    }
    case ShardingRule::tokenwise:
      for (const TensorId id : op.inputs) check_size(graph, op, called(id), width(id), width(op.outputs[0]));
      for (const TensorId id : op.parameters) check_size(graph, op, called(id), width(id), width(op.outputs[0]));
      break;
    case ShardingRule::contraction: {
      const Tensor& weight = tensor(graph, op.parameters[0]);
      if (weight.dims.size() != 2)
        wrong(graph, op, fmt::format("'{}' has {} dims, not 2", weight.name, weight.dims.size()));
      check_size(graph, op, called(op.parameters[0]), width(op.parameters[0]), width(op.inputs[0]));
      check_size(graph, op, called(op.outputs[0]), width(op.outputs[0]), weight.dims[0].size);
      if (op.parameters.size() > 1)
        check_size(graph, op, called(op.parameters[1]), width(op.parameters[1]), width(op.outputs[0]));
      break;
    }
    case ShardingRule::lookup:
      check_size(graph, op, called(op.parameters[0]), width(op.parameters[0]), width(op.outputs[0]));
      break;
    case ShardingRule::vocabulary_max:
    case ShardingRule::vocabulary_sum:
    case ShardingRule::vocabulary_loss:
      check_size(graph, op, called(op.inputs[0]), width(op.inputs[0]), graph.vocabulary);
      break;
    case ShardingRule::heads:
    case ShardingRule::head_sums:
    case ShardingRule::none:
      break;
  }
  if (row.widths)
    for (const OperandWidth& wanted : row.widths(op.attributes)) {
      const TensorId id = operands_of(op, wanted.source)[index(wanted.index)];
      check_size(graph, op, called(id), width(id), wanted.width);
    }
  if (row.fault)
    if (const std::string fault = row.fault(op.attributes); !fault.empty()) wrong(graph, op, fault);
}

// Topological order -------------------------------------------------------------------------------

// Ops and tensors as vertices: tensor t is vertex t, op i is vertex (tensors + i).
using Dag = boost::adjacency_list<boost::vecS, boost::vecS, boost::bidirectionalS>;

void check_order(const OpGraph& graph) {
  Dag dag(graph.tensors.size() + graph.ops.size());
  std::vector<std::optional<int>> producer(graph.tensors.size());
  for (std::size_t i = 0; i < graph.ops.size(); ++i) {
    const Op& op = graph.ops[i];
    const std::size_t vertex = graph.tensors.size() + i;
    for (const TensorId id : op.inputs) boost::add_edge(index(id), vertex, dag);
    for (const TensorId id : op.parameters) boost::add_edge(index(id), vertex, dag);
    for (const TensorId id : op.outputs) {
      const TensorRole role = tensor(graph, id).role;
      if (role == TensorRole::tokens)
        wrong(graph, op, fmt::format("'{}' comes from the data loader", tensor(graph, id).name));
      if (const std::optional<int> other = producer[index(id)])
        wrong(graph, op,
              fmt::format("'{}' is written by '{}' already", tensor(graph, id).name, graph.ops[index(*other)].name));
      producer[index(id)] = static_cast<int>(i);
      boost::add_edge(vertex, index(id), dag);
    }
  }
  std::vector<Dag::vertex_descriptor> sorted;  // reversed
  try {
    boost::topological_sort(dag, std::back_inserter(sorted));
  } catch (const boost::not_a_dag&) {
    wrong(graph, "its ops depend on each other in a circle");
  }
  // An order exists; the graph's own order has to be one of them.
  for (std::size_t i = 0; i < graph.ops.size(); ++i) {
    const Op& op = graph.ops[i];
    for (const TensorId id : op.inputs) {
      if (tensor(graph, id).role == TensorRole::tokens) continue;
      const std::optional<int> writer = producer[index(id)];
      if (!writer) wrong(graph, op, fmt::format("nothing writes '{}'", tensor(graph, id).name));
      if (*writer > static_cast<int>(i))
        wrong(graph, op,
              fmt::format("stands before '{}', which writes '{}'", graph.ops[index(*writer)].name,
                          tensor(graph, id).name));
      for (const TensorId output : op.outputs)
        if (output < id)
          wrong(graph, op,
                fmt::format("tensor '{}' stands before '{}', which it is made of", tensor(graph, output).name,
                            tensor(graph, id).name));
    }
  }
  const Op& last = graph.ops.back();
  if (tensor(graph, last.outputs[0]).role != TensorRole::loss)
    wrong(graph, last, "the last op does not write the loss");
}

// Blocks ------------------------------------------------------------------------------------------

void check_blocks(const OpGraph& graph) {
  if (graph.blocks.empty()) wrong(graph, "no blocks");
  std::vector<std::size_t> block_of(graph.ops.size(), 0);
  int next = 0;
  for (std::size_t b = 0; b < graph.blocks.size(); ++b) {
    const Block& block = graph.blocks[b];
    if (block.first_op != next || block.last_op <= block.first_op || index(block.last_op) > graph.ops.size())
      wrong(graph, fmt::format("block '{}' holds ops {} to {}, expected to begin at {} of {}", block.name,
                               block.first_op, block.last_op, next, graph.ops.size()));
    for (int i = block.first_op; i < block.last_op; ++i) block_of[index(i)] = b;
    next = block.last_op;
  }
  if (index(next) != graph.ops.size())
    wrong(graph, fmt::format("ops from {} of {} stand in no block", next, graph.ops.size()));

  // crossing[b]: tensors written before the boundary after block b and read after it.
  std::vector<std::vector<TensorId>> crossing(graph.blocks.size());
  std::vector<std::optional<int>> producer(graph.tensors.size());
  for (std::size_t i = 0; i < graph.ops.size(); ++i) {
    for (const TensorId id : graph.ops[i].inputs) {
      const std::optional<int> writer = producer[index(id)];
      if (!writer) continue;
      for (std::size_t b = block_of[index(*writer)]; b < block_of[i]; ++b)
        if (!contains(crossing[b], id)) crossing[b].push_back(id);
    }
    for (const TensorId id : graph.ops[i].outputs) producer[index(id)] = static_cast<int>(i);
  }
  const auto described = [&](std::optional<TensorId> id) {
    return id && index(*id) < graph.tensors.size() ? "'" + tensor(graph, *id).name + "'" : std::string("none");
  };
  for (std::size_t b = 0; b < graph.blocks.size(); ++b) {
    const Block& block = graph.blocks[b];
    const bool last = b + 1 == graph.blocks.size();
    if (!last && (crossing[b].size() != 1 || tensor(graph, crossing[b][0]).role != TensorRole::activation)) {
      std::vector<std::string> names;
      for (const TensorId id : crossing[b]) names.push_back(described(id));
      wrong(graph,
            fmt::format("between blocks '{}' and '{}' cross {}; expected one activation", block.name,
                        graph.blocks[b + 1].name, names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "))));
    }
    const std::optional<TensorId> input = b == 0 ? std::nullopt : std::optional(crossing[b - 1][0]);
    const std::optional<TensorId> output = last ? std::nullopt : std::optional(crossing[b][0]);
    if (block.input != input || block.output != output)
      wrong(graph, fmt::format("block '{}' declares input {} and output {}, but {} and {} cross", block.name,
                               described(block.input), described(block.output), described(input), described(output)));
    if (output && block_of[index(*producer[index(*output)])] != b)
      wrong(graph, fmt::format("block '{}' does not write its output {}", block.name, described(output)));
  }
}

// Blocks of equal work ----------------------------------------------------------------------------

// A block without what distinguishes it from equal blocks: tensors are numbered by first use, and
// names lose the block's prefix. A tied parameter keeps its identity.
struct BlockPattern {
  std::vector<Op> ops;
  std::vector<Tensor> tensors;
  std::vector<TensorId> tied;
  std::optional<TensorId> input;
  std::optional<TensorId> output;
  bool has_backward = true;
  bool passes_gradient_on = true;
  bool operator==(const BlockPattern&) const = default;
};

BlockPattern pattern(const OpGraph& graph, const Block& block) {
  BlockPattern result;
  std::map<TensorId, TensorId> number;
  const std::string prefix = block.name + ".";
  const auto renumber = [&](TensorId id) {
    const auto [found, inserted] = number.try_emplace(id, static_cast<TensorId>(number.size()));
    if (inserted) {
      Tensor local = tensor(graph, id);
      if (local.role != TensorRole::parameter) local.name.clear();
      if (local.name.starts_with(prefix)) local.name.erase(0, prefix.size());
      result.tensors.push_back(std::move(local));
      if (contains(graph.tied, id)) result.tied.push_back(id);
    }
    return found->second;
  };
  for (int i = block.first_op; i < block.last_op; ++i) {
    Op op = graph.ops[index(i)];
    op.name.clear();
    for (std::vector<TensorId>* ids : {&op.inputs, &op.parameters, &op.outputs})
      for (TensorId& id : *ids) id = renumber(id);
    result.ops.push_back(std::move(op));
  }
  if (block.input) result.input = number.at(*block.input);
  if (block.output) result.output = number.at(*block.output);
  const int position = static_cast<int>(&block - graph.blocks.data());
  result.has_backward = has_backward(graph, position);
  result.passes_gradient_on = passes_gradient_on(graph, position);
  return result;
}

// The first block with a parameter that is trained. A graph in which nothing is has no backward.
int first_trained_block(const OpGraph& graph) {
  for (std::size_t b = 0; b < graph.blocks.size(); ++b)
    for (int i = graph.blocks[b].first_op; i < graph.blocks[b].last_op; ++i)
      for (const TensorId id : graph.ops[index(i)].parameters)
        if (!tensor(graph, id).frozen) return static_cast<int>(b);
  return static_cast<int>(graph.blocks.size());
}

}  // namespace

std::vector<TensorId> parameters(const OpGraph& graph) {
  std::vector<TensorId> result;
  std::vector<bool> seen(graph.tensors.size(), false);
  for (const Op& op : graph.ops)
    for (const TensorId id : op.parameters) {
      if (seen[index(id)]) continue;
      seen[index(id)] = true;
      result.push_back(id);
    }
  return result;
}

std::int64_t parameter_count(const OpGraph& graph) {
  std::int64_t result = 0;
  for (const TensorId id : parameters(graph)) result += element_count(tensor(graph, id));
  return result;
}

std::int64_t trained_parameter_count(const OpGraph& graph) {
  std::int64_t result = 0;
  for (const TensorId id : parameters(graph))
    if (!tensor(graph, id).frozen) result += element_count(tensor(graph, id));
  return result;
}

std::vector<bool> needs_gradient(const OpGraph& graph, const Block& block) {
  std::vector<bool> needs(graph.tensors.size(), false);
  if (block.input)
    needs[index(*block.input)] = passes_gradient_on(graph, static_cast<int>(&block - graph.blocks.data()));
  for (int i = block.first_op; i < block.last_op; ++i) {
    const Op& op = graph.ops[index(i)];
    for (const TensorId id : op.parameters) needs[index(id)] = !tensor(graph, id).frozen;
    const auto is_needed = [&](TensorId id) { return needs[index(id)]; };
    const bool any = std::ranges::any_of(op.inputs, is_needed) || std::ranges::any_of(op.parameters, is_needed);
    for (const TensorId id : op.outputs) needs[index(id)] = any;
  }
  return needs;
}

bool may_be_fp8(const OpGraph& graph, const Op& op) {
  if (row_of(op.kind).casts == nullptr) return false;
  return std::ranges::none_of(tensor(graph, op.parameters[0]).dims, [](const TensorDim& dim) {
    return dim.dim == Dim::vocabulary || dim.dim == Dim::adapter;
  });
}

TensorId unquantized(const OpGraph& graph, const Block& block, TensorId id) {
  if (tensor(graph, id).role != TensorRole::quantized) return id;
  for (int i = block.first_op; i < block.last_op; ++i)
    if (const Op& op = graph.ops[index(i)]; contains(op.outputs, id)) return op.inputs[0];
  return id;
}

int product_passes(const std::vector<bool>& needs, const Op& op) {
  const bool first = !op.inputs.empty() && needs[index(op.inputs[0])];
  const bool second = op.parameters.empty() ? first : needs[index(op.parameters[0])];
  return 1 + int{first} + int{second};
}

ModelProducts model_products(const OpGraph& graph, const Op& op) {
  const OpRow& row = row_of(op.kind);
  return row.model_products ? row.model_products(shape_of(whole(graph, op))) : ModelProducts{};
}

Flops model_flops_per_sample(const OpGraph& graph) {
  // Chowdhery et al. 2022 (PaLM), appendix B, and Narayanan et al. 2021 (Megatron-LM), section 5.1.
  std::array<double, 4> forward{};  // by passes
  for (const Block& block : graph.blocks) {
    const std::vector<bool> needs = needs_gradient(graph, block);
    for (int i = block.first_op; i < block.last_op; ++i) {
      const ModelProducts products = model_products(graph, graph.ops[index(i)]);
      forward[static_cast<std::size_t>(product_passes(needs, graph.ops[index(i)]))] +=
          2 * products.pairs * products.multiply_adds;
    }
  }
  return Flops(forward[1] + 2 * forward[2] + 3 * forward[3]);
}

namespace {

std::vector<TensorId> tied_parameters(const OpGraph& graph) {
  std::vector<std::optional<std::size_t>> first_block(graph.tensors.size());
  std::vector<bool> tied(graph.tensors.size(), false);
  for (std::size_t b = 0; b < graph.blocks.size(); ++b)
    for (int i = graph.blocks[b].first_op; i < graph.blocks[b].last_op; ++i)
      for (const TensorId id : graph.ops[index(i)].parameters) {
        std::optional<std::size_t>& first = first_block[index(id)];
        if (!first) first = b;
        if (first != b) tied[index(id)] = true;
      }
  std::vector<TensorId> result = parameters(graph);
  std::erase_if(result, [&](TensorId id) { return !tied[index(id)]; });
  return result;
}

}  // namespace

void finish(OpGraph& graph) {
  if (graph.ops.empty()) wrong(graph, "no ops");
  for (const Op& op : graph.ops) check_operands(graph, op);
  for (const Op& op : graph.ops) check_sizes(graph, op);
  check_order(graph);
  check_blocks(graph);

  for (const Block& block : graph.blocks)
    for (int i = block.first_op; i < block.last_op && block.input && block.output; ++i)
      if (row_of(graph.ops[i].kind).sharding == ShardingRule::contraction)
        graph.tensors[graph.ops[i].parameters.front()].of_layer_product = true;
  graph.tied = tied_parameters(graph);
  for (const TensorId id : graph.tied) graph.tensors[id].of_layer_product = false;
  graph.first_trained = first_trained_block(graph);
  graph.joins_sequences =
      std::ranges::any_of(graph.ops, [](const Op& op) { return row_of(op.kind).sharding == ShardingRule::rows; });
  graph.kinds.clear();
  std::vector<BlockPattern> kinds;
  for (Block& block : graph.blocks) {
    BlockPattern mine = pattern(graph, block);
    const auto found = std::find(kinds.begin(), kinds.end(), mine);
    block.kind = static_cast<int>(found - kinds.begin());
    if (found != kinds.end()) continue;
    kinds.push_back(std::move(mine));
    graph.kinds.push_back(static_cast<int>(&block - graph.blocks.data()));
  }
}

}  // namespace parplan
