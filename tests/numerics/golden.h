#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "planner/graph/op_graph.h"

namespace parplan {

// The output of tests/golden/make_golden.py by tensor name; the script states the formula of its
// weights and tokens.
struct GoldenTensor {
  std::vector<std::int64_t> sizes;
  std::vector<float> values;
};
std::map<std::string, GoldenTensor> read_golden(const std::string& path);

// The script's values of a parameter, and `count` tokens of its text.
std::vector<float> golden_parameter(const Tensor& tensor);
std::vector<std::int32_t> golden_text(std::int64_t count, std::int64_t vocabulary);

}  // namespace parplan
