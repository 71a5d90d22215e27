#include "planner/simulator/play_list.h"

#include <algorithm>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

// Whether two tasks do the same, the second one `period` micro-batches later.
bool repeats(const PlayList& list, const Task& one, const Task& other, int period) {
  if (!one.action || !other.action) return false;
  if (one.action->stage != other.action->stage || one.action->phase != other.action->phase ||
      one.action->micro_batch + period != other.action->micro_batch ||
      one.last_call - one.first_call != other.last_call - other.first_call)
    return false;
  const int apart = other.first_call - one.first_call;
  for (int c = one.first_call; c < one.last_call; ++c) {
    const PlayList::Call &a = list.calls[c], &b = list.calls[c + apart];
    if (a.segment != b.segment) return false;
    const auto equally_far = [&](int of_a, int of_b) { return of_a + apart == of_b; };
    if (!std::ranges::equal(list.waits_of(a), list.waits_of(b), equally_far)) return false;
  }
  return true;
}

// Copies calls [first, end), `later` calls later, with waits that reach equally far back.
void append_calls(PlayList& to, const PlayList& from, int first, int end, int later) {
  for (int c = first; c < end; ++c) {
    PlayList::Call call = from.calls[c];
    call.first_wait = static_cast<int>(to.waits.size());
    for (const int wait : from.waits_of(from.calls[c])) to.waits.push_back(wait + later);
    call.end_wait = static_cast<int>(to.waits.size());
    to.calls.push_back(call);
  }
}

void append_task(PlayList& to, Task task, int calls_later, int micro_batches_later) {
  task.first_call += calls_later;
  task.last_call += calls_later;
  if (task.action) task.action->micro_batch += micro_batches_later;
  to.tasks.push_back(task);
}

}  // namespace

PlayList play_list(const Program& program) {
  PlayList list{.calls = {}, .waits = {}, .tasks = program.tasks, .sent = program.communication};
  std::vector<std::optional<int>> recorder(static_cast<std::size_t>(program.events));
  list.calls.reserve(program.calls.size());
  for (std::size_t c = 0; c < program.calls.size(); ++c) {
    const Call& call = program.calls[c];
    const int first = static_cast<int>(list.waits.size());
    for (const int event : call.waits) {
      PARPLAN_ASSERT(recorder[event].has_value(),
                     fmt::format("rank {}: call {} waits for event {}, which no earlier call records",
                                 program.pipeline_rank, c, event));
      list.waits.push_back(*recorder[event]);
    }
    if (call.records) recorder[*call.records] = static_cast<int>(c);
    const int end = static_cast<int>(list.waits.size());
    list.calls.push_back({.segment = call.segment, .first_wait = first, .end_wait = end});
  }
  return list;
}

std::optional<Repeat> find_repeat(const PlayList& list, int period) {
  std::set<std::pair<int, Phase>> kinds;
  for (const Task& task : list.tasks)
    if (task.action) kinds.insert({task.action->stage, task.action->phase});
  const int tasks = static_cast<int>(list.tasks.size()), length = period * static_cast<int>(kinds.size());
  if (length == 0) return std::nullopt;
  int first = 0, end = 0;  // tasks that are repeated by the one `length` later: the longest run
  for (int begin = 0, t = 0; t + length <= tasks; ++t) {
    if (t + length < tasks && repeats(list, list.tasks[t], list.tasks[t + length], period)) continue;
    if (t - begin > end - first) first = begin, end = t;
    begin = t + 1;
  }
  // A period of an interleaved schedule has every action of some groups of micro-batches, so that
  // buffers that took turns differently would show within one. A period of a few actions may repeat
  // itself by chance where the pipeline fills: it is held to more.
  constexpr int enough = 48;  // tasks
  if (end - first < std::clamp(enough, length, 3 * length)) return std::nullopt;
  const Repeat repeat{.period = period, .begin_task = first, .first_task = end, .end_task = end + length};
  const int reach = list.tasks[first].first_call;
  for (int c = list.tasks[repeat.first_task].first_call; c < static_cast<int>(list.calls.size()); ++c)
    for (const int wait : list.waits_of(list.calls[c]))
      if (wait < reach) return std::nullopt;
  return repeat;
}

PlayList extended(const PlayList& list, const Repeat& repeat, int times,
                  std::span<const CommunicationVolume> sent_by_segment) {
  const int first = list.tasks[repeat.first_task].first_call, end = list.tasks[repeat.end_task - 1].last_call;
  const int calls = end - first, all = static_cast<int>(list.calls.size());
  PlayList longer;
  longer.sent = list.sent;
  longer.calls.reserve(list.calls.size() + static_cast<std::size_t>(calls) * static_cast<std::size_t>(times));
  append_calls(longer, list, 0, end, 0);
  for (int n = 1; n <= times; ++n) append_calls(longer, list, first, end, n * calls);
  append_calls(longer, list, end, all, times * calls);
  for (int t = 0; t < repeat.end_task; ++t) append_task(longer, list.tasks[t], 0, 0);
  for (int n = 1; n <= times; ++n)
    for (int t = repeat.first_task; t < repeat.end_task; ++t)
      append_task(longer, list.tasks[t], n * calls, n * repeat.period);
  for (int t = repeat.end_task; t < static_cast<int>(list.tasks.size()); ++t)
    append_task(longer, list.tasks[t], times * calls, times * repeat.period);
  CommunicationVolume of_middle;
  for (int c = first; c < end; ++c) of_middle += sent_by_segment[list.calls[c].segment];
  for (const Axis axis : all_axes) longer.sent[axis] += of_middle[axis] * times;
  return longer;
}

}  // namespace parplan
