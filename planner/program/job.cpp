#include "planner/program/job.h"

#include <utility>

#include "planner/cluster/mesh.h"

namespace parplan {

Job job_of(const OpGraph& graph, const Cluster& cluster, TrainingSpec training, const ParallelSpec& spec,
           const Placements& placements, Schedule schedule) {
  return {.graph = &graph,
          .training = std::move(training),
          .layout = lay_out(spec, placements),
          .schedule = std::move(schedule),
          .backend = cluster.backend(),
          .overhead = memory_overhead(cluster)};
}

}  // namespace parplan
