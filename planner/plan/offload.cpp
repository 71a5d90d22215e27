#include "planner/plan/offload.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/base/enum_index.h"
#include "planner/base/error.h"
#include "planner/base/text.h"
#include "planner/cluster/host_share.h"

namespace parplan {
namespace {

constexpr OffloadPart parts[] = {
    {.home = &Offload::optimizer, .name = "optimizer", .words = "the optimizer's state"},
    {.home = &Offload::gradients, .name = "gradients", .words = "gradients", .is_updated = true},
    {.home = &Offload::parameters, .name = "parameters", .words = "parameters", .is_updated = true},
    {.home = &Offload::activations, .name = "activations", .words = "what layers keep for their backward"},
};

constexpr std::string_view of_file = ":nvme";

std::string word(const OffloadPart& part, Home home) {
  return std::string(part.name) + (home == Home::nvme ? std::string(of_file) : "");
}

// "a", "a and b", "a, b and c".
std::string listed(const std::vector<std::string>& words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i)
    text += (i == 0 ? "" : i + 1 < words.size() ? ", " : " and ") + words[i];
  return text;
}

std::vector<Offload> list_offloads() {
  std::vector<Offload> all;
  for (const Home parameters : all_homes)
    for (const Home gradients : all_homes)
      for (const Home activations : all_homes)
        for (const Home optimizer : all_homes)
          if (const Offload one{optimizer, gradients, parameters, activations}; !wrong_with(one)) all.push_back(one);
  std::ranges::stable_sort(all, {}, [](const Offload& one) {
    return std::ranges::count_if(parts, [&](const OffloadPart& part) { return one.*part.home == Home::nvme; });
  });
  return all;
}

}  // namespace

std::span<const OffloadPart> offload_parts() {
  return parts;
}

std::span<const Offload> all_offloads() {
  static const std::vector<Offload> all = list_offloads();
  return all;
}

std::optional<std::string> wrong_with(const Offload& offload) {
  for (const OffloadPart& part : parts) {
    const Home home = offload.*part.home;
    if (part.is_updated && home != Home::device && offload.optimizer == Home::device)
      return fmt::format(
          "{} are where the host updates them only with the optimizer's state; legal: optimizer+{} or "
          "optimizer:nvme+{}, or none",
          part.words, word(part, home), word(part, home));
  }
  return std::nullopt;
}

std::string name(const Offload& offload) {
  std::vector<std::string> words;
  for (const OffloadPart& part : parts)
    if (const Home home = offload.*part.home; home != Home::device) words.push_back(word(part, home));
  return words.empty() ? "none" : fmt::format("{}", fmt::join(words, "+"));
}

std::string phrase(const Offload& offload) {
  std::vector<std::string> in_files, on_host;
  for (const OffloadPart& part : parts) {
    if (offload.*part.home == Home::nvme) in_files.emplace_back(part.words);
    if (offload.*part.home == Home::host) on_host.emplace_back(part.words);
  }
  if (in_files.empty() && on_host.empty()) return "without anything in host memory";
  if (in_files.empty()) return fmt::format("with {} in host memory", listed(on_host));
  const std::string files = fmt::format("with {} on NVMe", listed(in_files));
  return on_host.empty() ? files : fmt::format("{}, and {} in host memory", files, listed(on_host));
}

Offload parse_offload(const std::string& text) {
  Offload offload;
  if (text == "none") return offload;
  std::vector<std::string> known{"none"};
  for (const OffloadPart& part : parts)
    for (const Home home : {Home::host, Home::nvme}) known.push_back(word(part, home));
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find('+', begin), text.size());
    std::string_view one = std::string_view(text).substr(begin, end - begin);
    const std::string whole(one);
    const bool in_file = one.ends_with(of_file);
    if (in_file) one.remove_suffix(of_file.size());
    const auto* const part = std::ranges::find(parts, one, &OffloadPart::name);
    if (part == std::end(parts))
      throw ConfigError(fmt::format("expected none, or parts joined by +: {}; found '{}'{}",
                                    join({known.begin() + 1, known.end()}), text, did_you_mean(whole, known)));
    if (offload.*part->home != Home::device)
      throw ConfigError(fmt::format("'{}' names {} twice; name each part once", text, part->name));
    offload.*part->home = in_file ? Home::nvme : Home::host;
    begin = end + 1;
  }
  if (const std::optional<std::string> reason = wrong_with(offload))
    throw ConfigError(fmt::format("there is no offload {}: {}", text, *reason));
  return offload;
}

int number_of(const Offload& offload) {
  int number = 0;
  for (std::size_t p = std::size(parts); p-- > 0;)
    number = number * static_cast<int>(count_of<Home>) + static_cast<int>(index_of(offload.*parts[p].home));
  return number;
}

Offload offload_of(int number) {
  Offload offload;
  for (const OffloadPart& part : parts) {
    offload.*part.home = static_cast<Home>(number % static_cast<int>(count_of<Home>));
    number /= static_cast<int>(count_of<Home>);
  }
  return offload;
}

bool includes(const Offload& whole, const Offload& part) {
  return std::ranges::all_of(
      parts, [&](const OffloadPart& of) { return index_of(whole.*of.home) >= index_of(part.*of.home); });
}

bool uses(const Offload& offload, Home home) {
  return std::ranges::any_of(parts, [&](const OffloadPart& part) { return offload.*part.home == home; });
}

Offload on_host_instead(const Offload& offload) {
  Offload same = offload;
  for (const OffloadPart& part : parts)
    if (same.*part.home == Home::nvme) same.*part.home = Home::host;
  return same;
}

StateHomes state_homes(const Offload& offload) {
  return {.parameters = offload.parameters, .gradients = offload.gradients, .optimizer = offload.optimizer};
}

std::optional<std::string> lacks_homes(const Cluster& cluster, const Offload& offload) {
  if (offload == Offload{}) return std::nullopt;
  if (std::optional<std::string> reason = lacks_host(cluster)) return reason;
  return uses(offload, Home::nvme) ? lacks_nvme(cluster) : std::nullopt;
}

}  // namespace parplan
