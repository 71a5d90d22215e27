#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace parplan {

// Where a model's parameters lie in the files of another program.

struct StoredTensor {
  std::string name;
  std::vector<std::int64_t> shape;
  // Another name under which files may have it; empty if there is none.
  std::string alias = {};
  bool operator==(const StoredTensor&) const = default;
};

// Rows of a parameter, and where they are stored: as rows of a tensor from `stored_row` on, or as
// its columns where it is transposed.
struct StoredRows {
  std::string parameter;
  std::int64_t row = 0, rows = 0;
  int tensor = 0;  // of StoredWeights
  std::int64_t stored_row = 0;
  bool transposed = false;
  bool by_element = false;  // the tensor is a matrix, and its elements are the rows of a vector
  float added = 0.0f;       // parameter = stored + added
  bool operator==(const StoredRows&) const = default;
};

struct StoredWeights {
  std::vector<StoredTensor> tensors;
  std::vector<StoredRows> rows;  // of each parameter all, once
};

}  // namespace parplan
