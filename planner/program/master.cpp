#include <optional>

#include "planner/program/bucket_work.h"
#include "planner/program/lowering_state.h"

// What goes between a master and its replicas beside logits (PyTorch's DataParallel). PyTorch
// launches all of it on the streams that compute, so a call of the compute stream waits for each:
// replicas begin when all parameters are there, and gradients are summed when all are.
namespace parplan {
namespace {

// One collective of the data axis between kernels, on all of a buffer.
void in_line(Lowering& lowering, const char* title, InstructionKind kind, Access access, int buffer, DataType type) {
  const std::int64_t bytes = lowering.program.buffers[buffer].bytes;
  if (bytes == 0) return;
  call_again(lowering, {title, bytes, 0, 0}, {buffer}, {}, [&]() -> Call& {
    return call_on_pieces(lowering, title, Stream::compute,
                          {communication(kind, all_along(Axis::dp), Stream::dp, type)},
                          {{{buffer, 0, bytes, access}}});
  });
}

}  // namespace

void hand_out_parameters(Lowering& lowering) {
  if (!lowering.job.layout.has_master()) return;
  const TrainingSpec& training = lowering.job.training;
  const Access access = lowering.is_replica() ? Access::write : Access::read;
  for (const Bucket& bucket : lowering.program.buckets)
    in_line(lowering, "data.broadcast.parameters", InstructionKind::broadcast, access, bucket.parameters,
            in_memory(training.precision));
  if (lowering.program.loss_scale_buffer && !training.engine.master_computes_loss)
    in_line(lowering, "data.broadcast.loss_scale", InstructionKind::broadcast, access,
            *lowering.program.loss_scale_buffer, DataType::fp32);
}

void clear_sent_gradients(Lowering& lowering, int micro_batch) {
  if (!lowering.is_replica() || micro_batch == 0) return;  // the step begins with cleared ones
  const DataType type = gradient_type(lowering.job.training);
  for (const Bucket& bucket : lowering.program.buckets)
    for (const std::optional<int> gradients : {bucket.gradients, bucket.second_gradients}) {
      if (!gradients || lowering.program.buffers[*gradients].bytes == 0) continue;
      const std::int64_t bytes = lowering.program.buffers[*gradients].bytes;
      constexpr const char* title = "fill_zero.sent_gradients";
      call_again(lowering, {title, bytes, 0, 0}, {*gradients}, {}, [&]() -> Call& {
        return call_on_pieces(lowering, title, Stream::compute,
                              {clear_gradients(bytes / size_of(type), Label::dp, type)},
                              {{{*gradients, 0, bytes, Access::write}}});
      });
    }
}

void collect_gradients(Lowering& lowering) {
  if (!lowering.job.layout.has_master()) return;
  for (const Bucket& bucket : lowering.program.buckets)
    for (const std::optional<int> gradients : {bucket.gradients, bucket.second_gradients})
      if (gradients)
        in_line(lowering, "data.reduce.gradients", InstructionKind::reduce_sum,
                lowering.is_replica() ? Access::read : Access::update, *gradients,
                gradient_type(lowering.job.training));
}

}  // namespace parplan
