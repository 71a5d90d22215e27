#pragma once

#include "runtime/device/cuda/kernels/kernel_arguments.h"

namespace parplan {

// fused qkv, (keys and values of ranks) -> y, log-sum-exp. Causal; layout and formulas as in
// runtime/device/cpu/kernels/attention.cpp. Head dims up to 256.
void attention(const CudaKernelArguments& arguments);
// dy, qkv, (keys and values of ranks), y, log-sum-exp -> dqkv, (their gradients); with keys of
// ranks, dqkv has gradients of queries, which add up around a ring, and zeros. Workspace:
// planner/graph/cuda_workspace.h.
void attention_gradient(const CudaKernelArguments& arguments);

// queries, packed keys and values, (rows of relative position biases) -> y, log-sum-exp.
void packed_attention(const CudaKernelArguments& arguments);
// dy, queries, keys and values, (rows of biases), y, log-sum-exp -> gradients of the inputs. Those
// of biases take the scores and dP once more, in fp32: sums over tiles of queries, which a second
// kernel adds in order.
void packed_attention_gradient(const CudaKernelArguments& arguments);

}  // namespace parplan
