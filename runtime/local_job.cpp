#include "runtime/local_job.h"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <exception>
#include <thread>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/program/lower.h"
#include "runtime/warm_up.h"

namespace parplan {
namespace {

using Clock = std::chrono::steady_clock;

// Calls `work` with the numbers from 0 to `count`, each in its own thread; where one throws, calls
// `on_failure` there. The first exception is thrown here, once all have ended.
void in_threads(std::size_t count, const std::function<void(std::size_t)>& work,
                const std::function<void(std::size_t, const std::string&)>& on_failure) {
  std::vector<std::exception_ptr> failures(count);
  {
    std::vector<std::jthread> threads;
    for (std::size_t r = 0; r < count; ++r)
      threads.emplace_back([&, r] {
        try {
          work(r);
        } catch (const std::exception& failure) {
          failures[r] = std::current_exception();
          on_failure(r, failure.what());
        }
      });
  }
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

}  // namespace

// Members are destroyed last to first: a communicator goes before the memory that it may have
// registered.
struct LocalJob::Rank {
  std::unique_ptr<Backend> backend;
  Arena arena;
  std::unique_ptr<Communicator> communicator;
  std::unique_ptr<Executor> executor;

  Rank(std::unique_ptr<Backend> made, const Program& program) : backend(std::move(made)), arena(*backend, program) {}
};

LocalJob::LocalJob(const Job& job, const InitialValues& initial, const MakeWorld& make_world, Rendezvous& rendezvous)
    : job_(job),
      rendezvous_(rendezvous),
      programs_(lower_all(job)),
      groups_(programs_),
      world_(make_world(groups_, static_cast<int>(programs_.size()))) {
  ranks_.resize(hosted().size());
  batch_.sequence = job.training.sequence_length;
  step_.ranks.resize(programs_.size());
  allocate();
  connect();
  prepare(initial);
}

// Each rank's thread makes and fills its own arena, so that a CPU's pages lie near its core.
void LocalJob::allocate() {
  for_each_rank([&](std::size_t r) {
    const Program& program = programs_[hosted()[r]];
    ranks_[r] = std::make_unique<Rank>(world_->make_backend(hosted()[r]), program);
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
    Rank& rank = *ranks_[r];
    rank.backend->attach_thread();
    rank.executor = std::make_unique<Executor>(program, groups_, *rank.backend, *rank.communicator, rank.arena,
                                               batch_rank(mesh, coordinates_of(mesh, number)), mesh.batch_ranks());
    initialise(*job_.graph, program, rank.arena, job_.training.precision, initial);
  });
}

void LocalJob::for_each_rank(const std::function<void(std::size_t)>& work) {
  in_threads(ranks_.size(), work, [&](std::size_t r, const std::string& reason) {
    if (ranks_[r] != nullptr && ranks_[r]->communicator != nullptr) ranks_[r]->communicator->abort(reason);
    rendezvous_.abort(reason);
  });
}

// Concurrently: NCCL lets the ranks of one machine wait for each other when they leave (its
// documentation of ncclCommDestroy).
LocalJob::~LocalJob() {
  std::vector<std::jthread> threads;
  for (std::unique_ptr<Rank>& rank : ranks_) threads.emplace_back([&rank] { rank.reset(); });
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
      static_cast<double>(job_.training.global_batch) * static_cast<double>(job_.training.sequence_length);
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
  if (rendezvous_.processes() > 1) barrier(rendezvous_);
}

void LocalJob::end_step(const Steps& steps, Progress& progress) {
  step_.time = Seconds(std::chrono::duration<double>(Clock::now() - progress.begin).count());
  step_.gradient_norm = ranks_.front()->executor->gradient_norm();
  step_.signal = steps.signal ? steps.signal() : std::nullopt;
  exchange_step(step_, own_loss(), hosted(), rendezvous_);
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
    try {
      end_step(steps, progress);
      if (!progress.stop) begin_step(steps, progress);
    } catch (...) {
      progress.between = std::current_exception();
      progress.stop = true;
    }
    progress.begin = Clock::now();
  };
  std::barrier step_end(static_cast<std::ptrdiff_t>(ranks_.size()), between_steps);
  const auto execute = [&](std::size_t r) {
    while (!progress.stop) {
      step_.ranks[hosted()[r]] = ranks_[r]->executor->run_step(batch_, progress.scalars, progress.timing);
      step_end.arrive_and_wait();
    }
  };
  progress.begin = Clock::now();
  in_threads(ranks_.size(), execute, [&](std::size_t r, const std::string& reason) {
    progress.failed = true;
    ranks_[r]->communicator->abort(reason);
    rendezvous_.abort(reason);
    step_end.arrive_and_drop();
  });

  if (!progress.between) return;
  // Other processes may be intact: leaving NCCL's communicators in good order would wait for theirs
  // (ncclCommDestroy), while they wait at the rendezvous.
  try {
    std::rethrow_exception(progress.between);
  } catch (const std::exception& failure) {
    for (const std::unique_ptr<Rank>& rank : ranks_) rank->communicator->abort(failure.what());
    rendezvous_.abort(failure.what());
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
  scalars.decoupled_decay = training.optimizer == Optimizer::adamw;
  scalars.momentum = training.momentum;
  scalars.clip_norm = training.clip_norm;
  return scalars;
}

}  // namespace parplan
