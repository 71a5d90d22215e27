#include "planner/program/verify.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/base/error.h"
#include "planner/program/verify_passes.h"

namespace parplan {
namespace {

using Accesses = std::vector<Access>;

// `is_first`: of a collective's group.
const Accesses& accesses_of(InstructionKind kind, bool is_first) {
  static const Accesses update{Access::update}, move{Access::read, Access::write}, send{Access::read},
      receive{Access::write}, hand_out{Access::write, Access::read};
  switch (kind) {
    case InstructionKind::copy:
    case InstructionKind::all_gather:
    case InstructionKind::all_to_all: return move;
    case InstructionKind::send: return send;
    case InstructionKind::receive: return receive;
    case InstructionKind::broadcast: return is_first ? send : receive;
    case InstructionKind::reduce_sum: return is_first ? update : send;
    case InstructionKind::gather: return is_first ? move : send;
    case InstructionKind::scatter: return is_first ? hand_out : receive;
    default: return update;
  }
}

// Checks one rank. What an index refers to is used only after the index has been checked.
class StructureCheck {
 public:
  StructureCheck(const Program& program, int ranks, std::vector<Fault>& faults)
      : program_(program), ranks_(ranks), faults_(faults), most_(faults.size() + most_faults) {}

  void run() {
    groups();
    buffers();
    segments();
    const std::size_t before = faults_.size();
    tasks();
    for (std::size_t c = 0; c < program_.calls.size(); ++c) call(static_cast<int>(c));
    if (faults_.size() == before) events();
  }

 private:
  template <class... Arguments>
  void fault(std::optional<int> call, std::optional<int> instruction, fmt::format_string<Arguments...> text,
             Arguments&&... arguments) {
    if (faults_.size() < most_)
      faults_.push_back({program_.rank, call, instruction, fmt::format(text, std::forward<Arguments>(arguments)...)});
  }
  static bool within(int index, std::size_t size) { return index >= 0 && static_cast<std::size_t>(index) < size; }

  void groups() {
    for (const auto& [key, ranks] : program_.groups) {
      const bool ascending = std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) == ranks.end();
      const bool in_job = ranks.empty() || (ranks.front() >= 0 && ranks.back() < ranks_);
      if (!ascending || !in_job)
        fault({}, {}, "the {} group ({}) is not an ascending list of ranks of a job of {}",
              name(key), list_ranks(ranks), ranks_);
    }
  }

  void buffers() {
    std::vector<std::size_t> order(program_.buffers.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, {}, [&](std::size_t i) { return program_.buffers[i].offset; });
    PerHome<const Buffer*> furthest;  // of those so far, the one that reaches furthest
    for (std::size_t i : order) {
      const Buffer& buffer = program_.buffers[i];
      const std::int64_t arena = program_.arena_bytes[buffer.home];
      const std::int64_t end = buffer.offset + buffer.bytes;
      if (buffer.offset < 0 || buffer.bytes < 0 || end > arena)
        fault({}, {}, "buffer '{}' at [{}, {}) is outside the arena of {} B{}", buffer.name, buffer.offset, end, arena,
              where(buffer.home));
      if (buffer.bytes <= 0) continue;
      const Buffer*& before = furthest[buffer.home];
      if (before && before->offset + before->bytes > buffer.offset)
        fault({}, {}, "buffers overlap{}: '{}' at [{}, {}) and '{}' at [{}, {})", where(buffer.home), before->name,
              before->offset, before->offset + before->bytes, buffer.name, buffer.offset, end);
      if (!before || before->offset + before->bytes < end) before = &buffer;
    }
    const auto known = [&](const char* what, std::optional<int> id) {
      if (id && !within(*id, program_.buffers.size()))
        fault({}, {}, "the {} is buffer {} of {}", what, *id, program_.buffers.size());
    };
    known("loss", program_.loss_buffer);
    known("gradient norm", program_.norm_buffer);
    known("loss scale", program_.loss_scale_buffer);
    for (const Bucket& bucket : program_.buckets)
      for (const int id : buffers_of(bucket))
        known(fmt::format("storage of bucket '{}'", bucket.name).c_str(), id);
  }

