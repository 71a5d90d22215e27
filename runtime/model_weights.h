#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "planner/graph/stored_weights.h"
#include "runtime/checkpoint/checkpoint_reader.h"
#include "runtime/checkpoint/weight_files.h"
#include "runtime/launch/rendezvous.h"
#include "runtime/parameters.h"

// Weights that other programs wrote or will read: files of Hugging Face's libraries.
namespace parplan {

struct WeightOptions {
  std::string folder = {};    // empty: none are read
  StoredWeights stored = {};  // where each parameter lies in them
};

struct ExportOptions {
  std::string folder = {};  // empty: none are written
  StoredWeights stored = {};
  std::string config = {};  // the text of its config.json
  double adapter_factor = 0.0;  // of the products of adapters that are added to weights
};

// Opens the weights and checks that they are all of the model. Every process calls it.
std::shared_ptr<const WeightFiles> open_weights(const WeightOptions& options, Rendezvous& rendezvous);
// The parameters that they hold, and of adapters, which are not in them, those of `adapters`. Each
// rank reads what it asks for.
InitialValues stored_values(const std::shared_ptr<const WeightFiles>& files, const StoredWeights& stored,
                            const InitialValues& adapters);

// ConfigError where the folder is there and not empty, or where one that an export needs beside it
// was left by somebody else.
void check_can_export(const std::string& folder);
// A folder of this name that an export fills; RunError where it cannot be made. What another one
// left there is removed.
void make_export_folder(const std::string& folder);
// Where the ranks write their parts first.
std::string folder_of_parts(const std::string& folder);
// Writes the parameters of a checkpoint as files of at most 5 GB (`model.safetensors`, or several
// and an index), and config.json. Adapters are merged: W becomes W + factor B A. The processes
// share the files. They are written under a temporary name; the folder has its own once all is on
// the device. RunError says what could not be written.
void export_weights(const ExportOptions& options, const CheckpointReader& from, Rendezvous& rendezvous);

}  // namespace parplan
