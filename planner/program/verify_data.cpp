#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "planner/graph/dynamic_quantization.h"
#include "planner/program/verify_intervals.h"
#include "planner/program/verify_passes.h"

namespace parplan {
namespace {


// For each stream, how many of its instructions are known to be complete: a vector clock.
using Clock = std::array<int, stream_count>;

void merge(Clock& into, const Clock& other) {
  for (std::size_t s = 0; s < stream_count; ++s) into[s] = std::max(into[s], other[s]);
}

// An instruction that touched some bytes: the `sequence`-th of its stream, from 1; 0 if there is
// none.
struct Touch {
  int sequence = 0;
  int call = 0;
  int instruction = 0;
};

enum class Content { undefined, freed, scattered, defined };

// What is known about some bytes of a buffer.
struct State {
  Content content = Content::undefined;
  bool partial = false;  // a gradient, or a sum that contains it, still to be summed over the data axis
  bool across = false;   // hybrid sharding: the same, summed over a shard group, but not over its replicas
  bool reduced = false;  // holds a gradient that was summed over all of it
  bool directed = false;   // what Muon's momentum has left in the place of a gradient
  bool scattered = false;  // this rank's part of a sum over the data axis
  bool of_copies = false;  // a gradient that was, last, summed over the ranks that hold copies of its rows
  bool stale = false;    // parameters that another rank has updated since
  bool outdated = false;  // parameters that this rank's host has updated since
  bool unread = false;   // written, and not read since
  bool uncopied = false;  // a sum of gradients that is on its way to the host, and not there yet
  int freed_by = 0;       // call, where it is freed
  Stream writer_stream{};
  Touch writer;
  std::array<Touch, stream_count> readers;  // last since the last write, per stream
};
using Interval = Intervals<State>::Interval;

// The part of [begin, end) that a mark covers, relative to begin.
struct Mark {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool partial = false;
  bool across = false;
  bool reduced = false;
  bool of_copies = false;
};

// Plays one rank's calls in launch order, two steps long: the second finds what the first leaves in
// persistent buffers.
class DataCheck {
 public:
  DataCheck(const Program& program, std::vector<Fault>& faults)
      : program_(program), faults_(faults), most_(faults.size() + most_faults) {
    for (const Buffer& buffer : program.buffers) contents_.emplace_back(buffer.bytes);
    for (const Segment& segment : program.segments) {
      std::vector<std::vector<OperandSource>>& of_segment = sources_.emplace_back();
      for (const Instruction& instruction : segment.instructions)
        of_segment.push_back(instruction.kind == InstructionKind::kernel ? *operand_sources(instruction)
                                                                         : std::vector<OperandSource>{});
    }
    is_sent_.assign(program.buffers.size(), false);
    for (const Bucket& bucket : program.buckets)
      if (is_updated_elsewhere(bucket))
        for (const std::optional<int> gradients : {bucket.gradients, bucket.second_gradients})
          if (gradients) is_sent_[*gradients] = true;
    find_sums_elsewhere();
    in_first_part_.assign(program.calls.size(), false);
    for (const Task& task : program.tasks)
      for (int c = task.first_call; c < task.last_call; ++c)
        in_first_part_[c] = task.action && task.action->phase == Phase::backward_inputs;
    for (std::size_t b = 0; b < program.buffers.size(); ++b)
      if (program.buffers[b].persistent)
        for (Interval& interval : contents_[b].all()) interval.state.content = Content::defined;
  }

  void run() {
    const std::size_t before = faults_.size();
    for (int step = 0; step < 2 && faults_.size() == before; ++step) {
      begin_step();
      for (std::size_t c = 0; c < program_.calls.size(); ++c) run_call(static_cast<int>(c));
      check_left();
    }
  }

 private:
  enum class Rule { order, definition, reduction };

  // One fault per rule for each instruction of each segment: its other calls would repeat it.
  void fault(Rule rule, int call, std::optional<int> instruction, const std::string& what) {
    const int segment = program_.calls[call].segment;
    if (faults_.size() < most_ && known_.insert({rule, {segment, instruction}}).second)
      faults_.push_back({program_.rank, call, instruction, what});
  }

  bool several_data_ranks() const { return program_.group(all_along(Axis::dp)).size() > 1; }
  bool over_data(const Instruction& instruction) const {
    return several_data_ranks() && program_.group(instruction.group) == program_.group(all_along(Axis::dp));
  }
  // Hybrid sharding: over the ranks that share out a bucket, or over those with the same shard.
  bool over_members(const Instruction& instruction, Members members) const {
    const std::vector<int>& ranks = program_.group({Axis::dp, members});
    return ranks.size() > 1 && program_.group(instruction.group) == ranks;
  }
  bool sums_gradients(const Instruction& instruction) const {
    return over_data(instruction) || over_members(instruction, Members::shard) ||
           over_members(instruction, Members::replicas);
  }
  const Buffer& buffer(int id) const { return program_.buffers[id]; }