  // Checks what does not depend on the call. Operand ranges do.
  void segments() {
    for (const Segment& segment : program_.segments) {
      std::vector<std::string>& wrong = wrong_.emplace_back();
      std::vector<bool> recorded(static_cast<std::size_t>(std::max(segment.events, 0)), false);
      for (const Instruction& instruction : segment.instructions) {
        wrong.push_back(wrong_with(segment, instruction));
        for (int event : instruction.waits)
          if (wrong.back().empty() && (!within(event, recorded.size()) || !recorded[event]))
            wrong.back() =
                fmt::format("missing event: {} waits for event {} of its segment, which nothing before it records",
                            describe(instruction), event);
        if (!instruction.records) continue;
        const int event = *instruction.records;
        if (wrong.back().empty() && !within(event, recorded.size()))
          wrong.back() =
              fmt::format("{} records event {} of a segment of {}", describe(instruction), event, segment.events);
        if (!wrong.back().empty()) continue;
        if (recorded[event])
          wrong.back() = fmt::format("{} records event {} of its segment a second time", describe(instruction), event);
        recorded[event] = true;
      }
    }
  }

  std::string wrong_with(const Segment& segment, const Instruction& instruction) const {
    for (const Operand& operand : instruction.operands)
      if (!within(operand.binding, segment.bindings.size()))
        return fmt::format("{} uses binding {} of {}", describe(instruction), operand.binding, segment.bindings.size());
    if (instruction.kind == InstructionKind::kernel)
      return operand_sources(instruction) ? ""
                                          : fmt::format("the operands of {} do not fit its row", describe(instruction));

    const std::vector<int>& ranks = program_.group(instruction.group);
    const Accesses& accesses =
        accesses_of(instruction.kind, !ranks.empty() && ranks.front() == program_.rank);
    const bool fits =
        std::equal(accesses.begin(), accesses.end(), instruction.operands.begin(), instruction.operands.end(),
                   [](Access access, const Operand& operand) { return access == operand.access; });
    if (!fits) return fmt::format("the operands of {} do not fit its kind", describe(instruction));
    if (instruction.kind == InstructionKind::copy) return wrong_with_copy(instruction);
    const bool to_neighbour = is_neighbour(instruction.group);
    if (instruction.kind == InstructionKind::send || instruction.kind == InstructionKind::receive) {
      if (!to_neighbour || ranks.size() != 1 || ranks.front() == program_.rank)
        return fmt::format("{} with the {} group ({}): not one neighbouring rank", describe(instruction),
                           name(instruction.group), list_ranks(ranks));
      return "";
    }
    const auto self = std::find(ranks.begin(), ranks.end(), program_.rank);
    if (to_neighbour || self == ranks.end())
      return fmt::format("{} over the {} group ({}), which this rank is not in", describe(instruction),
                         name(instruction.group), list_ranks(ranks));
    const std::int64_t element = size_of(instruction.type);
    const Operand& whole = instruction.operands.back();
    if (whole.bytes % element != 0)
      return fmt::format("{} of {} B is not a whole number of {} elements", describe(instruction), whole.bytes,
                         name(instruction.type));
    const int members = static_cast<int>(ranks.size());
    if (instruction.kind == InstructionKind::all_to_all) return wrong_with_exchange(instruction, members);
    if (instruction.operands.size() == 2 && has_root(instruction.kind)) {
      const Operand& own = instruction.operands.front();
      if (own.bytes * members != whole.bytes)
        return fmt::format("{} of {} B has parts of {} B for {} members", describe(instruction), whole.bytes, own.bytes,
                           members);
      if (overlap(own, whole)) return fmt::format("{} has its own part inside the whole", describe(instruction));
      return "";
    }
    if (instruction.kind != InstructionKind::all_gather) return "";
    const int member = static_cast<int>(self - ranks.begin());
    const std::int64_t begin = chunk_begin(whole.bytes / element, members, member) * element;
    const std::int64_t bytes = chunk_begin(whole.bytes / element, members, member + 1) * element - begin;
    const Operand& shard = instruction.operands.front();
    if (shard.bytes != bytes)
      return fmt::format("{} of {} B gathers a shard of {} B where member {} of {} holds {} B", describe(instruction),
                         whole.bytes, shard.bytes, member, members, bytes);
    if (overlap(shard, whole) && shard.offset != whole.offset + begin)
      return fmt::format("{} gathers in place from byte {} of the whole where member {} of {} holds bytes from {}",
                         describe(instruction), shard.offset - whole.offset, member, members, begin);
    return "";
  }

