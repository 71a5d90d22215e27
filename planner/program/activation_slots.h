#pragma once

#include <vector>

#include "planner/plan/parallel_spec.h"
#include "planner/plan/schedule.h"

namespace parplan {

// The buffers of one action, as indices into the rank's buffers of each kind.
struct ActionSlots {
  int saved = 0;     // slot of saved activations
  int head = 0;      // slot of those of the last block, where it has its own
  int input = 0;     // buffer for the activation that arrives, where it lies apart
  int handed_over = 0;  // forward: buffer for a result that stays on the rank, an input of its next stage
  int exchange = 0;  // forward: activation to send; backward: activation gradient
  // Of stages that run backwards in two parts: the slot of what the forward saves for the second,
  // and that of what the first part leaves for it.
  int for_weights = 0;
  int left = 0;
  bool operator==(const ActionSlots&) const = default;
};

// The buffers that each action of a rank uses, in the order of the rank's list.
struct Slots {
  // The number of slots of saved activations: that of the micro-batches that the rank holds at
  // once.
  int saved = 0;
  // The number of slots that the model's last block has of its own: 0 where it lies in the others.
  int head = 0;
  // The number of buffers for arriving activations: 0 where these arrive in the slots.
  int inputs = 0;
  // The numbers of exchange buffers.
  int outputs = 0;
  int gradients = 0;
  // The numbers of slots for backward_weights: of micro-batches between their forward and the end
  // of their backward, and between its two parts, on stages that run it so.
  int for_weights = 0;
  int left = 0;
  std::vector<ActionSlots> actions;
  bool operator==(const Slots&) const = default;
};

// The buffers that a rank has for activations that enter its stages, where these lie apart: those
// that a stage hands over to the next one on its rank, as many as are held at once; with `one_more`
// also those that other ranks send, and one more. The first stage has none.
int input_buffers(const Schedule& schedule, int rank, InputSlots inputs);

// Plays a rank's list. A forward takes the slot that has been free the longest, whose former
// content is the most likely to be no longer in use, and the backward of its micro-batch, or the
// first part of it, frees the slot; what the second part reads is in slots that it frees. The
// stages of a rank share its slots. But where it holds the last stage beside others, the last block
// (the head, whose logits are far larger than what layers save) has slots of its own, as many as
// that stage needs. Buffers for arriving activations are used likewise; with `one_more`, there is
// one more of them than micro-batches that hold one, unless no micro-batch would use it. What a
// stage hands over to the next one on its rank is in such a buffer from its forward on. Exchange
// buffers take turns: the result of an action is still being sent during the next. A gradient that
// is handed over stays in the buffer that it was computed in. Backwards of stages before
// `first_back` are empty (exchange_ways).
Slots play_slots(const Schedule& schedule, int rank, InputSlots inputs, int first_back = 0);

}  // namespace parplan
