#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace parplan {

// The safetensors format (https://github.com/huggingface/safetensors): 8 bytes of length, a JSON
// header, and the tensors' bytes side by side without a gap.

struct SafetensorsEntry {
  std::string name;
  std::string dtype;                // "F32"
  std::vector<std::int64_t> shape;  // row-major
  std::int64_t begin = 0, end = 0;  // bytes, from the end of the header
  bool operator==(const SafetensorsEntry&) const = default;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // ascending by their place
  std::map<std::string, std::string> metadata;
  std::int64_t data_begin = 0;  // bytes from the start of the file
  bool operator==(const SafetensorsHeader&) const = default;
};

// Bytes of an element; 0 for a dtype that the format does not have in whole bytes.
std::int64_t bytes_of_dtype(std::string_view dtype);

// The length and the header, padded so that the tensors begin at a multiple of 64 bytes.
std::string write_safetensors_header(const SafetensorsHeader& header);

// Reads the header of a file. A file that breaks the format in any way (a length beyond the file or
// beyond 100 MB, JSON that is none, duplicate names, offsets that overlap, leave gaps, overflow or
// do not fit shape and dtype) is refused: the ConfigError names the file and the tensor or byte.
SafetensorsHeader read_safetensors_header(const std::string& path);
// The same of a file's first bytes, of which all of the header has to be there.
SafetensorsHeader parse_safetensors_header(std::string_view bytes, std::int64_t file_bytes,
                                           const std::string& file_name);

}  // namespace parplan
