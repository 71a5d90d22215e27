#include "runtime/checkpoint/checkpoint_reader.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/base/error.h"
#include "runtime/checkpoint/crc32.h"
#include "runtime/checkpoint/open_file.h"
#include "runtime/checkpoint/safetensors.h"

namespace parplan {
namespace {

void check_size(const std::string& path, std::int64_t size, const CheckpointFile& file) {
  if (size != file.bytes)
    throw ConfigError({path}, fmt::format("{} bytes; {} were written: it was cut off or altered", size, file.bytes));
}

}  // namespace

CheckpointReader::CheckpointReader(std::string folder, CheckpointIndex index)
    : folder_(std::move(folder)), index_(std::move(index)) {
  std::vector<SafetensorsHeader> headers;
  for (const CheckpointFile& file : index_.files) {
    const std::string path = folder_ + '/' + file.name;
    check_size(path, OpenFile(path).size(), file);
    headers.push_back(read_safetensors_header(path));
  }
  for (CheckpointTensor& tensor : index_.tensors) {
    for (CheckpointPart& part : tensor.parts) {
      const SafetensorsHeader& header = headers[part.file];
      const std::vector<std::int64_t> shape =
          tensor.shape.size() == 1 ? std::vector{part.slice.rows} : std::vector{part.slice.rows, part.slice.columns};
      const auto entry = std::ranges::find(header.entries, tensor.name, &SafetensorsEntry::name);
      if (entry == header.entries.end() || entry->dtype != tensor.dtype || entry->shape != shape)
        throw ConfigError({folder_ + '/' + index_.files[part.file].name},
                          fmt::format("{} of shape [{}] is missing, which {} promises", tensor.name,
                                      fmt::join(shape, ", "), index_name));
      part.begin = header.data_begin + entry->begin;
    }
    tensors_[tensor.name] = &tensor;
  }
}

const CheckpointTensor* CheckpointReader::find(const std::string& tensor) const {
  const auto found = tensors_.find(tensor);
  return found == tensors_.end() ? nullptr : found->second;
}

void CheckpointReader::read(const CheckpointTensor& tensor, const LogicalSlice& slice, float* to) const {
  PARPLAN_ASSERT(tensor.dtype == "F32", tensor.name + " is " + tensor.dtype);
  constexpr std::int64_t element = sizeof(float);
  for (const CheckpointPart& part : tensor.parts) {
    const LogicalSlice both = common(part.slice, slice);
    if (both.rows == 0) continue;
    const OpenFile file(folder_ + '/' + index_.files[part.file].name);
    const auto from = [&](std::int64_t row) {
      return part.begin + element * ((row - part.slice.row) * part.slice.columns + both.column - part.slice.column);
    };
    const auto into = [&](std::int64_t row) {
      return to + (row - slice.row) * slice.columns + both.column - slice.column;
    };
    if (both.columns == part.slice.columns && both.columns == slice.columns) {
      file.read(from(both.row), into(both.row), element * both.elements());
      continue;
    }
    for (std::int64_t row = both.row; row < both.row + both.rows; ++row)
      file.read(from(row), into(row), element * both.columns);
  }
}

void check_file(const std::string& folder, const CheckpointFile& file) {
  const std::string path = folder + '/' + file.name;
  const OpenFile open(path);
  check_size(path, open.size(), file);
  constexpr std::int64_t chunk = std::int64_t{1} << 20;
  std::vector<std::byte> bytes(static_cast<std::size_t>(std::min(chunk, file.bytes)));
  Crc32 crc;
  for (std::int64_t at = 0; at < file.bytes; at += chunk) {
    const std::int64_t count = std::min(chunk, file.bytes - at);
    open.read(at, bytes.data(), count);
    crc.add(std::span(bytes).first(static_cast<std::size_t>(count)));
  }
  if (crc.value() != file.crc32)
    throw ConfigError({path}, fmt::format("its checksum is {:08x}; that of what was written is {:08x}: it was altered",
                                          crc.value(), file.crc32));
}

}  // namespace parplan
