#pragma once

#include <cstdint>

namespace parplan {

// out[i] = ((inputs[0][i] + inputs[1][i]) + inputs[2][i]) + ..., or the maximum, in which NaN wins;
// `out` may be one of the `count` inputs. With the chosen instruction set (instruction_sets.h).
using InOrder = void (*)(float* out, const float* const* inputs, int count, std::int64_t elements);
InOrder host_sum_in_order();
InOrder host_max_in_order();

}  // namespace parplan
