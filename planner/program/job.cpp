#include "planner/program/job.h"

#include <utility>

#include "planner/cluster/mesh.h"

namespace parplan {

Job job_of(const OpGraph& graph, const Cluster& cluster, TrainingSpec training, ParallelSpec spec,
           Placements placements, Schedule schedule) {
  return {.graph = &graph,
          .training = std::move(training),
          .spec = std::move(spec),
          .placements = std::move(placements),
          .schedule = std::move(schedule),
          .backend = cluster.backend(),
          .overhead = memory_overhead(cluster)};
}

}  // namespace parplan