  static std::string wrong_with_copy(const Instruction& instruction) {
    const std::int64_t from = instruction.operands.front().bytes, to = instruction.operands.back().bytes;
    if (from != to) return fmt::format("{} takes {} B to {} B", describe(instruction), from, to);
    if (!homes_of_copies(instruction.stream))
      return fmt::format("{} is on stream {}", describe(instruction), name(instruction.stream));
    return "";
  }

  // The homes that follow from an instruction: those of a copy's operands, and the host for what
  // its processor touches. A device reaches any memory, and nothing but a copy a file.
  static std::optional<Home> wanted_home(const Instruction& instruction, std::size_t operand) {
    if (instruction.kind == InstructionKind::kernel)
      return instruction.home == Home::host ? std::optional(Home::host) : std::nullopt;
    if (instruction.kind != InstructionKind::copy) return std::nullopt;
    const std::optional<CopyHomes> homes = homes_of_copies(instruction.stream);
    if (!homes) return std::nullopt;
    return operand == 1 ? homes->to : homes->from;
  }

  static bool overlap(const Operand& a, const Operand& b) {
    return a.binding == b.binding && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
  }

  static std::string wrong_with_exchange(const Instruction& instruction, int members) {
    const Operand& from = instruction.operands.front();
    const Operand& to = instruction.operands.back();
    if (from.bytes != to.bytes)
      return fmt::format("{} sends {} B and receives {} B", describe(instruction), from.bytes, to.bytes);
    if (to.bytes % (size_of(instruction.type) * members) != 0)
      return fmt::format("{} of {} B ({}) has no equal chunks for {} members", describe(instruction), to.bytes,
                         name(instruction.type), members);
    if (overlap(from, to)) return fmt::format("{} receives where it sends from", describe(instruction));
    return "";
  }

  void tasks() {
    int next = 0;
    for (const Task& task : program_.tasks) {
      if (task.first_call != next || task.last_call < task.first_call)
        return fault({}, {}, "a task has calls [{}, {}) where call {} is next", task.first_call, task.last_call, next);
      next = task.last_call;
    }
    if (next != static_cast<int>(program_.calls.size()))
      fault({}, {}, "the tasks hold {} calls of {}", next, program_.calls.size());
  }

  void call(int c) {
    const Call& call = program_.calls[c];
    if (!within(call.segment, program_.segments.size()))
      return fault(c, {}, "calls segment {} of {}", call.segment, program_.segments.size());
    const Segment& segment = program_.segments[call.segment];
    if (call.buffers.size() != segment.bindings.size())
      return fault(c, {}, "binds {} buffers to the {} bindings of '{}'", call.buffers.size(), segment.bindings.size(),
                   segment.name);
    for (const BufferIds* ids : {&call.buffers, &call.frees})
      for (int id : *ids)
        if (!within(id, program_.buffers.size()))
          return fault(c, {}, "{} buffer {} of {}", ids == &call.buffers ? "binds" : "frees", id,
                       program_.buffers.size());
    const std::vector<std::string>& wrong = wrong_[call.segment];
    for (std::size_t i = 0; i < segment.instructions.size(); ++i) {
      const Instruction& instruction = segment.instructions[i];
      if (!wrong[i].empty()) {
        fault(c, static_cast<int>(i), "{}", wrong[i]);
        continue;
      }
      for (std::size_t o = 0; o < instruction.operands.size(); ++o) {
        const Operand& operand = instruction.operands[o];
        const Buffer& buffer = program_.buffers[call.buffers[operand.binding]];
        const std::int64_t end = operand.offset + operand.bytes;
        if (const std::optional<Home> home = wanted_home(instruction, o); home && *home != buffer.home)
          fault(c, static_cast<int>(i), "wrong home: {} on stream {} uses '{}', which is on the {}",
                describe(instruction), name(instruction.stream), buffer.name, name(buffer.home));
        else if (!home && buffer.home == Home::nvme)
          fault(c, static_cast<int>(i), "wrong home: {} on stream {} uses '{}', which is in a file",
                describe(instruction), name(instruction.stream), buffer.name);
        if (operand.offset < 0 || operand.bytes < 0 || end > buffer.bytes)
          fault(c, static_cast<int>(i), "operand out of range: {} uses bytes [{}, {}) of '{}', which has {} B",
                describe(instruction), operand.offset, end, buffer.name, buffer.bytes);
      }
    }
  }

