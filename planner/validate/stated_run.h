#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "planner/cluster/find_cluster.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/layout_choices.h"
#include "planner/validate/published_run.h"

namespace parplan {

// A decoder as published runs state it.
struct StatedModel {
  std::string name;
  std::int64_t layers = 0, hidden = 0, heads = 0, kv_heads = 0, feature = 0, vocabulary = 0, sequence = 0;
  // The feed-forward layers are gated, as in Llama, and with them come its rotary positions, RMS
  // norms and the lack of biases; else all is as in GPT-2.
  bool gated = false;
  bool tied_embeddings = true;  // the head multiplies by the embedding's table
  bool alibi = false;  // ALiBi in place of GPT-2's positions, and a norm of the embedding, as in BLOOM
  // What of the layers and of the sequence is the decoder's of a T5; 0: it is another model.
  std::int64_t decoder_layers = 0, decoder_sequence = 0;
};

// What a published figure of memory counts.
enum class MemoryScope {
  allocated,  // torch.cuda.max_memory_allocated: tensors in use
  reserved,   // torch.cuda.max_memory_reserved: with what the allocator keeps
  device,     // nvidia-smi: with the context and libraries
};
const char* name(MemoryScope scope);

// In StatedRun::assumed.
inline constexpr const char* assumed_sequence_parallel = "sequence parallelism: true";

// A published run as parplan simulates it.
struct StatedRun {
  std::string skipped;               // why it cannot be simulated; empty: it can
  std::vector<std::string> assumed;  // facts that were not published, as they are filled in
  StatedModel model;
  Cluster cluster;
  TrainingSpec training;
  bool has_engine = false;     // training.engine is known: the run was not skipped before
  std::string engine_differs;  // what of it is not as in its file, and why; empty: nothing
  LayoutRequest layout;
  // What is recomputed was not published, and is not in `layout`: it is the least with which a run
  // that took place fits, of what a search would choose from.
  bool recompute_unstated = false;
  // Sequence parallelism was not published, and is in `layout` with `assumed_sequence_parallel`: it
  // holds where the model allows it.
  bool sequence_parallel_unstated = false;
  MemoryScope memory_scope = MemoryScope::device;
};

// Where a run's facts are looked up, and what it is predicted as.
struct ValidationRequest {
  ClusterCatalog catalog;
  std::filesystem::path engines;      // configs/engines
  std::optional<std::string> engine;  // of all runs; otherwise each run's own (docs/accuracy.md)
};

// Never throws: what the model, the cluster, the layout or the engine refuses is in `skipped`.
StatedRun state(const PublishedRun& run, const ValidationRequest& request);

}  // namespace parplan
