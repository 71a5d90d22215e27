#include "planner/program/lower.h"

#include <algorithm>
#include <initializer_list>
#include <numeric>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "planner/base/enum.h"
#include "planner/base/error.h"
#include "planner/program/buckets.h"
#include "planner/program/events.h"
#include "planner/program/memory.h"
#include "planner/program/slots.h"
#include "planner/program/workspace.h"

namespace parplan {
namespace {

using Bound = std::pair<const char*, int>;  // a binding's name and the buffer for it

// The Program of one rank under construction; `lower` below calls its passes in order.
class Lowering {
 public:
  Lowering(const Job& job, int rank)
      : job_(job), graph_(*job.graph), coordinates_(coordinates_of(job.spec.mesh, rank)) {
    program_.rank = rank;
    program_.stage = coordinate(Axis::pp);
    range_ = blocks_of_stage(job.spec, program_.stage);
    shards_ = data_shards(job.placements, job.spec.dp());
  }

  // Who this rank communicates with.
  void set_groups() {
    for (const Axis axis : inner_axes_first)
      if (is_planned(axis)) program_.set_group(all_along(axis), group_of(job_.spec.mesh, program_.rank, axis));
    const std::vector<int> pipeline = program_.group(all_along(Axis::pp));
    const bool crosses = pipeline.size() > 1 && !graph_.tied.empty();
    if (crosses && (is_first() || is_last())) program_.set_group(tied_stages, {pipeline.front(), pipeline.back()});
    if (!is_last()) program_.set_group(next_stage, {pipeline[program_.stage + 1]});
    if (!is_first()) program_.set_group(previous_stage, {pipeline[program_.stage - 1]});
  }

  // One pair of Segments for every kind of block on this stage.
  void lower_blocks() {
    const BlockChoice choice = block_choice(job_, program_.stage, coordinate(Axis::tp));
    for (int b = range_.first; b < range_.last; ++b) {
      const int kind = graph_.blocks[b].kind;
      if (kinds_.contains(kind)) continue;
      LoweredBlock lowered = lower_block(graph_, b, choice);
      Kind& entry = kinds_[kind];
      entry.saved_bytes = lowered.saved_bytes;
      crossing_bytes_ = lowered.crossing_bytes;
      entry.forward = add_segment(std::move(lowered.forward));
      entry.backward = add_segment(std::move(lowered.backward));
    }
  }

  // Parameters, gradients and optimizer state, sharded over the data axis as the placements say.
  void make_buckets() {
    stage_buckets_ = stage_buckets(job_, range_, coordinate(Axis::tp), coordinate(Axis::dp));
    const auto add = [&](const char* what, const StageBucket& from, MemoryCategory category, bool sharded,
                         DataType type) {
      const std::int64_t elements = sharded ? from.shard_elements : from.elements;
      return add_buffer(fmt::format("{} of {}", what, from.name), category, elements * size_of(type), true);
    };
    const DataType precision = job_.training.precision;
    for (const StageBucket& from : stage_buckets_) {
      Bucket bucket{.name = from.name, .elements = from.elements, .shard_begin = from.shard_begin,
                    .shard_elements = from.shard_elements};
      bucket.parameters = add("parameters", from, MemoryCategory::parameters, shards_.parameters, precision);
      program_.buckets.push_back(bucket);
      for (ParameterPart part : from.layout.parts) {
        part.bucket = static_cast<int>(program_.buckets.size()) - 1;
        program_.parameters.push_back(part);
      }
    }
    for (std::size_t i = 0; i < stage_buckets_.size(); ++i) {
      const StageBucket& from = stage_buckets_[i];
      Bucket& bucket = program_.buckets[i];
      bucket.gradients = add("gradients", from, MemoryCategory::gradients, shards_.gradients, DataType::fp32);
      if (from.blocks.size() > 1)
        bucket.second_gradients =
            add("second gradients", from, MemoryCategory::gradients, shards_.gradients, DataType::fp32);
    }
    const bool adaptive = job_.training.optimizer != Optimizer::sgd;
    for (std::size_t i = 0; i < stage_buckets_.size(); ++i) {
      const StageBucket& from = stage_buckets_[i];
      Bucket& bucket = program_.buckets[i];
      if (adaptive || job_.training.momentum != 0.0)
        bucket.first_moment = add("first moment", from, MemoryCategory::optimizer, true, DataType::fp32);
      if (adaptive) bucket.second_moment = add("second moment", from, MemoryCategory::optimizer, true, DataType::fp32);
      if (is_half(precision)) bucket.master = add("master copy", from, MemoryCategory::optimizer, true, DataType::fp32);
    }
    if (scales_loss(job_.training))
      program_.loss_scale_buffer = add_buffer("loss scale", MemoryCategory::optimizer, sizeof(LossScale), true);
  }

