#include "planner/program/events.h"

#include <algorithm>
#include <array>
#include <random>
#include <vector>

#include <doctest/doctest.h>

namespace parplan {
namespace {

bool touch(const Operand& a, const Operand& b) {
  return a.binding == b.binding && (a.access != Access::read || b.access != Access::read) &&
         a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
}

bool touch(const Instruction& a, const Instruction& b) {
  return std::ranges::any_of(a.operands, [&](const Operand& x) {
    return std::ranges::any_of(b.operands, [&](const Operand& y) { return touch(x, y); });
  });
}

// Whether each instruction surely runs after each earlier one: behind it on its stream, or behind
// an event that was recorded after it.
std::vector<std::vector<bool>> order_of(const std::vector<Instruction>& instructions) {
  const std::size_t count = instructions.size();
  std::vector<std::vector<bool>> after(count, std::vector<bool>(count, false));
  for (std::size_t i = 0; i < count; ++i)
    for (std::size_t j = 0; j < i; ++j) {
      const Instruction &later = instructions[i], &earlier = instructions[j];
      const bool waits = earlier.records && std::ranges::find(later.waits, *earlier.records) != later.waits.end();
      if (later.stream != earlier.stream && !waits) continue;
      after[i][j] = true;
      for (std::size_t k = 0; k < j; ++k) after[i][k] = after[i][k] || after[j][k];
    }
  return after;
}

}  // namespace

TEST_CASE("conflicting instructions of different streams are ordered by events, and by no event too many") {
  std::mt19937 random(20261125);
  int waits = 0;
  for (int trial = 0; trial < 200; ++trial) {
    Segment segment;
    segment.bindings.resize(1 + random() % 4);
    for (int i = 0; i < 40; ++i) {
      Instruction& one = segment.instructions.emplace_back();
      one.stream = std::array{Stream::compute, Stream::compute, Stream::tp, Stream::dp}[random() % 4];
      for (unsigned operands = 1 + random() % 3; operands > 0; --operands)
        one.operands.push_back({.binding = static_cast<int>(random() % segment.bindings.size()),
                                .offset = static_cast<std::int64_t>(random() % 64),
                                .bytes = 1 + static_cast<std::int64_t>(random() % 16),
                                .access = random() % 2 ? Access::read : Access::write});
    }
    order_instructions(segment);
    const std::vector<Instruction>& all = segment.instructions;
    const std::vector<std::vector<bool>> after = order_of(all);
    for (std::size_t i = 0; i < all.size(); ++i)
      for (std::size_t j = 0; j < i; ++j)
        if (touch(all[i], all[j])) CHECK(after[i][j]);
    // Without any one wait, two that touch would not be in order.
    for (std::size_t i = 0; i < all.size(); ++i)
      for (const int event : all[i].waits) {
        ++waits;
        std::vector<Instruction> fewer = all;
        fewer[i].waits.erase(std::ranges::remove(fewer[i].waits, event).begin(), fewer[i].waits.end());
        const std::vector<std::vector<bool>> without = order_of(fewer);
        bool matters = false;
        for (std::size_t j = 0; j < i; ++j) matters = matters || (touch(all[i], all[j]) && !without[i][j]);
        CHECK(matters);
      }
  }
  CHECK(waits > 1000);
}

}  // namespace parplan
