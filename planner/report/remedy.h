#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "planner/base/json.h"
#include "planner/cluster/cluster.h"
#include "planner/plan/memory_verdict.h"
#include "planner/plan/reasons.h"

namespace parplan {

// Why none fits, where there are candidates: "of 12 candidates none fits in 79.1 GiB of memory a
// device". `smallest`: what the one lacks that needs the least memory on a device; where that is
// there, the host or its drives lack room.
std::string why_none_fits(std::int64_t candidates, const Cluster& cluster, const std::optional<Shortage>& smallest);

// "24 devices instead of 8 (dp1 tp8 pp3 mb1 1f1b pp>tp, 2.31 s a step, 78.1 GiB a device)"
std::string describe(const Remedy& remedy);

// An object of "changes" (docs/json.md). The row of its plan has no rank.
Json remedy_json(const Remedy& remedy);

}  // namespace parplan