  // Which buffers hold sums of gradients on the host or in a file, and which take turns for them on
  // the device: what is copied to the former comes from the latter, to a file by way of the host.
  void find_sums_elsewhere() {
    is_sum_.assign(program_.buffers.size(), false);
    is_staged_ = is_sum_;
    std::vector<char> is_on_way = is_sum_;
    std::vector<std::optional<int>> bucket_of(program_.buffers.size());  // of a sum; then, of a buffer in turn
    for (std::size_t b = 0; b < program_.buckets.size(); ++b)
      if (const std::optional<int> gradients = program_.buckets[b].gradients)
        if (buffer(*gradients).home != Home::device) {
          is_sum_[*gradients] = true;
          bucket_of[*gradients] = static_cast<int>(b);
        }
    find_reads_by_host(bucket_of);
    for (std::size_t c = program_.calls.size(); c-- > 0;) {
      const Call& call = program_.calls[c];
      bool sums_copies = false;
      for (const Instruction& instruction : program_.segments[call.segment].instructions) {
        sums_copies = sums_copies || (instruction.kind == InstructionKind::all_reduce_sum &&
                                      instruction.group.members == Members::copies);
        if (instruction.kind != InstructionKind::copy) continue;
        const int from = bound(call, instruction.operands.front()), to = bound(call, instruction.operands.back());
        if (is_sum_[to] == 0 && is_on_way[to] == 0) continue;
        (instruction.stream == Stream::to_nvme ? is_on_way : is_staged_)[from] = true;
        bucket_of[from] = bucket_of[to];
        if (instruction.stream == Stream::to_host) sum_in_[{static_cast<int>(c), to}] = *bucket_of[to];
      }
      if (!sums_copies) continue;
      for (const int id : call.buffers)
        if (is_staged_[id] != 0) sum_in_[{static_cast<int>(c), id}] = *bucket_of[id];
    }
  }
  // Which calls of the host take sums that were read for them from a file. `bucket_of`: of a sum.
  void find_reads_by_host(std::vector<std::optional<int>> bucket_of) {
    for (std::size_t c = 0; c < program_.calls.size(); ++c) {
      const Call& call = program_.calls[c];
      for (const Instruction& instruction : program_.segments[call.segment].instructions) {
        if (instruction.kind == InstructionKind::copy && instruction.stream == Stream::from_nvme)
          bucket_of[bound(call, instruction.operands.back())] = bucket_of[bound(call, instruction.operands.front())];
        if (instruction.kind != InstructionKind::kernel || instruction.home != Home::host) continue;
        const int id = bound(call, instruction.operands.front());
        if (is_sum_[id] == 0 && bucket_of[id]) sum_in_[{static_cast<int>(c), id}] = *bucket_of[id];
      }
    }
  }
  std::string bytes_of(int id, std::int64_t begin, std::int64_t end) const {
    return fmt::format("bytes [{}, {}) of '{}'", begin, end, buffer(id).name);
  }

  void begin_step() {
    for (std::size_t b = 0; b < contents_.size(); ++b)
      for (Interval& interval : contents_[b].all()) {
        State fresh;
        if (program_.buffers[b].persistent) {
          fresh.content = interval.state.content;
          fresh.partial = interval.state.partial;
          fresh.across = interval.state.across;
          fresh.reduced = interval.state.reduced;
          fresh.stale = interval.state.stale;
          fresh.outdated = interval.state.outdated;
        }
        interval.state = fresh;
      }
    // What a master has updated since, and the step's gradients that it still has to take.
    for (const Bucket& bucket : program_.buckets)
      if (is_updated_elsewhere(bucket) && is_later_step_)
        for (Interval& interval : contents_[bucket.parameters].all()) interval.state.stale = true;
    is_later_step_ = true;
    for (Clock& clock : clocks_) clock.fill(0);
    recorded_.assign(static_cast<std::size_t>(program_.events), {});
  }

  void run_call(int c) {
    const Call& call = program_.calls[c];
    const Segment& segment = program_.segments[call.segment];
    Clock& main = clocks_[index_of(segment.stream)];
    for (int event : call.waits) merge(main, recorded_[event]);
    std::array<bool, stream_count> side{};
    for (const Instruction& instruction : segment.instructions) side[index_of(instruction.stream)] = true;
    side[index_of(segment.stream)] = false;
    for (std::size_t s = 0; s < stream_count; ++s)
      if (side[s]) merge(clocks_[s], main);

    std::vector<Clock> events(static_cast<std::size_t>(segment.events));
    for (std::size_t i = 0; i < segment.instructions.size(); ++i) {
      const Instruction& instruction = segment.instructions[i];
      Clock& clock = clocks_[index_of(instruction.stream)];
      for (int event : instruction.waits) merge(clock, events[event]);
      run_instruction(call, c, static_cast<int>(i), instruction, clock);
      if (instruction.records) events[*instruction.records] = clock;
    }

    for (std::size_t s = 0; s < stream_count; ++s)
      if (side[s]) merge(main, clocks_[s]);
    if (call.records) recorded_[*call.records] = main;
    for (int id : call.frees) {
      if (buffer(id).persistent) {
        fault(Rule::definition, c, {}, fmt::format("frees '{}', which keeps its value between steps", buffer(id).name));
        continue;
      }
      for (Interval& interval : contents_[id].all()) {
        if (interval.state.uncopied)
          fault(Rule::reduction, c, {},
                fmt::format("dropped copy: frees sums of gradients in {}, which nothing has copied to the host",
                            bytes_of(id, interval.begin, interval.end)));
        interval.state.uncopied = false;
        if (is_unread_sum(interval.state))
          fault(Rule::reduction, c, {},
                fmt::format("dropped sum: frees gradients in {}, which reduce_scatter of call {} has summed and "
                            "nothing has read",
                            bytes_of(id, interval.begin, interval.end), interval.state.writer.call));
        interval.state.content = Content::freed;
        interval.state.freed_by = c;
        State& freed = interval.state;
        freed.partial = freed.across = freed.reduced = freed.stale = freed.outdated = false;
      }
    }
  }

  // Gradients that were summed to be added to a shard.
  bool is_unread_sum(const State& state) const {
    if ((!state.reduced && !state.across) || state.content != Content::defined || state.writer.sequence == 0)
      return false;
    const Segment& segment = program_.segments[program_.calls[state.writer.call].segment];
    return segment.instructions[state.writer.instruction].kind == InstructionKind::reduce_scatter &&
           std::ranges::all_of(state.readers, [](const Touch& reader) { return reader.sequence == 0; });
  }

