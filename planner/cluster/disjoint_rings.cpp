#include "planner/cluster/disjoint_rings.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace parplan {
namespace {

// How many times each pair's links carry the narrowest link's rate, by positions in `members`; 0
// for pairs without a direct link.
using Rooms = std::vector<std::vector<int>>;

Rooms rooms_between(const NodeRoutes& routes, const std::vector<int>& members) {
  const std::size_t count = members.size();
  const auto bandwidth = [&](std::size_t a, std::size_t b) {
    const Path& path = routes.between[members[a]][members[b]];
    return a != b && path.arcs.size() == 1 ? path.bandwidth.value : 0.0;
  };
  double narrowest = std::numeric_limits<double>::infinity();
  for (std::size_t a = 0; a < count; ++a)
    for (std::size_t b = 0; b < count; ++b)
      if (bandwidth(a, b) > 0.0) narrowest = std::min(narrowest, bandwidth(a, b));
  Rooms rooms(count, std::vector<int>(count, 0));
  for (std::size_t a = 0; a < count; ++a)
    for (std::size_t b = 0; b < count; ++b)
      rooms[a][b] = static_cast<int>(std::floor(bandwidth(a, b) / narrowest * (1.0 + 1e-9)));
  return rooms;
}

bool all_equal(const Rooms& rooms) {
  for (std::size_t a = 0; a < rooms.size(); ++a)
    for (std::size_t b = 0; b < rooms.size(); ++b)
      if (a != b && rooms[a][b] != rooms[0][1]) return false;
  return true;
}

// All rings from position 0 on; two that differ only in direction are adjacent. Stops after
// `most_rings`.
class RingFinder {
 public:
  explicit RingFinder(const Rooms& rooms) : rooms_(rooms), visited_(rooms.size(), false) {
    ring_ = {0};
    visited_[0] = true;
    go_on();
  }
  std::vector<std::vector<std::size_t>> rings;

 private:
  void go_on() {
    if (rings.size() > most_rings) return;
    const std::size_t at = ring_.back();
    if (ring_.size() == rooms_.size()) {
      if (rooms_[at][0] == 0 || ring_[1] > at) return;
      rings.push_back(ring_);
      rings.push_back(ring_);
      std::reverse(rings.back().begin() + 1, rings.back().end());
      return;
    }
    for (std::size_t to = 1; to < rooms_.size(); ++to) {
      if (visited_[to] || rooms_[at][to] == 0) continue;
      visited_[to] = true;
      ring_.push_back(to);
      go_on();
      ring_.pop_back();
      visited_[to] = false;
    }
  }

  const Rooms& rooms_;
  std::vector<std::size_t> ring_;
  std::vector<bool> visited_;
};

// The largest selection of `rings` that the links can carry, each ring any number of times, found
// by trying those on the widest links first; the best so far where the search takes too long.
class Packing {
 public:
  Packing(const std::vector<std::vector<std::size_t>>& rings, Rooms rooms) : rings_(rings), rooms_(std::move(rooms)) {
    add();
  }
  std::vector<std::size_t> best;

 private:
  // No more rings fit than links lead away from any member, or back to it.
  std::size_t most_left() const {
    int least = std::numeric_limits<int>::max();
    for (std::size_t a = 0; a < rooms_.size(); ++a) {
      int out = 0;
      int in = 0;
      for (std::size_t b = 0; b < rooms_.size(); ++b) {
        out += rooms_[a][b];
        in += rooms_[b][a];
      }
      least = std::min({least, out, in});
    }
    return static_cast<std::size_t>(least);
  }
  int& room(const std::vector<std::size_t>& ring, std::size_t hop) {
    return rooms_[ring[hop]][ring[(hop + 1) % ring.size()]];
  }
  // The share of the remaining capacity that a ring takes, 1 for all of a link; infinite where it
  // does not fit.
  double taken_of(const std::vector<std::size_t>& ring) {
    double taken = 0.0;
    for (std::size_t hop = 0; hop < ring.size(); ++hop) taken += 1.0 / room(ring, hop);
    return taken;
  }
  void add() {
    if (taken_.size() > best.size()) best = taken_;
    std::vector<std::pair<double, std::size_t>> order;
    for (std::size_t ring = 0; ring < rings_.size(); ++ring)
      if (const double taken = taken_of(rings_[ring]); std::isfinite(taken)) order.emplace_back(taken, ring);
    std::ranges::sort(order);
    constexpr int most_tries = 1000;
    for (const auto& [taken, ring] : order) {
      if (taken_.size() + most_left() <= best.size() || ++tries_ > most_tries) return;
      for (std::size_t hop = 0; hop < rings_[ring].size(); ++hop) --room(rings_[ring], hop);
      taken_.push_back(ring);
      add();
      taken_.pop_back();
      for (std::size_t hop = 0; hop < rings_[ring].size(); ++hop) ++room(rings_[ring], hop);
    }
  }

  const std::vector<std::vector<std::size_t>>& rings_;
  Rooms rooms_;
  std::vector<std::size_t> taken_;
  int tries_ = 0;
};

}  // namespace

std::vector<std::vector<int>> disjoint_rings(const NodeRoutes& routes, const std::vector<int>& members) {
  if (members.size() < 3) return {};
  Rooms rooms = rooms_between(routes, members);
  if (all_equal(rooms)) return {};
  const RingFinder finder(rooms);
  if (finder.rings.empty() || finder.rings.size() > most_rings) return {};
  const Packing packing(finder.rings, std::move(rooms));
  std::vector<std::vector<int>> result;
  for (const std::size_t number : packing.best) {
    std::vector<int>& ring = result.emplace_back();
    for (const std::size_t at : finder.rings[number]) ring.push_back(members[at]);
  }
  return result;
}

}  // namespace parplan
