#pragma once

#include <string>
#include <utility>
#include <vector>

#include "planner/plan/plan.h"

namespace parplan {

// What starts a plan so that each rank gets the device for which it was planned: rank r gets the
// cluster's device r.
struct LaunchLine {
  std::vector<std::pair<std::string, std::string>> environment;  // to be set where devices were selected, in this order
  std::vector<std::string> commands;  // alternatives (docs/launch.md); empty where parplan cannot run the plan
  std::vector<std::string> notes;
  bool operator==(const LaunchLine&) const = default;
};
LaunchLine launch_line(const Plan& plan, const std::string& plan_file);

// The i-th command with its variables in front, for a shell: "CUDA_DEVICE_ORDER=PCI_BUS_ID
// CUDA_VISIBLE_DEVICES=2,0 parplan run plan.yaml".
std::string shell_line(const LaunchLine& line, std::size_t command = 0);

// For people: one line per command and note.
std::string write_launch_line(const LaunchLine& line);

}  // namespace parplan