  int bound(const Call& call, const Operand& operand) const { return call.buffers[operand.binding]; }
  std::span<Interval> bytes(const Call& call, const Operand& operand) {
    return contents_[bound(call, operand)].within(operand.offset, operand.offset + operand.bytes);
  }

  void run_instruction(const Call& call, int c, int i, const Instruction& instruction, Clock& clock) {
    const std::vector<OperandSource>& sources = sources_[call.segment][i];
    const bool optimizer = is_optimizer(instruction);
    for (std::size_t o = 0; o < instruction.operands.size(); ++o) {
      const Operand& operand = instruction.operands[o];
      const bool workspace = !sources.empty() && sources[o] == OperandSource::workspace;
      for (const Interval& interval : bytes(call, operand)) {
        check_order(call, c, i, instruction, operand, interval, clock);
        if (operand.access != Access::write && !workspace) check_content(call, c, i, instruction, operand, interval);
        if (operand.access == Access::write) check_lost(call, c, i, instruction, operand, interval);
      }
    }
    check_reductions(call, c, i, instruction);
    if (optimizer && instruction.op == OpKind::adamw_8bit) check_blocks(call, c, i, instruction);
    check_norm(call, c, i, instruction);
    check_directions(call, c, i, instruction);
    check_places(call, c, i, instruction);

    const bool gathers = gathers_directions(call, instruction);
    const std::vector<std::vector<Mark>> before = marks(call, instruction);
    const Touch touch{++clock[index_of(instruction.stream)], c, i};
    for (const Operand& operand : instruction.operands)
      if (operand.access == Access::read)
        for (Interval& interval : bytes(call, operand)) {
          interval.state.readers[index_of(instruction.stream)] = touch;
          interval.state.unread = false;
        }
    for (std::size_t o = 0; o < instruction.operands.size(); ++o) {
      const Operand& operand = instruction.operands[o];
      if (operand.access == Access::read) continue;
      const bool gradient = !sources.empty() && sources[o] == OperandSource::parameter_gradient && several_data_ranks();
      for (Interval& interval : bytes(call, operand)) {
        State& state = interval.state;
        state.content = Content::defined;
        state.writer = touch;
        state.writer_stream = instruction.stream;
        state.readers.fill({});
        state.unread = operand.access == Access::write || bound(call, operand) == program_.host_norm_buffer;
        state.uncopied = is_staged_[bound(call, operand)] != 0 && instruction.kind != InstructionKind::copy;
        if (operand.access == Access::write)
          state.partial = state.across = state.reduced = state.stale = state.outdated = false;
        if (gradient) state.partial = true;
        state.of_copies = false;
        state.directed = o == 0 && makes_momentum(instruction);
        state.scattered = instruction.kind == InstructionKind::reduce_scatter && sums_gradients(instruction);
      }
    }
    if (gathers) {
      const Bucket& bucket = *bucket_of_directions(bound(call, instruction.operands.back()));
      for (Interval& interval : matrices_within(bucket, 0, bucket.without_second)) interval.state.directed = true;
    }
    if (instruction.kind == InstructionKind::all_reduce_sum) sum_copies(call, instruction);
    if (instruction.kind == InstructionKind::reduce_sum) take_gradients(call, instruction);
    pass_marks(call, instruction, before);
    if (optimizer) update_parameters(call, instruction);
    if (instruction.kind == InstructionKind::copy) {
      return_parameters(call, instruction);
      take_sums(call, instruction);
    }
  }

  static bool is_optimizer(const Instruction& instruction) {
    return instruction.kind == InstructionKind::kernel &&
           (instruction.op == OpKind::adamw || instruction.op == OpKind::adamw_8bit || instruction.op == OpKind::sgd ||
            instruction.op == OpKind::muon_momentum || instruction.op == OpKind::muon);
  }

  // Directions ------------------------------------------------------------------------------------

  static bool makes_momentum(const Instruction& instruction) {
    return instruction.kind == InstructionKind::kernel && instruction.op == OpKind::muon_momentum;
  }
  // The bucket whose matrices' gradients a buffer holds, if any.
  const Bucket* bucket_of_directions(int id) const {
    for (const Bucket& bucket : program_.buckets)
      if (bucket.without_second > 0 && bucket.gradients == id) return &bucket;
    return nullptr;
  }
  // A momentum is made of each gradient once, and what is orthogonalized is made of all of it: also
  // of what other ranks have of the matrix, where the data axis shards the momentum.
  void check_directions(const Call& call, int c, int i, const Instruction& instruction) {
    if (instruction.kind == InstructionKind::kernel && instruction.op == OpKind::muon) {
      const Operand& direction = instruction.operands.front();
      if (bucket_of_directions(bound(call, direction)) == nullptr) return;
      for (const Interval& interval : bytes(call, direction))
        if (!interval.state.scattered)
          return fault(
              Rule::reduction, c, i,
              fmt::format("dropped reduction: {} takes directions in {}, which the rank that found them has "
                          "not given to the data group ({})",
                          describe(instruction), bytes_of(bound(call, direction), interval.begin, interval.end),
                          list_ranks(program_.group(all_along(Axis::dp)))));
    }
    const bool makes = makes_momentum(instruction);
    const bool takes = (instruction.kind == InstructionKind::kernel && instruction.op == OpKind::normalize_matrix) ||
                       (instruction.kind == InstructionKind::all_gather && instruction.group.axis == Axis::tp);
    if (!makes && !takes) return;
    const Operand& gradient = instruction.operands.front();
    const Bucket* bucket = bucket_of_directions(bound(call, gradient));
    if (bucket == nullptr) return;
    for (const Interval& interval : bytes(call, gradient))
      if (interval.state.directed == makes)
        return fault(Rule::reduction, c, i,
                     fmt::format("{}: {} takes {} of '{}', of which {}", makes ? "momentum twice" : "dropped momentum",
                                 describe(instruction), bytes_of(bound(call, gradient), interval.begin, interval.end),
                                 bucket->name, makes ? "a momentum is made already" : "no rank's momentum is there"));
  }
  // Where the data axis gathers a bucket's gradients and this rank's shard has all directions of
  // its part, so have the others theirs.
  bool gathers_directions(const Call& call, const Instruction& instruction) {
    if (instruction.kind != InstructionKind::all_gather || instruction.group.axis != Axis::dp) return false;
    const int id = bound(call, instruction.operands.back());
    const Bucket* bucket = bucket_of_directions(id);
    return bucket != nullptr && bucket->shard_elements > 0 &&
           std::ranges::all_of(matrices_within(*bucket, begin_in_whole(*bucket),
                                               begin_in_whole(*bucket) + bucket->shard_elements),
                               [](const Interval& interval) { return interval.state.directed; });
  }
  std::span<Interval> matrices_within(const Bucket& bucket, std::int64_t begin, std::int64_t end) {
    constexpr std::int64_t element = size_of(DataType::fp32);
    return contents_[*bucket.gradients].within(begin * element, std::min(end, bucket.without_second) * element);
  }