  // Whatever lives for less than a step.
  void make_buffers() {
    const auto largest = [&](bool tied) {
      std::int64_t elements = 0;
      for (const StageBucket& bucket : stage_buckets_)
        if ((bucket.tied >= 0) == tied) elements = std::max(elements, bucket.elements);
      return elements;
    };
    const auto pair = [&](const char* what, std::int64_t bytes, std::array<int, 2>& ids) {
      for (int i = 0; i < 2; ++i) ids[i] = add_buffer(fmt::format("{} {}", what, i), MemoryCategory::buffers, bytes);
    };
    const std::int64_t element = size_of(job_.training.precision);
    if (shards_.parameters) {
      pair("gathered parameters", largest(false) * element, gathered_);
      if (largest(true) > 0)
        gathered_tied_ = add_buffer("gathered tied parameter", MemoryCategory::buffers, largest(true) * element);
    }
    if (shards_.gradients) {
      pair("unreduced gradients", largest(false) * size_of(DataType::fp32), unreduced_);
      if (largest(true) > 0)
        unreduced_tied_ =
            add_buffer("unreduced tied gradients", MemoryCategory::buffers, largest(true) * size_of(DataType::fp32));
    }
    slots_ = play_slots(job_.schedule, program_.stage);
    saved_.resize(static_cast<std::size_t>(slots_.saved));
    for (int slot = 0; slot < slots_.saved; ++slot)
      for (int b = range_.first; b < range_.last; ++b)
        saved_[slot].push_back(add_buffer(
            fmt::format("saved of {}, slot {}", graph_.blocks[b].name, slot),
            MemoryCategory::activations, kind_of(b).saved_bytes));
    if (!is_last())
      for (int i = 0; i < slots_.exchanges; ++i)
        output_.push_back(
            add_buffer(fmt::format("activation to send {}", i), MemoryCategory::buffers, crossing_bytes_));
    std::int64_t scratch = step_scratch_bytes(job_.training, job_.backend).count;
    for (const Segment& segment : program_.segments) scratch = std::max(scratch, segment.scratch_bytes);
    scratch_ = add_buffer("scratch", MemoryCategory::activations, scratch);
    for (int i = 0; i < slots_.exchanges; ++i)
      gradient_.push_back(
          add_buffer(fmt::format("activation gradient {}", i), MemoryCategory::activations, crossing_bytes_));
    if (computes_norm(job_.training)) program_.norm_buffer = add_buffer("gradient norm", MemoryCategory::buffers, 4);
    if (is_last()) program_.loss_buffer = add_buffer("loss", MemoryCategory::buffers, 4);
  }

  // Gradient accumulators, loss and norm start from zero.
  void begin_step() {
    const int first = next_call();
    for (const Bucket& bucket : program_.buckets) {
      fill_zero(bucket.gradients, Label::optimizer);
      if (bucket.second_gradients >= 0) fill_zero(bucket.second_gradients, Label::optimizer);
    }
    if (program_.norm_buffer >= 0) fill_zero(program_.norm_buffer, Label::optimizer);
    if (program_.loss_buffer >= 0) fill_zero(program_.loss_buffer, Label::optimizer);
    program_.tasks.push_back({std::nullopt, first, next_call()});
  }

  void run_actions() {
    for (std::size_t i = 0; i < actions().size(); ++i) {
      const Action& action = actions()[i];
      const int first = next_call();
      if (action.phase == Phase::forward) {
        forward(action.micro_batch, slots_.actions[i]);
      } else {
        backward(action.micro_batch, slots_.actions[i]);
      }
      program_.tasks.push_back({action, first, next_call()});
    }
  }

