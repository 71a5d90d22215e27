#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "planner/graph/op_graph.h"

namespace parplan {

// What tests/golden/make_golden.py wrote, by tensor name; the formula of its weights and tokens
// stands there.
struct GoldenTensor {
  std::vector<std::int64_t> sizes;
  std::vector<float> values;
};
std::map<std::string, GoldenTensor> read_golden(const std::string& path);

// The values that the script gave a parameter, and `count` tokens of its text.
std::vector<float> golden_parameter(const Tensor& tensor);
std::vector<std::int32_t> golden_text(std::int64_t count, std::int64_t vocabulary);

}  // namespace parplan
