#include "planner/simulator/data_costs.h"

#include <algorithm>
#include <span>

#include "planner/base/enum_index.h"
#include "planner/cost/collective_time.h"
#include "planner/cost/host_time.h"
#include "planner/cost/kernel_time.h"
#include "planner/program/bucket_work.h"
#include "planner/program/orthogonalize.h"
#include "planner/simulator/estimate_sizes.h"

namespace parplan {
namespace {

// Prices the buckets of one layout in one environment.
class BucketPricer {
 public:
  BucketPricer(const ParallelSpec& spec, const Placements& placements, const TrainingSpec& training,
               const MeshView& view, const StageEnvironment& where)
      : spec_(spec),
        placements_(placements),
        training_(training),
        view_(view),
        where_(where),
        shards_(data_shards(placements, spec.replicas())) {}

  // The matrices that a bucket holds.
  struct Matrices {
    std::int64_t elements = 0;
    std::span<const Instruction> orthogonalization;
  };
  BucketCosts of(const BucketElements& trained, const BucketElements& frozen, bool runs_back, const StateHomes& homes,
                 const Matrices& matrices) const {
    const std::int64_t whole = padded(trained, spec_, training_);
    BucketCosts costs;
    costs.regather = collective(InstructionKind::all_gather, whole * element_);
    add_gathers(trained, frozen, runs_back, costs);
    if (homes.parameters != Home::device) add_copies_up(trained, frozen, runs_back, homes, costs);
    const bool has_master = spec_.dp_method == DataMethod::master;
    if (has_master)
      costs.hand_out = collective(InstructionKind::broadcast, whole * element_) +
                       collective(InstructionKind::broadcast, padded(frozen, spec_, training_) * element_);
    if (whole == 0) return costs;
    if (has_master)
      costs.collect = collective(InstructionKind::reduce_sum, whole * gradient_bytes(training_));
    else
      add_reductions(trained, whole, costs);
    add_sums(trained, whole, homes, costs);
    if (updates_on_host(homes))
      add_update_on_host(whole, homes, costs);
    else
      add_update(whole, matrices, costs);
    return costs;
  }

 private:
  void add_gathers(const BucketElements& trained, const BucketElements& frozen, bool runs_back,
                   BucketCosts& costs) const {
    const auto gather = [&](std::int64_t elements) {
      return collective(InstructionKind::all_gather, elements * element_);
    };
    costs.gather = units_of(trained, gather) + units_of(frozen, gather);
    if (runs_back) costs.gather_again = costs.gather;
  }

  // Copies of parameters that are elsewhere.
  void add_copies_up(const BucketElements& trained, const BucketElements& frozen, bool runs_back,
                     const StateHomes& homes, BucketCosts& costs) const {
    const auto bring = [&](std::int64_t elements) { return copy(local(elements, shards_.parameters) * element_); };
    costs.up = units_of(trained, bring) + units_of(frozen, bring);
    if (homes.parameters == Home::nvme)
      for (const BucketElements* bucket : {&trained, &frozen})
        if (const std::int64_t elements = padded(*bucket, spec_, training_); elements > 0)
          costs.read_up += file_time(Stream::from_nvme, Bytes(local(elements, shards_.parameters) * element_),
                                     where_.nvme);
    if (runs_back) costs.up_again = costs.up;
    if (runs_back) costs.read_again = costs.read_up;
  }

  void add_reductions(const BucketElements& trained, std::int64_t whole, BucketCosts& costs) const {
    costs.reduce = units_of(trained, [&](std::int64_t elements) {
      return collective(gradient_reduction(shards_, training_), elements * reduced_bytes(training_));
    });
    if (!shards_.gradients && spec_.replicas() > 1)
      for (const Instruction& copy_of : accumulated_reduction(whole, shards_, training_).copies())
        costs.reduce += kernel(copy_of);
  }