  // Order -----------------------------------------------------------------------------------------

  void check_order(const Call& call, int c, int i, const Instruction& instruction, const Operand& operand,
                   const Interval& interval, const Clock& clock) {
    const auto check = [&](const Touch& touch, std::size_t stream, const char* did) {
      if (touch.sequence == 0 || stream == index_of(instruction.stream) || clock[stream] >= touch.sequence) return;
      const Call& earlier = program_.calls[touch.call];
      const Segment& segment = program_.segments[earlier.segment];
      const Instruction& other = segment.instructions[touch.instruction];
      const char* does = operand.access == Access::read    ? "reads"
                         : operand.access == Access::write ? "writes"
                                                           : "updates";
      fault(Rule::order, c, i,
            fmt::format(
                "missing event: {} on stream {} {} {} without waiting for {} of call {} on stream {}, which {} them",
                describe(instruction), name(instruction.stream), does,
                bytes_of(bound(call, operand), interval.begin, interval.end), describe(other), touch.call,
                name(other.stream), did));
    };
    check(interval.state.writer, index_of(interval.state.writer_stream), "writes");
    if (operand.access == Access::read) return;
    for (std::size_t s = 0; s < stream_count; ++s) check(interval.state.readers[s], s, "reads");
  }

  // Definition ------------------------------------------------------------------------------------

  void check_content(const Call& call, int c, int i, const Instruction& instruction, const Operand& operand,
                     const Interval& interval) {
    const State& state = interval.state;
    if (state.content == Content::defined) return;
    const std::string range = bytes_of(bound(call, operand), interval.begin, interval.end);
    if (state.content == Content::undefined) {
      fault(Rule::definition, c, i,
            fmt::format("use before definition: {} reads {}, which nothing has written", describe(instruction), range));
    } else if (state.content == Content::freed) {
      fault(Rule::definition, c, i,
            fmt::format("use after free: {} reads {}, which call {} freed", describe(instruction), range,
                        state.freed_by));
    } else {
      fault(Rule::definition, c, i,
            fmt::format("use before definition: {} reads {}, which reduce_scatter of call {} left to other ranks",
                        describe(instruction), range, state.writer.call));
    }
  }

  // Whether the instruction reads bytes of a buffer: a kernel may write a result over these.
  bool reads(const Call& call, const Instruction& instruction, int id, const Interval& interval) const {
    return std::ranges::any_of(instruction.operands, [&](const Operand& operand) {
      return operand.access == Access::read && bound(call, operand) == id && operand.offset <= interval.begin &&
             interval.end <= operand.offset + operand.bytes;
    });
  }

  // What the first part of a backward leaves in an activation buffer is for the second: a call that
  // writes over it comes too early, or the one that reads it is missing.
  bool is_lost(int id, const State& state) const {
    return state.unread && state.content == Content::defined && in_first_part_[state.writer.call] != 0 &&
           !buffer(id).persistent && buffer(id).category == MemoryCategory::activations;
  }
  void check_lost(const Call& call, int c, int i, const Instruction& instruction, const Operand& operand,
                  const Interval& interval) {
    const State& state = interval.state;
    const int id = bound(call, operand);
    if (state.partial && is_sent_[id] != 0)
      fault(Rule::reduction, c, i,
            fmt::format("dropped reduction: {} writes over gradients in {}, which the master has not taken",
                        describe(instruction), bytes_of(id, interval.begin, interval.end)));
    if (state.uncopied)
      fault(Rule::reduction, c, i,
            fmt::format("dropped copy: {} writes over sums of gradients in {}, which nothing has copied to the host",
                        describe(instruction), bytes_of(id, interval.begin, interval.end)));
    if (is_sum_[id] != 0 && state.unread && instruction.kind == InstructionKind::copy)
      fault(Rule::reduction, c, i,
            fmt::format("dropped copy: {} writes over sums of gradients in {}, to which no backward has added since "
                        "call {} wrote them",
                        describe(instruction), bytes_of(id, interval.begin, interval.end), state.writer.call));
    if (id == program_.host_norm_buffer && state.unread && state.writer_stream == Stream::host)
      fault(Rule::reduction, c, i,
            fmt::format("dropped copy: {} writes over the host's sum of squares, which is not on the device",
                        describe(instruction)));
    if (!is_lost(id, state) || state.writer.call == c || reads(call, instruction, id, interval)) return;
    fault(Rule::definition, c, i,
          fmt::format("lost value: {} writes {}, which call {} wrote and nothing has read", describe(instruction),
                      bytes_of(id, interval.begin, interval.end), state.writer.call));
  }
  void check_left() {
    for (std::size_t b = 0; b < contents_.size(); ++b)
      for (const Interval& interval : contents_[b].all())
        if (interval.state.uncopied)
          fault(Rule::reduction, interval.state.writer.call, interval.state.writer.instruction,
                fmt::format("dropped copy: nothing has copied sums of gradients in {} to the host",
                            bytes_of(static_cast<int>(b), interval.begin, interval.end)));
        else if (is_lost(static_cast<int>(b), interval.state))
          fault(Rule::definition, interval.state.writer.call, interval.state.writer.instruction,
                fmt::format("lost value: nothing reads {}, which call {} wrote",
                            bytes_of(static_cast<int>(b), interval.begin, interval.end), interval.state.writer.call));
  }

