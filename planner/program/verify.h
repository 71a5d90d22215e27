#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "planner/program/program.h"

namespace parplan {

// A fault in the Programs of a job, and its place: an instruction (index within the call's
// segment), a call, or a whole Program.
struct Fault {
  int rank = 0;
  std::optional<int> call;
  std::optional<int> instruction;
  std::string what;
  bool operator==(const Fault&) const = default;
};
// "rank 0, call 3, instruction 1: use after free: ..."
std::string write_fault(const Fault& fault);

// The faults of a job, from the Programs of all its ranks (programs[r].rank == r); nothing when
// there is none.
//   structure      indices, operands and buffers within their bounds, operands that fit the op's
//                  row, buffers that do not overlap, events recorded once and before they are
//                  waited for
//   order          conflicting accesses are ordered by streams and events, never by luck ("missing
//                  event")
//   definition     what is read was written in this step and not freed since ("use before
//                  definition", "use after free"); undefined workspaces may be read; what the first
//                  part of a backward leaves for the second is read ("lost value"); what is
//                  gathered of a shard, and added to it, is in the whole where the bucket has it
//                  ("wrong place")
//   reductions     gradients are summed over the data axis exactly once before the optimizer reads
//                  them, those of rows that several ranks hold copies of over these ranks too, and
//                  updated parameters gathered before anything reads them ("dropped reduction",
//                  "reduced twice", "wrong reduction", "dropped gather"); sums for a shard are read
//                  before they are freed ("dropped sum")
//   rings          attention around the ring of the context axis meets the keys of every rank once,
//                  under the right name, and the gradients of a rank's keys come back from all
//                  ("wrong keys", "wrong sum", "incomplete ring"); products by slices beside the
//                  ring of the tensor axis read each rank's rows once, and sums of a rank's rows
//                  come back from all ("wrong rows", "missing rows")
//   communication  members launch the same collectives, sends meet receives, and nothing waits in a
//                  cycle: neither with ranks that block in launch order (sends do not), nor with
//                  concurrent streams on which a send lasts until its receive
// Faults of structure end the check, since the rest could not be followed.
std::vector<Fault> find_faults(std::span<const Program> programs);

// Throws InternalError with the first faults.
void verify(std::span<const Program> programs);

}  // namespace parplan
