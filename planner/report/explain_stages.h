#pragma once

#include <string>

#include "planner/plan/plan.h"
#include "planner/plan/reasons.h"

// Where the step's time and memory go, stage by stage and along the critical path.
namespace parplan {

// A work of the critical path in words: "forward of layers", "reduction of gradients".
std::string describe(const CriticalWork& work);

// Each stage's time and memory; empty where there is one stage.
std::string stage_tables(const Plan& plan, const Reasons& reasons);
std::string critical_path_table(const Plan& plan, const Reasons& reasons);
// For which stage of which replica the others wait on unlike devices, and how long; empty where all
// are alike.
std::string deciding_device(const Plan& plan, const Reasons& reasons);

// All stages' kernels in a step, each alone, by where their times come from.
TimeByOrigin kernels_by_origin(const Reasons& reasons);
// The same in words; empty where nothing is known of them.
std::string where_kernel_times_come_from(const Reasons& reasons);
// Likewise communication.
TimeByCommunicationOrigin collectives_by_origin(const Reasons& reasons);
std::string where_communication_times_come_from(const Reasons& reasons);

}  // namespace parplan
