#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/load_plan.h"
#include "models/model_file.h"
#include "planner/cluster/cluster.h"
#include "planner/graph/op_graph.h"
#include "planner/plan/plan.h"
#include "planner/report/suggest_and_run_json.h"
#include "planner/suggest.h"

namespace parplan {

// The inputs that the arguments name, found and read.
struct Inputs {
  ModelFile model;
  OpGraph graph;
  Cluster cluster;
  TrainingSpec training;
  std::vector<std::string> defaults;  // fields of `training` that neither the user nor the model's file gave
};

// The cluster that [where] names; this machine's cores if it names none.
Cluster resolve_cluster(const WhereArguments& where, Terminal& terminal, const OutputArguments& output);

// Takes the shares of a calibration's file (planner/cluster/cluster_calibration.h). Says where it
// is of another engine's steps; empty where it is not.
std::string calibrate(Cluster& cluster, Engine& engine, const std::string& file);

Inputs resolve_inputs(const std::string& model, const WhereArguments& where, const WhatArguments& what,
                      Terminal& terminal, const OutputArguments& output);

// The training on a cluster: the given values, else those of the model's file, else defaults, whose
// fields are added to `defaults`.
TrainingSpec choose_training(const Cluster& cluster, const ModelFile& model, const WhatArguments& what,
                             std::vector<std::string>& defaults);

// Says that the default length is below the model's context; empty where it is not.
std::string note_on_length(const ModelSpec& model, const TrainingSpec& training,
                           const std::vector<std::string>& defaults);

// bf16 where all devices have units for it, else fp16 (V100, TITAN RTX, T4), else fp32.
DataType default_precision(const Cluster& cluster);
// The default for the devices that a plan uses, where `defaults` has the precision; else empty.
PrecisionOf precision_of(const std::vector<std::string>& defaults);

// Sets the given cost of every device for an hour; ConfigError where the prices that the cluster
// then has cannot be added.
void set_price(Cluster& cluster, const std::optional<Price>& price);

// Sets the share of memory that plans leave free: the given one, else the cluster's own, else the
// default (planner/report/error_band.h), but none where memory is limited.
void leave_headroom(Cluster& cluster, const Engine& engine, const std::optional<double>& given, bool is_limited);
// Replaces the devices' memory by the limit, or by its share of each kind of device, so that the
// plan carries it. ConfigError where no device has as much.
void limit_memory(Cluster& cluster, const MemoryLimit& limit, Terminal& terminal, const OutputArguments& output);

// The request for the flows of planner/suggest.h. It refers to `inputs`.
SuggestRequest request_of(const Inputs& inputs, const LayoutRequest& layout);

// Throws ConfigError where a given layout contradicts the devices, the model or the batch, whatever
// the search would choose for the rest.
void check_layout(const Inputs& inputs, const LayoutRequest& layout, const WhereArguments& where);
void check_layout(const OpGraph& graph, const TrainingSpec& training, const Cluster& cluster,
                  const LayoutRequest& layout, const WhereArguments& where);

// Model, cluster and training in a few lines, defaults marked.
std::string describe_inputs(const ReportInputs& inputs);
ReportInputs report_inputs(const Inputs& inputs);
ReportInputs report_inputs(const Plan& plan);

}  // namespace parplan
