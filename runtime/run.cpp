#include "runtime/run.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <numeric>
#include <span>
#include <sstream>
#include <type_traits>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/base/text.h"
#include "planner/program/job.h"
#include "planner/program/verify.h"
#include "runtime/launch/agree.h"
#include "runtime/local_job.h"

namespace parplan {
namespace {

Bytes resident_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    std::istringstream words(line);
    std::string key;
    std::int64_t kibibytes = 0;
    if (words >> key >> kibibytes && key == "VmRSS:") return Bytes(kibibytes * 1024);
  }
  return Bytes(0);
}

// "396613632 + 0 + 0", and the names of its parts: "tensor, data, pipeline".
std::string counts(const CommunicationVolume& volume) {
  std::vector<std::string> words;
  for (const Axis axis : inner_axes_first)
    if (is_planned(axis)) words.push_back(fmt::format("{}", volume[axis].count));
  return join(words, " + ");
}
std::string counted_axes() {
  std::vector<std::string> words;
  for (const Axis axis : inner_axes_first)
    if (is_planned(axis)) words.push_back(axis_word(axis));
  return join(words);
}

// A run that breaks a promise has found a bug of parplan.
void check_promises(const LocalJob& job, const StepMeasurement& step, int rank) {
  const Program& program = job.programs()[rank];
  const std::int64_t touched = job.arena(rank).highest_touched();
  if (touched != program.arena_bytes)
    throw InternalError(
        fmt::format("rank {} was promised an arena of {} bytes and touched {}", rank, program.arena_bytes, touched));
  const CommunicationVolume& promised = program.communication;
  const CommunicationVolume& sent = step.communication;
  if (sent != promised)
    throw InternalError(fmt::format("rank {} was to send {} bytes a step ({}) and sent {}", rank, counts(promised),
                                    counted_axes(), counts(sent)));
}

// The ranks that a prediction describes: one per stage, at data and tensor coordinate 0.
std::vector<int> representatives(const Plan& plan) {
  std::vector<int> ranks;
  for (int stage = 0; stage < plan.spec.pp(); ++stage) ranks.push_back(rank_at(plan.spec.mesh, {.pp = stage}));
  return ranks;
}

// Compares what the run measured with the plan, to the byte.
void check_prediction(const Plan& plan, const StepResult& measured) {
  if (measured.memory.arena() != plan.prediction.memory.arena())
    throw InternalError(
        fmt::format("the worst rank's arena is {} bytes; the plan promises {} (was the plan changed by hand?)",
                    measured.memory.arena().count, plan.prediction.memory.arena().count));
  const CommunicationVolume& sent = measured.communication;
  const CommunicationVolume& promised = plan.prediction.communication;
  if (sent != promised)
    throw InternalError(
        fmt::format("{} bytes were sent a step ({}); the plan promises {} (was the plan changed by hand?)",
                    counts(sent), counted_axes(), counts(promised)));
}

// The number of steps until recorded work is replayed and caches are warm: CUDA work runs directly,
// is recorded, is replayed.
std::int64_t warm_up_steps(BackendKind backend) { return backend == BackendKind::cuda ? 3 : 1; }

// The numbers of the steps after the warm-up if there are any, else the number of the last step.
std::vector<std::size_t> behind_warm_up(std::size_t steps, std::int64_t warm_up) {
  const std::size_t first = std::min(static_cast<std::size_t>(warm_up), steps - 1);
  std::vector<std::size_t> numbers(steps - first);
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

// What the processes tell each other about one rank at the end.
struct RankEnd {
  std::int64_t rank = 0;
  std::int64_t touched = 0;
  std::int64_t device_used = 0;
};

struct JobEnd {
  std::vector<RankEnd> ranks;
  std::vector<InstructionMeasurement> instructions;  // of the measured rank, Segment by Segment
};
static_assert(std::is_trivially_copyable_v<RankEnd> && std::is_trivially_copyable_v<InstructionMeasurement>);

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}
template <class T>
void append(std::vector<T>& to, const std::vector<std::byte>& bytes) {
  const std::size_t count = bytes.size() / sizeof(T);
  const std::size_t old = to.size();
  to.resize(old + count);
  if (count > 0) std::memcpy(to.data() + old, bytes.data(), count * sizeof(T));
}

JobEnd share_end(const LocalJob& job, Rendezvous& rendezvous, int measured_rank,
                 const std::vector<InstructionMeasurement>& warm_up) {
  std::vector<RankEnd> own;
  std::vector<InstructionMeasurement> instructions;
  for (const int rank : job.hosted()) {
    own.push_back({.rank = rank,
                   .touched = job.arena(rank).highest_touched(),
                   .device_used = job.device_memory(rank).used.count});
    if (rank != measured_rank) continue;
    for (const std::vector<InstructionMeasurement>& segment : job.executor(rank).instructions())
      instructions.insert(instructions.end(), segment.begin(), segment.end());
    for (std::size_t i = 0; i < warm_up.size(); ++i) {
      instructions[i].runs -= warm_up[i].runs;
      instructions[i].busy_s -= warm_up[i].busy_s;
    }
  }
  JobEnd end;
  for (const std::vector<std::byte>& bytes : rendezvous.all_gather(bytes_of(own))) append(end.ranks, bytes);
  for (const std::vector<std::byte>& bytes : rendezvous.all_gather(bytes_of(instructions)))
    append(end.instructions, bytes);
  std::ranges::sort(end.ranks, {}, &RankEnd::rank);
  return end;
}

