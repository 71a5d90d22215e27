#include "planner/search/replica_shares.h"

#include <functional>
#include <map>
#include <queue>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {

// One after another to the replica that then takes least. Since times do not fall, no other shares
// are faster: with T the slowest of these, a replica that has fewer elsewhere leaves its next one,
// which takes T at most here, to another, which has more than here and so takes T or more.
std::vector<int> balanced_shares(std::span<const int> kinds, int micro_batches,
                                 const std::function<Seconds(int, int)>& time) {
  const int replicas = static_cast<int>(kinds.size());
  PARPLAN_ASSERT(micro_batches >= replicas, fmt::format("{} micro-batches for {} replicas", micro_batches, replicas));
  std::map<std::pair<int, int>, Seconds> known;
  const auto time_of = [&](int kind, int count) {
    const auto [entry, is_new] = known.try_emplace({kind, count});
    if (is_new) entry->second = time(kind, count);
    return entry->second;
  };
  std::vector<int> shares(kinds.size(), 1);
  using Next = std::tuple<double, int>;  // seconds with one more, replica
  std::priority_queue<Next, std::vector<Next>, std::greater<>> next;
  for (int replica = 0; replica < replicas; ++replica) next.emplace(time_of(kinds[replica], 2).value, replica);
  for (int left = micro_batches - replicas; left > 0; --left) {
    const int replica = std::get<int>(next.top());
    next.pop();
    const int share = ++shares[static_cast<std::size_t>(replica)];
    next.emplace(time_of(kinds[replica], share + 1).value, replica);
  }
  return shares;
}

}  // namespace parplan