  // Reductions ------------------------------------------------------------------------------------

  void check_reductions(const Call& call, int c, int i, const Instruction& instruction) {
    const bool kernel = instruction.kind == InstructionKind::kernel;
    for (const Operand& operand : instruction.operands) {
      if (operand.access == Access::write) continue;
      for (const Interval& interval : bytes(call, operand)) {
        if (!interval.state.stale) continue;
        fault(Rule::reduction, c, i,
              fmt::format("dropped gather: {} reads {}, which other ranks of the data group ({}) have updated",
                          describe(instruction), bytes_of(bound(call, operand), interval.begin, interval.end),
                          list_ranks(program_.group(all_along(Axis::dp)))));
        break;
      }
    }
    for (const Operand& operand : instruction.operands) {
      if (operand.access == Access::write) continue;
      const std::span<Interval> read = bytes(call, operand);
      const auto outdated = std::ranges::find_if(read, [](const Interval& of) { return of.state.outdated; });
      if (outdated == read.end()) continue;
      fault(Rule::reduction, c, i,
            fmt::format("dropped copy: {} reads {}, which the host has updated and not copied to the device",
                        describe(instruction), bytes_of(bound(call, operand), outdated->begin, outdated->end)));
    }
    if (is_optimizer(instruction) || (kernel && instruction.op == OpKind::sum_squares)) {
      const Operand& gradient = instruction.operands.front();
      for (const Interval& interval : bytes(call, gradient)) {
        if (interval.state.across)
          return fault(Rule::reduction, c, i,
                       fmt::format("dropped reduction: {} reads gradients in {}, which are not yet summed over the "
                                   "replicas of the shard group ({})",
                                   describe(instruction), bytes_of(bound(call, gradient), interval.begin, interval.end),
                                   list_ranks(program_.group(shard_replicas))));
        if (interval.state.partial)
          return fault(
              Rule::reduction, c, i,
              fmt::format(
                  "dropped reduction: {} reads gradients in {}, which are not yet summed over the data group ({})",
                  describe(instruction), bytes_of(bound(call, gradient), interval.begin, interval.end),
                  list_ranks(program_.group(all_along(Axis::dp)))));
      }
    }
    check_copies(call, c, i, instruction);
    // A master adds to what it has, and its replicas send theirs once.
    const bool sends = instruction.kind == InstructionKind::reduce_sum &&
                       instruction.operands.front().access == Access::read;
    const bool sums = sends || instruction.kind == InstructionKind::all_reduce_sum ||
                      instruction.kind == InstructionKind::reduce_scatter;
    if (!sums || !sums_gradients(instruction)) return;
    const bool over_replicas = over_members(instruction, Members::replicas);
    for (const Interval& interval : bytes(call, instruction.operands.front()))
      if (interval.state.reduced || (interval.state.across && !over_replicas))
        return fault(Rule::reduction, c, i,
                     fmt::format("reduced twice: {} sums {} over the {} group ({}), where they were summed before",
                                 describe(instruction),
                                 bytes_of(bound(call, instruction.operands.front()), interval.begin, interval.end),
                                 name(instruction.group), list_ranks(program_.group(instruction.group))));
  }

  // Bytes of an operand that are gradients of rows of which so many ranks hold copies
  // (ParameterPart::copies).
  struct Copied {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    std::int64_t padded_end = 0;  // where the next parameter begins
    int copies = 1;
  };
  // The bucket whose sum of gradients a buffer in turn has in a call, as far as `sum_in_` says.
  std::optional<int> sum_in(const Call& call, int id) const {
    const auto found = sum_in_.find({static_cast<int>(&call - program_.calls.data()), id});
    return found == sum_in_.end() ? std::nullopt : std::optional(found->second);
  }
  std::vector<Copied> copied_in(const Call& call, const Operand& operand, std::int64_t element) const {
    std::vector<Copied> found;
    const int id = bound(call, operand);
    const std::optional<int> staged = sum_in(call, id);
    for (std::size_t p = 0; p < program_.parameters.size(); ++p) {
      const ParameterPart& part = program_.parameters[p];
      const Bucket& bucket = program_.buckets[part.bucket];
      const bool is_own = bucket.gradients == id || staged == part.bucket;
      if (part.copies == 1 || (!is_own && bucket.host_gradients != id)) continue;
      const bool is_last = p + 1 == program_.parameters.size() || program_.parameters[p + 1].bucket != part.bucket;
      const std::int64_t next = is_last ? bucket.elements : program_.parameters[p + 1].bucket_offset;
      const bool whole = is_own && buffer(*bucket.gradients).bytes >= bucket.elements * element;
      for (const auto& [range, begin] : held_ranges(bucket, whole)) {
        const auto at = [&, &held = range, first = begin](std::int64_t in_bucket) {
          const std::int64_t in_buffer = first + std::clamp(in_bucket, held.begin, held.end) - held.begin;
          return std::clamp(in_buffer * element, operand.offset, operand.offset + operand.bytes);
        };
        const Copied copied{.begin = at(part.bucket_offset),
                            .end = at(part.bucket_offset + part.rows * part.columns),
                            .padded_end = at(next),
                            .copies = part.copies};
        if (copied.begin < copied.padded_end) found.push_back(copied);
      }
    }
    std::ranges::sort(found, {}, &Copied::begin);
    return found;
  }

