#pragma once

#include <string>
#include <vector>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/load_plan.h"
#include "models/model_file.h"
#include "planner/cluster/cluster.h"
#include "planner/graph/op_graph.h"
#include "planner/plan/plan.h"
#include "planner/report/json.h"
#include "planner/suggest.h"

namespace parplan {

// What the arguments name, found and read.
struct Inputs {
  ModelFile model;
  OpGraph graph;
  Cluster cluster;
  TrainingSpec training;
  std::vector<std::string> defaults;  // fields of `training` that neither the user nor the model's file gave
};

// The cluster that [where] names: this machine's cores where it names none.
Cluster resolve_cluster(const WhereArguments& where, Terminal& terminal, const OutputArguments& output);

Inputs resolve_inputs(const std::string& model, const WhereArguments& where, const WhatArguments& what, Terminal& terminal,
                      const OutputArguments& output);

// The request that the flows of planner/suggest.h take. Refers to `inputs`.
SuggestRequest request_of(const Inputs& inputs, const LayoutRequest& layout);

// ConfigError where a given layout contradicts the devices, the model or the batch, whatever the search would choose for the rest.
void check_layout(const Inputs& inputs, const LayoutRequest& layout, const WhereArguments& where);

// Model, cluster and training in a few lines, defaults marked.
std::string describe_inputs(const ReportInputs& inputs);
ReportInputs report_inputs(const Inputs& inputs);
ReportInputs report_inputs(const Plan& plan);

// JSON and CSV where they were asked for.
void write_outputs(const OutputArguments& output, Terminal& terminal, const Json& json, std::span<const Json> rows);

}  // namespace parplan
