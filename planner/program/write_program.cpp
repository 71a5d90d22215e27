#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/program/program.h"

namespace parplan {
namespace {

struct ShapeField {
  const char* name;
  std::int64_t OpShape::* value;
};
constexpr ShapeField shape_fields[] = {
    {"rows", &OpShape::rows},         {"columns", &OpShape::columns},     {"inner", &OpShape::inner},
    {"sequence", &OpShape::sequence}, {"batch", &OpShape::batch},         {"heads", &OpShape::heads},
    {"kv_heads", &OpShape::kv_heads}, {"head_dim", &OpShape::head_dim},   {"rotary_dim", &OpShape::rotary_dim},
    {"window", &OpShape::window},     {"all_heads", &OpShape::all_heads}, {"first_head", &OpShape::first_head},
    {"begin", &OpShape::begin},       {"valid", &OpShape::valid},         {"keys", &OpShape::keys},
    {"buckets", &OpShape::buckets},   {"key_columns", &OpShape::key_columns}};

struct ShapeFlag {
  const char* name;
  bool OpShape::* value;
};
constexpr ShapeFlag shape_flags[] = {{"bias", &OpShape::bias},
                                     {"second", &OpShape::second},
                                     {"accumulate", &OpShape::accumulate},
                                     {"weight_decay", &OpShape::weight_decay},
                                     {"norm", &OpShape::norm},
                                     {"master", &OpShape::master},
                                     {"scaled", &OpShape::scaled}};

// Fields that differ from their defaults; the others say nothing.
std::string write_shape(const OpShape& shape) {
  std::string text;
  for (const ShapeField& field : shape_fields)
    if (shape.*field.value != 0) text += fmt::format(" {}={}", field.name, shape.*field.value);
  for (const ShapeFlag& flag : shape_flags)
    if (shape.*flag.value) text += fmt::format(" {}", flag.name);
  if (shape.chunks.holder) text += fmt::format(" holder={}", *shape.chunks.holder);
  return text;
}

const char* name_of(Access access) {
  return access == Access::read ? "read" : access == Access::write ? "write" : "update";
}

std::string write_events(const char* what, const EventIds& events) {
  return events.empty() ? "" : fmt::format(", {} {}", what, fmt::join(events, " "));
}
std::string write_events(const char* what, const std::optional<int>& event) {
  return event ? fmt::format(", {} {}", what, *event) : "";
}

std::string write_instruction(const Instruction& instruction, const Segment& segment) {
  const bool kernel = instruction.kind == InstructionKind::kernel;
  std::string text = kernel ? fmt::format("    {} '{}' {}{}", name(instruction.op), instruction.name,
                                          name(instruction.type), write_shape(instruction.shape))
                            : fmt::format("    {} '{}' {}", name(instruction.kind), instruction.name,
                                          name(instruction.type));
  if (communicates(instruction.kind)) text += fmt::format(" group={}", name(instruction.group));
  text += fmt::format(" on {} as {}:", name(instruction.stream), name(instruction.label));
  for (std::size_t i = 0; i < instruction.operands.size(); ++i) {
    const Operand& operand = instruction.operands[i];
    text += fmt::format("{} {} {}[{}, {})", i == 0 ? "" : ",", name_of(operand.access),
                        segment.bindings[operand.binding], operand.offset, operand.offset + operand.bytes);
  }
  text += write_events("waits", instruction.waits);
  text += write_events("records", instruction.records);
  return text + "\n";
}

std::string write_segment(std::size_t number, const Segment& segment) {
  std::string text = fmt::format("  {} '{}' on {}, binds {}", number, segment.name, name(segment.stream),
                                 fmt::join(segment.bindings, ", "));
  if (segment.scratch_bytes > 0) text += fmt::format(", scratch {} B", segment.scratch_bytes);
  text += "\n";
  for (const Instruction& instruction : segment.instructions) text += write_instruction(instruction, segment);
  return text;
}

std::string write_call(std::size_t number, const Program& program) {
  const Call& call = program.calls[number];
  const auto names = [&](const BufferIds& ids) {
    std::vector<std::string> words;
    for (int id : ids) words.push_back(program.buffers[id].name);
    return words;
  };
  std::string text = fmt::format("    {} '{}' ({})", number, program.segments[call.segment].name,
                                 fmt::join(names(call.buffers), ", "));
  if (call.micro_batch) text += fmt::format(", micro-batch {}", *call.micro_batch);
  text += write_events("waits", call.waits);
  text += write_events("records", call.records);
  if (!call.frees.empty()) text += fmt::format(", frees {}", fmt::join(names(call.frees), ", "));
  return text + "\n";
}

std::string write_bucket(const Bucket& bucket, const Program& program) {
  std::string text = fmt::format("  '{}' {} elements, shard", bucket.name, bucket.elements);
  for (const BucketUnit& unit : bucket.units)
    text += fmt::format(" [{}, {})", unit.own.range.begin, unit.own.range.end);
  for (const int buffer : buffers_of(bucket)) text += fmt::format(", '{}'", program.buffers[buffer].name);
  return text + "\n";
}

}  // namespace

std::string write_program(const Program& program) {
  std::string text =
      fmt::format("rank {}, stage {}, arena {} B", program.rank, program.pipeline_rank, program.arena_bytes.device);
  for (const Home home : all_homes)
    if (home != Home::device && program.arena_bytes[home] > 0)
      text += fmt::format(", {} arena {} B", name(home), program.arena_bytes[home]);
  text += "\n";
  text += "groups\n";
  for (const Group& group : program.groups)
    if (!group.ranks.empty()) text += fmt::format("  {}: {}\n", name(group.key), fmt::join(group.ranks, ", "));
  text += "buffers\n";
  for (std::size_t b = 0; b < program.buffers.size(); ++b) {
    const Buffer& buffer = program.buffers[b];
    text += fmt::format("  {} '{}' {} [{}, {}){}{}\n", b, buffer.name, name(buffer.category), buffer.offset,
                        buffer.offset + buffer.bytes, where(buffer.home), buffer.persistent ? " persistent" : "");
  }
  text += "buckets\n";
  for (const Bucket& bucket : program.buckets) text += write_bucket(bucket, program);
  text += "segments\n";
  for (std::size_t s = 0; s < program.segments.size(); ++s) text += write_segment(s, program.segments[s]);
  text += "calls\n";
  for (const Task& task : program.tasks) {
    text += task.action ? fmt::format("  {}\n", write_action(*task.action)) : "  around the step\n";
    for (int call = task.first_call; call < task.last_call; ++call)
      text += write_call(static_cast<std::size_t>(call), program);
  }
  return text;
}

}  // namespace parplan
