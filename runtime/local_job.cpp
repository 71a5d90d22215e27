#include "runtime/local_job.h"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <exception>
#include <filesystem>
#include <mutex>
#include <new>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include "planner/base/allocated.h"
#include "planner/base/error.h"
#include "planner/base/file.h"
#include "planner/base/json.h"
#include "planner/base/parallel_for.h"
#include "planner/program/lower.h"
#include "runtime/warm_up.h"

namespace parplan {
namespace {

using Clock = std::chrono::steady_clock;

bool has_failed(Rendezvous& rendezvous) {
  try {
    rendezvous.check();
  } catch (const std::exception&) {
    return true;
  }
  return false;
}

// What a rank throws, as the job reports it: with the place, unless the job has failed elsewhere
// before. Running out of memory is no bug.
std::exception_ptr reported(const std::exception& failure, const std::string& place, Rendezvous& rendezvous) {
  if (const auto* memory = dynamic_cast<const std::bad_alloc*>(&failure); memory != nullptr)
    return std::make_exception_ptr(RunError(out_of_memory_text(*memory) + place));
  if (dynamic_cast<const RunError*>(&failure) != nullptr && !has_failed(rendezvous))
    return std::make_exception_ptr(RunError(failure.what() + place));
  return std::current_exception();
}

// Calls `work` with the numbers from 0 to `count`, each in its own thread; where one throws, calls
// `on_failure` there, which returns what it is to be reported as. The exception that came first is
// thrown here, once all have ended. No thread begins before all of them exist: those that wait for
// each other would wait for one that cannot be created.
void in_threads(std::size_t count, const std::function<void(std::size_t)>& work,
                const std::function<std::exception_ptr(std::size_t, const std::exception&)>& on_failure) {
  std::mutex mutex;
  std::exception_ptr first;
  std::atomic<int> begins = 0;  // 1: they may, -1: they must not
  std::string missing;
  {
    std::vector<std::jthread> threads;
    threads.reserve(count);
    try {
      for (std::size_t r = 0; r < count; ++r)
        threads.emplace_back([&, r] {
          begins.wait(0);
          if (begins < 0) return;
          try {
            work(r);
          } catch (const std::exception& failure) {
            const std::lock_guard lock(mutex);
            std::exception_ptr report = on_failure(r, failure);
            if (!first) first = report;
          }
        });
      begins = 1;
    } catch (const std::exception& failure) {
      missing = fmt::format("the thread of rank {} of {} of this process cannot be created: {}", threads.size(), count,
                            failure.what());
      begins = -1;
    }
    begins.notify_all();
  }
  if (!missing.empty()) throw RunError(missing);
  if (first) std::rethrow_exception(first);
}

std::string group_text(const Program& program, const Instruction& instruction) {
  const auto group = std::ranges::find(program.groups, instruction.group, &Group::key);
  if (!communicates(instruction.kind) || group == program.groups.end()) return "";
  const bool one = is_neighbour(instruction.group);
  return fmt::format(" {} rank{} {}", one ? instruction.kind == InstructionKind::send ? "to" : "from" : "of",
                     group->ranks.size() == 1 ? "" : "s", fmt::join(group->ranks, ", "));
}

// "step 3, all_reduce_sum of layers.backward (call 17) of ranks 0, 2".
std::string position_text(const Program& program, const Position& position) {
  if (position.call < 0 || position.call >= static_cast<std::int32_t>(program.calls.size())) return "its first step";
  const Segment& segment = program.segments[program.calls[position.call].segment];
  if (position.instruction < 0 || position.instruction >= static_cast<std::int32_t>(segment.instructions.size()))
    return fmt::format("step {}, {} (call {})", position.step, segment.name, position.call);
  const Instruction& instruction = segment.instructions[position.instruction];
  const bool kernel = instruction.kind == InstructionKind::kernel;
  return fmt::format("step {}, {} in {} (call {}){}", position.step,
                     kernel ? name(instruction.op) : name(instruction.kind), segment.name, position.call,
                     kernel ? "" : group_text(program, instruction));
}

// The last instructions of a rank, a line of JSON each; the first line says of whom and why.
std::string record_of(const Program& program, int ranks, const FlightRecorder& flight, const std::string& reason) {
  const auto now = FlightRecorder::Clock::now();
  const Position position = flight.position();
  std::string text = Json{{"rank", program.rank},
                          {"ranks", ranks},
                          {"reason", reason},
                          {"position", position_text(program, position)},
                          {"waits", position.waits}}
                         .dump(-1, ' ', false, Json::error_handler_t::replace) +
                     '\n';
  for (const FlightRecorder::Entry& entry : flight.last()) {
    const Segment& segment = program.segments.at(program.calls.at(entry.call).segment);
    const Instruction& instruction = segment.instructions.at(entry.instruction);
    const bool kernel = instruction.kind == InstructionKind::kernel;
    Json line{{"step", entry.step},
              {"call", entry.call},
              {"segment", segment.name},
              {"instruction", entry.instruction},
              {"what", kernel ? name(instruction.op) : name(instruction.kind)},
              {"name", instruction.name},
              {"before_s", std::chrono::duration<double>(now - entry.begun).count()}};
    if (const auto group = std::ranges::find(program.groups, instruction.group, &Group::key);
        !kernel && group != program.groups.end())
      line["with_ranks"] = group->ranks;
    text += line.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
  }
  return text;
}

}  // namespace

// Members are destroyed last to first: a communicator goes before the memory that it may have
// registered.
struct LocalJob::Rank {
  std::unique_ptr<Backend> backend;
  Arena arena;
  std::unique_ptr<Communicator> communicator;
  std::unique_ptr<Executor> executor;

