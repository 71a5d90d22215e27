#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "planner/base/units.h"

namespace parplan {

// The named dims of tensors. `kv_groups` is the dim of attention heads, counted in groups of one
// key/value head with the query heads that share it; `feature` is the inner width of a feed-forward
// layer, `adapter` that of a LoRA adapter.
enum class Dim : std::uint8_t { sequence, batch, hidden, kv_groups, feature, vocabulary, position, adapter, count_ };
const char* name(Dim dim);
// Dims over which a layer does the same with each element: their product is the rows of an op.
constexpr bool counts_tokens(Dim dim) { return dim == Dim::sequence || dim == Dim::batch; }

// tf32 is fp32 in memory; matrix products read 10 bits of its fraction (NVIDIA A100 whitepaper,
// 2020). fp8 is bf16 in memory; the products of layers read it as numbers of 8 bits (Fp8Casts in
// op_kind.h).
enum class DataType { fp32, bf16, fp16, int32, tf32, uint8, fp8 };
const char* name(DataType type);
// bf16 and fp16: training in them keeps a master copy of the parameters in fp32.
constexpr bool is_half(DataType type) { return type == DataType::bf16 || type == DataType::fp16; }
// The type in which numbers of a precision are stored.
constexpr DataType in_memory(DataType precision) {
  return precision == DataType::tf32 ? DataType::fp32 : precision == DataType::fp8 ? DataType::bf16 : precision;
}
// Bytes of a number in memory.
constexpr std::int64_t size_of(DataType type) {
  return type == DataType::uint8 ? 1 : is_half(in_memory(type)) ? 2 : 4;
}

// One dim of a tensor in logical coordinates. Shards are whole multiples of `granule` (the width of
// one kv group in a fused query/key/value tensor, else 1), or several consecutive shards share out
// one granule: each has the same number of its `parts`, and a copy of its last `shared` elements.
struct TensorDim {
  Dim dim{};
  std::int64_t size = 0;
  std::int64_t granule = 1;
  std::int64_t parts = 1;   // of equal width, before the shared end: the query heads of a kv group
  std::int64_t shared = 0;  // the end of a granule: the key and the value of a kv group
  // Of the vocabulary: each shard's rows are padded to a multiple of it
  // (Engine::vocabulary_multiple).
  std::int64_t multiple = 1;
  std::int64_t granules() const { return size / granule; }
  bool operator==(const TensorDim&) const = default;
};

// Whether so many shards are alike: whole granules each, or equal shares of one.
bool divides_into(const TensorDim& dim, std::int64_t shards);
// How many shards share out one granule, and hold copies of its end: 1 where they have whole ones.
std::int64_t shards_of_granule(const TensorDim& dim, std::int64_t shards);

enum class TensorRole {
  tokens,      // int32 ids from the data loader
  activation,  // in the compute precision
  statistic,   // fp32 whatever the precision: means, row maxima, log-sum-exp
  mask,        // a byte for each element: what dropout kept
  quantized,   // a byte for each element: an activation as products in fp8 read it (OpKind::quantize)
  parameter,   // in the compute precision (fp32 master copies belong to the optimizer)
  loss,        // one fp32 number, summed over tokens and micro-batches
};

// When one kernel makes attention's probabilities of its scores: in half precision, from so many
// heads and samples together, of such a sequence (Megatron-LM's FusedScaleMaskSoftmax,
// is_kernel_available).
struct SoftmaxKernel {
  std::int64_t multiple = 1;  // of heads times samples
  std::int64_t longest = 0;   // sequence, whose positions 4 divides; 0: any sequence
  // Where it does not, probabilities are in fp32, and so many bytes an element are kept beside
  // them, for the product that reads them in half precision.
  std::int64_t narrowed = 0;
  constexpr bool serves(std::int64_t heads_and_samples, std::int64_t sequence) const {
    constexpr std::int64_t shortest = 17;
    return heads_and_samples % multiple == 0 &&
           (longest == 0 || (sequence >= shortest && sequence <= longest && sequence % 4 == 0));
  }
  bool operator==(const SoftmaxKernel&) const = default;
};

enum class Initializer { zeros, ones, normal };

// Activations, statistics and tokens are declared for ONE sample: their batch dim has size 1 and is
// scaled by the micro-batch at lowering. The memory order is that of `dims`, the last one
// contiguous; activations are [sequence, batch, features], so a shard of the sequence is
// contiguous.
struct Tensor {
  std::string name;  // parameters: "layers.3.attention.qkv.weight"
  TensorRole role = TensorRole::activation;
  std::vector<TensorDim> dims;
  // Probabilities of attention whose softmax has a kernel for some sizes alone.
  std::optional<SoftmaxKernel> softmax = {};
  // Parameters only.
  Initializer initializer = Initializer::normal;
  double standard_deviation = 0.02;
  bool decays = false;  // weight decay applies (matrices, not biases and norms)
  bool frozen = false;  // not trained: it has no gradient and no optimizer state
  // The weight of a matrix product in a block between the first and the last, which no other block
  // uses (`finish` says so).
  bool of_layer_product = false;
  bool operator==(const Tensor&) const = default;
};

std::int64_t element_count(const Tensor& tensor);

}  // namespace parplan