  // What is left of the reductions, then the optimizer.
  void end_step() {
    const int first = next_call();
    for (std::size_t i = program_.buckets.size(); i-- > 0;) reduce_over_tensor_axis(i);
    for (std::size_t i = 0; i < program_.buckets.size(); ++i) add_tied(i);
    if (program_.norm_buffer >= 0) compute_norm();
    for (std::size_t i = 0; i < program_.buckets.size(); ++i) update(i);
    if (program_.loss_scale_buffer >= 0) update_loss_scale();
    if (shards_.optimizer && !shards_.parameters)
      for (const Bucket& bucket : program_.buckets) gather_in_place(bucket);
    if (program_.loss_buffer >= 0 && job_.spec.dp() > 1)
      collective("data.all_reduce.loss", InstructionKind::all_reduce_sum, all_along(Axis::dp),
                 {{program_.loss_buffer, 0, 4}});
    program_.tasks.push_back({std::nullopt, first, next_call()});
  }

  void plan_memory() {
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < program_.buffers.size(); ++i) {
      Buffer& buffer = program_.buffers[i];
      buffer.offset = offset;
      program_.arena_bytes = buffer.offset + buffer.bytes;
      const bool last = i + 1 == program_.buffers.size();
      const std::int64_t end =
          last ? program_.arena_bytes : align_up(Bytes(program_.arena_bytes), buffer_alignment).count;
      program_.memory.part(buffer.category) += Bytes(end - offset);
      offset = end;
    }
    program_.memory.overhead = job_.overhead;
  }

  void count_communication() {
    std::vector<CommunicationVolume> of_segment;
    for (const Segment& segment : program_.segments) {
      CommunicationVolume volume;
      for (const Instruction& instruction : segment.instructions) {
        if (instruction.kind == InstructionKind::kernel) continue;
        const std::vector<int>& group = program_.group(instruction.group);
        const auto at = std::find(group.begin(), group.end(), program_.rank) - group.begin();
        const Bytes sent(sent_bytes(instruction.kind, instruction.operands.back().bytes, size_of(instruction.type),
                                    static_cast<int>(group.size()), static_cast<int>(at)));
        volume[instruction.group.axis] += sent;
      }
      of_segment.push_back(volume);
    }
    for (const Call& call : program_.calls) {
      const CommunicationVolume& volume = of_segment[call.segment];
      program_.communication += volume;
    }
  }

  const std::vector<Action>& actions() const { return job_.schedule.ranks[program_.stage]; }
  Program take() { return std::move(program_); }
  Program& program() { return program_; }

 private:
  struct Kind {
    int forward = -1;   // segments
    int backward = -1;
    std::int64_t saved_bytes = 0;
  };
  struct Piece {
    int buffer = -1;
    std::int64_t offset = 0;
    std::int64_t bytes = 0;
    Access access = Access::update;
  };

  int coordinate(Axis axis) const { return coordinates_[axis]; }
  bool is_first() const { return program_.stage == 0; }
  bool is_last() const { return program_.stage == job_.spec.pp() - 1; }
  int next_call() const { return static_cast<int>(program_.calls.size()); }
  const Kind& kind_of(int block) const { return kinds_.at(graph_.blocks[block].kind); }
  Bucket& bucket_of(int block) { return program_.buckets[block - range_.first]; }
  // The bucket of the tied parameter that a block uses; -1 none.
  int tied_bucket_of(int block) const {
    for (std::size_t i = 0; i < stage_buckets_.size(); ++i)
      if (stage_buckets_[i].tied >= 0 &&
          std::ranges::find(stage_buckets_[i].blocks, block) != stage_buckets_[i].blocks.end())
        return static_cast<int>(i);
    return -1;
  }

  int add_segment(Segment segment) {
    const auto known = std::find(program_.segments.begin(), program_.segments.end(), segment);
    if (known != program_.segments.end()) return static_cast<int>(known - program_.segments.begin());
    program_.segments.push_back(std::move(segment));
    return static_cast<int>(program_.segments.size()) - 1;
  }

  int add_buffer(std::string name, MemoryCategory category, std::int64_t bytes, bool persistent = false) {
    program_.buffers.push_back({std::move(name), category, bytes, 0, persistent});
    return static_cast<int>(program_.buffers.size()) - 1;
  }

  Call& add_call(int segment, std::initializer_list<Bound> bound, int micro_batch = -1, std::vector<int> frees = {}) {
    Call call;
    call.segment = segment;
    call.micro_batch = micro_batch;
    call.frees = std::move(frees);
    for (const std::string& name : program_.segments[segment].bindings) {
      const auto found = std::find_if(bound.begin(), bound.end(), [&](const Bound& b) { return name == b.first; });
      PARPLAN_ASSERT(found != bound.end() && found->second >= 0,
                     fmt::format("nothing bound to '{}' of {}", name, program_.segments[segment].name));
      call.buffers.push_back(found->second);
      if (found->second == scratch_) call.frees.push_back(scratch_);
    }
    program_.calls.push_back(std::move(call));
    return program_.calls.back();
  }

