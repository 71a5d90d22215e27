#pragma once

#include <span>

#include "planner/graph/op_kind.h"

namespace parplan {

// The rows of op kinds, one file per family: forward, fused and backward kinds together.
// op_kind.cpp joins them into the table.
std::span<const OpRow> embedding_rows();       // tables of tokens and of positions
std::span<const OpRow> norm_rows();            // of whole rows, alone or behind a sum
std::span<const OpRow> query_key_norm_rows();  // of the queries and keys inside fused qkv
std::span<const OpRow> product_rows();         // linear layers
std::span<const OpRow> attention_rows();       // attention and rotary positions
std::span<const OpRow> packed_attention_rows();  // with queries and keys in tensors of their own, relative biases
std::span<const OpRow> row_move_rows();          // between rows of several sequences in one activation
std::span<const OpRow> elementwise_rows();     // activations, gates, sums, biases
std::span<const OpRow> loss_rows();            // cross-entropy
std::span<const OpRow> movement_rows();        // filling, copying, adding and loading buffers
std::span<const OpRow> optimizer_rows();       // norm of gradients, updates, loss scale
std::span<const OpRow> foreign_rows();         // what engines other than parplan's runtime do in several kernels

}  // namespace parplan
