#include "planner/program/events.h"

#include <algorithm>
#include <array>
#include <bit>
#include <span>

namespace parplan {
namespace {

// Per stream, one past the last item (instruction or call) known to be complete; 0: none.
using Clock = std::array<int, stream_count>;

void merge(Clock& into, const Clock& other) {
  for (std::size_t s = 0; s < stream_count; ++s) into[s] = std::max(into[s], other[s]);
}

bool conflict(const Operand& a, const Operand& b) {
  return a.binding == b.binding && (a.access != Access::read || b.access != Access::read) &&
         a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
}

bool conflict(const Instruction& a, const Instruction& b) {
  for (const Operand& x : a.operands)
    for (const Operand& y : b.operands)
      if (conflict(x, y)) return true;
  return false;
}

}  // namespace

void order_instructions(Segment& segment) {
  std::array<Clock, stream_count> streams{};
  std::vector<Clock> completed(segment.instructions.size());
  for (int i = 0; i < static_cast<int>(segment.instructions.size()); ++i) {
    Instruction& current = segment.instructions[i];
    Clock& clock = streams[index_of(current.stream)];
    for (int j = i - 1; j >= 0; --j) {
      Instruction& earlier = segment.instructions[j];
      if (earlier.stream == current.stream || clock[index_of(earlier.stream)] > j || !conflict(earlier, current))
        continue;
      if (!earlier.records) earlier.records = segment.events++;
      current.waits.push_back(*earlier.records);
      merge(clock, completed[j]);
    }
    clock[index_of(current.stream)] = i + 1;
    completed[i] = clock;
  }
}

void order_calls(Program& program) {
  // The use that a Segment makes of each of its bindings.
  struct Use {
    bool reads = false;
    bool writes = false;
  };
  std::vector<std::vector<Use>> uses;
  for (const Segment& segment : program.segments) {
    std::vector<Use> of_segment(segment.bindings.size());
    for (const Instruction& instruction : segment.instructions)
      for (const Operand& operand : instruction.operands) {
        Use& use = of_segment[operand.binding];
        use.reads |= operand.access != Access::write;
        use.writes |= operand.access != Access::read;
      }
    uses.push_back(std::move(of_segment));
  }

  struct History {
    int writer = 0;     // one past the last; 0: none
    unsigned read = 0;  // the streams that have read since, a bit each
    std::array<int, stream_count> readers;  // of these: one past the last
  };
  std::vector<History> histories(program.buffers.size());
  std::array<Clock, stream_count> streams{};
  std::vector<Clock> completed(program.calls.size());
  std::vector<Stream> stream_of;  // by call
  stream_of.reserve(program.calls.size());
  for (const Call& call : program.calls) stream_of.push_back(program.segments[call.segment].stream);

  for (int i = 0; i < static_cast<int>(program.calls.size()); ++i) {
    Call& call = program.calls[i];
    const Stream stream = stream_of[i];
    Clock& clock = streams[index_of(stream)];
    const auto wait_for = [&](int end) {
      const int earlier = end - 1;
      if (end == 0 || stream_of[earlier] == stream || clock[index_of(stream_of[earlier])] >= end) return;
      Call& other = program.calls[earlier];
      if (!other.records) other.records = program.events++;
      call.waits.push_back(*other.records);
      merge(clock, completed[earlier]);
    };
    const std::vector<Use>& of_segment = uses[call.segment];
    // Later items first: their clocks may cover earlier ones.
    for (std::size_t b = 0; b < of_segment.size(); ++b) {
      const History& history = histories[call.buffers[b]];
      if (of_segment[b].writes && history.read != 0) {
        std::array<int, stream_count> readers{};
        std::size_t count = 0;
        for (unsigned read = history.read; read != 0; read &= read - 1) {
          const int reader = history.readers[static_cast<std::size_t>(std::countr_zero(read))];
          std::size_t at = count++;
          for (; at > 0 && readers[at - 1] < reader; --at) readers[at] = readers[at - 1];
          readers[at] = reader;
        }
        for (const int reader : std::span(readers).first(count)) wait_for(reader);
      }
      wait_for(history.writer);
    }
    clock[index_of(stream)] = i + 1;
    completed[i] = clock;
    for (std::size_t b = 0; b < of_segment.size(); ++b) {
      History& history = histories[call.buffers[b]];
      if (of_segment[b].writes) {
        history.writer = i + 1;
        history.read = 0;
      } else if (of_segment[b].reads) {
        history.readers[index_of(stream)] = i + 1;
        history.read |= 1u << index_of(stream);
      }
    }
  }
}

}  // namespace parplan