  // A call of a Segment whose bindings are just its pieces' buffers; equal Segments are made once.
  Call& call_on_pieces(std::string name, Stream stream, std::vector<Instruction> instructions,
                       const std::vector<std::vector<Piece>>& pieces, std::vector<int> frees = {}) {
    Segment segment;
    segment.name = std::move(name);
    segment.stream = stream;
    std::vector<int> buffers;
    for (std::size_t i = 0; i < instructions.size(); ++i)
      for (const Piece& piece : pieces[i]) {
        auto at = std::find(buffers.begin(), buffers.end(), piece.buffer);
        if (at == buffers.end()) {
          buffers.push_back(piece.buffer);
          segment.bindings.push_back(fmt::format("buffer {}", buffers.size() - 1));
          at = buffers.end() - 1;
        }
        instructions[i].operands.push_back(
            {static_cast<int>(at - buffers.begin()), piece.offset, piece.bytes, piece.access});
      }
    segment.instructions = std::move(instructions);
    order_instructions(segment);
    Call call;
    call.segment = add_segment(std::move(segment));
    call.buffers = std::move(buffers);
    call.frees = std::move(frees);
    program_.calls.push_back(std::move(call));
    return program_.calls.back();
  }

  static Instruction communication(InstructionKind kind, GroupKey group, Stream stream,
                                   DataType type = DataType::fp32) {
    Instruction instruction;
    instruction.kind = kind;
    instruction.group = group;
    instruction.stream = stream;
    instruction.label = label_of(group.axis);
    instruction.type = type;
    instruction.name = name(kind);
    return instruction;
  }
  static Instruction flat_kernel(OpKind op, std::int64_t elements, Stream stream, Label label,
                                 DataType type = DataType::fp32) {
    Instruction instruction;
    instruction.kind = InstructionKind::kernel;
    instruction.op = op;
    instruction.shape.rows = elements;
    instruction.stream = stream;
    instruction.label = label;
    instruction.type = type;
    instruction.name = name(op);
    return instruction;
  }

  // On the stream of its axis.
  void collective(std::string name, InstructionKind kind, GroupKey group, const std::vector<Piece>& pieces) {
    const Stream stream = stream_of(group.axis);
    std::vector<Instruction> instructions;
    std::vector<std::vector<Piece>> operands;
    for (const Piece& piece : pieces) {
      instructions.push_back(communication(kind, group, stream));
      operands.push_back({piece});
    }
    call_on_pieces(std::move(name), stream, std::move(instructions), operands);
  }

  void fill_zero(int buffer, Label label) {
    const std::int64_t bytes = program_.buffers[buffer].bytes;
    if (bytes == 0) return;
    call_on_pieces("fill_zero", Stream::compute, {flat_kernel(OpKind::fill_zero, bytes / 4, Stream::compute, label)},
                   {{{buffer, 0, bytes, Access::write}}});
  }

  // Tasks -----------------------------------------------------------------------------------------

  // ZeRO-3: the whole bucket of a block, gathered into one of two buffers in turn.
  int gather(int block) {
    const int slot = gathered_[gathers_++ % 2];
    gather_into(bucket_of(block), slot);
    return slot;
  }
  void gather_into(const Bucket& bucket, int whole) {
    const DataType type = in_memory(job_.training.precision);
    const std::int64_t element = size_of(type);
    call_on_pieces("data.all_gather.parameters", Stream::dp,
                   {communication(InstructionKind::all_gather, all_along(Axis::dp), Stream::dp, type)},
                   {{{bucket.parameters, 0, bucket.shard_elements * element, Access::read},
                     {whole, 0, bucket.elements * element, Access::write}}});
  }

