#include "planner/cluster/axis.h"

#include <algorithm>
#include <vector>

#include "planner/base/error.h"
#include "planner/base/text.h"

namespace parplan {
namespace {

struct AxisRow {
  const char* name;
  const char* word;
};
constexpr std::array<AxisRow, count_of<Axis>> axis_rows = {{
    {"pp", "pipeline"},
    {"dp", "data"},
    {"cp", "context"},
    {"ep", "expert"},
    {"tp", "tensor"},
}};

}  // namespace

const char* name(Axis axis) { return axis_rows[index_of(axis)].name; }
const char* axis_word(Axis axis) { return axis_rows[index_of(axis)].word; }

std::string write_order(const AxisOrder& order) {
  std::string text;
  for (const Axis axis : order) {
    if (!text.empty()) text += '-';
    text += name(axis);
  }
  return text;
}

AxisOrder parse_order(const std::string& text) {
  AxisOrder order;
  std::vector<std::string> allowed;
  do {
    if (text == write_order(order)) return order;
    allowed.push_back(write_order(order));
  } while (std::next_permutation(order.begin(), order.end()));
  throw ConfigError("expected an order of the mesh axes, one of " + join(allowed) + ", found '" + text + "'" +
                    did_you_mean(text, allowed));
}

}  // namespace parplan