  // What becomes of sums of gradients until the update.
  void add_sums(const BucketElements& trained, std::int64_t whole, const StateHomes& homes, BucketCosts& costs) const {
    if (spec_.mesh.dp_shard > 0)
      costs.across =
          collective_time(InstructionKind::all_reduce_sum, Bytes(local(whole, true) * reduced_bytes(training_)),
                          *view_.replicas, where_.device->backend);
    if (shards_.gradients) {
      costs.accumulate = units_of(trained, [&](std::int64_t elements) {
        return kernel(accumulate_gradients(local(elements, true), Stream::dp, Label::dp));
      });
      if (clears_sharded(training_)) costs.clear = kernel(clear_gradients(whole, Label::dp, gradient_type(training_)));
    }
    const Bytes sum(local(whole, shards_.gradients) * gradient_bytes(training_)),
        shard(local(whole, shards_.optimizer) * gradient_bytes(training_));
    const bool are_elsewhere = homes.gradients != Home::device;
    if (are_elsewhere) costs.sum = copy(sum.count);
    if (homes.gradients == Home::nvme) {
      costs.sum_read = file_time(Stream::from_nvme, sum, where_.nvme);
      costs.sum_write = file_time(Stream::to_nvme, sum, where_.nvme);
      costs.shard_read = file_time(Stream::from_nvme, shard, where_.nvme);
      costs.shard_write = file_time(Stream::to_nvme, shard, where_.nvme);
    }
    if (!are_elsewhere)
      costs.begin_clear = kernel(clear_gradients(sum.count / size_of(DataType::fp32), Label::optimizer));
    if (computes_norm(training_)) {
      costs.norm = kernel(sum_of_squares(local(whole, shards_.optimizer)));
      // A rank that has nothing but a tied parameter sums on the device.
      if (updates_on_host(homes) && placements_.state.homes.gradients != Home::device) {
        const Seconds on_host = host_kernel(sum_of_squares_on_host(local(whole, shards_.optimizer)));
        costs.norm = are_elsewhere ? on_host : std::min(costs.norm, on_host);
      }
    }
    if (are_elsewhere || updates_on_host(homes)) costs.to_host = copy(shard.count);
  }

  void add_update_on_host(std::int64_t whole, const StateHomes& homes, BucketCosts& costs) const {
    const std::int64_t own = local(whole, shards_.optimizer);
    costs.update = host_kernel(update_on_host(own, false, training_));
    if (homes.parameters == Home::device) costs.from_host = copy(own * element_);
    const std::int64_t parts = bytes_of_state(training_, homes) / state_bytes;  // each by a copy of its own
    if (homes.optimizer == Home::nvme && parts > 0) {
      const Bytes part(own * state_bytes);
      costs.read = static_cast<double>(parts) * file_time(Stream::from_nvme, part, where_.nvme);
      costs.write = static_cast<double>(parts) * file_time(Stream::to_nvme, part, where_.nvme);
    }
    if (homes.parameters == Home::nvme) {
      const Bytes part(own * element_);
      costs.read += file_time(Stream::from_nvme, part, where_.nvme);
      costs.write += file_time(Stream::to_nvme, part, where_.nvme);
    }
  }

  // What the first rank updates: its shard, which begins with the matrices.
  void add_update(std::int64_t whole, const Matrices& matrices, BucketCosts& costs) const {
    const std::int64_t own = local(whole, shards_.optimizer), in_matrices = std::min(own, matrices.elements);
    costs.update = kernel(update_parameters(own - in_matrices, false, training_));
    if (in_matrices == 0) return;
    costs.update += kernel(update_momentum(in_matrices, training_));
    for (const Instruction& work : matrices.orthogonalization) costs.orthogonalize += kernel(work);
    costs.update += kernel(move_along(in_matrices, 1.0, false, training_));
    if (shards_.optimizer)
      costs.exchange = collective(InstructionKind::all_gather, whole * gradient_bytes(training_)) +
                       collective(InstructionKind::reduce_scatter, whole * element_);
  }

  // What a rank has of so many elements.
  std::int64_t local(std::int64_t elements, bool is_sharded) const {
    return is_sharded ? elements / spec_.shard_ranks() : elements;
  }
  Seconds kernel(const Instruction& work) const {
    if (work.shape.rows == 0) return Seconds(0.0);
    return kernel_time(work.op, work.shape, work.type, *where_.device, where_.rates);
  }
  Seconds host_kernel(const Instruction& work) const {
    return host_kernel_time(work, *where_.device, where_.rates, where_.host);
  }
  Seconds collective(InstructionKind kind, std::int64_t bytes) const {
    if (spec_.replicas() == 1 || bytes == 0) return Seconds(0.0);
    return collective_time(kind, Bytes(bytes), *view_.shard, where_.device->backend);
  }
  Seconds copy(std::int64_t bytes) const {
    return host_copy_time(Bytes(bytes), *where_.device, where_.rates, where_.host);
  }
  // The sum of what units take (for_each_unit).
  template <class OfUnit>
  Seconds units_of(const BucketElements& bucket, OfUnit seconds) const {
    Seconds all;
    for_each_unit(bucket, spec_, training_, [&](std::int64_t elements) { all += seconds(elements); });
    return all;
  }

