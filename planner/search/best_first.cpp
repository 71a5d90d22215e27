#include "planner/search/best_first.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

namespace parplan {
namespace {

bool comes_later(const Open& a, const Open& b) { return std::tie(a.bound, a.place) > std::tie(b.bound, b.place); }

bool cannot_win(const BestFirst& search, const Score& bound) {
  if (search.to_beat && !is_ahead(search)) return bound >= *search.to_beat;
  return static_cast<int>(search.best.size()) >= search.top && bound >= search.best.back().score;
}

bool may_win(const BestFirst& search) {
  return !search.open.empty() && !cannot_win(search, search.open.front().bound);
}

Open pop(BestFirst& search) {
  std::ranges::pop_heap(search.open, comes_later);
  const Open next = search.open.back();
  search.open.pop_back();
  return next;
}

}  // namespace

void add(BestFirst& search, std::span<const Open> open) {
  for (const Open& one : open) {
    search.open.push_back(one);
    std::ranges::push_heap(search.open, comes_later);
  }
}

bool is_ahead(const BestFirst& search) {
  return !search.best.empty() && (!search.to_beat || search.best.front().score < *search.to_beat);
}

std::optional<Score> best_score(const BestFirst& search) {
  return is_ahead(search) ? search.best.front().score : search.to_beat;
}

void rank(BestFirst& search) {
  std::ranges::sort(search.best, {}, [](const Ranked& one) { return std::pair(one.score, one.place); });
  if (static_cast<int>(search.best.size()) > search.top)
    search.best.erase(search.best.begin() + search.top, search.best.end());
}

void run(BestFirst& search, const BestFirstSteps& steps) {
  while (may_win(search)) {
    if (search.open.front().candidate == nullptr) {
      add(search, steps.look_into(pop(search)));
      continue;
    }
    const std::int64_t room = steps.room();
    if (room <= 0) break;
    std::vector<Open> turns;
    while (static_cast<std::int64_t>(turns.size()) < room && may_win(search) &&
           search.open.front().candidate != nullptr) {
      const Open next = pop(search);
      if (!steps.is_new || steps.is_new(next)) turns.push_back(next);
    }
    search.simulated += static_cast<std::int64_t>(turns.size());
    std::ranges::move(steps.simulate(turns), std::back_inserter(search.best));
    rank(search);
  }
}

bool is_certified(const BestFirst& search) {
  return search.open.empty() || search.open.front().bound >= search.best.front().score;
}

}  // namespace parplan
