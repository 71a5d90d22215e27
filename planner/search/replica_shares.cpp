#include "planner/search/replica_shares.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

// A kind of replica on the line through two of its times.
struct Line {
  int kind = 0;
  int replicas = 0;
  int at = 1;            // a number of micro-batches, ...
  double seconds = 0.0;  // its time, ...
  double slope = 0.0;    // and that of another one
  double count_until(double time) const {
    return slope > 0.0 ? at + (time - seconds) / slope : std::numeric_limits<double>::infinity();
  }
};

// The micro-batches of each line with which all take equally long, in all `micro_batches`; each at
// least one.
std::vector<int> level(const std::vector<Line>& lines, int micro_batches) {
  const auto shares_until = [&](double time) {
    std::vector<int> shares;
    for (const Line& line : lines)
      shares.push_back(static_cast<int>(std::clamp(line.count_until(time), 1.0, static_cast<double>(micro_batches))));
    return shares;
  };
  const auto sum = [&](const std::vector<int>& shares) {
    std::int64_t all = 0;
    for (std::size_t i = 0; i < lines.size(); ++i) all += std::int64_t{lines[i].replicas} * shares[i];
    return all;
  };
  double low = std::numeric_limits<double>::infinity(), high = 0.0;
  for (const Line& line : lines) {
    low = std::min(low, line.seconds - line.slope * (line.at - 1));
    high = std::max(high, line.seconds + line.slope * std::max(micro_batches - line.at, 0));
  }
  constexpr int halvings = 40;
  for (int i = 0; i < halvings; ++i) {
    const double middle = low + (high - low) / 2;
    (sum(shares_until(middle)) <= micro_batches ? low : high) = middle;
  }
  return shares_until(low);
}

}  // namespace

// One after another to the replica that then takes least. Since times do not fall, no other shares
// are faster: with T the slowest of these, a replica that has fewer elsewhere leaves its next one,
// which takes T at most here, to another, which has more than here and so takes T or more.
// What is handed out so are the least of all next ones, by time, then by replica. The same shares
// come out whatever they begin with, once none that is left is less than one that is handed out;
// they begin where lines through two times of each kind say, so that few times are asked for.
std::vector<int> balanced_shares(std::span<const int> kinds, int micro_batches,
                                 const std::function<Seconds(int, int)>& time) {
  const int replicas = static_cast<int>(kinds.size());
  PARPLAN_ASSERT(micro_batches >= replicas, fmt::format("{} micro-batches for {} replicas", micro_batches, replicas));
  std::map<std::pair<int, int>, Seconds> known;
  const auto time_of = [&](int kind, int count) {
    const auto [entry, is_new] = known.try_emplace({kind, count});
    if (is_new) entry->second = time(kind, count);
    return entry->second.value;
  };

  // Kinds that take forever with as many as all on average begin with one.
  std::map<int, int> replicas_of;
  for (const int kind : kinds) ++replicas_of[kind];
  const int average = micro_batches / replicas;
  std::vector<Line> lines;
  int left = micro_batches;
  for (const auto& [kind, count] : replicas_of) {
    const double least = time_of(kind, 1), usual = average > 1 ? time_of(kind, average) : least;
    if (average > 1 && std::isfinite(usual))
      lines.push_back({.kind = kind,
                       .replicas = count,
                       .at = average,
                       .seconds = usual,
                       .slope = std::max(usual - least, 0.0) / (average - 1)});
    else
      left -= count;
  }
  std::map<int, int> first;
  // The second time, the lines go through the times of what the first ones say.
  for (int round = 0; round < 2 && !lines.empty(); ++round) {
    const std::vector<int> shares = level(lines, left);
    for (std::size_t i = 0; i < lines.size(); ++i) {
      Line& line = lines[i];
      first[line.kind] = shares[i];
      const double seconds = time_of(line.kind, shares[i]);
      if (!std::isfinite(seconds)) {
        // The most that do not take forever.
        int never = shares[i];
        for (first[line.kind] = line.at; never - first[line.kind] > 1;) {
          const int middle = std::midpoint(first[line.kind], never);
          (std::isfinite(time_of(line.kind, middle)) ? first[line.kind] : never) = middle;
        }
        continue;
      }
      if (shares[i] == line.at) continue;
      line.slope = std::max((seconds - line.seconds) / (shares[i] - line.at), 0.0);
      line.at = shares[i];
      line.seconds = seconds;
    }
  }

  // The time with one more, or with the last one: seconds, replica, which one of the replica's.
  using Next = std::tuple<double, int, int>;
  std::priority_queue<Next, std::vector<Next>, std::greater<>> next;
  std::priority_queue<Next> last;
  std::vector<int> shares(kinds.size(), 1);
  const auto key = [&](int replica, int count) {
    return Next(time_of(kinds[static_cast<std::size_t>(replica)], count), replica, count);
  };
  const auto share_of = [&](int replica) -> int& { return shares[static_cast<std::size_t>(replica)]; };
  std::int64_t given = 0;
  for (int replica = 0; replica < replicas; ++replica) {
    if (const auto begins = first.find(kinds[static_cast<std::size_t>(replica)]); begins != first.end())
      share_of(replica) = begins->second;
    given += share_of(replica);
    next.push(key(replica, share_of(replica) + 1));
    if (share_of(replica) > 1) last.push(key(replica, share_of(replica)));
  }
  // Entries of the queues that no longer are the next or the last of their replica are skipped.
  const auto least_next = [&] {
    while (std::get<2>(next.top()) != share_of(std::get<1>(next.top())) + 1) next.pop();
    return next.top();
  };
  const auto greatest_last = [&] {
    while (!last.empty() && std::get<2>(last.top()) != share_of(std::get<1>(last.top()))) last.pop();
    return last.empty() ? std::nullopt : std::optional(last.top());
  };
  const auto set = [&](int replica, int share) {
    given += share - share_of(replica);
    share_of(replica) = share;
    next.push(key(replica, share + 1));
    if (share > 1) last.push(key(replica, share));
  };
  while (true) {
    if (given < micro_batches) {
      const auto [seconds, replica, count] = least_next();
      if (!std::isfinite(seconds)) {
        // All that is left takes forever, whoever takes it: the first does.
        share_of(replica) += static_cast<int>(micro_batches - given);
        break;
      }
      set(replica, count);
      continue;
    }
    const std::optional<Next> greatest = greatest_last();
    if (!greatest) break;
    const int replica = std::get<1>(*greatest);
    if (given == micro_batches) {
      // By rounding, a replica may take less with one more.
      const Next least = least_next();
      if (*greatest < least || std::get<1>(least) == replica) break;
    }
    set(replica, share_of(replica) - 1);
  }
  return shares;
}

}  // namespace parplan