  const ParallelSpec& spec_;
  const Placements& placements_;
  const TrainingSpec& training_;
  const MeshView& view_;
  const StageEnvironment& where_;
  DataShards shards_;
  std::int64_t element_ = size_of(training_.precision);  // bytes of a parameter
};

}  // namespace

const DataCosts& KnownDataCosts::of(const ParallelSpec& spec, const Placements& placements, const BlockShapes& shapes,
                                    const MeshView& view, int environment) {
  const auto [entry, inserted] = costs_.try_emplace({bucket_key(spec), view.shard, environment});
  DataCosts& costs = entry->second;
  if (!inserted) return costs;
  const StageEnvironment& where = views_.environment(environment);
  const BucketPricer prices(spec, placements, training_, view, where);
  const DataShards shards = data_shards(placements, spec.replicas());
  for (std::size_t kind = 0; kind < shapes.own_elements.size(); ++kind) {
    costs.own.push_back(prices.of(shapes.own_elements[kind], shapes.frozen_elements[kind],
                                  has_backward(graph_, graph_.kinds[kind]), placements.state.homes,
                                  {.elements = shapes.matrix_elements[kind],
                                   .orthogonalization = shapes.orthogonalizations[kind]}));
    costs.reductions.push_back(reductions_of(shapes.own_elements[kind], spec, shards, view, where));
  }
  const StateHomes of_tied = homes_of_tied(placements.state.homes);
  costs.tied = shapes.tied_is_frozen ? prices.of({}, shapes.tied_elements, true, of_tied, {})
                                     : prices.of(shapes.tied_elements, {}, true, of_tied, {});
  // A rank holds the loss scale once, which tied_state counts.
  const std::int64_t scale =
      held_by_state(rank_memory({.buckets = {}, .saved = {}, .computes_loss = false}, training_)).count;
  const auto state_of = [&](const BucketSizes& bucket) {
    return held_by_state(rank_memory({.buckets = {&bucket, 1}, .saved = {}, .computes_loss = false}, training_)).count;
  };
  for (std::size_t kind = 0; kind < shapes.own_elements.size(); ++kind) {
    const BucketSizes frozen = frozen_bucket(shapes, kind, spec, placements, training_);
    const std::int64_t of_frozen = frozen.elements > 0 ? state_of(frozen) - scale : 0;
    costs.own_state.push_back(state_of(own_bucket(shapes, kind, spec, placements, training_)) - scale + of_frozen);
  }
  const BucketSizes tied = tied_bucket(shapes, spec, placements, training_, 2);
  costs.tied_state = shapes.tied_elements.all > 0 ? state_of(tied) : scale;
  return costs;
}

std::vector<DataReduction> KnownDataCosts::reductions_of(const BucketElements& trained, const ParallelSpec& spec,
                                                         const DataShards& shards, const MeshView& view,
                                                         const StageEnvironment& where) const {
  const std::int64_t whole = padded(trained, spec, training_);
  const bool beside_kernels =
      execution_of(*where.device, training_.engine).stream_of(Stream::dp) != index_of(Stream::compute);
  if (spec.replicas() == 1 || whole == 0 || shards.gradients || spec.dp_method == DataMethod::master ||
      !beside_kernels || !accumulated_reduction(whole, shards, training_).copies().empty())
    return {};
  std::vector<DataReduction> reductions;
  const auto add = [&](InstructionKind kind, std::int64_t elements, const GroupNetwork& network) {
    const Bytes bytes(elements * reduced_bytes(training_));
    const Seconds duration = collective_time(kind, bytes, network, where.device->backend);
    reductions.push_back({duration, contention(kind, bytes, duration, network, *where.device, where.rates)});
  };
  for_each_unit(trained, spec, training_,
                [&](std::int64_t elements) { add(gradient_reduction(shards, training_), elements, *view.shard); });
  if (spec.mesh.dp_shard > 0) add(InstructionKind::all_reduce_sum, whole / spec.shard_ranks(), *view.replicas);
  return reductions;
}

}  // namespace parplan
