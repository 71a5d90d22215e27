// What goes around the ring of the tensor axis, within one Segment: whose rows slices of products
// read, where their results lie, and whose sums are added up.
#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/program/verify_passes.h"

namespace parplan {
namespace {

bool is_around_tensor_ring(const Instruction& instruction) {
  return communicates(instruction.kind) && instruction.group.axis == Axis::tp && is_neighbour(instruction.group);
}

// Rows of the rank so many places before this one, or sums of products of these.
struct PassedRows {
  std::int64_t places = 0;
  std::int64_t parts = 0;  // sums: of how many ranks' products; 0: rows
};

// All ranks do the same at the same time: what a rank's n-th receive of a Segment brings is what
// its own n-th send took, from one place further.
class SliceCheck {
 public:
  SliceCheck(const Program& program, int call, std::vector<Fault>& faults)
      : program_(program), call_(call), segment_(program.segments[program.calls[call].segment]), faults_(faults) {
    const std::vector<int>& group = program.group(all_along(Axis::tp));
    ranks_ = std::ssize(group);
    at_ = std::ranges::find(group, program.rank) - group.begin();
  }

  void run() {
    find_products();
    for (std::size_t i = 0; i < segment_.instructions.size(); ++i) {
      const Instruction& instruction = segment_.instructions[i];
      if (is_around_tensor_ring(instruction))
        transfer(static_cast<int>(i), instruction);
      else
        other(static_cast<int>(i), instruction);
    }
    for (const auto& [key, product] : products_)
      if (!product.met.empty() && std::ssize(product.met) != ranks_)
        fault(product.last, fmt::format("incomplete ring: {} multiplies the rows of {} of {} ranks",
                                        describe(segment_.instructions[product.last]), product.met.size(), ranks_));
  }

 private:
  using Place = std::tuple<int, std::int64_t, std::int64_t>;  // binding, offset, bytes
  static Place place_of(const Operand& operand) { return {operand.binding, operand.offset, operand.bytes}; }
  // The operands of a product that have rows.
  struct Rows {
    const Operand* read = nullptr;
    const Operand* written = nullptr;
  };
  // The slices of a product: where their rows begin, and the ranks whose rows have arrived.
  struct Product {
    int slices = 0;
    std::int64_t read_from = 0, written_from = 0;
    std::set<std::int64_t> met;
    int last = 0;
  };

  void fault(int instruction, const std::string& what) { faults_.push_back({program_.rank, call_, instruction, what}); }

  // Those of a product with a weight, or of the gradient of its input.
  static std::optional<Rows> rows_of(const Instruction& instruction) {
    if (instruction.kind != InstructionKind::kernel || row_of(instruction.op).cost != CostClass::product)
      return std::nullopt;
    const std::vector<OperandSource> sources = *operand_sources(instruction);
    const auto written = std::ranges::find_if(sources, [](OperandSource source) {
      return source == OperandSource::output || source == OperandSource::input_gradient;
    });
    if (written == sources.end() || std::ranges::find(sources, OperandSource::parameter) == sources.end())
      return std::nullopt;
    return Rows{.read = &instruction.operands.front(), .written = &instruction.operands[written - sources.begin()]};
  }

  void find_products() {
    for (std::size_t i = 0; i < segment_.instructions.size(); ++i) {
      const Instruction& instruction = segment_.instructions[i];
      const std::optional<Rows> rows = rows_of(instruction);
      if (!rows) continue;
      const auto [found, is_first] = products_.try_emplace({instruction.op, instruction.name});
      Product& product = found->second;
      ++product.slices;
      product.last = static_cast<int>(i);
      product.read_from = is_first ? rows->read->offset : std::min(product.read_from, rows->read->offset);
      product.written_from = is_first ? rows->written->offset : std::min(product.written_from, rows->written->offset);
    }
  }

  const PassedRows* known(const Operand& operand) const {
    const auto found = passed_.find(place_of(operand));
    return found == passed_.end() ? nullptr : &found->second;
  }
  void write(const Operand& operand, std::optional<PassedRows> what) {
    std::erase_if(passed_, [&](const auto& entry) {
      const auto& [binding, offset, bytes] = entry.first;
      return binding == operand.binding && offset < operand.offset + operand.bytes && operand.offset < offset + bytes;
    });
    if (what) passed_[place_of(operand)] = *what;
  }
  // The rank so many places before this one.
  std::int64_t before(std::int64_t places) const { return (at_ + ranks_ - places % ranks_) % ranks_; }

  void transfer(int i, const Instruction& instruction) {
    const Operand& operand = instruction.operands.back();
    if (instruction.kind == InstructionKind::send) {
      // What goes around first is this rank's.
      if (known(operand) == nullptr) write(operand, PassedRows{});
      sent_.push_back(*known(operand));
    } else {
      if (received_ == sent_.size()) return fault(i, fmt::format("{} comes before its send", describe(instruction)));
      PassedRows what = sent_[received_++];
      ++what.places;
      write(operand, what);
    }
  }

