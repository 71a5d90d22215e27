#pragma once

#include "planner/program/program.h"
#include "runtime/arena.h"
#include "runtime/device/backend.h"

namespace parplan {

// Makes what a GPU makes at first use: streams, and kernels, which CUDA loads when they are first
// launched. Loading one may wait for all work of the GPU, under a lock that other threads need, and
// so forever once NCCL's kernels wait for other ranks ("Lazy Loading" in the CUDA Programming
// Guide; meta-pytorch/torchcomms, pull request 2334; openxla/xla, pull request 38932). Every rank
// calls it before any of them communicates. Every kernel of the Program runs once, on zeros; then
// the arena is restored. There is nothing to do for backends that work immediately.
void warm_up(const Program& program, Backend& backend, const Arena& arena);

}  // namespace parplan