std::vector<InstructionMeasurement> flat(const std::vector<std::vector<InstructionMeasurement>>& segments) {
  std::vector<InstructionMeasurement> all;
  for (const std::vector<InstructionMeasurement>& segment : segments)
    all.insert(all.end(), segment.begin(), segment.end());
  return all;
}

}  // namespace

RunReport run_plan(const OpGraph& graph, const Plan& plan, const RunOptions& options, Rendezvous& rendezvous) {
  MakeWorld make_world;
  TokenData data{std::vector<std::int32_t>()};
  agree(rendezvous, [&] {
    make_world = choose_world(plan, options.world, rendezvous);
    data = TokenData::load(options.data, plan.training.sequence_length, graph.vocabulary);
  });
  if (options.on_start) options.on_start();
  const Bytes memory_before = resident_memory();
  const BackendKind backend = plan.cluster.backend();
  const std::int64_t warm_up = warm_up_steps(backend);

  const Job description = job_of(graph, plan.cluster, plan.training, plan.spec, plan.placements, plan.schedule);
  LocalJob job(description, initializer(plan.training.seed), make_world, rendezvous);
  verify(job.programs());

  RunReport report;
  std::vector<std::vector<StepMeasurement>> steps;
  // By hosted rank: the times of the first step, to be left out.
  std::map<int, std::vector<InstructionMeasurement>> warmed_up;
  job.run({.first = 0,
           .count = options.steps,
           .batch_of = [&](std::int64_t step, Batch& batch) { fill(batch, data, step, plan.training.global_batch); },
           .timing_of = [&](std::int64_t step) {
             return step + 1 == options.steps ? StepTiming::each_instruction : StepTiming::whole;
           },
           .on_step = [&](std::int64_t step, const JobStep& result) {
             report.loss.push_back(result.loss);
             report.step_times_s.push_back(result.step_time_s);
             steps.push_back(result.ranks);
             for (const int rank : job.hosted()) check_promises(job, result.ranks[rank], rank);
             if (step == 0 && options.steps > 1)
               for (const int rank : job.hosted()) warmed_up[rank] = flat(job.executor(rank).instructions());
             if (options.on_step) options.on_step(step, result.loss, result.step_time_s);
           }});
  report.process_growth = resident_memory() - memory_before;
  for (const Program& program : job.programs()) report.arena_bytes.push_back(Bytes(program.arena_bytes));
  for (const int rank : job.hosted())
    if (report.not_recorded.empty()) report.not_recorded = job.not_recorded(rank);
  if (steps.empty()) return report;

  // The median of the undisturbed steps: those after the warm-up, without those that were profiled
  // where profiling costs time.
  std::vector<std::size_t> counted = behind_warm_up(steps.size(), warm_up);
  if (backend == BackendKind::cuda && counted.size() > 1) counted.pop_back();
  std::nth_element(counted.begin(), counted.begin() + static_cast<std::ptrdiff_t>(counted.size() / 2), counted.end(),
                   [&](std::size_t a, std::size_t b) { return report.step_times_s[a] < report.step_times_s[b]; });
  const std::vector<StepMeasurement>& median = steps[counted[counted.size() / 2]];
  const auto last = std::ranges::max_element(median, {}, [](const StepMeasurement& step) { return step.total.value; });
  report.measured_rank = static_cast<int>(last - median.begin());
  const StepMeasurement& apart = last->taken_apart ? *last : steps.back()[report.measured_rank];
  report.measured.time = apart.time;
  if (!last->taken_apart) report.measured.time *= last->total / apart.time.total();

  const JobEnd end = share_end(job, rendezvous, report.measured_rank, warmed_up[report.measured_rank]);
  for (const RankEnd& rank : end.ranks) report.touched_bytes.push_back(Bytes(rank.touched));

  const auto worst =
      std::ranges::max_element(job.programs(), {}, [](const Program& program) { return program.memory.peak(); });
  // The parts are as planned: every rank touched its arena to the promised byte, or check_promises
  // would have thrown.
  report.measured.memory = worst->memory;
  if (backend == BackendKind::cuda) {
    Bytes used;
    for (const RankEnd& rank : end.ranks) used = std::max(used, Bytes(rank.device_used));
    // Ranks that share a GPU share the memory of libraries, and no rank's prediction covers the
    // whole.
    const bool shares = options.world.share_gpu && rendezvous.processes() == 1;
    if (!shares) report.device_used = used;
    Bytes arenas = worst->memory.arena();
    if (shares) arenas = std::accumulate(report.arena_bytes.begin(), report.arena_bytes.end(), Bytes(0));
    report.measured.memory.overhead =
        Bytes((used - arenas).count / (shares ? static_cast<std::int64_t>(job.programs().size()) : 1));
  }
  for (const int rank : representatives(plan)) {
    const CommunicationVolume& sent = median[rank].communication;
    if (sum(sent) > sum(report.measured.communication)) report.measured.communication = sent;
  }
  check_prediction(plan, report.measured);

  const Program& program = job.programs()[report.measured_rank];
  const std::int64_t taken_apart = backend == BackendKind::cuda ? 1 : std::max<std::int64_t>(options.steps - 1, 1);
  std::size_t next = 0;
  for (const Segment& segment : program.segments)
    for (const Instruction& instruction : segment.instructions) {
      const InstructionMeasurement& measurement = end.instructions[next++];
      const char* what = instruction.kind == InstructionKind::kernel ? name(instruction.op) : name(instruction.kind);
      report.instructions.push_back(
          {.segment = segment.name,
           .instruction = instruction.name == what ? what : fmt::format("{} {}", instruction.name, what),
           .runs_per_step = measurement.runs / taken_apart,
           .measured_s = measurement.busy_s / static_cast<double>(taken_apart)});
    }
  return report;
}

}  // namespace parplan
