#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "planner/base/units.h"

namespace parplan {

inline constexpr std::string_view own_engine = "parplan";

// How a training engine carries out a step: which kernels it fuses, what it computes again, what it
// overlaps, and what its host costs. The graph (engine_graph.h), lowering and costs ask it; there
// is no factor of a whole step. The default is parplan's own runtime, which alone can run plans.
struct Engine {
  std::string name{own_engine};
  std::string title = "parplan's own runtime";
  // Kernels that are one; otherwise each of their ops is a kernel that reads and writes memory.
  bool fused_attention = true;   // else: scores, softmax, dropout and weighted sum, with the scores kept
  // The newest compute capability that fused attention has kernels for, 90 for 9.0; on newer GPUs
  // it runs those for Ampere. 0: not known.
  int attention_up_to = 0;
  bool triton_attention = false;  // or it is Triton's kernel of 2022, on all GPUs
  bool fused_norm = true;        // a sum with the norm behind it
  bool fused_activation = true;  // a product with the GELU behind it, in the product's kernel
  bool fused_scores = true;      // scale and mask of unfused attention in the softmax's kernel
  // What that kernel asks of half precision's scores, of heads of a rank times samples, and of the
  // sequence: else each step of the softmax is a kernel, in fp32 (SoftmaxKernel).
  int softmax_multiple = 1;
  int softmax_up_to = 0;         // the longest sequence; 0: any
  bool fused_gelu = true;        // a GELU by itself; else each step of its formula is a kernel
  bool fused_gate = true;        // an activation times the other half; else two kernels, and the activation is kept
  bool fused_rms_norm = true;    // an RMS norm; else each step of it is a kernel, in fp32
  bool fused_rotary = true;      // rotary positions; else as complex numbers in fp32, with casts before and behind
  bool fused_update = true;      // an optimizer's update; else each step of it is a kernel
  // Of gradients: what a norm and a residual sum both read has those of both added in the norm's
  // kernel; a norm's own is one kernel with those of its parameters; a product's bias has its own
  // summed in the product's kernel. Else a kernel of its own does so (PyTorch's autograd).
  bool fused_sums = true;
  bool fused_norm_gradient = true;
  bool fused_bias_gradient = true;
  // An optimizer takes tensors in lists, of as many blocks of the model as a launch has room for
  // (submissions in planner/cost/cost_model.h).
  bool lists_updates = false;
  bool fused_dropout = true;     // dropout with the residual sum behind it
  bool fused_loss = true;        // else: logits widened to fp32 and kept so, each step of the softmax a kernel
  // Keys and values are copied behind their product, and twice more before attention. Where there
  // are as many as queries, these keep the first copies (OpKind::copy_keys).
  bool copies_keys = false;
  // Queries, keys and values are three products, not one.
  bool separate_keys = false;
  // Keys and values are repeated for all query heads before fused attention (OpKind::repeat_keys).
  bool repeats_keys = false;
  // Where context-parallel ranks gather keys and values, attention is a call for each rank's, with
  // halves of the queries or of the keys where the mask asks for no more; results are merged in
  // fp32, and gradients of keys and values are summed in fp32 around the ring of the ranks
  // (torch.distributed.tensor.experimental).
  bool attends_in_steps = false;
  // Rows that tensor-parallel ranks gather along the sequence are copied behind it, and those that
  // they reduce and scatter before it, since samples are the outer dim; not where products are in
  // fp8, whose rows are gathered in other ways.
  bool copies_rows = false;
  // In fp8, a weight is cast as the shards of it are gathered, not by each product that reads it.
  bool casts_weights_apart = false;
  // Where the loss is not fused, it subtracts maxima into another copy of the logits in fp32, while
  // the first is still there.
  bool copies_logits = false;
  // A loss that is not fused fills the gradient of its log-softmax in a tensor of its own, of which
  // another makes that of the logits, while the log-softmax is held (PyTorch's cross_entropy).
  bool fills_loss_gradient = false;
  // So many metrics compute the loss once more behind each backward, from a copy of the logits in
  // fp32, for nobody's gradient.
  int loss_metrics = 0;
  // Products are cuBLAS's of CUDA 12.0 and 12.1, slower on Hopper (sustained.early_half of device
  // files).
  bool early_cublas = false;
  // What products and attention write is filled before (torch.use_deterministic_algorithms).
  bool fills_outputs = false;
  bool dropout = false;          // behind attention's softmax and before residual sums (engine_graph.h)
  // Full recompute repeats a whole layer, with its last product and reduction, not only what the
  // backward reads.
  bool repeats_layers = false;
  // Communication overlaps with computation; else it takes its turn in the order of launch.
  bool overlaps_tensor = true;    // over the tensor, context and expert axes
  bool overlaps_data = true;      // over the data axis
  bool overlaps_pipeline = true;  // transfers between stages
  // Under DataParallel, the master computes the loss of all from their logits. Else each replica
  // computes its own, and the master gathers logits, and what else the model returns, for nobody.
  bool master_computes_loss = true;
  // A transfer between stages is split over the tensor axis, and gathered behind it.
  bool splits_transfers = false;
  // Backwards leave gradients in half precision, and kernels of their own add those of
  // micro-batches: in bf16 to sums in fp32, in fp16 to sums in fp16.
  bool half_gradients = false;
  // A product adds a weight's gradient to its sum; else it leaves it in half precision, and a
  // kernel adds it.
  bool fused_accumulation = true;
  // Gradients are summed in half precision where the training is in it, by products or apart, and
  // the optimizer widens the shard that it updates (Megatron-LM without grad_reduce_in_fp32).
  bool sums_half = false;
  // Gradients are reduced and scattered where the optimizer alone is sharded; else all-reduced.
  bool scatters_gradients = true;
  // Likewise where gradients are sharded and parameters are not (ZeRO-2).
  bool scatters_sharded = true;
  // Gradients that are summed over all micro-batches are copied into one tensor, divided by the
  // number of ranks, and copied back, around the all-reduce of them.
  bool copies_reduced = false;
  // Gradients that are whole on all data-parallel ranks, and without an optimizer that is sharded,
  // are copied to the buckets in which they are reduced, and back, in the type in which backwards
  // leave them; the buckets stay.
  bool copies_to_buckets = false;
  // Around an update, gradients in half precision are copied into one tensor, widened and scaled,
  // and parameters copied from their master; their norm is that of a copy in fp64.
  bool copies_to_update = false;
  // They are reduced in half precision where the training is, whatever they are summed in.
  bool reduces_half = false;
  // Where gradients are sharded, those that a backward leaves in half precision, one by one, are
  // copied into one tensor, which is widened to be reduced.
  bool flattens_gradients = false;
  // The same by one kernel, which widens them as it copies them.
  bool widens_gradients = false;
  // Where gradients are sharded, each comes in a tensor of its own and is copied into a bucket, and
  // this divided by the number of ranks and copied once more before it is reduced. The bucket has
  // room for so many elements.
  bool copies_sharded = false;
  int bucket_elements = 0;
  // Where gradients are sharded, a block's are where activations were that backwards freed, until
  // they are reduced.
  bool reduces_where_freed = false;
  // Gradients come to be as backwards make them, and are gone behind the update: with one backward
  // of each block a step they are in use beside what blocks before have saved. The allocator keeps
  // memory for both, since they come from a stream of their own (fully_shard's reductions).
  bool makes_gradients_late = false;
  // Where parameters are sharded, they are copied out of what was gathered before they are used.
  bool copies_gathered = false;
  // Where parameters are sharded, those that are gathered together are copied: a rank's shards into
  // one tensor before, and each parameter out of it behind.
  bool copies_coalesced = false;
  // Where parameters are sharded, they are gathered into lists of one tensor a rank: a flat tensor
  // is filled, a list made of it, and what is gathered into another copied to it rank by rank.
  // Gradients are divided by the number of ranks, and copied so before they are scattered. The host
  // awaits all work before a gather and behind it.
  bool lists_shards = false;
  // What the host takes for each rank's shard: to put it into the list, to submit its copy, and
  // where parameters persist, to take it from what is gathered behind the update.
  Seconds host_per_listed_shard{};
  Seconds host_per_copied_shard{};
  Seconds host_per_persistent_shard{};
  // What the host takes beside ops: where parameters are sharded, around each module of the model
  // (modules_of in planner/graph/engine_graph.h) in a forward and in a backward; where gradients
  // are, behind each of them.
  Seconds host_per_module_forward{};
  Seconds host_per_module_backward{};
  Seconds host_per_sharded_gradient{};
  // Where each parameter is gathered by itself, those of fewer elements persist: they are gathered
  // once a step, behind the update, all of a block together, and are not counted in memory. Within
  // a block they go with a larger parameter, of which they are a small part.
  int persists_below = 0;
  // Parameters that are gathered for a recomputed forward are gathered again for the backward.
  bool gathers_again = false;
  // Where parameters are sharded, gathers may run so many blocks further ahead than the plan says:
  // in forwards, and in backwards.
  int gathers_further_forward = 0;
  int gathers_further_backward = 0;
  // Where parameters are sharded, a rank holds its shard in fp32 alone, as the optimizer's master
  // copy, and casts it as it is gathered.
  bool casts_shards = false;
  // The vocabulary's rows are padded to a multiple of this on each tensor-parallel rank; padding is
  // computed and kept as other rows are, and counts as no parameter.
  int vocabulary_multiple = 1;
  // Layouts that it has.
  bool has_tensor = true;       // tensor parallelism
  bool has_pipeline = true;     // pipelines, of one stage on each rank
  bool has_other_groups = true;  // interleaved groups of other numbers of micro-batches than of ranks
  bool has_interleaved = true;  // pipelines of several
  bool has_gpipe = true;        // pipelines with all forwards before all backwards
  bool has_zero_bubble = true;  // pipelines with backwards in two parts
  bool has_sequence_parallel = true;
  bool has_tensor_overlap = true;        // rows around the ring of the tensor axis beside slices of products
  bool has_context = true;               // context parallelism
  bool has_context_by_keys = true;       // by keys and values of other ranks, not by exchange for heads alone
  bool has_hierarchical_context = true;  // with groups that exchange tokens for heads
  bool has_hierarchical_gather = true;   // and keys and values gathered between groups, not around a ring
  bool has_other_orders = true;          // of the mesh's axes than pp-dp-tp
  bool has_core_attn_recompute = true;   // of attention's core alone
  bool has_norms_recompute = true;       // of norms alone
  bool has_activation_recompute = true;  // of the activation alone
  bool has_mlp_recompute = true;         // of the feed-forward's inside alone
  bool has_full_recompute = true;        // of whole layers
  bool has_every_other_product_recompute = true;  // of every other product, and what is neither product nor attention
  bool keeps_unread_products = false;             // it keeps the products that it names, whoever reads them
  bool has_recompute_per_stage = true;   // of more on one stage than on another
  bool has_recompute_of_some_layers = true;  // of whole layers: the first ones of each stage
  bool has_modules_of_some_layers = true;    // likewise of modules of these layers
  bool has_offload_of_some_layers = true;    // of what the first layers save, to the host
  bool has_all_reduce = true;            // data-parallel ranks that each reduce gradients
  bool has_master = true;                // a single process of whole replicas (DataParallel)
  bool has_zero_1 = true;                // ZeRO stage 1, which shards the optimizer's state alone
  bool has_hybrid_sharding = true;       // ZeRO over groups of data-parallel ranks
  bool has_other_prefetch = true;        // gathers other than one block ahead (ParallelSpec::prefetch_depth)
  bool has_fp8 = true;                   // products of layers in fp8 (Fp8Casts in op_kind.h)
  bool fp8_casts_once = false;           // a tensor for all products that read it, and weights once a step
  // Where it casts once: weights, which are in fp8 alone, are transposed for each gradient of an
  // input.
  bool transposes_weights = false;
  // In fp8, scales follow from the largest magnitudes of so many casts before. Behind each forward
  // and each backward of a stage these are joined, reduced over all ranks of the stage, and enter
  // the histories, by kernels and a collective in line with the others; 0: scales follow from what
  // is cast, and nothing is reduced.
  int scale_history = 0;
  bool has_parameter_gathers = true;     // gathers of each parameter by itself (ParallelSpec::gather_unit)
  int most_zero = 3;                     // the highest ZeRO stage
  int most_zero_in_pipelines = 3;        // the highest where pp > 1
  // How stages are cut (stages_of_engine in planner/parallel/pipeline.h), where not in any way:
  // into equal numbers of layers; or into shares of the weights that products multiply with.
  bool equal_stages = false;
  bool last_stages_take_more = false;  // one layer, where equal numbers leave a remainder; else the first ones
  bool stages_share_weights = false;
  // What a device holds beyond tensors in use: what PyTorch's caching allocator keeps beside
  // activations, as a share of them, and copies of gradients, each in one piece for which what
  // activations leave is too small: of sums in fp32 in half precision, where they are reduced so,
  // and of sums in half precision flat and in fp32, of the shard that a rank updates.
  double allocator_reserve = 0.0;
  bool copies_gradients = false;
  // A gradient in half precision stands for those of all layers, whose kernels add to sums in fp32.
  bool dummy_gradients = false;
  Bytes libraries{};      // the CUDA context with the kernels that a process loads, where the device's file says less
  Seconds host_per_op{};  // the host's time to submit an op of a block's list; 0: steps are replayed
  bool blocks_launches = false;  // the host waits for each op before it submits the next
  std::vector<std::string> sources = {};
  bool operator==(const Engine&) const = default;
};

// Whether plans for it can be run: those for parplan's own runtime.
inline bool is_own(const Engine& engine) {
  return engine.name == own_engine;
}

// Whether its allocator keeps memory that no tensor uses, and gives it back where there is too
// little (MemoryVerdict::tight); and the engine as it is then.
inline bool keeps_memory(const Engine& engine) {
  return engine.allocator_reserve > 0.0 || engine.copies_gradients;
}
inline Engine keeping_nothing(Engine engine) {
  engine.allocator_reserve = 0.0;
  engine.copies_gradients = false;
  return engine;
}

}  // namespace parplan