  // Runs `visit(block, parameters, tied parameters)` over blocks, with their parameters whole. The
  // next block's are gathered while one computes.
  template <class Visit>
  void visit_blocks(const std::vector<int>& blocks, Visit visit) {
    int ready = -1;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const int block = blocks[i];
      const int tied = tied_bucket_of(block);
      if (!shards_.parameters) {
        visit(block, bucket_of(block).parameters, tied < 0 ? -1 : program_.buckets[tied].parameters);
        continue;
      }
      const auto has_own = [&](int b) { return bucket_of(b).elements > 0; };
      if (ready < 0 && has_own(block)) ready = gather(block);
      const int current = ready;
      ready = i + 1 < blocks.size() && has_own(blocks[i + 1]) ? gather(blocks[i + 1]) : -1;
      if (tied >= 0) gather_into(program_.buckets[tied], gathered_tied_);
      visit(block, current, tied < 0 ? -1 : gathered_tied_);
      std::vector<int>& frees = program_.calls[last_visit_].frees;
      if (current >= 0) frees.push_back(current);
      if (tied >= 0) frees.push_back(gathered_tied_);
    }
  }

  void forward(int micro_batch, const ActionSlots& slots) {
    const std::vector<int>& slot = saved_[slots.saved];
    const int to_send = is_last() ? -1 : output_[slots.exchange];
    if (!is_first())
      transfer("pipeline.receive.activation", InstructionKind::receive, previous_stage, Stream::receive_previous,
               slot.front());
    std::vector<int> blocks(static_cast<std::size_t>(range_.last - range_.first));
    std::iota(blocks.begin(), blocks.end(), range_.first);
    visit_blocks(blocks, [&](int block, int parameters, int tied_parameters_buffer) {
      const std::size_t at = static_cast<std::size_t>(block - range_.first);
      const int output = at + 1 < slot.size() ? slot[at + 1] : to_send;
      last_visit_ = next_call();
      add_call(kind_of(block).forward,
               {{binding::parameters, parameters}, {binding::tied_parameters, tied_parameters_buffer},
                {binding::saved, slot[at]}, {binding::output, output}, {binding::loss, program_.loss_buffer},
                {binding::scratch, scratch_}},
               micro_batch);
    });
    if (!is_last())
      transfer("pipeline.send.activation", InstructionKind::send, next_stage, Stream::send_next, to_send)
          .frees.push_back(to_send);
  }

  void backward(int micro_batch, const ActionSlots& slots) {
    const std::vector<int>& slot = saved_[slots.saved];
    const int gradient = gradient_[slots.exchange];
    const bool last_micro_batch = micro_batch + 1 == static_cast<int>(parplan::micro_batches(job_.spec, job_.training));
    if (!is_last())
      transfer("pipeline.receive.gradient", InstructionKind::receive, next_stage, Stream::receive_next, gradient);
    std::vector<int> blocks(static_cast<std::size_t>(range_.last - range_.first));
    std::iota(blocks.rbegin(), blocks.rend(), range_.first);
    visit_blocks(blocks, [&](int block, int parameters, int tied_parameters_buffer) {
      const std::size_t at = static_cast<std::size_t>(block - range_.first);
      const Bucket& bucket = bucket_of(block);
      const int tied = tied_bucket_of(block);
      int gradients = bucket.gradients;
      int accumulator = -1;
      int tied_gradients = -1;
      if (tied >= 0) {
        const Bucket& shared = program_.buckets[tied];
        accumulator = block == stage_buckets_[tied].blocks.front() ? shared.gradients : shared.second_gradients;
        tied_gradients = accumulator;
      }
      if (shards_.gradients) {
        gradients = unreduced_[reductions_++ % 2];
        fill_zero_range(gradients, bucket.elements);
        if (tied >= 0) fill_zero_range(tied_gradients = unreduced_tied_, program_.buckets[tied].elements);
      }
      std::vector<int> frees{slot[at]};
      if (is_first() && block == range_.first) frees.push_back(gradient);
      last_visit_ = next_call();
      add_call(kind_of(block).backward,
               {{binding::parameters, parameters}, {binding::tied_parameters, tied_parameters_buffer},
                {binding::gradients, gradients}, {binding::tied_gradients, tied_gradients},
                {binding::saved, slot[at]}, {binding::gradient, gradient}, {binding::loss, program_.loss_buffer},
                {binding::loss_scale, program_.loss_scale_buffer}, {binding::scratch, scratch_}},
               micro_batch, std::move(frees));
      const int visit = last_visit_;
      reduce_over_data_axis(bucket, bucket.gradients, gradients, last_micro_batch);
      if (tied >= 0) reduce_over_data_axis(program_.buckets[tied], accumulator, tied_gradients, last_micro_batch);
      last_visit_ = visit;
    });
    if (!is_first())
      transfer("pipeline.send.gradient", InstructionKind::send, previous_stage, Stream::send_previous, gradient)
          .frees.push_back(gradient);
  }

