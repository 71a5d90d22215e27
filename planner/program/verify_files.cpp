// What is in a file: state returns to where it was read from, and is not read between its update
// and its return; what layers keep there is read before its place is written again, and so is what
// lies in a buffer on its way.
#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/program/verify_intervals.h"
#include "planner/program/verify_passes.h"

namespace parplan {
namespace {

// What is known about some bytes of a buffer.
struct InFlight {
  int of_file = -1;        // on the host: the buffer in the file that it was read from; -1: none
  std::int64_t shift = 0;  // then: how many bytes further it is there
  bool unwritten = false;  // updated since, and not written back
  bool outdated = false;   // the host has updated it since, elsewhere
  bool unread = false;     // written by a copy, and not read since
  int writer = 0;          // call
  int writing = 0;         // instruction
};

// Plays one rank's calls in launch order, two steps long: the second finds what the first leaves.
class FileCheck {
 public:
  FileCheck(const Program& program, std::vector<Fault>& faults)
      : program_(program), faults_(faults), most_(faults.size() + most_faults) {
    for (const Buffer& buffer : program.buffers) contents_.emplace_back(buffer.bytes);
    is_on_way_.assign(program.buffers.size(), false);
    for (const Call& call : program.calls)
      for (const Instruction& instruction : program.segments[call.segment].instructions)
        if (instruction.kind == InstructionKind::copy && is_of_file(instruction.stream))
          for (const Operand& operand : instruction.operands)
            if (const int id = call.buffers[operand.binding]; !program.buffers[id].persistent) is_on_way_[id] = true;
  }

  void run() {
    const std::size_t before = faults_.size();
    for (int step = 0; step < 2 && faults_.size() == before; ++step) {
      for (std::size_t b = 0; b < contents_.size(); ++b)
        for (Piece& piece : contents_[b].all())
          piece.state = {.outdated = buffer(static_cast<int>(b)).persistent && piece.state.outdated};
      for (std::size_t c = 0; c < program_.calls.size(); ++c) run_call(static_cast<int>(c));
      check_left();
    }
  }

 private:
  using Piece = Intervals<InFlight>::Interval;

  // One fault of a kind for each instruction of each segment: its other calls would repeat it.
  void fault(int call, std::optional<int> instruction, const std::string& what) {
    const std::pair key{program_.calls[call].segment, instruction};
    if (faults_.size() < most_ && known_.insert(key).second)
      faults_.push_back({program_.rank, call, instruction, what});
  }
  const Buffer& buffer(int id) const { return program_.buffers[id]; }
  std::string bytes_of(int id, const Piece& piece) const {
    return fmt::format("bytes [{}, {}) of '{}'", piece.begin, piece.end, buffer(id).name);
  }
  static int bound(const Call& call, const Operand& operand) { return call.buffers[operand.binding]; }
  std::span<Piece> bytes(const Call& call, const Operand& operand) {
    return contents_[bound(call, operand)].within(operand.offset, operand.offset + operand.bytes);
  }
  static bool is_host_update(const Instruction& instruction) {
    return instruction.kind == InstructionKind::kernel && instruction.home == Home::host &&
           (instruction.op == OpKind::adamw || instruction.op == OpKind::adamw_8bit || instruction.op == OpKind::sgd);
  }
  // Which bucket has a buffer in the file.
  const Bucket* bucket_of(int id) const {
    for (const Bucket& bucket : program_.buckets)
      if (bucket.first_moment == id || bucket.second_moment == id || bucket.master == id || bucket.parameters == id)
        return &bucket;
    return nullptr;
  }

  void run_call(int c) {
    const Call& call = program_.calls[c];
    const Segment& segment = program_.segments[call.segment];
    for (std::size_t i = 0; i < segment.instructions.size(); ++i)
      run_instruction(call, c, static_cast<int>(i), segment.instructions[i]);
    for (const int id : call.frees)
      for (Piece& piece : contents_[id].all()) {
        if (piece.state.unwritten)
          fault(c, {},
                fmt::format("dropped write: frees {}, which the host has updated and not written to '{}'",
                            bytes_of(id, piece), buffer(piece.state.of_file).name));
        else if (piece.state.unread)
          fault(c, {},
                fmt::format("lost value: frees {}, which call {} wrote and nothing has read", bytes_of(id, piece),
                            piece.state.writer));
        piece.state = {.outdated = piece.state.outdated};
      }
  }

