#include "runtime/local_job.h"

#include <atomic>
#include <barrier>
#include <chrono>
#include <exception>
#include <thread>

#include "runtime/comm/local/local_communicator.h"
#include "runtime/device/cpu/cpu_backend.h"

namespace parplan {

struct LocalJob::World {
  LocalWorld world;
  explicit World(int ranks, const GroupTable& groups) : world(ranks, groups.groups(), GroupTable::channels) {}
};

struct LocalJob::Rank {
  std::unique_ptr<Backend> backend;
  Arena arena;
  Executor executor;

  Rank(const Program& program, const GroupTable& groups, Communicator& communicator, int data_rank, int data_ranks)
      : backend(make_cpu_backend()),
        arena(*backend, program),
        executor(program, groups, *backend, communicator, arena, data_rank, data_ranks) {}
};

LocalJob::LocalJob(const Job& job, const InitialValues& initial)
    : job_(job),
      programs_(lower_all(job)),
      groups_(programs_),
      world_(std::make_unique<World>(static_cast<int>(programs_.size()), groups_)) {
  ranks_.resize(programs_.size());
  batch_.sequence = job.training.sequence_length;
  // Each rank's thread makes and fills its own arena, so that its pages lie near its core.
  std::vector<std::exception_ptr> failures(programs_.size());
  {
    std::vector<std::jthread> threads;
    for (std::size_t r = 0; r < programs_.size(); ++r)
      threads.emplace_back([&, r] {
        try {
          const int data_rank = coordinates_of(job_.spec.mesh, static_cast<int>(r))[static_cast<std::size_t>(Axis::dp)];
          ranks_[r] = std::make_unique<Rank>(programs_[r], groups_, world_->world.communicator(static_cast<int>(r)), data_rank, job_.spec.dp());
          initialise(*job_.graph, programs_[r], ranks_[r]->arena, initial);
        } catch (...) {
          failures[r] = std::current_exception();
        }
      });
  }
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
  step_.ranks.resize(programs_.size());
}

LocalJob::~LocalJob() = default;

const Arena& LocalJob::arena(int rank) const { return ranks_[static_cast<std::size_t>(rank)]->arena; }
const Executor& LocalJob::executor(int rank) const { return ranks_[static_cast<std::size_t>(rank)]->executor; }

LogicalTensors LocalJob::collect(ParameterContent content) const {
  LogicalTensors tensors;
  for (std::size_t r = 0; r < programs_.size(); ++r) parplan::collect(*job_.graph, programs_[r], ranks_[r]->arena, content, tensors);
  return tensors;
}

void LocalJob::run(std::int64_t first_step, std::int64_t steps, const std::function<void(std::int64_t, Batch&)>& batch_of,
                   const std::function<void(std::int64_t, const JobStep&)>& on_step) {
  if (steps == 0) return;
  using clock = std::chrono::steady_clock;
  clock::time_point begin;
  std::int64_t step = first_step;
  StepScalars scalars = step_scalars(job_.training, step);
  const double tokens = static_cast<double>(job_.training.global_batch) * static_cast<double>(job_.training.sequence_length);
  batch_of(step, batch_);

  std::vector<std::exception_ptr> failures(programs_.size());
  std::exception_ptr between;  // from `batch_of` or `on_step`
  bool stop = false;
  std::atomic<bool> failed = false;  // a rank has left; the step is not whole
  const auto finish_step = [&]() noexcept {
    if (failed) {
      stop = true;
      return;
    }
    try {
      step_.step_time_s = std::chrono::duration<double>(clock::now() - begin).count();
      step_.loss = 0.0;
      // Every last-stage rank of data coordinate 0 holds the same reduced loss; one of them is read.
      for (std::size_t r = 0; r < programs_.size(); ++r)
        if (programs_[r].loss_buffer >= 0) {
          step_.loss = ranks_[r]->executor.loss() / tokens;
          break;
        }
      on_step(step, step_);
      ++step;
      stop = step == first_step + steps;
      if (!stop) {
        batch_of(step, batch_);
        scalars = step_scalars(job_.training, step);
      }
    } catch (...) {
      between = std::current_exception();
      stop = true;
    }
    begin = clock::now();
  };
  std::barrier barrier(static_cast<std::ptrdiff_t>(programs_.size()), finish_step);

  begin = clock::now();
  {
    std::vector<std::jthread> threads;
    for (std::size_t r = 0; r < programs_.size(); ++r)
      threads.emplace_back([&, r] {
        try {
          while (!stop) {
            step_.ranks[r] = ranks_[r]->executor.run_step(batch_, scalars);
            barrier.arrive_and_wait();
          }
        } catch (const std::exception& failure) {
          failures[r] = std::current_exception();
          failed = true;
          world_->world.communicator(static_cast<int>(r)).abort(failure.what());
          barrier.arrive_and_drop();
        }
      });
  }
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
  if (between) std::rethrow_exception(between);
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
