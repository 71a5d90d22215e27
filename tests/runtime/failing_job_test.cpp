// What is said, and written, when a rank fails in the middle of a step.
#include <doctest/doctest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <new>
#include <string>

#include <fmt/format.h>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/base/allocated.h"
#include "planner/base/json.h"
#include "planner/parallel/techniques.h"
#include "planner/program/lower.h"
#include "planner/schedule/schedules.h"
#include "runtime/local_job.h"
#include "tests/temporary_folder.h"

namespace parplan {
namespace {

// A rank's communicator whose all-reduces fail from some time on.
class FailingCommunicator final : public Communicator {
 public:
  FailingCommunicator(std::unique_ptr<Communicator> inner, std::function<void()> before_all_reduce)
      : inner_(std::move(inner)), before_(std::move(before_all_reduce)) {}
  int rank() const override { return inner_->rank(); }
  int ranks() const override { return inner_->ranks(); }
  bool in_order() const override { return inner_->in_order(); }
  Transfer all_reduce(StreamId stream, int group, Reduction reduction, Elements data) override {
    before_();
    return inner_->all_reduce(stream, group, reduction, data);
  }
  Transfer reduce_scatter(StreamId stream, int group, Elements data) override {
    return inner_->reduce_scatter(stream, group, data);
  }
  Transfer all_gather(StreamId stream, int group, Elements data) override {
    return inner_->all_gather(stream, group, data);
  }
  Transfer all_to_all(StreamId stream, int group, Elements from, Elements to) override {
    return inner_->all_to_all(stream, group, from, to);
  }
  Transfer broadcast(StreamId stream, int group, Elements data) override {
    return inner_->broadcast(stream, group, data);
  }
  Transfer reduce(StreamId stream, int group, Elements data) override { return inner_->reduce(stream, group, data); }
  Transfer gather(StreamId stream, int group, Elements own, Elements whole) override {
    return inner_->gather(stream, group, own, whole);
  }
  Transfer scatter(StreamId stream, int group, Elements whole, Elements own) override {
    return inner_->scatter(stream, group, whole, own);
  }
  SendTicket send(StreamId stream, int destination, int channel, Elements data) override {
    return inner_->send(stream, destination, channel, data);
  }
  Transfer wait_sent(StreamId stream, SendTicket ticket) override { return inner_->wait_sent(stream, ticket); }
  Transfer receive(StreamId stream, int source, int channel, Elements data) override {
    return inner_->receive(stream, source, channel, data);
  }
  void check() override { inner_->check(); }
  void abort(const std::string& reason) override { inner_->abort(reason); }

 private:
  std::unique_ptr<Communicator> inner_;
  std::function<void()> before_;
};

class FailingWorld final : public World {
 public:
  FailingWorld(std::unique_ptr<World> inner, std::function<void()> fails)
      : inner_(std::move(inner)), fails_(std::move(fails)) {}
  const std::vector<int>& hosted() const override { return inner_->hosted(); }
  std::unique_ptr<Backend> make_backend(int rank) override { return inner_->make_backend(rank); }
  std::unique_ptr<Communicator> make_communicator(int rank, Backend& backend) override {
    std::unique_ptr<Communicator> made = inner_->make_communicator(rank, backend);
    if (rank != 1) return made;
    return std::make_unique<FailingCommunicator>(std::move(made), fails_);
  }

