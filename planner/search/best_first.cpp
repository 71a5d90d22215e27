#include "planner/search/best_first.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

#include <boost/container/small_vector.hpp>

namespace parplan {
namespace {

bool comes_later(const Open& a, const Open& b) {
  return std::tie(a.bound, a.place) > std::tie(b.bound, b.place);
}

// Which plan is the how-manieth of its degrees.
class DegreeCounts {
 public:
  int count(const ParallelSpec& spec) {
    const auto of = std::ranges::find(counts_, spec.mesh.degree, &std::pair<Degrees, int>::first);
    if (of != counts_.end()) return ++of->second;
    counts_.emplace_back(spec.mesh.degree, 1);
    return 1;
  }

 private:
  boost::container::small_vector<std::pair<Degrees, int>, 16> counts_;  // asked for often
};

// Scores below it are as good as the best one.
double tied_limit(const BestFirst& search) {
  return search.best.front().score.first * (1.0 + search.tied);
}

// Whether nothing with this bound or a worse one can be ranked.
bool is_out(const BestFirst& search, const Score& bound) {
  const std::optional<Score> limit = score_limit(search);
  return limit && bound >= *limit;
}

// Where the other spaces have a whole list.
std::optional<Score> limit_elsewhere(const BestFirst& search) {
  const auto top = static_cast<std::size_t>(search.top);
  return search.elsewhere.size() < top ? std::nullopt : std::optional(search.elsewhere[top - 1].score);
}

// Whether what scores no less cannot be ranked beside the plans of its degrees in other spaces.
// What may be as good as the best but for a tie is not judged.
bool is_beaten_elsewhere(const BestFirst& search, const Score& score, const Degrees& degrees) {
  if (search.elsewhere.empty() || score.first < search.elsewhere.front().score.first * (1.0 + search.tied))
    return false;
  int of_degrees = 0;
  for (const RankedElsewhere& one : search.elsewhere)
    if (one.degrees == degrees && ++of_degrees == search.top_each) return score >= one.score;
  return false;
}

// Whether it cannot be ranked beside the plans of its degrees, or is not taken to be.
bool is_beaten(const BestFirst& search, const BestFirstSteps& steps, const Open& open) {
  if (is_beaten_elsewhere(search, open.bound, open.mesh->degree)) return true;
  if (search.best.empty()) return false;
  const bool may_tie = open.bound.first < tied_limit(search);
  const auto may_be_wanted = [&] {
    return open.candidate == nullptr || !steps.may_be_plainer ||
           std::ranges::none_of(search.best, [&](const Ranked& one) {
             return one.score <= open.bound && !steps.may_be_plainer(open, one);
           });
  };
  if (may_tie && may_be_wanted()) return false;
  int of_degrees = 0;
  for (const Ranked& one : search.best)
    if (one.plan.spec.mesh.degree == open.mesh->degree && ++of_degrees == search.top_each)
      return open.bound >= one.score ||
             (!may_tie && std::ranges::count(search.behind, open.mesh->degree) >= most_variants_behind);
  return false;
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

std::optional<Score> score_limit(const BestFirst& search) {
  if (search.to_beat && search.elsewhere.empty() && !is_ahead(search)) return search.to_beat;
  const std::optional<Score> elsewhere = limit_elsewhere(search);
  DegreeCounts counts;
  int counted = 0;
  for (const Ranked& one : search.best)
    if (counts.count(one.plan.spec) <= search.top_each && ++counted == search.top)
      return elsewhere ? std::min(*elsewhere, one.score) : one.score;
  return elsewhere;
}

bool is_ahead(const BestFirst& search) {
  return !search.best.empty() && (!search.to_beat || search.best.front().score < *search.to_beat);
}

std::optional<Score> best_score(const BestFirst& search) {
  return is_ahead(search) ? search.best.front().score : search.to_beat;
}

void rank(BestFirst& search) {
  std::ranges::sort(search.best, {}, [](const Ranked& one) { return std::pair(one.score, one.place); });
  if (search.best.empty()) return;
  const double tied_until = tied_limit(search);
  DegreeCounts counts;
  int counted = 0;
  std::vector<Ranked> kept;
  for (Ranked& one : search.best) {
    const bool counts_one = counts.count(one.plan.spec) <= search.top_each;
    if (counts_one && ++counted > search.top) break;
    if (counts_one || one.score.first < tied_until) kept.push_back(std::move(one));
  }
  search.best = std::move(kept);
}

void drop_beaten_elsewhere(BestFirst& search) {
  const std::optional<Score> limit = limit_elsewhere(search);
  std::erase_if(search.best, [&](const Ranked& one) {
    return (limit && one.score >= *limit) || is_beaten_elsewhere(search, one.score, one.plan.spec.mesh.degree);
  });
}

void run(BestFirst& search, const BestFirstSteps& steps) {
  // Those that cannot be ranked beside the plans of their degrees.
  std::vector<Open> beaten;
  const auto find_next = [&] {
    while (!search.open.empty() && !is_out(search, search.open.front().bound)) {
      if (!is_beaten(search, steps, search.open.front())) return true;
      beaten.push_back(pop(search));
    }
    return false;
  };
  while (find_next()) {
    if (search.open.front().candidate == nullptr) {
      add(search, steps.look_into(pop(search)));
      continue;
    }
    const std::int64_t room = steps.room();
    if (room <= 0) break;
    std::vector<Open> turns;
    while (static_cast<std::int64_t>(turns.size()) < room && find_next() && search.open.front().candidate != nullptr) {
      Open next = pop(search);
      if (steps.sharpened && !std::exchange(next.is_sharp, true))
        if (const Score sharper = steps.sharpened(next); sharper > next.bound) {
          next.bound = sharper;
          add(search, {&next, 1});
          continue;
        }
      if (steps.is_new && !steps.is_new(next)) continue;
      turns.push_back(next);
      if (!search.best.empty() && next.bound.first >= tied_limit(search)) search.behind.push_back(next.mesh->degree);
    }
    if (turns.empty()) continue;
    search.simulated += static_cast<std::int64_t>(turns.size());
    std::ranges::move(steps.simulate(turns), std::back_inserter(search.best));
    rank(search);
  }
  add(search, beaten);
}

std::vector<Ranked> first_of_each(std::vector<Ranked> ranked, int top_each) {
  DegreeCounts counts;
  std::erase_if(ranked, [&](const Ranked& one) { return counts.count(one.plan.spec) > top_each; });
  return ranked;
}

bool is_certified(const BestFirst& search) {
  return search.open.empty() || search.open.front().bound >= search.best.front().score;
}

bool is_settled(const BestFirst& search) {
  const std::optional<Score> best = best_score(search);
  if (!best || !score_limit(search)) return false;
  return search.open.empty() ||
         (search.open.front().bound >= *best && search.open.front().bound.first >= best->first * (1.0 + search.tied));
}

}  // namespace parplan