  Rank(std::unique_ptr<Backend> made, const Program& program, const std::string& nvme_folder)
      : backend(std::move(made)), arena(*backend, program, nvme_folder) {}
};

LocalJob::LocalJob(const Job& job, const InitialValues& initial, const MakeWorld& make_world, Rendezvous& rendezvous,
                   const std::string& nvme_folder)
    : job_(job),
      rendezvous_(rendezvous),
      programs_(lower_all(job)),
      groups_(programs_),
      world_(make_world(groups_, static_cast<int>(programs_.size()))) {
  ranks_.resize(hosted().size());
  batch_.sequence = job.training.sequence_length;
  step_.ranks.resize(programs_.size());
  allocate(nvme_folder);
  connect();
  prepare(initial);
}

// Each rank's thread makes and fills its own arena, so that a CPU's pages lie near its core.
void LocalJob::allocate(const std::string& nvme_folder) {
  for_each_rank([&](std::size_t r) {
    const Program& program = programs_[hosted()[r]];
    ranks_[r] = std::make_unique<Rank>(world_->make_backend(hosted()[r]), program, nvme_folder);
    warm_up(program, *ranks_[r]->backend, ranks_[r]->arena);
  });
}

// Ranks that connect wait for all others, some of which may fail to allocate their memory: nobody
// connects before every rank has its own.
void LocalJob::connect() {
  if (rendezvous_.processes() > 1) barrier(rendezvous_);
  for_each_rank([&](std::size_t r) {
    Rank& rank = *ranks_[r];
    rank.backend->attach_thread();
    rank.communicator = world_->make_communicator(hosted()[r], *rank.backend);
    rank.communicator->register_memory(rank.arena.begin(Home::device), rank.arena.size(Home::device));
  });
}

// Not while others connect: page-locked memory belongs to every GPU of the process, and NCCL may be
// using them.
void LocalJob::prepare(const InitialValues& initial) {
  for_each_rank([&](std::size_t r) {
    const int number = hosted()[r];
    const Program& program = programs_[number];
    const DeviceMesh& mesh = job_.layout.mesh;
    const int replica = batch_rank(mesh, coordinates_of(mesh, number));
    const std::int64_t samples =
        micro_batches(job_.layout, job_.training, replica) * job_.layout.layouts.front().micro_batch;
    Rank& rank = *ranks_[r];
    rank.backend->attach_thread();
    rank.executor = std::make_unique<Executor>(program, groups_, *rank.backend, *rank.communicator, rank.arena,
                                               SampleRange{first_sample(job_.layout, job_.training, replica), samples});
    initialise(*job_.graph, program, rank.arena, job_.training.precision, initial,
               std::max(threads_of_this_machine() / static_cast<int>(ranks_.size()), 1));
  });
}

void LocalJob::for_each_rank(const std::function<void(std::size_t)>& work) {
  try {
    in_threads(ranks_.size(), work, [&](std::size_t r, const std::exception& failure) {
      std::exception_ptr report = std::current_exception();
      try {
        report = reported(failure, fmt::format(" (rank {}, before the first step)", hosted()[r]), rendezvous_);
        if (ranks_[r] != nullptr && ranks_[r]->communicator != nullptr) ranks_[r]->communicator->abort(failure.what());
        rendezvous_.abort(failure.what());
      } catch (const std::bad_alloc&) {
        give_up_without_memory(r);
      }
      return report;
    });
  } catch (const std::exception& failure) {
    abort(failure.what());  // the threads may not even have begun
    throw;
  }
}

// Words so short need no memory.
void LocalJob::give_up_without_memory(std::size_t hosted_rank) {
  const std::string reason = "out of memory";
  const std::unique_ptr<Rank>& rank = ranks_[hosted_rank];
  if (rank != nullptr && rank->communicator != nullptr) rank->communicator->abort(reason);
  rendezvous_.fail(reason);
}

void LocalJob::abort(const std::string& reason) noexcept {
  try {
    for (const std::unique_ptr<Rank>& rank : ranks_)
      if (rank != nullptr && rank->communicator != nullptr) rank->communicator->abort(reason);
  } catch (const std::exception&) {
    // The rendezvous wakes the others, and the watch ends this process.
  }
  if (rendezvous_.processes() > 1) rendezvous_.abort(reason);
}

// Concurrently: NCCL lets the ranks of one machine wait for each other when they leave (its
// documentation of ncclCommDestroy). Where a thread cannot be created, they need not: all abort.
LocalJob::~LocalJob() {
  if (watch_ != nullptr) watch_->release();
  std::vector<std::jthread> threads;
  try {
    threads.reserve(ranks_.size());
    for (std::unique_ptr<Rank>& rank : ranks_) threads.emplace_back([&rank] { rank.reset(); });
  } catch (const std::exception& failure) {
    for (std::size_t r = threads.size(); r < ranks_.size(); ++r)
      if (ranks_[r] != nullptr && ranks_[r]->communicator != nullptr) ranks_[r]->communicator->abort(failure.what());
    for (std::size_t r = threads.size(); r < ranks_.size(); ++r) ranks_[r].reset();
  }
}

void LocalJob::be_watched(JobWatch& watch, const std::string& folder) {
  watch_ = &watch;
  WatchedRanks ranks;
  for (const std::unique_ptr<Rank>& rank : ranks_) ranks.recorders.push_back(&rank->executor->flight());
  ranks.abort = [this](const std::string& reason) {
    for (const std::unique_ptr<Rank>& rank : ranks_) rank->communicator->abort(reason);
  };
  ranks.describe = [this](int rank, const Position& position) { return position_text(programs_.at(rank), position); };
  ranks.write_records = [this, folder](const std::string& reason) {
    std::vector<std::string> files;
    for (const int number : hosted()) {
      const FlightRecorder& flight = executor(number).flight();
      if (flight.position().step < 0) continue;  // it has executed nothing
      const std::filesystem::path file =
          std::filesystem::path(folder) /
          fmt::format("parplan-rank-{}-of-{}.{}.jsonl", number, programs_.size(), getpid());
      write_file_atomically(file, record_of(programs_[number], static_cast<int>(programs_.size()), flight, reason));
      files.push_back(file.string());
    }
    return files;
  };
  watch.host(std::move(ranks));
}

std::string LocalJob::place_of_failure(std::size_t hosted_rank) const {
  const int number = hosted()[hosted_rank];
  const Position position = ranks_[hosted_rank]->executor->flight().position();
  return position.step < 0 ? "" : fmt::format(", in {}", position_text(programs_[number], position));
}

const LocalJob::Rank& LocalJob::rank(int number) const {
  const auto found = std::ranges::find(hosted(), number);
  PARPLAN_ASSERT(found != hosted().end(), fmt::format("rank {} is another process's", number));
  return *ranks_[found - hosted().begin()];
}
const Arena& LocalJob::arena(int number) const { return rank(number).arena; }
const Executor& LocalJob::executor(int number) const { return *rank(number).executor; }
DeviceMemory LocalJob::device_memory(int number) const {
  rank(number).backend->attach_thread();
  return rank(number).backend->memory();
}
std::string LocalJob::not_recorded(int number) const { return rank(number).backend->not_recorded(); }

LogicalTensors LocalJob::collect(ParameterContent content) const {
  LogicalTensors tensors;
  for (const int number : hosted())
    parplan::collect(*job_.graph, programs_[number], arena(number), job_.training.precision, content, tensors);
  return tensors;
}

// Every last-stage rank of data coordinate 0 holds the same reduced loss; the first is read.
std::optional<double> LocalJob::own_loss() const {
  const double tokens =
      static_cast<double>(job_.training.global_batch) * static_cast<double>(targets_of_sample(*job_.graph));
  for (const int number : hosted())
    if (programs_[number].loss_buffer) return executor(number).loss() / tokens;
  return std::nullopt;
}

// The step that the ranks execute. It changes while all of them wait for the next one.
struct LocalJob::Progress {
  std::int64_t step = 0;
  StepScalars scalars;
  StepTiming timing = StepTiming::whole;
  Clock::time_point begin;
  bool stop = false;
  std::atomic<bool> failed = false;  // a rank has left; the step is incomplete
  std::exception_ptr between;        // thrown by what is called between steps
};

void LocalJob::begin_step(const Steps& steps, Progress& progress) {
  steps.batch_of(progress.step, batch_);
  progress.scalars = step_scalars(job_.training, progress.step);
  progress.scalars.step -= skipped_;
  progress.scalars.skips_not_finite = steps.skips_not_finite;
  progress.timing = steps.timing_of ? steps.timing_of(progress.step) : StepTiming::whole;
  if (rendezvous_.processes() == 1) return;
  const WaitingForRanks waiting(ranks_.front()->executor->flight());
  barrier(rendezvous_);
}

void LocalJob::end_step(const Steps& steps, Progress& progress) {
  step_.time = Seconds(std::chrono::duration<double>(Clock::now() - progress.begin).count());
  step_.gradient_norm = ranks_.front()->executor->gradient_norm();
  step_.signal = steps.signal ? steps.signal() : std::nullopt;
  {
    const WaitingForRanks waiting(ranks_.front()->executor->flight());
    exchange_step(step_, own_loss(), hosted(), rendezvous_);
  }
  const bool scaled = scales_loss(job_.training);  // then the loss scale counts what is skipped
  step_.skipped = step_.gradient_norm && !std::isfinite(*step_.gradient_norm) && (scaled || steps.skips_not_finite);
  if (step_.skipped && !scaled) ++skipped_;
  steps.on_step(progress.step, step_);
  ++progress.step;
  progress.stop =
      progress.step == steps.first + steps.count || (steps.ends_after && steps.ends_after(step_));
}

void LocalJob::run(const Steps& steps) {
  if (steps.count == 0) return;
  Progress progress;
  progress.step = steps.first;
  begin_step(steps, progress);

  const auto between_steps = [&]() noexcept {
    if (progress.failed) {
      progress.stop = true;
      return;
    }
    FlightRecorder& flight = ranks_.front()->executor->flight();
    flight.end_waiting();  // what is done between steps may take its time
    try {
      end_step(steps, progress);
      if (!progress.stop) begin_step(steps, progress);
    } catch (...) {
      progress.between = std::current_exception();
      progress.stop = true;
    }
    flight.begin_waiting();
    progress.begin = Clock::now();
  };
  std::barrier step_end(static_cast<std::ptrdiff_t>(ranks_.size()), between_steps);
  const auto execute = [&](std::size_t r) {
    Executor& executor = *ranks_[r]->executor;
    while (!progress.stop) {
      executor.flight().begin_step(progress.step);
      step_.ranks[hosted()[r]] = executor.run_step(batch_, progress.scalars, progress.timing);
      const WaitingForRanks waiting(executor.flight());
      step_end.arrive_and_wait();
    }
  };
  progress.begin = Clock::now();
  try {
    in_threads(ranks_.size(), execute, [&](std::size_t r, const std::exception& failure) {
      progress.failed = true;
      std::exception_ptr report = std::current_exception();
      try {
        const std::string place = place_of_failure(r);
        report = reported(failure, fmt::format(" (rank {}{})", hosted()[r], place), rendezvous_);
        const std::string reason = failure.what() + place;
        ranks_[r]->communicator->abort(reason);
        rendezvous_.abort(reason);
      } catch (const std::bad_alloc&) {
        give_up_without_memory(r);
      }
      step_end.arrive_and_drop();
      return report;
    });
  } catch (const std::exception& failure) {
    abort(failure.what());
    throw;
  }

  if (!progress.between) return;
  // Other processes may be intact: leaving NCCL's communicators in good order would wait for theirs
  // (ncclCommDestroy), while they wait at the rendezvous.
  try {
    std::rethrow_exception(progress.between);
  } catch (const std::exception& failure) {
    rendezvous_.abort(failure.what());
    abort(failure.what());
    throw;
  }
}

StepScalars step_scalars(const TrainingSpec& training, std::int64_t step) {
  StepScalars scalars;
  scalars.step = step + 1;
  scalars.learning_rate = learning_rate_at(training, step);
  scalars.beta1 = training.beta1;
  scalars.beta2 = training.beta2;
  scalars.epsilon = training.epsilon;
  scalars.weight_decay = training.weight_decay;
  scalars.decoupled_decay = decouples_decay(training.optimizer);
  scalars.momentum = training.momentum;
  scalars.clip_norm = training.clip_norm;
  return scalars;
}

}  // namespace parplan