  // There are many, and all of one kind and direction are one Segment.
  Call& transfer(std::string name, InstructionKind kind, GroupKey group, Stream stream, int buffer) {
    const auto [known, first] = transfers_.try_emplace({kind, group}, -1);
    if (!first) {
      Call& call = program_.calls.emplace_back();
      call.segment = known->second;
      call.buffers = {buffer};
      return call;
    }
    Call& call =
        call_on_pieces(std::move(name), stream,
                       {communication(kind, group, stream, in_memory(job_.training.precision))},
                       {{{buffer, 0, crossing_bytes_, kind == InstructionKind::send ? Access::read : Access::write}}});
    known->second = call.segment;
    return call;
  }

  void fill_zero_range(int buffer, std::int64_t elements) {
    if (elements == 0) return;
    call_on_pieces("fill_zero", Stream::compute,
                   {flat_kernel(OpKind::fill_zero, elements, Stream::compute, Label::dp)},
                   {{{buffer, 0, elements * 4, Access::write}}});
  }

  // After a block's backward. Without sharded gradients the accumulated bucket is reduced once,
  // behind the last micro-batch; with them each micro-batch's bucket is, and added to this rank's
  // shard.
  void reduce_over_data_axis(const Bucket& bucket, int accumulator, int unreduced, bool last_micro_batch) {
    if (job_.spec.dp() == 1 || bucket.elements == 0) return;
    const std::int64_t bytes = bucket.elements * 4;
    if (!shards_.gradients) {
      if (!last_micro_batch) return;
      const InstructionKind kind =
          shards_.optimizer ? InstructionKind::reduce_scatter : InstructionKind::all_reduce_sum;
      collective(fmt::format("data.{}.gradients", name(kind)), kind, all_along(Axis::dp), {{accumulator, 0, bytes}});
      return;
    }
    call_on_pieces("data.reduce_scatter.gradients", Stream::dp,
                   {communication(InstructionKind::reduce_scatter, all_along(Axis::dp), Stream::dp),
                    flat_kernel(OpKind::accumulate, bucket.shard_elements, Stream::dp, Label::dp)},
                   {{{unreduced, 0, bytes, Access::update}},
                    {{unreduced, bucket.shard_begin * 4, bucket.shard_elements * 4, Access::read},
                     {accumulator, 0, bucket.shard_elements * 4, Access::update}}},
                   {unreduced});
  }

  // End of the step -------------------------------------------------------------------------------

  // Where element `element` of the bucket lies in its gradient, parameter and optimizer buffers.
  Piece gradient_piece(const Bucket& bucket, int buffer, BucketLayout::Range range, Access access) const {
    const std::int64_t begin = shards_.gradients ? bucket.shard_begin : 0;
    return {buffer, (range.begin - begin) * 4, (range.end - range.begin) * 4, access};
  }
  Piece parameter_piece(const Bucket& bucket, BucketLayout::Range range, Access access) const {
    const std::int64_t element = size_of(job_.training.precision);
    const std::int64_t begin = shards_.parameters ? bucket.shard_begin : 0;
    return {bucket.parameters, (range.begin - begin) * element, (range.end - range.begin) * element, access};
  }
  Piece state_piece(const Bucket& bucket, int buffer, BucketLayout::Range range) const {
    return {buffer, (range.begin - bucket.shard_begin) * 4, (range.end - range.begin) * 4, Access::update};
  }
  BucketLayout::Range shard_of(const Bucket& bucket) const {
    return {bucket.shard_begin, bucket.shard_begin + bucket.shard_elements};
  }

  // Parameters that every tensor rank holds whole, but whose gradients each computed from its share
  // of the tokens.
  void reduce_over_tensor_axis(std::size_t index) {
    const Bucket& bucket = program_.buckets[index];
    const BucketLayout::Range shard = shard_of(bucket);
    std::vector<Piece> pieces;
    for (const BucketLayout::Range& range :
         intersect(stage_buckets_[index].layout.tensor_partial, shard.begin, shard.end))
      pieces.push_back(gradient_piece(bucket, bucket.gradients, range, Access::update));
    if (!pieces.empty())
      collective("tensor.all_reduce.gradients", InstructionKind::all_reduce_sum, all_along(Axis::tp), pieces);
  }

