#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "planner/base/file.h"
#include "runtime/checkpoints.h"
#include "runtime/run.h"
#include "tests/numerics/plan_runs.h"

namespace parplan::testing {

// A job with its data, which can be stopped and gone on with.
struct Trainer {
  const OpGraph& graph;
  Plan plan;
  std::unique_ptr<Rendezvous> rendezvous = alone();
  LocalJob job;
  std::vector<double> losses = {};

  Trainer(const OpGraph& of, const Job& description, const MakeWorld& make_world = cpu_threads())
      : graph(of), job(description, initializer(description.training.seed), make_world, *rendezvous) {
    plan.training = description.training;
    plan.model_text = "name: " + of.name + '\n';
  }
  std::vector<Fact> facts() const { return {{"optimizer", name(plan.training.optimizer)}}; }

  void train(std::int64_t first, std::int64_t count, Checkpoints* checkpoints = nullptr) {
    job.run({.first = first,
             .count = count,
             .batch_of =
                 [&](std::int64_t step, Batch& batch) {
                   std::mt19937 random(static_cast<std::uint32_t>(step));
                   batch.ids.resize(static_cast<std::size_t>(global_batch * (sequence + 1)));
                   for (std::int32_t& id : batch.ids)
                     id = static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(graph.vocabulary));
                 },
             .timing_of = {},
             .on_step =
                 [&](std::int64_t step, const JobStep& result) {
                   losses.push_back(result.loss);
                   if (checkpoints != nullptr) checkpoints->save(position(step + 1));
                 }});
  }
  TrainingPosition position(std::int64_t step) const {
    return {.step = step, .skipped_steps = job.skipped(), .next_sample = step * global_batch};
  }
  void save(const std::string& folder, std::int64_t step) {
    std::vector<std::string> said;
    const auto say = [&](const std::string& line) { said.push_back(line); };
    Checkpoints checkpoints({.folder = folder}, job, graph, plan, facts(), *rendezvous, {.say = say, .complain = say});
    checkpoints.save(position(step));
    checkpoints.finish();
    CHECK(said == std::vector<std::string>{"wrote checkpoint " + path_of_checkpoint(folder, step)});
    CHECK(checkpoints.failures() == 0);
  }
  void load(const std::string& folder) {
    const auto reader = find_checkpoint(folder, graph, plan, facts(), *rendezvous);
    REQUIRE(reader != nullptr);
    restore(job, graph, plan.training, *reader);
  }
};

// All numbers of the newest checkpoint in a folder, by tensor, bit by bit.
inline std::map<std::string, std::vector<std::uint32_t>> content_of(const std::string& folder) {
  const std::string path = path_of_checkpoint(folder, complete_checkpoints(folder).back());
  const CheckpointReader reader(path, read_index(read_file(path + "/checkpoint.json"), path));
  std::map<std::string, std::vector<std::uint32_t>> content;
  for (const CheckpointTensor& tensor : reader.index().tensors) {
    const LogicalSlice whole{.rows = tensor.shape[0], .columns = tensor.shape.size() == 2 ? tensor.shape[1] : 1};
    std::vector<float> values(static_cast<std::size_t>(whole.elements()));
    reader.read(tensor, whole, values.data());
    std::vector<std::uint32_t>& bits = content[tensor.name];
    bits.resize(values.size());
    std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
  }
  return content;
}

}  // namespace parplan::testing
