// What goes around the ring of the context axis, within one Segment: whose keys and values arrive,
// and whose gradients of them are added up.
#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/program/verify_passes.h"

namespace parplan {
namespace {

// Keys and values of the rank so many places before this one, or gradients of these.
struct Passed {
  std::int64_t places = 0;
  std::int64_t parts = 0;  // gradients: of how many ranks' queries; 0: keys and values
};

// All ranks do the same at the same time: what a rank's n-th receive of a Segment brings is what
// its own n-th send took, from one place further.
class RingCheck {
 public:
  RingCheck(const Program& program, int call, std::vector<Fault>& faults)
      : program_(program), call_(call), segment_(program.segments[program.calls[call].segment]), faults_(faults) {}

  void run() {
    for (std::size_t i = 0; i < segment_.instructions.size(); ++i) {
      const Instruction& instruction = segment_.instructions[i];
      if (communicates(instruction.kind))
        transfer(static_cast<int>(i), instruction);
      else if (instruction.kind == InstructionKind::kernel)
        kernel(static_cast<int>(i), instruction);
    }
    for (const auto& [attention, met] : met_)
      if (std::ssize(met.holders) != met.ranks)
        fault(met.last, fmt::format("incomplete ring: {} meets the keys of {} of {} ranks",
                                    describe(segment_.instructions[met.last]), met.holders.size(), met.ranks));
  }

 private:
  using Place = std::tuple<int, std::int64_t, std::int64_t>;  // binding, offset, bytes
  static Place place_of(const Operand& operand) { return {operand.binding, operand.offset, operand.bytes}; }

  void fault(int instruction, const std::string& what) { faults_.push_back({program_.rank, call_, instruction, what}); }

  const Passed* known(const Operand& operand) const {
    const auto found = passed_.find(place_of(operand));
    return found == passed_.end() ? nullptr : &found->second;
  }
  void forget(const Operand& operand) {
    std::erase_if(passed_, [&](const auto& entry) {
      const auto& [binding, offset, bytes] = entry.first;
      return binding == operand.binding && offset < operand.offset + operand.bytes && operand.offset < offset + bytes;
    });
  }
  void write(const Operand& operand, Passed what) {
    forget(operand);
    passed_[place_of(operand)] = what;
  }

  void transfer(int i, const Instruction& instruction) {
    const Operand& operand = instruction.operands.back();
    if (instruction.group.axis == Axis::cp && instruction.kind == InstructionKind::send) {
      if (const Passed* what = known(operand))
        sent_.push_back(*what);
      else
        fault(i, fmt::format("{} passes on what are no keys and no gradients of keys", describe(instruction)));
    } else if (instruction.group.axis == Axis::cp && instruction.kind == InstructionKind::receive) {
      if (received_ == sent_.size()) return fault(i, fmt::format("{} comes before its send", describe(instruction)));
      Passed what = sent_[received_++];
      ++what.places;
      write(operand, what);
    } else {
      forget(operand);
    }
  }

  void kernel(int i, const Instruction& instruction) {
    if (instruction.shape.chunks.holder) return attend(i, instruction);
    const Operand& last = instruction.operands.back();
    if (instruction.op == OpKind::take_columns) return write(last, {});
    if (instruction.op == OpKind::accumulate) {
      const Passed *part = known(instruction.operands.front()), *sum = known(last);
      if (part != nullptr && sum != nullptr) return add(i, instruction, *part, *sum);
    }
    if (instruction.op == OpKind::put_columns)
      if (const Passed* whole = known(instruction.operands.front())) check_whole(i, instruction, *whole);
    for (const Operand& operand : instruction.operands)
      if (operand.access != Access::read) forget(operand);
  }