  // The two gradients of a tied parameter become one: here when both uses are on this stage, else
  // across stages.
  void add_tied(std::size_t index) {
    if (stage_buckets_[index].tied < 0) return;
    const Bucket& bucket = program_.buckets[index];
    const BucketLayout::Range shard = shard_of(bucket);
    const Piece sum = gradient_piece(bucket, bucket.gradients, shard, Access::update);
    if (bucket.second_gradients >= 0) {
      call_on_pieces("add_tied_gradients", Stream::compute,
                     {flat_kernel(OpKind::accumulate, bucket.shard_elements, Stream::compute, Label::optimizer)},
                     {{gradient_piece(bucket, bucket.second_gradients, shard, Access::read), sum}});
    } else if (job_.spec.pp() > 1) {
      collective("pipeline.all_reduce.tied_gradients", InstructionKind::all_reduce_sum, tied_stages, {sum});
    }
  }

  // The sum of squares over every parameter of the model, each counted once.
  void compute_norm() {
    std::vector<Instruction> instructions;
    std::vector<std::vector<Piece>> pieces;
    const Piece norm{program_.norm_buffer, 0, 4, Access::update};
    const std::int64_t workspace = step_scratch_bytes(job_.training, job_.backend).count;
    std::vector<int> frees;
    if (workspace > 0) frees.push_back(scratch_);
    for (std::size_t i = 0; i < program_.buckets.size(); ++i) {
      const Bucket& bucket = program_.buckets[i];
      if (stage_buckets_[i].tied >= 0 && !is_first()) continue;
      const BucketLayout::Range shard = shard_of(bucket);
      std::vector<BucketLayout::Range> ranges{shard};
      if (coordinate(Axis::tp) > 0) ranges = complement(stage_buckets_[i].layout.replicated, shard.begin, shard.end);
      for (const BucketLayout::Range& range : ranges) {
        if (range.begin == range.end) continue;
        instructions.push_back(
            flat_kernel(OpKind::sum_squares, range.end - range.begin, Stream::compute, Label::optimizer));
        pieces.push_back({gradient_piece(bucket, bucket.gradients, range, Access::read), norm});
        if (workspace > 0) pieces.back().push_back({scratch_, 0, workspace, Access::update});
      }
    }
    const auto reduce = [&](Axis axis) {
      instructions.push_back(communication(InstructionKind::all_reduce_sum, all_along(axis), Stream::dp));
      pieces.push_back({norm});
    };
    if (job_.spec.tp() > 1) reduce(Axis::tp);
    if (shards_.optimizer) reduce(Axis::dp);
    if (job_.spec.pp() > 1) reduce(Axis::pp);
    call_on_pieces("gradient_norm", Stream::compute, std::move(instructions), pieces, std::move(frees));
  }

  void update(std::size_t index) {
    const Bucket& bucket = program_.buckets[index];
    if (bucket.shard_elements == 0) return;
    const BucketLayout::Range shard = shard_of(bucket);
    std::vector<Instruction> instructions;
    std::vector<std::vector<Piece>> pieces;
    const auto add = [&](BucketLayout::Range range, bool decays) {
      const bool sgd = job_.training.optimizer == Optimizer::sgd;
      Instruction instruction = flat_kernel(sgd ? OpKind::sgd : OpKind::adamw, range.end - range.begin, Stream::compute,
                                            Label::optimizer, in_memory(job_.training.precision));
      instruction.shape.weight_decay = decays;
      instruction.shape.second = sgd && job_.training.momentum != 0.0;
      instruction.shape.norm = program_.norm_buffer >= 0;
      instruction.shape.master = bucket.master >= 0;
      instruction.shape.scaled = program_.loss_scale_buffer >= 0;
      std::vector<Piece> operands{gradient_piece(bucket, bucket.gradients, range, Access::read),
                                  parameter_piece(bucket, range, Access::update)};
      for (int buffer : {bucket.first_moment, bucket.second_moment})
        if (buffer >= 0) operands.push_back(state_piece(bucket, buffer, range));
      if (program_.norm_buffer >= 0) operands.push_back({program_.norm_buffer, 0, 4, Access::read});
      if (bucket.master >= 0) operands.push_back(state_piece(bucket, bucket.master, range));
      if (program_.loss_scale_buffer >= 0) operands.push_back(loss_scale_piece(Access::read));
      instructions.push_back(std::move(instruction));
      pieces.push_back(std::move(operands));
    };
    const std::vector<BucketLayout::Range>& decaying = stage_buckets_[index].layout.decaying;
    for (const BucketLayout::Range& range : intersect(decaying, shard.begin, shard.end)) add(range, true);
    for (const BucketLayout::Range& range : complement(decaying, shard.begin, shard.end)) add(range, false);
    call_on_pieces("optimizer", Stream::compute, std::move(instructions), pieces);
  }

