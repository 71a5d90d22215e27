#include "runtime/local_job.h"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstring>
#include <exception>
#include <span>
#include <thread>
#include <type_traits>

#include <fmt/format.h>

#include "planner/base/enum.h"
#include "planner/base/error.h"

namespace parplan {
namespace {

using Clock = std::chrono::steady_clock;

// The data that processes exchange after a step.
struct SharedStep {
  double loss = 0.0;
  bool holds_loss = false;
  double step_time_s = 0.0;
};
static_assert(std::is_trivially_copyable_v<SharedStep> && std::is_trivially_copyable_v<StepMeasurement>);

template <class T>
void append(std::vector<std::byte>& bytes, const T& value) {
  const auto* begin = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), begin, begin + sizeof(T));
}
template <class T>
T take(std::span<const std::byte>& bytes) {
  PARPLAN_ASSERT(bytes.size() >= sizeof(T), fmt::format("{} bytes of a step are left", bytes.size()));
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  bytes = bytes.subspan(sizeof(T));
  return value;
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
  // Each rank's thread makes and fills its own arena, so that a CPU's pages lie near its core.
  for_each_rank([&](std::size_t r) {
    const Program& program = programs_[hosted()[r]];
    ranks_[r] = std::make_unique<Rank>(world_->make_backend(hosted()[r]), program);
    warm_up(program, *ranks_[r]->backend, ranks_[r]->arena);
  });
  // Ranks that connect wait for all others, some of which may fail to allocate their memory: nobody
  // connects before every rank has its own.
  if (rendezvous_.processes() > 1) barrier(rendezvous_);
  for_each_rank([&](std::size_t r) {
    Rank& rank = *ranks_[r];
    rank.backend->attach_thread();
    rank.communicator = world_->make_communicator(hosted()[r], *rank.backend);
    rank.communicator->register_memory(rank.arena.begin(), rank.arena.size());
  });
  // Not while others connect: page-locked memory belongs to every GPU of the process, and NCCL may
  // be using them.
  for_each_rank([&](std::size_t r) {
    const int number = hosted()[r];
    const Program& program = programs_[number];
    const int data_rank = coordinates_of(job_.spec.mesh, number).dp;
    Rank& rank = *ranks_[r];
    rank.backend->attach_thread();
    rank.executor = std::make_unique<Executor>(program, groups_, *rank.backend, *rank.communicator, rank.arena,
                                               data_rank, job_.spec.dp());
    initialise(*job_.graph, program, rank.arena, job_.training.precision, initial);
  });
  step_.ranks.resize(programs_.size());
}

void LocalJob::for_each_rank(const std::function<void(std::size_t)>& work) {
  std::vector<std::exception_ptr> failures(ranks_.size());
  {
    std::vector<std::jthread> threads;
    for (std::size_t r = 0; r < ranks_.size(); ++r)
      threads.emplace_back([&, r] {
        try {
          work(r);
        } catch (const std::exception& failure) {
          failures[r] = std::current_exception();
          if (ranks_[r] != nullptr && ranks_[r]->communicator != nullptr)
            ranks_[r]->communicator->abort(failure.what());
          rendezvous_.abort(failure.what());
        }
      });
  }
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
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
void LocalJob::share_step() {
  const double tokens =
      static_cast<double>(job_.training.global_batch) * static_cast<double>(job_.training.sequence_length);
  SharedStep own{.step_time_s = step_.step_time_s};
  for (const int number : hosted())
    if (!own.holds_loss && programs_[number].loss_buffer)
      own = {.loss = executor(number).loss() / tokens, .holds_loss = true, .step_time_s = own.step_time_s};
  if (rendezvous_.processes() == 1) {
    step_.loss = own.loss;
    return;
  }
  std::vector<std::byte> bytes;
  append(bytes, own);
  for (const int number : hosted()) {
    append(bytes, number);
    append(bytes, step_.ranks[number]);
  }
  bool found = false;
  for (const std::vector<std::byte>& contribution : rendezvous_.all_gather(bytes)) {
    std::span<const std::byte> rest = contribution;
    const SharedStep shared = take<SharedStep>(rest);
    step_.step_time_s = std::max(step_.step_time_s, shared.step_time_s);
    if (shared.holds_loss && !found) step_.loss = shared.loss;
    found |= shared.holds_loss;
    while (!rest.empty()) {
      const int number = take<int>(rest);
      step_.ranks.at(static_cast<std::size_t>(number)) = take<StepMeasurement>(rest);
    }
  }
}

void LocalJob::run(const Steps& steps) {
  if (steps.count == 0) return;
  Clock::time_point begin;
  std::int64_t step = steps.first;
  StepScalars scalars;
  StepTiming timing = StepTiming::whole;
  const auto prepare_step = [&] {
    steps.batch_of(step, batch_);
    scalars = step_scalars(job_.training, step);
    timing = steps.timing_of ? steps.timing_of(step) : StepTiming::whole;
    if (rendezvous_.processes() > 1) barrier(rendezvous_);
  };
  prepare_step();

  std::vector<std::exception_ptr> failures(ranks_.size());
  std::exception_ptr between;  // thrown by what is called between steps
  bool stop = false;
  std::atomic<bool> failed = false;  // a rank has left; the step is incomplete
  const auto finish_step = [&]() noexcept {
    if (failed) {
      stop = true;
      return;
    }
    try {
      step_.step_time_s = std::chrono::duration<double>(Clock::now() - begin).count();
      share_step();
      steps.on_step(step, step_);
      ++step;
      stop = step == steps.first + steps.count;
      if (!stop) prepare_step();
    } catch (...) {
      between = std::current_exception();
      stop = true;
    }
    begin = Clock::now();
  };
  std::barrier step_end(static_cast<std::ptrdiff_t>(ranks_.size()), finish_step);

  begin = Clock::now();
  {
    std::vector<std::jthread> threads;
    for (std::size_t r = 0; r < ranks_.size(); ++r)
      threads.emplace_back([&, r] {
        try {
          while (!stop) {
            step_.ranks[hosted()[r]] = ranks_[r]->executor->run_step(batch_, scalars, timing);
            step_end.arrive_and_wait();
          }
        } catch (const std::exception& failure) {
          failures[r] = std::current_exception();
          failed = true;
          ranks_[r]->communicator->abort(failure.what());
          rendezvous_.abort(failure.what());
          step_end.arrive_and_drop();
        }
      });
  }
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
  if (!between) return;
  // Other processes may be intact: leaving NCCL's communicators in good order would wait for theirs
  // (ncclCommDestroy), while they wait at the rendezvous.
  try {
    std::rethrow_exception(between);
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