  void run_instruction(const Call& call, int c, int i, const Instruction& instruction) {
    if (instruction.operands.empty()) return;
    for (const Operand& operand : instruction.operands) {
      const int id = bound(call, operand);
      for (Piece& piece : bytes(call, operand))
        if (operand.access == Access::write)
          check_written(id, c, i, instruction, piece);
        else
          check_read(id, c, i, instruction, piece);
    }
    if (instruction.kind == InstructionKind::copy) check_copy(call, c, i, instruction);
    if (is_host_update(instruction)) check_update(call, c, i, instruction);

    for (const Operand& operand : instruction.operands)
      if (operand.access != Access::write)
        for (Piece& piece : bytes(call, operand)) piece.state.unread = false;
    for (const Operand& operand : instruction.operands) {
      if (operand.access == Access::read) continue;
      const int id = bound(call, operand);
      const bool is_copied = instruction.kind == InstructionKind::copy && is_on_way_[id] != 0;
      for (Piece& piece : bytes(call, operand)) {
        InFlight& state = piece.state;
        state.writer = c;
        state.writing = i;
        if (operand.access == Access::write)
          state = {.unread = is_copied, .writer = c, .writing = i};
        else
          state.unwritten = state.of_file >= 0;
      }
    }
    if (instruction.kind == InstructionKind::copy) move(call, instruction);
    if (is_host_update(instruction)) update(call, instruction);
  }

  void check_read(int id, int c, int i, const Instruction& instruction, const Piece& piece) {
    if (!piece.state.outdated) return;
    const bool in_file = buffer(id).home == Home::nvme;
    fault(c, i,
          fmt::format("dropped {}: {} reads {}, which the host has updated and not {}", in_file ? "write" : "copy",
                      describe(instruction), bytes_of(id, piece), in_file ? "written to it" : "copied to the device"));
  }
  void check_written(int id, int c, int i, const Instruction& instruction, const Piece& piece) {
    if (piece.state.unwritten)
      fault(c, i,
            fmt::format("dropped write: {} writes over {}, which the host has updated and not written to '{}'",
                        describe(instruction), bytes_of(id, piece), buffer(piece.state.of_file).name));
    else if (piece.state.unread)
      fault(c, i,
            fmt::format("lost value: {} writes over {}, which call {} wrote and nothing has read",
                        describe(instruction), bytes_of(id, piece), piece.state.writer));
  }
  void check_left() {
    for (std::size_t b = 0; b < contents_.size(); ++b)
      for (const Piece& piece : contents_[b].all()) {
        const int id = static_cast<int>(b);
        if (piece.state.unwritten)
          fault(piece.state.writer, piece.state.writing,
                fmt::format("dropped write: nothing has written {}, which the host has updated, to '{}'",
                            bytes_of(id, piece), buffer(piece.state.of_file).name));
        else if (piece.state.unread)
          fault(piece.state.writer, piece.state.writing,
                fmt::format("lost value: nothing reads {}, which call {} wrote", bytes_of(id, piece),
                            piece.state.writer));
      }
  }

  // That what was read from a file may go where an operand takes it.
  template <class IsRight>
  void check_origin(const Call& call, int c, int i, const Instruction& instruction, const Operand& operand, int target,
                    IsRight is_right) {
    for (const Piece& piece : bytes(call, operand)) {
      const int file = piece.state.of_file;
      if (file < 0 || is_right(file)) continue;
      return fault(c, i,
                   fmt::format("wrong state: {} takes {}, which was read from '{}', for '{}'", describe(instruction),
                               bytes_of(bound(call, operand), piece), buffer(file).name, buffer(target).name));
    }
  }

  void check_copy(const Call& call, int c, int i, const Instruction& instruction) {
    const Operand& from = instruction.operands.front();
    const int to = bound(call, instruction.operands.back());
    if (buffer(to).home == Home::device) check_places(call, c, i, instruction);
    if (buffer(to).home != Home::nvme)
      // What layers keep, and parameters, to where a block computes; else a bucket's own master
      // copy.
      return check_origin(call, c, i, instruction, from, to, [&](int file) {
        const Bucket* const bucket = bucket_of(file);
        if (bucket == nullptr) return !buffer(file).persistent;
        return bucket->parameters == file ? !buffer(to).persistent : bucket->parameters == to && bucket->master == file;
      });
    check_origin(call, c, i, instruction, from, to, [&](int file) { return file == to; });
    if (!buffer(to).persistent) return;
    for (const Piece& piece : bytes(call, from))
      if (piece.state.of_file < 0)
        return fault(c, i,
                     fmt::format("wrong state: {} takes {}, which nothing has read from '{}'", describe(instruction),
                                 bytes_of(bound(call, from), piece), buffer(to).name));
  }