  void sum_copies(const Call& call, const Instruction& instruction) {
    const Operand& sum = instruction.operands.front();
    for (const Copied& copied : copied_in(call, sum, size_of(instruction.type)))
      if (program_.group(instruction.group) == program_.group(holders_of_copies(copied.copies)))
        for (Interval& interval : contents_[bound(call, sum)].within(copied.begin, copied.end))
          interval.state.of_copies = true;
  }

  // Gradients of rows of which several ranks hold copies are summed over these ranks once before
  // they are used, and no others are.
  void check_copies(const Call& call, int c, int i, const Instruction& instruction) {
    if (instruction.operands.empty()) return;
    const Operand& gradient = instruction.operands.front();
    const bool uses = is_optimizer(instruction) ||
                      (instruction.kind == InstructionKind::kernel && instruction.op == OpKind::sum_squares);
    if (uses && instruction.shape.rows > 0) {
      for (const Copied& copied : copied_in(call, gradient, gradient.bytes / instruction.shape.rows))
        for (const Interval& interval : contents_[bound(call, gradient)].within(copied.begin, copied.end))
          if (!interval.state.of_copies)
            return fault(
                Rule::reduction, c, i,
                fmt::format("dropped reduction: {} reads gradients in {}, which are not yet summed over the "
                            "ranks that hold copies of the same rows ({})",
                            describe(instruction), bytes_of(bound(call, gradient), interval.begin, interval.end),
                            list_ranks(program_.group(holders_of_copies(copied.copies)))));
      return;
    }
    if (instruction.kind != InstructionKind::all_reduce_sum || instruction.group.members != Members::copies) return;
    std::int64_t end = gradient.offset;
    for (const Copied& copied : copied_in(call, gradient, size_of(instruction.type))) {
      if (copied.begin > end) break;
      end = copied.padded_end;
      for (const Interval& interval : contents_[bound(call, gradient)].within(copied.begin, copied.end))
        if (interval.state.of_copies)
          return fault(Rule::reduction, c, i,
                       fmt::format("reduced twice: {} sums {} over the {} group ({}), where they were summed before",
                                   describe(instruction), bytes_of(bound(call, gradient), interval.begin, interval.end),
                                   name(instruction.group), list_ranks(program_.group(instruction.group))));
    }
    if (end < gradient.offset + gradient.bytes)
      fault(Rule::reduction, c, i,
            fmt::format("wrong reduction: {} sums {}, of which the ranks of the {} group ({}) hold no copies",
                        describe(instruction), bytes_of(bound(call, gradient), end, gradient.offset + gradient.bytes),
                        name(instruction.group), list_ranks(program_.group(instruction.group))));
  }

  // Updates by the host take the norm of all ranks, which comes back from the device.
  void check_norm(const Call& call, int c, int i, const Instruction& instruction) {
    if (!is_optimizer(instruction) || instruction.home != Home::host) return;
    for (const Operand& operand : instruction.operands)
      if (bound(call, operand) == program_.host_norm_buffer)
        for (const Interval& interval : bytes(call, operand))
          if (interval.state.writer_stream == Stream::host)
            return fault(Rule::reduction, c, i,
                         fmt::format("dropped copy: {} reads the host's own sum of squares, not that of all ranks",
                                     describe(instruction)));
  }

  // The master's sum is whole afterwards; what a replica has sent, it must not send again.
  void take_gradients(const Call& call, const Instruction& instruction) {
    if (!over_data(instruction)) return;
    for (Interval& interval : bytes(call, instruction.operands.front())) {
      interval.state.reduced |= interval.state.partial;
      interval.state.partial = false;
    }
  }

  // Whether the elements of the target are those of the source, or of sources alike, elsewhere.
  static bool is_permuted(const Instruction& instruction) {
    return instruction.kind == InstructionKind::all_to_all ||
           (instruction.kind == InstructionKind::kernel && instruction.op == OpKind::transpose_blocks);
  }

  // The marks of the data that an instruction reads, before it writes.
  std::vector<std::vector<Mark>> marks(const Call& call, const Instruction& instruction) {
    std::vector<std::vector<Mark>> result;
    const bool moves = is_permuted(instruction) || instruction.kind == InstructionKind::all_gather ||
                       instruction.kind == InstructionKind::copy ||
                       (instruction.kind == InstructionKind::kernel &&
                        (instruction.op == OpKind::accumulate || instruction.op == OpKind::copy));
    if (!moves) return result;
    const Operand& source = instruction.operands.front();
    std::vector<Mark>& of_source = result.emplace_back();
    for (const Interval& interval : bytes(call, source))
      of_source.push_back({interval.begin - source.offset, interval.end - source.offset, interval.state.partial,
                           interval.state.across, interval.state.reduced, interval.state.of_copies});
    return result;
  }