  void events() {
    std::vector<bool> recorded(static_cast<std::size_t>(std::max(program_.events, 0)), false);
    for (std::size_t c = 0; c < program_.calls.size(); ++c) {
      const Call& call = program_.calls[c];
      const std::string& segment = program_.segments[call.segment].name;
      for (int event : call.waits)
        if (!within(event, recorded.size()) || !recorded[event])
          fault(static_cast<int>(c), {}, "missing event: '{}' waits for event {}, which no call before it records",
                segment, event);
      if (!call.records) continue;
      if (!within(*call.records, recorded.size())) {
        fault(static_cast<int>(c), {}, "'{}' records event {} of {}", segment, *call.records, program_.events);
        continue;
      }
      if (recorded[*call.records])
        fault(static_cast<int>(c), {}, "'{}' records event {} a second time", segment, *call.records);
      recorded[*call.records] = true;
    }
  }

  const Program& program_;
  int ranks_;
  std::vector<Fault>& faults_;
  std::size_t most_;
  // Per segment and instruction: its fault, empty where there is none.
  std::vector<std::vector<std::string>> wrong_;
};

// Whether an operand can stand for a row's operand. A gradient that is added to is updated where
// the row writes it, and so are attention's outputs after the first step around a ring.
bool fits(const OperandRow& row, const Operand& operand, const OpShape& shape) {
  if (row.access == operand.access) return true;
  const bool may_be_added_to = row.source == OperandSource::input_gradient ||
                               (row.source == OperandSource::output && shape.accumulate && shape.chunks.holder);
  return may_be_added_to && row.access == Access::write && operand.access == Access::update;
}

}  // namespace

std::optional<std::vector<OperandSource>> operand_sources(const Instruction& instruction) {
  const std::optional<std::vector<int>> positions = operand_positions(instruction);
  if (!positions) return std::nullopt;
  std::vector<OperandSource> sources;
  for (std::size_t i = 0; i < positions->size(); ++i) {
    const OperandRow& row = row_of(instruction.op).operands[(*positions)[i]];
    if (!fits(row, instruction.operands[i], instruction.shape)) return std::nullopt;
    sources.push_back(row.source);
  }
  return sources;
}

std::string describe(const Instruction& instruction) {
  const bool kernel = instruction.kind == InstructionKind::kernel;
  return fmt::format("{} '{}'", kernel ? name(instruction.op) : name(instruction.kind), instruction.name);
}

std::string list_ranks(const std::vector<int>& ranks) { return fmt::format("{}", fmt::join(ranks, ", ")); }

void find_structure_faults(std::span<const Program> programs, std::vector<Fault>& faults) {
  for (std::size_t r = 0; r < programs.size(); ++r) {
    if (programs[r].rank != static_cast<int>(r))
      faults.push_back(
          {static_cast<int>(r), {}, {}, fmt::format("the Program in place {} is of rank {}", r, programs[r].rank)});
    StructureCheck(programs[r], static_cast<int>(programs.size()), faults).run();
  }
}

std::string write_fault(const Fault& fault) {
  std::string text = fmt::format("rank {}", fault.rank);
  if (fault.call) text += fmt::format(", call {}", *fault.call);
  if (fault.instruction) text += fmt::format(", instruction {}", *fault.instruction);
  return text + ": " + fault.what;
}

std::vector<Fault> find_faults(std::span<const Program> programs) {
  std::vector<Fault> faults;
  find_structure_faults(programs, faults);
  if (!faults.empty()) return faults;
  for (const Program& program : programs) find_file_faults(program, faults);
  for (const Program& program : programs) find_data_faults(program, faults);
  for (const Program& program : programs) find_ring_faults(program, faults);
  for (const Program& program : programs) find_exchange_faults(program, faults);
  for (const Program& program : programs) find_slice_faults(program, faults);
  find_communication_faults(programs, faults);
  return faults;
}

void verify(std::span<const Program> programs) {
  constexpr std::size_t shown = 5;
  const std::vector<Fault> faults = find_faults(programs);
  if (faults.empty()) return;
  std::string text = fmt::format("the Programs of {} ranks do not verify, {} found:", programs.size(),
                                 faults.size() == 1 ? "1 fault" : fmt::format("{} faults", faults.size()));
  for (std::size_t i = 0; i < std::min(shown, faults.size()); ++i) text += "\n  " + write_fault(faults[i]);
  if (faults.size() > shown) text += fmt::format("\n  and {} more", faults.size() - shown);
  throw InternalError(text);
}

}  // namespace parplan
