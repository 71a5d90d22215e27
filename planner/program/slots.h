#pragma once

#include <vector>

#include "planner/plan/schedule.h"

namespace parplan {

// The buffers of one action, as indices into the rank's buffers of each sort.
struct ActionSlots {
  int saved = 0;     // slot of saved activations
  int exchange = 0;  // a forward: activation to send; a backward: activation gradient
  bool operator==(const ActionSlots&) const = default;
};

// Which buffers each action of a rank uses, in the order of its list.
struct Slots {
  int saved = 0;      // slots of saved activations: as many as the rank holds micro-batches at once
  int exchanges = 0;  // buffers of either sort
  std::vector<ActionSlots> actions;
  bool operator==(const Slots&) const = default;
};

// Plays a rank's list. A forward takes the slot that has been free for longest, so that what the
// slot held before is the likeliest to be done with, and its micro-batch's backward gives it back.
// Exchange buffers are taken in turn: what leaves an action is still being sent in the next.
Slots play_slots(const Schedule& schedule, int rank);

}  // namespace parplan