  // Parameters of a shard that were read from a file go where the whole bucket has them
  // (BucketUnit).
  void check_places(const Call& call, int c, int i, const Instruction& instruction) {
    const Operand &from = instruction.operands.front(), &to = instruction.operands.back();
    const std::int64_t element = size_of(instruction.type);
    for (const Piece& piece : bytes(call, from)) {
      const Bucket* const bucket = piece.state.of_file < 0 ? nullptr : bucket_of(piece.state.of_file);
      if (bucket == nullptr || bucket->parameters != piece.state.of_file) continue;
      const BucketRange held{piece.begin + piece.state.shift, piece.end + piece.state.shift};
      const std::int64_t begin = to.offset + piece.begin - from.offset;
      const bool is_shard = buffer(piece.state.of_file).bytes < bucket->elements * element;
      const bool is_placed =
          is_shard ? std::ranges::any_of(bucket->units,
                                         [&](const BucketUnit& unit) {
                                           const std::int64_t at = unit.own.at * element;
                                           return held.begin >= at &&
                                                  held.end <= at + unit.own.range.size() * element &&
                                                  begin == unit.own.range.begin * element + held.begin - at;
                                         })
                   : begin == held.begin;
      if (!is_placed)
        return fault(c, i,
                     fmt::format("wrong place: {} takes {} to byte {}, where '{}' has other parameters",
                                 describe(instruction), bytes_of(bound(call, from), piece), begin, bucket->name));
    }
  }

  // An update works on one bucket's gradients, state and parameters.
  void check_update(const Call& call, int c, int i, const Instruction& instruction) {
    const int gradients = bound(call, instruction.operands.front());
    for (const Operand& operand : instruction.operands)
      check_origin(call, c, i, instruction, operand, gradients, [&](int file) {
        const Bucket* const bucket = bucket_of(file);
        return bucket != nullptr && (bucket->gradients == gradients || bucket->host_gradients == gradients);
      });
  }

  void move(const Call& call, const Instruction& instruction) {
    const Operand &from = instruction.operands.front(), &to = instruction.operands.back();
    if (instruction.stream == Stream::from_nvme)
      for (Piece& piece : bytes(call, to)) {
        piece.state.of_file = bound(call, from);
        piece.state.shift = from.offset - to.offset;
      }
    if (instruction.stream == Stream::to_nvme)
      for (Piece& piece : bytes(call, from)) piece.state.unwritten = false;
  }

  // What the host has updated is outdated in the file until it is written; and where that is the
  // master copy that parameters on the device are made of, so are these until it is copied there.
  void update(const Call& call, const Instruction& instruction) {
    for (const Operand& operand : instruction.operands) {
      if (operand.access == Access::read) continue;
      for (const Piece& piece : bytes(call, operand)) {
        const InFlight& state = piece.state;
        if (state.of_file < 0) continue;
        const std::int64_t begin = piece.begin + state.shift, end = piece.end + state.shift;
        for (Piece& there : contents_[state.of_file].within(begin, end)) there.state.outdated = true;
        const Bucket* const bucket = bucket_of(state.of_file);
        const bool is_parameter = &operand == &instruction.operands[1];
        if (bucket == nullptr || !is_parameter || bucket->master != state.of_file) continue;
        const std::int64_t element = size_of(instruction.type);
        const bool is_shard = buffer(bucket->parameters).bytes < bucket->elements * element;
        const std::int64_t shard = is_shard ? 0 : begin_in_whole(*bucket) * element;
        for (Piece& there : contents_[bucket->parameters].within(shard + begin, shard + end))
          there.state.outdated = true;
      }
    }
  }

  const Program& program_;
  std::vector<Fault>& faults_;
  std::size_t most_;
  std::set<std::pair<int, std::optional<int>>> known_;
  std::vector<Intervals<InFlight>> contents_;  // per buffer
  std::vector<char> is_on_way_;                // per buffer: to or from a file, or in one until the step has read it
};

}  // namespace

void find_file_faults(const Program& program, std::vector<Fault>& faults) {
  if (program.arena_bytes.nvme > 0) FileCheck(program, faults).run();
}

}  // namespace parplan
