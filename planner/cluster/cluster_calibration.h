#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "planner/base/units.h"
#include "planner/base/yaml.h"
#include "planner/cluster/cluster.h"
#include "planner/graph/engine.h"
#include "planner/graph/tensor.h"

namespace parplan {

// What measured steps say of a cluster (docs/calibration.md): the share that training reached there
// of the rates in its files and, for its hosts, of the ops that they submit in the time of the
// engine's file (Engine::host_per_op). A share acts on rates that the cost model has anyway, never
// on a step.
enum class ClusterConstant { kernels, node_links, network, host, count_ };

struct ClusterConstantRow {
  ClusterConstant constant{};
  const char* key;    // in files
  const char* words;  // what the share is of
  const char* bound;  // what the highest share stands for
  // The highest share: with it, nothing is faster than its datasheet says.
  double (*most)(const Cluster& cluster, DataType precision) = nullptr;
  // Takes that share of the rates; each stays within what its own datasheet says.
  void (*take)(Cluster& cluster, Engine& engine, double share) = nullptr;
  bool of_any_cluster = true;  // not only of the one where it was fitted
};
std::span<const ClusterConstantRow> cluster_constants();
const ClusterConstantRow& row_of(ClusterConstant constant);
// What reaches less than a tenth of what its file says, or more than ten times that, has another
// cause.
inline constexpr double least_share = 0.1;
inline constexpr double most_share = 10.0;
// Where no datasheet is known: as in fits of kernels (planner/cost/calibration.cpp).
inline constexpr double most_share_without_datasheet = 2.0;

struct FittedShare {
  ClusterConstant constant{};
  double share = 1.0;
  // How many per cent the share moves where the measured steps are wrong by one; nothing where it
  // is held at a bound.
  std::optional<double> percent_per_percent;
  bool operator==(const FittedShare&) const = default;
};

// A step to which shares were fitted.
struct FittedStep {
  std::string model;
  std::string layout;
  int devices = 1;
  std::int64_t global_batch = 1;
  std::int64_t sequence_length = 1;
  DataType precision = DataType::bf16;
  Seconds measured;
  Seconds before;  // predicted with the rates of the files
  Seconds after;   // and with the shares
  bool operator==(const FittedStep&) const = default;
};

struct ClusterCalibration {
  std::string cluster;               // its name
  std::vector<std::string> devices;  // their kinds
  std::string engine;                // that ran the steps
  std::vector<FittedShare> shares;
  std::vector<FittedStep> steps;
  bool operator==(const ClusterCalibration&) const = default;
};
// calibration.yaml; read(write(c)) equals c, to the digits that are written.
ClusterCalibration read_calibration(const YamlNode& document);
std::string write_calibration(const ClusterCalibration& calibration);

// Takes the shares, and sets the cluster's `calibrated`. The shares of links are left out, with a
// note, where the cluster has another name. ConfigError where the devices are of other kinds,
// nothing of the calibration is of this cluster, or the cluster is calibrated already.
void calibrate(Cluster& cluster, Engine& engine, const ClusterCalibration& calibration);

}  // namespace parplan
