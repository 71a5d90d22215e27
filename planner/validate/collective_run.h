#pragma once

#include "planner/base/units.h"
#include "planner/cluster/find_cluster.h"
#include "planner/validate/published_run.h"

namespace parplan {

// A published collective as parplan predicts it.
struct PredictedCollective {
  std::string skipped;               // why it cannot be predicted; empty: it can
  std::vector<std::string> assumed;  // what was filled in
  Seconds time;                      // by collective_time, of one group that communicates alone
};

// Never throws. `run.collective` is set.
PredictedCollective predict_collective(const PublishedRun& run, const ClusterCatalog& catalog);

}  // namespace parplan
