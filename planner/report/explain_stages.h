#pragma once

#include <string>
#include <vector>

#include "planner/plan/plan.h"
#include "planner/plan/reasons.h"

// Where the step's time and memory go, stage by stage and along the critical path.
namespace parplan {

// A work of the critical path in words: "layers", "reductions of gradients".
std::string describe(const CriticalWork& work);

// Each stage's time and memory; empty where there is one stage.
std::string stage_tables(const Plan& plan, const Reasons& reasons);
std::string critical_path_table(const Plan& plan, const Reasons& reasons);

// A kind of device with the ranks (by their place in the details) that are on it, where a plan is
// on unlike devices. A rank that several kinds share is of each of them: it goes at the pace of the
// slowest, the one on which its kernels take longest, and the others wait for that.
struct DecidingDevice {
  std::string device;
  std::vector<int> ranks = {};
  std::vector<std::string> waits_for = {};  // by rank: the slowest that shares it, if slower; else empty
  Seconds on_path = {};  // what ranks at its pace compute on the critical path, recomputation included
  double share = 0.0;    // of all that is computed on it
  // Of its ranks, in the whole step; beside a slower kind, with what its kernels take less than on
  // that one.
  Seconds waits_least = {};
  Seconds waits_most = {};
};
// The kinds of device, the one that decides first: at whose pace most of the critical path's
// computation goes (ties: the one with the first rank). Empty where all are alike.
std::vector<DecidingDevice> deciding_devices(const Plan& plan, const Reasons& reasons);
// The same in words.
std::string deciding_device(const Plan& plan, const Reasons& reasons);

// All stages' kernels in a step, each alone, by where their times come from.
TimeByOrigin kernels_by_origin(const Reasons& reasons);
// The same in words, with the devices whose products have the rates of loops (knows_sustained);
// empty where nothing is known of them.
std::string where_kernel_times_come_from(const Plan& plan, const Reasons& reasons);
// Likewise communication.
TimeByCommunicationOrigin collectives_by_origin(const Reasons& reasons);
std::string where_communication_times_come_from(const Reasons& reasons);

}  // namespace parplan