  void attend(int i, const Instruction& instruction) {
    const ContextChunks& chunks = instruction.shape.chunks;
    const std::vector<OperandSource> sources = *operand_sources(instruction);
    const std::int64_t places = (chunks.rank + chunks.ranks - *chunks.holder) % chunks.ranks;
    for (std::size_t o = 0; o < sources.size(); ++o) {
      const Operand& operand = instruction.operands[o];
      if (sources[o] == OperandSource::gathered) {
        const Passed* keys = known(operand);
        if (keys == nullptr || keys->parts != 0)
          fault(i, fmt::format("wrong keys: {} reads what are no keys for those of place {} of the ring",
                               describe(instruction), *chunks.holder));
        else if (keys->places % chunks.ranks != places)
          fault(i, fmt::format("wrong keys: {} takes the keys of place {} of the ring for those of place {}",
                               describe(instruction),
                               (chunks.rank + chunks.ranks - keys->places % chunks.ranks) % chunks.ranks,
                               *chunks.holder));
      } else if (sources[o] == OperandSource::gathered_gradient) {
        write(operand, {.places = places, .parts = 1});
      } else if (operand.access != Access::read) {
        forget(operand);
      }
    }
    Met& met = met_[{instruction.op, instruction.name}];
    met.ranks = chunks.ranks;
    met.last = i;
    if (instruction.shape.accumulate == met.holders.empty())
      fault(i, fmt::format("incomplete ring: {} {} in step {}", describe(instruction),
                           instruction.shape.accumulate ? "adds to nothing" : "writes over what it left",
                           met.holders.size()));
    if (!met.holders.insert(*chunks.holder).second)
      fault(i, fmt::format("{} meets the keys of place {} of the ring a second time", describe(instruction),
                           *chunks.holder));
  }

  void add(int i, const Instruction& instruction, const Passed& part, const Passed& sum) {
    if ((part.places - sum.places) % program_ranks() != 0)
      fault(i, fmt::format("wrong sum: {} adds gradients of the keys of two ranks, {} and {} places before",
                           describe(instruction), part.places % program_ranks(), sum.places % program_ranks()));
    Passed both = sum;
    both.parts += part.parts;
    write(instruction.operands.back(), both);
  }

  // What comes to the columns of this rank's own keys and values.
  void check_whole(int i, const Instruction& instruction, const Passed& whole) {
    if (whole.parts > 0 && whole.places % program_ranks() == 0 && whole.parts == program_ranks()) return;
    fault(i, fmt::format("wrong sum: {} puts in place gradients of the keys {} places before, with the parts of {} of "
                         "{} ranks",
                         describe(instruction), whole.places % program_ranks(), whole.parts, program_ranks()));
  }
  std::int64_t program_ranks() const {
    const std::vector<int>& keys = program_.group({Axis::cp, Members::keys});
    return std::ssize(keys.empty() ? program_.group(all_along(Axis::cp)) : keys);
  }

  const Program& program_;
  int call_;
  const Segment& segment_;
  std::vector<Fault>& faults_;
  std::map<Place, Passed> passed_;
  std::vector<Passed> sent_;
  std::size_t received_ = 0;
  // The ranks whose keys an op, forward or backward, has met.
  struct Met {
    std::set<std::int64_t> holders;
    std::int64_t ranks = 0;
    int last = 0;
  };
  std::map<std::pair<OpKind, std::string>, Met> met_;
};

}  // namespace

void find_ring_faults(const Program& program, std::vector<Fault>& faults) {
  std::set<int> seen;
  for (std::size_t c = 0; c < program.calls.size(); ++c) {
    const Segment& segment = program.segments[program.calls[c].segment];
    const bool is_around_ring = std::ranges::any_of(
        segment.instructions, [](const Instruction& one) { return one.shape.chunks.holder.has_value(); });
    if (!is_around_ring || !seen.insert(program.calls[c].segment).second) continue;
    std::vector<Fault> found;
    RingCheck(program, static_cast<int>(c), found).run();
    found.resize(std::min(found.size(), most_faults));
    faults.insert(faults.end(), found.begin(), found.end());
  }
}

}  // namespace parplan