  Piece loss_scale_piece(Access access) const { return {program_.loss_scale_buffer, 0, sizeof(LossScale), access}; }

  // Behind every optimizer call of the step, which read the scale that the gradients were computed
  // with. The norm is that of the whole model on every rank, so that all ranks keep the same scale.
  void update_loss_scale() {
    call_on_pieces("update_loss_scale", Stream::compute,
                   {flat_kernel(OpKind::update_loss_scale, 1, Stream::compute, Label::optimizer)},
                   {{{program_.norm_buffer, 0, 4, Access::read}, loss_scale_piece(Access::update)}});
  }

  // ZeRO-1 and 2: each rank has updated its shard of the whole bucket.
  void gather_in_place(const Bucket& bucket) {
    if (bucket.elements == 0) return;
    const BucketLayout::Range whole{0, bucket.elements};
    call_on_pieces(
        "data.all_gather.parameters", Stream::dp,
        {communication(InstructionKind::all_gather, all_along(Axis::dp), Stream::dp,
                       in_memory(job_.training.precision))},
        {{parameter_piece(bucket, shard_of(bucket), Access::read), parameter_piece(bucket, whole, Access::write)}});
  }

  const Job& job_;
  const OpGraph& graph_;
  Coordinates coordinates_;
  BlockRange range_;
  DataShards shards_;
  Program program_;
  std::map<int, Kind> kinds_;  // by Block::kind
  std::int64_t crossing_bytes_ = 0;
  std::vector<StageBucket> stage_buckets_;
  std::array<int, 2> gathered_{-1, -1};
  int gathered_tied_ = -1;
  std::array<int, 2> unreduced_{-1, -1};
  int unreduced_tied_ = -1;
  Slots slots_;
  std::vector<std::vector<int>> saved_;  // per slot, per block of the stage
  std::vector<int> gradient_;
  std::vector<int> output_;
  int scratch_ = -1;
  std::map<std::pair<InstructionKind, GroupKey>, int> transfers_;  // the Segment of each
  int gathers_ = 0;
  int reductions_ = 0;
  int last_visit_ = -1;  // the call of the block that was visited last
};

}  // namespace

BlockChoice block_choice(const Job& job, int stage, int tensor_rank) {
  return {.placements = job.placements,
          .tensor_ranks = job.spec.tp(),
          .tensor_rank = tensor_rank,
          .micro_batch = job.spec.micro_batch,
          .recompute = job.spec.recompute_of(stage) == Recompute::full,
          .precision = job.training.precision,
          .backend = job.backend,
          .loss_weight = 1.0 / (static_cast<double>(job.training.global_batch) *
                                static_cast<double>(job.training.sequence_length)),
          .fuse = job.fuse};
}

BlockRange blocks_of_stage(const ParallelSpec& spec, int stage) {
  const auto begin = spec.stage_blocks.begin();
  const int first = std::accumulate(begin, begin + stage, 0);
  return {first, first + spec.stage_blocks[stage]};
}

Program lower(const Job& job, int rank) {
  Lowering lowering(job, rank);
  lowering.set_groups();
  lowering.lower_blocks();
  lowering.make_buckets();
  lowering.make_buffers();
  lowering.begin_step();
  lowering.run_actions();
  lowering.end_step();
  order_calls(lowering.program());
  lowering.plan_memory();
  lowering.count_communication();
  return lowering.take();
}

std::vector<Program> lower_representatives(const Job& job) {
  std::vector<Program> programs;
  for (int stage = 0; stage < job.spec.pp(); ++stage)
    programs.push_back(lower(job, rank_at(job.spec.mesh, {.pp = stage})));
  return programs;
}

std::vector<Program> lower_all(const Job& job) {
  std::vector<Program> programs;
  for (int rank = 0; rank < job.spec.mesh.size(); ++rank) programs.push_back(lower(job, rank));
  return programs;
}

}  // namespace parplan
