// What is in a file: state returns to where it was read from, and is not read between its update
// and its return; what layers keep there is read before its place is written again, and so is what
// lies in a buffer on its way. Sums of gradients are read once the step has written them, are
// written back once a backward has taken them, and are those of the bucket whose block computes,
// and whose state they update.
#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/program/lower_block.h"
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
  // Of sums of gradients: the bucket that they are of, where that is known, and how many bytes
  // further they are in its file; there, whether a backward is still to write them, and whether the
  // norm has them.
  int bucket = -1;
  std::optional<std::int64_t> further = {};
  bool is_due = false;
  bool is_counted = false;
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
    sum_of_.assign(program.buffers.size(), -1);
    parameters_in_ = sum_of_;
    for (std::size_t b = 0; b < program.buckets.size(); ++b) {
      const Bucket& bucket = program.buckets[b];
      parameters_in_[bucket.parameters] = static_cast<int>(b);
      if (bucket.gradients && program.buffers[*bucket.gradients].home == Home::nvme)
        sum_of_[*bucket.gradients] = static_cast<int>(b);
    }
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
          piece.state = {.outdated = buffer(static_cast<int>(b)).persistent && piece.state.outdated,
                         .is_due = sum_of_[b] >= 0};
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
    if (sum_of_[id] >= 0) return &program_.buckets[sum_of_[id]];
    for (const Bucket& bucket : program_.buckets)
      if (bucket.first_moment == id || bucket.second_moment == id || bucket.master == id || bucket.parameters == id)
        return &bucket;
    return nullptr;
  }

  void run_call(int c) {
    const Call& call = program_.calls[c];
    const Segment& segment = program_.segments[call.segment];
    const auto bound_as = [&](const char* name) {
      const auto at = std::ranges::find(segment.bindings, name);
      return at == segment.bindings.end() ? -1 : static_cast<int>(at - segment.bindings.begin());
    };
    gradients_ = bound_as(binding::gradients);
    const int parameters = bound_as(binding::parameters);
    block_ = gradients_ < 0 || parameters < 0 ? -1 : parameters_in_[call.buffers[parameters]];
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
    const std::vector<Sum> sums = sums_in(call, instruction);
    check_sums(call, c, i, instruction, sums);

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
    pass_sums(call, instruction, sums);
    if (instruction.kind == InstructionKind::copy || instruction.kind == InstructionKind::all_gather)
      if (const int of = parameters_in_[bound(call, instruction.operands.front())]; of >= 0)
        if (const int to = bound(call, instruction.operands.back()); !buffer(to).persistent) parameters_in_[to] = of;
    if (instruction.kind == InstructionKind::copy) move(call, instruction);
    if (is_host_update(instruction)) update(call, instruction);
  }

  void check_read(int id, int c, int i, const Instruction& instruction, const Piece& piece) {
    if (piece.state.is_due)
      fault(c, i,
            fmt::format("dropped write: {} reads {}, to which the step has not written sums that no backward has taken",
                        describe(instruction), bytes_of(id, piece)));
    if (!piece.state.outdated) return;
    const bool in_file = buffer(id).home == Home::nvme;
    fault(c, i,
          fmt::format("dropped {}: {} reads {}, which the host has updated and not {}", in_file ? "write" : "copy",
                      describe(instruction), bytes_of(id, piece), in_file ? "written to it" : "copied to the device"));
  }
  void check_written(int id, int c, int i, const Instruction& instruction, const Piece& piece) {
    if (sum_of_[id] >= 0 && !piece.state.is_due)
      fault(c, i,
            fmt::format("lost value: {} writes over {}, which call {} wrote and no backward has taken",
                        describe(instruction), bytes_of(id, piece), piece.state.writer));
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
        if (sum_of_[file] >= 0) return !buffer(to).persistent;
        return bucket->parameters == file ? !buffer(to).persistent : bucket->parameters == to && bucket->master == file;
      });
    check_origin(call, c, i, instruction, from, to, [&](int file) { return file == to; });
    if (!buffer(to).persistent || sum_of_[to] >= 0) return;
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
    const Operand& gradient = instruction.operands.front();
    int gradients = bound(call, gradient);
    for (const Piece& piece : bytes(call, gradient))
      if (const int file = piece.state.of_file; file >= 0 && sum_of_[file] >= 0) gradients = file;
    for (const Operand& operand : instruction.operands) {
      check_origin(call, c, i, instruction, operand, gradients, [&](int file) {
        const Bucket* const bucket = bucket_of(file);
        return bucket != nullptr && (bucket->gradients == gradients || bucket->host_gradients == gradients);
      });
      const int id = bound(call, operand);
      const auto owner = std::ranges::find_if(program_.buckets, [&](const Bucket& bucket) {
        return bucket.first_moment == id || bucket.second_moment == id || bucket.master == id ||
               bucket.host_parameters == id || bucket.parameters == id;
      });
      if (owner == program_.buckets.end() || owner->gradients == gradients || owner->host_gradients == gradients)
        continue;
      return fault(c, i,
                   fmt::format("wrong state: {} takes '{}' for '{}'", describe(instruction), buffer(id).name,
                               buffer(gradients).name));
    }
  }

  // Sums of gradients -----------------------------------------------------------------------------

  // Bytes [begin, end) of what an instruction reads.
  struct Sum {
    std::int64_t begin = 0, end = 0;
    int bucket = -1;
    std::optional<std::int64_t> further;  // InFlight::further
  };
  static bool takes_on(const Instruction& instruction) {
    return instruction.kind == InstructionKind::copy ||
           (instruction.kind == InstructionKind::kernel && instruction.op == OpKind::accumulate);
  }
  // What copies and additions take on to their last operand.
  std::vector<Sum> sums_in(const Call& call, const Instruction& instruction) {
    std::vector<Sum> sums;
    if (!takes_on(instruction)) return sums;
    const Operand& from = instruction.operands.front();
    const int of_file = sum_of_[bound(call, from)];
    for (const Piece& piece : bytes(call, from)) {
      if (of_file >= 0)
        sums.push_back({piece.begin, piece.end, of_file, 0});
      else if (piece.state.bucket >= 0)
        sums.push_back({piece.begin, piece.end, piece.state.bucket, piece.state.further});
    }
    return sums;
  }
  // A backward adds its own block's gradients to a sum, and a sum goes to its own file. The host
  // sums the squares of each once.
  void check_sums(const Call& call, int c, int i, const Instruction& instruction, const std::vector<Sum>& sums) {
    const auto wrong = [&](int id, const Piece& piece, int other) {
      fault(c, i,
            fmt::format("wrong sum: {} takes gradients of '{}' to {}, which has those of '{}'", describe(instruction),
                        program_.buckets[other].name, bytes_of(id, piece),
                        program_.buckets[piece.state.bucket >= 0 ? piece.state.bucket : sum_of_[id]].name));
    };
    for (const Operand& operand : instruction.operands) {
      const int id = bound(call, operand);
      if (operand.access == Access::read || buffer(id).persistent || block_ < 0 || operand.binding != gradients_)
        continue;
      for (const Piece& piece : bytes(call, operand))
        if (operand.access == Access::update && piece.state.bucket >= 0 && piece.state.bucket != block_)
          return wrong(id, piece, block_);
    }
    if (!sums.empty()) {
      const Operand& to = instruction.operands.back();
      const int id = bound(call, to);
      for (const Piece& piece : bytes(call, to)) {
        const int own = sum_of_[id] >= 0                       ? sum_of_[id]
                        : instruction.kind == InstructionKind::copy ? -1
                                                                    : piece.state.bucket;
        const std::int64_t moved = to.offset - instruction.operands.front().offset;
        for (const Sum& sum : sums) {
          if (own >= 0 && sum.bucket != own) return wrong(id, piece, sum.bucket);
          if (sum_of_[id] >= 0 && sum.further && *sum.further != moved)
            return fault(c, i,
                         fmt::format("wrong place: {} takes {} B of a sum to {}, {} B further than where it was read",
                                     describe(instruction), to.bytes, bytes_of(id, piece), moved - *sum.further));
        }
      }
    }
    if (instruction.kind != InstructionKind::kernel || instruction.op != OpKind::sum_squares) return;
    const Operand& squared = instruction.operands.front();
    for (const Piece& piece : bytes(call, squared)) {
      const int file = piece.state.of_file;
      if (file < 0 || sum_of_[file] < 0) continue;
      for (Piece& there : contents_[file].within(piece.begin + piece.state.shift, piece.end + piece.state.shift)) {
        if (there.state.is_counted)
          return fault(c, i,
                       fmt::format("summed twice: {} takes {}, whose squares the norm has", describe(instruction),
                                   bytes_of(file, there)));
        there.state.is_counted = true;
      }
    }
  }
  void pass_sums(const Call& call, const Instruction& instruction, const std::vector<Sum>& sums) {
    if (block_ >= 0)
      for (const Operand& operand : instruction.operands)
        if (operand.access != Access::read && operand.binding == gradients_ && !buffer(bound(call, operand)).persistent)
          for (Piece& piece : bytes(call, operand)) piece.state.bucket = block_;
    if (sums.empty()) return;
    const Operand &from = instruction.operands.front(), &to = instruction.operands.back();
    const int target = bound(call, to);
    if (buffer(target).persistent) return;
    const bool is_copy = instruction.kind == InstructionKind::copy;
    for (const Sum& sum : sums) {
      const std::int64_t moved = to.offset - from.offset;
      for (Piece& piece : contents_[target].within(is_copy ? sum.begin + moved : to.offset,
                                                   is_copy ? sum.end + moved : to.offset + to.bytes)) {
        piece.state.bucket = sum.bucket;
        if (is_copy && sum.further) piece.state.further = *sum.further - moved;
      }
    }
    // What goes on to the device is due again.
    if (!is_copy || instruction.stream != Stream::from_host) return;
    for (const Piece& piece : bytes(call, from)) {
      const int file = piece.state.of_file;
      if (file < 0 || sum_of_[file] < 0) continue;
      for (Piece& there : contents_[file].within(piece.begin + piece.state.shift, piece.end + piece.state.shift))
        there.state.is_due = true;
    }
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
  std::vector<int> sum_of_;         // per buffer: the bucket whose sum of gradients it has in a file, or -1
  std::vector<int> parameters_in_;  // per buffer: the bucket whose parameters it has, or -1
  int gradients_ = -1;              // of the call that runs: the binding to which a backward adds,
  int block_ = -1;                  // and the bucket whose parameters it reads
  std::vector<char> is_on_way_;                // per buffer: to or from a file, or in one until the step has read it
};

}  // namespace

void find_file_faults(const Program& program, std::vector<Fault>& faults) {
  if (program.arena_bytes.nvme > 0) FileCheck(program, faults).run();
}

}  // namespace parplan
