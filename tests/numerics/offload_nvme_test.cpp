// What plans that keep state, gradients, parameters and activations in files on NVMe copy and hold.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "planner/base/error.h"
#include "planner/program/lower.h"
#include "planner/program/memory.h"
#include "tests/numerics/plan_runs.h"

namespace parplan {

using namespace testing;

namespace {

ParallelSpec spec_of(const OpGraph& graph, int dp, int zero) {
  ParallelSpec spec;
  spec.mesh.degree = {.dp = dp};
  spec.zero_stage = zero;
  spec.micro_batch = 2;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  spec.offload = Offload{.optimizer = Home::nvme};
  return spec;
}

}  // namespace

TEST_CASE("parameters on NVMe are read for each forward and backward, and written once a step") {
  const OpGraph graph = graph_of("tiny-gpt2");
  for (const DataType type : {DataType::fp32, DataType::bf16}) {
    TrainingSpec training = training_of();
    training.precision = type;
    ParallelSpec spec = spec_of(graph, 2, 3);
    spec.offload = {.optimizer = Home::host, .parameters = Home::host};
    const std::vector<Program> on_host = lower_all(job_of(graph, training, spec));
    spec.offload.parameters = Home::nvme;
    const std::vector<Program> on_nvme = lower_all(job_of(graph, training, spec));
    for (std::size_t rank = 0; rank < on_nvme.size(); ++rank) {
      const Program& program = on_nvme[rank];
      std::int64_t shards = 0, largest = 0;
      for (const Bucket& bucket : program.buckets) {
        shards += bucket.shard_elements;
        largest = std::max(largest, bucket.shard_elements);
      }
      const std::int64_t element = size_of(type);
      const auto buckets = static_cast<std::int64_t>(program.buckets.size());
      // What goes to the device is what is read, and an update reads each once more, and writes it.
      CHECK(program.copied.host.device == on_host[rank].copied.host.device);
      CHECK(program.copied.device == on_host[rank].copied.device);
      const Bytes norms = training.clip_norm > 0.0 ? Bytes(4) : Bytes(0);
      CHECK(program.copied.nvme.host == program.copied.host.device - norms + Bytes(element * shards));
      CHECK(program.copied.host.nvme == Bytes(element * shards));
      CHECK(program.memory.nvme.count == program.arena_bytes.nvme);
      CHECK(program.memory.nvme >= Bytes(element * shards));
      CHECK(program.memory.nvme <= Bytes(element * shards + buckets * buffer_alignment));
      CHECK(program.memory.peak() == on_host[rank].memory.peak());
      // The host has buffers of the largest shard for them: those of updates, and those read ahead.
      const std::int64_t held = element * largest * (state_buffers + std::min<std::int64_t>(buckets, file_buffers));
      const Bytes padding((buckets + state_buffers + file_buffers + 1) * buffer_alignment);
      const Bytes freed = on_host[rank].memory.host - program.memory.host;
      CHECK(freed >= Bytes(element * shards - held) - padding);
      CHECK(freed <= Bytes(element * shards - held) + padding);
    }
  }
}

TEST_CASE("parameters and what layers keep are read ahead, as many as there are buffers on the host for them") {
  const OpGraph graph = graph_of("tiny-llama");
  ParallelSpec spec = spec_of(graph, 1, 0);
  spec.offload = {.optimizer = Home::host, .parameters = Home::nvme};
  const auto most_ahead = [&](std::string_view read, std::string_view taken) {
    const Program program = lower_all(job_of(graph, training_of(), spec)).front();
    int ahead = 0, most = 0;
    for (const Call& call : program.calls) {
      const std::string& name = program.segments[call.segment].name;
      ahead += name == read ? 1 : name == taken ? -1 : 0;
      CHECK(ahead >= 0);
      most = std::max(most, ahead);
    }
    CHECK(ahead == 0);
    return most;
  };
  CHECK(most_ahead("read.parameters", "fetch.parameters") ==
        std::min<int>(file_buffers, static_cast<int>(graph.blocks.size())));
  spec.offload = {.activations = Home::nvme};
  const int most = most_ahead("read.saved", "fetch.saved");
  CHECK(most > 1);
  CHECK(most <= file_buffers);
}

TEST_CASE("what layers keep on NVMe is written once and read once, and the host has only buffers for it") {
  const OpGraph graph = graph_of("tiny-llama");
  for (const ScheduleKind schedule : {ScheduleKind::one_f_one_b, ScheduleKind::zero_bubble_h1}) {
    ParallelSpec spec = spec_of(graph, 1, 0);
    spec.mesh.degree = {.pp = 2};
    spec.schedule = schedule;
    spec.stage_blocks = {static_cast<int>(graph.blocks.size()) - 2, 2};
    spec.offload = {.activations = Home::host};
    const std::vector<Program> on_host = lower_all(job_of(graph, training_of(), spec));
    spec.offload = {.activations = Home::nvme};
    const std::vector<Program> on_nvme = lower_all(job_of(graph, training_of(), spec));
    for (std::size_t rank = 0; rank < on_nvme.size(); ++rank) {
      const Program &program = on_nvme[rank], &other = on_host[rank];
      CHECK(program.copied.device.host == other.copied.device.host);
      CHECK(program.copied.host.device == other.copied.host.device);
      CHECK(program.copied.host.nvme == program.copied.device.host);
      CHECK(program.copied.nvme.host == program.copied.host.device);
      CHECK(program.memory.nvme == other.memory.host);
      CHECK(program.memory.peak() == other.memory.peak());
      std::int64_t staged = 0;
      for (const Buffer& buffer : program.buffers)
        if (buffer.home == Home::host) staged = std::max(staged, buffer.bytes);
      CHECK(program.memory.host <= Bytes(file_buffers * (staged + buffer_alignment)));
    }
  }
}

TEST_CASE("state on NVMe is read and written once a step, and the host holds buffers of the largest bucket for it") {
  const OpGraph graph = graph_of("tiny-gpt2");
  const TrainingSpec training = training_of();
  for (const int zero : {0, 2, 3}) {
    CAPTURE(zero);
    ParallelSpec spec = spec_of(graph, 2, zero);
    const std::vector<Program> on_nvme = lower_all(job_of(graph, training, spec));
    spec.offload = Offload{.optimizer = Home::host};
    const std::vector<Program> on_host = lower_all(job_of(graph, training, spec));
    for (std::size_t rank = 0; rank < on_nvme.size(); ++rank) {
      const Program& program = on_nvme[rank];
      std::int64_t shards = 0, largest = 0;
      for (const Bucket& bucket : program.buckets) {
        shards += bucket.shard_elements;
        largest = std::max(largest, bucket.shard_elements);
      }
      // Two moments and the master copy, in fp32.
      constexpr std::int64_t state = 3 * 4;
      const Bytes padding = static_cast<std::int64_t>(5 * program.buckets.size()) * Bytes(buffer_alignment);
      CHECK(program.copied.nvme.host == Bytes(state * shards));
      CHECK(program.copied.host.nvme == Bytes(state * shards));
      CHECK(program.copied.device == on_host[rank].copied.device);
      CHECK(program.copied.host.device == on_host[rank].copied.host.device);
      CHECK(program.memory.nvme >= Bytes(state * shards));
      CHECK(program.memory.nvme <= Bytes(state * shards) + padding);
      CHECK(program.memory.nvme.count == program.arena_bytes.nvme);
      const Bytes freed = on_host[rank].memory.host - program.memory.host;
      CHECK(freed >= Bytes(state * (shards - state_buffers * largest)) - padding);
      CHECK(freed <= Bytes(state * (shards - state_buffers * largest)) + padding);
      CHECK(program.memory.peak() == on_host[rank].memory.peak());
    }
  }
}

TEST_CASE("while a bucket is updated, the next ones' state is read and the one before it is written") {
  const OpGraph graph = graph_of("tiny-gpt2");
  const Program program = lower_all(job_of(graph, training_of(), spec_of(graph, 1, 0))).front();
  std::vector<std::string> order;
  for (const Call& call : program.calls) {
    const Segment& segment = program.segments[call.segment];
    if (segment.name == "read.state" || segment.name == "write.state" || segment.name == "optimizer")
      order.push_back(segment.name.substr(0, 1));
  }
  const auto buckets = static_cast<int>(program.buckets.size());
  REQUIRE(buckets > state_buffers);
  std::vector<std::string> expected(state_buffers, "r");  // before the first forward
  for (int b = 0; b < buckets; ++b) {
    expected.insert(expected.end(), {"o", "w"});
    if (b + state_buffers < buckets) expected.push_back("r");
  }
  CHECK(order == expected);
}

TEST_CASE("sums of gradients go to their file and back with each micro-batch, and neither memory holds them") {
  const OpGraph graph = graph_of("tiny-gpt2");
  for (const int zero : {0, 1, 2, 3})
    for (const bool clips : {false, true}) {
      CAPTURE(zero);
      CAPTURE(clips);
      TrainingSpec training = training_of();
      training.clip_norm = clips ? 0.5 : 0.0;
      ParallelSpec spec = spec_of(graph, 2, zero);
      spec.micro_batch = 1;
      const std::int64_t micro = micro_batches(spec, training);
      REQUIRE(micro > 2);
      spec.offload = {.optimizer = Home::nvme, .gradients = Home::host};
      const std::vector<Program> on_host = lower_all(job_of(graph, training, spec));
      spec.offload.gradients = Home::nvme;
      const std::vector<Program> on_nvme = lower_all(job_of(graph, training, spec));
      for (std::size_t rank = 0; rank < on_nvme.size(); ++rank) {
        const Program &program = on_nvme[rank], &other = on_host[rank];
        constexpr std::int64_t element = 4;
        std::int64_t sums = 0, shards = 0, largest = 0, files = 0;
        for (const Bucket& bucket : program.buckets) {
          const Buffer& sum = program.buffers[*bucket.gradients];
          if (sum.home != Home::nvme) continue;  // a tied parameter's
          ++files;
          sums += sum.bytes;
          shards += element * bucket.shard_elements;
          largest = std::max(largest, sum.bytes);
        }
        REQUIRE(files + 1 >= static_cast<std::int64_t>(program.buckets.size()));
        // Over the link what goes over it where they are on the host; and all of it to the file and
        // back, where the host reads a shard for the update, and one for the norm.
        CHECK(program.copied.device.host == other.copied.device.host);
        CHECK(program.copied.host.device == other.copied.host.device);
        CHECK(program.copied.host.nvme - other.copied.host.nvme == Bytes((micro - 1) * sums + shards));
        CHECK(program.copied.nvme.host - other.copied.nvme.host ==
              Bytes((micro - 1) * sums + (clips ? 2 : 1) * shards));
        CHECK(program.memory.peak() == other.memory.peak());
        const Bytes padding((files + file_buffers) * buffer_alignment);
        const Bytes filed = program.memory.nvme - other.memory.nvme;
        CHECK(filed >= Bytes(sums) - padding);
        CHECK(filed <= Bytes(sums) + padding);
        const Bytes freed = other.memory.host - program.memory.host;
        CHECK(freed >= Bytes(sums - file_buffers * largest) - padding);
        CHECK(freed <= Bytes(sums - file_buffers * largest) + padding);
      }
    }
}

TEST_CASE("sums of gradients are read ahead, and the norm takes each bucket's in one more pass") {
  const OpGraph graph = graph_of("tiny-llama");
  TrainingSpec training = training_of();
  training.clip_norm = 0.5;
  ParallelSpec spec = spec_of(graph, 1, 0);
  spec.offload = {.optimizer = Home::host, .gradients = Home::nvme};
  const Program program = lower_all(job_of(graph, training, spec)).front();
  int ahead = 0, most = 0, norms = 0, updates = 0, most_of_end = 0;
  for (const Call& call : program.calls) {
    const Segment& segment = program.segments[call.segment];
    const bool is_norm = segment.name == "gradient_norm" && segment.stream == Stream::host;
    norms += is_norm;
    updates += segment.name == "optimizer";
    const bool takes = segment.name == "fetch.gradients" || is_norm || segment.name == "optimizer";
    ahead += segment.name == "read.gradients" ? 1 : takes ? -1 : 0;
    CHECK(ahead >= 0);
    most = std::max(most, ahead);
    if (norms > 0) most_of_end = std::max(most_of_end, ahead);
  }
  const auto blocks = static_cast<int>(graph.blocks.size());
  CHECK(ahead == 0);
  CHECK(norms == blocks);
  CHECK(updates == blocks);
  CHECK(most <= file_buffers);
  CHECK(most_of_end >= std::min(file_buffers, blocks) - 1);
}

TEST_CASE("a folder that takes no file ends the run before its first step, and says what to do") {
  const OpGraph graph = graph_of("tiny-mlp");
  const TrainingSpec training = training_of();
  const auto reason = [&](const std::string& folder) {
    const std::unique_ptr<Rendezvous> rendezvous = alone();
    try {
      LocalJob job(job_of(graph, training, spec_of(graph, 1, 0)), initializer(1), cpu_threads(), *rendezvous, folder);
    } catch (const RunError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(reason("/nonexistent/folder") ==
        "cannot create a file in '/nonexistent/folder' for what a rank keeps on NVMe: No such file or directory; name "
        "a folder with room, which this user may write to, with --nvme-dir (rank 0, before the first step)");
  CHECK(reason("/dev/null").starts_with("cannot create a file in '/dev/null' for what a rank keeps on NVMe: Not a "));
}

}  // namespace parplan