  void other(int i, const Instruction& instruction) {
    if (instruction.kind == InstructionKind::kernel && instruction.op == OpKind::accumulate) {
      const PassedRows *part = known(instruction.operands.front()), *sum = known(instruction.operands.back());
      if (part != nullptr && sum != nullptr && part->parts > 0 && sum->parts > 0)
        return add(i, instruction, *part, *sum);
    }
    const std::optional<Rows> rows = rows_of(instruction);
    std::optional<PassedRows> result;
    if (rows && known(*rows->read) != nullptr && known(*rows->read)->parts == 0)
      multiply_arrived(i, instruction, *rows, known(*rows->read)->places);
    else if (rows)
      result = product_to_sum(instruction, *rows);
    else if (instruction.kind == InstructionKind::kernel && instruction.op == OpKind::copy)
      if (const PassedRows* copied = known(instruction.operands.front()); copied != nullptr && copied->parts == 0)
        result = *copied;
    const std::vector<OperandSource> sources = instruction.kind == InstructionKind::kernel
                                                   ? *operand_sources(instruction)
                                                   : std::vector<OperandSource>(instruction.operands.size());
    for (std::size_t o = 0; o < sources.size(); ++o)
      if (instruction.operands[o].access != Access::write && sources[o] != OperandSource::workspace)
        check_read(i, instruction, instruction.operands[o]);
    for (const Operand& operand : instruction.operands)
      if (operand.access != Access::read) write(operand, std::nullopt);
    if (result) write(rows ? *rows->written : instruction.operands.back(), result);
  }

  void multiply_arrived(int i, const Instruction& instruction, const Rows& rows, std::int64_t places) {
    Product& product = products_.at({instruction.op, instruction.name});
    if (product.slices == 1) return;  // the own rows, of which something else reads all
    const std::int64_t rank = (rows.written->offset - product.written_from) / rows.written->bytes;
    if (rank != before(places))
      fault(i, fmt::format("wrong rows: {} takes those of place {} of the ring for those of place {}",
                           describe(instruction), before(places), rank));
    if (!product.met.insert(before(places)).second)
      fault(i, fmt::format("{} multiplies the rows of place {} of the ring a second time", describe(instruction),
                           before(places)));
  }

  // A slice whose result goes around.
  std::optional<PassedRows> product_to_sum(const Instruction& instruction, const Rows& rows) const {
    const Product& product = products_.at({instruction.op, instruction.name});
    if (product.slices == 1 || !product.met.empty()) return std::nullopt;
    const std::int64_t rank = (rows.read->offset - product.read_from) / rows.read->bytes;
    return PassedRows{.places = (at_ + ranks_ - rank) % ranks_, .parts = 1};
  }

  void add(int i, const Instruction& instruction, const PassedRows& part, const PassedRows& sum) {
    if ((part.places - sum.places) % ranks_ != 0)
      fault(i, fmt::format("wrong sum: {} adds products of the rows of two places of the ring, {} and {}",
                           describe(instruction), before(part.places), before(sum.places)));
    PassedRows both = sum;
    both.parts += part.parts;
    write(instruction.operands.back(), both);
  }

  // A sum is read where it is whole, and with arrived rows all of them, each in its place.
  void check_read(int i, const Instruction& instruction, const Operand& operand) {
    std::int64_t rows = 0, last_bytes = 0;
    for (const auto& [place, what] : passed_) {
      const auto& [binding, offset, bytes] = place;
      const bool is_inside =
          binding == operand.binding && operand.offset <= offset && offset + bytes <= operand.offset + operand.bytes;
      if (!is_inside) continue;
      if (what.parts > 0 && (what.parts != ranks_ || what.places % ranks_ != 0))
        return fault(i, fmt::format("wrong sum: {} reads that of the rows of place {} of the ring, of {} of {} ranks",
                                    describe(instruction), before(what.places), what.parts, ranks_));
      if (what.parts > 0 || bytes == operand.bytes) continue;
      ++rows;
      last_bytes = bytes;
      if (const std::int64_t rank = (offset - operand.offset) / bytes; rank != before(what.places))
        return fault(i, fmt::format("wrong rows: {} finds those of place {} of the ring where those of place {} belong",
                                    describe(instruction), before(what.places), rank));
    }
    if (rows > 0 && rows * last_bytes != operand.bytes)
      fault(i, fmt::format("missing rows: {} reads those of all ranks, and {} of {} are there", describe(instruction),
                           rows, ranks_));
  }

  const Program& program_;
  int call_;
  const Segment& segment_;
  std::vector<Fault>& faults_;
  std::int64_t ranks_ = 1, at_ = 0;
  std::map<Place, PassedRows> passed_;
  std::vector<PassedRows> sent_;
  std::size_t received_ = 0;
  std::map<std::pair<OpKind, std::string>, Product> products_;
};

}  // namespace

void find_slice_faults(const Program& program, std::vector<Fault>& faults) {
  std::set<int> seen;
  for (std::size_t c = 0; c < program.calls.size(); ++c) {
    const int segment = program.calls[c].segment;
    if (std::ranges::none_of(program.segments[segment].instructions, is_around_tensor_ring)) continue;
    if (!seen.insert(segment).second) continue;
    std::vector<Fault> found;
    SliceCheck(program, static_cast<int>(c), found).run();
    found.resize(std::min(found.size(), most_faults));
    faults.insert(faults.end(), found.begin(), found.end());
  }
}

}  // namespace parplan
