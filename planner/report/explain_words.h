#pragma once

#include <cstddef>
#include <string>

#include "planner/plan/plan.h"
#include "planner/plan/reasons.h"

// What the parts of an explanation say in the same words: comparisons of a layout with the plan.
namespace parplan {

inline constexpr std::size_t line_width = 140;  // of an explanation

// Waiting for other stages' communication is mentioned from this share of the step on.
inline constexpr double worth_a_word = 0.05;

// The words for more and less of what an objective counts.
struct ObjectiveWords {
  const char* best;  // of this space
  const char* less;
  const char* more;
  const char* same;
};
const ObjectiveWords& words_of(Objective objective);
// What a plan is better by whose rival takes 1 + `gap` times as much: a step of 80 s is 25 % faster
// than one of 100 s, and a plan that costs or holds 80 instead of 100 is 20 % cheaper or smaller.
double better_by(Objective objective, double gap);
// "15.00 % slower", "as fast": `change`, as a share, is more where it is positive.
std::string compared(double change, Objective objective, int digits);
// "11.5 s (15.00 % slower)", and the value of the plan's objective if that is not time. `now` is
// the plan itself.
std::string measured_against(const Plan& plan, const RankedPlan& other, const RankedPlan& now, int digits);
// The part by which `other` takes longer.
double slower(const StepResult& other, const StepResult& than);
std::string signed_share(double change);  // "+12 %", "0.0 %"

// The parts of the step in which `other` differs from the plan by at least a thousandth of the
// step, largest first.
std::string differences(const StepTime& best, const StepTime& other);
// The parts on which another layout loses, or by how much it does not fit.
std::string loss(const Plan& plan, const Rival& rival);

// Every line two columns further to the right.
std::string indent(const std::string& text);

}  // namespace parplan
