#pragma once

#include <cstddef>

// The basis of the warp-wide functions, for device_code.h and for the emulation of PTX
// instructions. Every CUDA thread is a fiber; a thread that waits for others yields the processor
// to them.
namespace emulator {

inline constexpr unsigned full_warp = 0xffffffffu;

// The operation of one meeting of lanes: `lanes[i]` is the argument of lane i, null where the lane
// is not named in `mask` or has exited. It runs once, on the stack of whichever lane came last, and
// may read and write all arguments.
using Meeting = void (*)(unsigned mask, void* const* lanes);

// Waits until every lane of the warp that `mask` names and that has not exited is here with the
// same name, mask and `meeting`; anything else ends the program with a message. The caller's own
// lane must be in the mask.
void warp_meeting(const char* name, unsigned mask, void* mine, Meeting meeting, const char* file = __builtin_FILE(),
                  int line = __builtin_LINE());

// Like warp_meeting, for the instructions that all 32 lanes must reach (".aligned"): checks that
// the warp has 32 lanes and none has exited. `meeting` may then use all of `lanes`. No copies are
// made, so this is faster.
void whole_warp_meeting(const char* name, void* mine, Meeting meeting, const char* file = __builtin_FILE(),
                        int line = __builtin_LINE());

// All 32 lanes deposit `bytes` bytes, and each gets all of them in the order of lanes: all32 has
// room for 32 * bytes.
void warp_exchange(const void* mine, std::size_t bytes, void* all32, const char* file = __builtin_FILE(),
                   int line = __builtin_LINE());

// Lane of the running thread within its warp.
unsigned lane();

// Ends the program with "CUDA emulator: <text>" and the place in the running kernel.
[[noreturn]] void fail(const char* text);

}  // namespace emulator
