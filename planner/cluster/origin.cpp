#include "planner/cluster/origin.h"

#include <algorithm>

namespace parplan {
namespace {

constexpr std::array<const char*, count_of<Origin>> origin_texts = {"measured", "interpolated", "datasheet"};

constexpr std::array<const char*, count_of<CommunicationOrigin>> communication_texts = {"fitted", "formula", "links"};

constexpr std::array<const char*, count_of<Rate>> rate_texts = {"matrix_fp32",
                                                                "matrix_half",
                                                                "matrix_tf32",
                                                                "matrix_fp8",
                                                                "vector",
                                                                "memory",
                                                                "sustained.half",
                                                                "sustained.weight_gradients",
                                                                "sustained.early_half",
                                                                "sustained.early_weight_gradients",
                                                                "sustained.fp8",
                                                                "sustained.fp8_weight_gradients",
                                                                "sustained.memory",
                                                                "attention.forward",
                                                                "attention.backward",
                                                                "attention.ampere_forward",
                                                                "attention.ampere_backward",
                                                                "attention.triton_forward",
                                                                "attention.triton_backward",
                                                                "unaligned.two_bytes",
                                                                "unaligned.four_bytes",
                                                                "kernel_launch"};

}  // namespace

const char* name(Origin origin) {
  return origin_texts[index_of(origin)];
}
std::vector<std::string> origin_names() {
  return {origin_texts.begin(), origin_texts.end()};
}

const char* name(CommunicationOrigin origin) {
  return communication_texts[index_of(origin)];
}
const char* name(Rate rate) {
  return rate_texts[index_of(rate)];
}
std::vector<std::string> rate_names() {
  return {rate_texts.begin(), rate_texts.end()};
}

RateOrigins less_sure(const RateOrigins& a, const RateOrigins& b) {
  RateOrigins both;
  for (std::size_t i = 0; i < both.of.size(); ++i) both.of[i] = std::max(a.of[i], b.of[i]);
  return both;
}

}  // namespace parplan