 private:
  std::unique_ptr<World> inner_;
  std::function<void()> fails_;
};

struct Failed {
  std::string message;
  std::vector<std::string> files;
};

// Two data-parallel ranks, of which rank 1 does something in the all-reduces of step 3.
Failed run_until_failure(const std::string& folder, const std::function<void()>& what) {
  const OpGraph graph =
      build_graph(load_model(std::string(PARPLAN_SOURCE_DIR) + "/tests/data/models/tiny-gpt2.yaml", "").spec, 16);
  TrainingSpec training;
  training.global_batch = 4;
  training.sequence_length = 16;
  ParallelSpec spec;
  spec.mesh.degree = {.pp = 1, .dp = 2, .tp = 1};
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  const Job job{.graph = &graph, .training = training, .layout = lay_out(spec, place(graph, spec)),
                .schedule = row_of(spec.schedule).actions({1, static_cast<int>(micro_batches(spec, training))}),
                .backend = BackendKind::cpu, .overhead = {}};
  std::vector<std::int32_t> numbers;
  for (int i = 0; i < 500; ++i) numbers.push_back(i * 7 % 31);
  const TokenData data(std::move(numbers));
  const std::unique_ptr<Rendezvous> rendezvous = alone();
  JobWatch watch({.timeout = std::chrono::hours(1), .last_resort = [](const auto&, const auto&) {}});
  watch.join(*rendezvous);
  std::atomic<bool> due = false;
  Failed failed;
  try {
    LocalJob ranks(job, initializer(1),
                   [&](const GroupTable& groups, int count) {
                     return std::make_unique<FailingWorld>(cpu_threads()(groups, count), [&] {
                       if (due) what();
                     });
                   },
                   *rendezvous);
    ranks.be_watched(watch, folder);
    ranks.run({.first = 0,
               .count = 9,
               .batch_of =
                   [&](std::int64_t step, Batch& batch) {
                     fill(batch, data, step, training.global_batch);
                     due = step == 3;
                   },
               .timing_of = {},
               .on_step = [](std::int64_t, const JobStep&) {}});
  } catch (const std::exception& error) {
    failed.message = error.what();
  }
  failed.files = watch.write_records();
  return failed;
}

TEST_CASE("a rank that fails says in which step, instruction and group, and all write their last instructions") {
  const testing::TemporaryFolder folder;
  const Failed failed = run_until_failure(folder.root().string(), [] { throw RunError("out of paper"); });
  INFO(failed.message);
  CHECK(failed.message.starts_with("out of paper (rank 1, in step 3, all_reduce_sum in "));
  CHECK(failed.message.ends_with(" of ranks 0, 1)"));
  REQUIRE(failed.files.size() == 2);
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(std::filesystem::path(failed.files[rank]).filename().string().starts_with(
        fmt::format("parplan-rank-{}-of-2.", rank)));
    std::ifstream file(failed.files[rank]);
    std::vector<Json> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(Json::parse(line));
    REQUIRE(lines.size() > 10);
    CHECK(lines.front().at("rank") == rank);
    CHECK(lines.front().at("ranks") == 2);
    CHECK(lines.front().at("reason").get<std::string>().find("out of paper") != std::string::npos);
    // The other rank may be anywhere before the all-reduce, in this step or at the end of the last
    // one, when the watch writes.
    if (rank == 1) {
      CHECK(lines.back().at("step") == 3);
      CHECK(lines.back().at("what") == "all_reduce_sum");
      CHECK(lines.back().at("with_ranks") == Json({0, 1}));
    }
    for (std::size_t i = 2; i < lines.size(); ++i)
      CHECK(lines[i].at("before_s").get<double>() <= lines[i - 1].at("before_s").get<double>());
  }
  // Nothing but the two files: they came under their names when they were whole.
  CHECK(std::distance(std::filesystem::directory_iterator(folder.root()), {}) == 2);
}

TEST_CASE("a rank without memory ends the job with a RunError that names it") {
  const testing::TemporaryFolder folder;
  const Failed failed = run_until_failure(folder.root().string(), [] { throw std::bad_alloc(); });
  CHECK(failed.message.starts_with("out of memory (rank 1, in step 3, all_reduce_sum in "));
  const Failed sized = run_until_failure(folder.root().string(), [] { throw RefusedAllocation(3 * 1024 * 1024); });
  CHECK(sized.message.starts_with("out of memory: 3.00 MiB were asked for (rank 1, in step 3, all_reduce_sum in "));
}

}  // namespace
}  // namespace parplan