  void pass_marks(const Call& call, const Instruction& instruction, const std::vector<std::vector<Mark>>& before) {
    const Operand& target = instruction.operands.back();
    Intervals<State>& contents = contents_[bound(call, target)];
    const std::vector<int>& ranks = program_.group(instruction.group);
    switch (instruction.kind) {
      case InstructionKind::all_reduce_sum:
        reduce(instruction, contents, target.offset, target.offset + target.bytes);
        return;
      case InstructionKind::reduce_scatter: {
        if (ranks.size() < 2) return;
        const int members = static_cast<int>(ranks.size());
        const int member = static_cast<int>(std::find(ranks.begin(), ranks.end(), program_.rank) - ranks.begin());
        const std::int64_t element = size_of(instruction.type);
        const std::int64_t begin = target.offset + chunk_begin(target.bytes / element, members, member) * element;
        const std::int64_t end = target.offset + chunk_begin(target.bytes / element, members, member + 1) * element;
        scatter(contents, target.offset, begin);
        scatter(contents, end, target.offset + target.bytes);
        reduce(instruction, contents, begin, end);
        return;
      }
      case InstructionKind::all_gather:
      case InstructionKind::all_to_all: return spread_marks(contents, target, before.front());
      case InstructionKind::copy:
      case InstructionKind::kernel:
        break;
      default: return;
    }
    if (before.empty()) return;
    if (is_permuted(instruction)) return spread_marks(contents, target, before.front());
    // accumulate, copy: element i of the source goes to element i of the target, in its own width.
    const Operand& source = instruction.operands.front();
    for (const Mark& mark : before.front()) {
      const bool of_copies = mark.of_copies && instruction.kind == InstructionKind::copy;
      if (!mark.partial && !mark.across && !mark.reduced && !of_copies) continue;
      const auto at = [&](std::int64_t offset) {
        return source.bytes == 0 ? 0 : target.offset + offset * target.bytes / source.bytes;
      };
      for (Interval& interval : contents.within(at(mark.begin), at(mark.end))) {
        interval.state.partial |= mark.partial;
        interval.state.across |= mark.across;
        interval.state.reduced |= mark.reduced;
        interval.state.of_copies |= of_copies;
      }
    }
  }

  // All of the target has every mark that a part of the source has.
  static void spread_marks(Intervals<State>& contents, const Operand& target, const std::vector<Mark>& marks) {
    Mark any;
    for (const Mark& mark : marks) {
      any.partial |= mark.partial;
      any.across |= mark.across;
      any.reduced |= mark.reduced;
    }
    for (Interval& interval : contents.within(target.offset, target.offset + target.bytes)) {
      interval.state.partial = any.partial;
      interval.state.across = any.across;
      interval.state.reduced = any.reduced;
    }
  }
  // What was partial is summed over the whole data axis; or first over a shard group, then over its
  // replicas.
  void reduce(const Instruction& instruction, Intervals<State>& contents, std::int64_t begin, std::int64_t end) const {
    const bool over_all = over_data(instruction);
    const bool over_shard = !over_all && over_members(instruction, Members::shard);
    const bool over_replicas = !over_all && over_members(instruction, Members::replicas);
    for (Interval& interval : contents.within(begin, end)) {
      State& state = interval.state;
      if (over_all) {
        state.reduced |= state.partial;
        state.partial = false;
      } else if (over_shard) {
        state.across |= state.partial;
        state.partial = false;
      } else if (over_replicas) {
        state.reduced |= state.across;
        state.across = false;
      }
    }
  }
  static void scatter(Intervals<State>& contents, std::int64_t begin, std::int64_t end) {
    for (Interval& interval : contents.within(begin, end)) {
      interval.state.content = Content::scattered;
      interval.state.partial = interval.state.across = interval.state.reduced = false;
    }
  }

  // Codes of quantized moments mean nothing without the scales of their own blocks, whole ones.
  void check_blocks(const Call& call, int c, int i, const Instruction& instruction) {
    for (const int moment : {0, 1}) {
      const Operand& codes = instruction.operands[static_cast<std::size_t>(2 + moment)];
      const Operand& scales = instruction.operands[static_cast<std::size_t>(4 + moment)];
      const bool of_one_bucket = std::ranges::any_of(program_.buckets, [&](const Bucket& bucket) {
        return (moment == 0 ? bucket.first_moment : bucket.second_moment) == bound(call, codes) &&
               (moment == 0 ? bucket.first_scales : bucket.second_scales) == bound(call, scales);
      });
      constexpr std::int64_t scale = size_of(DataType::fp32);
      if (of_one_bucket && codes.offset % quantization_block == 0 &&
          scales.offset == codes.offset / quantization_block * scale &&
          scales.bytes == quantization_blocks(codes.bytes) * scale)
        continue;
      fault(Rule::definition, c, i,
            fmt::format("wrong scales: {} takes codes from {} with scales from {}, which are not those of their blocks",
                        describe(instruction), bytes_of(bound(call, codes), codes.offset, codes.offset + codes.bytes),
                        bytes_of(bound(call, scales), scales.offset, scales.offset + scales.bytes)));
    }
  }

