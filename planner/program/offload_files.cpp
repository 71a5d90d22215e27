#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "planner/program/lowering_state.h"

// When the device's next blocks need what is in a file, it is read ahead: passes add each read
// right before the copy that takes it on, and it is moved here to where it may be at the earliest,
// behind the call that leaves its buffer on the host free, and behind the one that writes what it
// reads. So as many reads are ahead as there are such buffers, over the ends of actions and of
// micro-batches (in DeepSpeed runtime/swap_tensor/partitioned_param_swapper.py, with prefetches by
// runtime/zero/partitioned_param_coordinator.py).
namespace parplan {

void note_use(Lowering& lowering, int buffer) {
  lowering.last_use[buffer] = lowering.next_call() - 1;
}

void may_be_early(Lowering& lowering, int file, int on_host) {
  // What nothing of the step has used is there from its beginning on.
  const auto end = [&](int buffer) {
    const auto last = lowering.last_use.find(buffer);
    return last == lowering.last_use.end() ? lowering.program.tasks.front().last_call : last->second + 1;
  };
  lowering.early_reads.push_back({.call = lowering.next_call() - 1, .before = std::max(end(file), end(on_host))});
}

void may_follow_early(Lowering& lowering) {
  int before = lowering.program.tasks.front().last_call;
  for (const Lowering::EarlyRead& read : lowering.early_reads) before = std::max(before, read.before);
  lowering.early_reads.push_back({.call = lowering.next_call() - 1, .before = before});
}

void read_ahead(Lowering& lowering) {
  if (lowering.early_reads.empty()) return;
  Program& program = lowering.program;
  std::vector<Call> calls = std::exchange(program.calls, {});
  std::vector<std::vector<int>> before(calls.size());
  std::vector<char> is_early(calls.size(), false);
  for (const Lowering::EarlyRead& read : lowering.early_reads) {
    before[static_cast<std::size_t>(read.before)].push_back(read.call);
    is_early[static_cast<std::size_t>(read.call)] = true;
  }
  program.calls.reserve(calls.size());
  std::vector<int> begins;  // of each call among those that are moved
  begins.reserve(calls.size() + 1);
  // A read is of the task whose calls are before it.
  for (std::size_t c = 0; c < calls.size(); ++c) {
    for (const int read : before[c]) program.calls.push_back(std::move(calls[static_cast<std::size_t>(read)]));
    begins.push_back(static_cast<int>(program.calls.size()));
    if (is_early[c] == 0) program.calls.push_back(std::move(calls[c]));
  }
  begins.push_back(static_cast<int>(program.calls.size()));
  for (Task& task : program.tasks) {
    task.first_call = begins[static_cast<std::size_t>(task.first_call)];
    task.last_call = begins[static_cast<std::size_t>(task.last_call)];
  }
  program.tasks.front().first_call = 0;
}

}  // namespace parplan
