// Tokens that groups of the context axis exchange for heads, within one Segment: what attention
// reads has come by an exchange, and what it writes goes back.
#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/program/verify_passes.h"

namespace parplan {
namespace {

// What lies in a place: own rows, packed by the rank that gets them; the group's rows of some
// heads; own rows again, still apart by the rank that computed them.
enum class Held { packed, heads, returned };

const char* words_of(Held held) {
  return held == Held::heads ? "rows of some heads" : "rows of heads that came back";
}

// Operands of attention that are exchanged: not the statistics, which its gradient alone reads.
bool is_exchanged(const OperandRow& row) {
  return row.source == OperandSource::input || row.source == OperandSource::input_gradient ||
         row.source == OperandSource::output_gradient || (row.source == OperandSource::output && row.index == 0);
}

class ExchangeCheck {
 public:
  ExchangeCheck(const Program& program, int call, std::vector<Fault>& faults)
      : program_(program),
        call_(call),
        segment_(program.segments[program.calls[call].segment]),
        faults_(faults),
        group_ranks_(std::ssize(program.group(exchange_group))),
        keys_ranks_(std::ssize(program.group({Axis::cp, Members::keys}))) {}

  void run() {
    for (std::size_t i = 0; i < segment_.instructions.size(); ++i) {
      const Instruction& instruction = segment_.instructions[i];
      if (instruction.group == exchange_group && communicates(instruction.kind))
        exchange(static_cast<int>(i), instruction);
      else if (instruction.kind == InstructionKind::kernel && instruction.shape.gathered)
        attend(static_cast<int>(i), instruction);
      else
        other(static_cast<int>(i), instruction);
    }
    for (const auto& [place, made] : owed_)
      fault(made, fmt::format("{} leaves rows of some heads that are not exchanged back",
                              describe(segment_.instructions[made])));
  }

 private:
  using Place = std::tuple<int, std::int64_t, std::int64_t>;  // binding, offset, bytes
  static Place place_of(const Operand& operand) { return {operand.binding, operand.offset, operand.bytes}; }

  void fault(int instruction, const std::string& what) { faults_.push_back({program_.rank, call_, instruction, what}); }

  std::optional<Held> held(const Operand& operand) const {
    const auto found = held_.find(place_of(operand));
    return found == held_.end() ? std::nullopt : std::optional(found->second);
  }
  void forget(const Operand& operand) {
    std::erase_if(held_, [&](const auto& entry) {
      const auto& [binding, offset, bytes] = entry.first;
      return binding == operand.binding && offset < operand.offset + operand.bytes && operand.offset < offset + bytes;
    });
  }
  void write(const Operand& operand, Held what) {
    forget(operand);
    held_[place_of(operand)] = what;
  }

  void exchange(int i, const Instruction& instruction) {
    const Operand &from = instruction.operands.front(), &to = instruction.operands.back();
    const std::optional<Held> what = held(from);
    if (instruction.kind != InstructionKind::all_to_all || !what || *what == Held::returned)
      fault(i, fmt::format("{} exchanges what is neither packed by rank nor of some heads", describe(instruction)));
    owed_.erase(place_of(from));
    write(to, what == Held::heads ? Held::returned : Held::heads);
  }

  void attend(int i, const Instruction& instruction) {
    const OpShape& shape = instruction.shape;
    if (shape.chunks.ranks != keys_ranks_ || shape.sequence != 2 * shape.chunks.size)
      fault(i, fmt::format("{} meets {} ranks with {} rows in chunks of {}; it needs both chunks of its group, and {} "
                           "groups",
                           describe(instruction), shape.chunks.ranks, shape.sequence, shape.chunks.size, keys_ranks_));
    const std::vector<int> positions = *operand_positions(instruction);
    const std::span<const OperandRow> rows = row_of(instruction.op).operands;
    for (std::size_t o = 0; o < positions.size(); ++o) {
      const Operand& operand = instruction.operands[o];
      if (!is_exchanged(rows[static_cast<std::size_t>(positions[o])])) {
        if (operand.access != Access::read) forget(operand);
        continue;
      }
      if (operand.access != Access::write && held(operand) != Held::heads)
        fault(i, fmt::format("wrong rows: operand {} of {} has not come by an exchange for heads", o,
                             describe(instruction)));
      if (operand.access == Access::read) continue;
      write(operand, Held::heads);
      owed_[place_of(operand)] = i;
    }
  }

  // Keys and values are taken out of rows of some heads, and their gradients put in. What other
  // axes exchange is packed likewise.
  void other(int i, const Instruction& instruction) {
    const auto is = [&](OpKind op) { return instruction.kind == InstructionKind::kernel && instruction.op == op; };
    bool puts_together = false;
    for (const Operand& operand : instruction.operands) {
      const std::optional<Held> what = held(operand);
      if (operand.access != Access::read || !what || what == Held::packed) continue;
      puts_together = is(OpKind::transpose_blocks) && what == Held::returned && instruction.shape.rows == group_ranks_;
      if (!puts_together && !(what == Held::heads && is(OpKind::take_columns)))
        fault(i, fmt::format("wrong rows: {} reads {}", describe(instruction), words_of(*what)));
    }
    const bool packs = is(OpKind::transpose_blocks) && !puts_together && instruction.shape.inner == group_ranks_;
    for (const Operand& operand : instruction.operands) {
      if (operand.access == Access::read) continue;
      if (packs)
        write(operand, Held::packed);
      else if (!is(OpKind::put_columns))
        forget(operand);
    }
  }

  const Program& program_;
  int call_;
  const Segment& segment_;
  std::vector<Fault>& faults_;
  std::int64_t group_ranks_, keys_ranks_;
  std::map<Place, Held> held_;
  std::map<Place, int> owed_;  // what attention wrote last: its instruction
};

// The neighbours around a ring are those of this rank among the ranks whose keys it meets.
void check_neighbours(const Program& program, std::vector<Fault>& faults) {
  const std::vector<int>& keys = program.group({Axis::cp, Members::keys});
  const auto at = std::ranges::find(keys, program.rank) - keys.begin(), ranks = std::ssize(keys);
  for (const GroupKey neighbour : {next_keys, previous_keys}) {
    const std::vector<int>& group = program.group(neighbour);
    if (group.empty() || at == ranks) continue;
    const int wanted = keys[static_cast<std::size_t>((at + (is_after(neighbour) ? 1 : ranks - 1)) % ranks)];
    if (group != std::vector{wanted})
      faults.push_back({program.rank,
                        {},
                        {},
                        fmt::format("wrong ring: group {} holds ranks {}, and rank {} is the neighbour among those "
                                    "whose keys this rank meets",
                                    name(neighbour), list_ranks(group), wanted)});
  }
}

}  // namespace

void find_exchange_faults(const Program& program, std::vector<Fault>& faults) {
  if (program.group(exchange_group).empty()) return;
  check_neighbours(program, faults);
  std::vector<bool> seen(program.segments.size());
  for (std::size_t c = 0; c < program.calls.size(); ++c) {
    const auto segment = static_cast<std::size_t>(program.calls[c].segment);
    if (seen[segment]) continue;
    seen[segment] = true;
    std::vector<Fault> found;
    ExchangeCheck(program, static_cast<int>(c), found).run();
    found.resize(std::min(found.size(), most_faults));
    faults.insert(faults.end(), found.begin(), found.end());
  }
}

}  // namespace parplan