  // What is gathered of a shard, copied to be gathered, or added to it, is in the whole where the
  // bucket has it (BucketUnit).
  void check_places(const Call& call, int c, int i, const Instruction& instruction) {
    const bool gathers = instruction.kind == InstructionKind::all_gather,
               adds = instruction.kind == InstructionKind::kernel && instruction.op == OpKind::accumulate;
    if ((!gathers && !adds && instruction.kind != InstructionKind::copy) || instruction.operands.size() != 2) return;
    const Operand& whole = adds ? instruction.operands.front() : instruction.operands.back();
    const Operand& shard = adds ? instruction.operands.back() : instruction.operands.front();
    for (const Bucket& bucket : program_.buckets) {
      if (bound(call, shard) != (adds ? bucket.gradients.value_or(-1) : bucket.parameters)) continue;
      const std::int64_t element =
          adds ? shard.bytes / std::max<std::int64_t>(instruction.shape.rows, 1) : size_of(instruction.type);
      // (What goes from a file to the host is followed to the whole by FileCheck.)
      if (instruction.kind == InstructionKind::copy && buffer(bound(call, whole)).home != Home::device) continue;
      const bool is_shard = bucket.shard_elements < bucket.elements &&
                            buffer(bound(call, shard)).bytes == bucket.shard_elements * element;
      if (!is_shard || bucket.second_gradients == bound(call, whole)) continue;
      const bool is_placed = std::ranges::any_of(bucket.units, [&](const BucketUnit& unit) {
        const BucketRange& in_whole = gathers ? unit.range : unit.own.range;
        return shard.offset == unit.own.at * element && shard.bytes == unit.own.range.size() * element &&
               whole.offset == in_whole.begin * element && whole.bytes == in_whole.size() * element;
      });
      if (is_placed) continue;
      fault(Rule::definition, c, i,
            fmt::format("wrong place: {} takes {} and {}, which are not the same parameters of '{}'",
                        describe(instruction), bytes_of(bound(call, shard), shard.offset, shard.offset + shard.bytes),
                        bytes_of(bound(call, whole), whole.offset, whole.offset + whole.bytes), bucket.name));
    }
  }

  // The optimizer has updated this rank's shard; the rest of the bucket in the buffer is now stale.
  // Where the host has updated it, the shard in the buffer on the device is outdated.
  void update_parameters(const Call& call, const Instruction& instruction) {
    const int id = bound(call, instruction.operands[1]);
    const std::int64_t element = size_of(instruction.type);
    for (const Bucket& bucket : program_.buckets) {
      const bool on_host = instruction.home == Home::host && buffer(bucket.parameters).home == Home::device &&
                           (bucket.master == id || bucket.host_parameters == id);
      if (on_host) {
        const Operand& updated = instruction.operands[1];
        const std::int64_t shift = begin_of_shard(bucket, element);
        for (Interval& interval : contents_[bucket.parameters].within(shift + updated.offset,
                                                                      shift + updated.offset + updated.bytes))
          interval.state.outdated = true;
      }
      if (bucket.parameters == id) others_are_stale(bucket, element);
    }
  }
  // Sums on their way to the host, or over it to a file, are there. Once they are summed over the
  // data axis, those that this rank updates are all that it needs.
  void take_sums(const Call& call, const Instruction& instruction) {
    const Operand &source = instruction.operands.front(), &target = instruction.operands.back();
    const int from = bound(call, source), to = bound(call, target);
    if (is_staged_[from] == 0) return;
    bool are_summed = true;
    for (Interval& interval : bytes(call, source)) {
      const State& state = interval.state;
      are_summed = are_summed && !state.partial && !state.across && state.content == Content::defined;
      interval.state.uncopied = false;
    }
    if (!are_summed) return;
    const std::optional<int> of = sum_in(call, to);
    if (!of) return;
    const Bucket& bucket = program_.buckets[*of];
    const std::int64_t element = size_of(instruction.type);
    const bool is_whole = buffer(*bucket.gradients).bytes >= bucket.elements * element;
    const std::int64_t begin = is_whole ? begin_in_whole(bucket) * element : 0,
                       end = begin + bucket.shard_elements * element;
    if (target.offset <= begin && end <= target.offset + target.bytes)
      for (Interval& interval : contents_[from].all()) interval.state.uncopied = false;
  }

  // A shard that the host has updated arrives in the parameters.
  void return_parameters(const Call& call, const Instruction& instruction) {
    const int id = bound(call, instruction.operands.back());
    for (const Bucket& bucket : program_.buckets)
      if (bucket.parameters == id) others_are_stale(bucket, size_of(instruction.type));
  }
  void others_are_stale(const Bucket& bucket, std::int64_t element) {
    if (!several_data_ranks() || buffer(bucket.parameters).bytes < bucket.elements * element) return;
    const std::int64_t begin = begin_in_whole(bucket) * element;
    const std::int64_t end = begin + bucket.shard_elements * element;
    Intervals<State>& contents = contents_[bucket.parameters];
    for (Interval& interval : contents.within(0, begin)) interval.state.stale = true;
    for (Interval& interval : contents.within(end, bucket.elements * element)) interval.state.stale = true;
  }
  // Where this rank's shard begins in the buffer of the bucket's parameters.
  std::int64_t begin_of_shard(const Bucket& bucket, std::int64_t element) const {
    return buffer(bucket.parameters).bytes < bucket.elements * element ? 0 : begin_in_whole(bucket) * element;
  }

  const Program& program_;
  std::vector<Fault>& faults_;
  std::size_t most_;
  std::set<std::pair<Rule, std::pair<int, std::optional<int>>>> known_;
  std::vector<Intervals<State>> contents_;                      // per buffer
  std::vector<char> is_sent_;                                   // per buffer: gradients that a master takes
  std::vector<char> in_first_part_;                             // per call: of backward_inputs
  std::vector<char> is_sum_, is_staged_;                        // per buffer: find_sums_elsewhere
  // Bucket by call and buffer, where sums of copies are made, taken to the host, or taken there.
  std::map<std::pair<int, int>, int> sum_in_;
  std::vector<std::vector<std::vector<OperandSource>>> sources_;  // per segment, instruction (kernels), operand
  std::array<Clock, stream_count> clocks_{};  // what is complete when a stream's next instruction begins
  bool is_later_step_ = false;
  std::vector<Clock> recorded_;                                 // per event of the Program
};

}  // namespace

void find_data_faults(const Program& program, std::vector<Fault>& faults) { DataCheck(program, faults).run(); }

}  // namespace parplan
