#include "runtime/model_weights.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "planner/base/allocated.h"
#include "planner/base/error.h"
#include "planner/base/json.h"
#include "planner/graph/trained_graph.h"
#include "runtime/checkpoint/open_file.h"
#include "runtime/checkpoint/safetensors.h"
#include "runtime/device/cpu/host_conversion.h"
#include "runtime/launch/agree_on_inputs.h"
#include "runtime/launch/fingerprint.h"

namespace parplan {
namespace {

constexpr std::int64_t most_bytes_of_file = 5'000'000'000;  // transformers' default for save_pretrained

// "weights/" and "weights" are one folder.
std::string beside(std::string folder, const char* ending) {
  while (folder.size() > 1 && folder.ends_with('/')) folder.pop_back();
  return folder + ending;
}

// A number of a stored tensor.
float stored_number(const WeightFiles::Weights& weights, std::int64_t index) {
  float value = 0.0f;
  widen(weights.type, weights.data + index * size_of(weights.type), 1, &value);
  return value;
}

// A parameter's rows in ascending order.
using RowsOfParameter = std::vector<std::pair<StoredRows, WeightFiles::Weights>>;

std::int64_t columns_of(const StoredTensor& tensor, const StoredRows& rows) {
  if (tensor.shape.size() == 1 || rows.by_element) return 1;
  return rows.transposed ? tensor.shape[0] : tensor.shape[1];
}

// Lies in what an export writes until it is complete: whatever has it may be removed.
constexpr const char* export_mark = ".parplan-export";

bool is_left_by_export(const std::string& folder) {
  std::error_code error;
  if (!std::filesystem::is_directory(std::filesystem::symlink_status(folder, error))) return false;
  return std::filesystem::is_empty(folder, error) || std::filesystem::exists(folder + '/' + export_mark, error);
}

// Adds what an adapter adds to `part`, the rows of a parameter from `first` on.
void merge_adapter(const std::string& parameter, std::int64_t first, std::int64_t columns, double factor,
                   const CheckpointReader& from, std::vector<float>& part) {
  const std::optional<AdapterNames> names = adapter_of(parameter);
  if (!names) return;
  const CheckpointTensor *const inner = from.find(names->in), *const outer = from.find(names->out);
  if (inner == nullptr || outer == nullptr) return;
  const std::int64_t rank = inner->shape[0], rows = std::ssize(part) / columns;
  auto a = allocated<float>(rank * columns, fmt::format("the parameter {}", names->in));
  auto b = allocated<float>(rows * rank, fmt::format("the parameter {}", names->out));
  from.read(*inner, {.row = 0, .rows = rank, .columns = columns}, a.data());
  from.read(*outer, {.row = first, .rows = rows, .columns = rank}, b.data());
  std::vector<double> sums(static_cast<std::size_t>(columns));
  for (std::int64_t row = 0; row < rows; ++row) {
    std::ranges::fill(sums, 0.0);
    for (std::int64_t k = 0; k < rank; ++k)
      for (std::int64_t column = 0; column < columns; ++column)
        sums[column] += static_cast<double>(b[row * rank + k]) * a[k * columns + column];
    for (std::int64_t column = 0; column < columns; ++column)
      part[row * columns + column] = static_cast<float>(part[row * columns + column] + factor * sums[column]);
  }
}

std::vector<std::byte> stored_bytes(const ExportOptions& options, int number, const CheckpointReader& from) {
  const StoredWeights& stored = options.stored;
  const StoredTensor& tensor = stored.tensors[number];
  std::int64_t elements = 1;
  for (const std::int64_t size : tensor.shape) elements *= size;
  auto values = allocated<float>(elements, fmt::format("the weights {}", tensor.name));
  for (const StoredRows& rows : stored.rows) {
    if (rows.tensor != number) continue;
    const CheckpointTensor* const parameter = from.find(rows.parameter);
    PARPLAN_ASSERT(parameter != nullptr, rows.parameter);
    const std::int64_t columns = columns_of(tensor, rows);
    auto part = allocated<float>(rows.rows * columns, fmt::format("the parameter {}", rows.parameter));
    from.read(*parameter, {.row = rows.row, .rows = rows.rows, .columns = columns}, part.data());
    merge_adapter(rows.parameter, rows.row, columns, options.adapter_factor, from, part);
    for (std::int64_t row = 0; row < rows.rows; ++row)
      for (std::int64_t column = 0; column < columns; ++column) {
        const std::int64_t at = rows.transposed ? column * tensor.shape[1] + rows.stored_row + row
                                                : (rows.stored_row + row) * columns + column;
        values[at] = part[row * columns + column] - rows.added;
      }
  }
  const auto bytes = std::as_bytes(std::span(values));
  auto copied = allocated<std::byte>(std::ssize(bytes), fmt::format("the weights {}", tensor.name));
  std::ranges::copy(bytes, copied.begin());
  return copied;
}

// A file of an export: which tensors it holds.
struct ExportFile {
  std::string name;
  std::vector<int> tensors;
  SafetensorsHeader header;
};

std::vector<ExportFile> files_of_export(const StoredWeights& stored) {
  std::vector<ExportFile> files;
  std::int64_t end = 0;
  for (std::size_t i = 0; i < stored.tensors.size(); ++i) {
    const StoredTensor& tensor = stored.tensors[i];
    std::int64_t bytes = sizeof(float);
    for (const std::int64_t size : tensor.shape) bytes *= size;
    if (files.empty() || end + bytes > most_bytes_of_file) {
      files.push_back({.name = {}, .tensors = {}, .header = {.entries = {}, .metadata = {{"format", "pt"}}}});
      end = 0;
    }
    files.back().tensors.push_back(static_cast<int>(i));
    files.back().header.entries.push_back(
        {.name = tensor.name, .dtype = "F32", .shape = tensor.shape, .begin = end, .end = end + bytes});
    end += bytes;
  }
  for (std::size_t i = 0; i < files.size(); ++i)
    files[i].name =
        files.size() == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
  return files;
}

void write_text(const std::string& path, const std::string& text) {
  NewFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.close();
}

void write_export_file(const std::string& folder, const ExportFile& file, const ExportOptions& options,
                       const CheckpointReader& from) {
  NewFile out(folder + '/' + file.name);
  const std::string header = write_safetensors_header(file.header);
  out.write(std::as_bytes(std::span(header)));
  for (const int tensor : file.tensors) out.write(stored_bytes(options, tensor, from));
  out.close();
}

std::string write_weight_index(const std::vector<ExportFile>& files) {
  Json map = Json::object();
  std::int64_t bytes = 0;
  for (const ExportFile& file : files)
    for (const SafetensorsEntry& entry : file.header.entries) {
      map[entry.name] = file.name;
      bytes += entry.end - entry.begin;
    }
  return write_json({{"metadata", {{"total_size", bytes}}}, {"weight_map", map}});
}

// Does `work` in this process; where it fails in any, all throw why.
void all_do(Rendezvous& rendezvous, const std::function<void()>& work) {
  std::string failure;
  try {
    work();
  } catch (const RunError& error) {
    failure = error.what();
  }
  for (const std::vector<std::byte>& bytes : rendezvous.all_gather(std::as_bytes(std::span(failure))))
    if (!bytes.empty()) throw RunError(text_of(bytes));
}

}  // namespace

std::shared_ptr<const WeightFiles> open_weights(const WeightOptions& options, Rendezvous& rendezvous) {
  std::shared_ptr<const WeightFiles> files;
  std::uint64_t sampled = 0;
  agree(rendezvous, [&] {
    files = std::make_shared<WeightFiles>(options.folder);
    files->find(options.stored.tensors);
    if (rendezvous.processes() > 1) sampled = files->sampled_fingerprint();
  });
  agree_on(rendezvous,
           std::vector<Fact>{{"--weights", fmt::format("of the fingerprint {}", write_fingerprint(sampled))}});
  return files;
}

InitialValues stored_values(const std::shared_ptr<const WeightFiles>& files, const StoredWeights& stored,
                            const InitialValues& adapters) {
  const std::vector<WeightFiles::Weights> weights = files->find(stored.tensors);
  auto by_parameter = std::make_shared<std::map<std::string, RowsOfParameter>>();
  for (const StoredRows& rows : stored.rows) (*by_parameter)[rows.parameter].emplace_back(rows, weights[rows.tensor]);
  for (auto& [parameter, rows] : *by_parameter)
    std::ranges::sort(rows, {}, [](const auto& one) { return one.first.row; });
  return [files, by_parameter, adapters](const Tensor& tensor) -> std::function<float(std::int64_t)> {
    if (is_of_adapter(tensor)) return adapters(tensor);
    const RowsOfParameter& rows = by_parameter->at(tensor.name);
    const std::int64_t columns = tensor.dims.size() == 2 ? tensor.dims[1].size : 1;
    return [&rows, columns](std::int64_t index) {
      const std::int64_t row = index / columns, column = index % columns;
      const auto after = std::ranges::upper_bound(rows, row, {}, [](const auto& one) { return one.first.row; });
      const auto& [part, stored_part] = *std::prev(after);
      const std::int64_t stored_row = part.stored_row + row - part.row;
      const std::int64_t at =
          part.transposed ? column * stored_part.shape[1] + stored_row : stored_row * columns + column;
      return stored_number(stored_part, at) + part.added;
    };
  };
}

void check_can_export(const std::string& folder) {
  std::error_code error;
  for (const std::string& left : {folder_of_parts(folder), beside(folder, ".incomplete")})
    if (std::filesystem::exists(std::filesystem::symlink_status(left, error)) && !is_left_by_export(left))
      throw ConfigError(fmt::format("'{}' is needed to write '{}', and was not left there by parplan; move it away, or "
                                    "give --export-weights another name",
                                    left, folder));
  if (std::filesystem::exists(folder, error) && !std::filesystem::is_empty(folder, error))
    throw ConfigError(fmt::format("'{}' is there already; give --export-weights the name of a new folder", folder));
}

void make_export_folder(const std::string& folder) {
  std::error_code error;
  if (is_left_by_export(folder)) std::filesystem::remove_all(folder, error);
  if (!error) std::filesystem::create_directories(folder, error);
  if (error) throw RunError(fmt::format("cannot make the folder '{}': {}", folder, error.message()));
  write_text(folder + '/' + export_mark, "");
}

std::string folder_of_parts(const std::string& folder) {
  return beside(folder, ".parts");
}

void export_weights(const ExportOptions& options, const CheckpointReader& from, Rendezvous& rendezvous) {
  const std::string folder = beside(options.folder, ".incomplete");
  const std::vector<ExportFile> files = files_of_export(options.stored);
  const bool first = rendezvous.process() == 0;
  all_do(rendezvous, [&] {
    if (first) make_export_folder(folder);
  });
  all_do(rendezvous, [&] {
    for (std::size_t i = 0; i < files.size(); ++i)
      if (static_cast<int>(i % static_cast<std::size_t>(rendezvous.processes())) == rendezvous.process())
        write_export_file(folder, files[i], options, from);
  });
  all_do(rendezvous, [&] {
    if (!first) return;
    if (files.size() > 1) write_text(folder + "/model.safetensors.index.json", write_weight_index(files));
    write_text(folder + "/config.json", options.config);
    std::error_code error;
    std::filesystem::remove(folder + '/' + export_mark, error);
    synchronize_folder(folder);
    std::filesystem::rename(folder, options.folder, error);
    if (error) throw RunError(fmt::format("cannot rename '{}': {}", folder, error.message()));
    synchronize_folder(std::filesystem::absolute(beside(options.folder, "")).parent_path().string());
  });
}

}  // namespace parplan
