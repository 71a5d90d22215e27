#pragma once

#include <string>
#include <utility>
#include <vector>

#include "planner/plan/plan.h"

namespace parplan {

// What starts a plan so that each rank gets the device that it was planned on: rank r the cluster's
// device r.
struct LaunchLine {
  std::vector<std::pair<std::string, std::string>> environment;  // to be set where devices were selected, in this order
  std::vector<std::string> commands;  // any of them does (docs/launch.md); none where parplan does not run the devices
  std::vector<std::string> notes;
  bool operator==(const LaunchLine&) const = default;
};
LaunchLine launch_line(const Plan& plan, const std::string& plan_file);

// The i-th command behind its variables, for a shell: "CUDA_DEVICE_ORDER=PCI_BUS_ID
// CUDA_VISIBLE_DEVICES=2,0 parplan run plan.yaml".
std::string shell_line(const LaunchLine& line, std::size_t command = 0);

// For people: a line for each command and note.
std::string write_launch_line(const LaunchLine& line);

}  // namespace parplan
