#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace parplan {

// A collective that somebody measured by itself, such as NCCL's tests do.
struct PublishedCollective {
  std::string kind;                   // "all_reduce", "all_gather", "reduce_scatter", "alltoall"
  std::optional<std::int64_t> bytes;  // of the whole buffer, as NCCL's tests count them
  std::optional<std::int64_t> nodes;
  std::string notes;                  // names the settings that NCCL was given, if any
};

// A training run that somebody measured and published: a line of a CSV file, as it stands there.
// Absent: not stated. A line of a table of collectives has its device's text in `device`, its ranks
// in `devices`, and its time in `step_seconds`.
struct PublishedRun {
  std::string id, source, engine, family, device, precision, data_parallel, outcome, intra_node, recompute, notes;
  std::string cluster = {};  // a name of configs/clusters, or a file: whose nodes they are
  std::optional<std::int64_t> layers, hidden, heads, kv_heads, feature, vocabulary, sequence, experts;
  std::optional<bool> gated;
  std::optional<std::int64_t> devices, devices_per_node;
  std::optional<double> gbit_s_per_node;  // all NICs of a node together, one way
  std::optional<std::int64_t> dp, zero_stage, tp, pp, virtual_stages, cp, ep;
  std::optional<std::int64_t> shard = {};             // ranks that share one copy of sharded states; all of dp
  std::optional<std::int64_t> recompute_layers = {};  // of the whole model; all
  std::optional<std::int64_t> micro_batch, global_batch;
  std::optional<bool> sequence_parallel;
  std::optional<bool> tied_embeddings = {};  // the head multiplies by the embedding's table
  std::optional<double> step_seconds;
  std::optional<double> memory_gib;  // of the fullest device
  std::optional<PublishedCollective> collective = {};
};

// Reads a file of runs (docs/accuracy.md), vTrain's table of one node of eight A100, or a table of
// collectives, which their headers tell apart. Columns that are not known are ignored. ConfigError
// with the place.
std::vector<PublishedRun> read_published_runs(const std::string& path);

}  // namespace parplan
