#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/plan/plan.h"
#include "runtime/checkpoints.h"
#include "runtime/choose_world.h"
#include "runtime/launch/job_watch.h"
#include "runtime/measured_step.h"
#include "runtime/model_weights.h"

namespace parplan {

// What a run does after a step whose loss or gradients are not finite: it ends; or the step changes
// no parameter, and the run goes on. fp16, whose loss scale has to find its size, always goes on
// where the gradients alone are not finite.
enum class OnNotFinite { stop, skip };
const char* name(OnNotFinite what);

// The training of a run that has to know the norm of all gradients: with a clip norm that clips
// nothing where the plan computes no norm. The bits of the parameters are the same.
TrainingSpec with_gradient_norm(TrainingSpec training);

// What is known of a step when it is done.
struct StepRecord {
  std::int64_t step = 0;  // from 0
  double loss = 0.0;      // mean per token
  std::optional<double> gradient_norm = {};  // before clipping, where the plan computes it
  double learning_rate = 0.0;
  Seconds time;
  bool skipped = false;  // its gradients were not finite, and it changed no parameter
};

struct RunOptions {
  std::int64_t steps = 20;  // all of them, with those before the checkpoint that it goes on from
  std::vector<std::string> data = {};  // paths of text, token or image files; none: random images
  std::optional<std::uint64_t> shuffle = {};  // the seed of the order of sequences; as they stand without
  bool notes_epochs = false;  // says how long an epoch is, where the data starts over
  WorldOptions world = {};
  std::string nvme_folder = {};  // for what ranks keep on NVMe; empty: default_nvme_folder
  CheckpointOptions checkpoint = {};
  WeightOptions weights = {};         // initial parameters; those of a checkpoint come first
  ExportOptions exported_weights = {};  // written after the last step
  OnNotFinite on_not_finite = OnNotFinite::stop;  // to skip, the plan has to compute the gradient norm
  // The signal that this process received, if any: the job ends after the present step. May be
  // empty.
  std::function<std::optional<int>()> signal = {};
  // Which ends the job's waiting when it has failed; may be null. The ranks' last instructions are
  // then written to files of this folder.
  JobWatch* watch = nullptr;
  std::string records_folder = {};
  std::function<void()> on_start = {};  // when it is clear that the plan can run here; may be empty
  std::function<void(const StepRecord&)> on_step = {};  // may be empty
  // Lines for people, of checkpoints: what was done, and what could not be. May be empty.
  std::function<void(const std::string&)> on_note = {}, on_failure = {};
};

struct RunReport {
  std::int64_t first_step = 0;  // that of the checkpoint that it went on from
  std::int64_t steps = 0;       // executed
  std::optional<std::int64_t> checkpoint;  // the step of the last one that was written
  int failed_checkpoints = 0;
  std::int64_t skipped_steps = 0;
  // Why there are fewer than were asked for: a signal, or what was not finite ("the loss of step 3
  // is not a number").
  std::optional<int> signal;
  std::string not_finite;
  // Every `listed_every`-th step from the first: all of them up to StepLists::most.
  std::vector<double> loss;  // mean per token
  std::vector<Seconds> step_times;
  std::int64_t listed_every = 1;
  // Whether a step was profiled, so that `measured` and `instructions` say something: not on GPUs
  // where the run ended before its last step.
  bool is_profiled = false;
  // Time: the median step after the warm-up on the rank that computed longest. Where profiling a
  // step costs time (GPUs), only the last step is profiled, and its parts are scaled to the median
  // step.
  // Memory: parts as planned, overhead as reported by the device's driver.
  StepResult measured;
  int measured_rank = 0;             // the rank that computed longest
  PerHome<std::vector<Bytes>> arena_bytes;    // promised, per rank
  PerHome<std::vector<Bytes>> touched_bytes;  // highest arena byte touched, per rank
  Bytes process_growth;              // of this process's resident memory from start to end
  std::vector<int> hosted;           // the ranks of this process
  // GPUs, one per rank: memory of the fullest in use at the end, by all programs.
  std::optional<Bytes> device_used;
  std::vector<InstructionComparison> instructions;  // of `measured_rank`
  std::string not_recorded;  // why some repeated work of this process was submitted each time, if any was
};

// The flow of `parplan run`: lowers the plan for every rank, executes `options.steps` steps and
// compares. Every process of the job calls it and gets the whole report. Throws ConfigError if this
// build or machine cannot run the plan (it says what is missing) or the processes were not started
// alike; RunError if running failed; InternalError if the plan's prediction is not the plan's
// (before the first step), or if the run broke a promise (peak or communicated bytes).
RunReport run_plan(const OpGraph& graph, const Plan& plan, const RunOptions& options, Rendezvous& rendezvous);

}  // namespace parplan
