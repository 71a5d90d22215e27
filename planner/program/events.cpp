#include "planner/program/events.h"

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <span>
#include <utility>
#include <vector>

namespace parplan {
namespace {

// Per stream, one past the last item (instruction or call) known to be complete; 0: none.
using Clock = std::array<int, stream_count>;

void merge(Clock& into, const Clock& other) {
  for (std::size_t s = 0; s < stream_count; ++s) into[s] = std::max(into[s], other[s]);
}

bool conflict(const Operand& a, const Operand& b) {
  return (a.access != Access::read || b.access != Access::read) && a.offset < b.offset + b.bytes &&
         b.offset < a.offset + a.bytes;
}

// An operand, in the list of those with its binding and stream, the last one first.
struct Use {
  int instruction = 0;
  const Operand* operand = nullptr;
  int before = -1;  // the place of the next one in the list; -1: none
};

}  // namespace

void order_instructions(Segment& segment) {
  std::array<Clock, stream_count> streams{};
  std::vector<Clock> completed(segment.instructions.size());
  std::vector<Use> uses;
  std::vector<std::array<int, stream_count>> last(segment.bindings.size());  // in `uses`, by binding and stream
  for (auto& of_binding : last) of_binding.fill(-1);
  std::vector<int> conflicting;  // earlier instructions of other streams
  for (int i = 0; i < static_cast<int>(segment.instructions.size()); ++i) {
    Instruction& current = segment.instructions[i];
    const std::size_t own = index_of(current.stream);
    Clock& clock = streams[own];
    conflicting.clear();
    for (const Operand& operand : current.operands)
      for (std::size_t stream = 0; stream < stream_count; ++stream) {
        if (stream == own) continue;
        for (int at = last[operand.binding][stream]; at >= 0; at = uses[at].before) {
          if (uses[at].instruction < clock[stream]) break;
          if (conflict(*uses[at].operand, operand)) conflicting.push_back(uses[at].instruction);
        }
      }
    // Later ones first: their clocks may cover earlier ones.
    std::ranges::sort(conflicting, std::greater<>());
    for (const int j : conflicting) {
      Instruction& earlier = segment.instructions[j];
      if (clock[index_of(earlier.stream)] > j) continue;
      if (!earlier.records) earlier.records = segment.events++;
      current.waits.push_back(*earlier.records);
      merge(clock, completed[j]);
    }
    clock[own] = i + 1;
    completed[i] = clock;
    for (const Operand& operand : current.operands) {
      int& place = last[operand.binding][own];
      uses.push_back(
          {.instruction = i, .operand = &operand, .before = std::exchange(place, static_cast<int>(uses.size()))});
    }
  }
}

void order_calls(Program& program) {
  // What a Segment does with each of its bindings.
  struct BindingUse {
    bool reads = false;
    bool writes = false;
  };
  std::vector<std::vector<BindingUse>> uses;
  for (const Segment& segment : program.segments) {
    std::vector<BindingUse> of_segment(segment.bindings.size());
    for (const Instruction& instruction : segment.instructions)
      for (const Operand& operand : instruction.operands) {
        BindingUse& use = of_segment[operand.binding];
        use.reads |= operand.access != Access::write;
        use.writes |= operand.access != Access::read;
      }
    uses.push_back(std::move(of_segment));
  }

  struct History {
    int writer = 0;                         // one past the last; 0: none
    unsigned read = 0;                      // the streams that have read since, a bit each
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
    const std::vector<BindingUse>& of_segment = uses[call.segment];
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
