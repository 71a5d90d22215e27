#pragma once

#include <cstddef>

// What stands behind the warp-wide functions, for device_code.h and for the emulation of PTX
// instructions. Every CUDA thread is a fiber; a thread that waits for others gives the processor to
// them.
namespace emulator {

inline constexpr unsigned full_warp = 0xffffffffu;

// What one meeting of lanes does: `lanes[i]` is what lane i brought, null where the lane is not
// named in `mask` or exited. It runs once, on the stack of whichever lane came last, and may read
// and write all that was brought.
using Meeting = void (*)(unsigned mask, void* const* lanes);

// Waits until every lane of the warp that `mask` names and that has not exited is here with the
// same name, mask and `meeting`; anything else ends the program with a message. The caller's own
// lane must be in the mask.
void warp_meeting(const char* name, unsigned mask, void* mine, Meeting meeting, const char* file = __builtin_FILE(),
                  int line = __builtin_LINE());

// As warp_meeting for the instructions that all 32 lanes must reach (".aligned"): that the warp has
// 32 and none has exited is checked. `meeting` may then use all of `lanes`. No copies are made, so
// it is the faster way.
void whole_warp_meeting(const char* name, void* mine, Meeting meeting, const char* file = __builtin_FILE(),
                        int line = __builtin_LINE());

// All 32 lanes deposit `bytes` bytes and each gets all of them in the order of lanes: all32 has
// room for 32 * bytes.
void warp_exchange(const void* mine, std::size_t bytes, void* all32, const char* file = __builtin_FILE(),
                   int line = __builtin_LINE());

// Lane of the running thread within its warp.
unsigned lane();

// Ends the program with "CUDA emulator: <text>" and where the running kernel is.
[[noreturn]] void fail(const char* text);

}  // namespace emulator
